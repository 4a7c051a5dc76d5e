"""NUTS: against a naive reference with the same random numbers, and in its batches. Its
law is in ``test_laws``.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from pyro_symmetric.density.compiled import Compiled
from pyro_symmetric.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import tuned
from pyro_symmetric.mcmc.kernels.kernel import (
    DenseMass,
    Mass,
    PhasePoint,
    leapfrog,
    normal,
)
from pyro_symmetric.mcmc.kernels.nuts import NUTS
from pyro_symmetric.models import BayesianModel, GaussianLikelihood

from .conftest import GaussianPotential, ToyPotential


class AsTheyAre(Compiled):
    """Programs that aren't compiled: batches of all chains, those that have finished
    masked.
    """

    most_chains = 10**9

    def __init__(self, density):
        self.density = density
        density.without_compiling = density.energy_and_gradient

    def run(self, function, *inputs):
        return function(self.density.energy_and_gradient, *inputs)


WAYS = ("batches", "masked", "loops")


def computed(density, way: str):
    """Have leaves computed by tensor operations on the unfinished chains or on all, or
    by loops over chains.
    """
    if way == "masked":
        density.fast = AsTheyAre(density)
    if way == "loops":
        density.engine = "layers"
    return density


# the reference ------------------------------------------------------------------------


def turns(mass: Mass, momenta: list[Tensor]) -> bool:
    """Stan's criterion for a tree of these momenta in order, without what is inside of
    its halves.
    """

    def turning(part: list[Tensor]) -> bool:
        velocity = mass.velocity(torch.stack(part).sum(0))
        return bool((part[0] @ velocity <= 0) | (part[-1] @ velocity <= 0))

    half = len(momenta) // 2
    return (
        turning(momenta) or turning(momenta[: half + 1]) or turning(momenta[half - 1 :])
    )


def any_subtree_turns(mass: Mass, momenta: list[Tensor]) -> bool:
    if len(momenta) == 1:
        return False
    half = len(momenta) // 2
    parts = (momenta[:half], momenta[half:])
    return turns(mass, momenta) or any(any_subtree_turns(mass, part) for part in parts)


def reference(
    density,
    z: Tensor,
    mass: Mass,
    step: Tensor,
    max_depth: int,
    generator: torch.Generator,
) -> dict[str, object]:
    """One transition of one chain, plainly: a list of states, whose subtrees are
    searched anew by recursion.

    It takes random numbers as the kernel does: momentum, then for each doubling the
    direction, one for each leaf, and whether to take the doubling's state.
    """

    def chance() -> float:
        return torch.empty(1, dtype=torch.double).uniform_(generator=generator).item()

    first = PhasePoint(
        z[None],
        mass.momentum(normal(z[None], generator)),
        *density.energy_and_gradient(z[None]),
    )
    start = first.energy + mass.kinetic(first.momentum)
    states = [first]
    chosen, log_weight, depth, steps, accepted = (z, start.item()), 0.0, 0, 0, 0.0
    diverging = False
    while depth < max_depth:
        forward = chance() < 0.5
        new: list[PhasePoint] = []
        weights: list[float] = []
        candidate = chosen
        for _ in range(2**depth):
            taken = chance()
            origin = new[-1] if new else (states[-1] if forward else states[0])
            end = leapfrog(
                density.energy_and_gradient, origin, step if forward else -step, mass
            )
            total = end.energy + mass.kinetic(end.momentum)
            error = (total - start).item()
            steps, accepted = steps + 1, accepted + min(1.0, math.exp(-error))
            new.append(end)
            weights.append(-error)
            share = math.exp(
                -error - torch.tensor(weights).double().logsumexp(0).item()
            )
            if taken < share:
                candidate = (end.z[0], total.item())
            diverging = error > 1000
            # all aligned subtrees that are complete by now
            momenta = [s.momentum[0] for s in new]
            complete = [2**k for k in range(1, depth + 1) if len(new) % 2**k == 0]
            turning = any(any_subtree_turns(mass, momenta[-size:]) for size in complete)
            if diverging or turning:
                break
        if diverging or turning:
            break
        depth += 1
        branch = torch.tensor(weights).double().logsumexp(0).item()
        if chance() < math.exp(min(0.0, branch - log_weight)):
            chosen = candidate
        log_weight = float(
            torch.logaddexp(
                torch.tensor(log_weight).double(), torch.tensor(branch).double()
            )
        )
        states = states + new if forward else new[::-1] + states
        if turns(mass, [s.momentum[0] for s in states]):
            break
    return {
        "z": chosen[0],
        "energy": chosen[1],
        "tree_depth": depth,
        "n_steps": steps,
        "acceptance_rate": accepted / steps,
        "diverging": diverging,
    }


@pytest.mark.parametrize("step", [0.05, 0.4])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_one_chain_does_exactly_what_a_naive_search_of_all_subtrees_does(
    banana, step, rotated, way
):
    variance = torch.tensor([1.0, 2.0], dtype=torch.float64)
    correlation = torch.tensor([[1.0, 0.4], [0.4, 1.0]], dtype=torch.float64)
    mass = of_chains = DenseMass.of(variance, correlation)
    if way == "loops":  # which know no dense one
        mass, of_chains = Mass(variance), Mass(variance[None])
    density = (
        GaussianPotential(torch.tensor([0.3, 4.0], dtype=torch.float64))
        if rotated
        else banana
    )
    density = computed(density, way)
    kernel = NUTS(None, step_size=step, max_tree_depth=7)
    depths = set()
    for seed in range(10):
        generator = torch.Generator(torch.empty(0).device).manual_seed(seed)
        z = torch.randn(1, 2, dtype=torch.float64, generator=generator)
        state = tuned(kernel.init(density, z, 0, generator), mass=of_chains)
        generator.manual_seed(1000 + seed)
        found = kernel.step(density, state)
        generator.manual_seed(1000 + seed)
        expected = reference(
            density, z[0], mass, torch.tensor(step, dtype=torch.float64), 7, generator
        )
        assert torch.allclose(found.z[0], expected["z"], atol=1e-9)
        for name in ("energy", "tree_depth", "n_steps", "acceptance_rate", "diverging"):
            assert found.statistics[name].item() == pytest.approx(
                expected[name], abs=1e-8
            ), name
        depths.add(expected["tree_depth"])
    assert len(depths) >= 2  # short and long trajectories were compared


# batches ------------------------------------------------------------------------------


class Still(Mass):
    """Coordinates of deviation 0 don't move."""

    def momentum(self, noise):
        return torch.where(self.deviation > 0, noise / self.deviation, 0.0)


