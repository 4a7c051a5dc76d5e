"""The two files of a store: one of draws, which is mapped, and the checkpoint that says what in it counts."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.storage import PathLike, StoreError, inside, load_tensors, open_own, raw_bytes, save_tensors

KIND = "draw store"
VERSION = 1
CHECKPOINT = "checkpoint.safetensors"
TASKS = "tasks.json"
PIECE = 2**21  # bytes to read or to keep back at once
CODES = {  # those of safetensors
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
}
DTYPES = {code: dtype for dtype, code in CODES.items()}


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
class Entry:
    """One tensor of a file of draws.

    :param kind: ``samples`` or ``statistics``.
    :param name: of the site or statistic.
    :param code: its dtype, as safetensors calls it.
    :param shape: of one draw of one chain.
    """

    kind: str
    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of one draw of one chain."""
        return math.prod(self.shape) * DTYPES[self.code].itemsize


@dataclass(frozen=True)
class DrawsFile:
    """A file of draws: the places of tensors in it.

    :param number: of the file.
    :param chains: how many there are.
    :param room: draws of each chain that fit.
    :param entries: in the order in which they were given.
    """

    number: int
    chains: int
    room: int
    entries: tuple[Entry, ...]

    @classmethod
    def like(cls, number: int, room: int, draw: Mapping[str, Mapping[str, Tensor]]) -> DrawsFile:
        """For draws like these, kind -> name -> ``(chains, draws, *shape)``.

        :raises TypeError: if one has a dtype that the file can't hold.
        """
        named = [(kind, name, value) for kind, values in draw.items() for name, value in values.items()]
        for kind, name, value in named:
            if value.dtype not in CODES:
                raise TypeError(f"{kind}[{name!r}] is of {value.dtype}, which a store can't keep")
        entries = (Entry(kind, name, CODES[value.dtype], tuple(value.shape[2:])) for kind, name, value in named)
        return cls(number, len(named[0][2]), room, tuple(entries))

    @property
    def name(self) -> str:
        """The file's name."""
        return f"draws-{self.number:04d}.safetensors"

    def header(self) -> bytes:
        """The beginning of the file: all that a reader of safetensors needs."""
        header = {
            f"{entry.kind}/{entry.name}": {
                "dtype": entry.code,
                "shape": [self.chains, self.room, *entry.shape],
                "data_offsets": [begin, begin + self.bytes_of(entry)],
            }
            for entry, begin in zip(self.entries, self._begins(), strict=True)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def bytes_of(self, entry: Entry) -> int:
        """Bytes that an entry takes."""
        return self.chains * self.room * entry.size

    @property
    def places(self) -> list[int]:
        """The place in the file at which each entry begins."""
        first = len(self.header())
        return [first + begin for begin in self._begins()]

    @property
    def file_size(self) -> int:
        """Bytes of the file."""
        return len(self.header()) + sum(map(self.bytes_of, self.entries))

    def _begins(self) -> list[int]:
        """The place of each entry after the header: those of long numbers first, so that all are aligned."""
        order = sorted(range(len(self.entries)), key=lambda i: -DTYPES[self.entries[i].code].itemsize)
        ends = itertools.accumulate((self.bytes_of(self.entries[i]) for i in order), initial=0)
        return [begin for _, begin in sorted(zip(order, ends, strict=False))]

    def make(self, folder: Path) -> int:
        """Make the file, with all its room; its descriptor.

        :raises OSError: if there isn't so much room on the disk.
        """
        path = folder / self.name
        path.unlink(missing_ok=True)  # left by a process that was killed before a checkpoint named it
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, self.file_size)
            else:
                os.truncate(descriptor, self.file_size)
            write_at(descriptor, memoryview(self.header()), 0)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return descriptor

    def open(self, folder: Path, flags: int) -> int:
        """A descriptor of the file.

        :raises StoreError: if it isn't there, is a link that leads out, or doesn't begin as it should.
        """
        path, header, size = inside(folder, self.name), self.header(), self.file_size
        if not path.is_file():  # a pipe would be waited for
            raise StoreError(f"the draw store {folder} is damaged: {self.name} is missing, or no file")
        descriptor = open_own(path, flags) if flags != os.O_RDONLY else os.open(path, flags)
        if (found := os.fstat(descriptor).st_size) != size:
            message = f"{self.name} holds {found} of {size} bytes (was it cut short?)"
        elif os.pread(descriptor, len(header), 0) != header:
            message = f"{self.name} has a damaged header"
        else:
            return descriptor
        os.close(descriptor)
        raise StoreError(f"the draw store {folder} is damaged: {message}")

    def map(self, folder: Path, draws: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Samples and statistics, read when they are touched; changes to them stay in memory."""
        os.close(self.open(folder, os.O_RDONLY))
        path = str(folder / self.name)
        whole = torch.from_file(path, shared=False, size=self.file_size, dtype=torch.uint8)
        found: dict[str, dict[str, Tensor]] = {"samples": {}, "statistics": {}}
        for entry, begin in zip(self.entries, self.places, strict=True):
            flat = whole[begin : begin + self.bytes_of(entry)].view(DTYPES[entry.code])
            found[entry.kind][entry.name] = flat.view(self.chains, self.room, *entry.shape)[:, :draws]
        return found["samples"], found["statistics"]


@dataclass(frozen=True)
class Checkpoint:
    """The record of the last commit.

    :param file: of draws; ``None`` before there are any.
    :param draws: how many of each chain are safe.
    :param sums: the CRC-32 of each chain's draws in each entry, ``(entries, chains)``.
    :param fingerprint: of the run.
    :param metadata: of the posterior.
    :param state: what the run resumes from; empty if it can't.
    """

    file: DrawsFile | None
    draws: int
    sums: Tensor
    fingerprint: dict[str, Any]
    metadata: dict[str, Any]
    state: bytes | memoryview = b""

    def write(self, folder: Path) -> None:
        """Replace what the folder has, whole or not at all."""
        header = {name: getattr(self, name) for name in ("draws", "fingerprint", "metadata")}
        header["file"] = None if self.file is None else asdict(self.file)
        content = self.state if isinstance(self.state, memoryview) else bytearray(self.state)
        state = torch.frombuffer(content or bytearray(1), dtype=torch.uint8)
        header["state_bytes"] = len(self.state)
        save_tensors(folder / CHECKPOINT, KIND, VERSION, {"sums": self.sums, "state": state}, header)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """:raises StoreError: if it is damaged or of a newer version."""
        tensors, header = load_tensors(inside(folder, CHECKPOINT), KIND, VERSION)
        try:
            file = None if header["file"] is None else _file_of(header["file"])
            state = bytes(raw_bytes(tensors["state"])[: header["state_bytes"]].numpy())
            found = cls(file, header["draws"], tensors["sums"], header["fingerprint"], header["metadata"], state)
            _require_sound(found)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{folder / CHECKPOINT} has a damaged header: {error!r}") from error
        return found

    def verify(self, folder: Path) -> None:
        """Read all draws and compare them with their checksums, at some gigabytes a second.

        :raises StoreError: naming the first site or statistic that differs, and the chains.
        """
        if self.file is None:
            return
        descriptor = self.file.open(folder, os.O_RDONLY)
        try:
            for entry, begin, sums in zip(self.file.entries, self.file.places, self.sums.tolist(), strict=True):
                row = self.file.room * entry.size
                found = [checksum(descriptor, begin + c * row, self.draws * entry.size) for c in range(len(sums))]
                if bad := [chain for chain, pair in enumerate(zip(found, sums, strict=True)) if pair[0] != pair[1]]:
                    shown = ", ".join(map(str, bad[:5])) + ", ..." * (len(bad) > 5)
                    raise StoreError(
                        f"the draw store {folder} is damaged: in {self.file.name}, {entry.kind}/{entry.name} of "
                        f"{len(bad)} chains ({shown}) differs from its checksum. Restore it from a copy; "
                        "Posterior.load(path, verify=False) reads it as it is"
                    )
        finally:
            os.close(descriptor)


def read_store(path: PathLike, *, verify: bool = True) -> Contents:
    """The committed draws of a store, mapped from its file.

    :param verify: read everything and compare it with the checksums; otherwise draws are read when they are touched.
    :raises OSError: if there is no store or it can't be read.
    :raises StoreError: if it holds no draws yet, is damaged, or is of a newer version.
    """
    folder = Path(path)
    if not (folder / CHECKPOINT).exists():
        raise FileNotFoundError(f"there is no draw store at {path}")
    while True:
        found = Checkpoint.read(folder)
        if found.file is None or found.draws == 0:
            raise StoreError(
                f"the draw store {folder} holds no draws yet: its warm-up isn't over; the call that began it resumes it"
            )
        try:
            if verify:
                found.verify(folder)
            return Contents(*found.file.map(folder, found.draws), found.metadata)
        except StoreError:
            now = Checkpoint.read(folder).file
            if now is None or now.number == found.file.number:
                raise  # otherwise a larger file has taken its place meanwhile


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of it: the system may take less than it is given, and on a full disk does so before it complains."""
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def checksum(descriptor: int, offset: int, size: int) -> int:
    """The CRC-32 of a part of a file."""
    total = 0
    while size > 0 and (piece := os.pread(descriptor, min(size, PIECE), offset)):
        total = zlib.crc32(piece, total)
        offset, size = offset + len(piece), size - len(piece)
    return total


# small steps --------------------------------------------------------------------------------------------------------


def _file_of(found: Mapping[str, Any]) -> DrawsFile:
    entries = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in found["entries"])
    file = DrawsFile(**{**found, "entries": entries})
    numbers: Sequence[Any] = (file.number, file.chains, file.room, *(n for c in entries for n in c.shape))
    if any(type(number) is not int or number < 0 for number in numbers) or not (file.chains and entries):
        raise ValueError(f"{file.name if type(file.number) is int else 'it'} is of no shape that draws can have")
    for entry in entries:
        known = entry.kind in ("samples", "statistics") and entry.code in DTYPES
        if not known or not isinstance(entry.name, str):
            raise ValueError(f"an entry is {entry}")
    names = [f"{entry.kind}/{entry.name}" for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"it has several entries of one name: {twice}")
    return file


def _require_sound(found: Checkpoint) -> None:
    """:raises ValueError: if counts, checksums or the rest are none."""
    shape = (0, 0) if found.file is None else (len(found.file.entries), found.file.chains)
    room = 0 if found.file is None else found.file.room
    if type(found.draws) is not int or not 0 <= found.draws <= room:
        raise ValueError(f"draws is {found.draws!r}")
    if tuple(found.sums.shape) != shape or found.sums.dtype != torch.int64:
        raise ValueError(f"sums is of shape {tuple(found.sums.shape)}")
    for field in fields(found):
        if field.name in ("metadata", "fingerprint") and not isinstance(getattr(found, field.name), dict):
            raise TypeError(f"{field.name} is no dictionary")
