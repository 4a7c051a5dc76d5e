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
from pyro_symmetric.store import PathLike
from pyro_symmetric.weights import Weights

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
_NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the state dict


def read_checkpoints(
    source: PathLike | Sequence[PathLike],
    *,
    pattern: str = "**/*",
    rename: Callable[[str], str | None] | None = None,
    key: str | None = None,
    progress: bool = True,
) -> Posterior:
    """Read state dicts, one file for each network, as one posterior.

    >>> import pathlib
    >>> pathlib.Path("checkpoints").mkdir()
    >>> for number in range(3):
    ...     torch.save(nn.Linear(2, 3).state_dict(), f"checkpoints/net-{number}.pt")
    >>> ps.checkpoints.read_checkpoints("checkpoints").samples["weight"].shape
    torch.Size([1, 3, 3, 2])

    :param source: a folder, or the files themselves in the order that the draws shall have.
    :param pattern: which files of the folder, as :meth:`pathlib.Path.glob` takes it; those of a known ending are read,
        in natural order (``net-2`` before ``net-10``).
    :param rename: name in the file -> name of the site, or ``None`` to leave it out. Running statistics of batch
        normalisation are sites, too; tensors that aren't floating-point are left out.
    :param key: where in a ``.pt`` file the state dict lies. Default: the file itself, or its entry ``state_dict``,
        ``model_state_dict`` or ``model``.
    :return: samples ``(1, files, *shape)`` in the first file's precision; ``metadata`` with ``files`` and
        ``not_finite``, those with a NaN or an infinity in them, of which it warns.
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
            samples = {s: torch.empty(len(files), *v.shape, dtype=v.dtype, device="cpu") for s, v in sites.items()}
        if {s: v.shape for s, v in sites.items()} != {s: v.shape[1:] for s, v in samples.items()}:
            raise ValueError(f"{file} and {files[0]} have other sites or shapes; they must be of one network (rename=)")
        for site, value in sites.items():
            samples[site][i] = value
        if not all(bool(torch.isfinite(value[i]).all()) for value in samples.values()):
            not_finite.append(names[i])
    if not_finite:
        told = f"{len(not_finite)} checkpoints hold a NaN or an infinity: {not_finite}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
    metadata = {"files": names, "not_finite": not_finite}
    return Posterior({site: value[None] for site, value in samples.items()}, {}, metadata, kind="independent")


def _files(source: PathLike | Sequence[PathLike], pattern: str) -> list[Path]:
    if not isinstance(source, str | os.PathLike):
        return [Path(file) for file in source]
    found = [file for file in Path(source).glob(pattern) if file.is_file() and file.suffix in SUFFIXES]
    # Numbers in a name count as numbers: between them stands text, so that like meets like.
    return sorted(found, key=lambda file: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", str(file))])


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
    nested = next((held[name] for name in _NESTED if isinstance(held.get(name), Mapping)), held)
    state: Any = nested if key is None else held.get(key)
    tensors = {str(name): value for name, value in (state or {}).items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{file} holds no state dict, but {sorted(map(str, held))[:10]}: name an entry by key=")
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
    return sites
