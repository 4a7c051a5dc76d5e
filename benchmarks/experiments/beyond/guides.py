r"""Guides over ``n`` exchangeable units of ``d`` numbers, with their densities.

A guide has ``draw(K) -> w (K, n, d), log q(w) (K,)`` for training. Those that aren't invariant by themselves also have
``log_prob(w)``, so that the sum over the orbit can be made of it.

* :class:`FullRank`, and :class:`Coupling`, a flow of affine couplings on the flat vector after a full-rank Gaussian.
* :class:`Symmetrised`: a guide's density averaged over the whole orbit, draws from the guide itself.
* :class:`Ordered`: a guide on a canonical region. Units are ordered along a learnt direction ``a``; a full-rank
  Gaussian gives the first key, the logarithms of the gaps between keys, and all that is orthogonal to ``a``. Its
  density on the region is ``q_F``; over all copies, ``q(w) = q_F(c(w)) / n!``, with ``c`` the sorting along ``a``.
* :class:`Equivariant`: a flow that commutes with permutations, after Gaussians that all units share. Each layer is
  linear first, ``u_i <- u_i M + mean(u) C``, which commutes with permutations for any two matrices, of determinant
  ``|M|^(n-1) |M + C|``; then half of a unit's numbers move by affine maps whose coefficients depend on its other half
  and on all units', symmetrically: by a mean (deep sets, Zaheer et al. 2017) or by attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from benchmarks.experiments.beyond.problems import Problem

HIDDEN = 32
Draw = tuple[Tensor, Tensor]


def network(inputs: int, outputs: int, small: bool = False) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))
    if small:
        nn.init.zeros_(net[2].weight)
        nn.init.zeros_(net[2].bias)
    return net


class FullRank(nn.Module):
    """A Gaussian over all weights."""

    def __init__(self, problem: Problem, scale: float = 0.3):
        super().__init__()
        self.shape = (problem.units, problem.features)
        self.loc = nn.Parameter(problem.prior_scale / 2 * torch.randn(problem.dim))
        self.log_diagonal = nn.Parameter(torch.full((problem.dim,), math.log(scale)))
        self.below = nn.Parameter(torch.zeros(problem.dim, problem.dim))

    def normal(self) -> MultivariateNormal:
        tril = self.below.tril(-1) + self.log_diagonal.exp().diag()
        return MultivariateNormal(self.loc, scale_tril=tril, validate_args=False)

    def draw(self, size: int) -> Draw:
        normal = self.normal()
        z = normal.rsample((size,))
        return z.unflatten(-1, self.shape), normal.log_prob(z)

    def log_prob(self, w: Tensor) -> Tensor:
        return self.normal().log_prob(w.flatten(-2))


class Coupling(FullRank):
    """Affine couplings on the flat vector, after a full-rank Gaussian."""

    def __init__(self, problem: Problem, layers: int = 4):
        super().__init__(problem)
        mask = torch.arange(problem.dim) % 2
        self.register_buffer(
            "masks", torch.stack([(mask + k) % 2 for k in range(layers)]).to(torch.get_default_dtype())
        )
        self.nets = nn.ModuleList(network(problem.dim, 2 * problem.dim, small=True) for _ in range(layers))

    def coefficients(self, k: int, kept: Tensor) -> Draw:
        log_scale, shift = (self.nets[k](kept) * (1 - self.masks[k]).repeat(2)).chunk(2, -1)
        return log_scale.tanh(), shift

    def draw(self, size: int) -> Draw:
        normal = self.normal()
        z = normal.rsample((size,))
        log_q = normal.log_prob(z)
        for k in range(len(self.nets)):
            log_scale, shift = self.coefficients(k, z * self.masks[k])
            z, log_q = z * log_scale.exp() + shift, log_q - log_scale.sum(-1)
        return z.unflatten(-1, self.shape), log_q

    def log_prob(self, w: Tensor) -> Tensor:
        z, log_det = w.flatten(-2), torch.zeros(())
        for k in reversed(range(len(self.nets))):
            log_scale, shift = self.coefficients(k, z * self.masks[k])
            z, log_det = (z - shift) * (-log_scale).exp(), log_det - log_scale.sum(-1)
        return self.normal().log_prob(z) + log_det


class Symmetrised(nn.Module):
    """The density of a guide averaged over all permutations of the units, by enumeration."""

    def __init__(self, problem: Problem, base: FullRank):
        super().__init__()
        self.base, self.problem = base, problem

    def draw(self, size: int) -> Draw:
        w, _ = self.base.draw(size)
        return w, self.log_prob(w)

    def log_prob(self, w: Tensor) -> Tensor:
        terms = self.base.log_prob(self.problem.on_orbit(w))
        return terms.logsumexp(0) - math.log(len(terms))


class Ordered(FullRank):
    """A full-rank Gaussian on the region in which units are ordered along a learnt direction."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.direction = nn.Parameter(torch.randn(problem.features))
        with torch.no_grad():
            self.loc.view(self.shape)[1:, 0] = math.log(problem.prior_scale / 2)
            self.loc.view(self.shape)[0, 0] = -problem.prior_scale / 2

    def draw(self, size: int) -> Draw:
        w, log_q = super().draw(size)
        gaps = w[..., 1:, 0]
        keys = torch.cat([w[..., :1, 0], gaps.exp()], -1).cumsum(-1)
        w = torch.cat([keys[..., None], w[..., 1:]], -1)
        # The reflection that carries the first axis to the direction: volume is kept.
        axis = torch.zeros_like(self.direction)
        axis[0] = 1
        normal = axis - self.direction / self.direction.norm()
        w = w - 2 * (w @ normal)[..., None] * normal / (normal.square().sum() + 1e-12)
        return w, log_q - gaps.sum(-1) - math.lgamma(self.shape[0] + 1)


