"""Bad calls of groups, their units and their elements."""

import numpy as np
import torch

import pyro_symmetric as ps

from .table import (
    ARRAY,
    DEVICES,
    DTYPES,
    FACTORS,
    FLAGS,
    INF,
    NAN,
    THINGS,
    Calls,
    Made,
    bad_weights,
    changed,
    exchanges,
    group,
    signed,
    symmetry,
    weights,
)

AXES = {"loadings": (None, "factor"), "scores": ("factor", None)}
SHAPES = (3, "34", 1.5, (1.5,), (-1,), (True,), None)
BAD_AXES = (
    *THINGS,
    {"loadings": "ab", "scores": ("factor", None)},
    {"loadings": ("factor",), "scores": ("factor", None)},
    {"other": ("factor", None)},
    {"loadings": 3},
    {"loadings": (None, 3)},
    {"loadings": ("factor", None), "scores": ("factor", None)},
)
BAD_EXAMPLES = (*THINGS, {}, {"loadings": np.zeros((4, 2)), "scores": torch.zeros(2, 5)}, {"loadings": 3})
BAD_MOVES = (3, "exchange", ["permute", "turn"], [], "scale", {"other": "permute"}, {"factor": "scale"}, {})
NO_DATA = (*THINGS, {}, [1], {"units": []}, {"site_shapes": {}})
TRANSPOSED = Made("transposed", lambda: changed("0.weight", lambda value: value.mT))


def units(**changes):
    """The hidden units of the network, or units that differ from them."""
    return ps.groups.Units(**{"name": "0", "size": 3, "axes": group()["0"].axes, **changes})


