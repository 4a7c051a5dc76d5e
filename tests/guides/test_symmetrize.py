"""Guides written by hand, symmetrised: values and gradients against enumeration."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor

import pyro_symmetric as ps

SHAPES = {
    "locs": torch.Size([3, 2]),
    "shares": torch.Size([3]),
    "scales": torch.Size([3]),
}
AXES: Any = {"locs": ("k", None), "shares": ("k",), "scales": ("k",)}
X = torch.tensor([[-1.0, 0.2], [0.3, 1.0], [1.2, -0.4]], dtype=torch.float64)
NORMAL = ps.Group.declare({"locs": ("k", None)}, {"locs": SHAPES["locs"]})
ALL = ps.Group.declare(AXES, SHAPES)


def mixture(x: Tensor = X) -> None:
    """Components of which each has a place, a share and a scale."""
    double = {"dtype": torch.float64}
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3, **double)))
    with pyro.plate("components", 3):
        scales = pyro.sample("scales", dist.LogNormal(torch.zeros((), **double), 0.5))
    locs = pyro.sample(
        "locs", dist.Normal(torch.zeros(3, 2, **double), 2.0).to_event(2)
    )
    rows = (
        dist.Normal(locs.unsqueeze(-3), scales.reshape(*shares.shape[:-1], 1, 3, 1))
        .to_event(1)
        .log_prob(x[:, None])
    )
    pyro.factor(
        "rows",
        (rows + shares.log().unsqueeze(-2))
        .logsumexp(-1)
        .sum(-1)
        .reshape(shares.shape[:-1]),
    )


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    double = {"dtype": torch.float64, "generator": generator}
    return {
        "loc": pyro.param("loc", 0.7 * torch.randn(3, 2, **double)),
        "log_scale": pyro.param("log_scale", -0.5 + 0.2 * torch.randn(3, 2, **double)),
        "concentration": pyro.param("concentration", torch.randn(3, **double)),
        "size": pyro.param("size", 0.5 * torch.randn(3, **double)),
    }


def by_hand(x: Tensor = X) -> str:
    p = parameters()
    pyro.sample("shares", dist.Dirichlet(p["concentration"].exp() + 1))
    with pyro.plate("components", 3):
        pyro.sample("scales", dist.LogNormal(p["size"], 0.3))
    pyro.sample("locs", dist.Normal(p["loc"], p["log_scale"].exp()).to_event(2))
    return "as it was"


def log_q(w: dict[str, Tensor], sites: Any = SHAPES) -> Tensor:
    p = parameters()
    laws = {
        "locs": dist.Normal(p["loc"], p["log_scale"].exp()).to_event(2),
        "shares": dist.Dirichlet(p["concentration"].exp() + 1),
        "scales": dist.LogNormal(p["size"], 0.3).to_event(1),
    }
    return sum(laws[site].log_prob(w[site]) for site in sites)


def enumerated(w: dict[str, Tensor], group: ps.Group) -> Tensor:
    """The log-density of the average over the group, of one draw."""
    moved = group.enumerate()({site: w[site] for site in group.site_shapes})
    rest = [site for site in SHAPES if site not in group.site_shapes]
    return (
        log_q(moved, group.site_shapes).logsumexp(0)
        - group.log_order()
        + log_q(w, rest)
    )


@pytest.fixture
def draws_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every element drawn be the identity."""

    def sample(group: ps.Group, shape: Any = (), **options: Any) -> Any:
        return group.identity(shape)

    monkeypatch.setattr(ps.Group, "sample", sample)


@pytest.mark.usefixtures("draws_stay")
@pytest.mark.parametrize("group", [NORMAL, ALL])
@pytest.mark.parametrize("particles", [1, 4])
@pytest.mark.parametrize("objective", [Trace_ELBO, TraceMeanField_ELBO])
def test_values_and_gradients_are_those_of_enumeration(
    group: ps.Group, particles: int, objective: Any
) -> None:
    """Draw for draw; several particles in one batch."""
    guide, found = ps.symmetrize(by_hand, group, ps.ExactOrbit()), []
    for own in (guide, by_hand):
        loss = objective(
            num_particles=particles,
            max_plate_nesting=1,
            vectorize_particles=particles > 1,
        )
        pyro.set_rng_seed(1)
        found.append(loss.differentiable_loss(mixture, own))
    held = list(pyro.get_param_store().named_parameters())
    w = drawn(particles)
    draws = [{site: value[k] for site, value in w.items()} for k in range(particles)]
    difference = torch.stack(
        [enumerated(one, group) - log_q(one) for one in draws]
    ).mean()
    torch.testing.assert_close(found[0] - found[1], difference, rtol=1e-7, atol=1e-7)
    assert float(difference.detach().abs()) > 1e-2
    own, expected = (
        torch.autograd.grad(
            value, [p for _, p in held], allow_unused=True, retain_graph=True
        )
        for value in (found[0] - found[1], difference)
    )
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(
            torch.zeros(()) if one is None else one,
            torch.zeros(()) if other is None else other,
        )


