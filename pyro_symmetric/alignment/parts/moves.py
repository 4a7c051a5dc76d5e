"""From a group's axes to the moves of the descent: what is decided together, and what depends on what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.alignment.parts.units import Move, Place, Slot, Term, Units, actor, covered_blocks, lookup
from pyro_symmetric.symmetry.rescaling import RescalingGroup


def moves_of(roots: Sequence[Units], rescalings: dict[str, RescalingGroup[Any]], sites: set[str]) -> list[Move]:
    """All moves.

    :param rescalings: ``"sign"`` and ``"scale"`` -> the group.
    :param sites: the sites that are compared, all others don't count.
    """
    slots = {units.name: _slots(units, rescalings, sites) for root in roots for units in reversed(root.tree())}
    _keep_deepest(roots, slots)
    moves = [_move(root, active, slots, sites) for root in roots for active in _conflict_free(root)]
    held = {a for move in moves for a in move.actors}
    for kind, group in rescalings.items():
        for name in group.factors:
            if actor(kind, name) not in held:
                terms = tuple(
                    Term(name, (a.site, a.dim), a.index, exponent=a.exponent)
                    for a in group.axes(name)
                    if a.site in sites
                )
                moves.append(Move(None, terms=terms, multiplier=(kind, name)))
    acting = _acting(roots, rescalings, sites)
    return [_with_dependencies(move, acting) for move in moves]


# multipliers --------------------------------------------------------------------------------------------------------


def _slots(units: Units, rescalings: dict[str, RescalingGroup[Any]], sites: set[str]) -> list[Slot]:
    """Multipliers of which each unit of the set has exactly one."""
    lookups = {place: lookup(index, int(index.max()) + 1) for place, index in units.places.items()}
    found = []
    for kind, group in rescalings.items():
        offset = 0
        alike: dict[tuple[object, ...], tuple[list[str], Tensor, dict[Place, dict[int, int]]]] = {}
        for name, n in group.factors.items():
            placed = _placed(group, name, lookups, sites)
            if placed is not None:
                unit, exponents = placed
                signature = tuple(sorted((place, tuple(sorted(e.items()))) for place, e in exponents.items()))
                names, taken, _ = alike.setdefault(signature, ([], torch.full((units.count,), -1), exponents))
                if bool((taken[unit] < 0).all()):
                    taken[unit] = offset + torch.arange(n)
                    names.append(name)
            offset += n
        for names, taken, exponents in alike.values():
            if bool((taken >= 0).all()):
                found.append(Slot(kind, tuple(names), taken, exponents))
    return found


def _placed(
    group: RescalingGroup[Any], name: str, lookups: dict[Place, tuple[Tensor, Tensor]], sites: set[str]
) -> tuple[Tensor, dict[Place, dict[int, int]]] | None:
    """The unit that each multiplier of a factor belongs to, and the blocks that it multiplies; None if none fits."""
    owner: Tensor | None = None
    exponents: dict[Place, dict[int, int]] = {}
    for axis in group.axes(name):
        if axis.site not in sites:
            continue
        if (axis.site, axis.dim) not in lookups:
            return None
        block, unit = lookups[axis.site, axis.dim]
        index = axis.index.cpu()
        if int(index.max()) >= len(unit):
            return None
        owner = unit[index[0]] if owner is None else owner
        blocks = block[index].sort(0).values
        one_each = len(owner.unique()) == len(owner) and int(owner.min()) >= 0
        if not one_each or bool((unit[index] != owner).any()) or bool((blocks != blocks[:, :1]).any()):
            return None
        exponents.setdefault((axis.site, axis.dim), {}).update({int(b): axis.exponent for b in blocks[:, 0]})
    return None if owner is None else (owner, exponents)


def _keep_deepest(roots: Iterable[Units], slots: dict[str, list[Slot]]) -> None:
    """A multiplier belongs to the innermost set whose units have one each, and only if no set lies around it there."""
    for root in roots:
        taken: set[tuple[str, str]] = set()
        for units in reversed(root.tree()):
            covered = {
                (place, int(b))
                for child in units.inner
                for place in child.places
                for b in covered_blocks(units, child, place)
            }
            kept: list[Slot] = []
            scaled: set[tuple[Place, int]] = set()
            for slot in slots[units.name]:
                hit = {(place, b) for place, blocks in slot.exponents.items() for b in blocks}
                free = not any((slot.kind, name) in taken for name in slot.factors)
                # Two scales on one block, or a scale around units that are rearranged, are moved alone instead.
                if free and not hit & covered and not (slot.kind == "scale" and hit & scaled):
                    kept.append(slot)
                    taken |= {(slot.kind, name) for name in slot.factors}
                    scaled |= hit if slot.kind == "scale" else set()
            slots[units.name] = kept


# moves --------------------------------------------------------------------------------------------------------------


def _conflict_free(root: Units) -> list[tuple[Units, ...]]:
    """Choices of sets to rearrange together: each set is in one at least, with all that it lies in."""
    parents = {child.name: units for units in root.tree() for child in units.inner}
    pending = root.tree()[1:]
    if not pending:
        return [(root,)]
    choices = []
    while pending:
        chosen = [root]
        for units in (*pending, *(u for u in root.tree()[1:] if all(u is not p for p in pending))):
            line, above = [units], parents[units.name]
            while above is not root:
                line.append(above)
                above = parents[above.name]
            fresh = [u for u in line if all(u is not c for c in chosen)]
            others = [c for c in chosen if all(c is not u for u in line) and c is not root]
            if not any(u.meets(c) for u in fresh for c in others if not _nested(u, c)):
                chosen += fresh
        pending = [u for u in pending if all(u is not c for c in chosen)]
        choices.append(tuple(u for u in root.tree() if any(u is c for c in chosen)))
    return choices


def _nested(one: Units, other: Units) -> bool:
    return any(one is u for u in other.tree()) or any(other is u for u in one.tree())


def _move(root: Units, active: tuple[Units, ...], slots: dict[str, list[Slot]], sites: set[str]) -> Move:
    move = Move(root, active)
    chosen, terms = {}, []
    for units in active:
        own = slots[units.name]
        chosen[units.name] = tuple(own)
        for place, index in units.places.items():
            if place[0] not in sites:
                continue
            covered = [covered_blocks(units, child, place) for child in move.inside(units)]
            left = set(range(len(index))) - {int(b) for blocks in covered for b in blocks}
            alike: dict[tuple[tuple[int, ...], int | None, int], list[int]] = {}
            for block in sorted(left):
                signs = tuple(
                    k for k, s in enumerate(own) if s.kind == "sign" and s.exponents.get(place, {}).get(block, 0) % 2
                )
                scale = next(
                    (k for k, s in enumerate(own) if s.kind == "scale" and block in s.exponents.get(place, {})), None
                )
                exponent = 0 if scale is None else own[scale].exponents[place][block]
                alike.setdefault((signs, scale, exponent), []).append(block)
            for (signs, scale, exponent), blocks in alike.items():
                rows = index if len(blocks) == len(index) else index[blocks]
                terms.append(Term(units.name, place, rows, signs, scale, exponent))
    return replace(move, slots=chosen, terms=tuple(terms))


def _acting(
    roots: Sequence[Units], rescalings: dict[str, RescalingGroup[Any]], sites: set[str]
) -> dict[str, list[tuple[int, Tensor, str]]]:
    """Site -> what acts on it: axis, positions, actor."""
    acting: dict[str, list[tuple[int, Tensor, str]]] = {}
    for units in (u for root in roots for u in root.tree()):
        for (site, dim), index in units.places.items():
            acting.setdefault(site, []).append((dim, index.unique(), units.name))
    for kind, group in rescalings.items():
        for name in group.factors:
            for axis in group.axes(name):
                acting.setdefault(axis.site, []).append((axis.dim, axis.index.cpu().unique(), actor(kind, name)))
    return {site: found for site, found in acting.items() if site in sites}


def _with_dependencies(move: Move, acting: dict[str, list[tuple[int, Tensor, str]]]) -> Move:
    own = move.actors
    terms = []
    for term in move.terms:
        site, dim = term.place
        depends = {
            name
            for other, positions, name in acting[site]
            if other != dim or (name not in own and bool(torch.isin(positions, term.index.cpu()).any()))
        }
        terms.append(replace(term, depends=frozenset(depends)))
    return replace(move, terms=tuple(terms))
