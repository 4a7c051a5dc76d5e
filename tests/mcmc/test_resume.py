"""A broken run that is taken up gives, draw for draw, what an unbroken one gives;
another run's store is refused.
"""

import errno
import functools
import io
import os
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_symmetric.mcmc as mcmc
import pyro_symmetric.store as recorders
from pyro_symmetric.mcmc import HMC, SGHMC, sample
from pyro_symmetric.mcmc.resume import VERSIONS
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import LOCK, Checkpoint, Recorder, StoreError, read_store

from .conftest import Killed, assert_same_draws

QUICK = {
    "num_chains": 3,
    "num_warmup": 24,
    "num_samples": 8,
    "thinning": 2,
    "progress": False,
}
TOTAL = 24 + 2 * 8
SETTINGS = {
    "HMC": {"num_steps": 2},
    "Walk": {},
    "NUTS": {"max_tree_depth": 2, "full_mass": True},
    "AdaptiveHMC": {"max_steps": 4},
    "MCLMC": {"max_steps": 4},
}
KERNELS = sorted(  # all there are
    name
    for name in mcmc.__all__
    if isinstance(kind := getattr(mcmc, name), type)
    and issubclass(kind, mcmc.Kernel)
    and kind is not mcmc.Kernel
)


def model(y: torch.Tensor) -> None:
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    b = pyro.sample("b", dist.Gamma(2.0, 1.0))
    c = pyro.sample("c", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a.sum(-1) + c[..., 0], b), obs=y)


Y = torch.linspace(-1, 1, 7)
# Quick runs are no good ones.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws diverged|chains hardly move):RuntimeWarning"
)


@dataclass(frozen=True, eq=False)
class Walked:
    """The quantity that the kernel below learns."""

    step_size: torch.Tensor
    count: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class Walk(mcmc.Kernel):
    """Metropolis's random walk, whose step warm-up adapts."""

    model: Callable[..., Any]

    def init(self, density, z, num_warmup, generator):
        return mcmc.State(
            z, 0 * z, density.energy(z), 0 * z, Walked(z.new_tensor(1.0)), generator
        )

    def step(self, density, state):
        z = state.z + state.tuning.step_size * torch.randn(
            state.z.shape, generator=state.generator
        )
        energy = density.energy(z)
        accept = (
            torch.rand(len(z), generator=state.generator)
            < (state.energy - energy).exp()
        )
        z, energy = (
            torch.where(accept[:, None], z, state.z),
            torch.where(accept, energy, state.energy),
        )
        return replace(
            state, z=z, energy=energy, statistics={"acceptance_rate": accept.float()}
        )

    def adapt(self, density, state, iteration, num_warmup):
        factor = (state.statistics["acceptance_rate"].mean() - 0.3).exp()
        tuning = Walked(state.tuning.step_size * factor, state.tuning.count + 1)
        return replace(state, tuning=tuning)


def hmc(**settings) -> HMC:
    return HMC(model, **SETTINGS["HMC"], **settings)


def run(name: str, **options) -> Posterior:
    """A quick run of a kernel: HMC and the one above on a traced model with constrained
    sites, the others on a network, which is faster; with mini-batches for those that
    take them, so that their order is part of the state."""
    kind = Walk if name == "Walk" else getattr(mcmc, name)
    options = {**QUICK, **options}
    with warnings.catch_warnings():
        # of divergences and interruptions
        warnings.simplefilter("ignore", RuntimeWarning)
        if name in ("HMC", "Walk"):
            return sample(kind(model, **SETTINGS[name]), Y, **options)
        torch.manual_seed(0)
        net = BayesianModel(
            nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)),
            likelihood="gaussian",
        )
        settings = {"batch_size": 5, "step_size": 1e-3} if kind.subsampled else {}
        settings |= SETTINGS.get(name, {"num_steps": 2})
        return sample(
            kind(net, **settings),
            torch.randn(12, 2),
            torch.randn(12),
            engine="eager",
            **options,
        )


@functools.cache
def unbroken(name: str, seed: int) -> Posterior:
    """The run that several tests compare with."""
    return run(name, seed=seed)


