"""Guides go to other processes and come back: pickles, pools, dask, copies, files."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import Tensor, nn

from pyro_symmetric.distributions import InfoNCE
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import (
    AutoSymmetrized,
    AutoUnitBlocks,
    load_guide,
    push_forward,
    save_guide,
)
from pyro_symmetric.guides.files import KIND, VERSION
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.store import load_tensors, save_tensors

HIDDEN = 3
X = torch.linspace(-2, 2, 20)[:, None]
Y = torch.sin(2 * X[:, 0])
AXES = {"0.weight": ("unit", None), "0.bias": ("unit",), "2.weight": (None, "unit")}

BASES: dict[str, tuple[type, dict[str, Any]]] = {
    "normal": (AutoNormal, {}),
    "diagonal": (AutoDiagonalNormal, {}),
    "full rank": (AutoMultivariateNormal, {}),
    "low rank": (AutoLowRankMultivariateNormal, {"rank": 2}),
}


def network() -> BayesianModel:
    pyro.set_rng_seed(7)
    return BayesianModel(
        nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)),
        1.0,
        "gaussian",
    )


def symmetrized(base: str) -> tuple[BayesianModel, AutoSymmetrized]:
    """A guide that isn't set up, and its model."""
    model, (kind, options) = network(), BASES[base]
    shapes = {name: parameter.shape for name, parameter in model.net.named_parameters()}
    return model, AutoSymmetrized(
        model, Group.declare(AXES, shapes), kind, InfoNCE(2), **options
    )


def blocks(model: BayesianModel) -> AutoUnitBlocks:
    return AutoUnitBlocks(
        model,
        Group.declare(
            AXES, {name: p.shape for name, p in model.net.named_parameters()}
        ),
    )


def train(
    model: Any, guide: Any, steps: int = 5, lr: float = 0.02
) -> tuple[Any, list[float]]:
    """Runs here and in other processes; both find the same."""
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), Trace_ELBO())
    return guide, [step(svi, number) for number in range(steps)]


def step(svi: SVI, number: int) -> float:
    """Of the same draws whatever came between this step and the last."""
    pyro.set_rng_seed(3 + number)
    return svi.step(X, Y)


