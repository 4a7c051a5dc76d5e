"""Every random number of a kernel comes from its state's generator."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.mcmc import (
    HMC,
    MCLMC,
    NUTS,
    SGHMC,
    SGLD,
    AdaptiveHMC,
    Density,
    Kernel,
    State,
    pSGLD,
)
from pyro_symmetric.models import BayesianModel

NETWORK = BayesianModel(
    nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), likelihood="gaussian"
).double()
X, Y = (
    torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2),
    torch.linspace(-1, 2, 12, dtype=torch.float64),
)
MINI = {"batch_size": 5}
EVERY_KERNEL = [
    HMC(NETWORK, max_steps=4),
    HMC(NETWORK, num_steps=3, full_mass=True),
    NUTS(NETWORK, full_mass=True, max_tree_depth=3),
    AdaptiveHMC(NETWORK, max_steps=4),
    MCLMC(NETWORK, max_steps=4),
    SGLD(NETWORK, **MINI),
    pSGLD(NETWORK, **MINI),
    SGHMC(NETWORK, **MINI),
    # its chains explode and draw their momenta anew
    SGHMC(NETWORK, step_size=10.0, **MINI),
]
WARMUP = 24  # long enough for one window of the mass matrix


class OnlyNamedGenerators(TorchDispatchMode):
    """Refuses every random number that comes from a global generator of PyTorch."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = any(
            isinstance(value, torch.Generator)
            for value in (*args, *(kwargs or {}).values())
        )
        if torch.Tag.nondeterministic_seeded in func.tags and not named:
            raise AssertionError(f"{func} was called without a generator")
        return func(*args, **(kwargs or {}))


def density_for(kernel: Kernel) -> Density:
    return Density(
        kernel.model, (X, Y), batch_size=kernel.batch_size, subsampled=kernel.subsampled
    )


def advance(
    kernel: Kernel, density: Density, state: State, begin: int, end: int
) -> State:
    for iteration in range(begin, end):
        state = kernel.step(density, state)
        if iteration < WARMUP:
            state = kernel.adapt(density, state, iteration, WARMUP)
    return state


def start(kernel: Kernel, density: Density, seed: int) -> State:
    z = 0.1 * torch.arange(3 * density.dim, dtype=torch.float64).reshape(3, -1).sin()
    return kernel.init(
        density, z, WARMUP, torch.Generator(torch.empty(0).device).manual_seed(seed)
    )


@pytest.mark.parametrize("kernel", EVERY_KERNEL, ids=repr)
def test_every_random_number_of_a_kernel_comes_from_its_states_generator(kernel):
    density, before = (
        density_for(kernel),
        (torch.get_rng_state(), np.random.get_state()[1], random.getstate()),
    )
    with OnlyNamedGenerators():
        first = advance(kernel, density, start(kernel, density, 0), 0, WARMUP + 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]
    torch.manual_seed(1)
    again, other = (
        advance(kernel, density, start(kernel, density, seed), 0, WARMUP + 3)
        for seed in (0, 1)
    )
    assert torch.equal(again.z, first.z)
    assert torch.equal(again.momentum, first.momentum)
    assert not torch.equal(
        torch.cat([other.z, other.momentum]), torch.cat([first.z, first.momentum])
    )
