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
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal, AutoNormal
from pyro.infer.autoguide.initialization import init_to_sample, init_to_value

from pyro_symmetric.distributions import OrbitEstimator, Symmetrized
from pyro_symmetric.distributions.constrained import ConstrainedAction
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.layout import LayoutModel, action_on, layout_of
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.symmetry.permutation import FlatAction, Permutation, PermutationGroup
from pyro_symmetric.symmetry.weights import Weights


class AutoSymmetrized(WeightsGuide):
    """A stock continuous guide, symmetrised over a permutation group; it plugs into stock :class:`~pyro.infer.SVI`.

    >>> guide = AutoSymmetrized(model, group, base=AutoDiagonalNormal, estimator=InfoNCE(16))
    >>> svi = SVI(model, guide, Adam({"lr": 1e-2}), loss=Trace_ELBO())

    Draws, ``median`` and ``quantiles`` are those of the base, one copy of every mode: predictions, being invariant, are
    distributed as under the symmetrised guide. Only the density, and so the ELBO, differs. Where the estimator's
    ``bound`` is ``"upper"`` (of the log-density), the ELBO that SVI reports is a lower bound of the symmetrised
    guide's. Objectives that divide by the guide's density (``RenyiELBO``, importance weighting) need ``ExactOrbit``.

    The model must be invariant under the group: exchangeable priors and likelihood; set-up checks it at a draw from the
    prior. Local latent variables (inside a subsampled plate) are not supported.

    :param model: the Pyro model.
    :param group: the permutations to average over, e.g. ``find_symmetry(net, x).permutations``. Sites of the model that
        it doesn't know stay as they are.
    :param base: the stock guide class: ``AutoDiagonalNormal``, ``AutoLowRankMultivariateNormal``,
        ``AutoMultivariateNormal`` or another :class:`~pyro.infer.autoguide.AutoContinuous`; ``AutoNormal`` is taken as
        ``AutoDiagonalNormal``, the same family.
    :param estimator: of the symmetrised log-density; ``InfoNCE(16)`` by default.
    :param init_loc_fn: where the means start. By default the network's own values for a :class:`BayesianModel`, else a
        draw from the prior: never the group's fixed point (all units equal), where the gradient can't tell units apart.
    :param base_arguments: further arguments of the base, such as ``init_scale`` or ``rank``.
    """

    base_class: ClassVar[type[AutoContinuous]]
    group: PermutationGroup
    estimator: OrbitEstimator | None

    def __new__(
        cls, model: Any = None, group: Any = None, base: type = AutoDiagonalNormal, **_: Any
    ) -> AutoSymmetrized:
        return super().__new__(_symmetrized_over(base) if cls is AutoSymmetrized else cls)

    def __init__(
        self,
        model: Any,
        group: PermutationGroup,
        base: type[AutoContinuous] | type[AutoNormal] = AutoDiagonalNormal,
        estimator: OrbitEstimator | None = None,
        *,
        init_loc_fn: Callable[[dict[str, Any]], torch.Tensor] | None = None,
        **base_arguments: Any,
    ):
        if not isinstance(group, PermutationGroup):
            raise TypeError(
                f"group is a {type(group).__name__}; it must be a PermutationGroup, e.g. find_symmetry(net, "
                f"x).permutations"
            )
        if estimator is not None and (
            isinstance(estimator, type) or not callable(getattr(estimator, "log_prob", None))
        ):
            raise TypeError(f"estimator is {estimator!r}; it must be an estimator such as InfoNCE(16) or ExactOrbit()")
        if "init_loc_fn" in inspect.signature(self.base_class.__init__).parameters:
            base_arguments["init_loc_fn"] = init_loc_fn or default_init_loc_fn(model)
        super().__init__(model, **base_arguments)
        self._given_model = (model,)  # in a tuple, so that a module doesn't become a part of the guide
        self.group = group
        self.estimator = estimator
        self._action: FlatAction | ConstrainedAction | None = None

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self._action = action_on(layout_of(self), self.group)
        if not isinstance(self._given_model[0], LayoutModel):
            check_invariance(self._given_model[0], self.group, *args, **kwargs)

    def sample_posterior(self, sample_shape: Sequence[int] = (), orbit: bool = False) -> Weights:
        """Draws of the weights, ``sample_shape + site_shape``, detached and on the guide's device. Needs no data.

        :param orbit: draw from the symmetrised guide itself, all copies alike, instead of from its base.
        """
        weights = super().sample_posterior(sample_shape)
        if not orbit:
            return weights
        element = self.group.sample(sample_shape, device=next(iter(weights.values())).device)
        return element(weights)

    def get_base_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """The base guide's distribution over flat unconstrained vectors, not symmetrised."""
        return super().get_posterior(*args, **kwargs)

    def get_posterior(self, *args: Any, **kwargs: Any) -> Symmetrized:
        """The symmetrised distribution over flat unconstrained vectors."""
        if self._action is None:
            layout_of(self)  # says what to do
        return Symmetrized(self.get_base_posterior(*args, **kwargs), self._action, self.estimator)  # type: ignore[arg-type]


def check_invariance(model: Callable[..., Any], group: PermutationGroup, *args: Any, **kwargs: Any) -> None:
    """Compare a model's log-joint density at a draw from its prior before and after random elements of each factor.

    Models whose density isn't a fixed function of the weights (subsampled plates) are passed over.

    :raises ValueError: naming the factors that change it: the prior, the likelihood or the data treat units
        differently.
    """
    cuda = {arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda}
    with torch.random.fork_rng(cuda), torch.no_grad(), poutine.block(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = poutine.trace(model).get_trace(*args, **kwargs)
        weights: dict[str, Any] = {name: site["value"] for name, site in trace.iter_stochastic_nodes()}

        def log_joint(values: dict[str, Any]) -> float:
            conditioned = poutine.condition(model, data=values)
            return float(poutine.trace(conditioned).get_trace(*args, **kwargs).log_prob_sum())

        before = log_joint(weights)
        tolerance = 1e-3 * (1 + abs(before))
        if not abs(log_joint(weights) - before) < tolerance:
            return
        broken = [
            name
            for name, n in group.factors.items()
            if n > 1 and abs(log_joint(_rotated(group, name)(weights)) - before) > tolerance
        ]
    if broken:
        raise ValueError(
            f"the model is not invariant under the factors {broken} of the group: its log-density changes when their "
            "units are permuted. Do the prior, the likelihood or buffers such as running statistics treat units "
            "differently?"
        )


def _rotated(group: PermutationGroup, name: str) -> Permutation:
    n = group.factors[name]
    return group.element({name: torch.arange(n).roll(1)})


def default_init_loc_fn(model: Any) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Start at a network's own values where there are some, else at a draw from the prior."""
    if isinstance(model, BayesianModel):
        return init_to_value(values=model.initial_weights(), fallback=init_to_sample)
    return init_to_sample


@functools.cache
def _symmetrized_over(base: type) -> type:
    """The subclass that symmetrises one stock guide class: its parameters are the stock guide's own."""
    base = AutoDiagonalNormal if base is AutoNormal else base
    if not (isinstance(base, type) and issubclass(base, AutoContinuous)):
        raise TypeError(f"base is {base!r}; it must be AutoDiagonalNormal or another subclass of AutoContinuous")
    return types.new_class(
        f"AutoSymmetrized[{base.__name__}]",
        (AutoSymmetrized, base),
        exec_body=lambda body: body.update(base_class=base),
    )
