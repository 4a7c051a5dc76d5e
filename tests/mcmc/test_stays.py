"""The target of acceptance rises if chains are refused for long, and for nothing else."""

import math
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric.mcmc.kernels.learning import FURTHEST, HIGHER, Stays, StepSearch
from pyro_symmetric.mcmc.kernels.mass import MassEstimate
from pyro_symmetric.mcmc.kernels.warmup import window_ends

CHAINS, ITERATIONS = 64, 200


def seen(acceptance: torch.Tensor) -> Stays:
    """After iterations of these acceptances ``(iterations, chains)``."""
    found = Stays.start(acceptance[0])
    for own in acceptance:
        found = found.update(own)
    return found


def test_moves_that_are_refused_here_and_there_leave_the_target(generator):
    """Of 12,800 iterations, each refused with probability 0.35: false alarms under 1e-6."""
    acceptance = (torch.rand(ITERATIONS, CHAINS, generator=generator) < 0.65).double()
    assert not seen(acceptance).too_many()


def one_refused_for_long(generator: torch.Generator) -> torch.Tensor:
    acceptance = 0.6 + 0.4 * torch.rand(ITERATIONS, CHAINS, generator=generator, dtype=torch.float64)
    acceptance[50:100, 3] = 0.0  # in 50 of 12,800 iterations, the first ten of which may be chance
    return acceptance


def test_one_chain_that_is_refused_for_long_is_counted(generator):
    acceptance = one_refused_for_long(generator)
    found = seen(acceptance)
    decay = math.log(0.1 / float(seen(acceptance[:50]).recent[3])) / math.log(0.8)
    assert int(found.stuck) == pytest.approx(50 - math.ceil(decay), abs=1)
    assert int(found.count) == acceptance.numel()
    assert found.too_many()


@pytest.mark.parametrize("target", [0.8, 0.98])
def test_it_raises_the_target_at_the_end_of_a_window_but_the_first(gaussian, generator, target):
    density = gaussian(torch.ones(2, dtype=torch.float64))
    stays, z = seen(one_refused_for_long(generator)), density.sample(CHAINS)
    kernel = ps.HMC(None, step_size=0.1, target_accept=target)
    state = kernel.init(density, z, 200, generator)
    first, second = window_ends(200)[1]
    for end, expected in ((first, target), (second, max(target, HIGHER))):
        tuning = replace(state.tuning, stays=stays, estimate=MassEstimate.start(z).update(z).update(-z))
        state = kernel.adapt(density, replace(state, z=z + end, tuning=tuning), end - 1, 200)
        assert float(state.tuning.search.target) == expected
        assert int(state.tuning.stays.count) == 0


@pytest.mark.parametrize("kernel", [ps.HMC, ps.NUTS, ps.AdaptiveHMC])
def test_posteriors_of_one_curvature_keep_the_target_that_was_asked_for(kernel):
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(5), torch.logspace(-1, 1, 5)).to_event(1))

    settings = {"num_samples": 5, "num_warmup": 200, "num_chains": 8, "seed": 0, "progress": False}
    posterior = ps.sample(kernel(model, target_accept=0.7), **settings)
    assert posterior.metadata["target_accept"] == 0.7


def test_where_curvature_varies_it_rises():
    """Neal's funnel: a step that suits its mouth is too long for its neck, where chains stay."""

    def model():
        v = pyro.sample("v", dist.Normal(0.0, 3.0))
        pyro.sample("x", dist.Normal(torch.zeros(5), (v / 2).exp()).to_event(1))

    settings = {"num_samples": 5, "num_warmup": 300, "num_chains": 32, "seed": 0, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # divergences, if any
        posterior = ps.sample(ps.HMC(model), **settings)
    assert posterior.metadata["target_accept"] == HIGHER


def test_one_bad_iteration_does_not_take_the_step_to_nothing():
    """Near a target of 1, where Newton's gain is 8 and more."""
    begun = StepSearch.start(torch.tensor(0.1), 0.95)
    found = begun.update(torch.tensor(0.0))
    assert float(found.log_step - begun.log_step) == pytest.approx(-FURTHEST)
