"""Guides: symmetrised, pushed forward, interpolated; alone with their parameters; on disk."""

import math
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import nn

from pyro_symmetric.alignment import align, to_gaussian
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.distributions import ExactOrbit, InfoNCE
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import (
    AutoGaussian,
    AutoSymmetrized,
    interpolate,
    load_guide,
    push_forward,
    sample_posterior,
    save_guide,
)
from pyro_symmetric.guides.evidence import evidence_of
from pyro_symmetric.mcmc import log_joint
from pyro_symmetric.models import BayesianModel

HIDDEN = 3


def network() -> tuple[BayesianModel, Group, torch.Tensor, torch.Tensor]:
    """A small regression with learnt noise, so that one site is constrained and unknown to the group."""
    net = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    model = BayesianModel(net, 1.0, "gaussian")
    group = Group.declare(
        {"0.weight": ("hidden", None), "0.bias": ("hidden",), "2.weight": (None, "hidden")},
        {name: parameter.shape for name, parameter in net.named_parameters()},
    )
    x = torch.linspace(-2, 2, 30)[:, None]
    return model, group, x, torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(30)


def mixture(data: torch.Tensor) -> None:
    """Three exchangeable components, with a simplex and a positive site; one plate around components."""
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
        scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scales)), obs=data)


MIXTURE_GROUP = Group.declare(
    {"weights": ("k",), "locs": ("k",), "scales": ("k",)},
    {"weights": torch.Size([3]), "locs": torch.Size([3]), "scales": torch.Size([3])},
)


def steps(model: Any, guide: Any, *data: torch.Tensor, number: int = 60, elbo: Any = None) -> list[float]:
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), elbo or Trace_ELBO())
    return [svi.step(*data) for _ in range(number)]


BASES = [AutoDiagonalNormal, AutoNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal]


# symmetrised --------------------------------------------------------------------------------------------------------


EVERY_OBJECTIVE = [(elbo, vectorized) for elbo in (Trace_ELBO, TraceMeanField_ELBO) for vectorized in (False, True)]


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("base", "elbo", "vectorized"),
    [(BASES[0], *objective) for objective in EVERY_OBJECTIVE]
    + [(base, TraceMeanField_ELBO, True) for base in BASES[1:]],  # test_bases.py trains them one particle at a time
)
def test_every_base_trains_with_stock_svi(base: type, elbo: type, vectorized: bool) -> None:
    model, group, x, y = network()
    guide = AutoSymmetrized(model, group, base=base, estimator=InfoNCE(3), init_scale=0.05)
    particles = {"num_particles": 4, "vectorize_particles": True, "max_plate_nesting": 1} if vectorized else {}
    losses = steps(model, guide, x, y, number=150, elbo=elbo(**particles))
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    assert all(
        value.shape == (2, 5, *model.site_shapes[site]) for site, value in guide.sample_posterior((2, 5)).items()
    )


def test_a_flow_can_be_the_base() -> None:
    model, group, x, y = network()
    guide = AutoSymmetrized(model, group, base=AutoIAFNormal, estimator=ExactOrbit(), hidden_dim=[20])
    losses = steps(model, guide, x, y, number=30)
    assert all(math.isfinite(loss) for loss in losses)
    assert guide.sample_posterior((4,))["noise_scale"].shape == (4,)


@pytest.mark.stochastic
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
def test_the_symmetrised_elbo_is_the_elbo_plus_the_information(elbo: type) -> None:
    """ELBO(q̄) from draws of q̄ itself, every copy of them, against SVI's loss, which draws from q alone.

    Both are means of thousands of draws; the comparison is at 5 standard errors: false alarm below 1 in 10^6.
    """
    model, group, x, y = network()
    guide = AutoSymmetrized(model, group, estimator=ExactOrbit(), init_scale=0.5).setup(x, y)
    with torch.no_grad():
        latent = guide.get_posterior().sample_orbit((8000,))
        weights = guide.unpack(latent)
        log_volume = weights["noise_scale"].log()
        terms = model.log_joint(weights, x, y) + log_volume - guide.get_posterior().log_prob(latent)
        particles = elbo(num_particles=8000, vectorize_particles=True, max_plate_nesting=1)
        loss = particles.loss(model, guide, x, y)
        information = guide.base.get_posterior().log_prob(latent) - guide.get_posterior().log_prob(latent)
    error = 5 * math.sqrt(2) * float(terms.std()) / math.sqrt(8000)
    assert -loss == pytest.approx(float(terms.mean()), abs=error)
    # The orbit's copies are further than q's own draws from q: without symmetrising, the same terms would differ.
    assert float(information.mean()) < -5 * float(information.std()) / math.sqrt(8000)


