r"""Completeness of a symmetry: the dimension of all continuous symmetries, against that
of those that were found.

A continuous symmetry moves weights along the null space of the Jacobian of a network's
outputs, at many inputs. Its dimension is compared with the rank of the tangents of the
scales, shifts and rotations that were found, at several random points near the
network's weights: one may have a larger null space by accident (a unit that no input
switches on, say).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric._process import forked, without_fast_attention, without_warnings
from pyro_symmetric.arguments import Keywords, Names
from pyro_symmetric.discovery.linear_twin import Pass, gradients, in_double
from pyro_symmetric.discovery.symmetry import Symmetry, copied, in_precision, near
from pyro_symmetric.discovery.trace import Trace
from pyro_symmetric.groups import Group, Units
from pyro_symmetric.groups.moves import MOVES, Move, skew_basis
from pyro_symmetric.weights import Weights, map_values

# points at most, and weights at most: time grows with their cube
POINTS = 5
LARGEST = 10_000
CENTRED = 0.9  # the share of their mean that rows of matrices lose at every other point
# relative size of singular values that may count as zero, and a gap that leaves no
# doubt
NULL = 1e-8
CLEAR = 1e3
# step in log-scales for tangents, and the relative change of outputs along false ones
STEP = 1e-4
WRONG = 1e-6
# losses for one draw of the inputs, and the sizes of the draws in turn
LOSSES = 16
SIZES = (1.0, 3.0, 10.0, 0.1)


@dataclass(frozen=True)
class Completeness:
    """The dimension of all continuous symmetries of a network, and of those that were
    found.

    Many networks have more than scales, shifts and rotations: all invertible maps
    between two matrices (queries and keys), an offset that a normalisation removes. The
    library doesn't act with these. Permutations and signs have no tangents.

    :ivar weights: the number of weights (with the running statistics that the symmetry
        moves); complex ones are two numbers.
    :ivar null: the dimension of the Jacobian's null space, at generic weights and to
        first order.
    :ivar found: the dimension of the scales and shifts of the symmetry, and of the
        rotations of :meth:`~pyro_symmetric.Symmetry.with_rotations`.
    :ivar doubts: reasons why the numbers may be wrong.
    """

    weights: int
    null: int
    found: int
    doubts: Names = ()

    @property
    def complete(self) -> bool:
        """True if all directions are found, without a doubt."""
        return self.null == self.found and not self.doubts


@forked(0)
def completeness(
    symmetry: Symmetry,
    net: nn.Module,
    *inputs: Any,
    kwargs: Keywords | None = None,
) -> Completeness:
    """Compare a symmetry with all directions in which a network's weights move without
    effect.

    >>> net, x = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.randn(5, 3)
    >>> result = ps.discovery.completeness(ps.find_symmetry(net, x), net, x)
    >>> result.null, result.found  # 8 numbers determine the function of 50 weights
    (42, 8)

    :param symmetry: the symmetry of the network, which isn't changed; its
        ``with_rotations()`` counts rotations.
    :param inputs: an example of what its ``forward`` takes. Floating-point inputs are
        replaced by random numbers, integers by others from the smallest to the largest
        of the example; masks stay.
    :param kwargs: keyword arguments of its ``forward``, likewise.
    :raises ValueError: if there are more than 10,000 weights, or the network isn't the
        symmetry's.
    """
    if sum(shape.numel() for shape in symmetry.site_shapes.values()) > LARGEST:
        raise ValueError(
            f"there are more than {LARGEST} weights, whose null space takes too long "
            "to find"
        )
    run = Pass(Trace(copied(net).eval(), inputs, kwargs), symmetry.logits)
    trials = []
    doubles = map_values(in_double, symmetry.weights_of(net))
    for point in range(POINTS):
        weights = {
            site: near(value, site in symmetry.buffers)
            for site, value in doubles.items()
        }
        # units that read positive numbers switch on and off if their weights have a
        # mean of nearly zero
        if point % 2:
            means = {
                s: v.mean([*range(1, v.dim())], keepdim=True)
                for s, v in weights.items()
                if v.dim() > 1
            }
            weights = {
                site: value - CENTRED * means.get(site, 0.0)
                for site, value in weights.items()
            }
        trials.append(_counted(symmetry.group, weights, _rows(run, weights)))
        best = min(trials, key=lambda trial: trial.null)
        if (
            best.null == best.found
            or [trial.null for trial in trials].count(best.null) == 2
        ):
            break
    return best


# the Jacobian -------------------------------------------------------------------------


def _rows(run: Pass, weights: Weights) -> Tensor:
    """Return normalised gradients of random losses, which span the Jacobian's rows:
    more than there are weights.
    """
    size = sum(len(_numbers(value)) for value in weights.values())
    rows = []
    leaves = map_values(lambda value: value.clone().requires_grad_(), weights)
    needed = size + size // 4 + 64
    for draw in range(10 + needed):
        inputs = [_like(value, SIZES[draw % len(SIZES)]) for value in run.trace.tensors]
        with without_fast_attention(), without_warnings():
            outputs = run.outputs(leaves, inputs, torch.float64)
        entries = sum(out.numel() for out in outputs if out.requires_grad)
        for gradient in gradients(outputs, leaves, min(LOSSES, entries)):
            blocks = [
                _numbers(gradient.get(site, torch.zeros_like(value)))
                for site, value in weights.items()
            ]
            row = torch.cat(blocks).cpu()
            rows += [row / row.norm()] if 0 < row.norm() < float("inf") else []
        if len(rows) >= needed:
            return torch.stack(rows)
    raise ValueError(
        "no output of the network depends on these weights; there is no Jacobian to "
        "look at"
    )


def _numbers(value: Tensor, batch_dims: int = 0) -> Tensor:
    """Return the real numbers of a tensor, two for a complex one, along one axis after
    its batch dimensions.
    """
    numbers = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return numbers.reshape(*value.shape[:batch_dims], -1)


def _like(value: Tensor, size: float) -> Tensor:
    """Draw normal numbers like a tensor, or integers from its smallest to its largest;
    return masks unchanged.
    """
    own_dtype = in_precision(value.dtype, torch.float64)
    if own_dtype.is_floating_point or own_dtype.is_complex:
        return size * torch.randn_like(value, dtype=own_dtype)
    if (
        value.dtype == torch.bool
        or not value.numel()
        or set(value.unique().tolist()) <= {0, 1}
    ):
        return value
    return torch.randint_like(value, int(value.min()), int(value.max()) + 1)


def _counted(group: Group, weights: Weights, rows: Tensor) -> Completeness:
    """Return the dimensions at one point, where the null space may be too large, and
    the span of tangents too small.
    """
    columns = rows.norm(dim=0)
    # without an effect, columns would be noise of length one
    scale = columns.clamp_min(1e-4 * columns.max())
    values = torch.linalg.svdvals(torch.linalg.qr(rows / scale, mode="r").R)
    # smaller ones are rounding
    values = values.clamp_min(torch.finfo(values.dtype).eps * values[0])
    ratios = values[:-1] / values[1:]
    # the largest gap delimits the null space
    ratios = torch.where(values[1:] < NULL * values[0], ratios, 0.0)
    rank = int(ratios.argmax()) + 1 if (ratios > 0).any() else len(values)
    null = len(values) - rank
    doubts = []
    tangents = [rows[:0]]
    for what, directions in _tangents(group, weights):
        if float((rows @ directions.T).norm()) > WRONG * float(rows.norm()) * float(
            directions.norm()
        ):
            doubts.append(f"the {what} change the outputs: they are no symmetry here")
        else:
            tangents.append(directions[directions.norm(dim=1) > 0])
    spanned = torch.cat(tangents)
    counted = (
        int(
            torch.linalg.matrix_rank(
                spanned / spanned.norm(dim=1, keepdim=True), rtol=1e-6
            )
        )
        if len(spanned)
        else 0
    )
    if rank < len(values) and float(ratios[rank - 1]) < CLEAR:
        doubts.append(
            "the singular values that count are hardly larger than those that count as "
            "zero"
        )
    if null > counted and (columns == 0).any():
        doubts.append(
            "some weights have no effect for any input that was tried; wider inputs "
            "may reach them"
        )
    return Completeness(rows.shape[1], null, counted, tuple(doubts))


def _tangents(group: Group, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Iterate over scales, shifts and rotations, in words, with the tangents of their
    units, ``(units, size)``.
    """
    moves: tuple[Move, ...] = ("scale", "shift", "rotate")
    for move in moves:
        for name in group.names(move):
            steps = _steps(group[name], move)
            up, down = (
                group.element(**{MOVES[move].argument: {name: step}}).on_sites(weights)
                for step in steps
            )
            moved = [
                _numbers((up[site] - down[site]).expand(len(steps[0]), *v.shape), 1)
                for site, v in weights.items()
            ]
            yield f"{move}s of {name!r}", torch.cat(moved, 1).cpu() / (2 * STEP)


def _steps(units: Units, move: Move) -> tuple[Tensor, Tensor]:
    """Return the numbers of small moves, of each unit or plane of units, and of their
    inverses.
    """
    if move != "rotate":
        still = torch.eye(units.count, dtype=torch.float64, device="cpu")
        step = STEP * still.reshape(-1, *units.shape)
        return step, -step
    copies = torch.eye(units.copies, dtype=torch.float64, device="cpu")
    step = STEP * torch.einsum("cd,pij->cpdij", copies, skew_basis(units.size))
    turn = torch.linalg.matrix_exp(step).reshape(-1, *units.shape, units.size)
    return turn, turn.mT
