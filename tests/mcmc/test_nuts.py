"""NUTS: against a naive reference with the same random numbers, in its batches, and in its invariant distribution."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from pyro_symmetric.mcmc.density.compiled import Compiled
from pyro_symmetric.mcmc.kernels import nuts
from pyro_symmetric.mcmc.kernels.integrator import PhasePoint, leapfrog
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.mass import DenseMass, Mass
from pyro_symmetric.mcmc.kernels.nuts import NUTS


class AsTheyAre(Compiled):
    """Programs that aren't compiled: batches of all chains, those that have finished masked."""

    most_chains = 10**9

    def __init__(self, density):
        self.density = density
        density.without_compiling = density.energy_and_gradient

    def run(self, function, *inputs):
        return function(self.density.energy_and_gradient, *inputs)


def kernel_state_with(state: State, mass: Mass) -> State:
    return replace(state, tuning=replace(state.tuning, mass=mass))


# the reference ------------------------------------------------------------------------------------------------------


def turns(mass: Mass, momenta: list[Tensor]) -> bool:
    """Stan's criterion for a tree of these momenta in order, without what is inside of its halves."""

    def turning(part: list[Tensor]) -> bool:
        velocity = mass.velocity(torch.stack(part).sum(0))
        return bool((part[0] @ velocity <= 0) | (part[-1] @ velocity <= 0))

    half = len(momenta) // 2
    return turning(momenta) or turning(momenta[: half + 1]) or turning(momenta[half - 1 :])


def any_subtree_turns(mass: Mass, momenta: list[Tensor]) -> bool:
    if len(momenta) == 1:
        return False
    half = len(momenta) // 2
    parts = (momenta[:half], momenta[half:])
    return turns(mass, momenta) or any(any_subtree_turns(mass, part) for part in parts)


def reference(
    density, z: Tensor, mass: Mass, step: Tensor, max_depth: int, generator: torch.Generator
) -> dict[str, object]:
    """One transition of one chain, plainly: a list of states, whose subtrees are searched anew by recursion.

    It takes random numbers as the kernel does: momentum, then for each doubling the direction, one for each leaf, and
    whether to take the doubling's state.
    """

    def chance() -> float:
        return torch.empty(1, dtype=torch.double).uniform_(generator=generator).item()

    first = PhasePoint(z[None], mass.draw(z[None], generator), *density.energy_and_gradient(z[None]))
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
            end = leapfrog(density.energy_and_gradient, origin, step if forward else -step, mass)
            total = end.energy + mass.kinetic(end.momentum)
            error = (total - start).item()
            steps, accepted = steps + 1, accepted + min(1.0, math.exp(-error))
            new.append(end)
            weights.append(-error)
            share = math.exp(-error - torch.tensor(weights).double().logsumexp(0).item())
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
        log_weight = float(torch.logaddexp(torch.tensor(log_weight).double(), torch.tensor(branch).double()))
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
@pytest.mark.parametrize("masked", [False, True])
def test_one_chain_does_exactly_what_a_naive_search_of_all_subtrees_does(gaussian, banana, step, rotated, masked):
    covariance = torch.tensor([[1.0, 0.6], [0.6, 2.0]], dtype=torch.float64)
    mass = DenseMass.of(covariance)
    density = gaussian(torch.tensor([0.3, 4.0], dtype=torch.float64)) if rotated else banana
    if masked:
        density.fast = AsTheyAre(density)
    kernel = NUTS(None, step_size=step, max_treedepth=7)
    depths = set()
    for seed in range(25):
        generator = torch.Generator(torch.empty(0).device).manual_seed(seed)
        z = torch.randn(1, 2, dtype=torch.float64, generator=generator)
        state = kernel.init(density, z, 0, generator)
        state = kernel_state_with(state, mass)
        generator.manual_seed(1000 + seed)
        found = kernel.step(density, state)
        generator.manual_seed(1000 + seed)
        expected = reference(density, z[0], mass, torch.tensor(step, dtype=torch.float64), 7, generator)
        assert torch.allclose(found.z[0], expected["z"], atol=1e-9)
        for name in ("energy", "tree_depth", "n_steps", "acceptance_rate", "diverging"):
            assert found.statistics[name].item() == pytest.approx(expected[name], abs=1e-8), name
        depths.add(expected["tree_depth"])
    assert len(depths) >= 2  # short and long trajectories were compared


