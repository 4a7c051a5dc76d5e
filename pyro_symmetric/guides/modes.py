r"""A guide with several modes: a mixture of Gaussians with trainable weights.

.. math:: q(w) = \sum_{k=1}^{M} \pi_k\, q_k(w), \qquad
          \mathrm{ELBO}(q) = \sum_k \pi_k\, \mathbb E_{q_k}[\log p(w, D) - \log q(w)]

Its log-density is exact. If the modes lie apart, this is the mean of the modes' own ELBOs plus the entropy of the
weights: modes of equal worth are worth :math:`\log M` nats together; other copies of one mode are worth no more than
that, and :class:`~pyro_symmetric.guides.AutoSymmetrized` counts all of them. Align the modes
(:meth:`AutoModes.from_guides` with ``group``) to compare or average them weight by weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.alignment.matching import align
from pyro_symmetric.alignment.parts.problem import AnyGroup
from pyro_symmetric.distributions import Modes, OrbitEstimator
from pyro_symmetric.guides import starts
from pyro_symmetric.guides.affine import AffineAction
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.gaussian import (
    FAMILIES,
    GaussianGuide,
    Moments,
    family_and_moments,
    one_family,
    require_moments,
)
from pyro_symmetric.guides.layout import LayoutModel, SiteLayout, layout_of, one_layout_of
from pyro_symmetric.guides.quantiles import checked, mixture_quantiles
from pyro_symmetric.guides.starts import InitLocFn
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.symmetry.finite import AnyFiniteGroup
from pyro_symmetric.symmetry.weights import Weights

Family = Literal["AutoMeanField", "AutoLowRank", "AutoFullRank"]


class AutoModes(WeightsGuide):
    r"""A mixture of ``M`` Gaussians over the concatenated unconstrained sites, with trainable weights.

    >>> guide = AutoModes(model, num_modes=4)
    >>> svi = SVI(model, guide, Adam({"lr": 1e-2}), loss=Modes_ELBO())

    Stock objectives take it: ``Trace_ELBO`` draws a component for each particle, and gradients are unbiased, those of
    the mixture weights by their score, whose noise is as large as the ELBO itself. Draw all components instead with
    :class:`~pyro_symmetric.guides.Modes_ELBO`, or hold the weights (``train_weights=False``). ``TraceMeanField_ELBO``
    refuses trainable weights; other objectives that know no scores of reparametrised sites (``TraceGraph_ELBO``,
    ``RenyiELBO``) leave that term out: give them held weights.

    :param model: the Pyro model.
    :param num_modes: number of components ``M``.
    :param family: of each component: ``"AutoMeanField"``, ``"AutoLowRank"`` or ``"AutoFullRank"``.
    :param rank: of ``AutoLowRank``; by default the square root of the number of weights.
    :param init_loc_fn: where the means start, called for each mode anew. By default the first mode starts at the
        network's own values for a :class:`~pyro_symmetric.models.BayesianModel` and each other at freshly initialised
        ones, the likelihood's sites at their prior's median; of any other model, all start at draws from the prior.
    :param num_starts: how many starts are compared for each mode, as by
        :class:`~pyro_symmetric.guides.AutoSymmetrized`; the best is kept. With ``init_loc_fn`` there is nothing to
        compare.
    :param moved: the sites that a group moves: those that are drawn from the prior, the others starting at its median.
    :param init_scale: of all deviations at the start.
    :param train_weights: whether the mixture weights are parameters; else they stay as they are, equal at the start.
    """

    chooses_starts: ClassVar[bool] = True
    logits: Any
    loc: Any
    scale: Any
    cov_factor: Any
    scale_tril: Any

    def __init__(
        self,
        model: Any,
        num_modes: int = 2,
        *,
        family: Family = "AutoMeanField",
        rank: int | None = None,
        init_loc_fn: InitLocFn | None = None,
        num_starts: int = 4,
        moved: Collection[str] | None = None,
        init_scale: float = 0.1,
        train_weights: bool = True,
    ):
        arguments.whole("num_modes", num_modes, 1)
        arguments.one_of("family", family, FAMILIES)
        arguments.whole("rank", rank, 1, none="the square root of the number of weights")
        arguments.function("init_loc_fn", init_loc_fn, "a function of a site", none="the usual starts")
        arguments.positive("init_scale", init_scale)
        arguments.flag("train_weights", train_weights)
        arguments.whole("num_starts", num_starts, 1)
        moved = None if moved is None else arguments.listed("moved", moved, str, "sites")
        super().__init__(model, init_loc_fn or starts.init_loc_fn(model, moved))
        self.num_modes, self.family, self.rank, self.train_weights = num_modes, family, rank, train_weights
        self._start = (model, init_loc_fn, moved)  # in a tuple, so that a module doesn't become a part of the guide
        self.num_starts = num_starts
        self._init_scale = init_scale
        self._stratum: int | None = None

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self._require_moved()
        loc = torch.stack([self._start_of_mode(k, *args, **kwargs) for k in range(self.num_modes)])
        logits = loc.new_zeros(self.num_modes)
        if self.train_weights:
            self.logits = nn.Parameter(logits)
        else:
            self.register_buffer("logits", logits)
        low_rank = self.family == "AutoLowRank"
        scale = self._init_scale * (0.5**0.5 if low_rank else 1.0)  # half of the variance is the factor's, as in Pyro
        self.loc = nn.Parameter(loc)
        self.scale = PyroParam(torch.full_like(loc, scale), constraints.softplus_positive)
        if low_rank:
            self.rank = round(self.latent_dim**0.5) if self.rank is None else self.rank
            self.cov_factor = nn.Parameter(loc.new_empty(*loc.shape, self.rank).normal_(0, 1 / self.rank**0.5))
        if self.family == "AutoFullRank":
            eye = torch.eye(self.latent_dim, dtype=loc.dtype, device=loc.device)
            self.scale_tril = PyroParam(eye.repeat(self.num_modes, 1, 1), constraints.unit_lower_cholesky)

    def _require_moved(self) -> None:
        """:raises ValueError: if sites that are to be moved aren't the model's."""
        names, moved = [site.name for site in layout_of(self)], self._start[-1]
        if unknown := [name for name in moved or () if name not in names]:
            self.prototype_trace = None  # so that the next call refuses it again
            raise ValueError(f"moved holds the sites {unknown}, which the model lacks; it has {names}")

    def _start_of_mode(self, mode: int, *args: Any, **kwargs: Any) -> Tensor:
        (model, given, moved), sites = self._start, layout_of(self)
        ways = [given] if given else starts.candidates(model, sites, moved, self.num_starts, fresh=mode > 0)
        if mode == 0 and len(ways) == 1:
            return self._init_loc()
        best, densities = starts.best_start(model, sites, ways, *args, **kwargs)
        self.starts += densities
        return best

    # the distribution -----------------------------------------------------------------------------------------------

    def get_posterior(self, *args: Any, **kwargs: Any) -> Modes:
        """The mixture over flat unconstrained vectors."""
        return Modes([self._component(k) for k in range(self.num_modes)], self.logits, self._stratum)

    def _component(self, k: int) -> Any:
        if self.family == "AutoMeanField":
            return dist.Normal(self.loc[k], self.scale[k]).to_event(1)
        scale = self.scale[k].unsqueeze(-1)
        if self.family == "AutoLowRank":
            return dist.LowRankMultivariateNormal(self.loc[k], self.cov_factor[k] * scale, self.scale[k].square())
        return dist.MultivariateNormal(self.loc[k], scale_tril=self.scale_tril[k] * scale)

    @contextmanager
    def stratified(self, first: int) -> Iterator[None]:
        """Within, draw ``i`` of a batch comes from component ``(first + i) mod M``: for objectives that weight the
        components themselves."""
        self._stratum = first
        try:
            yield
        finally:
            self._stratum = None

    @property
    def mixture_weights(self) -> Tensor:
        """``(M,)``, detached; they sum to one."""
        layout_of(self)
        return self.logits.detach().softmax(-1)

    @torch.no_grad()
    def moments(self) -> list[dict[str, Tensor]]:
        """For each mode, the arguments that make the Gaussian guide of its family its equal."""
        layout_of(self)
        result = []
        for k in range(self.num_modes):
            moments = {"loc": self.loc[k].detach().clone()}
            scale = self.scale[k].detach().clone()
            if self.family == "AutoFullRank":
                moments["scale_tril"] = self.scale_tril[k] * scale.unsqueeze(-1)
            else:
                moments["scale"] = scale
            if self.family == "AutoLowRank":
                moments["cov_factor"] = self.cov_factor[k] * scale.unsqueeze(-1)
            result.append(moments)
        return result

    def components(self) -> list[GaussianGuide]:
        """The modes as guides of their own, with copies of the moments."""
        return [FAMILIES[self.family](layout_of(self), **moments) for moments in self.moments()]

    def median(self, *args: Any, **kwargs: Any) -> Weights:
        """Medians of the marginals of the mixture, by site."""
        return {site: value[0] for site, value in self.quantiles([0.5]).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> Weights:
        """Quantiles of the marginals of the mixture, by site, ``(len(quantiles), *site_shape)``."""
        layout_of(self)
        given = checked(quantiles).to(self.loc).reshape(-1, 1)
        components = [self._component(k) for k in range(self.num_modes)]
        marginals = [torch.distributions.Normal(c.mean, c.variance.sqrt()) for c in components]
        return self.unpack(mixture_quantiles(marginals, self.mixture_weights, given))

    # made of other guides -------------------------------------------------------------------------------------------

    @classmethod
    def from_guides(
        cls,
        guides: Sequence[AutoGuide],
        weights: Sequence[float] | Tensor | None = None,
        *,
        group: AnyGroup | None = None,
        align_to: int | Any = 0,
        cost: str = "wasserstein",
        train_weights: bool = True,
    ) -> AutoModes:
        """A mixture of given Gaussian guides, independent or brought into one frame.

        >>> guide = AutoModes.from_guides(fits, group=find_symmetry(net, x).permutations)

        The moments are copied: training goes on with stock SVI and leaves the given guides as they are.

        :param guides: set-up Gaussian guides of one model, stock or ours. The mixture's family is the smallest that
            holds them all.
        :param weights: mixture weights, positive; equal by default.
        :param group: bring each guide as close as this group (of permutations, signs, scalings, or all) allows to
            ``align_to``; ``None`` leaves them as they are.
        :param align_to: the number of one of the guides, or what :func:`~pyro_symmetric.alignment.align` takes as
            reference.
        :param cost: of :func:`~pyro_symmetric.alignment.align`.
        :param train_weights: whether the mixture weights are parameters.
        """
        guides = arguments.listed("guides", guides, AutoGuide, "guides")
        if not guides:
            raise ValueError("guides is empty; a mixture needs at least one")
        sites = one_layout_of(guides)
        pairs = [family_and_moments(guide) for guide in guides]
        moments: list[Moments] = [found for _, found in pairs]
        if group is not None:
            number: int | None = align_to if isinstance(align_to, int) else None
            if number is not None and not -len(guides) <= number < len(guides):
                raise ValueError(f"align_to is {number}, but there are {len(guides)} guides")
            reference = align_to if number is None else guides[number]
            for k, guide in enumerate(guides):
                if number is None or k != number % len(guides):
                    element = align(guide, reference, group, cost).element
                    moments[k] = AffineAction(element, sites).pushed(moments[k])
        family, alike = one_family([kind.__name__ for kind, _ in pairs], moments)
        like = moments[0]["loc"]
        shares = like.new_ones(len(guides)) if weights is None else arguments.numbers("weights", weights).to(like)
        if shares.shape != (len(guides),) or not bool(((shares > 0) & shares.isfinite()).all()):
            raise ValueError(f"weights are {weights}; there must be {len(guides)} positive numbers, one for each guide")
        return cls.of_moments(sites, family, alike, (shares / shares.sum()).log(), train_weights=train_weights)

    @classmethod
    def of_moments(
        cls,
        sites: tuple[SiteLayout, ...],
        family: str,
        moments: Sequence[Moments],
        logits: Tensor,
        *,
        train_weights: bool = True,
    ) -> AutoModes:
        """The mixture over a layout with given moments, one for each mode, all of one family."""
        names = inspect.signature(FAMILIES[arguments.one_of("family", family, FAMILIES)]).parameters
        for mode in arguments.listed("moments", moments, Mapping, "moments, one for each mode"):
            require_moments(sites, {name: mode.get(name) for name in names if name != "sites"})
        if arguments.tensor("logits", logits).shape != (len(moments),) or not moments:
            raise ValueError(f"logits has shape {tuple(logits.shape)}, but moments has {len(moments)} modes")
        model = LayoutModel(sites, moments[0]["loc"])
        rank = moments[0]["cov_factor"].shape[-1] if family == "AutoLowRank" else None
        guide = cls(
            model,
            len(moments),
            family=family,  # type: ignore[arg-type]
            rank=rank,
            init_loc_fn=model.init_loc_fn,
            train_weights=train_weights,
        )
        guide.setup()
        with torch.no_grad():
            guide.logits.copy_(logits)
            guide.loc.copy_(torch.stack([m["loc"] for m in moments]))
            if family == "AutoFullRank":
                roots = torch.stack([m["scale_tril"] for m in moments])
                scale = roots.diagonal(dim1=-2, dim2=-1).clone()
                guide.scale_tril = roots / scale.unsqueeze(-1)
            else:
                scale = torch.stack([m["scale"] for m in moments])
            guide.scale = scale  # a PyroParam since set-up
            if family == "AutoLowRank":
                guide.cov_factor.copy_(torch.stack([m["cov_factor"] for m in moments]) / scale.unsqueeze(-1))
        return guide

    def symmetrized(self, group: AnyFiniteGroup, estimator: OrbitEstimator | None = None) -> AutoSymmetrized:
        """This mixture averaged over the orbits of a group, as a guide of its own that starts at copies of the
        parameters; ``AutoSymmetrized(model, group, base=AutoModes, num_modes=M)`` starts anew."""
        model = LayoutModel(layout_of(self), self.loc)
        guide = AutoSymmetrized(
            model, group, AutoModes, estimator=estimator, init_loc_fn=model.init_loc_fn, **self.options()
        )
        guide.setup()
        guide.load_state_dict(self.state_dict())
        return guide

    def options(self) -> dict[str, Any]:
        """The arguments that make a guide with the same parameters."""
        names = ("num_modes", "family", "rank", "train_weights")
        return {name: getattr(self, name) for name in names}
