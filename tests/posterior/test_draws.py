"""Draws as data frames."""

import itertools

import pytest
import torch

from pyro_symmetric import Posterior


@pytest.fixture
def posterior() -> Posterior:
    samples = {"w": torch.randn(3, 5, 2, 4), "s": torch.randn(3, 5, dtype=torch.float64), "v": torch.randn(3, 5, 1)}
    return Posterior(samples, {"diverging": torch.rand(3, 5) < 0.5, "lp": torch.randn(3, 5)}, kind="chains")


def test_every_number_stands_at_its_draw_and_under_its_entrys_name(posterior: Posterior) -> None:
    frame = posterior.to_dataframe()
    assert frame.shape == (15, 10)
    assert frame.index.names == ["chain", "draw"]
    for chain, draw in itertools.product(range(3), range(5)):
        row = frame.loc[(chain, draw)]
        for i, j in itertools.product(range(2), range(4)):
            assert row[f"w[{i},{j}]"] == posterior.samples["w"][chain, draw, i, j].item()
        assert row["s"] == posterior.samples["s"][chain, draw].item()
        assert row["v[0]"] == posterior.samples["v"][chain, draw, 0].item()


def test_columns_keep_their_sites_dtype_and_statistics_come_by_name(posterior: Posterior) -> None:
    frame = posterior.to_dataframe(["diverging", "s", "v"])
    assert list(frame.columns) == ["diverging", "s", "v[0]"]
    assert [dtype.name for dtype in frame.dtypes] == ["bool", "float64", "float32"]
    assert frame["diverging"].groupby("chain").sum().tolist() == posterior.divergences.tolist()


def test_empty_sites_no_draws_and_bfloat16() -> None:
    posterior = Posterior({"e": torch.zeros(2, 3, 0), "b": torch.ones(2, 3, 2).bfloat16()}, kind="independent")
    frame = posterior.to_dataframe()
    assert len(frame) == 6
    assert frame.select_dtypes("float32").to_numpy().sum() == 12
    assert len(posterior.select(draws=slice(0, 0)).to_dataframe()) == 0
