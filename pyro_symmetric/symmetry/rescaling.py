r"""Groups that multiply weights: positive scalings, and signs.

Scaling what enters a ReLU unit by :math:`\lambda > 0` and what leaves it by :math:`1/\lambda` doesn't change a
network's function; nor does flipping both signs around an odd activation such as tanh. One :class:`RescalingFactor`
holds such a multiplier :math:`f_i` for each of ``n`` units; a :class:`RescaledAxis` says where it enters, and with
which exponent:

.. math:: (s \cdot w)_i = f_i^{\,e}\, w_i, \qquad (s \cdot v)_i = f_i^{\,e} (v_i + \epsilon) - \epsilon,

the second where an ``epsilon`` is given, which is exact for the running variances of batch normalisation. (The stored
variance may then fall below zero, the scaled :math:`v + \epsilon` that the network uses never does.)

Both groups commute, so that ``(s @ t)(w) == s(t(w)) == t(s(w))``. Elements are batched and broadcast against
weights like :class:`~pyro_symmetric.symmetry.permutation.Permutation`.

Source: Laurent, Aldea & Franchi 2024, "A symmetry-aware exploration of Bayesian neural network posteriors",
arXiv 2310.08287, section 3 (scaling); Wiese et al. 2023, arXiv 2304.02902 (signs).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.factor import RescaledAxis, RescalingFactor
from pyro_symmetric.symmetry.factored import (
    FactoredGroup,
    acted_shape,
    along_axis,
    declared_axes,
    moved_weights,
    same_group,
    table,
)
from pyro_symmetric.symmetry.independence import independent_units
from pyro_symmetric.symmetry.shift import Shift, ShiftGroup
from pyro_symmetric.symmetry.weights import Weights, shapes_of

if TYPE_CHECKING:
    from pyro_symmetric.symmetry.model_check import ModelVerification

__all__ = [
    "Multipliers",
    "RescaledAxis",
    "RescalingFactor",
    "RescalingGroup",
    "Scaling",
    "ScalingGroup",
    "Shift",
    "ShiftGroup",
    "Sign",
    "SignGroup",
]


ENUMERATION_LIMIT = 20  # units whose signs are enumerated at most

E = TypeVar("E", bound="Multipliers[Any]")
G = TypeVar("G", bound="RescalingGroup[Any]")


class RescalingGroup(FactoredGroup[RescalingFactor, RescaledAxis], Generic[E]):
    """What :class:`ScalingGroup` and :class:`SignGroup` share: factors, and which axes of which sites they multiply.

    :param factors: one multiplier per unit each; factors act side by side and commute.
    :param site_shapes: shape of every site of the model, rescaled or not (without batch dimensions).
    """

    verb = "rescales"
    are_signs = False  # whether multipliers are signs
    factor_kind = RescalingFactor

    def to_dict(self) -> dict[str, Any]:
        """As JSON: the sites' shapes and the factors with their axes."""
        return {
            "site_shapes": {site: list(shape) for site, shape in self.site_shapes.items()},
            "factors": [factor.to_dict(self.site_shapes) for factor in self._factors.values()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        shapes = {site: torch.Size(shape) for site, shape in data["site_shapes"].items()}
        return cls((RescalingFactor.from_dict(factor, shapes) for factor in data["factors"]), shapes)

    @property
    def weight_sites(self) -> tuple[str, ...]:
        """The sites that are weights, whether rescaled or not: all but biases and buffers.

        A rescaled site with one axis is a bias if it enters with a positive exponent, unless its name ends in
        ``weight`` (the affine weight of a normalisation). A site that isn't rescaled is a weight if it has two axes or
        more, or if its name ends in ``weight``. A site whose name says ``bias`` in its last part is always one.
        """
        return tuple(site for site in self.site_shapes if self._is_weight(site))

    def _is_weight(self, site: str) -> bool:
        axes = [axis for members in self.members(site).values() for _, axis in members]
        last = site.rsplit(".", 1)[-1]
        if "bias" in last or any(axis.buffer for axis in axes):
            return False
        return len(self.site_shapes[site]) >= 2 or last.endswith("weight") or any(axis.exponent < 0 for axis in axes)

    def __repr__(self) -> str:
        if not self._factors:
            return f"{type(self).__name__}(trivial)"
        rows = [("factor", "size", "axes, with exponents")]
        for name, factor in self._factors.items():
            rows.append((name, str(factor.size), ", ".join(map(str, factor.axes))))
        return "\n".join([type(self).__name__, *table(rows)])

    @functools.cached_property
    def independent(self) -> dict[str, Tensor]:
        """Factor -> bool ``(n,)``: units whose multipliers are independent and together do what all units' do."""
        return independent_units(self, self.are_signs)

    @property
    def dim(self) -> int:
        """The number of independent multipliers."""
        return sum(int(units.sum()) for units in self.independent.values())

    # its elements ---------------------------------------------------------------------------------------------------

    def _wrap(self, images: Mapping[str, Tensor]) -> E:
        raise NotImplementedError

    def _check(self, name: str, value: Tensor) -> None:
        raise NotImplementedError

    def identity(
        self, shape: Sequence[int] = (), device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> E:
        """The neutral element, as a batch of the given shape."""
        shape, device = arguments.shape("shape", shape), arguments.device("device", device)
        return self._wrap({k: torch.ones(*shape, n, device=device, dtype=dtype) for k, n in self.factors.items()})

    def element(self, images: Mapping[str, Tensor | Sequence[float]]) -> E:
        """A given element or batch of elements; factors that are left out stay at one.

        :param images: factor -> multipliers of shape ``batch_shape + (n,)``.
        :raises ValueError: if a factor is unknown, or a multiplier isn't what the group allows.
        """
        self.require_factors(images)
        checked = {}
        for name, given in images.items():
            value = arguments.numbers(f"element[{name!r}]", given)
            value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
            n = self.factors[name]
            if value.dim() < 1 or value.shape[-1] != n:
                raise ValueError(f"element[{name!r}] has shape {tuple(value.shape)}; its last axis must be {n} long")
            self._check(name, value)
            checked[name] = value
        shape = torch.broadcast_shapes(*(value.shape[:-1] for value in checked.values())) if checked else torch.Size()
        example = next(iter(checked.values())) if checked else torch.ones(())
        return self._wrap(
            {name: checked.get(name, example.new_ones(n)).expand(*shape, n) for name, n in self.factors.items()}
        )


class Multipliers(Generic[G]):
    """What :class:`Scaling` and :class:`Sign` share: a batch of multipliers, one for each unit of each factor.

    ``s(weights)`` acts, ``s @ t`` composes, ``s.inverse()`` inverts, ``s["hidden.0"]`` is the tensor
    ``batch_shape + (n,)`` of one factor. Batch shapes of elements and weights broadcast.
    """

    def __init__(self, group: G, images: Mapping[str, Tensor]):
        self.group = group
        self.images = dict(images)
        shapes = {value.shape[:-1] for value in self.images.values()}
        self.batch_shape = torch.broadcast_shapes(*shapes) if shapes else torch.Size()

    def _like(self, images: Mapping[str, Tensor]) -> Self:
        return type(self)(self.group, images)

    def __getitem__(self, factor: str) -> Tensor:
        self.group.factor(factor)
        return self.images[factor]

    def __repr__(self) -> str:
        sizes = "".join(f", {name}: {n}" for name, n in self.group.factors.items())
        return f"{type(self).__name__}(batch_shape={tuple(self.batch_shape)}{sizes})"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same element on another device or in another precision."""
        return self._like({name: value.to(device=device, dtype=dtype) for name, value in self.images.items()})

    def select(self, index: int | slice | Tensor | tuple[Any, ...]) -> Self:
        """Index the batch: ``s.select(0)`` is the first element."""
        return self._like({name: value[index] for name, value in self.images.items()})

    def equal(self, other: Self) -> bool:
        """Whether both are the same elements, bit by bit."""
        return self.group.factors == other.group.factors and all(
            torch.equal(value, other.images[name].to(value)) for name, value in self.images.items()
        )

    def inverse(self) -> Self:
        """The element with ``s.inverse() @ s`` the identity."""
        return self._like({name: value.reciprocal() for name, value in self.images.items()})

    def __matmul__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        same_group(self.group, other.group)
        return self._like({name: value * other.images[name].to(value.device) for name, value in self.images.items()})

    def axis_multiplier(self, site: str, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """What multiplies each position of this axis: ``batch_shape + (length,)``, computed in at least ``dtype``.

        :param dim: the axis, counted in the group's view of the site, see ``group.view``.
        """
        members = self.group.members(site).get(dim, [])
        length = self.group.view_shapes[site][dim]
        full: Tensor | None = None
        for name, axis in members:
            image = self.images[name]
            image = image.to(torch.promote_types(image.dtype, dtype)) if dtype is not None else image
            step = _on_positions(image**axis.exponent, axis.index, length)
            full = step if full is None else full * step
        return torch.ones(length) if full is None else full

    def __call__(self, weights: Mapping[str, Tensor]) -> Weights:
        """Act on weights: ``batch_shape`` of the result is that of the element and of the weights, broadcast.

        Sites that the group doesn't rescale are passed on, expanded to the same batch shape; dtypes stay.
        """
        return moved_weights(self, weights, acted_shape(self.group, weights))

    def moved(self, site: str, value: Tensor) -> Tensor:
        """Act on one site alone; batch shapes broadcast."""
        by_dim = self.group.members(site)
        value = self.group.view(site, value)
        epsilon = next((a.epsilon for ms in by_dim.values() for _, a in ms if a.epsilon is not None), 0.0)
        value = value + epsilon if epsilon else value
        for dim in by_dim:
            factor = self.axis_multiplier(site, dim, value.dtype).to(value)
            value = value * along_axis(factor, dim, len(self.group.view_shapes[site]))
        return self.group.view_back(site, value - epsilon if epsilon else value)


class ScalingGroup(RescalingGroup["Scaling"]):
    """Positive scalings of units whose activation is positively homogeneous: one copy of R+ per unit.

    A continuous group: it has no finite order.
    """

    def _wrap(self, images: Mapping[str, Tensor]) -> Scaling:
        return Scaling(self, images)

    def _check(self, name: str, value: Tensor) -> None:
        bad = ~(torch.isfinite(value) & (value > 0))
        if bool(bad.any()):
            raise ValueError(f"element[{name!r}] must hold finite numbers > 0; it holds {float(value[bad][0])}")

    def sample(
        self,
        shape: Sequence[int] = (),
        spread: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Scaling:
        """A batch of independent log-normal scales, ``log f ~ Normal(0, spread)``, from PyTorch's generator.

        (No uniform distribution exists on this group.)
        """
        shape, device = arguments.shape("shape", shape), arguments.device("device", device)
        arguments.number("spread", spread, least=0, below=math.inf)
        return Scaling(
            self,
            {
                name: (spread * torch.randn(*shape, n, device=device, dtype=dtype)).exp()
                for name, n in self.factors.items()
            },
        )


class Scaling(Multipliers[ScalingGroup]):
    """A batch of elements of a :class:`ScalingGroup`: positive multipliers."""


class SignGroup(RescalingGroup["Sign"]):
    """Sign flips: of units whose activation is odd, of the factors of a factor analysis. Two elements per unit.

    Flips of some units may do together what flips of others do: such elements act alike, and count once.
    """

    are_signs = True

    @classmethod
    def declare(
        cls, axes: Mapping[str, Sequence[str | None]], example_weights: Mapping[str, Tensor | torch.Size]
    ) -> SignGroup:
        """Declare which axes of which sites can be flipped together, for any Pyro model.

        >>> signs = SignGroup.declare(
        ...     {"loadings": (None, "factor"), "scores": ("factor", None)},
        ...     {"loadings": torch.zeros(5, 2), "scores": torch.zeros(2, 20)},
        ... )
        >>> signs.order()
        4

        :param axes: site -> for each of its axes, the name of the factor whose units flip it, or ``None``.
        :param example_weights: one example (or the shape) of every site of the model, without batch dimensions.
        """
        shapes = shapes_of(example_weights)
        factors = []
        for name, (n, members) in declared_axes(axes, shapes).items():
            parts = tuple(RescaledAxis(site, dim, torch.arange(n)[None], 1) for site, dim in members)
            factors.append(RescalingFactor(name, n, parts))
        return cls(factors, shapes)

    def verify(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> ModelVerification:
        """Check that a Pyro model is invariant under the group; see
        :func:`~pyro_symmetric.symmetry.model_check.verify_model`."""
        from pyro_symmetric.symmetry.model_check import verify_model

        return verify_model(self, model, *args, **kwargs)

    def _wrap(self, images: Mapping[str, Tensor]) -> Sign:
        return Sign(self, images)

    def _check(self, name: str, value: Tensor) -> None:
        bad = value.abs() != 1
        if bool(bad.any()):
            raise ValueError(f"element[{name!r}] must hold +1 or -1 only; it holds {float(value[bad][0])}")

    def order(self) -> int:
        """The number of elements that act differently, exactly."""
        return int(2**self.dim)

    def log_order(self) -> float:
        """Natural logarithm of the number of elements that act differently."""
        return self.dim * math.log(2.0)

    def enumerate(self) -> Sign:
        """All elements that act differently, as one batch of shape ``(order,)`` that starts with the identity.

        :raises ValueError: if there are more than about a million.
        """
        if self.dim > ENUMERATION_LIMIT:
            raise ValueError(f"the group has 2^{self.dim} elements; at most 2^{ENUMERATION_LIMIT} can be enumerated")
        dtype = torch.get_default_dtype()
        signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=self.dim)), dtype=dtype)
        every = torch.ones(len(signs), sum(self.factors.values()), dtype=dtype)
        if self.factors:
            every[:, torch.cat(list(self.independent.values()))] = signs
        pieces = every.split(list(self.factors.values()), dim=-1) if self.factors else ()
        return Sign(self, dict(zip(self.factors, pieces, strict=True)))

    def sample(
        self, shape: Sequence[int] = (), device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Sign:
        """A batch of uniform, independent elements, from PyTorch's generator."""
        shape, device = arguments.shape("shape", shape), arguments.device("device", device)
        dtype = dtype or torch.get_default_dtype()
        return Sign(
            self,
            {
                name: torch.randint(0, 2, (*shape, n), device=device).mul_(2).sub_(1).to(dtype)
                for name, n in self.factors.items()
            },
        )


class Sign(Multipliers[SignGroup]):
    """A batch of elements of a :class:`SignGroup`: multipliers +1 and -1."""


# small steps --------------------------------------------------------------------------------------------------------


def _on_positions(factor: Tensor, index: Tensor, length: int) -> Tensor:
    """Lay multipliers of units, ``batch + (n,)``, on the positions of an axis, by the (blocks, n) index map."""
    index = index.to(factor.device)
    full = factor.new_ones(*factor.shape[:-1], length)
    full[..., index.reshape(-1)] = factor.unsqueeze(-2).expand(*factor.shape[:-1], *index.shape).flatten(-2)
    return full