@pytest.mark.stochastic
@pytest.mark.parametrize("base", [AutoDiagonalNormal, AutoMultivariateNormal])
def test_a_mixture_with_simplex_weights_is_symmetrised(base: type) -> None:
    data = torch.cat([torch.randn(40) - 4, torch.randn(50), torch.randn(20) + 5])
    guide = AutoSymmetrized(mixture, MIXTURE_GROUP, base=base, estimator=ExactOrbit())
    losses = steps(mixture, guide, data, number=200)
    assert sum(losses[-20:]) < sum(losses[:20])
    draws = guide.sample_posterior((7,))
    torch.testing.assert_close(draws["weights"].sum(-1), torch.ones(7))
    assert bool((draws["scales"] > 0).all())


def test_default_start_is_off_the_groups_fixed_point() -> None:
    """The gradient can't tell units apart if all are equal; stock AutoNormal starts there."""
    model, group, x, y = network()
    guide = AutoSymmetrized(model, group).setup(x, y)
    weights = guide.unpack(guide.base.loc)
    assert len(set(weights["0.weight"].flatten().tolist())) == HIDDEN
    torch.testing.assert_close(weights["0.weight"], model.initial_weights()["0.weight"])
    stock = AutoNormal(model)
    stock(x, y)
    assert torch.equal(stock.median()["0.weight"], torch.zeros(HIDDEN, 1))


def test_a_group_of_another_model_is_refused_by_site() -> None:
    model, _, x, y = network()
    other = Group.declare({"5.weight": ("unit",)}, {"5.weight": torch.Size([3])})
    with pytest.raises(ValueError, match=r"5\.weight.*0\.weight"):
        AutoSymmetrized(model, other).setup(x, y)
    wider = Group.declare({"0.bias": ("unit",)}, {"0.bias": torch.Size([4])})
    with pytest.raises(ValueError, match=r"0\.bias.*\(3,\).*\(4,\)"):
        AutoSymmetrized(model, wider).setup(x, y)


def test_a_model_that_treats_units_differently_is_refused() -> None:
    model, group, x, y = network()
    lopsided = BayesianModel(
        model.net,
        lambda name, value: dist.Normal(
            torch.zeros_like(value), torch.arange(1.0, 1 + value.numel()).reshape(value.shape)
        ).to_event(value.dim()),
        "gaussian",
    )
    with pytest.raises(ValueError, match=r"\['hidden'\]"):
        AutoSymmetrized(lopsided, group).setup(x, y)


def test_trained_running_statistics_break_the_symmetry_and_are_noticed() -> None:
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))
    for _ in range(30):
        net(3 + 2 * torch.randn(50, 1))
    model = BayesianModel(net, 1.0, "gaussian")
    x, y = torch.randn(20, 1), torch.randn(20)
    group = find_symmetry(net.eval(), x).permutations
    with pytest.raises(ValueError, match="running statistics"):
        AutoSymmetrized(model, group).setup(x, y)


def test_orbit_draws_visit_all_copies_and_base_draws_one() -> None:
    """12 distant units in a row: that 400 uniform permutations all leave unit 0 first has probability 3^-400."""
    model, group, x, y = network()
    guide = AutoSymmetrized(model, group, init_scale=1e-4).setup(x, y)
    one, all_copies = (guide.sample_posterior((400,), orbit=orbit)["0.bias"] for orbit in (False, True))
    assert float(one.std(0).max()) < 1e-3
    assert float(all_copies.std(0).min()) > 0.05
    torch.testing.assert_close(all_copies.sort(-1).values, one.sort(-1).values, atol=2e-3, rtol=0)


