"""Every base: set-up, training, draws, medians, quantiles; permutations and signs;
where guides start.
"""

import functools
import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.transforms import (
    block_autoregressive,
    iterated,
    spline_coupling,
)
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalizingFlow,
)
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import ExactOrbit, InfoNCE, SinkhornImportance
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import AutoSymmetrized, AutoUnitBlocks, push_forward
from pyro_symmetric.guides.evidence import evidence
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.posterior import Posterior

GAUSSIAN = [
    AutoDiagonalNormal,
    AutoNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoUnitBlocks,
]
FLOWS: list[tuple[type, dict[str, Any]]] = [
    (AutoIAFNormal, {"hidden_dim": [16]}),
    (
        AutoNormalizingFlow,
        {"init_transform_fn": functools.partial(iterated, 2, spline_coupling)},
    ),
]
EVERY: list[tuple[type, dict[str, Any]]] = [(base, {}) for base in GAUSSIAN] + FLOWS


def perceptron(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))


@functools.cache
def symmetry_of(width: int) -> Symmetry:
    """Once for all tests: tracing takes longer than most of them."""
    with torch.random.fork_rng():
        return find_symmetry(perceptron(width), torch.zeros(2, 1))


def network(
    width: int = 3,
) -> tuple[BayesianModel, Symmetry, torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, 20)[:, None]
    return (
        BayesianModel(perceptron(width), 1.0, "gaussian"),
        symmetry_of(width),
        x,
        torch.sin(2 * x[:, 0]),
    )


@pytest.mark.parametrize(("base", "options"), EVERY)
def test_every_base_is_set_up_trained_and_drawn_from(
    base: type, options: dict[str, Any]
) -> None:
    model, symmetry, x, y = network()
    estimator = InfoNCE(3) if base in GAUSSIAN else InfoNCE(1)
    guide = AutoSymmetrized(
        model, symmetry.permutations, base=base, estimator=estimator, **options
    ).setup(x, y)
    parameters = {name for name, _ in guide.named_parameters()}
    assert parameters
    svi = SVI(
        model,
        guide,
        pyro.optim.Adam({"lr": 0.02 if base in GAUSSIAN else 0.01}),
        Trace_ELBO(),
    )
    before = [svi.evaluate_loss(x, y) for _ in range(40)]
    for _ in range(80):
        svi.step(x, y)
    # set-up created them all
    assert {name for name, _ in guide.named_parameters()} == parameters
    assert sum(svi.evaluate_loss(x, y) for _ in range(40)) < sum(before)
    shapes = {
        site: tuple(value.shape)
        for site, value in guide.sample_posterior((2, 5)).items()
    }
    assert shapes == {site: (2, 5, *shape) for site, shape in model.site_shapes.items()}


@pytest.mark.parametrize("base", GAUSSIAN)
def test_guides_train_have_an_evidence_and_are_moved_where_their_model_lies(
    base: type, device: torch.device
) -> None:
    model, symmetry, x, y = network()
    model, x, y = model.to(device), x.to(device), y.to(device)
    guide = AutoSymmetrized(
        model, symmetry, base=base, estimator=SinkhornImportance(2)
    ).setup(x, y)
    assert math.isfinite(
        SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO()).step(x, y)
    )
    posterior = Posterior.from_samples(
        guide.sample_posterior((40,)), kind="independent"
    )
    assert math.isfinite(
        evidence(guide, x, y, posterior=posterior, num_samples=16).best.log_evidence
    )
    pushed = push_forward(guide, symmetry.finite.sample())
    assert {value.device.type for value in pushed.sample_posterior().values()} == {
        device.type
    }


