"""Deep ensembles: thousands of independent small networks, trained at once on one
device.

A network with a few hundred parameters is too small to keep a processor busy: operator
overhead dominates the time of a training step. Here all members take their steps
together by :func:`torch.func.vmap`, each from its own initial values and in its own
order of mini-batches; an element-wise optimiser updates each member independently of
the others. Laurent, Aldea & Franchi 2024, arXiv 2310.08287, use such ensembles as
samples of the posterior.
"""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Transform, biject_to, identity_transform
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.arguments import Device, described
from pyro_symmetric.density.eager import require_data
from pyro_symmetric.models import (
    BayesianModel,
    call_with_weights,
    hold_frozen,
    over_weights,
)
from pyro_symmetric.networks import naming_layer
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import (
    Shapes,
    Weights,
    drop_names,
    first_value,
    keep_names,
    map_values,
)

Loss = Callable[[Tensor, Tensor], Tensor]
# (parameters, buffers, inputs, targets) of one network -> its loss
MemberLoss = Callable[[Weights, Weights, Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[Tensor]], Optimizer]
Watch = Callable[[int, Weights], None]

# approximate number of inputs in one step, of all members that are trained together
ENTRIES = 2**22
STEPS, EPOCHS = 2_000, 20  # default lower bounds


def ensemble(
    net: nn.Module | BayesianModel,
    data: tuple[Tensor, Tensor],
    num_members: int = 1_000,
    *,
    loss: str | Loss = "cross_entropy",
    epochs: int | None = None,
    batch_size: int | None = 32,
    optimizer: MakeOptimizer | None = None,
    cosine: bool = True,
    initial: Callable[[int], Weights] | None = None,
    members_at_once: int | None = None,
    watch: Watch | None = None,
    seed: int | None = None,
    device: Device = None,
    progress: bool = True,
) -> Posterior:
    """Train many independent networks at once and return them as a posterior whose
    draws are the members.

    >>> x = torch.randn(100, 2)
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> posterior = ps.ensemble(
    ...     net, (x, (x[:, 0] > 0).long()), num_members=500, epochs=5, progress=False
    ... )
    >>> posterior.get_samples()["0.weight"].shape
    torch.Size([500, 2, 2])

    Members whose loss or weights aren't finite at the end are left out, with a warning.
    Running statistics are sites.

    :param net: the network, whose frozen parameters keep their values; or a
        ``BayesianModel``, for which each member converges to a mode of the posterior
        (the loss is minus the log-joint density per row, whatever ``loss`` is).
    :param data: inputs ``(N, ...)`` and targets ``(N, ...)``; standardise them, as for
        any network.
    :param loss: ``"cross_entropy"``, ``"binary_cross_entropy"`` (of logits), ``"mse"``,
        or a function from one network's outputs ``(B, ...)`` and targets to their mean
        loss.
    :param epochs: passes over the data, in each member's own order. Default: 2,000
        steps, and at least 20 passes.
    :param batch_size: rows of a mini-batch; ``None`` for all data at every step.
    :param optimizer: stacked parameters -> an element-wise PyTorch optimiser. Default:
        Adam with learning rate 0.01.
    :param cosine: whether the learning rate decays to zero along a cosine.
    :param initial: number of members -> their initial parameters, e.g. ``lambda n:
        torch.func.stack_module_state([make() for _ in range(n)])[0]``. Default: the
        modules' own initialisation.
    :param members_at_once: number of members that are trained together, with a seed of
        their own.
    :param watch: called after each step with the step's number and the weights of the
        members trained together.
    :param seed: seed of all random numbers; by default drawn from PyTorch's generator.
    :return: one chain of members, on the CPU, with each member's loss on all data;
        ``metadata["losses"]`` by epoch.
    """
    objective = _objective(net, loss, data, device)
    for name, value, none in (
        ("epochs", epochs, "2,000 steps"),
        ("batch_size", batch_size, "all data"),
    ):
        arguments.whole(name, value, 1, none=none)
    arguments.whole("num_members", num_members, 1)
    arguments.whole(
        "members_at_once",
        members_at_once,
        1,
        none="a number that fits the network and the data",
    )
    arguments.whole("seed", seed, 0, none="one from PyTorch's generator")
    x = objective.x
    make_optimizer = optimizer or functools.partial(torch.optim.Adam, lr=0.01)
    batch_size = min(batch_size or len(x), len(x))
    epochs = epochs or max(EPOCHS, -(-STEPS // (len(x) // batch_size)))
    seed = drawn_seed() if seed is None else seed
    num_weights = sum(
        value.numel()
        for value in (*objective.net.parameters(), *objective.net.buffers())
    )
    default_size = max(
        1, min(2_500, ENTRIES // max(batch_size * x[0].numel(), num_weights, len(x)))
    )
    size = min(num_members, members_at_once or default_size)
    start_time = time.perf_counter()
    parts = []
    with tqdm(
        total=num_members, desc="ensemble", unit="network", disable=not progress
    ) as bar:
        for index, start in enumerate(range(0, num_members, size)):
            count = min(size, num_members - start)
            generator = torch.Generator(x.device).manual_seed((seed + index) % 2**63)
            # initial values, dropout and users' functions draw from it
            with forked(generator, x.device):
                z = _initial_values(objective, initial, count)
                parts.append(
                    _train(
                        objective,
                        z,
                        epochs,
                        batch_size,
                        make_optimizer,
                        cosine,
                        generator,
                        watch,
                        bar,
                    )
                )
    samples = {
        site: torch.cat([part.weights[site] for part in parts])
        for site in parts[0].weights
    }
    losses = torch.cat([part.losses for part in parts])
    finite = _finite_members(samples, losses)
    metadata = {
        "kernel": "ensemble",
        "settings": {
            "num_members": num_members,
            "members_at_once": size,
            "epochs": epochs,
            "batch_size": batch_size,
        },
        "seed": seed,
        "diverged": int((~finite).sum()),
        "losses": torch.stack([len(part.losses) * part.curve for part in parts])
        .sum(0)
        .div(num_members)
        .tolist(),
        "seconds": time.perf_counter() - start_time,
    }
    members = map_values(lambda value: value[finite][None], samples)
    return Posterior(
        members, {"loss": losses[finite][None]}, metadata, kind="independent"
    )


@dataclass(frozen=True)
class Objective:
    """The training objective of the members.

    :param net: the network.
    :param training: whether the network is in train mode during training.
    :param loss: the loss of one network, as a function of its parameters, buffers,
        inputs and targets.
    :param x: all inputs, on the device of training; ``y`` likewise.
    :param shapes: site -> its shape in one member.
    :param transforms: site -> the bijection from the unconstrained values, which the
        optimiser moves.
    :param fresh: number of members -> their initial values.
    """

    net: nn.Module
    training: bool
    loss: MemberLoss
    x: Tensor
    y: Tensor
    shapes: Shapes
    transforms: Mapping[str, Transform]
    fresh: Callable[[int], Weights]

    def constrain(self, unconstrained: Weights) -> Weights:
        """Map unconstrained values to weights."""
        return {
            site: self.transforms[site](value) for site, value in unconstrained.items()
        }

    def losses(
        self, unconstrained: Weights, buffers: Weights, rows: Tensor | slice
    ) -> Tensor:
        """Return the losses ``(M,)`` of all members, on rows of their own ``(M, B)`` or
        on common rows.
        """
        axis = None if isinstance(rows, slice) else 0
        return over_weights(
            self.net,
            lambda values, *others: self.loss(self.constrain(values), *others),
            unconstrained,
            buffers,
            self.x[rows],
            self.y[rows],
            in_dims=(0, 0, axis, axis),
            randomness="different",
        )


class _Trained(NamedTuple):
    """Members: their weights ``(M, *shape)``, losses ``(M,)``, and the mean losses
    ``(epochs,)``.
    """

    weights: Weights
    losses: Tensor
    curve: Tensor


def _train(
    objective: Objective,
    unconstrained: Weights,
    epochs: int,
    batch_size: int,
    make_optimizer: MakeOptimizer,
    cosine: bool,
    generator: torch.Generator,
    watch: Watch | None,
    bar: tqdm,
) -> _Trained:
    """Train ``M`` members."""
    rows = len(objective.x)
    count = len(first_value(unconstrained))
    objective.net.train(objective.training)
    buffers = {
        name: b.detach().expand(count, *b.shape).clone()
        for name, b in objective.net.named_buffers()
    }
    optimizer = make_optimizer(list(unconstrained.values()))
    arguments.instance(
        "the result of optimizer", optimizer, Optimizer, "an optimiser of torch.optim"
    )
    epoch_losses = []
    members_before = bar.n
    steps = rows // batch_size
    schedule = CosineAnnealingLR(optimizer, steps * epochs) if cosine else None
    for epoch in range(epochs):
        if batch_size < rows:
            order = torch.rand(
                count, rows, generator=generator, device=generator.device
            ).argsort(-1)
        total = torch.zeros(count, device=generator.device)
        for step in range(steps):
            batch = (
                slice(None)
                if batch_size == rows
                else order[:, step * batch_size : (step + 1) * batch_size]
            )
            losses = objective.losses(unconstrained, buffers, batch)
            optimizer.zero_grad()
            # members share no parameter, so this is each member's own gradient
            losses.sum().backward()
            optimizer.step()
            total = torch.add(total, losses.detach(), alpha=1 / steps)
            if schedule is not None:
                schedule.step()
            if watch is not None:
                with torch.no_grad():
                    watch(epoch * steps + step, objective.constrain(unconstrained))
        epoch_losses.append(total[total.isfinite()].mean().cpu())
        bar.update(members_before + round(count * (epoch + 1) / epochs) - bar.n)
        bar.set_postfix(loss=f"{epoch_losses[-1]:.4g}", refresh=False)
    objective.net.eval()
    with torch.no_grad():
        final = torch.zeros(count, device=objective.x.device)
        for start in range(0, rows, batch_size):
            part = slice(start, min(start + batch_size, rows))
            final += (
                objective.losses(unconstrained, buffers, part)
                * (part.stop - start)
                / rows
            )
        # Each member has running statistics of its own.
        statistics = {
            name: value for name, value in buffers.items() if value.is_floating_point()
        }
        members = {**objective.constrain(unconstrained), **statistics}
    return _Trained(
        map_values(lambda value: value.detach().cpu(), members),
        final.cpu(),
        torch.stack(epoch_losses),
    )


def _finite_members(samples: Weights, losses: Tensor) -> Tensor:
    """Return a mask ``(M,)`` of the members with finite loss and weights; warn of
    others, raise if there are none.
    """
    total = len(losses)
    finite = losses.isfinite()
    for draws in samples.values():
        finite &= draws.reshape(total, -1).isfinite().all(1)
    if not finite.any():
        raise ValueError(
            f"all {total} members diverged; is the learning rate too high, are the "
            "data finite?"
        )
    if diverged := int((~finite).sum()):
        message = (
            f"{diverged} members diverged, to a loss or weights that aren't finite"
        )
        warnings.warn(
            f"{message}; {total - diverged} of {total} are left",
            RuntimeWarning,
            stacklevel=3,
        )
    return finite


# objectives and losses ----------------------------------------------------------------


def _objective(
    net: nn.Module | BayesianModel,
    loss: str | Loss,
    data: tuple[Tensor, Tensor],
    device: Device,
) -> Objective:
    arguments.instance("net", net, nn.Module, "an nn.Module or a BayesianModel")
    if not (
        isinstance(data, tuple | list)
        and len(data) == 2
        and all(isinstance(part, Tensor) for part in data)
    ):
        raise TypeError(
            "data must be a pair of tensors with all rows, inputs and targets; found "
            f"{described(data)}"
        )
    if len(data[0]) != len(data[1]) or not len(data[0]):
        counts = f"{len(data[0])} inputs and {len(data[1])} targets"
        raise ValueError(
            f"data holds {counts}; their numbers must be equal, at least one"
        )
    net = copy.deepcopy(net) if device is None else copy.deepcopy(net).to(device)
    if not isinstance(net, BayesianModel) and not any(
        parameter.requires_grad for parameter in net.parameters()
    ):
        raise ValueError(
            "net has no parameter that requires a gradient; there is nothing to train"
        )
    x, y = (part.to(next(net.parameters()).device) for part in data)
    if isinstance(net, BayesianModel):
        return _negative_log_joint(net, x, y)
    if not isinstance(loss, str):
        return _loss_of_network(net, loss, x, y)
    arguments.one_of("loss", loss, LOSSES, "a function")
    _require_meaning(loss, y)
    return _loss_of_network(net, LOSSES[loss], x, y)


def _negative_log_joint(model: BayesianModel, x: Tensor, y: Tensor) -> Objective:
    """Return the objective of a posterior mode: minus the log-joint density, per row of
    the data.
    """
    require_data(model, x, y)
    model.num_data = num_data = len(x)

    def loss(weights: Weights, buffers: Weights, x: Tensor, y: Tensor) -> Tensor:
        return -model.log_joint({**weights, **buffers}, x, y, validate=False) / num_data

    transforms = map_values(lambda prior: biject_to(prior.support), model.priors())
    fresh = functools.partial(fresh_members, model)
    return Objective(model.net, False, loss, x, y, model.site_shapes, transforms, fresh)


def _loss_of_network(net: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Objective:
    """Return the objective of a network: the loss of its outputs."""
    hold_frozen(net)
    shapes = {
        name: parameter.shape
        for name, parameter in net.requires_grad_(False).named_parameters()
    }

    def member_loss(
        parameters: Weights, buffers: Weights, x: Tensor, y: Tensor
    ) -> Tensor:
        with naming_layer(net, x):
            outputs = call_with_weights(net, {**parameters, **buffers}, (x,))
        return loss(outputs, y)

    fresh = functools.partial(fresh_members, net)
    return Objective(
        net,
        True,
        member_loss,
        x,
        y,
        shapes,
        dict.fromkeys(shapes, identity_transform),
        fresh,
    )


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() > 1 and outputs.shape[1] == 1:
        raise ValueError(
            "loss is 'cross_entropy', which is zero for a network of one output "
            "whatever its weights; use 'mse', or "
            "'binary_cross_entropy' for two classes"
        )
    return nn.functional.cross_entropy(outputs, targets)


def _require_meaning(loss: str, y: Tensor) -> None:
    """Raise ``ValueError`` for targets that a loss would score without a meaning."""
    low = y.min().item()
    high = y.max().item()
    # PyTorch leaves out labels of -100, and takes negative probabilities.
    if (loss != "mse" and low < 0) or (loss == "binary_cross_entropy" and high > 1):
        raise ValueError(
            f"data: targets of {loss!r} lie from {low:g} to {high:g}; they must be "
            "probabilities, or labels from 0 on (of two classes 0 and 1); other "
            "numbers take 'mse'"
        )


def _of_values(loss: Loss) -> Loss:
    """Let a loss accept targets without the axis of a single output; refuse other
    shapes, which it would broadcast.
    """

    def evaluate(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape == (*targets.shape, 1):
            outputs = outputs.squeeze(-1)
        if outputs.shape != targets.shape:
            raise ValueError(
                f"data: a target has shape {tuple(targets.shape[1:])}, but an output "
                "of the network "
                f"{tuple(outputs.shape[1:])}; they must be the same"
            )
        return loss(outputs, targets.to(outputs.dtype))

    return evaluate


LOSSES: dict[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _of_values(nn.functional.binary_cross_entropy_with_logits),
    "mse": _of_values(nn.functional.mse_loss),
}


# initial values -----------------------------------------------------------------------


def fresh_members(net: nn.Module | BayesianModel, count: int) -> Weights:
    """Draw independent initial values of every parameter, ``(count,) + shape``, by the
    modules' ``reset_parameters``; draw the sites of a ``BayesianModel``'s likelihood
    from their priors.

    Parameters that no module resets keep their values in all members, with a warning
    unless they are constant (ones, zeros). Initialisation by the network itself, after
    its modules were built, isn't repeated. Pass ``initial`` in both cases.
    """
    if isinstance(net, BayesianModel):
        parameters = dict(net.net.named_parameters())
        latents = {
            site: prior.sample((count,))
            for site, prior in net.priors().items()
            if site not in parameters
        }
        return {**fresh_members(net.net, count), **latents}
    net = copy.deepcopy(net)
    members = {
        name: p.detach().expand(count, *p.shape).clone()
        for name, p in net.named_parameters()
    }
    is_reset: set[str] = set()
    for prefix, module in net.named_modules():
        names = {
            f"{prefix}.{name}".lstrip("."): p
            for name, p in module.named_parameters(recurse=False)
        }
        # a tied parameter belongs to its first module
        own_parameters = keep_names(names, members)
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        if not own_parameters or not callable(reset):
            continue
        is_reset |= own_parameters.keys()
        for member in range(count):
            reset()
            for name, parameter in own_parameters.items():
                members[name][member] = parameter.detach()
    varying = [
        name
        for name, value in drop_names(members, is_reset).items()
        if count > 1 and not (value[0] == value.flatten()[0]).all()
    ]
    if varying:
        warnings.warn(
            f"no module resets the parameters {varying}, so they start with the same "
            "values in all members; pass "
            "initial=, a function that builds networks and stacks their parameters",
            UserWarning,
            stacklevel=2,
        )
    return members


def _initial_values(
    objective: Objective, initial: Callable[[int], Weights] | None, count: int
) -> Weights:
    """Return unconstrained initial values of ``count`` members."""
    start = arguments.weights(
        "the result of initial", (initial or objective.fresh)(count)
    )
    unconstrained = {}
    for name, shape in objective.shapes.items():
        found = tuple(start[name].shape) if name in start else "missing"
        if found != (count, *shape):
            raise ValueError(
                f"initial: the shape of {name!r} is {found}; it must be "
                f"{(count, *shape)}"
            )
        value = objective.transforms[name].inv(start[name]).detach()
        unconstrained[name] = value.to(objective.x.device).clone().requires_grad_()
    return unconstrained
