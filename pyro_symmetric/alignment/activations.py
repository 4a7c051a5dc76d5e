r"""Correlations of hidden activations on given inputs: units by what they do.

.. math:: S_{ij} = \operatorname{corr}_x\big( h^{(0)}_i(x),\; h^{(1)}_j(x) \big)

over inputs (and pixels, tokens, time steps), for every set of units by itself (Li et al. 2016, arXiv 1511.07543;
Ainsworth et al. 2023, section 3.1). The units' activations are what enters the layers that read them: channel ``j`` of
a layer's input belongs to the unit that lies on column ``j`` of its weight. So a layer's input is a site of its own,
``(columns, samples)``, on which the group acts as on the weight's columns, nested units, heads and flattened pixels
included. Units that no layer reads whole (of the lower layers of an ``nn.LSTM``, say) are left to their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.discovery.symmetry import with_weights
from pyro_symmetric.groups import Group
from pyro_symmetric.weights import Weights

# Layers, and the name of the weight whose columns read their first input.
LAYERS = (
    (nn.Linear, "weight"),
    (nn.modules.conv._ConvNd, "weight"),
    (nn.RNNBase, "weight_ih_l0"),
    (nn.RNNCellBase, "weight_ih"),
    (nn.MultiheadAttention, "in_proj_weight"),
)


class Shown(NamedTuple):
    """Features of what units do.

    :ivar group: the units whose activations show, and the signs that these tell, along the layers' inputs.
    :ivar left: the permutations and signs of the weights' group that don't show.
    :ivar reference: weight that reads them -> features ``(1, 1, columns, samples)``; ``source``: ``(1, B, ...)``.
    """

    group: Group
    left: Group
    reference: Weights
    source: Weights


def shown_by(activations: Sequence[Any], sources: Weights, reference: Weights, group: Group) -> Shown:
    """Standardised activations of all units that show.

    :param activations: the network, in whose place weights are put, in eval mode, and what its ``forward`` takes.
    :param sources: weights with one leading batch dimension.
    :raises ValueError: if no units show.
    """
    net, *inputs = activations
    arguments.instance("activations[0]", net, nn.Module, "a torch.nn.Module")
    first = _entering(net, inputs, reference, group)
    count = len(next(iter(sources.values())))
    every = [_entering(net, inputs, {s: value[k] for s, value in sources.items()}, group) for k in range(count)]
    shown = _on_inputs(group.finite, {site: value.shape for site, value in first.items()})
    if not shown.units:
        raise ValueError(f"no layer of the network reads any of the units {list(group.names('permute'))} whole")
    left = group.finite.without(shown.names("permute"), "permute")
    left = left.without([name for name in shown.names("flip") if name in left.names("flip")], "flip")
    blocks = {site: min(len(axis.index) for _, axis in shown.members(site)[0]) for site in shown.sites}
    known = {site: first[site][None, None] / number for site, number in blocks.items()}
    return Shown(shown, left, known, {site: torch.stack([own[site] for own in every])[None] for site in blocks})


def _entering(net: nn.Module, inputs: Sequence[Any], weights: Mapping[str, Tensor], group: Group) -> Weights:
    """Weight of a layer -> its input, ``(columns, samples)``: of mean zero and norm one, or zero if constant."""
    own = dict(net.named_parameters()) | dict(net.named_buffers())
    net = with_weights(net, {name: value for name, value in weights.items() if name in own}).eval()
    found: dict[str, list[Tensor]] = {}
    for name, module in net.named_modules():
        site = next((f"{name}.{weight}".lstrip(".") for kind, weight in LAYERS if isinstance(module, kind)), "")
        if site in group.site_shapes and not getattr(module, "transposed", False):
            axis = 1 if isinstance(module, nn.modules.conv._ConvNd) else -1
            calls = found.setdefault(site, [])

            def keep(module: nn.Module, given: Any, calls: list[Tensor] = calls, axis: int = axis) -> None:
                calls += [value.detach().movedim(axis, 0).flatten(1).double() for value in given[:1]]

            module.register_forward_pre_hook(keep)
    net(*inputs)
    result = {}
    for site, calls in found.items():
        if calls and len(calls[0]) == group.site_shapes[site][1]:
            value = torch.cat(calls, 1)
            value = value - value.mean(1, keepdim=True)
            norm = value.norm(dim=1, keepdim=True)
            result[site] = torch.where(norm > 0, value / norm.clamp_min(1e-300), 0.0).cpu()
    return result


def _on_inputs(group: Group, shapes: Mapping[str, torch.Size]) -> Group:
    """The units that lie along columns of these weights, along what enters them; signs if these columns take part."""
    units, held = [], set()
    for one in reversed(group.units.values()):
        axes = tuple(replace(a, dim=0) for a in one.axes if a.site in shapes and (a.dim, a.span) == (1, 1))
        moves = one.moves & ({"permute", "flip"} if any(axis.exponent % 2 for axis in axes) else {"permute"})
        if (axes and moves) or one.name in held:
            held.add(one.parent)
            units.append(replace(one, axes=axes, moves=moves if axes else frozenset()))
    found = {axis.site for one in units for axis in one.axes}
    return Group(reversed(units), {site: shape for site, shape in shapes.items() if site in found})
