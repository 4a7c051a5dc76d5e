"""Bad calls of data sets."""

from pathlib import Path

import torch

import pyro_symmetric as ps

from .table import DEVICES, DTYPES, FLAGS, FRACTIONS, NOT_NEGATIVE, THINGS, Calls

WINE = {"name": "wine"}
CELLS = ("1_00", "1e300", "1e400", "inf", "nan", "", "ten", "0x10", "١")  # noqa: RUF001 (an Arabic digit)


def table(cell="1.5", **options):
    """Load a table of four rows with this cell in it."""
    Path("table.csv").write_text(f"a,b,y\n1,2,0.5\n{cell},4,1.5\n3,1,2.5\n4,3,3.5\n5,2,4.5\n", encoding="utf-8")
    arguments = {"name": "csv:table.csv", "target": "y", "task": "regression", "test_fraction": 0.4, **options}
    return ps.datasets.load(**arguments)


CALLS = (
    Calls(
        "datasets.load",
        ps.datasets.load,
        lambda: WINE,
        {
            "name": (*THINGS, "wines", "", "csv:", "csv:missing.csv", "uci/missing"),
            "root": (None, 3, ""),
            "download": FLAGS,
            "target": ("y", 3),
            "task": ("regress", 3, "regression"),
            "test_fraction": (*FRACTIONS, None),
            "hold_out": ("banana", 3, ["banana"], [99], [None]),
            "split": (*NOT_NEGATIVE, None),
            "max_train": (1, 0, -1, 2.5, True, "10"),
            "max_test": (0, -1, 2.5, True, "10"),
            "seed": (*NOT_NEGATIVE, None),
            "dtype": DTYPES,
            "device": DEVICES,
        },
        words={"name": ""},
    ),
    Calls(
        "datasets.load",
        table,
        dict,
        {
            "cell": CELLS,
            "target": (None, "z", 3),
        },
        words={"cell": "'a'", "target": "target"},
        misspelt=False,
    ),
    Calls(
        "datasets.ood",
        ps.datasets.ood,
        lambda: {"name": "digits", "like": ps.datasets.load("digits")},
        {
            "name": (*THINGS, "wines", "digits", "wine"),
            "like": (*THINGS, torch.zeros(3)),
            "root": (None, 3),
            "download": FLAGS,
            "max_rows": (0, -1, 1.5, True, "3"),
            "seed": (*NOT_NEGATIVE, None),
        },
        words={"name": "", "max_rows": "max_rows"},
        quick=False,
    ),
)
