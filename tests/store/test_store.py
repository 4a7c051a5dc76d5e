"""The draw store: what is committed is there, to the byte; what isn't counts for
nothing; everybody else reads it.
"""

import contextlib
import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from safetensors import safe_open

from pyro_symmetric import store
from pyro_symmetric.mcmc import HMC, sample
from pyro_symmetric.mcmc.resume import pack, unpack
from pyro_symmetric.posterior.posterior import Posterior

ROOM = 7


def draw(
    k: int, device: str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The k-th draw of 3 chains, of sites in all dtypes and strides that samplers
    make.
    """
    w = torch.randn(
        3, 2, 4, generator=torch.Generator(torch.empty(0).device).manual_seed(k)
    ).to(device)
    samples = {
        "w": w,
        "a/b.c": w[:, 0, 0].double(),
        "turned": w.mT,
        "none": w[:, :0, 0],
        "half": w[:, :, 1].half(),
    }
    statistics = {
        "diverging": w[:, 0, 0] > 0,
        "n_steps": torch.tensor([k, 2 * k, 3 * k]),
        "one": w[0, 0, 0].expand(3),
    }
    return samples, statistics


def check(found: store.Contents, draws: int) -> None:
    every = [draw(k) for k in range(draws)]
    for kind in (0, 1):
        assert list(found[kind]) == list(every[0][kind])
        for name, value in found[kind].items():
            expected = torch.stack([one[kind][name] for one in every], 1).cpu()
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected), name


def fill(recorder: store.Recorder, begin: int, end: int) -> None:
    for k in range(begin, end):
        recorder.append(k, *draw(k))


def commit(
    recorder: store.Recorder, draws: int, state: bytes = b"", **metadata: object
) -> None:
    recorder.commit(draws, lambda: metadata, lambda: state)


def fill_and_commit(recorder: store.Recorder, begin: int, end: int) -> None:
    fill(recorder, begin, end)
    commit(recorder, end)


@pytest.fixture(
    params=[2**22, 300, 0], ids=["kept back", "few kept back", "none kept back"]
)
def path(tmp_path, request, monkeypatch):
    """A store of 5 draws in two commits, and 2 draws more that no commit counts."""
    monkeypatch.setattr(store, "BLOCK", request.param)
    with store.Recorder(tmp_path / "store", ROOM) as recorder:
        fill(recorder, 0, 3)
        commit(recorder, 3, b"one", kernel="test")
        fill(recorder, 3, 5)
        commit(recorder, 5, b"two", kernel="test", more=[1])
        fill(recorder, 5, 7)
    return tmp_path / "store"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(folder)): f.read_bytes()
        for f in folder.rglob("*")
        if f.is_file() and f.name != store.LOCK
    }


def test_what_was_committed_is_read_back_in_chains_by_draws_and_nothing_else(path):
    found = store.read_store(path)
    check(found, 5)
    assert found[2] == {"kernel": "test", "more": [1]}
    assert (Posterior.load(path).num_chains, Posterior.load(path).num_samples) == (3, 5)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("block", [0, 300, 2**20])
def test_memory_gives_back_what_a_folder_does(device, block, monkeypatch):
    monkeypatch.setattr(store, "BLOCK", block)
    recorder = store.Recorder(None, ROOM)
    for k in (0, 1, 2, 2, 3, 4, 5):  # one twice, as after an interruption
        recorder.append(k, *draw(k, device))
    assert recorder.next_commit > time.perf_counter() + 1e9
    check(recorder.draws(5, {}), 5)
    assert recorder.diverged == sum(
        int(draw(k)[1]["diverging"].sum()) for k in range(5)
    )


@pytest.mark.filterwarnings("ignore")  # of zarr and xarray
def test_xarray_opens_the_folder_as_it_is(path):
    zarr, xarray = pytest.importorskip("zarr"), pytest.importorskip("xarray")
    tree = xarray.open_datatree(path, engine="zarr")
    found = store.read_store(path)
    assert dict(tree["posterior"].sizes) | {"chain": 3, "draw": 5} == dict(
        tree["posterior"].sizes
    )
    for group, values in zip(("posterior", "sample_stats"), found[:2], strict=True):
        for name, value in values.items():
            shown = name.replace("/", "%2F")
            assert np.array_equal(tree[group][shown].values, value.numpy())
    assert zarr.open_group(path, mode="r")["posterior/w"].shape == (3, 5, 2, 4)


def test_draws_are_mapped_and_changes_to_them_stay_in_memory(path):
    samples = store.read_store(path)[0]
    samples["w"].zero_()
    check(store.read_store(path), 5)
    if Path("/proc/self/maps").exists():
        assert str(path / "posterior/w/c/0") in Path("/proc/self/maps").read_text()


def test_a_store_resumes_from_its_last_commit_and_counts_nothing_that_came_after(path):
    with store.Recorder(path, 12) as recorder:  # for more draws than there was room
        assert (recorder.last.draws, recorder.last.state) == (5, b"two")
        recorder.append(5, *draw(99))
        recorder.append(5, *draw(5))
        fill(recorder, 6, 9)
        check(store.read_store(path), 5)  # a reader meanwhile sees what is committed
        commit(recorder, 9, b"three")
        fill(recorder, 9, 12)
    check(store.read_store(path), 9)


def test_an_interruption_in_the_middle_of_writing_leaves_no_draw_out(path, monkeypatch):
    pwrite, left = os.pwrite, [4]

    def interrupted(file, data, at):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return pwrite(file, data[:5], at)  # and the system takes less than it is given

    monkeypatch.setattr(os, "pwrite", interrupted)
    with store.Recorder(path, ROOM) as recorder:
        fill(recorder, 5, 6)
        with pytest.raises(KeyboardInterrupt):
            commit(recorder, 6)
        fill(recorder, 6, 7)
        commit(recorder, 7)
    check(store.read_store(path), 7)


def test_opening_a_store_changes_nothing_and_a_commit_without_new_draws_keeps_the_old_ones(
    path,
):
    before = snapshot(path)
    with store.Recorder(path, 100):
        pass
    assert snapshot(path) == before
    with store.Recorder(path, ROOM) as recorder:
        commit(recorder, 5, b"nine")
    check(store.read_store(path), 5)
    assert store.Checkpoint.read(path).state == b"nine"


def test_bytes_that_no_commit_counts_and_what_others_read_may_be_anything(path):
    with open(path / "posterior/w/c/0/0/0/0", "r+b") as content:
        content.seek(5 * 3 * 32)
        content.write(b"x" * 32)
    for file in path.rglob("zarr.json"):
        file.write_text("{")
    check(store.read_store(path), 5)


def test_what_no_store_can_hold_and_other_sites_than_before_are_told(path, tmp_path):
    with store.Recorder(tmp_path / "new", 1) as recorder:
        recorder.append(0, {"w": torch.ones(1, 1, dtype=torch.complex64)}, {})
        with pytest.raises(ValueError, match="complex64"):
            commit(recorder, 1)
    for name in ("", ".", ".."):  # which Zarr has for other folders
        with pytest.raises(ValueError, match="a store can't keep"):
            Posterior({name: torch.ones(1, 2)}, kind="chains").save(
                tmp_path / "posterior"
            )
    assert not (tmp_path / "posterior").exists()
    with store.Recorder(path, ROOM) as recorder:
        recorder.append(5, {"w": torch.zeros(3)}, {})
        with pytest.raises(ValueError, match="other sites or statistics"):
            commit(recorder, 6)
    check(store.read_store(path), 5)


# places that can't be written ---------------------------------------------------------


def test_tensors_and_a_header_come_back_and_what_stood_there_survives_a_failed_write(
    tmp_path,
):
    file, shared = tmp_path / "x", torch.arange(6.0)
    tensors = {"a": shared[:3], "b": shared[3:], "c": torch.ones(2, 2).t()}
    store.write_whole(file, b"old")
    with pytest.raises(TypeError, match="JSON"):
        store.save_tensors(file, "thing", 2, tensors, {"bad": object()})
    assert file.read_text() == "old"
    store.save_tensors(file, "thing", 2, tensors, {"n": [1, None, "é"]})
    assert list(tmp_path.iterdir()) == [file]
    loaded, header = store.load_tensors(file, "thing", 2)
    assert header == {"n": [1, None, "é"]}
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())
    with safe_open(file, framework="pt") as opened:  # as everybody reads it
        assert torch.equal(opened.get_tensor("b"), tensors["b"])
    with pytest.raises(store.StoreError, match="no other"):
        store.load_tensors(file, "other", 2)


def test_a_newer_version_is_refused(path):
    store.save_tensors(
        path / store.CHECKPOINT, store.KIND, store.VERSION + 1, {}, {"anything": 1}
    )
    before = snapshot(path)
    for use in (store.read_store, lambda p: store.Recorder(p, ROOM)):
        with pytest.raises(ValueError, match="newer pyro_symmetric"):
            use(path)
    assert snapshot(path) == before


def test_files_and_folders_of_other_things_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError):
        store.Recorder(tmp_path / "thesis.tex", 1)
    with pytest.raises(
        FileExistsError, match=r"is no draw store but holds thesis\.tex"
    ):
        store.Recorder(tmp_path, 1)
    for taken in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(
            FileExistsError, match="something else than a saved posterior"
        ):
            Posterior({"w": torch.ones(1, 2)}, kind="chains").save(taken)
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {
        "thesis.tex": "mine"
    }


def in_child(action: Callable[[], object]) -> int:
    """Start another process that does something, and then sleeps until it is killed."""
    child = os.fork()
    if child == 0:
        try:
            action()
            time.sleep(60)
        finally:
            os._exit(1)
    return child


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
# the child runs no thread of PyTorch's
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_one_process_at_a_time_writes_and_the_lock_goes_with_a_killed_one(path):
    ours, theirs = os.pipe()

    def hold():
        global held
        held = store.Recorder(path, 1)
        os.write(theirs, b"locked")

    child = in_child(hold)
    try:
        assert os.read(ours, 10) == b"locked"
        with pytest.raises(BlockingIOError, match="written by another run"):
            store.Recorder(path, 1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
    recorder = store.Recorder(path, 1)
    # a worker that was forked meanwhile doesn't keep the lock
    child = in_child(lambda: None)
    try:
        recorder.__exit__()
        store.Recorder(path, 1).__exit__()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_is_told_and_nothing_committed_is_lost(path, monkeypatch, call):
    """For room, in the middle of a file, and when it is to reach the disk."""
    whole, room = getattr(os, call), [2]

    def full(*arguments):
        if call == "pwrite" and room[0]:
            room[0] -= 1  # it takes what fits, then complains, as Linux does
            return whole(arguments[0], arguments[1][:3], arguments[2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with store.Recorder(path, 20) as recorder:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(
                OSError,
                match=r"No space left on device. 5 draws of each chain are safe",
            ) as error:
                fill_and_commit(recorder, 5, 20)
        assert error.value.errno == errno.ENOSPC
        assert recorder.failed
    check(store.read_store(path), 5)
    with store.Recorder(path, 20) as recorder:
        assert recorder.last.state == b"two"
        fill(recorder, 5, 20)
        commit(recorder, 20)
    check(store.read_store(path), 20)


# files that somebody made to lead astray: nothing outside of a store's folder is read o

links = pytest.mark.skipif(os.name != "posix", reason="symbolic links of POSIX")


def add(path: Path, begin: int = 4, end: int = 5) -> None:
    with store.Recorder(path, end) as recorder:
        recorder.fingerprint = {"seed": 0.0}
        for k in range(begin, end):
            recorder.append(
                k, {"w": torch.full((2, 3), float(k))}, {"lp": torch.ones(2)}
            )
            commit(recorder, k + 1)


@pytest.fixture
def small(tmp_path) -> Path:
    add(tmp_path / "store", 0, 4)
    return tmp_path / "store"


def rewrite(path: Path, **changes: object) -> None:
    """The checkpoint with another header, and a checksum that is right."""
    tensors, header = store.load_tensors(
        path / store.CHECKPOINT, store.KIND, store.VERSION
    )
    first = header["arrays"][0]
    first |= {name: changes.pop(name) for name in list(changes) if name in first}
    store.save_tensors(
        path / store.CHECKPOINT, store.KIND, store.VERSION, tensors, header | changes
    )


@links
@pytest.mark.parametrize(
    "linked",
    ["posterior", "posterior/w", "posterior/w/c/0/0/0", "checkpoint.safetensors"],
)
def test_a_link_that_leads_out_is_refused(linked, small, tmp_path):
    shutil.move(small / linked, tmp_path / "moved")
    (small / linked).symlink_to(tmp_path / "moved")
    for use in (store.read_store, add):
        with pytest.raises(store.StoreError, match=r"isn't a file inside of it"):
            use(small)


@links
@pytest.mark.parametrize(
    "name", ["zarr.json", "posterior/.zarr.json.tmp", "posterior/v/c/0/0/0"]
)
def test_a_link_in_place_of_a_file_to_come_is_not_written_through(
    name, small, tmp_path
):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 100)
    (small / name).parent.mkdir(parents=True, exist_ok=True)
    (small / name).unlink(missing_ok=True)
    (small / name).symlink_to(secret)
    with contextlib.suppress(OSError, store.StoreError):
        add(small)
    assert secret.read_bytes() == b"secret" * 100


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
def test_counts_shapes_and_dtypes_that_cannot_be_are_told(changes, small):
    rewrite(small, **changes)
    for use in (store.read_store, Posterior.load, add):
        with pytest.raises(store.StoreError):
            use(small)


def sampled(path: Path) -> Posterior:
    def model() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))

    options = {
        "num_samples": 6,
        "num_warmup": 2,
        "num_chains": 2,
        "seed": 0,
        "progress": False,
    }
    kernel = HMC(
        model,
        step_size=0.5,
        num_steps=2,
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    return sample(kernel, store=path, **options)


def test_a_run_that_claims_another_iteration_or_has_no_fingerprint_is_refused(tmp_path):
    sampled(tmp_path / "run")
    whole = store.Checkpoint.read(tmp_path / "run")
    fields, energies = unpack(whole.state, HMC(None))
    others = [
        replace(whole, state=pack({**fields, "iteration": other}, energies))
        for other in (-5, 3, 10**6)
    ]
    for changed in (*others, replace(whole, fingerprint={})):
        changed.write(tmp_path / "run")
        with pytest.raises(store.StoreError, match=r"iteration|call"):
            sampled(tmp_path / "run")


@links
def test_a_pipe_in_place_of_draws_is_not_waited_for(small):
    (small / "posterior/w/c/0/0/0").unlink()
    os.mkfifo(small / "posterior/w/c/0/0/0")
    with pytest.raises(store.StoreError, match="is missing"):
        Posterior.load(small)
