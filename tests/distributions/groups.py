"""Small groups of every kind, for tests of estimators."""

import math
from typing import Any

import pyro.distributions as dist
import torch

from pyro_symmetric.groups import Action, Axis, Group, Units

BOTH = ("permute", "flip")


def one_layer(
    n: int, inputs: int = 3, outputs: int = 1, moves: Any = "permute"
) -> Group:
    return Group.declare(
        {"weight": ("hidden", None), "bias": ("hidden",), "out": (None, "hidden")},
        {
            "weight": torch.Size([n, inputs]),
            "bias": torch.Size([n]),
            "out": torch.Size([outputs, n]),
        },
        moves=moves,
    )


def two_layers(n: int, m: int, inputs: int = 3, moves: Any = "permute") -> Group:
    return Group.declare(
        {"a": ("first", None), "b": ("second", "first"), "c": (None, "second")},
        {
            "a": torch.Size([n, inputs]),
            "b": torch.Size([m, n]),
            "c": torch.Size([2, m]),
        },
        moves=moves,
    )


def recurrent(n: int) -> Group:
    return Group.declare(
        {"input": ("h", None), "hidden": ("h", "h"), "out": (None, "h")},
        {
            "input": torch.Size([n, 2]),
            "hidden": torch.Size([n, n]),
            "out": torch.Size([1, n]),
        },
    )


def part_of_an_axis() -> Group:
    """Units in blocks of two positions, on a part of the second site's axis only (a
    flattened, concatenated layer).
    """
    axes = (
        Axis("w", 0, torch.arange(4)[None]),
        Axis("v", 1, torch.tensor([[1, 3, 5, 7], [2, 4, 6, 8]])),
    )
    return Group(
        [Units("h", 4, axes)], {"w": torch.Size([4, 2]), "v": torch.Size([2, 10])}
    )


def wide_and_deep() -> Group:
    """Two branches that end in one matrix: two sets of units on different parts of one
    of its axes.
    """
    shapes = {
        "a": torch.Size([3, 2]),
        "b": torch.Size([4, 2]),
        "c": torch.Size([3, 4]),
        "out": torch.Size([1, 6]),
    }
    axes = {
        "wide": (
            Axis("a", 0, torch.arange(3)[None]),
            Axis("out", 1, torch.arange(3)[None]),
        ),
        "deep": (
            Axis("b", 0, torch.arange(4)[None]),
            Axis("c", 1, torch.arange(4)[None]),
        ),
        "last": (
            Axis("c", 0, torch.arange(3)[None]),
            Axis("out", 1, torch.arange(3, 6)[None]),
        ),
    }
    return Group(
        [Units(name, axes[name][0].index.shape[1], axes[name]) for name in axes], shapes
    )


def heads(count: int = 2, size: int = 2) -> Group:
    """Rows inside heads, and heads as wholes, with a number of their own."""
    inner = torch.arange(count * size)[None]
    outer = inner.reshape(count, size).T
    return Group(
        [
            Units(
                "heads",
                count,
                (
                    Axis("w", 0, outer),
                    Axis("v", 1, outer),
                    Axis("gate", 0, torch.arange(count)[None]),
                ),
            ),
            Units(
                "rows",
                size,
                (Axis("w", 0, inner), Axis("v", 1, inner)),
                parent="heads",
                copies=count,
            ),
        ],
        {
            "w": torch.Size([count * size, 2]),
            "v": torch.Size([2, count * size]),
            "gate": torch.Size([count]),
        },
    )


def grouped() -> Group:
    """A convolution of 2 groups of 2 channels each: inputs and outputs inside groups,
    both on the same kernel.
    """
    outer, inner = torch.tensor([[0, 2], [1, 3]]), torch.arange(4)[None]
    # of the kernel (4, 2), flattened
    columns = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]])
    own: Any = {"parent": "groups", "copies": 2}
    return Group(
        [
            Units(
                "groups",
                2,
                (
                    Axis("first", 0, outer),
                    Axis("kernel", 0, outer),
                    Axis("last", 1, outer),
                ),
            ),
            Units(
                "inputs",
                2,
                (Axis("first", 0, inner, 1), Axis("kernel", 0, columns, 1, span=2)),
                **own,
            ),
            Units(
                "outputs",
                2,
                (Axis("kernel", 0, inner, 1), Axis("last", 1, inner, 1)),
                **own,
            ),
        ],
        {
            "first": torch.Size([4, 2]),
            "kernel": torch.Size([4, 2]),
            "last": torch.Size([1, 4]),
        },
    )


def normalised() -> Group:
    """Signs of units after a normalisation, and signs that ride along, of what comes
    before it.
    """
    three = torch.arange(3)[None]
    after = (
        Axis("w", 0, three),
        Axis("scale", 0, three, 1),
        Axis("bias", 0, three, 1),
        Axis("out", 1, three, -1),
    )
    before = (Axis("w", 0, three, 1), Axis("scale", 0, three, -1))
    flip = frozenset({"flip"})
    return Group(
        [
            Units("units", 3, after, moves=frozenset(BOTH)),
            Units("before", 1, before, parent="units", copies=3, moves=flip),
        ],
        {
            "w": torch.Size([3, 2]),
            "scale": torch.Size([3]),
            "bias": torch.Size([3]),
            "out": torch.Size([1, 3]),
        },
    )