@pytest.mark.parametrize("base", GAUSSIAN)
def test_every_base_starts_at_the_networks_own_values_and_off_the_fixed_point(
    base: type,
) -> None:
    """Means of 400 draws of scale 0.02: far within 0.1 of the values, which are further
    apart.
    """
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(
        model, symmetry, base=base, estimator=InfoNCE(1), init_scale=0.02
    ).setup(x, y)
    start = guide.unpack(guide.base.loc.detach())["0.weight"]
    torch.testing.assert_close(start, model.initial_weights()["0.weight"])
    draws = guide.sample_posterior((400,), orbit=False)["0.weight"]
    assert float(draws.std(0).max()) < 0.1
    torch.testing.assert_close(draws.mean(0), start, atol=0.1, rtol=0)


@pytest.mark.parametrize("base", GAUSSIAN)
def test_medians_and_quantiles_are_those_of_the_base(base: type) -> None:
    """Against 20,000 draws: quantiles at 10 % to 90 % of a scale of 0.3 err by
    0.005.
    """
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry, base=base, init_scale=0.3).setup(x, y)
    levels = [0.1, 0.5, 0.9]
    found = guide.quantiles(levels)
    draws = guide.sample_posterior((20_000,), orbit=False)
    for site, value in found.items():
        assert value.shape == (3, *model.site_shapes[site])
        expected = torch.quantile(draws[site], torch.tensor(levels), dim=0)
        torch.testing.assert_close(value, expected, atol=0.08, rtol=0.08)
    for site, value in guide.median().items():
        torch.testing.assert_close(value, found[site][1])


def test_a_flow_without_an_inverse_is_refused_at_set_up() -> None:
    model, symmetry, x, y = network()
    flow = functools.partial(iterated, 1, block_autoregressive)
    guide = AutoSymmetrized(
        model, symmetry, base=AutoNormalizingFlow, init_transform_fn=flow
    )
    with pytest.raises(TypeError, match="spline_coupling"):
        guide.setup(x, y)


# permutations and signs ---------------------------------------------------------------


def test_evidence_takes_the_finite_part_and_gains_up_to_its_log_order() -> None:
    """Units far apart and far from zero: all copies are distinct, and symmetrising is
    worth log 48 nats.
    """
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(
        model, symmetry, estimator=ExactOrbit(), init_scale=0.01
    ).setup(x, y)
    with torch.no_grad():
        guide.base.loc[:3] = torch.tensor([1.0, -2.0, 3.0])
    joint = functools.partial(model.log_joint, x=x, y=y)
    worth, without = (
        evidence(
            guide,
            log_joint=joint,
            symmetry=group,
            estimator=ExactOrbit(),
            num_samples=10,
        )
        for group in (symmetry.finite, symmetry.signs)
    )
    assert worth.log_order == pytest.approx(math.log(48))
    assert worth.symmetrized_elbo - worth.elbo == pytest.approx(math.log(48), abs=1e-3)
    assert without.symmetrized_elbo - without.elbo == pytest.approx(
        math.log(8), abs=1e-3
    )


def test_orbit_draws_flip_signs_and_leave_predictions_alone() -> None:
    """400 fair coins for each of 3 units: that one side shows for all of them has
    probability below 10^-100.
    """
    model, symmetry, x, y = network()
    guide = AutoSymmetrized(model, symmetry.signs, init_scale=1e-4).setup(x, y)
    pyro.set_rng_seed(2)
    one = guide.sample_posterior((400,), orbit=False)
    pyro.set_rng_seed(2)
    every = guide.sample_posterior((400,), orbit=True)
    torch.testing.assert_close(every["0.bias"].abs(), one["0.bias"].abs())
    assert bool(((every["0.bias"] > 0).any(0) & (every["0.bias"] < 0).any(0)).all())
    torch.testing.assert_close(
        model.outputs(every, x), model.outputs(one, x), rtol=1e-4, atol=1e-4
    )


