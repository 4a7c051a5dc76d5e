"""Collections of checkpoints: a folder of state dicts, one file for each network, as one posterior, and back.

Published collections hold thousands of trained networks of one architecture as ``.pt``, ``.pth`` or ``.safetensors``
files. :func:`read_checkpoints` makes a :class:`~pyro_symmetric.posterior.Posterior` of them, a network a draw, so that
every distance and test of the library can be applied; :func:`write_checkpoints` writes one file per draw.

Nothing that a file could execute is executed: ``.pt`` files are read with ``torch.load(weights_only=True)``, which
refuses all but tensors and plain containers.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.posterior import Posterior, Rows
from pyro_symmetric.storage import PathLike, StoreError, dtype_of, load_json, save_json, write_whole
from pyro_symmetric.weights import Weights, is_running_statistic

Buffers = Literal["sites", "drop"]
Format = Literal["safetensors", "pt"]

SUFFIXES, MORE_SUFFIXES = (".safetensors", ".pt", ".pth"), (".ckpt", ".bin")
_NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the state dict
_METADATA, _KIND = "checkpoints.json", "list of the checkpoints' statistics and metadata"


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
    >>> posterior = ps.read_checkpoints("checkpoints")
    >>> posterior.get_samples()["weight"].shape
    torch.Size([3, 3, 2])

    Files are read one after the other into one tensor for each site, so that memory holds the result and one network.

    :param source: a folder, or the files themselves in the order that the draws shall have.
    :param pattern: which files of the folder, as :meth:`pathlib.Path.glob` takes it; those that end in
        ``.safetensors``, ``.pt`` or ``.pth`` are read (if there are none, ``.ckpt`` and ``.bin``), in natural order
        (``net-2`` before ``net-10``).
    :param buffers: what becomes of the running statistics of batch normalisation (``running_mean``, ``running_var``):
        ``"sites"`` keeps them as sites of the posterior, which moving and removing symmetries needs; ``"drop"`` leaves
        them out. Tensors that aren't floating-point (``num_batches_tracked``) are always left out; ``metadata`` lists
        what was.
    :param rename: name in the file -> name of the site, or ``None`` to leave it out; ``lambda name:
        name.removeprefix("module.")`` undoes ``DataParallel``.
    :param key: where in a ``.pt`` file the state dict lies. Default: the file itself, or its entry ``state_dict``,
        ``model_state_dict`` or ``model``.
    :param dtype: to convert to; by default that of the first file.
    :return: samples ``(1, files, *shape)``; ``metadata`` with ``files``, ``buffers`` (the sites that are),
        ``left_out``, ``not_finite`` (the files with a NaN or an infinity in them, of which it warns) and what
        :func:`write_checkpoints` kept of a posterior's own.
    :raises OSError: if there is no such folder or file, or no checkpoint in it.
    :raises ValueError: naming the file that can't be read, lacks a site, or has one of another shape or more than the
        first file has.
    """
    arguments.one_of("buffers", buffers, get_args(Buffers))
    arguments.dtype("dtype", dtype, none="that of the first file")
    arguments.function("rename", rename, "a function of a tensor's name", none="names as they are")
    if key is not None:
        arguments.instance("key", key, str, "the name of an entry, or None for the usual ones")
    files, folder = _files(source, pattern)
    samples: Weights = {}
    left_out: list[str] = []
    not_finite: list[int] = []
    kept = _kept(folder)
    names = [str(file.relative_to(folder)) if folder is not None else str(file) for file in files]
    for i, file in enumerate(tqdm(files, desc="checkpoints", unit="file", disable=not progress)):
        _require_unchanged(file, kept.get("crc32s", {}).get(names[i]))
        sites, others = _sites(_state(file, key), buffers, rename, file)
        if i == 0:
            left_out = others
            samples = {
                site: torch.empty(len(files), *value.shape, dtype=dtype or value.dtype, device="cpu")
                for site, value in sites.items()
            }
        _check_sites(sites, samples, file, files[0])
        for site, value in sites.items():
            samples[site][i] = value
        if not all(bool(torch.isfinite(value[i]).all()) for value in samples.values()):
            not_finite.append(i)
    if not_finite:
        shown = ", ".join(str(files[i]) for i in not_finite[:3]) + (", ..." if len(not_finite) > 3 else "")
        warnings.warn(f"{len(not_finite)} checkpoints hold a NaN or an infinity: {shown}", RuntimeWarning, stacklevel=2)
    metadata = {
        **kept.get("metadata", {}),
        "files": names,
        "buffers": [site for site in samples if is_running_statistic(site)],
        "left_out": left_out,
        "not_finite": [names[i] for i in not_finite],
    }
    dtypes = {name: dtype_of(dtype) for name, dtype in kept.get("dtypes", {}).items()}
    statistics = {
        name: torch.tensor(values, dtype=dtypes.get(name), device="cpu")[None]
        for name, values in _statistics(kept, names).items()
    }
    # One row whatever it was: files are sorted, and may be some of those that were written.
    rows: Rows = "chains" if kept.get("rows") == "chains" else "independent"
    return Posterior({site: value[None] for site, value in samples.items()}, statistics, metadata, rows=rows)


