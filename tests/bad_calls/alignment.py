"""Bad calls of what brings networks and posteriors into one frame."""

import torch

import pyro_symmetric as ps

from .table import (
    ARRAY,
    COUNTS,
    NAN,
    NOT_NEGATIVE,
    THINGS,
    Calls,
    Made,
    bad_weights,
    changed,
    data,
    group,
    guide,
    model,
    network,
    not_finite,
    posterior,
    unused_guide,
    weights,
)

TOLERANCES = (-1.0, NAN, "1", None)
NO_GROUP = (*THINGS, ARRAY, {})


def allocations() -> torch.Tensor:
    """The probability that each of 6 observations belongs to each of 3 components, under each draw."""
    return torch.rand(2, 8, 6, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)


CURVE = ps.alignment.BarrierCurve(torch.linspace(0, 1, 3), {"data": torch.tensor([1.0, 2.0, 1.0])}, {})


def two_factors():
    """A group of more than a mixture's components."""
    return ps.Group.declare({"w": ("rows", "columns")}, {"w": torch.zeros(2, 3)})


CALLS = (
    Calls(
        "align",
        lambda **o: ps.align(**o),
        lambda: {"source": weights(), "reference": weights(), "group": group(), "progress": False},
        {
            "source": (*bad_weights(), *not_finite(), Made("unused", unused_guide)),
            "reference": (*bad_weights(), *not_finite(), Made("batch", lambda: weights(4))),
            "group": NO_GROUP,
            "cost": ("euclid", None, 3),
            "restarts": NOT_NEGATIVE,
            "max_sweeps": COUNTS,
            "tolerance": TOLERANCES,
        },
        words={"source": "", "reference": ""},
    ),
    Calls(
        "align",
        lambda cost: ps.align(weights(), weights(), group(), cost, progress=False),
        lambda: {"cost": ps.alignment.ActivationCost(network(), data()[0])},
        {"cost": (lambda sources, reference, group: None, lambda sources, reference, group: torch.zeros(3, 3))},
        misspelt=False,
    ),
    Calls(
        "align_many",
        ps.align_many,
        lambda: {"sources": weights(4), "group": group(), "progress": False},
        {
            "sources": (*bad_weights(4), *not_finite(4), [], [None], [weights(), "banana"], Made("single", weights)),
            "group": NO_GROUP,
            "cost": ("kl", "banana", 3),
            "each": ("draws", None, 3),
            "restarts": NOT_NEGATIVE,
            "max_rounds": COUNTS,
            "max_sweeps": COUNTS,
            "tolerance": TOLERANCES,
        },
        words={"sources": ""},
    ),
    Calls(
        "relabel",
        ps.relabel,
        lambda: {"posterior": posterior(), "group": group(), "probabilities": allocations()},
        {
            "posterior": (*THINGS, ARRAY, Made("weights", lambda: weights(4))),
            "group": (*NO_GROUP, Made("two", two_factors)),
            "probabilities": (
                *THINGS,
                ARRAY,
                torch.full((2, 8, 6, 3), 1 / 3, dtype=torch.complex64),
                torch.full((2, 8, 6, 3), NAN),
                torch.ones(2, 8, 6, 2) / 2,
                torch.ones(6, 3) / 3,
            ),
            "method": ("kl", None, 3),
            "starts": COUNTS,
            "max_rounds": COUNTS,
        },
    ),
    Calls(
        "to_gaussian",
        ps.alignment.to_gaussian,
        lambda: {"weights": weights()},
        {"weights": (*THINGS, ARRAY, {"w": ARRAY}, {"w": None}, {}, Made("unused", unused_guide))},
        words={"weights": ""},
    ),
    Calls(
        "GaussianWeights",
        ps.alignment.GaussianWeights,
        lambda: {"loc": weights(), "scale": {site: torch.ones_like(v) for site, v in weights().items()}},
        {
            "loc": (*THINGS, ARRAY, {}, {"w": ARRAY}, Made("int", lambda: {s: v.long() for s, v in weights().items()})),
            "scale": (
                *THINGS,
                ARRAY,
                {},
                Made("negative", lambda: changed("0.weight", lambda value: -value.abs())),
                Made("NaN", lambda: changed("0.weight", lambda value: value * NAN)),
                Made("misshaped", lambda: changed("0.weight", lambda value: value.mT)),
                Made("array", lambda: changed("0.weight", lambda value: value.numpy())),
            ),
            "supports": (3, "banana", {"other": torch.distributions.constraints.real}, {"0.weight": "real"}),
        },
    ),
    Calls(
        "ActivationCost",
        lambda net, inputs, **o: ps.alignment.ActivationCost(net, inputs, **o),
        lambda: {"net": network(), "inputs": data()[0]},
        {"net": (*THINGS, ARRAY), "inputs": (None, ARRAY, 3, torch.zeros(3, 3))},
        words={"inputs": "input"},
    ),
    Calls(
        "ActivationCost.__call__",
        lambda **o: ps.alignment.ActivationCost(network(), data()[0])(**o),
        lambda: {"sources": weights(2), "reference": weights(), "group": group()},
        {"sources": (*THINGS, ARRAY, Made("one", weights)), "reference": (*THINGS, ARRAY), "group": THINGS},
    ),
    Calls(
        "TableCost",
        lambda **o: ps.alignment.TableCost(**o),
        lambda: {"group": group(), "tables": {name: torch.zeros(1, n, n) for name, n in group().factors.items()}},
        {"group": THINGS, "tables": (*THINGS, {}, Made("numbers", lambda: dict.fromkeys(group().factors, 3)))},
    ),
    Calls(
        "loss_barrier",
        ps.loss_barrier,
        lambda: {"guide_0": weights(), "guide_1": guide(), "log_likelihood": model(), "data": data()},
        {
            "guide_0": (*bad_weights(), *not_finite(), Made("unused", unused_guide)),
            "guide_1": (*THINGS, ARRAY, {}),
            "log_likelihood": (*THINGS, ARRAY, {}, Made("network", network)),
            "data": (*THINGS, ARRAY, {}, torch.zeros(3), (ARRAY, ARRAY), (torch.zeros(3, 2), torch.zeros(4)), [None]),
            "num_points": (2, 1.5, True, "3", None),
            "num_samples": (*COUNTS, None),
            "repair": (3, "banana", ARRAY),
        },
        words={"guide_0": "", "guide_1": ""},
    ),
    Calls("BarrierCurve.excess", lambda **o: CURVE.excess(**o), lambda: {"name": "data"}, {"name": (*THINGS, "test")}),
    Calls(
        "BarrierCurve.network",
        lambda **o: CURVE.network(**o),
        lambda: {"t": 0.5},
        {"t": (-0.1, 1.5, NAN, "0.5", None)},
        quick=False,
    ),
    Calls(
        "BarrierCurve.plot",
        lambda **o: CURVE.plot(**o),
        dict,
        {"ax": (3, "banana"), "label": (3, None), "names": ("data", ["test"], 3, [3])},
        quick=False,
    ),
)
