"""Verification: a function of the weights, compared before and after random elements of
the whole group.

The function may be a network's outputs (:func:`verify`), or a log-density
(:mod:`~pyro_symmetric.discovery.model_check`). Each decides whether an element changes
it by more than rounding; the elements that are tried, and the search for the moves that
break the invariance, are the same.

Outputs are those of a copy in float64, whose constant tensors (zero-initialised heads,
ones in normalisation layers, running statistics) are random: with zeros a wrong group
can pass with an error of exactly zero. Fresh weights and inputs of several sizes
follow, as units may be off, and bounds out of reach, at the network's own weights.
Casts to lower precisions become casts to float64. In eval mode each evaluation draws
the same random numbers; in train mode they count as their means, so that noise that
only regularises breaks no symmetry.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric._process import (
    drawn_seed,
    forked,
    with_both_branches,
    without_fast_attention,
    without_warnings,
)
from pyro_symmetric.arguments import Names, described
from pyro_symmetric.discovery.linear_twin import NotDifferentiable, gradients
from pyro_symmetric.discovery.rotations import confirmed
from pyro_symmetric.discovery.symmetry import (
    CONSTANT,
    Symmetry,
    copied,
    fresh,
    in_precision,
    near,
    refreshed,
)
from pyro_symmetric.discovery.trace import Deterministic, TensorsOnly, try_out
from pyro_symmetric.errors import Error
from pyro_symmetric.groups.axes import spanned
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.moves import MOVES, Move
from pyro_symmetric.groups.units import Units
from pyro_symmetric.weights import Weights

TOLERANCE = 1e-6  # a relative change that passes,
ROUNDINGS = 30.0  # or as a multiple of rounding errors, if that is larger
HOPELESS = 0.5  # a relative change by rounding that makes verification inconclusive
BITS = 20  # a wrong move passes with probability ``2 ** -BITS`` at most
# Networks with fewer weights are compared at fresh weights and inputs of all these
# sizes; those up to the second number, at inputs of the example's size.
SMALL, LARGE = 20_000, 20_000_000
INPUT_SIZES = (0.1, 1.0, 10.0, 1e3, 1e4, 1e5)
# how often these are drawn at most, while no unit of a set is on
DRAWS = 10

UnitMove = tuple[Move, str]  # one move of some units
T = TypeVar("T")


class BrokenSymmetry(UserWarning):
    """A move that discovery had proposed failed verification, and was left out."""


class UnverifiedSymmetry(UserWarning):
    """A symmetry couldn't be checked, for the reason in the message (a random network,
    say).
    """


def verify(
    symmetry: Symmetry,
    net: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    trials: int | None = None,
) -> Verification:
    """Compare outputs before and after random elements of the whole group.

    >>> net, x = (
    ...     nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)),
    ...     torch.randn(4, 3),
    ... )
    >>> symmetry = ps.find_symmetry(net, x)
    >>> bool(ps.verify(symmetry, net, x))
    True
    >>> other = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 2))
    >>> bool(ps.verify(symmetry, other, x))  # softplus(c z) isn't c softplus(z)
    False

    Outputs are compared in float64. A change of 1e-6 of the largest output passes, or a
    larger one if the measured rounding errors are as large. Both sides draw the same
    random numbers, from the generators of PyTorch, NumPy and Python. Masks of dropout,
    and the noise of train mode, count as their means.

    A network with fewer than 20,000 weights is compared at its own weights, and at
    fresh ones (normal, as large as its own) for inputs of six sizes from 0.1 to
    100,000; a larger one at fresh weights for ordinary inputs. The result is false, and
    says that nothing is known, if some units are multiplied of which none was ever on.

    :param symmetry: the symmetry of the network, or of one like it.
    :param net: the network; it isn't changed.
    :param inputs: an example of what its ``forward`` takes. Floating-point inputs are
        replaced by random numbers if it runs at these.
    :param kwargs: keyword arguments of its ``forward``.
    :param trials: the number of random elements; by default so many that a wrong move
        passes less than once in a million times.
    :raises ValueError: if the network doesn't take the inputs.
    :raises InconclusiveError: if the network doesn't run in float64, draws random
        numbers that can't be drawn again, has rounding errors as large as its outputs,
        or is on the meta device.
    """
    arguments.instance(
        "symmetry", symmetry, Symmetry, "a Symmetry, such as find_symmetry(net, x)"
    )
    arguments.instance("net", net, nn.Module, "a torch.nn.Module")
    arguments.whole("trials", trials, 1, none="as many as it takes")
    for number, value in enumerate(inputs):
        if isinstance(value, Tensor) and not value.numel():
            raise ValueError(
                f"inputs[{number}] is {described(value)}, which is empty; there is "
                "nothing to compare"
            )
    outputs = _Points(_Copy(symmetry, net, inputs, kwargs), True)
    broken, error = broken_moves(symmetry.group, outputs.change, trials)
    return Verification(
        "the network's outputs",
        broken,
        error,
        outputs.tolerance,
        "of the largest output",
        outputs.unknown,
    )


def repaired(
    symmetry: Symmetry,
    net: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    bounded: bool = True,
) -> Symmetry:
    """Drop the moves that fail from a symmetry, with a warning that names them, or warn
    if nothing is conclusive.

    :param bounded: whether the network may compare numbers with bounds, which only
        inputs of some sizes reach. If it doesn't, fresh weights tell what holds.
    """
    dropped: list[BrokenMove] = []
    try:
        outputs = _Points(_Copy(symmetry, net, inputs, kwargs), bounded)
        while broken := broken_moves(symmetry.group, outputs.change)[0]:
            untried = {(move, name) for move, name, *_ in broken if move != "permute"}
            untried -= {*symmetry.eval_only}
            if untried and outputs.all[0].has_train_mode:  # do they hold without it?
                in_eval = (*symmetry.seen_in_eval, *sorted(untried))
                symmetry = replace(symmetry, seen_in_eval=in_eval)
                outputs.copy.symmetry = symmetry
                continue
            dropped += broken
            for move, name, *_ in broken:
                symmetry = symmetry.without([name], move)
        rotating = confirmed(
            symmetry.group,
            symmetry.rotating,
            lambda turning: [
                move.name for move in broken_moves(turning, outputs.change)[0]
            ],
        )
        symmetry = replace(symmetry, rotating=rotating)
    except InconclusiveError as error:
        warnings.warn(
            f"{error}. The group is what rules and gradients propose; no element of it "
            "was tried.",
            UnverifiedSymmetry,
            stacklevel=3,
        )
    if dropped:
        names = ", ".join(f"{name} ({move})" for move, name, *_ in dropped)
        sizes = ", ".join(f"{move.change:.3g}" for move in dropped)
        warnings.warn(
            f"verification failed for the units {names}: these moves are left out of "
            "the group. Either a rule "
            "that you registered is wrong, or pyro_symmetric is; then please report "
            "the network. (They change outputs "
            f"by {sizes} of the largest; {outputs.tolerance:.1g} would pass as "
            "rounding.)",
            BrokenSymmetry,
            stacklevel=3,
        )
    return symmetry


# results ------------------------------------------------------------------------------


class InconclusiveError(Error, ValueError):
    """An invariance that can't be decided: the function depends on more than weights,
    or can't be evaluated.
    """


class Change(NamedTuple):
    """The change of a function by an element.

    :param broken: whether it exceeds rounding.
    :param size: its size; infinite outside of a support.
    :param sites: the sites whose own density changes; empty for outputs.
    """

    broken: bool
    size: float
    sites: tuple[str, ...] = ()


class BrokenMove(NamedTuple):
    """A move of some units that changes the function.

    :param move: ``"permute"``, ``"flip"``, ``"scale"``, ``"shift"`` or ``"rotate"``.
    :param name: the name of the units.
    :param change: the largest change, infinite outside of a support.
    :param sites: the sites whose own density, given the others, changed; empty for
        outputs, and if discrete sites were summed out.
    :param remedy: the axis with or without which a declaration would hold, in words;
        empty if there is none.
    """

    move: Move
    name: str
    change: float
    sites: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Verification:
    """A function's invariance under a group; true if it is invariant, and nothing is
    unknown.

    :param function: the function, in words.
    :param broken: the moves that change it.
    :param error: the largest change seen: of an output, relative to the largest one; of
        a log-density, in nats.
    :param tolerance: the relative change that passes as rounding: of an output, or of
        each site's log-density.
    :param unit: the unit of changes, in words.
    :param unknown: names of multiplied or shifted units of which nothing is known, as
        no weights and inputs that were tried switched any of them on.
    """

    function: str
    broken: tuple[BrokenMove, ...]
    error: float
    tolerance: float
    unit: str
    unknown: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not (self.broken or self.unknown)

    def __str__(self) -> str:
        lines = []
        if self.broken:
            names = [move.name for move in self.broken]
            lines.append(f"{self.function}: not invariant under the units {names}")
        else:
            lines.append(
                f"{self.function}: invariant under the group; the largest change seen "
                f"is {self.error:.1e} {self.unit}"
            )
        for move, name, change, sites, remedy in self.broken:
            text = (
                f"units {name!r}: a change of {change:.3g} {self.unit} when they {move}"
            )
            if sites:
                of_sites = ", ".join(map(repr, sites))
                text += f"; what changes is the density of {of_sites}"
            lines.append(f"{text}. It would hold {remedy}" if remedy else text)
        if self.broken:
            lines.append(
                f"a relative change of up to {self.tolerance:.1g} would pass as "
                "rounding"
            )
        if self.unknown:
            lines.append(
                f"nothing is known of the units {[*self.unknown]}: no weights and "
                "inputs that were tried switched them on"
            )
        return "\n".join(lines)


# bisection ----------------------------------------------------------------------------


def broken_moves(
    group: Group, change: Callable[[Element], Change], trials: int | None = None
) -> tuple[tuple[BrokenMove, ...], float]:
    """Try random elements; if one changes the function, find by bisection the moves
    that do.

    :param change: the change of the function by an element.
    :param trials: the number of elements; by default so many that a wrong move passes
        less than once in a million times.
    :return: the moves that change it, and the largest change that all of them made
        together.
    """
    # the first element that changed it; others may reach a clamp, say, more rarely
    counterexample: list[Element] = []

    def worst(moves: Sequence[UnitMove], trials: int | None = None) -> Change:
        """Return the first change that is broken, or the largest of all."""
        largest = Change(False, 0.0)
        again = [only(element, moves) for element in counterexample]
        for element in chain(again, trial_elements(group, moves, trials)):
            largest = worse(largest, change(element))
            if largest.broken:
                counterexample[:] = counterexample or [element]
                break
        return largest

    moves = moves_in(group)
    together = worst(moves, trials)
    broken = list[BrokenMove]()
    if together.broken:
        for move in guilty(moves, lambda suspects: worst(suspects).broken):
            change_by_move = worst([move])
            broken.append(BrokenMove(*move, change_by_move.size, change_by_move.sites))
    return tuple(broken), together.size


def worse(change: Change, further: Change) -> Change:
    """Return the worse of two changes: a broken one, then the larger."""
    return max(change, further, key=operator.itemgetter(0, 1))


def guilty(suspects: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Find by bisection, of some that fail together, those that fail alone; all if
    neither half fails.
    """
    if len(suspects) <= 1:
        return list(suspects)
    half = len(suspects) // 2
    failing = list[T]()
    for side in (suspects[:half], suspects[half:]):
        if fails(side):
            failing += guilty(side, fails)
    return failing or list(suspects)


