"""Bad calls of what finds, describes, checks and removes symmetries."""

import functools

import pyro.distributions as dist
import torch
from torch import nn

import pyro_symmetric as ps

from .groups import NO_DATA, SHAPES, TRANSPOSED
from .table import (
    ARRAY,
    COUNTS,
    DEVICES,
    DTYPES,
    FLAGS,
    INF,
    NAN,
    THINGS,
    Calls,
    Made,
    bad_weights,
    changed,
    data,
    group,
    model,
    network,
    not_finite,
    signed,
    symmetry,
    weights,
)

NO_SYMMETRY = (*THINGS, ARRAY, {}, network)
NO_NAMES = (3, [3], "nothing", ["0.weight", "nothing"], "")
NO_ELEMENT = (*THINGS, ARRAY, group)


def priors(scale=1.0):
    """Normal priors of the network's parameters."""
    return {
        site: dist.Normal(torch.zeros(shape), scale).to_event(len(shape)) for site, shape in group().site_shapes.items()
    }


def normalised(width=3):
    """A network with running statistics."""
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)).eval()


@functools.cache
def normalised_symmetry():
    """Of that network."""
    return ps.find_symmetry(normalised(), torch.randn(2, 2))


CALLS = (
    Calls(
        "find_symmetry",
        lambda net, x, **options: ps.find_symmetry(net, x, **options),
        lambda: {"net": network(), "x": data()[0]},
        {
            "net": (*THINGS, ARRAY, nn.Linear, {"0.weight": torch.zeros(3, 2)}),
            "x": (ARRAY, 3, torch.zeros(5, 3)),
            "kwargs": (3, "x", [1], {3: 4}, {"banana": 3}),
            "only": (*NO_NAMES, ()),
            "freeze": NO_NAMES,
            "buffers": FLAGS,
            "strict": FLAGS,
            "verify": FLAGS,
            "logits": FLAGS,
        },
        words={"x": "input", "kwargs": ""},
    ),
    Calls(
        "verify",
        lambda net, x, **o: ps.verify(o.pop("symmetry", symmetry()), net, x, **o),
        lambda: {"net": network(), "x": data()[0]},
        {
            "symmetry": (*THINGS, ARRAY),
            "net": (*THINGS, ARRAY, nn.Linear(3, 3)),
            "x": (ARRAY, 3, None, torch.zeros(3, 3), torch.zeros(0, 2)),
            "kwargs": (3, "x", [1], {3: 4}, {"banana": 3}),
            "tolerance": (-1.0, NAN, "1e-6"),
            "trials": COUNTS,
            "dtype": DTYPES,
        },
        words={"x": "input", "kwargs": ""},
    ),
    Calls(
        "completeness",
        lambda net, x, **o: ps.discovery.completeness(o.pop("symmetry", symmetry()), net, x, **o),
        lambda: {"net": network(), "x": data()[0]},
        {
            "symmetry": (*THINGS, ARRAY),
            "net": (*THINGS, ARRAY, nn.Linear(3, 3)),
            "x": (ARRAY, 3, None, torch.zeros(3, 3), torch.zeros(0, 2)),
            "kwargs": (3, "banana", ARRAY, {"there_is_none": 1}),
            "sites": (3, ["there is none"], [], [3]),
            "largest": (*COUNTS, 5),
            "seed": (-1, 0.5, "0"),
        },
        words={"x": "input", "kwargs": "argument", "sites": "sites", "largest": "largest"},
    ),
    Calls(
        "verify_model",
        lambda model, x, y, **o: ps.verify_model(o.pop("group", group()), model, x, y, **o),
        lambda: {"model": model(), "x": data()[0], "y": data()[1]},
        {"group": (*THINGS, ARRAY), "model": (*THINGS, ARRAY), "x": (None, ARRAY, 3)},
    ),
    Calls(
        "verify_model",
        lambda **o: ps.verify_model(signed(), **o),
        lambda: {"model": model()},
        {"model": THINGS},
        quick=False,
    ),
    Calls(
        "check_priors",
        ps.discovery.check_priors,
        lambda: {"symmetry": symmetry(), "priors": priors()},
        {"symmetry": NO_SYMMETRY, "priors": (*THINGS, ARRAY, {})},
        misspelt=False,
    ),
    Calls(
        "register_rule",
        lambda operator, **o: ps.discovery.register_rule(operator, **o),
        lambda: {"operator": "aten.there_is_no_such_operator"},
        {"operator": THINGS[:2], "sliced": FLAGS},
    ),
    Calls(
        "canonicalize",
        ps.canonicalize,
        lambda: {"weights": weights(4), "symmetry": symmetry()},
        {
            "weights": (*bad_weights(4), *not_finite(4), TRANSPOSED),
            "symmetry": NO_SYMMETRY,
            "permutations": ("maximum", 3, True),
            "scalings": ("unit", 3, True),
            "signs": FLAGS,
            "shifts": FLAGS,
            "warn": FLAGS,
        },
    ),
    Calls(
        "sorting_permutation",
        ps.canonical.sorting_permutation,
        lambda: {"weights": weights(4), "symmetry": symmetry()},
        {"weights": bad_weights(4), "symmetry": NO_SYMMETRY, "key": ("maximum", None, 3)},
    ),
    Calls(
        "minimal_mass",
        ps.minimal_mass,
        lambda: {"weights": weights(4), "symmetry": symmetry()},
        {
            "weights": (*bad_weights(4), *not_finite(4)),
            "symmetry": NO_SYMMETRY,
            "sites": (["0.wait"], "0.weight", 3, [3]),
        },
    ),
    Calls(
        "Symmetry",
        ps.Symmetry,
        lambda: {"group": symmetry().group},
        {"group": (*THINGS, Made("symmetry", symmetry)), "explanation": THINGS, "logits": FLAGS},
    ),
    Calls("Symmetry.from_dict", ps.Symmetry.from_dict, lambda: {"data": symmetry().to_dict()}, {"data": NO_DATA}),
    Calls(
        "Symmetry.sample",
        lambda **o: symmetry().sample(**o),
        dict,
        {"shape": SHAPES, "spread": (-1.0, NAN, INF, "1", None), "device": DEVICES},
    ),
    Calls(
        "Symmetry.act",
        lambda **o: symmetry().act(**o),
        lambda: {"element": symmetry().group.identity(), "target": weights()},
        {
            "element": NO_ELEMENT,
            "target": (
                *THINGS,
                ARRAY,
                {},
                [1],
                Made("array", lambda: changed("0.weight", lambda value: value.numpy())),
                TRANSPOSED,
                Made("other-net", lambda: nn.Linear(3, 3)),
            ),
        },
        words={"target": ""},
    ),
    Calls(
        "Symmetry.weights_of",
        lambda **o: symmetry().weights_of(**o),
        lambda: {"net": network()},
        {"net": (*THINGS, ARRAY, nn.Linear(3, 3))},
    ),
    Calls(
        "Symmetry.explain",
        lambda **o: symmetry().explain(**o),
        lambda: {"site": "0", "factor": "0", "only": "moved"},
        {
            "site": (3, "nothing", ["0"], ""),
            "factor": (3, "nothing", "2.weight", ["0"]),
            "only": (3, "pinne", ["pinned"], ""),
        },
    ),
    Calls(
        "Symmetry.renamed",
        lambda **o: symmetry().renamed(**o),
        lambda: {"rename": str.upper},
        {"rename": (*THINGS, lambda site: "same", {"0.weight": "w"})},
    ),
    Calls(
        "Symmetry.prefixed",
        lambda **o: symmetry().prefixed(**o),
        lambda: {"prefix": "net"},
        {"prefix": (None, 3, ["net"])},
    ),
    Calls(
        "Symmetry.without",
        lambda **o: symmetry().without(**o),
        lambda: {"names": ["0"], "moves": "scale"},
        {"names": (*THINGS, "0", ["1"], [3]), "moves": (3, "turn", [])},
        words={"names": ""},
    ),
    Calls(
        "Symmetry.holding",
        lambda **o: normalised_symmetry().holding(**o),
        lambda: {"net": normalised()},
        {
            "net": (
                *THINGS,
                ARRAY,
                {},
                Made("plain", network),
                Made("wider", lambda: normalised(4)),
                {"1.running_mean": 3},
            )
        },
    ),
)
