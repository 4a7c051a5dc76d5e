"""The library's files: tensors and a JSON header in one ``.safetensors`` file, written whole or not at all. No
pickle.

Every file carries the CRC-32 of all that it says and holds, which reading compares: about 4 GB a second, where
cryptographic hashes take 1 or 2. It finds whatever happens to a file by itself (flipped bits, zeros that a power cut
left, a lost end); it is no seal against somebody who writes another file on purpose.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import stat
import sys
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.errors import Error

PathLike = str | os.PathLike[str]
CHECKSUM = "crc32"
DAMAGED = "what it holds differs from its checksum. Restore it from a copy, or remove it to make it anew"
MOST_TRIES = 100  # to read a file that is replaced again and again


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
    separate = _separate(tensors)
    metadata = {"format": _format(kind), "version": str(version), "json": text}
    metadata[CHECKSUM] = _checksum(separate, metadata)
    write_whole(path, lambda to: save_file(separate, to, metadata), kind)


def load_tensors(
    path: PathLike, kind: str, version: int, *, verify: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: tensors on the CPU, and the header. Draws are mapped, not copied.

    :param version: the newest version that the caller understands.
    :param verify: read everything and compare it with its checksum; otherwise tensors are read when they are touched.
    :raises OSError: if there is no such file or it can't be read.
    :raises StoreError: if it is truncated, differs from its checksum, is of another kind, or of a newer version.
    """
    path = arguments.path("path", path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {kind} at {path}")
    try:
        metadata, header, tensors = _opened(path, kind, version)
    except SafetensorError as error:
        raise StoreError(f"{path} is no {kind} or is damaged (was it cut short?): {error}") from error
    if verify and metadata.get(CHECKSUM) != _checksum(tensors, metadata):
        raise StoreError(f"{path} is damaged: {DAMAGED}")
    return tensors, header


def save_json(path: PathLike, content: Mapping[str, Any], kind: str) -> None:
    """Write a JSON file with a checksum, whole or not at all.

    :raises ValueError: if JSON can't hold the content.
    """
    try:
        content = json.loads(json.dumps(content))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {kind} can't be written as JSON: {error}") from error
    write_text(path, json.dumps({**content, CHECKSUM: _checksum_of_json(content)}, indent=1), kind)


def load_json(path: PathLike, kind: str) -> dict[str, Any]:
    """Read what :func:`save_json` wrote.

    :raises OSError: if there is no such file or it can't be read.
    :raises StoreError: if it differs from its checksum.
    """
    try:
        content = dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"the {kind} {path} is damaged: {error!r}") from error
    if content.pop(CHECKSUM, None) != _checksum_of_json(content):
        raise StoreError(f"the {kind} {path} is damaged: {DAMAGED}")
    return content


def inside(folder: PathLike, name: Any) -> Path:
    """The path of a file that another file names, as ``"a"`` or ``"a/b"``.

    :raises StoreError: unless that is in ``folder``, links followed: nothing that is read may name other files.
    """
    folder = Path(folder)
    parts = name.split("/") if isinstance(name, str) else [""]
    if not any(part in ("", ".", "..") or set(part) & set("\\:\0") for part in parts):
        path = folder.joinpath(*parts)
        with contextlib.suppress(OSError, RuntimeError):  # links that lead to each other
            if path.resolve().is_relative_to(folder.resolve()):
                return path
    raise StoreError(f"{folder} refers to {name!r}, which isn't a file inside of it; nothing else is read or written")


def write_whole(path: PathLike, write: Callable[[str], None], kind: str = "file") -> None:
    """Let ``write`` make a file beside ``path``, sync it, and only then move it into its place."""
    path = arguments.path("path", path)
    if not path.parent.is_dir():
        raise OSError(f"the {kind} couldn't be saved to {path}: there is no folder {path.parent}")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        mode = os.fstat(descriptor).st_mode  # as any new file has; safetensors makes private ones
        os.close(descriptor)
        write(str(temporary))
        os.chmod(temporary, stat.S_IMODE(mode))
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        message = f"the {kind} couldn't be saved to {path}: {error}"
        raise (OSError(message) if (number := _errno(error)) is None else OSError(number, message)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: PathLike, text: str, kind: str = "file") -> None:
    """Write a text file whole or not at all."""
    write_whole(path, lambda to: _write_text(to, text), kind)


def open_own(path: PathLike, flags: int) -> int:
    """An opener of files to write, which refuses a symbolic link: what it points to is somebody else's.

    :raises OSError: naming the link.
    """
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        if Path(path).is_symlink():
            told = f"{path} is a symbolic link, which isn't followed; remove it"
            raise OSError(errno.ELOOP, told) from error
        raise


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
    :raises OSError: if the folder is missing or can't be written to, or if there is something else in the file's place:
        a link, or a file that no lock has written.
    """

    def __init__(self, path: PathLike, what: str):
        self._path = Path(path)
        self._is_new = not self._path.exists()
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") if hasattr(os, "pread") else ""
            if holder and not holder.startswith(_HOLDER):
                raise FileExistsError(f"{path} is no lock file but holds other things; it was left as it is")
            if not _take(descriptor):
                raise BlockingIOError(
                    f"{what} is being written by another run ({holder or 'unknown'}); nothing was done"
                )
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{_HOLDER}{os.getpid()} on {socket.gethostname()}".encode())
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


_HOLDER = "process "  # how a lock file's text begins

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
    """The system's error that it was; safetensors says it in words only."""
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


def _opened(path: Path, kind: str, version: int) -> tuple[dict[str, str], dict[str, Any], dict[str, Tensor]]:
    """The contents of a file: its metadata, the header in them, and its tensors, mapped.

    safetensors opens the file by name, once to read the metadata and once more to map the tensors. A file that is
    replaced in between, as a run does with its checkpoint, would give those of one and the values of another.
    """
    for _ in range(MOST_TRIES):
        before = _which(path)
        try:
            with safe_open(path, framework="pt", device="cpu") as store:
                metadata = store.metadata() or {}
                header = _checked_header(path, kind, version, metadata)
                tensors = {name: store.get_tensor(name) for name in store.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, RuntimeError):  # such as values beyond the end of a shorter file
            if _which(path) == before:
                raise
            continue
        if _which(path) == before:
            return metadata, header, tensors
    raise OSError(f"{path} was replaced {MOST_TRIES} times while it was read; try again")


def _which(path: Path) -> tuple[int, ...]:
    """Another number where the file of this name is another one."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


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
        return dict(json.loads(metadata["json"]))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"{path} has a damaged header: {error!r}") from error


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """The CRC-32 of all but itself, in hexadecimal."""
    said = {key: text for key, text in metadata.items() if key != CHECKSUM}
    layout = {name: [str(value.dtype), *value.shape] for name, value in tensors.items()}
    total = zlib.crc32(json.dumps([said, layout], sort_keys=True).encode())
    for name in sorted(tensors):
        total = zlib.crc32(raw_bytes(tensors[name]).numpy().data, total)
    return f"{total:08x}"


def _checksum_of_json(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
