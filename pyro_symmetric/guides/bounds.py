r"""The value of a fitted guide: its ELBO, and that of the guide averaged over the orbits of a group.

.. math:: \mathrm{ELBO}(q) = \mathbb E_q[\log p(w, D) - \log q(w)] \;\le\; \mathrm{ELBO}(\bar q) \;\le\; \log p(D)

Reference: Gelberg et al. 2024 (arXiv 2408.05496), Section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.discovery.model_check import check_function
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import OrbitEstimator
from pyro_symmetric.distributions.orbit import require_estimator
from pyro_symmetric.groups import Group, group_of
from pyro_symmetric.guides.gaussian import plain_posterior
from pyro_symmetric.guides.layout import Layout, layout_of
from pyro_symmetric.guides.suggest import suggest_estimator
from pyro_symmetric.weights import Weights

# So many draws show whether log_joint has the group, and how large its rounding errors are.
CHECKED = 4


@dataclass(frozen=True)
class Evidence:
    """Monte Carlo estimates, in nats, with their standard errors.

    :param elbo: of the guide as it is.
    :param elbo_error: its standard error.
    :param symmetrized_elbo: of the guide averaged over the group.
    :param symmetrized_error: its standard error.
    :param estimator: by which the symmetrised density was estimated.
    :param bound: ``"lower"`` if the expectation of ``symmetrized_elbo`` is a lower bound of the symmetrised guide's
        ELBO, ``"exact"`` if it is that ELBO.
    :param log_order: the most that symmetrisation can add, ``log |G|``.
    """

    elbo: float
    elbo_error: float
    symmetrized_elbo: float
    symmetrized_error: float
    estimator: str
    bound: str
    log_order: float

    def __repr__(self) -> str:
        relation = "=" if self.bound == "exact" else "≥"
        return (
            f"Evidence(ELBO = {self.elbo:.2f} ± {self.elbo_error:.2f}, symmetrised ELBO {relation} "
            f"{self.symmetrized_elbo:.2f} ± {self.symmetrized_error:.2f} nats by {self.estimator}, log|G| = "
            f"{self.log_order:.1f})"
        )


@torch.no_grad()
def evidence(
    guide: AutoGuide,
    log_joint: Callable[[Weights], Tensor],
    group: Group | Symmetry,
    estimator: OrbitEstimator | None = None,
    *,
    num_samples: int = 512,
    chunk: int = 64,
) -> Evidence:
    """Estimate the ELBO of a guide, and of that guide symmetrised.

    The second is worth something only if ``log_joint`` is invariant under the group: that is compared at draws of the
    guide, up to the function's own noise (rounding, subsampled data), at the price of about 20 more evaluations.

    >>> evidence(guide, lambda w: model.log_joint(w, x, y), group)

    :param guide: a set-up guide of this library, or a stock ``AutoNormal`` or ``AutoContinuous``.
    :param log_joint: e.g. :func:`log_joint(model, *args) <pyro_symmetric.mcmc.log_joint>`; weights of batch shape
        ``(S,)`` -> log of prior times likelihood of all data, ``(S,)``.
    :param group: the symmetry of the model: permutations, signs, or both. Of a symmetry, the finite part.
    :param estimator: of the symmetrised log-density; by default what
        :func:`~pyro_symmetric.guides.suggest_estimator` picks for reports.
    :param num_samples: Monte Carlo samples, at least 2.
    :param chunk: how many are evaluated at once.
    :raises ValueError: naming the units whose exchange changes ``log_joint``.
    """
    arguments.whole("num_samples", num_samples, 2)
    arguments.whole("chunk", chunk, 1)
    group = group_of(group).finite
    estimator = estimator or suggest_estimator(guide, group, training=False).estimator
    require_estimator(estimator)
    arguments.function("log_joint", log_joint, "a function of weights, e.g. ps.log_joint(model, *args)")
    layout = layout_of(guide)
    base, action = plain_posterior(guide), layout.action(group)
    plain, symmetrized = [], []
    for start in range(0, num_samples, chunk):
        latent = base.sample((min(chunk, num_samples - start),))
        log_target = _checked(log_joint(layout.unpack(latent)), len(latent)).double() + layout.log_volume(latent)
        if start == 0:
            _require_invariance(layout, log_joint, group, latent[:CHECKED])
        plain.append(log_target - base.log_prob(latent).double())
        symmetrized.append(log_target - estimator.log_prob(base, action, latent).double())
    elbo, elbo_error = _mean_and_error(torch.cat(plain))
    symmetrized_elbo, symmetrized_error = _mean_and_error(torch.cat(symmetrized))
    bound = "lower" if estimator.bound == "upper" else estimator.bound
    return Evidence(elbo, elbo_error, symmetrized_elbo, symmetrized_error, repr(estimator), bound, group.log_order())


def _require_invariance(layout: Layout, log_joint: Callable[[Weights], Tensor], group: Group, latent: Tensor) -> None:
    """:raises ValueError: if ``log_joint`` changes when draws of the guide are moved."""
    with forked():
        last_digit = torch.finfo(latent.dtype).eps * (4 * torch.randint(2, latent.shape) - 2)
    draws, nearby = (layout.unpack(value) for value in (latent, latent * (1 + last_digit.to(latent))))
    found = check_function(group, log_joint, draws, nearby)
    if not found:
        raise ValueError(
            f"at draws of the guide, {found}\nWithout that symmetry the symmetrised ELBO would be no bound of the "
            "evidence: give the group that the model has (verify_model(group, model, ...) names the sites; of networks "
            "with running statistics it is symmetry.holding(net)), or mend the prior or the likelihood that treats "
            "units differently"
        )


def _checked(log_target: Any, num_samples: int) -> Tensor:
    shape = tuple(getattr(log_target, "shape", ()))
    if not isinstance(log_target, Tensor) or shape != (num_samples,):
        raise ValueError(
            f"log_joint gave {type(log_target).__name__} of shape {shape} for {num_samples} sets of weights; it must "
            f"give one number for each, shape ({num_samples},)"
        )
    return log_target


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / len(values) ** 0.5)
