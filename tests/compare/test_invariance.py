import numpy as np
import pytest
import torch
from scipy import stats

from pyro_symmetric import compare
from pyro_symmetric.compare.invariance import (
    _index_test,
    chi_square_uniform,
    holm,
    kolmogorov_smirnov,
)
from pyro_symmetric.groups.axes import Axis
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import Units
from pyro_symmetric.posterior.posterior import Posterior


def invariance_tests(weights, group, **options):
    """Of independent draws."""
    return compare.invariance_tests(
        Posterior.from_samples(weights, kind="independent"), group, **options
    )


def mlp_group(inputs=3, hidden=6, outputs=2):
    shapes = {
        "0.weight": torch.Size([hidden, inputs]),
        "0.bias": torch.Size([hidden]),
        "2.weight": torch.Size([outputs, hidden]),
        "2.bias": torch.Size([outputs]),
    }
    axes = {
        "0.weight": ("hidden", None),
        "0.bias": ("hidden",),
        "2.weight": (None, "hidden"),
    }
    return Group.declare(axes, shapes)


def one_copy(group, draws, spread=0.3):
    """Draws around one point: no unit is like another."""
    return {
        site: torch.randn(shape) + spread * torch.randn(draws, *shape)
        for site, shape in group.site_shapes.items()
    }


def symmetrised(group, weights):
    return group.sample((len(next(iter(weights.values()))),))(weights)


def rejections(group, draw, repetitions, **arguments):
    results = [invariance_tests(draw(), group, **arguments) for _ in range(repetitions)]
    return torch.tensor([result.rejected for result in results]), results


@pytest.mark.stochastic
def test_a_chain_in_one_copy_is_found_out():
    # index: a uniform one would have to hold one unit in nearly all of 200 draws; false
    # alarm nil
    group = mlp_group()
    result = invariance_tests(one_copy(group, 200), group)
    factor = result.parts["hidden"]
    assert result.rejected
    assert result.p_value < 1e-6
    assert factor["index_adjusted"] < 1e-6
    assert factor["marginal_adjusted"] < 1e-6
    assert factor["marginal_rejected"] > factor["marginal_tests"] / 2
    assert "not invariant" in result.verdict


@pytest.mark.stochastic
def test_size_is_at_most_the_level_on_invariant_samples():
    # 60 repetitions at level 0.05: more than 9 rejections have probability 0.0007 under
    # Binomial(60, 0.05)
    group = mlp_group(hidden=4)
    rejected, _ = rejections(group, lambda: symmetrised(group, one_copy(group, 60)), 60)
    assert int(rejected.sum()) <= 9


@pytest.mark.stochastic
def test_units_that_depend_on_each_other_within_a_draw_do_no_harm():
    # w_1 = -w_0 is invariant under the exchange; comparing both from the same draws
    # would reject twice as often. p-values of the one test: share under 0.1 in 200
    # repetitions beyond 0.1 + 0.09 has probability under 1e-4.
    group = Group.declare({"w": ("unit",)}, {"w": torch.Size([2])})
    p_values = []
    for _ in range(200):
        w = torch.randn(60, 1)
        p_values.append(
            invariance_tests({"w": torch.cat([w, -w], 1)}, group).parts["unit"][
                "marginal_p_value"
            ]
        )
    assert (torch.tensor(p_values) < 0.1).double().mean() < 0.19


@pytest.mark.stochastic
def test_equal_index_with_unequal_marginals_is_found_by_the_marginals():
    # the largest weight is always the shared second position; only the first position's
    # spread tells the units apart
    group = Group.declare({"w": ("unit", None)}, {"w": torch.Size([4, 2])})
    w = torch.randn(400, 4, 2)
    w[..., 1] += 50
    w[:, 2, 0] *= 5
    factor = invariance_tests({"w": w}, group).parts["unit"]
    assert factor["marginal_p_value"] < 1e-6
    assert factor["index_p_value"] > 1e-4  # false alarm 1e-4


def test_index_counts_name_the_unit_with_the_largest_incoming_weight():
    group = mlp_group()
    weights = one_copy(group, 50)
    expected = torch.zeros(6, dtype=torch.long)
    for s in range(50):
        per_unit = [
            max(*weights["0.weight"][s, i].tolist(), float(weights["0.bias"][s, i]))
            for i in range(6)
        ]
        expected[per_unit.index(max(per_unit))] += 1
    factor = invariance_tests(weights, group).parts["hidden"]
    assert factor["index_counts"].tolist() == [expected.tolist()]
    assert factor["sites"] == "0.weight, 0.bias"


def test_marginal_p_value_equals_a_loop_with_scipy():
    group = mlp_group(hidden=4)
    weights = one_copy(group, 40, spread=3.0)
    both = torch.cat([weights["0.weight"], weights["0.bias"][..., None]], -1)
    p_values = [
        stats.ks_2samp(
            both[0::2, i, k].numpy(), both[1::2, j, k].numpy(), method="exact"
        ).pvalue
        for k in range(4)
        for i in range(4)
        for j in range(i + 1, 4)
    ]
    factor = invariance_tests(weights, group).parts["hidden"]
    assert factor["marginal_tests"] == 24
    assert factor["marginal_p_value"] == pytest.approx(
        min(1.0, 24 * min(p_values)), rel=1e-6
    )
    level = sorted(24 * p for p in p_values)[3] * 0.9  # somewhere in the middle
    expected = 0
    for rank, p in enumerate(sorted(p_values)):
        if p * (24 - rank) > level:
            break
        expected += 1
    if level < 1:
        found = invariance_tests(weights, group, level=level).parts["hidden"][
            "marginal_rejected"
        ]
        assert found == expected


