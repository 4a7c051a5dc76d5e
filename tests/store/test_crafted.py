"""Files that somebody made to lead astray: nothing outside of a store's folder is read or written for them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from pyro_symmetric.checkpoints import read_checkpoints, write_checkpoints
from pyro_symmetric.ensembles import load_ensemble
from pyro_symmetric.samples import Posterior
from pyro_symmetric.storage import StoreError, inside, load_json, load_tensors, save_json, save_tensors
from pyro_symmetric.store import DrawStore, read_store
from pyro_symmetric.store.joined import join_stores
from pyro_symmetric.store.layout import CHECKPOINT, CHUNKS, KIND, LOCK, TASKS, VERSION

SECRET = b"secret" * 100
links = pytest.mark.skipif(os.name != "posix", reason="symbolic links of POSIX")


def fill(path: Path, shift: float = 0.0) -> Path:
    with DrawStore(path) as store:
        for k in range(4):
            store.append({"w": torch.full((2, 3), k + shift)}, {"lp": torch.ones(2)})
            store.commit({}, {}, {})
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    return fill(tmp_path / "store")


@pytest.fixture
def secret(tmp_path, path):
    yield tmp_path / "secret"
    assert (tmp_path / "secret").read_bytes() == SECRET


def go_on(path: Path) -> None:
    with DrawStore(path) as store:
        store.append({"w": torch.zeros(2, 3)}, {"lp": torch.ones(2)})
        store.commit({}, {}, {})


def rewrite(path: Path, **changes: object) -> None:
    """The checkpoint with another header, and a checksum that is right."""
    tensors, header = load_tensors(path / CHECKPOINT, KIND, VERSION)
    column = {name: changes.pop(name) for name in list(changes) if name in header["columns"][0]}
    header["columns"][0] |= column
    save_tensors(path / CHECKPOINT, KIND, VERSION, tensors, header | changes)


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "../secret", "samples/../../secret", "samples/../../store/../secret", "..", ".", "", "a//b"),
        *("~/x", "samples\\..\\..\\secret", "C:secret", "a\0b", 5, None, ["a"]),
    ],
)
def test_a_draws_file_outside_is_refused(name, path, secret):
    if name == "~/x":  # a plain name, of a file that isn't there
        rewrite(path, file=name)
        with pytest.raises(StoreError, match="~/x holds 0 of 4 draws"):
            read_store(path)
        return
    rewrite(path, file=name)
    for use in (read_store, Posterior.load, go_on):
        with pytest.raises(StoreError, match=r"isn't a file inside of it"):
            use(path)
    with pytest.raises(StoreError, match=r"isn't a file inside of it"):
        Posterior.load(path, verify=False)


@links
@pytest.mark.parametrize("linked", ["samples/0000.w.bin", "samples"])
def test_a_link_that_leads_out_is_refused(linked, path, tmp_path, secret):
    shutil.move(path / linked, tmp_path / "moved")
    (path / linked).symlink_to(tmp_path / "moved")
    for use in (read_store, go_on):
        with pytest.raises(StoreError, match=r"isn't a file inside of it"):
            use(path)


@links
def test_a_link_in_place_of_the_records_is_not_written_through(path, tmp_path):
    shutil.move(path / CHUNKS, tmp_path / "moved")
    (path / CHUNKS).symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    with pytest.raises(OSError, match=r"chunks\.bin is a symbolic link, which isn't followed; remove it"):
        go_on(path)
    assert (tmp_path / "moved").read_bytes() == before


@links
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_place_of_the_lock_is_not_followed(exists, path, tmp_path, secret):
    (path / LOCK).unlink()
    target = secret if exists else tmp_path / "new"
    (path / LOCK).symlink_to(target)
    with pytest.raises(OSError, match=r"\.pyro_symmetric\.lock is a symbolic link, which isn't followed; remove it"):
        DrawStore(path)
    assert (path / LOCK).is_symlink()
    assert target.exists() == exists


@pytest.mark.skipif(not hasattr(os, "pread"), reason="needs pread")
def test_another_file_in_place_of_the_lock_is_left_alone(path, secret):
    (path / LOCK).unlink()
    os.link(secret, path / LOCK)
    with pytest.raises(OSError, match="is no lock file but holds other things; it was left as it is"):
        DrawStore(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"draws": -1},
        {"draws": 10**12},
        {"draws": 4.0},
        {"draws": True},
        {"chunks": -1},
        {"chunks": 10**9},
        {"chunks": 3},
        {"token": 2**40},
        {"seal": 0},
        {"seal": "0"},
        {"shape": [2, -3]},
        {"shape": [2, 10**9]},
        {"shape": [2, 3.5]},
        {"shape": [3, 2]},
        {"shape": []},
        {"shape": "23"},
        {"dtype": "load"},
        {"dtype": "float64"},
        {"dtype": None},
        {"kind": "methods"},
        {"name": 5},
        {"columns": []},
        {"columns": 7},
        {"metadata": None},
        {"checkpoint": []},
    ],
    ids=str,
)
def test_counts_shapes_and_dtypes_that_cannot_be_are_told(changes, path):
    rewrite(path, **changes)
    for use in (read_store, Posterior.load, DrawStore):
        with pytest.raises(StoreError):
            use(path)


def tasks(path: Path, names: list[object], **changes: object) -> Path:
    for k in range(2):
        fill(path / f"task-{k}", 10.0 * k)
    join_stores(path, [path / "task-0", path / "task-1"])
    note = {"version": VERSION, "seed": 1, "chains_per_task": 2, "folders": names}
    save_json(path / TASKS, note | changes, "list of tasks")
    return path


@pytest.mark.parametrize("name", ["../store", "/etc", "task-0/..", 3])
def test_a_task_outside_is_refused(name, path, tmp_path):
    with pytest.raises(StoreError, match=r"isn't a file inside of it"):
        read_store(tasks(tmp_path / "t", ["task-0", name]))


@pytest.mark.parametrize("changes", [{"version": None}, {"version": 99}, {"folders": "task-0"}])
def test_a_list_of_tasks_that_says_nothing_is_told(changes, tmp_path):
    with pytest.raises(StoreError):
        read_store(tasks(tmp_path / "t", ["task-0", "task-1"], **changes))


@links
def test_a_joined_copy_that_lies_elsewhere_is_not_read(path, tmp_path):
    folder = tasks(tmp_path / "t", ["task-0", "task-1"])
    expected = read_store(folder).samples["w"].clone()
    shutil.move(folder / "joined", tmp_path / "moved")
    (folder / "joined").symlink_to(tmp_path / "moved")
    assert torch.equal(read_store(folder).samples["w"], expected)


@links
def test_an_ensembles_part_that_lies_elsewhere_is_refused(tmp_path):
    (tmp_path / "e").mkdir()
    save_json(tmp_path / "e/ensemble.json", {"settings": {}, "seed": 1}, "ensemble")
    draws = Posterior({"w": torch.zeros(1, 2)}, rows="independent")
    draws.save(tmp_path / "elsewhere")
    (tmp_path / "e/part-00000.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"part-00000.* isn't a file inside of it"):
        load_ensemble(tmp_path / "e")


def test_a_dtype_of_statistics_is_a_dtype(tmp_path):
    posterior = Posterior({"w": torch.zeros(1, 2)}, {"lp": torch.zeros(1, 2)}, rows="chains")
    write_checkpoints(posterior, tmp_path / "c", progress=False)
    head = load_json(tmp_path / "c/checkpoints.json", "list")
    save_json(tmp_path / "c/checkpoints.json", head | {"dtypes": {"lp": "load"}}, "list")
    with pytest.raises(StoreError, match="unknown dtype, 'load'"):
        read_checkpoints(tmp_path / "c", progress=False)


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
