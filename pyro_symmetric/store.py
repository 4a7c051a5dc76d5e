"""Draws in memory, or in a folder from which a broken run resumes and which can be read
at any time.

The folder of a run or of a saved posterior is a Zarr group (version 3), which ArviZ
opens by ``xarray.open_datatree(folder, engine="zarr")``::

    zarr.json                        the group and its arrays; metadata as attributes
    posterior/<site>/c/0/0           all draws of a site, one chunk, draws first
    sample_stats/<name>/c/0/0        all draws of a statistic, likewise
    checkpoint.safetensors           the number of valid draws, their checksums, and
                                     the state to resume from
    .pyro_symmetric.lock             held by the process that writes

Draws are appended as they come and mapped when they are read, so neither needs memory
for all of them. A commit syncs the draws and then replaces the checkpoint as a whole:
the draws that it counts are valid, and nothing else is. A ``zarr.json`` is written for
other readers and never read here.

The draws aren't written through zarr-python (3.1.6), which

* reads a chunk into memory and rewrites it as a whole: a site that can be mapped is
  one chunk, and appending to it takes 2,700 µs a draw of 16 chains and 100 weights,
  22 µs in chunks of 50 draws, which can't be mapped as one tensor;
* makes an array without allocating its room, so that a full disk shows hours later;
* never syncs a file, so that a checkpoint could reach the disk before its draws;
* has no bfloat16, and takes 1.4 s to import.

Checkpoints and guides are files of tensors with a JSON header, written whole or not at
all, without pickle. They and the draws carry a CRC-32, which reading compares. It
detects accidents (flipped bits, zeros after a power cut, truncation), not forgery.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import safetensors.torch
import torch
from torch import Size, Tensor

from pyro_symmetric.arguments import ByName, Entries, Json, Shape, Tensors, Values
from pyro_symmetric.errors import Error

PathLike = str | os.PathLike[str]
# samples and statistics of all chains, (chains, ...)
Draw = tuple[Tensors, Tensors]
# A posterior's samples (chains, draws, *site_shape), statistics (chains, draws), and
# metadata, whatever JSON can hold.
Contents = tuple[ByName, ByName, Entries]
KIND = "draw store"
VERSION = 3
CHECKPOINT = "checkpoint.safetensors"
LOCK = ".pyro_symmetric.lock"
GROUPS = ("posterior", "sample_stats")
COMMIT_SECONDS = 5.0  # between two commits, at least
COMMIT_SHARE = 0.05  # of the time that commits may take
# bytes of draws that wait to be written, on their own device: each copy from a GPU
# stalls the host
BLOCK = 2**25
DRAWS_AT_ONCE = 1000  # of a posterior that is saved
# the header's entry, and its value while the checksum is computed
CHECKSUM = "crc32"
BLANK = "0" * 8
NUMBERS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
DTYPES = {name: getattr(torch, name) for name in NUMBERS}
# the bytes of a file's tensors for each of its own: one storage may be two weights
MOST_EXPANDED = 3
# in place, into a new or an old file but no link
WRITE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class StoreError(Error, ValueError):
    """Damaged files, or those of another run or a newer version."""


def read_store(path: PathLike, *, verify: bool = True) -> Contents:
    """Read the valid draws of a store, mapped from its files; see
    :meth:`.Posterior.load`.
    """
    folder = Path(path)
    if not (folder / CHECKPOINT).exists():
        raise FileNotFoundError(f"there is no draw store at {path}")
    checkpoint = Checkpoint.read(folder)
    if checkpoint.draws == 0 and checkpoint.state:
        raise StoreError(
            f"the draw store {folder} holds no draws yet; the call that began it "
            "resumes its warm-up"
        )
    return checkpoint.contents(folder, verify)


def save_store(path: PathLike, contents: Contents) -> None:
    """Write a posterior to a folder, which appears whole or not at all; see
    :meth:`.Posterior.save`.
    """
    path = Path(path)
    if path.is_symlink() or (
        path.exists()
        and (not (path / CHECKPOINT).is_file() or Checkpoint.read(path).state)
    ):
        raise FileExistsError(
            f"{path} is something else than a saved posterior; it was left as it is"
        )
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", dir=path.parent
        ) as temporary:
            _save_by_way_of(Path(temporary), path, contents)
    except OSError as error:
        # the error names files under the temporary name, which are gone
        raise OSError(
            error.errno,
            f"the posterior couldn't be written to {path}: "
            f"{os.strerror(error.errno or 0)}. What was there before is unchanged, and "
            "nothing was left behind",
        ) from error


def _save_by_way_of(temporary: Path, path: Path, contents: Contents) -> None:
    """Write a posterior to a temporary folder, and rename it to ``path`` at the end."""
    *parts, metadata = contents
    draws = next(iter(parts[0].values())).shape[1]
    new = temporary / "new"
    with Recorder(new, draws) as recorder:
        for begin in range(0, max(draws, 1), DRAWS_AT_ONCE):
            rows = slice(begin, begin + DRAWS_AT_ONCE)
            recorder.write(
                [
                    {n: v[:, rows].transpose(0, 1) for n, v in part.items()}
                    for part in parts
                ]
            )
        recorder.commit(draws, lambda: metadata, bytes)
    (new / LOCK).unlink()
    old = path.rename(temporary / "old") if path.exists() else None
    try:
        new.rename(path)
    except BaseException:
        if old is not None:
            old.rename(path)
        raise
    sync(path.parent)


# writing draws ------------------------------------------------------------------------


class Recorder:
    """A writer of draws, which it collects into blocks and puts into memory or into a
    folder that it has locked.

    >>> from pyro_symmetric.store import Recorder, read_store
    >>> with Recorder("draws", num_samples=100) as recorder:
    ...     recorder.append(0, {"w": torch.randn(4, 3)}, {"lp": torch.randn(4)})
    ...     recorder.commit(1, lambda: {"kernel": "HMC"}, lambda: b"")
    >>> samples, statistics, metadata = read_store("draws")
    >>> samples["w"].shape, metadata
    (torch.Size([4, 1, 3]), {'kernel': 'HMC'})

    :param folder: created if it doesn't exist. ``None``: memory.
    :param num_samples: draws of each chain to make room for.
    :ivar fingerprint: of the run, for its checkpoints.
    :ivar last: the checkpoint found on opening, if any.
    :ivar failed: whether writing has failed; then nothing more should be committed.
    :ivar next_commit: time at which the next commit is due, by ``time.perf_counter``.
    :ivar diverged: number of draws written so far whose statistic ``diverging`` is
        true.
    :raises OSError: if the folder can't be written, is being written by another
        process, or holds something else.
    :raises StoreError: if it is damaged, or of a newer version. Nothing is changed
        then.
    """

    def __init__(self, folder: PathLike | None, num_samples: int):
        self.folder = None if folder is None else Path(folder)
        self.num_samples = num_samples
        self.fingerprint = Entries()
        self.last: Checkpoint | None = None
        self.failed = False
        self.next_commit = math.inf
        self.diverged = 0
        # Number of written draws, their arrays, and the waiting draws: one value, which
        # no interruption can split.
        self._progress: tuple[int, tuple[Array, ...], list[Draw]] = (0, (), [])
        self._memory: dict[str, ByName] = {group: {} for group in GROUPS}
        self._files = list[int]()
        self._open = contextlib.ExitStack()
        if self.folder:
            with contextlib.ExitStack() as stack:
                self._lock(self.folder, stack)
                self._open = stack.pop_all()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def append(
        self,
        number: int,
        samples: Tensors,
        statistics: Tensors,
    ) -> None:
        """Append a draw of all chains, ``(chains, *site_shape)`` and ``(chains,)``; the
        tensors mustn't change later.

        It replaces every draw from this number on, as after an interruption; the draws
        before it are final.
        """
        written, _, waiting = self._progress
        del waiting[number - written :]
        if (
            len(waiting)
            * sum([value.nbytes for value in (*samples.values(), *statistics.values())])
            > BLOCK
        ):
            self._flush(number)
        self._progress[2].append((samples, statistics))

    def commit(
        self,
        draws: int,
        metadata: Callable[[], Json],
        state: Callable[[], bytes | memoryview],
    ) -> None:
        """Make the first draws of a folder valid, with the state from which a broken
        run resumes.

        :param metadata: of the posterior. It and ``state`` are called here, so that a
            commit's time includes them.
        :raises OSError: if they can't be written; draws committed before stay valid.
        """
        assert self.folder
        began = time.perf_counter()
        content = state()
        self._flush(draws)
        with self._reporting(self.folder):
            for file in self._files:
                os.fsync(file)
            checkpoint = Checkpoint(
                draws, self._progress[1], self.fingerprint, metadata(), content
            )
            if self._files:  # new draws
                self._write_zarr_metadata(self.folder, checkpoint)
            checkpoint.write(self.folder)
        now = time.perf_counter()
        self.next_commit = now + max(COMMIT_SECONDS, (now - began) / COMMIT_SHARE)

    def draws(self, count: int, metadata: Json) -> Contents:
        """Return the first draws."""
        self._flush(count)
        if self.folder:
            return Checkpoint(count, self._progress[1], {}, metadata).contents(
                self.folder
            )
        samples, statistics = (
            {
                # without the room for draws that never came
                name: value[:, :count].clone() if count < value.shape[1] else value
                for name, value in part.items()
            }
            for part in self._memory.values()
        )
        return samples, statistics, metadata

    def write(self, parts: list[ByName]) -> None:
        """Append many draws at once, samples and statistics ``(draws, chains,
        ...)``.
        """
        begin = self._progress[0]
        self._progress = (
            begin + len(next(iter(parts[0].values()))),
            self._put(parts, begin),
            [],
        )

    # small steps ----------------------------------------------------------------------

    def _lock(self, folder: Path, stack: contextlib.ExitStack) -> None:
        """Lock the folder until the stack is closed or this process ends, and read its
        checkpoint.
        """
        import fcntl  # POSIX only

        make_folder(folder)
        files = [
            entry.name
            for entry in folder.iterdir()
            if not entry.name.startswith((LOCK, f".{CHECKPOINT}."))
        ]
        if files and CHECKPOINT not in files:
            raise FileExistsError(
                f"{folder} is no draw store but holds {', '.join(sorted(files)[:5])}; "
                "name another"
            )
        lock = os.open(folder / LOCK, WRITE, 0o666)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"{folder} is being written by another run; nothing was done"
            ) from error
        # closing isn't enough if a forked process shares it
        stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        # of a process that was killed in a commit
        for stale in folder.glob(".*.tmp"):
            stale.unlink()
        if (folder / CHECKPOINT).exists():
            self.last = Checkpoint.read(folder)
            self.last.contents(folder, verify=True)
            self._progress = (self.last.draws, self.last.arrays, [])
        self.next_commit = time.perf_counter() + COMMIT_SECONDS

    def _flush(self, until: int) -> None:
        """Write the waiting draws before number ``until``; if this is interrupted they
        are written again.
        """
        written, _, waiting = self._progress
        count = min(len(waiting), max(0, until - written))
        if not count:
            return
        parts = []
        for k in (0, 1):
            draws = [draw[k] for draw in waiting[:count]]
            names = draws[0]
            parts.append({n: torch.stack([d[n] for d in draws]).cpu() for n in names})
        arrays = self._put(parts, written)
        if "diverging" in parts[1]:
            self.diverged += int(parts[1]["diverging"].sum())
        self._progress = (written + count, arrays, waiting[count:])

    def _put(self, parts: list[ByName], begin: int) -> tuple[Array, ...]:
        """Put samples and statistics ``(draws, chains, ...)`` in memory or in files;
        return the files' arrays.

        :raises OSError: if there is no room; committed draws stay valid.
        """
        values = [
            (group, *item)
            for group, part in zip(GROUPS, parts, strict=True)
            for item in part.items()
        ]
        if not self.folder:
            for group, name, value in values:
                memory = self._memory[group]
                shape = (value.shape[1], self.num_samples, *value.shape[2:])
                if name not in memory:
                    memory[name] = torch.empty(shape, dtype=value.dtype, device="cpu")
                memory[name][:, begin : begin + len(value)] = value.transpose(0, 1)
            return ()
        arrays = tuple(
            Array.of(group, name, value.dtype, value.shape[1:])
            for group, name, value in values
        )
        before = self._progress[1] or arrays
        after = []
        if before != arrays:
            differing = sorted({array.name for array in {*before} ^ {*arrays}})
            raise StoreError(
                f"the draw store {self.folder} holds other sites or statistics; what "
                f"differs: {differing}"
            )
        with self._reporting(self.folder):
            self._files = self._files or [
                self._open_file(self.folder, array) for array in arrays
            ]
            for array, file, (_, _, value) in zip(
                before, self._files, values, strict=True
            ):
                data = raw_bytes(value).numpy().data
                offset = begin * array.size
                after.append(replace(array, crc=zlib.crc32(data, array.crc)))
                # pwrite may write less, as it does first on a full disk
                while len(data):
                    count = os.pwrite(file, data, offset)
                    data = data[count:]
                    offset = offset + count
        return tuple(after)

    def _open_file(self, folder: Path, array: Array) -> int:
        """Open an array's file and allocate room for all draws, so that a full disk is
        noticed now.
        """
        path = array.file(folder)
        size = self.num_samples * array.size
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, WRITE, 0o666)
        self._open.callback(os.close, file)
        if size > os.fstat(file).st_size:
            getattr(
                os, "posix_fallocate", lambda file, _, size: os.truncate(file, size)
            )(file, 0, size)
        return file

    def _write_zarr_metadata(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Write the ``zarr.json`` that describes the group and all of its arrays."""
        group = {"zarr_format": 3, "node_type": "group"}
        nodes: Entries = {name: {**group, "attributes": {}} for name in GROUPS}
        for array, file in zip(checkpoint.arrays, self._files, strict=True):
            room = os.fstat(file).st_size // max(1, array.size) or 1
            nodes[array.path] = array.zarr(checkpoint.draws, room)
        attributes = {
            "inference_library": "pyro_symmetric",
            "metadata": json.dumps(checkpoint.metadata),
        }
        inline = {"kind": "inline", "must_understand": False, "metadata": nodes}
        root = {**group, "attributes": attributes, "consolidated_metadata": inline}
        write_whole(folder / "zarr.json", json.dumps(root).encode())

    @contextlib.contextmanager
    def _reporting(self, folder: Path) -> Iterator[None]:
        """Report in an ``OSError`` how many draws are safe."""
        try:
            yield
        except OSError as error:
            self.failed = True
            safe = (
                Checkpoint.read(folder).draws if (folder / CHECKPOINT).exists() else 0
            )
            raise OSError(
                error.errno,
                f"the draw store {folder} couldn't be written: {error}. {safe} draws "
                "of each chain are safe there; "
                "when the cause is mended (is the disk full?), the same call resumes "
                "from them",
            ) from error