@pytest.mark.parametrize("way", WAYS)
def test_chains_keep_their_places_while_others_finish(generator, way):
    # The first coordinate names the chain: nothing pulls at it and it has no momentum.
    # The scales of the others differ from chain to chain, so that trajectories have
    # many lengths.
    def energy(state: Tensor) -> Tensor:
        return 0.5 * (state[:, 1:] / (1 + state[:, :1])).square().sum(-1)

    density = computed(ToyPotential(energy), way)
    names = torch.arange(20, dtype=torch.float64)
    z = torch.cat(
        [
            names[:, None],
            torch.randn(20, 3, dtype=torch.float64) * (1 + names[:, None]),
        ],
        -1,
    )
    kernel = NUTS(None, step_size=0.3)
    deviation = torch.rand(20, 4, dtype=torch.float64) + 0.5  # of each chain
    deviation[:, 0] = 0.0
    state = tuned(kernel.init(density, z, 0, generator), mass=Still(deviation.square()))
    for _ in range(5):
        before, density.batches = state, []
        state = kernel.step(density, state)
        assert torch.equal(state.z[:, 0], names)
        fresh, gradient = energy(state.z), density.energy_and_gradient(state.z)[1]
        assert torch.allclose(state.energy, fresh)
        assert torch.allclose(state.gradient, gradient)
        assert torch.allclose(state.statistics["lp"], -fresh)
        assert (state.z != before.z).any(-1).float().mean() > 0.9
        steps = state.statistics["n_steps"]
        assert steps.unique().numel() > 3
        if way == "masked":
            assert set(density.batches) == {20}
            continue
        # Batches shrink as chains finish, and no chain is in them for more than one
        # step too long.
        batches = density.batches[:-1]
        assert batches == sorted(batches, reverse=True)
        assert steps.sum() <= sum(batches) <= steps.sum() + 20


