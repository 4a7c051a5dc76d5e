"""Signs of a Pyro model's sites that flip, from values of its joint density."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pyro_symmetric.discovery.integer_algebra import echelon
from pyro_symmetric.discovery.model_permutations import Factor
from pyro_symmetric.discovery.valid_sets import (
    Candidates,
    Place,
    PlaceSet,
    Searcher,
    SignChange,
    SignPair,
    Unexpressed,
    axes_by_length,
)
from pyro_symmetric.weights import Shapes

NEAR_BOUNDS = 64  # points at which a support is tried
MOST_JOINT = 8  # positions of an axis, pairs of whose signs are searched
TRIED_SIGNS = 64  # positions of an axis, from the first on, whose signs are searched


class SignFlip(NamedTuple):
    """Positions whose signs flip, one by one, or whole sites.

    :param positions: empty if the sites flip as wholes.
    """

    positions: tuple[int, ...]
    places: PlaceSet

    @property
    def sites(self) -> frozenset[str]:
        """The sites whose signs change if all positions flip."""
        names = [place.site for place in self.places]
        return frozenset(name for name in names if names.count(name) % 2)

    @property
    def generators(self) -> tuple[SignChange, ...]:
        """The changes of sign, along the places."""
        return tuple(map(SignChange, self.positions)) or (SignChange(None),)


def flipping_signs(searcher: Searcher, factors: Sequence[Factor]) -> list[SignFlip]:
    """Return the signs that flip: of single positions, and of whole sites."""
    density = searcher.density
    movable = searcher.movable_shapes
    real = {site: shape for site, shape in movable.items() if density.is_real(site)}
    return _flips_of(searcher, real, factors)


def _flips_of(
    searcher: Searcher, shapes: Shapes, factors: Sequence[Factor]
) -> list[SignFlip]:
    flips = []
    for count, candidates in axes_by_length(shapes).items():
        flips += _position_signs(searcher, count, candidates, factors)
    first_places = {site: [Place(site, 0)] for site in shapes}
    if not first_places:
        return flips
    spanned = [flip.sites for flip in flips if _covers_axis(flip, shapes)]
    for places in searcher.valid_sets(SignChange(None), first_places):
        flip = SignFlip((), places)
        if _is_independent(flip.sites, spanned):
            spanned.append(flip.sites)
            flips.append(flip)
    return flips


def unexpressed_signs(searcher: Searcher) -> list[Unexpressed]:
    """Return the signs that flip together with sites that can't take every real number,
    but keep their support, such as those of a correlation.
    """
    density = searcher.density
    shapes = {}
    bounded = set()
    for site, shape in searcher.movable_shapes.items():
        if density.is_real(site):
            shapes[site] = shape
        elif _may_flip(searcher, site, shape):
            shapes[site] = shape
            bounded.add(site)
    flips = _flips_of(searcher, shapes, []) if bounded else []
    unexpressed = []
    for flip in flips:
        sites = sorted({place.site for place in flip.places})
        outside = [site for site in sites if site in bounded]
        if outside:
            remark = (
                f"the signs of {', '.join(sites)} flip, which no group here can "
                f"express, as {outside[0]!r} can't take every real number"
            )
            unexpressed.append(Unexpressed(flip.generators, flip.places, remark))
    return unexpressed


def joint_signs(searcher: Searcher, flips: Sequence[SignFlip]) -> list[Unexpressed]:
    """Return pairs of positions of a site whose signs flip together only."""
    settled = {place for flip in flips if flip.positions for place in flip.places}
    moves = []
    for site, shape in searcher.movable_shapes.items():
        for place in (Place(site, dim) for dim in range(len(shape))):
            few = 2 < shape[place.dim] <= MOST_JOINT
            if few and place not in settled and searcher.density.is_real(site):
                for pair in itertools.combinations(range(shape[place.dim]), 2):
                    moves.append((SignPair(*pair), frozenset({place})))
    for move, places in itertools.compress(moves, searcher.holds(moves)):
        remark = (
            f"the signs of the positions {move.first} and {move.second} of "
            f"{min(places)} flip together, which no group here can express: make "
            "them a site"
        )
        return [Unexpressed((move,), places, remark)]
    return []


def _may_flip(searcher: Searcher, site: str, shape: torch.Size) -> bool:
    """Return whether some signs of a site keep it in its support."""
    value = searcher.first_point[site]
    places = [Place(site, dim) for dim, length in enumerate(shape) if length > 1]
    change = SignChange(0 if places else None)
    places = places or [Place(site, 0)]
    subsets = searcher.subsets_inside(change, site, places, value)[1:]
    if not subsets:
        return False
    density = searcher.density
    # near the bounds, which may differ little
    extreme = density.points_of_scale(NEAR_BOUNDS, 10.0)[site]
    was_inside = density.site_inside(site, extreme)
    for subset in subsets:
        images = torch.stack([change.act(entry, subset) for entry in extreme])
        if (density.site_inside(site, images) | ~was_inside).all():
            return True
    return False


def _position_signs(
    searcher: Searcher, count: int, candidates: Candidates, factors: Sequence[Factor]
) -> list[SignFlip]:
    """Return the sets of places along which signs of single positions flip.

    Positions that exchange along all places have the same signs, so that one of them is
    searched.
    """
    representative = _exchangeable_everywhere(count, candidates, factors)
    flipping = dict[PlaceSet, list[int]]()
    for position in range(count):
        if representative[position] != position:  # which was searched before
            for positions in flipping.values():
                if representative[position] in positions:
                    positions.append(position)
            continue
        if not flipping and position >= TRIED_SIGNS:
            break
        change = SignChange(position)
        holds = searcher.holds([(change, places) for places in flipping])
        valid = [*flipping] if flipping and all(holds) else None
        for places in valid or searcher.valid_sets(change, candidates):
            flipping.setdefault(places, []).append(position)
    return [SignFlip(tuple(p), places) for places, p in flipping.items()]


def _exchangeable_everywhere(
    count: int, candidates: Candidates, factors: Sequence[Factor]
) -> list[int]:
    """Return for each position the first one with which it exchanges along each of the
    places.
    """
    places = {place for site in candidates for place in candidates[site]}
    labels = [[0] * count for _ in places]
    for place, label in zip(places, labels, strict=True):
        label[:] = range(count)
        for factor in factors:
            if place in factor.places and factor.outer is None:
                for unit in factor.units:
                    label[unit] = factor.units[0]
    columns = [*zip(*labels, strict=True)]
    return [columns.index(column) for column in columns]


def _covers_axis(flip: SignFlip, shapes: Shapes) -> bool:
    return all(
        len(flip.positions) == shapes[place.site][place.dim] for place in flip.places
    )


def _is_independent(sites: frozenset[str], spanned: Sequence[frozenset[str]]) -> bool:
    """Return whether a flip of whole sites is no product of others."""
    names = sorted(sites.union(*spanned))
    rows = np.array([[n in chosen for n in names] for chosen in (*spanned, sites)], int)
    rank_before = len(echelon(rows[:-1], modulo_two=True)[1]) if spanned else 0
    return len(echelon(rows, modulo_two=True)[1]) > rank_before
