"""``import pyro_symmetric`` loads nothing that takes long and few calls need."""

import json
import subprocess
import sys

import pyro_symmetric as ps

SLOW = {
    "arviz_base",
    "arviz_stats",
    "matplotlib",
    "pandas",
    "scipy.stats",
    "sklearn",
    "sympy",
    "torchvision",
    "xarray",
}
PROGRAM = """
import json, sys
import pyro
before = set(sys.modules)
import pyro_symmetric
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_the_package_loads_no_tables_no_figures_and_no_arviz():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    loaded = set(json.loads(done.stdout))
    assert "pyro_symmetric" in loaded
    assert not loaded & SLOW


def test_completion_shows_what_is_public() -> None:
    shown = dir(ps)
    assert {"sample", "AutoSymmetrized", "guides", "mcmc"} <= set(shown)
    assert not {"arguments", "traced", "annotations"} & set(shown)
    assert all(hasattr(ps, name) for name in shown)