def test_wrong_bases_and_groups_are_refused() -> None:
    model, group, _, _ = network()
    with pytest.raises(TypeError, match="AutoDelta"):
        AutoSymmetrized(model, group, base=AutoDelta)
    with pytest.raises(TypeError, match="Group"):
        AutoSymmetrized(model, {"0.weight": ("hidden", None)})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="InfoNCE"):
        AutoSymmetrized(model, group, estimator=InfoNCE)  # type: ignore[arg-type]
    for call in (lambda g: g.sample_posterior((2,)), lambda g: g.median(), lambda g: g.quantiles([0.5])):
        with pytest.raises(ValueError, match="setup"):
            call(AutoSymmetrized(model, group))


# parameters of their own --------------------------------------------------------------------------------------------


def test_training_one_guide_leaves_another_of_its_class_alone() -> None:
    model, group, x, y = network()
    first, second = AutoSymmetrized(model, group), AutoSymmetrized(model, group)
    second(x, y)
    before = {site: value.clone() for site, value in second.median().items()}
    steps(model, first, x, y, number=5)
    assert all(torch.equal(value, before[site]) for site, value in second.median().items())
    assert not torch.equal(first.median()["0.weight"], before["0.weight"])


def test_setup_creates_what_an_optimiser_needs() -> None:
    model, group, x, y = network()
    guide = AutoSymmetrized(model, group)
    assert not list(guide.parameters())
    assert guide.setup(x, y) is guide
    assert sum(p.numel() for p in guide.parameters()) == 2 * guide.latent_dim


# draws --------------------------------------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("guide_class", [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal])
def test_draws_of_stock_guides_have_their_moments(guide_class: type) -> None:
    """Means of 20,000 draws at 6 standard errors over 11 weights: false alarm below 1 in 10^7."""
    model, _, x, y = network()
    guide = guide_class(model, init_scale=0.3)
    steps(model, guide, x, y, number=20)
    moments, draws = to_gaussian(guide), sample_posterior(guide, (20_000,))
    for site in ("0.weight", "2.weight"):
        error = moments.scale[site] / math.sqrt(20_000)
        assert bool(((draws[site].mean(0) - moments.loc[site]).abs() < 6 * error).all())
        torch.testing.assert_close(draws[site].std(0), moments.scale[site], rtol=0.05, atol=0)
    logs = draws["noise_scale"].log()
    assert abs(float(logs.mean() - moments.loc["noise_scale"])) < 6 * float(logs.std()) / math.sqrt(20_000)


def test_draws_of_a_mixture_guide_keep_sites_in_plates_apart() -> None:
    guide = AutoDiagonalNormal(mixture)
    guide(torch.randn(20))
    shapes = {site: tuple(value.shape) for site, value in sample_posterior(guide, (5, 2)).items()}
    assert shapes == {"weights": (5, 2, 3), "locs": (5, 2, 3), "scales": (5, 2, 3)}


def test_pack_is_the_inverse_of_unpack() -> None:
    guide = AutoSymmetrized(mixture, MIXTURE_GROUP).setup(torch.randn(20))
    latent = torch.randn(4, guide.latent_dim)
    torch.testing.assert_close(guide.pack(guide.unpack(latent)), latent, rtol=1e-4, atol=1e-4)


# pushed forward and in between --------------------------------------------------------------------------------------


def trained_pair() -> tuple[Any, ...]:
    model, group, x, y = network()
    guides = [kind(model, init_scale=0.1) for kind in (AutoNormal, AutoDiagonalNormal)]
    for guide in guides:
        steps(model, guide, x, y, number=40)
    return model, group, x, y, *guides


def test_the_push_forward_has_the_permuted_moments() -> None:
    _, group, _, _, first, _ = trained_pair()
    permutation = group.element({"hidden": [2, 0, 1]})
    moved, original = to_gaussian(push_forward(first, permutation)), to_gaussian(first)
    for values, permuted in ((original.loc, moved.loc), (original.scale, moved.scale)):
        torch.testing.assert_close(permuted["0.weight"], values["0.weight"][[2, 0, 1]])
        torch.testing.assert_close(permuted["0.bias"], values["0.bias"][[2, 0, 1]])
        torch.testing.assert_close(permuted["2.weight"], values["2.weight"][:, [2, 0, 1]])
        torch.testing.assert_close(permuted["noise_scale"], values["noise_scale"])


