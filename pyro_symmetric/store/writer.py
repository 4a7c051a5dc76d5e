"""The one process that writes a store: append draws, commit them, resume after an interruption."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pyro_symmetric.storage import (
    Lock,
    PathLike,
    StoreError,
    flush,
    inside,
    make_folder,
    open_own,
    raw_bytes,
    save_tensors,
    sync,
)
from pyro_symmetric.store.layout import (
    CHECKPOINT,
    CHUNKS,
    KIND,
    LOCK,
    TASKS,
    VERSION,
    Column,
    Commit,
    chunk_record,
    find_damage,
    seal_of,
)


class Mark(NamedTuple):
    """A place in a store, between two draws.

    :param draws: how many lie before it.
    :param sums: each file's CRC-32 since the last commit.
    """

    draws: int
    sums: tuple[int, ...]


class DrawStore:
    """A store, open for writing.

    >>> with DrawStore(path) as store:
    ...     store.append({"w": torch.randn(4, 3)}, {"lp": torch.randn(4)})
    ...     store.commit({"kernel": "HMC"}, {"iteration": 1}, {"z": torch.randn(4, 3)})

    :param path: the folder; made if there is none. If it is a store, ``last`` is its last commit, whose draws have been
        compared with their checksums.
    :raises NotADirectoryError: if it is a file.
    :raises FileExistsError: if it holds other things than a store.
    :raises BlockingIOError: if another process writes it.
    :raises StoreError: if it is damaged, or of a newer version. Nothing is changed then.
    :raises OSError: if it can't be written.
    """

    def __init__(self, path: PathLike):
        self.path = Path(path)
        self._lock = lock_folder(self.path, _recognise)
        self._files: list[io.FileIO] = []
        self._columns: tuple[Column, ...] = ()
        self.token = int.from_bytes(os.urandom(4), "little")
        # Draws and chunks that are committed, and the last one's seal; one value, so that no interruption parts them.
        self._done = (0, 0, self.token)
        self.failed = False  # once writing has failed, no more is tried
        self.last: Commit | None = None
        self.mark = Mark(0, ())
        try:
            self._take_up()
        except BaseException:
            self._lock.withdraw()
            raise

    @property
    def committed(self) -> int:
        """Draws of each chain that are safe."""
        return self._done[0]

    def append(self, samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
        """Write one draw of every chain: site -> ``(chains, *site_shape)``, name -> ``(chains,)``.

        :raises OSError: if it can't be written; what was committed is safe.
        """
        values = [("samples", *item) for item in samples.items()] + [("statistics", *i) for i in statistics.items()]
        if not self._files:
            self._start([Column.like(kind, name, k, value) for k, (kind, name, value) in enumerate(values)])
        sums = []
        with self._reporting():
            for file, before, (_, _, value) in zip(self._files, self.mark.sums, values, strict=True):
                data = raw_bytes(value).numpy().data
                _write(file, data)
                sums.append(zlib.crc32(data, before))
        self.mark = Mark(self.mark.draws + 1, tuple(sums))  # last: an interruption leaves no half draw counted

    def commit(
        self,
        metadata: Mapping[str, Any],
        checkpoint: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        mark: Mark | None = None,
    ) -> None:
        """Make the draws up to ``mark`` safe, and with them what is needed to resume from there.

        :param metadata: of the posterior that a reader gets.
        :param checkpoint: JSON for whoever resumes; ``tensors`` likewise.
        :param mark: by default the last draw; any after it are cut off.
        :raises OSError: if it can't be written; what was committed before is safe.
        """
        mark = self.mark if mark is None else mark
        _, chunks, seal = self._done
        with self._reporting():
            for file, column in zip(self._files, self._columns, strict=False):  # no files yet: no new draws
                file.truncate(mark.draws * column.size)
                file.seek(0, os.SEEK_END)
                flush(file.fileno())
            if mark.draws > self.committed:
                seal = self._append_chunk(mark)
                chunks += 1
            header = {
                "token": self.token,
                "seal": seal,
                "columns": [vars(column) for column in self._columns],
                "draws": mark.draws,
                "chunks": chunks,
                "metadata": dict(metadata),
                "checkpoint": dict(checkpoint),
            }
            save_tensors(self.path / CHECKPOINT, KIND, VERSION, tensors, header)
        self._done = (mark.draws, chunks, seal)
        self.mark = Mark(mark.draws, (0,) * len(mark.sums))

    def close(self) -> None:
        """Let others write."""
        for file in self._files:
            file.close()
        self._files = []
        self._lock.release()

    def __enter__(self) -> DrawStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # small steps ----------------------------------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Read the last commit; changes nothing."""
        if not (self.path / CHECKPOINT).exists():
            return
        self.last = Commit.read(self.path)
        if damage := find_damage(self.path, self.last, thorough=True):
            raise StoreError(f"{damage.message}. Nothing was changed")
        self.token, self._columns = self.last.token, self.last.columns
        self._done = (self.last.draws, self.last.chunks, self.last.seal)
        self.mark = Mark(self.committed, (0,) * len(self._columns))

    def _start(self, columns: Sequence[Column]) -> None:
        """Open the files, and cut off what no commit has named."""
        if self._columns and tuple(columns) != self._columns:
            changed = sorted({column.name for column in set(columns) ^ set(self._columns)})
            raise StoreError(f"the draw store {self.path} holds other sites or statistics; what differs: {changed}")
        self._columns = tuple(columns)
        self.mark = Mark(self.committed, (0,) * len(columns))
        with self._reporting():
            for stale in self.path.glob(f".{CHECKPOINT}.*.tmp"):  # left by a process that was killed in a commit
                stale.unlink()
            for column in columns:
                file = inside(self.path, column.file)
                file.parent.mkdir(exist_ok=True)
                self._files.append(_opened(file))
                self._files[-1].truncate(self.committed * column.size)
                self._files[-1].seek(0, os.SEEK_END)
            _opened(self.path / CHUNKS).close()
            for folder in {(self.path / column.file).parent for column in columns} | {self.path}:
                sync(folder)

    def _append_chunk(self, mark: Mark) -> int:
        """:return: the record's seal."""
        record = chunk_record(mark.draws, mark.sums, self._done[2])
        with _opened(self.path / CHUNKS) as chunks:
            chunks.truncate(self._done[1] * len(record))
            chunks.seek(0, os.SEEK_END)
            _write(chunks, memoryview(record))
            flush(chunks.fileno())
        return seal_of(record)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = True
            raise OSError(
                error.errno,
                f"the draw store {self.path} couldn't be written: {error}. {self.committed} draws of each chain are "
                "safe there; when the cause is mended (is the disk full?), the same call resumes from them",
            ) from error


