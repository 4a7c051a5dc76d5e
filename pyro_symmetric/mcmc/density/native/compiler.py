"""The compiled code of ``dense.cpp``: built once by the machine's C++ compiler, kept, and loaded.

To load a library is to run it. So it is loaded only from a folder that nobody but this user can have written to, and
only if it is, to the last bit, what was built: one that was cut short or changed is built anew.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pyro_symmetric.mcmc.density.engine import NoCompiler

SOURCE = Path(__file__).with_name("dense.cpp")
# No -ffast-math: infinite and NaN energies must stay what they are, and linking with it changes the whole process.
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w", "-ffp-contract=fast"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
PATIENCE = 300  # seconds for a build


def library() -> ctypes.CDLL:
    """The compiled code, built if this machine hasn't done so yet. A process tries once, also if that fails.

    :raises NoCompiler: saying what went wrong.
    """
    found = _outcome()
    if isinstance(found, str):
        raise NoCompiler(found)
    return found


def compiler_name() -> str | None:
    """The machine's C++ compiler, or ``None``."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)


# small steps --------------------------------------------------------------------------------------------------------


@functools.cache
def _outcome() -> ctypes.CDLL | str:
    """The compiled code, or why there is none."""
    name = compiler_name()
    if name is None:
        return "no C++ compiler was found (g++, clang++ or $CXX)"
    try:
        return _declared(_load(shlex.split(name)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"the C++ compiler {name} failed: {said.strip()[-300:]}"


def _load(compiler: list[str]) -> ctypes.CDLL:
    version = _run([*compiler, "--version"])
    parts = (SOURCE.read_text(), " ".join(FLAGS), version, platform.platform(), _processor())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    folder = _cache_folder()
    if folder is not None:
        return ctypes.CDLL(str(_kept(folder, key) or _build(compiler, folder, key)))
    with tempfile.TemporaryDirectory(prefix="pyro_symmetric-", ignore_cleanup_errors=True) as own:
        return ctypes.CDLL(str(_build(compiler, Path(own), key)))  # once loaded, it isn't read again


def _build(compiler: list[str], folder: Path, key: str) -> Path:
    kept = f"kept in {folder}" if folder.name == "pyro_symmetric" else "for this process alone"
    print(f"pyro_symmetric: {compiler[0]} compiles {SOURCE.name}, some seconds, once; {kept}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as room:
        part = Path(room) / "part.so"
        _run([*compiler, *FLAGS, str(SOURCE), "-o", str(part)])
        path = folder / f"dense-{key}-{_digest(part)}.so"
        os.replace(part, path)  # at once: another process may build the same
    return path


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout


def _kept(folder: Path, key: str) -> Path | None:
    """An earlier build that is still what it was."""
    for path in folder.glob(f"dense-{key}-*.so"):
        if _is_own(path) and path.stem.endswith(f"-{_digest(path)}"):
            return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _cache_folder() -> Path | None:
    """A folder that this user alone can enter and write to; ``None`` if there is none."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_symmetric"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        if not _is_own(folder) or not _is_firm(folder.parent):
            return None
        folder.chmod(0o700)
        return folder if os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # the latter: no home
        return None


def _is_own(path: Path) -> bool:
    """True if it is this user's, and no one else may write to it."""
    if not hasattr(os, "getuid"):
        return True
    found = path.lstat()
    return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o022


def _is_firm(folder: Path) -> bool:
    """True if strangers can't rename what this user has in it."""
    mode = folder.stat().st_mode
    return not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX)


def _processor() -> str:
    """The features of the processor that decide if a build runs on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """With the types of its functions."""
    pointer: Any = ctypes.c_void_p
    integer: Any = ctypes.c_int64
    for function in (loaded.loss_and_gradient_float, loaded.loss_and_gradient_double):
        function.argtypes = (*[pointer] * 6, integer, pointer, integer, *[pointer] * 5, integer)
        function.restype = None
    loaded.vector_bytes.restype = integer
    return loaded
