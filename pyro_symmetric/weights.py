"""The library's one currency: ``weights``, a dict from site to tensor.

Every entry has shape ``batch_shape + site_shape`` with the same ``batch_shape``, as ``MCMC.get_samples``,
``Predictive`` and ``torch.func.functional_call`` already speak it. These helpers read, check and reshape such dicts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.calls import described

Weights = dict[str, Tensor]
Shapes = Mapping[str, torch.Size]


def shapes_of(weights: Mapping[str, Any], name: str = "example_weights") -> dict[str, torch.Size]:
    """The shape of each entry; entries may be tensors or shapes already."""
    for site, value in weights.items():
        if not isinstance(value, Tensor | Sequence):
            found = described(value)
            raise TypeError(f"{name}[{site!r}] is {found}; it must be a tensor, or a shape such as torch.Size([3, 2])")
    return {
        site: value.shape if isinstance(value, Tensor) else arguments.shape(f"{name}[{site!r}]", value)
        for site, value in weights.items()
    }


def batch_shape(weights: Mapping[str, Tensor], site_shapes: Shapes, name: str = "weights") -> torch.Size:
    """The leading dimensions that all of ``weights`` share in front of ``site_shapes``.

    Sites that ``site_shapes`` doesn't name are not looked at.

    :param name: what messages call the weights.
    :raises ValueError: naming the site whose shape doesn't fit, what was found and what would be right.
    :raises TypeError: if they are no mapping, or an entry is no tensor.
    """
    if not isinstance(weights, Mapping):
        arguments.weights(name, weights)
    found: torch.Size | None = None
    first = ""
    for site, shape in site_shapes.items():
        if site not in weights:
            continue
        value = weights[site]
        if not isinstance(value, Tensor):
            arguments.tensor(f"{name}[{site!r}]", value)
        split = value.dim() - len(shape)
        if split < 0 or value.shape[split:] != shape:
            raise ValueError(
                f"{name}[{site!r}] has shape {tuple(value.shape)}, which doesn't end in the site's shape {tuple(shape)}"
            )
        if found is None:
            found, first = value.shape[:split], site
        elif value.shape[:split] != found:
            raise ValueError(
                f"{name}[{site!r}] has batch shape {tuple(value.shape[:split])}, but {name}[{first!r}] has "
                f"{tuple(found)}; every site needs the same batch shape"
            )
    if found is None:
        raise ValueError(f"{name} holds none of the expected sites {sorted(site_shapes)}; found {sorted(weights)}")
    return found


def is_running_statistic(site: str) -> bool:
    """True if a site is one of a normalisation layer, which follows from the weights and the data."""
    return site.rpartition(".")[2] in ("running_mean", "running_var")


def is_bias(site: str) -> bool:
    """True if the last part of a site's name says so in a word of its own: ``bias``, ``in_proj_bias``, ``bias_ih_l0``.

    A weight called ``unbiased`` is none.
    """
    return "bias" in site.rpartition(".")[2].split("_")


def require_sites(weights: Mapping[str, Tensor], sites: Iterable[str], name: str = "weights") -> None:
    """:raises ValueError: if ``weights`` lacks one of ``sites``."""
    if not isinstance(weights, Mapping):
        arguments.weights(name, weights)
    missing = [site for site in sites if site not in weights]
    if missing:
        raise ValueError(f"{name} lacks the sites {missing}; it has {sorted(weights)}")


def require_same_network(sites: Iterable[str], site_shapes: Shapes, name: str = "weights") -> None:
    """Further sites of a model (a noise scale, a second network) are none of a symmetry's business; parameters are.

    Parameters are known by their names: they lie in the module in which all sites of the symmetry lie, and are called
    what those are called: ``weight``, ``bias``.

    :raises ValueError: if there are parameters that the symmetry doesn't know, so that it is another network's.
    """
    known = [site.split(".") for site in site_shapes if not is_running_statistic(site)]
    levels = zip(*(parts[:-1] for parts in known), strict=False)
    root = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)]
    kinds = {parts[-1] for parts in known}
    found = [site for site in sites if site not in site_shapes]
    unknown = [s for s in found if "." in s and s.split(".")[: len(root)] == root and s.rpartition(".")[2] in kinds]
    if unknown:
        raise ValueError(
            f"{name} holds the parameters {unknown}, which the symmetry doesn't know: it is that of another network, "
            "or these are second names of tied parameters. A symmetry acts on the weights of the network that it was "
            "found in, under the names of net.named_parameters()"
        )


def all_true(flags: Iterable[Tensor]) -> bool:
    """True if all are: boolean tensors of no dimension, read by one sync for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        by_device.setdefault(flag.device, []).append(flag)
    return all(bool(torch.stack(own).all()) for own in by_device.values())


def require_finite(weights: Mapping[str, Tensor], name: str = "weights") -> None:
    """:raises ValueError: naming the first site that holds NaN or infinite values."""
    arguments.weights(name, weights)
    # NaN and infinity reach the sum; a sum that overflows by itself is looked at entry by entry.
    if all_true(torch.isfinite(value.sum()) for value in weights.values()):
        return
    for site, value in weights.items():
        if bad := int((~torch.isfinite(value)).sum()):
            raise ValueError(f"{name}[{site!r}] holds {bad} NaN or infinite values; all weights must be finite")


def flatten(weights: Mapping[str, Tensor], sites: Iterable[str], site_shapes: Shapes) -> Tensor:
    """Concatenate ``sites`` in the given order into vectors of shape ``batch_shape + (D,)``."""
    sites = list(sites)
    require_sites(weights, sites)
    shape = batch_shape(weights, {site: site_shapes[site] for site in sites})
    return torch.cat([weights[site].reshape(*shape, -1) for site in sites], dim=-1)


def unflatten(vector: Tensor, sites: Iterable[str], site_shapes: Shapes) -> Weights:
    """The inverse of :func:`flatten`."""
    sites = list(sites)
    pieces = vector.split([math.prod(site_shapes[site]) for site in sites], dim=-1)
    return {
        site: piece.reshape((*vector.shape[:-1], *site_shapes[site])) for site, piece in zip(sites, pieces, strict=True)
    }
