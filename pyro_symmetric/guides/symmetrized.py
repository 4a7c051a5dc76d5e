r"""Guides averaged over the orbits of a symmetry group: automatic ones, and those
written by hand.

For a model whose joint density is invariant under a finite group, with base guide ``q``
and
:math:`\bar q(w) = \frac1{|G|} \sum_g q(g \cdot w)`,

.. math:: \mathrm{ELBO}(\bar q) = \mathrm{ELBO}(q) + I(g; w), \qquad 0 \le I(g; w) \le \log|G| .

A guide written by hand keeps its draws ``w`` and gains the factor :math:`\log \bar q(w)
- \log q(w)`, which makes its log-density that of :math:`\bar q`.

Reference: Gelberg et al. 2024 (arXiv 2408.05496), Section 4.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoGuide,
    AutoNormal,
)
from torch import Tensor
from torch.distributions import constraints

from pyro_symmetric._process import forked
from pyro_symmetric.arguments import described
from pyro_symmetric.discovery.model_check import verify_model
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import InconclusiveError
from pyro_symmetric.distributions import OrbitEstimator, Symmetrized, usual_estimator
from pyro_symmetric.distributions.matching import mean_field_moments
from pyro_symmetric.groups import Action, Group, group_of
from pyro_symmetric.guides.base import (
    InitLocFn,
    Start,
    WeightsGuide,
    action_on,
    layout_of,
)
from pyro_symmetric.guides.gaussian import (
    AutoGaussian,
    AutoUnitBlocks,
    plain_posterior,
    require_spread,
)
from pyro_symmetric.weights import Weights, unflatten

Guide = Callable[..., Any]


class AutoSymmetrized(WeightsGuide):
    """A continuous guide symmetrised over a finite group, for stock
    :class:`~pyro.infer.SVI`.

    >>> def model(x):
    ...     locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 5.0).to_event(1))
    ...     uniform = dist.Categorical(torch.ones(3))
    ...     pyro.sample(
    ...         "x",
    ...         dist.MixtureSameFamily(uniform, dist.Normal(locs, 1.0))
    ...         .expand([4])
    ...         .to_event(1),
    ...         obs=x,
    ...     )
    >>> x, group = (
    ...     torch.tensor([-4.0, -3.0, 0.0, 5.0]),
    ...     ps.Group.declare({"locs": ("k",)}, {"locs": torch.zeros(3)}),
    ... )
    >>> guide = ps.AutoSymmetrized(model, group, estimator=ps.ExactOrbit())
    >>> svi = pyro.infer.SVI(
    ...     model, guide, pyro.optim.Adam({"lr": 0.01}), loss=pyro.infer.Trace_ELBO()
    ... )
    >>> losses = [svi.step(x) for _ in range(10)]
    >>> guide.sample_posterior((20,))["locs"].shape
    torch.Size([20, 3])

    Draws, ``median`` and ``quantiles`` are those of the guide in ``base``, one copy of
    every mode, whose predictions are the symmetrised guide's; only the density, and so
    the ELBO, differs. The model must be invariant under the group: set-up checks it at
    draws from the prior.

    :param model: the Pyro model, without local latent variables (inside a subsampled
        plate).
    :param symmetry: permutations, signs, or both, e.g. ``find_symmetry(net, x)``. Scales
        and shifts are left out: no proper prior is invariant under them.
    :param base: a class of :class:`~pyro.infer.autoguide.AutoContinuous`,
        :class:`~pyro_symmetric.AutoUnitBlocks` among them (``AutoNormal`` stands for
        ``AutoDiagonalNormal``); or a set-up guide, which is copied.
    :param estimator: of the symmetrised log-density; by default exact where that is
        cheap, else matched units.
    :param init_loc_fn: the initial means; by default near the prior's mean, or at a
        network's own values.
    :param base_arguments: further arguments of the base, such as ``init_scale`` or
        ``rank``.
    """

    def __init__(
        self,
        model: Any,
        symmetry: Group | Symmetry,
        base: type[AutoGuide] | AutoGuide = AutoDiagonalNormal,
        estimator: OrbitEstimator | None = None,
        *,
        init_loc_fn: InitLocFn | None = None,
        **base_arguments: Any,
    ):
        self.group = group_of(symmetry).finite
        if base is AutoUnitBlocks:
            base_arguments = {"symmetry": self.group, **base_arguments}
        start = init_loc_fn or Start(model, self.group.required_sites)
        super().__init__(model, start)
        self.base = _base(base, model, start, base_arguments)
        self.estimator: Any = estimator  # if None, chosen at set-up
        self._action: Action | None = None

    @property
    def plain(self) -> AutoContinuous:
        """The guide before it is symmetrised."""
        return self.base

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        given = self.base.prototype_trace is not None
        if not given:
            # stock guides lose theirs when they are pickled
            self.base._model = self._model
            self.base._setup_prototype(*args, **kwargs)
        self._adopt(self.base)
        self.base.prototype_trace = self.prototype_trace  # which holds no data
        try:
            self._check(*args, **kwargs)
        except Exception:
            # A refused guide isn't set up: the next call refuses it again.
            self.prototype_trace = None
            self.base.prototype_trace = self.base.prototype_trace if given else None
            raise

    def _check(self, *args: Any, **kwargs: Any) -> None:
        """Check that the model's sites fit the group, and that its joint density is
        invariant, at draws from the prior.

        The density goes unchecked if it isn't a function of the sites (dropout), or if
        a prior can't be sampled.

        :raises ValueError: naming the misfit: see
            :func:`~pyro_symmetric.discovery.model_check.verify_model`.
        :raises TypeError: if the base can't evaluate the density of moved draws.
        """
        posterior = self.base.get_posterior()
        require_spread(posterior, self.base)
        for name, stack in self._cond_indep_stacks.items():
            for plate in stack:
                if plate.full_size and plate.size < plate.full_size:
                    raise ValueError(
                        f"site {name!r} lies in the plate {plate.name!r}, which draws "
                        f"{plate.size} of "
                        f"{plate.full_size} rows: a symmetrised guide takes no local "
                        "latent variables. Marginalise "
                        "them, or use the full plate"
                    )
        self._action = action_on(self, self.group)
        # Pyro leaves the score of a guide's flat site out of the gradient
        if not posterior.has_rsample:
            raise TypeError(
                f"{type(self.base).__name__} draws without rsample, so that its "
                "gradient would lack a term; take a "
                "reparametrised distribution, or symmetrise a guide written by hand by "
                "ps.symmetrize"
            )
        try:
            with torch.no_grad(), forked():
                posterior.log_prob(posterior.sample() + 1e-3)
        except (KeyError, NotImplementedError) as error:
            raise TypeError(
                f"{type(self.base).__name__} evaluates the density of its own draws "
                "only, but symmetrising needs that "
                "of their copies; take a flow with an inverse: AutoIAFNormal (as many "
                "passes as there are weights), or "
                "affine_coupling or spline_coupling (one pass)"
            ) from error
        self.estimator = self.estimator or usual_estimator(posterior, self._action)
        with suppress(InconclusiveError, NotImplementedError):
            if not (
                verdict := verify_model(
                    self.group, functools.partial(self._raw_model[0], *args, **kwargs)
                )
            ):
                raise ValueError(str(verdict))

    def get_posterior(self, *args: Any, **kwargs: Any) -> Symmetrized:
        """Return the symmetrised distribution over flat unconstrained vectors, of base
        ``base.get_posterior()``.
        """
        if self._action is None:
            layout_of(self)  # raises: set the guide up first
        base = self.base.get_posterior(*args, **kwargs)
        return Symmetrized(base, self._action, self.estimator)  # type: ignore[arg-type]

    def sample_posterior(
        self, sample_shape: Sequence[int] = (), orbit: bool = False
    ) -> Weights:
        """Draw weights, ``sample_shape + site_shape``, without data; detached and on
        the guide's device.

        :param orbit: whether to draw from the symmetrised guide itself, uniformly on
            orbits, instead of from its base.
        """
        weights = super().sample_posterior(sample_shape)
        if not orbit:
            return weights
        element = self.group.without_buffers().sample(
            sample_shape, device=next(iter(weights.values())).device
        )
        return element(weights)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.base._loc_scale(*args, **kwargs)  # for median and quantiles


def _base(
    base: Any, model: Any, start: InitLocFn, options: Mapping[str, Any]
) -> AutoContinuous:
    """Make a guide of the class ``base`` with initial means ``start``, or copy the
    set-up guide ``base``.
    """
    if isinstance(base, AutoGuide):
        if options:
            raise ValueError(
                "base is a guide, which takes no more arguments; found "
                f"{sorted(options)}"
            )
        layout_of(base)  # raises unless it is set up
        plain: Any = getattr(base, "plain", base)
        ours = isinstance(plain, WeightsGuide)
        copied = (
            copy.deepcopy(plain)
            if ours
            else AutoGaussian(plain, plain_posterior(plain))
        )
        copied._pyro_context.used = False  # it hasn't run under any name yet
        return copied
    if base is AutoNormal:
        base = AutoDiagonalNormal
    if not (isinstance(base, type) and issubclass(base, AutoContinuous)):
        raise TypeError(
            f"base is {described(base)}; it must be AutoDiagonalNormal or another "
            "AutoContinuous"
        )
    if "init_loc_fn" in inspect.signature(base.__init__).parameters:
        options = {"init_loc_fn": start, **options}
    return base(model, **options)


# guides written by hand ---------------------------------------------------------------


def symmetrize(
    guide: Guide, symmetry: Group | Symmetry, estimator: OrbitEstimator | None = None
) -> Guide:
    """Average a guide written by hand over the orbits of a group.

    >>> def guide():
    ...     loc = pyro.param("loc", torch.tensor([-1.0, 0.0, 1.0]))
    ...     pyro.sample("w", dist.Normal(loc, 0.5).to_event(1))
    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> svi = pyro.infer.SVI(
    ...     model,
    ...     ps.symmetrize(guide, group),
    ...     pyro.optim.Adam({"lr": 0.01}),
    ...     pyro.infer.Trace_ELBO(),
    ... )
    >>> loss = svi.step()

    The guide's draws stay, one copy of every mode; a factor makes their density the
    symmetrised one under any objective of Pyro but ``TraceTMC_ELBO``, which ignores
    factors of guides. For automatic guides take
    :class:`~pyro_symmetric.guides.AutoSymmetrized`, which also checks the model: check
    yours by ``ps.verify_model(group, model, *args)``.

    :param guide: a function with ``pyro.sample`` statements. The sites that the group
        moves must be independent of each other and of all other sites, and lie in no
        subsampled plate. It is run twice for each draw.
    :param symmetry: permutations and signs under which the model is invariant.
    :param estimator: of the symmetrised density; by default exact where that is cheap,
        else ``SinkhornImportance``.
    :raises ValueError: in a step, if a site is missing, has another shape, or depends
        on another site.
    """
    if isinstance(guide, AutoGuide):
        raise TypeError(
            "guide is an automatic one; take ps.AutoSymmetrized(model, group, "
            "base=guide)"
        )
    group = group_of(symmetry).finite
    action = Action(group, group.required_sites)
    shapes = action.layout.site_shapes

    @functools.wraps(guide)
    def symmetrized(*args: Any, **kwargs: Any) -> Any:
        trace: Any = poutine.trace(guide).get_trace(*args, **kwargs)
        with poutine.block():  # a single draw, outside of plates of particles
            single: Any = poutine.trace(guide).get_trace(*args, **kwargs)
        _require_sites(trace, single, action)
        # The plates of particles around the guide: their sizes, and the shape of one
        # number a particle.
        stacks = [
            one.nodes[action.sites[0]]["cond_indep_stack"] for one in (trace, single)
        ]
        inner = {frame.name for frame in stacks[1]}
        plates = {
            frame.dim: int(frame.size)
            for frame in stacks[0]
            if frame.vectorized and frame.name not in inner
        }
        batch = [plates[dim] for dim in sorted(plates)]
        outer = [plates.get(dim, 1) for dim in range(min(plates, default=0), 0)]
        values = [
            trace.nodes[site]["value"].reshape(*batch, *shape)
            for site, shape in shapes.items()
        ]
        w = torch.cat([value.flatten(len(batch)) for value in values], -1)
        base = _joint({site: single.nodes[site]["fn"] for site in shapes}, shapes)
        log_q_bar = (estimator or usual_estimator(base, action)).log_prob(
            base, action, w
        )
        pyro.factor(
            "symmetrized",
            (log_q_bar - base.log_prob(w)).reshape(outer),
            has_rsample=True,
        )
        return trace.nodes["_RETURN"]["value"]

    return symmetrized


class _Product(TorchDistribution):
    """A joint distribution of independent sites over the vector of their values."""

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (torch's own declaration)
    support = constraints.real_vector

    def __init__(self, sites: Mapping[str, Any], shapes: Mapping[str, torch.Size]):
        self.sites, self.shapes = sites, shapes
        super().__init__(
            torch.Size(), torch.Size([sum(shape.numel() for shape in shapes.values())])
        )

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        return torch.cat(
            [
                fn.sample(sample_shape).reshape(*sample_shape, -1)
                for fn in self.sites.values()
            ],
            -1,
        )

    def log_prob(self, value: Tensor) -> Tensor:
        pieces = unflatten(value, self.shapes)
        terms = [
            fn.log_prob(pieces[site]).reshape(*value.shape[:-1], -1)
            for site, fn in self.sites.items()
        ]
        return torch.cat(terms, -1).sum(-1)


def _joint(sites: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> Any:
    """Return the joint distribution of independent sites: a normal if all are, as
    estimators know more of that.
    """
    moments = [mean_field_moments(fn) for fn in sites.values()]
    if not all(moments):
        return _Product(sites, shapes)
    loc, scale = (
        torch.cat(
            [
                part.expand(shape).reshape(-1)
                for part, shape in zip(parts, shapes.values(), strict=True)
            ]
        )
        for parts in zip(*moments, strict=True)
    )
    return dist.Normal(loc, scale).to_event(1)


def _require_sites(trace: Any, single: Any, action: Action) -> None:
    """Raise ``ValueError`` for a site that is missing, of another shape or support,
    subsampled, or not independent.
    """
    for site, shape in action.layout.site_shapes.items():
        if site not in trace.nodes:
            raise ValueError(
                f"the group moves the site {site!r}, which the guide doesn't draw"
            )
        node, other = trace.nodes[site], single.nodes[site]
        if other["value"].shape != shape:
            raise ValueError(
                f"site {site!r} has shape {tuple(other['value'].shape)}; the group's "
                f"is {tuple(shape)}"
            )
        action.require_real(site, other["fn"].support)
        if other["scale"] != 1.0:
            raise ValueError(
                f"site {site!r} lies in a subsampled plate; a symmetrised guide takes "
                "no local variables"
            )
        with torch.no_grad():
            log_prob, again = (
                float(fn.log_prob(node["value"]).sum())
                for fn in (node["fn"], other["fn"])
            )
        if not math.isclose(log_prob, again, rel_tol=1e-4, abs_tol=1e-4):
            raise ValueError(
                f"site {site!r} depends on another site of the guide; those that the "
                "group moves must not"
            )
