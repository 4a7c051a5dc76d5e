r"""Microcanonical dynamics: chains move at constant speed, and the gradient only turns them.

In coordinates :math:`x = W z` that the mass matrix has whitened, with :math:`g = \nabla_x U` and D coordinates,

.. math:: \dot x = \sqrt D\, u, \qquad
    \dot u = -\frac{\sqrt D}{D - 1} (I - u u^\top)\, g, \qquad |u| = 1,

leaves :math:`e^{-U(x)}` times the uniform distribution of directions :math:`u` invariant (Robnik, De Luca, Silverstein
& Seljak 2023, arXiv 2212.08549; Ver Steeg & Galstyan 2021, arXiv 2111.02434). The papers' speed is 1. Here it is
:math:`\sqrt D`, about that of Hamiltonian chains, so times and step sizes of the two dynamics compare; the papers'
are :math:`\sqrt D` times ours.

**A kick** for the time :math:`\varepsilon`, with fixed :math:`g`, is exact. With :math:`e = -g / |g|`,
:math:`c = e \cdot u` and :math:`\delta = \varepsilon \sqrt D\, |g| / (D - 1)`,

.. math:: u' = \frac{u + e\,(\sinh \delta + c\,(\cosh \delta - 1))}{\cosh \delta + c \sinh \delta}
    = \frac{(1 - t^2)\, u + 2 t\,(1 + c t)\, e}{1 + t^2 + 2 c t}, \qquad t = \tanh \tfrac12 \delta,

which no :math:`\delta` makes overflow.
It contracts the sphere of directions by :math:`(\cosh \delta + c \sinh \delta)^{-(D - 1)}`. So

.. math:: \Delta E = \Delta U + (D - 1) \sum_{\text{kicks}} \log(\cosh \delta + c \sinh \delta)

is both the error of the energy, which the exact flow conserves, and the logarithm of what Metropolis' rule needs.

**A step** is the minimal-norm splitting of two gradients (McLachlan 1995; Omelyan, Mryglod & Folk 2002), palindromic,
so reversible and of second order:

.. math:: \text{kick}(\lambda \varepsilon)\ \text{drift}(\tfrac12 \varepsilon)\
    \text{kick}((1 - 2 \lambda) \varepsilon)\ \text{drift}(\tfrac12 \varepsilon)\
    \text{kick}(\lambda \varepsilon), \qquad \lambda = 0.1932.

**Refreshment** turns directions at random, :math:`u \leftarrow (u + \nu \xi) / |u + \nu \xi|` with normal
:math:`\xi` and :math:`\nu^2 = (e^{2 \varepsilon / L} - 1) / D`: after the time :math:`L` they have forgotten theirs
(Robnik & Seljak 2023, arXiv 2303.18221).

Momenta are held as elsewhere, :math:`p = \sqrt D\, W^\top u`, so that the velocity is :math:`\Sigma p` and
:math:`p^\top \Sigma\, p = D`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.flat import Evaluate
from pyro_symmetric.mcmc.density.programs import compiles, run
from pyro_symmetric.mcmc.kernels.integrator import PhasePoint
from pyro_symmetric.mcmc.kernels.mass import Mass

OUTER = 0.1931833275037836  # lambda, for which the leading error is least
GRADIENTS = 2  # of a step


def isokinetic(
    density: Density, start: PhasePoint, step_size: Tensor, mass: Mass, num_steps: int = 1
) -> tuple[PhasePoint, Tensor]:
    """Follow the flow for ``num_steps`` steps: where it ends, and the energy's change ``(C,)``.

    :param step_size: ``()``, or ``(C, 1)`` for each chain its own. To go back in time, turn the momenta round.
    """
    steps = torch.as_tensor(step_size, device=start.z.device).expand(len(start.z), 1).contiguous()
    if not compiles(density):
        found: tuple[PhasePoint, Tensor] = run(density, steps_of_isokinetic, start, steps, mass, num_steps=num_steps)
        return found
    change = torch.zeros_like(start.energy)
    for _ in range(num_steps):  # one program for trajectories of all lengths
        start, more = run(density, steps_of_isokinetic, start, steps, mass, num_steps=1)
        change = change + more
    return start, change


def steps_of_isokinetic(
    evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass, num_steps: int
) -> tuple[PhasePoint, Tensor]:
    """:func:`isokinetic` as arithmetic.

    :param step_size: ``(C, 1)``.
    """
    z, half = start.z, 0.5 * step_size
    p, change = kicked(start.momentum, start.gradient, OUTER * step_size, mass)
    energy, gradient = start.energy, start.gradient
    for k in range(num_steps):
        z = z + half * mass.velocity(p)
        p, inner = kicked(p, evaluate(z)[1], (1 - 2 * OUTER) * step_size, mass)
        z = z + half * mass.velocity(p)
        energy, gradient = evaluate(z)
        # Two kicks by the same gradient are one.
        p, outer = kicked(p, gradient, (OUTER if k + 1 == num_steps else 2 * OUTER) * step_size, mass)
        change = change + inner + outer
    return PhasePoint(z, p, energy, gradient), energy - start.energy + change


def kicked(momentum: Tensor, gradient: Tensor, time: Tensor, mass: Mass) -> tuple[Tensor, Tensor]:
    """Momenta ``(C, D)`` after a kick that lasts for ``time`` ``(C, 1)``, and what it adds to the energy's change,
    ``(C,)``."""
    dim, limits = momentum.shape[-1], torch.finfo(momentum.dtype)
    along = mass.velocity(gradient)
    norm = torch.linalg.vecdot(gradient, along).sqrt().clamp(min=limits.tiny)
    half = norm * time[:, 0] * (0.5 * math.sqrt(dim) / (dim - 1))
    t, gap = torch.tanh(half), 2 * torch.sigmoid(-2 * half)  # gap = 1 - t, which would round to nothing
    share = t / norm
    # t (1 + c), as far as directions tell: nothing cancels in what is made of it
    turn = t - (torch.linalg.vecdot(momentum, along) * share * dim**-0.5)
    turn = torch.maximum(turn, limits.eps * t)
    scale = 1 / (gap * gap + 2 * turn).clamp(min=limits.tiny)
    keep = (gap * (1 + t) * scale).clamp(min=limits.tiny)  # 1 / (cosh + c sinh)
    push = share * (gap + turn) * scale
    turned = torch.addcmul(keep[:, None] * momentum, push[:, None], gradient, value=-2 * math.sqrt(dim))
    return turned, (1 - dim) * keep.log()


def directed(momentum: Tensor, mass: Mass) -> Tensor:
    r"""Momenta ``(C, D)`` of the same directions and of length :math:`\sqrt D`."""
    return momentum * (momentum.shape[-1] / (2 * mass.kinetic(momentum))).sqrt()[:, None]


def refreshed(momentum: Tensor, noise: Tensor, spread: Tensor, mass: Mass) -> Tensor:
    r"""Momenta turned by standard normal noise ``(C, D)``.

    :param spread: :math:`\sqrt D\, \nu`, ``(C, 1)``.
    """
    return directed(momentum + spread * mass.momentum(noise), mass)
