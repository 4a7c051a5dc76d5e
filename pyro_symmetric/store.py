"""Draws on their way to memory, or to a folder that a broken run resumes from and that everybody reads at any time.

The folder of a run, and of a saved posterior, is a group of Zarr's third version, which
``xarray.open_datatree(folder, engine="zarr")`` opens, and so ArviZ::

    zarr.json                        the group, with what is known of the draws as attributes
    posterior/<site>/c/0/0           all draws of a site, one chunk, in which draws follow each other
    sample_stats/<name>/c/0/0        those of a statistic, likewise
    checkpoint.safetensors           how many draws count, their checksums, the state to resume from
    .pyro_symmetric.lock             held by the process that writes

Draws are written behind each other as they are made, and mapped as they are, so that neither writing nor reading needs
memory for all. What the checkpoint counts is there; it is replaced whole at every commit, after the draws that it
counts have reached the disk. Nothing else is believed: a ``zarr.json`` is for others, and is never read here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor

from pyro_symmetric.storage import (
    Lock,
    PathLike,
    StoreError,
    inside,
    load_tensors,
    make_folder,
    raw_bytes,
    save_tensors,
    sync,
)

KIND, VERSION = "draw store", 2
CHECKPOINT, LOCK = "checkpoint.safetensors", ".pyro_symmetric.lock"
GROUPS = ("posterior", "sample_stats")
COMMIT_SECONDS = 5.0  # at least so long between two commits,
COMMIT_SHARE = 0.05  # and so long that they take at most this share of the time
BLOCK = 2**25  # bytes of draws that wait to be written; those of a GPU wait there, as each copy makes the host wait
PIECE = 2**21  # bytes to read at once
AT_ONCE = 1000  # draws of a posterior that is saved
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    ]
}
Draw = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]  # samples and statistics of all chains, (chains, ...)


class Contents(NamedTuple):
    """The tensors and metadata of a posterior.

    :param samples: site -> ``(chains, draws, *site_shape)``.
    :param statistics: name -> ``(chains, draws)``.
    :param metadata: anything that JSON can hold.
    """

    samples: dict[str, Tensor]
    statistics: dict[str, Tensor]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Array:
    """One array of a store, whose axes are chains, draws and a site's own; in its file draws come first.

    :param shape: of one draw of all chains, ``(chains, *site_shape)``.
    """

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = all(type(length) is int and length >= 0 for length in self.shape)
        if self.group not in GROUPS or self.dtype not in DTYPES or not (self.shape and lengths):
            raise ValueError(f"a store can't keep {self}")

    @property
    def size(self) -> int:
        """Bytes of one draw of all chains."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def place(self) -> str:
        """The array's folder within that of the store."""
        name = quote(self.name, safe=" ()[],=+@!$&'")
        return f"{self.group}/{name.replace('.', '%2E') if name == 'zarr.json' or not name.strip('.') else name}"

    def file(self, folder: Path) -> Path:
        """:raises StoreError: if it leads out of the folder."""
        return inside(folder, "/".join([self.place, "c", *"0" * (len(self.shape) + 1)]))

    def sum(self, folder: Path, draws: int) -> int:
        """The CRC-32 of the first draws, read at some gigabytes a second."""
        total, left = 0, draws * self.size
        with open(self.file(folder), "rb") as file:
            while left > 0 and (piece := file.read(min(left, PIECE))):
                total, left = zlib.crc32(piece, total), left - len(piece)
        return total

    def map(self, folder: Path, draws: int) -> Tensor:
        """The first draws ``(chains, draws, *site_shape)``, read when they are touched; changes stay in memory.

        :raises StoreError: if they aren't there.
        """
        path, size = self.file(folder), draws * self.size
        if not path.is_file() or path.stat().st_size < size:  # a pipe would be waited for
            raise StoreError(f"the draw store {folder} is damaged: {path.relative_to(folder)} is missing or cut short")
        kept = torch.empty(0, dtype=torch.uint8, device="cpu")
        if size:
            kept = torch.from_file(str(path), size=size, dtype=torch.uint8)
        return kept.view(DTYPES[self.dtype]).view(draws, *self.shape).transpose(0, 1)

    def zarr(self, draws: int, room: int) -> dict[str, Any]:
        """The array in Zarr's words: one chunk with room for all draws, of which there are so many now."""
        chains, *own = self.shape
        chunk = [chains, room, *(max(1, length) for length in own)]
        return {
            **{"zarr_format": 3, "node_type": "array", "attributes": {}, "data_type": self.dtype},
            "shape": [chains, draws, *own],
            "dimension_names": ["chain", "draw", *(f"{self.name}_dim_{k}" for k in range(len(own)))],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [
                {"name": "transpose", "configuration": {"order": [1, 0, *range(2, len(own) + 2)]}},
                {"name": "bytes", "configuration": {"endian": "little"}},
            ],
            "fill_value": False if self.dtype == "bool" else 0,
        }


