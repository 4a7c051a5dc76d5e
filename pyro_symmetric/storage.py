"""The library's files: tensors and a JSON header in one ``.safetensors`` file, written whole or not at all. No
pickle."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

PathLike = str | os.PathLike[str]


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
    :raises ValueError: if it is truncated, of another kind, or of a newer version.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {kind} at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as store:
            header = _checked_header(path, kind, version, store.metadata() or {})
            return {name: store.get_tensor(name) for name in store.keys()}, header  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is no {kind} or is damaged (was it cut short?): {error}") from error


def write_whole(path: PathLike, write: Callable[[str], None], kind: str = "file") -> None:
    """Let ``write`` make a file beside ``path``, sync it, and only then move it into its place."""
    path = Path(path)
    if not path.parent.is_dir():
        raise OSError(f"the {kind} couldn't be saved to {path}: there is no folder {path.parent}")
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        write(temporary)
        _sync(temporary)
        # A temporary file is private; the finished one gets the permissions that any new file would.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        temporary = None
        if os.name == "posix":
            _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise OSError(f"the {kind} couldn't be saved to {path}: {error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def write_text(path: PathLike, text: str, kind: str = "file") -> None:
    """Write a text file whole or not at all."""
    write_whole(path, lambda to: _write_text(to, text), kind)


# small steps --------------------------------------------------------------------------------------------------------


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


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked_header(path: Path, kind: str, version: int, metadata: Mapping[str, str]) -> dict[str, Any]:
    if metadata.get("format") != _format(kind):
        raise ValueError(
            f"{path} is a safetensors file, but no {kind} of this library (format {metadata.get('format')!r})"
        )
    found = int(metadata["version"]) if metadata.get("version", "").isdigit() else None
    if found is None or found > version:
        raise ValueError(
            f"{path} is of version {metadata.get('version')!r} of the {kind} format; this library reads versions up to "
            f"{version}, so a newer pyro_symmetric is needed"
        )
    try:
        return json.loads(metadata["json"])
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} has a damaged header: {error!r}") from error
