"""SGLD's recursion and schedule, against the formulas written out. Its stationary law is in ``test_stochastic``."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyro_symmetric.mcmc import SGLD
from pyro_symmetric.mcmc.kernels.curvature import CurvatureEstimate

CURVATURES = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)


class Quadratic:
    """Its gradient has noise of variance 7 in each coordinate if there are mini-batches."""

    def __init__(self, noisy: bool = False):
        self.row_counts = {"rows": (10_000, 1)} if noisy else {}

    def energy_and_gradient(self, z: Tensor, rows: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        return 0.5 * (CURVATURES * z.square()).sum(-1), self.gradient(z, rows)

    def energy(self, z: Tensor, rows: dict[str, Tensor] | None = None) -> Tensor:
        return self.energy_and_gradient(z, rows)[0]

    def gradient(self, z: Tensor, rows: dict[str, Tensor] | None = None) -> Tensor:
        gradient = CURVATURES * z
        return gradient if rows is None else gradient + math.sqrt(7) * (2.0 * (rows["rows"] % 2) - 1)


def test_an_iteration_is_the_recursion_of_its_description():
    z = torch.randn(5, 3, dtype=torch.float64)
    kernel, twin = SGLD(None, step_size=0.1, num_steps=4), torch.Generator(torch.empty(0).device).manual_seed(3)
    state = kernel.init(Quadratic(), z, 0, torch.Generator(torch.empty(0).device).manual_seed(3))
    after, virial = kernel.step(Quadratic(), state), torch.zeros(5, dtype=torch.float64)
    expected = z.clone()
    for noise in torch.randn(4, 5, 3, dtype=torch.float64, generator=twin):
        gradient = CURVATURES * expected
        virial += (expected * gradient).sum(-1) / 3 / 4
        expected = expected - 0.05 * gradient + math.sqrt(0.1) * noise
    assert torch.allclose(after.z, expected, rtol=1e-12)
    assert torch.allclose(after.statistics["virial"], virial, rtol=1e-12)
    assert torch.equal(state.z, z)  # a step moves copies
    assert (after.statistics["n_steps"] == 4).all()
    assert torch.equal(after.momentum, torch.zeros_like(z))


def test_the_step_falls_as_a_power_after_warm_up(generator):
    kernel = SGLD(None, step_size=0.01, num_steps=1, decay=0.55, decay_offset=3.0)
    state = kernel.init(Quadratic(), torch.zeros(2, 3, dtype=torch.float64), 8, generator)
    for iteration in range(20):
        state = kernel.step(Quadratic(), state)
        expected = 0.01 * (1 + max(iteration - 8, 0) / 3) ** -0.55
        if iteration < 8:
            state = kernel.adapt(Quadratic(), state, iteration, 8)
        assert state.statistics["step_size"].tolist() == pytest.approx([expected] * 2)


def test_the_step_that_is_found_keeps_the_excess_of_the_stiffest_direction_to_the_tolerance(generator):
    kernel = SGLD(None, tolerance=0.08)
    z = torch.zeros(4, 3, dtype=torch.float64)
    flat = CurvatureEstimate.start(z, generator)
    estimate = replace(flat, curvature=torch.tensor([3.0, 9.0, 1.0, 2.0]).double(), noise=torch.tensor([1.0, 2.0, 3.0]))
    step = kernel.best_step(estimate).item()
    assert step * (9.0 + 2.0) / 4 == pytest.approx(0.08)  # the excess of the module's description, to first order


@pytest.mark.stochastic
def test_warm_up_finds_curvature_and_noise_and_the_step_that_suits_them(generator):
    kernel, z = SGLD(None, batch_size=1, replacement=True), torch.zeros(400, 3, dtype=torch.float64)
    state = kernel.init(Quadratic(noisy=True), z, 10, generator)
    for iteration in range(10):
        state = kernel.adapt(Quadratic(noisy=True), state, iteration, 10)
    # Each measurement is 0 or 14 with a chance of a half: the mean of 16 x 400 has a standard error of 0.09, a little
    # more by their weights; 0.7 is five of them and more: false alarms below 1e-6.
    assert state.tuning.curvature.noise.mean().item() == pytest.approx(7.0, abs=0.7)
    assert state.tuning.base_step_size.item() == pytest.approx(0.2 / (9 + 7), rel=0.05)
