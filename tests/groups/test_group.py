"""Groups: their orders, all their elements, their draws, parts of them, and what is no
group.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

import pyro_symmetric as ps
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.axes import rows

from .cases import (
    ALL,
    GROUPS,
    close,
    normalised,
    plain,
    units,
    weights_of,
)


def number_of_images(elements, weights) -> int:
    return len(
        torch.cat([value.flatten(1) for value in elements(weights).values()], 1).unique(
            dim=0
        )
    )


# orders and enumeration ---------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPS)
def test_enumeration_lists_every_element_once_and_the_identity_first(name):
    group = GROUPS[name]()
    finite = group.finite
    if finite.order() > 50_000:
        with pytest.raises(ValueError, match="enumerated"):
            Group(
                [units("u", 30, [("w", 0, 1)], {"permute"})], {"w": (30,)}
            ).enumerate()
        return
    every = group.enumerate()
    assert every.batch_shape == (finite.order(),) == (group.order(),)
    assert number_of_images(every, weights_of(group)) == group.order()
    assert every.select(0).equal(group.identity())
    assert group.log_order() == pytest.approx(math.log(group.order()))


def test_the_action_of_exchanged_and_flipped_factors_equals_loops_over_both():
    group = GROUPS["factors"]()
    w = weights_of(group)
    moved = group.enumerate()(w)
    assert moved["loadings"].shape == (48, 4, 3)
    found = {tuple(row.reshape(-1).tolist()) for row in moved["loadings"]}
    expected = set()
    for order in itertools.permutations(range(3)):
        for signs in itertools.product((1.0, -1.0), repeat=3):
            flipped = w["loadings"] * torch.tensor(signs, dtype=torch.float64)
            expected.add(tuple(flipped[:, list(order)].reshape(-1).tolist()))
    assert found == expected
    torch.testing.assert_close(
        moved["loadings"] @ moved["scores"],
        (w["loadings"] @ w["scores"]).expand(48, 4, 5),
    )
    assert torch.equal(moved["scale"], w["scale"].expand(48, 4))
    assert torch.equal(
        moved["variances"].sort(-1).values, w["variances"].sort().values.expand(48, 3)
    )


# draws --------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("moves", "size", "bound"),
    # Chi-squared with 23 and 7 degrees of freedom over 1,000 draws for each: exceeded
    # with probability 2e-5 and 3e-5.
    [(("permute",), 4, 62), (("flip",), 3, 33), (("permute", "flip"), 2, 33)],
)
def test_draws_are_uniform_over_the_group(moves, size, bound):
    group = Group.declare({"w": ("u",)}, {"w": (size,)}, moves=moves)
    images = group.sample((1000 * group.order(),))({"w": torch.arange(1.0, size + 1)})[
        "w"
    ]
    counts = images.unique(dim=0, return_counts=True)[1].double()
    assert len(counts) == group.order()
    assert float(((counts - 1000) ** 2 / 1000).sum()) < bound


# indices ------------------------------------------------------------------------------


INDICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda index: index.T.contiguous().T,
    "every second": lambda index: index.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda index: index[:, :1] + torch.zeros(1, dtype=torch.long).expand(6),
    "of 32 bits": lambda index: index.int(),
    "of 8 bits": lambda index: index.to(torch.uint8),
}


@pytest.mark.parametrize("kind", INDICES)
def test_an_axis_takes_any_index_tensor(kind):
    plain_index = torch.arange(6).view(2, 3)
    index = INDICES[kind](plain_index)
    axis = Axis("w", 0, index)
    assert axis.index.dtype == torch.long
    assert axis.index.is_contiguous()
    assert torch.equal(axis.index, index.long())


def test_tables_with_transposed_indices_are_aligned():
    """Rows and columns of a table along one axis: what one places, the other finds."""
    table = torch.arange(12).view(3, 4)

    def group(change: Callable[[torch.Tensor], torch.Tensor]) -> Group:
        rows_of, columns = change(table.T), change(table)
        sites = (("w", 0), ("v", 1))
        return Group(
            [
                Units(
                    "row", 3, tuple(Axis(site, dim, rows_of, 1) for site, dim in sites)
                ),
                Units(
                    "column", 4, tuple(Axis(site, dim, columns) for site, dim in sites)
                ),
            ],
            {"w": (12, 2), "v": (3, 12)},
        )

    transposed = group(lambda index: index.T.contiguous().T)
    reference = weights_of(transposed)
    moved = transposed.sample(dtype=torch.float64)(reference)
    found = ps.align(moved, reference, transposed)
    assert close(found.element(moved), reference)
    contiguous = ps.align(moved, reference, group(torch.Tensor.contiguous))
    assert found.element.within(contiguous.element.group).equal(contiguous.element)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_indices_that_are_no_integers_are_refused(dtype):
    with pytest.raises(ValueError, match="must hold integers"):
        Axis("w", 0, torch.zeros(1, 3, dtype=dtype))


# normalisation ------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_scaling_through_batch_normalisation_is_exact_including_its_epsilon(train):
    # Large epsilon, small variances: ignoring epsilon would be off by more than a
    # tenth.
    nn = torch.nn
    net = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, eps=0.1), nn.ReLU(), nn.Linear(4, 2)
    ).double()
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.05, 0.2)
    weights = {
        **{k: v.detach() for k, v in net.named_parameters()},
        **dict(net.named_buffers()),
    }
    group = normalised()
    # then the statistics are those of the batch, and only what follows them can be
    # scaled
    if train:
        group = group.without(["0"], "scale")
    x = torch.randn(6, 3, dtype=torch.float64)
    net = net.train(train)
    for _ in range(5):
        moved = group.sample(dtype=torch.float64)(weights)
        before, after = (
            functional_call(copy.deepcopy(net), w, x) for w in (weights, moved)
        )
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    assert moved["1.num_batches_tracked"].dtype == torch.long
    assert group.required_sites == tuple(s for s in group.sites if "running" not in s)
    assert set(group.buffers) == {"1.running_mean", "1.running_var"}


def test_which_sites_are_weights_and_which_are_biases():
    axes = [("w", 0, 1), ("b", 0, 1), ("norm.weight", 0, 1), ("v", 0, -1)]
    one = units("unit", 4, axes, {"scale"})
    one = replace(one, axes=(*one.axes, Axis("mean", 0, plain(4), 1, buffer=True)))
    shapes = {
        "w": (4, 2),
        "b": (4,),
        "norm.weight": (4,),
        "v": (4,),
        "mean": (4,),
        "scale": (),
        "last.bias": (2, 2),
    }
    group = Group([one], {**shapes, "free": (3, 3), "c": (3,)})
    assert group.weight_sites == ("w", "norm.weight", "v", "free")


# what is no group ---------------------------------------------------------------------

SHAPES = {"w": (6,), "v": (6, 6), "x": (8,)}
PLACE = torch.arange(6).view(2, 3)
HEAD = Units("head", 2, (Axis("w", 0, PLACE.T), Axis("v", 0, PLACE.T)))
WHOLE = plain(6)


def row(**changes) -> Units:
    return replace(Units("row", 3, (Axis("w", 0, WHOLE),), "head", 2), **changes)


TANGLED: dict[str, Callable[[], list[Units]]] = {
    # Two permutations of the same positions that don't commute.
    "neighbours and halves": lambda: [
        Units("a", 3, (Axis("w", 0, torch.tensor([[0, 2, 4], [1, 3, 5]])),)),
        Units("b", 2, (Axis("w", 0, torch.tensor([[0, 3], [1, 4], [2, 5]])),)),
    ],
    "rows of heads that are not inside them": lambda: [HEAD, row(parent=None)],
    "rows in too few copies": lambda: [
        HEAD,
        Units("row", 3, (Axis("w", 0, PLACE[:1]),), "head", 1),
    ],
    "rows in units that are not there": lambda: [row(parent="heads")],
    # Multipliers that permutations tear apart.
    "flips of what is exchanged apart": lambda: [
        units("a", 6, [("w", 0, 0)], {"permute"}),
        units("f", 6, [("w", 0, 1), ("v", 0, 1)], {"flip"}),
    ],
    "other exponents in other heads": lambda: [
        HEAD,
        row(
            axes=(Axis("w", 0, PLACE[:1], 1), Axis("w", 0, PLACE[1:], -1)),
            copies=1,
            parent=None,
            moves=ALL,
        ),
    ],
    # Rows that are exchanged with other columns in other cells.
    "a twisted table": lambda: [
        Units("a", 2, (Axis("x", 0, torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7]])),)),
        Units("b", 2, (Axis("x", 0, torch.tensor([[0, 2], [1, 3], [4, 7], [5, 6]])),)),
    ],
    # One epsilon for each site.
    "two epsilons on one site": lambda: [
        Units(
            "a",
            3,
            (Axis("w", 0, torch.arange(3)[None], 2, epsilon=0.1),),
            moves=frozenset({"scale"}),
        ),
        Units(
            "b",
            3,
            (Axis("w", 0, torch.arange(3, 6)[None], 2, epsilon=0.2),),
            moves=frozenset({"scale"}),
        ),
    ],
}


@pytest.mark.parametrize("what", TANGLED)
def test_moves_that_make_no_group_together_are_refused(what):
    with pytest.raises(ValueError, match=r"'[abfs]'|'row'|'head'|'w'"):
        Group(TANGLED[what](), SHAPES)


def test_moves_that_commute_on_the_same_positions_are_a_group():
    """Rows and columns of a flattened table; a shift along with units that are
    exchanged within it.
    """
    table = torch.arange(6).view(2, 3)
    grid = Group(
        [
            Units("row", 2, (Axis("w", 0, table.T),)),
            Units("column", 3, (Axis("w", 0, table),)),
        ],
        SHAPES,
    )
    weights = weights_of(grid)
    g, h = grid.sample((20,)), grid.sample((20,))
    assert close((g @ h)(weights), g(h(weights)), 0.0)
    moved = g(weights)["w"].view(20, 2, 3)
    for k in range(20):
        expected = weights["w"].view(2, 3)[g["row"][k]][:, g["column"][k]]
        assert torch.equal(moved[k], expected)
    assert grid.order() == 12 == number_of_images(grid.enumerate(), weights)
    shift = Units(
        "s", 1, (Axis("w", 0, torch.arange(6)[:, None]),), moves=frozenset({"shift"})
    )
    shifted = Group([units("a", 6, [("w", 0, 0)], {"permute"}), shift], SHAPES)
    g, h = (shifted.sample((20,), dtype=torch.float64) for _ in range(2))
    assert close((g @ h)(weights), g(h(weights)))


# places -------------------------------------------------------------------------------


def test_groups_of_inference_mode_can_be_trained_with_afterwards():
    with torch.inference_mode():
        axis = Axis("w", 0, torch.tensor([[2, 0, 1]]), 1)
        group = Group(
            [Units("k", 3, (axis,), moves=frozenset({"permute", "flip"}))],
            {"w": torch.Size([3, 2])},
        )
        part = group.restricted("permute")
    w = torch.randn(3, 2, requires_grad=True)
    own, acted = rows(w, part["k"].axes[0], 2), part.sample()({"w": w})["w"]
    (own.square().sum() + acted.sum()).backward()
    torch.testing.assert_close(w.grad, 2 * w.detach() + 1)


@pytest.mark.parametrize(
    "axis",
    [
        Axis("nowhere", 0, plain(3)),
        Axis("a", 1, plain(3)),
        Axis("a", 0, plain(3), span=2),
        Axis("a", 0, torch.tensor([[1, 2, 3]])),
        Axis("a", 0, torch.tensor([[0, 1, -1]])),
        Axis("a", 0, torch.tensor([[1, 1, 2]])),
    ],
    ids=["site", "dim", "span", "outside", "negative", "twice"],
)
def test_axes_that_do_not_fit_their_sites_are_refused(axis):
    with pytest.raises(ValueError, match="'unit'"):
        Group([Units("unit", 3, (axis,))], {"a": (3,)})


# declared groups ----------------------------------------------------------------------

AXES = {"loadings": (None, "factor"), "scores": ("factor", "group"), "scale": (None,)}
DECLARED = {"loadings": (4, 3), "scores": (3, 2), "scale": (4,), "other": (2, 2)}


@pytest.mark.parametrize(
    ("moves", "order"),
    [
        ("permute", 6 * 2),
        ("flip", 2**5),
        (("permute", "flip"), 6 * 2 * 2**5),
        ({"factor": "flip", "group": "permute"}, 2**3 * 2),
        ({"factor": ("permute", "flip"), "group": ("permute",)}, 6 * 2**3 * 2),
    ],
)
def test_moves_are_those_of_all_units_or_of_each(moves, order):
    group = Group.declare(AXES, DECLARED, moves=moves)
    assert group.order() == order
    weights = weights_of(group)
    images = group.enumerate()(weights)
    distinct = torch.cat([value.flatten(1) for value in images.values()], 1).unique(
        dim=0
    )
    assert len(distinct) == order
    g, h = group.sample((20,)), group.sample((20,))
    assert close((g @ h)(weights), g(h(weights)))


def test_a_group_from_another_process_is_found_among_equal_ones():
    given = 'import pickle, sys, torch; from pyro_symmetric.groups import Group; group = Group.declare({"w": ("k",)}, '
    code = (
        given
        + '{"w": torch.Size([3])}); hash(group); sys.stdout.buffer.write(pickle.dumps(group))'
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2",
    }
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        env=environment,
        timeout=300,
    )
    fresh = Group.declare({"w": ("k",)}, {"w": torch.Size([3])})
    assert pickle.loads(child.stdout) in {fresh: 1}
