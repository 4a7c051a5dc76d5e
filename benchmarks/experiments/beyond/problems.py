r"""Small posteriors with exchangeable units whose evidence is known, for the trials beyond the papers.

``w`` has shape ``(..., n, d)``: ``n`` units of ``d`` numbers, and the log-joint doesn't change if units change places.

* **Mixtures**: ``n`` components in the plane with unit variance, equal weights and unknown centres of prior N(0, 9).
  The evidence is exact: given which component each point belongs to, everything is Gaussian, and the ``n ** rows``
  assignments are enumerated.
* **Networks**: one hidden layer of ``n`` SiLU units with bias on one input (SiLU has neither sign nor scale symmetry),
  standard normal priors, known noise. The evidence comes from sequential Monte Carlo: an adaptive ladder of tempered
  posteriors from prior to posterior, random-walk moves between them (Del Moral, Doucet & Jasra 2006). The mixtures
  show how far it can be trusted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

import pyro_symmetric as ps


@dataclass(frozen=True)
class Problem:
    name: str
    units: int
    features: int
    log_likelihood: Callable[[Tensor], Tensor]
    prior_scale: float
    exact: float | None = None

    @property
    def dim(self) -> int:
        return self.units * self.features

    def log_prior(self, w: Tensor) -> Tensor:
        return Normal(0.0, self.prior_scale).log_prob(w).sum((-2, -1))

    def log_joint(self, w: Tensor) -> Tensor:
        return self.log_prior(w) + self.log_likelihood(w)

    @functools.cached_property
    def orders(self) -> Tensor:
        """All orders of the units, ``(n!, n)``, the identity first."""
        shape = torch.Size([self.units, self.features])
        return ps.Group.declare({"w": ("unit", None)}, {"w": shape}).enumerate()["unit"]

    def on_orbit(self, w: Tensor) -> Tensor:
        """All copies of ``w``, ``(n!, ..., n, d)``."""
        return w[..., self.orders, :].movedim(-3, 0)


def mixture(name: str, units: int, separation: float, rows: int = 12) -> Problem:
    """A mixture whose centres lie on a circle, neighbours ``separation`` apart."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.arange(units, dtype=torch.float64) / units
    centres = separation / (2 * math.sin(math.pi / units)) * torch.stack([angle.cos(), angle.sin()], -1)
    x = centres[torch.arange(rows) % units] + torch.randn(rows, 2, generator=generator, dtype=torch.float64)

    def log_likelihood(w: Tensor) -> Tensor:
        squares = (w[..., None, :, :] - x[:, None].to(w)).square().sum(-1)  # (..., rows, units)
        return ((-squares / 2).logsumexp(-1) - math.log(2 * math.pi * units)).sum(-1)

    return Problem(name, units, 2, log_likelihood, 3.0, mixture_evidence(x, units, 9.0))


def mixture_evidence(x: Tensor, units: int, prior_variance: float) -> float:
    """Sum over all assignments z of ``units^-rows`` times the Gaussian evidence of each component's points."""
    rows = len(x)
    z = torch.cartesian_prod(*[torch.arange(units)] * (rows - 1))
    z = torch.nn.functional.pad(z, (1, 0))  # the first point in the first component: all others are copies
    total = torch.full((len(z),), -rows * math.log(units) - rows * math.log(2 * math.pi), dtype=x.dtype)
    for unit in range(units):
        member = (z == unit).to(x)
        count, s, ss = member.sum(-1), member @ x, member @ x.square().sum(-1)
        shrink = 1 + prior_variance * count
        total = total - shrink.log() - (ss - prior_variance * s.square().sum(-1) / shrink) / 2
    return float(total.logsumexp(0)) + math.log(units)


def network(name: str, units: int, rows: int = 16, noise: float = 0.4) -> Problem:
    """A network of SiLU units on a bump, ``rows`` points."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, rows).double()
    y = 1.5 * torch.exp(-2 * x.square()) - 0.5 * x + noise * torch.randn(rows, generator=generator, dtype=torch.float64)

    def log_likelihood(w: Tensor) -> Tensor:
        hidden = torch.nn.functional.silu(2 * (w[..., 0, None] * x.to(w) + w[..., 1, None]))
        outputs = (2 * w[..., 2, None] * hidden).sum(-2)
        return Normal(outputs, noise).log_prob(y.to(w)).sum(-1)

    return Problem(name, units, 3, log_likelihood, 1.0)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mixture, overlapping": lambda: mixture("mixture, overlapping", 3, 1.5),
    "mixture, touching": lambda: mixture("mixture, touching", 3, 3.0),
    "network": lambda: network("network", 3),
}


@torch.no_grad()
def annealed_evidence(problem: Problem, seed: int, particles: int = 4000, moves: int = 20) -> float:
    """The log-evidence by sequential Monte Carlo; temperatures keep the conditional effective sample size at 0.9."""
    torch.manual_seed(seed)
    w = problem.prior_scale * torch.randn(particles, problem.units, problem.features, dtype=torch.float64)
    prior, likelihood = problem.log_prior(w), problem.log_likelihood(w)
    beta, step, total = 0.0, 1.0, 0.0
    while beta < 1:
        change = next_temperature(likelihood, 1 - beta)
        beta += change
        log_weights = change * likelihood
        total += float(log_weights.logsumexp(0)) - math.log(particles)
        chosen = systematic(log_weights.softmax(0))
        w, prior, likelihood = w[chosen], prior[chosen], likelihood[chosen]
        for _ in range(moves):
            proposal = w + step * 2.4 / math.sqrt(problem.dim) * problem.prior_scale * torch.randn_like(w)
            new_prior, new_likelihood = problem.log_prior(proposal), problem.log_likelihood(proposal)
            ratio = new_prior - prior + beta * (new_likelihood - likelihood)
            accept = torch.rand_like(ratio).log() < ratio
            w = torch.where(accept[:, None, None], proposal, w)
            prior, likelihood = torch.where(accept, new_prior, prior), torch.where(accept, new_likelihood, likelihood)
            step *= math.exp(0.2 * (float(accept.double().mean()) - 0.25))
    return total


def next_temperature(likelihood: Tensor, most: float) -> float:
    """The largest change of temperature that leaves nine tenths of the particles effective, by bisection."""

    def effective(change: float) -> float:
        return float((change * likelihood).softmax(0).square().sum().reciprocal()) / len(likelihood)

    if effective(most) >= 0.9:
        return most
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if effective(middle) >= 0.9 else (low, middle)
    return max(low, 1e-9)


def systematic(weights: Tensor) -> Tensor:
    """Indices of particles, drawn with these weights by one uniform number."""
    points = (torch.arange(len(weights), dtype=weights.dtype) + torch.rand((), dtype=weights.dtype)) / len(weights)
    return torch.searchsorted(weights.cumsum(0), points).clamp_max(len(weights) - 1)
