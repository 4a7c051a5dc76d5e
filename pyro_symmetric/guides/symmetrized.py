r"""Guides that are averaged over the orbits of a symmetry group: automatic ones, and those that were written by hand.

For a model whose joint density is invariant under a finite group, with base guide ``q`` and
:math:`\bar q(w) = \frac1{|G|} \sum_g q(g \cdot w)`,

.. math:: \mathrm{ELBO}(\bar q) = \mathrm{ELBO}(q) + I(g; w), \qquad 0 \le I(g; w) \le \log|G| .

A guide written by hand keeps its own draws ``w``, and gets one factor more, :math:`\log \bar q(w) - \log q(w)`, so that
its log-density is that of :math:`\bar q`.

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
from pyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal, AutoGuide, AutoNormal
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
from pyro_symmetric.guides.base import InitLocFn, Start, WeightsGuide, action_on, layout_of
from pyro_symmetric.guides.gaussian import AutoUnitBlocks, gaussian_copy, require_spread
from pyro_symmetric.weights import Weights, unflatten

Guide = Callable[..., Any]


class AutoSymmetrized(WeightsGuide):
    """A continuous guide, symmetrised over a finite group; it plugs into stock :class:`~pyro.infer.SVI`.

    >>> def model(x):
    ...     locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 5.0).to_event(1))
    ...     uniform = dist.Categorical(torch.ones(3))
    ...     pyro.sample("x", dist.MixtureSameFamily(uniform, dist.Normal(locs, 1.0)).expand([4]).to_event(1), obs=x)
    >>> x, group = torch.tensor([-4.0, -3.0, 0.0, 5.0]), ps.Group.declare({"locs": ("k",)}, {"locs": torch.zeros(3)})
    >>> guide = ps.AutoSymmetrized(model, group, estimator=ps.ExactOrbit())
    >>> svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=pyro.infer.Trace_ELBO())
    >>> losses = [svi.step(x) for _ in range(10)]
    >>> guide.sample_posterior((20,))["locs"].shape
    torch.Size([20, 3])

    The guide holds its base in ``base``. Draws, ``median`` and ``quantiles`` are those of the base, one copy of every
    mode, whose predictions are the symmetrised guide's; only the density, and so the ELBO, differs. The model must be
    invariant under the group: set-up checks it at draws from the prior.

    :param model: the Pyro model, without local latent variables (inside a subsampled plate).
    :param group: what to average over: permutations, signs, or both, e.g. ``find_symmetry(net, x)``. Scales and shifts
        are left out, as no proper prior has them.
    :param base: a class of :class:`~pyro.infer.autoguide.AutoContinuous`, :class:`~pyro_symmetric.AutoUnitBlocks` among
        them (``AutoNormal`` stands for ``AutoDiagonalNormal``); or a set-up guide, of which a copy is the base.
    :param estimator: of the symmetrised log-density; by default exact where that is cheap, else matched units.
    :param init_loc_fn: where the means start; by default near the prior's mean, or at a network's own values.
    :param base_arguments: further arguments of the base, such as ``init_scale`` or ``rank``.
    """

    def __init__(
        self,
        model: Any,
        group: Group | Symmetry,
        base: type[AutoGuide] | AutoGuide = AutoDiagonalNormal,
        estimator: OrbitEstimator | None = None,
        *,
        init_loc_fn: InitLocFn | None = None,
        **base_arguments: Any,
    ):
        self.group = group_of(group).finite
        if base is AutoUnitBlocks:
            base_arguments = {"group": self.group, **base_arguments}
        start = init_loc_fn or Start(model, self.group.required_sites)
        super().__init__(model, start)
        self.base = _base(base, model, start, base_arguments)
        self.estimator: Any = estimator  # until set-up None, if it is left to the base
        self._action: Action | None = None

    @property
    def plain(self) -> AutoContinuous:
        """The guide before it is symmetrised."""
        return self.base

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        given = self.base.prototype_trace is not None
        if not given:
            self.base._model = self._model  # stock guides lose theirs when they are pickled
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
        """Compare the model with the group: its sites, and its joint density at two draws from the prior.

        The density is passed over if it isn't a fixed function of the sites (dropout), or if a prior can't be drawn
        from (an improper one).

        :raises ValueError: naming what doesn't fit: see :func:`~pyro_symmetric.discovery.model_check.verify_model`.
        :raises TypeError: if the base can't tell the density of moved draws.
        """
        law = self.base.get_posterior()
        require_spread(law, self.base)
        for name, stack in self._cond_indep_stacks.items():
            for plate in stack:
                if plate.full_size and plate.size < plate.full_size:
                    raise ValueError(
                        f"site {name!r} lies in the plate {plate.name!r}, which draws {plate.size} of "
                        f"{plate.full_size} rows: a symmetrised guide takes no local latent variables. Marginalise "
                        "them, or use the full plate"
                    )
        self._action = action_on(self, self.group)
        if not law.has_rsample:  # Pyro leaves the score of a guide's flat site out of the gradient
            raise TypeError(
                f"{type(self.base).__name__} draws without rsample, so that its training would lack a term; give the "
                "law a reparametrised one, or symmetrise a guide written by hand by ps.symmetrize"
            )
        try:
            with torch.no_grad(), forked():
                law.log_prob(law.sample() + 1e-3)
        except (KeyError, NotImplementedError) as error:
            raise TypeError(
                f"{type(self.base).__name__} knows the density of its own draws only, but symmetrising asks for that "
                "of their copies; take a flow that inverts everywhere: AutoIAFNormal (as many passes as there are "
                "weights), or affine_coupling or spline_coupling (one pass)"
            ) from error
        self.estimator = self.estimator or usual_estimator(law, self._action)
        with suppress(InconclusiveError, NotImplementedError):
            (model,) = self._raw_model or (None,)
            if not (verdict := verify_model(self.group, functools.partial(model, *args, **kwargs))):
                raise ValueError(str(verdict))

    def get_posterior(self, *args: Any, **kwargs: Any) -> Symmetrized:
        """The symmetrised distribution over flat unconstrained vectors. Its base is ``guide.base.get_posterior()``."""
        if self._action is None:
            layout_of(self)  # says what to do
        base = self.base.get_posterior(*args, **kwargs)
        return Symmetrized(base, self._action, self.estimator)  # type: ignore[arg-type]

    def sample_posterior(self, sample_shape: Sequence[int] = (), orbit: bool = False) -> Weights:
        """Draws of the weights, ``sample_shape + site_shape``, detached and on the guide's device. Needs no data.

        :param orbit: draw from the symmetrised guide itself, all copies alike, instead of from its base.
        """
        weights = super().sample_posterior(sample_shape)
        if not orbit:
            return weights
        element = self.group.without_buffers().sample(sample_shape, device=next(iter(weights.values())).device)
        return element(weights)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.base._loc_scale(*args, **kwargs)  # of which median and quantiles are made


def _base(base: Any, model: Any, start: InitLocFn, options: Mapping[str, Any]) -> AutoContinuous:
    """A guide of the class ``base``, whose means start by ``start``; or a copy of the set-up guide ``base``."""
    if isinstance(base, AutoGuide):
        if options:
            raise ValueError(f"base is a guide, which takes no more arguments; found {sorted(options)}")
        layout_of(base)
        inner: Any = getattr(base, "plain", base)
        copied = copy.deepcopy(inner) if isinstance(inner, WeightsGuide) else gaussian_copy(inner)
        copied._pyro_context.used = False  # it hasn't run under any name yet
        return copied
    if base is AutoNormal:
        base = AutoDiagonalNormal
    if not (isinstance(base, type) and issubclass(base, AutoContinuous)):
        raise TypeError(f"base is {described(base)}; it must be AutoDiagonalNormal or another AutoContinuous")
    if "init_loc_fn" in inspect.signature(base.__init__).parameters:
        options = {"init_loc_fn": start, **options}
    return base(model, **options)


# guides written by hand -----------------------------------------------------------------------------------------------


def symmetrize(guide: Guide, group: Group | Symmetry, estimator: OrbitEstimator | None = None) -> Guide:
    """Average a guide that was written by hand over the orbits of a group.

    >>> def guide():
    ...     loc = pyro.param("loc", torch.tensor([-1.0, 0.0, 1.0]))
    ...     pyro.sample("w", dist.Normal(loc, 0.5).to_event(1))
    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> svi = pyro.infer.SVI(model, ps.symmetrize(guide, group), pyro.optim.Adam({"lr": 0.01}), pyro.infer.Trace_ELBO())
    >>> loss = svi.step()

    The guide draws as it did, one copy of every mode, and gets one factor more, so that any objective of Pyro (but
    ``TraceTMC_ELBO``, which leaves factors of guides out) sees the symmetrised density. Its other sites stay as they
    are. Automatic guides go by :class:`~pyro_symmetric.guides.AutoSymmetrized`, which also checks that the model has
    the symmetry: here check yours by ``ps.verify_model(group, model, *args)``.

    :param guide: a function with ``pyro.sample`` statements. The sites that the group moves must be independent of
        each other and of all others, and lie in no subsampled plate. It is run twice for each draw.
    :param group: permutations and signs that the model has.
    :param estimator: of the symmetrised density; by default exact where that is cheap, else ``SinkhornImportance``.
    :raises ValueError: in a step: if a site is missing, has another shape, or depends on another one.
    """
    if isinstance(guide, AutoGuide):
        raise TypeError("guide is an automatic one; take ps.AutoSymmetrized(model, group, base=guide)")
    group = group_of(group).finite
    sites = group.required_sites
    shapes = {site: group.site_shapes[site] for site in sites}
    action = Action(group, sites)

    @functools.wraps(guide)
    def symmetrized(*args: Any, **kwargs: Any) -> Any:
        trace = poutine.trace(guide).get_trace(*args, **kwargs)
        with poutine.block():  # without the plates of particles, and unseen
            alone = poutine.trace(guide).get_trace(*args, **kwargs)
        _require_sites(trace, alone, action)
        nodes: Any = trace.nodes
        # The plates around the guide, those of particles: their sizes, and the shape that they make of one number.
        own = {frame.name for frame in alone.nodes[sites[0]]["cond_indep_stack"]}
        stack = nodes[sites[0]]["cond_indep_stack"]
        plates = {frame.dim: int(frame.size) for frame in stack if frame.vectorized and frame.name not in own}
        batch = [plates[dim] for dim in sorted(plates)]
        outer = [plates.get(dim, 1) for dim in range(min(plates, default=0), 0)]
        values = {site: nodes[site]["value"].reshape(*batch, *shape) for site, shape in shapes.items()}
        laws = {site: alone.nodes[site]["fn"] for site in sites}
        base, flat = _flat(laws, shapes), torch.cat([v.flatten(len(batch)) for v in values.values()], -1)
        chosen = estimator or usual_estimator(base, action)
        change = chosen.log_prob(base, action, flat) - base.log_prob(flat)
        pyro.factor("symmetrized", change.reshape(outer), has_rsample=True)
        return nodes["_RETURN"]["value"]

    return symmetrized


class _Product(TorchDistribution):
    """Independent sites as one vector of their values."""

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (torch's own declaration)
    support = constraints.real_vector

    def __init__(self, laws: Mapping[str, Any], shapes: Mapping[str, torch.Size]):
        self.laws, self.shapes = laws, shapes
        super().__init__(torch.Size(), torch.Size([sum(shape.numel() for shape in shapes.values())]))

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        return torch.cat([law.sample(sample_shape).reshape(*sample_shape, -1) for law in self.laws.values()], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        pieces = unflatten(value, self.shapes)
        terms = [law.log_prob(pieces[site]).reshape(*value.shape[:-1], -1) for site, law in self.laws.items()]
        return torch.cat(terms, -1).sum(-1)


def _flat(laws: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> Any:
    """The joint law of all sites: a normal vector, of which estimators know more, if all are normal."""
    moments = [mean_field_moments(law) for law in laws.values()]
    if not all(moments):
        return _Product(laws, shapes)
    loc, scale = (
        torch.cat([part.expand(shape).reshape(-1) for part, shape in zip(parts, shapes.values(), strict=True)])
        for parts in zip(*moments, strict=True)
    )
    return dist.Normal(loc, scale).to_event(1)


def _require_sites(trace: Any, alone: Any, action: Action) -> None:
    """:raises ValueError: for a site that isn't there, of another shape or support, subsampled, or not independent."""
    for site, shape in action.layout.site_shapes.items():
        if site not in trace.nodes:
            raise ValueError(f"the group moves the site {site!r}, which the guide doesn't draw")
        node, other = trace.nodes[site], alone.nodes[site]
        if other["value"].shape != shape:
            raise ValueError(f"site {site!r} has shape {tuple(other['value'].shape)}; the group's is {tuple(shape)}")
        action.require_real(site, other["fn"].support)
        if other["scale"] != 1.0:
            raise ValueError(f"site {site!r} lies in a subsampled plate; a symmetrised guide takes no local variables")
        with torch.no_grad():
            same, found = (float(law.log_prob(node["value"]).sum()) for law in (node["fn"], other["fn"]))
        if not math.isclose(same, found, rel_tol=1e-4, abs_tol=1e-4):
            raise ValueError(f"site {site!r} depends on another site of the guide; those that the group moves must not")
