"""The last word on a symmetry: a function of the weights before and after random elements of the whole group.

The function may be the outputs of a network (:func:`verify`) or a log-density
(:mod:`~pyro_symmetric.discovery.model_check`). Each says by itself what an element changes, and whether that is more
than rounding; the elements that are tried, and the search for the moves that break the invariance, are the same.

Outputs are those of a copy in float64, in which what is constant is random (zero-initialised heads, ones in
normalisation layers, running statistics): with zeros a wrong group can pass with an error of exactly zero. A network
that casts to less precise numbers casts to float64 meanwhile. Each evaluation in eval mode draws the same random
numbers; in train mode they count as their means, so that noise that only regularises breaks no symmetry.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked, with_both_branches, without_fast_attention, without_warnings
from pyro_symmetric.arguments import described
from pyro_symmetric.discovery.symmetry import CONSTANT, Symmetry, copied, in_precision, near, refreshed
from pyro_symmetric.discovery.trace import Deterministic, TensorsOnly, try_out
from pyro_symmetric.errors import Error
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import MOVES, Element, Move

# The largest relative change that passes; or as many times the rounding errors, if that is more.
TOLERANCE, ROUNDINGS = 1e-6, 30.0
# Rounding errors that change outputs by more than this share of them tell nothing about a symmetry.
HOPELESS = 0.5
BITS = 20  # a wrong move passes less than once in two to the power of so many times

Part = tuple[Move, str]  # one move of some units
T = TypeVar("T")


class BrokenSymmetry(UserWarning):
    """A move of some units that discovery had proposed failed verification, and was left out."""


class UnverifiedSymmetry(UserWarning):
    """Something about the symmetry couldn't be checked; the message says what (a network that is random, say)."""


def verify(
    symmetry: Symmetry,
    net: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    trials: int | None = None,
) -> Verification:
    """Compare outputs before and after random elements of the whole group.

    >>> net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 3)
    >>> symmetry = ps.find_symmetry(net, x)
    >>> bool(ps.verify(symmetry, net, x))
    True
    >>> other = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 2))
    >>> bool(ps.verify(symmetry, other, x))  # softplus(c z) isn't c softplus(z)
    False

    Outputs are compared in float64. A change of 1e-6 of the largest output passes, or a larger one if rounding errors,
    which are measured, are as large. Both sides draw the same random numbers, from the generators of PyTorch, NumPy and
    Python. Masks of dropout, and the noise of train mode, count as their means.

    :param symmetry: what was found for the network, or for one like it.
    :param net: the network; it isn't changed.
    :param inputs: an example of what its ``forward`` takes. Floating-point inputs are replaced by random numbers if it
        takes these.
    :param kwargs: keyword arguments of its ``forward``.
    :param trials: how many random elements are tried; by default so many that a wrong move passes less than once in a
        million times.
    :raises ValueError: if the network doesn't take the inputs.
    :raises InconclusiveError: if nothing can be told: the network doesn't run in float64, draws random numbers that
        can't be drawn again, has rounding errors as large as its outputs, or is on the meta device.
    """
    arguments.instance("symmetry", symmetry, Symmetry, "a Symmetry, such as find_symmetry(net, x)")
    arguments.instance("net", net, nn.Module, "a torch.nn.Module")
    arguments.whole("trials", trials, 1, none="as many as it takes")
    for number, value in enumerate(inputs):
        if isinstance(value, Tensor) and not value.numel():
            raise ValueError(f"inputs[{number}] is {described(value)}, which is empty; there is nothing to compare")
    outputs = _outputs_of(symmetry, net, inputs, kwargs)
    broken, error = broken_moves(symmetry.group, outputs.change, trials)
    return Verification("the network's outputs", broken, error, outputs.tolerance, "of the largest output")


