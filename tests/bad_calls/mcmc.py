"""Bad calls of samplers and of what runs them."""

import torch
from torch import nn

import pyro_symmetric as ps

from .table import (
    ARRAY,
    COUNTS,
    DEVICES,
    DTYPES,
    FLAGS,
    FRACTIONS,
    INF,
    NAN,
    NOT_NEGATIVE,
    POSITIVE,
    THINGS,
    Calls,
    Made,
    data,
    model,
    network,
    unused_guide,
    weights,
)

SHARES = (-0.1, 1.1, NAN, "0.5", None)
KERNEL = {"model": (3, "banana", ARRAY, {}, ps.BayesianModel)}  # without a model, kernels are driven by hand
GRADIENT = {
    **KERNEL,
    "step_size": POSITIVE,
    "target_accept": FRACTIONS,
    "adapt_step_size": FLAGS,
    "adapt_mass": FLAGS,
    "mass": ("full", "low-rank", None, 3, True),
}
STOCHASTIC = {
    **KERNEL,
    "step_size": POSITIVE,
    "batch_size": COUNTS,
    "replacement": FLAGS,
    "tolerance": (*FRACTIONS, None),
}
PATH = {
    "num_steps": (*COUNTS, None),
    "decay": SHARES,
    "decay_offset": (*POSITIVE, None),
}


def sampled(**options):
    """A run of one draw."""
    options = {"kernel_or_model": ps.HMC(model()), "args": data(), **SHORT, **options}
    kernel_or_model, given = options.pop("kernel_or_model"), options.pop("args")
    return ps.sample(kernel_or_model, *given, **{"engine": "torch", "progress": False, **options})


SHORT = {"num_samples": 1, "num_warmup": 1, "num_chains": 1}


def kernel(kind, bad):
    """Calls of a kernel's constructor."""
    return Calls(kind.__name__, kind, lambda: {"model": model()}, bad)


CALLS = (
    kernel(
        ps.HMC,
        {
            **GRADIENT,
            "trajectory_length": (*POSITIVE, None),
            "num_steps": COUNTS,
            "jitter": SHARES,
            "max_steps": COUNTS,
        },
    ),
    kernel(
        ps.NUTS,
        {"target_accept": FRACTIONS, "mass": ("full", None), "max_treedepth": (*COUNTS, None), "step_size": POSITIVE},
    ),
    kernel(
        ps.AdaptiveHMC,
        {"trajectory_length": POSITIVE, "adapt_length": FLAGS, "max_steps": (*COUNTS, None)},
    ),
    kernel(
        ps.MCLMC,
        {
            "step_size": POSITIVE,
            "adapt_step_size": FLAGS,
            "adapt_mass": FLAGS,
            "mass": ("full", None),
            "energy_error": (*POSITIVE, None),
            "length": (*POSITIVE, None),
            "adapt_length": FLAGS,
            "max_steps": (*COUNTS, None),
        },
    ),
    kernel(ps.SGLD, {**STOCHASTIC, **PATH}),
    kernel(
        ps.SGHMC,
        {
            **PATH,
            "friction": POSITIVE,
            "noise_estimate": (-1.0, NAN, INF, "guess", "auto", None, ARRAY, True),
            "resample_momentum": FLAGS,
            "batch_size": COUNTS,
        },
    ),
    kernel(ps.pSGLD, {"smoothing": (-0.1, 1.0, NAN, "0.5", None), "damping": (*POSITIVE, None), "running": FLAGS}),
    Calls(
        "sample",
        sampled,
        dict,
        {
            "kernel_or_model": (*THINGS, ps.HMC, ps.HMC(None), ps.BayesianModel, Made("guide", unused_guide)),
            "args": (("xy",), (data()[0],), (data(),), (ARRAY, ARRAY), (data()[0],) * 3),
            "kwargs": (3, "banana", [1], {3: 1}, {"banana": 1}),
            "num_samples": (*COUNTS, None),
            "num_warmup": (*NOT_NEGATIVE, None, "automatic"),
            "num_chains": COUNTS,
            "thinning": (*COUNTS, None),
            "initial": (
                *(3, "prio", ARRAY, {}, [weights(1)]),
                {"0.weight": ARRAY},
                Made("lacking", lambda: {"0.weight": torch.zeros(1, 3, 2)}),
                Made("misshaped", lambda: {**weights(1), "0.weight": torch.zeros(1, 2, 3)}),
                Made("NaN", lambda: {**weights(1), "0.weight": torch.full((1, 3, 2), NAN)}),
                Made("too-many", lambda: weights(5)),
                lambda count: 3,
            ),
            "chain_chunk": COUNTS,
            "engine": (1, "yes", None),
            "store": ("", 3, ["a"]),
            "resume": ("no", 3, None, True),
            "seed": (1.5, "3", True, -1, 2**70),
            "device": DEVICES,
            "dtype": (*DTYPES, torch.float16, torch.bfloat16, torch.complex64),
            "executor": (3, "banana", nn.Linear),
            "chains_per_task": COUNTS,
            "hook": (3, "banana", nn.Linear),
        },
        words={"kernel_or_model": "", "args": "", "kwargs": ""},
    ),
    Calls(
        "sample",
        lambda **o: sampled(chains_per_task=1, **o),
        dict,
        {"threads_per_task": (*COUNTS, None)},
        misspelt=False,
        quick=False,
    ),
    Calls(
        "sample",
        lambda **o: sampled(kernel_or_model=model(), **o),
        dict,
        {"num_chains": (0, -1, 1.5, "4"), "args": ((ARRAY, ARRAY),), "dtype": DTYPES},
        words={"args": ""},
        misspelt=False,
    ),
    Calls(
        "log_joint",
        lambda model, **o: ps.log_joint(model, *data(), **o),
        lambda: {"model": model()},
        {"model": (*THINGS, ARRAY, Made("network", network), ps.BayesianModel)},
        words={"model": ""},
    ),
    Calls(
        "log_joint",
        lambda weights: ps.log_joint(model(), *data())(weights),
        lambda: {"weights": weights(4)},
        {"weights": (*THINGS, ARRAY, {}, {"0.weight": ARRAY}, {"0.weight": torch.zeros(4, 2, 3)})},
        misspelt=False,
    ),
)
