r"""Completeness of a symmetry: in how many directions weights move without any effect, and how many of these are found.

The outputs of a network, for many inputs, don't change to first order along the null space of their Jacobian. A
continuous symmetry moves weights along it. So its dimension is compared with the rank of the tangents of the scales and
shifts that were found, at random weights near the network's own: what is counted at one set of weights may be an
accident of it (a unit that no input switches on, say).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric._process import forked, without_fast_attention, without_warnings
from pyro_symmetric.discovery.linear_twin import Pass, gradients, in_dtype
from pyro_symmetric.discovery.symmetry import Symmetry, copied, in_precision, near
from pyro_symmetric.discovery.trace import Trace
from pyro_symmetric.groups import Group
from pyro_symmetric.groups.units import Move
from pyro_symmetric.weights import Weights

POINTS, LARGEST = 5, 10_000  # sets of weights that are tried, and weights, at most: time grows with their cube
CENTRED = 0.9  # the part of their mean that rows of matrices lose at every other point
NULL, CLEAR = 1e-8, 1e3  # relative size of singular values that may count as zero, and a ratio that leaves no doubt
STEP, WRONG = 1e-4, 1e-6  # of log-scales, whose differences are tangents; what these change, if they are no symmetry
LOSSES, SIZES = 16, (1.0, 3.0, 10.0, 0.1)  # losses for one draw of the inputs, and the sizes of these in turn


@dataclass(frozen=True)
class Completeness:
    """The dimension of all continuous symmetries of a network, beside that of those that were found.

    Most networks have more than scales: linear maps between two matrices (queries and keys), rotations of a normalised
    stream, an offset that a normalisation takes back. The library doesn't act with these. Permutations and signs have
    no tangents.

    :ivar weights: the number of weights (with the running statistics that the symmetry moves).
    :ivar null: the dimension of the Jacobian's null space, at generic weights and to first order.
    :ivar found: the dimension of the scales and shifts of the symmetry.
    :ivar doubts: why the numbers may be wrong; empty if nothing speaks against them.
    """

    weights: int
    null: int
    found: int
    doubts: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if all directions are found, without a doubt."""
        return self.null == self.found and not self.doubts


@forked(0)
def completeness(
    symmetry: Symmetry, net: nn.Module, *inputs: Any, kwargs: Mapping[str, Any] | None = None
) -> Completeness:
    """Compare a symmetry with all directions in which the weights of a network move without effect.

    >>> net, x = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.randn(5, 3)
    >>> result = ps.discovery.completeness(ps.find_symmetry(net, x), net, x)
    >>> result.null, result.found  # of 50 weights, 8 numbers decide what it computes
    (42, 8)

    :param symmetry: what was found for the network, which isn't changed.
    :param inputs: an example of what its ``forward`` takes. Floating-point inputs are replaced by random numbers,
        integers by others from the smallest to the largest of the example; masks stay.
    :param kwargs: what its ``forward`` takes by name, treated alike.
    :raises ValueError: if there are more than 10,000 weights, or the network isn't the symmetry's.
    """
    if sum(shape.numel() for shape in symmetry.site_shapes.values()) > LARGEST:
        raise ValueError(f"there are more than {LARGEST} weights, whose null space takes too long to find")
    run, tried = Pass(Trace(copied(net).eval(), inputs, kwargs), symmetry.logits), list[Completeness]()
    own = {site: in_dtype(value.detach(), torch.float64) for site, value in symmetry.weights_of(net).items()}
    for point in range(POINTS):
        weights = {site: near(value, site in symmetry.buffers) for site, value in own.items()}
        if point % 2:  # units that read positive numbers switch on and off if their weights have a mean of nearly zero
            means = {s: v.mean([*range(1, v.dim())], keepdim=True) for s, v in weights.items() if v.dim() > 1}
            weights = {site: value - CENTRED * means.get(site, 0.0) for site, value in weights.items()}
        tried.append(_counted(symmetry.group, weights, _rows(run, weights)))
        best = min(tried, key=lambda one: one.null)
        if best.null == best.found or [one.null for one in tried].count(best.null) == 2:
            break
    return best