# trial elements -----------------------------------------------------------------------


def moves_in(group: Group) -> list[UnitMove]:
    """List every move of every set of units."""
    return [(move, name) for move in MOVES for name in group.names(move)]


def trial_elements(
    group: Group, moves: Collection[UnitMove], trials: int | None = None
) -> Iterator[Element]:
    """Draw elements that make all of these moves at once: if none changes a function,
    no move does.

    Permutations of the first are cycles through all units of a copy, so that no unit
    stays; the others are uniform. Elements that change nothing are a subgroup, so that
    each finds a wrong move with probability a half or more: of n units that are
    exchanged, in all but two of (n over n / 2) cases (even permutations alone are no
    network's symmetry). Random scales and shifts lie in no subgroup at all. Of a few
    flips of single units each element has one, which finds a wrong one for certain.

    :param trials: their number; by default so many that a wrong move passes less than
        once in a million times.
    """
    single = [name for move, name in moves if move == "flip" and group[name].count == 1]
    # a large set needs one element only
    bits = dict.fromkeys(moves, float(BITS))
    for move, name in moves:
        if move == "flip" and name in single:
            bits[move, name] = 0.0
        elif move in ("permute", "flip") and group[name].count > 1:
            bits[move, name] = _bits(group, move, name)
    least = min((b for b in bits.values() if b), default=BITS)
    enough = max(math.ceil(BITS / least), min(BITS, len(single)))
    for i in range(enough if trials is None else trials):
        # without the moves of large sets, the next changes fewer sites
        moves_of_element = [
            move for move in moves if trials is not None or i * bits[move] < BITS
        ]
        element = group.sample(dtype=torch.float64)
        permutations = element.permutations
        signs = element.signs
        if i == 0:
            permutations = {
                n: torch.empty_like(p).scatter_(-1, p, p.roll(1, -1))
                for n, p in permutations.items()
            }
        for j, name in enumerate(single if i < len(single) < BITS else ()):
            signs[name] = torch.full_like(signs[name], -1.0 if i == j else 1.0)
        yield only(
            Element(group, permutations, signs, *element.parts[2:]), moves_of_element
        )


