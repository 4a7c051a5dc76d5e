r"""Mean-field Gaussian moments by site, and the costs and features of pairs of them.

:func:`to_gaussian` converts guides (with a parameter for each site, a flat vector, a
Cholesky factor), plain weights, networks and draws to one form. Correlations are
dropped: deviations are marginal. For independent Gaussians

.. math:: W_2^2(q_0, q_1) = \|m_0 - m_1\|^2 + \|s_0 - s_1\|^2, \qquad
          \bar m = \sum_i \lambda_i m_i, \quad \bar s = \sum_i \lambda_i s_i ,

and the geodesic is the barycentre of two with weights :math:`(1 - t, t)` (Rossi et al.
2023, arXiv 2310.10171).

A cost is an elementwise function. Over all permutations and signs it is, up to a
constant, minus the score: the inner product of features of the reference and of the
moved source.

=================  ==============================  ==================  ===============
cost               cost of one weight              features of the     features of the
                                                   reference           source
=================  ==============================  ==================  ===============
``"l2"``           :math:`(m_0 - m_1)^2`           :math:`m_0`         :math:`m_1`
``"wasserstein"``  and :math:`(s_0 - s_1)^2`       :math:`m_0, s_0`    :math:`m_1,
                                                                       s_1`
``"gaussian"``     :math:`-E \log N(w; m_0,        :math:`m_0/s_0^2,   :math:`m_1,
                   s_0^2)`                         -1/2s_0^2`          s_1^2 + m_1^2`
activations        minus the product               standardised        standardised
=================  ==============================  ==================  ===============

``"l2"``, and ``"wasserstein"`` of plain networks, is weight matching (Ainsworth et al.
2023, arXiv 2209.04836). ``"gaussian"`` is, up to the source's entropy, the
Kullback-Leibler divergence to the reference: weights count by their precision, whatever
their units of measurement, and the few weights known best decide.

Activations are correlated over inputs (and pixels, and tokens), separately for each set
of units (Li et al. 2016, arXiv 1511.07543). They are read at the inputs of layers:
channel ``j`` of a layer's input belongs to the unit on column ``j`` of its weight. So a
layer's input is a site, ``(columns, samples)``, on which the group acts as on the
weight's columns, with nested units, heads and flattened pixels. Units that are no
layer's whole input (such as those of the lower layers of an ``nn.LSTM``) are matched by
their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from torch.distributions import biject_to
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Shape, described
from pyro_symmetric.discovery.symmetry import with_weights
from pyro_symmetric.groups import Group, is_real
from pyro_symmetric.groups.action import of_entries
from pyro_symmetric.groups.elements import require_buffers
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import (
    Shapes,
    Tensors,
    Weights,
    batch_shape,
    drop_names,
    first_value,
    keep_names,
    map_values,
    pick,
    require_finite,
    select_rows,
    shapes_of,
    stacked,
)

Moments = dict[str, Tensor]

# A weight that varies by less than this fraction, such as the zeros of a triangle,
# carries no information on labels.
LEAST_SPREAD = 1e-7
# Layers, and the weight whose columns multiply their first input.
LAYERS = (
    (nn.Linear, "weight"),
    (nn.modules.conv._ConvNd, "weight"),
    (nn.RNNBase, "weight_ih_l0"),
    (nn.RNNCellBase, "weight_ih"),
    (nn.MultiheadAttention, "in_proj_weight"),
)


@dataclass(frozen=True, repr=False)
class GaussianWeights:
    """Independent Gaussians over weights, by means and standard deviations.

    >>> first = ps.alignment.GaussianWeights(
    ...     {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    ... )
    >>> second = ps.alignment.GaussianWeights(
    ...     {"w": torch.tensor([3.0, 4.0])}, {"w": torch.ones(2)}
    ... )
    >>> ps.interpolate(first, second, 0.5).loc
    {'w': tensor([1.5000, 2.0000])}

    :param loc: site -> means, of the site's shape.
    :param scale: site -> standard deviations of the same shape; zero where a weight is
        known exactly.
    :param supports: site -> support of the model's site, for those sites whose moments
        are those of the unconstrained value ``biject_to(support).inv(weight)``.
    """

    loc: Weights
    scale: Weights
    supports: Mapping[str, Constraint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arguments.weights("loc", self.loc)
        arguments.weights("scale", self.scale)
        if odd := set(self.loc) ^ set(self.scale) | set(self.supports) - set(self.loc):
            raise ValueError(
                "loc and scale must hold the same sites, supports none but theirs: "
                f"{sorted(odd)}"
            )
        for site, loc in self.loc.items():
            scale = self.scale[site]
            if scale.shape != loc.shape or not (
                loc.is_floating_point() and scale.is_floating_point()
            ):
                raise ValueError(
                    f"loc[{site!r}] is {described(loc)}, scale[{site!r}] "
                    f"{described(scale)}; both must "
                    "be real numbers of one shape (of complex ones pass "
                    "torch.view_as_real, counters leave out)"
                )
            if not (scale >= 0).all():
                raise ValueError(
                    f"scale[{site!r}] holds negative values or NaN; standard "
                    "deviations are at least 0"
                )

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{site} {tuple(loc.shape)}" for site, loc in self.loc.items()
        )
        widest = max(
            (float(scale.max()) for scale in self.scale.values() if scale.numel()),
            default=0.0,
        )
        return f"GaussianWeights({shapes}; deviations up to {widest:.3g})"

    def bijection(self, site: str) -> Transform | None:
        """Return the map from the unconstrained to the constrained value of a site;
        ``None`` for the identity.
        """
        if site not in self.supports:
            return None
        return biject_to(of_entries(self.supports[site]))

    def shape_of(self, site: str, shape: torch.Size) -> torch.Size:
        """Return the shape of the moments of a site whose values have this shape."""
        bijection = self.bijection(site)
        return shape if bijection is None else bijection.inverse_shape(shape)


@torch.no_grad()
def to_gaussian(weights: Any, name: str = "weights") -> GaussianWeights:
    """Return the mean-field Gaussian moments of ``weights``, detached.

    >>> draws = ps.Posterior(
    ...     {"w": torch.tensor([[[0.0, 1.0], [2.0, 3.0]]])}, kind="independent"
    ... )
    >>> moments = ps.alignment.to_gaussian(draws)
    >>> moments.loc["w"], moments.scale["w"]
    (tensor([1., 2.]), tensor([1., 1.]))

    :param weights: one of

        * :class:`GaussianWeights`, returned unchanged;
        * plain weights (site -> tensor), or a network (its parameters and running
          statistics), with deviations of zero;
        * a ``Posterior``: means and deviations over all of its draws;
        * a Pyro guide that keeps Gaussian moments per site (``AutoNormal``) or in one
          flat vector (any ``AutoContinuous`` whose ``_loc_scale`` gives the marginal
          means and deviations). Moments are those of unconstrained values; ``supports``
          names the sites where these differ.

    :param name: of the argument, in messages.
    :raises ValueError: if there are no weights or draws, or the guide has no parameters
        yet.
    :raises TypeError: if ``weights`` is none of these.
    """
    if isinstance(weights, GaussianWeights):
        return weights
    return _read(plain(weights), name)


def on_host(
    weights: Any, name: str = "weights"
) -> tuple[GaussianWeights, torch.device]:
    """Return the moments on the CPU, and their device. On a GPU each decision of a
    descent would synchronise.
    """
    gaussian = to_gaussian(weights, name)
    device = next(
        (value.device for value in gaussian.loc.values()), torch.device("cpu")
    )
    loc = map_values(Tensor.cpu, gaussian.loc)
    scale = map_values(Tensor.cpu, gaussian.scale)
    return GaussianWeights(loc, scale, gaussian.supports), device


def plain(weights: Any) -> Any:
    """Return the parameters and running statistics of a network; all else (a guide,
    say) unchanged.
    """
    is_guide = isinstance(weights, AutoGuide) or hasattr(weights, "prototype_trace")
    if not isinstance(weights, nn.Module) or is_guide:
        return weights
    tensors: Weights = dict(weights.named_parameters())
    for name, value in weights.named_buffers():
        if value.is_floating_point():
            tensors[name] = value
    return tensors


def _read(weights: Any, name: str) -> GaussianWeights:
    """Return means, deviations (zero for plain weights) and supports, on their
    device.
    """
    if isinstance(weights, Posterior):
        flat = weights.get_samples()
        require_finite(flat, name)
        spread = map_values(lambda value: value.std(0, correction=0), flat)
        mean = map_values(lambda value: value.mean(0), flat)
        return GaussianWeights(mean, spread)
    if isinstance(weights, Mapping):
        arguments.weights(name, weights)
        loc = map_values(Tensor.detach, weights)
        return GaussianWeights(loc, map_values(torch.zeros_like, loc))
    by_site = hasattr(weights, "_get_loc_and_scale")
    in_one_vector = hasattr(weights, "_unpack_latent") and hasattr(
        weights, "_loc_scale"
    )
    if not by_site and not in_one_vector:
        raise TypeError(
            f"{name} is {described(weights)}, which has no Gaussian moments that can "
            "be read. Pass GaussianWeights, "
            "a dict of site -> tensor (for a network, dict(net.named_parameters())), "
            "AutoNormal, or a Gaussian "
            "AutoContinuous guide; of an AutoDelta guide pass guide.median()"
        )
    if weights.prototype_trace is None:
        raise ValueError(
            f"this {type(weights).__name__} has no parameters yet; call "
            "guide.setup(...) or run one SVI step first"
        )
    moments = {}
    if not by_site:  # a flat vector, in the order of the guide's own layout
        locs, scales = map(weights._unpack_latent, weights._loc_scale())
        for (entry, mean), (_, deviation) in zip(locs, scales, strict=True):
            moments[entry["name"]] = mean, deviation
    loc = Weights()
    scale = Weights()
    supports = {}
    for site, node in weights.prototype_trace.iter_stochastic_nodes():
        mean, deviation = weights._get_loc_and_scale(site) if by_site else moments[site]
        # Cloned, as later training steps change the guide's parameters in place.
        loc[site] = mean.detach().clone()
        scale[site] = deviation.detach().clone()
        if not is_real(node["fn"].support):
            supports[site] = node["fn"].support
    return GaussianWeights(loc, scale, supports)


# barycentres --------------------------------------------------------------------------


def barycentre_gaussians(
    gaussians: Sequence[GaussianWeights], shares: Sequence[float]
) -> GaussianWeights:
    """Return the barycentre of mean-field Gaussians of the same sites, with weights
    ``shares`` of sum one.
    """

    def mean(values: Sequence[Weights]) -> Weights:
        result = Weights()
        for site, example in values[0].items():
            terms = []
            for share, value in zip(shares, values, strict=True):
                terms.append(share * value[site].to(example.device))
            result[site] = torch.stack(terms).sum(0)
        return result

    loc = mean([gaussian.loc for gaussian in gaussians])
    scale = mean([gaussian.scale for gaussian in gaussians])
    return GaussianWeights(loc, scale, gaussians[0].supports)


def require_ends(first: GaussianWeights, second: GaussianWeights) -> None:
    """Raise ``ValueError`` unless both ends of a path are finite and have the same
    sites, shapes and supports.
    """
    shapes = shapes_of(first.loc).items()
    if differing := {site for site, _ in shapes ^ shapes_of(second.loc).items()}:
        raise ValueError(
            "both ends must have the same sites, of the same shapes; they differ in "
            f"{sorted(differing)}"
        )
    if differing := set(first.supports) ^ set(second.supports):
        raise ValueError(
            f"the sites {sorted(differing)} are unconstrained, as a guide has them, at "
            "one end only; map them by "
            "biject_to(support).inv and pass GaussianWeights(loc, scale, supports)"
        )
    for gaussian, end in ((first, "the first end"), (second, "the second end")):
        require_finite(gaussian.loc, end)
        require_finite(gaussian.scale, f"scale of {end}")


# costs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The cost of aligning moments, and its features.

    :param distance: moments of the reference and features of the moved source -> costs,
        elementwise.
    :param of_reference: moments -> features; ``of_source``: likewise.
    :param centre: the mean of the features of many sources -> the moments of their best
        reference.
    :param deviations: whether deviations count.
    :param squared: whether the cost is a squared distance, which has a minimum over
        scales.
    """

    distance: Callable[[Tensor, Tensor], Tensor] = lambda reference, moved: (
        reference - moved
    ).square()
    of_reference: Callable[[Tensor], Tensor] = lambda moments: moments
    of_source: Callable[[Tensor], Tensor] = lambda moments: moments
    centre: Callable[[Tensor], Tensor] = lambda features: features
    deviations: bool = True
    squared: bool = True

    def total(self, reference: Tensors, moved: Tensors) -> Tensor:
        """Return the cost of each source over all sites, float64 ``(B,)``."""
        if not moved:
            return torch.zeros(1, dtype=torch.float64, device="cpu")
        parts = [self.of_site(reference[site], value) for site, value in moved.items()]
        return torch.stack(parts).sum(0)

    def of_site(self, reference: Tensor, moved: Tensor) -> Tensor:
        """Return the cost of one site, float64 ``(B,)``."""
        distance = self.distance(reference, moved)
        distance = distance.reshape(-1, moved.shape[1], moved[0, 0].numel())
        return distance.sum((0, 2), dtype=torch.float64)


def _divergence(reference: Tensor, moved: Tensor) -> Tensor:
    loc, scale = reference
    # in place: it takes most of the time with many draws
    variance = moved[0].square().neg_().add_(moved[1])
    variance.add_((moved[0] - loc).square_()).mul_(0.5 / scale.square())
    return variance.add_(scale.log() + 0.5 * math.log(2 * math.pi))


def _fitted(features: Tensor) -> Tensor:
    loc, square = features
    variance = square - loc**2
    varies = variance > LEAST_SPREAD**2 * square
    return torch.stack([loc, torch.where(varies, variance, 1.0).sqrt()])


def _natural(moments: Tensor) -> Tensor:
    loc, scale = moments
    return torch.stack([loc / scale**2, -0.5 / scale**2])


def _raw(moments: Tensor) -> Tensor:
    loc = moments[0]
    variance = moments[1:].square().sum(0)
    return torch.stack([loc, loc**2 + variance])


COSTS = {
    "wasserstein": Cost(),
    "l2": Cost(deviations=False),
    "gaussian": Cost(_divergence, _natural, _raw, _fitted, squared=False),
}
CORRELATION = Cost(lambda reference, moved: -reference * moved, squared=False)


def require_fit(cost: str, group: Group) -> None:
    """Raise ``ValueError`` if a cost has no minimum over the scales of a group, or
    isn't a distance, of which rotations are the best.
    """
    if not COSTS[cost].squared and group.names("rotate"):
        raise ValueError(
            f"cost is {cost!r}, but the units {group.names('rotate')[0]!r} rotate, "
            "and deviations weight by weight don't: use cost='l2', or the symmetry's "
            ".finite part"
        )
    if not COSTS[cost].squared and group.names("scale"):
        raise ValueError(
            f"cost is {cost!r}, but the group scales {group.names('scale')[0]!r}, and "
            "scales make any density as high "
            "as one likes: use cost='wasserstein', or the symmetry's .finite part"
        )


# checks -------------------------------------------------------------------------------


def require_rotatable(gaussians: Iterable[GaussianWeights], group: Group) -> None:
    """Raise ``ValueError`` if units rotate that have deviations: a rotated Gaussian has
    none weight by weight.
    """
    if not group.names("rotate"):
        return
    for gaussian in gaussians:
        for site, value in gaussian.scale.items():
            if site in group.sites and value.any():
                raise ValueError(
                    f"{site!r} has deviations, which can't be rotated weight by "
                    "weight; align means alone, or draws, or by the symmetry's .finite "
                    "part, which holds permutations and signs"
                )


def batch_shape_of(weights: GaussianWeights, group: Group, name: str) -> torch.Size:
    """Return the leading dimensions that all sites share.

    :raises ValueError: naming the site that doesn't fit, or if the batch is empty.
    """
    group.require_own(weights.loc, name)
    shapes = {
        site: weights.shape_of(site, group.site_shapes[site])
        for site in _comparable(group)
    }
    if shapes.keys().isdisjoint(weights.loc):
        return torch.Size()
    shape = batch_shape(weights.loc, shapes, name)
    if 0 in shape:
        raise ValueError(
            f"{name} has batch shape {tuple(shape)}, so it holds no weights at all"
        )
    return shape


def compared_sites(gaussians: Mapping[str, GaussianWeights], group: Group) -> list[str]:
    """Return the sites to compare: those that the group knows, without buffers.

    :param gaussians: name in messages -> moments.
    :raises ValueError: naming the site that some lack, or whose values don't suit the
        group or one another.
    """
    known = set(group.required_sites)
    for gaussian in gaussians.values():
        known.update(gaussian.loc)
    sites = [site for site in _comparable(group) if site in known]
    for site in sites:
        for name, weights in gaussians.items():
            if site not in weights.loc:
                raise ValueError(
                    f"{name} lacks the site {site!r}, which alignment needs; it has "
                    f"{sorted(weights.loc)}"
                )
            require_finite({site: weights.loc[site]}, name)
            require_finite({site: weights.scale[site]}, f"scale of {name}")
            members = [*chain.from_iterable(group.members(site).values())]
            rescaled = any(axis.exponent for _, axis in members)
            bijection = weights.bijection(site)
            if bijection is None or not members:
                continue
            if rescaled or bijection.domain.event_dim:
                raise ValueError(
                    f"the group moves site {site!r} of {name}, whose support "
                    f"{weights.supports[site]} isn't mapped to "
                    "unconstrained values as the group moves it: linearly if it is "
                    "rescaled, else element by element"
                )
        kinds = {site in part.supports: name for name, part in gaussians.items()}
        if len(kinds) > 1:
            raise ValueError(
                f"{kinds[True]}[{site!r}] is unconstrained, as a guide has it, but "
                f"{kinds[False]}[{site!r}] isn't: "
                "give draws, or map it by biject_to(support).inv and pass "
                "GaussianWeights(loc, scale, supports)"
            )
    return sites


class Members(NamedTuple):
    """The moments of members by name, their device, and the batch shape of their
    elements.
    """

    moments: dict[str, GaussianWeights]
    device: torch.device
    shape: Shape


def members_of(sources: Any, group: Group) -> Members:
    """Return the members of a list, a batch or a posterior.

    :raises ValueError: if there are none, or naming the member and the site that
        doesn't fit.
    """
    if not isinstance(sources, Posterior | Mapping | GaussianWeights):
        members = arguments.listed("sources", sources, object, "members, or a batch")
        if not members:
            raise ValueError(
                "sources is an empty list; it must hold at least one set of weights, "
                "network or guide"
            )
        moments = dict[str, GaussianWeights]()
        devices = []
        for k, member in enumerate(members):
            name = f"sources[{k}]"
            moments[name], device = on_host(member, name)
            devices.append(device)
        for name, weights in moments.items():
            if batch_shape_of(weights, group, name):
                raise ValueError(
                    f"{name} has batch dimensions; a list holds one set of weights in "
                    "each place"
                )
            require_buffers(weights.loc, group.buffers, name)
        return Members(moments, devices[0], (len(moments),))
    shape = None
    samples = sources
    if isinstance(sources, Posterior):
        shape = (sources.num_chains, sources.num_samples)
        samples = sources.get_samples()
    # without the counters and labels that the group doesn't know
    if isinstance(samples, Mapping):
        integers = [s for s, value in samples.items() if not value.is_floating_point()]
        samples = drop_names(samples, set(integers).difference(group.site_shapes))
    gaussian, device = on_host(samples, "sources")
    batch = tuple(batch_shape_of(gaussian, group, "sources"))
    if len(batch) != 1:
        raise ValueError(
            f"sources has batch shape {batch}; it must be (number of members,), or a "
            "list of members"
        )
    require_buffers(gaussian.loc, group.buffers, "sources")
    return Members({"sources": gaussian}, device, shape or batch)


def moments_of(
    gaussians: Sequence[GaussianWeights], sites: Sequence[str], group: Group, cost: Cost
) -> list[Moments]:
    """Stack means and deviations (unless all are zero), site -> ``(channels, B,
    *site_shape)``.

    The dtype is the widest of all, at least float32, as inner products need.
    """
    varies = False
    for weights in gaussians:
        scales = pick(weights.scale, sites).values()
        varies = varies or (cost.deviations and any(scale.any() for scale in scales))
    result: list[Moments] = [{} for _ in gaussians]
    for site in sites:
        dtype = torch.float32
        for weights in gaussians:
            dtype = torch.promote_types(dtype, weights.loc[site].dtype)
        for moments, weights in zip(result, gaussians, strict=True):
            shape = weights.shape_of(site, group.site_shapes[site])
            channels = [weights.loc[site].to(dtype).reshape(-1, *shape)]
            if varies:
                channels.append(weights.scale[site].to(dtype).reshape(-1, *shape))
            moments[site] = torch.stack(channels)
    return result


def _comparable(group: Group) -> list[str]:
    buffers = set(group.buffers)
    return [site for site in group.site_shapes if site not in buffers]


# activations --------------------------------------------------------------------------


class Shown(NamedTuple):
    """Features of activations.

    :ivar group: the units whose activations enter a layer, with the signs that these
        determine, along the inputs.
    :ivar remaining: the permutations and signs of the weights' group that activations
        don't determine.
    :ivar reference: the layer's weight -> features ``(1, 1, columns, samples)``;
        ``source``: ``(1, B, ...)``.
    """

    group: Group
    remaining: Group
    reference: Weights
    source: Weights


def shown_by(
    activations: Sequence[Any], sources: Weights, reference: Weights, group: Group
) -> Shown:
    """Run the network with all weights; return the standardised activations of the
    units that enter a layer whole.

    :param activations: the network, run in eval mode with each set of weights, and the
        inputs of its ``forward``.
    :param sources: weights with one leading batch dimension.
    :raises ValueError: if there are no such units.
    """
    net, *inputs = activations
    arguments.instance("activations[0]", net, nn.Module, "a torch.nn.Module")
    of_reference = _layer_inputs(net, inputs, reference, group)
    of_sources = []
    for k in range(len(first_value(sources))):
        weights = select_rows(sources, k)
        of_sources.append(_layer_inputs(net, inputs, weights, group))
    shown = _on_inputs(group.finite, shapes_of(of_reference))
    if not shown.units:
        raise ValueError(
            "no layer of the network reads any of the units "
            f"{list(group.names('permute'))} whole"
        )
    remaining = group.finite.without(shown.names("permute"), "permute")
    determined = set(shown.names("flip")).intersection(remaining.names("flip"))
    remaining = remaining.without(sorted(determined), "flip")
    features = Weights()
    source = stacked([pick(of_source, shown.sites) for of_source in of_sources])
    for site in shown.sites:
        blocks = min(len(axis.index) for _, axis in shown.members(site)[0])
        features[site] = of_reference[site][None, None] / blocks
    source = map_values(lambda value: value[None], source)
    return Shown(shown, remaining, features, source)


def _layer_inputs(
    net: nn.Module, inputs: Sequence[Any], weights: Tensors, group: Group
) -> Weights:
    """Return a layer's weight -> its inputs, ``(columns, samples)``, of mean zero and
    norm one, or zero if constant.
    """
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    net = with_weights(net, keep_names(weights, tensors)).eval()
    recorded: dict[str, list[Tensor]] = {}
    for name, module in net.named_modules():
        weights_read = [weight for kind, weight in LAYERS if isinstance(module, kind)]
        site = f"{name}.{weights_read[0]}".lstrip(".") if weights_read else ""
        if site in group.site_shapes and not getattr(module, "transposed", False):
            axis = 1 if isinstance(module, nn.modules.conv._ConvNd) else -1
            calls = recorded.setdefault(site, [])

            def record(
                module: nn.Module,
                args: Any,
                calls: list[Tensor] = calls,
                axis: int = axis,
            ) -> None:
                for value in args[:1]:
                    lines = value.detach().movedim(axis, 0).flatten(1)
                    calls.append(lines.double())

            module.register_forward_pre_hook(record)
    net(*inputs)
    result = {}
    for site, calls in recorded.items():
        if calls and len(calls[0]) == group.site_shapes[site][1]:
            value = torch.cat(calls, 1)
            value = value - value.mean(1, keepdim=True)
            norm = value.norm(dim=1, keepdim=True)
            unit = value / norm.clamp_min(1e-300)
            result[site] = torch.where(norm > 0, unit, 0.0).cpu()
    return result


def _on_inputs(group: Group, shapes: Shapes) -> Group:
    """Return the units along columns of these weights, acting on the inputs; with signs
    if these columns flip.
    """
    units = []
    parents = set()
    sites = set[str]()
    for unit_set in reversed(group.units.values()):
        axes = []
        moves = set[Move]()
        for axis in unit_set.axes:
            if axis.site in shapes and (axis.dim, axis.span) == (1, 1):
                axes.append(replace(axis, dim=0))
                moves |= {"permute", "flip"} if axis.exponent % 2 else {"permute"}
        moves &= unit_set.moves
        if (axes and moves) or unit_set.name in parents:
            parents.add(unit_set.parent)
            sites.update(axis.site for axis in axes)
            acting = frozenset(moves)
            units.append(replace(unit_set, axes=tuple(axes), moves=acting))
    return Group(reversed(units), keep_names(shapes, sites))
