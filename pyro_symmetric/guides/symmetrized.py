r"""Guides that are averaged over the orbits of a symmetry group.

For a model whose joint density is invariant under a finite group, with base guide ``q`` and
:math:`\bar q(w) = \frac1{|G|} \sum_g q(g \cdot w)`,

.. math:: \mathrm{ELBO}(\bar q) = \mathrm{ELBO}(q) + I(g; w), \qquad 0 \le I(g; w) \le \log|G| .

Reference: Gelberg et al. 2024 (arXiv 2408.05496), Section 4.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.transforms import AffineTransform, ComposeTransform
from pyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal, AutoNormal, AutoNormalizingFlow
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.distributions import OrbitEstimator, Symmetrized
from pyro_symmetric.distributions.constrained import ConstrainedAction
from pyro_symmetric.distributions.orbit import require_estimator
from pyro_symmetric.guides import starts
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.layout import LayoutModel, SiteLayout, action_on, layout_of
from pyro_symmetric.guides.one_sided import GuideDensity
from pyro_symmetric.guides.quantiles import checked
from pyro_symmetric.guides.starts import InitLocFn
from pyro_symmetric.guides.suggest import suggest_estimator
from pyro_symmetric.symmetry.factored import moved_weights
from pyro_symmetric.symmetry.finite import AnyFiniteGroup, SignedFlatAction, finite_part
from pyro_symmetric.symmetry.joint_density import InconclusiveError
from pyro_symmetric.symmetry.model_check import check
from pyro_symmetric.symmetry.permutation import FlatAction
from pyro_symmetric.symmetry.rescaling import SignGroup
from pyro_symmetric.symmetry.weight_symmetry import WeightSymmetry
from pyro_symmetric.symmetry.weights import Weights


class AutoSymmetrized(WeightsGuide):
    """A stock continuous guide, symmetrised over a finite group; it plugs into stock :class:`~pyro.infer.SVI`.

    >>> guide = AutoSymmetrized(model, group, base=AutoDiagonalNormal, estimator=SinkhornImportance(4))
    >>> svi = SVI(model, guide, Adam({"lr": 1e-2}), loss=Trace_ELBO())

    Draws, ``median`` and ``quantiles`` are those of the base, one copy of every mode: predictions, being invariant, are
    distributed as under the symmetrised guide. Only the density, and so the ELBO, differs. (``orbit=True`` gives
    those of the symmetrised guide itself.) Where units lie far apart, as in trained networks, the gain is nearly
    constant: training ends about where the base alone does, and only the evidence changes. Where the estimator's
    ``bound`` is ``"upper"`` (of the log-density), the ELBO that SVI reports is a lower bound of the symmetrised
    guide's. Objectives that weight draws by the density (``RenyiELBO``, ``ReweightedWakeSleep``, importance sampling)
    need ``ExactOrbit`` and refuse a bound.

    The model must be invariant under the group: exchangeable priors and likelihood; set-up checks it at draws from the
    prior and names what is wrong. Local latent variables (inside a subsampled plate) are not supported.

    :param model: the Pyro model.
    :param group: what to average over: permutations, signs, or both, e.g. ``find_symmetry(net, x)``. Scalings and
        shifts of a network are continuous, no symmetry of any proper prior, and left out. Signs need sites that can
        take every real number. Sites of the model that the group doesn't know stay as they are.
    :param base: the stock guide class: ``AutoDiagonalNormal``, ``AutoLowRankMultivariateNormal``,
        ``AutoMultivariateNormal``, ``AutoNormalizingFlow``, ``AutoIAFNormal`` or another
        :class:`~pyro.infer.autoguide.AutoContinuous`, such as :class:`~pyro_symmetric.guides.AutoModes` for several
        modes. ``AutoNormal`` is taken as ``AutoDiagonalNormal``, the same
        family. A flow is followed by a trainable shift and scale, so that it starts where other bases do.
    :param estimator: of the symmetrised log-density; by default what
        :func:`~pyro_symmetric.guides.suggest_estimator` picks: exact for small groups, else ``SinkhornImportance(4)``.
    :param sticking_the_landing: leave the score of the guide out of its gradients (Gaussian bases only): noise that
        vanishes as the guide fits better. See :class:`~pyro_symmetric.distributions.Symmetrized` on when gradients
        stay unbiased.
    :param init_loc_fn: where the means start. By default sites that the group moves start at the network's own values
        for a :class:`BayesianModel`, else at a draw from the prior, never at the group's fixed point (all units equal),
        where the gradient can't tell units apart; other sites, such as a scale of noise, at their prior's median.
    :param num_starts: how many starts are compared by the joint density there; the best is kept. The others are drawn
        from the prior (a network's weights stay at their own values). ``starts`` and the repr tell their log-densities.
        With ``init_loc_fn`` there is nothing to compare.
    :param base_arguments: further arguments of the base, such as ``init_scale`` or ``rank``.
    """

    base_class: ClassVar[type[AutoContinuous]]
    group: AnyFiniteGroup
    estimator: OrbitEstimator

    def __new__(
        cls, model: Any = None, group: Any = None, base: type = AutoDiagonalNormal, **_: Any
    ) -> AutoSymmetrized:
        return super().__new__(_symmetrized_over(base) if cls is AutoSymmetrized else cls)

    def __init__(
        self,
        model: Any,
        group: AnyFiniteGroup | SignGroup | WeightSymmetry,
        base: type[AutoContinuous] | type[AutoNormal] = AutoDiagonalNormal,
        estimator: OrbitEstimator | None = None,
        *,
        sticking_the_landing: bool = False,
        init_loc_fn: InitLocFn | None = None,
        num_starts: int = 4,
        **base_arguments: Any,
    ):
        group = finite_part(group)
        if estimator is not None:
            require_estimator(estimator)
        arguments.flag("sticking_the_landing", sticking_the_landing)
        arguments.function("model", model, "a Pyro model")
        arguments.function("init_loc_fn", init_loc_fn, "a function of a site", none="the usual starts")
        arguments.positive("init_scale", base_arguments.get("init_scale"), none="the base's own")
        arguments.whole("num_starts", num_starts, 1)
        given_model, start = model, init_loc_fn or starts.init_loc_fn(model, group.required_sites)
        if not self._has_moments:
            if sticking_the_landing:
                raise TypeError(f"sticking_the_landing needs a Gaussian base; found {self.base_class.__name__}")
            init_scale = base_arguments.pop("init_scale", 0.1)
            model = InitMessenger(start)(model)  # a flow would start its sites at zero
        elif self.chooses_starts:
            base_arguments |= {"init_loc_fn": init_loc_fn, "num_starts": num_starts, "moved": group.required_sites}
        elif "init_loc_fn" in inspect.signature(self.base_class.__init__).parameters:
            base_arguments["init_loc_fn"] = start
        super().__init__(model, **base_arguments)
        if not self._has_moments:
            self.init_scale = init_scale
        self._given_model = (given_model,)  # in a tuple, so that a module doesn't become a part of the guide
        self.num_starts = num_starts if init_loc_fn is None else 1
        self.group = group
        self.estimator = estimator or suggest_estimator(self.base_class, group).estimator
        self.sticking_the_landing = sticking_the_landing
        self._action: FlatAction | SignedFlatAction | ConstrainedAction | None = None

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        try:
            sites = layout_of(self)
            require_global(sites)
            self._action = action_on(sites, self.group)
            if not isinstance(self._given_model[0], LayoutModel):
                check_invariance(self._given_model[0], self.group, *args, **kwargs)
            if self.num_starts > 1 and not self.chooses_starts:
                self._compare_starts(sites, *args, **kwargs)
        except Exception:
            self.prototype_trace = None  # a guide that was refused isn't set up: the next call refuses it again
            raise

    def _compare_starts(self, sites: Sequence[SiteLayout], *args: Any, **kwargs: Any) -> None:
        model = self._given_model[0]
        ways = starts.candidates(model, sites, self.group.required_sites, self.num_starts)
        if len(ways) > 1:  # else it is there already
            best, self.starts = starts.best_start(model, sites, ways, *args, **kwargs)
            with torch.no_grad():
                self.loc.copy_(best)

    def sample_latent(self, *args: Any, **kwargs: Any) -> Tensor:
        """One flat unconstrained draw as a Pyro site, whose log-density is refused where a bound won't do."""
        density = GuideDensity.of(self.get_posterior(*args, **kwargs))
        return pyro.sample(f"_{self._pyro_name}_latent", density, infer={"is_auxiliary": True})

    def sample_posterior(self, sample_shape: Sequence[int] = (), orbit: bool = False) -> Weights:
        """Draws of the weights, ``sample_shape + site_shape``, detached and on the guide's device. Needs no data.

        :param orbit: draw from the symmetrised guide itself, all copies alike, instead of from its base.
        """
        weights = super().sample_posterior(sample_shape)
        if not arguments.flag("orbit", orbit):
            return weights
        element = self.group.sample(sample_shape, device=next(iter(weights.values())).device)
        return moved_weights(element, weights, sample_shape)

    def median(self, *args: Any, orbit: bool = False, num_samples: int = 2000, **kwargs: Any) -> Weights:
        """Medians of the weights, by site; see :meth:`quantiles`."""
        if not arguments.flag("orbit", orbit) and self._has_moments:
            return super().median(*args, **kwargs)
        found = self.quantiles([0.5], *args, orbit=orbit, num_samples=num_samples, **kwargs)
        return {site: value[0] for site, value in found.items()}

    def quantiles(
        self, quantiles: Any, *args: Any, orbit: bool = False, num_samples: int = 2000, **kwargs: Any
    ) -> Weights:
        """Marginal quantiles of the weights, by site, ``(len(quantiles), *site_shape)``.

        By default those of the base, one copy of every mode.

        :param orbit: those of the symmetrised guide, whose marginals are the same for all units that the group
            exchanges, and symmetric around zero where it flips signs.
        :param num_samples: draws that they are estimated from, with ``orbit``, or where the base is a flow.
        """
        arguments.whole("num_samples", num_samples, 1)
        if not arguments.flag("orbit", orbit) and self._has_moments:
            return super().quantiles(quantiles, *args, **kwargs)
        checked(quantiles)
        draws = self.sample_posterior((num_samples,), orbit=orbit)
        return {site: _empirical_quantiles(value, quantiles) for site, value in draws.items()}

    @property
    def _has_moments(self) -> bool:
        return not issubclass(self.base_class, AutoNormalizingFlow)

    def get_base_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """The base guide's distribution over flat unconstrained vectors, not symmetrised."""
        return super().get_posterior(*args, **kwargs)

    def get_posterior(self, *args: Any, **kwargs: Any) -> Symmetrized:
        """The symmetrised distribution over flat unconstrained vectors."""
        if self._action is None:
            layout_of(self)  # says what to do
        return Symmetrized(
            self.get_base_posterior(*args, **kwargs),
            self._action,  # type: ignore[arg-type]
            self.estimator,
            self.sticking_the_landing,
        )


class _StartingFlow:
    """A normalising flow followed by a trainable shift and scale of each coordinate.

    Pyro's flows start around zero, the fixed point of a group of permutations and signs, about as wide as a standard
    normal. This one starts around given values, and as narrow as other guides.
    """

    init_scale: float
    loc: Any
    scale: Any
    latent_dim: int
    transform: Any
    _prototype_tensor: Any

    def _setup_prototype(self: Any, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)  # type: ignore[misc]
        self.loc = nn.Parameter(self._init_loc())
        self.scale = PyroParam(torch.full_like(self.loc, self.init_scale), constraints.softplus_positive)
        AutoNormalizingFlow.get_posterior(self)  # creates the flow's own parameters
        self.transform.to(device=self.loc.device, dtype=self.loc.dtype)
        del self._prototype_tensor  # Pyro's second name for one of those parameters
        self._require_inverse()

    def _require_inverse(self: Any) -> None:
        """A copy of a draw isn't one that the flow has made: its density needs the inverse, not its cache."""
        posterior = AutoNormalizingFlow.get_posterior(self)
        try:
            with torch.no_grad():
                posterior.log_prob(self.loc + self.scale / 2)
        except (KeyError, NotImplementedError) as error:
            raise TypeError(
                "the flow knows the inverse of its own draws only, but symmetrising asks for the density of their "
                "copies; take a flow that inverts everywhere: AutoIAFNormal (as many passes as there are weights), or "
                "affine_coupling or spline_coupling (one pass)"
            ) from error

    def get_base_dist(self) -> Any:
        standard = dist.Normal(self.loc.new_zeros(1), self.loc.new_ones(1))
        return standard.expand([self.latent_dim]).to_event(1)

    def get_transform(self, *args: Any, **kwargs: Any) -> Any:
        flow = super().get_transform(*args, **kwargs)  # type: ignore[misc]
        return ComposeTransform([flow, AffineTransform(self.loc, self.scale, event_dim=1)])


def require_global(sites: Sequence[SiteLayout]) -> None:
    """:raises ValueError: if a site is drawn for a subsample of the data only."""
    for site in sites:
        for plate in site.plates:
            if plate.size < plate.full_size:
                raise ValueError(
                    f"site {site.name!r} lies in the plate {plate.name!r}, which draws {plate.size} of "
                    f"{plate.full_size} rows: a symmetrised guide takes no local latent variables. "
                    "Marginalise them, or use the full plate"
                )


def check_invariance(model: Callable[..., Any], group: AnyFiniteGroup, *args: Any, **kwargs: Any) -> None:
    """Compare a model's joint density at two draws from its prior before and after elements of each factor.

    Models whose density isn't a fixed function of their sites (dropout), and those with priors that can't be drawn from
    (improper ones), are passed over.

    :raises ValueError: naming the factors, sites and axes that are wrong: see
        :func:`~pyro_symmetric.symmetry.model_check.verify_model`.
    """
    try:
        check(group, model, args, kwargs).require()
    except (InconclusiveError, NotImplementedError):
        return


@functools.cache
def _symmetrized_over(base: type) -> type:
    """The subclass that symmetrises one stock guide class: its parameters are the stock guide's own."""
    base = AutoDiagonalNormal if base is AutoNormal else base
    if not (isinstance(base, type) and issubclass(base, AutoContinuous)):
        raise TypeError(f"base is {base!r}; it must be AutoDiagonalNormal or another subclass of AutoContinuous")
    start = (_StartingFlow,) if issubclass(base, AutoNormalizingFlow) else ()
    return types.new_class(
        f"AutoSymmetrized[{base.__name__}]",
        (AutoSymmetrized, *start, base),
        exec_body=lambda body: body.update(base_class=base),
    )


def _empirical_quantiles(draws: Tensor, quantiles: Any) -> Tensor:
    """Linearly interpolated quantiles over the first axis, ``(len(quantiles), *site_shape)``; any number of draws."""
    ordered = draws.sort(0).values
    where = torch.as_tensor(quantiles, dtype=draws.dtype, device=draws.device).reshape(-1) * (len(draws) - 1)
    below = where.floor().long()
    weight = (where - below).reshape(-1, *([1] * (draws.dim() - 1)))
    return torch.lerp(ordered[below], ordered[(below + 1).clamp(max=len(draws) - 1)], weight)