@dataclass(frozen=True)
class Checkpoint:
    """The record of the last commit.

    :param draws: how many of each chain count.
    :param arrays: in the order in which they were given; none before there are draws.
    :param sums: the CRC-32 of each array's draws.
    :param fingerprint: of the run.
    :param metadata: of the posterior.
    :param state: what the run resumes from; empty if it can't.
    """

    draws: int
    arrays: tuple[Array, ...]
    sums: tuple[int, ...]
    fingerprint: dict[str, Any]
    metadata: dict[str, Any]
    state: bytes | memoryview = b""

    def write(self, folder: Path) -> None:
        """Replace what the folder has, whole or not at all."""
        header = {name: getattr(self, name) for name in ("draws", "sums", "fingerprint", "metadata")}
        header |= {"arrays": [asdict(array) for array in self.arrays], "state_bytes": len(self.state)}
        content = self.state if isinstance(self.state, memoryview) else bytearray(self.state)
        state = torch.frombuffer(content or bytearray(1), dtype=torch.uint8)
        save_tensors(folder / CHECKPOINT, KIND, VERSION, {"state": state}, header)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """:raises StoreError: if it is damaged or of a newer version."""
        tensors, header = load_tensors(inside(folder, CHECKPOINT), KIND, VERSION)
        try:
            arrays = tuple(Array(**{**said, "shape": tuple(said["shape"])}) for said in header["arrays"])
            state = bytes(raw_bytes(tensors["state"])[: header["state_bytes"]].numpy())
            fingerprint, metadata = (dict(header[name]) for name in ("fingerprint", "metadata"))
            found = cls(header["draws"], arrays, tuple(header["sums"]), fingerprint, metadata, state)
            alike = len(found.sums) == len(arrays) == len({array.place for array in arrays})
            if not alike or type(found.draws) is not int or not found.draws >= 0 or (found.draws and not arrays):
                raise ValueError(f"{found.draws!r} draws of {[array.place for array in arrays]}")
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{folder / CHECKPOINT} has a damaged header: {error!r}") from error
        return found

    def contents(self, folder: Path) -> Contents:
        """The draws that count, mapped.

        :raises StoreError: if an array is missing or cut short.
        """
        found: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}
        for array in self.arrays:
            found[array.group][array.name] = array.map(folder, self.draws)
        return Contents(found["posterior"], found["sample_stats"], self.metadata)

    def verify(self, folder: Path) -> None:
        """Read all draws that count.

        :raises StoreError: naming the first array that differs from its checksum.
        """
        self.contents(folder)
        for array, expected in zip(self.arrays, self.sums, strict=True):
            if array.sum(folder, self.draws) != expected:
                raise StoreError(
                    f"the draw store {folder} is damaged: {array.file(folder).relative_to(folder)} differs from its "
                    "checksum. Restore it from a copy; Posterior.load(path, verify=False) reads it as it is"
                )


def read_store(path: PathLike, *, verify: bool = True) -> Contents:
    """The draws of a store that count, mapped from its files.

    :param verify: read everything and compare it with the checksums; otherwise draws are read when they are touched.
    :raises OSError: if there is no store or it can't be read.
    :raises StoreError: if it holds no draws yet, is damaged, or is of a newer version.
    """
    folder = Path(path)
    if not (folder / CHECKPOINT).exists():
        raise FileNotFoundError(f"there is no draw store at {path}")
    found = Checkpoint.read(folder)
    if found.draws == 0 and found.state:
        raise StoreError(f"the draw store {folder} holds no draws yet; the call that began it resumes its warm-up")
    if verify:
        found.verify(folder)
    return found.contents(folder)


