"""Bad calls of what finds, describes and removes symmetries."""

import functools

import numpy as np
import torch
from torch import nn

import pyro_symmetric as ps

from .table import (
    ARRAY,
    COUNTS,
    DEVICES,
    FACTORS,
    FLAGS,
    INF,
    NAN,
    THINGS,
    Calls,
    Made,
    bad_weights,
    changed,
    data,
    exchanges,
    group,
    model,
    network,
    not_finite,
    signs,
    symmetry,
    weights,
)

AXES = {"loadings": (None, "factor"), "scores": ("factor", None)}
NO_SYMMETRY = (*THINGS, ARRAY, {}, network)
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
NO_ELEMENT = (*THINGS, ARRAY, group)
TRANSPOSED = Made("transposed", lambda: changed("0.weight", lambda value: value.mT))
NO_DATA = (*THINGS, {}, [1], {"factors": []}, {"signs": {}})


def verified(call):
    """A group's check of a model that it is called with."""
    return lambda model, x, y, **options: call(model, x, y, **options)


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
            "strict": FLAGS,
            "verify": FLAGS,
            "logits": FLAGS,
        },
        words={"x": "input"},
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
        },
    ),
    Calls(
        "minimal_mass",
        ps.minimal_mass,
        lambda: {"weights": weights(4), "symmetry": symmetry()},
        {
            "weights": (*bad_weights(4), *not_finite(4)),
            "symmetry": (*NO_SYMMETRY, Made("no-scalings", group)),
            "scale_free": ("keep", None, 3),
            "sites": (["0.wait"], "0.weight", 3, [3]),
        },
    ),
    Calls(
        "PermutationGroup",
        ps.PermutationGroup,
        lambda: {"factors": [group().factor("0")], "site_shapes": group().site_shapes},
        {
            "factors": (*THINGS, ["0"], Made("twice", lambda: [group().factor("0")] * 2)),
            "site_shapes": (*THINGS, {}, {"0.weight": "32"}, {"0.weight": 3}),
        },
        words={"site_shapes": "site"},
    ),
    Calls(
        "PermutationGroup.declare",
        ps.PermutationGroup.declare,
        lambda: {"axes": AXES, "example_weights": FACTORS},
        {"axes": BAD_AXES, "example_weights": BAD_EXAMPLES},
        words={"axes": "ax"},
    ),
    Calls(
        "SignGroup",
        ps.SignGroup,
        lambda: {"factors": [signs().factor("factor")], "site_shapes": signs().site_shapes},
        {"factors": (*THINGS, ["0"]), "site_shapes": (*THINGS, {})},
        words={"site_shapes": "site"},
    ),
    Calls(
        "SignGroup.declare",
        ps.SignGroup.declare,
        lambda: {"axes": AXES, "example_weights": FACTORS},
        {"axes": BAD_AXES, "example_weights": BAD_EXAMPLES},
        words={"axes": "ax"},
    ),
    Calls(
        "FiniteGroup",
        ps.FiniteGroup,
        lambda: {"permutations": exchanges(), "signs": signs()},
        {"permutations": (*THINGS, Made("signs", signs)), "signs": (*THINGS, Made("exchanges", exchanges))},
    ),
    Calls(
        "PermutationGroup.sample",
        lambda **o: group().sample(**o),
        dict,
        {"shape": SHAPES, "device": DEVICES},
    ),
    Calls(
        "PermutationGroup.identity",
        lambda **o: group().identity(**o),
        dict,
        {"shape": SHAPES, "device": DEVICES},
    ),
    Calls("SignGroup.sample", lambda **o: signs().sample(**o), dict, {"shape": SHAPES, "device": DEVICES}),
    Calls(
        "FiniteGroup.sample",
        lambda **o: ps.FiniteGroup(exchanges(), signs()).sample(**o),
        dict,
        {"shape": SHAPES, "device": DEVICES},
    ),
    Calls(
        "FiniteGroup.identity",
        lambda **o: ps.FiniteGroup(exchanges(), signs()).identity(**o),
        dict,
        {"shape": SHAPES[:3], "device": DEVICES},
    ),
    Calls(
        "PermutationGroup.element",
        lambda **o: group().element(**o),
        lambda: {"images": {"0": [2, 0, 1]}},
        {
            "images": (
                *THINGS,
                {"1": [0, 1]},
                {"0": [0, 1]},
                {"0": [0, 0, 1]},
                {"0": [0.5, 1.0, 2.0]},
                {"0": "021"},
                {"0": None},
                {"0": [True, False, True]},
            )
        },
        words={"images": ""},
    ),
    Calls(
        "FiniteGroup.element",
        lambda **o: ps.FiniteGroup(exchanges(), signs()).element(**o),
        lambda: {"permutations": {"factor": [1, 0]}, "signs": {"factor": [1.0, -1.0]}},
        {
            "permutations": (3, "banana", {"other": [0, 1]}, {"factor": [0, 0]}, {"factor": "01"}),
            "signs": (3, "banana", {"other": [1, 1]}, {"factor": [0.0, 1.0]}, {"factor": "+-"}, {"factor": [NAN, 1.0]}),
        },
        words={"permutations": "", "signs": ""},
    ),
    Calls(
        "PermutationGroup.children",
        lambda **o: group().children(**o),
        lambda: {"name": "0"},
        {"name": (*THINGS, "1")},
        words={"name": "factor"},
    ),
    Calls(
        "PermutationGroup.ancestors",
        lambda **o: group().ancestors(**o),
        lambda: {"name": "0"},
        {"name": (*THINGS, "1")},
        words={"name": "factor"},
    ),
    Calls(
        "PermutationGroup.flat",
        lambda **o: group().flat(**o),
        lambda: {"sites": list(group().site_shapes)},
        {"sites": (*THINGS, ["0.wait"], [3], [])},
    ),
    Calls(
        "FiniteGroup.flat",
        lambda **o: ps.FiniteGroup(exchanges(), signs()).flat(**o),
        lambda: {"sites": list(FACTORS)},
        {"sites": (*THINGS, ["0.wait"])},
    ),
    Calls(
        "FiniteGroup.batch_shape",
        lambda **o: ps.FiniteGroup(exchanges(), signs()).batch_shape(**o),
        lambda: {"weights": FACTORS},
        {"weights": (*THINGS, ARRAY, {}, {**FACTORS, "loadings": torch.zeros(2, 4)}, {"loadings": torch.zeros(4, 2)})},
    ),
    Calls(
        "FiniteGroup.over",
        lambda **o: ps.FiniteGroup(exchanges(), signs()).over(**o),
        lambda: {"site_shapes": signs().site_shapes},
        {"site_shapes": (*THINGS, {}, {"loadings": 3})},
        words={"site_shapes": "site"},
    ),
    *(
        Calls(
            f"{kind.__name__}.from_dict",
            kind.from_dict,
            lambda made=make: {"data": made().to_dict()},
            {"data": NO_DATA},
        )
        for kind, make in (
            (ps.PermutationGroup, group),
            (ps.FiniteGroup, lambda: ps.FiniteGroup(exchanges(), signs())),
            (ps.WeightSymmetry, symmetry),
        )
    ),
    *(
        Calls(
            f"{kind}.verify",
            verified(lambda *args, made=make, **options: made().verify(*args, **options)),
            lambda: {"model": model(), "x": data()[0], "y": data()[1]},
            {"model": (*THINGS, ARRAY), "x": (None, ARRAY, 3)},
            words={"x": "x"},
            quick=kind == "PermutationGroup",
        )
        for kind, make in (("PermutationGroup", group),)
    ),
    Calls(
        "FiniteGroup.verify",
        lambda **o: ps.FiniteGroup(exchanges(), signs()).verify(**o),
        lambda: {"model": model()},
        {"model": THINGS},
        quick=False,
    ),
    Calls(
        "SignGroup.verify", lambda **o: signs().verify(**o), lambda: {"model": model()}, {"model": THINGS}, quick=False
    ),
    Calls(
        "Permutation",
        ps.Permutation,
        lambda: {"group": group(), "images": {"0": torch.arange(3)}},
        {
            "group": (*THINGS, Made("symmetry", symmetry)),
        },
    ),
    Calls(
        "Permutation.__call__",
        lambda weights: group().identity()(weights),
        lambda: {"weights": weights(4)},
        {"weights": (*bad_weights(4), TRANSPOSED)},
    ),
    Calls(
        "SymmetryElement.__call__",
        lambda weights: symmetry().identity()(weights),
        lambda: {"weights": weights(4)},
        {"weights": (*bad_weights(4), TRANSPOSED)},
    ),
    Calls("Permutation.to", lambda **o: group().identity().to(**o), lambda: {"device": "cpu"}, {"device": DEVICES}),
    Calls(
        "Permutation.equal",
        lambda **o: group().identity().equal(**o),
        lambda: {"other": group().identity()},
        {"other": (*THINGS, ARRAY)},
    ),
    Calls(
        "WeightSymmetry",
        ps.WeightSymmetry,
        lambda: {kind: getattr(symmetry(), kind) for kind in ("permutations", "scalings", "signs", "shifts")},
        {
            "permutations": (*THINGS, Made("symmetry", symmetry)),
            "scalings": (*THINGS, Made("permutations", group)),
            "signs": (*THINGS, Made("permutations", group)),
            "shifts": (*THINGS, Made("permutations", group)),
            "logits": FLAGS,
        },
    ),
    Calls(
        "WeightSymmetry.sample",
        lambda **o: symmetry().sample(**o),
        dict,
        {"shape": SHAPES, "spread": (-1.0, NAN, INF, "1", None), "device": DEVICES},
    ),
    Calls(
        "WeightSymmetry.identity",
        lambda **o: symmetry().identity(**o),
        dict,
        {"shape": SHAPES[:3], "device": DEVICES},
    ),
    Calls(
        "WeightSymmetry.act",
        lambda **o: symmetry().act(**o),
        lambda: {"element": symmetry().identity(), "target": weights()},
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
        "WeightSymmetry.weights_of",
        lambda **o: symmetry().weights_of(**o),
        lambda: {"net": network()},
        {"net": (*THINGS, ARRAY, nn.Linear(3, 3))},
    ),
    Calls(
        "WeightSymmetry.verify",
        lambda net, x, **o: symmetry().verify(net, x, **o),
        lambda: {"net": network(), "x": data()[0]},
        {
            "net": (*THINGS, ARRAY, nn.Linear(3, 3)),
            "x": (ARRAY, 3, None, torch.zeros(3, 3), torch.zeros(0, 2)),
            "tolerance": (-1.0, NAN, "1e-6", None),
            "trials": COUNTS,
        },
        words={"x": "input"},
    ),
    Calls(
        "WeightSymmetry.renamed",
        lambda **o: symmetry().renamed(**o),
        lambda: {"rename": str.upper},
        {"rename": (*THINGS, lambda site: "same", lambda site: None, {"0.weight": "w"})},
    ),
    Calls(
        "WeightSymmetry.prefixed",
        lambda **o: symmetry().prefixed(**o),
        lambda: {"prefix": "net"},
        {"prefix": (None, 3, ["net"])},
    ),
    Calls(
        "WeightSymmetry.without",
        lambda **o: symmetry().without(**o),
        lambda: {"names": {"scalings": ["0"]}},
        {
            "names": (
                *THINGS,
                {"scaling": ["0"]},
                {"scalings": ["1"]},
                {"permutations": ["hidden"]},
                {"scalings": "0"},
                {"shifts": ["0.wait"]},
                {"signs": ["0"]},
                ["0"],
            )
        },
    ),
    Calls(
        "WeightSymmetry.holding",
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
    Calls(
        "WeightSymmetry.leaving",
        lambda **o: symmetry().leaving(**o),
        lambda: {"sites": ["0.bias"]},
        {"sites": (*THINGS, ["0.wait"], [3])},
    ),
    Calls("WeightSymmetry.to_axes", lambda **o: symmetry().to_axes(**o), dict, {"strict": FLAGS}),
    Calls(
        "WeightSymmetry.from_axes",
        ps.WeightSymmetry.from_axes,
        lambda: {"axes": AXES, "example_weights": FACTORS},
        {"axes": BAD_AXES, "example_weights": BAD_EXAMPLES},
        words={"axes": "ax"},
    ),
)