CALLS = (
    Calls(
        "Axis",
        lambda **o: ps.Group([units(axes=[ps.groups.Axis(**o)])], group().site_shapes),
        lambda: {"site": "0.weight", "dim": 0, "index": torch.arange(3)[None]},
        {
            "site": (*THINGS, "0.wait"),
            "dim": (-1, 2, 7),
            "index": (torch.arange(3), torch.arange(4)[None], torch.tensor([[0, 1, 3]]), torch.tensor([[0, 1, 1]])),
            "exponent": (0.5, "1", None),
            "buffer": FLAGS,
            "epsilon": (-0.1, NAN, INF, "0.1"),
            "span": (0, -1, 5),
        },
        words={"site": "site", "dim": "", "index": "index", "span": ""},
    ),
    Calls(
        "Units",
        lambda **o: units(**o),
        dict,
        {
            "name": (None, 3),
            "size": (0, -1, 1.5, "3", True, 2),
            "axes": (*THINGS, ["0.weight"]),
            "parent": (3, ["heads"]),
            "copies": (0, -1, 1.5, "3", 2),
            "moves": (3, "exchange", ["permute", "turn"]),
        },
        words={"size": "", "copies": ""},
    ),
    Calls(
        "Axis.to_dict",
        lambda **o: group()["0"].axes[0].to_dict(**o),
        lambda: {"site_shapes": group().site_shapes},
        {},
    ),
    Calls(
        "Axis.from_dict",
        lambda data: ps.groups.Axis.from_dict(data, group().site_shapes),
        lambda: {"data": group()["0"].axes[0].to_dict(group().site_shapes)},
        {"data": (*THINGS, {}, [1], {"site": "0.weight"})},
        words={"data": "axis"},
    ),
    Calls(
        "Units.to_dict",
        lambda **o: group()["0"].to_dict(**o),
        lambda: {"site_shapes": group().site_shapes},
        {},
    ),
    Calls(
        "Units.from_dict",
        lambda data: ps.groups.Units.from_dict(data, group().site_shapes),
        lambda: {"data": group()["0"].to_dict(group().site_shapes)},
        {"data": (*THINGS, {}, [1], {"name": "0"})},
    ),
    Calls(
        "Group",
        ps.Group,
        lambda: {"units": [units()], "site_shapes": group().site_shapes},
        {
            "units": (*THINGS, ["0"], Made("twice", lambda: [units(), units()]), Made("orphan", lambda: [orphan()])),
            "site_shapes": (*THINGS, {}, {"0.weight": "32"}, {"0.weight": 3}),
            "of_network": FLAGS,
        },
        words={"units": "", "site_shapes": "site"},
    ),
    Calls(
        "Group.declare",
        ps.Group.declare,
        lambda: {"axes": AXES, "example_weights": FACTORS},
        {"axes": BAD_AXES, "example_weights": BAD_EXAMPLES, "moves": BAD_MOVES, "even": (*THINGS[1:], ["other"])},
        words={"axes": "ax"},
    ),
    Calls(
        "Group.sample",
        lambda **o: group().sample(**o),
        dict,
        {"shape": SHAPES, "spread": (-1.0, NAN, INF, "1", None), "device": DEVICES, "dtype": DTYPES},
    ),
    Calls(
        "Group.identity",
        lambda **o: group().identity(**o),
        dict,
        {"shape": SHAPES, "device": DEVICES, "dtype": DTYPES},
    ),
    Calls(
        "Group.element",
        lambda **o: symmetry().group.element(**o),
        lambda: {"permutations": {"0": [2, 0, 1]}},
        {
            "permutations": (
                3,
                "banana",
                {"1": [0, 1]},
                {"0": [0, 1]},
                {"0": [0, 0, 1]},
                {"0": [0.5, 1.0, 2.0]},
                {"0": "021"},
                {"0": None},
                {"0": [True, False, True]},
            ),
            "signs": (3, "banana", {"0": [1.0, 1.0, 1.0]}, {"1": [1.0]}),
            "log_scales": (3, "banana", {"1": [0.0]}, {"0": [0.0, 0.0]}, {"0": [NAN, 0.0, 0.0]}, {"0": "000"}),
            "shifts": (3, "banana", {"0": [0.0, 0.0, 0.0]}, {"1": [0.0]}),
        },
        words={"permutations": "", "signs": "", "log_scales": "", "shifts": ""},
    ),
    Calls(
        "Group.element",
        lambda **o: signed().element(**o),
        lambda: {"permutations": {"factor": [1, 0]}, "signs": {"factor": [1.0, -1.0]}},
        {
            "permutations": ({"other": [0, 1]}, {"factor": [0, 0]}, {"factor": "01"}),
            "signs": ({"other": [1, 1]}, {"factor": [0.0, 1.0]}, {"factor": "+-"}, {"factor": [NAN, 1.0]}),
        },
        words={"permutations": "", "signs": ""},
    ),
    Calls(
        "Group.generators",
        lambda **o: group().generators(**o),
        lambda: {"name": "0"},
        {"name": (*THINGS, "1")},
        words={"name": "units"},
    ),
    Calls(
        "Group.children",
        lambda **o: group().children(**o),
        lambda: {"name": "0"},
        {"name": (*THINGS, "1")},
        words={"name": "units"},
    ),
    Calls(
        "Group.ancestors",
        lambda **o: group().ancestors(**o),
        lambda: {"name": "0"},
        {"name": (*THINGS, "1")},
        words={"name": "units"},
    ),
    Calls(
        "Group.independent",
        lambda **o: signed().independent(**o),
        lambda: {"move": "flip"},
        {"move": (*THINGS, "permute", "turn")},
    ),
    Calls(
        "Group.restricted",
        lambda *, moves: group().restricted(moves),
        lambda: {"moves": "permute"},
        {"moves": (*THINGS, "turn")},
        misspelt=False,
    ),
    Calls(
        "Group.without",
        lambda **o: symmetry().group.without(**o),
        lambda: {"names": ["0"]},
        {"names": (*THINGS, "0", ["1"], [3]), "moves": (3, "turn", [])},
        words={"names": ""},
    ),
    Calls(
        "Group.leaving",
        lambda **o: group().leaving(**o),
        lambda: {"sites": ["0.bias"]},
        {"sites": (*THINGS, [3])},
    ),
    Calls(
        "Group.renamed",
        lambda **o: group().renamed(**o),
        lambda: {"rename": str.upper},
        {"rename": (*THINGS, lambda site: "same", lambda site: None, {"0.weight": "w"})},
    ),
    Calls(
        "Group.batch_shape",
        lambda **o: exchanges().batch_shape(**o),
        lambda: {"weights": FACTORS},
        {"weights": (*THINGS, ARRAY, {}, {**FACTORS, "loadings": torch.zeros(2, 4)}, {"loadings": torch.zeros(4, 2)})},
    ),
    Calls("Group.from_dict", ps.Group.from_dict, lambda: {"data": group().to_dict()}, {"data": NO_DATA}),
    Calls("group_of", ps.groups.group_of, lambda: {"symmetry": symmetry()}, {"symmetry": (*THINGS, ARRAY, {})}),
    Calls(
        "Element",
        lambda weights: group().identity()(weights),
        lambda: {"weights": weights(4)},
        {"weights": (*bad_weights(4), TRANSPOSED)},
    ),
    Calls("Element.to", lambda **o: group().identity().to(**o), lambda: {"device": "cpu"}, {"device": DEVICES}),
    Calls(
        "Element.equal",
        lambda **o: group().identity().equal(**o),
        lambda: {"other": group().identity()},
        {"other": (*THINGS, ARRAY)},
    ),
    Calls(
        "Action",
        lambda **o: ps.groups.Action(**{"group": group(), **o}),
        lambda: {"sites": list(group().site_shapes)},
        {
            "group": (*THINGS, ARRAY),
            "sites": (
                *THINGS,
                ["0.wait"],
                [3],
                [],
                ["0.weight"] * 2,
                Made("no-supports", lambda: dict.fromkeys(group().site_shapes, 3)),
            ),
        },
    ),
)


def orphan():
    """Units inside units that aren't there."""
    return ps.groups.Units("rows", 1, parent="heads", copies=3)