def save_store(path: PathLike, contents: Contents) -> None:
    """Write a posterior to a folder, which appears whole or not at all; another posterior's is replaced.

    :raises OSError: if it can't be written, or if there is something else.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and (not (path / CHECKPOINT).is_file() or Checkpoint.read(path).state)):
        raise FileExistsError(f"{path} is something else than a saved posterior; it was left as it is")
    new, old = (path.with_name(f".{path.name}.{secrets.token_hex(8)}.{name}") for name in ("tmp", "old"))
    draws = next(iter(contents.samples.values())).shape[1]
    try:
        new.mkdir()
        with FolderRecorder(new, draws) as recorder:
            for begin in range(0, max(draws, 1), AT_ONCE):
                rows = slice(begin, begin + AT_ONCE)
                recorder.write([{n: v[:, rows].transpose(0, 1) for n, v in kept.items()} for kept in contents[:2]])
            recorder.commit(draws, lambda: contents.metadata, bytes)
        (new / LOCK).unlink()
        if path.exists():
            path.rename(old)
        new.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


class Recorder:
    """Draws, held back until there are many, and then kept in the CPU's memory.

    :param num_samples: draws of each chain that there will be.
    """

    def __init__(self, num_samples: int):
        self.diverged = 0
        """The number of draws kept so far whose statistic ``diverging`` is true."""
        self.num_samples = num_samples
        # How many are written, their checksums, and those that wait: one value, so that no interruption parts them.
        self._at: tuple[int, tuple[int, ...], list[Draw]] = (0, (), [])
        self._kept: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    @property
    def is_due(self) -> bool:
        """True if it is time for a commit; never, if nothing is kept beyond the process."""
        return False

    def append(self, number: int, samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
        """Keep a draw of every chain, ``(chains, *site_shape)`` and ``(chains,)``, which must stay as they are.

        It takes the place of all that came from this number on; what comes before it counts from now on.
        """
        done, _, held = self._at
        del held[number - done :]
        size = sum([value.nbytes for value in (*samples.values(), *statistics.values())])
        if len(held) * size > BLOCK:
            self._hand_over(number)
        self._at[2].append((samples, statistics))

    def commit(
        self, draws: int, metadata: Callable[[], dict[str, Any]], state: Callable[[], bytes | memoryview]
    ) -> None:
        """Make the first draws safe, and with them the state that a broken run resumes from.

        :param metadata: of the posterior; called, as ``state`` is, only if something is kept beyond the process.
        """

    def draws(self, count: int, metadata: dict[str, Any]) -> Contents:
        """The first draws."""
        self._hand_over(count)
        cut = [{name: value[:, :count] for name, value in kept.items()} for kept in self._kept]
        return Contents(cut[0], cut[1], metadata)

    def _hand_over(self, until: int) -> None:
        """Write what is held of the draws before ``until``; an interruption leaves it to be written again."""
        done, _, held = self._at
        ready, rest = held[: max(0, until - done)], held[max(0, until - done) :]
        if ready:
            parts = [
                {name: torch.stack([draw[k][name] for draw in ready]).cpu() for name in ready[0][k]} for k in (0, 1)
            ]
            sums = self._write(parts, done)
            self.diverged += int(parts[1]["diverging"].sum()) if "diverging" in parts[1] else 0
            self._at = (done + len(ready), sums, rest)

    def _write(self, parts: list[dict[str, Tensor]], begin: int) -> tuple[int, ...]:
        """Put samples and statistics ``(draws, chains, ...)`` into their place; the checksums of all so far."""
        for kept, values in zip(self._kept, parts, strict=True):
            for name, value in values.items():
                if name not in kept:
                    shape = value.shape[1], self.num_samples, *value.shape[2:]
                    kept[name] = torch.empty(shape, dtype=value.dtype, device="cpu")
                kept[name][:, begin : begin + len(value)] = value.transpose(0, 1)
        return ()


class FolderRecorder(Recorder):
    """Draws in a folder; the one process that writes it.

    >>> with FolderRecorder(path, num_samples=100) as recorder:
    ...     recorder.append(0, {"w": torch.randn(4, 3)}, {"lp": torch.randn(4)})
    ...     recorder.commit(1, lambda: {"kernel": "HMC"}, lambda: b"")

    :param path: the folder; made if there is none.
    :param num_samples: draws of each chain that there will be.
    :raises OSError: if it can't be written, is written by another process, or holds other things than a run.
    :raises StoreError: if it is damaged, or of a newer version. Nothing is changed then.
    """

    def __init__(self, path: PathLike, num_samples: int):
        super().__init__(num_samples)
        self.path = Path(path)
        self.fingerprint: dict[str, Any] = {}  # what every checkpoint says of the run
        self.last: Checkpoint | None = None  # what the folder held, with draws that agree with their checksums
        self.failed = False  # once writing has failed, no more is tried
        self._arrays: tuple[Array, ...] = ()
        self._files: list[int] = []
        self._safe = 0
        self._next_commit = time.perf_counter() + COMMIT_SECONDS
        make_folder(self.path)
        others = [entry.name for entry in self.path.iterdir() if not entry.name.startswith((LOCK, f".{CHECKPOINT}."))]
        if others and CHECKPOINT not in others:
            raise FileExistsError(f"{path} is no draw store but holds {', '.join(sorted(others)[:5])}; name another")
        self._lock = Lock(self.path / LOCK, f"the draw store {path}")
        try:
            for stale in self.path.glob(f".{CHECKPOINT}.*.tmp"):  # left by a process that was killed in a commit
                stale.unlink()
            if (self.path / CHECKPOINT).exists():
                self.last = last = Checkpoint.read(self.path)
                last.verify(self.path)
                self._arrays, self._safe, self._at = last.arrays, last.draws, (last.draws, last.sums, [])
        except BaseException:
            self._lock.release()
            raise

    @property
    def is_due(self) -> bool:
        return time.perf_counter() >= self._next_commit

    def commit(
        self, draws: int, metadata: Callable[[], dict[str, Any]], state: Callable[[], bytes | memoryview]
    ) -> None:
        """:raises OSError: if it can't be written; what was committed before is safe."""
        began = time.perf_counter()
        content = state()
        self._hand_over(draws)
        with self._reporting():
            for file in self._files:
                os.fsync(file)
            found = Checkpoint(draws, self._arrays, self._at[1], self.fingerprint, metadata(), content)
            self._tell_zarr(found)
            found.write(self.path)
            self._safe = draws
        now = time.perf_counter()
        self._next_commit = now + max(COMMIT_SECONDS, (now - began) / COMMIT_SHARE)

    def write(self, parts: list[dict[str, Tensor]]) -> None:
        """Keep many draws at once, samples and statistics ``(draws, chains, ...)``, behind those that there are."""
        done = self._at[0]
        self._at = (done + len(next(iter(parts[0].values()))), self._write(parts, done), [])

    def draws(self, count: int, metadata: dict[str, Any]) -> Contents:
        return Checkpoint(count, self._arrays, self._at[1], {}, metadata).contents(self.path)

    def __enter__(self) -> FolderRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._files:
            os.close(self._files.pop())
        self._lock.release()

    # small steps ----------------------------------------------------------------------------------------------------

    def _write(self, parts: list[dict[str, Tensor]], begin: int) -> tuple[int, ...]:
        """:raises OSError: if there is no room; what was committed is safe."""
        with self._reporting():
            if not self._files:
                self._open(parts)
            sums, values = [], [value for kept in parts for value in kept.values()]
            for array, file, value, before in zip(self._arrays, self._files, values, self._at[1], strict=True):
                data = raw_bytes(value).numpy().data
                sums.append(zlib.crc32(data, before))
                at = begin * array.size
                while len(data):  # the system may take less than it is given, and on a full disk does so at first
                    written = os.pwrite(file, data, at)
                    data, at = data[written:], at + written
        return tuple(sums)

    def _open(self, parts: list[dict[str, Tensor]]) -> None:
        """The arrays' files, with room for all draws, so that a full disk is told now."""
        found = tuple(
            Array(group, name, str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))
            for group, values in zip(GROUPS, parts, strict=True)
            for name, value in values.items()
        )
        if self._arrays and self._arrays != found:
            differing = sorted({array.name for array in set(found) ^ set(self._arrays)})
            raise StoreError(f"the draw store {self.path} holds other sites or statistics; what differs: {differing}")
        for array in found:
            path = array.file(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
            size = self.num_samples * array.size
            if size > os.fstat(self._files[-1]).st_size:
                getattr(os, "posix_fallocate", lambda file, _, size: os.truncate(file, size))(self._files[-1], 0, size)
        self._arrays, self._at = found, (self._at[0], self._at[1] or (0,) * len(found), self._at[2])

    def _tell_zarr(self, found: Checkpoint) -> None:
        """Tell other readers what there is: a file ``zarr.json`` for each group and array."""
        if not self._files:  # nothing new
            return
        about = {"inference_library": "pyro_symmetric", "metadata": json.dumps(found.metadata)}
        nodes: dict[str, dict[str, Any]] = {}
        for group in [group for group in GROUPS if any(array.group == group for array in found.arrays)]:
            nodes[group] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        for array, file in zip(found.arrays, self._files, strict=True):
            nodes[array.place] = array.zarr(found.draws, os.fstat(file).st_size // max(1, array.size) or 1)
        inline = {"kind": "inline", "must_understand": False, "metadata": nodes}
        root = {"zarr_format": 3, "node_type": "group", "attributes": about, "consolidated_metadata": inline}
        for place, node in {**nodes, ".": root}.items():
            path, beside = (self.path / place / name for name in ("zarr.json", ".zarr.json.tmp"))
            beside.unlink(missing_ok=True)
            with open(beside, "x") as text:
                json.dump(node, text)
            os.replace(beside, path)

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
