"""Draws without their symmetries: each brought to one frame by what its orbit and all draws together say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar, overload

from torch import Tensor

from pyro_symmetric.alignment.many import align_many
from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.weights import Weights

MOST_ROUNDS = 10  # any frame will do, so the last per cent of the distance needn't be won

AnyDraws = TypeVar("AnyDraws", Posterior, Weights)


def is_group(symmetry: Any) -> TypeGuard[Symmetry | Group]:
    """True for a symmetry or a group, rather than a function of weights."""
    return isinstance(symmetry, Symmetry | Group)


def comparing(symmetry: Symmetry | Group, weights: Mapping[str, Tensor]) -> Group:
    """The group as it acts on weights that are compared, and predict nothing: running statistics may be missing."""
    group = group_of(symmetry, "symmetry")
    return group if all(site in weights for site in group.buffers) else group.without_buffers()


@overload
def canonical_frame(draws: Posterior, symmetry: Symmetry | Group, **options: Any) -> Posterior: ...
@overload
def canonical_frame(draws: Mapping[str, Tensor], symmetry: Symmetry | Group, **options: Any) -> Weights: ...
def canonical_frame(
    draws: Posterior | Mapping[str, Tensor], symmetry: Symmetry | Group, **options: Any
) -> Posterior | Weights:
    """The draws in canonical form.

    :param options: see :func:`~pyro_symmetric.canonical.forms.canonicalize`.
    :raises TypeError: if ``symmetry`` is neither a symmetry nor a group.
    """
    if isinstance(draws, Posterior):
        return draws.map(canonical_frame, symmetry, **options)
    return canonicalize(draws, comparing(symmetry, draws), **{"warn": False, **options})


def one_frame(canonical: AnyDraws, symmetry: Symmetry | Group) -> AnyDraws:
    """Canonical forms, their units and signs moved to where they lie closest to the mean of all draws.

    A canonical form sorts units by one key, and tells nothing of units whose keys overlap; alignment looks at all that
    a unit has. It starts from canonical forms, so that where it ends depends on the draws' orbits, not on the copies in
    which they came, and it never sees which chain or sample a draw belongs to: draws whose orbits are exchangeable are
    so in this frame too. Scales stay those of the canonical form.

    :param canonical: draws in canonical form, a ``Posterior`` or weights ``(draws, *site_shape)``.
    :param symmetry: what canonical forms were taken of, a symmetry or a group.
    """
    weights = canonical.samples if isinstance(canonical, Posterior) else canonical
    group = comparing(group_of(symmetry, "symmetry").finite, weights)
    return align_many(canonical, group, max_rounds=MOST_ROUNDS, progress=False).aligned
