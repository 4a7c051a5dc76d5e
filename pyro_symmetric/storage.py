"""The library's files: tensors and a JSON header in one ``.safetensors`` file, written whole or not at all. No pickle.

Every file carries the CRC-32 of all that it holds, which reading compares. It finds whatever happens to a file by
itself (flipped bits, zeros that a power cut left, a lost end); it is no seal against somebody who writes another file.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pyro_symmetric.errors import Error

PathLike = str | os.PathLike[str]
CHECKSUM, OPEN = "crc32", "0" * 8  # what stands in a file's header while its checksum is made


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