def three_deep() -> Group:
    """Units inside units inside units."""
    leaves = torch.arange(8)[None]
    pairs, halves = leaves.reshape(4, 2).T, leaves.reshape(2, 4).T
    axes = {
        name: (Axis("w", 0, index),)
        for name, index in (("halves", halves), ("pairs", pairs), ("leaves", leaves))
    }
    return Group(
        [
            Units("halves", 2, axes["halves"]),
            Units("pairs", 2, axes["pairs"], parent="halves", copies=2),
            Units("leaves", 2, axes["leaves"], parent="pairs", copies=4),
        ],
        {"w": torch.Size([8, 2])},
    )


def copies_apart() -> Group:
    """Units of which each copy is permuted by itself, inside nothing that moves:
    outputs of a grouped convolution.
    """
    index = torch.arange(6)[None]
    return Group(
        [Units("outputs", 3, (Axis("w", 0, index), Axis("v", 1, index)), copies=2)],
        {"w": torch.Size([6, 2]), "v": torch.Size([1, 6])},
    )


def loadings() -> Group:
    """Signs flip one site of their units and not the other; the rows of the first are
    exchanged as well.
    """
    shapes = {"L": torch.Size([3, 4]), "tau": torch.Size([4])}
    moves = {"row": ("permute",), "factor": BOTH}
    return Group.declare(
        {"L": ("row", "factor"), "tau": ("factor",)}, shapes, moves=moves, even=["tau"]
    )


def recurrent_with_signs() -> Group:
    return Group.declare({"W": ("h", "h")}, {"W": torch.Size([4, 4])}, moves=BOTH)


def meeting_with_signs() -> Group:
    """Two sets with signs, which move the same array and nothing else."""
    return Group.declare({"w": ("r", "c", None)}, {"w": torch.Size([2, 2, 2])}, BOTH)


def signed(kind: str) -> Group:
    if kind == "one layer":
        shapes = {"a": torch.Size([3, 2]), "b": torch.Size([2, 3])}
        return Group.declare(
            {"a": ("first", None), "b": (None, "first")}, shapes, moves=BOTH
        )
    shapes = {"a": torch.Size([3, 2]), "b": torch.Size([2, 3]), "c": torch.Size([1, 2])}
    axes = {"a": ("first", None), "b": ("second", "first"), "c": (None, "second")}
    first = {"signs alone": "flip"}.get(kind, BOTH)
    second = {
        "signs alone": "flip",
        "signs of one layer, exchanges of both": "permute",
    }.get(kind, BOTH)
    return Group.declare(axes, shapes, moves={"first": first, "second": second})


PERMUTED = {
    "wide and deep": wide_and_deep(),
    "one layer": one_layer(5),
    "two layers": two_layers(4, 3),
    "recurrent": recurrent(4),
    "part of an axis": part_of_an_axis(),
    "two unrelated sets": Group.declare(
        {"a": ("x",), "b": ("y", None)},
        {"a": torch.Size([4]), "b": torch.Size([3, 2]), "c": torch.Size([2])},
    ),
}
NESTED = {
    "heads": heads(),
    "grouped": grouped(),
    "normalised": normalised(),
    "three deep": three_deep(),
    "copies apart": copies_apart(),
}
SIGNED = {
    "signed one layer": signed("one layer"),
    "signed two layers": signed("two layers"),
    "signs alone": signed("signs alone"),
    "loadings": loadings(),
    "recurrent with signs": recurrent_with_signs(),
}
GROUPS = {**PERMUTED, **NESTED, **SIGNED}


def action_of(group: Group) -> Action:
    return Action(group, list(group.site_shapes))


def base(
    dim: int, separation: float, *batch: int, generator: torch.Generator | None = None
) -> dist.TorchDistribution:
    loc = separation * torch.randn(
        *batch, dim, dtype=torch.float64, generator=generator
    )
    return dist.Normal(
        loc, 0.3 + torch.rand(*batch, dim, dtype=torch.float64, generator=generator)
    ).to_event(1)


def by_enumeration(q: Any, action: Action, w: torch.Tensor) -> torch.Tensor:
    """The symmetrised log-density as a sum over all permutations and signs, which are
    listed.
    """
    elements = action.group.finite.enumerate()
    terms = []
    for some in range(0, elements.batch_shape[0], 256):
        element = elements.select((slice(some, some + 256), *[None] * (w.dim() - 1)))
        terms.append(q.log_prob(action(w, element)) + action.log_abs_det(w, element))
    every = torch.cat(terms)
    return every.logsumexp(0) - math.log(len(every))