# small steps --------------------------------------------------------------------------------------------------------


def _rows(run: Pass, weights: Weights) -> Tensor:
    """Gradients of random losses, each of length one, more than there are weights."""
    size, rows = sum(value.numel() for value in weights.values()), list[Tensor]()
    leaves = {site: value.clone().requires_grad_() for site, value in weights.items()}
    needed = size + size // 4 + 64
    for draw in range(10 + needed):
        inputs = [_like(value, SIZES[draw % len(SIZES)]) for value in run.trace.tensors]
        with without_fast_attention(), without_warnings():
            outputs = run.outputs(leaves, inputs, torch.float64)
        losses = min(LOSSES, sum(out.numel() for out in outputs if out.requires_grad))
        for own in gradients(outputs, leaves, losses):
            every = [own[site] if site in own else torch.zeros_like(value) for site, value in weights.items()]
            row = torch.cat([gradient.flatten() for gradient in every]).cpu()
            rows += [row / row.norm()] if 0 < row.norm() < float("inf") else []
        if len(rows) >= needed:
            return torch.stack(rows)
    raise ValueError("no output of the network depends on these weights; there is no Jacobian to look at")


def _like(value: Tensor, size: float) -> Tensor:
    """Random inputs like one: normal ones, or integers from its smallest to its largest. Masks are what they are."""
    own = in_precision(value.dtype, torch.float64)
    if own.is_floating_point or own.is_complex:
        return size * torch.randn_like(value, dtype=own)
    if value.dtype == torch.bool or not value.numel() or set(value.unique().tolist()) <= {0, 1}:
        return value
    return torch.randint_like(value, int(value.min()), int(value.max()) + 1)


def _counted(group: Group, weights: Weights, rows: Tensor) -> Completeness:
    """The dimensions at one set of weights: tangents span no more, and the null space no less, than elsewhere."""
    columns = rows.norm(dim=0)
    scale = columns.clamp_min(1e-4 * columns.max())  # what no output feels would be noise of length one
    values = torch.linalg.svdvals(torch.linalg.qr(rows / scale, mode="r").R)
    values = values.clamp_min(torch.finfo(values.dtype).eps * values[0])  # what is smaller is rounding
    ratios = values[:-1] / values[1:]
    ratios = torch.where(values[1:] < NULL * values[0], ratios, 0.0)  # the null space begins at the largest of these
    rank = int(ratios.argmax()) + 1 if bool((ratios > 0).any()) else len(values)
    null = len(values) - rank
    doubts, tangents = list[str](), [rows[:0]]
    for what, own in _tangents(group, weights):
        if float((rows @ own.T).norm()) > WRONG * float(rows.norm()) * float(own.norm()):
            doubts.append(f"the {what} change the outputs: they are no symmetry here")
        else:
            tangents.append(own[own.norm(dim=1) > 0])
    spanned = torch.cat(tangents)
    found = int(torch.linalg.matrix_rank(spanned / spanned.norm(dim=1, keepdim=True), rtol=1e-6)) if len(spanned) else 0
    if rank < len(values) and float(ratios[rank - 1]) < CLEAR:
        doubts.append("the singular values that count are hardly larger than those that count as zero")
    if null > found and bool((columns == 0).any()):
        doubts.append("some weights have no effect for any input that was tried; wider inputs may reach them")
    return Completeness(rows.shape[1], null, found, tuple(doubts))


def _tangents(group: Group, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Units with a scale or a shift in words, and how weights move as each begins to grow: ``(units, size)``."""
    moves: dict[Move, str] = {"scale": "log_scales", "shift": "shifts"}
    for move, argument in moves.items():
        for name in group.names(move):
            one = group[name]
            each = STEP * torch.eye(one.count, dtype=torch.float64, device="cpu").reshape(one.count, *one.shape)
            up, down = (group.element(**{argument: {name: own}}).on_sites(weights) for own in (each, -each))
            moved = [(up[site] - down[site]).expand(one.count, *v.shape).flatten(1) for site, v in weights.items()]
            yield f"{move}s of {name!r}", torch.cat(moved, 1).cpu() / (2 * STEP)
