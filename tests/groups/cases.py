"""Groups of every kind, for tests of what all groups have in common; and their action,
entry by entry in loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pyro_symmetric.groups import Axis, Element, Group, Units
from pyro_symmetric.weights import Weights

ALL = frozenset({"permute", "flip", "scale"})


def plain(n: int) -> Tensor:
    """The index of ``n`` units that fill an axis in order."""
    return torch.arange(n)[None]


def units(
    name: str, n: int, axes: list[tuple[str, int, int]], moves: frozenset | set = ALL
) -> Units:
    """Units that fill axes ``(site, dim, exponent)`` in order."""
    own = tuple(Axis(site, dim, plain(n), exponent) for site, dim, exponent in axes)
    return Units(name, n, own, moves=frozenset(moves))


def layers() -> Group:
    """Two hidden layers that permute, flip and scale (no activation, so to say), and a
    softmax behind them.
    """
    first = units("first", 3, [("a", 0, 1), ("a bias", 0, 1), ("b", 1, -1)])
    second = units("second", 2, [("b", 0, 1), ("b bias", 0, 1), ("c", 1, -1)])
    shift = Units(
        "shift",
        1,
        (Axis("c bias", 0, torch.arange(4)[:, None]),),
        moves=frozenset({"shift"}),
    )
    shapes = {
        "a": (3, 2),
        "a bias": (3,),
        "b": (2, 3),
        "b bias": (2,),
        "c": (4, 2),
        "c bias": (4,),
        "free": (2,),
    }
    return Group([first, second, shift], shapes)


def wreath(
    outer: int = 2,
    middle: int = 2,
    inner: int = 3,
    moves: frozenset = frozenset({"permute"}),
) -> Group:
    """``outer`` groups of ``middle`` heads of ``inner`` rows: keys and values permute
    their rows separately.
    """
    size = outer * middle * inner
    place = torch.arange(size)

    def lying(index: Tensor, *axes: tuple[str, int, int]) -> tuple[Axis, ...]:
        return tuple(Axis(site, dim, index, exponent) for site, dim, exponent in axes)

    every = (("key", 0, 0), ("value", 0, 0), ("out", 1, 0))
    return Group(
        [
            Units(
                "value rows",
                inner,
                lying(place[None], ("value", 0, 1), ("out", 1, -1)),
                "heads",
                outer * middle,
                moves,
            ),
            Units("groups", outer, lying(place.view(outer, -1).T, *every)),
            Units(
                "key rows",
                inner,
                lying(place[None], ("key", 0, 1)),
                "heads",
                outer * middle,
                moves,
            ),
            Units(
                "heads", middle, lying(place.view(-1, inner).T, *every), "groups", outer
            ),
        ],
        {"key": (size, 2), "value": (size,), "out": (3, size), "free": (2,)},
    )


def attention() -> Group:
    """Heads with rows of queries and keys, and rows of values; a second scale rides
    along with the rows of values.
    """
    heads, d = 2, 3
    n = heads * d
    rows, blocks = plain(n), torch.arange(n).view(heads, d).T
    whole = tuple(
        Axis(site, dim, blocks)
        for site, dim in (("q", 0), ("k", 0), ("v", 0), ("gain", 0), ("o", 1))
    )
    return Group(
        [
            Units("heads", heads, whole),
            Units(
                "qk",
                d,
                (Axis("q", 0, rows, 1), Axis("k", 0, rows, -1)),
                "heads",
                heads,
                ALL,
            ),
            Units(
                "v",
                d,
                (Axis("v", 0, rows, 1), Axis("gain", 0, rows, -1), Axis("o", 1, rows)),
                "heads",
                heads,
                ALL,
            ),
            Units(
                "after",
                1,
                (Axis("gain", 0, rows, 1), Axis("o", 1, rows, -1)),
                "v",
                n,
                frozenset({"scale", "flip"}),
            ),
        ],
        {"q": (n, 2), "k": (n, 2), "v": (n, 2), "gain": (n,), "o": (2, n)},
    )


def attend(weights: Weights, x: Tensor) -> Tensor:
    """The group that leaves :func:`attention` unchanged, with linear scores: queries
    ``(tokens, 2)``.
    """
    q, k, v = (
        (x @ weights[site].mT).unflatten(-1, (2, 3)).transpose(-3, -2) for site in "qkv"
    )
    out = q @ k.mT @ v * weights["gain"].view(2, 1, 3)
    return out.transpose(-3, -2).flatten(-2) @ weights["o"].mT


def normalised() -> Group:
    """Linear, batch normalisation, ReLU, linear: one multiplier in front of the
    normalisation, one behind it.
    """
    n = 4
    inside = [
        ("0.weight", 0, 1),
        ("0.bias", 0, 1),
        ("3.weight", 1, 0),
        ("1.weight", 0, 0),
        ("1.bias", 0, 0),
    ]
    axes = [Axis(site, dim, plain(n), exponent) for site, dim, exponent in inside]
    axes.append(Axis("1.running_mean", 0, plain(n), 1, buffer=True))
    axes.append(Axis("1.running_var", 0, plain(n), 2, buffer=True, epsilon=0.1))
    after = [("1.weight", 0, 1), ("1.bias", 0, 1), ("3.weight", 1, -1)]
    rider = Units(
        "after",
        1,
        tuple(Axis(site, dim, plain(n), e) for site, dim, e in after),
        "0",
        n,
        frozenset({"scale"}),
    )
    shapes = {
        "0.weight": (n, 3),
        "0.bias": (n,),
        "1.weight": (n,),
        "1.bias": (n,),
        "3.weight": (2, n),
        "3.bias": (2,),
    }
    shapes |= {"1.running_mean": (n,), "1.running_var": (n,)}
    return Group(
        [Units("0", n, tuple(axes), moves=frozenset({"permute", "scale"})), rider],
        shapes,
    )


def grouped() -> Group:
    """A convolution, one in 2 groups with 3 inputs and 2 outputs each, and one behind
    it; linear in between.
    """
    g, i, o = 2, 3, 2
    # of the grouped kernel, its rows and columns flattened
    entry = torch.arange(g * o * i).view(g, o, i)
    columns = entry.transpose(0, 1).reshape(o, g * i)
    ins, outs = plain(g * i), plain(g * o)
    return Group(
        [
            Units(
                "groups",
                g,
                (
                    Axis("first", 0, torch.arange(g * i).view(g, i).T),
                    Axis("grouped", 0, torch.arange(g * o).view(g, o).T),
                    Axis("last", 1, torch.arange(g * o).view(g, o).T),
                ),
            ),
            Units(
                "in",
                i,
                (Axis("first", 0, ins, 1), Axis("grouped", 0, columns, -1, span=2)),
                "groups",
                g,
                ALL,
            ),
            Units(
                "out",
                o,
                (Axis("grouped", 0, outs, 1), Axis("last", 1, outs, -1)),
                "groups",
                g,
                ALL,
            ),
        ],
        {"first": (g * i, 2, 1), "grouped": (g * o, i, 2), "last": (2, g * o, 1)},
    )


def convolve(weights: Weights, x: Tensor) -> Tensor:
    """The group that leaves :func:`grouped` unchanged: ``x`` is ``(batch, 2,
    length)``.
    """
    conv = torch.nn.functional.conv1d
    return conv(
        conv(conv(x, weights["first"]), weights["grouped"], groups=2), weights["last"]
    )


def factors() -> Group:
    """The factors of a factor analysis: exchanged and flipped, but for their
    variances.
    """
    axes = {
        "loadings": (None, "factor"),
        "scores": ("factor", None),
        "variances": ("factor",),
        "scale": (None,),
    }
    shapes = {"loadings": (4, 3), "scores": (3, 5), "variances": (3,), "scale": (4,)}
    return Group.declare(axes, shapes, moves=("permute", "flip"), even=["variances"])


def apart() -> Group:
    """Copies without a parent, parts of an axis that move by themselves, and one
    multiplier of a whole site.
    """
    return Group(
        [
            Units(
                "pairs",
                2,
                (Axis("w", 0, torch.tensor([[0, 2, 5, 7], [1, 3, 6, 8]]), 1),),
                None,
                2,
                ALL,
            ),
            Units(
                "one",
                1,
                (Axis("w", 1, torch.arange(2)[:, None], -1), Axis("v", 0, plain(1), 3)),
                moves={"scale"},
            ),
        ],
        {"w": (9, 2), "v": (1,)},
    )


GROUPS: dict[str, Callable[[], Group]] = {
    "layers": layers,
    "wreath": wreath,
    "flipped wreath": lambda: wreath(2, 3, 2, frozenset({"permute", "flip"})),
    "attention": attention,
    "normalised": normalised,
    "grouped": grouped,
    "factors": factors,
    "apart": apart,
    "trivial": lambda: Group([], {"a": (2,)}),
}


def weights_of(
    group: Group, *batch: int, dtype: torch.dtype = torch.float64
) -> Weights:
    """Generic weights; running variances are positive."""
    drawn = {
        site: torch.randn((*batch, *shape), dtype=dtype)
        for site, shape in group.site_shapes.items()
    }
    return {
        site: value.exp() if site.endswith("_var") else value
        for site, value in drawn.items()
    }


def by_loops(element: Element, weights: Mapping[str, Tensor]) -> Weights:
    """One element (without a batch) at work on one set of weights: shifts, then
    multipliers, then permutations, those of the innermost units first; unit by unit and
    copy by copy."""
    group = element.group
    moved = {site: value.clone() for site, value in weights.items()}
    every = [(name, axis) for name, one in group.units.items() for axis in one.axes]

    def along(site: str, axis: Axis) -> Tensor:
        shape = group.site_shapes[site]
        flat = moved[site].reshape(
            *shape[: axis.dim], -1, *shape[axis.dim + axis.span :]
        )
        assert flat.data_ptr() == moved[site].data_ptr()
        return flat.movedim(axis.dim, 0)

    for name, axis in every:
        for u, constant in enumerate(
            element.shifts[name].flatten().tolist() if name in element.shifts else ()
        ):
            along(axis.site, axis)[axis.index[:, u]] += constant
    for name, axis in every:
        for u in range(group[name].count):
            factor = (
                math.exp(element.log_scales[name].flatten()[u])
                if name in element.log_scales
                else 1.0
            )
            factor *= (
                float(element.signs[name].flatten()[u])
                if name in element.signs
                else 1.0
            )
            view, epsilon = along(axis.site, axis), axis.epsilon or 0.0
            for position in axis.index[:, u].tolist():
                view[position] = (
                    factor**axis.exponent * (view[position] + epsilon) - epsilon
                )
    for name, axis in sorted(every, key=lambda pair: -len(group.ancestors(pair[0]))):
        one = group[name]
        if name not in element.permutations:
            continue
        images = element[name].reshape(one.copies, one.size)
        before = along(axis.site, axis).clone()
        for copy in range(one.copies):
            for i in range(one.size):
                source = copy * one.size + int(images[copy, i])
                along(axis.site, axis)[axis.index[:, copy * one.size + i]] = before[
                    axis.index[:, source]
                ]
    return moved


def close(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = 1e-12
) -> bool:
    return a.keys() == b.keys() and all(
        a[site].shape == b[site].shape
        and torch.allclose(a[site], b[site], rtol=tolerance, atol=tolerance)
        for site in a
    )
