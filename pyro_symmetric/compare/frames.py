"""Draws without their symmetries: each brought to one frame by what its orbit and all draws together say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar, overload

from torch import Tensor

from pyro_symmetric.alignment.many import align_many
from pyro_symmetric.calls import described
from pyro_symmetric.samples import Posterior
from pyro_symmetric.symmetry.canonical import Symmetry, canonical_form
from pyro_symmetric.symmetry.finite import FiniteGroup, finite_part
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.rescaling import SignGroup
from pyro_symmetric.symmetry.weights import Weights

MOST_ROUNDS = 10  # any frame will do, so the last per cent of the distance needn't be won

Draws = TypeVar("Draws", Posterior, Weights)


def is_group(symmetry: Any) -> TypeGuard[Symmetry | PermutationGroup | SignGroup | FiniteGroup]:
    """Whether it is a symmetry or a group of one, rather than a function of weights."""
    return isinstance(symmetry, PermutationGroup | SignGroup | FiniteGroup) or hasattr(symmetry, "permutations")


def comparing(symmetry: Any, weights: Mapping[str, Tensor]) -> Any:
    """The symmetry as it acts on weights that are compared, and predict nothing: running statistics may be missing."""
    held = all(site in weights for site in getattr(symmetry, "buffers", ()))
    return symmetry if held else symmetry.without_buffers()


@overload
def canonical_frame(draws: Posterior, symmetry: Any, **options: Any) -> Posterior: ...
@overload
def canonical_frame(draws: Mapping[str, Tensor], symmetry: Any, **options: Any) -> Weights: ...
def canonical_frame(draws: Posterior | Mapping[str, Tensor], symmetry: Any, **options: Any) -> Posterior | Weights:
    """The draws in canonical form.

    :param options: see :func:`~pyro_symmetric.symmetry.canonicalize`.
    :raises TypeError: if ``symmetry`` is none.
    """
    if not is_group(symmetry):
        raise TypeError(
            f"symmetry is {described(symmetry)}; it must be a symmetry, such as find_symmetry(net, x), or a group of it"
        )
    if isinstance(draws, Posterior):
        form = canonical_frame(draws.samples, symmetry, **options)
        return Posterior(form, draws.statistics, draws.metadata, rows=draws.rows)
    return canonical_form(draws, comparing(symmetry, draws), **options)


def one_frame(canonical: Draws, symmetry: Any) -> Draws:
    """Canonical forms, their units and signs moved to where they lie closest to the mean of all draws.

    A canonical form sorts units by one key, and tells nothing of units whose keys overlap; alignment looks at all that
    a unit has. It starts from canonical forms, so that where it ends depends on the draws' orbits, not on the copies in
    which they came, and it never sees which chain or sample a draw belongs to: draws whose orbits are exchangeable are
    so in this frame too. Scales stay those of the canonical form.

    :param canonical: draws in canonical form, a ``Posterior`` or weights ``(draws, *site_shape)``.
    :param symmetry: what canonical forms were taken of, a symmetry or a group.
    """
    weights = canonical.samples if isinstance(canonical, Posterior) else canonical
    group = comparing(finite_part(symmetry), weights)
    return align_many(canonical, group, max_rounds=MOST_ROUNDS, triples=0, progress=False).aligned
