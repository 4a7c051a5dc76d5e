"""Collections of checkpoints: a folder of state dicts, one file for each network, as one posterior.

Nothing that a file could execute is executed: all but ``.safetensors`` is read with ``torch.load(weights_only=True)``,
which refuses all but tensors and plain containers.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.storage import PathLike
from pyro_symmetric.weights import Weights

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
_NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the state dict


def read_checkpoints(
    source: PathLike | Sequence[PathLike],
    *,
    pattern: str = "**/*",
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
        ``.safetensors``, ``.pt``, ``.pth``, ``.ckpt`` or ``.bin`` are read, in natural order (``net-2`` before
        ``net-10``).
    :param rename: name in the file -> name of the site, or ``None`` to leave it out; ``lambda name:
        name.removeprefix("module.")`` undoes ``DataParallel``. Running statistics of batch normalisation are sites,
        too, since moving and removing symmetries needs them; tensors that aren't floating-point are left out.
    :param key: where in a ``.pt`` file the state dict lies. Default: the file itself, or its entry ``state_dict``,
        ``model_state_dict`` or ``model``.
    :param dtype: to convert to; by default that of the first file.
    :return: samples ``(1, files, *shape)``; ``metadata`` with ``files`` and ``not_finite``, the files with a NaN or an
        infinity in them, of which it warns.
    :raises OSError: if there is no such folder or file, or no checkpoint in it.
    :raises ValueError: naming the file that can't be read, or differs from the first one in its sites.
    """
    files = _files(source, pattern)
    if not files:
        raise FileNotFoundError(f"there is no file {pattern} in {source} that ends in {', '.join(SUFFIXES)}")
    names = [str(file.relative_to(source)) if isinstance(source, str | Path) else str(file) for file in files]
    samples: Weights = {}
    not_finite: list[str] = []
    for i, file in enumerate(tqdm(files, desc="checkpoints", unit="file", disable=not progress)):
        sites = _sites(_state(file, key), rename, file)
        if i == 0:
            samples = {
                site: torch.empty(len(files), *value.shape, dtype=dtype or value.dtype, device="cpu")
                for site, value in sites.items()
            }
        shapes, found = ({site: value.shape for site, value in own.items()} for own in (samples, sites))
        if apart := sorted(
            s for s in {**shapes, **found} if s not in found or shapes.get(s) != (len(files), *found[s])
        ):
            raise ValueError(
                f"{file} differs from {files[0]} in the sites {apart}; all checkpoints must be of one network "
                "(rename= can take a prefix such as 'module.' away)"
            )
        for site, value in sites.items():
            samples[site][i] = value
        if not all(bool(torch.isfinite(value[i]).all()) for value in samples.values()):
            not_finite.append(names[i])
    if not_finite:
        told = f"{len(not_finite)} checkpoints hold a NaN or an infinity: {not_finite}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
    metadata = {"files": names, "not_finite": not_finite}
    return Posterior({site: value[None] for site, value in samples.items()}, {}, metadata, kind="independent")


# small steps --------------------------------------------------------------------------------------------------------


def _files(source: PathLike | Sequence[PathLike], pattern: str) -> list[Path]:
    if not isinstance(source, str | os.PathLike):
        return [Path(file) for file in source]
    folder = Path(source)
    found = [file for file in folder.glob(pattern) if file.is_file() and file.suffix in SUFFIXES]
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
            f"{file} can't be read as a checkpoint ({type(error).__name__}: {str(error)[:200]}): it is damaged, "
            "another kind of file (pattern= says which are read), or holds more than tensors: save net.state_dict()"
        ) from error
    held = content if isinstance(content, Mapping) else {}
    nested = [name for name in _NESTED if isinstance(held.get(name), Mapping)]
    state: Any = held.get(key) if key is not None else held[nested[0]] if nested else held
    tensors = {str(name): value for name, value in (state or {}).items() if isinstance(value, Tensor)}
    if not tensors:
        at = f" at {key!r}" if key else ""
        raise ValueError(f"{file} holds no state dict{at}: entries {sorted(map(str, held))[:10]}; name one by key=")
    return tensors


def _sites(state: Mapping[str, Tensor], rename: Callable[[str], str | None] | None, file: Path) -> Weights:
    """The sites of one network."""
    sites: Weights = {}
    for name, value in state.items():
        site = name if rename is None else rename(name)
        if site is None or not value.is_floating_point():
            continue
        if site in sites:
            raise ValueError(f"{file}: rename gives {site!r} to two tensors, the second is {name!r}")
        sites[site] = value
    if not sites:
        raise ValueError(f"{file} holds no floating-point tensor to keep; found {sorted(state)}")
    return sites