def repaired(
    symmetry: Symmetry, net: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Symmetry:
    """The symmetry without the moves that fail, of which a warning names them.

    Another warning says if nothing can be told.
    """
    dropped: list[BrokenMove] = []
    try:
        outputs = _outputs_of(symmetry, net, inputs, kwargs)
        while broken := broken_moves(symmetry.group, outputs.change)[0]:
            dropped += broken
            for one in broken:
                symmetry = symmetry.without([one.name], one.move)
    except InconclusiveError as error:
        warnings.warn(
            f"{error}. The group is what the rules prove; no element of it was tried.", UnverifiedSymmetry, stacklevel=3
        )
    if dropped:
        names = ", ".join(f"{one.name} ({one.move})" for one in dropped)
        sizes = ", ".join(f"{one.change:.3g}" for one in dropped)
        warnings.warn(
            f"verification failed for the units {names}: these moves are left out of the group. A rule is wrong: one "
            "that you registered, or one of pyro_symmetric; then please report the network. (They change outputs by "
            f"{sizes} of the largest; {outputs.tolerance:.1g} would pass as rounding.)",
            BrokenSymmetry,
            stacklevel=3,
        )
    return symmetry


# what is found --------------------------------------------------------------------------------------------------------


class InconclusiveError(Error, ValueError):
    """Nothing can be told about an invariance: the function isn't one of the weights alone, or can't be evaluated."""


class Change(NamedTuple):
    """The effect of an element on a function.

    :param broken: whether the change is larger than rounding explains.
    :param size: the change; infinite outside of a support.
    :param sites: of a density, the sites whose own density changes.
    """

    broken: bool
    size: float
    sites: tuple[str, ...] = ()


class BrokenMove(NamedTuple):
    """A move of some units that changes the function.

    :param move: ``"permute"``, ``"flip"``, ``"scale"`` or ``"shift"``.
    :param name: the name of the units.
    :param change: the largest change, infinite outside of a support.
    :param sites: the sites whose own density, given the others, changed. Empty for outputs, and if discrete sites were
        summed out.
    :param remedy: the axis with which, or without which, a declaration holds, in words; empty if there is none.
    """

    move: Move
    name: str
    change: float
    sites: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Verification:
    """The result of a check that a function is invariant under a group; true if it is.

    :param function: the function in words.
    :param broken: the moves that change it.
    :param error: the largest change that was seen: of an output, relative to the largest output; of a log-density, in
        nats.
    :param tolerance: the relative change that passes as rounding: of an output, or of each site's log-density.
    :param unit: what the changes are measured in, in words.
    """

    function: str
    broken: tuple[BrokenMove, ...]
    error: float
    tolerance: float
    unit: str

    def __bool__(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        if self:
            return (
                f"{self.function}: invariant under the group; the largest change seen is {self.error:.1e} {self.unit}"
            )
        lines = [f"{self.function}: not invariant under the units {[found.name for found in self.broken]}"]
        for one in self.broken:
            changed = f"; what changes is the density of {', '.join(map(repr, one.sites))}" if one.sites else ""
            remedy = f". It would hold {one.remedy}" if one.remedy else ""
            size = f"a change of {one.change:.3g} {self.unit} when they {one.move}"
            lines.append(f"units {one.name!r}: {size}{changed}{remedy}")
        return "\n".join([*lines, f"a relative change of up to {self.tolerance:.1g} would pass as rounding"])


# moves that break it --------------------------------------------------------------------------------------------------


def broken_moves(
    group: Group, change: Callable[[Element], Change], trials: int | None = None
) -> tuple[tuple[BrokenMove, ...], float]:
    """Try random elements, and if one changes the function, single moves until those that do are known.

    :param change: the effect of an element.
    :param trials: how many elements; by default so many that a wrong move passes less than once in a million times.
    :return: the moves that change it, and the largest change that all of them together made.
    """

    broke: list[Element] = []  # the first that did; others may break a clamp, say, more rarely

    def worst(parts: Sequence[Part], trials: int | None = None) -> Change:
        """The effect of the first element that changes the function, or the largest effect of all."""
        found = Change(False, 0.0)
        for element in chain([only(one, parts) for one in broke], elements_to_try(group, parts, trials)):
            found = max(found, change(element), key=lambda one: (one.broken, one.size))
            if found.broken:
                broke[:] = broke or [element]
                break
        return found

    parts = parts_of(group)
    whole = worst(parts, trials)
    wrong = guilty(parts, lambda own: worst(own).broken) if whole.broken else []
    alone = [worst([part]) for part in wrong]
    broken = (BrokenMove(*part, one.size, one.sites) for part, one in zip(wrong, alone, strict=True))
    return tuple(broken), whole.size


def guilty(parts: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """The parts that fail by themselves, of those that fail together; if no half of them does, all."""
    if len(parts) <= 1:
        return list(parts)
    half = len(parts) // 2
    found = [part for side in (parts[:half], parts[half:]) if fails(side) for part in guilty(side, fails)]
    return found or list(parts)


# elements that are tried ----------------------------------------------------------------------------------------------


def parts_of(group: Group) -> list[Part]:
    """Every move of every set of units that elements hold."""
    return [(move, name) for move in MOVES for name in group.names(move)]


def elements_to_try(group: Group, parts: Collection[Part], trials: int | None = None) -> Iterator[Element]:
    """Random elements that make all of these moves at once: if none changes a function, no move does.

    Permutations of the first are cycles of all units of a copy, so that it leaves no unit where it is. The others are
    uniform. Elements that change nothing are a subgroup, so that each finds a wrong move in half of all cases or more:
    of n units that are exchanged, in all but two of (n over n / 2). (That of even permutations is left aside: no
    network minds whether a permutation is even.) Random scales and shifts meet no subgroup at all. Of a few flips of
    single units, each element has one, which finds a wrong one for certain.

    :param trials: how many; by default so many that a wrong move passes less than once in a million times.
    """
    single = [name for move, name in parts if move == "flip" and group[name].count == 1]
    several = [part for part in parts if part[0] in ("permute", "flip") and group[part[1]].count > 1]
    bits = [_bits(group, *part) for part in several]
    enough = max(math.ceil(BITS / min(bits, default=BITS)), min(BITS, len(single)))
    for i in range(enough if trials is None else trials):
        element = group.sample(dtype=torch.float64)
        permutations, signs = element.permutations, element.signs
        if i == 0:
            permutations = {n: torch.empty_like(p).scatter_(-1, p, p.roll(1, -1)) for n, p in permutations.items()}
        for j, name in enumerate(single if i < len(single) < BITS else ()):
            signs[name] = torch.full_like(signs[name], -1.0 if i == j else 1.0)
        yield only(Element(group, permutations, signs, element.log_scales, element.shifts), parts)


def _bits(group: Group, move: Move, name: str) -> float:
    """A wrong move passes one random element with probability at most ``2 ** -bits``.

    Flips of units that are exchanged are wrong together.
    """
    around = (name, *group.ancestors(name)) if move == "flip" else (name,)
    alike = math.prod(group[own].size for own in around if "permute" in group[own].moves)
    return max(1.0, (alike - 1) / 2)


def only(element: Element, parts: Collection[Part]) -> Element:
    """The same element without all moves but these."""
    permutations, signs, log_scales, shifts = (
        {name: value for name, value in numbers.items() if (move, name) in parts}
        for move, numbers in zip(MOVES, element.parts, strict=True)
    )
    return Element(element.group, permutations, signs, log_scales, shifts, element.batch_shape, dtype=torch.float64)


def difference(before: list[Tensor] | None, after: list[Tensor] | None) -> float:
    """The largest change of an entry, relative to the largest finite entry of the same output."""
    if before is None or after is None:
        return 0.0 if before is after else float("inf")
    if [x.shape for x in before] != [y.shape for y in after]:
        return float("inf")
    worst = 0.0
    for x, y in zip(before, after, strict=True):
        if not x.numel():
            continue
        if not (x.is_floating_point() or x.is_complex()):
            x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        size = torch.where(x.isfinite(), x, 0).abs().max().clamp_min(torch.finfo(x.dtype).tiny)
        worst = max(worst, float((torch.where(same, 0, x - y).abs().max() / size).nan_to_num(nan=float("inf"))))
    return worst


# outputs as functions of weights --------------------------------------------------------------------------------------


def _outputs_of(symmetry: Symmetry, net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> _Outputs:
    """At random inputs if the network runs at these, else at the example.

    :raises ValueError: if the network doesn't take the inputs.
    :raises InconclusiveError: if it does, but there is nothing that can be compared.
    """
    if any(parameter.is_meta for parameter in net.parameters()):
        raise InconclusiveError(f"inconclusive: {type(net).__name__} is on the meta device, which holds no numbers")
    try:
        return _Outputs(symmetry, net, args, kwargs, True)
    except InconclusiveError as error:
        with suppress(InconclusiveError):
            return _Outputs(symmetry, net, args, kwargs, False)
        try_out(copied(net).eval(), args, kwargs)
        raise error


class _Outputs:
    """The outputs of a randomised copy of a network in both modes, as functions of its weights.

    :param args: an example of what the forward pass takes; so are ``kwargs``.
    :param redraw: whether real and complex inputs are replaced by random numbers.
    :raises InconclusiveError: if the copy doesn't run in eval mode, or its outputs aren't numbers.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        net: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        redraw: bool,
    ):
        self.logits, self.seed = symmetry.logits, drawn_seed()
        self.net = copied(net, torch.float64)
        # The copy's tensors by site; and the network's own values, or random ones for what is constant.
        self.weights = symmetry.weights_of(self.net)
        self.origin = {site: value.detach() for site, value in symmetry.weights_of(net).items()}
        for site, value in self.origin.items():
            if _real(value) and value.numel() and float(value.std(correction=0)) < CONSTANT:
                self.origin[site] = near(value, site in symmetry.buffers)
        self.call = TensorsOnly(self.net, args, kwargs)
        self.inputs = [x.detach().to(in_precision(x.dtype, torch.float64)) for x in self.call.tensors]
        self.inputs = [torch.randn_like(x) if redraw and _real(x) else x for x in self.inputs]
        self._load(self._own)
        self.before: dict[bool, list[Tensor] | None] = {train: self._run(train) for train in (False, True)}
        for output in (outputs := self.before[False] or []):
            if _real(output) and output.numel() and (output.isnan().any() or not output.isfinite().any()):
                raise InconclusiveError(f"inconclusive: the outputs of {type(net).__name__} are no finite numbers")
        if not outputs:
            raise InconclusiveError(f"inconclusive: {type(net).__name__} returns no tensor")
        if difference(outputs, self.before[True]) == 0:  # training does nothing else than eval mode
            self.before[True] = None
        self.tolerance, self.measured = TOLERANCE, False

    def change(self, element: Element) -> Change:
        """The effect of an element on the outputs in either mode.

        Scales that are exact for running variances plus epsilon aren't for those of a batch: train mode is without.
        """
        group = element.group
        inexact = {one.name for one in group.units.values() if any(a.buffer and a.exponent for a in one.axes)}
        inexact &= set(group.names("scale"))
        exact = [part for part in parts_of(group) if part[0] != "scale" or part[1] not in inexact]
        first = only(element, exact) if inexact else element
        self._load(lambda site: first.on_site(site, self._own(site)))
        found = self._difference(True)
        if inexact:
            late = group.scalings.without(set(group.scalings.units) - inexact)
            logs = {name: element.log_scales[name].reshape(late[name].shape) for name in inexact}
            then = Element(late, log_scales=logs, dtype=torch.float64)
            for site in {axis.site for one in late.units.values() for axis in one.axes}:
                with torch.no_grad():
                    self.weights[site].copy_(then.on_site(site, self.weights[site]))
        found = max(found, self._difference(False))
        if not found < self.tolerance:
            again = self._changes(self._own)
            if again >= self.tolerance:
                raise InconclusiveError(
                    "inconclusive: the network is random. Its outputs at the same weights, with all generators of "
                    f"PyTorch, NumPy and Python at the same seed, differ by {again:.1g} of the largest one"
                )
            if not self.measured:
                self.tolerance, self.measured = self.rounding(), True
        return Change(not found < self.tolerance, found)

    def rounding(self) -> float:
        """The change that passes: a few times what the last digit of all weights changes.

        :raises InconclusiveError: if that is as large as the outputs.
        """

        def nudged(site: str) -> Tensor:
            own = self._own(site)
            return own * (1 + torch.finfo(own.dtype).eps * (2 * torch.rand_like(own) - 1)) if _real(own) else own

        found = max(self._changes(nudged) for _ in range(3))
        if not ROUNDINGS * found < HOPELESS:
            raise InconclusiveError(
                f"inconclusive: the last digit of the weights changes outputs by {found:.1g} of the largest one, so "
                "that rounding errors hide whether an element of the group does"
            )
        return max(TOLERANCE, ROUNDINGS * found)

    def _own(self, site: str) -> Tensor:
        value = self.origin[site]
        return value.to(self.weights[site].device, in_precision(value.dtype, torch.float64))

    def _changes(self, weights: Callable[[str], Tensor]) -> float:
        """Largest relative change of an output in either mode at other weights, by site."""
        self._load(weights)
        return max(self._difference(train) for train in (False, True))

    def _difference(self, train: bool) -> float:
        return 0.0 if self.before[train] is None else difference(self.before[train], self._run(train))

    def _load(self, weights: Callable[[str], Tensor]) -> None:
        """Put weights site by site into the copy: there is no second copy, and nothing to be put back."""
        with torch.no_grad():
            for site, value in self.weights.items():
                value.copy_(weights(site))

    def _run(self, train: bool) -> list[Tensor] | None:
        """All outputs; None if the network has no such mode (a batch of one, say). Statistics stay.

        :raises InconclusiveError: if it doesn't run in eval mode.
        """
        buffers = {name: value.clone() for name, value in self.net.named_buffers()}
        devices = {value.device for value in (*self.weights.values(), *self.inputs)}
        refreshed(self.net, train)
        try:
            with (
                torch.no_grad(),
                without_fast_attention(),
                with_both_branches(),
                without_warnings(),
                forked(self.seed, *devices, host=True),
                Deterministic(torch.float64, noise=not train),
            ):
                outputs = self.call(*self.inputs)
        except Exception as error:
            if not train:
                raise InconclusiveError(f"inconclusive: {type(self.net).__name__} doesn't run ({error!r})") from error
            if not isinstance(error, ValueError | RuntimeError):
                raise
            return None
        finally:
            with torch.no_grad():
                for name, value in self.net.named_buffers():
                    if name in buffers and value.shape == buffers[name].shape:
                        value.copy_(buffers[name])
        return [out.log_softmax(-1) if out.dim() else out for out in outputs] if self.logits else outputs


def _real(value: Tensor) -> bool:
    """True for real and complex numbers, rather than integers."""
    return value.is_floating_point() or value.is_complex()