def test_a_chain_that_leaves_the_support_is_evaluated_there_in_one_doubling_only(
    generator,
):
    outside = torch.zeros(30)

    def energy(z):
        outside.add_(z.detach()[:, 0] > 1)
        return torch.where(
            z[:, 0] > 1, torch.inf, 0.5 * z[:, 0] ** 2 + 0.01 * z[:, 1] ** 2
        )

    density = computed(ToyPotential(energy), "masked")  # batches of all chains
    kernel = NUTS(None, step_size=0.2, max_tree_depth=10**12)
    state = kernel.init(
        density,
        -torch.rand(30, 2, dtype=torch.float64, generator=generator),
        0,
        generator,
    )
    outside.zero_()
    statistics = kernel.step(density, state).statistics
    assert 3 < statistics["diverging"].sum() < 30
    assert (outside <= 2 ** statistics["tree_depth"] * statistics["diverging"]).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_trajectory_ends_at_the_largest_depth_and_says_so(way, generator):
    density = GaussianPotential(torch.ones(3, dtype=torch.float64))
    density = computed(density, way)
    kernel = NUTS(None, step_size=1e-3, max_tree_depth=4)
    state = kernel.step(density, kernel.init(density, density.sample(6), 0, generator))
    assert (state.statistics["tree_depth"] == 4).all()
    assert (state.statistics["n_steps"] == 15).all()
    assert state.statistics["reached_max_treedepth"].all()
    assert (state.statistics["acceptance_rate"] > 0.999).all()


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loops_over_chains_move_them_as_tensor_operations_do(scale, dtype, generator):
    """Of a network, whose chains turn, diverge or go on. In single precision energies
    of 1e9 are rounded to 64, and few chains may turn at another state.
    """
    x = torch.randn(40, 2, dtype=dtype, generator=generator)
    y = scale * torch.randn(40, 1, dtype=dtype, generator=generator)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    model = BayesianModel(net, likelihood=GaussianLikelihood(1.0), num_data=40)
    density = Density(model, args=(x, y), engine="layers")
    tensors = Density(model, args=(x, y), engine="eager")
    z = torch.randn(30, density.dim, dtype=dtype, generator=generator)
    kernel = NUTS(model, step_size=1.0, max_tree_depth=5)
    step = torch.logspace(-4, 0, 30, dtype=dtype) / scale
    state = tuned(kernel.init(density, z, 0, generator), step_size=step)
    random_numbers = generator.get_state()
    moved = kernel.step(density, state)
    generator.set_state(random_numbers)
    expected = kernel.step(tensors, state)
    is_same = torch.isclose(moved.z, expected.z, rtol=1e-3, atol=1e-3).all(1)
    for name in ("tree_depth", "diverging", "n_steps", "acceptance_rate"):
        found, value = moved.statistics[name], expected.statistics[name]
        is_same &= torch.isclose(found, value, rtol=1e-3, atol=1e-3)
    assert is_same.sum() >= (30 if dtype == torch.float64 and scale == 1 else 24)
    assert torch.equal(generator.get_state(), moved.generator.get_state())
    assert len(moved.statistics["tree_depth"].unique()) >= 2
    assert (0 < moved.statistics["diverging"].sum() < 30) == (scale == 1.0)
