"""Pictures hold the numbers of the results that they are of."""

import builtins
import functools
import math
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.alignment import BarrierCurve
from pyro_symmetric.compare import DistanceResult

NET = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
X = torch.linspace(-1, 1, 40).reshape(20, 2)
SYMMETRY = ps.find_symmetry(NET, X)
CURVE = BarrierCurve(
    torch.tensor([0.0, 0.5, 1.0]),
    {"train": torch.tensor([1.0, 4.0, 2.0]), "test": torch.tensor([2.0, 5.0, 2.0])},
    {},
)


@pytest.fixture(autouse=True)
def agg() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    pyplot.close("all")


@functools.cache
def chains() -> ps.Posterior:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(4, 50, 2, 6, generator=generator)
    return ps.Posterior({"w": draws, "s": draws[..., 0, 0]}, kind="chains")


def data(artist: Any) -> np.ndarray:
    return np.asarray(artist.get_data(), dtype=float)


def test_a_barrier_is_drawn_along_the_path() -> None:
    (axes,) = pyplot.figure().subplots(1, 1, squeeze=False).flat
    assert CURVE.plot(ax=axes) is axes
    assert [line.get_label() for line in axes.lines] == ["train", "test"]
    for line, losses in zip(axes.lines, CURVE.losses.values(), strict=True):
        np.testing.assert_allclose(data(line), np.stack([CURVE.t, losses]))
    assert axes.get_xlabel() == "position on the path t"
    assert axes.get_ylabel() == "loss (nats per row)"


def test_traces_and_marginals_are_drawn_for_each_chain_of_each_entry() -> None:
    left, right = chains().plot("s")
    assert len(left.lines) == len(right.patches) == 4
    for line, chain in zip(left.lines, chains()["s"], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), chain)
    for patch in right.patches:  # a density along the value's axis
        corners = patch.get_xy()
        width = np.diff(np.unique(corners[:, 1]))[0]
        levels = corners[1:-1:2, 0]
        assert levels.sum() * width == pytest.approx(1, rel=1e-3)
    left, _ = chains().plot("w", ax=pyplot.subplots(1, 2)[1])
    assert len(left.lines) == 10 * 4
    assert left.get_title() == "w, 10 of 12 entries"
    np.testing.assert_array_equal(
        left.lines[5].get_ydata(), chains()["w"].flatten(2)[1, :, 1]
    )
    with pytest.raises(KeyError, match="no site 'v'"):
        chains().plot("v")


def test_an_alignment_is_drawn_unit_by_unit() -> None:
    element = SYMMETRY.group.element({"0": [2, 0, 1]})
    weights = {site: v.detach() for site, v in NET.state_dict().items()}
    result = ps.align(element(weights), weights, SYMMETRY)
    axes = result.plot()
    (line,) = axes.lines
    expected = [[0, 1, 2], result.element["0"].tolist()]
    assert data(line).tolist() == expected
    assert sorted(expected[1]) == [0, 1, 2]
    assert f"{result.initial_cost:.4g}" in axes.get_title()


def test_a_distance_is_drawn_by_layer_and_of_predictions_by_input() -> None:
    p, q = (
        {"a.weight": torch.randn(20, 3), "b.weight": torch.randn(20, 2)}
        for _ in range(2)
    )
    distance = ps.mmd(p, q)
    axes = distance.plot()
    (points,) = axes.collections
    drawn = [part["median"] for part in distance.parts.values()]
    np.testing.assert_allclose(points.get_offsets()[:, 0], drawn)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    by_input = DistanceResult("TV", (3, 3), {"mean": 0.2}, each=torch.rand(30)).plot()
    assert sum(patch.get_height() for patch in by_input.patches) == 30


def test_scores_are_drawn_as_reliability_beside_the_diagonal() -> None:
    labels = torch.arange(40) % 2
    scores = ps.scores.classification(probabilities(), labels)
    diagonal, curve = scores.plot().lines
    assert data(diagonal).tolist() == [[0, 1], [0, 1]]
    expected = [scores.calibration.confidence, scores.calibration.accuracy]
    np.testing.assert_allclose(data(curve), np.stack(expected))
    coverage = ps.scores.regression(torch.zeros(3, 40, 1), 1.0, torch.randn(40))
    _, curve = coverage.plot().lines
    np.testing.assert_allclose(data(curve)[1], list(coverage.coverage.values()))
    with pytest.raises(ValueError, match=r"scores hold \['auroc'\]"):
        type(scores)(auroc=1.0).plot()


def probabilities() -> torch.Tensor:
    first = torch.linspace(0.1, 0.9, 120).reshape(3, 40, 1)
    return torch.cat([first, 1 - first], -1)


def test_a_diagnosis_is_drawn_as_r_hats_by_space_and_site() -> None:
    diagnosis = ps.diagnose(chains())
    axes = diagnosis.plot()
    (points,) = axes.collections
    numbers = diagnosis.statistics["weights"]
    worst = [float(numbers[site].r_hat.max()) for site in ("w", "s")]
    np.testing.assert_allclose(points.get_offsets()[:, 0], worst)
    assert axes.lines[0].get_xdata()[0] == 1.02
    assert diagnosis.outcome in axes.get_title()


def test_a_symmetry_is_drawn_as_axes_in_the_colours_of_their_units() -> None:
    axes = SYMMETRY.plot()
    sites = [label.get_text() for label in axes.get_yticklabels()]
    assert sites == list(SYMMETRY.site_shapes)
    bars = [
        (patch.get_x(), patch.get_y(), patch.get_facecolor()) for patch in axes.patches
    ]
    units = matplotlib.colors.to_rgba("C0")
    moved = {
        (sites[round(y + 0.4)], int(x)) for x, y, colour in bars if colour == units
    }
    assert moved == {("0.weight", 0), ("0.bias", 0), ("2.weight", 1)}
    assert len(axes.texts) == sum(map(len, SYMMETRY.site_shapes.values()))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["0"]


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        CURVE.plot()
    assert math.isfinite(CURVE.barrier)


def test_curves_have_labels_and_only_axes_are_drawn_into() -> None:
    axes = CURVE.plot(label="before")
    CURVE.plot(axes, label="after")
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["before train", "before test", "after train", "after test"]
    for ax in (SYMMETRY, axes, [SYMMETRY, axes]):
        with pytest.raises(TypeError, match=r"ax is a .* 2 axes of matplotlib"):
            chains().plot("s", ax)
    with pytest.raises(TypeError, match="ax is a Symmetry; it must be axes"):
        CURVE.plot(SYMMETRY)


def test_traces_are_aligned_modulo_a_symmetry() -> None:
    locs = torch.tensor([-5.0, 5.0]) + 0.1 * torch.randn(3, 50, 2)
    locs[1] = locs[1].flip(-1)
    group = ps.Group.declare({"locs": ("k",)}, {"locs": torch.zeros(2)})
    posterior = ps.Posterior({"locs": locs}, kind="chains")
    for symmetry, apart in ((None, True), (group, False)):
        left, _ = posterior.plot("locs", symmetry=symmetry)
        means = [float(data(line)[1].mean()) for line in left.lines[:3]]
        assert (max(means) - min(means) > 5) == apart