def write_checkpoints(
    posterior: Posterior,
    folder: PathLike,
    *,
    net: nn.Module | None = None,
    format: Format = "safetensors",
    prefix: str = "net",
    progress: bool = True,
) -> list[Path]:
    """Write every draw as a state dict of its own: ``net-00000.safetensors``, ``net-00001.safetensors`` ...

    Metadata, statistics and checksums go to ``checkpoints.json`` beside them. Each file appears whole or not at all.
    Chains are laid end to end.

    >>> net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    >>> draws = {name: torch.randn(3, *value.shape) for name, value in net.named_parameters()}
    >>> posterior = ps.Posterior.from_samples(draws, rows="independent")
    >>> paths = ps.write_checkpoints(posterior, "checkpoints", net=net, format="pt", progress=False)
    >>> [path.name for path in paths]
    ['net-00000.pt', 'net-00001.pt', 'net-00002.pt']
    >>> net.load_state_dict(torch.load(paths[1], weights_only=True))
    <All keys matched successfully>

    :param folder: a new or an empty folder; it is made.
    :param net: the network whose ``load_state_dict`` is to take each file. What draws lack, its buffers (running
        statistics, counts), is then written as the network has it, a shared parameter under all its names; sites that
        aren't the network's (a noise scale) are left out. Without it, the sites are written as they are.
    :param format: ``"safetensors"``, or ``"pt"`` for :func:`torch.load`.
    :param prefix: how the files' names begin.
    :return: the files, in the order of the draws.
    :raises ValueError: if ``prefix`` can't begin a file's name, the folder holds something already, the metadata can't
        be written as JSON, or the draws lack a parameter of ``net`` or have it in another shape.
    :raises OSError: if a file can't be written.
    """
    arguments.instance("posterior", posterior, Posterior, "a Posterior")
    arguments.one_of("format", format, get_args(Format))
    _require_plain(prefix)
    folder = arguments.path("folder", folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(
            f"folder {folder} isn't empty; name a new or an empty one, so that no checkpoints are mixed up"
        )
    draws = posterior.num_chains * posterior.num_samples
    sources = {site: site for site in posterior.samples}
    rest: dict[str, Tensor] = {}
    if net is not None:
        sources, rest = _for_network(arguments.instance("net", net, nn.Module, "a torch.nn.Module, or None"), posterior)
    flat = {site: value.reshape(draws, *value.shape[2:]) for site, value in posterior.samples.items()}
    files = [folder / f"{prefix}-{i:05d}.{format}" for i in range(draws)]
    head = {
        "metadata": posterior.metadata,
        "rows": posterior.rows,
        "files": [file.name for file in files],
        "statistics": {name: value.reshape(-1).tolist() for name, value in posterior.statistics.items()},
        "dtypes": {name: str(value.dtype).removeprefix("torch.") for name, value in posterior.statistics.items()},
    }
    try:
        json.dumps(head)  # before any file is written
    except (TypeError, ValueError) as error:
        raise ValueError(f"the posterior's metadata can't be written as JSON: {error}") from error
    for i, file in enumerate(tqdm(files, desc="checkpoints", unit="file", disable=not progress)):
        # clones: a view would be written with the storage of all draws
        state = {name: flat[site][i].detach().cpu().clone().contiguous() for name, site in sources.items()}
        state |= rest
        save = torch.save if format == "pt" else save_file
        write_whole(file, functools.partial(save, state), "checkpoint")
    head["crc32s"] = {file.name: _checksum(file) for file in files}
    save_json(folder / _METADATA, head, _KIND)
    return files


# small steps --------------------------------------------------------------------------------------------------------


def _for_network(net: nn.Module, posterior: Posterior) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A state dict of a network from a posterior: its name -> the site that it is of, and what the network gives."""
    state, shapes = net.state_dict(keep_vars=True), posterior.site_shapes
    parameters = {id(value): name for name, value in net.named_parameters()}
    sources = {name: name if name in shapes else parameters.get(id(value), name) for name, value in state.items()}
    sources = {name: site for name, site in sources.items() if site in shapes}
    rest = {name: value for name, value in state.items() if name not in sources}
    if missing := [name for name, value in rest.items() if id(value) in parameters]:
        raise ValueError(f"posterior lacks the parameters {missing} of net; it has the sites {list(shapes)[:12]}")
    for name, site in sources.items():
        if shapes[site] != state[name].shape:
            raise ValueError(f"site {site!r} has shape {tuple(shapes[site])}; in net it has {tuple(state[name].shape)}")
    return sources, {name: value.detach().cpu().clone().contiguous() for name, value in rest.items()}


def _require_plain(prefix: str) -> None:
    """As Windows has it, whose rules are the stricter ones: no separator of either kind, no drive."""
    arguments.instance("prefix", prefix, str, "a string such as 'net'")
    if PureWindowsPath(prefix).name != prefix or not prefix or not prefix.isprintable():
        raise ValueError(f"prefix is {prefix!r}; it must be the beginning of a file's name, such as 'net', not a path")


def _files(source: PathLike | Sequence[PathLike], pattern: str) -> tuple[list[Path], Path | None]:
    """The files in order, and the folder that they were found in."""
    if not isinstance(source, str | Path) and isinstance(source, Sequence):
        files = [arguments.path(f"source[{i}]", file) for i, file in enumerate(source)]
        missing = [str(file) for file in files if not file.is_file()]
        if missing or not files:
            raise FileNotFoundError(f"there is no checkpoint at {', '.join(missing)}" if missing else "source is empty")
        return files, None
    folder = arguments.path("source", source)
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"pattern is {pattern!r}; it must say which files of the folder to read, as in '**/*.pt'")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; source is a folder of checkpoints, or a list of files")
    matching = [file for file in folder.glob(pattern) if file.is_file()]
    found = [file for file in matching if file.suffix in SUFFIXES]
    found = found or [file for file in matching if file.suffix in MORE_SUFFIXES]
    if not found:
        suffixes = ", ".join(SUFFIXES + MORE_SUFFIXES)
        raise FileNotFoundError(f"{folder} holds no file {pattern} that ends in {suffixes}")
    return sorted(found, key=lambda file: _natural(str(file.relative_to(folder)))), folder


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Numbers in a name count as numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _state(file: Path, key: str | None) -> dict[str, Tensor]:
    """A file's tensors, on the CPU."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt", device="cpu") as store:
                return {name: store.get_tensor(name) for name in store.keys()}  # noqa: SIM118 (no mapping)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file or is damaged (was it cut short?): {error}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors, or is damaged or another kind of file; it isn't read, as unpickling can "
            "run any code. Save net.state_dict() instead of the module; pattern= says which files are read"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can end in any of them
        raise ValueError(
            f"{file} can't be read as a checkpoint ({type(error).__name__}: {error}); was it cut short, or is it "
            "another kind of file? pattern= says which are read"
        ) from error
    return _state_dict(content, key, file)


def _state_dict(content: Any, key: str | None, file: Path) -> dict[str, Tensor]:
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            found = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
            raise ValueError(f"{file} has no entry {key!r}; found {found}")
        content = content[key]
    elif isinstance(content, Mapping):
        content = next((content[name] for name in _NESTED if isinstance(content.get(name), Mapping)), content)
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        entries = f" with the entries {sorted(map(str, content))[:10]}" if isinstance(content, Mapping) else ""
        raise ValueError(
            f"{file} holds no state dict: found {type(content).__name__}{entries}; name the entry by key=, or the "
            "files to read by pattern="
        )
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _sites(
    state: Mapping[str, Tensor], buffers: str, rename: Callable[[str], str | None] | None, file: Path
) -> tuple[Weights, list[str]]:
    """The sites of one network, and the names that were left out."""
    sites: Weights = {}
    left_out = []
    for name, value in state.items():
        site = name if rename is None else rename(name)
        if site is None or not value.is_floating_point() or (buffers == "drop" and is_running_statistic(name)):
            left_out.append(name)
        elif site in sites:
            raise ValueError(f"{file}: rename gives {site!r} to two tensors, the second is {name!r}")
        else:
            sites[site] = value
    if not sites:
        raise ValueError(f"{file} holds no floating-point tensor to keep; found {sorted(state)}")
    return sites, left_out


def _check_sites(sites: Weights, samples: Weights, file: Path, first: Path) -> None:
    for what, names in (
        ("lacks, unlike", samples.keys() - sites.keys()),
        ("has, beyond those of", sites.keys() - samples.keys()),
    ):
        if names:
            hint = " (rename= can take a prefix such as 'module.' away)" if _are_prefixed(sites, samples) else ""
            raise ValueError(
                f"{file} {what} {first}, the sites {sorted(names)}; all checkpoints must be of one network{hint}"
            )
    for site, value in sites.items():
        if value.shape != samples[site].shape[1:]:
            raise ValueError(
                f"{file}: {site!r} has shape {tuple(value.shape)}, but {tuple(samples[site].shape[1:])} in "
                f"{first}; all checkpoints must be of one network"
            )


def _are_prefixed(sites: Weights, samples: Weights) -> bool:
    """True if the names are the same but for a prefix on one side."""
    short, long = sorted((sorted(sites), sorted(samples)), key=lambda names: len("".join(names)))
    return len(short) == len(long) and all(b.endswith(f".{a}") for a, b in zip(short, long, strict=True))


def _kept(folder: Path | None) -> dict[str, Any]:
    """The notes that :func:`write_checkpoints` wrote beside the files."""
    path = None if folder is None else folder / _METADATA
    if path is None or not path.is_file():
        return {}
    return load_json(path, _KIND)


def _require_unchanged(file: Path, checksum: str | None) -> None:
    """:param checksum: what :func:`write_checkpoints` noted of the file; ``None`` if it knows nothing of it."""
    if checksum is not None and _checksum(file) != checksum:
        raise StoreError(
            f"{file} differs from its checksum in {_METADATA}: it is damaged, or another file was put there. Restore "
            f"it from a copy; if it is as it should be, remove {_METADATA}, which holds statistics of the other one"
        )


def _checksum(file: Path) -> str:
    return f"{zlib.crc32(file.read_bytes()):08x}"


def _statistics(kept: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """The statistics of the files that were read, if those of all of them are known."""
    place = {name: i for i, name in enumerate(kept.get("files", []))}
    if not all(name in place for name in names):
        return {}
    return {key: [values[place[name]] for name in names] for key, values in kept.get("statistics", {}).items()}
