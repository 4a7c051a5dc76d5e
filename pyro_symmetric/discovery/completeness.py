r"""Completeness of a symmetry: in how many directions weights move without any effect, and how many of these are found.

The outputs of a network, for many inputs, don't change to first order along the null space of their Jacobian
:math:`J = \partial f / \partial \theta`. A continuous symmetry moves weights along it. So its dimension is compared
with the rank of the tangents of the scales and shifts that were found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.discovery.jacobian import Jacobian
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups import Group
from pyro_symmetric.groups.tensors import along_axis
from pyro_symmetric.groups.units import Move
from pyro_symmetric.weights import Weights

POINTS, ALIKE = 8, 3  # sets of weights that are tried at most; so many with the least dimension are enough
FRESH = 64  # rows of the Jacobian that the null space is checked with
NULL = 1e-8  # singular values below it, relative to the largest, may count as zero
CLEAR = 1e3  # a ratio of neighbouring singular values that leaves no doubt
WRONG = 1e-6  # relative change of the outputs, to first order, with which a symmetry is none
MOST = 20  # rows of the Jacobian for each weight; what hasn't settled then is in doubt


@dataclass(frozen=True)
class Completeness:
    """The dimension of all continuous symmetries of a network, beside that of those that were found.

    Dimensions are those at generic weights near the network's own, for the inputs that were tried, to first order. They
    say nothing about permutations and signs, which have no tangents. Most networks have more than scales: linear maps
    between two matrices (queries and keys), rotations of a normalised stream, an offset that a normalisation takes
    back. The library doesn't act with these.

    :ivar weights: the number of weights (with the running statistics that the symmetry moves).
    :ivar null: the dimension of the Jacobian's null space.
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

    def __repr__(self) -> str:
        head = (
            f"{self.null} of {self.weights} directions leave the function alone: {self.found} are scales and shifts "
            f"that were found, {self.null - self.found} are others (gap {self.gap:.0e})"
        )
        return "\n".join([head, *(f"  doubt: {text}" for text in self.doubts)])


def completeness(
    symmetry: Symmetry,
    net: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    sites: Iterable[str] | None = None,
    largest: int = 10_000,
    seed: int = 0,
) -> Completeness:
    """Compare a symmetry with all directions in which the weights of a network move without effect.

    >>> net, x = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.randn(5, 3)
    >>> result = ps.discovery.completeness(ps.find_symmetry(net, x), net, x)
    >>> result.null, result.found  # of 50 weights, 8 numbers decide what it computes
    (42, 8)

    :param symmetry: what was found for the network.
    :param net: the network, in eval mode and in float64 for this; it isn't changed.
    :param inputs: an example of what its ``forward`` takes. Floating-point inputs are replaced by random numbers,
        integers by others from the smallest to the largest of the example; masks stay.
    :param kwargs: what its ``forward`` takes by name, treated alike.
    :param sites: the sites that count as weights, such as one layer's; all that the symmetry knows by default. What
        moves others, too, is left out on both sides.
    :param largest: the largest number of weights that is accepted: time grows with its cube, memory with its square.
    :param seed: of the random inputs and weights.
    :raises ValueError: if there are more weights than ``largest``, or the network isn't the symmetry's.
    """
    arguments.instance("symmetry", symmetry, Symmetry, "a Symmetry, such as find_symmetry(net, x)")
    arguments.instance("net", net, nn.Module, "a torch.nn.Module")
    arguments.instance("kwargs", {} if kwargs is None else kwargs, Mapping, "a dict of arguments by name")
    arguments.whole("largest", largest, 1)
    arguments.whole("seed", seed, 0)
    chosen = list(symmetry.site_shapes) if sites is None else arguments.listed("sites", sites, str, "names of sites")
    if unknown := [site for site in chosen if site not in symmetry.site_shapes]:
        raise ValueError(
            f"sites holds {unknown}, which the symmetry doesn't know; it knows {list(symmetry.site_shapes)}"
        )
    number = sum(symmetry.site_shapes[site].numel() for site in chosen)
    if not 0 < number <= largest:
        raise ValueError(
            f"there are {number} weights; there must be some, and at most largest={largest}. Of a larger network, look "
            "at one layer's sites at a time, e.g. sites=['0.weight', '0.bias']"
        )
    jacobian = Jacobian(symmetry, net, inputs, kwargs or {}, list(dict.fromkeys(chosen)))
    group, generator = symmetry.group, torch.Generator("cpu").manual_seed(seed)
    # Tangents span no more, and the null space no less, than at generic weights.
    tried = [_at(group, jacobian, generator, False)]
    settled = tried[0].null == tried[0].found
    while not settled and len(tried) < POINTS:
        tried = sorted([*tried, _at(group, jacobian, generator, len(tried) % 2 == 1)], key=lambda own: own.null)
        settled = tried[0].null == tried[0].found or [own.null for own in tried].count(tried[0].null) == ALIKE
    best, most = tried[0], tried[-1].null
    doubts = list(best.doubts)
    if best.gap < CLEAR:
        doubts.append(
            f"the smallest singular value that counts is only {best.gap:.0f} times the largest that counts as zero, so "
            "the rank isn't certain"
        )
    if not settled:
        doubts.append(
            f"at other weights up to {most} directions were counted: some units may be on, or off, for all inputs"
        )
    if best.still and best.null > best.found:
        doubts.append(f"{best.still} weights have no effect for any input that was tried; wider inputs may reach them")
    return Completeness(jacobian.size, best.null, best.found, best.gap, tuple(doubts))