# the contents of a folder -------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """The record of a commit.

    :param draws: number of valid draws of each chain.
    :param arrays: in the order of the sites and statistics; empty before the first
        draw.
    :param fingerprint: of the run.
    :param metadata: of the posterior.
    :param state: of the run, to resume from; empty if it can't be resumed.
    """

    draws: int
    arrays: tuple[Array, ...]
    fingerprint: Json
    metadata: Json
    state: bytes | memoryview = b""

    def write(self, folder: Path) -> None:
        """Replace the folder's checkpoint, whole or not at all."""
        header = {
            name: getattr(self, name) for name in ("draws", "fingerprint", "metadata")
        }
        header |= {"arrays": [asdict(array) for array in self.arrays]}
        content = (
            self.state if isinstance(self.state, memoryview) else bytearray(self.state)
        )
        state = (
            {"state": torch.frombuffer(content, dtype=torch.uint8)}
            if len(content)
            else {}
        )
        save_tensors(folder / CHECKPOINT, KIND, VERSION, state, header)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read the folder's checkpoint; raise ``StoreError`` if it is damaged or of a
        newer version.
        """
        tensors, header = load_tensors(inside(folder, CHECKPOINT), KIND, VERSION)
        try:
            arrays = tuple(
                Array(**{**fields, "shape": tuple(fields["shape"])})
                for fields in header["arrays"]
            )
            fingerprint, metadata = (
                dict(header[name]) for name in ("fingerprint", "metadata")
            )
            state = tensors["state"].numpy().tobytes() if tensors else b""
            draws = header["draws"]
            paths = [array.path for array in arrays]
            if (
                len({*paths}) < len(paths)
                or type(draws) is not int
                or not draws >= 0
                or (draws and not arrays)
            ):
                raise ValueError(f"{draws!r} draws of {paths}")
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{folder / CHECKPOINT} has a damaged header: {error!r}"
            ) from error
        return cls(draws, arrays, fingerprint, metadata, state)

    def contents(self, folder: Path, verify: bool = False) -> Contents:
        """Map the valid draws.

        :raises StoreError: naming the first array that is missing, cut short, or
            differs from its checksum.
        """
        draws: dict[str, ByName] = {group: {} for group in GROUPS}
        for array in self.arrays:
            draws[array.group][array.name] = array.map(folder, self.draws, verify)
        return draws["posterior"], draws["sample_stats"], self.metadata


@dataclass(frozen=True)
class Array:
    """An array ``(chains, draws, *site_shape)`` of a store; in its file the axis of
    draws comes first.

    :param shape: of one draw of all chains, ``(chains, *site_shape)``.
    :param crc: CRC-32 of the valid draws.
    """

    group: str
    name: str
    dtype: str
    shape: Shape
    crc: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        valid_shape = self.shape and all(
            type(length) is int and length >= 0 for length in self.shape
        )
        # other folders
        valid_path = self.group in GROUPS and self.name not in ("", ".", "..")
        if not valid_path or self.dtype not in DTYPES or not valid_shape:
            raise ValueError(f"a store can't keep {self}")

    @classmethod
    def of(cls, group: str, name: str, dtype: torch.dtype, shape: Size) -> Array:
        """Describe the array for draws ``shape``, ``(chains, *site_shape)``."""
        return cls(group, name, str(dtype).removeprefix("torch."), tuple(shape))

    @property
    def size(self) -> int:
        """Size of one draw of all chains, in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def path(self) -> str:
        """Path of the array's folder within the store."""
        return "/".join([self.group, quote(self.name, safe=" ()[],=+@!$&'")])

    def file(self, folder: Path) -> Path:
        """Return the path of the array's file; raise ``StoreError`` if it is outside
        the folder.
        """
        return inside(folder, "/".join([self.path, "c", *"0" * (len(self.shape) + 1)]))

    def map(self, folder: Path, draws: int, verify: bool = False) -> Tensor:
        """Map the first draws ``(chains, draws, *site_shape)``; they are read on
        access, and changes stay in memory.

        :param verify: compare the checksum, at some gigabytes a second.
        :raises StoreError: if the file is missing, too short, or differs from its
            checksum.
        """
        path = self.file(folder)
        size = draws * self.size
        damaged = f"the draw store {folder} is damaged: {path.relative_to(folder)}"
        # reading from a pipe would block
        if not path.is_file() or path.stat().st_size < size:
            raise StoreError(f"{damaged} is missing or cut short")
        content = torch.empty(0, dtype=torch.uint8, device="cpu")
        if size:
            content = torch.from_file(str(path), size=size, dtype=torch.uint8)
        if verify and zlib.crc32(content.numpy().data) != self.crc:
            raise StoreError(
                f"{damaged} differs from its checksum. Restore it from a copy; "
                "Posterior.load(path, verify=False) reads it as it is"
            )
        return content.view(DTYPES[self.dtype]).view(draws, *self.shape).transpose(0, 1)

    def zarr(self, draws: int, room: int) -> Json:
        """Describe the array to Zarr: ``draws`` draws in one chunk with room for
        ``room``.
        """
        chains, *site_shape = self.shape
        chunk = [chains, room, *(max(1, length) for length in site_shape)]
        return {
            **{
                "zarr_format": 3,
                "node_type": "array",
                "attributes": {},
                "data_type": self.dtype,
            },
            "shape": [chains, draws, *site_shape],
            "dimension_names": [
                "chain",
                "draw",
                *(f"{self.name}_dim_{k}" for k in range(len(site_shape))),
            ],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {
                "name": "default",
                "configuration": {"separator": "/"},
            },
            "codecs": [
                {
                    "name": "transpose",
                    "configuration": {"order": [1, 0, *range(2, len(site_shape) + 2)]},
                },
                {"name": "bytes", "configuration": {"endian": "little"}},
            ],
            "fill_value": False if self.dtype == "bool" else 0,
        }


