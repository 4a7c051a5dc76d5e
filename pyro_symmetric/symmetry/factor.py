"""The parts that groups are made of: named sets of units, and the axes of sites along which the units lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.symmetry.factored import index_from_json, index_to_json
from pyro_symmetric.symmetry.view import place_of


@dataclass(frozen=True, eq=False)
class Axis:
    """Where the units of a factor lie along one axis of one site.

    :param site: the site (for a network, the parameter's or buffer's name).
    :param dim: the axis, counted from the front of the site's shape.
    :param index: LongTensor ``(blocks, n)``: unit ``i`` occupies the positions ``index[:, i]``. A plain axis is
        ``arange(n)[None]``; a flattened channel of ``hw`` pixels has ``hw`` blocks; positions that are not listed stay.
    :param buffer: whether the site is a buffer (running statistics), which guides and models needn't hold.
    :param span: how many axes, from ``dim`` on, count as one that is flattened. Input channels of a grouped convolution
        span two: those of group ``g`` occupy columns (axis 1) of the rows (axis 0) of that group only.
    """

    site: str
    dim: int
    index: Tensor
    buffer: bool = False
    span: int = 1

    def __str__(self) -> str:
        return place_of(self)


@dataclass(frozen=True, eq=False)
class Factor:
    """One symmetric group :math:`S_n` of the product.

    :param name: what it is called, after the units that it permutes.
    :param size: the number ``n`` of units.
    :param axes: the axes that it moves.
    :param parent: the factor inside whose unit ``slot`` this one permutes, if any. Every slot of a parent must hold
        the same: the first factor listed for a slot corresponds to the first of every other slot, and so on.
    :param slot: the unit of the parent, ``0 .. parent.size - 1``.
    """

    name: str
    size: int
    axes: tuple[Axis, ...] = field(default=())
    parent: str | None = None
    slot: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"factor {self.name!r} has size {self.size}; a factor permutes at least one unit")
        for axis in self.axes:
            if axis.index.dim() != 2 or axis.index.shape[1] != self.size:
                raise ValueError(
                    f"factor {self.name!r} permutes {self.size} units, but its index on axis {axis.dim} of "
                    f"{axis.site!r} has shape {tuple(axis.index.shape)}; it must be (blocks, {self.size})"
                )

    def to_dict(self, site_shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
        """As JSON; the index of an axis that the factor fills in order is left out."""
        axes = [
            {"site": a.site, "dim": a.dim, "index": index_to_json(a, site_shapes), "buffer": a.buffer, "span": a.span}
            for a in self.axes
        ]
        return {"name": self.name, "size": self.size, "axes": axes, "parent": self.parent, "slot": self.slot}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], site_shapes: Mapping[str, torch.Size]) -> Factor:
        """From JSON."""
        axes = tuple(
            Axis(a["site"], a["dim"], index_from_json(a, site_shapes), a.get("buffer", False), a.get("span", 1))
            for a in data["axes"]
        )
        return cls(data["name"], data["size"], axes, data.get("parent"), data.get("slot"))


@dataclass(frozen=True, eq=False)
class RescaledAxis:
    """Where, and with which exponent, the multipliers of a factor enter one axis of one site.

    :param site: the site (for a network, the parameter's or buffer's name).
    :param dim: the axis, counted from the front of the site's shape.
    :param index: LongTensor ``(blocks, n)``: unit ``i`` multiplies the positions ``index[:, i]``.
    :param exponent: the weight is multiplied by ``factor ** exponent``: 1 for what enters a unit (its rows and bias),
        -1 for what leaves it (for signs too, although -1 and 1 then act alike), 2 for a running variance.
    :param buffer: whether the site is a buffer, see :class:`Axis`.
    :param epsilon: if given, the stored value ``v`` becomes ``factor ** exponent * (v + epsilon) - epsilon``.
    :param span: how many axes, from ``dim`` on, count as one that is flattened, see :class:`Axis`.
    """

    site: str
    dim: int
    index: Tensor
    exponent: int
    buffer: bool = False
    epsilon: float | None = None
    span: int = 1

    def __str__(self) -> str:
        return f"{place_of(self)}^{self.exponent}"


@dataclass(frozen=True, eq=False)
class RescalingFactor:
    """One multiplier for each of ``size`` units: its name and the axes that it multiplies."""

    name: str
    size: int
    axes: tuple[RescaledAxis, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"factor {self.name!r} has size {self.size}; a factor rescales at least one unit")
        for axis in self.axes:
            if axis.index.dim() != 2 or axis.index.shape[1] != self.size:
                raise ValueError(
                    f"factor {self.name!r} rescales {self.size} units, but its index on axis {axis.dim} of "
                    f"{axis.site!r} has shape {tuple(axis.index.shape)}; it must be (blocks, {self.size})"
                )

    def to_dict(self, site_shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
        """As JSON; the index of an axis that the factor fills in order is left out."""
        axes = [
            {
                "site": a.site,
                "dim": a.dim,
                "index": index_to_json(a, site_shapes),
                "exponent": a.exponent,
                "buffer": a.buffer,
                "epsilon": a.epsilon,
                "span": a.span,
            }
            for a in self.axes
        ]
        return {"name": self.name, "size": self.size, "axes": axes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], site_shapes: Mapping[str, torch.Size]) -> RescalingFactor:
        """From JSON."""
        axes = tuple(
            RescaledAxis(
                a["site"],
                a["dim"],
                index_from_json(a, site_shapes),
                a["exponent"],
                a["buffer"],
                a["epsilon"],
                a.get("span", 1),
            )
            for a in data["axes"]
        )
        return cls(data["name"], data["size"], axes)
