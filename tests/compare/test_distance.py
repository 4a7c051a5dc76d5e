"""The register of distances: what is ours, what a third party adds, and what is refused."""

from importlib.metadata import EntryPoint

import pytest
import torch

from pyro_symmetric.compare import Distance, DistanceResult, Shown, distances, marginal_wasserstein, mmd
from pyro_symmetric.compare.distance import _REGISTERED, ENTRY_POINTS, register_distance


def mean_gap(p, q, like=None):
    """The distance between the means of the first site, in one number."""
    gap = (p["w"].mean(0) - q["w"].mean(0)).norm()
    return DistanceResult(title="Mean gap", num_samples=(len(p["w"]), len(q["w"])), totals={"gap": float(gap)})


GAP = Distance("mean gap", mean_gap, shows=(Shown("gap", "gap", "How far the means lie apart."),))


@pytest.fixture
def register(monkeypatch):
    """A register of this test's own."""
    held = dict(_REGISTERED)
    monkeypatch.setattr("pyro_symmetric.compare.distance._REGISTERED", held)
    return held


def offer(monkeypatch, value="tests.compare.test_distance:GAP", loaded=GAP):
    """A package that has this entry point."""
    entry = EntryPoint("gap", value, ENTRY_POINTS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: loaded)
    monkeypatch.setattr(
        "pyro_symmetric.compare.distance.entry_points", lambda group: [entry] if group == ENTRY_POINTS else []
    )


def test_ours_are_registered_by_what_they_compare():
    assert [distance.name for distance in distances()] == ["total_variation", "mmd", "wasserstein"]
    assert [distance.name for distance in distances("weights")] == ["mmd", "wasserstein"]
    p, q = {"0.w": torch.randn(20, 3)}, {"0.w": torch.randn(15, 3)}
    ours, gap = distances("weights")
    assert ours(p, q).to_dict() == mmd(p, q).to_dict()
    assert ours(q, p, mmd(p, q)).to_dict() == mmd(q, p, bandwidths=mmd(p, q)).to_dict()
    assert gap(p, q).value == marginal_wasserstein(p, q).value
    for distance in distances():
        result = distance(*((p, q) if distance.between == "weights" else (torch.full((3, 2), 0.5),) * 2))
        assert all(shown.total in result.totals for shown in distance.shows)


def test_one_of_an_entry_point_comes_last_and_once(register, monkeypatch):
    offer(monkeypatch)
    assert [distance.name for distance in distances("weights")] == ["mmd", "wasserstein", "mean gap"]
    assert [distance.name for distance in distances("weights")] == ["mmd", "wasserstein", "mean gap"]
    result = distances()[-1]({"w": torch.zeros(3, 2)}, {"w": torch.ones(4, 2)})
    assert result.value == pytest.approx(2**0.5)
    assert repr(result) == "Mean gap, 3 against 4 samples: gap 1.41"
    assert result.to_dict()["num_samples"] == [3, 4]


def test_what_is_no_distance_or_has_anothers_name_is_refused(register, monkeypatch):
    with pytest.raises(ValueError, match="distance has the name 'mmd', which another distance has"):
        register_distance(Distance("mmd", mean_gap))
    assert register_distance(GAP) is register_distance(GAP)
    broken = Distance("broken", lambda p, q, like: 0.5)
    with pytest.raises(TypeError, match=r"what distance 'broken' returned is 0.5; it must be a DistanceResult"):
        broken({}, {})
    offer(monkeypatch, loaded=mean_gap)
    with pytest.warns(UserWarning, match=r"the distance 'gap' of .* can't be used: .* must be a Distance"):
        assert "mmd" in [distance.name for distance in distances()]  # one that is broken takes no other away
