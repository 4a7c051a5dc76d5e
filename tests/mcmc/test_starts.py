"""The starts of chains: each kind of ``initial`` gives the points that it names."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal

from pyro_symmetric.guides import AutoGaussian
from pyro_symmetric.mcmc import HMC, Density, sample
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.posterior.posterior import Posterior

STILL = {"num_samples": 1, "num_warmup": 0, "progress": False}


def model() -> None:
    pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("b", dist.Gamma(2.0, 1.0))


def start(initial, num_chains: int = 3):
    """The places of chains after a step too small to move them."""
    kernel = HMC(model, step_size=1e-9, num_steps=1, adapt_step_size=False)
    draws = sample(kernel, initial=initial, num_chains=num_chains, **STILL).samples
    return {site: value[:, 0] for site, value in draws.items()}


def test_a_posteriors_last_draws_are_where_its_chains_go_on():
    a = torch.arange(3 * 4 * 2.0).reshape(3, 4, 2)
    b = torch.arange(1, 13.0).reshape(3, 4)
    posterior = Posterior({"a": a, "b": b}, kind="chains")
    assert torch.allclose(start(posterior)["a"], a[:, -1])
    assert torch.allclose(start(posterior, 2)["b"], b[:2, -1])
    # then the draws before, the oldest of one chain left out
    more = start(posterior, 8)["b"].round().int().tolist()
    assert sorted(more) == [2, 3, 4, 6, 7, 8, 11, 12]
    with pytest.raises(ValueError, match="3 x 4 draws, too few to start 13 chains"):
        start(posterior, 13)


@pytest.mark.parametrize("kind", [AutoGaussian, AutoDiagonalNormal, AutoNormal])
def test_a_guides_draws_start_the_chains(kind):
    guide = (
        kind(model, init_scale=1e-3)
        if kind is not AutoGaussian
        else AutoDiagonalNormal(model, init_scale=1e-3)
    )
    guide()
    if kind is AutoGaussian:
        guide = AutoGaussian(guide, guide.get_posterior())
    centre = guide.median()
    found = start(guide, 6)
    assert found["a"].shape == (6, 2)
    for site, value in found.items():
        # ten deviations
        assert torch.allclose(value, centre[site].expand_as(value), atol=0.02)
        assert len(value.unique(dim=0)) == 6


def test_a_function_draws_again_for_chains_that_start_nowhere():
    calls = []

    def draw(count):
        calls.append(count)
        a = torch.zeros(count, 2)
        if len(calls) == 1:
            a[1] = torch.nan
        return {"a": a, "b": torch.ones(count)}

    z = starting_points(Density(model), 3, draw)
    assert calls == [3, 1]
    assert torch.isfinite(z).all()


def test_a_start_in_the_box_that_is_far_worse_than_others_is_drawn_anew_and_given_weights_are_not():
    def walled():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.factor("wall", -1e10 * (a - 1).clamp(min=0))

    density = Density(walled)
    # of which a quarter would start beyond
    assert (starting_points(density, 50) < 1.001).all()
    assert starting_points(density, 1, {"a": torch.tensor(1.5)}) == 1.5


def test_starts_whose_gradient_is_infinite_are_drawn_anew():
    """A root has one at 0, where its value is finite."""

    def rooted():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.factor("root", a.abs().sqrt())

    counts = []

    def draw(count):
        counts.append(count)
        return {"a": torch.zeros(count) if len(counts) == 1 else torch.ones(count)}

    assert (starting_points(Density(rooted), 3, draw) == 1).all()
    assert counts == [3, 3]


@pytest.mark.stochastic
def test_starts_in_the_box_are_uniform_between_minus_two_and_two():
    """Of 1,200 coordinates none lies in a fortieth of the box in 1 of 10^13 runs; the
    mean has a deviation of 0.033, of which six are exceeded in 1 of 10^8."""
    z = starting_points(Density(model), 400, "uniform")
    assert -2 <= z.min() < -1.9
    assert 1.9 < z.max() <= 2
    assert abs(z.mean()) < 0.2


def test_names_and_weights_are_passed_on():
    weights = {"a": torch.ones(2), "b": torch.tensor(3.0)}
    assert torch.allclose(start(weights)["b"], torch.tensor(3.0))
    assert (start("uniform", 50)["b"].log().abs() < 2).all()
    prior = start("prior", 400)["a"]
    assert abs(prior.std() - 1) < 0.15  # five standard errors


@pytest.mark.parametrize("given", ["weights", "a function"])
def test_starts_outside_of_a_simplex_are_refused_rather_than_moved(given):
    def model():
        pyro.sample("shares", dist.Dirichlet(torch.ones(3)))

    start = {"shares": torch.tensor([[0.5, 0.3, 0.2], [2.0, 1.0, 1.0]])}
    initial = start if given == "weights" else lambda count: start
    with pytest.raises(
        ValueError, match="outside of its support, or not finite, is 'shares'"
    ):
        starting_points(Density(model), 2, initial)
    start["shares"] /= start["shares"].sum(-1, keepdim=True)
    z = starting_points(Density(model), 2, initial)
    assert torch.allclose(
        Density(model).layout.constrain(z)["shares"], start["shares"], atol=1e-6
    )


def with_an_unused_site() -> None:
    pyro.sample("used", dist.Normal(0.0, 1.0))
    pyro.sample("free", dist.ImproperUniform(dist.constraints.real, (), (3,)))


def with_a_mask() -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 4):
        pyro.sample(
            "y",
            dist.Normal(mean, 1.0),
            obs=torch.ones(4),
            obs_mask=torch.tensor([True, True, False, True]),
        )


@pytest.mark.parametrize("initial", [None, "prior", "weights"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (with_an_unused_site, "3 of 3 entries of 'free'"),
        (with_a_mask, "3 of 4 entries of 'y_unobserved'"),
    ],
)
def test_entries_on_which_the_density_does_not_depend_are_named_once_before_sampling(
    model, words, initial
):
    density = Density(model)
    if initial == "prior" and model is with_an_unused_site:
        return  # of which nothing can be drawn
    if initial == "weights":
        initial = density.layout.constrain(torch.randn(density.dim))
    with pytest.warns(RuntimeWarning, match=f"doesn't depend on {words}") as told:
        starting_points(density, 4, initial)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (2.5, "ends at bounds that the support doesn't tell"),
        (25.0, "ends at bounds that the support doesn't tell"),
        (60.0, "doesn't depend on 1 of 1 entries of 'u'"),
    ],
)
def test_a_flat_entry_that_ends_at_hidden_bounds_is_told_from_one_without(bound, words):
    """They are looked for up to a distance of 30."""

    def model() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))
        u = pyro.sample("u", dist.ImproperUniform(dist.constraints.real, (), ()))
        outside = torch.tensor(-torch.inf)
        pyro.factor("inside", torch.where(u.abs() < bound, 0.0, outside))

    with pytest.warns(RuntimeWarning, match=words) as told:
        starting_points(Density(model), 4, "uniform")
    assert len(told) == 1
