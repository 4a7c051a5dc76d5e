r"""Completeness of a symmetry: the directions in which weights move without any effect, and what they belong to.

The outputs of a network, for many inputs, don't change to first order along the null space of their Jacobian
:math:`J = \partial f / \partial \theta`. A continuous symmetry moves weights along it. So its dimension is compared
with the rank of the tangents of all symmetries that are known, those that the library acts with first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.discovery.apart import apart
from pyro_symmetric.discovery.factors import FACTORS, exchangeable_factors
from pyro_symmetric.discovery.families import LOST, candidates
from pyro_symmetric.discovery.jacobian import Jacobian
from pyro_symmetric.discovery.remainder import CLEAR, orthonormal, remainder
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.tangents import SKETCH, Point, confirmed, found_tangents, point
from pyro_symmetric.weights import Weights

POINTS = 8  # sets of weights that are tried if something stays unexplained, unless the least are three alike
FRESH = 64  # rows of the Jacobian that the null space is checked with
WRONG = 1e-6  # relative change of the outputs, to first order, with which a symmetry is none
MOST = 20  # rows of the Jacobian for each weight; what hasn't settled then is in doubt
EXTRA = 0.125  # rows beyond the number of weights, as a share of it


@dataclass(frozen=True)
class Family:
    """A continuous symmetry of one layer, or exchanges that the library doesn't act with, of dimension zero.

    :ivar name: what it is.
    :ivar layer: the module that holds all of its weights; empty for the whole network.
    :ivar acted_on: whether the library acts with it.
    :ivar dimension: the dimension of its tangents.
    :ivar new: how many of these the families before it don't span.
    """

    name: str
    layer: str
    acted_on: bool
    dimension: int
    new: int


@dataclass(frozen=True)
class Layer:
    """The part of the null space that lies in one module's own weights.

    Null directions may move several modules. So these are traces of projectors over a module's weights: they needn't be
    whole numbers, and over all modules they add up to the dimensions.

    :ivar name: the module's name.
    :ivar weights: the number of its weights.
    :ivar null, found, known, unexplained: its part of these dimensions.
    """

    name: str
    weights: int
    null: float
    found: float
    known: float
    unexplained: float


@dataclass(frozen=True)
class Completeness:
    """The continuous symmetries of a network, beside those that were found.

    A symmetry is *complete* in this sense: at generic weights near the network's own, every direction in which weights
    can move without changing the outputs to first order, for any of the inputs that were tried, is tangent to a known
    family of symmetries, whether the library acts with it or not. This says nothing about permutations and signs, which
    have no tangents (only exchanges of the two factors of a product are named, which the library doesn't act with); and
    a symmetry that holds up to an epsilon only (a scale before a normalisation) isn't one.

    :ivar weights: the number of weights (with the running statistics that the symmetry moves).
    :ivar null: the dimension of the Jacobian's null space: ``found + known + unexplained``.
    :ivar found: the dimension of the scales and shifts of the symmetry.
    :ivar known: what known families add that the library doesn't act with.
    :ivar unexplained: what is left.
    :ivar gap: the smallest singular value that counts, over the largest that counts as zero.
    :ivar families: all families with the dimensions of their tangents.
    :ivar layers: the null space module by module.
    :ivar doubts: why the numbers may be wrong; empty if nothing speaks against them.
    :ivar directions: orthonormal directions that stay unexplained: site -> ``(unexplained,) + site_shape``.
    :ivar point: the weights at which they, and all dimensions, were found.
    """

    weights: int
    null: int
    found: int
    known: int
    unexplained: int
    gap: float
    families: tuple[Family, ...]
    layers: tuple[Layer, ...]
    doubts: tuple[str, ...]
    directions: Weights
    point: Weights

    @property
    def complete(self) -> bool:
        """True if nothing stays unexplained, without a doubt."""
        return not self.unexplained and not self.doubts

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]]
        layers: list[tuple[str, ...]]
        head = (
            f"{self.null} of {self.weights} directions leave the function alone: {self.found} found, "
            f"{self.known} known but not acted on, {self.unexplained} unexplained (gap {self.gap:.0e})"
        )
        rows = [("family", "layer", "dimension", "new", "")]
        for one in self.families:
            acts = "found" if one.acted_on else "not acted on"
            rows.append((one.name, one.layer or "the network", str(one.dimension), str(one.new), acts))
        layers = [("layer", "weights", "null", "found", "known", "unexplained")]
        for own in self.layers:
            parts = (own.null, own.found, own.known, own.unexplained)
            layers.append((own.name or "the network", str(own.weights), *(f"{part:.1f}" for part in parts)))
        doubts = [f"  doubt: {text}" for text in self.doubts]
        return "\n".join([head, *doubts, *_aligned(rows, 2), *_aligned(layers, 1)])


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
    >>> result = ps.completeness(ps.find_symmetry(net, x), net, x)
    >>> result.found, result.known, result.unexplained  # of 50 weights, 8 numbers decide what it computes
    (8, 34, 0)

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
    return _Search(symmetry, jacobian, torch.Generator("cpu").manual_seed(seed)).result()


class _At(NamedTuple):
    """The directions at one set of weights.

    :ivar basis: orthonormal columns, family by family: what each adds to those before it.
    """

    point: Point
    basis: Tensor
    families: tuple[Family, ...]
    unexplained: Tensor
    gap: float
    wrong: tuple[str, ...]

    @property
    def null(self) -> int:
        return self.basis.shape[1] + self.unexplained.shape[1]


def _settled(tried: Sequence[_At]) -> bool:
    """True if the null space is the smallest at three sets of weights, so that it is none of one set alone."""
    nulls = [own.null for own in tried]
    return nulls.count(min(nulls)) > 2


def _changes(own: Point, spanned: Tensor) -> bool:
    """True if orthonormal directions ``(weights, number)`` change the outputs, to first order."""
    return float((own.sketch @ spanned).norm()) > WRONG * float(own.sketch.norm())


class _Search:
    def __init__(self, symmetry: Symmetry, jacobian: Jacobian, generator: torch.Generator):
        self.group, self.jacobian, self.generator = apart(symmetry.group), jacobian, generator
        self.rows = jacobian.size + max(2 * FRESH, math.ceil(EXTRA * jacobian.size))
        self.points = [point(jacobian, rows, generator) for rows in (self.rows, 2 * SKETCH)]
        proposed = (confirmed(variants, jacobian, self.points, generator) for variants in candidates(self.group))
        self.confirmed = [family for family in proposed if family is not None]

    def result(self) -> Completeness:
        # Tangents span no more, and the null space no less, than at generic weights: one point without rest is enough.
        tried = [self._at(self.points[0])]
        while len(tried) < POINTS and all(own.unexplained.shape[1] for own in tried) and not _settled(tried):
            tried.append(self._at(point(self.jacobian, self.rows, self.generator, centred=True)))
        return self._summed(min(tried, key=lambda own: own.null), [own.null for own in tried])

    def _at(self, own: Point) -> _At:
        """The null space at one set of weights, from as many rows as it takes."""
        tangents = self._tangents(own)
        basis = torch.empty(self.jacobian.size, 0, dtype=torch.float64, device="cpu")
        families = []
        wrong = []
        for (name, layer, acted_on), rows in tangents.items():
            spanned = orthonormal(rows)
            if acted_on and _changes(own, spanned):
                wrong.append(f"the {name} of {layer or 'the network'} change the outputs: they are no symmetry here")
                continue
            new = orthonormal((spanned - basis @ (basis.T @ spanned)).T, least=1e-6)
            basis = torch.cat([basis, new], 1)
            families.append(Family(name, layer, acted_on, spanned.shape[1], new.shape[1]))
        while True:
            left, gap = remainder(own.rows, basis.to(own.rows.device))
            left = left.cpu()
            fresh = self.jacobian.rows(own.weights, FRESH, self.generator)
            settled = not left.shape[1] or float((fresh.cpu() @ left).abs().max()) < 1e-7
            if not settled and len(own.rows) > MOST * self.jacobian.size:
                wrong.append(f"after {len(own.rows)} rows of the Jacobian, further ones still change its null space")
                settled = True
            if settled:
                return _At(own, basis, tuple(one for one in families if one.new), left, gap, tuple(wrong))
            more = self.jacobian.rows(own.weights, len(own.rows) // 2, self.generator)
            own = own._replace(rows=torch.cat([own.rows, fresh, more]))

    def _tangents(self, own: Point) -> dict[tuple[str, str, bool], Tensor]:
        """(name, layer, whether the library acts with it) -> tangents ``(number, weights)``, in the order of rows.

        A known family that changes the outputs here is left out: it was confirmed where units don't switch on and off.
        """
        weights = own.weights
        pieces: dict[tuple[str, str, bool], list[Tensor]] = {}
        for move, rows in found_tangents(self.group, self.jacobian, weights):
            pieces.setdefault((f"{move}s", self._layer(rows), True), []).append(rows)
        # What is lost whatever else happens comes first, so that no larger family has its dimensions told twice.
        for family in sorted(self.confirmed, key=lambda own: (own.candidate.name != LOST, -own.candidate.dimension)):
            rows = family.basis(self.jacobian, weights, self.generator)
            if not _changes(own, orthonormal(rows)):
                pieces.setdefault((family.candidate.name, self._layer(rows), False), []).append(rows)
        return {key: torch.cat(rows) for key, rows in pieces.items()}

    def _layer(self, rows: Tensor) -> str:
        """The module that holds all weights that these tangents move."""
        moved = [site for site, piece in self._by_site(rows.abs().amax(0)) if bool((piece > 1e-9).any())]
        return _common(moved)

    def _by_site(self, values: Tensor) -> Iterable[tuple[str, Tensor]]:
        return zip(
            self.jacobian.shapes, values.split([shape.numel() for shape in self.jacobian.shapes.values()]), strict=True
        )

    def _summed(self, best: _At, nulls: Sequence[int]) -> Completeness:
        found = sum(one.new for one in best.families if one.acted_on)
        known = best.basis.shape[1] - found
        left = best.unexplained.shape[1]
        shares = torch.stack(
            [(part**2).sum(1) for part in (best.basis[:, :found], best.basis[:, found:], best.unexplained)], 1
        )
        layers: dict[str, Tensor] = {}
        for site, part in self._by_site(shares):
            own = torch.cat([part.sum(0), part.new_tensor([len(part)])])
            layers[site.rpartition(".")[0]] = layers.get(site.rpartition(".")[0], 0) + own
        told = (
            Layer(name, int(own[3]), float(own[:3].sum()), *(float(value) for value in own[:3]))
            for name, own in layers.items()
        )
        shapes = self.jacobian.shapes
        directions = {
            site: part.T.reshape(left, *shapes[site]).clone() for site, part in self._by_site(best.unexplained)
        }
        doubts = self._doubts(best, nulls)
        return Completeness(
            self.jacobian.size, best.null, found, known, left, best.gap, (*best.families, *self._exchanges(best.point)),
            tuple(told), doubts, directions, best.point.weights,
        )  # fmt: skip

    def _exchanges(self, own: Point) -> list[Family]:
        """Exchanges that are known, but that no group holds."""
        every = exchangeable_factors(self.group, self.jacobian, own.weights, self.generator.initial_seed())
        layers = [_common([axis.site for pair in pairs for axis in pair]) for pairs in every]
        return [Family(FACTORS, layer, False, 0, 0) for layer in layers]

    def _doubts(self, best: _At, nulls: Sequence[int]) -> tuple[str, ...]:
        doubts = list(best.wrong)
        if best.gap < CLEAR:
            doubts.append(
                f"the smallest singular value that counts is only {best.gap:.0f} times the largest that counts as "
                "zero, so the rank isn't certain"
            )
        still = int((best.point.rows.abs().amax(0) == 0).sum())
        if best.unexplained.shape[1] and len(set(nulls)) > 1:
            doubts.append(
                f"at other weights up to {max(nulls)} directions were counted: some units may be on, or off, for all "
                "inputs"
            )
        if best.unexplained.shape[1] and still:
            doubts.append(f"{still} weights have no effect for any input that was tried; wider inputs may reach them")
        return tuple(doubts)


def _common(sites: Sequence[str]) -> str:
    """The module that holds all of some sites; empty for the whole network."""
    paths = [site.split(".")[:-1] for site in sites]
    together = 0
    while paths and len({tuple(path[: together + 1]) for path in paths}) == 1 and together < len(paths[0]):
        together += 1
    return ".".join(paths[0][:together]) if paths else ""


def _aligned(rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Lines with aligned columns: the first few to the left, numbers to the right; none if there is but a head."""
    if len(rows) < 2:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i < words or not (cell[:1].isdigit() or rows[0][i]) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
