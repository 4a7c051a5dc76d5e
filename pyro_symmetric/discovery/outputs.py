"""The outputs of a network as functions of its weights.

They are those of a copy in float64, whose running statistics are random and whose constant parameters (zero-initialised
heads, ones in normalisation layers) are random too: with zeros a wrong group can pass with an error of exactly zero. A
network that casts to less precise numbers casts to float64 meanwhile. One that doesn't run like this keeps its own
precision. Each evaluation in eval mode draws the same random numbers; in train mode they count as their means, so that
noise that only regularises breaks no symmetry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric._process import drawn_seed, forked, with_both_branches, without_fast_attention, without_warnings
from pyro_symmetric.discovery.deterministic import NUMBERS, Deterministic
from pyro_symmetric.discovery.export import try_out
from pyro_symmetric.discovery.invariance import Change, InconclusiveError, only, parts_of
from pyro_symmetric.discovery.symmetry import Symmetry, copied, in_precision, refreshed
from pyro_symmetric.discovery.tensors_only import TensorsOnly
from pyro_symmetric.groups.element import Element
from pyro_symmetric.weights import Weights

# The largest relative change that passes in float64; in other precisions, as many times the rounding errors pass.
TOLERANCE, ROUNDINGS = 1e-6, 30.0
# Rounding errors that change outputs by more than this share of them tell nothing about a symmetry.
HOPELESS = 0.5


class DoesNotRun(Exception):
    """A copy of the network doesn't run, or gives nothing that can be compared."""


