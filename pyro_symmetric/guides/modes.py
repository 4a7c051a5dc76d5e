r"""A guide with several modes: a mixture of Gaussians with trainable weights.

.. math:: q(w) = \sum_{k=1}^{M} \pi_k\, q_k(w), \qquad
          \mathrm{ELBO}(q) = \sum_k \pi_k\, \mathbb E_{q_k}[\log p(w, D) - \log q(w)]

Its log-density is exact. If the modes lie apart, this is the mean of the modes' own ELBOs plus the entropy of the
weights: modes of equal worth are worth :math:`\log M` nats together; other copies of one mode are worth no more than
that, and :class:`~pyro_symmetric.guides.AutoSymmetrized` counts all of them. Align guides before they are mixed
(:func:`~pyro_symmetric.alignment.align`, :func:`~pyro_symmetric.guides.push_forward`) to compare or average modes
weight by weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn.module import PyroModuleList
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_symmetric import arguments
from pyro_symmetric.distributions import Modes
from pyro_symmetric.guides import starts
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.bases import held_guide
from pyro_symmetric.guides.gaussian import shares_of
from pyro_symmetric.guides.layout import GuideLayout, LayoutModel, layout_of, one_layout_of
from pyro_symmetric.guides.starts import InitLocFn
from pyro_symmetric.guides.unit_blocks import AutoUnitBlocks, gaussian_copy

BISECTIONS = 60  # of a bracket of a quantile; more than the digits of a float64

GAUSSIAN = (AutoDiagonalNormal, AutoNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal, AutoUnitBlocks)


class AutoModes(WeightsGuide):
    r"""A mixture of ``M`` Gaussian guides over the concatenated unconstrained sites, with trainable weights.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = ps.AutoModes(model, num_modes=4)
    >>> svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=ps.Modes_ELBO())
    >>> loss = svi.step()
    >>> len(guide.modes)
    4

    The guide holds its modes in ``modes``, guides themselves. Stock objectives take it: ``Trace_ELBO`` draws one of
    them for each particle, and gradients are unbiased, those of the mixture weights by their score, whose noise is as
    large as the ELBO itself. Draw all modes instead with :class:`~pyro_symmetric.guides.Modes_ELBO`, or hold the
    weights (``train_weights=False``). ``TraceMeanField_ELBO`` refuses trainable weights; other objectives that know no
    scores of reparametrised sites (``TraceGraph_ELBO``, ``RenyiELBO``) leave that term out: give them held weights.

    :param model: the Pyro model.
    :param num_modes: number of components ``M``.
    :param base: the class of each mode: ``AutoDiagonalNormal``, ``AutoNormal`` (which is taken as that),
        ``AutoLowRankMultivariateNormal``, ``AutoMultivariateNormal`` or
        :class:`~pyro_symmetric.guides.AutoUnitBlocks` (with ``group=...``).
    :param init_loc_fn: where the means start, called for each mode anew. By default the first mode starts at the
        network's own values for a :class:`~pyro_symmetric.models.BayesianModel` and each other at freshly initialised
        ones, the likelihood's sites at their prior's median; of any other model, all start at draws from the prior.
    :param num_starts: how many starts are compared for each mode, as by
        :class:`~pyro_symmetric.guides.AutoSymmetrized`; the best is kept. With ``init_loc_fn`` there is nothing to
        compare.
    :param exchanged: the sites that a group moves: those that are drawn from the prior, the others starting at its
        median.
    :param train_weights: whether the mixture weights are parameters; else they stay as they are, equal at the start.
    :param base_arguments: further arguments of the base, such as ``init_scale`` or ``rank``.
    """

    logits: Any
    modes: Any

    def __init__(
        self,
        model: Any,
        num_modes: int = 2,
        *,
        base: type[AutoGuide] = AutoDiagonalNormal,
        init_loc_fn: InitLocFn | None = None,
        num_starts: int = 4,
        exchanged: Collection[str] | None = None,
        train_weights: bool = True,
        **base_arguments: Any,
    ):
        arguments.whole("num_modes", num_modes, 1)
        if not (isinstance(base, type) and issubclass(base, GAUSSIAN)):
            raise TypeError(f"base is {arguments.shown(base)}; it must be AutoDiagonalNormal or another Gaussian guide")
        arguments.function("init_loc_fn", init_loc_fn, "a function of a site", none="the usual starts")
        arguments.whole("num_starts", num_starts, 1)
        exchanged = None if exchanged is None else arguments.listed("exchanged", exchanged, str, "sites")
        start = init_loc_fn or starts.Start(model, exchanged)
        super().__init__(model, start)
        self.num_modes, self.num_starts, self.exchanged = num_modes, num_starts, exchanged
        self.train_weights = arguments.flag("train_weights", train_weights)
        self._given = (model, init_loc_fn)
        self.modes = PyroModuleList(
            [held_guide(AutoModes, base, model, start, base_arguments) for _ in range(num_modes)]
        )
        self._stratum: int | None = None

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        model, init_loc_fn = self._given or (None, None)
        self.starts = ()
        for number, mode in enumerate(self.modes):
            self.starts += starts.set_up_at_best(
                mode, model, init_loc_fn, self.exchanged, self.num_starts, args, kwargs, fresh=number > 0
            )
        sites = layout_of(self.modes[0]).site_shapes
        if unknown := [name for name in self.exchanged or () if name not in sites]:
            raise ValueError(f"exchanged holds the sites {unknown}, which the model lacks; it has {list(sites)}")
        self._adopt(self.modes[0])
        self._set_logits(self.modes[0].loc.new_zeros(self.num_modes))

    def _set_logits(self, logits: Tensor) -> None:
        if self.train_weights:
            self.logits = nn.Parameter(logits)
        else:
            self.register_buffer("logits", logits)

    # the distribution -----------------------------------------------------------------------------------------------

    def get_posterior(self, *args: Any, **kwargs: Any) -> Modes:
        """The mixture over flat unconstrained vectors."""
        return Modes([mode.get_posterior() for mode in self.modes], self.logits, self._stratum)

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

    def _marginal_quantiles(self, levels: Tensor) -> Tensor:
        weights = self.mixture_weights
        marginals = [torch.distributions.Normal(*mode._loc_scale()) for mode in self.modes]
        return _mixture_quantiles(marginals, weights, levels.to(weights))

    # made of other guides -------------------------------------------------------------------------------------------

    @classmethod
    def from_guides(
        cls,
        guides: Sequence[AutoGuide],
        weights: Sequence[float] | Tensor | None = None,
        *,
        train_weights: bool = True,
    ) -> AutoModes:
        """A mixture of given Gaussian guides, of whatever families.

        To bring them into one frame first:

        >>> aligned = [push_forward(fit, align(fit, fits[0], group).element) for fit in fits]
        >>> guide = AutoModes.from_guides(aligned)

        The moments are copied: stock SVI continues the training and leaves the given guides as they are.

        :param guides: set-up Gaussian guides of one model, stock or ours.
        :param weights: mixture weights, positive; equal by default.
        :param train_weights: whether the mixture weights are parameters.
        """
        guides = arguments.listed("guides", guides, AutoGuide, "guides")
        if not guides:
            raise ValueError("guides is empty; a mixture needs at least one")
        layout = one_layout_of(guides)
        modes = [gaussian_copy(guide) for guide in guides]
        logits = shares_of(weights, len(modes), zero=False).log().to(modes[0].loc)
        return cls._holding(layout, modes, logits, train_weights)

    @classmethod
    def _holding(cls, layout: GuideLayout, modes: Sequence[Any], logits: Tensor, train_weights: bool) -> AutoModes:
        model = LayoutModel(layout, logits)
        guide = cls(model, len(modes), init_loc_fn=model.init_loc_fn, train_weights=train_weights)
        for mode in modes:
            mode._pyro_context.used = False
        guide.modes = PyroModuleList(modes)
        guide._adopt(guide.modes[0])
        guide._set_logits(logits)
        return guide


# small steps --------------------------------------------------------------------------------------------------------


def _mixture_quantiles(components: Sequence[Distribution], weights: Tensor, levels: Tensor) -> Tensor:
    """The quantiles of a mixture, of the shape of the components' own, by bisection of its distribution function.

    :param components: with ``icdf`` and ``cdf``, of one batch shape.
    :param weights: of the components, of sum one, ``(M,)``.
    :param levels: between 0 and 1, of a shape that broadcasts with the components' batch shape.
    """
    ends = torch.stack([component.icdf(levels) for component in components])
    low, high = ends.amin(0), ends.amax(0)  # if all components agree, so does the mixture
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = sum(w * component.cdf(middle) for w, component in zip(weights, components, strict=True)) < levels
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2
