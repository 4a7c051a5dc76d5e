"""Symmetries of networks that people use don't change from one version to the next, unless it is meant to.

``zoo.json`` holds the log-order of the permutations, and how many scales and signs there are; it was made by what this
test runs. A number that is larger than there is a gain, and written there anew.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.zoo import Case, images, plain
from pyro_symmetric.discovery.find import find_symmetry

FROZEN: dict[str, list[float]] = json.loads((Path(__file__).parent / "zoo.json").read_text())
QUICK = ("OptuNet", "UNet", "TransformerEncoder", "bidirectional LSTM", "MLP GroupNorm", "GRUCell", "siamese Bilinear")


def marked(library: str, case: Case) -> object:
    quick = library == "torch" and case.name in QUICK
    return pytest.param(case, id=f"{library}: {case.name}", marks=[] if quick else pytest.mark.slow)


CASES = [marked("torch", case) for case in plain.plain()] + [
    marked("torchvision", case) for case in images.torchvision() if f"torchvision: {case.name}" in FROZEN
]


@pytest.mark.parametrize("case", CASES)
def test_a_network_of_the_zoo_has_the_symmetries_that_were_found_before(
    case: Case, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    net, inputs = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = find_symmetry(net.eval(), *inputs, verify=False).group
    scales, signs = (sum(group[name].count for name in group.names(move)) for move in ("scale", "flip"))
    log_order, *multipliers = FROZEN[request.node.callspec.id]
    assert group.permutations.log_order() == pytest.approx(log_order, abs=0.01)
    assert [scales, signs] == multipliers
