"""ArviZ's plots draw what :func:`to_arviz` gives, by the releases of the extra ``plots``."""

import pytest
import torch

import pyro_symmetric as ps

matplotlib = pytest.importorskip("matplotlib")
arviz_plots = pytest.importorskip("arviz_plots")

PLOTS = ("trace", "rank", "forest", "energy")


@pytest.fixture(autouse=True)
def _no_window():
    from matplotlib import pyplot

    matplotlib.use("Agg")
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def tree():
    samples = {
        "net.0.weight": torch.randn(4, 60, 2, 3),
        "net.0.bias": torch.randn(4, 60, 2),
        "scale": torch.rand(4, 60),
    }
    statistics = {name: torch.rand(4, 60) for name in ("lp", "energy", "acceptance_rate")}
    return ps.Posterior(samples, {**statistics, "diverging": torch.rand(4, 60) < 0.05}, kind="chains").to_arviz()


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_draws_every_entry(name: str, tree, tmp_path) -> None:
    figure = getattr(arviz_plots, f"plot_{name}")(tree)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    if name in ("trace", "rank"):  # a panel for each of 6 + 2 + 1 entries
        panels = figure.viz.get("plot", figure.viz)
        assert sum(panels[site].size for site in ("net.0.weight", "net.0.bias", "scale")) == 9
