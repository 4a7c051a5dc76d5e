"""Bad calls of models, priors and likelihoods."""

import torch
from torch import nn

import pyro_symmetric as ps

from .table import (
    ARRAY,
    COUNTS,
    FLAGS,
    INF,
    NAN,
    POSITIVE,
    THINGS,
    Calls,
    Made,
    bad_weights,
    changed,
    data,
    model,
    network,
    weights,
)

ROWS = (*THINGS, ARRAY, torch.zeros(3), torch.zeros(3, 5))
TARGETS = (3, "banana", ARRAY, torch.zeros(5).long())
CLASSES = (torch.full((6,), 7), torch.full((6,), -1))

CALLS = (
    Calls(
        "BayesianModel",
        ps.BayesianModel,
        lambda: {"net": network()},
        {
            "net": (*THINGS, ARRAY, nn.Linear, nn.ReLU(), {"w": torch.zeros(2)}),
            "prior": (
                *(0.0, -1.0, NAN, INF, True, "1", None, torch.tensor(1.0), nn.Linear),
                lambda name, parameter: 3,
                lambda name, parameter: torch.distributions.Normal(0.0, 1.0),
                ps.GaussianPrior(scales={"0.wait": 2.0}),
                ps.GaussianPrior(scales={"1.*": 2.0}),
            ),
            "likelihood": ("gauss", None, 3, ps.GaussianLikelihood, {}),
            "num_data": (0, -1, 100.5, True, "6", NAN),
        },
    ),
    Calls(
        "BayesianModel.forward",
        lambda **o: model(num_data=8)(**o),
        lambda: {"x": data()[0], "y": data()[1]},
        {"x": ROWS, "y": TARGETS},
        words={"x": "x "},
    ),
    Calls(
        "BayesianModel.outputs",
        lambda **o: model().outputs(**o),
        lambda: {"weights": weights(4), "x": data()[0]},
        {"weights": bad_weights(4), "x": ROWS, "chunk_size": COUNTS},
    ),
    Calls(
        "BayesianModel.log_prior",
        lambda **o: model().log_prior(**o),
        lambda: {"weights": weights(4)},
        {"weights": (*bad_weights(4), Made("transposed", lambda: changed("0.weight", lambda v: v.mT)))},
    ),
    Calls(
        "BayesianModel.log_likelihood",
        lambda **o: model().log_likelihood(**o),
        lambda: {"weights": weights(4), "x": data()[0], "y": data()[1]},
        {"weights": bad_weights(4), "x": ROWS, "y": (*TARGETS, *CLASSES, None), "chunk_size": COUNTS},
    ),
    Calls(
        "BayesianModel.log_joint",
        lambda **o: model(num_data=8).log_joint(**o),
        lambda: {"weights": weights(4), "x": data()[0], "y": data()[1]},
        {"weights": bad_weights(4), "x": (*ROWS, torch.zeros(9, 2)), "y": (*TARGETS, *CLASSES, None)},
    ),
    Calls("BayesianModel.initial_weights", lambda **o: model().initial_weights(**o), dict, {"fresh": FLAGS}),
    Calls(
        "GaussianPrior",
        ps.GaussianPrior,
        dict,
        {
            "scale": (*POSITIVE, None, torch.tensor(1.0)),
            "fan_in": FLAGS,
            "scales": (3, "banana", None, {"*": 0.0}, {"*": NAN}, {"*": "1"}, {"*": None}, {3: 1.0}, [("*", 1.0)]),
        },
    ),
    Calls(
        "GaussianPrior.__call__",
        lambda **o: ps.GaussianPrior()(**o),
        lambda: {"name": "0.weight", "parameter": torch.zeros(3, 2)},
        {"name": (None, 3), "parameter": (*THINGS, ARRAY)},
    ),
    Calls("CategoricalLikelihood", ps.CategoricalLikelihood, dict, {"temperature": (*POSITIVE, None)}),
    Calls(
        "HeteroscedasticLikelihood", ps.likelihoods.HeteroscedasticLikelihood, dict, {"temperature": (*POSITIVE, None)}
    ),
    Calls(
        "GaussianLikelihood",
        ps.GaussianLikelihood,
        dict,
        {"scale": POSITIVE, "prior_scale": (*POSITIVE, None), "temperature": (*POSITIVE, None)},
    ),
)
