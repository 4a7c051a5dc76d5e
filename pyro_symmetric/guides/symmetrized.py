r"""Guides that are averaged over the orbits of a symmetry group.

For a model whose joint density is invariant under a finite group, with base guide ``q`` and
:math:`\bar q(w) = \frac1{|G|} \sum_g q(g \cdot w)`,

.. math:: \mathrm{ELBO}(\bar q) = \mathrm{ELBO}(q) + I(g; w), \qquad 0 \le I(g; w) \le \log|G| .

Reference: Gelberg et al. 2024 (arXiv 2408.05496), Section 4.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from pyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal, AutoGuide, AutoNormal
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor

from pyro_symmetric._process import forked
from pyro_symmetric.arguments import described
from pyro_symmetric.discovery.invariance import InconclusiveError
from pyro_symmetric.discovery.model_check import verify_model
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import OrbitEstimator, Symmetrized, usual_estimator
from pyro_symmetric.groups import Action, Group, group_of
from pyro_symmetric.guides.base import WeightsGuide, action_on, layout_of
from pyro_symmetric.guides.gaussian import AutoUnitBlocks, gaussian_copy, plain, require_spread
from pyro_symmetric.guides.starts import InitLocFn, Start
from pyro_symmetric.weights import Weights


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
        self._given = (model, start)
        self.base = _base(base, model, start, base_arguments)
        self.estimator: Any = estimator  # until set-up None, if it is left to the base
        self._action: Action | None = None

    @property
    def plain(self) -> AutoContinuous:
        return self.base

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        (model, start), given = self._given or (None, None), self.base.prototype_trace is not None
        if not given:
            self.base._model = (InitMessenger(start)(model),)  # stock guides lose theirs when they are pickled
            self.base._setup_prototype(*args, **kwargs)
        self._adopt(self.base)
        self.base.prototype_trace = self.prototype_trace  # which holds no data
        try:
            self._check(model, *args, **kwargs)
        except Exception:
            # A guide that was refused isn't set up: the next call refuses it again.
            self.prototype_trace = None
            self.base.prototype_trace = self.base.prototype_trace if given else None
            raise

    def _check(self, model: Any, *args: Any, **kwargs: Any) -> None:
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
            if not (found := verify_model(self.group, functools.partial(model, *args, **kwargs))):
                raise ValueError(str(found))

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
        inner = plain(base)
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
