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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pyro_symmetric.errors import Error

PathLike = str | os.PathLike[str]
CHECKSUM = "crc32"
DAMAGED = "what it holds differs from its checksum. Restore it from a copy, or remove it to make it anew"


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
    said = {"format": f"pyro_symmetric.{kind}", "version": str(version), "json": json.dumps(header)}
    write_whole(path, safetensors.torch.save(own, {**said, CHECKSUM: _checksum(own, said)}), kind)


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
        said = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
        checksum = said.pop(CHECKSUM, "")
        if said["format"] != f"pyro_symmetric.{kind}":
            raise StoreError(f"{path} is no {kind} of this library, but {said['format']!r}")
        if int(said["version"]) > version:
            raise StoreError(f"{path} is of version {said['version']} of the {kind} format: a newer pyro_symmetric's")
        if checksum != _checksum(tensors, said):
            raise StoreError(f"{path} is damaged: {DAMAGED}")
        return tensors, dict(json.loads(said["json"]))
    except StoreError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} is no {kind} or is damaged (was it cut short?): {error!r}") from error


def save_json(path: PathLike, content: Mapping[str, Any], kind: str) -> None:
    """Write a JSON file with a checksum, whole or not at all."""
    content = json.loads(json.dumps(content))
    write_text(path, json.dumps({**content, CHECKSUM: _checksum({}, content)}, indent=1), kind)


def load_json(path: PathLike, kind: str) -> dict[str, Any]:
    """Read what :func:`save_json` wrote.

    :raises OSError: if there is no such file or it can't be read.
    :raises StoreError: if it differs from its checksum.
    """
    try:
        content = dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"the {kind} {path} is damaged: {error!r}") from error
    if content.pop(CHECKSUM, None) != _checksum({}, content):
        raise StoreError(f"the {kind} {path} is damaged: {DAMAGED}")
    return content


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


def write_text(path: PathLike, text: str, kind: str = "file") -> None:
    """Write a text file whole or not at all."""
    write_whole(path, text.encode(), kind)


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


class Lock:
    """A file that one process at a time can hold; the system frees it when that process ends, however it ends.

    :param what: what it guards, for the error.
    :raises BlockingIOError: if another holds it.
    :raises OSError: if it can't be made, or is a link.
    """

    def __init__(self, path: PathLike, what: str):
        import fcntl  # of POSIX

        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise BlockingIOError(f"{what} is being written by another run; nothing was done") from error

    def release(self) -> None:
        """Let others have it."""
        import fcntl

        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also where a process was forked meanwhile
        os.close(self._descriptor)


def _checksum(tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> str:
    """The CRC-32 of both, in hexadecimal."""
    layout = {name: [str(value.dtype), *value.shape] for name, value in tensors.items()}
    total = zlib.crc32(json.dumps([said, layout], sort_keys=True).encode())
    for name in sorted(tensors):
        total = zlib.crc32(raw_bytes(tensors[name]).numpy().data, total)
    return f"{total:08x}"