@pytest.mark.parametrize(
    ("name", "seed"),
    [*((name, 7) for name in (*KERNELS, "Walk")), ("HMC", None), ("SGHMC", None)],
)
def test_a_run_broken_many_times_gives_the_unbroken_draws(
    name, seed, tmp_path, break_after
):
    pyro.set_rng_seed(1)
    whole = run(name) if seed is None else unbroken(name, seed)
    pyro.set_rng_seed(1)
    broken = 0
    # in warm-up, at its end, between draws that are thinned out
    for steps in [1, 11, 14, 2, 10, 3, 100]:
        break_after(steps)
        try:
            posterior = run(name, seed=seed, store=tmp_path / "s")
        except Killed:
            broken += 1
            # a new process's generators stand anywhere
            pyro.set_rng_seed(1000 + broken)
    assert broken == 6
    assert_same_draws(posterior, whole)
    assert not posterior.metadata["interrupted"]
    assert_same_draws(Posterior.load(tmp_path / "s"), whole)


def test_a_hook_sees_every_iteration_when_it_is_done():
    seen = {}
    posterior = run(
        "HMC",
        seed=7,
        hook=lambda iteration, weights: seen.update({iteration: weights["a"]}),
    )
    assert list(seen) == list(range(TOTAL))
    kept = torch.stack([seen[iteration] for iteration in range(25, TOTAL, 2)], 1)
    assert torch.equal(posterior.samples["a"], kept)
    ended = []

    def ends(iteration, weights):
        ended.append(iteration)
        if iteration == 30:
            raise KeyboardInterrupt

    assert run("HMC", seed=7, hook=ends).num_samples == 3
    assert ended[-1] == 30


@pytest.mark.parametrize("name", ["HMC", "SGHMC"])
def test_draws_added_later_are_those_of_a_longer_run(name, tmp_path):
    whole = unbroken(name, 7)
    first = run(name, seed=7, num_samples=3, store=tmp_path / "s")
    assert torch.equal(
        next(iter(first.samples.values())), next(iter(whole.samples.values()))[:, :3]
    )
    more = run(name, seed=7, store=tmp_path / "s")
    assert_same_draws(more, whole)
    # nothing is done, nothing is lost
    fewer = run(name, seed=7, num_samples=5, store=tmp_path / "s")
    assert fewer.num_samples == 5
    assert_same_draws(Posterior.load(tmp_path / "s"), whole)


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
# the child uses one thread of PyTorch's
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("name", ["NUTS", "pSGLD"])
def test_a_process_that_is_killed_leaves_a_run_that_resumes(
    name, tmp_path, monkeypatch
):
    """``kill -9`` in warm-up, at its end and in sampling; ``kill_and_resume`` of the
    benchmarks does it at any time.
    """
    whole, commit = unbroken(name, 7), Recorder.commit
    monkeypatch.setattr(recorders, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(recorders, "COMMIT_SHARE", 1e9)
    for commits in (3, 18, 12):
        child = os.fork()
        if child == 0:

            def dying(*call, left=[commits]):  # noqa: B006 (one list for all calls)
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                commit(*call)

            Recorder.commit = dying
            torch.set_num_threads(1)
            try:
                run(name, seed=7, store=tmp_path / "s")
            finally:
                os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert_same_draws(run(name, seed=7, store=tmp_path / "s"), whole)


@pytest.fixture
def limit_file_size():
    """``limit(bytes)``: the system refuses to let any file grow further, as a full disk
    does; ``None``: as before.
    """
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, before if size is None else (size, before[1])
        )

    yield limit
    limit(None)


def wide() -> None:
    pyro.sample("w", dist.Normal(torch.zeros(1000), 1.0).to_event(1))


@pytest.mark.parametrize("room", [0, 100, 200_000])
def test_a_disk_that_is_full_is_told_and_the_run_goes_on_when_there_is_room(
    tmp_path, limit_file_size, room
):
    """Room for nothing, not even the lock's text; for that but no checkpoint; for
    checkpoints but not all draws.
    """
    options = {
        "num_chains": 3,
        "num_warmup": 5,
        "seed": 1,
        "progress": False,
        "store": tmp_path / "s",
    }
    kernel = HMC(wide, step_size=0.1, num_steps=1)
    whole = sample(kernel, num_samples=40, **{**options, "store": None})
    if room == 200_000:
        sample(kernel, num_samples=2, **options)
    limit_file_size(room)
    with pytest.raises(
        OSError,
        match=r"the draw store .* (couldn't|can't) be written: .*File too large",
    ) as error:
        sample(kernel, num_samples=40, **options)
    limit_file_size(None)
    assert error.value.errno == errno.EFBIG
    if room == 200_000:
        assert "2 draws of each chain are safe" in str(error.value)
        assert torch.equal(
            read_store(tmp_path / "s", verify=True)[0]["w"], whole.samples["w"][:, :2]
        )
    assert_same_draws(sample(kernel, num_samples=40, **options), whole)
    # nothing half-written is left behind
    assert not list((tmp_path / "s").glob(".*.tmp"))