def lock_folder(path: Path, recognise: Callable[[Path], None]) -> Lock:
    """Make a store's folder if there is none, and take its lock.

    :param recognise: raises if the folder holds other things. It is asked first, so that they are left as they are, and
        again under the lock, since another run may have begun meanwhile.
    :raises OSError: see :class:`DrawStore`.
    """
    try:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{path} is a file; a draw store is a folder of its own. It was left as it is")
        make_folder(path)
        recognise(path)
        lock = Lock(path / LOCK, f"the draw store {path}")
        try:
            recognise(path)
        except BaseException:
            lock.withdraw()
            raise
        return lock
    except (BlockingIOError, NotADirectoryError, FileExistsError):
        raise
    except OSError as error:
        raise OSError(error.errno, f"the draw store {path} can't be written: {error}") from error


# small steps --------------------------------------------------------------------------------------------------------


def _recognise(folder: Path) -> None:
    """:raises FileExistsError: if there are other things than a store."""
    if (folder / CHECKPOINT).exists():
        return
    names = sorted(entry.name for entry in folder.iterdir())
    if TASKS in names:
        raise FileExistsError(
            f"{folder} is a draw store of tasks; pass the same executor or chains_per_task as before. It was left as "
            "it is"
        )
    others = [name for name in names if name != LOCK and not name.startswith(f".{CHECKPOINT}.")]
    if others:
        shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise FileExistsError(f"{folder} is no draw store but holds {shown}; name a new or an empty folder")


def _opened(file: Path) -> io.FileIO:
    return io.FileIO(file, "r+" if file.exists() else "w+", opener=open_own)


def _write(file: io.FileIO, data: memoryview) -> None:
    """All of it: a raw file may take less than it is given, and on a full disk does so before it complains."""
    while len(data):
        data = data[file.write(data) or 0 :]
