"""Evidence of any Gaussian guide, and of models that lack the symmetry."""

import math
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.initialization import init_to_sample
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.groups import Group
from pyro_symmetric.guides.evidence import evidence

GROUP = Group.declare({"locs": ("k",)}, {"locs": torch.Size([3])})


def model(data: torch.Tensor) -> None:
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("data", len(data)):
        pyro.sample(
            "x",
            dist.MixtureSameFamily(
                dist.Categorical(torch.ones(3) / 3), dist.Normal(locs, 1.0)
            ),
            obs=data,
        )


DATA = torch.linspace(-3, 3, 12)


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "kind", [AutoNormal, AutoDiagonalNormal, AutoLowRankMultivariateNormal]
)
def test_stock_guides_have_an_evidence_too(kind: Any) -> None:
    """As our guide of the same moments: the same draws if mean-field, else within 5
    errors (1 in 10^6).
    """
    # Apart: from AutoNormal's own start, where all units are equal, there is nothing to
    # gain.
    stock = kind(model, init_loc_fn=init_to_sample, init_scale=0.5)
    stock(DATA)
    pyro.set_rng_seed(1)
    worth = evidence(stock, log_joint=ps.log_joint(model, DATA), symmetry=GROUP)
    pyro.set_rng_seed(1)
    ours = evidence(
        ps.push_forward(stock, GROUP.identity()),
        log_joint=ps.log_joint(model, DATA),
        symmetry=GROUP,
    )
    tolerance = (
        5 * (worth.elbo_error + ours.elbo_error)
        if kind is AutoLowRankMultivariateNormal
        else 3e-3
    )
    assert worth.elbo == pytest.approx(ours.elbo, abs=tolerance)
    assert worth.symmetrized_elbo == pytest.approx(ours.symmetrized_elbo, abs=tolerance)
    assert worth.symmetrized_elbo > worth.elbo


def test_the_symmetry_of_a_network_is_taken_as_it_was_found() -> None:
    """Its scales change the prior; permutations don't."""
    net, x = (
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)),
        torch.randn(8, 2),
    )
    network, symmetry = (
        ps.BayesianModel(net, likelihood="gaussian", num_data=8),
        ps.find_symmetry(net, x),
    )
    stock, joint = AutoDiagonalNormal(network), ps.log_joint(network, x, x[:, :1])
    stock(x, x[:, :1])
    found = []
    for group in (symmetry, symmetry.group, symmetry.finite):
        pyro.set_rng_seed(1)
        found.append(evidence(stock, log_joint=joint, symmetry=group, num_samples=16))
    assert repr(found[0]) == repr(found[1]) == repr(found[2])
    assert found[0].log_order == pytest.approx(math.log(6))


def test_a_model_may_have_an_argument_named_group() -> None:
    def grouped(group: torch.Tensor, y: torch.Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        effects = pyro.sample("effects", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        pyro.sample(
            "y",
            dist.Normal(locs.sum(-1, keepdim=True) + effects[..., group], 1.0).to_event(
                1
            ),
            obs=y,
        )

    group = torch.arange(12) % 2
    declared = Group.declare(
        {"locs": ("k",)}, {"locs": torch.Size([3]), "effects": torch.Size([2])}
    )
    guide = ps.AutoSymmetrized(grouped, declared).setup(group, DATA)
    found = []
    for args, kwargs in (
        ((group, DATA), {}),
        ((), {"group": group, "y": DATA}),
    ):
        pyro.set_rng_seed(1)
        found.append(ps.evidence(guide, *args, num_samples=16, **kwargs))
    assert found[0] == found[1]


def test_a_guide_knows_its_model_and_its_group(tmp_path: Path) -> None:
    """The same numbers as of the function and the group; a guide from a file knows no
    model.
    """
    guide = ps.AutoSymmetrized(model, GROUP).setup(DATA)
    found = []
    for worth in (
        lambda: ps.evidence(guide, DATA),
        lambda: evidence(guide, log_joint=ps.log_joint(model, DATA), symmetry=GROUP),
    ):
        pyro.set_rng_seed(1)
        found.append(worth())
    assert found[0] == found[1]
    ps.save_guide(guide, tmp_path / "guide.safetensors")
    loaded = ps.load_guide(tmp_path / "guide.safetensors", device=DATA.device)
    with pytest.raises(ValueError, match="without its model"):
        ps.evidence(loaded, DATA)
    again = ps.AutoSymmetrized(model, GROUP, base=loaded).setup(DATA)
    assert ps.evidence(again, DATA).elbo == pytest.approx(
        found[0].elbo, abs=8 * found[0].elbo_error + 1e-3
    )


@pytest.mark.parametrize(
    "options", [{}, {"log_joint": ps.log_joint(model, DATA), "symmetry": GROUP}]
)
def test_a_guide_that_is_no_automatic_one_is_told_what_it_takes(options: Any) -> None:
    by_hand = ps.symmetrize(
        lambda: pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1)), GROUP
    )
    with pytest.raises(
        TypeError, match="another AutoGuide with log_joint= and symmetry="
    ):
        ps.evidence(by_hand, **options)