@pytest.mark.stochastic
def test_the_push_forward_has_the_same_elbo_and_can_be_trained() -> None:
    model, group, x, y, first, _ = trained_pair()
    moved = push_forward(first, group.element({"hidden": [1, 2, 0]}))
    before = {site: value.clone() for site, value in to_gaussian(first).loc.items()}
    original = push_forward(first, group.identity())

    def loss(guide: Any) -> float:
        return evidence_of(guide, lambda w: model.log_joint(w, x, y), group, ExactOrbit(), num_samples=4000).elbo

    # The two estimates share no draws; their standard errors are below 0.1 nats here, so 1 is 7 sigma.
    assert loss(moved) == pytest.approx(loss(original), abs=1.0)
    losses = steps(model, moved, x, y, number=100)
    assert sum(losses[-20:]) < sum(losses[:20])
    assert all(torch.equal(value, before[site]) for site, value in to_gaussian(first).loc.items())


def test_interpolation_runs_from_one_guide_to_the_other() -> None:
    _, group, _, _, first, second = trained_pair()
    aligned = push_forward(second, align(second, first, group).element)
    ends = to_gaussian(first), to_gaussian(aligned)
    for t in (0.0, 0.3, 1.0):
        between = to_gaussian(interpolate(first, aligned, t))
        for site in between.loc:
            torch.testing.assert_close(between.loc[site], (1 - t) * ends[0].loc[site] + t * ends[1].loc[site])
            torch.testing.assert_close(between.scale[site], (1 - t) * ends[0].scale[site] + t * ends[1].scale[site])


def test_positive_sites_are_pushed_forward_as_they_are_aligned() -> None:
    def model() -> None:
        with pyro.plate("components", 3):
            pyro.sample("scales", dist.LogNormal(0.0, 1.0))

    guide = AutoDiagonalNormal(model)
    guide()
    group = Group.declare({"scales": ("k",)}, {"scales": torch.Size([3])})
    moved = push_forward(guide, group.element({"k": [2, 0, 1]}))
    torch.testing.assert_close(moved.median()["scales"], guide.median()["scales"][[2, 0, 1]])


def test_a_batch_of_permutations_and_a_simplex_cannot_push_forward() -> None:
    _, group, _, _, first, _ = trained_pair()
    with pytest.raises(TypeError, match=r"align\(guide"):
        push_forward(first, align(first, first, group))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch of shape"):
        push_forward(first, group.sample((2,)))
    pyro.clear_param_store()  # of the guide of this class above
    guide = AutoDiagonalNormal(mixture)
    guide(torch.randn(20))
    with pytest.raises(ValueError, match="constrained together"):
        push_forward(guide, MIXTURE_GROUP.sample())


# on disk ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
def test_a_symmetrised_guide_survives_the_disk(base: type, tmp_path: Path) -> None:
    model, group, x, y = network()
    guide = AutoSymmetrized(model, group, base=base, estimator=InfoNCE(4), init_scale=0.1)
    steps(model, guide, x, y, number=10)
    save_guide(guide, tmp_path / "guide.safetensors")
    pyro.clear_param_store()
    loaded = load_guide(tmp_path / "guide.safetensors", device=x.device)
    assert isinstance(loaded, AutoSymmetrized)
    assert loaded.estimator == InfoNCE(4)
    assert loaded.group == group
    draws = []
    for one in (guide, loaded):
        pyro.set_rng_seed(5)
        draws.append(one.sample_posterior((3,)))
    assert all(torch.equal(draws[0][site], draws[1][site]) for site in draws[0])
    losses = steps(model, loaded, x, y, number=100)
    assert sum(losses[-20:]) < sum(losses[:20])


