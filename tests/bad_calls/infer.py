"""Bad calls of the door for those who come from Pyro."""

import pyro
import torch

import pyro_symmetric as ps
from pyro_symmetric.infer import HMC, NUTS

from .table import ARRAY, COUNTS, DEVICES, FLAGS, FRACTIONS, NOT_NEGATIVE, THINGS, Calls


def plain(y=0.0):
    """A model of one site."""
    pyro.sample("z", pyro.distributions.Normal(y, 1.0))


def chains(**options):
    """A run of one draw."""
    good = {"kernel": NUTS(plain), "num_samples": 1, "warmup_steps": 1, "disable_progbar": True, "engine": "torch"}
    mcmc = ps.MCMC(**{**good, **options})
    mcmc.run()
    return mcmc


SHARED = {
    "model": (3, "banana", ARRAY, ps.BayesianModel),
    "adapt_step_size": FLAGS,
    "adapt_mass_matrix": FLAGS,
    "full_mass": (3, None, "z", ["z"]),
    "target_accept_prob": (*FRACTIONS, None),
}
OURS = {"adapt_mass_matrix": "adapt_mass", "target_accept_prob": "target_accept", "max_tree_depth": "max_treedepth"}

CALLS = (
    Calls("infer.HMC", HMC, lambda: {"model": plain}, {**SHARED, "trajectory_length": (0.0, -1.0, "1")}, words=OURS),
    Calls("infer.NUTS", NUTS, lambda: {"model": plain}, {**SHARED, "max_tree_depth": (*COUNTS, None)}, words=OURS),
    Calls(
        "MCMC",
        chains,
        dict,
        {
            "kernel": (*THINGS, plain, ps.NUTS),
            "num_samples": (*COUNTS, None),
            "warmup_steps": NOT_NEGATIVE,
            "initial_params": (3, {}, {"z": 0.0}, {"y": torch.zeros(())}, {"z": torch.zeros(2)}),
            "num_chains": (*COUNTS, None),
            "hook_fn": (3, "banana"),
            "disable_progbar": FLAGS,
            "save_params": (3, "z", [3], ["banana"]),
            "seed": (1.5, "3", True, -1),
            "device": DEVICES,
            "engine": (1, "yes", None),
        },
        words={"kernel": "", "initial_params": "initial"},
    ),
    Calls(
        "MCMC.run",
        lambda **o: ps.MCMC(NUTS(plain), 1, 1, disable_progbar=True, engine="torch").run(**o),
        dict,
        {"num_chains": (3,), "seed": (3,), "kernel": (3,)},
        misspelt=False,
    ),
    Calls(
        "MCMC.get_samples",
        lambda **o: chains().get_samples(**o),
        dict,
        {"num_samples": COUNTS, "group_by_chain": FLAGS},
    ),
    Calls("MCMC.summary", lambda **o: chains().summary(**o), dict, {"prob": (*FRACTIONS, None)}),
)
