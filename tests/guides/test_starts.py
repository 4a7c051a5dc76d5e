"""The starts of guides: what the group moves off its fixed point, other sites at suitable scales, the best of a few."""

import functools
import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.distributions import InfoNCE
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import AutoModes, AutoSymmetrized
from pyro_symmetric.likelihoods import GaussianLikelihood
from pyro_symmetric.models import BayesianModel

GROUP = Group.declare({"locs": ("k",)}, {"locs": torch.Size([3])})
DATA = torch.linspace(-1, 1, 40)


def mixture(data: Tensor) -> None:
    """A scale of noise over twelve orders of magnitude, and components that may be relabelled."""
    noise = pyro.sample("noise", dist.LogNormal(0.0, 4.0))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", len(data)):
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), dist.Normal(locs, noise)), obs=data)


def log_density(weights: dict[str, Tensor]) -> float:
    """The mixture's joint density of ``log noise`` and ``locs``, written out."""
    noise, locs = weights["noise"], weights["locs"]
    prior = dist.Normal(0.0, 4.0).log_prob(noise.log()) + dist.Normal(0.0, 1.0).log_prob(locs).sum()
    rows = dist.Normal(locs, noise).log_prob(DATA[:, None]).logsumexp(-1) - math.log(3)
    return float(prior + rows.sum())


def first_loc(guide: Any) -> Tensor:
    """The means of a symmetrised guide's base, or of its first mode."""
    base = guide.base.modes[0] if isinstance(guide.base, AutoModes) else guide.base
    return base.loc.detach().clone()


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))


@functools.cache
def symmetry_of_perceptron() -> Any:
    """Once for all tests: tracing takes longer than most of them."""
    with torch.random.fork_rng():
        return find_symmetry(perceptron(), torch.zeros(2, 2))


def regression(prior_scale: float = 1.0) -> tuple[BayesianModel, Any, Tensor, Tensor]:
    model = BayesianModel(perceptron(), likelihood=GaussianLikelihood(prior_scale=prior_scale))
    x = torch.randn(30, 2)
    return model, symmetry_of_perceptron(), x, x.sum(-1)


@pytest.mark.stochastic
@pytest.mark.parametrize("base", [{}, {"base": AutoModes, "num_modes": 1}])
def test_a_scale_of_noise_starts_near_its_prior_s_median_and_exchanged_sites_apart(base: dict[str, Any]) -> None:
    """The deviation of a median of 15 draws is 0.32 of the prior's: of 40, none beyond 5 of these; false alarms 2e-5.
    Of as many draws, some would be (all within 1.6 deviations with probability 0.01)."""
    starts = []
    for _ in range(40):
        guide = AutoSymmetrized(mixture, GROUP, estimator=InfoNCE(1), num_starts=1, **base).setup(DATA)
        starts.append(guide.unpack(first_loc(guide)))
    noise = torch.stack([start["noise"] for start in starts])
    locs = torch.stack([start["locs"] for start in starts])
    assert float(noise.log().abs().max()) < 5 * 0.32 * 4
    assert float(locs.std()) == pytest.approx(1.0, abs=0.35)  # draws, not medians, of deviation 0.32
    assert float((locs[:, :, None] - locs[:, None]).abs().flatten(1).median(1).values.min()) > 0


def test_the_best_of_the_starts_is_kept_and_their_densities_are_told() -> None:
    for seed in range(10):
        pyro.set_rng_seed(seed)
        guide = AutoSymmetrized(mixture, GROUP, estimator=InfoNCE(1), num_starts=5).setup(DATA)
        assert len(guide.starts) == 5
        start = guide.unpack(first_loc(guide))
        assert log_density(start) == pytest.approx(max(guide.starts), rel=1e-4)
        assert f"starts=5 of log-density {min(guide.starts):.1f} to {max(guide.starts):.1f}" in repr(guide)


def test_modes_keep_the_best_of_their_starts_each() -> None:
    guide = AutoModes(mixture, 3, num_starts=4).setup(DATA)
    assert len(guide.starts) == 12
    for mode in range(3):
        start = guide.unpack(guide.modes[mode].loc.detach())
        assert log_density(start) == pytest.approx(max(guide.starts[4 * mode : 4 * mode + 4]), rel=1e-4)


@pytest.mark.parametrize("base", [{}, {"base": AutoModes, "num_modes": 2}])
def test_a_network_starts_at_its_own_values_whatever_is_compared(base: dict[str, Any]) -> None:
    model, symmetry, x, y = regression(prior_scale=10.0)
    guide = AutoSymmetrized(model, symmetry, estimator=InfoNCE(1), **base).setup(x, y)
    first = guide.unpack(first_loc(guide))
    for name, value in model.initial_weights().items():
        torch.testing.assert_close(first[name], value)
    assert max(guide.starts) > min(guide.starts)  # the scale of noise differs


def test_where_a_network_has_all_values_nothing_is_compared() -> None:
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(30, 2)
    symmetry, y = find_symmetry(net.eval(), x), torch.randint(3, (30,))
    states = []
    for num_starts in (1, 4):
        pyro.set_rng_seed(2)
        guide = AutoSymmetrized(BayesianModel(net), symmetry, estimator=InfoNCE(1), num_starts=num_starts).setup(x, y)
        states.append(torch.get_rng_state())
        assert guide.starts == ()
    assert torch.equal(*states)


def test_comparing_starts_leaves_the_parameter_store_alone_and_is_repeatable() -> None:
    model, symmetry, x, y = regression()
    pyro.param("mine", torch.ones(2))
    found = []
    for _ in range(2):
        pyro.set_rng_seed(3)
        guide = AutoSymmetrized(model, symmetry, estimator=InfoNCE(1)).setup(x, y)
        found.append(first_loc(guide))
    assert list(pyro.get_param_store().keys()) == ["mine"]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    lazily = AutoSymmetrized(model, symmetry, estimator=InfoNCE(1))
    svi = SVI(model, lazily, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    assert math.isfinite(svi.step(x, y))
    assert len(lazily.starts) == 4


def test_a_given_start_is_taken_as_it_is() -> None:
    model, symmetry, x, y = regression()
    given = {name: torch.full(shape, 0.3) for name, shape in model.site_shapes.items()}
    for base in ({}, {"base": AutoModes, "num_modes": 2}):
        guide = AutoSymmetrized(model, symmetry, init_loc_fn=lambda site: given[site["name"]], **base).setup(x, y)
        assert guide.starts == ()
        torch.testing.assert_close(guide.unpack(first_loc(guide)), given)


def test_sites_to_move_that_the_model_lacks_are_refused() -> None:
    guide = AutoModes(mixture, exchanged=["lcos"])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"exchanged holds the sites \['lcos'\], which the model lacks"):
            guide.setup(DATA)


def test_one_quantile_is_as_a_list_of_one() -> None:
    guide = AutoSymmetrized(mixture, GROUP).setup(DATA)
    torch.testing.assert_close(guide.quantiles(0.3), guide.quantiles([0.3]))


@pytest.mark.parametrize("num_starts", [0, True, 2.5])
def test_a_number_of_starts_that_is_none_is_named(num_starts: Any) -> None:
    model, symmetry, _, _ = regression()
    for make in (
        lambda: AutoSymmetrized(model, symmetry, num_starts=num_starts),
        lambda: AutoModes(model, num_starts=num_starts),
    ):
        with pytest.raises((TypeError, ValueError), match="num_starts is"):
            make()