def test_a_mixture_guide_survives_the_disk_with_its_plates(tmp_path: Path) -> None:
    data = torch.randn(30)
    guide = AutoSymmetrized(mixture, MIXTURE_GROUP, estimator=ExactOrbit()).setup(data)
    save_guide(guide, tmp_path / "guide.safetensors")
    loaded = load_guide(tmp_path / "guide.safetensors")
    torch.testing.assert_close(loaded.sample_posterior((4,))["weights"].sum(-1), torch.ones(4))
    assert all(math.isfinite(loss) for loss in steps(mixture, loaded, data, number=5))


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal])
def test_stock_mean_field_guides_come_back_as_ours(kind: type, tmp_path: Path) -> None:
    model, _, x, y = network()
    guide = kind(model)
    steps(model, guide, x, y, number=5)
    save_guide(guide, tmp_path / "guide.safetensors")
    loaded = load_guide(tmp_path / "guide.safetensors")
    assert isinstance(loaded, AutoGaussian)
    for site, loc in to_gaussian(guide).loc.items():
        torch.testing.assert_close(to_gaussian(loaded).loc[site], loc)


def test_what_is_no_guide_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no guide"):
        load_guide(tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("not a guide")
    with pytest.raises(ValueError, match="no guide or is damaged"):
        load_guide(tmp_path / "text.safetensors")
    model, _, x, y = network()
    stock = AutoDelta(model)
    stock(x, y)
    with pytest.raises(TypeError, match="AutoDelta"):
        save_guide(stock, tmp_path / "delta.safetensors")


@pytest.mark.stochastic
def test_evidence_of_a_hand_written_model_lies_below_that_of_importance_sampling() -> None:
    """log p(D) by 200,000 draws from the prior; the bound may exceed it by 5 standard errors of both at most."""
    data = torch.tensor([0.3, -0.2, 1.1])

    def model(data: torch.Tensor) -> None:
        with pyro.plate("components", 2):
            locs = pyro.sample("locs", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3))
        with pyro.plate("data", len(data)):
            pyro.sample(
                "x", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(locs, scale)), obs=data
            )

    group = Group.declare({"locs": ("k",)}, {"locs": torch.Size([2])})
    guide = AutoSymmetrized(model, group, estimator=ExactOrbit())
    steps(model, guide, data, number=300)
    worth = evidence_of(guide, log_joint(model, data), group, ExactOrbit(), num_samples=2000)
    locs, scale = torch.randn(200_000, 2, 1), (0.3 * torch.randn(200_000, 1, 1)).exp()
    likelihood = dist.Normal(locs, scale).log_prob(data).logsumexp(1).sub(math.log(2)).sum(-1).exp().double()
    log_evidence = float(likelihood.mean().log())
    error = 5 * (worth.symmetrized_error + float(likelihood.std() / likelihood.mean()) / math.sqrt(200_000))
    assert log_evidence - 0.5 < worth.symmetrized_elbo < log_evidence + error


def test_sites_of_a_guide_have_the_density_of_pyro_s_own() -> None:
    def model() -> None:
        pyro.sample("real", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("positive", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("simplex", dist.Dirichlet(torch.ones(4)))
        with pyro.plate("rows", 5):
            pyro.sample("in a plate", dist.Beta(2.0, 2.0))

    group = Group.declare({"real": ("k",)}, {"real": torch.zeros(3)})
    guide = AutoSymmetrized(model, group, estimator=ExactOrbit()).setup()
    trace = pyro.poutine.trace(guide).get_trace()
    for name in ("real", "positive", "simplex", "in a plate"):
        own, value = trace.nodes[name]["fn"], trace.nodes[name]["value"]
        stock = dist.Delta(value, own.log_density.expand(own.batch_shape), own.event_dim)
        support = guide.prototype_trace.nodes[name]["fn"].support
        map_to = torch.distributions.biject_to(support)
        jacobian = map_to.inv.log_abs_det_jacobian(value, map_to.inv(value))
        jacobian = jacobian.sum() if len(own.batch_shape) == 0 else jacobian
        torch.testing.assert_close(own.log_prob(value), jacobian + torch.zeros(own.batch_shape))
        torch.testing.assert_close(own.log_prob(value.clone()), stock.log_prob(value))
        assert bool((own.log_prob(value + 1) == -torch.inf).all())