def test_ctrl_c_in_warm_up_keeps_it_and_says_how_to_go_on(tmp_path, break_after):
    break_after(10, KeyboardInterrupt)
    with pytest.raises(
        KeyboardInterrupt,
        match=r"after 9 of 24 iterations of warm-up; they are kept in .*the same call "
        r"resumes",
    ):
        run("HMC", seed=1, store=tmp_path / "s")
    with pytest.raises(ValueError, match="no draws yet"):
        Posterior.load(tmp_path / "s")
    assert_same_draws(run("HMC", seed=1, store=tmp_path / "s"), unbroken("HMC", 1))


def test_ctrl_c_in_the_last_commit_loses_no_draw(tmp_path, monkeypatch):
    commit = Recorder.commit

    def interrupted(recorder, draws, *parts):
        if draws == QUICK["num_samples"]:
            raise KeyboardInterrupt
        commit(recorder, draws, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "commit", interrupted)
        posterior = run("HMC", seed=7, store=tmp_path / "s")
    assert_same_draws(posterior, unbroken("HMC", 7))
    assert_same_draws(run("HMC", seed=7, store=tmp_path / "s"), unbroken("HMC", 7))


# another run --------------------------------------------------------------------------


def other_sites() -> None:
    pyro.sample("a", dist.Normal(torch.zeros(3), 1.0).to_event(1))


CHANGES = {
    "kernel: 'HMC' there, 'SGHMC' here": lambda: (
        SGHMC(model, step_size=0.1),
        (Y,),
        {},
    ),
    "settings.target_accept_prob: 0.9 there, 0.8 here": lambda: (
        hmc(target_accept_prob=0.8),
        (Y,),
        {},
    ),
    "data: ": lambda: (hmc(), (Y + 1e-3,), {}),
    r"sites.a: \[2\] there, \[3\] here": lambda: (
        HMC(other_sites, num_steps=2),
        (),
        {},
    ),
    "seed: 1 there, 2 here": lambda: (hmc(), (Y,), {"seed": 2}),
    "dtype: 'float32' there, 'float64' here": lambda: (
        hmc(),
        (Y,),
        {"dtype": torch.float64},
    ),
    "initial: None there, 'prior' here": lambda: (hmc(), (Y,), {"initial": "prior"}),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "s"
    run("HMC", seed=1, store=path)
    return path


def bytes_of(folder):
    return {
        f.name: f.read_bytes()
        for f in sorted(folder.rglob("*"))
        if f.is_file() and f.name != LOCK
    }


@pytest.mark.parametrize("difference", CHANGES)
def test_a_store_of_another_run_is_refused_even_if_it_is_insisted_on_and_left_as_it_is(
    difference, stored
):
    kernel, data, options = CHANGES[difference]()
    before = bytes_of(stored)
    with pytest.raises(
        ValueError, match=f"(?s)holds another run; it was left as it is.*{difference}"
    ):
        sample(
            kernel, *data, store=stored, resume=True, **{"seed": 1, **QUICK, **options}
        )
    assert bytes_of(stored) == before


def test_another_version_is_refused_unless_it_is_insisted_on(
    stored, tmp_path, monkeypatch, break_after
):
    break_after(30)
    with pytest.raises(Killed):
        run("HMC", seed=1, store=tmp_path / "s")
    monkeypatch.setitem(VERSIONS, "torch", "99.0")
    with pytest.raises(
        ValueError, match=r"torch: .* there, '99.0' here.*pass resume=True"
    ):
        run("HMC", seed=1, store=tmp_path / "s")
    with pytest.warns(
        RuntimeWarning, match=r"may differ from an unbroken run's.*99\.0"
    ):
        posterior = sample(hmc(), Y, seed=1, store=tmp_path / "s", resume=True, **QUICK)
    assert_same_draws(posterior, Posterior.load(stored))


def test_resume_false_wants_a_new_folder_and_true_an_old_one(stored, tmp_path):
    with pytest.raises(FileExistsError, match="is a draw store already"):
        run("HMC", seed=1, store=stored, resume=False)
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        run("HMC", seed=1, store=tmp_path / "s", resume=True)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("store", ["", " ", 3])
def test_a_store_without_a_name_is_refused(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError), match=r"store is .* path of a"):
        run("HMC", seed=1, store=store)
    assert not list(tmp_path.iterdir())


