"""How a symmetry is shown and exchanged: a table for people, Git Re-Basin's per-axis specification for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pyro_symmetric.symmetry.permutation import Axis, Factor, PermutationGroup
from pyro_symmetric.symmetry.rescaling import RescaledAxis

if TYPE_CHECKING:
    from pyro_symmetric.symmetry.weight_symmetry import WeightSymmetry

Row = tuple[str, str, str, str, str]


def to_axes(group: PermutationGroup, strict: bool = True) -> dict[str, tuple[str | None, ...]]:
    """Site -> for each axis, the factor that permutes it as a whole, or None.

    Source: Ainsworth, Hayase & Srinivasa 2023, arXiv 2209.04836 (``axes_to_perm`` in their code).

    :raises ValueError: if ``strict`` and a factor doesn't fit this form.
    """
    axes: dict[str, list[str | None]] = {site: [None] * len(shape) for site, shape in group.site_shapes.items()}
    for name in group.factors:
        factor = group.factor(name)
        whole = factor.parent is None and all(_is_whole(axis, group.site_shapes[axis.site]) for axis in factor.axes)
        if whole:
            for axis in factor.axes:
                axes[axis.site][axis.dim] = name
        elif strict:
            raise ValueError(
                f"factor {name!r} moves blocks or parts of axes, several axes as one, or is nested, which a per-axis "
                "specification can't say; strict=False leaves such factors out"
            )
    return {site: tuple(names) for site, names in axes.items()}


def _is_whole(axis: Axis, shape: torch.Size) -> bool:
    return axis.span == 1 and torch.equal(axis.index.cpu(), torch.arange(shape[axis.dim])[None])


def table(symmetry: WeightSymmetry) -> str:
    """One line for each factor: its kind, name, size, log of its order, and the axes that it moves."""
    group, signs = symmetry.permutations, symmetry.signs
    head = (
        f"WeightSymmetry: {len(group.factors)} permutation factors (log-order {group.log_order():.1f}), "
        f"{symmetry.scalings.dim} scales, {signs.dim} signs, {len(symmetry.shifts.sites)} shifts"
    )
    rows: list[Row] = [_row(group, alike) for alike in _folded(group)]
    for kind, rescalings in (("scaling", symmetry.scalings), ("sign", signs)):
        for name, size in rescalings.factors.items():
            order = f"{int(signs.independent[name].sum()) * math.log(2):.1f}" if kind == "sign" else ""
            rows.append((kind, name, str(size), order, _members(rescalings.factor(name).axes)))
    rows += [("shift", site, "1", "", site) for site in symmetry.shifts.sites]
    if not rows:
        return head
    rows = [("kind", "factor", "size", "log-order", "members"), *rows]
    a, b, c, d = (max(len(row[i]) for row in rows) for i in range(4))
    lines = [f"  {r[0]:<{a}}  {r[1]:<{b}}  {r[2]:>{c}}  {r[3]:>{d}}  {r[4]}".rstrip() for r in rows]
    return "\n".join([head, *lines])


def _folded(group: PermutationGroup) -> list[list[str]]:
    """Factors, nested ones of the same kind together."""
    folded: dict[str, list[str]] = {}
    for name in group.factors:
        nested = group.factor(name).parent is not None
        folded.setdefault(name.partition("[")[0] + "[]" if nested else name, []).append(name)
    return list(folded.values())


def _row(group: PermutationGroup, alike: Sequence[str]) -> Row:
    factor: Factor = group.factor(alike[0])
    shown = f"{alike[0].partition('[')[0]}[...] x {len(alike)}" if len(alike) > 1 else alike[0]
    order = len(alike) * math.lgamma(factor.size + 1)
    return "permutation", shown, str(factor.size), f"{order:.1f}", _members(factor.axes)


def _members(axes: Sequence[Axis | RescaledAxis], most: int = 6) -> str:
    return ", ".join(map(str, axes[:most])) + (f", ... {len(axes) - most} more" if len(axes) > most else "")