def _bits(group: Group, move: Move, name: str) -> float:
    """Return ``b`` such that a wrong move passes one random element with probability
    ``2 ** -b`` at most.

    Flips of units that are exchanged are wrong together. Permutations that a cycle
    doesn't refute are a transitive group: of more than eight units, the largest keeps
    two halves together (fewer have larger ones).
    """
    names = (name, *group.ancestors(name)) if move == "flip" else (name,)
    families = [group[name] for name in names if "permute" in group[name].moves]
    n = min(math.prod(family.size for family in families), 2 * BITS)
    return math.log2(math.comb(n, n // 2) / 2) if n > 8 else max(1.0, (n - 1) / 2)


def only(element: Element, moves: Collection[UnitMove]) -> Element:
    """Return the element without all moves but these."""
    parts = (
        {name: value for name, value in numbers.items() if (move, name) in moves}
        for move, numbers in zip(MOVES, element.parts, strict=True)
    )
    shape = element.batch_shape
    return Element(element.group, *parts, batch_shape=shape, dtype=torch.float64)


def moved_sites(element: Element) -> set[str]:
    """Return the sites that an element moves."""
    group = element.group
    neutral = group.identity(device=element.device, dtype=torch.float64)
    names = set[str]()
    for numbers, unmoved in zip(element.parts, neutral.parts, strict=True):
        names |= {n for n in numbers if not torch.equal(numbers[n], unmoved[n])}
    return {axis.site for name in names for axis in group.axes(name)}


def difference(before: list[Tensor] | None, after: list[Tensor] | None) -> float:
    """Return the largest change of an entry, relative to the largest finite entry of
    the same output.
    """
    if before is None or after is None:
        return 0.0 if before is after else float("inf")
    if [x.shape for x in before] != [y.shape for y in after]:
        return float("inf")
    worst = 0.0
    for x, y in zip(before, after, strict=True):
        if not x.numel():
            continue
        if not (x.is_floating_point() or x.is_complex()):
            x = x.double()
            y = y.double()
        changes = (x != y) & ~(x.isnan() & y.isnan())
        change = torch.where(changes, x - y, 0).abs().max()
        size = torch.where(x.isfinite(), x, 0).abs().max()
        size = size.clamp_min(torch.finfo(x.dtype).tiny)
        worst = max(worst, float((change / size).nan_to_num(nan=float("inf"))))
    return worst


# a network's outputs ------------------------------------------------------------------


class _Copy:
    """A copy of a network in float64, into which weights are loaded.

    :param args: an example of what the forward pass takes; so are ``kwargs``.
    :ivar weights: the copy's own tensors, by site.
    :ivar holds: the tensors from which unchanged ones were loaded.
    :ivar origin: the network's weights, with random numbers in place of constants.
    :raises InconclusiveError: if the network is on the meta device.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        net: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ):
        if any(parameter.is_meta for parameter in net.parameters()):
            raise InconclusiveError(
                f"inconclusive: {type(net).__name__} is on the meta device, which "
                "holds no numbers"
            )
        self.original = net
        self.net = copied(net, torch.float64)
        self.weights = symmetry.weights_of(self.net)
        self.holds = dict[str, Tensor]()
        self.origin = _weights_without_constants(symmetry, net)
        self.size = sum(value.numel() for value in self.origin.values())
        self.call = TensorsOnly(self.net, args, kwargs)
        self.symmetry = symmetry
        self.seed = drawn_seed()

    def load(self, weights: Weights, anew: Collection[str] = ()) -> None:
        """Load weights by site, but for those that the copy holds, as large ones take
        time.

        :param anew: sites that are loaded in any case: a network may change its own
            weights.
        """
        with torch.no_grad():
            for site, value in self.weights.items():
                if site in anew or self.holds.get(site) is not weights[site]:
                    value.copy_(weights[site])
                    self.holds[site] = weights[site]

    def replace(
        self, sites: Collection[str], new: Callable[[str, Tensor], Tensor]
    ) -> None:
        """Replace the weights of some sites, one after the other: each further array of
        a large one takes time.
        """
        with torch.no_grad():
            for site in sites:
                self.holds.pop(site, None)
                self.weights[site].copy_(new(site, self.weights[site]))

    def run(self, inputs: Sequence[Tensor], train: bool) -> list[Tensor] | None:
        """Run the copy, and restore its buffers; None if it has no train mode (at a
        batch of one, say).

        :raises InconclusiveError: if it doesn't run in eval mode.
        """
        buffers = {name: value.clone() for name, value in self.net.named_buffers()}
        devices = {value.device for value in (*self.weights.values(), *inputs)}
        refreshed(self.net, train)
        try:
            with (
                without_fast_attention(),
                with_both_branches(),
                without_warnings(),
                forked(self.seed, *devices, host=True),
                Deterministic(torch.float64, noise=not train),
            ):
                outputs = self.call(*inputs)
        except Exception as error:
            if not train:
                raise InconclusiveError(
                    f"inconclusive: {type(self.net).__name__} doesn't run ({error!r})"
                ) from error
            if not isinstance(error, ValueError | RuntimeError):
                raise
            return None
        finally:
            with torch.no_grad():
                for name, value in self.net.named_buffers():
                    if name in buffers and value.shape == buffers[name].shape:
                        value.copy_(buffers[name])
        if not self.symmetry.logits:
            return outputs
        return [out.log_softmax(-1) if out.dim() else out for out in outputs]

    # points ---------------------------------------------------------------------------

    def at_own_weights(self) -> _Outputs:
        """Evaluate the network near its own weights: at random inputs if it runs at
        these, else at the example.

        :raises ValueError: if it doesn't take the inputs.
        :raises InconclusiveError: if it does, but nothing can be compared.
        """
        try:
            return _Outputs(self, self.origin, self._random_inputs(1.0))
        except InconclusiveError as error:
            with suppress(InconclusiveError):
                return _Outputs(self, self.origin, self._example_inputs())
            try_out(copied(self.original).eval(), *self.call.given)
            raise error

    def at_fresh_weights(self, size: float) -> _Outputs | None:
        """Evaluate the network at fresh weights and inputs of a size; None if it has no
        outputs there.

        Weights of a small network are drawn anew while they leave all units of a set
        off; the best are returned.
        """
        best: _Outputs | None = None
        for _ in range(DRAWS if self.size < SMALL else 1):
            drawn = {
                site: fresh(value, site in self.symmetry.buffers)
                if _real(value)
                else value
                for site, value in self.origin.items()
            }
            with suppress(InconclusiveError):
                point = _Outputs(self, drawn, self._random_inputs(size))
                if self.size >= SMALL:
                    return point
                if best is None or len(point.off) < len(best.off):
                    best = point
                if not point.off:
                    break
        return best

    def _example_inputs(self) -> list[Tensor]:
        """Return the example's tensors in double precision."""
        return [
            x.detach().to(in_precision(x.dtype, torch.float64))
            for x in self.call.tensors
        ]

    def _random_inputs(self, size: float) -> list[Tensor]:
        """Draw normal numbers of a size in place of the example's real and complex
        ones.
        """
        return [
            size * torch.randn_like(x) if _real(x) else x
            for x in self._example_inputs()
        ]


class _Points:
    """A network's outputs at its own weights, and at fresh ones with inputs of several
    sizes.

    A unit that no input switches on at the network's own weights may be on at others,
    and large inputs reach clamps that others don't. Without bounds, what holds at
    generic weights and inputs holds at all: then fresh ones are enough, unless they are
    too rough for a verdict.

    :ivar at_own: None as long as fresh weights are enough.
    """

    def __init__(self, copy: _Copy, bounded: bool):
        self.copy = copy
        self.at_own = copy.at_own_weights() if bounded else None
        sizes = INPUT_SIZES if bounded and copy.size < SMALL else (1.0,)
        few = bounded and copy.size >= LARGE
        points = map(copy.at_fresh_weights, () if few else sizes)
        self.at_fresh = [point for point in points if point is not None]
        if not self.at_fresh and self.at_own is None:
            self.at_own = copy.at_own_weights()

    @property
    def all(self) -> list[_Outputs]:
        """The points, the network's own weights first."""
        return [*filter(None, [self.at_own]), *self.at_fresh]

    @property
    def tolerance(self) -> float:
        """The largest change that passes at any point."""
        return max(point.tolerance for point in self.all)

    @property
    def unknown(self) -> Names:
        """The names of units that are multiplied or shifted, none of which was on at
        any point of a small network.
        """
        if self.copy.size >= SMALL:
            return ()
        return tuple(sorted(set.intersection(*(set(point.off) for point in self.all))))

    def change(self, element: Element) -> Change:
        """Return the largest change by an element at all points, or that at the first
        at which it is broken.
        """
        if self.at_own is None:
            with suppress(InconclusiveError):
                (point,) = self.at_fresh
                change = point.change(element)
                if change.broken or point.tolerance == TOLERANCE:
                    return change
            self.at_own = self.copy.at_own_weights()
        largest = self.at_own.change(element)
        for point in self.at_fresh:
            if largest.broken:
                break
            # too rough there for a verdict
            with suppress(InconclusiveError):
                largest = worse(largest, point.change(element))
        return largest


def _weights_without_constants(symmetry: Symmetry, net: nn.Module) -> Weights:
    """Return a network's weights, with random numbers in place of constant tensors."""
    weights = {site: value.detach() for site, value in symmetry.weights_of(net).items()}
    for site, value in weights.items():
        if _real(value) and value.numel():
            if float(value.std(correction=0)) < CONSTANT:
                weights[site] = near(value, site in symmetry.buffers)
    return weights


class _Outputs:
    """The outputs of a copy in both modes at one point, as functions of its weights.

    :param origin: the weights at this point, by site.
    :raises InconclusiveError: if the copy doesn't run in eval mode, or its outputs
        aren't finite.
    """

    def __init__(self, copy: _Copy, origin: Weights, inputs: list[Tensor]):
        self.copy = copy
        self.origin = origin
        self.inputs = inputs
        self.copy.load(origin, anew=origin)
        self.before = dict[bool, list[Tensor] | None]()
        for train in (False, True):
            self.before[train] = self._run(train)
        network = type(copy.net).__name__
        outputs = self.before[False] or []
        if not outputs:
            raise InconclusiveError(f"inconclusive: {network} returns no tensor")
        for output in outputs:
            if not _real(output) or not output.numel():
                continue
            if output.isnan().any() or not output.isfinite().any():
                raise InconclusiveError(
                    f"inconclusive: the outputs of {network} are no finite numbers"
                )
        if difference(outputs, self.before[True]) == 0:  # both modes are one
            self.before[True] = None
        self.tolerance = TOLERANCE
        self.measured = False

    @property
    def has_train_mode(self) -> bool:
        """The verdict that outputs differ in train mode."""
        return self.before[True] is not None

    def change(self, element: Element) -> Change:
        """Return the change of the outputs by an element, in either mode.

        What holds in eval mode alone is applied after train mode is compared.
        """
        group = element.group
        in_eval = set(self.copy.symmetry.eval_only) & set(moves_in(group))
        in_both = set(moves_in(group)) - in_eval
        first = only(element, in_both) if in_eval else element
        moved = moved_sites(first)
        self.copy.load(self.origin, anew=moved)
        self.copy.replace(moved, first.on_site)
        size = self._difference(train=True)
        if in_eval:
            second = only(element, in_eval)
            self.copy.replace(moved_sites(second), second.on_site)
        size = max(size, self._difference(train=False))
        if not size < self.tolerance:
            self.copy.load(self.origin, anew=self.origin)
            again = self._largest_difference()
            if again >= self.tolerance:
                raise InconclusiveError(
                    "inconclusive: the network is random. Its outputs at the same "
                    "weights, with all generators of "
                    "PyTorch, NumPy and Python at the same seed, differ by "
                    f"{again:.1g} of the largest one"
                )
            if not self.measured:
                self.tolerance = self.rounding()
                self.measured = True
        return Change(not size < self.tolerance, size)

    def rounding(self) -> float:
        """Return the tolerance: some times the change of outputs by the last digit of
        all weights.

        :raises InconclusiveError: if that change is about as large as the outputs.
        """

        def nudged(_: str, value: Tensor) -> Tensor:
            if not _real(value):
                return value
            digit = torch.finfo(value.dtype).eps
            return value * (1 + digit * (2 * torch.rand_like(value) - 1))

        size = 0.0
        for _ in range(3):
            self.copy.load(self.origin, anew=self.origin)
            self.copy.replace(self.copy.weights, nudged)
            size = max(size, self._largest_difference())
        if not ROUNDINGS * size < HOPELESS:
            raise InconclusiveError(
                "inconclusive: the last digit of the weights changes outputs by "
                f"{size:.1g} of the largest one, so "
                "that rounding errors hide whether an element of the group does"
            )
        return max(TOLERANCE, ROUNDINGS * size)

    @cached_property
    def off(self) -> list[str]:
        """The names of units that are multiplied or shifted of which no weight has a
        gradient here: none of them is on; none if the network has no derivatives.

        Which units may be exchanged shows in how they are read, on or off.
        """
        group = self.copy.symmetry.group
        self.copy.load(self.origin)
        weights = {
            site: value
            for site, value in self.copy.weights.items()
            if _real(value) and value.is_leaf and site not in group.buffers
        }
        required = {site: value.requires_grad for site, value in weights.items()}
        try:
            for value in weights.values():
                value.requires_grad_()
            with torch.enable_grad():
                outputs = self.copy.run(self.inputs, False) or []
            (gradient,) = gradients(outputs, weights, 1)
        except (RuntimeError, TypeError, InconclusiveError, NotDifferentiable):
            return []
        finally:
            for site, value in weights.items():
                value.requires_grad_(required[site])
        moves = (move for move in MOVES if move != "permute")
        multiplied = {name for move in moves for name in group.names(move)}
        off = [name for name in multiplied if not _is_on(group[name], gradient)]
        return off if gradient else []

    def _largest_difference(self) -> float:
        """Return the largest relative change of an output, in either mode."""
        return max(self._difference(train) for train in (False, True))

    def _difference(self, train: bool) -> float:
        before = self.before[train]
        return 0.0 if before is None else difference(before, self._run(train))

    def _run(self, train: bool) -> list[Tensor] | None:
        with torch.no_grad():
            return self.copy.run(self.inputs, train)


def _is_on(units: Units, gradient_of: Weights) -> bool:
    """Return whether any weight of some units has a gradient."""
    for axis in units.axes:
        gradient = gradient_of.get(axis.site)
        if gradient is not None:
            along = spanned(gradient, axis.dim, axis.span)
            if bool(along.movedim(axis.dim, 0)[axis.index].any()):
                return True
    return False


def _real(value: Tensor) -> bool:
    """Return whether a tensor holds real or complex numbers, rather than integers."""
    return value.is_floating_point() or value.is_complex()
