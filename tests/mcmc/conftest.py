"""Shared by the tests of kernels and runs: potentials with known answers, a loop
without the trappings of ``sample``, and runs that break."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.run import Run
from pyro_symmetric.posterior.posterior import Posterior

Energy = Callable[[Tensor], Tensor]


class ToyPotential:
    """An energy ``(C, D) -> (C,)`` with its gradient, in the shape of a ``Density``;
    counts its gradients.
    """

    def __init__(self, energy: Energy):
        self.energy = energy
        self.batches: list[int] = []

    def __call__(self, z: Tensor) -> Tensor:
        return self.energy(z)

    def energy_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
        self.batches.append(len(z))
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            energy = self.energy(leaf)
            return energy.detach(), torch.autograd.grad(energy.sum(), leaf)[0]


class GaussianPotential(ToyPotential):
    """A Gaussian of mean 0 whose covariance has given eigenvalues, in random or in the
    coordinates' directions.
    """

    def __init__(self, eigenvalues: Tensor, rotated: bool = True, seed: int = 0):
        dim = len(eigenvalues)
        generator = torch.Generator(eigenvalues.device).manual_seed(seed)
        basis = torch.eye(dim, dtype=eigenvalues.dtype)
        if rotated:
            basis = torch.linalg.qr(
                torch.randn(dim, dim, generator=generator, dtype=eigenvalues.dtype)
            )[0]
        self.eigenvalues, self.basis = eigenvalues, basis
        self.covariance = basis @ torch.diag(eigenvalues) @ basis.T
        precision = basis @ torch.diag(1 / eigenvalues) @ basis.T
        super().__init__(lambda z: 0.5 * ((z @ precision) * z).sum(-1))

    def sample(self, count: int) -> Tensor:
        return (
            torch.randn(count, len(self.eigenvalues), dtype=self.basis.dtype)
            * self.eigenvalues.sqrt()
        ) @ self.basis.T

    def standardise(self, z: Tensor) -> Tensor:
        """Coordinates along the eigenvectors, in units of their deviations: independent
        standard normals.
        """
        return (z @ self.basis) / self.eigenvalues.sqrt()


class Banana(ToyPotential):
    """x ~ N(0, 1), y ~ N(x², 0.5²)."""

    def __init__(self) -> None:
        def energy(z: Tensor) -> Tensor:
            x, y = z.unbind(-1)
            return 0.5 * x.square() + 0.5 * ((y - x.square()) / 0.5).square()

        super().__init__(energy)

    def sample(self, count: int) -> Tensor:
        x, noise = torch.randn(2, count, dtype=torch.float64)
        return torch.stack([x, x.square() + 0.5 * noise], -1)

    def standardise(self, z: Tensor) -> Tensor:
        x, y = z.unbind(-1)
        return torch.stack([x, (y - x.square()) / 0.5], -1)


def drive(
    kernel: Kernel, density: ToyPotential, z: Tensor, num_warmup: int, num_samples: int
) -> tuple[Tensor, dict[str, Tensor], State]:
    """Draws ``(C, S, D)``, statistics ``(C, S)`` and the last state."""
    generator = torch.Generator(z.device).manual_seed(int(torch.randint(2**62, ())))
    state = kernel.init(density, z, num_warmup, generator)
    draws, statistics = [], []
    for iteration in range(num_warmup + num_samples):
        state = kernel.step(density, state)
        if iteration < num_warmup:
            state = kernel.adapt(density, state, iteration, num_warmup)
        else:
            draws.append(state.z)
            statistics.append(state.statistics)
    names = statistics[0] if statistics else {}
    return (
        torch.stack(draws, 1),
        {n: torch.stack([s[n] for s in statistics], 1) for n in names},
        state,
    )


@pytest.fixture
def banana() -> Banana:
    return Banana()


def assert_same_draws(found: Posterior, expected: Posterior) -> None:
    for have, want in (
        (found.samples, expected.samples),
        (found.statistics, expected.statistics),
    ):
        assert list(have) == list(want)
        for name, value in want.items():
            assert torch.equal(have[name], value) or torch.allclose(
                have[name], value, 0, 0, equal_nan=True
            ), name


class Killed(BaseException):
    """The process ends here, as far as the library can tell."""


@pytest.fixture
def break_after(monkeypatch):
    """Break the run in the middle of its ``n``-th iteration from now, when numbers were
    drawn but nothing was kept.
    """
    advance, left = Run.advance, [0]

    def breaking(run):
        left[0] -= 1
        if left[0] == 0:
            run.settings.kernel.step(run.density, run.state.kernel_state)
            raise kind[0]
        advance(run)

    monkeypatch.setattr(Run, "advance", breaking)
    kind: list[type[BaseException]] = [Killed]

    def start(steps: int, error: type[BaseException] = Killed) -> None:
        left[0], kind[0] = steps, error

    return start


def variances_by_formula(draws: np.ndarray) -> np.ndarray:
    """The variances ``(C, D)`` that warm-up makes of the draws ``(S, C, D)`` of a
    window, from all of them at once.
    """
    length, chains, dim = draws.shape
    degrees = chains * (length - 1)
    variances = draws.var(0, ddof=1)
    lower_median = np.sort(variances, axis=0)[(chains - 1) // 2]
    middle = lower_median if chains >= 16 else variances.mean(0)
    pooled = (middle * degrees + 5 * 1e-3) / (degrees + 5)

    def pattern(part: np.ndarray) -> np.ndarray:
        logs = np.log(part.var(0, ddof=1) / pooled).clip(np.log(1e-4))
        return logs - logs.mean(1, keepdims=True) + logs.mean()

    first, second = (
        pattern(half) - pattern(half).mean(0)
        for half in (draws[: length // 2], draws[length // 2 :])
    )
    rho = 2 * (first * second).sum() / ((first**2).sum() + (second**2).sum())
    rho = max(rho - ((chains - 1) * (dim - 1)) ** -0.5, 0.0)
    return pooled * np.exp(2 * rho / (1 + rho) * pattern(draws))
