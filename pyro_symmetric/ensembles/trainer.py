"""The training loop of an ensemble: many members take every step together."""

from __future__ import annotations

import copy
import functools
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.ensembles.data_checks import require_data
from pyro_symmetric.ensembles.members import (
    LOSSES,
    Loss,
    MemberLoss,
    evaluating,
    fresh_members,
    kept_sites,
    map_loss,
    member_loss,
    stacked_buffers,
)
from pyro_symmetric.generators import seeded
from pyro_symmetric.mcmc.batches import Batches
from pyro_symmetric.mcmc.data_checks import require_data as require_model_data
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.samples import Posterior
from pyro_symmetric.weights import Weights

MakeOptimizer = Callable[[list[Tensor]], Optimizer]
OutlierRule = Callable[[Tensor], Tensor]
_ENTRIES = 2**22  # inputs of all members of a part in one step, about
_PROBED = 32  # rows


class Trainer:
    """One way of training; :meth:`part` trains some members by it."""

    def __init__(
        self,
        net: nn.Module | BayesianModel,
        data: tuple[Tensor, Tensor],
        loss: str | Loss,
        epochs: int,
        batch_size: int | None,
        optimizer: MakeOptimizer,
        cosine: bool,
        init: Callable[[int], Weights] | None,
        outliers: OutlierRule | None,
        device: torch.device | str | None,
    ):
        self.x, self.y = _checked_data(data)
        arguments.whole("epochs", epochs, 1)
        arguments.whole("batch_size", batch_size, 1, none="all data")
        arguments.instance("net", net, nn.Module, "an nn.Module or a BayesianModel")
        arguments.device("device", device, none="the network's own")
        arguments.flag("cosine", cosine)
        arguments.function("init", init, "a function of a number of members", none="the modules' own")
        arguments.function("outliers", outliers, "a function of losses", none="none")
        if not isinstance(loss, str):
            arguments.function("loss", loss, "the name of a loss, or a function of outputs and targets")
        model = copy.deepcopy(net) if device is None else copy.deepcopy(net).to(device)
        self.net = model.net if isinstance(model, BayesianModel) else model
        parameters = list(self.net.parameters())
        if not parameters:
            raise ValueError("net has no parameters; there is nothing to train")
        self.frozen = set()
        if not isinstance(model, BayesianModel):
            self.frozen = {name for name, parameter in self.net.named_parameters() if not parameter.requires_grad}
        if len(self.frozen) == len(parameters):
            raise ValueError("no parameter of net requires a gradient; there is nothing to train")
        self.net.train(not isinstance(model, BayesianModel)).requires_grad_(False)
        self.device = parameters[0].device
        self.x, self.y = self.x.to(self.device), self.y.to(self.device)
        self.batch_size = min(batch_size or len(self.x), len(self.x))
        self.loss: MemberLoss
        if isinstance(model, BayesianModel):
            require_model_data(model, self.x, self.y)
            self.loss, self.loss_name = map_loss(model, len(self.x)), repr(model)
        else:
            self.loss, self.loss_name = member_loss(self.net, _named_loss(loss)), _name(loss)
            require_data(self.net, loss, self.x, self.y)
        self.epochs, self.cosine, self.init, self.outliers = epochs, cosine, init, outliers
        trained = [p for name, p in self.net.named_parameters() if name not in self.frozen]
        self.optimizer, self.optimizer_name = optimizer, _checked_optimizer(optimizer, trained)

    def settings(self) -> dict[str, Any]:
        """What the members depend on, as far as it can be written down."""
        return {
            "network": str(self.net),
            "frozen": sorted(self.frozen),
            "data": f"{len(self.x)} rows, sha256 {_digest(self.x, self.y)}",
            "loss": self.loss_name,
            "loss at fixed weights": self._probe(),
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "optimizer": self.optimizer_name,
            "cosine": self.cosine,
            "init": None if self.init is None else _name(self.init),
            "outliers": None if self.outliers is None else _name(self.outliers),
        }

    def comfortable_size(self) -> int:
        """How many members a part has by default."""
        weights = sum(p.numel() for p in self.net.parameters())
        per_member = max(self.batch_size * self.x[0].numel(), weights, len(self.x))
        return max(1, min(2_500, _ENTRIES // per_member))

    def part(self, count: int, seed: int, redraw: bool, bar: tqdm) -> Posterior:
        """``count`` members, trained together; those that stop are drawn again in further rounds."""
        began = time.perf_counter()
        done: list[tuple[Weights, Tensor]] = []
        stopped: list[dict[str, float]] = []
        missing = count
        with seeded(seed, self.device):
            while missing:
                weights, losses, out = self._round(missing, bar)
                if not len(losses):
                    raise ValueError(
                        f"all of {missing} members stopped as outliers, the first in epoch {out[0]['epoch']:.0f} at a "
                        f"loss of {out[0]['loss']:.4g}; is the learning rate too high, or the outlier rule too strict?"
                    )
                done.append((weights, losses))
                stopped += out
                missing = len(out) if redraw else 0
        samples = {site: torch.cat([weights[site] for weights, _ in done]).cpu() for site in done[0][0]}
        statistics = {"loss": torch.cat([losses for _, losses in done]).cpu()}
        metadata = {"stopped": stopped, "seconds": time.perf_counter() - began}
        return Posterior.from_samples(samples, rows="independent", statistics=statistics, metadata=metadata)

    def _round(self, count: int, bar: tqdm) -> tuple[Weights, Tensor, list[dict[str, float]]]:
        """Train ``count`` members: those that came through, their losses, and who stopped when."""
        parameters = {name: value.requires_grad_(name not in self.frozen) for name, value in self._start(count).items()}
        buffers = stacked_buffers(self.net, count)
        optimizer = self.optimizer([value for value in parameters.values() if value.requires_grad])
        steps = len(self.x) // self.batch_size
        schedule: LRScheduler | None = CosineAnnealingLR(optimizer, steps * self.epochs) if self.cosine else None
        stopped: list[dict[str, float]] = []
        for epoch in range(self.epochs):
            losses = self._epoch(parameters, buffers, optimizer, schedule, steps)
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
        losses = torch.where(_is_finite(parameters, self.frozen), self._final(parameters, buffers), torch.nan)
        out = self._off(losses)
        stopped += [{"epoch": self.epochs - 1, "loss": value} for value in losses[out].tolist()]
        weights = {site: value[~out] for site, value in kept_sites(parameters, buffers).items()}
        return weights, losses[~out], stopped

    def _off(self, losses: Tensor) -> Tensor:
        """Which members to stop."""
        out = ~torch.isfinite(losses)
        if self.outliers is not None and not bool(out.all()):
            out[~out] = self.outliers(losses[~out])
        return out

    def _start(self, count: int) -> Weights:
        shapes = {name: p.shape for name, p in self.net.named_parameters()}
        held = {name: self.net.get_parameter(name).expand(count, *shapes[name]).clone() for name in self.frozen}
        if self.init is None:
            return {**fresh_members(self.net, count), **held}
        start = {**arguments.weights("what init gave", self.init(count)), **held}
        for name, shape in shapes.items():
            if name not in start or start[name].shape != (count, *shape):
                found = "is missing" if name not in start else f"has shape {tuple(start[name].shape)}"
                raise ValueError(f"init: {name!r} {found}; it must be {(count, *shape)}")
        return {name: start[name].detach().to(self.device).clone() for name in shapes}

    def _epoch(
        self,
        parameters: Weights,
        buffers: Weights,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        steps: int,
    ) -> Tensor:
        """One pass of every member over the data; their mean losses."""
        count = len(next(iter(parameters.values())))
        stream = Batches({"data": (len(self.x), self.batch_size)}, count, str(self.device))
        mapped = torch.func.vmap(self.loss, randomness="different")
        total = torch.zeros(count, device=self.device)
        for _ in range(steps):
            rows, stream = stream.next()
            index = rows["data"] if rows else slice(None)
            losses = mapped(parameters, buffers, self.x[index], self.y[index])
            optimizer.zero_grad()
            # the members' losses share nothing, so the gradient of their sum is each one's own
            losses.sum().backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            total += losses.detach() / steps
        return total

    @torch.no_grad()
    def _probe(self) -> str:
        """The loss of a few rows at weights that are the same in every run, by which functions of one name differ."""
        mapped = torch.func.vmap(self.loss, in_dims=(0, 0, None, None), randomness="different")
        with evaluating(self.net), seeded(0, self.device):
            weights = {
                name: 0.3 * torch.randn(1, *p.shape, dtype=p.dtype).to(self.device)
                for name, p in self.net.named_parameters()
            }
            loss = mapped(weights, stacked_buffers(self.net, 1), self.x[:_PROBED], self.y[:_PROBED])
        return f"{float(loss):.4g}"

    @torch.no_grad()
    def _final(self, parameters: Weights, buffers: Weights) -> Tensor:
        """The loss on all data, in eval mode."""
        count = len(next(iter(parameters.values())))
        mapped = torch.func.vmap(self.loss, in_dims=(0, 0, None, None), randomness="different")
        total = torch.zeros(count, device=self.device)
        with evaluating(self.net):
            for start in range(0, len(self.x) if count else 0, self.batch_size):
                x, y = self.x[start : start + self.batch_size], self.y[start : start + self.batch_size]
                total += mapped(parameters, buffers, x, y) * len(x) / len(self.x)
        return total


# small steps --------------------------------------------------------------------------------------------------------


def _checked_data(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not (isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
        raise TypeError("data must be a pair of tensors, inputs and targets")
    x, y = data
    if len(x) != len(y) or not len(x):
        raise ValueError(f"data holds {len(x)} inputs and {len(y)} targets; they must be equally many, at least one")
    return x, y


def _digest(*tensors: Tensor) -> str:
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:16]


def _named_loss(loss: str | Loss) -> Loss:
    if not isinstance(loss, str):
        return loss
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}; it must be one of {sorted(LOSSES)} or a function of outputs and targets")
    return LOSSES[loss]


def _checked_optimizer(make: MakeOptimizer, parameters: Sequence[Tensor]) -> str:
    """What a function makes of stacks of such parameters, with its settings, the same in every run."""
    if isinstance(make, Optimizer):
        kind = type(make).__name__
        raise TypeError(
            f"optimizer is one of {kind}; it must be a function that makes one of given parameters: "
            f"functools.partial(torch.optim.{kind}, lr=...)"
        )
    arguments.instance("optimizer", make, Callable, "a function that makes an optimiser of given parameters")  # type: ignore[arg-type]
    made = make([torch.zeros(1, *parameter.shape, requires_grad=True) for parameter in parameters])
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


def _name(thing: Any) -> str:
    """A function's name and its arguments, the same in every run."""
    if isinstance(thing, functools.partial):
        arguments = [repr(value) for value in thing.args] + [f"{k}={v!r}" for k, v in thing.keywords.items()]
        return f"{_name(thing.func)}({', '.join(arguments)})"
    return thing if isinstance(thing, str) else getattr(thing, "__qualname__", type(thing).__name__)


def _is_finite(parameters: Weights, frozen: Collection[str]) -> Tensor:
    """Which members have finite weights in all that was trained."""
    trained = [value.detach().flatten(1) for name, value in parameters.items() if name not in frozen]
    return torch.stack([torch.isfinite(value).all(1) for value in trained]).all(0)


def _keep(optimizer: Optimizer, parameters: Weights, buffers: Weights, kept: Tensor) -> None:
    """Go on with these members only: their parameters, buffers and the optimiser's memory of them."""
    count = len(kept)
    for parameter in parameters.values():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape[:1] == (count,):
                optimizer.state[parameter][name] = value[kept]
        parameter.grad = None
        parameter.data = parameter.data[kept]
    for name, value in buffers.items():
        buffers[name] = value[kept]
