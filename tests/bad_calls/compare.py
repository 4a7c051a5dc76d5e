"""Bad calls of distances, tests, diagnostics and scores."""

import numpy as np
import torch

import pyro_symmetric as ps

from .table import (
    ARRAY,
    COUNTS,
    FRACTIONS,
    INF,
    NAN,
    THINGS,
    Calls,
    Made,
    bad_weights,
    data,
    group,
    model,
    network,
    not_finite,
    posterior,
    symmetry,
    weights,
)

LAYERS = (3, "0", {}, {"a": []}, {"a": ["0.wait"]}, {"a": "0.weight"}, {"a": ["0.weight", "0.weight"]}, ["0.weight"])
NO_SYMMETRY = (3, "banana", ARRAY, {}, Made("network", network))
COMPARED = {
    "weights_p": (*bad_weights(20), *not_finite(20)),
    "weights_q": (*bad_weights(20), *not_finite(20)),
    "layers": LAYERS,
}


def compared(function, **bad):
    """Calls of a comparison of two collections of weights."""
    words = {
        "weights_p": "weights",
        "weights_q": "weights",
        "layers": "layer",
    }
    return Calls(
        function.__name__,
        function,
        lambda: {"weights_p": weights(20), "weights_q": weights(20)},
        {**COMPARED, **bad},
        words,
    )


BAD_POSTERIORS = (
    *(*THINGS, ARRAY, Made("lacking", lambda: lacking(20))),
    *(
        Made(bad.name, lambda bad=bad: ps.Posterior.from_samples(bad.make(), rows="independent"))
        for bad in not_finite(20)
    ),
)


def independent(count, held=None):
    """Independent draws."""
    return ps.Posterior.from_samples(held or weights(count), rows="independent")


def lacking(count):
    """Draws without one of the sites."""
    held = {site: value for site, value in weights(count).items() if site != "0.weight"}
    return ps.Posterior.from_samples(held, rows="independent")


PROBABILITIES = torch.full((4, 6, 2), 0.5)
BAD_PROBABILITIES = (
    *(*THINGS, ARRAY, torch.zeros(6), torch.randn(4, 6, 2), torch.full((4, 6, 2), NAN), PROBABILITIES.long()),
    torch.zeros(0, 6, 2),
    PROBABILITIES + 0.1,
)
LABELS = torch.zeros(6, dtype=torch.long)


def tracked(weights, **options):
    """One step of a tracker."""
    tracker = ps.compare.SortingTracker(group(), **options)
    tracker(weights)
    return tracker


