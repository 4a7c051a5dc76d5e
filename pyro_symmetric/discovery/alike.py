"""Units that look alike although nothing exchanges them: a symmetry may be missing.

At weights that an exchange of units leaves as they are, gradients are the same for the
units that it exchanges. So all weights of each tensor are set to one number, and units
whose gradients differ then are different for certain::

    u = torch.tensor([0.3, 0.3, 0.3], requires_grad=True)  # three units
    loss = u[0].sin() + u[1].sin() + u[2]  # the last isn't like the others
    torch.autograd.grad(loss, u)  # 0.955, 0.955, 1.0

Units with equal gradients at several such points need not be exchangeable. They are a
reason to say that a group is *at least* as large as the one that was found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric._process import Replaced
from pyro_symmetric.discovery.cells import Cells, distinct_rows
from pyro_symmetric.discovery.flow import Flow, Leaf
from pyro_symmetric.discovery.linear_twin import Pass
from pyro_symmetric.discovery.registry import Array, hash64, salt_of
from pyro_symmetric.discovery.trace import Trace
from pyro_symmetric.discovery.trials import Network, Point

POINTS = 3  # at which gradients are compared
SAME = 1e-7  # relative to the largest gradient of a tensor: a difference by rounding
SILENT = 1e-11  # relative to the largest of all gradients: no gradient at all


@dataclass(frozen=True, eq=False)
class _Line:
    """Positions along one axis of a tensor.

    :param unit: for each position, its class of unified atoms.
    :param orbit: for each position, a number that exchangeable positions share.
    """

    site: str
    dim: int
    unit: Array
    orbit: Array


def alike(
    flow: Flow,
    cells: Cells,
    traces: Sequence[Trace],
    held: Collection[str],
    logits: bool,
    doubtful: bool,
) -> str | None:
    """Return an axis with positions that look alike and aren't exchanged, in words.

    :param held: sites that keep their values.
    :param logits: whether outputs go through a softmax.
    :param doubtful: whether a rule may have tied too many units, or have pinned some
        that might move. Then units without any gradient look alike, too.
    :raises NotDifferentiable: if the network has no gradients at such weights.
    """
    lines = list(_lines(flow, cells, held))
    net = traces[0].net
    shapes = {site: torch.Size(leaf.value.shape) for site, leaf in flow.leaves.items()}
    shapes |= {site: value.shape for site, value in net.named_parameters()}
    network = Network.of([Pass(trace, logits) for trace in traces], net, shapes)
    labels = [list[Array]() for _ in lines]
    heard = np.zeros(len(cells.colour), dtype=bool)
    for _ in range(POINTS):
        weights = dict(network.center)
        for site, leaf in flow.leaves.items():
            if site not in held:
                weights[site] = _symmetric(leaf, weights[site], flow, network.generator)
        point = Point(weights, network.random_inputs(), [])
        with Replaced(UNCENTRED):
            (loss,) = network.losses(point, 1)
        gradient = {site: value.cpu() for site, value in loss.gradient.items()}
        sizes = [float(value.abs().max()) for value in gradient.values()]
        largest = max(sizes, default=0.0)
        for number, line in enumerate(lines):
            if line.site not in gradient or gradient[line.site].is_complex():
                continue
            features = _features(gradient[line.site], line.dim)
            audible = features.abs().amax(1).numpy() > SILENT * largest
            heard[line.unit[audible]] = True
            labels[number].append(_rounded_apart(features))
    # a unit is another if it differs along one of its axes
    seen = np.zeros(len(cells.colour), dtype=np.uint64)
    for number, line in enumerate(lines if not doubtful else ()):
        for draw, numbers in enumerate(labels[number]):
            salted = hash64(numbers) ^ salt_of(number, draw)
            np.add.at(seen, line.unit, hash64(salted))
    for line, columns in zip(lines, labels, strict=True):
        chosen = np.ones_like(line.orbit, dtype=bool) if doubtful else heard[line.unit]
        if not chosen.any() or not columns:
            continue
        alike_there = [*columns, seen[line.unit]]
        alike_there = [column[chosen] for column in alike_there]
        by_gradient = len(distinct_rows(*alike_there)[0])
        by_orbit = len(distinct_rows(*alike_there, line.orbit[chosen])[0])
        if by_orbit > by_gradient:
            return f"{line.site}[{line.dim}]"
    return None


def _lines(flow: Flow, cells: Cells, held: Collection[str]) -> Iterator[_Line]:
    """Iterate over the axes that hold units; pixels of kernels hold none."""
    for leaf in flow.leaves.values():
        if leaf.site in held:
            continue
        for part in leaf.value.parts:
            pixels = leaf.kernel and part.axes[0] > 1
            if len(part.axes) != 1 or part.atoms.size < 2 or pixels:
                continue
            if np.isin(part.atoms, flow.by_data).any():
                continue
            unit = cells.unit[part.atoms]
            atom_colour = cells.atom_colour[part.atoms]
            _, orbit, _ = distinct_rows(cells.colour[unit], atom_colour)
            yield _Line(leaf.site, part.axes[0], unit, orbit)


def _symmetric(
    leaf: Leaf, values: Tensor, flow: Flow, generator: torch.Generator
) -> Tensor:
    """Draw a tensor that is equal along all axes that hold units."""
    shape = [1] * values.dim()
    for part in leaf.value.parts:
        pixels = leaf.kernel and part.axes[0] > 1
        if pixels or np.isin(part.atoms, flow.by_data).any():
            for axis in part.axes:
                shape[axis] = values.shape[axis]
    inputs = max(1, values.shape[1:].numel()) if values.dim() > 1 else 1
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    sign = drawn.sign()
    size = (0.5 + drawn.abs()) * inputs**-0.5
    if leaf.buffer:
        sign = torch.ones_like(sign)
    return (sign * size).to(values).expand(values.shape).contiguous()


def _softmax(x: Tensor, dim: int, *_: Any) -> Tensor:
    exponentials = (x - x.detach().amax()).exp()
    return exponentials / (1.0 + exponentials.sum(dim, keepdim=True))


def _layer_norm(x: Tensor, shape: Sequence[int], *weights: Any) -> Tensor:
    return _affine(x / _size(x, range(-len(shape), 0)), shape, *weights)


def _group_norm(x: Tensor, groups: int, *weights: Any) -> Tensor:
    split = x.reshape(len(x), groups, -1)
    y = (split / _size(split, [-1])).reshape(x.shape)
    return _affine(y, (-1, *(1 for _ in x.shape[2:])), *weights)


def _affine(
    y: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
) -> Tensor:
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


# Normalisations vanish at equal entries, where gradients would tell nothing: other
# symmetric functions take their place.
UNCENTRED: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.softmax.int: _softmax,
    torch.ops.aten._softmax.default: _softmax,
    torch.ops.aten.layer_norm.default: _layer_norm,
    torch.ops.aten.group_norm.default: _group_norm,
}


def _size(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return a smooth symmetric function of entries along some axes."""
    return (1.0 + x.square().mean([*dims], keepdim=True)).sqrt()


def _features(gradient: Tensor, dim: int) -> Tensor:
    """Return what positions along an axis have in common if they are exchangeable: the
    sorted gradients of their entries.
    """
    return gradient.unsqueeze(-1).movedim(dim, 0).flatten(1).sort(1).values


def _rounded_apart(features: Tensor) -> Array:
    """Number rows; those that differ by rounding have the same number."""
    scale = features.abs().max().clamp_min(1e-300)
    powers = torch.linspace(
        0.5, 1.5, features.shape[1], dtype=torch.float64, device="cpu"
    )
    mean = (features / scale) @ (powers / powers.norm())
    order = mean.argsort()
    jumps = mean[order].diff().abs() > SAME
    labels = torch.zeros(len(mean), dtype=torch.int64, device="cpu")
    labels[order[1:]] = jumps.cumsum(0)
    return labels.numpy()
