"""Files that somebody made to lead astray: nothing outside of a store's folder is read or written for them."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_symmetric import store
from pyro_symmetric.mcmc import HMC, sample
from pyro_symmetric.mcmc.resume import packed, unpacked
from pyro_symmetric.posterior.posterior import Posterior

SECRET = b"secret" * 100
links = pytest.mark.skipif(os.name != "posix", reason="symbolic links of POSIX")


def fill(path: Path, shift: float = 0.0) -> Path:
    with store.Recorder(path, 4) as recorder:
        recorder.fingerprint = {"seed": shift}
        for k in range(4):
            recorder.append(k, {"w": torch.full((2, 3), k + shift)}, {"lp": torch.ones(2)})
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
    with store.Recorder(path, 5) as recorder:
        recorder.append(4, {"w": torch.zeros(2, 3)}, {"lp": torch.ones(2)})
        recorder.commit(5, dict, bytes)


def rewrite(path: Path, **changes: object) -> None:
    """The checkpoint with another header, and a checksum that is right."""
    tensors, header = store.load_tensors(path / store.CHECKPOINT, store.KIND, store.VERSION)
    first = header["arrays"][0]
    first |= {name: changes.pop(name) for name in list(changes) if name in first}
    store.save_tensors(path / store.CHECKPOINT, store.KIND, store.VERSION, tensors, header | changes)


@links
@pytest.mark.parametrize("linked", ["posterior", "posterior/w", "posterior/w/c/0/0/0", "checkpoint.safetensors"])
def test_a_link_that_leads_out_is_refused(linked, path, tmp_path, secret):
    shutil.move(path / linked, tmp_path / "moved")
    (path / linked).symlink_to(tmp_path / "moved")
    for use in (store.read_store, add):
        with pytest.raises(store.StoreError, match=r"isn't a file inside of it"):
            use(path)


@links
@pytest.mark.parametrize("name", ["zarr.json", "posterior/.zarr.json.tmp", "posterior/v/c/0/0/0"])
def test_a_link_in_place_of_a_file_to_come_is_not_written_through(name, tmp_path, secret):
    folder = tmp_path / "new"
    fill(folder)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with contextlib.suppress(OSError, store.StoreError):
        add(folder)


@pytest.mark.parametrize(
    "changes",
    [
        *[{"draws": draws} for draws in (-1, 10**12, True)],
        *[{"shape": shape} for shape in ([10**30, 3], [2, -3], [], "3")],
        *[{"dtype": dtype} for dtype in ("load", "float64")],
        *[{"group": group} for group in ("sample_stats", "../store")],
        *[{"name": name} for name in (5, "v", "../../secret", "..")],
        *[{"arrays": arrays} for arrays in ([], 7)],
        *[{"crc": crc} for crc in (0, "12")],
        {"metadata": None},
        {"fingerprint": 3},
    ],
    ids=str,
)
def test_counts_shapes_and_dtypes_that_cannot_be_are_told(changes, path):
    rewrite(path, **changes)
    for use in (store.read_store, Posterior.load, add):
        with pytest.raises(store.StoreError):
            use(path)


def sampled(path: Path) -> Posterior:
    def model() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))

    options = {"num_samples": 6, "num_warmup": 2, "num_chains": 2, "seed": 0, "progress": False}
    kernel = HMC(model, step_size=0.5, num_steps=2, adapt_step_size=False, adapt_mass=False)
    return sample(kernel, store=path, **options)


def test_a_run_that_claims_another_iteration_or_has_no_fingerprint_is_refused(tmp_path):
    sampled(tmp_path / "run")
    whole = store.Checkpoint.read(tmp_path / "run")
    at, more = unpacked(whole.state, HMC(None))
    others = [replace(whole, state=packed({**at, "iteration": other}, more)) for other in (-5, 3, 10**6)]
    for changed in (*others, replace(whole, fingerprint={})):
        changed.write(tmp_path / "run")
        with pytest.raises(store.StoreError, match=r"iteration|call"):
            sampled(tmp_path / "run")


@links
def test_a_pipe_in_place_of_draws_is_not_waited_for(path):
    (path / "posterior/w/c/0/0/0").unlink()
    os.mkfifo(path / "posterior/w/c/0/0/0")
    with pytest.raises(store.StoreError, match="is missing"):
        Posterior.load(path)
