"""Bad calls of symmetrised distributions and their estimators."""

import pyro.distributions as dist
import torch

import pyro_symmetric as ps

from .table import COUNTS, FLAGS, NOT_NEGATIVE, THINGS, Calls, exchanges

SHAPES = (3, "34", 1.5, (1.5,), (-1,), None)
BASE = dist.Normal(torch.zeros(18), torch.ones(18)).to_event(1)


def symmetrized():
    """A Gaussian over the orbits of a factor analysis."""
    return ps.Symmetrized(BASE, ps.groups.Action(exchanges(), ["loadings", "scores"]))


CALLS = (
    Calls("InfoNCE", ps.InfoNCE, dict, {"K": (*NOT_NEGATIVE, None)}),
    Calls("SinkhornImportance", ps.SinkhornImportance, dict, {"K": (*COUNTS, None)}),
    Calls("ExactOrbit", ps.ExactOrbit, dict, {"limit": (*COUNTS, None)}),
    Calls(
        "Symmetrized",
        ps.Symmetrized,
        lambda: {"base_distribution": BASE, "action": ps.groups.Action(exchanges(), ["loadings", "scores"])},
        {
            "base_distribution": (
                *THINGS,
                dist.Normal,
                dist.Normal(0.0, 1.0),
                dist.Normal(torch.zeros(5), torch.ones(5)).to_event(1),
            ),
            "action": (*THINGS, exchanges()),
            "estimator": (3, "InfoNCE", ps.InfoNCE),
            "sticking_the_landing": FLAGS,
        },
    ),
    Calls("Symmetrized.sample", lambda **o: symmetrized().sample(**o), dict, {"sample_shape": SHAPES}),
    Calls("Symmetrized.rsample", lambda **o: symmetrized().rsample(**o), dict, {"sample_shape": SHAPES}),
    Calls("Symmetrized.sample_orbit", lambda **o: symmetrized().sample_orbit(**o), dict, {"sample_shape": SHAPES}),
    Calls(
        "Symmetrized.mutual_information",
        lambda **o: symmetrized().mutual_information(**o),
        lambda: {"num_samples": 8},
        {"num_samples": (1, *COUNTS)},
    ),
    Calls("Symmetrized.__call__", lambda **o: symmetrized()(**o), dict, {"sample_shape": SHAPES}),
    Calls(
        "Symmetrized.expand",
        lambda **o: symmetrized().expand(**o),
        lambda: {"batch_shape": (3,)},
        {"batch_shape": (3, "34", (1.5,))},
    ),
)
