"""The library's one currency: ``weights``, a dict from site to tensor.

Every entry has shape ``batch_shape + site_shape`` with the same ``batch_shape``, as ``MCMC.get_samples``,
``Predictive`` and ``torch.func.functional_call`` already speak it. These helpers read, check and reshape such dicts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments

Weights = dict[str, Tensor]
Shapes = Mapping[str, torch.Size]


def shapes_of(weights: Mapping[str, Any], name: str = "example_weights") -> dict[str, torch.Size]:
    """The shape of each entry; entries may be tensors or shapes already."""
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
    arguments.weights(name, weights)
    found: dict[str, torch.Size] = {}
    for site in weights.keys() & site_shapes.keys():
        shape, whole = site_shapes[site], weights[site].shape
        split = len(whole) - len(shape)
        if split < 0 or whole[split:] != shape:
            raise ValueError(
                f"{name}[{site!r}] has shape {tuple(whole)}, which doesn't end in {tuple(shape)}, the site's"
            )
        found[site] = whole[:split]
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{name} must have one batch shape, but they have { ({s: tuple(b) for s, b in found.items()}) }"
        )
    if not found:
        raise ValueError(f"{name} holds none of the expected sites {sorted(site_shapes)}; found {sorted(weights)}")
    return next(iter(found.values()))


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
    arguments.instance(name, weights, Mapping, "weights (site -> tensor)")
    if missing := [site for site in sites if site not in weights]:
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
            "or these are second names of tied parameters"
        )


def require_finite(weights: Mapping[str, Tensor], name: str = "weights") -> None:
    """:raises ValueError: naming the first site that holds NaN or infinite values."""
    for site, value in arguments.weights(name, weights).items():
        # NaN and infinity reach the sum; a sum that overflows by itself is looked at entry by entry.
        if not bool(value.sum().isfinite()) and (bad := int((~value.isfinite()).sum())):
            raise ValueError(f"{name}[{site!r}] holds {bad} NaN or infinite values; all weights must be finite")


def unflatten(vector: Tensor, shapes: Shapes) -> Weights:
    """Vectors ``batch_shape + (D,)`` that concatenate sites of these shapes, in this order, by site."""
    pieces = vector.split([math.prod(shape) for shape in shapes.values()], dim=-1)
    named = zip(shapes.items(), pieces, strict=True)
    return {site: piece.reshape((*vector.shape[:-1], *shape)) for (site, shape), piece in named}
