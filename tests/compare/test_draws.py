"""Draws as comparisons take them: what is refused, and how many of a chain's count as
independent.
"""

import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric.compare import independent_draws, invariance_tests, mmd_test
from pyro_symmetric.compare.draws import PairedSamples
from pyro_symmetric.groups.group import Group
from pyro_symmetric.posterior.posterior import Posterior


def test_running_statistics_are_no_weights_unless_they_are_named():
    weights = {
        "1.weight": torch.randn(5, 3),
        "1.running_mean": torch.randn(5, 3),
        "1.running_var": torch.rand(5, 3),
    }
    assert PairedSamples(weights, weights).layers == {"1": ["1.weight"]}
    # an ensemble and a guide
    assert (
        PairedSamples(weights, {"1.weight": weights["1.weight"]}).num_weights("1") == 3
    )


@pytest.mark.parametrize("function", [ps.mmd, ps.mmd_test, ps.marginal_wasserstein])
@pytest.mark.parametrize("shape", [(3, 2), ()])
def test_chains_and_draws_in_a_dictionary_are_refused(function, shape):
    draws = {
        "0.weight": torch.randn(4, 50, *shape),
        "0.bias": torch.randn(4, 50),
        "2.bias": torch.randn(4, 50),
    }
    with pytest.raises(
        ValueError,
        match="4 samples, and all its sites have an axis of size 50 next; of chains",
    ):
        function(draws, draws)
    known = ps.Posterior(draws, kind="independent")
    assert function(known, known).num_samples == (200, 200)


RHO = 0.95
GROUP = Group.declare({"w": ("unit", None)}, {"w": torch.Size([4, 2])})


def autoregression(chains=4, draws=400):
    """Stationary standard normal chains that forget a share 1 - RHO with every draw;
    invariant under GROUP.
    """
    states = [torch.randn(chains, 4, 2)]
    for _ in range(draws - 1):
        states.append(
            RHO * states[-1] + (1 - RHO**2) ** 0.5 * torch.randn(chains, 4, 2)
        )
    return Posterior({"w": torch.stack(states, 1)}, kind="chains")


def test_autoregressive_draws_count_by_their_effective_size():
    found = independent_draws(autoregression(draws=5_000))
    # 256, of one weight; the smallest of eight estimates is lower
    expected = 20_000 * (1 - RHO) / (1 + RHO) / 2
    assert 0.5 * expected < found < 1.1 * expected


def test_independent_rows_all_count_and_those_of_a_dictionary():
    weights = {"w": torch.randn(4, 5, 4, 2)}
    assert independent_draws(Posterior(weights, kind="independent")) == 20
    flat = {"w": weights["w"].flatten(0, 1)}
    assert invariance_tests(flat, GROUP).num_samples == (20,)
    assert mmd_test(flat, Posterior(weights, kind="independent")).num_samples == (
        20,
        20,
    )
    with pytest.raises(TypeError, match="weights_q are a tensor"):
        mmd_test(flat, flat["w"])


@pytest.mark.stochastic
def test_tests_of_a_samplers_draws_keep_their_level():
    # 20 repetitions at level 0.05: more than 4 rejections have probability 0.003 for
    # each test. Taken as independent, such draws are rejected nearly always.
    invariance, same = 0, 0
    for _ in range(20):
        first, second = autoregression(), autoregression()
        invariance += invariance_tests(first, GROUP).rejected
        same += mmd_test(first, second, num_permutations=99).rejected
    assert invariance <= 4
    assert same <= 4
    as_they_come = invariance_tests(Posterior(first.samples, kind="independent"), GROUP)
    assert as_they_come.num_samples == (1600,)
    assert as_they_come.rejected


def changing_sign(rho):
    """The size of a weight is a chain's that forgets a share 1 - rho, its sign is drawn
    anew each time.
    """
    size = torch.randn(2, 200, 1)
    for t in range(1, 200):
        size[:, t] = rho * size[:, t - 1] + (1 - rho**2) ** 0.5 * size[:, t]
    return size * torch.where(torch.rand(2, 200, 1) < 0.5, -1.0, 1.0)


def alternating():
    """Draws that lie above the mean are followed by some below it, at about the same
    distance.
    """
    states = torch.randn(4, 50, 2)
    for t in range(1, 50):
        states[:, t] = -0.9 * states[:, t - 1] + 0.19**0.5 * states[:, t]
    return states


@pytest.mark.stochastic
@pytest.mark.parametrize("draws", [lambda: changing_sign(0.99), alternating])
def test_chains_whose_sizes_move_slowly_keep_the_level(draws):
    # 20 repetitions at level 0.05: more than 5 rejections have probability 3e-4. By
    # bulk effective sample sizes alone these are rejected with probability 0.95 and
    # 0.5.
    pairs = [
        [Posterior({"w": draws()}, kind="chains") for _ in range(2)] for _ in range(20)
    ]
    assert sum(mmd_test(*pair, num_permutations=39).rejected for pair in pairs) <= 5


def test_broken_draws_are_refused_even_if_thinning_would_drop_them():
    posterior = autoregression()
    posterior.samples["w"][0, 0, 0, 0] = torch.nan
    with pytest.raises(
        ValueError, match="weights_p\\['w'\\] holds 1 NaN or infinite values"
    ):
        mmd_test(posterior, autoregression())


def test_one_weight_that_never_moves_hides_no_slow_one():
    slow = torch.linspace(0, 1, 200).expand(1, 200)[..., None] + 1e-3 * torch.randn(
        1, 200, 2
    )
    slow[..., 0] = 1.0
    assert (
        independent_draws(
            Posterior({"w": slow, "v": torch.randn(1, 200, 3)}, kind="chains")
        )
        < 5
    )
