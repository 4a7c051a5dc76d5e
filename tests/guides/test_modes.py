"""Guides with several modes: ELBOs and their gradients by quadrature, moments, files, symmetrised forms."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal
from torch import Tensor, nn

from pyro_symmetric.alignment import align
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.distributions import ExactOrbit, SinkhornImportance
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import (
    AutoGaussian,
    AutoModes,
    AutoSymmetrized,
    Modes_ELBO,
    SymmetrizedMeanField_ELBO,
    distinct,
    evidence,
    load_guide,
    push_forward,
    save_guide,
)
from pyro_symmetric.guides.gaussian import moments_of
from pyro_symmetric.guides.layout import GuideLayout, LatentSite, LayoutModel
from pyro_symmetric.mcmc import log_joint
from pyro_symmetric.models import BayesianModel

DATA = torch.tensor([1.6, 2.1], dtype=torch.float64)
FAMILIES = {
    "mean-field": AutoDiagonalNormal,
    "low rank": AutoLowRankMultivariateNormal,
    "full rank": AutoMultivariateNormal,
}


def two_sided(data: Tensor) -> None:
    """|w| is seen with noise: two modes."""
    w = pyro.sample("w", dist.Normal(data.new_zeros(1), 2.0).to_event(1))
    with pyro.plate("data", len(data)):
        pyro.sample("y", dist.Normal(w.abs().squeeze(-1), 0.7), obs=data)


def one_dimensional(**options: Any) -> AutoModes:
    torch.set_default_dtype(torch.float64)
    guide = AutoModes(two_sided, 3, **options)
    guide.setup(DATA)
    with torch.no_grad():
        guide.logits.copy_(torch.tensor([0.4, -0.8, 0.1]))
    place(guide, torch.tensor([[-1.5], [0.3], [2.0]]), torch.tensor([[0.5], [0.8], [0.3]]))
    return guide


def locs(guide: AutoModes) -> Tensor:
    return torch.stack([mode.loc.detach().clone() for mode in guide.modes])


def scales(guide: AutoModes) -> Tensor:
    return torch.stack([mode.scale.detach().clone() for mode in guide.modes])


def place(guide: AutoModes, loc: Tensor, scale: Tensor) -> None:
    """Give mean-field modes their moments."""
    for mode, m, s in zip(guide.modes, loc, scale, strict=True):
        with torch.no_grad():
            mode.loc.copy_(m)
        mode.scale = s


def exact_elbo(guide: AutoModes) -> Tensor:
    grid = torch.linspace(-10, 10, 20_001)
    log_q = guide.get_posterior().log_prob(grid[:, None])
    log_p = dist.Normal(0.0, 2.0).log_prob(grid) + dist.Normal(grid.abs()[:, None], 0.7).log_prob(DATA).sum(-1)
    return torch.trapezoid(log_q.exp() * (log_p - log_q), grid)


def unconstrained(guide: Any) -> list[Tensor]:
    return [p for _, p in sorted(guide.named_parameters())]


def estimates(guide: AutoModes, loss: Any, steps: int) -> tuple[Tensor, Tensor]:
    """Values and gradients of many steps, ``(steps,)`` and ``(steps, parameters)``."""
    values, gradients = [], []
    for _ in range(steps):
        value = loss.loss_and_grads(two_sided, guide, DATA)
        values.append(torch.tensor(value))
        gradients.append(torch.cat([p.grad.reshape(-1) for p in unconstrained(guide)]))
        for p in unconstrained(guide):
            p.grad = None
    return torch.stack(values), torch.stack(gradients)


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "loss",
    [
        Trace_ELBO(num_particles=400, vectorize_particles=True, max_plate_nesting=1),
        Modes_ELBO(num_particles=100, vectorize_particles=True, max_plate_nesting=1),
        Modes_ELBO(num_particles=2),
    ],
    ids=["Trace_ELBO", "Modes_ELBO", "Modes_ELBO in a loop"],
)
def test_values_and_gradients_are_unbiased_for_the_weights_too(loss: Any) -> None:
    """The ELBO and its derivatives in all 9 parameters, by quadrature, against the mean of 50 steps: 5 standard errors
    of each; false alarms below 1e-5. A missing score of the weights is off by 50 of them."""
    guide = one_dimensional()
    exact = -exact_elbo(guide)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(exact, unconstrained(guide))])
    values, gradients = estimates(guide, loss, 50)
    for found, truth in ((values, exact.detach()), (gradients, expected)):
        error = found.std(0) / math.sqrt(len(found))
        assert bool(((found.mean(0) - truth).abs() < 5 * error + 1e-9).all()), (found.mean(0), truth, error)


@pytest.mark.stochastic
def test_drawing_every_mode_has_less_noise_in_the_weights() -> None:
    guide = one_dimensional()
    count = guide.num_modes
    stock = Trace_ELBO(num_particles=20 * count, vectorize_particles=True, max_plate_nesting=1)
    ours = Modes_ELBO(num_particles=20, vectorize_particles=True, max_plate_nesting=1)
    where = [n for n, _ in sorted(guide.named_parameters())].index("logits") * 3  # three parameters of three numbers
    noise = [estimates(guide, loss, 60)[1][:, where : where + 3].var(0).sum() for loss in (stock, ours)]
    assert noise[1] < noise[0] / 2


def test_the_loop_and_the_batch_of_modes_give_one_estimate() -> None:
    """With deviations next to nothing there is no noise left, but there are the weights."""
    guide = one_dimensional()
    place(guide, locs(guide), torch.full((3, 1), 1e-6))
    batch = Modes_ELBO(vectorize_particles=True).loss(two_sided, guide, DATA)
    assert batch == pytest.approx(Modes_ELBO().loss(two_sided, guide, DATA), rel=0.05)


@pytest.mark.stochastic
def test_fitted_to_a_posterior_of_two_modes_it_finds_both_and_nearly_all_evidence() -> None:
    guide = AutoModes(two_sided, 2, init_loc_fn=lambda site: torch.randn(1, dtype=torch.float64), init_scale=0.3)
    torch.set_default_dtype(torch.float64)
    guide.setup(DATA)
    place(guide, torch.tensor([[-1.0], [1.2]]), scales(guide))
    svi = SVI(two_sided, guide, pyro.optim.Adam({"lr": 0.03}), Modes_ELBO(16, vectorize_particles=True))
    for _ in range(200):
        svi.step(DATA)
    grid = torch.linspace(-10, 10, 20_001)
    log_p = dist.Normal(0.0, 2.0).log_prob(grid) + dist.Normal(grid.abs()[:, None], 0.7).log_prob(DATA).sum(-1)
    log_evidence = torch.logsumexp(log_p, 0) + math.log(float(grid[1] - grid[0]))
    assert float(log_evidence - exact_elbo(guide).detach()) < 0.05
    torch.testing.assert_close(guide.mixture_weights, torch.tensor([0.5, 0.5]), atol=0.05, rtol=0)


def test_held_weights_are_no_parameters_and_please_stock_objectives() -> None:
    guide = one_dimensional(train_weights=False)
    assert "logits" not in dict(guide.named_parameters())
    TraceMeanField_ELBO().loss_and_grads(two_sided, guide, DATA)
    with pytest.raises(NotImplementedError):
        TraceMeanField_ELBO().loss_and_grads(two_sided, one_dimensional(), DATA)
    with pytest.raises(TypeError, match="use Modes_ELBO"):
        SymmetrizedMeanField_ELBO().loss_and_grads(two_sided, guide, DATA)
    with pytest.raises(TypeError, match="several modes"):
        Modes_ELBO().loss(two_sided, AutoDiagonalNormal(two_sided), DATA)


# networks -----------------------------------------------------------------------------------------------------------


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


@functools.cache
def permutations_of_perceptron() -> Group:
    """Once for all tests: tracing takes longer than most of them."""
    with torch.random.fork_rng():
        return find_symmetry(perceptron(), torch.zeros(2, 2)).permutations


def problem() -> tuple[BayesianModel, Group, Tensor, Tensor]:
    model, x = BayesianModel(perceptron(), 1.0, "gaussian"), torch.randn(20, 2)
    return model, permutations_of_perceptron(), x, x[:, 0].sin() + 0.1 * torch.randn(20)


def trained(model: Any, kind: Any, x: Tensor, y: Tensor) -> Any:
    guide = distinct(kind(model, init_scale=0.2))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), Trace_ELBO())
    for _ in range(10):
        svi.step(x, y)
    return guide


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_svi_and_predictive_take_it_and_each_mode_starts_elsewhere(family: Any) -> None:
    model, _, x, y = problem()
    guide = AutoModes(model, 3, base=FAMILIES[family])
    guide.setup(x, y)
    starts = locs(guide)
    assert float((starts[0] - starts[1]).abs().max()) > 0.05
    before = {name: p.detach().clone() for name, p in guide.named_parameters()}
    for loss in (Trace_ELBO(), Modes_ELBO(vectorize_particles=True)):
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
        for _ in range(8):
            assert math.isfinite(svi.step(x, y))
    assert all(not torch.equal(p, before[name]) for name, p in guide.named_parameters())
    assert Predictive(model, guide=guide, num_samples=5)(x)["y"].shape == (5, 20)
    draws = guide.sample_posterior((6, 2))
    assert {site: value.shape for site, value in draws.items()} == {
        site: torch.Size((6, 2)) + shape for site, shape in model.site_shapes.items()
    }
    assert model.outputs(draws, x).shape == (6, 2, 20, 1)


def test_two_guides_of_a_kind_share_nothing() -> None:
    model, _, x, y = problem()
    first, second = AutoModes(model, 2), AutoModes(model, 2)
    first.setup(x, y)
    second.setup(x, y)
    before = locs(second)
    SVI(model, first, pyro.optim.Adam({"lr": 0.1}), Modes_ELBO()).step(x, y)
    assert torch.equal(locs(second), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_bring_back_the_same_mixture(family: Any, tmp_path: Path) -> None:
    model, group, x, y = problem()
    guide = AutoModes(model, 2, base=FAMILIES[family])
    guide.setup(x, y)
    with torch.no_grad():
        guide.logits.copy_(torch.tensor([0.3, -1.0]))
    points = guide.get_posterior().sample((5,))
    symmetrized = AutoSymmetrized(model, group, base=guide, estimator=ExactOrbit()).setup(x, y)
    for original in (guide, symmetrized):
        save_guide(original, tmp_path / "guide.safetensors")
        loaded = load_guide(tmp_path / "guide.safetensors", device=x.device)
        assert type(loaded) is type(original)
        torch.testing.assert_close(loaded.get_posterior().log_prob(points), original.get_posterior().log_prob(points))
        SVI(model, loaded, pyro.optim.Adam({"lr": 0.01}), Modes_ELBO()).step(x, y)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_of_given_guides_has_their_densities(family: Any) -> None:
    model, _, x, y = problem()
    guides = [trained(model, FAMILIES[family], x, y) for _ in range(2)]
    mixture = AutoModes.from_guides(guides, weights=[1.0, 3.0])
    points = mixture.get_posterior().sample((7,))
    terms = torch.stack([guide.get_posterior().log_prob(points) for guide in guides], -1)
    expected = torch.logsumexp(terms + torch.tensor([0.25, 0.75]).log(), -1)
    torch.testing.assert_close(mixture.get_posterior().log_prob(points), expected)
    torch.testing.assert_close(mixture.mixture_weights, torch.tensor([0.25, 0.75]))
    for part, guide in zip(mixture.modes, guides, strict=True):
        assert set(part.moment_names) == set(moments_of(guide))
        torch.testing.assert_close(part.get_posterior().log_prob(points), guide.get_posterior().log_prob(points))


@pytest.mark.parametrize("vectorized", [False, True])
def test_steps_of_a_stock_model_go_on_each_device(vectorized: bool, device: torch.device) -> None:
    guide = AutoModes(two_sided, 3)
    svi = SVI(two_sided, guide, pyro.optim.Adam({"lr": 0.01}), Modes_ELBO(vectorize_particles=vectorized))
    assert math.isfinite(svi.step(DATA.to(device)))


def test_weights_given_as_numbers_keep_their_digits() -> None:
    layout = GuideLayout((LatentSite("w", (2,), dist.constraints.independent(dist.constraints.real, 1), 1),))
    guides = [AutoGaussian(layout, torch.randn(2).double(), torch.ones(2).double()) for _ in range(2)]
    found = AutoModes.from_guides(guides, weights=[0.1, 0.7]).mixture_weights
    torch.testing.assert_close(found, torch.tensor([0.125, 0.875], dtype=torch.float64), rtol=1e-14, atol=0)


def test_guides_of_different_families_are_mixed_as_they_are() -> None:
    model, _, x, y = problem()
    guides = [trained(model, kind, x, y) for kind in FAMILIES.values()]
    mixture = AutoModes.from_guides(guides)
    points = mixture.get_posterior().sample((4,))
    for part, guide in zip(mixture.modes, guides, strict=True):
        found, expected = (g.get_posterior().log_prob(points) for g in (part, guide))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_aligned_modes_are_the_same_functions_in_one_frame() -> None:
    model, group, x, y = problem()
    first = trained(model, AutoDiagonalNormal, x, y)
    copy = push_forward(first, group.element({name: torch.tensor([2, 0, 3, 1]) for name in group.factors}))
    back = push_forward(copy, align(copy, first, group).element)
    apart, together = AutoModes.from_guides([first, copy]), AutoModes.from_guides([first, back])
    assert not torch.allclose(*locs(apart))
    torch.testing.assert_close(*locs(together))
    torch.testing.assert_close(*scales(together))


def test_a_pushed_mixture_has_pushed_components() -> None:
    model, group, x, y = problem()
    mixture = AutoModes.from_guides([trained(model, AutoMultivariateNormal, x, y) for _ in range(2)], [1.0, 2.0])
    element = group.sample()
    pushed = push_forward(mixture, element)
    assert isinstance(pushed, AutoModes)
    points = pushed.get_posterior().sample((5,))
    back = mixture.pack(element.inverse()(pushed.unpack(points)))
    torch.testing.assert_close(pushed.get_posterior().log_prob(points), mixture.get_posterior().log_prob(back))
    assert pushed.train_weights
    held = AutoModes.from_guides(mixture.modes, train_weights=False)
    assert not push_forward(held, element).logits.requires_grad


def test_quantiles_are_those_of_the_marginal_mixture() -> None:
    guide = one_dimensional()
    levels = [0.05, 0.5, 0.9]
    found = guide.quantiles(levels)["w"].reshape(-1, 1)
    weights, loc, scale = guide.mixture_weights, locs(guide), scales(guide)
    cdf = (weights * torch.distributions.Normal(loc.T, scale.T).cdf(found)).sum(-1)
    torch.testing.assert_close(cdf, torch.tensor(levels), rtol=0, atol=1e-9)
    torch.testing.assert_close(guide.median()["w"], found[1])
    with pytest.raises(ValueError, match="between 0 and 1"):
        guide.quantiles([0.0])


# symmetrised --------------------------------------------------------------------------------------------------------


def test_the_symmetrised_mixture_counts_copies_and_modes() -> None:
    """Two modes far apart, each with 4! copies far apart: at a draw of one, its density over 2 · 4!."""
    torch.set_default_dtype(torch.float64)
    model, group, x, y = problem()
    one = trained(model, AutoDiagonalNormal, x, y)
    mixture = AutoModes.from_guides([one, one])
    place(mixture, 20 * torch.randn_like(locs(mixture)), torch.full_like(scales(mixture), 0.05))
    points = mixture.modes[1].get_posterior().sample((10,))
    own = mixture.modes[1].get_posterior().log_prob(points)
    torch.testing.assert_close(mixture.get_posterior().log_prob(points), own - math.log(2))
    for estimator in (ExactOrbit(), SinkhornImportance(4)):
        guide = AutoSymmetrized(model, group, base=mixture, estimator=estimator).setup(x, y)
        found = guide.get_posterior().log_prob(points)
        torch.testing.assert_close(found, own - math.log(2) - group.log_order(), atol=1e-6, rtol=0)


def test_the_evidence_of_a_mixture_counts_what_symmetrising_adds() -> None:
    model, group, x, y = problem()
    mixture = AutoModes.from_guides([trained(model, AutoDiagonalNormal, x, y) for _ in range(2)])
    worth = evidence(mixture, log_joint(model, x, y), group, ExactOrbit(), num_samples=64)
    assert 0 < worth.symmetrized_elbo - worth.elbo <= group.log_order() + 1e-4
    assert worth.bound == "exact"


@pytest.mark.stochastic
def test_gradients_of_a_symmetrised_mixture_are_unbiased() -> None:
    """Two exchangeable weights, two modes: the symmetrised ELBO by a grid against the mean of 60 steps, 5 standard
    errors of each of 10 numbers."""
    torch.set_default_dtype(torch.float64)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.5).to_event(1))
        pyro.sample("y", dist.Normal(w.relu().sum(-1) - (-w).relu().sum(-1) ** 2, 0.5), obs=torch.tensor(0.7))

    group = Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    guide = AutoSymmetrized(model, group, base=AutoModes, estimator=ExactOrbit(), num_modes=2)
    guide.setup()
    with torch.no_grad():
        guide.base.logits.copy_(torch.tensor([0.5, -0.5]))
    place(guide.base, torch.tensor([[1.0, -0.4], [0.2, 0.6]]), torch.tensor([[0.3, 0.4], [0.5, 0.3]]))

    axis = torch.linspace(-6, 6, 601)
    w = torch.cartesian_prod(axis, axis)
    log_q = guide.base.get_posterior().log_prob(w)
    log_q_bar = torch.logaddexp(log_q, guide.base.get_posterior().log_prob(w.flip(-1))) - math.log(2)
    log_p = dist.Normal(0.0, 1.5).log_prob(w).sum(-1)
    log_p = log_p + dist.Normal(w.relu().sum(-1) - (-w).relu().sum(-1) ** 2, 0.5).log_prob(torch.tensor(0.7))
    exact = -(log_q.exp() * (log_p - log_q_bar)).sum() * (axis[1] - axis[0]) ** 2
    parameters = unconstrained(guide)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(exact, parameters)])
    for loss in (
        Trace_ELBO(400, vectorize_particles=True, max_plate_nesting=0),
        Modes_ELBO(100, vectorize_particles=True),
    ):
        values, gradients = [], []
        for _ in range(60):
            values.append(torch.tensor(loss.loss_and_grads(model, guide)))
            gradients.append(torch.cat([p.grad.reshape(-1) for p in parameters]))
            for p in parameters:
                p.grad = None
        for found, truth in ((torch.stack(values), exact.detach()), (torch.stack(gradients), expected)):
            error = found.std(0) / math.sqrt(len(found))
            assert bool(((found.mean(0) - truth).abs() < 5 * error + 1e-4).all())


@pytest.mark.stochastic
def test_gradients_by_sinkhorn_s_proposals_are_those_of_finite_differences_of_the_exact_mixture() -> None:
    """Three exchangeable units, two modes that overlap, few proposals: at 20 batches of fresh draws of the mixture, the
    estimated gradient less the central difference of the enumerated log-density, in all 26 parameters; mean within 6
    standard errors (false alarms below 1e-3), which together are less than 0.3 of the gradient."""
    torch.set_default_dtype(torch.float64)
    support = dist.constraints.independent(dist.constraints.real, 2)
    layout = GuideLayout((LatentSite("w", (3, 2), support, 2),))
    group = Group.declare({"w": ("k", None)}, {"w": torch.Size([3, 2])})
    modes = [AutoGaussian(layout, torch.randn(6), 0.5 * torch.rand(6) + 0.5) for _ in range(2)]
    mixture = AutoModes.from_guides(modes, [1.0, 2.0])
    exact, estimated = (
        AutoSymmetrized(LayoutModel(layout, torch.zeros(0)), group, base=mixture, estimator=kind).setup()
        for kind in (ExactOrbit(), SinkhornImportance(4))
    )

    def mean_log_density(guide: Any, points: Tensor) -> Tensor:
        return guide.get_posterior().log_prob(points).mean()

    @torch.no_grad()
    def difference(points: Tensor, entry: Tensor, step: float = 1e-5) -> Tensor:
        values = []
        for shift in (step, -2 * step):
            entry += shift
            values.append(mean_log_density(exact, points))
        entry += step
        return (values[0] - values[1]) / (2 * step)

    excess, truths = [], []
    for _ in range(20):
        points = mixture.get_posterior().sample((100,))
        gradient = torch.autograd.grad(mean_log_density(estimated, points), unconstrained(estimated))
        entries = [entry for p in unconstrained(exact) for entry in p.detach().view(-1).split(1)]
        truth = torch.cat([difference(points, entry).reshape(1) for entry in entries])
        excess.append(torch.cat([g.reshape(-1) for g in gradient]) - truth)
        truths.append(truth)
    found = torch.stack(excess)
    error = found.std(0) / math.sqrt(len(found))
    assert bool((found.mean(0).abs() < 6 * error + 1e-6).all())
    assert float(error.norm()) < 0.3 * float(torch.stack(truths).square().mean(0).sum().sqrt())


def test_symmetrised_mixtures_train_by_bounds_and_draw_over_the_orbit() -> None:
    model, group, x, y = problem()
    guide = AutoSymmetrized(model, group, base=AutoModes, estimator=SinkhornImportance(2), num_modes=2)
    for loss in (Trace_ELBO(), Modes_ELBO(2, vectorize_particles=True)):
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
        assert all(math.isfinite(svi.step(x, y)) for _ in range(3))
    assert guide.sample_posterior((3,), orbit=True)["0.weight"].shape == (3, 4, 2)
    assert guide.median()["0.weight"].shape == (4, 2)


# bad input ----------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named() -> None:
    model, _, x, y = problem()
    guide = trained(model, AutoDiagonalNormal, x, y)
    other = BayesianModel(nn.Linear(2, 1), 1.0, "gaussian")
    stranger = trained(other, AutoDiagonalNormal, x, y)
    for call, message in (
        (lambda: AutoModes(model, 0), "num_modes is 0"),
        (lambda: AutoModes(model, 2, base=AutoLowRankMultivariateNormal, rank=0), "rank is 0"),
        (lambda: AutoModes(model, 2, init_scale=0.0), "init_scale is 0"),
        (lambda: AutoModes.from_guides([]), "guides is empty"),
        (lambda: AutoModes.from_guides([guide, stranger]), r"guides\[1\] has the sites .*'weight'"),
        (lambda: AutoModes.from_guides([guide, guide], weights=[1.0]), "2 positive numbers"),
        (lambda: AutoModes.from_guides([guide, guide], weights=[1.0, 0.0]), "2 positive numbers"),
        (lambda: AutoModes(model, 2).mixture_weights, "hasn't been set up"),
        (lambda: AutoModes(model, 2).quantiles([0.5]), "hasn't been set up"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
