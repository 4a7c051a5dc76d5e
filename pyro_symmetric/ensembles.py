"""Ensembles by the thousand: many independent small networks, trained at once on one device.

A network with a few hundred parameters is too small to keep a processor busy: most of a training step goes into calling
operators. Here all members take their steps together, by :func:`torch.func.vmap`, each from its own initial values and
in its own order of mini-batches; what an element-wise optimiser does to one doesn't depend on the others.
Laurent, Aldea & Franchi 2024, arXiv 2310.08287, take such ensembles as their picture of the posterior.
"""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform, biject_to, identity_transform
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.arguments import described
from pyro_symmetric.mcmc.density.eager import require_data
from pyro_symmetric.models import BayesianModel, hold_frozen, over_weights, with_weights
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Weights

Loss = Callable[[Tensor, Tensor], Tensor]
# parameters, buffers, inputs, targets of one network -> its loss
MemberLoss = Callable[[Weights, Weights, Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[Tensor]], Optimizer]
Watch = Callable[[int, Weights], None]

ENTRIES = 2**22  # inputs of all members of a part in one step, about
STEPS, EPOCHS = 2_000, 20  # at least, by default


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
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Posterior:
    """Train many independent networks at once and return them as one posterior, a member a draw.

    >>> x = torch.randn(100, 2)
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> posterior = ps.ensemble(net, (x, (x[:, 0] > 0).long()), num_members=500, epochs=5, progress=False)
    >>> posterior.get_samples()["0.weight"].shape
    torch.Size([500, 2, 2])

    Members whose loss or weights aren't finite at the end are left out, with a warning; running statistics are sites.

    :param net: the network, whose parameters that require no gradient stay; or a ``BayesianModel``, of which every
        member becomes a mode of the posterior (``loss`` is then minus its log-joint density, per row).
    :param data: inputs ``(N, ...)`` and targets ``(N, ...)``; standardise them, as for any network.
    :param loss: ``"cross_entropy"``, ``"binary_cross_entropy"`` (of logits), ``"mse"``, or a function of one network's
        outputs ``(B, ...)`` and targets that returns their mean loss.
    :param epochs: passes over the data, in each member's own order. Default: 2,000 steps, and at least 20 passes.
    :param batch_size: rows of a mini-batch; ``None`` takes all data at every step.
    :param optimizer: makes an element-wise PyTorch optimiser of stacked parameters. Default: Adam at 0.01.
    :param cosine: whether the learning rate falls to zero along a cosine.
    :param initial: number of members -> their initial parameters; :func:`~pyro_symmetric.ensembles.initialised_by` of
        a function that builds a network makes one. Default: the modules' own.
    :param members_at_once: size of a part that is trained together, with a seed of its own.
    :param watch: called after every step of a part with the step's number and all its members' weights.
    :param seed: of all random numbers; by default drawn from PyTorch's generator.
    :return: one chain of members, on the CPU, with each one's loss on all data; ``metadata`` has the mean of epochs.
    """
    for name, value, none in (("epochs", epochs, "2,000 steps"), ("batch_size", batch_size, "all data")):
        arguments.whole(name, value, 1, none=none)
    arguments.whole("num_members", num_members, 1)
    arguments.whole("members_at_once", members_at_once, 1, none="a number that suits")
    arguments.whole("seed", seed, 0, none="one from PyTorch's generator")
    objective = _objective(net, loss, data, device)
    x, make = objective.x, optimizer or functools.partial(torch.optim.Adam, lr=0.01)
    batch_size = min(batch_size or len(x), len(x))
    epochs = epochs or max(EPOCHS, -(-STEPS // (len(x) // batch_size)))
    seed = drawn_seed() if seed is None else seed
    weights_each = sum(value.numel() for value in (*objective.net.parameters(), *objective.net.buffers()))
    comfortable = max(1, min(2_500, ENTRIES // max(batch_size * x[0].numel(), weights_each, len(x))))
    size = min(num_members, members_at_once or comfortable)
    began, parts = time.perf_counter(), []
    with tqdm(total=num_members, desc="ensemble", unit="network", disable=not progress) as bar:
        for index, start in enumerate(range(0, num_members, size)):
            count = min(size, num_members - start)
            generator = torch.Generator(x.device).manual_seed((seed + index) % 2**63)
            with forked(generator, x.device):  # which initial values, dropout and users' functions draw from
                free = _started(objective, initial, count)
                parts.append(_train(objective, free, epochs, batch_size, make, cosine, generator, watch, bar))
    samples = {site: torch.cat([weights[site] for weights, _, _ in parts]) for site in parts[0][0]}
    losses = torch.cat([losses for _, losses, _ in parts])
    kept = losses.isfinite()
    for draws in samples.values():
        kept &= draws.reshape(num_members, -1).isfinite().all(1)
    if not kept.any():
        raise ValueError(f"all {num_members} members diverged; is the learning rate too high, are the data finite?")
    if diverged := int((~kept).sum()):
        words = f"{diverged} members diverged, to a loss or weights that aren't finite"
        warnings.warn(f"{words}; {num_members - diverged} of {num_members} are left", RuntimeWarning, stacklevel=2)
    metadata = {
        "kernel": "ensemble",
        "settings": {"num_members": num_members, "members_at_once": size, "epochs": epochs, "batch_size": batch_size},
        "seed": seed,
        "diverged": diverged,
        "losses": torch.stack([len(own) * curve for _, own, curve in parts]).sum(0).div(num_members).tolist(),
        "seconds": time.perf_counter() - began,
    }
    members = {site: value[kept][None] for site, value in samples.items()}
    return Posterior(members, {"loss": losses[kept][None]}, metadata, kind="independent")


@dataclass(frozen=True)
class Objective:
    """The function that members minimise.

    :param net: the network.
    :param training: whether it is trained in train mode.
    :param loss: of one network, as a function of its parameters, buffers, inputs and targets.
    :param x: all inputs, where members are trained; ``y`` likewise.
    :param shapes: site -> its shape in one member.
    :param transforms: site -> the map from the free values that optimisers move.
    :param fresh: initial values of so many members.
    """

    net: nn.Module
    training: bool
    loss: MemberLoss
    x: Tensor
    y: Tensor
    shapes: Mapping[str, torch.Size]
    transforms: Mapping[str, Transform]
    fresh: Callable[[int], Weights]

    def constrain(self, free: Weights) -> Weights:
        """The weights at free values."""
        return {site: self.transforms[site](value) for site, value in free.items()}

    def losses(self, free: Weights, buffers: Weights, rows: Tensor | slice) -> Tensor:
        """The losses of all members ``(M,)``, on rows of their own ``(M, B)`` or on the same ones."""

        def evaluate(free: Weights, buffers: Weights, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.constrain(free), buffers, x, y)

        axis = None if isinstance(rows, slice) else 0
        options: dict[str, Any] = {"in_dims": (0, 0, axis, axis), "randomness": "different"}
        return over_weights(self.net, evaluate, free, buffers, self.x[rows], self.y[rows], **options)


def _train(
    objective: Objective,
    free: Weights,
    epochs: int,
    batch_size: int,
    make: MakeOptimizer,
    cosine: bool,
    generator: torch.Generator,
    watch: Watch | None,
    bar: tqdm,
) -> tuple[Weights, Tensor, Tensor]:
    """Members' weights ``(M, *shape)`` and losses ``(M,)`` at the end, on the CPU; mean losses of epochs."""
    rows, count = len(objective.x), len(next(iter(free.values())))
    objective.net.train(objective.training)
    buffers = {name: b.detach().expand(count, *b.shape).clone() for name, b in objective.net.named_buffers()}
    optimizer = make(list(free.values()))
    arguments.instance("what optimizer made", optimizer, Optimizer, "an optimiser of torch.optim")
    curve, before, steps = [], bar.n, rows // batch_size
    schedule = CosineAnnealingLR(optimizer, steps * epochs) if cosine else None
    for epoch in range(epochs):
        if batch_size < rows:
            order = torch.rand(count, rows, generator=generator, device=generator.device).argsort(-1)
        total = torch.zeros(count, device=generator.device)
        for step in range(steps):
            chosen = slice(None) if batch_size == rows else order[:, step * batch_size : (step + 1) * batch_size]
            losses = objective.losses(free, buffers, chosen)
            optimizer.zero_grad()
            losses.sum().backward()  # they share nothing, so the gradient of their sum is each one's own
            optimizer.step()
            total = torch.add(total, losses.detach(), alpha=1 / steps)
            if schedule is not None:
                schedule.step()
            if watch is not None:
                with torch.no_grad():
                    watch(epoch * steps + step, objective.constrain(free))
        curve.append(total[total.isfinite()].mean().cpu())
        bar.update(before + round(count * (epoch + 1) / epochs) - bar.n)
        bar.set_postfix(loss=f"{curve[-1]:.4g}", refresh=False)
    objective.net.eval()
    with torch.no_grad():
        final = torch.zeros(count, device=objective.x.device)
        for start in range(0, rows, batch_size):
            part = slice(start, min(start + batch_size, rows))
            final += objective.losses(free, buffers, part) * (part.stop - start) / rows
        # the running statistics of normalisation layers belong to a member
        moving = {name: value for name, value in buffers.items() if value.is_floating_point()}
        weights = {site: value.detach().cpu() for site, value in {**objective.constrain(free), **moving}.items()}
    return weights, final.cpu(), torch.stack(curve)


# initial values -------------------------------------------------------------------------------------------------------


def fresh_members(net: nn.Module | BayesianModel, count: int) -> Weights:
    """Independent initial values of every parameter, ``(count,) + shape``, as the modules' own initialisation draws
    them; of a ``BayesianModel`` the likelihood's own sites, too, from their prior.

    Parameters that no module resets (by ``reset_parameters``) keep the values that they have, in every member, which is
    warned of unless these are all alike (ones, zeros). What a network does to its weights after their modules made them
    isn't repeated. For both there is :func:`initialised_by`.
    """
    if isinstance(net, BayesianModel):
        known = dict(net.net.named_parameters())
        others = {site: prior.sample((count,)) for site, prior in net.priors().items() if site not in known}
        return {**fresh_members(net.net, count), **others}
    net = copy.deepcopy(net)
    members = {name: p.detach().expand(count, *p.shape).clone() for name, p in net.named_parameters()}
    left = dict(members)
    for prefix, module in net.named_modules():
        names = {f"{prefix}.{name}".lstrip("."): p for name, p in module.named_parameters(recurse=False)}
        own = {name: p for name, p in names.items() if name in members}  # a tied one is its first module's
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if not own or not callable(reset):
            continue
        left = {name: value for name, value in left.items() if name not in own}
        for member in range(count):
            reset()
            for name, parameter in own.items():
                members[name][member] = parameter.detach()
    alike = [name for name, values in left.items() if count > 1 and not bool((values[0] == values.flatten()[0]).all())]
    if alike:
        warnings.warn(
            f"no module resets the parameters {alike}, so that they begin alike in all members; pass "
            "initial=initialised_by(...) with a function that builds the network",
            UserWarning,
            stacklevel=2,
        )
    return members


def initialised_by(make: Callable[[], nn.Module]) -> Callable[[int], Weights]:
    """Initial values of members as a function makes networks, for ``ensemble(..., initial=)``: all that construction
    does to the weights is done to every member's.

    >>> members = initialised_by(lambda: torchvision.models.resnet18(num_classes=10))(5)

    :param make: a new network, of the same architecture each time; called once for each member.
    """

    def initial(count: int) -> Weights:
        made = [dict(make().named_parameters()) for _ in range(count)]
        return {name: torch.stack([own[name].detach() for own in made]) for name in made[0]}

    return initial


# losses ---------------------------------------------------------------------------------------------------------------


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() > 1 and outputs.shape[1] == 1:
        raise ValueError(
            "loss is 'cross_entropy', which is zero for a network of one output whatever its weights; take 'mse', or "
            "'binary_cross_entropy' for two classes"
        )
    return nn.functional.cross_entropy(outputs, targets)


def _of_values(loss: Loss) -> Loss:
    """The loss of targets that may lack the axis of a single output. Others it would pair with all outputs."""

    def evaluate(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape == (*targets.shape, 1):
            outputs = outputs.squeeze(-1)
        if outputs.shape != targets.shape:
            raise ValueError(
                f"data: a target has shape {tuple(targets.shape[1:])}, but an output of the network "
                f"{tuple(outputs.shape[1:])}; they must be alike"
            )
        return loss(outputs, targets.to(outputs.dtype))

    return evaluate


LOSSES: dict[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _of_values(nn.functional.binary_cross_entropy_with_logits),
    "mse": _of_values(nn.functional.mse_loss),
}


def network_loss(net: nn.Module, loss: Loss) -> MemberLoss:
    """The loss of one network as a function of its parameters, to be mapped over members."""

    def evaluate(parameters: Weights, buffers: Weights, x: Tensor, y: Tensor) -> Tensor:
        return loss(with_weights(net, {**parameters, **buffers}, (x,)), y)

    return evaluate


def map_loss(model: BayesianModel, num_data: int) -> MemberLoss:
    """The objective that a mode of the posterior minimises: minus the log-joint density, by row of the data."""

    def evaluate(weights: Weights, buffers: Weights, x: Tensor, y: Tensor) -> Tensor:
        return -model.log_joint({**weights, **buffers}, x, y, validate=False) / num_data

    return evaluate


# small steps --------------------------------------------------------------------------------------------------------


def _objective(
    net: nn.Module | BayesianModel, loss: str | Loss, data: tuple[Tensor, Tensor], device: torch.device | str | None
) -> Objective:
    arguments.instance("net", net, nn.Module, "an nn.Module or a BayesianModel")
    if not (isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        raise TypeError(f"data must be a pair of tensors with all rows, inputs and targets; found {described(data)}")
    if len(data[0]) != len(data[1]) or not len(data[0]):
        found = f"{len(data[0])} inputs and {len(data[1])} targets"
        raise ValueError(f"data holds {found}; they must be equally many, at least one")
    own = copy.deepcopy(net) if device is None else copy.deepcopy(net).to(device)
    if not isinstance(own, BayesianModel) and not any(parameter.requires_grad for parameter in own.parameters()):
        raise ValueError("net has no parameter that requires a gradient; there is nothing to train")
    x, y = (part.to(next(own.parameters()).device) for part in data)
    start = functools.partial(fresh_members, own)
    if isinstance(own, BayesianModel):
        require_data(own, x, y)
        own.num_data = len(x)
        transforms = {site: biject_to(prior.support) for site, prior in own.priors().items()}
        return Objective(own.net, False, map_loss(own, len(x)), x, y, own.site_shapes, transforms, start)
    function = LOSSES[arguments.one_of("loss", loss, LOSSES, "a function")] if isinstance(loss, str) else loss
    hold_frozen(own)
    shapes = {name: parameter.shape for name, parameter in own.requires_grad_(False).named_parameters()}
    same = dict.fromkeys(shapes, identity_transform)
    return Objective(own, True, network_loss(own, function), x, y, shapes, same, start)


def _started(objective: Objective, initial: Callable[[int], Weights] | None, count: int) -> Weights:
    """Free values of so many members at the start."""
    start = arguments.weights("what initial gave", (initial or objective.fresh)(count))
    for name, shape in objective.shapes.items():
        if name not in start or start[name].shape != (count, *shape):
            found = "is missing" if name not in start else f"has shape {tuple(start[name].shape)}"
            raise ValueError(f"initial: {name!r} {found}; it must be {(count, *shape)}")
    free = {name: objective.transforms[name].inv(start[name]) for name in objective.shapes}
    return {name: v.detach().to(objective.x.device).clone().requires_grad_() for name, v in free.items()}
