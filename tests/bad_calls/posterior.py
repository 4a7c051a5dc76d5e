"""Bad calls of posteriors."""

import numpy as np
import torch

import pyro_symmetric as ps

from .table import ARRAY, COUNTS, FRACTIONS, THINGS, Calls, data, group, model, posterior

BAD_SAMPLES = (
    *(*THINGS, ARRAY, {}, {"w": ARRAY}, {"w": None}, {"w": torch.zeros(3)}, {3: torch.zeros(2, 3)}),
    {"w": torch.zeros(2, 3), "b": torch.zeros(3, 2)},
)

CALLS = (
    Calls(
        "Posterior",
        ps.Posterior,
        lambda: {"samples": {"w": torch.zeros(2, 3, 4)}, "rows": "chains"},
        {
            "samples": BAD_SAMPLES,
            "statistics": (3, "banana", {"lp": np.zeros((2, 3))}, {"lp": torch.zeros(2, 3, 1)}, {"lp": [0.0]}),
            "metadata": (3, "banana", [1]),
            "rows": ("chain", None, 3, True),
        },
    ),
    Calls(
        "Posterior.from_samples",
        ps.Posterior.from_samples,
        lambda: {"weights": {"w": torch.zeros(6, 4)}, "rows": "independent"},
        {
            "weights": (*THINGS, ARRAY, {}, {"w": ARRAY}, {"w": None}, {"w": torch.tensor(1.0)}),
            "rows": ("chain", None, 3),
            "num_chains": (*COUNTS, 4),
            "statistics": (3, "banana", {"lp": np.zeros(6)}, {"lp": torch.zeros(5)}),
            "metadata": (3, "banana"),
        },
    ),
    Calls(
        "Posterior.get_samples",
        lambda **o: posterior().get_samples(**o),
        dict,
        {"num_samples": COUNTS, "group_by_chain": (1, "yes", None)},
    ),
    Calls(
        "Posterior.select",
        lambda **o: posterior().select(**o),
        dict,
        {"chains": (5, [5], "0", 0.5, [0.5], None), "draws": (99, [99], "0", 0.5, None)},
    ),
    Calls(
        "Posterior.concat",
        ps.Posterior.concat,
        lambda: {"parts": [posterior(), posterior()]},
        {"parts": (*THINGS, ARRAY, [], [3], [posterior(), posterior().thin(2)])},
        misspelt=False,
    ),
    Calls("Posterior.thin", lambda **o: posterior().thin(**o), lambda: {"every": 2}, {"every": (*COUNTS, None)}),
    Calls(
        "Posterior.summary",
        lambda **o: posterior().summary(**o),
        dict,
        {"prob": (*FRACTIONS, None)},
    ),
    Calls(
        "Posterior.to_dataframe",
        lambda **o: posterior().to_dataframe(**o),
        dict,
        {"names": (3, "banana", [], ["banana"], [3]), "form": ("tall", None, 3)},
    ),
    Calls(
        "Posterior.map",
        lambda **o: posterior().map(**o),
        lambda: {"function": group().identity()},
        {
            "function": (
                *(*THINGS, ARRAY, ps.Posterior),
                lambda weights: None,
                lambda weights: {},
                lambda weights: {site: value[:1] for site, value in weights.items()},
            )
        },
        misspelt=False,
    ),
    Calls(
        "summary",
        ps.summary,
        lambda: {"posterior": posterior(), "symmetry": group(), "progress": False},
        {
            "posterior": (*THINGS, ARRAY, {}),
            "symmetry": (*THINGS, ARRAY, {}),
            "prob": (*FRACTIONS, None),
        },
    ),
    Calls(
        "Posterior.attach",
        lambda **o: posterior().attach(**o),
        lambda: {"kernel_or_model": model()},
        {"kernel_or_model": (*THINGS, ps.HMC)},
        misspelt=False,
    ),
    Calls(
        "Posterior.save",
        lambda **o: posterior().save(**o),
        lambda: {"path": "posterior.safetensors"},
        {"path": (None, 3, "", "missing/folder/file", ["a"])},
        words={"path": ""},
    ),
    Calls(
        "Posterior.load",
        ps.Posterior.load,
        dict,
        {"path": (None, 3, "", "missing.safetensors", ["a"])},
        words={"path": ""},
        quick=False,
    ),
    Calls(
        "Posterior.to_arviz",
        posterior().attach(model(), *data()).to_arviz,
        dict,
        {
            "dims": (3, "banana", {"0.weight": 3}, {"0.weight": ["only one"]}, {"0.weights": ["out", "in"]}),
            "coords": (3, "banana"),
            "log_likelihood": (3, "banana", None, (3,), ()),
            "posterior_predictive": (3, "banana", None, (3,), ()),
        },
        words={"log_likelihood": "", "posterior_predictive": ""},
        quick=False,
    ),
)
