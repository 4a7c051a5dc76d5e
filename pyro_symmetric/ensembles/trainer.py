"""The training loop of an ensemble: many members take every step together."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform, biject_to
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.calls import described, over_weights
from pyro_symmetric.ensembles.coordinates import Coordinates, standardising
from pyro_symmetric.ensembles.data_checks import require_data
from pyro_symmetric.ensembles.descent import batches_of, descend
from pyro_symmetric.ensembles.members import (
    LOSSES,
    Loss,
    MemberLoss,
    Perturb,
    evaluating,
    fresh_members,
    fresh_starts,
    kept_sites,
    map_loss,
    network_loss,
    stacked_buffers,
)
from pyro_symmetric.ensembles.parts import Part
from pyro_symmetric.fingerprint import as_json, surroundings
from pyro_symmetric.likelihoods import GaussianLikelihood
from pyro_symmetric.mcmc.density.data_checks import require_data as require_model_data
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Weights

MakeOptimizer = Callable[[list[Tensor]], Optimizer]
Watch = Callable[[int, Weights], None]
OutlierRule = Callable[[Tensor], Tensor]
_ENTRIES = 2**22  # inputs of all members of a part in one step, about
_PROBED = 32  # rows
_STEPS, _EPOCHS = 2_000, 20  # at least, by default


class Trainer:
    """One way of training; :meth:`part` trains some members by it. The arguments are those of ``ensemble``."""

    def __init__(
        self,
        net: nn.Module | BayesianModel,
        data: tuple[Tensor, Tensor],
        *,
        loss: str | Loss,
        epochs: int | None,
        batch_size: int | None,
        optimizer: MakeOptimizer | None,
        cosine: bool,
        initial: Callable[[int], Weights] | None,
        perturb: Perturb | None,
        outliers: OutlierRule | None,
        watch: Watch | None,
        device: torch.device | str | None,
    ):
        self.x, self.y = _checked_data(data)
        arguments.whole("epochs", epochs, 1, none="2,000 steps")
        arguments.whole("batch_size", batch_size, 1, none="all data")
        arguments.instance("net", net, nn.Module, "an nn.Module or a BayesianModel")
        arguments.device("device", device, none="the network's own")
        arguments.flag("cosine", cosine)
        arguments.function("initial", initial, "a function of a number of members", none="the modules' own")
        arguments.function("perturb", perturb, "a function of weights", none="none")
        arguments.function("outliers", outliers, "a function of losses", none="none")
        arguments.function("watch", watch, "a function of a step's number and the weights", none="none")
        if not isinstance(loss, str):
            arguments.function("loss", loss, "the name of a loss, or a function of outputs and targets")
        if perturb is not None and not isinstance(net, BayesianModel):
            raise ValueError("perturb is given, but net is no BayesianModel, whose likelihood it would change")
        model = copy.deepcopy(net) if device is None else copy.deepcopy(net).to(device)
        self.model = model if isinstance(model, BayesianModel) else None
        self.net = model.net if isinstance(model, BayesianModel) else model
        parameters = dict(self.net.named_parameters())
        if not parameters:
            raise ValueError("net has no parameters; there is nothing to train")
        self.frozen = {name for name, p in parameters.items() if self.model is None and not p.requires_grad}
        if len(self.frozen) == len(parameters):
            raise ValueError("no parameter of net requires a gradient; there is nothing to train")
        self.net.train(self.model is None).requires_grad_(False)
        self.like = next(iter(parameters.values()))
        self.x, self.y = self.x.to(self.device), self.y.to(self.device)
        self.batch_size = min(batch_size or len(self.x), len(self.x))
        self.transforms: dict[str, Transform] = {}
        self.shapes = {name: p.shape for name, p in parameters.items()}
        self.loss: MemberLoss
        self.loss_name: str | Loss
        if self.model is not None:
            require_model_data(self.model, self.x, self.y)
            self.transforms = {site: biject_to(prior.support) for site, prior in self.model.priors().items()}
            self.shapes = dict(self.model.site_shapes)
            self.loss, self.loss_name = map_loss(self.model, len(self.x), perturb), repr(self.model)
        else:
            self.loss, self.loss_name = network_loss(self.net, _named_loss(loss)), loss
            require_data(self.net, loss, self.x, self.y)
        self.epochs = epochs or max(_EPOCHS, -(-_STEPS // (len(self.x) // self.batch_size)))
        self.cosine, self.initial, self.outliers = cosine, initial, outliers
        self.perturb, self.watch = perturb, watch
        trained = [shape for name, shape in self.shapes.items() if name not in self.frozen]
        self.optimizer = optimizer or functools.partial(torch.optim.Adam, lr=0.01)
        self.optimizer_name, self.coordinates = _checked_optimizer(self.optimizer, trained), Coordinates()
        if optimizer is None:
            real = self.loss_name == "mse" or isinstance(getattr(self.model, "likelihood", None), GaussianLikelihood)
            with evaluating(self.net):
                self.coordinates = standardising(self.net, self.x, self.y if real else None, self.frozen)
            self.optimizer_name += " of standardised data"

    @property
    def device(self) -> torch.device:
        """The device of the members."""
        return self.like.device

    def constrain(self, free: Weights) -> Weights:
        """The weights of free coordinates, which optimisers move: sites with bounds, and layers that see the data."""
        bounded = {site: self.transforms[site](v) if site in self.transforms else v for site, v in free.items()}
        return self.coordinates.weights(bounded)

    def fingerprint(self, more: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """All that the members depend on.

        :param more: further settings.
        """
        settings = {
            "network": str(self.net),
            "frozen": {name: self.net.get_parameter(name) for name in sorted(self.frozen)},
            "data": {"x": self.x, "y": self.y},
            "loss": self.loss_name,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "optimizer": self.optimizer_name,
            "cosine": self.cosine,
            "initial": self.initial,
            "perturb": self.perturb,
            "outliers": self.outliers,
            **more,
        }
        dtype = str(self.like.dtype).removeprefix("torch.")
        losses = [self._loss_at_fixed_weights()]
        return as_json(settings=settings, seed=seed, dtype=dtype, losses=losses, **surroundings(self.device))

    def comfortable_size(self) -> int:
        """The number of members that a part has by default."""
        weights = sum(p.numel() for p in self.net.parameters())
        per_member = max(self.batch_size * self.x[0].numel(), weights, len(self.x))
        return max(1, min(2_500, _ENTRIES // per_member))

    def part(self, count: int, seed: int, redraw: bool, bar: tqdm) -> tuple[Weights, Tensor, Part]:
        """``count`` members, trained together; those that stop are drawn again in further rounds.

        :return: weights ``(members, *shape)`` and losses ``(members,)`` on the CPU, and how it went.
        """
        began = time.perf_counter()
        done: list[tuple[Weights, Tensor]] = []
        stopped: list[dict[str, float]] = []
        curve: list[float] = []  # of the first round
        missing, generator = count, torch.Generator(self.device).manual_seed(seed)
        with forked(generator, self.device):  # which initial values, dropout and users' functions draw from
            while missing:
                weights, losses, out, followed = self._round(missing, generator, bar)
                curve = curve or followed
                if not len(losses):
                    raise ValueError(
                        f"all of {missing} members stopped as outliers, the first in epoch {out[0]['epoch']:.0f} at a "
                        f"loss of {out[0]['loss']:.4g}; is the learning rate too high, or the outlier rule too strict?"
                    )
                done.append((weights, losses))
                stopped += out
                missing = len(out) if redraw else 0
        samples = {site: torch.cat([weights[site] for weights, _ in done]).cpu() for site in done[0][0]}
        losses = torch.cat([losses for _, losses in done]).cpu()
        return samples, losses, Part(len(losses), stopped, curve, time.perf_counter() - began)

    def _round(
        self, count: int, generator: torch.Generator, bar: tqdm
    ) -> tuple[Weights, Tensor, list[dict[str, float]], list[float]]:
        """Train ``count`` members: those that came through, their losses, who stopped when, and the mean losses."""
        parameters = {name: value.requires_grad_(name not in self.frozen) for name, value in self._start(count).items()}
        buffers = stacked_buffers(self.net, count)
        optimizer = self.optimizer([value for value in parameters.values() if value.requires_grad])
        steps = len(self.x) // self.batch_size
        schedule: LRScheduler | None = CosineAnnealingLR(optimizer, steps * self.epochs) if self.cosine else None
        stopped: list[dict[str, float]] = []
        curve: list[float] = []
        for epoch in range(self.epochs):
            now = range(epoch * steps, (epoch + 1) * steps)
            losses = self._epoch(parameters, buffers, optimizer, schedule, now, generator).cpu()  # one wait an epoch
            curve.append(float(losses.mean()))
            out = self._off(losses)
            bar.update(len(losses))
            if bool(out.any()):
                stopped += [{"epoch": epoch, "loss": value} for value in losses[out].tolist()]
                _keep(optimizer, parameters, buffers, ~out)
                bar.update(int(out.sum()) * (self.epochs - epoch - 1))
                if bool(out.all()):
                    break
            bar.set_postfix(loss=f"{float(losses[~out].mean()):.4g}", stopped=len(stopped), refresh=False)
        # An epoch's losses are taken before each step, so they don't show where the last one led.
        losses = torch.where(_is_finite(parameters, self.frozen), self._final(parameters, buffers), torch.nan).cpu()
        out = self._off(losses)
        stopped += [{"epoch": self.epochs - 1, "loss": value} for value in losses[out].tolist()]
        weights = {site: value[~out] for site, value in kept_sites(self.constrain(parameters), buffers).items()}
        return weights, losses[~out], stopped, curve

    def _off(self, losses: Tensor) -> Tensor:
        """Which members to stop."""
        out = ~torch.isfinite(losses)
        if self.outliers is not None and not bool(out.all()):
            out[~out] = self.outliers(losses[~out])
        return out

    def _start(self, count: int) -> Weights:
        """Initial values in free coordinates."""
        held = {name: self.net.get_parameter(name).expand(count, *self.shapes[name]).clone() for name in self.frozen}
        if self.initial is not None:
            start = {**arguments.weights("what initial gave", self.initial(count)), **held}
        elif self.model is not None:
            start = fresh_starts(self.model, count)
        else:
            start = {**fresh_members(self.net, count), **held}
        for name, shape in self.shapes.items():
            if name not in start or start[name].shape != (count, *shape):
                found = "is missing" if name not in start else f"has shape {tuple(start[name].shape)}"
                raise ValueError(f"initial: {name!r} {found}; it must be {(count, *shape)}")
        if self.initial is not None:  # others are drawn for standardised data
            start = self.coordinates.free(start)
        free = {n: self.transforms[n].inv(start[n]) if n in self.transforms else start[n] for n in self.shapes}
        return {name: value.detach().to(self.device).clone() for name, value in free.items()}

    def _epoch(
        self,
        parameters: Weights,
        buffers: Weights,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        steps: range,
        generator: torch.Generator,
    ) -> Tensor:
        """One pass of every member over the data, in these of all steps; their mean losses."""
        batches = batches_of(len(self.x), self.batch_size, len(next(iter(parameters.values()))))
        mapped = self._mapped(None if batches is None else 0)

        def losses(rows: Tensor | None) -> Tensor:
            x, y = (self.x, self.y) if rows is None else (self.x[rows], self.y[rows])
            return mapped(parameters, buffers, x, y)

        @torch.no_grad()
        def watch(step: int) -> None:
            if self.watch is not None:
                self.watch(step, self.constrain(parameters))

        return descend(losses, optimizer, steps, batches, generator, schedule, watch)

    def _mapped(self, data_axis: int | None) -> MemberLoss:
        """The losses of all members; ``data_axis`` is 0 if each has a mini-batch of its own."""

        def evaluate(free: Weights, buffers: Weights, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.constrain(free), buffers, x, y)

        axes = (0, 0, data_axis, data_axis)
        return functools.partial(over_weights, self.net, evaluate, in_dims=axes, randomness="different")

    @torch.no_grad()
    def _loss_at_fixed_weights(self) -> float:
        """The loss of a few rows at weights that are the same in every run: it shows what no hash of code sees."""
        mapped = self._mapped(None)
        with evaluating(self.net), forked(0, self.device):
            weights = {
                name: 0.3 * torch.randn(1, *shape, dtype=self.like.dtype, device="cpu").to(self.device)
                for name, shape in self.shapes.items()
            }
            loss = mapped(weights, stacked_buffers(self.net, 1), self.x[:_PROBED], self.y[:_PROBED])
        return float(loss)

    @torch.no_grad()
    def _final(self, parameters: Weights, buffers: Weights) -> Tensor:
        """The loss on all data, in eval mode."""
        count = len(next(iter(parameters.values())))
        mapped = self._mapped(None)
        total = torch.zeros(count, device=self.device)
        with evaluating(self.net):
            for start in range(0, len(self.x) if count else 0, self.batch_size):
                x, y = self.x[start : start + self.batch_size], self.y[start : start + self.batch_size]
                total += mapped(parameters, buffers, x, y) * len(x) / len(self.x)
        return total


# small steps --------------------------------------------------------------------------------------------------------


def _checked_data(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not (isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        raise TypeError(f"data must be a pair of tensors with all rows, inputs and targets; found {described(data)}")
    x, y = data
    if len(x) != len(y) or not len(x):
        raise ValueError(f"data holds {len(x)} inputs and {len(y)} targets; they must be equally many, at least one")
    return x, y


def _named_loss(loss: str | Loss) -> Loss:
    if not isinstance(loss, str):
        return loss
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}; it must be one of {sorted(LOSSES)} or a function of outputs and targets")
    return LOSSES[loss]


def _checked_optimizer(make: MakeOptimizer, shapes: Sequence[torch.Size]) -> str:
    """The description of the optimiser that a function makes for stacks of such parameters, the same in every run."""
    if isinstance(make, Optimizer):
        kind = type(make).__name__
        raise TypeError(
            f"optimizer is one of {kind}; it must be a function that makes one of given parameters: "
            f"functools.partial(torch.optim.{kind}, lr=...)"
        )
    arguments.instance("optimizer", make, Callable, "a function that makes an optimiser of given parameters")  # type: ignore[arg-type]
    made = make([torch.zeros(1, *shape, requires_grad=True, device="cpu") for shape in shapes])
    arguments.instance("what optimizer made", made, Optimizer, "an optimiser of torch.optim")
    if isinstance(made, torch.optim.LBFGS):
        raise ValueError("optimizer makes LBFGS, whose steps need all members' losses at once; take SGD, Adam, ...")
    groups = [
        {k: v for k, v in group.items() if k != "params" and v not in (None, False)} for group in made.param_groups
    ]
    settings = [", ".join(f"{k}={_plain(v)}" for k, v in group.items()) for group in groups]
    return f"{type(made).__name__}({'; '.join(dict.fromkeys(settings))})"


def _plain(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, Tensor) else value)


def _is_finite(parameters: Weights, frozen: Collection[str]) -> Tensor:
    """Which members have finite weights in all that was trained."""
    trained = [value.detach()[:, None].flatten(1) for name, value in parameters.items() if name not in frozen]
    return torch.stack([torch.isfinite(value).all(1) for value in trained]).all(0)


def _keep(optimizer: Optimizer, parameters: Weights, buffers: Weights, kept: Tensor) -> None:
    """Keep these members only: their parameters, buffers and the optimiser's memory of them."""
    count = len(kept)
    for parameter in parameters.values():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape[:1] == (count,):
                optimizer.state[parameter][name] = value[kept]
        parameter.grad = None
        parameter.data = parameter.data[kept]
    for name, value in buffers.items():
        buffers[name] = value[kept]