def test_a_chunk_of_chains_that_was_chosen_is_kept(tmp_path):
    run("HMC", seed=1, chain_chunk=2, num_samples=2, store=tmp_path / "s")
    assert (
        run("HMC", seed=1, num_samples=3, store=tmp_path / "s").metadata["chain_chunk"]
        == 2
    )
    with pytest.raises(ValueError, match="chain_chunk: 2 there, 3 here"):
        run("HMC", seed=1, chain_chunk=3, store=tmp_path / "s")


def test_a_kernels_state_that_cannot_be_stored_is_told(tmp_path):
    class Odd(HMC):
        def init(self, density, z, num_warmup, generator):
            state = super().init(density, z, num_warmup, generator)
            return replace(state, tuning=replace(state.tuning, step_size=odd))

    for odd in (print, np.ones(2)):  # noqa: B007 (init above takes it)
        with pytest.raises(TypeError, match="what a store can't keep"):
            sample(Odd(model), Y, store=tmp_path / "s", **QUICK)


def test_sites_that_no_store_can_hold_are_told_before_the_warm_up(tmp_path):
    def model():
        pyro.sample("..", dist.Normal(0.0, 1.0))

    def hook(i, samples):
        raise AssertionError("an iteration was made")

    with pytest.raises(ValueError, match=r"a store can't keep .*'\.\.'"):
        sample(
            HMC(model),
            num_samples=5,
            num_warmup=5,
            num_chains=2,
            hook=hook,
            store=tmp_path / "run",
            progress=False,
        )


class Crafted:
    def __reduce__(self):
        return os.system, ("touch crafted",)


def test_a_state_that_somebody_made_runs_no_code_and_builds_no_other_classes(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run("HMC", seed=1, num_samples=2, store=tmp_path / "s")
    checkpoint = Checkpoint.read(tmp_path / "s")
    for bad in (
        Crafted(),
        Posterior({"w": torch.ones(1, 2)}, kind="chains"),
        HMC(model),
        3,
        {"state": 1},
        [],
        None,
    ):
        content = io.BytesIO()
        torch.save(bad, content)
        replace(checkpoint, state=content.getvalue()).write(tmp_path / "s")
        with pytest.raises(StoreError, match=r"is damaged|no run that could resume"):
            run("HMC", seed=1, store=tmp_path / "s")
    replace(checkpoint, state=b"no pickle").write(tmp_path / "s")
    with pytest.raises(StoreError, match="is damaged"):
        run("HMC", seed=1, store=tmp_path / "s")
    assert not (tmp_path / "crafted").exists()


@pytest.mark.cpu
# of Python 3.12, on forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_kernel_of_ones_own_runs_in_a_pool(tmp_path):
    options = {"seed": 3, "chains_per_task": 2, "num_chains": 4}
    cut = run("Walk", **options)
    with ThreadPoolExecutor(2) as threads:
        assert_same_draws(run("Walk", executor=threads, **options), cut)
    if hasattr(os, "fork"):
        with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
            assert_same_draws(
                run("Walk", executor=pool, store=tmp_path / "tasks", **options), cut
            )


class Merging(Walk):
    """Returns one chain for all."""

    def step(self, density, state):
        moved = super().step(density, state)
        return replace(moved, z=moved.z[:1])


def test_a_kernel_that_changes_the_shape_of_the_chains_is_refused():
    with pytest.raises(ValueError, match=r"z of shape \(1, \d+\); it must keep"):
        sample(Merging(model), Y, num_chains=3, num_warmup=2, num_samples=2, seed=0)
