"""A group in words: a table of its units."""

from __future__ import annotations

from pyro_symmetric.groups.arrangement import Arrangement
from pyro_symmetric.groups.units import MOVES

LISTED = 6  # axes of each set of units; of more, the number is told


def table(group: Arrangement) -> list[str]:
    """Lines with aligned columns: the units, their number, their moves, the axes along which they lie.

    Units that lie inside others stand below them, indented; ``3 x 2`` are two in each of three.
    """
    rows = [("units", "number", "moves", "axes")]

    def add(name: str, depth: int) -> None:
        one = group[name]
        number = str(one.size) if one.copies == 1 else f"{one.copies} x {one.size}"
        moves = ", ".join(move for move in MOVES if move in one.moves)
        axes = ", ".join(map(str, one.axes[:LISTED]))
        more = f", ... {len(one.axes) - LISTED} more" if len(one.axes) > LISTED else ""
        rows.append(("  " * depth + name, number, moves, axes + more))
        for child in group.children(name):
            add(child, depth + 1)

    for root in group.roots:
        add(root, 0)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
