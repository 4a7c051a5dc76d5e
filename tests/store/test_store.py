"""The draw store: what is committed is there, to the byte; what isn't is cut off; damage is told and nothing lost."""

import errno
import io
import json
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

import pyro_symmetric.store.writer as writer
from pyro_symmetric.samples import Posterior
from pyro_symmetric.storage import save_tensors
from pyro_symmetric.store import Draws, DrawStore, join, read_store
from pyro_symmetric.store.layout import CHECKPOINT, KIND, LOCK, VERSION


def draw(k: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The k-th draw of 3 chains, of a site in each dtype that chains come in."""
    generator = torch.Generator().manual_seed(k)
    w = torch.randn(3, 2, 4, generator=generator)
    samples = {"w": w, "a/b.c": w[:, 0, 0].double(), "half": w[:, :, 0].bfloat16()}
    return samples, {"diverging": w[:, 0, 0] > 0, "n_steps": torch.tensor([k, 2 * k, 3 * k]), "lp": w[:, 1, 1]}


def expected(draws: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    every = [draw(k) for k in range(draws)]
    return tuple({name: torch.stack([d[i][name] for d in every], 1) for name in every[0][i]} for i in (0, 1))


def check(found: Draws, draws: int) -> None:
    for have, want in zip(found[:2], expected(draws), strict=True):
        assert list(have) == list(want)
        for name, value in want.items():
            assert have[name].dtype == value.dtype
            assert torch.equal(have[name], value), name


def fill(store: DrawStore, begin: int, end: int) -> None:
    for k in range(begin, end):
        store.append(*draw(k))


@pytest.fixture
def path(tmp_path):
    """A store of 5 draws in two chunks, and 2 draws more that no commit has named."""
    with DrawStore(tmp_path / "store") as store:
        fill(store, 0, 3)
        store.commit({"kernel": "test"}, {"step": 1}, {"z": torch.tensor(1.5)})
        fill(store, 3, 5)
        store.commit({"kernel": "test", "more": [1]}, {"step": 2}, {"z": torch.tensor(2.5)})
        fill(store, 5, 7)
    return tmp_path / "store"


def snapshot(folder) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != LOCK}


def test_what_was_committed_is_read_back_in_chains_by_draws_and_nothing_else(path):
    found = read_store(path, verify=True)
    check(found, 5)
    assert found.metadata == {"kernel": "test", "more": [1]}
    posterior = Posterior.load(path)
    assert (posterior.num_chains, posterior.num_samples) == (3, 5)


def test_draws_are_mapped_and_changes_to_them_stay_in_memory(path):
    samples = read_store(path).samples
    assert samples["w"].stride() == (8, 24, 4, 1)
    samples["w"].zero_()
    check(read_store(path, verify=True), 5)


def test_a_store_goes_on_from_its_last_commit_and_cuts_off_what_came_after(path):
    with DrawStore(path) as store:
        assert (store.committed, store.last.checkpoint, store.last.tensors["z"].item()) == (5, {"step": 2}, 2.5)
        fill(store, 5, 9)
        check(read_store(path), 5)  # a reader meanwhile sees what is committed
        store.commit({}, {"step": 3}, {})
    check(read_store(path, verify=True), 9)


def test_a_commit_at_an_earlier_mark_drops_the_draws_after_it(path):
    with DrawStore(path) as store:
        fill(store, 5, 6)
        mark = store.mark
        fill(store, 6, 8)
        store.commit({}, {}, {}, mark)
    check(read_store(path, verify=True), 6)


def test_a_commit_without_new_draws_keeps_the_old_ones(path):
    with DrawStore(path) as store:
        store.commit({}, {"step": 9}, {})
    check(read_store(path, verify=True), 5)


def test_opening_a_store_changes_nothing(path):
    before = snapshot(path)
    DrawStore(path).close()
    assert snapshot(path) == before


def test_a_single_chains_expanded_statistic_is_stored(tmp_path):
    with DrawStore(tmp_path) as store:
        store.append({"w": torch.ones(1, 1)}, {"step_size": torch.tensor(0.5).expand(1)})
        store.commit({}, {}, {})
    assert read_store(tmp_path).statistics["step_size"].tolist() == [[0.5]]


# damage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["samples/0000.w.bin", "statistics/0003.diverging.bin", "samples/0001.a%2Fb.c.bin"])
def test_a_truncated_file_is_told_and_the_chunks_before_can_be_read(path, file):
    size = (path / file).stat().st_size // 7 * 5  # of the committed draws
    os.truncate(path / file, size - 1)
    before = snapshot(path)
    with pytest.raises(ValueError, match=r"is damaged: .* holds 4 of 5 draws") as error:
        read_store(path)
    assert file.split("/")[1] in str(error.value)
    with pytest.raises(ValueError, match="Nothing was changed"):
        DrawStore(path)
    assert snapshot(path) == before
    check(read_store(path, salvage=True), 3)


def test_a_missing_file_is_told(path):
    (path / "samples/0000.w.bin").unlink()
    with pytest.raises(ValueError, match=r"0000\.w\.bin holds 0 of 5 draws"):
        read_store(path)
    with pytest.raises(ValueError, match="no draws before the damage"):
        read_store(path, salvage=True)


@pytest.mark.parametrize("byte", [0, 24 * 4 * 4])
def test_a_changed_byte_is_found_by_its_chunks_checksum(path, byte):
    with open(path / "samples/0000.w.bin", "r+b") as file:
        file.seek(byte)
        old = file.read(1)
        file.seek(byte)
        file.write(bytes([old[0] ^ 1]))
    read_store(path, verify=False)  # lengths are right
    with pytest.raises(ValueError, match="differs from its checksum"):
        read_store(path)
    with pytest.raises(ValueError, match="Nothing was changed"):
        DrawStore(path)
    if byte:
        check(read_store(path, salvage=True), 3)


def test_a_list_of_chunks_that_was_cut_short_is_told(path):
    size = (path / "chunks.bin").stat().st_size
    os.truncate(path / "chunks.bin", size - 3)
    with pytest.raises(ValueError, match=r"chunks\.bin"):
        DrawStore(path)
    check(read_store(path, salvage=True), 3)


def test_a_truncated_checkpoint_is_told(path):
    os.truncate(path / CHECKPOINT, 40)
    with pytest.raises(ValueError, match="damaged"):
        read_store(path)
    before = snapshot(path)
    with pytest.raises(ValueError, match="damaged"):
        DrawStore(path)
    assert snapshot(path) == before


def test_a_newer_version_is_refused_and_left_alone(path):
    save_tensors(path / CHECKPOINT, KIND, VERSION + 1, {}, {"anything": 1})
    before = snapshot(path)
    for use in (read_store, DrawStore):
        with pytest.raises(ValueError, match="newer pyro_symmetric"):
            use(path)
    assert snapshot(path) == before


@pytest.mark.parametrize("header", [{}, {"columns": [{"kind": 1}]}])
def test_a_checkpoint_with_another_header_is_damaged(path, header):
    save_tensors(path / CHECKPOINT, KIND, VERSION, {}, header)
    with pytest.raises(ValueError, match="damaged header"):
        read_store(path)


# places that can't be written ---------------------------------------------------------------------------------------


def test_a_file_in_the_folders_place_is_left_alone(tmp_path):
    (tmp_path / "store").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file"):
        DrawStore(tmp_path / "store")
    assert (tmp_path / "store").read_text() == "mine"


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "lock").write_text("precious")
    with pytest.raises(FileExistsError, match=r"is no draw store but holds lock, thesis\.tex"):
        DrawStore(tmp_path)
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {"lock": "precious", "thesis.tex": "mine"}


def test_a_refused_store_keeps_no_lock_that_it_did_not_have(path):
    (path / LOCK).unlink()
    save_tensors(path / CHECKPOINT, KIND, VERSION + 1, {}, {"anything": 1})
    with pytest.raises(ValueError, match="newer pyro_symmetric"):
        DrawStore(path)
    assert not (path / LOCK).exists()


def test_things_that_another_run_put_there_meanwhile_are_seen_under_the_lock(tmp_path, monkeypatch):
    calls = []

    def recognise(folder):
        calls.append(folder)
        if len(calls) == 2:
            raise FileExistsError("taken")

    monkeypatch.setattr(writer, "_recognise", recognise)
    with pytest.raises(FileExistsError, match="taken"):
        DrawStore(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_read_only_folder_is_told_and_still_read(path):
    def refuse(*arguments, **options):  # what a user without rights gets; root has them all
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match=r"can't be written.*Permission denied"):
            DrawStore(path)
    check(read_store(path), 5)


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


forks = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # the child runs no thread of PyTorch's
]


class TestOtherProcesses:
    pytestmark = forks

    def test_a_folder_of_another_user_is_told(self, path):
        os.chmod(path, 0o555)
        ours, theirs = os.pipe()

        def attempt():
            if os.geteuid() == 0:
                os.seteuid(65534)
            try:
                DrawStore(path / "new")
            except OSError as error:
                os.write(theirs, str(error).encode())
            os._exit(0)

        os.waitpid(in_child(attempt), 0)
        os.close(theirs)
        assert b"can't be written" in os.read(ours, 1000)
        os.close(ours)
        os.chmod(path, 0o755)
        check(read_store(path), 5)

    def test_the_lock_goes_with_a_killed_process(self, path):
        ours, theirs = os.pipe()

        def hold():
            global held
            held = DrawStore(path)
            os.write(theirs, b"locked")

        child = in_child(hold)
        try:
            assert os.read(ours, 10) == b"locked"
            with pytest.raises(BlockingIOError, match=f"process {child} on"):
                DrawStore(path)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(ours)
            os.close(theirs)
        DrawStore(path).close()

    def test_a_worker_that_was_forked_meanwhile_does_not_keep_the_lock(self, path):
        store = DrawStore(path)
        child = in_child(lambda: None)
        try:
            store.close()
            DrawStore(path).close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_one_process_at_a_time_writes(path):
    with DrawStore(path), pytest.raises(BlockingIOError, match=f"by another run \\(process {os.getpid()} on"):
        DrawStore(path)
    DrawStore(path).close()


class Full(io.FileIO):
    """A file on a disk that has room for so many bytes more: it takes what fits, then complains, as Linux does."""

    room = 0

    def write(self, data):
        if Full.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(memoryview(data)[: Full.room])
        Full.room -= taken
        return taken


@pytest.mark.parametrize("room", [0, 50, 500, 777])
def test_a_full_disk_is_told_and_nothing_committed_is_lost(path, monkeypatch, room):
    monkeypatch.setattr(writer.io, "FileIO", Full)
    Full.room = room
    with DrawStore(path) as store:
        with pytest.raises(OSError, match=r"No space left on device. 5 draws of each chain are safe") as error:
            fill(store, 5, 20)
        assert error.value.errno == errno.ENOSPC
        assert store.failed
    check(read_store(path, verify=True), 5)
    Full.room = 10**9
    with DrawStore(path) as store:
        fill(store, 5, 20)
        store.commit({}, {}, {})
    check(read_store(path, verify=True), 20)


def test_a_disk_that_fills_up_in_a_commit_keeps_the_last_one(path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with DrawStore(path) as store:
        fill(store, 5, 8)
        monkeypatch.setattr(writer, "save_tensors", refuse)
        with pytest.raises(OSError, match="5 draws of each chain are safe"):
            store.commit({}, {"step": 3}, {})
        monkeypatch.undo()
    check(read_store(path, verify=True), 5)
    with DrawStore(path) as store:
        assert store.last.checkpoint == {"step": 2}
        fill(store, 5, 8)
        store.commit({}, {}, {})
    check(read_store(path, verify=True), 8)


def test_a_store_without_draws_or_at_no_place_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no draw store"):
        read_store(tmp_path / "nowhere")
    with DrawStore(tmp_path / "new") as store:
        store.commit({}, {}, {})
    with pytest.raises(ValueError, match="holds no draws yet"):
        read_store(tmp_path / "new")


def test_other_sites_than_before_are_refused(path):
    with DrawStore(path) as store, pytest.raises(ValueError, match="other sites or statistics"):
        store.append({"w": torch.zeros(3)}, {})
    check(read_store(path, verify=True), 5)


# parts --------------------------------------------------------------------------------------------------------------


def test_parts_are_joined_chain_by_chain_with_mean_traces_and_summed_seconds():
    def part(chains: int, draws: int, value: float) -> Draws:
        trace = {"iteration": list(range(draws)), "potential": [value] * draws, "acceptance_rate": [None] * draws}
        seconds = {"warmup": 1.0, "sampling": value}
        metadata = {"kernel": "k", "seconds": seconds, "trace": trace, "seed": int(value), "interrupted": False}
        return Draws({"w": torch.full((chains, draws, 2), value)}, {"lp": torch.zeros(chains, draws)}, metadata)

    joined = join([part(1, 4, 2.0), part(3, 3, 6.0)])
    assert joined.samples["w"].shape == (4, 3, 2)
    assert joined.samples["w"][:, 0, 0].tolist() == [2.0, 6.0, 6.0, 6.0]
    assert joined.metadata["seconds"] == {"warmup": 2.0, "sampling": 8.0}
    assert joined.metadata["trace"] == {"iteration": [0, 1, 2], "potential": [5.0] * 3, "acceptance_rate": [None] * 3}
    assert [(task["chains"], task["seed"]) for task in joined.metadata["tasks"]] == [(1, 2), (3, 6)]
    json.dumps(joined.metadata)
