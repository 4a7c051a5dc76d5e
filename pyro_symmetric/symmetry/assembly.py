"""From solved structure to the factors of a permutation group: their axes, index maps, nesting and names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from pyro_symmetric.symmetry.facts import Facts
from pyro_symmetric.symmetry.forest import rank_within
from pyro_symmetric.symmetry.labels import Array, distinct_rows
from pyro_symmetric.symmetry.permutation import Axis, Factor
from pyro_symmetric.symmetry.structure import Structure

Instance = tuple[int, int]  # a cell, and which of its owners


def factors_of(facts: Facts, structure: Structure) -> list[Factor]:
    """One factor for each free cell, and one inside each owner of each nested cell; in order of first use.

    Owners come before what lies inside them.
    """
    assembly = _Assembly(structure)
    for leaf in facts.leaves.values():
        for dim, part in enumerate(leaf.parts):
            assembly.add(leaf.site, dim, part.atoms, leaf.buffer, len(leaf.shape) > 2)
    return assembly.factors()


class _Assembly:
    def __init__(self, structure: Structure):
        self.structure = structure
        self.cells = structure.cells
        self.rows: dict[Instance, dict[tuple[str, int, bool], list[Array]]] = {}
        self.of_images: set[int] = set()
        self.owner: dict[int, Array] = {}
        self.rank: dict[int, Array] = {}
        for number, cell in self.cells.items():
            if len(cell.direct) < 2:
                self.owner[number] = (
                    cell.parents[cell.direct[0]] if cell.direct else np.zeros(cell.size, dtype=np.int64)
                )
                self.rank[number] = rank_within(self.owner[number])

    def add(self, site: str, dim: int, atoms: Array, buffer: bool, image: bool) -> None:
        """Note where the units of all factors lie along one axis."""
        classes = self.structure.unit_class[atoms]
        cells = self.structure.cell[classes]
        for number in np.unique(cells).tolist():
            if number not in self.cells:
                continue
            where = np.flatnonzero(cells == number)
            units = self.structure.place[classes[where]]
            movers = {number: units} | {up: f[units] for up, f in self.cells[number].parents.items()}
            movers = {mover: units for mover, units in movers.items() if mover in self.rank}
            self.of_images.update(movers if image else ())
            apart = [
                self.structure.colour[classes[where]],
                _numbered(self.structure.atom_colour[atoms[where]], classes[where]),
            ]
            for mover, own in movers.items():
                others = [self.rank[other][u] for other, u in movers.items() if other != mover]
                self._add_blocks(mover, own, where, [*apart, *others], (site, dim, buffer))

    def _add_blocks(
        self, mover: int, units: Array, where: Array, keys: list[Array], axis: tuple[str, int, bool]
    ) -> None:
        """Group positions into blocks: within a block all but the unit is equal."""
        _, key, _ = distinct_rows(*keys)
        owner, rank = self.owner[mover][units], self.rank[mover][units]
        order = np.lexsort([rank, key, owner])
        size = int(self.rank[mover].max()) + 1
        blocks, ranks = where[order].reshape(-1, size), rank[order].reshape(-1, size)
        if (ranks != np.arange(size)).any():
            raise RuntimeError(f"units of one factor lie unevenly along axis {axis[1]} of {axis[0]!r}")
        owners = owner[order].reshape(-1, size)[:, 0]
        for instance in np.unique(owners).tolist():
            self.rows.setdefault((mover, instance), {}).setdefault(axis, []).append(blocks[owners == instance])

    def factors(self) -> list[Factor]:
        names = self._names()
        built = []
        for instance in self._order():
            axes = tuple(
                Axis(site, dim, torch.from_numpy(_in_order(np.concatenate(rows))), buffer)
                for (site, dim, buffer), rows in self.rows[instance].items()
            )
            parent = self._parent(instance)
            size = int(self.rank[instance[0]].max()) + 1
            slot = None if parent is None else int(self.rank[parent[0]][instance[1]])
            built.append(Factor(names[instance], size, axes, None if parent is None else names[parent], slot))
        return built

    def _parent(self, instance: Instance) -> Instance | None:
        """The factor whose unit this one lies in."""
        cell = self.cells[instance[0]]
        if not cell.direct:
            return None
        above = cell.direct[0]
        return above, int(self.owner[above][instance[1]])

    def _order(self) -> list[Instance]:
        """Families in order of first use, owners first."""
        first: dict[int, int] = {}
        for position, (mover, _) in enumerate(self.rows):
            first.setdefault(mover, position)
        done: list[int] = []

        def visit(mover: int) -> None:
            if mover not in done:
                for above in self.cells[mover].direct:
                    visit(above)
                done.append(mover)

        for mover in sorted(first, key=first.__getitem__):
            visit(mover)
        return [instance for mover in done for instance in sorted(i for i in self.rows if i[0] == mover)]

    def _names(self) -> dict[Instance, str]:
        """After the module whose outputs are permuted: that of the first site in which the units lie."""
        has_inner = {cell.direct[0] for cell in self.cells.values() if len(cell.direct) == 1}
        names: dict[Instance, str] = {}
        families: dict[int, str] = {}
        for mover, instance in self._order():
            if mover not in families:
                site = next(site for site, _, _ in self.rows[mover, instance])
                base = module_name(site) + (self._whole(mover) if mover in has_inner else "")
                families[mover] = _unused(base, families.values())
            names[mover, instance] = families[mover] + self._path((mover, instance))
        return names

    def _whole(self, mover: int) -> str:
        """What units with an inner life are called: heads of attention, groups of channels."""
        return ".groups" if mover in self.of_images else ".heads"

    def _path(self, instance: Instance) -> str:
        parent = self._parent(instance)
        if parent is None:
            return ""
        return f"{self._path(parent)}[{int(self.rank[parent[0]][instance[1]])}]"


def module_name(site: str) -> str:
    """``layer.conv.weight`` -> ``layer.conv``; a site that isn't simply a weight or bias keeps its own name, too."""
    module, _, own = site.partition(".parametrizations.")[0].rpartition(".")
    if ".parametrizations." in site:
        return site.partition(".parametrizations.")[0]
    for recurrent in ("weight_ih_", "weight_hh_", "bias_ih_", "bias_hh_"):
        own = own.removeprefix(recurrent)
    plain = own in ("weight", "bias", "in_proj_weight", "in_proj_bias", "weight_g", "weight_v")
    return module if plain and module else f"{module}.{own}" if module else own


def _in_order(blocks: Array) -> Array:
    """Blocks by their first position."""
    return blocks[blocks[:, 0].argsort()]


def _unused(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}~{number}"
    return candidate


def _numbered(colours: Array, classes: Array) -> Array:
    """Among the positions of each class: the rank of its atom's colour (0 where a class has one position)."""
    _, where = np.unique(colours, return_inverse=True)
    order = np.lexsort([where, classes])
    sorted_classes = classes[order]
    starts = np.r_[True, sorted_classes[1:] != sorted_classes[:-1]]
    first = np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - first
    return rank
