"""Pyro's parameter store: saved in one process, loaded in another, cleared, shared."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal

import pyro_symmetric as ps

from .stored_guides import BASES, GROUP, elbo, model, symmetrised, train

CHILD = Path(__file__).parent / "stored_guides.py"


def in_a_new_process(job: str, folder: Path) -> list[dict[str, float]]:
    arguments = [sys.executable, "-W", "ignore", str(CHILD), job, str(folder)]
    result = subprocess.run(arguments, capture_output=True, check=True, text=True)
    return json.loads(result.stdout)


def test_a_loaded_store_is_used_in_full_by_a_new_process(tmp_path: Path) -> None:
    """Also if another guide of the class was made first, which starts anew. Two guides
    of a class find their own, in whatever order they are trained, and evaluated.
    """
    saved, two_saved = in_a_new_process("save", tmp_path)
    loaded, two_loaded = in_a_new_process("load", tmp_path)
    assert two_loaded == pytest.approx(two_saved, rel=1e-5)
    for base in BASES:
        for order in ("then made", "made before", "set up before"):
            trained, fresh = f"{base}, {order}", f"the other {base}, {order}"
            assert loaded[trained] == pytest.approx(saved[base], rel=1e-5), trained
            assert abs(loaded[fresh] - saved[base]) > 1.0, fresh


def test_the_best_state_is_restored_after_more_training(tmp_path: Path) -> None:
    """By a file and by a copied state; an optimiser of PyTorch resumes with it."""
    guide, store = symmetrised("full rank"), pyro.get_param_store()
    train(guide)
    best = elbo(guide)
    store.save(str(tmp_path / "best"))
    state = copy.deepcopy(store.get_state())
    for restore in (
        lambda: store.load(str(tmp_path / "best")),
        lambda: store.set_state(copy.deepcopy(state)),
    ):
        train(guide, 5)
        assert elbo(guide) != pytest.approx(best, rel=1e-4)
        median = guide.median()["w"].clone()
        restore()
        assert not torch.equal(guide.median()["w"], median)
        assert elbo(guide) == pytest.approx(best, rel=1e-5)
        assert ps.evidence(guide, num_samples=50).elbo > -100
    optimizer = torch.optim.SGD(guide.parameters(), lr=0.1)
    store.load(str(tmp_path / "best"))
    Trace_ELBO()(torch.nn.Identity(), guide)  # a module, whose parameters are the same
    loss = Trace_ELBO().differentiable_loss(model, guide)
    loss.backward()
    before = guide.median()["w"].clone()
    optimizer.step()
    assert not torch.equal(guide.median()["w"], before)


def test_quantiles_are_those_of_the_state_that_was_restored(tmp_path: Path) -> None:
    guide, store = symmetrised("diagonal"), pyro.get_param_store()
    train(guide, 2)
    store.save(str(tmp_path / "then"))
    then = guide.quantiles([0.2, 0.8])["w"].clone()
    train(guide, 3)
    store.load(str(tmp_path / "then"))
    torch.testing.assert_close(guide.quantiles([0.2, 0.8])["w"], then)


def test_a_cleared_store_leaves_guides_as_they_are() -> None:
    first = symmetrised("diagonal")
    train(first)
    value = elbo(first)
    pyro.clear_param_store()
    second = symmetrised("diagonal")
    train(second, 2)
    assert elbo(second) < value - 1.0
    assert elbo(first) == pytest.approx(value)
    assert len(pyro.get_param_store()) == 4


def test_scopes_keep_guides_apart() -> None:
    store, guides, values, scopes = pyro.get_param_store(), [], [], []
    for _ in range(2):
        with store.scope() as scope:
            guides.append(symmetrised("diagonal"))
            train(guides[-1], 10 * (1 + len(values)))
            values.append(elbo(guides[-1]))
            scopes.append(scope)
    for guide, value, scope in zip(guides, values, scopes, strict=True):
        with store.scope(scope):
            assert elbo(guide) == pytest.approx(value)


def test_guides_with_given_moments_keep_them(tmp_path: Path) -> None:
    """A guide read from a file, or computed, isn't one whose parameters were stored."""
    trained = symmetrised("diagonal")
    train(trained)
    ps.save_guide(trained, tmp_path / "guide.safetensors")
    fresh = symmetrised("diagonal").setup()
    pushed = ps.push_forward(fresh, GROUP.sample())
    train(pushed, 2)
    store = pyro.get_param_store()
    names = {"loc": "AutoGaussian_{}.loc", "scale": "AutoGaussian_{}.scale"}
    for number in range(1, 60):  # loaded entries of every number
        for name in names.values():
            store[name.format(number)] = torch.full((4,), 9.0)
    again = ps.push_forward(fresh, GROUP.identity())
    loaded: Any = ps.load_guide(tmp_path / "guide.safetensors")
    median = loaded.median()["w"]
    torch.testing.assert_close(median, trained.median()["w"])
    torch.testing.assert_close(again.median()["w"], fresh.median()["w"])


def test_a_stock_base_and_a_guide_of_other_sites_are_no_obstacle() -> None:
    """Entries of other shapes belong to a guide of another model."""
    guide = symmetrised("diagonal")
    number = int(guide._pyro_name.rsplit("_", 1)[1])
    store = pyro.get_param_store()
    store[f"AutoSymmetrized_{number}.base.loc"] = torch.zeros(7)
    store[f"AutoSymmetrized_{number}.base.scale"] = torch.ones(7)
    train(guide, 2)
    assert guide.median()["w"].shape == (3,)
    assert store[f"AutoSymmetrized_{number}.base.loc"].shape == (7,)
    stock = AutoDiagonalNormal(model)
    train(stock, 2, 0.05)
    over = ps.AutoSymmetrized(model, GROUP, base=stock)
    train(over, 2, 0.05)
    assert float((over.median()["w"] - stock.median()["w"]).abs().max()) < 0.2
