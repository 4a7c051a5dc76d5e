"""The shift of a softmax: one constant added to all of its inputs changes no probability.

Source: Laurent, Aldea & Franchi 2024, "A symmetry-aware exploration of Bayesian neural network posteriors",
arXiv 2310.08287, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.factored import moved_weights, same_group
from pyro_symmetric.symmetry.weights import Weights, batch_shape, require_same_network, require_sites


class ShiftGroup:
    """The shift of a softmax: one constant added to all entries of a site (the last bias) changes no probability.

    :param sites: the sites that may be shifted, each by a constant of its own.
    :param site_shapes: shape of every site of the model (without batch dimensions).
    """

    def __init__(self, sites: Iterable[str], site_shapes: Mapping[str, torch.Size]):
        self.sites = tuple(sites)
        self.site_shapes = dict(site_shapes)
        unknown = [site for site in self.sites if site not in self.site_shapes]
        if unknown:
            raise ValueError(f"sites {unknown} are unknown; the known sites are {sorted(self.site_shapes)}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON: the sites' shapes and the shifted sites."""
        return {
            "site_shapes": {site: list(shape) for site, shape in self.site_shapes.items()},
            "sites": list(self.sites),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShiftGroup:
        """The inverse of :meth:`to_dict`."""
        return cls(data["sites"], {site: torch.Size(shape) for site, shape in data["site_shapes"].items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShiftGroup) and (self.sites, self.site_shapes) == (other.sites, other.site_shapes)

    def __hash__(self) -> int:
        return hash(self.sites)

    def __repr__(self) -> str:
        return f"ShiftGroup({list(self.sites)})" if self.sites else "ShiftGroup(trivial)"

    @property
    def required_sites(self) -> tuple[str, ...]:
        """The sites that weights must hold to be acted on."""
        return self.sites

    def batch_shape(self, weights: Mapping[str, Tensor]) -> torch.Size:
        """The batch shape of ``weights``, checked against the sites' shapes."""
        require_sites(weights, self.sites)
        return batch_shape(weights, self.site_shapes)

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers that the group acts on: none."""
        return ()

    def leaving(self, sites: Iterable[str]) -> ShiftGroup:
        """The same shifts for a model without these sites."""
        left = set(sites)
        shapes = {site: shape for site, shape in self.site_shapes.items() if site not in left}
        return ShiftGroup([site for site in self.sites if site not in left], shapes)

    def identity(
        self, shape: Sequence[int] = (), device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Shift:
        """The neutral element, as a batch of the given shape."""
        shape, device = arguments.shape("shape", shape), arguments.device("device", device)
        return Shift(self, {site: torch.zeros(tuple(shape), device=device, dtype=dtype) for site in self.sites})

    def sample(
        self,
        shape: Sequence[int] = (),
        spread: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Shift:
        """A batch of independent shifts, ``Normal(0, spread)``, from PyTorch's generator."""
        shape, device = arguments.shape("shape", shape), arguments.device("device", device)
        arguments.number("spread", spread, least=0, below=math.inf)
        return Shift(
            self, {site: spread * torch.randn(tuple(shape), device=device, dtype=dtype) for site in self.sites}
        )

    def element(self, images: Mapping[str, Tensor | float]) -> Shift:
        """A given element or batch of elements, site -> shift of shape ``batch_shape``; sites left out stay.

        :raises ValueError: if a site is unknown or a shift isn't finite.
        """
        unknown = [site for site in images if site not in self.sites]
        if unknown:
            raise ValueError(f"the group shifts no sites {unknown}; it shifts {list(self.sites)}")
        values = {site: torch.as_tensor(value, dtype=None) for site, value in images.items()}
        for site, value in values.items():
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"element[{site!r}] holds NaN or infinite shifts; they must be finite")
        example = next(iter(values.values()), torch.zeros(()))
        return Shift(self, {site: values.get(site, example.new_zeros(())) for site in self.sites})


class Shift:
    """A batch of elements of a :class:`ShiftGroup`: site -> the constant that is added, ``batch_shape``."""

    def __init__(self, group: ShiftGroup, images: Mapping[str, Tensor]):
        self.group = group
        self.images = dict(images)
        self.batch_shape = torch.broadcast_shapes(*(value.shape for value in self.images.values()))

    def __getitem__(self, site: str) -> Tensor:
        if site not in self.images:
            raise ValueError(f"the group shifts no site {site!r}; it shifts {list(self.group.sites)}")
        return self.images[site]

    def __repr__(self) -> str:
        return f"Shift(batch_shape={tuple(self.batch_shape)}, sites={list(self.group.sites)})"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Shift:
        """The same element on another device or in another precision."""
        return Shift(self.group, {site: value.to(device=device, dtype=dtype) for site, value in self.images.items()})

    def select(self, index: int | slice | Tensor | tuple[Any, ...]) -> Shift:
        """Index the batch: ``s.select(0)`` is the first element."""
        return Shift(self.group, {site: value[index] for site, value in self.images.items()})

    def equal(self, other: Shift) -> bool:
        """Whether both are the same elements, bit by bit."""
        return self.group.sites == other.group.sites and all(
            torch.equal(value, other.images[site].to(value)) for site, value in self.images.items()
        )

    def inverse(self) -> Shift:
        """The element with ``s.inverse() @ s`` the identity."""
        return Shift(self.group, {site: -value for site, value in self.images.items()})

    def __matmul__(self, other: Shift) -> Shift:
        if not isinstance(other, Shift):
            return NotImplemented
        same_group(self.group, other.group)
        return Shift(self.group, {site: value + other.images[site].to(value) for site, value in self.images.items()})

    def __call__(self, weights: Mapping[str, Tensor]) -> Weights:
        """Act on weights; batch shapes broadcast, sites that aren't shifted are expanded to the same batch shape."""
        require_same_network(weights, self.group.site_shapes)
        own = self.group.batch_shape(weights) if self.group.sites else batch_shape(weights, self.group.site_shapes)
        return moved_weights(self, weights, own)

    def moved(self, site: str, value: Tensor) -> Tensor:
        """Act on one site alone; batch shapes broadcast."""
        if site not in self.images:
            return value
        shift = self.images[site].to(value)
        return value + shift.reshape((*shift.shape, *([1] * len(self.group.site_shapes[site]))))
