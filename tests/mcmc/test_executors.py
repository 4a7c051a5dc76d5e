"""Tasks: the same draws wherever they are done."""

import json
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_symmetric.mcmc import HMC, sample
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.posterior import Posterior

from .conftest import assert_same_draws

QUICK = {
    "num_chains": 5,
    "num_warmup": 5,
    "num_samples": 4,
    "chains_per_task": 2,
    "seed": 3,
    "progress": False,
}
X, Y = torch.linspace(-1, 1, 12).reshape(6, 2), torch.linspace(-1, 1, 6)
NET = BayesianModel(
    nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), likelihood="gaussian"
)
# whose parts are all importable by name, so that it travels
KERNEL = HMC(NET, num_steps=2)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws diverged|chains hardly move):RuntimeWarning"
)


def model(y: torch.Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.fixture(scope="module")
def expected() -> Posterior:
    return sample(KERNEL, X, Y, **QUICK)


# here ---------------------------------------------------------------------------------


def test_a_task_is_the_run_of_its_chains_alone_with_a_seed_of_its_own(expected):
    assert (expected.num_chains, expected.num_samples) == (5, 4)
    tasks = expected.metadata["parts"]
    assert [task["chains"] for task in tasks] == [2, 2, 1]
    assert expected.metadata["seed"] == 3
    assert expected.metadata["chains_per_task"] == 2
    json.dumps(expected.metadata, allow_nan=False)
    for task, chains in zip(
        tasks, (slice(0, 2), slice(2, 4), slice(4, 5)), strict=True
    ):
        options = {
            **QUICK,
            "seed": task["seed"],
            "num_chains": task["chains"],
            "chains_per_task": None,
        }
        alone = sample(KERNEL, X, Y, **options)
        for site, value in alone.samples.items():
            assert torch.equal(value, expected.samples[site][chains])
    first, second = expected.samples["0.weight"][:2], expected.samples["0.weight"][2:4]
    assert not torch.equal(first, second)


def test_without_a_seed_the_global_generator_decides_on_the_tasks(tmp_path):
    options = {**QUICK, "seed": None}
    pyro.set_rng_seed(5)
    first = sample(KERNEL, X, Y, **options)
    pyro.set_rng_seed(5)
    assert_same_draws(sample(KERNEL, X, Y, **options), first)
    pyro.set_rng_seed(5)
    assert_same_draws(sample(KERNEL, X, Y, store=tmp_path / "s", **options), first)
    pyro.set_rng_seed(6)
    # the store remembers the seed
    assert_same_draws(sample(KERNEL, X, Y, store=tmp_path / "s", **options), first)


def test_starting_points_go_to_the_task_of_their_chain(tmp_path):
    def draw(count):
        return {"mean": torch.arange(count) + 0.5}

    options = {**QUICK, "num_warmup": 0, "num_samples": 1}
    still = HMC(model, step_size=1e-9, num_steps=1, adapt_step_size=False)
    for initial in (draw, draw(5), sample(still, Y, initial=draw, **options)):
        posterior = sample(still, Y, initial=initial, **options)
        assert torch.allclose(posterior.samples["mean"][:, 0], draw(5)["mean"])
    same = sample(still, Y, initial={"mean": torch.tensor(2.0)}, **options)
    assert torch.allclose(same.samples["mean"], torch.tensor(2.0))


def test_an_error_of_one_task_names_its_chains_and_leaves_what_was_done(tmp_path):
    starts = {"mean": torch.tensor([0.0, 0.0, 0.0, torch.nan, 0.0])}
    with pytest.raises(ValueError, match="mean") as error:
        sample(
            HMC(model, num_steps=2), Y, initial=starts, store=tmp_path / "s", **QUICK
        )
    assert error.value.__notes__[-1] == "in the task of the chains from 2 on"
    assert not Posterior.load(tmp_path / "s" / "task-0000").metadata["interrupted"]


def test_threads_give_the_same_draws_and_leave_the_number_of_pytorchs_threads_as_it_was(
    expected,
):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with ThreadPoolExecutor(2) as threads:
            for _ in range(3):
                assert_same_draws(
                    sample(KERNEL, X, Y, executor=threads, **QUICK), expected
                )
            assert {
                threads.submit(torch.get_num_threads).result() for _ in range(8)
            } == {2}
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


# stores -------------------------------------------------------------------------------


def joined(store: Path) -> Posterior:
    return Posterior.concat([Posterior.load(task) for task in sorted(store.iterdir())])


def test_a_store_of_tasks_goes_on(expected, tmp_path):
    fewer = sample(KERNEL, X, Y, store=tmp_path / "s", **{**QUICK, "num_samples": 2})
    assert torch.equal(fewer.samples["0.bias"], expected.samples["0.bias"][:, :2])
    assert_same_draws(sample(KERNEL, X, Y, store=tmp_path / "s", **QUICK), expected)
    assert_same_draws(joined(tmp_path / "s"), expected)
    part = Posterior.load(tmp_path / "s" / "task-0001")
    assert torch.equal(part.samples["0.bias"], expected.samples["0.bias"][2:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chains_per_task": 3}, "num_chains: 2 there, 3 here"),
        ({"seed": 4}, "seed: "),
        ({"chains_per_task": None}, "is no draw store but holds task"),
        ({"resume": False}, "is a draw store already"),
    ],
)
def test_another_runs_tasks_are_refused(change, message, expected, tmp_path):
    sample(KERNEL, X, Y, store=tmp_path / "s", **QUICK)
    with pytest.raises((ValueError, OSError), match=message):
        sample(KERNEL, X, Y, store=tmp_path / "s", **{**QUICK, **change})
    assert_same_draws(joined(tmp_path / "s"), expected)


@pytest.mark.parametrize("at", [3, 12])
def test_ctrl_c_keeps_the_tasks_that_finished(at, expected, tmp_path, monkeypatch):
    step, left = HMC.step, [at]  # a task takes nine steps

    def interrupting(self, density, state):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return step(self, density, state)

    monkeypatch.setattr(HMC, "step", interrupting)
    if at < 9:
        with pytest.raises(
            KeyboardInterrupt,
            match=r"before any of 3 tasks had finished\. What is done is kept",
        ):
            sample(KERNEL, X, Y, store=tmp_path / "s", **QUICK)
    else:
        with pytest.warns(RuntimeWarning, match="2 of 5 chains; the same call resumes"):
            posterior = sample(KERNEL, X, Y, store=tmp_path / "s", **QUICK)
        assert torch.equal(posterior.samples["0.bias"], expected.samples["0.bias"][:2])
    assert_same_draws(sample(KERNEL, X, Y, store=tmp_path / "s", **QUICK), expected)


# other processes ----------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
# of Python 3.12, on forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_pool_gives_the_draws_of_one_process(expected, tmp_path):
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as forked:
        assert_same_draws(
            sample(KERNEL, X, Y, executor=forked, store=tmp_path / "s", **QUICK),
            expected,
        )
        more = sample(
            KERNEL,
            X,
            Y,
            executor=forked,
            store=tmp_path / "s",
            **{**QUICK, "num_samples": 6},
        )
        assert more.num_samples == 6  # the pool's workers didn't keep the store's lock


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # dask's and its libraries' own
def test_dask_gives_the_draws_of_one_process(expected, tmp_path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert_same_draws(
            sample(KERNEL, X, Y, executor=client.get_executor(), **QUICK), expected
        )
        stored = sample(
            KERNEL, X, Y, executor=client.get_executor(), store=tmp_path / "s", **QUICK
        )
    assert_same_draws(stored, expected)
