"""What lies where in a store, and whether it is whole."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor

from pyro_symmetric.storage import StoreError, dtype_of, inside, load_tensors

KIND = "draw store"
VERSION = 1
CHECKPOINT = "checkpoint.safetensors"
CHUNKS = "chunks.bin"
LOCK = ".pyro_symmetric.lock"
TASKS = "tasks.json"
PIECE = 1 << 22  # bytes to read at once


class Draws(NamedTuple):
    """What a :class:`~pyro_symmetric.samples.Posterior` is made of.

    :param samples: site -> ``(chains, draws, *site_shape)``.
    :param statistics: name -> ``(chains, draws)``.
    :param metadata: anything that JSON can hold.
    """

    samples: dict[str, Tensor]
    statistics: dict[str, Tensor]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One file of draws.

    :param kind: ``samples`` or ``statistics``.
    :param name: of the site or statistic.
    :param file: path within the store.
    :param dtype: as sampled, without ``torch.``.
    :param shape: of one draw, chains first.
    """

    kind: str
    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def like(cls, kind: str, name: str, index: int, value: Tensor) -> Column:
        """The ``index``-th column, for draws like ``value``."""
        file = f"{kind}/{index:04d}.{quote(name, safe='')[:100]}.bin"
        return cls(kind, name, file, str(value.dtype).removeprefix("torch."), tuple(value.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return dtype_of(self.dtype)

    @property
    def size(self) -> int:
        """Bytes of one draw."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def map(self, folder: Path, draws: int) -> Tensor:
        """The first draws, ``(chains, draws, ...)``, read when they are touched; changes to them stay in memory."""
        count = draws * math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape[0], draws, *self.shape[1:], dtype=self.torch_dtype)
        flat = torch.from_file(str(inside(folder, self.file)), shared=False, size=count, dtype=self.torch_dtype)
        return flat.view(draws, *self.shape).transpose(0, 1)


@dataclass(frozen=True)
class Commit:
    """What the last commit said.

    :param token: a random number of 32 bits that marks this store's records, so that no other's are taken for them.
    :param seal: the last record's own checksum; the token, before there is one.
    :param draws: how many of each chain are safe.
    :param chunks: in how many commits they came.
    :param metadata: of the posterior.
    :param checkpoint: what the writer needs to resume, with ``tensors``.
    """

    token: int
    seal: int
    columns: tuple[Column, ...]
    draws: int
    chunks: int
    metadata: dict[str, Any]
    checkpoint: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> Commit:
        """:raises StoreError: if it is damaged or of a newer version, or names files outside of the folder."""
        tensors, header = load_tensors(folder / CHECKPOINT, KIND, VERSION)
        try:
            columns = tuple(Column(**{**entry, "shape": tuple(entry["shape"])}) for entry in header["columns"])
            own = {field.name: header[field.name] for field in fields(cls) if field.name not in ("columns", "tensors")}
            commit = cls(columns=columns, tensors=tensors, **own)
            _require_sound(commit)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{folder / CHECKPOINT} has a damaged header: {error!r}") from error
        for column in columns:
            inside(folder, column.file)
        return commit


class Damage(NamedTuple):
    """What is wrong with a store's files.

    :param message: for the error.
    :param whole: draws of each chain that come before the damage.
    """

    message: str
    whole: int


def find_damage(folder: Path, commit: Commit, thorough: bool) -> Damage | None:
    """Whether files are shorter than was committed; with ``thorough``, whether they hold what was written."""
    message, whole = "", commit.draws
    for column in commit.columns:
        file = folder / column.file
        found = file.stat().st_size // max(1, column.size) if file.exists() else 0
        if column.size and found < whole:
            message, whole = f"{column.file} holds {found} of {commit.draws} draws (was it cut short?)", found
    if thorough and commit.draws:
        agreeing, file_name = _verified(folder, commit, whole)
        if agreeing < whole and not message:
            message = f"{file_name} differs from its checksum after draw {agreeing}"
        whole = agreeing
    if not message:
        return None
    advice = f"pyro_symmetric.store.read_store({str(folder)!r}, salvage=True) reads the draws before the damage"
    return Damage(f"the draw store {folder} is damaged: {message}. {advice}", whole)


def chunk_record(draws: int, sums: Sequence[int], seal: int) -> bytes:
    """What a commit appends to the list of chunks.

    :param draws: of each chain, up to this commit.
    :param sums: each file's CRC-32 since the last commit.
    :param seal: of the record before; see :func:`seal_of`.
    """
    body = struct.pack(f"<Q{len(sums)}I", draws, *sums)
    return body + struct.pack("<I", zlib.crc32(body, seal))


def seal_of(record: bytes) -> int:
    """A record's own checksum, which goes on from that of the record before: no zeros and no other list pass for it."""
    return struct.unpack("<I", record[-4:])[0]


# small steps --------------------------------------------------------------------------------------------------------


def _require_sound(commit: Commit) -> None:
    """:raises ValueError: if counts, shapes or dtypes are none."""
    for name in ("token", "seal", "draws", "chunks"):
        if type(count := getattr(commit, name)) is not int or count < 0:
            raise ValueError(f"{name} is {count!r}")
    for column in commit.columns:
        sizes = column.shape
        if column.kind not in ("samples", "statistics") or not isinstance(column.name, str):
            raise ValueError(f"a column is {column.kind!r}, {column.name!r}")
        if (
            not sizes
            or any(type(size) is not int or size < 0 for size in sizes)
            or sizes[0] != commit.columns[0].shape[0]
        ):
            raise ValueError(f"{column.file!r} is of shape {sizes}")
        dtype_of(column.dtype)
    if not (isinstance(commit.metadata, dict) and isinstance(commit.checkpoint, dict)):
        raise TypeError("metadata and checkpoint are no dictionaries")


def _verified(folder: Path, commit: Commit, limit: int) -> tuple[int, str]:
    """Up to which draw, at most ``limit``, whole chunks agree with their checksums; and which file ends that."""
    records = _records(folder, commit)
    agreeing, culprit = min(limit, records[-1][0] if records else 0), CHUNKS
    for k, column in enumerate(commit.columns):
        begin = 0
        if not (folder / column.file).exists():
            return 0, column.file
        with open(folder / column.file, "rb") as file:
            for end, sums in records:
                if begin >= agreeing:
                    break
                if end > limit or _checksum(file, (end - begin) * column.size) != sums[k]:
                    agreeing, culprit = min(agreeing, begin), column.file
                    break
                begin = end
    return agreeing, culprit


def _records(folder: Path, commit: Commit) -> list[tuple[int, list[int]]]:
    """The draws and checksums of each chunk, as far as the list of chunks is whole and this store's."""
    form = struct.Struct(f"<Q{len(commit.columns)}II")
    chunks = folder / CHUNKS
    listed = chunks.read_bytes()[: commit.chunks * form.size] if chunks.exists() else b""
    records: list[tuple[int, list[int]]] = []
    begin, seal = 0, commit.token
    for end, *sums, own in form.iter_unpack(listed[: len(listed) // form.size * form.size]):
        seal = seal_of(chunk_record(end, sums, seal))
        if own != seal or not begin < end <= commit.draws:
            return records
        records.append((end, sums))
        begin = end
    differs = (len(records), seal) != (commit.chunks, commit.seal)
    return [] if differs and begin == commit.draws else records  # a whole list, but not the one that was committed


def _checksum(file: BinaryIO, size: int) -> int:
    total = 0
    while size > 0 and (piece := file.read(min(size, PIECE))):
        total = zlib.crc32(piece, total)
        size -= len(piece)
    return total