def drawn(particles: int) -> dict[str, Tensor]:
    """Draw as the objective did: with the same seed, in the same plate."""
    pyro.set_rng_seed(1)
    with pyro.plate("particles", particles, dim=-2):
        trace = pyro.poutine.trace(by_hand).get_trace()
    return {
        site: trace.nodes[site]["value"].reshape(particles, *shape)
        for site, shape in SHAPES.items()
    }


@pytest.mark.stochastic
@pytest.mark.parametrize("estimator", [None, ps.SinkhornImportance(2), ps.InfoNCE(3)])
def test_it_trains_and_ends_above_the_plain_bound(estimator: Any) -> None:
    """Components far apart: log 3! = 1.79 nats are gained, up to log 4 by three random
    elements; 5 errors.
    """
    data = torch.tensor(
        [[-6.0, 0.0], [0.0, 6.0], [6.0, 0.0]], dtype=torch.float64
    ).repeat(10, 1)
    data = data + 0.3 * torch.randn_like(data)
    pyro.param(
        "loc", torch.tensor([[-6.0, 0.0], [0.0, 6.0], [6.0, 0.0]], dtype=torch.float64)
    )
    guide = ps.symmetrize(by_hand, ALL, estimator)
    assert (
        pyro.poutine.trace(guide).get_trace(data).nodes["_RETURN"]["value"]
        == "as it was"
    )
    svi = SVI(mixture, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(100):
        svi.step(data)
    many = Trace_ELBO(2000, 1, vectorize_particles=True)
    gains = torch.tensor(
        [
            many.loss(mixture, by_hand, data) - many.loss(mixture, guide, data)
            for _ in range(4)
        ]
    )
    most = 1.386 if estimator == ps.InfoNCE(3) else 1.792
    expected = 1.0 if estimator == ps.InfoNCE(3) else 1.6
    assert expected < float(gains.mean()) + 5 * float(gains.std()) / 2
    assert float(gains.mean()) < most + 5 * float(gains.std()) / 2 + 1e-3


@pytest.mark.stochastic
@pytest.mark.parametrize("estimator", [ps.ExactOrbit(), ps.SinkhornImportance(1)])
def test_importance_weights_of_a_symmetrised_guide_find_the_evidence(
    estimator: Any,
) -> None:
    """One location for each of two rows, whose evidence is known; 6 errors of a mean of
    20 (1 in 10^5).
    """
    rows, double = (
        torch.tensor([-1.0, 2.0], dtype=torch.float64),
        {"dtype": torch.float64},
    )

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, **double), 1.0).to_event(1))
        y = dist.Normal(w.unsqueeze(-2), 1.0).log_prob(rows[:, None])
        pyro.factor("y", y.logsumexp(-1).sum(-1))

    def guide() -> None:
        pyro.sample(
            "w", dist.Normal(torch.tensor([-0.5, 1.0], **double), 1.0).to_event(1)
        )

    own = dist.MultivariateNormal(
        torch.zeros(2, **double), torch.ones(2, 2, **double) + torch.eye(2, **double)
    )
    apart = dist.Normal(torch.zeros((), **double), 2**0.5)
    truth = (2 * own.log_prob(rows).exp() + 2 * apart.log_prob(rows).sum().exp()).log()
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    loss = RenyiELBO(
        alpha=0.0, num_particles=5000, max_plate_nesting=0, vectorize_particles=True
    )
    found = torch.tensor(
        [-loss.loss(model, ps.symmetrize(guide, group, estimator)) for _ in range(20)]
    )
    assert float(found.mean()) == pytest.approx(
        float(truth), abs=6 * float(found.std()) / 20**0.5 + 1e-4
    )


def test_sites_that_depend_on_each_other_or_are_not_there_are_refused() -> None:
    def dependent() -> None:
        shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
        pyro.sample(
            "locs", dist.Normal(shares.unsqueeze(-1).expand(3, 2), 0.1).to_event(2)
        )

    with pytest.raises(ValueError, match="'locs' depends on another site"):
        ps.symmetrize(dependent, NORMAL)()
    with pytest.raises(ValueError, match="'locs', which the guide doesn't draw"):
        ps.symmetrize(lambda: pyro.sample("w", dist.Normal(0.0, 1.0)), NORMAL)()
    flat = ps.symmetrize(
        lambda: pyro.sample("locs", dist.Normal(torch.zeros(6), 1.0).to_event(1)),
        NORMAL,
    )
    with pytest.raises(ValueError, match=r"shape \(6,\); the group's is \(3, 2\)"):
        flat()


def test_signs_of_a_positive_site_are_refused() -> None:
    """A standard deviation must be declared as even: its flipped copies have no
    density.
    """
    axes: Any = {"locs": ("k",), "scales": ("k",)}
    shapes = dict.fromkeys(axes, torch.Size([3]))

    def guide() -> None:
        pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("scales", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))

    both = {"moves": ("permute", "flip")}
    with pytest.raises(
        ValueError, match=r"'scales', whose support is .* Declare the site as even"
    ):
        ps.symmetrize(guide, ps.Group.declare(axes, shapes, **both))()
    even = ps.symmetrize(guide, ps.Group.declare(axes, shapes, even=["scales"], **both))
    assert pyro.poutine.trace(even).get_trace().log_prob_sum().isfinite()
