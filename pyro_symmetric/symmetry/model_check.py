r"""Does a Pyro model have a declared symmetry? If not, which factor is wrong, and which axis.

A group is a symmetry of a model if the joint density of its sites doesn't change,
:math:`p(g \cdot w, D) = p(w, D)`. That is compared at draws from the prior, for elements that generate each factor.
Where it fails, the sites whose own (conditional) density changes are named, and declarations with one axis fewer, or
a few more, are tried until one holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyro
import torch
from pyro import poutine

from pyro_symmetric import arguments
from pyro_symmetric._process import without_warnings
from pyro_symmetric.generators import kept
from pyro_symmetric.symmetry.factor import Axis, RescaledAxis
from pyro_symmetric.symmetry.finite import AnyFiniteGroup, FiniteGroup, finite_part
from pyro_symmetric.symmetry.joint_density import JointDensity, Point
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.rescaling import SignGroup

SITE_AND_DIM = tuple[str, int]
MOST_REPAIRS = 200  # alternative declarations of one factor that are tried at most


@dataclass(frozen=True)
class BrokenFactor:
    """A factor under which a model isn't invariant.

    :param kind: ``"permutations"`` or ``"signs"``.
    :param name: the factor's name.
    :param change: by how much the log-joint density changed, in nats (infinite outside of a support).
    :param sites: the sites whose own density, given the others, changed; empty if discrete sites were summed out.
    :param superfluous: axes ``(site, dim)`` without which the declaration holds.
    :param missing: axes ``(site, dim)`` with which it holds.
    """

    kind: str
    name: str
    change: float
    sites: tuple[str, ...]
    superfluous: tuple[SITE_AND_DIM, ...] = ()
    missing: tuple[SITE_AND_DIM, ...] = ()

    def __str__(self) -> str:
        done = "permuted" if self.kind == "permutations" else "flipped"
        text = f"factor {self.name!r}: the log-density changes by {self.change:.3g} nats when its units are {done}"
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

    :param broken: the factors that the model doesn't have.
    :param trials: how many draws from the prior were compared.
    """

    broken: tuple[BrokenFactor, ...]
    trials: int

    def __bool__(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        if self:
            return f"the model is invariant under the group (at {self.trials} draws from its prior)"
        names = [factor.name for factor in self.broken]
        return "\n".join([f"the model is not invariant under the factors {names} of the group", *map(str, self.broken)])

    def require(self) -> None:
        """:raises ValueError: if the model lacks a part of the group, with all that is known about it."""
        if not self:
            raise ValueError(
                f"{self}\nDo the prior, the likelihood, or buffers such as running statistics treat units differently, "
                "or is the declaration wrong?"
            )


def verify_model(
    group: AnyFiniteGroup | SignGroup,
    model: Callable[..., Any],
    *args: Any,
    trials: int = 2,
    tolerance: float = 1e-4,
    explain: bool = True,
    **kwargs: Any,
) -> ModelVerification:
    """Compare a model's joint density before and after elements of each factor, at draws from the prior.

    Discrete sites are summed out where they can be enumerated; subsampled plates keep one draw of their rows.

    >>> def model(data):
    ...     with pyro.plate("k", 3):
    ...         locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    ...         scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    ...     with pyro.plate("data", len(data)):
    ...         pyro.sample("x", dist.MixtureSameFamily(uniform, dist.Normal(locs, scales)), obs=data)
    >>> group = PermutationGroup.declare({"locs": ("k",)}, {"locs": torch.zeros(3), "scales": torch.zeros(3)})
    >>> print(group.verify(model, data))
    the model is not invariant under the factors ['k'] of the group
    factor 'k': the log-density changes by 7.3 nats when its units are permuted; what changes is the density of 'x'.
    It would hold with axis 0 of 'scales'

    :param group: what was declared.
    :param model: any Pyro model; ``args`` and ``kwargs`` are what it is called with, data included.
    :param trials: how many draws from the prior are compared.
    :param tolerance: relative change of a site's log-density (in the norm over its entries) that passes as rounding.
    :param explain: look for the axes that are wrong.
    :raises ValueError: if the group moves sites that the model lacks.
    :raises InconclusiveError: if the density isn't a function of the sites (dropout, other randomness).
    """
    return check(group, model, args, kwargs, trials=trials, tolerance=tolerance, explain=explain)


def check(
    group: AnyFiniteGroup | SignGroup,
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
    finite = finite_part(group)
    density = JointDensity(model, args, kwargs, tolerance)
    with (
        kept(),
        torch.no_grad(),
        poutine.block(),
        pyro.validation_enabled(False),
        without_warnings(),
    ):
        points = [density.draw(finite) for _ in range(trials)]
        return ModelVerification(broken_factors(finite, density, points, explain), trials)


class Density(Protocol):
    """A density that can be compared before and after an element."""

    def change(self, point: Point, element: Any) -> tuple[bool, float, tuple[str, ...]]:
        """Whether an element changes the density at a point, by how many nats, and which sites' own densities."""


def broken_factors(
    group: AnyFiniteGroup, density: Density, points: Sequence[Point], explain: bool
) -> tuple[BrokenFactor, ...]:
    """The factors whose elements change the density at any of the points."""
    if not any(density.change(point, element)[0] for point in points for element in _whole(group)):
        return ()
    inspected = (_inspect(alone, density, points, explain) for alone in _single_factors(group))
    return tuple(found for found in inspected if found is not None)


# one factor at a time -----------------------------------------------------------------------------------------------

_Single = PermutationGroup | SignGroup  # mostly of one factor


def _whole(group: AnyFiniteGroup) -> list[Any]:
    """A few elements that move all factors at once: if none changes the density, no factor does."""
    parts: list[_Single] = [group.permutations, group.signs] if isinstance(group, FiniteGroup) else [group]
    return [element for part in parts if part.factors for element in _generators(part)]


def _single_factors(group: AnyFiniteGroup) -> Iterator[_Single]:
    permutations = group.permutations if isinstance(group, FiniteGroup) else group
    for name, size in permutations.factors.items():
        if size > 1:
            factor = replace(permutations.factor(name), parent=None, slot=None)
            yield PermutationGroup([factor], group.site_shapes)
    if isinstance(group, FiniteGroup):
        for name in group.signs.factors:
            yield SignGroup([group.signs.factor(name)], group.site_shapes)


def _generators(group: _Single) -> list[Any]:
    """A cycle and an exchange make up all permutations; the flip of one unit, all flips: and a draw of each."""
    if isinstance(group, SignGroup):
        first = {name: torch.cat([-torch.ones(1), torch.ones(n - 1)]) for name, n in group.factors.items()}
        every = {name: -torch.ones(n) for name, n in group.factors.items()}
        return [group.element(first), group.element(every), group.sample()]
    units = {name: torch.arange(n) for name, n in group.factors.items()}
    swaps = {name: torch.cat([unit[:2].flip(0), unit[2:]]) for name, unit in units.items()}
    return [group.element({name: unit.roll(1) for name, unit in units.items()}), group.element(swaps), group.sample()]


def _inspect(group: _Single, density: Density, points: Sequence[Point], explain: bool) -> BrokenFactor | None:
    changes = [density.change(point, element) for point in points for element in _generators(group)]
    if not any(broken for broken, _, _ in changes):
        return None
    ((name, _),) = group.factors.items()
    sites = tuple(dict.fromkeys(site for broken, _, changed in changes if broken for site in changed))
    less, more = _repair(group, density, points) if explain else ((), ())
    kind = "signs" if isinstance(group, SignGroup) else "permutations"
    return BrokenFactor(kind, name, max(size for broken, size, _ in changes if broken), sites, less, more)


def _repair(
    group: _Single, density: Density, points: Sequence[Point]
) -> tuple[tuple[SITE_AND_DIM, ...], tuple[SITE_AND_DIM, ...]]:
    """The smallest change of the declaration that holds: axes to leave out, and axes to add; none if none is found."""
    ((name, size),) = group.factors.items()
    factor: Any = group.factor(name)
    declared = [(axis.site, axis.dim) for axis in factor.axes]
    latent = points[0].weights
    free = [
        (site, dim)
        for site, value in latent.items()
        for dim, length in enumerate(value.shape)
        if length == size and (site, dim) not in declared
    ]
    shapes = {**group.site_shapes, **{site: value.shape for site, value in latent.items()}}
    for less, more in itertools.islice(_alternatives(declared, free), MOST_REPAIRS):
        kept = tuple(axis for axis in factor.axes if (axis.site, axis.dim) not in less)
        other = replace(factor, axes=(*kept, *(_plain_axis(group, site, dim, size) for site, dim in more)))
        candidate = type(group)([other], shapes)
        if not any(density.change(point, element)[0] for point in points for element in _generators(candidate)):
            return less, more
    return (), ()


def _alternatives(declared: Sequence[SITE_AND_DIM], free: Sequence[SITE_AND_DIM]) -> Iterator[Any]:
    """Pairs (axes to leave out, axes to add), the smallest changes first."""
    for changes in range(1, 4):
        for left_out in range(min(changes, len(declared) - 1, 2) + 1):
            for less in itertools.combinations(declared, left_out):
                for more in itertools.combinations(free, changes - left_out):
                    yield less, more


def _plain_axis(group: _Single, site: str, dim: int, size: int) -> Axis | RescaledAxis:
    index = torch.arange(size)[None]
    return RescaledAxis(site, dim, index, 1) if isinstance(group, SignGroup) else Axis(site, dim, index)
