r"""Weights that a parametrisation computes: fields that move what it computes, in the sites that are stored.

Families of symmetries move the weight :math:`W` that a layer multiplies by. If it is stored as a direction and a length
(weight normalisation) or divided by its spectral norm, this asks for a direction of the stored sites under which
:math:`W` moves by the given :math:`\Delta`:

* :math:`W = g\, v / \lVert v \rVert`: :math:`\delta v = (\lVert v \rVert / g)\, \Delta` and
  :math:`\delta g = \langle v, \Delta \rangle / \lVert v \rVert`;
* :math:`W = V / \sigma,\ \sigma = u^\top V w`, with vectors that are stored: :math:`\delta V = \sigma \Delta` and
  :math:`\delta u = -(u^\top \Delta w)\, u`, so that :math:`\sigma` stays.

Source: Salimans & Kingma 2016, arXiv 1602.07868 (weight normalisation); Miyato et al. 2018, arXiv 1802.05957 (spectral
normalisation); the site names are those of ``torch.nn.utils.parametrizations``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.weights import Weights

DIRECTION, LENGTH = "original1", "original0"
MATRIX, VECTORS = "original", ("0._u", "0._v")


@dataclass(frozen=True)
class Directed:
    """A weight that is stored as lengths and directions.

    :param own: the site of the directions, under whose name fields see the weight itself.
    :param length: the site of the lengths, of the same number of axes: of length one along those that a norm takes in.
    """

    own: str
    length: str

    @property
    def beside(self) -> tuple[str, ...]:
        """The other sites that the weight is computed from."""
        return (self.length,)

    def weight(self, weights: Mapping[str, Tensor]) -> Tensor:
        return weights[self.length] * weights[self.own] / self._norm(weights)

    def stored(self, weights: Mapping[str, Tensor], moved: Tensor) -> Weights:
        """The change of the sites with which the weight changes so."""
        direction, norm = weights[self.own], self._norm(weights)
        length = (direction / norm * moved).sum(self._taken_in(weights), keepdim=True)
        return {self.own: moved * norm / weights[self.length], self.length: length}

    def _norm(self, weights: Mapping[str, Tensor]) -> Tensor:
        return torch.linalg.vector_norm(weights[self.own], dim=self._taken_in(weights), keepdim=True)

    def _taken_in(self, weights: Mapping[str, Tensor]) -> tuple[int, ...]:
        return tuple(dim for dim, length in enumerate(weights[self.length].shape) if length == 1)


@dataclass(frozen=True)
class Spectral:
    """A weight that is stored as a matrix, which is divided by its spectral norm.

    :param own: the site of the matrix, under whose name fields see the weight itself.
    :param left, right: the sites of the vectors of the norm.
    :param axis: along which the rows of the matrix lie: 0, or 1 of a transposed convolution.
    """

    own: str
    left: str
    right: str
    axis: int

    @property
    def beside(self) -> tuple[str, ...]:
        """The other sites that the weight is computed from."""
        return (self.left, self.right)

    def weight(self, weights: Mapping[str, Tensor]) -> Tensor:
        return weights[self.own] / self._between(weights, weights[self.own])

    def stored(self, weights: Mapping[str, Tensor], moved: Tensor) -> Weights:
        """The change of the sites with which the weight changes so."""
        turned = -weights[self.left] * self._between(weights, moved)
        return {self.own: moved * self._between(weights, weights[self.own]), self.left: turned}

    def turned(self, weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
        """The vectors move by numbers ``(left + right,)``, and the right one so that the norm of the weight stays one.

        :param weights: with the weight itself in place of the matrix.
        """
        left, right = raw.split([len(weights[self.left]), len(weights[self.right])])
        weight, own = weights[self.own], weights[self.right]
        grown = self._between({**weights, self.left: left}, weight) + self._between(
            {**weights, self.right: right}, weight
        )
        return {self.left: left, self.right: right - own * grown}

    def _between(self, weights: Mapping[str, Tensor], matrix: Tensor) -> Tensor:
        rows = matrix.movedim(self.axis, 0).flatten(1)
        return torch.einsum("o,oi,i->", weights[self.left], rows, weights[self.right])


def parametrised(sites: Mapping[str, torch.Size]) -> Iterator[Directed | Spectral]:
    """All weights that parametrisations compute, by the names of their sites."""
    for site in sites:
        module, _, last = site.rpartition(".")
        if ".parametrizations." not in site:
            continue
        if last == DIRECTION and f"{module}.{LENGTH}" in sites:
            yield Directed(site, f"{module}.{LENGTH}")
        vectors = [f"{module}.{vector}" for vector in VECTORS]
        if last == MATRIX and all(vector in sites for vector in vectors):
            # If two axes fit, the first is taken; candidates by the wrong one don't leave the function alone.
            lengths, count = [sites[vector].numel() for vector in vectors], sites[site].numel()
            for axis in [k for k, length in enumerate(sites[site]) if [length, count // max(1, length)] == lengths][:1]:
                yield Spectral(site, vectors[0], vectors[1], axis)
