"""The library's files: tensors and a JSON header in one ``.safetensors`` file, written whole or not at all. No pickle.
Beside them, arrays of draws, which grow in place.

Every file carries the CRC-32 of all that it holds, which reading compares. It finds whatever happens to a file by
itself (flipped bits, zeros that a power cut left, a lost end); it is no seal against somebody who writes another file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pyro_symmetric.errors import Error

PathLike = str | os.PathLike[str]
CHECKSUM, OPEN = "crc32", "0" * 8  # what stands in a file's header while its checksum is made
GROUPS = ("posterior", "sample_stats")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*FLOATS, *WHOLES)}


class StoreError(Error, ValueError):
    """Damaged files on the disk, or others than expected: another run's, another version's.

    >>> with open("guide.safetensors", "wb") as file:
    ...     size = file.write(b"no guide")
    >>> try:
    ...     ps.load_guide("guide.safetensors")
    ... except ps.storage.StoreError:
    ...     print("not a guide")
    not a guide
    """


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


@contextlib.contextmanager
def locked(path: PathLike, what: str) -> Iterator[None]:
    """Hold a file that one process at a time can; the system frees it when that process ends, however it ends.

    :param what: what it guards, for the error.
    :raises BlockingIOError: if another holds it.
    :raises OSError: if it can't be made, or is a link.
    """
    import fcntl  # of POSIX

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"{what} is being written by another run; nothing was done") from error
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a process was forked meanwhile
        os.close(descriptor)


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
    crc: int = 0

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
