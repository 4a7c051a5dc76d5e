"""Bad calls of predictions."""

import torch

import pyro_symmetric as ps

from .table import ARRAY, COUNTS, FLAGS, THINGS, Calls, Made, bad_weights, data, model, network, posterior, unused_guide

CALLS = (
    Calls(
        "predict",
        lambda posterior, model, x, **o: ps.predict(posterior, model, x, **o),
        lambda: {"posterior": posterior(), "model": model(), "x": data()[0], "progress": False},
        {
            "posterior": (*bad_weights(4), Made("unused", unused_guide)),
            "model": (*THINGS, ARRAY),
            "x": (None, 3, "banana", ARRAY, torch.zeros(3, 5)),
            "kind": ("logits", None, 3, "log_likelihood"),
            "num_samples": (*COUNTS, 99),
            "average": FLAGS,
            "draw_chunk": COUNTS,
            "row_chunk": COUNTS,
        },
        words={"posterior": "", "model": "", "x": ""},
    ),
    Calls(
        "predict",
        lambda **o: ps.predict(posterior(), network(), data()[0], kind="outputs", progress=False, **o),
        dict,
        {"average": (True,)},
        misspelt=False,
    ),
)
