"""Bad calls of ensembles."""

from torch import nn

import pyro_symmetric as ps

from .table import ARRAY, COUNTS, DEVICES, FLAGS, NAN, NOT_NEGATIVE, THINGS, Calls, data, network

X, Y = data()

CALLS = (
    Calls(
        "ensemble",
        ps.ensemble,
        lambda: {"net": network(), "data": (X, Y), "num_members": 2, "epochs": 1, "progress": False},
        {
            "net": (*THINGS, ARRAY, nn.Linear, nn.ReLU()),
            "data": (
                *(*THINGS, X, (X,), (X, Y, Y), (ARRAY, ARRAY), (X, Y[:5]), (X[:0], Y[:0]), (X, None), {"x": X}),
                (X * NAN, Y),
            ),
            "num_members": (*COUNTS, None),
            "loss": ("entropy", None, 3, nn.CrossEntropyLoss),
            "epochs": COUNTS,
            "batch_size": COUNTS,
            "optimizer": (*THINGS[1:], lambda parameters: 3),
            "cosine": FLAGS,
            "initial": (3, "banana", lambda count: 3, lambda count: {}),
            "members_at_once": COUNTS,
            "seed": NOT_NEGATIVE,
            "device": DEVICES,
        },
        words={"net": "net", "data": ""},
    ),
)
