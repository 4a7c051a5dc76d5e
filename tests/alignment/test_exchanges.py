"""Units that lie on two axes of one site, as the states of a hidden Markov model do in
its transition matrix.
"""

import pytest
import torch
from torch.distributions import Dirichlet

from pyro_symmetric import Group
from pyro_symmetric.alignment import align, align_many
from pyro_symmetric.posterior.posterior import Posterior


def states(n: int) -> Group:
    return Group.declare({"T": ("k", "k")}, {"T": torch.ones(n, n)})


def transitions(*batch: int, n: int) -> torch.Tensor:
    return Dirichlet(torch.ones(n)).sample((*batch, n))


@pytest.mark.stochastic
@pytest.mark.parametrize("n", [8, 12, 20])
def test_every_copy_of_a_transition_matrix_is_recognised(n):
    # Signatures of independent rows differ, and tell all states of an exact copy,
    # whatever the seed.
    group, reference = states(n), {"T": transitions(n=n)}
    copies = group.sample((10,))(reference)
    assert float(align(copies, reference, group, progress=False).cost.max()) < 1e-10


@pytest.mark.stochastic
def test_draws_of_a_hidden_markov_model_come_into_one_frame():
    # All states emit alike, so that transitions alone tell them apart.
    n, draws = 8, 50
    group = states(n)
    log_odds = Dirichlet(torch.full((n,), 0.5)).sample((n,)).clamp_min(1e-4).log()
    planted = (log_odds + 0.2 * torch.randn(4, draws, n, n)).softmax(-1)
    scattered = Posterior(group.sample((4, draws))({"T": planted}), kind="chains")
    aligned = align_many(scattered, group, progress=False).posterior.samples["T"]
    assert float(aligned.std((0, 1)).mean()) < 1.05 * float(planted.std((0, 1)).mean())