# files --------------------------------------------------------------------------------


def save_tensors(
    path: PathLike,
    kind: str,
    version: int,
    tensors: Tensors,
    header: Values,
) -> None:
    """Write tensors and a header to a file, replacing an old one only by a complete
    one.

    :param kind: of the contents, such as ``"guide"``; :func:`load_tensors` requires the
        same.
    :param version: of that kind's layout.
    :param header: anything that JSON can represent.
    :raises OSError: if the file can't be written (a full disk, a read-only folder).
    """
    # none share memory
    copies = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in tensors.items()
    }
    about = {
        "format": f"pyro_symmetric.{kind}",
        "version": str(version),
        "json": json.dumps(header),
        CHECKSUM: BLANK,
    }
    content = safetensors.torch.save(copies, about)
    write_whole(
        path, _with_checksum(content, BLANK, f"{zlib.crc32(content):08x}"), kind
    )


def load_tensors(path: PathLike, kind: str, version: int) -> tuple[ByName, Entries]:
    """Read the tensors, on the CPU, and the header that :func:`save_tensors` wrote.

    :param version: the newest version that the caller understands.
    :raises OSError: if there is no such file or it can't be read.
    :raises StoreError: if it is truncated, differs from its checksum, is of another
        kind, or of a newer version.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {kind} at {path}")
    # in one read, since another process may replace the file
    content = path.read_bytes()
    try:
        tensors = safetensors.torch.load(content)
        about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])[
            "__metadata__"
        ]
        if about["format"] != f"pyro_symmetric.{kind}":
            raise StoreError(
                f"{path} is no {kind} of this library, but {about['format']!r}"
            )
        if int(about["version"]) > version:
            raise StoreError(
                f"{path} is of version {about['version']} of the {kind} format: a "
                "newer pyro_symmetric's"
            )
        if (
            f"{zlib.crc32(_with_checksum(content, about[CHECKSUM], BLANK)):08x}"
            != about[CHECKSUM]
        ):
            raise StoreError(
                f"{path} is damaged: it differs from its checksum. Restore it from a "
                "copy, or remove it"
            )
        return tensors, dict(json.loads(about["json"]))
    except StoreError:
        raise
    except Exception as error:  # a damaged file may raise any
        raise StoreError(
            f"{path} is no {kind} or is damaged (was it cut short?): {error!r}"
        ) from error


def load_pickled(
    source: PathLike | bytes | memoryview, map_location: str | None = "cpu"
) -> Any:
    """Read what ``torch.save`` wrote, tensors and plain containers, without running
    code.

    A tensor can still be larger than the file, as an expanded one is.

    :param source: a file, or the bytes of one.
    :param map_location: device of the tensors. ``None``: the one they were on.
    :raises ValueError: if it unpacks to more bytes than it has. ``torch.save`` doesn't
        compress, and a compressed file can hold a thousand times its own size.
    """
    file: Any
    if isinstance(source, str | os.PathLike):
        file = source
        size = os.path.getsize(source)
    else:
        file = io.BytesIO(source)
        size = len(source)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(record.file_size for record in archive.infolist())
        if unpacked > size:
            raise ValueError(
                f"it has {size:,} bytes and would unpack to {unpacked:,}, but "
                "torch.save doesn't compress"
            )
    if isinstance(file, io.BytesIO):
        file.seek(0)
    return torch.load(file, map_location=map_location, weights_only=True)


def require_stored(tensors: Tensors, path: PathLike) -> None:
    """Raise ``ValueError`` if the dense tensors read from a file are much larger than
    the file: an expanded tensor takes a few bytes there and any number in memory.
    """
    size = os.path.getsize(path)
    claimed = sum(value.nbytes for value in tensors.values())
    if claimed > MOST_EXPANDED * size:
        raise ValueError(
            f"{path} has {size:,} bytes, but its tensors would take {claimed:,}: they "
            "are expanded; save value.clone()"
        )


def _with_checksum(content: bytes, before: str, after: str) -> bytes:
    """Replace the checksum in the header, where it occurs first."""
    return content.replace(
        f'"{CHECKSUM}":"{before}"'.encode(), f'"{CHECKSUM}":"{after}"'.encode(), 1
    )


def inside(folder: PathLike, name: str) -> Path:
    """Return the path of a file, ``"a"`` or ``"a/b"``, that another file refers to.

    :raises StoreError: unless the file is inside ``folder``, links followed.
    """
    folder = Path(folder)
    path = folder / name
    with contextlib.suppress(OSError, RuntimeError):  # circular links
        if path.resolve().is_relative_to(folder.resolve()):
            return path
    raise StoreError(
        f"{folder} refers to {name!r}, which isn't a file inside of it; nothing else "
        "is read or written"
    )


def write_whole(path: PathLike, content: bytes, kind: str = "file") -> None:
    """Write a file under a temporary name, sync it, and rename it to ``path``.

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
        raise OSError(
            error.errno,
            f"the {kind} couldn't be saved to {path}: {error.strerror or error}",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def raw_bytes(value: Tensor) -> Tensor:
    """View a tensor of any dtype as a flat tensor of bytes on the CPU."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    # a single value may have another stride
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def sync(folder: PathLike) -> None:
    """Wait until a folder's list of files is on the disk."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: PathLike) -> None:
    """Make a folder and its missing parents, synced so that they survive a power
    cut.
    """
    path = Path(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)
