"""Files that somebody made to lead astray: nothing outside of a store's folder is read or written for them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_symmetric.mcmc import HMC, sample
from pyro_symmetric.mcmc.run import packed, unpacked
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import StoreError, inside, load_json, load_tensors, save_json, save_tensors
from pyro_symmetric.store import FolderRecorder, read_store
from pyro_symmetric.store.files import CHECKPOINT, KIND, TASKS, VERSION, Checkpoint
from pyro_symmetric.store.recorders import LOCK

SECRET = b"secret" * 100
links = pytest.mark.skipif(os.name != "posix", reason="symbolic links of POSIX")


def fill(path: Path, shift: float = 0.0) -> Path:
    with FolderRecorder(path, 4) as recorder:
        recorder.fingerprint = {"seed": shift}
        for k in range(4):
            recorder.append(k, {"w": torch.full((2, 1, 3), k + shift)}, {"lp": torch.ones(2, 1)})
            recorder.commit(k + 1, dict, bytes)
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    return fill(tmp_path / "store")


@pytest.fixture
def secret(tmp_path, path):
    yield tmp_path / "secret"
    assert (tmp_path / "secret").read_bytes() == SECRET


def add(path: Path) -> None:
    with FolderRecorder(path, 5) as recorder:
        recorder.append(4, {"w": torch.zeros(2, 1, 3)}, {"lp": torch.ones(2, 1)})
        recorder.commit(5, dict, bytes)


def rewrite(path: Path, **changes: object) -> None:
    """The checkpoint with another header, and a checksum that is right."""
    tensors, header = load_tensors(path / CHECKPOINT, KIND, VERSION)
    file = header["file"]
    file["entries"][0] |= {name: changes.pop(name) for name in list(changes) if name in file["entries"][0]}
    file |= {name: changes.pop(name) for name in list(changes) if name in file}
    tensors |= {name: changes.pop(name) for name in list(changes) if name in tensors}
    save_tensors(path / CHECKPOINT, KIND, VERSION, tensors, header | changes)


@pytest.mark.parametrize("number", ["/../../secret", "../secret", -1, 1.5, None, [0], True])
def test_a_draws_file_outside_cannot_be_named(number, path, secret):
    rewrite(path, number=number)
    for use in (read_store, Posterior.load, add):
        with pytest.raises(StoreError):
            use(path)


@links
@pytest.mark.parametrize("linked", ["draws-0000.safetensors", "checkpoint.safetensors"])
def test_a_link_that_leads_out_is_refused(linked, path, tmp_path, secret):
    shutil.move(path / linked, tmp_path / "moved")
    (path / linked).symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    for use in (read_store, add):
        with pytest.raises(StoreError, match=r"isn't a file inside of it"):
            use(path)
    assert (tmp_path / "moved").read_bytes() == before


@links
def test_a_link_in_place_of_a_file_to_come_is_not_written_through(path, tmp_path, secret):
    (path / "draws-0001.safetensors").symlink_to(secret)
    add(path)
    assert not (path / "draws-0001.safetensors").is_symlink()


@links
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_place_of_the_lock_is_not_followed(exists, path, tmp_path, secret):
    (path / LOCK).unlink()
    target = secret if exists else tmp_path / "new"
    (path / LOCK).symlink_to(target)
    with pytest.raises(OSError, match=r"\.pyro_symmetric\.lock is a symbolic link, which isn't followed; remove it"):
        FolderRecorder(path, 5)
    assert (path / LOCK).is_symlink()
    assert target.exists() == exists


@pytest.mark.skipif(not hasattr(os, "pread"), reason="needs pread")
def test_another_file_in_place_of_the_lock_is_left_alone(path, secret):
    (path / LOCK).unlink()
    os.link(secret, path / LOCK)
    with pytest.raises(OSError, match="is no lock file but holds other things; it was left as it is"):
        FolderRecorder(path, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"draws": -1},
        {"draws": 10**12},
        {"draws": 4.0},
        {"draws": True},
        {"room": 3},
        {"room": 10**12},
        {"chains": 0},
        {"chains": 3},
        {"chains": 10**30},
        {"shape": [-3]},
        {"shape": [10**9]},
        {"shape": [3.5]},
        {"shape": [2]},
        {"shape": "3"},
        {"code": "load"},
        {"code": "F64"},
        {"code": None},
        {"kind": "methods"},
        {"kind": "statistics"},
        {"name": 5},
        {"name": "v"},
        {"entries": []},
        {"entries": 7},
        {"file": None},
        {"file": 3},
        {"metadata": None},
        {"fingerprint": []},
        {"state_bytes": "all"},
        {"sums": torch.zeros(2, 2, dtype=torch.long)},
        {"sums": torch.zeros(2, 3, dtype=torch.long)},
        {"sums": torch.zeros(2, 2)},
    ],
    ids=str,
)
def test_counts_shapes_and_dtypes_that_cannot_be_are_told(changes, path):
    rewrite(path, **changes)
    for use in (read_store, Posterior.load, add):
        with pytest.raises(StoreError):
            use(path)


def test_two_entries_of_one_name_are_told_by_their_name(path):
    _, header = load_tensors(path / CHECKPOINT, KIND, VERSION)
    first, second = header["file"]["entries"]
    rewrite(path, entries=[first, second | {"kind": first["kind"], "name": first["name"]}])
    for use in (read_store, Posterior.load, add):
        with pytest.raises(StoreError, match="samples/w"):
            use(path)


def tasks(path: Path, **changes: object) -> Path:
    for k in range(2):
        fill(path / f"task-{k:04d}", 10.0 * k)
    note = {"version": VERSION, "num_tasks": 2, "fingerprint": {"seed": 0, "call": {"chains_per_task": 2}}}
    save_json(path / TASKS, note | changes, "list of tasks")
    return path


@pytest.mark.parametrize(
    "changes",
    [{"version": None}, {"version": 99}, {"num_tasks": "../store"}, {"num_tasks": 0}, {"fingerprint": None}],
    ids=str,
)
def test_a_list_of_tasks_that_says_nothing_is_told(changes, tmp_path):
    with pytest.raises(StoreError):
        Posterior.load(tasks(tmp_path / "t", **changes))


@links
def test_a_task_that_lies_elsewhere_is_refused(path, tmp_path):
    folder = tasks(tmp_path / "t")
    shutil.move(folder / "task-0001", tmp_path / "moved")
    (folder / "task-0001").symlink_to(tmp_path / "moved")
    with pytest.raises(StoreError, match=r"isn't a file inside of it"):
        Posterior.load(folder)


def test_a_json_text_that_nests_too_deep_is_told(tmp_path):
    (tmp_path / "deep.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(StoreError, match="damaged"):
        load_json(tmp_path / "deep.json", "list")


@links
def test_links_within_a_folder_may_stay(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "loop").symlink_to("loop")
    assert inside(tmp_path, "b") == tmp_path / "b"
    with pytest.raises(StoreError, match="isn't a file inside"):
        inside(tmp_path, "loop/x")


def sampled(path: Path) -> Posterior:
    def model() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))

    options = {"num_samples": 6, "num_warmup": 2, "num_chains": 2, "seed": 0, "progress": False}
    kernel = HMC(model, step_size=0.5, num_steps=2, adapt_step_size=False, adapt_mass=False)
    return sample(kernel, store=path, **options)


@pytest.mark.parametrize("iteration", [-5, 3, 10**6])
def test_a_run_that_claims_another_iteration_is_refused(iteration, tmp_path):
    sampled(tmp_path / "run")
    checkpoint = Checkpoint.read(tmp_path / "run")
    at, more = unpacked(checkpoint.state, HMC(None))
    more = {name: value for name, value in more.items() if name not in ("iteration", "generator", "state")}
    replace(checkpoint, state=packed(replace(at, iteration=iteration), more)).write(tmp_path / "run")
    with pytest.raises(StoreError, match="iteration"):
        sampled(tmp_path / "run")


def test_a_run_without_a_fingerprint_is_refused(tmp_path):
    sampled(tmp_path / "run")
    replace(Checkpoint.read(tmp_path / "run"), fingerprint={}).write(tmp_path / "run")
    with pytest.raises(StoreError, match="fingerprint"):
        sampled(tmp_path / "run")


@links
def test_a_pipe_in_place_of_draws_is_not_waited_for(path):
    (path / "draws-0000.safetensors").unlink()
    os.mkfifo(path / "draws-0000.safetensors")
    with pytest.raises(StoreError, match="no file"):
        Posterior.load(path)
