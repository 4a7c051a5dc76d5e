"""The closest equivalent of given weights is the closest that enumeration finds, and
within the theorem's bound.
"""

import pytest
import torch

from pyro_symmetric.alignment.nearest import nearest_copy
from pyro_symmetric.groups import Group

SHAPES = {"in": torch.Size((4, 3)), "bias": torch.Size((4,)), "out": torch.Size((2, 4))}
AXES = {"in": ("h", None), "bias": ("h",), "out": (None, "h")}


@pytest.mark.parametrize("moves", [("permute",), ("permute", "flip"), ("flip",)])
@pytest.mark.parametrize("even", [(), ("bias",)])
def test_the_nearest_copy_is_the_enumerated_one(moves, even):
    group = Group.declare(AXES, SHAPES, moves, even)
    for _ in range(10):
        weights = {
            site: torch.randn(shape, dtype=torch.float64)
            for site, shape in SHAPES.items()
        }
        moved = group.enumerate()(weights)
        distances = sum(
            (moved[s] - weights[s]).square().flatten(1).sum(1) for s in weights
        ).sqrt()
        found = nearest_copy(weights, group)
        assert found.distance == pytest.approx(float(distances[1:].min()), rel=1e-12)
        own = found.element(weights)
        assert sum(
            float((own[s] - weights[s]).square().sum()) for s in own
        ) == pytest.approx(found.distance**2)
        assert found.distance <= found.bound