# small steps --------------------------------------------------------------------------------------------------------


class _At(NamedTuple):
    """Dimensions at one set of weights.

    :ivar still: the number of weights without effect.
    """

    null: int
    found: int
    gap: float
    still: int
    doubts: tuple[str, ...]


def _at(group: Group, jacobian: Jacobian, generator: torch.Generator, centred: bool) -> _At:
    weights = jacobian.draw(generator, centred)
    rows = jacobian.rows(weights, jacobian.size + max(2 * FRESH, jacobian.size // 8), generator)
    doubts: list[str] = []
    while True:
        basis, gap = _null_space(rows)
        fresh = jacobian.rows(weights, FRESH, generator)
        settled = not basis.shape[1] or float((fresh @ basis).abs().max()) < 1e-7
        if not settled and len(rows) > MOST * jacobian.size:
            doubts.append(f"after {len(rows)} rows of the Jacobian, further ones still change its null space")
            settled = True
        if settled:
            break
        rows = torch.cat([rows, fresh, jacobian.rows(weights, len(rows) // 2, generator)])
    tangents = []
    for move, name, own in _tangents(group, jacobian, weights):
        if float((rows @ own.T.to(rows)).norm()) > WRONG * float(rows.norm()) * float(own.norm()):
            doubts.append(f"the {move}s of {name!r} change the outputs: they are no symmetry here")
        else:
            tangents.append(own)
    return _At(basis.shape[1], _rank(tangents), gap, int((rows.abs().amax(0) == 0).sum()), tuple(doubts))


def _null_space(rows: Tensor) -> tuple[Tensor, float]:
    """An orthonormal basis ``(size, dimension)``, and by how much the singular values that count are larger."""
    columns = rows.norm(dim=0)
    columns = columns.clamp_min(1e-4 * columns.max())  # what no output feels would be noise of length one
    values, vectors = torch.linalg.svd(torch.linalg.qr(rows / columns, mode="r").R)[1:]
    ratios = values[:-1] / values[1:].clamp_min(torch.finfo(values.dtype).tiny)
    ratios = torch.where(values[1:] < NULL * values[0], ratios, 0.0)  # the null space begins at the largest of these
    if not len(ratios) or float(ratios.max()) <= 0.0:
        return rows.new_empty(rows.shape[1], 0), float("inf")
    rank = int(ratios.argmax()) + 1
    return torch.linalg.qr(vectors[rank:].T / columns[:, None]).Q, float(ratios[rank - 1])


def _rank(tangents: list[Tensor]) -> int:
    if not tangents:
        return 0
    rows = torch.cat(tangents)
    rows = rows[rows.norm(dim=1) > 0]
    return int(torch.linalg.matrix_rank(rows / rows.norm(dim=1, keepdim=True), rtol=1e-6)) if len(rows) else 0


def _tangents(group: Group, jacobian: Jacobian, weights: Weights) -> Iterable[tuple[Move, str, Tensor]]:
    """For some units at a time: their move, and tangents ``(units, weights)`` of all scales and shifts of a group."""
    moves: tuple[Move, ...] = ("scale", "shift")
    for move in moves:
        for name in group.names(move):
            if all(axis.site in jacobian.shapes for axis in group[name].axes if axis.exponent or move == "shift"):
                yield move, name, jacobian.flat(_moved(group, name, move, weights))


def _moved(group: Group, name: str, move: Move, weights: Weights) -> Weights:
    """For each unit, how all sites move as its log-scale or its shift begins to grow."""
    one = group[name]
    each = torch.eye(one.count, dtype=torch.float64, device="cpu").reshape(one.count, *one.shape)
    element = group.element(log_scales={name: each}) if move == "scale" else group.element(shifts={name: each})
    moved = {}
    for site in dict.fromkeys(axis.site for axis in one.axes):
        value = group.view(site, weights[site])
        total = value.new_zeros(one.count, *value.shape)
        for dim in group.members(site):
            along = element.axis_multiplier(site, dim).log() if move == "scale" else element.axis_shift(site, dim)
            if along is not None:
                total = total + along_axis(along, dim, value.dim())
        moved[site] = group.view_back(site, total * (value + group.epsilon(site)) if move == "scale" else total)
    return moved