# batches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.cpu), True])  # a GPU leaves all in
def test_chains_keep_their_places_while_others_finish(toy, generator, masked):
    # The first coordinate names the chain: nothing pulls at it and it has no momentum. The scales of the others differ
    # from chain to chain, so that trajectories have many lengths.
    def energy(state: Tensor) -> Tensor:
        return 0.5 * (state[:, 1:] / (1 + state[:, :1])).square().sum(-1)

    class Frozen(DenseMass):
        def velocity(self, momentum: Tensor) -> Tensor:
            return torch.cat([torch.zeros_like(momentum[:, :1]), momentum[:, 1:]], -1)

        def momentum(self, noise: Tensor) -> Tensor:
            return self.velocity(noise)

    density = toy(energy)
    if masked:
        density.fast = AsTheyAre(density)
    names = torch.arange(20, dtype=torch.float64)
    z = torch.cat([names[:, None], torch.randn(20, 3, dtype=torch.float64) * (1 + names[:, None])], -1)
    kernel = NUTS(None, step_size=0.3)
    eye = torch.eye(4, dtype=torch.float64)
    state = kernel_state_with(kernel.init(density, z, 0, generator), Frozen(eye.diagonal(), eye, eye))
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
        assert state.statistics["occupancy"][0] < 0.9
        if masked:
            assert set(density.batches) == {20}
            continue
        # Batches shrink as chains finish, and no chain is in them for more than one step too long.
        batches = density.batches[:-1]
        assert batches == sorted(batches, reverse=True)
        assert steps.sum() <= sum(batches) <= steps.sum() + 20
        assert state.statistics["occupancy"][0].item() == pytest.approx(steps.sum() / len(batches) / 20)


def test_a_trajectory_ends_at_the_largest_depth_and_says_so(gaussian, generator):
    density = gaussian(torch.ones(3, dtype=torch.float64))
    kernel = NUTS(None, step_size=1e-3, max_treedepth=4)
    state = kernel.step(density, kernel.init(density, density.sample(6), 0, generator))
    assert (state.statistics["tree_depth"] == 4).all()
    assert (state.statistics["n_steps"] == 15).all()
    assert state.statistics["reached_max_treedepth"].all()
    assert (state.statistics["acceptance_rate"] > 0.999).all()
    assert (state.statistics["occupancy"] == 1).all()


def test_trajectories_end_after_about_half_a_turn(gaussian, generator):
    # In many dimensions a standard Gaussian's orbits are nearly circles: half a turn takes 31 steps of 0.1.
    density = gaussian(torch.ones(200, dtype=torch.float64))
    kernel = NUTS(None, step_size=0.1)
    state = kernel.step(density, kernel.init(density, density.sample(50), 0, generator))
    assert not state.statistics["reached_max_treedepth"].any()
    assert (state.statistics["n_steps"] >= 15).all()
    assert (state.statistics["n_steps"] <= 63).all()


def test_divergent_trajectories_are_counted_and_their_branch_is_not_used(gaussian, generator):
    density = gaussian(torch.full((1,), 1e-6, dtype=torch.float64), rotated=False)
    kernel = NUTS(None, step_size=0.5)
    state = kernel.init(density, torch.tensor([[0.0], [1e-3]], dtype=torch.float64), 0, generator)
    after = kernel.step(density, state)
    assert after.statistics["diverging"].all()
    assert torch.equal(after.z, state.z)
    assert (after.statistics["tree_depth"] == 0).all()


def test_energy_and_gradient_that_are_not_numbers_end_a_trajectory(toy, generator):
    density = toy(lambda z: (0.5 * z.square() - (1 - z.square()).log()).sum(-1))  # NaN outside of (-1, 1)
    kernel = NUTS(None, step_size=0.3)
    state = kernel.init(density, 0.5 * torch.rand(100, 2, dtype=torch.float64), 0, generator)
    for _ in range(20):
        state = kernel.step(density, state)
        assert torch.isfinite(state.z).all()
        assert (state.z.abs() < 1).all()
        assert torch.isfinite(state.gradient).all()


@pytest.mark.parametrize("patience", [2, 7, 50])
def test_trees_are_the_same_however_seldom_a_device_is_looked_at(gaussian, generator, monkeypatch, patience):
    density = gaussian(torch.logspace(-1, 1, 5, dtype=torch.float64))
    state = NUTS(None, step_size=0.1).init(density, density.sample(40), 0, generator)
    begun = generator.get_state()
    now = NUTS(None).step(density, state)
    density.batches.clear()
    monkeypatch.setattr(nuts, "AT_HAND", ())
    monkeypatch.setattr(nuts, "PATIENCE", patience)
    generator.set_state(begun)
    later = NUTS(None).step(density, state)
    assert max(density.batches) == 40
    assert torch.equal(now.statistics["n_steps"], later.statistics["n_steps"])
    torch.testing.assert_close(later.z, now.z)
    for name in now.statistics.keys() - {"occupancy"}:
        torch.testing.assert_close(later.statistics[name], now.statistics[name])


