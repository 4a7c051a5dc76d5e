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

Checkpoints and guides are files of tensors and a JSON header, written whole or not at all. No pickle. They and the
draws carry a CRC-32, which reading compares. It finds whatever happens to a file by itself (flipped bits, zeros that a
power cut left, a lost end); it is no seal against somebody who writes another file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pyro_symmetric.errors import Error

PathLike = str | os.PathLike[str]
Draw = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]  # samples and statistics of all chains, (chains, ...)
# A posterior's samples (chains, draws, *site_shape), statistics (chains, draws), and metadata, whatever JSON can hold.
Contents = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]
KIND, VERSION = "draw store", 3
CHECKPOINT, LOCK = "checkpoint.safetensors", ".pyro_symmetric.lock"
GROUPS = ("posterior", "sample_stats")
COMMIT_SECONDS = 5.0  # at least so long between two commits,
COMMIT_SHARE = 0.05  # and so long that they take at most this share of the time
BLOCK = 2**25  # bytes of draws that wait to be written; those of a GPU wait there, as each copy makes the host wait
AT_ONCE = 1000  # draws of a posterior that is saved
CHECKSUM, OPEN = "crc32", "0" * 8  # what stands in a file's header while its checksum is made
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*FLOATS, *WHOLES)}
NEW = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # a file to write in place, made if there is none; no link


class StoreError(Error, ValueError):
    """Damaged files on the disk, or others than expected: another run's, another version's."""


def read_store(path: PathLike, *, verify: bool = True) -> Contents:
    """The draws of a store that count, mapped from its files, as :meth:`.Posterior.load` says."""
    folder = Path(path)
    if not (folder / CHECKPOINT).exists():
        raise FileNotFoundError(f"there is no draw store at {path}")
    found = Checkpoint.read(folder)
    if found.draws == 0 and found.state:
        raise StoreError(f"the draw store {folder} holds no draws yet; the call that began it resumes its warm-up")
    return found.contents(folder, verify)


def save_store(path: PathLike, contents: Contents) -> None:
    """Write a posterior to a folder, which appears whole or not at all, as :meth:`.Posterior.save` says."""
    *parts, metadata = contents
    path, draws = Path(path), next(iter(parts[0].values())).shape[1]
    if path.is_symlink() or (path.exists() and (not (path / CHECKPOINT).is_file() or Checkpoint.read(path).state)):
        raise FileExistsError(f"{path} is something else than a saved posterior; it was left as it is")
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
        new = Path(beside) / "new"
        with Recorder(new, draws) as recorder:
            for begin in range(0, max(draws, 1), AT_ONCE):
                rows = slice(begin, begin + AT_ONCE)
                recorder.write([{n: v[:, rows].transpose(0, 1) for n, v in kept.items()} for kept in parts])
            recorder.commit(draws, lambda: metadata, bytes)
        (new / LOCK).unlink()
        old = path.rename(Path(beside) / "old") if path.exists() else None
        try:
            new.rename(path)
        except BaseException:
            if old is not None:
                old.rename(path)
            raise
        sync(path.parent)


# writing draws ------------------------------------------------------------------------------------------------------