def state(guide: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in guide.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """One process, which imports everything anew."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("base", BASES)
def test_guides_of_one_class_train_in_turns_without_touching_each_other(
    base: str,
) -> None:
    """Each as if it were alone."""
    rates, alone = (0.02, 0.05), []
    for rate in rates:
        model, guide = symmetrized(base)
        alone.append(state(train(model, guide.setup(X, Y), lr=rate)[0]))
        pyro.clear_param_store()
    assert differ(*alone)
    pairs = []
    for _ in rates:
        model, guide = symmetrized(base)
        pairs.append((model, guide.setup(X, Y)))
    optimizers = [
        SVI(m, g, pyro.optim.Adam({"lr": rate}), Trace_ELBO())
        for rate, (m, g) in zip(rates, pairs, strict=True)
    ]
    for number in range(5):
        for svi in optimizers:
            step(svi, number)
    for number, (_, guide) in enumerate(pairs):
        assert_same(state(guide), alone[number])


# pickles and copies -------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
def test_a_copy_trains_alone_and_the_original_goes_on(base: str) -> None:
    model, guide = symmetrized(base)
    train(model, guide, steps=2)
    before = state(guide)
    for copied in (copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
        assert_same(state(copied), before)
        train(model, copied, steps=2)
        assert differ(state(copied), before)
        assert_same(state(guide), before)
        assert copied.sample_posterior((4,))["0.bias"].shape == (4, HIDDEN)
    train(model, guide, steps=1)
    assert differ(state(guide), before)


def test_a_guide_over_a_function_in_a_function_travels_once_it_is_set_up() -> None:
    """As stock guides do: it needs its model no longer."""
    inner = network()

    def model(x: Tensor, y: Tensor) -> Any:
        return inner(x, y)

    shapes = {name: parameter.shape for name, parameter in inner.net.named_parameters()}
    guide = AutoUnitBlocks(model, Group.declare(AXES, shapes)).setup(X, Y)
    travelled = pickle.loads(pickle.dumps(guide))
    assert_same(state(travelled), state(guide))
    train(model, travelled)
    assert guide.model is not None


def test_the_data_does_not_travel() -> None:
    sizes = []
    for rows in (20, 5000):
        guide = symmetrized("diagonal")[1].setup(
            torch.randn(rows, 1), torch.randn(rows)
        )
        sizes.append(len(pickle.dumps(guide)))
    assert sizes[1] < 1.1 * sizes[0]


def both(model: Any, guide: Any) -> tuple[Any, list[float]]:
    """A guide that comes set up or not, trained."""
    return train(model, guide.setup(X, Y))


@pytest.mark.cpu
@pytest.mark.parametrize("set_up", [pytest.param(False, marks=pytest.mark.slow), True])
def test_process_workers_train_guides_as_this_process_does(
    set_up: bool, pool: ProcessPoolExecutor
) -> None:
    """A guide that comes back draws and trains further."""
    for base in ("full rank",):
        model, guide = symmetrized(base)
        if set_up:
            guide.setup(X, Y)
        before = state(guide)
        # before set-up, which the worker does with a seed of its own
        torch.manual_seed(5)
        travelled, losses = pool.submit(both, model, guide).result()
        assert_same(state(guide), before)
        if set_up:
            here, expected = train(model, copy.deepcopy(guide))
            assert losses == pytest.approx(expected, rel=1e-4)
            assert_same(state(travelled), state(here))
        for one in (travelled, push_forward(travelled, guide.group.sample())):
            assert all(
                value.isfinite().all() for value in one.sample_posterior((3,)).values()
            )
            train(model, one, steps=1)


# files --------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
def test_a_guide_over_a_gaussian_base_comes_back_from_a_file(
    base: str, tmp_path: Path
) -> None:
    model, guide = symmetrized(base)
    train(model, guide)
    save_guide(guide, tmp_path / "guide.safetensors")
    pyro.set_rng_seed(99)
    loaded = load_guide(tmp_path / "guide.safetensors", device=X.device)
    assert isinstance(loaded, AutoSymmetrized)
    assert loaded.group == guide.group
    assert loaded.estimator == guide.estimator
    points = guide.base.get_posterior().sample((6,)) + 0.1
    found, expected = (
        one.base.get_posterior().log_prob(points) for one in (loaded, guide)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    _, losses = train(model, loaded, steps=60)
    assert sum(losses[-20:]) < sum(losses[:20])


def test_a_guide_over_a_flow_is_refused_by_a_file(tmp_path: Path) -> None:
    model, other = symmetrized("diagonal")
    guide = AutoSymmetrized(
        model, other.group, AutoIAFNormal, InfoNCE(1), hidden_dim=[16]
    )
    with pytest.raises(TypeError, match="isn't Gaussian"):
        save_guide(guide.setup(X, Y), tmp_path / "flow.safetensors")


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal, AutoUnitBlocks])
def test_a_guide_is_set_up_before_it_is_saved(kind: type, tmp_path: Path) -> None:
    model, guide = symmetrized("diagonal")
    args = (model, guide.group) if kind is AutoUnitBlocks else (model,)
    for early in (kind(*args), guide):
        with pytest.raises(ValueError, match="hasn't been set up"):
            save_guide(early, tmp_path / "guide.safetensors")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_moments_that_are_not_finite_are_neither_saved_nor_loaded(
    value: float, tmp_path: Path
) -> None:
    _, guide = symmetrized("diagonal")
    guide.setup(X, Y)
    with torch.no_grad():
        guide.base.loc[0] = value
    path = tmp_path / "guide.safetensors"
    with pytest.raises(ValueError, match=r"loc'\] holds 1 NaN or infinite"):
        save_guide(guide, path)
    assert not path.exists()
    with torch.no_grad():
        guide.base.loc[0] = 0.0
    save_guide(guide, path)
    tensors, header = load_tensors(path, KIND, VERSION)
    tensors["loc"][0] = value
    fields = {name: header[name] for name in ("sites", "group", "estimator")}
    save_tensors(path, KIND, VERSION, tensors, fields)
    with pytest.raises(ValueError, match=r"loc'\] holds 1 NaN or infinite"):
        load_guide(path)