@pytest.mark.parametrize(
    ("estimator", "doubted"),
    [
        (ps.InfoNCE(1), True),
        (ps.SinkhornImportance(2), False),
        (ps.ExactOrbit(), False),
    ],
)
def test_a_guide_trained_by_an_estimate_that_sees_little_is_told_so(
    estimator: Any, doubted: bool
) -> None:
    """Of places 3 apart, with deviations of 0.5, one random element sees no more than
    log 2 of log 6 nats.
    """

    def start(site: Any) -> torch.Tensor:
        return torch.tensor([-3.0, 0.0, 3.0])

    guide = ps.AutoSymmetrized(
        model, GROUP, estimator=estimator, init_loc_fn=start, init_scale=0.5
    ).setup(DATA)
    found = evidence(
        guide, log_joint=ps.log_joint(model, DATA), symmetry=GROUP, num_samples=64
    )
    told = [doubt for doubt in found.doubts if doubt.startswith("density")]
    assert bool(told) == doubted


def test_local_latent_variables_are_refused() -> None:
    def local(data: torch.Tensor) -> None:
        pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 12, subsample_size=4):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="draws 4 of 12 rows"):
        ps.AutoSymmetrized(local, GROUP).setup(DATA)


# the group must be the model's --------------------------------------------------------


def gaussian_guide(target: Any, locs: torch.Tensor) -> AutoDiagonalNormal:
    guide = AutoDiagonalNormal(
        target, init_loc_fn=lambda site: locs.clone(), init_scale=0.1
    )
    guide()
    return guide


def test_a_group_that_the_model_lacks_is_refused() -> None:
    """The guide is the model itself, whose evidence is 1: symmetrised, it would seem to
    be worth log 2 nats.
    """
    locs = torch.tensor([-3.0, 3.0])

    def lopsided() -> None:
        pyro.sample("locs", dist.Normal(locs, 0.1).to_event(1))

    group = Group.declare({"locs": ("k",)}, {"locs": torch.Size([2])})
    with pytest.raises(ValueError, match=r"\['k'\].*\n.*change of 3\..*e\+03 nats"):
        evidence(
            gaussian_guide(lopsided, locs),
            log_joint=ps.log_joint(lopsided),
            symmetry=group,
        )