def convolutional_group():
    """conv 3 -> 4 (2x2), flattened to 3 pixels, linear 12 -> 2."""
    shapes = {
        "c.weight": torch.Size([4, 3, 2, 2]),
        "c.bias": torch.Size([4]),
        "l.weight": torch.Size([2, 12]),
    }
    plain, blocks = (
        torch.arange(4)[None],
        (torch.arange(4) * 3 + torch.arange(3)[:, None]),
    )
    axes = (
        Axis("c.weight", 0, plain),
        Axis("c.bias", 0, plain),
        Axis("l.weight", 1, blocks),
    )
    return Group([Units("channel", 4, axes)], shapes)


def gate_group():
    """A recurrent layer of 5 units with 3 gates: blocks on the rows, the same factor on
    the columns.
    """
    shapes = {"ih": torch.Size([15, 2]), "hh": torch.Size([15, 5])}
    gates = torch.arange(5) + 5 * torch.arange(3)[:, None]
    axes = (
        Axis("ih", 0, gates),
        Axis("hh", 0, gates),
        Axis("hh", 1, torch.arange(5)[None]),
    )
    return Group([Units("cell", 5, axes)], shapes)


def nested_group():
    """Three rows in each of two heads, and what leaves them."""
    shapes = {"in": torch.Size([6, 2]), "out": torch.Size([2, 6])}
    every, heads = torch.arange(6)[None], torch.tensor([[0, 3], [1, 4], [2, 5]])
    return Group(
        [
            Units("head", 2, (Axis("in", 0, heads), Axis("out", 1, heads))),
            Units(
                "row",
                3,
                (Axis("in", 0, every), Axis("out", 1, every)),
                parent="head",
                copies=2,
            ),
        ],
        shapes,
    )


def outgoing_group():
    return Group.declare({"topics": (None, "topic")}, {"topics": torch.Size([3, 4])})


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "make", [convolutional_group, gate_group, nested_group, outgoing_group]
)
def test_blocks_convolutions_and_recurrent_weights_keep_size_and_power(make):
    # per repetition a false alarm has probability at most 1e-3: more than 2 in 40 have
    # probability 1e-5
    group = make()
    rejected, _ = rejections(
        group, lambda: symmetrised(group, one_copy(group, 120)), 40, level=1e-3
    )
    assert int(rejected.sum()) <= 2
    assert invariance_tests(one_copy(group, 120), group, level=1e-3).rejected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 333])
def test_kolmogorov_smirnov_equals_scipys_exact_test(size):
    x, y = (
        torch.randn(4, size),
        torch.randn(4, size) + torch.tensor([0.0, 0.1, 0.5, 3.0])[:, None],
    )
    first, second = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    first, second = first.reshape(-1), second.reshape(-1)
    p_values, floor = kolmogorov_smirnov(x, y, first, second)
    for i, j, p_value in zip(first, second, p_values, strict=True):
        expected = stats.ks_2samp(x[i].numpy(), y[j].numpy(), method="exact")
        assert float(p_value) == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
        assert floor <= float(p_value) + 1e-15


def test_ties_are_counted_once():
    x = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    y = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    zero = torch.zeros(1, dtype=torch.long)
    # of a statistic of 1 / 4
    assert kolmogorov_smirnov(x, y, zero, zero)[0].tolist() == pytest.approx([1.0])
    assert kolmogorov_smirnov(x, x, zero, zero)[0].tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("counts", [[20, 30, 25], [5, 5, 5, 5], [100, 0]])
def test_chi_square_equals_scipy(counts):
    p_value = chi_square_uniform(torch.tensor([counts, counts[::-1]]))
    expected = stats.chisquare(counts)
    assert p_value.tolist() == pytest.approx([expected.pvalue] * 2)


@pytest.mark.stochastic
def test_few_draws_are_tested_by_simulation():
    # 4 draws on 3 units; exact by enumeration of the 81 outcomes. 9,999 simulations: 5
    # deviations are under 0.025.
    counts = torch.tensor([3, 1, 0])
    both = torch.stack([counts, torch.tensor([2, 1, 1])])
    outcomes = np.stack(np.meshgrid(*[range(3)] * 4), -1).reshape(-1, 4)
    tables = np.stack([(outcomes == unit).sum(1) for unit in range(3)], 1)
    statistics = ((tables - 4 / 3) ** 2).sum(1) / (4 / 3)
    found = stats.chisquare(both.double().numpy(), axis=1).statistic
    for statistic, p_value in zip(
        found, chi_square_uniform(both).tolist(), strict=True
    ):
        assert p_value == pytest.approx(
            (statistics >= statistic - 1e-9).mean(), abs=0.025
        )
    assert chi_square_uniform(torch.tensor([1, 1, 1, 1])) == 1.0


def test_holm_equals_the_step_down_definition():
    p_values = torch.tensor([0.01, 0.04, 0.03, 0.005], dtype=torch.float64)
    torch.testing.assert_close(
        holm(p_values), torch.tensor([0.03, 0.06, 0.06, 0.02], dtype=torch.float64)
    )
    assert holm(torch.zeros(0)).numel() == 0


@pytest.mark.stochastic
def test_the_p_value_of_the_index_counts_each_copy_and_ties_are_broken_at_random():
    """Two copies of two units, whose largest is always the first, or tied."""
    units = torch.zeros(40, 2, 2, 1)
    units[:, 0, 0] = 1.0
    found = _index_test(units)
    expected = stats.chisquare([40, 0]).pvalue
    assert found["index_p_value"] == pytest.approx(2 * expected)
    assert 5 < found["index_counts"][1][0] < 35  # of 40; a chance of 7e-7 a side
