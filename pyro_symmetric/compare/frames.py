"""Draws without their symmetries: each brought to one frame by what its orbit and all draws together say.

*Canonical* forms are functions of a draw's orbit alone. They sort units by one key, and where the keys of two units
overlap they mix the two. In the *aligned* frame units and signs are moved to where all draws lie closest together, by
all that a unit has. Both are functions of orbits and of the set of all draws, never of who drew them: draws that are
exchangeable stay so, and what compares them sees no difference where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeGuard, overload

import torch
from torch import Tensor, nn

from pyro_symmetric._process import forked
from pyro_symmetric.alignment.many import Frame, align_many
from pyro_symmetric.calls import described
from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.weights import Weights

NEAR_ROUNDS = 3  # a start needn't be an end
SEED = 0  # of the alignment's own random choices: a frame is a function of the draws

FrameKind = Literal["aligned", "canonical"]
AnySymmetry = Symmetry | Group | Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def is_group(symmetry: Any) -> TypeGuard[Symmetry | Group]:
    """True for a symmetry or a group, rather than a function of weights."""
    return isinstance(symmetry, Symmetry | Group)


def comparing(symmetry: Symmetry | Group, weights: Mapping[str, Tensor]) -> Group:
    """The group as it acts on weights that are compared, and predict nothing: running statistics may be missing."""
    group = group_of(symmetry, "symmetry")
    return group if all(site in weights for site in group.buffers) else group.without_buffers()


def removal(symmetry: Any) -> Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]:
    """The function that brings weights to their canonical forms under a symmetry; a function of weights is one itself.

    :raises TypeError: if it is neither.
    """
    if is_group(symmetry):
        return lambda weights: canonical_frame(weights, symmetry)
    if not callable(symmetry) or isinstance(symmetry, nn.Module):
        raise TypeError(
            f"symmetry is {described(symmetry)}; it must be a symmetry, such as find_symmetry(net, x), a declared "
            "group, or a function of weights that removes it"
        )

    def removed(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        result = symmetry(weights)
        if not isinstance(result, Mapping):
            raise TypeError(f"symmetry returned {described(result)}; it must return the weights that it is given")
        return result

    return removed


@overload
def canonical_frame(draws: Posterior, symmetry: Symmetry | Group, **options: Any) -> Posterior: ...
@overload
def canonical_frame(draws: Mapping[str, Tensor], symmetry: Symmetry | Group, **options: Any) -> Weights: ...
def canonical_frame(
    draws: Posterior | Mapping[str, Tensor], symmetry: Symmetry | Group, **options: Any
) -> Posterior | Weights:
    """The draws in canonical form, at the scales of the least norm of all parameters, biases included.

    Biases must count. At unit norm, and at the least norm of weights alone, a unit that is nearly dead has a bias
    without bound, and a few of them decide a distance.

    :param options: see :func:`~pyro_symmetric.canonical.forms.canonicalize`.
    :raises TypeError: if ``symmetry`` is neither a symmetry nor a group.
    """
    if isinstance(draws, Posterior):
        return draws.map(canonical_frame, symmetry, **options)
    return canonicalize(draws, comparing(symmetry, draws), scalings="minimal_norm", warn=False, **options)


@overload
def one_frame(canonical: Posterior, symmetry: Symmetry | Group) -> Posterior: ...
@overload
def one_frame(canonical: Mapping[str, Tensor], symmetry: Symmetry | Group) -> Weights: ...
def one_frame(canonical: Posterior | Mapping[str, Tensor], symmetry: Symmetry | Group) -> Posterior | Weights:
    """Canonical forms, their units and signs moved to where they lie closest to the mean of all draws.

    A canonical form sorts units by one key, and tells nothing of units whose keys overlap; alignment looks at all that
    a unit has. It starts from canonical forms, so that where it ends depends on the draws' orbits, not on the copies in
    which they came. It takes the draws in the order of their norms, and its random choices from a seed of its own: the
    frame is a function of the set of draws, whichever chain or sample each belongs to, and draws whose orbits are
    exchangeable are so in this frame too. Scales stay those of the canonical form.

    :param canonical: draws in canonical form, a ``Posterior`` or weights ``(draws, *site_shape)``.
    :param symmetry: what canonical forms were taken of, a symmetry or a group.
    """
    if isinstance(canonical, Posterior):
        batch = (canonical.num_chains, canonical.num_samples)
        moved = one_frame(canonical.get_samples(), symmetry)
        return canonical.map(lambda _: {site: value.unflatten(0, batch) for site, value in moved.items()})
    group = comparing(group_of(symmetry, "symmetry").finite, canonical)
    order = _squared_norms(canonical).argsort()
    back = order.argsort()
    with forked(SEED):
        frame = _closest(_select(canonical, order), group)
    return _select(frame.aligned, back)


def pooled_frame(samples: Sequence[Mapping[str, Tensor]], symmetry: Symmetry | Group) -> list[Weights]:
    """Samples in canonical form, ``(draws, *site_shape)`` each, brought into one frame found from all draws together.

    Sites that some sample lacks are left out.
    """
    first, *others = samples
    shared = [site for site in first if all(site in other for other in others)]
    sizes = [len(sample[shared[0]]) for sample in samples]
    moved = one_frame({site: torch.cat([sample[site].detach() for sample in samples]) for site in shared}, symmetry)
    parts = {site: value.split(sizes) for site, value in moved.items()}
    return [{site: part[i] for site, part in parts.items()} for i in range(len(samples))]


# small steps --------------------------------------------------------------------------------------------------------


def _closest(canonical: Weights, group: Group) -> Frame:
    """The better of two ends, if draws are many: from canonical forms, and from where distances are least.

    Many draws are aligned by densities, which count a weight by its spread. In canonical forms the weight that units
    are sorted by hardly spreads, the others of mixed units do, and from there the descent may end with units mixed.
    Distances don't know spreads; they can be misled by a weight of large numbers only.
    """
    frame = align_many(canonical, group, progress=False)
    if frame.objective != "gaussian":
        return frame
    near = align_many(canonical, group, cost="wasserstein", max_rounds=NEAR_ROUNDS, progress=False)
    other = align_many(near.aligned, group, progress=False)
    return min(frame, other, key=lambda end: float(end.cost.mean()))


def _squared_norms(weights: Mapping[str, Tensor]) -> Tensor:
    """Of each draw, ``(S,)``: what no permutation and no sign changes."""
    parts = [value.flatten(1) if value.dim() > 1 else value[:, None] for value in weights.values()]
    return torch.stack([part.square().sum(1, dtype=torch.float64) for part in parts]).sum(0)


def _select(weights: Mapping[str, Tensor], rows: Tensor) -> Weights:
    return {site: value[rows.to(value.device)] for site, value in weights.items()}
