"""Collections of checkpoints: a folder of state dicts, one file for each network, as one posterior.

Published collections hold thousands of trained networks of one architecture as ``.pt``, ``.pth`` or ``.safetensors``
files. :func:`read_checkpoints` makes a :class:`~pyro_symmetric.posterior.Posterior` of them, a network a draw, so that
every distance and test of the library can be applied.

Nothing that a file could execute is executed: ``.pt`` files are read with ``torch.load(weights_only=True)``, which
refuses all but tensors and plain containers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import PathLike
from pyro_symmetric.weights import Weights, is_running_statistic

Buffers = Literal["sites", "drop"]

SUFFIXES, MORE_SUFFIXES = (".safetensors", ".pt", ".pth"), (".ckpt", ".bin")
_NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the state dict


def read_checkpoints(
    source: PathLike | Sequence[PathLike],
    *,
    pattern: str = "**/*",
    buffers: Buffers = "sites",
    rename: Callable[[str], str | None] | None = None,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Posterior:
    """Read state dicts, one file for each network, as one posterior.

    >>> import pathlib
    >>> pathlib.Path("checkpoints").mkdir()
    >>> for number in range(3):
    ...     torch.save(nn.Linear(2, 3).state_dict(), f"checkpoints/net-{number}.pt")
    >>> posterior = ps.checkpoints.read_checkpoints("checkpoints")
    >>> posterior.get_samples()["weight"].shape
    torch.Size([3, 3, 2])

    Files are read one after the other into one tensor for each site, so that memory holds the result and one network.

    :param source: a folder, or the files themselves in the order that the draws shall have.
    :param pattern: which files of the folder, as :meth:`pathlib.Path.glob` takes it; those that end in
        ``.safetensors``, ``.pt`` or ``.pth`` are read (if there are none, ``.ckpt`` and ``.bin``), in natural order
        (``net-2`` before ``net-10``).
    :param buffers: what becomes of the running statistics of batch normalisation (``running_mean``, ``running_var``):
        ``"sites"`` keeps them as sites of the posterior, which moving and removing symmetries needs; ``"drop"`` leaves
        them out. Tensors that aren't floating-point (``num_batches_tracked``) are always left out.
    :param rename: name in the file -> name of the site, or ``None`` to leave it out; ``lambda name:
        name.removeprefix("module.")`` undoes ``DataParallel``.
    :param key: where in a ``.pt`` file the state dict lies. Default: the file itself, or its entry ``state_dict``,
        ``model_state_dict`` or ``model``.
    :param dtype: to convert to; by default that of the first file.
    :return: samples ``(1, files, *shape)``; ``metadata`` with ``files`` and ``not_finite``, the files with a NaN or an
        infinity in them, of which it warns.
    :raises OSError: if there is no such folder or file, or no checkpoint in it.
    :raises ValueError: naming the file that can't be read, or differs from the first one in its sites.
    """
    arguments.one_of("buffers", buffers, get_args(Buffers))
    arguments.dtype("dtype", dtype, none="that of the first file")
    arguments.function("rename", rename, "a function of a tensor's name", none="names as they are")
    if key is not None:
        arguments.instance("key", key, str, "the name of an entry, or None for the usual ones")
    files = _files(source, pattern)
    names = [str(file.relative_to(source)) if isinstance(source, str | Path) else str(file) for file in files]
    samples: Weights = {}
    not_finite: list[str] = []
    for i, file in enumerate(tqdm(files, desc="checkpoints", unit="file", disable=not progress)):
        sites = _sites(_state(file, key), buffers, rename, file)
        if i == 0:
            samples = {
                site: torch.empty(len(files), *value.shape, dtype=dtype or value.dtype, device="cpu")
                for site, value in sites.items()
            }
        shapes = {site: tuple(value.shape[1:]) for site, value in samples.items()}
        if shapes != (found := {site: tuple(value.shape) for site, value in sites.items()}):
            apart = {site: own for site, own in (found | shapes).items() if found.get(site) != shapes.get(site)}
            raise ValueError(
                f"{file} differs from {files[0]} in the sites {sorted(apart)}; all checkpoints must be of one network "
                "(rename= can take a prefix such as 'module.' away)"
            )
        for site, value in sites.items():
            samples[site][i] = value
        if not all(bool(torch.isfinite(value[i]).all()) for value in samples.values()):
            not_finite.append(names[i])
    if not_finite:
        shown = ", ".join(not_finite[:3]) + (", ..." if len(not_finite) > 3 else "")
        warnings.warn(f"{len(not_finite)} checkpoints hold a NaN or an infinity: {shown}", RuntimeWarning, stacklevel=2)
    metadata = {"files": names, "not_finite": not_finite}
    return Posterior({site: value[None] for site, value in samples.items()}, {}, metadata, rows="independent")


# small steps --------------------------------------------------------------------------------------------------------


def _files(source: PathLike | Sequence[PathLike], pattern: str) -> list[Path]:
    if not isinstance(source, str | Path) and isinstance(source, Sequence):
        files = [arguments.path(f"source[{i}]", file) for i, file in enumerate(source)]
        missing = [str(file) for file in files if not file.is_file()]
        if missing or not files:
            raise FileNotFoundError(f"there is no checkpoint at {', '.join(missing)}" if missing else "source is empty")
        return files
    folder = arguments.path("source", source)
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"pattern is {pattern!r}; it must say which files of the folder to read, as in '**/*.pt'")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; source is a folder of checkpoints, or a list of files")
    matching = [file for file in folder.glob(pattern) if file.is_file()]
    found = [file for file in matching if file.suffix in SUFFIXES]
    found = found or [file for file in matching if file.suffix in MORE_SUFFIXES]
    if not found:
        raise FileNotFoundError(f"{folder} holds no file {pattern} that ends in {', '.join(SUFFIXES + MORE_SUFFIXES)}")
    return sorted(found, key=lambda file: _natural(str(file.relative_to(folder))))


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Numbers in a name count as numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _state(file: Path, key: str | None) -> dict[str, Tensor]:
    """A file's tensors, on the CPU."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file can end in any of them
        raise ValueError(
            f"{file} can't be read as a checkpoint ({type(error).__name__}: {str(error)[:200]}): it is "
            "damaged, another kind of file (pattern= says which are read), or holds more than tensors, which isn't "
            "read, as unpickling can run any code: save net.state_dict()"
        ) from error
    held = content if isinstance(content, Mapping) else {}
    nested = [name for name in _NESTED if isinstance(held.get(name), Mapping)]
    state: Any = held.get(key) if key is not None else held[nested[0]] if nested else held
    tensors = {str(name): value for name, value in (state or {}).items() if isinstance(value, Tensor)}
    if not tensors:
        entries = f" with the entries {sorted(map(str, held))[:10]}" if held else ""
        raise ValueError(
            f"{file} holds no state dict{f' at {key!r}' if key else ''}: found {type(content).__name__}{entries}; name "
            "the entry by key=, or the files to read by pattern="
        )
    return tensors


def _sites(
    state: Mapping[str, Tensor], buffers: str, rename: Callable[[str], str | None] | None, file: Path
) -> Weights:
    """The sites of one network."""
    sites: Weights = {}
    for name, value in state.items():
        site = name if rename is None else rename(name)
        if site is None or not value.is_floating_point() or (buffers == "drop" and is_running_statistic(name)):
            continue
        if site in sites:
            raise ValueError(f"{file}: rename gives {site!r} to two tensors, the second is {name!r}")
        sites[site] = value
    if not sites:
        raise ValueError(f"{file} holds no floating-point tensor to keep; found {sorted(state)}")
    return sites