# the invariant distribution -----------------------------------------------------------------------------------------


@pytest.mark.stochastic
def test_chains_that_start_in_the_target_stay_in_it(gaussian, generator):
    # 20,000 exact draws, two transitions with a coarse step. Kolmogorov-Smirnov at 1e-4 for each of 3 coordinates and
    # for the energy: false alarms 4e-4.
    density = gaussian(torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64))
    kernel = NUTS(None, step_size=0.75, max_treedepth=5)
    state = kernel.init(density, density.sample(20_000), 0, generator)
    for _ in range(2):
        state = kernel.step(density, state)
    assert 0.5 < state.statistics["acceptance_rate"].mean() < 0.97
    x = density.standardise(state.z)
    for coordinate in range(3):
        assert stats.kstest(x[:, coordinate].numpy(), "norm").pvalue > 1e-4
    assert stats.kstest((2 * density(state.z)).numpy(), "chi2", args=(3,)).pvalue > 1e-4


@pytest.mark.stochastic
def test_draws_from_a_banana_match_its_moments(banana, drive):
    # Curvature grows like 16 x². The step of the usual target (0.4 deviations) is too long beyond |x| = 2: chains enter
    # and leave there once in hundreds of iterations (from 4,000 starts in the middle the mean of y² was 0.9 too small,
    # 0.5 after 200 draws). At 0.95 the step is half of that, and 100 iterations of warm-up reach the tails.
    start = torch.randn(400, 2, dtype=torch.float64)
    draws, statistics, _ = drive(NUTS(None, target_accept=0.95), banana, start, 100, 40)
    x, y = draws.unbind(-1)
    noise = (y - x.square()) / 0.5
    # E y = 1, cov(x, y) = 0; noise is normal and independent of x; y² has tails too heavy for a mean of 400 chains to
    # be normal, so it is cut off: E min(y², 9) by quadrature. Standard errors from the means of independent chains;
    # 5 of them: false alarms 1e-6 for each of 8.
    grid = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    mass = torch.outer((-0.5 * grid.square()).softmax(0), (-0.5 * grid.square()).softmax(0))
    cut_off = (mass * (grid[:, None].square() + 0.5 * grid).square().clamp(max=9)).sum().item()
    moments = ((x, 0.0), (x.square(), 1.0), (y, 1.0), (y.square().clamp(max=9), cut_off), (x * y.clamp(max=3), 0.0))
    whitened = ((noise, 0.0), (noise.square(), 1.0), (x * noise, 0.0))
    for values, truth in (*moments, *whitened):
        means = values.mean(1)
        assert abs(means.mean().item() - truth) < 5 * (means.std() / len(means) ** 0.5).item()
    assert 0.88 < statistics["acceptance_rate"].mean() < 0.99


@pytest.mark.stochastic
def test_chains_that_start_in_a_banana_stay_in_it_though_the_step_is_too_long_for_its_tails(banana, generator):
    # 20,000 exact draws; most of those beyond |x| = 2.5 don't move at once. Kolmogorov-Smirnov at 1e-4 for x and for
    # the noise, and means of differences within 5 standard errors: false alarms 2e-4.
    x, noise = torch.randn(2, 20_000, dtype=torch.float64)
    start = torch.stack([x, x.square() + 0.5 * noise], -1)
    kernel = NUTS(None, step_size=0.35)
    state = kernel.init(banana, start, 0, generator)
    for _ in range(3):
        state = kernel.step(banana, state)
    assert (state.z == start).all(-1)[x.abs() > 2.5].double().mean() > 0.3
    x1, y1 = state.z.unbind(-1)
    noise1 = (y1 - x1.square()) / 0.5
    assert stats.kstest(x1.numpy(), "norm").pvalue > 1e-4
    assert stats.kstest(noise1.numpy(), "norm").pvalue > 1e-4
    for change in (
        x1.square() - x.square(),
        y1 - start[:, 1],
        noise1.square() - noise.square(),
        x1 * noise1 - x * noise,
    ):
        assert abs(change.mean().item()) < 5 * (change.std() / len(change) ** 0.5).item()