class Equivariant(nn.Module):
    """A flow that commutes with permutations of units."""

    def __init__(self, problem: Problem, attention: bool, layers: int = 5):
        super().__init__()
        self.shape, d = (problem.units, problem.features), problem.features
        self.kept, self.attention = d // 2 if d > 2 else 1, attention
        self.loc, self.log_scale = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d) + math.log(0.5))
        self.mixing = nn.Parameter(torch.eye(d).roll(1, 0).repeat(layers, 1, 1))
        self.common = nn.Parameter(torch.zeros(layers, d, d))
        self.own = nn.ModuleList(network(self.kept, 3 * HIDDEN) for _ in range(layers))
        self.nets = nn.ModuleList(network(self.kept + HIDDEN, 2 * (d - self.kept), small=True) for _ in range(layers))

    def summary(self, k: int, kept: Tensor) -> Tensor:
        """A summary of all units for each unit, ``(..., n, HIDDEN)``."""
        query, key, value = self.own[k](kept).chunk(3, -1)
        if not self.attention:
            return value.mean(-2, keepdim=True).expand_as(value)
        return (query @ key.mT / math.sqrt(HIDDEN)).softmax(-1) @ value

    def draw(self, size: int) -> Draw:
        z = torch.randn(size, *self.shape)
        log_q = -(z.square() / 2 + math.log(2 * math.pi) / 2 + self.log_scale).sum((-2, -1))
        w = self.loc + self.log_scale.exp() * z
        for k, (mixing, common, net) in enumerate(zip(self.mixing, self.common, self.nets, strict=True)):
            w = w @ mixing + w.mean(-2, keepdim=True) @ common
            log_dets = torch.linalg.slogdet(torch.stack([mixing, mixing + common]))[1]
            log_q = log_q - (self.shape[0] - 1) * log_dets[0] - log_dets[1]
            kept, moved = w[..., : self.kept], w[..., self.kept :]
            log_scale, shift = net(torch.cat([kept, self.summary(k, kept)], -1)).chunk(2, -1)
            log_scale = 2 * log_scale.tanh()
            w = torch.cat([kept, moved * log_scale.exp() + shift], -1)
            log_q = log_q - log_scale.sum((-2, -1))
        return w, log_q
