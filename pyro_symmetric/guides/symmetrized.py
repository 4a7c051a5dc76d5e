r"""Guides averaged over the orbits of a symmetry group: automatic ones, and those
written by hand.

For a model whose joint density is invariant under a finite group, with base guide ``q``
and
:math:`\bar q(w) = \frac1{|G|} \sum_g q(g \cdot w)`,

.. math:: \mathrm{ELBO}(\bar q) = \mathrm{ELBO}(q) + I(g; w), \qquad
    0 \le I(g; w) \le \log|G| .

Draws are draws of ``q``, moved by a uniform element of the group.

Reference: Gelberg et al. 2024 (arXiv 2408.05496), Section 4.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoGuide,
    AutoNormal,
)
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor

from pyro_symmetric._process import forked
from pyro_symmetric.arguments import Names, described
from pyro_symmetric.density.traced import ContinuousStart, require_model, title_of
from pyro_symmetric.discovery.model_carried import (
    AUTO,
    Auto,
    is_auto,
    symmetry_of_model,
)
from pyro_symmetric.discovery.model_check import verify_model
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import InconclusiveError
from pyro_symmetric.distributions import (
    OrbitEstimator,
    RotationImportance,
    Symmetrized,
    usual_estimator,
)
from pyro_symmetric.groups import Action, Group, group_of
from pyro_symmetric.guides.base import (
    InitLocFn,
    Start,
    WeightsGuide,
    action_on,
    hidden_from_guides,
    layout_of,
)
from pyro_symmetric.guides.collapse import unit_divergences
from pyro_symmetric.guides.gaussian import (
    AutoGaussian,
    AutoUnitBlocks,
    plain_posterior,
    require_spread,
    sample_posterior,
)
from pyro_symmetric.weights import Weights

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

    Without a symmetry the guide finds the model's own at its first call:

    >>> found = ps.AutoSymmetrized(model).setup(x)
    >>> found.group.order()
    6

    Draws, those of :class:`~pyro.infer.Predictive` and :meth:`get_posterior` too, are
    the base's, moved by a uniform element of the group: they visit all copies of a
    mode, and predict as the base's. ``guide.plain``, ``sample_posterior(orbit=False)``,
    ``median`` and ``quantiles`` give one copy. The model must be invariant under the
    group: set-up checks it at draws from the prior. If that could be checked, steps of
    Pyro's SVI spare the moves, which change no loss then.

    :param model: the Pyro model, without local latent variables (inside a subsampled
        plate). Discrete sites are no part of the guide: ``TraceEnum_ELBO`` sums them
        out of ``pyro.infer.config_enumerate(model)``.
    :param symmetry: permutations, signs, or both, e.g. ``find_symmetry(net, x)``.
        Scales and shifts are left out: no proper prior is invariant under them.
        ``"auto"``: that of ``base`` if it is symmetrised, else the model's, found at
        the first call with its arguments. ``None``, or a model without any: the plain
        guide.
    :param base: a class of :class:`~pyro.infer.autoguide.AutoContinuous`,
        :class:`~pyro_symmetric.AutoUnitBlocks` among them (``AutoNormal`` stands for
        ``AutoDiagonalNormal``); or a set-up guide, which is copied.
    :param estimator: of the symmetrised log-density; by default exact where that is
        cheap, else matched units.
        :class:`~pyro_symmetric.distributions.RotationImportance` averages over the
        rotations of units that rotate, too.
    :param init_loc_fn: the initial means; by default near the prior's mean, or at a
        network's own values.
    :param base_arguments: further arguments of the base, such as ``init_scale`` or
        ``rank``.
    """

    rotating: Names = ()  # of the given group, whose rotations are left out

    def __init__(
        self,
        model: Any,
        symmetry: Group | Symmetry | Auto | None = AUTO,
        base: type[AutoGuide] | AutoGuide = AutoDiagonalNormal,
        estimator: OrbitEstimator | None = None,
        *,
        init_loc_fn: InitLocFn | None = None,
        **base_arguments: Any,
    ):
        require_model(model)
        if is_auto(symmetry) and isinstance(base, AutoSymmetrized):
            symmetry = base.group
        self.finds_symmetry = is_auto(symmetry)
        self.at_least = getattr(symmetry, "at_least", False)
        self.group: Group = Group([], {})
        if symmetry is not None and not self.finds_symmetry:
            self._take(group_of(symmetry), estimator)
        if base is AutoUnitBlocks:
            base_arguments = {"symmetry": self.group, **base_arguments}
        start: InitLocFn = Start(model, self.group.required_sites)
        if init_loc_fn is not None:
            start = ContinuousStart(init_loc_fn)
        super().__init__(model, start)
        self._start = start if self.finds_symmetry else None
        self.base = _base(base, model, start, base_arguments)
        self.is_fresh = not isinstance(base, AutoGuide)
        self.estimator: Any = estimator  # if None, chosen at set-up
        self._action: Action | None = None
        self._is_verified = False

    @property
    def plain(self) -> AutoContinuous:
        """The guide before it is symmetrised, of one copy of every mode."""
        return self.base

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        if self.finds_symmetry:
            self._find(*args, **kwargs)
        was_set_up = self.base.prototype_trace is not None
        if not was_set_up:
            # stock guides lose theirs when they are pickled
            self.base._model = self._model
            self.base._prototype_hide_fn = hidden_from_guides
            try:
                self.base._setup_prototype(*args, **kwargs)
            except RuntimeError as error:
                if "no latent variables" not in str(error):
                    raise
                raise ValueError(
                    f"model {title_of(self._raw_model[0])} has no latent sites; make "
                    "a model of a network by ps.BayesianModel(net)"
                ) from None
        self._adopt(self.base)
        self.base.prototype_trace = self.prototype_trace  # which holds no data
        try:
            self._check(*args, **kwargs)
        except Exception:
            # A refused guide isn't set up: the next call refuses it again.
            self.prototype_trace = None
            self.base.prototype_trace = (
                self.base.prototype_trace if was_set_up else None
            )
            raise

    def _take(self, group: Group, estimator: OrbitEstimator | None) -> None:
        """Take the moves over which an estimator averages."""
        if isinstance(estimator, RotationImportance):
            self.group = group.compact
        else:
            self.rotating = group.names("rotate")
            self.group = group.finite

    def _find(self, *args: Any, **kwargs: Any) -> None:
        """Take the symmetry of the model."""
        symmetry = symmetry_of_model(self._raw_model[0], args, kwargs)
        if symmetry.rotating:
            symmetry = symmetry.with_rotations()
        self._take(symmetry.group, self.estimator)
        self.at_least = symmetry.at_least
        if isinstance(self._start, Start):
            self._start.moved = self.group.required_sites
        if isinstance(self.base, AutoUnitBlocks):
            self.base.group = self.group

    def _check(self, *args: Any, **kwargs: Any) -> None:
        """Check that the model's sites fit the group, and that its joint density is
        invariant, at draws from the prior, unless the group was found there.

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
        if not self.group.units:
            self.group = Group([], layout_of(self).site_shapes)
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
        if self.finds_symmetry or not self.group.units:
            self._is_verified = True
            return
        with suppress(InconclusiveError, NotImplementedError):
            verdict = verify_model(
                self.group, functools.partial(self._raw_model[0], *args, **kwargs)
            )
            if not verdict:
                raise ValueError(str(verdict))
            self._is_verified = True

    def get_posterior(self, *args: Any, **kwargs: Any) -> Symmetrized:
        """Return the symmetrised distribution over flat unconstrained vectors, of base
        ``base.get_posterior()``.
        """
        if self._action is None:
            layout_of(self)  # raises: set the guide up first
        base = self.base.get_posterior(*args, **kwargs)
        posterior = Symmetrized(base, self._action, self.estimator)  # type: ignore[arg-type]
        posterior.moves_draws = not (self._is_verified and _collects_parameters())
        return posterior

    def sample_posterior(
        self, sample_shape: Sequence[int] = (), orbit: bool = True
    ) -> Weights:
        """Draw weights, ``sample_shape + site_shape``, without data; detached and on
        the guide's device.

        :param orbit: whether to move each draw by a uniform element of the group;
            otherwise draws are those of the base, of one copy of every mode.
        """
        if orbit:
            return super().sample_posterior(sample_shape)
        return sample_posterior(self.plain, sample_shape)

    def extra_repr(self) -> str:
        """Show what rotations are left out, and, once the guide is set up, how far its
        units are from their priors.
        """
        lines = list[str]()
        if self.rotating:
            lines.append(
                f"averaged over the permutations and signs of {list(self.rotating)}, "
                "not over their rotations, as evidence(guide, symmetry=group) is"
            )
        with suppress(TypeError, ValueError, NotImplementedError):
            lines.append(repr(unit_divergences(self, self.group)))
        return "\n".join(lines)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.base._loc_scale(*args, **kwargs)  # for median and quantiles


def _collects_parameters() -> bool:
    """Return whether parameters are being collected, as in a step of Pyro's SVI."""
    return any(
        isinstance(handler, TraceMessenger) and handler.param_only
        for handler in _PYRO_STACK
    )


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
        is_weights_guide = isinstance(plain, WeightsGuide)
        copied = (
            copy.deepcopy(plain)
            if is_weights_guide
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
