"""The draw store: what is committed is there, to the byte; what isn't counts for nothing; damage is told."""

import errno
import json
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pyro_symmetric.store.files as files
import pyro_symmetric.store.recorders as recorders
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import save_tensors
from pyro_symmetric.store import Checkpoint, Contents, FolderRecorder, MemoryRecorder, read_store
from pyro_symmetric.store.files import CHECKPOINT, KIND, VERSION
from pyro_symmetric.store.recorders import LOCK

ROOM = 7


def draw(k: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The k-th draw of 3 chains, of a site in each dtype that chains come in."""
    generator = torch.Generator(torch.empty(0).device).manual_seed(k)
    w = torch.randn(3, 2, 4, generator=generator)
    samples = {"w": w, "a/b.c": w[:, 0, 0].double(), "half": w[:, :, 0].bfloat16(), "none": w[:, :0, 0]}
    return samples, {"diverging": w[:, 0, 0] > 0, "n_steps": torch.tensor([k, 2 * k, 3 * k]), "lp": w[:, 1, 1]}


def one(kinds: tuple[dict[str, torch.Tensor], ...]) -> tuple[dict[str, torch.Tensor], ...]:
    """As a recorder takes a single draw."""
    return tuple({name: value[:, None] for name, value in values.items()} for values in kinds)


def expected(draws: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    every = [draw(k) for k in range(draws)]
    return tuple({name: torch.stack([d[i][name] for d in every], 1) for name in every[0][i]} for i in (0, 1))


def check(found: Contents, draws: int) -> None:
    for have, want in zip(found[:2], expected(draws), strict=True):
        assert list(have) == list(want)
        for name, value in want.items():
            assert have[name].dtype == value.dtype
            assert torch.equal(have[name], value), name


def fill(recorder, begin: int, end: int) -> None:
    for k in range(begin, end):
        recorder.append(k, *one(draw(k)))


def fill_and_commit(recorder, begin: int, end: int) -> None:
    fill(recorder, begin, end)
    commit(recorder, end)


def commit(recorder, draws: int, state: bytes = b"", **metadata) -> None:
    recorder.commit(draws, lambda: metadata, lambda: state)


@pytest.fixture(params=[2**22, 100, 1], ids=["kept back", "few kept back", "none kept back"])
def path(tmp_path, request, monkeypatch):
    """A store of 5 draws in two commits, and 2 draws more that no commit counts."""
    monkeypatch.setattr(recorders, "PIECE", request.param)
    with FolderRecorder(tmp_path / "store", ROOM) as recorder:
        fill(recorder, 0, 3)
        commit(recorder, 3, b"one", kernel="test")
        fill(recorder, 3, 5)
        commit(recorder, 5, b"two", kernel="test", more=[1])
        fill(recorder, 5, 7)
    return tmp_path / "store"


def snapshot(folder) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != LOCK}


def test_what_was_committed_is_read_back_in_chains_by_draws_and_nothing_else(path):
    found = read_store(path, verify=True)
    check(found, 5)
    assert found.metadata == {"kernel": "test", "more": [1]}
    posterior = Posterior.load(path)
    assert (posterior.num_chains, posterior.num_samples) == (3, 5)


def test_memory_gives_back_what_a_folder_does():
    recorder = MemoryRecorder(ROOM)
    fill(recorder, 0, 6)
    assert not recorder.is_due
    check(recorder.draws(5, {}), 5)


def test_a_draw_takes_the_place_of_those_that_no_commit_counted(path):
    with FolderRecorder(path, ROOM) as recorder:
        recorder.append(5, *one(draw(99)))
        recorder.append(5, *one(draw(5)))
        fill(recorder, 6, 7)
        commit(recorder, 7)
    check(read_store(path), 7)


def test_draws_are_mapped_and_changes_to_them_stay_in_memory(path):
    samples = read_store(path).samples
    assert samples["w"].stride() == (8 * ROOM, 8, 4, 1)
    samples["w"].zero_()
    check(read_store(path, verify=True), 5)


def test_a_full_store_is_one_file_of_safetensors_whose_draws_are_mapped_end_to_end(path):
    with FolderRecorder(path, ROOM) as recorder:
        fill(recorder, 5, ROOM)
        commit(recorder, ROOM)
    (file,) = path.glob("draws-*.safetensors")
    found = load_file(file)
    for kind, want in zip(("samples", "statistics"), expected(ROOM), strict=True):
        assert all(torch.equal(found[f"{kind}/{name}"], value) for name, value in want.items())
    posterior = Posterior.load(path)
    flat = posterior.get_samples()
    assert all(flat[site].data_ptr() == value.data_ptr() for site, value in posterior.samples.items())
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    assert all(any(a <= flat[s].data_ptr() < b for a, b in ranges) for s in flat if flat[s].numel())


def test_a_store_resumes_from_its_last_commit_and_counts_nothing_that_came_after(path):
    with FolderRecorder(path, ROOM) as recorder:
        assert (recorder.last.draws, recorder.last.state) == (5, b"two")
        fill(recorder, 5, 7)
        check(read_store(path), 5)  # a reader meanwhile sees what is committed
        commit(recorder, 7, b"three")
    check(read_store(path, verify=True), 7)


def test_for_more_draws_a_larger_file_takes_the_place_of_the_first(path):
    before = read_store(path)
    with FolderRecorder(path, 12) as recorder:
        fill(recorder, 5, 9)
        check(read_store(path), 5)
        commit(recorder, 9)
        fill(recorder, 9, 12)
        commit(recorder, 12)
    check(read_store(path, verify=True), 12)
    check(before, 5)  # whoever mapped the first still has it
    assert [file.name for file in path.glob("draws-*")] == ["draws-0001.safetensors"]


def test_a_larger_file_that_no_commit_named_is_made_anew(path):
    with FolderRecorder(path, 12) as recorder:
        fill(recorder, 5, 9)
    check(read_store(path), 5)
    with FolderRecorder(path, 10) as recorder:
        fill(recorder, 5, 10)
        commit(recorder, 10)
    check(read_store(path), 10)


def test_a_reader_finds_the_larger_file_that_takes_its_place_meanwhile(path, monkeypatch):
    first = Checkpoint.read(path)
    with FolderRecorder(path, 12) as recorder:
        fill(recorder, 5, 12)
        commit(recorder, 12)
    read, found = Checkpoint.read, [first]
    monkeypatch.setattr(files.Checkpoint, "read", lambda folder: found.pop() if found else read(folder))
    check(read_store(path), 12)


def test_a_commit_at_an_earlier_number_drops_the_draws_after_it(path):
    with FolderRecorder(path, ROOM) as recorder:
        fill(recorder, 5, 7)
        commit(recorder, 6)
    check(read_store(path, verify=True), 6)


def test_a_commit_without_new_draws_keeps_the_old_ones(path):
    with FolderRecorder(path, ROOM) as recorder:
        commit(recorder, 5, b"nine")
    check(read_store(path, verify=True), 5)
    assert Checkpoint.read(path).state == b"nine"


def test_opening_a_store_changes_nothing(path):
    before = snapshot(path)
    FolderRecorder(path, 100).close()
    assert snapshot(path) == before


def test_a_single_chains_expanded_statistic_is_stored(tmp_path):
    with FolderRecorder(tmp_path, 1) as recorder:
        recorder.append(0, {"w": torch.ones(1, 1, 1)}, {"step_size": torch.tensor(0.5).expand(1, 1)})
        commit(recorder, 1)
    assert read_store(tmp_path).statistics["step_size"].tolist() == [[0.5]]


def test_a_dtype_that_the_file_does_not_know_is_told(tmp_path):
    with (
        FolderRecorder(tmp_path, 1) as recorder,
        pytest.raises(TypeError, match=r"samples\['w'\] is of torch.complex64"),
    ):
        recorder.append(0, {"w": torch.ones(1, 1, 1, dtype=torch.complex64)}, {})


# damage -------------------------------------------------------------------------------------------------------------


def place(path, name: str) -> tuple[Path, int]:
    """The file of draws, and where in it a entry begins."""
    file = Checkpoint.read(path).file
    at = [f"{entry.kind}/{entry.name}" for entry in file.entries].index(name)
    return path / file.name, file.places[at]


@pytest.mark.parametrize("kept", [0, 3, 100, -1])
def test_a_truncated_file_is_told_by_name_and_left_as_it_is(path, kept):
    file, _ = place(path, "samples/w")
    os.truncate(file, kept % file.stat().st_size)
    before = snapshot(path)
    for use in (read_store, lambda p: read_store(p, verify=False), lambda p: FolderRecorder(p, ROOM)):
        with pytest.raises(ValueError, match=r"draws-0000.safetensors holds \d+ of \d+ bytes"):
            use(path)
    assert snapshot(path) == before


def test_a_missing_file_is_told(path):
    place(path, "samples/w")[0].unlink()
    with pytest.raises(ValueError, match=r"draws-0000\.safetensors is missing"):
        read_store(path)


@pytest.mark.parametrize(("name", "chain", "size"), [("samples/w", 1, 32), ("statistics/diverging", 2, 1)])
def test_a_changed_byte_is_found_and_its_site_and_chain_are_named(path, name, chain, size):
    file, begin = place(path, name)
    with open(file, "r+b") as content:
        content.seek(begin + chain * ROOM * size + 4 * size)  # the fifth draw
        old = content.read(1)
        content.seek(-1, os.SEEK_CUR)
        content.write(bytes([old[0] ^ 1]))
    found = read_store(path, verify=False)  # lengths are right
    for use in (read_store, lambda p: FolderRecorder(p, ROOM)):
        with pytest.raises(ValueError, match=rf"{name} of 1 chains \({chain}\) differs"):
            use(path)
    others = [c for c in range(3) if c != chain]
    assert torch.equal(found.samples["w"][others], expected(5)[0]["w"][others])


def test_a_changed_header_of_the_draws_is_found(path):
    file, _ = place(path, "samples/w")
    whole = bytearray(file.read_bytes())
    whole[whole.index(b"F32") + 1 : whole.index(b"F32") + 3] = b"64"
    file.write_bytes(whole)
    with pytest.raises(ValueError, match="damaged header"):
        read_store(path, verify=False)


def test_bytes_that_no_commit_counts_may_be_anything(path):
    file, begin = place(path, "samples/w")
    with open(file, "r+b") as content:
        content.seek(begin + 5 * 32)
        content.write(b"x" * 32)
    check(read_store(path), 5)


def test_a_truncated_checkpoint_is_told(path):
    os.truncate(path / CHECKPOINT, 40)
    before = snapshot(path)
    for use in (read_store, lambda p: FolderRecorder(p, ROOM)):
        with pytest.raises(ValueError, match="damaged"):
            use(path)
    assert snapshot(path) == before


def test_a_newer_version_is_refused_and_left_alone(path):
    save_tensors(path / CHECKPOINT, KIND, VERSION + 1, {}, {"anything": 1})
    before = snapshot(path)
    for use in (read_store, lambda p: FolderRecorder(p, ROOM)):
        with pytest.raises(ValueError, match="newer pyro_symmetric"):
            use(path)
    assert snapshot(path) == before


@pytest.mark.parametrize("header", [{}, {"file": {"entries": 1}}])
def test_a_checkpoint_with_another_header_is_damaged(path, header):
    save_tensors(path / CHECKPOINT, KIND, VERSION, {}, header)
    with pytest.raises(ValueError, match="damaged header"):
        read_store(path)


# places that can't be written ---------------------------------------------------------------------------------------


def test_a_file_in_the_folders_place_is_left_alone(tmp_path):
    (tmp_path / "store").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file"):
        FolderRecorder(tmp_path / "store", 1)
    assert (tmp_path / "store").read_text() == "mine"


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "lock").write_text("precious")
    with pytest.raises(FileExistsError, match=r"is no draw store but holds lock, thesis\.tex"):
        FolderRecorder(tmp_path, 1)
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {"lock": "precious", "thesis.tex": "mine"}


def test_a_refused_store_keeps_no_lock_that_it_did_not_have(path):
    (path / LOCK).unlink()
    save_tensors(path / CHECKPOINT, KIND, VERSION + 1, {}, {"anything": 1})
    with pytest.raises(ValueError, match="newer pyro_symmetric"):
        FolderRecorder(path, 1)
    assert not (path / LOCK).exists()


def test_things_that_another_run_put_there_meanwhile_are_seen_under_the_lock(tmp_path, monkeypatch):
    calls = []

    def require_free(folder):
        calls.append(folder)
        if len(calls) == 2:
            raise FileExistsError("taken")

    monkeypatch.setattr(recorders, "_require_free", require_free)
    with pytest.raises(FileExistsError, match="taken"):
        FolderRecorder(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_read_only_folder_is_told_and_still_read(path):
    opened = os.open

    def refuse(path, flags, *arguments, **options):  # what a user without rights gets; root has them all
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match=r"can't be written.*Permission denied"):
            FolderRecorder(path, 1)
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
                FolderRecorder(path / "new", 1)
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
            held = FolderRecorder(path, 1)
            os.write(theirs, b"locked")

        child = in_child(hold)
        try:
            assert os.read(ours, 10) == b"locked"
            with pytest.raises(BlockingIOError, match=f"process {child} on"):
                FolderRecorder(path, 1)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(ours)
            os.close(theirs)
        FolderRecorder(path, 1).close()

    def test_a_worker_that_was_forked_meanwhile_does_not_keep_the_lock(self, path):
        recorder = FolderRecorder(path, 1)
        child = in_child(lambda: None)
        try:
            recorder.close()
            FolderRecorder(path, 1).close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_one_process_at_a_time_writes(path):
    with FolderRecorder(path, 1), pytest.raises(BlockingIOError, match=f"by another run \\(process {os.getpid()} on"):
        FolderRecorder(path, 1)
    FolderRecorder(path, 1).close()


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_is_told_and_nothing_committed_is_lost(path, monkeypatch, call):
    """For a larger file, in the middle of it, and when it is to reach the disk."""
    whole, room = getattr(os, call), [2]

    def full(*arguments):
        if call == "pwrite" and room[0]:
            room[0] -= 1  # it takes what fits, then complains, as Linux does
            return whole(arguments[0], arguments[1][:3], arguments[2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with FolderRecorder(path, 20) as recorder:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OSError, match=r"No space left on device. 5 draws of each chain are safe") as error:
                fill_and_commit(recorder, 5, 20)
        assert error.value.errno == errno.ENOSPC
        assert recorder.failed
    check(read_store(path, verify=True), 5)
    with FolderRecorder(path, 20) as recorder:
        fill(recorder, 5, 20)
        commit(recorder, 20)
    check(read_store(path, verify=True), 20)


def test_writes_that_take_less_than_they_are_given_are_gone_on_with(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:5], offset))
    with FolderRecorder(tmp_path / "s", ROOM) as recorder:
        fill(recorder, 0, ROOM)
        commit(recorder, ROOM)
    check(read_store(tmp_path / "s"), ROOM)


def test_a_disk_that_fills_up_in_a_commit_keeps_the_last_one(path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with FolderRecorder(path, ROOM) as recorder:
        fill(recorder, 5, 7)
        with monkeypatch.context() as patch:
            patch.setattr(files, "save_tensors", refuse)
            with pytest.raises(OSError, match="5 draws of each chain are safe"):
                commit(recorder, 7, b"three")
    check(read_store(path, verify=True), 5)
    with FolderRecorder(path, ROOM) as recorder:
        assert recorder.last.state == b"two"
        fill(recorder, 5, 7)
        commit(recorder, 7)
    check(read_store(path, verify=True), 7)


def test_a_store_without_draws_or_at_no_place_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no draw store"):
        read_store(tmp_path / "nowhere")
    with FolderRecorder(tmp_path / "new", 1) as recorder:
        commit(recorder, 0)
    with pytest.raises(ValueError, match="holds no draws yet"):
        read_store(tmp_path / "new")


def test_other_sites_than_before_are_refused(path):
    with FolderRecorder(path, ROOM) as recorder, pytest.raises(ValueError, match="other sites or statistics"):
        recorder.append(5, {"w": torch.zeros(3, 1)}, {})
    check(read_store(path, verify=True), 5)


def test_the_header_is_that_of_safetensors_and_aligned(path):
    raw = place(path, "samples/w")[0].read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    entries = json.loads(raw[8 : 8 + size])
    assert size % 8 == 0
    assert entries["samples/a/b.c"]["shape"] == [3, ROOM]
    assert all(
        begin % {"F64": 8, "I64": 8, "F32": 4, "BF16": 2}.get(entry["dtype"], 1) == 0
        for entry in entries.values()
        for begin in entry["data_offsets"][:1]
    )


def test_narrow_draws_of_many_chains_are_written_by_the_kilobyte(tmp_path, monkeypatch):
    lengths, chains, draws = [], 3000, 300

    def watched(descriptor, data, offset):
        lengths.append(len(data))
        files.write_at(descriptor, data, offset)

    monkeypatch.setattr(recorders, "write_at", watched)
    values = torch.arange(draws, dtype=torch.float32)[:, None] + torch.rand(draws, chains)
    with FolderRecorder(tmp_path, draws) as recorder:
        for number, value in enumerate(values):
            recorder.append(number, {"w": value[:, None]}, {"lp": value[:, None]})
        recorder.commit(draws, dict, lambda: b"")
    assert sorted(set(lengths)) == [4 * (draws - 256), 1024]
    assert torch.equal(read_store(tmp_path).samples["w"], values.mT)