@pytest.mark.stochastic
@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_rounding_errors_of_large_float32_densities_are_no_broken_symmetry(
    size: float, offset: float
) -> None:
    """Terms of up to 10^10 nats, also where they cancel, summed in an order that
    depends on the units' order: refused for fewer than 1 of 100 seeds."""
    features = torch.randn(200, 40)

    def symmetric() -> None:
        pyro.sample("locs", dist.Normal(torch.zeros(40), 1.0).to_event(1))

    def joint(w: Any) -> torch.Tensor:
        hidden = (w["locs"][:, None, :] + features[:, :1]).tanh()
        return (
            -size * hidden.cumsum(-1)[..., -1].square().sum(-1)
            + offset * size
            - offset * size
        )

    group = Group.declare({"locs": ("k",)}, {"locs": torch.Size([40])})
    guide = gaussian_guide(symmetric, torch.randn(40))
    worth = evidence(
        guide,
        log_joint=joint,
        symmetry=group,
        estimator=ps.SinkhornImportance(1),
        num_samples=8,
    )
    assert worth.log_order > 0
    with pytest.raises(ValueError, match="not invariant"):
        evidence(
            guide,
            log_joint=lambda w: joint(w) - 100 * size * w["locs"][:, 0] ** 2,
            symmetry=group,
            num_samples=8,
        )


@pytest.mark.stochastic
def test_a_density_of_random_rows_or_units_is_taken_as_it_comes() -> None:
    """Mini-batches and dropout change from call to call: nothing can be told within
    that noise, only beyond it. One of 20 calls is refused for fewer than 1 of 1,000
    seeds."""
    rows = torch.randn(1000)

    def symmetric() -> None:
        pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    def joint(w: Any) -> torch.Tensor:
        batch = rows[torch.randint(1000, (10,))]
        kept = torch.nn.functional.dropout(w["locs"], 0.5)
        return -50 * (batch[:, None] - kept.sum(-1)).square().sum(0)

    guide = gaussian_guide(symmetric, torch.tensor([-3.0, 0.0, 3.0]))
    for _ in range(20):
        found = evidence(guide, log_joint=joint, symmetry=GROUP, num_samples=8)
        assert any(doubt.startswith("density") for doubt in found.doubts)
    with pytest.raises(ValueError, match="not invariant"):
        evidence(
            guide,
            log_joint=lambda w: joint(w) - 1e7 * w["locs"][:, 0],
            symmetry=GROUP,
            num_samples=8,
        )


@pytest.mark.cuda
@pytest.mark.parametrize("default", ["cpu", "cuda"])
def test_a_guide_loaded_on_either_device_has_the_evidence_of_the_model_on_the_gpu(
    default: str, tmp_path: Path
) -> None:
    with torch.device(default):
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
        ).cuda()
        x, y = torch.randn(20, 3, device="cuda"), torch.randint(2, (20,), device="cuda")
        problem = ps.BayesianModel(
            net, likelihood=ps.CategoricalLikelihood(), num_data=20
        )
        group = ps.find_symmetry(net, x[:4]).permutations
        ps.save_guide(
            ps.AutoSymmetrized(problem, group).setup(x, y),
            tmp_path / "guide.safetensors",
        )
        joint = ps.log_joint(problem, x, y)
        for device in ("cpu", "cuda"):
            guide = ps.load_guide(tmp_path / "guide.safetensors", device=device)
            draws = guide.sample_posterior((5,))
            assert {value.device.type for value in draws.values()} == {device}
            assert joint(draws).device.type == device
            assert ps.predict(draws, problem, x).isfinite().all()
            assert math.isfinite(
                evidence(guide, log_joint=joint, symmetry=group, num_samples=50).elbo
            )


def test_a_symmetry_of_which_more_may_exist_is_a_doubt() -> None:
    guide = ps.AutoSymmetrized(model, GROUP).setup(DATA)
    for at_least in (False, True):
        guide.at_least = at_least
        doubts = evidence(guide, DATA, num_samples=16).doubts
        told = any(doubt.startswith("symmetry: it says at least") for doubt in doubts)
        assert told == at_least


def test_about_as_many_draws_of_the_posterior_as_of_the_guide_are_taken() -> None:
    guide = ps.AutoSymmetrized(model, GROUP).setup(DATA)
    draws = torch.randn(8, 400, 3, device=DATA.device)
    posterior = ps.Posterior({"locs": draws}, kind="chains")
    found = evidence(guide, DATA, posterior=posterior, num_samples=64)
    assert found.bridge is not None
    assert found.bridge.num_draws == 64  # every fiftieth of each chain