def test_a_relu_network_has_no_signs_and_a_declaration_of_them_is_refused() -> None:
    net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    x = torch.linspace(-2, 2, 20)[:, None]
    model, symmetry = BayesianModel(net, 1.0, "gaussian"), find_symmetry(net, x)
    guide = AutoSymmetrized(model, symmetry)  # its scalings are continuous: left out
    assert guide.group == symmetry.permutations
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    axes = {"0.weight": ("unit", None), "0.bias": ("unit",), "2.weight": (None, "unit")}
    with pytest.raises(ValueError, match=r"\['unit'\].*\n.*when they flip"):
        AutoSymmetrized(model, Group.declare(axes, shapes, moves="flip")).setup(
            x, x[:, 0]
        )


# where they start ---------------------------------------------------------------------

GROUP = Group.declare({"locs": ("k",)}, {"locs": torch.Size([3])})
DATA = torch.linspace(-1, 1, 40)


def mixture(data: Tensor) -> None:
    """A scale of noise over twelve orders of magnitude, and components that may be
    relabelled.
    """
    noise = pyro.sample("noise", dist.LogNormal(0.0, 4.0))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", len(data)):
        pyro.sample(
            "x",
            dist.MixtureSameFamily(
                dist.Categorical(torch.ones(3)), dist.Normal(locs, noise)
            ),
            obs=data,
        )


def first_loc(guide: Any) -> Tensor:
    """The means of a symmetrised guide's base."""
    return guide.base.loc.detach().clone()


@pytest.mark.stochastic
def test_a_scale_of_noise_starts_near_its_prior_s_median_and_exchanged_sites_beside_each_other() -> (
    None
):
    """The deviation of a median of 15 draws is 0.32 of the prior's: of 12, none beyond
    5 of these; false alarms 1e-5. The noise of places has a deviation of 0.01; of 36,
    none beyond 6 of these."""
    starts = []
    for _ in range(12):
        guide = AutoSymmetrized(mixture, GROUP, estimator=InfoNCE(1)).setup(DATA)
        starts.append(guide.unpack(first_loc(guide)))
    noise = torch.stack([start["noise"] for start in starts])
    locs = torch.stack([start["locs"] for start in starts])
    assert float(noise.log().abs().max()) < 5 * 0.32 * 4
    assert float(locs.abs().max()) < 0.06
    assert (
        float(
            (locs[:, :, None] - locs[:, None]).abs().flatten(1).median(1).values.min()
        )
        > 0
    )


@pytest.mark.stochastic
@pytest.mark.parametrize("base", [AutoDiagonalNormal, AutoUnitBlocks])
def test_sites_that_are_found_to_be_exchangeable_start_beside_each_other_and_are_blocks(
    base: type,
) -> None:
    """The noise of places has a deviation of 0.01: one of three beyond six of these in
    1 of 10^8 runs."""
    guide = AutoSymmetrized(mixture, base=base, estimator=InfoNCE(1)).setup(DATA)
    locs = guide.unpack(first_loc(guide))["locs"]
    assert float(locs.abs().max()) < 0.06
    assert len(locs.unique()) == 3
    if base is AutoUnitBlocks:
        (units,) = guide.base.get_posterior().positions
        assert units.shape == (3, 1)


def test_setting_up_leaves_the_parameter_store_alone_and_is_repeatable() -> None:
    model, symmetry, x, y = network()
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


def test_an_improper_site_that_the_group_doesn_t_move_is_no_obstacle_if_its_start_is_given() -> (
    None
):
    def model(data: Tensor) -> None:
        level = pyro.sample(
            "level", dist.ImproperUniform(dist.constraints.real, (), ())
        )
        locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample(
            "x",
            dist.Normal(level + locs.sum(), 1.0).expand(data.shape).to_event(1),
            obs=data,
        )

    starts = {"level": torch.tensor(0.0), "locs": torch.arange(3.0)}
    guide = AutoSymmetrized(
        model, GROUP, init_loc_fn=lambda site: starts[site["name"]]
    ).setup(DATA)
    assert math.isfinite(Trace_ELBO().loss(model, guide, DATA))
