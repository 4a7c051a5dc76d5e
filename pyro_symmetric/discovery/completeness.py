r"""Completeness of a symmetry: in how many directions weights move without any effect, and how many of these are found.

The outputs of a network, for many inputs, don't change to first order along the null space of their Jacobian. A
continuous symmetry moves weights along it. So its dimension is compared with the rank of the tangents of the scales and
shifts that were found, at random weights near the network's own: what is counted at one set of weights may be an
accident of it (a unit that no input switches on, say).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pyro_symmetric import arguments
from pyro_symmetric._process import without_fast_attention, without_warnings
from pyro_symmetric.discovery.symmetry import Symmetry, copied, in_precision, refreshed
from pyro_symmetric.discovery.tensors_only import TensorsOnly
from pyro_symmetric.groups import Group
from pyro_symmetric.groups.units import Move
from pyro_symmetric.weights import Weights

POINTS, LARGEST = 5, 10_000  # sets of weights that are tried, and weights, at most: time grows with their cube
NULL, CLEAR = 1e-8, 1e3  # relative size of singular values that may count as zero, and a ratio that leaves no doubt
STEP, WRONG = 1e-4, 1e-6  # of log-scales, whose differences are tangents; what these change, if they are no symmetry
PICKED, SIZES = 16, (1.0, 3.0, 10.0, 0.1)  # outputs for one draw of the inputs, and the sizes of these in turn
SPREAD = 0.3  # of weights around the network's own, relative to their standard deviation
CENTRED = 0.9  # the part of their mean that rows of matrices lose at every other point: units switch on and off then


@dataclass(frozen=True)
class Completeness:
    """The dimension of all continuous symmetries of a network, beside that of those that were found.

    Most networks have more than scales: linear maps between two matrices (queries and keys), rotations of a normalised
    stream, an offset that a normalisation takes back. The library doesn't act with these. Permutations and signs have
    no tangents.

    :ivar weights: the number of weights (with the running statistics that the symmetry moves).
    :ivar null: the dimension of the Jacobian's null space, at generic weights and to first order.
    :ivar found: the dimension of the scales and shifts of the symmetry.
    :ivar gap: the smallest singular value that counts, over the largest that counts as zero.
    :ivar doubts: why the numbers may be wrong; empty if nothing speaks against them.
    """

    weights: int
    null: int
    found: int
    gap: float
    doubts: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if all directions are found, without a doubt."""
        return self.null == self.found and not self.doubts


def completeness(
    symmetry: Symmetry,
    net: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    sites: Iterable[str] | None = None,
    seed: int = 0,
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
    :param sites: the sites that count as weights, such as one layer's; all that the symmetry knows by default. What
        moves others, too, is left out on both sides.
    :param seed: of the random inputs and weights.
    :raises ValueError: if there are more than 10,000 weights, or the network isn't the symmetry's.
    """
    known = symmetry.site_shapes
    chosen = dict.fromkeys(known if sites is None else arguments.listed("sites", sites, str, "names of sites"))
    if unknown := [site for site in chosen if site not in known]:
        raise ValueError(f"sites holds {unknown}, which the symmetry doesn't know; it knows {list(known)}")
    shapes = {site: known[site] for site in chosen}
    if sum(shape.numel() for shape in shapes.values()) > LARGEST:
        raise ValueError(f"there are more than {LARGEST} weights; look at one layer's at a time, by sites=[...]")
    call = TensorsOnly(copied(net, torch.float64), inputs, kwargs or {})
    generator, tried = torch.Generator("cpu").manual_seed(seed), list[Completeness]()
    for point in range(POINTS):
        weights = _near(symmetry, call.net, shapes, point % 2 == 1, generator)
        tried.append(
            _counted(symmetry.group, weights, shapes, *_rows(call, weights, shapes, symmetry.logits, generator))
        )
        best = min(tried, key=lambda one: one.null)
        if best.null == best.found or [one.null for one in tried].count(best.null) == 2:
            break
    return best


# small steps --------------------------------------------------------------------------------------------------------


def _near(
    symmetry: Symmetry, net: nn.Module, shapes: Mapping[str, torch.Size], centred: bool, generator: torch.Generator
) -> Weights:
    """Random weights around the network's own: values of all sites, of which some count."""
    weights = {site: value.detach() for site, value in symmetry.weights_of(net).items()}
    for site in shapes:
        value = weights[site]
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype, device="cpu").to(value.device)
        if site in symmetry.buffers and bool((value >= 0).all()):  # a variance
            weights[site] = (value + 0.1) * (SPREAD * noise).exp()
            continue
        spread, least = SPREAD * float(value.std(correction=0)), SPREAD if value.dim() < 2 else max(value.shape) ** -0.5
        near = value + (spread if spread > 0.03 * least else least) * noise  # zeros and ones need more
        mean = near.mean([*range(1, near.dim())], keepdim=True) if centred and near.dim() > 1 else 0.0
        weights[site] = near - CENTRED * mean
    return weights


