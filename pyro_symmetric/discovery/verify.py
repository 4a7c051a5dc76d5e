"""The last word on a symmetry: the outputs of a network before and after random elements of the whole group.

They are those of a copy in float64, in which what is constant is random (zero-initialised heads, ones in normalisation
layers, running statistics): with zeros a wrong group can pass with an error of exactly zero. A network that casts to
less precise numbers casts to float64 meanwhile. Each evaluation in eval mode draws the same random numbers; in train
mode they count as their means, so that noise that only regularises breaks no symmetry.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked, with_both_branches, without_fast_attention, without_warnings
from pyro_symmetric.arguments import described
from pyro_symmetric.discovery.invariance import (
    BrokenMove,
    Change,
    InconclusiveError,
    Verification,
    broken_moves,
    difference,
    only,
    parts_of,
)
from pyro_symmetric.discovery.symmetry import CONSTANT, Symmetry, copied, in_precision, near, refreshed
from pyro_symmetric.discovery.trace import Deterministic, TensorsOnly, try_out
from pyro_symmetric.groups.element import Element

# The largest relative change that passes; or as many times the rounding errors, if that is more.
TOLERANCE, ROUNDINGS = 1e-6, 30.0
# Rounding errors that change outputs by more than this share of them tell nothing about a symmetry.
HOPELESS = 0.5


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


# outputs as functions of weights --------------------------------------------------------------------------------------


class _DoesNotRun(Exception):
    """A copy of the network doesn't run, or gives nothing that can be compared."""


def _outputs_of(symmetry: Symmetry, net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> _Outputs:
    """At random inputs if the network runs at these, else at the example.

    :raises ValueError: if the network doesn't take the inputs.
    :raises InconclusiveError: if it does, but there is nothing that can be compared.
    """
    if any(parameter.is_meta for parameter in net.parameters()):
        raise InconclusiveError(f"inconclusive: {type(net).__name__} is on the meta device, which holds no numbers")
    reason: Exception | None = None
    for redraw in (True, False):
        try:
            return _Outputs(symmetry, net, args, kwargs, redraw)
        except _DoesNotRun as error:
            reason = reason or error
    try_out(copied(net).eval(), args, kwargs)
    raise InconclusiveError(f"inconclusive: {type(net).__name__} can't be compared with itself ({reason})")


class _Outputs:
    """The outputs of a randomised copy of a network in both modes, as functions of its weights.

    :param args: an example of what the forward pass takes; so are ``kwargs``.
    :param redraw: whether real and complex inputs are replaced by random numbers.
    :raises _DoesNotRun: if the copy doesn't run in eval mode, or its outputs aren't numbers.
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
        self.before: dict[bool, list[Tensor] | None] = {train: self._at(self._own, train) for train in (False, True)}
        for output in (outputs := self.before[False] or []):
            if _real(output) and output.numel() and (output.isnan().any() or not output.isfinite().any()):
                raise _DoesNotRun("its outputs are no finite numbers")
        if not outputs:
            raise _DoesNotRun("it returns no tensor")
        if difference(outputs, self.before[True]) == 0:  # training does nothing else than eval mode
            self.before[True] = None
        self.tolerance, self.measured = TOLERANCE, False

    def change(self, element: Element) -> Change:
        """The effect of an element on the outputs in either mode.

        Scales that are exact for running variances plus epsilon aren't for those of a batch: train mode is without.
        """
        group = element.group
        inexact = {one.name for one in group.units.values() if any(a.buffer and a.exponent for a in one.axes)}
        exact = {(move, name) for move, name in parts_of(group) if move != "scale" or name not in inexact}

        def error(element: Element, train: bool) -> float:
            return self._change(lambda site: element.on_site(site, self._own(site)), train)

        found = max(error(element, False), error(only(element, exact), True))
        if not found < self.tolerance:
            again = max(self._change(self._own, train) for train in (False, True))
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

        found = max(self._change(nudged, train) for train in (False, True) for _ in range(3))
        if not ROUNDINGS * found < HOPELESS:
            raise InconclusiveError(
                f"inconclusive: the last digit of the weights changes outputs by {found:.1g} of the largest one, so "
                "that rounding errors hide whether an element of the group does"
            )
        return max(TOLERANCE, ROUNDINGS * found)

    def _own(self, site: str) -> Tensor:
        value = self.origin[site]
        return value.to(self.weights[site].device, in_precision(value.dtype, torch.float64))

    def _change(self, weights: Callable[[str], Tensor], train: bool) -> float:
        """Largest relative change of an output at other weights, by site."""
        return 0.0 if self.before[train] is None else difference(self.before[train], self._at(weights, train))

    def _at(self, weights: Callable[[str], Tensor], train: bool) -> list[Tensor] | None:
        """All outputs; None if the network has no such mode (a batch of one, say). Statistics stay.

        :raises _DoesNotRun: if it doesn't run in eval mode.
        """
        with torch.no_grad():  # site by site into the copy: there is no second copy, and nothing to be put back
            for site, value in self.weights.items():
                value.copy_(weights(site))
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
                raise _DoesNotRun(f"{type(error).__name__}: {error}") from error
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
