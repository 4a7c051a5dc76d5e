"""The target of acceptance rises if chains are refused for long, and for nothing else."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric.mcmc.kernels.stays import HIGHER, Stays
from pyro_symmetric.mcmc.kernels.warmup import FURTHEST, StepSearch

CHAINS, ITERATIONS = 64, 200


def seen(acceptance: torch.Tensor, target: float = 0.8) -> Stays:
    """After iterations of these acceptances ``(iterations, chains)``."""
    found = Stays.start(target, acceptance[0])
    for own in acceptance:
        found = found.update(own)
    return found


def test_moves_that_are_refused_here_and_there_leave_the_target(generator):
    """Of 12,800 iterations, each refused with probability 0.35: false alarms under 1e-6."""
    acceptance = (torch.rand(ITERATIONS, CHAINS, generator=generator) < 0.65).double()
    assert seen(acceptance).renewed(judge=True).target == 0.8


def test_one_chain_that_is_refused_for_long_raises_it(generator):
    acceptance = 0.6 + 0.4 * torch.rand(ITERATIONS, CHAINS, generator=generator, dtype=torch.float64)
    acceptance[50:100, 3] = 0.0  # in 50 of 12,800 iterations, the first ten of which may be chance
    found = seen(acceptance)
    decay = math.log(0.1 / float(seen(acceptance[:50]).recent[3])) / math.log(0.8)
    assert int(found.stuck) == pytest.approx(50 - math.ceil(decay), abs=1)
    assert found.renewed(judge=False).target == 0.8
    raised = found.renewed(judge=True)
    assert raised.target == HIGHER
    assert (int(raised.stuck), raised.count) == (0, 0)
    assert seen(acceptance, 0.98).renewed(judge=True).target == 0.98


@pytest.mark.parametrize("kernel", [ps.HMC, ps.NUTS, ps.AdaptiveHMC, ps.AdjustedMCLMC])
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
    begun = StepSearch.start(torch.tensor(0.1))
    found = begun.update(torch.tensor(0.0), 0.95)
    assert float(found.log_step - begun.log_step) == pytest.approx(-FURTHEST)