def _rows(
    call: TensorsOnly, weights: Weights, shapes: Mapping[str, torch.Size], logits: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows of the Jacobian, each of length one, more than there are weights; and some further ones."""
    size = sum(shape.numel() for shape in shapes.values())
    rows, needed = list[Tensor](), size + size // 4 + 128
    leaves = {f"net.{site}": value.clone().requires_grad_(site in shapes) for site, value in weights.items()}
    own = [leaves[f"net.{site}"] for site in shapes]
    for draw in range(10 + needed):
        inputs = tuple(_like(value, SIZES[draw % len(SIZES)], generator) for value in call.tensors)
        refreshed(call.net, train=False)
        with without_fast_attention(), without_warnings(), _Differentiable():
            outputs = [out for out in functional_call(call, leaves, inputs) if out.requires_grad]
        outputs = [out.log_softmax(-1) if logits and out.dim() else out for out in outputs]
        numbers = [(torch.view_as_real(out) if out.is_complex() else out).flatten() for out in outputs]
        flat = torch.cat(numbers) if numbers else torch.empty(0, device="cpu")
        for index in torch.randperm(len(flat), generator=generator, device="cpu")[:PICKED].tolist():
            grads = torch.autograd.grad(flat[index], own, retain_graph=True, allow_unused=True, materialize_grads=True)
            row = torch.cat([grad.flatten() for grad in grads]).cpu()
            rows += [row / row.norm()] if 0 < row.norm() < float("inf") else []
        if len(rows) >= needed:
            return torch.stack(rows[64:]), torch.stack(rows[:64])
    raise ValueError("no output of the network depends on these weights; there is no Jacobian to look at")


def _like(value: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Random inputs like one: normal ones, or integers from its smallest to its largest. Masks are what they are."""
    own = in_precision(value.dtype, torch.float64)
    if own.is_floating_point or own.is_complex:
        return size * torch.randn(value.shape, generator=generator, dtype=own, device="cpu").to(value.device)
    if value.dtype == torch.bool or not value.numel() or set(value.unique().tolist()) <= {0, 1}:
        return value
    ends = int(value.min()), int(value.max()) + 1
    return torch.randint(*ends, value.shape, generator=generator, dtype=value.dtype, device="cpu").to(value.device)


class _Differentiable(TorchFunctionMode):
    """Batch normalisation by running statistics as a formula, whose derivatives in these PyTorch's own lacks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm or args[1] is None:
            return func(*args, **kwargs)
        x, mean, variance = args
        shape = (-1, *(1 for _ in x.shape[2:]))
        result = (x - mean.reshape(shape)) / (variance + kwargs["eps"]).sqrt().reshape(shape)
        weight, bias = kwargs["weight"], kwargs["bias"]
        result = result if weight is None else result * weight.reshape(shape)
        return result if bias is None else result + bias.reshape(shape)


def _counted(
    group: Group, weights: Weights, shapes: Mapping[str, torch.Size], rows: Tensor, fresh: Tensor
) -> Completeness:
    """The dimensions at one set of weights: tangents span no more, and the null space no less, than elsewhere."""
    columns = rows.norm(dim=0)
    scale = columns.clamp_min(1e-4 * columns.max())  # what no output feels would be noise of length one
    values, vectors = torch.linalg.svd(torch.linalg.qr(rows / scale, mode="r").R)[1:]
    ratios = values[:-1] / values[1:].clamp_min(torch.finfo(values.dtype).tiny)
    ratios = torch.where(values[1:] < NULL * values[0], ratios, 0.0)  # the null space begins at the largest of these
    rank = int(ratios.argmax()) + 1 if bool((ratios > 0).any()) else len(values)
    null, gap = torch.linalg.qr(vectors[rank:].T / scale[:, None]).Q, float([*ratios, torch.inf][rank - 1])
    doubts, tangents = list[str](), [rows[:0]]
    for what, own in _tangents(group, shapes, weights):
        if float((rows @ own.T).norm()) > WRONG * float(rows.norm()) * float(own.norm()):
            doubts.append(f"the {what} change the outputs: they are no symmetry here")
        else:
            tangents.append(own[own.norm(dim=1) > 0])
    spanned = torch.cat(tangents)
    found = int(torch.linalg.matrix_rank(spanned / spanned.norm(dim=1, keepdim=True), rtol=1e-6)) if len(spanned) else 0
    if bool(((fresh @ null).abs() > 1e-7).any()):
        doubts.append("further rows of the Jacobian change its null space")
    if gap < CLEAR:
        doubts.append(f"the singular values that count are only {gap:.0f} times as large as those that count as zero")
    if null.shape[1] > found and bool((columns == 0).any()):
        doubts.append("some weights have no effect for any input that was tried; wider inputs may reach them")
    return Completeness(rows.shape[1], null.shape[1], found, gap, tuple(doubts))


def _tangents(group: Group, shapes: Mapping[str, torch.Size], weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Units with a scale or a shift in words, and how weights move as each begins to grow: ``(units, size)``."""
    moves: dict[Move, str] = {"scale": "log_scales", "shift": "shifts"}
    for move, argument in moves.items():
        for name in group.names(move):
            one = group[name]
            if any(axis.site not in shapes for axis in one.axes if axis.exponent or move == "shift"):
                continue
            each = STEP * torch.eye(one.count, dtype=torch.float64, device="cpu").reshape(one.count, *one.shape)
            up, down = (group.element(**{argument: {name: own}}).on_sites(weights) for own in (each, -each))
            moved = [((up[s] - down[s]) / (2 * STEP)).expand(one.count, *n).flatten(1) for s, n in shapes.items()]
            yield f"{move}s of {name!r}", torch.cat(moved, 1).cpu()
