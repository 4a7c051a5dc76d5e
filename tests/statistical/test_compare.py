"""Size and power of the comparisons over many repetitions."""

import pytest
import torch
from scipy import stats

from pyro_symmetric import compare
from pyro_symmetric.compare import mmd, mmd_test
from pyro_symmetric.compare.invariance import _exact_table
from pyro_symmetric.groups.group import Group
from pyro_symmetric.posterior.posterior import Posterior

REPETITIONS = 500
LEVEL = 0.05


def invariance_tests(weights, group, **options):
    """Of independent draws."""
    return compare.invariance_tests(
        Posterior.from_samples(weights, kind="independent"), group, **options
    )


def group():
    shapes = {
        "0.weight": torch.Size([5, 3]),
        "0.bias": torch.Size([5]),
        "2.weight": torch.Size([4, 5]),
    }
    shapes |= {"2.bias": torch.Size([4]), "4.weight": torch.Size([1, 4])}
    axes = {
        "0.weight": ("first", None),
        "0.bias": ("first",),
        "2.weight": ("second", "first"),
        "2.bias": ("second",),
    }
    return Group.declare(axes | {"4.weight": (None, "second")}, shapes)


def one_copy(symmetry, draws):
    return {
        site: torch.randn(shape) + 0.5 * torch.randn(draws, *shape)
        for site, shape in symmetry.site_shapes.items()
    }


@pytest.mark.stochastic
@pytest.mark.slow
@pytest.mark.parametrize("draws", [12, 200])
def test_invariance_tests_keep_their_level(draws):
    # An upper bound of 0.05 + 3.5 standard errors: false alarm 2e-4 or less (Holm is
    # conservative). The index test alone is exact (up to the discreteness of its
    # counts), so that its p-values must also not be too large.
    symmetry = group()
    results = []
    for _ in range(REPETITIONS):
        weights = symmetry.sample((draws,))(one_copy(symmetry, draws))
        results.append(invariance_tests(weights, symmetry, level=LEVEL))
    bound = stats.binom.ppf(1 - 2e-4, REPETITIONS, LEVEL)
    assert sum(result.rejected for result in results) <= bound
    index = torch.tensor([result.parts["first"]["index_p_value"] for result in results])
    marginal = torch.tensor(
        [result.parts["first"]["marginal_p_value"] for result in results]
    )
    assert int((index <= LEVEL).sum()) <= bound
    assert int((marginal <= LEVEL).sum()) <= bound
    if draws == 200:
        assert int((index <= LEVEL).sum()) >= stats.binom.ppf(2e-4, REPETITIONS, LEVEL)


@pytest.mark.stochastic
@pytest.mark.slow
@pytest.mark.parametrize(("copies", "least"), [(1, 99), (2, 95)])
def test_invariance_tests_find_draws_that_stay_in_one_copy_or_two(copies, least):
    """The second: half the draws in each, seen by the marginals and by the index.
    Measured power: 1 of 100 each.
    """
    symmetry, found = group(), 0
    for _ in range(100):
        weights = one_copy(symmetry, 100)
        if copies == 2:
            moved = symmetry.sample(())(weights)
            weights = {
                site: torch.cat([weights[site][:50], moved[site][50:]])
                for site in weights
            }
        found += invariance_tests(weights, symmetry).rejected
    assert found >= least


@pytest.mark.stochastic
@pytest.mark.slow
def test_single_marginal_tests_are_exact():
    # one pair, one position: 1,000 exact p-values against their discrete uniform law; a
    # bound of 4 standard errors on each of three levels: false alarm under 2e-4
    symmetry = Group.declare({"w": ("unit",)}, {"w": torch.Size([2])})
    p_values = torch.tensor(
        [
            invariance_tests({"w": torch.randn(200, 2)}, symmetry).parts["unit"][
                "marginal_p_value"
            ]
            for _ in range(1000)
        ]
    )
    attainable = _exact_table(100)
    for level in (0.05, 0.2, 0.5):
        exact = float(attainable[attainable <= level].max())
        share = float((p_values <= level).double().mean())
        assert abs(share - exact) < 4 * (exact * (1 - exact) / 1000) ** 0.5


@pytest.mark.stochastic
@pytest.mark.slow
def test_mmd_is_unbiased_under_given_kernels_and_slightly_positive_under_its_own():
    # 3,000 repetitions; |z| < 5: false alarm under 2e-5 over the twenty kernels
    def draw():
        return {"w": torch.randn(15, 4)}, {"w": torch.randn(12, 4)}

    kernels = mmd(*draw())
    given, own = (
        torch.stack(
            [
                torch.from_numpy(mmd(*draw(), bandwidths=used).parts["w"]["squared"])
                for _ in range(3000)
            ]
        )
        for used in (kernels, None)
    )
    z = given.mean(0) / given.std(0) * 3000**0.5
    assert float(z.abs().max()) < 5
    assert float(own.mean(0)[0]) > 0
    assert float(own.mean(0).max()) < 0.02


def autoregression(correlation, chains, draws):
    """Stationary standard normal chains, invariant under exchanges of four units."""
    states = [torch.randn(chains, 4, 2)]
    for _ in range(draws - 1):
        states.append(
            correlation * states[-1]
            + (1 - correlation**2) ** 0.5 * torch.randn(chains, 4, 2)
        )
    return Posterior({"w": torch.stack(states, 1)}, kind="chains")


@pytest.mark.stochastic
@pytest.mark.slow
@pytest.mark.parametrize(
    ("correlation", "chains", "draws"), [(0.9, 4, 400), (0.9, 1, 1600), (0.98, 8, 200)]
)
def test_tests_of_chains_keep_their_level(correlation, chains, draws):
    # Each count of rejections lies beyond the upper bound with probability 2e-4 if the
    # level is kept. As independent draws the same chains are rejected nearly always.
    symmetry = Group.declare({"w": ("unit", None)}, {"w": torch.Size([4, 2])})
    invariance, same = 0, 0
    for _ in range(REPETITIONS):
        first, second = (autoregression(correlation, chains, draws) for _ in range(2))
        invariance += compare.invariance_tests(first, symmetry, level=LEVEL).rejected
        same += mmd_test(first, second, level=LEVEL, num_permutations=39).rejected
    bound = stats.binom.ppf(1 - 2e-4, REPETITIONS, LEVEL)
    assert invariance <= bound
    assert same <= bound
    taken_as_independent = Posterior(first.samples, kind="independent")
    assert compare.invariance_tests(
        taken_as_independent, symmetry, level=LEVEL
    ).rejected