CALLS = (
    compared(ps.mmd, bandwidths=(3, "banana", {})),
    compared(ps.mmd_test, level=(*FRACTIONS, None), num_permutations=(*COUNTS, 3)),
    compared(ps.marginal_wasserstein, p=(0.5, NAN, "1", None, True)),
    Calls(
        "common_frame",
        ps.common_frame,
        lambda: {"weights_p": weights(20), "weights_q": weights(20), "symmetry": group()},
        {"weights_p": bad_weights(20), "weights_q": bad_weights(20), "symmetry": (None, *NO_SYMMETRY)},
        words={"weights_p": "weights", "weights_q": "weights", "symmetry": ""},
    ),
    Calls(
        "invariance_tests",
        ps.invariance_tests,
        lambda: {"weights": independent(20), "group": group()},
        {
            "weights": (*BAD_POSTERIORS, Made("one", lambda: independent(1))),
            "group": (None, *NO_SYMMETRY),
            "level": (*FRACTIONS, None),
            "max_tests": (*COUNTS, None),
        },
        words={"weights": "", "group": ""},
    ),
    Calls(
        "diagnose",
        ps.diagnose,
        lambda: {"posterior": posterior()},
        {
            "posterior": (*THINGS, ARRAY),
            "symmetry": NO_SYMMETRY,
            "model": (3, "banana", Made("network", network)),
            "predictions": (3, "banana", ARRAY, torch.zeros(3, 8, 2), torch.tensor(1.0)),
            "num_draws": (*COUNTS, None),
        },
    ),
    Calls(
        "diagnose",
        lambda **o: ps.diagnose(posterior(), model=model(), **o),
        lambda: {"x": data()[0]},
        {"x": (3, "banana", ARRAY, torch.zeros(3, 5))},
        words={"x": "x"},
        misspelt=False,
    ),
    Calls(
        "DistanceResult.of",
        lambda **o: ps.mmd(weights(20), weights(20)).of(**o),
        lambda: {"part": "0"},
        {"part": ("banana", 3, None)},
    ),
    Calls(
        "total_variation",
        ps.total_variation,
        lambda: {"p": PROBABILITIES, "q": PROBABILITIES},
        {"p": BAD_PROBABILITIES, "q": (*BAD_PROBABILITIES, torch.full((4, 5, 2), 0.5))},
    ),
    Calls(
        "excess_mass",
        ps.compare.excess_mass,
        lambda: {"weights": weights(4), "symmetry": symmetry()},
        {"weights": (*bad_weights(4), *not_finite(4)), "symmetry": (None, *NO_SYMMETRY)},
    ),
    Calls(
        "SortingTracker",
        ps.compare.SortingTracker,
        lambda: {"symmetry": symmetry()},
        {"symmetry": (None, *NO_SYMMETRY), "key": ("maximum", None, 3)},
    ),
    Calls(
        "SortingTracker.__call__",
        tracked,
        lambda: {"weights": weights(4)},
        {"weights": (*bad_weights(4), *not_finite(4))},
        misspelt=False,
    ),
    Calls(
        "functional_collapse",
        ps.compare.functional_collapse,
        lambda: {"probabilities": PROBABILITIES, "ood_probabilities": PROBABILITIES},
        {
            "probabilities": (*BAD_PROBABILITIES, torch.full((6, 2), 0.5)),
            "ood_probabilities": (*BAD_PROBABILITIES, torch.full((3, 6, 2), 0.5)),
        },
    ),
    Calls(
        "scores.classification",
        ps.scores.classification,
        lambda: {"probabilities": PROBABILITIES, "labels": LABELS},
        {
            "probabilities": (*BAD_PROBABILITIES, torch.ones(4, 6, 1)),
            "labels": (*THINGS, np.zeros(6), LABELS[:5], LABELS + 2, LABELS - 1, LABELS.float()),
            "ood_probabilities": (3, "banana", ARRAY, torch.randn(4, 6, 2), torch.full((3, 6, 2), 0.5)),
            "num_bins": (*COUNTS, None),
        },
    ),
    Calls(
        "scores.detect",
        ps.scores.detect,
        lambda: {"scores_in": torch.rand(4), "scores_out": torch.rand(3)},
        {
            "scores_in": (*THINGS, ARRAY, torch.zeros(0), torch.zeros(2, 2), torch.full((3,), NAN)),
            "scores_out": (*THINGS, np.zeros(3), torch.zeros(0), torch.full((3,), INF)),
        },
    ),
    Calls(
        "scores.regression",
        ps.scores.regression,
        lambda: {"means": torch.zeros(4, 6, 1), "noise_scale": 1.0, "targets": torch.zeros(6)},
        {
            "means": (*THINGS, ARRAY, torch.zeros(4, 6), torch.zeros(0, 6, 1), torch.full((4, 6, 1), NAN)),
            "noise_scale": (None, "1", 0.0, -1.0, NAN, INF, torch.ones(5), np.ones(4), True),
            "targets": (*THINGS, np.zeros(6), torch.zeros(()), torch.full((6,), INF)),
            "levels": ([0.0], [1.0], [NAN], ["0.5"], 0.5, "0.5", None, [True]),
        },
        words={"targets": ""},
    ),
)
