"""PyTorch's default device is for the user's own tensors: what the library makes is
where the inputs are, or on the CPU.

With "meta", which holds no numbers, as the default, whatever is made without a device
can't be read: this needs no GPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.canonical import sorting_permutation
from pyro_symmetric.groups import Axis, Group, Units

SHAPES = {"in": torch.Size([4, 3]), "bias": torch.Size([4]), "out": torch.Size([2, 4])}
AXES = {"in": ("k", None), "bias": ("k",), "out": (None, "k")}


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Another default device, which nothing can be read from."""
    with torch.device("meta"):
        yield


def weights(count: int, device: torch.device) -> dict[str, Tensor]:
    return {
        site: torch.randn(count, *shape, device=device)
        for site, shape in SHAPES.items()
    }


def posterior(count: int, device: torch.device) -> ps.Posterior:
    return ps.Posterior.from_samples(weights(count, device), kind="independent")


def mean(count: int, device: torch.device) -> dict[str, Tensor]:
    return {site: value.mean(0) for site, value in weights(count, device).items()}


SIGNED = Group.declare(AXES, SHAPES, moves={"k": {"permute", "flip"}})
EACH = torch.arange(4)[None]
SIDES = (Axis("in", 0, EACH, 1), Axis("bias", 0, EACH, 1), Axis("out", 1, EACH, -1))
SCALED = Group([Units("k", 4, SIDES, moves=frozenset({"permute", "scale"}))], SHAPES)
CALLS: dict[str, Callable[[torch.device], Any]] = {
    "declare": lambda d: Group.from_dict(SIGNED.to_dict()),
    "sample": lambda d: SCALED.sample((3,))(weights(3, d))["in"],
    "identity": lambda d: SIGNED.identity((3,))(weights(3, d))["in"],
    "enumerate": lambda d: SIGNED.enumerate()(mean(1, d))["in"],
    "canonicalize signs": lambda d: ps.canonicalize(weights(5, d), SIGNED)["in"],
    "canonicalize scales": lambda d: ps.canonicalize(weights(5, d), SCALED)["in"],
    "minimal_mass": lambda d: ps.minimal_mass(weights(5, d), SCALED).mass,
    "sorting_permutation": lambda d: sorting_permutation(weights(5, d), SIGNED)["k"],
    "align": lambda d: ps.align(weights(5, d), mean(1, d), SIGNED, cost="l2").cost,
    "align scales": lambda d: (
        ps.align(weights(5, d), mean(1, d), SCALED, cost="l2", restarts=2).cost
    ),
    "align_many": lambda d: ps.align_many(weights(4, d), SIGNED).displaced,
    "mmd": lambda d: ps.mmd(*ps.common_frame(weights(6, d), weights(6, d), SIGNED)),
    "mmd_test": lambda d: ps.mmd_test(
        posterior(8, d), posterior(8, d), num_permutations=99
    ),
    "marginal_wasserstein": lambda d: ps.marginal_wasserstein(
        weights(6, d), weights(6, d)
    ),
    "invariance_tests": lambda d: ps.invariance_tests(posterior(60, d), SIGNED),
    "classification": lambda d: ps.scores.classification(
        weights(7, d)["in"].softmax(-1), torch.tensor([0, 1, 2, 0], device=d)
    ),
    "detect": lambda d: ps.scores.detect(
        torch.rand(5, device=d), torch.rand(4, device=d)
    ),
}


STAY = {"sample", "identity", "enumerate", "canonicalize signs", "canonicalize scales"}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_where_the_inputs_are_whatever_the_default_device(
    elsewhere, device, name
):
    result = CALLS[name](device)
    if isinstance(result, Tensor):
        assert result.device.type in {"cpu", device.type}
    if name in STAY:
        assert result.device.type == device.type


def test_symmetries_are_found_and_verified_whatever_the_default_device(
    elsewhere, device
):
    net = nn.Sequential(
        nn.Linear(3, 4, device=device), nn.Tanh(), nn.Linear(4, 2, device=device)
    )
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(5, 3, device=device)
    symmetry = ps.find_symmetry(net, x)
    assert ps.verify(symmetry, net, x)
    assert symmetry.log_order() > 0
