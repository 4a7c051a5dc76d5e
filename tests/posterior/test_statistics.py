"""R-hat, effective sample sizes and missing energy of many quantities, against ArviZ's
one at a time.
"""

import warnings

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats

from pyro_symmetric.posterior import diagnostics
from pyro_symmetric.posterior import statistics as module
from pyro_symmetric.posterior.diagnostics import temperature
from pyro_symmetric.posterior.statistics import (
    chain_statistics,
    evenly_spaced,
    missing_energy,
    non_finite,
    standing_still,
)


def arviz(draws: torch.Tensor) -> list[np.ndarray]:
    """R-hat, bulk and tail effective sample size as ArviZ computes them."""
    series = np.moveaxis(draws.flatten(2).numpy().astype(np.float64), -1, 0)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        tail = array_stats.ess(series, method="tail", prob=(0.05, 0.95))
        halves = draws.shape[0] == 1  # of which ArviZ says nothing
        r_hat = (
            chain_statistics(draws).r_hat.numpy()
            if halves
            else array_stats.rhat(series)
        )
        return [r_hat, array_stats.ess(series, method="bulk"), tail]


def draws_of(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    if kind == "random walk":
        return x.cumsum(1)
    if kind == "with ties":
        return x.mul(2).round()
    if kind == "rejected moves":
        return x.repeat_interleave(3, dim=1)[:, : shape[1]]
    if kind == "antithetic":
        for t in range(1, shape[1]):
            x[:, t] -= 0.8 * x[:, t - 1]
    if kind == "disagreeing chains":
        x += torch.arange(shape[0], dtype=x.dtype)[:, None, None]
    return x


@pytest.mark.parametrize(
    "kind",
    [
        "independent",
        "random walk",
        "with ties",
        "rejected moves",
        "antithetic",
        "disagreeing chains",
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        (4, 100, 5),
        (1, 61, 4),
        (3, 4, 6),
        (2, 5, 6),
        (2, 6, 6),
        (2, 7, 6),
        (2, 9, 6),
        (16, 41, 3),
    ],
)
def test_they_are_arvizs_numbers(shape, kind):
    draws = draws_of(kind, shape)
    found = chain_statistics(draws)
    for values, expected in zip(
        (found.r_hat, found.ess_bulk, found.ess_tail), arviz(draws), strict=True
    ):
        known = ~np.isnan(values.numpy())
        np.testing.assert_allclose(values.numpy()[known], expected[known], rtol=1e-10)
        usable = (draws.amax((0, 1)) > draws.amin((0, 1))).numpy()
        assert (known == (usable & ~np.isnan(expected))).all()


def test_many_chains_in_single_precision_are_arvizs_numbers_too():
    draws = torch.randn(600, 20, 2).cumsum(1)
    found = chain_statistics(draws)
    sides = zip(
        (found.r_hat, found.ess_bulk, found.ess_tail),
        arviz(draws),
        (1e-10, 1e-5, 1e-10),
        strict=True,
    )
    for values, expected, rtol in sides:
        np.testing.assert_allclose(values.numpy(), expected, rtol=rtol)


def test_blocks_and_threads_change_nothing(monkeypatch):
    draws = torch.randn(3, 30, 4, 5)
    whole = chain_statistics(draws)
    monkeypatch.setattr(module, "_BLOCK_ENTRIES", 3 * 30 * 7)
    monkeypatch.setattr(module, "_PART_ENTRIES", 3 * 30 * 2)
    parts = chain_statistics(draws)
    assert parts.r_hat.shape == (4, 5)
    for name in ("r_hat", "ess_bulk", "ess_tail"):
        assert torch.equal(getattr(parts, name), getattr(whole, name))


def test_a_shift_of_one_chain_raises_r_hat_of_its_entry_only():
    draws = torch.randn(4, 200, 2, 3)
    draws[2, :, 1, 0] += 3
    r_hat = chain_statistics(draws).r_hat
    assert r_hat[1, 0] > 1.2
    # of 5 independent entries: false alarm below 1e-6
    assert r_hat.flatten().sort().values[-2] < 1.05


def test_too_little_to_tell_is_nan():
    for shape in ((1, 3, 2), (4, 3, 2), (2, 0, 2), (0, 10, 2)):
        assert torch.isnan(chain_statistics(torch.randn(shape)).r_hat).all()


def test_constant_and_infinite_quantities_are_nan_and_leave_the_others_alone():
    draws = torch.randn(2, 20, 3)
    alone = chain_statistics(draws[..., 2])
    draws[..., 0], draws[0, 0, 1] = 1.5, torch.inf
    found = chain_statistics(draws)
    assert torch.isnan(found.ess_bulk).tolist() == [True, True, False]
    assert found.ess_tail[2] == alone.ess_tail
    summary = found.summary()
    assert np.isnan(summary["r_hat"])
    assert summary["r_hat_median"] == found.r_hat[2]


def test_r_hat_is_infinite_if_no_half_moves_and_halves_differ():
    still = torch.tensor([0.1, 0.7, 0.3])[:, None].expand(3, 40)
    halves = (
        torch.tensor([0.1, 0.7])[:, None].expand(2, 20).reshape(1, 40).expand(3, 40)
    )
    moving = torch.randn(3, 40)
    found = chain_statistics(torch.stack([still, halves, moving], -1)).r_hat
    assert torch.isinf(found).tolist() == [True, True, False]
    # One chain that moves has a variance to compare with: a large number, and ArviZ's.
    partly = torch.cat([still[:2], moving[:1]])[..., None]
    r_hat = chain_statistics(partly).r_hat
    np.testing.assert_allclose(r_hat.numpy(), arviz(partly)[0], rtol=1e-10)
    assert 1.05 < r_hat < torch.inf


def test_missing_energy_is_arvizs():
    energy = torch.randn(4, 50, dtype=torch.float64).cumsum(1)
    np.testing.assert_allclose(
        missing_energy(energy).numpy(), array_stats._bfmi(energy.numpy()), rtol=1e-12
    )


@pytest.mark.stochastic
def test_missing_energy_of_an_autoregression_is_twice_one_minus_its_correlation():
    # E (e_t - e_{t-1})^2 / var e = 2 (1 - r); over 20,000 draws the relative error is
    # about 2 %.
    r, energy = 0.8, torch.randn(1, 20_000, dtype=torch.float64)
    for t in range(1, 20_000):
        energy[:, t] = r * energy[:, t - 1] + (1 - r**2) ** 0.5 * energy[:, t]
    assert float(missing_energy(energy)) == pytest.approx(2 * (1 - r), rel=0.1)


@pytest.mark.parametrize(("count", "most"), [(10, 4), (12, 12), (3, 8), (7, 1), (0, 5)])
def test_evenly_spaced_places_are_the_last_of_equal_parts(count, most):
    places = evenly_spaced(count, most)
    assert len(places) == min(count, most)
    assert set(places[-1:].tolist()) <= {count - 1}
    assert set(places.diff(prepend=torch.tensor([-1])).tolist()) <= {
        count // most,
        count // most + 1,
    }


def test_broken_and_standing_draws_are_counted_by_chain():
    draws = torch.randn(3, 20, 2, 2)
    draws[0, :4, 1, 0], draws[2, 7] = torch.nan, -torch.inf
    assert non_finite(draws).tolist() == [4, 0, 1]
    draws = torch.randn(3, 20, 2)
    draws[..., 0] = torch.arange(3.0)[:, None]
    assert standing_still(draws).tolist() == [[True, False]] * 3


def test_an_infinite_temperature_fails_and_one_that_chance_allows_does_not():
    values = 1 + torch.randn(4, 1000)
    assert (
        temperature("temperature", values, subsampled=False, arrived=True).status
        == "pass"
    )
    values[0, 0] = torch.inf
    assert (
        temperature("temperature", values, subsampled=False, arrived=True).status
        == "fail"
    )


def test_findings_are_graded_between_their_limits():
    grades = [diagnostics.graded(value, (0.1, 0.5)) for value in (0.1, 0.3, 0.6)]
    assert grades == ["pass", "warn", "fail"]
    grades = [diagnostics.graded(value, (0.4, 0.1)) for value in (0.4, 0.2, 0.05)]
    assert grades == ["pass", "warn", "fail"]


def test_the_share_of_divergences_is_that_of_all_draws():
    diverging = torch.zeros(4, 250, dtype=torch.bool)
    diverging[0, 3] = True
    (check,) = diagnostics.sampler_checks({"diverging": diverging}, False, True)
    assert (check.value, check.status) == (pytest.approx(0.001), "warn")


def test_a_chain_that_takes_tiny_steps_hardly_moves():
    draws = torch.randn(4, 50)
    draws[2] *= 1e-4
    check = diagnostics.moving({"w": draws})
    assert check.status == "fail"
    assert "chain 2" in check.words


def test_squared_energy_errors_are_averaged_over_draws_that_have_one():
    ratios = torch.tensor([[1.0, torch.nan, 2.0]])
    assert diagnostics.energy_error(ratios).value == pytest.approx(1.5)


def test_means_of_chains_that_differ_widen_the_margin_of_a_temperature():
    """Means 1.2 - 0.3 and 1.2 + 0.3 of 16 chains: a standard error of 0.077."""
    offsets = 0.3 * torch.tensor([-1.0, 1.0]).repeat(8)[:, None]
    values = 1.2 + offsets + 0.01 * torch.randn(16, 40)
    check = diagnostics.temperature("temperature", values, False, True)
    assert check.status == "pass"
    assert "± 0.077" in check.words or "± 0.078" in check.words
