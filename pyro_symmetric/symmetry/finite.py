r"""Permutations and signs together: the finite part of a symmetry, as it serves to symmetrise a guide.

Factors of a factor analysis can be exchanged and flipped; so can the hidden units of a tanh network. An element acts as
:math:`g = p\,\sigma`, first the signs, then the permutations,

.. math:: (g \cdot w)_i = \sigma_{p(i)}\, w_{p(i)},

and since permutations carry signs into signs, :math:`p^{-1} \sigma p = \sigma'` with
:math:`\sigma'_u = \sigma_{p^{-1}(u)}`, the elements form a group of :math:`|P| \cdot |\Sigma|` elements; for one set
of ``n`` units it is the hyperoctahedral group of order :math:`n!\,2^n`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.carrying import SignCarrier
from pyro_symmetric.symmetry.factored import gather_last, moved_weights, require_buffers, same_group
from pyro_symmetric.symmetry.flat import FlatAction
from pyro_symmetric.symmetry.permutation import ENUMERATION_LIMIT, Permutation, PermutationGroup
from pyro_symmetric.symmetry.rescaling import Sign, SignGroup
from pyro_symmetric.symmetry.weights import (
    Weights,
    batch_shape,
    flatten,
    require_same_network,
    require_sites,
    unflatten,
)

if TYPE_CHECKING:
    from pyro_symmetric.symmetry.model_check import ModelVerification
    from pyro_symmetric.symmetry.weight_symmetry import WeightSymmetry


class FiniteGroup:
    """A group made of permutations and signs.

    It serves wherever a :class:`~pyro_symmetric.symmetry.permutation.PermutationGroup` serves: symmetrised guides and
    distributions, ``evidence``, the estimators that ask no more of a group than draws or a list of its elements.

    >>> example = {"loadings": torch.zeros(5, 2), "scores": torch.zeros(2, 20)}
    >>> axes = {"loadings": (None, "factor"), "scores": ("factor", None)}
    >>> group = FiniteGroup(PermutationGroup.declare(axes, example), SignGroup.declare(axes, example))
    >>> group.order()
    8

    :param permutations: the exchanges.
    :param signs: the flips. A permutation must carry every unit that is flipped onto another such unit.
    :raises ValueError: if the two disagree on a site's shape, or permutations tear the units of a sign factor apart.
    """

    def __init__(self, permutations: PermutationGroup, signs: SignGroup):
        arguments.instance("permutations", permutations, PermutationGroup, "a PermutationGroup")
        arguments.instance("signs", signs, SignGroup, "a SignGroup")
        shapes = {**permutations.site_shapes, **signs.site_shapes}
        for site, shape in permutations.site_shapes.items():
            if shapes[site] != shape:
                raise ValueError(
                    f"site {site!r} has shape {tuple(shape)} in permutations, but {tuple(shapes[site])} in signs"
                )
        self.site_shapes: dict[str, torch.Size] = shapes
        spans = permutations.spans | signs.spans  # one view for both, in which their axes can be compared
        alike = permutations.site_shapes == shapes and permutations.spans == spans
        self.permutations = permutations if alike else permutations.over(shapes, spans)
        alike = signs.site_shapes == shapes and signs.spans == spans
        self.signs = signs if alike else signs.over(shapes, spans)
        self._carrier = SignCarrier(self.permutations, self.signs)

    # what the group is ----------------------------------------------------------------------------------------------

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that the group acts on, buffers included."""
        return tuple(dict.fromkeys((*self.permutations.sites, *self.signs.sites)))

    @property
    def required_sites(self) -> tuple[str, ...]:
        """The sites that weights must hold to be acted on."""
        return tuple(dict.fromkeys((*self.permutations.required_sites, *self.signs.required_sites)))

    def order(self) -> int:
        """The number of elements of the group, exactly."""
        return self.permutations.order() * self.signs.order()

    def log_order(self) -> float:
        """Natural logarithm of the number of elements."""
        return self.permutations.log_order() + self.signs.log_order()

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers (running statistics) that the group acts on."""
        return tuple(dict.fromkeys((*self.permutations.buffers, *self.signs.buffers)))

    def without_buffers(self) -> FiniteGroup:
        """The same factors acting on parameters alone; see ``PermutationGroup.without_buffers``."""
        buffers = self.buffers
        return FiniteGroup(self.permutations.leaving(buffers), self.signs.leaving(buffers)) if buffers else self

    def batch_shape(self, weights: Mapping[str, Tensor]) -> torch.Size:
        """The batch shape of ``weights`` that are only looked at, checked against the sites' shapes."""
        require_sites(weights, self.required_sites)
        return batch_shape(weights, self.site_shapes)

    def acted_shape(self, weights: Mapping[str, Tensor]) -> torch.Size:
        """The batch shape of ``weights`` that are to be moved, all sites, buffers included."""
        arguments.weights("weights", weights)
        require_buffers(weights, self.buffers)
        require_same_network(weights, self.site_shapes)
        return self.batch_shape(weights)

    def over(self, site_shapes: Mapping[str, torch.Size]) -> FiniteGroup:
        """The same factors, for a model with these sites."""
        return FiniteGroup(self.permutations.over(site_shapes), self.signs.over(site_shapes))

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"permutations": self.permutations.to_dict(), "signs": self.signs.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FiniteGroup:
        """The inverse of :meth:`to_dict`."""
        arguments.entries("data", data, ("permutations", "signs"))
        return cls(PermutationGroup.from_dict(data["permutations"]), SignGroup.from_dict(data["signs"]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FiniteGroup):
            return NotImplemented
        return self.permutations == other.permutations and self.signs == other.signs

    def __hash__(self) -> int:
        return hash((self.permutations, self.signs))

    def __repr__(self) -> str:
        return f"FiniteGroup of log-order {self.log_order():.1f}\n{self.permutations!r}\n{self.signs!r}"

    # its elements ---------------------------------------------------------------------------------------------------

    def identity(self, shape: Sequence[int] = (), device: torch.device | str | None = None) -> SignedPermutation:
        """The neutral element, as a batch of the given shape."""
        return SignedPermutation(
            self, self.permutations.identity(shape, device=device), self.signs.identity(shape, device=device)
        )

    def sample(self, shape: Sequence[int] = (), device: torch.device | str | None = None) -> SignedPermutation:
        """A batch of uniform, independent elements, from PyTorch's generator."""
        return SignedPermutation(
            self, self.permutations.sample(shape, device=device), self.signs.sample(shape, device=device)
        )

    def element(
        self,
        permutations: Mapping[str, Tensor | Sequence[int]] | None = None,
        signs: Mapping[str, Tensor | Sequence[float]] | None = None,
    ) -> SignedPermutation:
        """A given element; factors that are left out stay at the identity. Signs act first."""
        return SignedPermutation(self, self.permutations.element(permutations or {}), self.signs.element(signs or {}))

    def enumerate(self) -> SignedPermutation:
        """All elements, as one batch of shape ``(order,)`` that starts with the identity.

        :raises ValueError: if there are more than a million.
        """
        if self.order() > ENUMERATION_LIMIT:
            raise ValueError(
                f"the group has exp({self.log_order():.1f}) elements; at most {ENUMERATION_LIMIT} can be enumerated"
            )
        first, second = torch.arange(self.permutations.order()), torch.arange(self.signs.order())
        return SignedPermutation(
            self,
            self.permutations.enumerate().select(first.repeat_interleave(len(second))),
            self.signs.enumerate().select(second.repeat(len(first))),
        )

    def flat(self, sites: Sequence[str]) -> SignedFlatAction:
        """The action on vectors that concatenate ``sites`` in this order."""
        return SignedFlatAction(self, sites)

    def verify(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> ModelVerification:
        """Check that a Pyro model is invariant under the group; see
        :func:`~pyro_symmetric.symmetry.model_check.verify_model`."""
        from pyro_symmetric.symmetry.model_check import verify_model

        return verify_model(self, model, *args, **kwargs)


class SignedPermutation:
    """A batch of elements ``p σ`` of a :class:`FiniteGroup`: signs act first.

    ``g(weights)`` acts, ``g @ h`` composes (``(g @ h)(w) == g(h(w))``), ``g.inverse()`` inverts. Batch shapes of
    elements and weights broadcast.
    """

    def __init__(self, group: FiniteGroup, permutation: Permutation, sign: Sign):
        self.group = group
        self.permutation = permutation
        self.sign = sign
        self.batch_shape = torch.broadcast_shapes(permutation.batch_shape, sign.batch_shape)

    def __repr__(self) -> str:
        return f"SignedPermutation(batch_shape={tuple(self.batch_shape)}, log_order={self.group.log_order():.1f})"

    @property
    def steps(self) -> tuple[Sign, Permutation]:
        """What acts one after the other, the first one first."""
        return self.sign, self.permutation

    def to(self, device: torch.device | str) -> SignedPermutation:
        """The same element on another device."""
        return SignedPermutation(self.group, self.permutation.to(device), self.sign.to(device))

    def select(self, index: int | slice | Tensor | tuple[slice | None, ...]) -> SignedPermutation:
        """Index the batch: ``g.select(0)`` is the first element."""
        return SignedPermutation(self.group, self.permutation.select(index), self.sign.select(index))

    def equal(self, other: SignedPermutation) -> bool:
        """Whether both are the same elements."""
        return self.permutation.equal(other.permutation) and self.sign.equal(other.sign)

    def inverse(self) -> SignedPermutation:
        """The element with ``g.inverse() @ g`` the identity."""
        carried = self.group._carrier(self.sign.inverse(), self.permutation.inverse())
        return SignedPermutation(self.group, self.permutation.inverse(), carried)

    def __matmul__(self, other: SignedPermutation) -> SignedPermutation:
        if not isinstance(other, SignedPermutation):
            return NotImplemented
        same_group(self.group, other.group)
        carried = self.group._carrier(self.sign, other.permutation)
        return SignedPermutation(self.group, self.permutation @ other.permutation, carried @ other.sign)

    def __call__(self, weights: Mapping[str, Tensor]) -> Weights:
        """Act on weights; sites that the group doesn't touch are passed on, expanded to the same batch shape."""
        return moved_weights(self, weights, self.group.acted_shape(weights))

    def moved(self, site: str, value: Tensor) -> Tensor:
        """Act on one site alone; batch shapes broadcast."""
        return self.permutation.moved(site, self.sign.moved(site, value))


class SignedFlatAction:
    """How a :class:`FiniteGroup` acts on vectors ``batch_shape + (D,)``: one multiplication and one gather.

    The map preserves volume (:meth:`log_abs_det` is zero).
    """

    def __init__(self, group: FiniteGroup, sites: Sequence[str]):
        sites = arguments.listed("sites", sites, str, "sites")
        left_out = [site for site in group.required_sites if site not in sites]
        if left_out:
            raise ValueError(f"the group moves the sites {left_out}, which the vector doesn't hold: {sites}")
        self.group = group
        self.gather = FlatAction(group.permutations, sites)
        self.sites = self.gather.sites
        self.dim = self.gather.dim

    def __repr__(self) -> str:
        return f"SignedFlatAction(dim={self.dim}, sites={list(self.sites)})"

    def multiplier(self, element: SignedPermutation, dtype: torch.dtype | None = None) -> Tensor:
        """Tensor ``element.batch_shape + (D,)`` of signs that the vector is multiplied by, before it is gathered."""
        images = element.sign.images
        device = next(iter(images.values())).device if images else None
        ones = self.unflatten(torch.ones(self.dim, device=device, dtype=dtype))
        return self.flatten(moved_weights(element.sign, ones, ()))

    def index(self, element: SignedPermutation) -> Tensor:
        """LongTensor ``element.batch_shape + (D,)`` of the gather."""
        return self.gather.index(element.permutation)

    def __call__(self, vector: Tensor, element: SignedPermutation) -> Tensor:
        """Act on vectors; batch shapes broadcast."""
        if vector.shape[-1:] != (self.dim,):
            raise ValueError(f"vector has shape {tuple(vector.shape)}, but this action needs a last axis of {self.dim}")
        flipped = vector * self.multiplier(element, vector.dtype).to(vector.device)
        return gather_last(flipped, self.index(element).to(vector.device))

    def log_abs_det(self, vector: Tensor, element: SignedPermutation) -> Tensor:
        """Log-determinant of the action's Jacobian, ``batch_shape``: zero, for signed permutations."""
        return vector.new_zeros(torch.broadcast_shapes(vector.shape[:-1], element.batch_shape))

    def flatten(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Weights -> vectors."""
        return flatten(weights, self.sites, self.group.site_shapes)

    def unflatten(self, vector: Tensor) -> Weights:
        """Vectors -> weights."""
        return unflatten(vector, self.sites, self.group.site_shapes)


AnyFiniteGroup = PermutationGroup | FiniteGroup


def finite_part(group: AnyFiniteGroup | SignGroup | WeightSymmetry) -> AnyFiniteGroup:
    """What a guide can be averaged over: permutations, or permutations and signs.

    Scalings and shifts of a :class:`~pyro_symmetric.symmetry.weight_symmetry.WeightSymmetry` are continuous and left
    out: no proper prior is invariant under them, so they are no symmetry of a posterior.

    :raises TypeError: if ``group`` is none of these.
    """
    if isinstance(group, PermutationGroup | FiniteGroup):
        return group
    if isinstance(group, SignGroup):
        return FiniteGroup(PermutationGroup((), group.site_shapes), group)
    permutations, signs = getattr(group, "permutations", None), getattr(group, "signs", None)
    if not isinstance(permutations, PermutationGroup) or not isinstance(signs, SignGroup):
        raise TypeError(
            f"group is a {type(group).__name__}; it must be a PermutationGroup, a SignGroup, a FiniteGroup or a "
            "WeightSymmetry, e.g. find_symmetry(net, x) or PermutationGroup.declare(...)"
        )
    return FiniteGroup(permutations, signs) if signs.factors else permutations


def finite_group_from_dict(data: Mapping[str, Any]) -> AnyFiniteGroup:
    """The inverse of ``to_dict`` of either kind."""
    return FiniteGroup.from_dict(data) if "signs" in data else PermutationGroup.from_dict(data)
