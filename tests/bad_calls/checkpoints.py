"""Bad calls of what reads and writes checkpoints."""

import shutil

import torch

import pyro_symmetric as ps

from .table import DTYPES, THINGS, Calls, posterior


def write(**options):
    """Write two draws."""
    shutil.rmtree("checkpoints", ignore_errors=True)
    return ps.write_checkpoints(**{"posterior": posterior(1, 2), "folder": "checkpoints", "progress": False, **options})


def read(**options):
    """Read the checkpoints that were just written."""
    write()
    return ps.read_checkpoints(**{"source": "checkpoints", "progress": False, **options})


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
    Calls(
        "write_checkpoints",
        write,
        dict,
        {
            "posterior": (*THINGS, {"w": torch.zeros(3)}),
            "folder": (None, 3, ""),
            "net": (3, "banana", torch.nn.Linear(7, 7)),
            "format": ("npz", None, 3),
            "prefix": (None, 3),
        },
    ),
)
