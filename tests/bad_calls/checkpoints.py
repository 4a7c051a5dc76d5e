"""Bad calls of what reads checkpoints."""

from pathlib import Path

import torch

import pyro_symmetric as ps

from .table import DTYPES, Calls


def read(**options):
    """Read a checkpoint."""
    Path("checkpoints").mkdir(exist_ok=True)
    torch.save(torch.nn.Linear(2, 3).state_dict(), "checkpoints/net.pt")
    return ps.checkpoints.read_checkpoints(**{"source": "checkpoints", "progress": False, **options})


CALLS = (
    Calls(
        "read_checkpoints",
        read,
        dict,
        {
            "source": (None, 3, "", "missing", [], ["missing.pt"], [3]),
            "pattern": ("", "*.txt", None, 3),
            "buffers": ("keep", None, True),
            "rename": (3, "banana", lambda name: "same", lambda name: None, lambda name: 3),
            "key": (3, ["a"]),
            "dtype": (*DTYPES, torch.bool, torch.complex64),
        },
        words={"source": "", "pattern": "", "rename": ""},
    ),
)