def prepared(
    symmetry: Symmetry, net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Outputs:
    """In float64 if the network runs in it, else in its own precision; at random inputs if it runs at these.

    :raises ValueError: if the network doesn't take the inputs.
    :raises InconclusiveError: if it does, but there is nothing that can be compared.
    """
    if any(parameter.is_meta for parameter in net.parameters()):
        raise InconclusiveError(f"inconclusive: {type(net).__name__} is on the meta device, which holds no numbers")
    reason: Exception | None = None
    for precision in (torch.float64, None):
        for redraw in (True, False):
            try:
                return Outputs(symmetry, net, args, kwargs, precision, redraw)
            except DoesNotRun as error:
                reason = reason or error
    try_out(copied(net).eval(), args, kwargs)
    raise InconclusiveError(f"inconclusive: {type(net).__name__} can't be compared with itself ({reason})")


class Outputs:
    """The outputs of a randomised copy of a network in both modes, as functions of its weights.

    :param args: an example of what the forward pass takes; so are ``kwargs``.
    :param dtype: the copy's precision; the network's own by default.
    :param redraw: whether real and complex inputs are replaced by random numbers.
    :raises DoesNotRun: if the copy doesn't run in eval mode, or its outputs aren't numbers.
    """

    name, unit = "the network's outputs", "of the largest output"

    def __init__(
        self,
        symmetry: Symmetry,
        net: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        dtype: torch.dtype | None,
        redraw: bool,
    ):
        self.dtype, self.logits = dtype, symmetry.logits
        self.net = copied(net, dtype)
        with torch.no_grad():
            self.weights, self.origin = _randomised(symmetry, self.net, net)
        self.call = TensorsOnly(self.net, args, kwargs)
        self.seed, self.coarsest = drawn_seed(), 0.0
        self.inputs = [_given(x, dtype, redraw) for x in self.call.tensors]
        self.before = {False: self._outputs(False), True: self._outputs(True)}
        _require_comparable(self.before[False])
        if difference(self.before[False], self.before[True]) == 0:  # training does nothing else than eval mode
            self.before[True] = None
        self.measured = dtype != torch.float64
        self.tolerance = self.rounding() if self.measured else TOLERANCE

    def change(self, element: Element) -> Change:
        """The effect of an element on the outputs in either mode.

        Scales that are exact for running variances plus epsilon aren't for those of a batch: train mode is without.
        """
        group = element.group
        inexact = {one.name for one in group.units.values() if any(a.buffer and a.exponent for a in one.axes)}
        exact = {(move, name) for move, name in parts_of(group) if move != "scale" or name not in inexact}
        error = max(self._error(element, False), self._error(only(element, exact), True))
        if not error < self.tolerance:
            self.require_repeatable()
            if not self.measured:  # in float64, too, rounding errors may be large
                self.tolerance, self.measured = self.rounding(), True
        return Change(not error < self.tolerance, error)

    def rounding(self) -> float:
        """The change that passes: a few times what the last digit of all weights changes.

        :raises InconclusiveError: if that is as large as the outputs.
        """

        def nudged(site: str, value: Tensor) -> Tensor:
            own = self.origin[site].to(value)
            digit = max(self.coarsest, torch.finfo(value.dtype).eps) if value.dtype in NUMBERS else 0.0
            return own * (1 + digit * (2 * torch.rand_like(value) - 1)) if digit else own

        found = max(self._change(nudged, train) for train in (False, True) for _ in range(3))
        if not ROUNDINGS * found < HOPELESS:
            raise InconclusiveError(
                f"inconclusive: the last digit of the weights changes outputs by {found:.1g} of the largest one, so "
                "that rounding errors hide whether an element of the group does"
            )
        return max(TOLERANCE, ROUNDINGS * found)

    def require_repeatable(self) -> None:
        """:raises InconclusiveError: if the network draws random numbers that can't be drawn again."""
        found = max(self._change(lambda site, value: self.origin[site].to(value), train) for train in (False, True))
        if found >= self.tolerance:
            raise InconclusiveError(
                "inconclusive: the network is random. Its outputs at the same weights, with all generators of "
                f"PyTorch, NumPy and Python at the same seed, differ by {found:.1g} of the largest one"
            )

    def _error(self, element: Element, train: bool) -> float:
        def moved(site: str, value: Tensor) -> Tensor:
            return element.on_site(site, self.origin[site].to(value.device, in_precision(value.dtype, torch.float64)))

        return self._change(moved, train)

    def _change(self, changed: Callable[[str, Tensor], Tensor], train: bool) -> float:
        """Largest relative change of an output if each site is changed, site by site from the untouched values."""
        if self.before[train] is None:
            return 0.0
        with torch.no_grad():  # into the copy: there is no second copy, and nothing to be put back
            for site, value in self.weights.items():
                value.copy_(changed(site, value))
        return difference(self.before[train], self._outputs(train))

    def _outputs(self, train: bool) -> list[Tensor] | None:
        """All outputs; None if the network has no such mode (a batch of one, say). Statistics stay.

        :raises DoesNotRun: if it doesn't run in eval mode.
        """
        buffers = {name: value.clone() for name, value in self.net.named_buffers()}
        devices = {value.device for value in (*self.weights.values(), *self.inputs)}
        mode = Deterministic(self.dtype, noise=not train)
        refreshed(self.net, train)
        try:
            with (
                torch.no_grad(),
                without_fast_attention(),
                with_both_branches(),
                without_warnings(),
                forked(self.seed, *devices, host=True),
                mode,
            ):
                outputs = self.call(*self.inputs)
        except Exception as error:
            if not train:
                raise DoesNotRun(f"{type(error).__name__}: {error}") from error
            if not isinstance(error, ValueError | RuntimeError):
                raise
            return None
        finally:
            with torch.no_grad():
                for name, value in self.net.named_buffers():
                    if name in buffers and value.shape == buffers[name].shape:
                        value.copy_(buffers[name])
        self.coarsest = max(self.coarsest, mode.coarsest)
        return [out.log_softmax(-1) if out.dim() else out for out in outputs] if self.logits else outputs


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
        if x.dtype not in NUMBERS:
            x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        size = torch.where(x.isfinite(), x, 0).abs().max().clamp_min(torch.finfo(x.dtype).tiny)
        worst = max(worst, float((torch.where(same, 0, x - y).abs().max() / size).nan_to_num(nan=float("inf"))))
    return worst


# small steps --------------------------------------------------------------------------------------------------------


def _randomised(symmetry: Symmetry, copy: nn.Module, net: nn.Module) -> tuple[Weights, Weights]:
    """Constant and tiny parameters, and running statistics that move, get random values; all else keeps its own.

    Returns the copy's tensors by site, and the values that they have now: those of the network where they are the same.
    """
    changed: dict[str, Tensor] = {}
    for name, value in copy.named_parameters():
        if value.dtype in NUMBERS and value.numel() and float(value.std(correction=0)) < 1e-3:
            fan_in = max(1, value.numel() // value.shape[0]) if value.dim() > 1 else 1
            changed[name] = value.add_((0.3 if value.dim() < 2 else fan_in**-0.5) * torch.randn_like(value))
    for name, buffer in copy.named_buffers():
        if name in symmetry.site_shapes and float(buffer.std(correction=0)) < 1e-3:
            positive = float(buffer.min()) > 0  # variances
            changed[name] = buffer.uniform_(0.5, 2.0) if positive else buffer.normal_(std=0.5)
    weights, origin = symmetry.weights_of(copy), symmetry.weights_of(net)
    return weights, {
        site: changed[site].detach().clone() if site in changed else value.detach() for site, value in origin.items()
    }


def _given(value: Tensor, dtype: torch.dtype | None, redraw: bool) -> Tensor:
    if value.dtype not in NUMBERS:
        return value
    own = in_precision(value.dtype, dtype)
    return torch.randn_like(value, dtype=own) if redraw else value.detach().to(own)


def _require_comparable(outputs: list[Tensor] | None) -> None:
    """:raises DoesNotRun: if there is no output, or one that isn't a number."""
    if not outputs:
        raise DoesNotRun("it returns no tensor")
    for output in outputs:
        if output.dtype in NUMBERS and output.numel() and (output.isnan().any() or not output.isfinite().any()):
            raise DoesNotRun("its outputs are no finite numbers")
