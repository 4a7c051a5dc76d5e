"""Shared by all kernels: where their random numbers come from, what a state is made of, and what it takes to write one
more."""

import io
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
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
    sample,
)
from pyro_symmetric.mcmc.kernels.kernel import normal, uniform
from pyro_symmetric.models import BayesianModel

# random numbers -----------------------------------------------------------------------------------------------------

NETWORK = BayesianModel(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), likelihood="gaussian").double()
X, Y = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2), torch.linspace(-1, 2, 12, dtype=torch.float64)
MINI = {"batch_size": 5}
EVERY_KERNEL = [
    HMC(NETWORK, max_steps=4),
    HMC(NETWORK, num_steps=3, mass="dense"),
    NUTS(NETWORK, mass="dense", max_treedepth=3),
    AdaptiveHMC(NETWORK, max_steps=4),
    MCLMC(NETWORK, max_steps=4),
    SGLD(NETWORK, **MINI),
    pSGLD(NETWORK, **MINI),
    SGHMC(NETWORK, **MINI),
    SGHMC(NETWORK, step_size=10.0, **MINI),  # its chains explode and draw their momenta anew
]
WARMUP = 24  # long enough for one window of the mass matrix


class OnlyNamedGenerators(TorchDispatchMode):
    """Refuses every random number that comes from a global generator of PyTorch."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = any(isinstance(value, torch.Generator) for value in (*args, *(kwargs or {}).values()))
        if torch.Tag.nondeterministic_seeded in func.tags and not named:
            raise AssertionError(f"{func} was called without a generator")
        return func(*args, **(kwargs or {}))


def density_for(kernel: Kernel) -> Density:
    return Density(kernel.model, (X, Y), batch_size=kernel.batch_size, subsampled=kernel.subsampled)


def advance(kernel: Kernel, density: Density, state: State, begin: int, end: int) -> State:
    for iteration in range(begin, end):
        state = kernel.step(density, state)
        if iteration < WARMUP:
            state = kernel.adapt(density, state, iteration, WARMUP)
    return state


def start(kernel: Kernel, density: Density, seed: int) -> State:
    z = 0.1 * torch.arange(3 * density.dim, dtype=torch.float64).reshape(3, -1).sin()
    return kernel.init(density, z, WARMUP, torch.Generator(torch.empty(0).device).manual_seed(seed))


@pytest.mark.parametrize("kernel", EVERY_KERNEL, ids=repr)
def test_every_random_number_of_a_kernel_comes_from_its_states_generator(kernel):
    density, before = density_for(kernel), (torch.get_rng_state(), np.random.get_state()[1], random.getstate())  # noqa: NPY002
    with OnlyNamedGenerators():
        first = advance(kernel, density, start(kernel, density, 0), 0, WARMUP + 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert random.getstate() == before[2]
    torch.manual_seed(1)
    again, other = (advance(kernel, density, start(kernel, density, seed), 0, WARMUP + 3) for seed in (0, 1))
    assert torch.equal(again.z, first.z)
    assert torch.equal(again.momentum, first.momentum)
    assert not torch.equal(torch.cat([other.z, other.momentum]), torch.cat([first.z, first.momentum]))


# what a state is made of --------------------------------------------------------------------------------------------


def dataclasses_of(kernel: Kernel) -> list[type]:
    """Those that the modules of the kernels' room and the kernel's own define, apart from kernels."""
    names = {kind.__module__ for kind in type(kernel).__mro__}
    names |= {name for name in sys.modules if name.startswith("pyro_symmetric.mcmc.kernels.")}
    found = [value for name in names for value in vars(sys.modules[name]).values() if isinstance(value, type)]
    return [kind for kind in found if is_dataclass(kind) and kind.__module__ in names and not issubclass(kind, Kernel)]


def assert_same_bits(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()  # sums run through memory in this order
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        assert torch.equal(one.isnan(), other.isnan())
    elif is_dataclass(one):
        for field in fields(one):
            if field.name != "generator":
                assert_same_bits(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        for name in one:
            assert_same_bits(one[name], other[name])
    else:
        assert one == other


@pytest.mark.parametrize("at", [3, WARMUP, WARMUP + 1])
@pytest.mark.parametrize("kernel", EVERY_KERNEL, ids=repr)
def test_a_state_that_was_saved_goes_on_to_the_last_bit_as_if_it_had_not_been(kernel, at):
    density, file = density_for(kernel), io.BytesIO()
    state = advance(kernel, density, start(kernel, density, 0), 0, at)
    torch.save((replace(state, generator=None), state.generator.get_state()), file)
    on = advance(kernel, density, state, at, WARMUP + 4)
    file.seek(0)
    with torch.serialization.safe_globals(dataclasses_of(kernel)):
        saved, numbers = torch.load(file, weights_only=True)
    generator = torch.Generator(torch.empty(0).device)
    generator.set_state(numbers)
    again = advance(kernel, density, replace(saved, generator=generator), at, WARMUP + 4)
    assert_same_bits(again, on)
    assert torch.equal(again.generator.get_state(), on.generator.get_state())


# one more kernel ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class RandomWalk(Kernel):
    """Random-walk Metropolis (Metropolis et al. 1953)."""

    model: Callable[..., Any]
    step_size: float = 1.0

    def init(self, density: Density, z: torch.Tensor, num_warmup: int, generator: torch.Generator) -> State:
        nothing = torch.zeros_like(z)
        return State(z, nothing, density.energy(z), nothing, None, generator)

    def step(self, density: Density, state: State) -> State:
        z = state.z + self.step_size * normal(state.z, state.generator)
        energy = density.energy(z)
        accept = uniform(energy, state.generator) < (state.energy - energy).exp()
        z, energy = torch.where(accept[:, None], z, state.z), torch.where(accept, energy, state.energy)
        return replace(state, z=z, energy=energy, statistics={"lp": -energy, "acceptance_rate": accept.to(z.dtype)})


@pytest.mark.stochastic
def test_a_kernel_of_twenty_lines_is_sampled_like_any_other():
    def model() -> None:
        pyro.sample("x", dist.Gamma(3.0, 2.0))

    posterior = sample(RandomWalk(model), num_chains=400, num_warmup=50, num_samples=10, thinning=10, progress=False)
    assert 0.2 < posterior.statistics["acceptance_rate"].mean() < 0.9
    # 400 independent chains: Kolmogorov-Smirnov of their last draws at 1e-4.
    assert stats.kstest(posterior.samples["x"][:, -1].numpy(), stats.gamma(3, scale=0.5).cdf).pvalue > 1e-4
    assert posterior.metadata["settings"] == {"step_size": 1.0}
