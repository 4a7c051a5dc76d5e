"""The library's files: tensors and a JSON header in one ``.safetensors`` file, written whole or not at all. No
pickle."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyro_symmetric import arguments

PathLike = str | os.PathLike[str]


class StoreError(ValueError):
    """What lies on the disk is damaged, or isn't what it should be: another run's, another version's."""


def save_tensors(
    path: PathLike, kind: str, version: int, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors and a header to ``path``; what stood there is replaced only by a complete file.

    :param kind: what the file holds, such as ``"posterior"``; :func:`load_tensors` asks for it again.
    :param version: of that kind's layout.
    :param header: anything that JSON can hold.
    :raises ValueError: if the header can't be written as JSON.
    :raises OSError: if the file can't be written (a full disk, a read-only folder).
    """
    try:
        text = json.dumps(header)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metadata can't be written as JSON: {error}; keep to numbers, texts, lists and dicts"
        ) from error
    metadata = {"format": _format(kind), "version": str(version), "json": text}
    write_whole(path, lambda to: save_file(_separate(tensors), to, metadata), kind)


def load_tensors(path: PathLike, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: tensors on the CPU, and the header. Draws are mapped, not copied.

    :param version: the newest version that the caller understands.
    :raises OSError: if there is no such file or it can't be read.
    :raises StoreError: if it is truncated, of another kind, or of a newer version.
    """
    path = arguments.path("path", path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {kind} at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as store:
            header = _checked_header(path, kind, version, store.metadata() or {})
            return {name: store.get_tensor(name) for name in store.keys()}, header  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise StoreError(f"{path} is no {kind} or is damaged (was it cut short?): {error}") from error


def write_whole(path: PathLike, write: Callable[[str], None], kind: str = "file") -> None:
    """Let ``write`` make a file beside ``path``, sync it, and only then move it into its place."""
    path = arguments.path("path", path)
    if not path.parent.is_dir():
        raise OSError(f"the {kind} couldn't be saved to {path}: there is no folder {path.parent}")
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        write(temporary)
        sync(temporary)
        # A temporary file is private; the finished one gets the permissions that any new file would.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        temporary = None
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        message = f"the {kind} couldn't be saved to {path}: {error}"
        raise (OSError(message) if (number := _errno(error)) is None else OSError(number, message)) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def write_text(path: PathLike, text: str, kind: str = "file") -> None:
    """Write a text file whole or not at all."""
    write_whole(path, lambda to: _write_text(to, text), kind)


def raw_bytes(value: Tensor) -> Tensor:
    """A tensor's values as a flat tensor of bytes on the CPU, of any dtype."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one value alone may keep another stride


def sync(path: PathLike) -> None:
    """Wait until a file, or on POSIX a folder's list of files, is on the disk and no longer in memory only."""
    path = Path(path)
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def flush(descriptor: int) -> None:
    """Wait until what was written to an open file is on the disk."""
    if sys.platform == "darwin":  # whose fsync leaves it in the drive's own memory
        import fcntl

        with contextlib.suppress(OSError):  # of file systems that don't know it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def make_folder(path: PathLike) -> None:
    """Make a folder, and those above it that are missing, so that a power cut doesn't take them away again."""
    path = Path(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


class Lock:
    """A file that one process at a time can hold; the system frees it when that process ends, however it ends.

    Processes that are forked meanwhile, a pool's workers say, don't share it.

    :param what: what it guards, for the error.
    :raises BlockingIOError: if another holds it, naming who.
    :raises OSError: if the folder is missing or can't be written to.
    """

    def __init__(self, path: PathLike, what: str):
        self._path = Path(path)
        self._is_new = not self._path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _take(descriptor):
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") if hasattr(os, "pread") else ""
                raise BlockingIOError(
                    f"{what} is being written by another run ({holder or 'unknown'}); nothing was done"
                )
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        _held.add(self)

    def release(self) -> None:
        """Let others have it."""
        _held.discard(self)
        if self._descriptor is not None and os.name != "nt":
            import fcntl

            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also where a process was forked just now
        self._close()

    def withdraw(self) -> None:
        """Let others have it, and leave no trace: a file that was made for this lock is removed."""
        if self._is_new and os.name == "posix":  # elsewhere an open file can't be removed
            self._path.unlink(missing_ok=True)
        self.release()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    """In a forked process: it has a descriptor of each lock too, and would keep them after its parent's end."""
    for lock in list(_held):
        lock._close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks_to_parent)


# small steps --------------------------------------------------------------------------------------------------------


def _take(descriptor: int) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _errno(error: OSError | SafetensorError) -> int | None:
    """Which error of the system it was; safetensors says it in words only."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None


def _write_text(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _format(kind: str) -> str:
    return f"pyro_symmetric.{kind}"


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values on the CPU, contiguous, no two in one storage: the format stores each tensor by itself."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        result[name] = value.clone() if value.untyped_storage().data_ptr() in seen else value
        seen.add(value.untyped_storage().data_ptr())
    return result


def _checked_header(path: Path, kind: str, version: int, metadata: Mapping[str, str]) -> dict[str, Any]:
    if metadata.get("format") != _format(kind):
        raise StoreError(
            f"{path} is a safetensors file, but no {kind} of this library (format {metadata.get('format')!r})"
        )
    found = int(metadata["version"]) if metadata.get("version", "").isdigit() else None
    if found is None or found > version:
        raise StoreError(
            f"{path} is of version {metadata.get('version')!r} of the {kind} format; this library reads versions up to "
            f"{version}, so a newer pyro_symmetric is needed"
        )
    try:
        return json.loads(metadata["json"])
    except (KeyError, json.JSONDecodeError) as error:
        raise StoreError(f"{path} has a damaged header: {error!r}") from error
