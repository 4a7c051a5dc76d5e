r"""The library's one currency: ``weights``, a dict from site to tensor; and flat
vectors of unconstrained values.

Every entry has shape ``batch_shape + site_shape`` with the same ``batch_shape``, as in
``MCMC.get_samples``, ``Predictive`` and ``torch.func.functional_call``. The functions
here read, check and reshape such dicts.

Samplers and guides move a vector :math:`z \in \mathbb R^D`, the concatenation of a
model's sites, each mapped to unconstrained values by the bijection of its support. A
vector always comes with its :class:`Layout`, which is keyed by site name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, TypeVar

import torch
from pyro.distributions import Delta, SineBivariateVonMises, SineSkewed
from pyro.distributions.torch_distribution import (
    ExpandedDistribution,
    MaskedDistribution,
)
from torch import Size, Tensor
from torch.distributions import (
    Distribution,
    Independent,
    Transform,
    VonMises,
    biject_to,
    constraints,
    identity_transform,
)
from torch.distributions.transforms import (
    ComposeTransform,
    ExpTransform,
    IndependentTransform,
)

from pyro_symmetric import arguments
from pyro_symmetric.arguments import ByName as ByName
from pyro_symmetric.arguments import Tensors as Tensors
from pyro_symmetric.arguments import as_tensor

Weights = dict[str, Tensor]
Shapes = Mapping[str, Size]
Name = TypeVar("Name")
Before = TypeVar("Before")
After = TypeVar("After")


def map_values(
    change: Callable[[Before], After], named: Mapping[Name, Before]
) -> dict[Name, After]:
    """Change each value of a dictionary.

    >>> from pyro_symmetric.weights import map_values
    >>> map_values(len, {"a": "word", "b": "letters"})
    {'a': 4, 'b': 7}
    """
    return {name: change(value) for name, value in named.items()}


def select_rows(named: Mapping[Name, Any], rows: Any) -> dict[Name, Any]:
    """Select an entry or some along the first axis of each value."""
    return {name: value[rows] for name, value in named.items()}


def first_value(named: Mapping[Name, Before]) -> Before:
    """Return the value of the first name."""
    return next(iter(named.values()))


def stacked(draws: Sequence[Tensors]) -> Weights:
    """Stack draws of the same sites along a new first axis."""
    return {site: torch.stack([draw[site] for draw in draws]) for site in draws[0]}


def pick(named: Mapping[Name, Before], names: Iterable[Name]) -> dict[Name, Before]:
    """Return the entries of some names, in the order of these."""
    return {name: named[name] for name in names}


def keep_names(
    named: Mapping[Name, Before], names: Container[Name]
) -> dict[Name, Before]:
    """Return the entries with one of some names, which may be of others, too."""
    return {name: value for name, value in named.items() if name in names}


def drop_names(
    named: Mapping[Name, Before], names: Container[Name]
) -> dict[Name, Before]:
    """Return the entries with none of some names."""
    return {name: value for name, value in named.items() if name not in names}


def shapes_of(
    weights: Mapping[str, Any], name: str = "example_weights"
) -> dict[str, Size]:
    """Return the shape of each entry; entries may be tensors or shapes."""
    return {
        site: value.shape
        if isinstance(value, Tensor)
        else arguments.shape(f"{name}[{site!r}]", value)
        for site, value in weights.items()
    }


def batch_shape(weights: Tensors, site_shapes: Shapes, name: str = "weights") -> Size:
    """Return the leading dimensions that all of ``weights`` share in front of
    ``site_shapes``.

    Sites that ``site_shapes`` lacks are ignored.

    :param name: the name of the weights in error messages.
    :raises ValueError: naming the site whose shape doesn't fit, the shape found and the
        shape expected.
    :raises TypeError: if ``weights`` is no mapping, or an entry is no tensor.
    """
    arguments.weights(name, weights)
    batch_shapes = {}
    for site in filter(weights.__contains__, site_shapes):
        site_shape = site_shapes[site]
        shape = weights[site].shape
        batch_dims = len(shape) - len(site_shape)
        if batch_dims < 0 or shape[batch_dims:] != site_shape:
            raise ValueError(
                f"{name} and this symmetry or model don't belong together: "
                f"{name}[{site!r}] has shape {tuple(shape)}, which doesn't end in the "
                f"site's shape {tuple(site_shape)}"
            )
        batch_shapes[site] = shape[:batch_dims]
    if len(set(batch_shapes.values())) > 1:
        raise ValueError(
            f"{name} must have one batch shape, but they have "
            f"{map_values(tuple, batch_shapes)}"
        )
    if not batch_shapes:
        raise ValueError(
            f"{name} holds none of the expected sites {sorted(site_shapes)}; found "
            f"{sorted(weights)}"
        )
    return next(iter(batch_shapes.values()))


def is_running_statistic(site: str) -> bool:
    """Return whether a site is a running mean or variance of a normalisation layer."""
    return site.rpartition(".")[2] in ("running_mean", "running_var")


def is_bias(site: str) -> bool:
    """Return whether "bias" is a word of a site's name: of ``in_proj_bias`` and
    ``bias_ih_l0``, not of ``unbiased``.
    """
    return "bias" in site.rpartition(".")[2].split("_")


def require_sites(
    weights: Tensors, sites: Iterable[str], name: str = "weights", remedy: str = ""
) -> None:
    """Raise ``ValueError`` if ``weights`` lacks one of ``sites``; the message ends with
    the remedy.
    """
    arguments.instance(name, weights, Mapping, "weights (site -> tensor)")
    if missing := [site for site in sites if site not in weights]:
        raise ValueError(
            f"{name} lacks the sites {missing}; it has {sorted(weights)}{remedy}"
        )


def require_same_network(
    sites: Iterable[str], site_shapes: Shapes, name: str = "weights"
) -> None:
    """Raise ``ValueError`` if ``sites`` holds parameters that the symmetry lacks: it is
    another network's symmetry.

    Other sites of a model, such as a noise scale or a second network, are allowed. A
    site counts as a parameter of the symmetry's network if it has the same root module
    and the same kind of name (``weight``, ``bias``) as its sites.
    """
    parameters = [
        site.split(".") for site in site_shapes if not is_running_statistic(site)
    ]
    paths = [parts[:-1] for parts in parameters]
    root = os.path.commonprefix(paths)  # noqa: RUF071 (of lists)
    kinds = {parts[-1] for parts in parameters}
    unknown = []
    for site in sites:
        *path, kind = site.split(".")
        is_of_network = path and path[: len(root)] == root
        if site not in site_shapes and is_of_network and kind in kinds:
            unknown.append(site)
    if unknown:
        raise ValueError(
            f"{name} holds the parameters {unknown}, which the symmetry doesn't know: "
            "it is that of another network, "
            "or these are second names of tied parameters"
        )


def require_finite(weights: Tensors, name: str = "weights") -> None:
    """Raise ``ValueError`` that names the first site with NaN or infinite values."""
    for site, value in arguments.weights(name, weights).items():
        # NaN and infinity propagate to the sum; a sum may also overflow, so its entries
        # are counted.
        if not value.sum().isfinite() and (bad := int((~value.isfinite()).sum())):
            raise ValueError(
                f"{name}[{site!r}] holds {bad} NaN or infinite values; all weights "
                "must be finite"
            )


def unflatten(vector: Tensor, shapes: Shapes) -> Weights:
    """Split vectors ``batch_shape + (D,)`` into sites of these shapes, in this
    order.
    """
    batch = vector.shape[:-1]
    pieces = vector.split([*map(math.prod, shapes.values())], dim=-1)
    result = Weights()
    for (site, shape), piece in zip(shapes.items(), pieces, strict=True):
        result[site] = piece.reshape((*batch, *shape))
    return result


# flat vectors -------------------------------------------------------------------------

ANGLES = (VonMises, SineBivariateVonMises, SineSkewed)
SECTORS = 12  # of a circle


class Layout:
    r"""The order, shapes and transforms of the sites in a flat unconstrained vector of
    shape ``batch_shape + (dim,)``.

    :param site_shapes: site -> shape of its constrained value, in the order of
        concatenation.
    :param transforms: site -> bijection from unconstrained to constrained values;
        default: the identity.
    :ivar unconstrained_shapes: site -> shape of its unconstrained value; a simplex of 3
        has 2 coordinates.
    :ivar dim: length ``D`` of the vector.
    :ivar angles: sites on a circle, which is cut at :math:`\pm\pi`.
    """

    def __init__(
        self,
        site_shapes: Mapping[str, Iterable[int]],
        transforms: Mapping[str, Transform] | None = None,
    ):
        known = transforms or {}
        self.site_shapes = map_values(Size, site_shapes)
        self.transforms = dict[str, Transform]()
        self.unconstrained_shapes = dict[str, Size]()
        self.angles: list[str] = []
        self.dim = 0
        self._transformed = list[str]()
        for site, shape in self.site_shapes.items():
            transform = known.get(site, identity_transform)
            self.transforms[site] = transform
            unconstrained_shape = Size(transform.inverse_shape(shape))
            self.unconstrained_shapes[site] = unconstrained_shape
            self.dim += unconstrained_shape.numel()
            if not is_identity(transform):
                self._transformed.append(site)

    @classmethod
    def of(cls, sites: Mapping[str, Distribution]) -> Layout:
        """Return the layout of sites with these distributions, in this order.

        :raises ValueError: naming a site whose support has no bijection from
            unconstrained values.
        """
        shapes = map_values(
            lambda fn: Size(fn.batch_shape) + Size(fn.event_shape), sites
        )
        layout = cls(
            shapes, {site: transform_of(site, fn) for site, fn in sites.items()}
        )
        layout.angles = [site for site, fn in sites.items() if is_angle(fn)]
        return layout

    def flatten(self, pieces: Tensors) -> Tensor:
        """Concatenate unconstrained values by site into vectors."""
        batch = batch_shape(pieces, self.unconstrained_shapes)
        return torch.cat(
            [pieces[site].reshape(*batch, -1) for site in self.unconstrained_shapes],
            dim=-1,
        )

    def unflatten(self, z: Tensor) -> Weights:
        """Invert :meth:`flatten`."""
        return unflatten(z, self.unconstrained_shapes)

    def constrain(self, z: Tensor) -> Weights:
        """Map vectors to weights."""
        pieces = unflatten(z, self.unconstrained_shapes)
        for site in self._transformed:
            pieces[site] = self.transforms[site](pieces[site])
        return pieces

    def constrain_with_log_det(
        self, z: Tensor, sites: Iterable[str] | None = None
    ) -> tuple[Weights, Tensor]:
        r"""Map vectors to weights and :math:`\log |\det \partial w / \partial z|` of
        shape ``batch_shape``.

        :param sites: the sites to transform; default: all whose transform isn't the
            identity.
        """
        weights = unflatten(z, self.unconstrained_shapes)
        log_det = z.new_zeros(z.shape[:-1])
        for site in self._transformed if sites is None else sites:
            unconstrained = weights[site]
            transform = self.transforms[site]
            weights[site] = transform(unconstrained)
            site_log_det = transform.log_abs_det_jacobian(unconstrained, weights[site])
            log_det = log_det + site_log_det.reshape(*z.shape[:-1], -1).sum(-1)
        return weights, log_det

    def unconstrain(self, weights: Tensors) -> Tensor:
        """Map weights to vectors. Sites that the layout lacks are ignored.

        :raises ValueError: naming a site that is missing, or whose shape doesn't fit.
        """
        require_sites(weights, self.site_shapes)
        batch_shape(weights, self.site_shapes)
        pieces = Weights()
        for site, transform in self.transforms.items():
            pieces[site] = transform.inv(weights[site])
        return self.flatten(pieces)


def is_identity(transform: Transform) -> bool:
    """Return whether a transform, or each part of a composition, is the identity."""
    if isinstance(transform, IndependentTransform):
        return is_identity(transform.base_transform)
    if not isinstance(transform, ComposeTransform):
        return False
    return all(map(is_identity, transform.parts))


def is_angle(fn: Distribution) -> bool:
    """Return whether the values of a distribution lie on a circle."""
    return isinstance(base_of(fn), ANGLES)


def base_of(fn: Any) -> Any:
    """Return the distribution within expanded, masked and reinterpreted ones."""
    while isinstance(fn, Independent | MaskedDistribution | ExpandedDistribution):
        fn = fn.base_dist
    return fn


def turns_back(draws: Tensor) -> bool:
    r"""Return whether more draws of an angle lie around the cut at :math:`\pm\pi` than
    in the emptiest sector of the circle, so that the cut parts a mode."""
    angles = draws.double().flatten(0, 1).reshape(draws.shape[:2].numel(), -1)
    sectors = ((angles + math.pi) / (2 * math.pi) * SECTORS).round().long() % SECTORS
    for entry in sectors.T:  # the cut is in the middle of sector 0
        counts = entry.bincount(minlength=SECTORS)
        if counts[0] > max(len(entry) / 100, 4 * int(counts[1:].min())):
            return True
    return False


def transform_of(site: str, fn: Distribution) -> Transform:
    """Return the bijection from unconstrained values to a site's support.

    :raises ValueError: naming a site whose support has none.
    """
    if isinstance(base_of(fn), Delta):
        raise ValueError(
            f"site {site!r} is a Delta, which leaves nothing to sample; use "
            "pyro.deterministic"
        )
    try:
        support: Any = fn.support
        # whose support in Pyro is the real line, where a periodic density is improper
        if is_angle(fn):
            support = constraints.independent(
                constraints.interval(-math.pi, math.pi), len(fn.event_shape)
            )
        if not support.is_discrete:
            return _bijection(support)
    except NotImplementedError as error:
        raise ValueError(
            f"the support of site {site!r} ({fn}) can't be mapped to unconstrained "
            "values; if it isn't data, "
            "reparametrise the site (pyro.poutine.reparam)"
        ) from error
    raise ValueError(
        f"site {site!r} is discrete ({fn}), and Pyro can't list its values to sum them "
        "out. If it isn't data, "
        "bound its values (a Categorical over them), or put independent ones into a "
        "pyro.plate instead of .to_event"
    )


def _bijection(support: Any) -> Transform:
    """Return PyTorch's bijection to a support, except for half-lines: an infinite upper
    bound counts as none, and positive values aren't shifted by 0, which costs time
    where there are many such sites."""
    # PyTorch wraps the support of a mixture's components in a constraint without a
    # transform.
    if isinstance(support, constraints.MixtureSameFamilyConstraint):
        support = support.base_constraint
    if isinstance(support, constraints.independent):
        return IndependentTransform(
            _bijection(support.base_constraint), support.reinterpreted_batch_ndims
        )
    upper = getattr(support, "upper_bound", None)
    if upper is not None and (as_tensor(upper) == torch.inf).all():
        support = constraints.greater_than_eq(support.lower_bound)
    half_line = isinstance(
        support, constraints.greater_than | constraints.greater_than_eq
    )
    positive = (
        half_line
        and isinstance(support.lower_bound, Number)
        and support.lower_bound == 0
    )
    return ExpTransform() if positive else biject_to(support)
