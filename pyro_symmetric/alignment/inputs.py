"""What :func:`~pyro_symmetric.alignment.align` is given, brought to one form and checked: moments, site by site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from pyro_symmetric.alignment.costs import Cost
from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.alignment.state import Groups, State
from pyro_symmetric.alignment.units import units_of
from pyro_symmetric.samples import Posterior
from pyro_symmetric.symmetry.finite import FiniteGroup, SignedPermutation
from pyro_symmetric.symmetry.permutation import Permutation, PermutationGroup
from pyro_symmetric.symmetry.rescaling import RescalingGroup, Scaling, ScalingGroup, ShiftGroup, Sign, SignGroup
from pyro_symmetric.symmetry.weight_symmetry import SymmetryElement, WeightSymmetry
from pyro_symmetric.symmetry.weights import require_finite

AnyGroup = PermutationGroup | SignGroup | ScalingGroup | FiniteGroup | WeightSymmetry
Element = Permutation | Sign | Scaling | SignedPermutation | SymmetryElement
Moments = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """A group taken apart for the descent.

    :param group: as it was given.
    :param parts: permutations, signs and scalings in one view.
    :param shifts: constants in front of a softmax.
    :param sites: the sites that may be compared: all that the group knows, without buffers.
    :param required: those that must be there.
    """

    group: AnyGroup
    parts: Groups
    shifts: ShiftGroup
    sites: tuple[str, ...]
    required: frozenset[str]

    @property
    def site_shapes(self) -> dict[str, torch.Size]:
        return self.parts.permutations.site_shapes

    def element(self, state: State, shifts: Mapping[str, Tensor], batch_shape: Sequence[int]) -> Element:
        """A state as an element of the group that was given."""
        shape, group = tuple(batch_shape), self.group
        images = {name: value.reshape(*shape, -1) for name, value in state.images.items()}

        def cut(kind: str, whole: RescalingGroup[Any]) -> dict[str, Tensor]:
            values = state.multipliers[kind] if kind == "sign" else state.multipliers[kind].exp()
            found = {name: values[:, at].reshape(*shape, -1) for name, at in self.parts.offsets(kind).items()}
            return {name: found.get(name, values.new_ones(*shape, n)) for name, n in whole.factors.items()}

        if isinstance(group, PermutationGroup):
            return Permutation(group, images)
        if isinstance(group, SignGroup):
            return Sign(group, cut("sign", group))
        if isinstance(group, ScalingGroup):
            return Scaling(group, cut("scale", group))
        permutation, sign = Permutation(group.permutations, images), Sign(group.signs, cut("sign", group.signs))
        if isinstance(group, FiniteGroup):
            return SignedPermutation(group, permutation, sign)
        shift = group.shifts.element({site: value.reshape(shape) for site, value in shifts.items()})
        return SymmetryElement((shift, sign, Scaling(group.scalings, cut("scale", group.scalings)), permutation))


def problem_of(group: AnyGroup) -> Problem:
    """Take a group apart.

    :raises TypeError: if it is none.
    """
    if not isinstance(group, AnyGroup):
        raise TypeError(
            f"group is a {type(group).__name__}; it must be a PermutationGroup, SignGroup, ScalingGroup, FiniteGroup "
            "or WeightSymmetry, e.g. find_symmetry(net, x) or PermutationGroup.declare(...)"
        )
    given: list[Any] = [group]
    if isinstance(group, FiniteGroup | WeightSymmetry):
        given = [group.permutations, group.signs]
    if isinstance(group, WeightSymmetry):
        given.append(group.scalings)
    spans = frozenset(span for part in given for span in part.spans)
    shapes = dict(group.site_shapes)

    def part(kind: Any) -> Any:
        found = next((own for own in given if isinstance(own, kind)), None)
        if found is None:
            return kind((), shapes, spans)
        alike = found.site_shapes == shapes and found.spans == spans
        return found if alike else found.over(shapes, spans)

    permutations = part(PermutationGroup)
    parts = Groups(permutations, part(SignGroup), part(ScalingGroup), tuple(units_of(permutations)))
    shifts = group.shifts if isinstance(group, WeightSymmetry) else ShiftGroup((), shapes)
    every: list[Any] = [parts.permutations, parts.signs, parts.scalings, shifts]
    required = frozenset(site for own in every for site in own.required_sites)
    acted = {site for own in every for site in own.sites}
    return Problem(group, parts, shifts, tuple(s for s in shapes if s in required or s not in acted), required)


def plain(weights: Any) -> Any:
    """Of a network its parameters and running statistics; all else (a guide, say) as it is."""
    if not isinstance(weights, nn.Module) or isinstance(weights, AutoGuide) or hasattr(weights, "prototype_trace"):
        return weights
    buffers = {name: value for name, value in weights.named_buffers() if value.is_floating_point()}
    return {**dict(weights.named_parameters()), **buffers}


def gaussian_of(weights: Any, name: str) -> GaussianWeights:
    """Moments of weights (a batch, too), of a network, of a Gaussian guide, or over all draws of a posterior."""
    weights = plain(weights)
    if isinstance(weights, Posterior):
        require_draws(weights, name)
        flat = {site: value.flatten(0, 1) for site, value in weights.samples.items()}
        require_finite(flat, name)
        return GaussianWeights(
            {site: value.mean(0) for site, value in flat.items()},
            {site: value.std(0, correction=0) for site, value in flat.items()},
        )
    if isinstance(weights, Mapping) and not weights:
        raise ValueError(f"{name} is empty; it must hold the weights of at least one site")
    return to_gaussian(weights)


def require_draws(posterior: Posterior, name: str) -> None:
    """:raises ValueError: if the posterior is empty."""
    if not posterior.num_chains * posterior.num_samples:
        raise ValueError(f"{name} has {posterior.num_chains} chains of {posterior.num_samples} draws; it is empty")


def batch_shape_of(weights: GaussianWeights, problem: Problem, name: str) -> torch.Size:
    """The leading dimensions of all sites.

    :raises ValueError: naming the site that doesn't fit.
    """
    found: tuple[torch.Size, str] | None = None
    for site in problem.sites:
        if site not in weights.loc:
            continue
        loc, shape = weights.loc[site], _own_shape(weights, site, problem)
        split = loc.dim() - len(shape)
        if split < 0 or loc.shape[split:] != shape:
            raise ValueError(f"{name}[{site!r}] has shape {tuple(loc.shape)}, but the group expects {tuple(shape)}")
        if found is None:
            found = loc.shape[:split], site
        elif loc.shape[:split] != found[0]:
            raise ValueError(
                f"{name}[{site!r}] has batch shape {tuple(loc.shape[:split])}, but {name}[{found[1]!r}] has "
                f"{tuple(found[0])}; every site needs the same"
            )
    if found is not None and 0 in found[0]:
        raise ValueError(f"{name} has batch shape {tuple(found[0])}, so it holds no weights at all")
    return torch.Size() if found is None else found[0]


def varies(source: GaussianWeights, reference: GaussianWeights, problem: Problem) -> bool:
    """Whether either has a deviation above zero at a site that counts."""
    sites = _compared_sites(source, reference, problem)
    return any(bool(weights.scale[site].any()) for weights in (source, reference) for site in sites)


def moments_of(
    source: GaussianWeights, reference: GaussianWeights, problem: Problem, cost: Cost
) -> tuple[Moments, Moments, torch.Size]:
    """The moments of both, viewed and checked: ``(reference, source, batch_shape)``.

    The reference's are ``(1, *view_shape, channels)``, the source's ``(B, *view_shape, channels)``.
    """
    sites = _compared_sites(source, reference, problem)
    shape = batch_shape_of(source, problem, "source")
    if batch_shape_of(reference, problem, "reference"):
        batched = next(site for site in sites)
        raise ValueError(
            f"reference[{batched!r}] has shape {tuple(reference.loc[batched].shape)}, but the group expects "
            f"{tuple(_own_shape(reference, batched, problem))}: one set of weights at a time; align_many "
            "brings a batch into one frame"
        )
    for site in sites:
        _check_site(site, source, reference, problem, cost)
    # Of plain weights no deviations need to be carried along.
    channels = 2 if cost.uses_scale and (cost.needs_scale or varies(source, reference, problem)) else 1
    results: tuple[Moments, Moments] = ({}, {})
    for site in sites:
        device, dtype = source.loc[site].device, _dtype(source.loc[site], reference.loc[site])
        for result, weights in zip(results, (reference, source), strict=True):
            own = _own_shape(weights, site, problem)
            values = [value.to(device, dtype) for value in (weights.loc[site], weights.scale[site])[:channels]]
            viewed = [problem.parts.permutations.view(site, value.reshape(-1, *own)) for value in values]
            result[site] = torch.stack(viewed, -1)
    return (*results, shape)


# small steps --------------------------------------------------------------------------------------------------------


def _own_shape(weights: GaussianWeights, site: str, problem: Problem) -> torch.Size:
    bijection = weights.bijection(site)
    shape = problem.site_shapes[site]
    return shape if bijection is None else bijection.inverse_shape(shape)


def _compared_sites(source: GaussianWeights, reference: GaussianWeights, problem: Problem) -> list[str]:
    """The sites that count: those that the group knows, without buffers, held by both."""
    sites = []
    for site in problem.sites:
        held = {"source": site in source.loc, "reference": site in reference.loc}
        if not (any(held.values()) or site in problem.required):
            continue
        for name, holds in held.items():
            if not holds:
                found = sorted((source if name == "source" else reference).loc)
                raise ValueError(f"{name} lacks the site {site!r}, which alignment needs; it has {found}")
        sites.append(site)
    return sites


def _check_site(site: str, source: GaussianWeights, reference: GaussianWeights, problem: Problem, cost: Cost) -> None:
    rescaled = any(group.members(site) for group in problem.parts.rescalings.values()) or site in problem.shifts.sites
    moved = rescaled or bool(problem.parts.permutations.members(site))
    for name, weights in (("source", source), ("reference", reference)):
        bijection = weights.bijection(site)
        if bijection is not None and (rescaled or (bijection.domain.event_dim and moved)):
            how = "rescaled or shifted" if rescaled else "permuted"
            raise ValueError(
                f"the group moves site {site!r} of {name}, whose support {weights.supports[site]} isn't mapped to "
                f"unconstrained values {'linearly' if rescaled else 'element by element'}; its moments can't be {how}"
            )
        require_finite({site: weights.loc[site]}, name)
        require_finite({site: weights.scale[site]}, f"scale of {name}")
        if cost.needs_scale and not bool((weights.scale[site] > 0).all()):
            raise ValueError(f"{name} has deviations of zero at site {site!r}; cost 'kl' needs them positive")
    if (site in source.supports) != (site in reference.supports):
        transformed, plain = ("source", "reference") if site in source.supports else ("reference", "source")
        support = (source if site in source.supports else reference).supports[site]
        raise ValueError(
            f"{transformed}[{site!r}] is unconstrained, as a guide has it, but {plain}[{site!r}] isn't: map it by "
            f"biject_to(support).inv and pass GaussianWeights(loc, scale, supports={{{site!r}: {support}}})"
        )


def _dtype(source: Tensor, reference: Tensor) -> torch.dtype:
    """The wider of both dtypes, and at least float32, in which inner products are meaningful."""
    return torch.promote_types(torch.promote_types(source.dtype, reference.dtype), torch.float32)
