r"""Does a Pyro model have a declared symmetry? If not, which units are wrong, and which axis.

A group is a symmetry of a model if the joint density of its sites doesn't change,
:math:`p(g \cdot w, D) = p(w, D)`. That is compared at draws from the prior, for elements that generate the group. If it
fails, the sites whose own (conditional) density changes are named, and declarations with one axis fewer, or a few more,
are tried until one holds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import without_warnings
from pyro_symmetric.discovery.densities import Change, Density, FunctionDensity, JointDensity, Point
from pyro_symmetric.discovery.invariance import Part, guilty, parts_of, tried
from pyro_symmetric.generators import kept
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import Axis, Move
from pyro_symmetric.weights import Weights

SITE_AND_DIM = tuple[str, int]
MOST_REPAIRS = 200  # alternative declarations of the same units that are tried at most


@dataclass(frozen=True)
class BrokenMove:
    """A move of some units under which a model isn't invariant.

    :param move: ``"permute"`` or ``"flip"``.
    :param name: the name of the units.
    :param change: by how much the log-joint density changed, in nats (infinite outside of a support).
    :param sites: the sites whose own density, given the others, changed; empty if discrete sites were summed out.
    :param superfluous: axes ``(site, dim)`` without which the declaration holds.
    :param missing: axes ``(site, dim)`` with which it holds.
    """

    move: str
    name: str
    change: float
    sites: tuple[str, ...]
    superfluous: tuple[SITE_AND_DIM, ...] = ()
    missing: tuple[SITE_AND_DIM, ...] = ()

    def __str__(self) -> str:
        done = "permuted" if self.move == "permute" else "flipped"
        text = f"units {self.name!r}: the log-density changes by {self.change:.3g} nats when they are {done}"
        if self.sites:
            text += f"; what changes is the density of {', '.join(map(repr, self.sites))}"
        hints = [
            f"{verb} {', '.join(f'axis {dim} of {site!r}' for site, dim in axes)}"
            for verb, axes in (("without", self.superfluous), ("with", self.missing))
            if axes
        ]
        return f"{text}. It would hold {' and '.join(hints)}" if hints else text


@dataclass(frozen=True)
class ModelVerification:
    """What :func:`verify_model` found; true if the model has the whole group.

    :param broken: what changes the model's density.
    :param trials: how many draws from the prior were compared.
    """

    broken: tuple[BrokenMove, ...]
    trials: int

    def __bool__(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        if self:
            return f"the model is invariant under the group (at {self.trials} draws from its prior)"
        names = [found.name for found in self.broken]
        return "\n".join([f"the model is not invariant under the units {names} of the group", *map(str, self.broken)])

    def require(self) -> None:
        """:raises ValueError: if the model lacks a part of the group, with all that is known about it."""
        if not self:
            raise ValueError(
                f"{self}\nDo the prior, the likelihood, or buffers such as running statistics treat units differently, "
                "or is the declaration wrong?"
            )


def verify_model(
    group: Any,
    model: Callable[..., Any],
    *args: Any,
    trials: int = 2,
    tolerance: float = 1e-4,
    explain: bool = True,
    **kwargs: Any,
) -> ModelVerification:
    """Compare a model's joint density before and after elements of a group, at draws from the prior.

    Discrete sites are summed out if they can be enumerated; subsampled plates keep one draw of their rows.

    >>> def model(data):
    ...     with pyro.plate("k", 3):
    ...         locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    ...         scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    ...     with pyro.plate("data", len(data)):
    ...         pyro.sample("x", dist.MixtureSameFamily(uniform, dist.Normal(locs, scales)), obs=data)
    >>> group = Group.declare({"locs": ("k",)}, {"locs": torch.zeros(3), "scales": torch.zeros(3)})
    >>> print(verify_model(group, model, data))
    the model is not invariant under the units ['k'] of the group
    units 'k': the log-density changes by 7.3 nats when they are permuted; what changes is the density of 'x'.
    It would hold with axis 0 of 'scales'

    :param group: what was declared, or a symmetry; its permutations and signs count.
    :param model: any Pyro model; ``args`` and ``kwargs`` are what it is called with, data included.
    :param trials: how many draws from the prior are compared.
    :param tolerance: relative change of a site's log-density (in the norm over its entries) that passes as rounding.
    :param explain: look for the axes that are wrong.
    :raises ValueError: if the group moves sites that the model lacks.
    :raises InconclusiveError: if the density isn't a function of the sites (dropout, other randomness).
    """
    return check(group, model, args, kwargs, trials=trials, tolerance=tolerance, explain=explain)


def check(
    group: Any,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    trials: int = 2,
    tolerance: float = 1e-4,
    explain: bool = True,
) -> ModelVerification:
    """:func:`verify_model`, for models whose own arguments have the names of its options."""
    arguments.function("model", model, "a Pyro model")
    arguments.whole("trials", trials, 1)
    arguments.number("tolerance", tolerance, least=0)
    finite = group_of(group).finite
    density = JointDensity(model, args, kwargs, tolerance)
    with (
        kept(),
        torch.no_grad(),
        poutine.block(),
        pyro.validation_enabled(False),
        without_warnings(),
    ):
        points = [density.draw(finite) for _ in range(trials)]
        return ModelVerification(_broken(finite, density, points, explain), trials)


def check_function(
    group: Group, log_joint: Callable[[Weights], Tensor], draws: Weights, nearby: Weights
) -> ModelVerification:
    """:func:`verify_model` for a log-density, of which only values are known.

    What passes is measured, not guessed: by how much the values change if the same draws are asked for again (which a
    function that subsamples its data, or is otherwise random, answers differently), or ``nearby``.

    :param log_joint: weights of batch shape ``(S,)`` -> ``(S,)``.
    :param draws: weights of batch shape ``(S,)`` at which the density matters.
    :param nearby: the same but for the last digit of each number.
    """
    with kept(), torch.no_grad():
        density = FunctionDensity(log_joint, draws, nearby)
        return ModelVerification(_broken(group.finite, density, density.points, explain=True), len(density.points))


# small steps --------------------------------------------------------------------------------------------------------


def _broken(group: Group, density: Density, points: Sequence[Point], explain: bool) -> tuple[BrokenMove, ...]:
    """The moves of a finite group that change the density at any of the points."""

    def changes(group: Group, parts: Sequence[Part]) -> Iterator[Change]:
        return (density.change(point, element) for point in points for element in tried(group, parts))

    def fails(group: Group, parts: Sequence[Part]) -> bool:
        return any(change.broken for change in changes(group, parts))

    def inspected(move: Move, name: str) -> BrokenMove:
        found = list(changes(group, [(move, name)]))
        sites = tuple(dict.fromkeys(site for change in found if change.broken for site in change.sites))
        less, more = _repair(group, (move, name), points[0].weights, fails) if explain else ((), ())
        return BrokenMove(move, name, max(change.size for change in found), sites, less, more)

    parts = parts_of(group)
    if not fails(group, parts):
        return ()
    return tuple(inspected(*part) for part in guilty(parts, functools.partial(fails, group)))


def _repair(
    group: Group, part: Part, latent: Weights, fails: Callable[[Group, Sequence[Part]], bool]
) -> tuple[tuple[SITE_AND_DIM, ...], tuple[SITE_AND_DIM, ...]]:
    """The smallest change of the declaration that holds: axes to leave out, and axes to add; none if none is found."""
    move, name = part
    units = replace(group.restricted(move)[name], parent=None, moves=frozenset({move}))
    declared = [(axis.site, axis.dim) for axis in units.axes]
    free = [
        (site, dim)
        for site, value in latent.items()
        for dim, length in enumerate(value.shape)
        if length == units.count and (site, dim) not in declared
    ]
    shapes = {**group.site_shapes, **{site: value.shape for site, value in latent.items()}}
    index = torch.arange(units.count)[None]
    for less, more in itertools.islice(_alternatives(declared, free), MOST_REPAIRS):
        kept_axes = tuple(axis for axis in units.axes if (axis.site, axis.dim) not in less)
        other = replace(units, axes=(*kept_axes, *(Axis(site, dim, index, 1) for site, dim in more)))
        if not fails(Group([other], shapes), [part]):
            return less, more
    return (), ()


def _alternatives(declared: Sequence[SITE_AND_DIM], free: Sequence[SITE_AND_DIM]) -> Iterator[Any]:
    """Pairs (axes to leave out, axes to add), the smallest changes first."""
    for changes in range(1, 4):
        for left_out in range(min(changes, len(declared) - 1, 2) + 1):
            for less in itertools.combinations(declared, left_out):
                for more in itertools.combinations(free, changes - left_out):
                    yield less, more
