"""Recorders: what a run hands its draws to, in memory or in a folder that it can resume from."""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_symmetric.storage import Lock, PathLike, StoreError, flush, make_folder, raw_bytes, sync
from pyro_symmetric.store.files import CHECKPOINT, PIECE, TASKS, Checkpoint, Contents, DrawsFile, checksum, write_at

LOCK = ".pyro_symmetric.lock"
COMMIT_SECONDS = 5.0  # at least so long between two commits,
COMMIT_SHARE = 0.05  # and so long that they take at most this share of the time
RUN = 1024  # bytes of each chain to write at once, lest system calls take longer than all else,
MOST_KEPT = 2**26  # unless those of all chains and entries are more than this

Values = Mapping[str, Tensor]


class Recorder(Protocol):
    """Takes draws in the order of their numbers, and gives them back."""

    def append(self, number: int, samples: Values, statistics: Values) -> None:
        """Keep the draws of every chain from ``number`` on: site -> ``(chains, draws, *site_shape)``, name ->
        ``(chains, draws)``.

        They take the place of all that came from this number on; what comes before it counts from now on.
        """

    @property
    def is_due(self) -> bool:
        """True if it is time for a commit; never, if nothing is kept beyond the process."""

    def commit(
        self, draws: int, metadata: Callable[[], dict[str, Any]], state: Callable[[], bytes | memoryview]
    ) -> None:
        """Make the first draws safe, and with them the state that a broken run resumes from.

        :param metadata: of the posterior; called, as ``state`` is, only if something is kept beyond the process.
        """

    def draws(self, count: int, metadata: dict[str, Any]) -> Contents:
        """The first draws."""


class MemoryRecorder:
    """Draws in the CPU's memory.

    :param num_samples: draws of each chain that there will be.
    """

    is_due = False

    def __init__(self, num_samples: int):
        self._num_samples = num_samples
        self._kept: dict[str, dict[str, Tensor]] = {"samples": {}, "statistics": {}}

    def append(self, number: int, samples: Values, statistics: Values) -> None:
        for kind, values in (("samples", samples), ("statistics", statistics)):
            kept = self._kept[kind]
            for name, value in values.items():
                if name not in kept:
                    shape = len(value), self._num_samples, *value.shape[2:]
                    kept[name] = torch.empty(shape, dtype=value.dtype, device="cpu")
                kept[name][:, number : number + value.shape[1]] = value

    def commit(
        self, draws: int, metadata: Callable[[], dict[str, Any]], state: Callable[[], bytes | memoryview]
    ) -> None:
        pass

    def draws(self, count: int, metadata: dict[str, Any]) -> Contents:
        cut = [{name: value[:, :count] for name, value in kept.items()} for kept in self._kept.values()]
        return Contents(cut[0], cut[1], metadata)


