"""The README's and the how-to pages' code, as a user's type checker sees it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent
PAGES = (
    TREE / "README.md",
    TREE / "docs" / "index.md",
    *sorted((TREE / "docs" / "how-to").glob("*.md")),
)
OTHERS = "pyro.*,pandas.*,scipy.*,sklearn.*,arviz_plots.*,matplotlib.*,xarray.*,distributed.*,torchvision.*"
CONFIG = f"[mypy]\ncheck_untyped_defs = true\n[mypy-{OTHERS}]\nignore_missing_imports = true\nfollow_imports = skip\n"
RETURNS = """
from typing import assert_type
import torch
from torch import Tensor, nn
import pyro_symmetric as ps

def check(net: nn.Module, posterior: ps.Posterior, symmetry: ps.Symmetry, weights: dict[str, Tensor]) -> None:
    assert_type(ps.canonicalize(weights, symmetry), dict[str, Tensor])
    assert_type(ps.canonicalize(net, symmetry), nn.Module)
    assert_type(symmetry.act(symmetry.sample(), net), nn.Module)
    assert_type(ps.sample(ps.NUTS(ps.BayesianModel(net)), torch.zeros(2)), ps.Posterior)
    assert_type(posterior.get_samples(), dict[str, Tensor])
"""


@pytest.mark.slow
def test_a_users_type_checker_finds_nothing_in_the_pages_code(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for page in PAGES:
        if blocks := re.findall(
            r"^```python\n(.*?)^```",
            page.read_text(encoding="utf-8"),
            re.DOTALL | re.MULTILINE,
        ):
            (tmp_path / f"page_{page.stem.replace('-', '_')}.py").write_text(
                "\n".join(blocks), encoding="utf-8"
            )
    (tmp_path / "returns.py").write_text(RETURNS)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "mypy",
        *sorted(path.name for path in tmp_path.glob("*.py")),
    ]
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "MYPYPATH": str(TREE)},
        "timeout": 300,
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
