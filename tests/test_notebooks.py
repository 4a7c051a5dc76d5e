"""Results in a notebook: small tables, which say what the text says."""

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.compare import DistanceResult

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
X = torch.randn(20, 2)
Y = torch.arange(20) % 2
SYMMETRY = ps.find_symmetry(NET, X)
MODEL = ps.BayesianModel(NET)


def weights(*batch: int) -> dict[str, torch.Tensor]:
    return {s: torch.randn(*batch, *v) for s, v in SYMMETRY.site_shapes.items()}


@functools.cache
def results() -> dict[str, Any]:
    chains = ps.Posterior(weights(2, 20), kind="chains")
    guide = ps.AutoSymmetrized(MODEL, SYMMETRY).setup(X, Y)
    return {
        "posterior": chains,
        "summary": ps.summary(chains, None),
        "symmetry": SYMMETRY,
        "diagnosis": ps.diagnose(chains, SYMMETRY),
        "alignment": ps.align(weights(), weights(), SYMMETRY),
        "evidence": ps.evidence(guide, X, Y, num_samples=8),
        "distance": ps.mmd(weights(10), weights(10)),
        "test": ps.invariance_tests(weights(40), SYMMETRY),
    }


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "posterior": ["2 chains of 20 draws", "<td>0.weight</td><td>(3, 2)</td>"],
        "summary": ["<th>0.bias[1]</th>", "2 chains of 20 draws"],
        "symmetry": ["3 units that permute", "<td>permute, flip</td>"],
        "diagnosis": ["<td>modulo symmetry</td>", "<td>finite</td>"],
        "alignment": ["<th>source</th><th>aligned</th>", "<td>cost</td>"],
        "evidence": ["<td>symmetrised ELBO</td>", "importance sampling: "],
        "distance": ["MMD", "<td>0</td>", "<td>2</td>"],
        "test": ["Invariance: ", "<th>size</th>", "<td>0</td>"],
    }.items(),
)
def test_a_notebook_shows_small_tables(name: str, words: list[str]) -> None:
    shown = results()[name]._repr_html_()
    assert all(word in shown for word in words), shown
    assert "<img" not in shown
    for tag in ("table", "tr", "td", "th", "b", "div"):
        opened = len(re.findall(rf"<{tag}[ >]", shown))
        assert opened == shown.count(f"</{tag}>")


def test_text_in_tables_is_escaped() -> None:
    parts = {"<a & b>": {"size": 2}}
    shown = DistanceResult("d", (2, 3), {"x": 1.0}, parts)._repr_html_()
    assert "<td>&lt;a &amp; b&gt;</td><td>2</td>" in shown