class FolderRecorder:
    """Draws in a folder; the one process that writes it.

    >>> with FolderRecorder(path, num_samples=100) as recorder:
    ...     recorder.append(0, {"w": torch.randn(4, 1, 3)}, {"lp": torch.randn(4, 1)})
    ...     recorder.commit(1, lambda: {"kernel": "HMC"}, lambda: b"")

    :param path: the folder; made if there is none.
    :param num_samples: draws of each chain that there will be.
    :raises NotADirectoryError: if it is a file.
    :raises FileExistsError: if it holds other things than a run.
    :raises BlockingIOError: if another process writes it.
    :raises StoreError: if it is damaged, or of a newer version. Nothing is changed then.
    :raises OSError: if it can't be written.
    """

    def __init__(self, path: PathLike, num_samples: int):
        self.path, self._num_samples = Path(path), num_samples
        self.fingerprint: dict[str, Any] = {}  # what every checkpoint says of the run
        self.last: Checkpoint | None = None  # what the folder held, with draws that agree with their checksums
        self.failed = False  # once writing has failed, no more is tried
        self._file: DrawsFile | None = None
        self._descriptor: int | None = None
        self._writers: list[_Writer] = []
        self._safe = 0
        self._next_commit = time.perf_counter() + COMMIT_SECONDS
        self._lock = lock_folder(self.path, _require_free)
        try:
            if (self.path / CHECKPOINT).exists():
                self.last = Checkpoint.read(self.path)
                self.last.verify(self.path)
                self._file, self._safe = self.last.file, self.last.draws
        except BaseException:
            self._lock.withdraw()
            raise

    @property
    def is_due(self) -> bool:
        return time.perf_counter() >= self._next_commit

    def append(self, number: int, samples: Values, statistics: Values) -> None:
        """:raises OSError: if there is no room; what was committed is safe."""
        values = [*samples.values(), *statistics.values()]
        with self._reporting():
            if self._descriptor is None:
                self._open({"samples": samples, "statistics": statistics})
            for writer, value in zip(self._writers, values, strict=True):
                writer.append(number, value)

    def commit(
        self, draws: int, metadata: Callable[[], dict[str, Any]], state: Callable[[], bytes | memoryview]
    ) -> None:
        """:raises OSError: if it can't be written; what was committed before is safe."""
        began = time.perf_counter()
        content = state()
        with self._reporting():
            for writer in self._writers:
                writer.write(draws)
            if self._descriptor is not None:
                flush(self._descriptor)
            if self._writers:
                sums = torch.tensor([writer.sums for writer in self._writers], device="cpu")
            else:
                sums = torch.empty(0, 0, dtype=torch.long, device="cpu") if self.last is None else self.last.sums
            found = Checkpoint(self._file, draws, sums, self.fingerprint, metadata(), content)
            found.write(self.path)
            self._safe = draws
            for path in self.path.glob("draws-*.safetensors"):  # whose place a larger one has taken
                if self._file is not None and path.name != self._file.name:
                    path.unlink()
        now = time.perf_counter()
        self._next_commit = now + max(COMMIT_SECONDS, (now - began) / COMMIT_SHARE)

    def draws(self, count: int, metadata: dict[str, Any]) -> Contents:
        assert self._file is not None
        return Contents(*self._file.map(self.path, count), metadata)

    def close(self) -> None:
        """Let others write."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._lock.release()

    def __enter__(self) -> FolderRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # small steps ----------------------------------------------------------------------------------------------------

    def _open(self, draw: Mapping[str, Values]) -> None:
        """The file of draws, with room for all of them."""
        before = self._file
        now = DrawsFile.like(0 if before is None else before.number, self._num_samples, draw)
        if before is not None and (before.chains, before.entries) != (now.chains, now.entries):
            differing = sorted({entry.name for entry in set(before.entries) ^ set(now.entries)})
            raise StoreError(f"the draw store {self.path} holds other sites or statistics; what differs: {differing}")
        for stale in self.path.glob(f".{CHECKPOINT}.*.tmp"):  # left by a process that was killed in a commit
            stale.unlink()
        sums: Sequence[Sequence[int]] = [[0] * now.chains] * len(now.entries)
        if before is None:
            self._descriptor = now.make(self.path)
        elif self.last is not None:
            sums, now = self.last.sums.tolist(), before
            if before.room >= self._num_samples:
                self._descriptor = before.open(self.path, os.O_RDWR)
            else:
                now = DrawsFile(before.number + 1, before.chains, self._num_samples, before.entries)
                self._descriptor = now.make(self.path)
                copy_rows([(self.path, before)], self._descriptor, now, self._safe)
        sync(self.path)
        places = zip(now.entries, now.places, sums, strict=True)
        assert self._descriptor is not None
        piece = max(PIECE, min(RUN * now.chains, MOST_KEPT // len(now.entries)))
        self._writers = [_Writer(self._descriptor, now.room, c.size, at, self._safe, s, piece) for c, at, s in places]
        self._file = now

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = True
            raise OSError(
                error.errno,
                f"the draw store {self.path} couldn't be written: {error}. {self._safe} draws of each chain are safe "
                "there; when the cause is mended (is the disk full?), the same call resumes from them",
            ) from error


class _Writer:
    """The part of a file that one site's or statistic's draws go to, and the draws that are yet to go there.

    :param room: draws of each chain that fit.
    :param size: bytes of one draw of one chain.
    :param place: where in the file it begins.
    :param done: draws that it holds; ``sums``: the CRC-32 of each chain's.
    :param piece: bytes to keep back, one draw at least.
    """

    def __init__(self, descriptor: int, room: int, size: int, place: int, done: int, sums: Sequence[int], piece: int):
        self._descriptor, self._room, self._size, self._place, self._piece = descriptor, room, size, place, piece
        self._done: tuple[int, Sequence[int]] = (done, sums)  # one value, so that no interruption parts them
        self._kept: Tensor | None = None  # (chains, so many draws, bytes)

    @property
    def sums(self) -> list[int]:
        return list(self._done[1])

    def append(self, number: int, value: Tensor) -> None:
        chains, count = value.shape[:2]
        room = 0 if self._kept is None else self._kept.shape[1]
        if number - self._done[0] + count > room:
            self.write(number)  # and no further: what comes may yet be taken back
        if self._kept is None or count > room:
            most = max(1, min(self._piece // max(1, chains * self._size), self._room))
            self._kept = torch.empty(chains, max(most, count), *value.shape[2:], dtype=value.dtype, device="cpu")
        place = number - self._done[0]
        self._kept[:, place : place + count] = value

    def write(self, until: int) -> None:
        """Write what is kept back, as far as the draws before ``until``."""
        begin, sums = self._done
        if self._kept is None or until <= begin:
            return
        kept = raw_bytes(self._kept).view(len(self._kept), self._kept.shape[1] * self._size).numpy()
        length, pitch = (until - begin) * self._size, self._room * self._size
        at, now = self._place + begin * self._size, []
        for row, before in zip(kept[:, :length], sums, strict=True):
            data = row.data  # each chain's draws lie elsewhere: a system call each
            write_at(self._descriptor, data, at)
            now.append(zlib.crc32(data, before))
            at += pitch
        self._done = (until, now)


def copy_rows(sources: Sequence[tuple[Path, DrawsFile]], target: int, file: DrawsFile, draws: int) -> list[list[int]]:
    """Copy the first draws of the chains of some files into one that is to hold them all, one below the other.

    :param sources: folders, and the file of draws in each.
    :param target: descriptor of the file to write, which is ``file``.
    :return: the CRC-32 of each chain's draws in each entry.
    """
    first = 0
    sums: list[list[int]] = [[] for _ in file.entries]
    for folder, source in sources:
        descriptor = source.open(folder, os.O_RDONLY)
        try:
            for k, (entry, begin, to) in enumerate(zip(file.entries, source.places, file.places, strict=True)):
                for chain in range(source.chains):
                    at = begin + chain * source.room * entry.size
                    new = to + (first + chain) * file.room * entry.size
                    for done in range(0, draws * entry.size, PIECE):
                        piece = os.pread(descriptor, min(PIECE, draws * entry.size - done), at + done)
                        write_at(target, memoryview(piece), new + done)
                    sums[k].append(checksum(target, new, draws * entry.size))
        finally:
            os.close(descriptor)
        first += source.chains
    return sums


def lock_folder(path: Path, require_free: Callable[[Path], None]) -> Lock:
    """Make a store's folder if there is none, and take its lock.

    :param require_free: raises if the folder holds other things. It is asked first, so that they are left as they are,
        and again under the lock, since another run may have begun meanwhile.
    :raises OSError: see :class:`FolderRecorder`.
    """
    try:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{path} is a file; a draw store is a folder of its own. It was left as it is")
        make_folder(path)
        require_free(path)
        lock = Lock(path / LOCK, f"the draw store {path}")
        try:
            require_free(path)
        except BaseException:
            lock.withdraw()
            raise
        return lock
    except (BlockingIOError, NotADirectoryError, FileExistsError):
        raise
    except OSError as error:
        raise OSError(error.errno, f"the draw store {path} can't be written: {error}") from error


# small steps --------------------------------------------------------------------------------------------------------


def _require_free(folder: Path) -> None:
    """:raises FileExistsError: if there are other things than a run."""
    names = sorted(entry.name for entry in folder.iterdir())
    if CHECKPOINT in names:
        return
    if TASKS in names:
        raise FileExistsError(
            f"{folder} is a draw store of tasks; pass the same executor or chains_per_task as before. It was left as "
            "it is"
        )
    others = [name for name in names if name != LOCK and not name.startswith(f".{CHECKPOINT}.")]
    if others:
        shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise FileExistsError(f"{folder} is no draw store but holds {shown}; name a new or an empty folder")
