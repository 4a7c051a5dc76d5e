"""Results that judge are true if they pass, and false if they don't, all of them."""

import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.alignment import Alignment, Frame
from pyro_symmetric.posterior.diagnostics import Check

GROUP = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
LAYERS = ps.Group.declare(
    {"in": ("a", None), "mid": ("b", "a"), "out": (None, "b")},
    {"in": torch.zeros(9, 2), "mid": torch.zeros(9, 9), "out": torch.zeros(1, 9)},
)


def draws(*shape, apart=0.0):
    """Chains of independent draws, each some deviations from the last."""
    torch.manual_seed(0)
    return torch.randn(4, 200, *shape) + apart * torch.arange(4.0).reshape(4, 1, 1)


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = LAYERS.site_shapes.items()
    return {site: torch.randn(shape, generator=generator) for site, shape in shapes}


def verified(*sites):
    """A parameter: whether a network's outputs stay if units are permuted in these sites alone."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    axes = {"0.weight": ("h", None), "0.bias": ("h",), "2.weight": (None, "h")}
    group = ps.Group.declare({s: axes[s] for s in sites}, dict(net.named_parameters()))
    return ps.verify(ps.Symmetry(group), net, torch.randn(5, 2))


def shifted(shift):
    generator = torch.Generator().manual_seed(1)
    sides = [torch.randn(200, 3, generator=generator) for _ in range(2)]
    return ps.mmd_test({"w": sides[0]}, {"w": sides[1] + shift}, level=0.01)


def invariance(shift):
    samples = torch.randn(400, 3, generator=torch.Generator().manual_seed(2))
    samples[:, 0] += shift
    return ps.invariance_tests({"w": samples}, GROUP, level=1e-3)


def frame(converged, ends):
    return Frame(*[None] * 4, converged, "l2", ends)


# a result that judges -> one that passes, and some that don't
VERDICTS = {
    "mmd_test": (lambda: shifted(0.0), lambda: shifted(2.0)),
    "invariance_tests": (lambda: invariance(0.0), lambda: invariance(2.0)),
    "diagnose": (
        lambda: ps.diagnose({"w": draws(3)}),
        lambda: ps.diagnose({"w": draws(3, apart=2.0)}),
        lambda: ps.diagnose({"w": torch.full((4, 200, 3), torch.nan)}),
        lambda: ps.diagnose({"w": torch.randn(2, 3, 1)}),  # too few to tell
    ),
    "a check": (
        lambda: Check("R-hat", "pass", ""),
        lambda: Check("R-hat", "fail", ""),
        lambda: Check("R-hat", "unknown", ""),
    ),
    "a check that warns": (
        lambda: Check("R-hat", "warn", ""),
        lambda: ps.diagnose({"w": draws(3, apart=2.0)})["weights"],
    ),
    "verify": (
        lambda: verified("0.weight", "0.bias", "2.weight"),
        lambda: verified("0.weight", "0.bias"),
    ),
    "align": (
        lambda: ps.align(weights(0), weights(0), LAYERS),
        lambda: ps.align(weights(0), weights(1), LAYERS, restarts=0),
    ),
    "some of several alignments": (
        lambda: Alignment(None, None, None, torch.tensor([True, True]), ()),
        lambda: Alignment(None, None, None, torch.tensor([True, False]), ()),
    ),
    "align_many": (
        lambda: ps.align_many([weights(0), weights(0)], LAYERS, progress=False),
        lambda: frame(False, (1.0, 1.0)),
        lambda: frame(True, (1.0, 2.0)),
    ),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", VERDICTS)
def test_a_result_that_judges_is_true_if_and_only_if_it_passes(name):
    passing, *failing = VERDICTS[name]
    assert bool(passing())
    for result in failing:
        assert not bool(result())
