"""Folders of checkpoints, one state dict for each network, as one posterior.

No file can execute code: all but ``.safetensors`` are read with
``torch.load(weights_only=True)``, which accepts only tensors and plain containers.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import NUMBERS, PathLike, load_pickled, require_stored
from pyro_symmetric.weights import Tensors, Weights, map_values

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
# under which training scripts save the state dict
_KEYS = ("state_dict", "model_state_dict", "model")


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

    :param source: a folder, or a list of files in the order of the draws.
    :param pattern: of the folder's files, for :meth:`pathlib.Path.glob`; those with a
        known ending are read in natural order (``net-2`` before ``net-10``).
    :param rename: name in the file -> name of the site, or ``None`` to leave it out.
        By default sites are named as in the network that was compiled or made parallel,
        without ``_orig_mod.``, and without ``module.`` at the start of all names.
        Running statistics of batch normalisation become sites; integer tensors are left
        out.
    :param key: of the state dict in a ``.pt`` file. Default: the file's own top level,
        or its entry ``state_dict``, ``model_state_dict`` or ``model``.
    :return: samples ``(1, files, *shape)`` in the first file's precision; ``metadata``
        lists the ``files`` and, with a warning, those that hold a NaN or an infinity as
        ``not_finite``.
    :raises OSError: if there is no such folder or file, or no checkpoint in it.
    :raises ValueError: naming the file that can't be read or has other sites than the
        first one; has other numbers than dense, real ones of 16 bits at least; or is
        much smaller than its tensors.
    """
    files = _files(source, pattern)
    if not files:
        raise FileNotFoundError(
            f"there is no file {pattern} in {source} that ends in {', '.join(SUFFIXES)}"
        )
    names = [
        str(file.relative_to(source)) if isinstance(source, str | Path) else str(file)
        for file in files
    ]
    samples = {}
    not_finite = []
    for i, file in enumerate(
        tqdm(files, desc="checkpoints", unit="file", disable=not progress)
    ):
        sites = _sites(_state(file, key), rename, file)
        if i == 0:
            samples = map_values(
                lambda v: torch.empty(
                    len(files), *v.shape, dtype=v.dtype, device="cpu"
                ),
                sites,
            )
        if map_values(lambda v: v.shape, sites) != map_values(
            lambda v: v.shape[1:], samples
        ):
            raise ValueError(
                f"{file} and {files[0]} have other sites or shapes; they must be of "
                "one network (rename=)"
            )
        for site, value in sites.items():
            samples[site][i] = value
        if not all(bool(torch.isfinite(value[i]).all()) for value in samples.values()):
            not_finite.append(names[i])
    if not_finite:
        message = (
            f"{len(not_finite)} checkpoints hold a NaN or an infinity: {not_finite}"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    metadata = {"files": names, "not_finite": not_finite}
    return Posterior(
        map_values(lambda value: value[None], samples),
        {},
        metadata,
        kind="independent",
    )


def _files(source: PathLike | Sequence[PathLike], pattern: str) -> list[Path]:
    if not isinstance(source, str | os.PathLike):
        return [Path(file) for file in source]
    files = [
        file
        for file in Path(source).glob(pattern)
        if file.is_file() and file.suffix in SUFFIXES
    ]
    # Sort digits as numbers; the split alternates text and digits, so that keys are
    # comparable.
    return sorted(
        files,
        key=lambda file: [
            int(p) if p.isdigit() else p for p in re.split(r"(\d+)", str(file))
        ],
    )


def _state(file: Path, key: str | None) -> Weights:
    """Read the state dict of a file, on the CPU."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = load_pickled(file)
    except OSError:
        raise
    except Exception as error:  # a damaged file may raise any exception
        raise ValueError(
            f"{file} can't be read as a checkpoint ({type(error).__name__}: "
            f"{str(error)[:200]}): it is damaged, "
            "another kind of file (pattern= says which are read), or holds more than "
            "tensors: save net.state_dict()"
        ) from error
    entries = content if isinstance(content, Mapping) else {}
    default = next(
        (entries[name] for name in _KEYS if isinstance(entries.get(name), Mapping)),
        entries,
    )
    state = default if key is None else entries.get(key)
    tensors = {
        str(name): value
        for name, value in (state if isinstance(state, Mapping) else {}).items()
        if isinstance(value, Tensor)
    }
    if not tensors:
        raise ValueError(
            f"{file} holds no state dict, but {sorted(map(str, entries))[:10]}: name "
            "an entry by key="
        )
    return tensors


def _unwrapped(state: Tensors) -> Weights:
    """Return a state with the names that it has without ``torch.compile`` and
    ``DataParallel``.
    """
    names = [name.replace("_orig_mod.", "") for name in state]
    while all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return dict(zip(names, state.values(), strict=True))


def _sites(
    state: Tensors, rename: Callable[[str], str | None] | None, file: Path
) -> Weights:
    """Rename the tensors of one network to sites."""
    sites = {}
    if rename is None:
        state = _unwrapped(state)
    for name, value in state.items():
        site = name if rename is None else rename(name)
        if site is None or not (value.is_floating_point() or value.is_complex()):
            continue
        if site in sites:
            raise ValueError(
                f"{file}: rename gives {site!r} to two tensors, the second is {name!r}"
            )
        if problem := _problem(value):
            raise ValueError(
                f"{file}: {name!r} is {problem}; save a dense tensor of numbers, or "
                "leave it out by rename="
            )
        sites[site] = value
    require_stored(sites, file)
    return sites


def _problem(value: Tensor) -> str:
    """Describe why a floating-point tensor can't become draws; empty if it can."""
    if value.is_nested or value.layout != torch.strided:
        return "sparse or nested"
    if value.is_meta:
        return "on the device 'meta', without data"
    kind = str(value.dtype).removeprefix("torch.")
    return "" if kind in NUMBERS else f"of dtype {kind}"