class Recorder:
    """Draws, held back until there are many, and then kept in memory, or in a folder, which one process writes.

    >>> with Recorder(path, num_samples=100) as recorder:
    ...     recorder.append(0, {"w": torch.randn(4, 3)}, {"lp": torch.randn(4)})
    ...     recorder.commit(1, lambda: {"kernel": "HMC"}, lambda: b"")

    :param folder: made if there is none; ``None``: memory.
    :param num_samples: draws of each chain that there will be.
    :ivar fingerprint: what every checkpoint says of the run.
    :ivar last: what there was when the folder was opened.
    :ivar failed: once writing has failed, no more is tried.
    :ivar next_commit: when it is due, by ``time.perf_counter``.
    :ivar diverged: the number of draws kept so far whose statistic ``diverging`` is true.
    :raises OSError: if it can't be written, is written by another process, or holds other things than a run.
    :raises StoreError: if it is damaged, or of a newer version. Nothing is changed then.
    """

    def __init__(self, folder: PathLike | None, num_samples: int):
        self.folder, self.num_samples = None if folder is None else Path(folder), num_samples
        self.fingerprint = dict[str, Any]()
        self.last: Checkpoint | None = None
        self.failed, self.next_commit, self.diverged = False, math.inf, 0
        # How many are written, to which arrays, and those that wait: one value, so that no interruption parts them.
        self._at: tuple[int, tuple[Array, ...], list[Draw]] = (0, (), [])
        self._kept: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})  # in memory
        self._files, self._open = list[int](), contextlib.ExitStack()
        if self.folder:
            with contextlib.ExitStack() as stack:
                self._begin(self.folder, stack)
                self._open = stack.pop_all()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def append(self, number: int, samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
        """Keep a draw of every chain, ``(chains, *site_shape)`` and ``(chains,)``, which must stay as they are.

        It takes the place of all that came from this number on; what comes before it counts from now on.
        """
        done, _, held = self._at
        del held[number - done :]
        if len(held) * sum([value.nbytes for value in (*samples.values(), *statistics.values())]) > BLOCK:
            self._hand_over(number)
        self._at[2].append((samples, statistics))

    def commit(
        self, draws: int, metadata: Callable[[], dict[str, Any]], state: Callable[[], bytes | memoryview]
    ) -> None:
        """Make the first draws of a folder safe, and with them the state that a broken run resumes from.

        :param metadata: of the posterior; called, as ``state`` is, within the time that commits are measured by.
        :raises OSError: if it can't be written; what was committed before is safe.
        """
        assert self.folder
        began = time.perf_counter()
        content = state()
        self._hand_over(draws)
        with self._reporting(self.folder):
            for file in self._files:
                os.fsync(file)
            found = Checkpoint(draws, self._at[1], self.fingerprint, metadata(), content)
            if self._files:  # there is something new
                self._tell_zarr(self.folder, found)
            found.write(self.folder)
        now = time.perf_counter()
        self.next_commit = now + max(COMMIT_SECONDS, (now - began) / COMMIT_SHARE)

    def draws(self, count: int, metadata: dict[str, Any]) -> Contents:
        """The first draws."""
        self._hand_over(count)
        if self.folder:
            return Checkpoint(count, self._at[1], {}, metadata).contents(self.folder)
        samples, statistics = ({name: v[:, :count] for name, v in kept.items()} for kept in self._kept)
        return samples, statistics, metadata

    def write(self, parts: list[dict[str, Tensor]]) -> None:
        """Keep many draws at once, samples and statistics ``(draws, chains, ...)``, behind those that there are."""
        begin = self._at[0]
        self._at = (begin + len(next(iter(parts[0].values()))), self._written(parts, begin), [])

    # small steps ----------------------------------------------------------------------------------------------------

    def _begin(self, folder: Path, stack: contextlib.ExitStack) -> None:
        """Open the folder, and lock it; the system frees it when this process ends, however it ends."""
        import fcntl  # of POSIX

        make_folder(folder)
        others = [entry.name for entry in folder.iterdir() if not entry.name.startswith((LOCK, f".{CHECKPOINT}."))]
        if others and CHECKPOINT not in others:
            raise FileExistsError(f"{folder} is no draw store but holds {', '.join(sorted(others)[:5])}; name another")
        lock = os.open(folder / LOCK, NEW, 0o666)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"{folder} is being written by another run; nothing was done") from error
        stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # also where a process was forked meanwhile
        for stale in folder.glob(f".{CHECKPOINT}.*.tmp"):  # left by a process that was killed in a commit
            stale.unlink()
        if (folder / CHECKPOINT).exists():
            self.last = Checkpoint.read(folder)
            self.last.contents(folder, verify=True)
            self._at = (self.last.draws, self.last.arrays, [])
        self.next_commit = time.perf_counter() + COMMIT_SECONDS

    def _hand_over(self, until: int) -> None:
        """Write what is held of the draws before ``until``; an interruption leaves it to be written again."""
        done, _, held = self._at
        ready, rest = held[: max(0, until - done)], held[max(0, until - done) :]
        if ready:
            parts = [{n: torch.stack([draw[k][n] for draw in ready]).cpu() for n in ready[0][k]} for k in (0, 1)]
            arrays = self._written(parts, done)
            self.diverged += int(parts[1]["diverging"].sum()) if "diverging" in parts[1] else 0
            self._at = (done + len(ready), arrays, rest)

    def _written(self, parts: list[dict[str, Tensor]], begin: int) -> tuple[Array, ...]:
        """Put samples and statistics ``(draws, chains, ...)`` into their place; the arrays afterwards, of files.

        :raises OSError: if there is no room; what was committed is safe.
        """
        named = [(group, *item) for group, values in zip(GROUPS, parts, strict=True) for item in values.items()]
        if not self.folder:
            for group, name, value in named:
                kept, shape = self._kept[GROUPS.index(group)], (value.shape[1], self.num_samples, *value.shape[2:])
                if name not in kept:
                    kept[name] = torch.empty(shape, dtype=value.dtype, device="cpu")
                kept[name][:, begin : begin + len(value)] = value.transpose(0, 1)
            return ()
        arrays = tuple(Array.of(group, name, value.dtype, value.shape[1:]) for group, name, value in named)
        known, found = self._at[1] or arrays, []
        if known != arrays:
            differing = sorted({array.name for array in {*known} ^ {*arrays}})
            raise StoreError(f"the draw store {self.folder} holds other sites or statistics; what differs: {differing}")
        with self._reporting(self.folder):
            self._files = self._files or [self._file(self.folder, array) for array in arrays]
            for array, file, (_, _, value) in zip(known, self._files, named, strict=True):
                data, at = raw_bytes(value).numpy().data, begin * array.size
                found.append(replace(array, crc=zlib.crc32(data, array.crc)))
                while len(data):  # the system may take less than it is given, and on a full disk does so at first
                    written = os.pwrite(file, data, at)
                    data, at = data[written:], at + written
        return tuple(found)

    def _file(self, folder: Path, array: Array) -> int:
        """Open an array's file, with room for all draws, so that a full disk is told now."""
        path, size = array.file(folder), self.num_samples * array.size
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, NEW, 0o666)
        self._open.callback(os.close, file)
        if size > os.fstat(file).st_size:
            getattr(os, "posix_fallocate", lambda file, _, size: os.truncate(file, size))(file, 0, size)
        return file

    def _tell_zarr(self, folder: Path, found: Checkpoint) -> None:
        """Tell other readers what there is: a file ``zarr.json`` for each group and array."""
        group = {"zarr_format": 3, "node_type": "group"}
        nodes: dict[str, dict[str, Any]] = {name: {**group, "attributes": {}} for name in GROUPS}
        for array, file in zip(found.arrays, self._files, strict=True):
            nodes[array.place] = array.zarr(found.draws, os.fstat(file).st_size // max(1, array.size) or 1)
        about = {"inference_library": "pyro_symmetric", "metadata": json.dumps(found.metadata)}
        inline = {"kind": "inline", "must_understand": False, "metadata": nodes}
        for place, node in {**nodes, ".": {**group, "attributes": about, "consolidated_metadata": inline}}.items():
            path, beside = (folder / place / name for name in ("zarr.json", ".zarr.json.tmp"))
            path.parent.mkdir(exist_ok=True)
            beside.unlink(missing_ok=True)
            with open(beside, "x") as text:
                json.dump(node, text)
            os.replace(beside, path)

    @contextlib.contextmanager
    def _reporting(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed, safe = True, Checkpoint.read(folder).draws if (folder / CHECKPOINT).exists() else 0
            raise OSError(
                error.errno,
                f"the draw store {folder} couldn't be written: {error}. {safe} draws of each chain are safe there; "
                "when the cause is mended (is the disk full?), the same call resumes from them",
            ) from error


# what a folder holds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """The record of the last commit.

    :param draws: how many of each chain count.
    :param arrays: in the order in which they were given; none before there are draws.
    :param fingerprint: of the run.
    :param metadata: of the posterior.
    :param state: what the run resumes from; empty if it can't.
    """

    draws: int
    arrays: tuple[Array, ...]
    fingerprint: dict[str, Any]
    metadata: dict[str, Any]
    state: bytes | memoryview = b""

    def write(self, folder: Path) -> None:
        """Replace what the folder has, whole or not at all."""
        header = {name: getattr(self, name) for name in ("draws", "fingerprint", "metadata")}
        header |= {"arrays": [asdict(array) for array in self.arrays]}
        content = self.state if isinstance(self.state, memoryview) else bytearray(self.state)
        state = {"state": torch.frombuffer(content, dtype=torch.uint8)} if len(content) else {}
        save_tensors(folder / CHECKPOINT, KIND, VERSION, state, header)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """:raises StoreError: if it is damaged or of a newer version."""
        tensors, header = load_tensors(inside(folder, CHECKPOINT), KIND, VERSION)
        try:
            arrays = tuple(Array(**{**said, "shape": tuple(said["shape"])}) for said in header["arrays"])
            fingerprint, metadata = (dict(header[name]) for name in ("fingerprint", "metadata"))
            state = tensors["state"].numpy().tobytes() if tensors else b""
            found = cls(header["draws"], arrays, fingerprint, metadata, state)
            alike = len(arrays) == len({array.place for array in arrays})
            if not alike or type(found.draws) is not int or not found.draws >= 0 or (found.draws and not arrays):
                raise ValueError(f"{found.draws!r} draws of {[array.place for array in arrays]}")
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{folder / CHECKPOINT} has a damaged header: {error!r}") from error
        return found

    def contents(self, folder: Path, verify: bool = False) -> Contents:
        """The draws that count, mapped.

        :raises StoreError: naming the first array that is missing or cut short, or differs from its checksum.
        """
        found: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}
        for array in self.arrays:
            found[array.group][array.name] = array.map(folder, self.draws, verify)
        return found["posterior"], found["sample_stats"], self.metadata


@dataclass(frozen=True)
class Array:
    """One array of a store, whose axes are chains, draws and a site's own; in its file draws come first.

    :param shape: of one draw of all chains, ``(chains, *site_shape)``.
    :param crc: the CRC-32 of the draws that count.
    """

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    crc: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        lengths = all(type(length) is int and length >= 0 for length in self.shape)
        named = self.group in GROUPS and self.name not in ("", ".", "..")  # which Zarr has for other folders
        if not named or self.dtype not in DTYPES or not (self.shape and lengths):
            raise ValueError(f"a store can't keep {self}")

    @classmethod
    def of(cls, group: str, name: str, dtype: torch.dtype, shape: torch.Size) -> Array:
        """The array that keeps draws ``(chains, *site_shape)``."""
        return cls(group, name, str(dtype).removeprefix("torch."), tuple(shape))

    @property
    def size(self) -> int:
        """Bytes of one draw of all chains."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def place(self) -> str:
        """The array's folder within that of the store."""
        return "/".join([self.group, quote(self.name, safe=" ()[],=+@!$&'")])

    def file(self, folder: Path) -> Path:
        """:raises StoreError: if it leads out of the folder."""
        return inside(folder, "/".join([self.place, "c", *"0" * (len(self.shape) + 1)]))

    def map(self, folder: Path, draws: int, verify: bool = False) -> Tensor:
        """The first draws ``(chains, draws, *site_shape)``, read when they are touched; changes stay in memory.

        :raises StoreError: if they aren't there, or aren't those of the checksum, which is looked at on demand.
        """
        path, size = self.file(folder), draws * self.size
        named = f"the draw store {folder} is damaged: {path.relative_to(folder)}"
        if not path.is_file() or path.stat().st_size < size:  # a pipe would be waited for
            raise StoreError(f"{named} is missing or cut short")
        kept = torch.empty(0, dtype=torch.uint8, device="cpu")
        if size:
            kept = torch.from_file(str(path), size=size, dtype=torch.uint8)
        if verify and zlib.crc32(kept.numpy().data) != self.crc:  # at some gigabytes a second
            advice = "Restore it from a copy; Posterior.load(path, verify=False) reads it as it is"
            raise StoreError(f"{named} differs from its checksum. {advice}")
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


# files ----------------------------------------------------------------------------------------------------------------


def save_tensors(
    path: PathLike, kind: str, version: int, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors and a header to ``path``; what stood there is replaced only by a complete file.

    :param kind: what the file holds, such as ``"guide"``; :func:`load_tensors` asks for it again.
    :param version: of that kind's layout.
    :param header: anything that JSON can hold.
    :raises OSError: if the file can't be written (a full disk, a read-only folder).
    """
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}  # none share memory
    said = {"format": f"pyro_symmetric.{kind}", "version": str(version), "json": json.dumps(header), CHECKSUM: OPEN}
    content = safetensors.torch.save(own, said)
    write_whole(path, _with_sum(content, OPEN, f"{zlib.crc32(content):08x}"), kind)


def load_tensors(path: PathLike, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: tensors on the CPU, and the header.

    :param version: the newest version that the caller understands.
    :raises OSError: if there is no such file or it can't be read.
    :raises StoreError: if it is truncated, differs from its checksum, is of another kind, or of a newer version.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {kind} at {path}")
    content = path.read_bytes()  # at once, since it may be replaced meanwhile
    try:
        tensors = safetensors.torch.load(content)
        said = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        if said["format"] != f"pyro_symmetric.{kind}":
            raise StoreError(f"{path} is no {kind} of this library, but {said['format']!r}")
        if int(said["version"]) > version:
            raise StoreError(f"{path} is of version {said['version']} of the {kind} format: a newer pyro_symmetric's")
        if f"{zlib.crc32(_with_sum(content, said[CHECKSUM], OPEN)):08x}" != said[CHECKSUM]:
            raise StoreError(f"{path} is damaged: it differs from its checksum. Restore it from a copy, or remove it")
        return tensors, dict(json.loads(said["json"]))
    except StoreError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} is no {kind} or is damaged (was it cut short?): {error!r}") from error


def _with_sum(content: bytes, before: str, after: str) -> bytes:
    """The file's content with another checksum in its header, which comes first and quotes no other."""
    return content.replace(f'"{CHECKSUM}":"{before}"'.encode(), f'"{CHECKSUM}":"{after}"'.encode(), 1)


def inside(folder: PathLike, name: str) -> Path:
    """The path of a file that another file names, as ``"a"`` or ``"a/b"``.

    :raises StoreError: unless that is in ``folder``, links followed: nothing that is read may name other files.
    """
    folder = Path(folder)
    path = folder / name
    with contextlib.suppress(OSError, RuntimeError):  # links that lead to each other
        if path.resolve().is_relative_to(folder.resolve()):
            return path
    raise StoreError(f"{folder} refers to {name!r}, which isn't a file inside of it; nothing else is read or written")


def write_whole(path: PathLike, content: bytes, kind: str = "file") -> None:
    """Write a file beside ``path``, sync it, and only then move it into its place.

    :raises OSError: if it can't be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, f"the {kind} couldn't be saved to {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def raw_bytes(value: Tensor) -> Tensor:
    """A tensor's values as a flat tensor of bytes on the CPU, of any dtype."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one value alone may keep another stride


def sync(folder: PathLike) -> None:
    """Wait until a folder's list of files is on the disk and no longer in memory only."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: PathLike) -> None:
    """Make a folder, and those above it that are missing, so that a power cut doesn't take them away again."""
    path = Path(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)
