"""The symmetrised distribution against brute-force enumeration, and Pyro's contract of
a distribution.
"""

import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from pyro.ops.provenance import track_provenance
from torch.distributions import biject_to, constraints

from pyro_symmetric.distributions import ExactOrbit, InfoNCE, Symmetrized
from pyro_symmetric.groups import Action, Group

TWO_LAYERS = Group.declare(
    {"a": ("first", None), "b": ("second", "first"), "c": (None, "second")},
    {"a": torch.Size([3, 2]), "b": torch.Size([2, 3]), "c": torch.Size([1, 2])},
)
SITES = ["b", "a", "c"]  # any order of concatenation
DIM = 6 + 6 + 2


def base(*batch: int) -> dist.TorchDistribution:
    return dist.Normal(
        torch.randn(*batch, DIM, dtype=torch.float64),
        torch.rand(*batch, DIM, dtype=torch.float64) + 0.3,
    ).to_event(1)


@pytest.mark.stochastic
def test_exact_orbit_integrates_to_one() -> None:
    """Importance sampling with a wide proposal; the check fails by chance in less than
    1 of 10^6 runs (5 sigma).
    """
    group = Group.declare({"w": ("unit",)}, {"w": torch.Size([3])})
    q = dist.Normal(
        torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([0.5, 1.0, 0.7])
    ).to_event(1)
    proposal = dist.Normal(torch.zeros(3), 2.5).to_event(1)
    w = proposal.sample((100_000,))
    ratio = (
        (
            Symmetrized(q, Action(group, ["w"]), ExactOrbit()).log_prob(w)
            - proposal.log_prob(w)
        )
        .exp()
        .double()
    )
    assert abs(float(ratio.mean()) - 1) < 5 * float(ratio.std()) / math.sqrt(len(ratio))


@pytest.mark.stochastic
@pytest.mark.parametrize("k", [0, 1, 7, 31])
def test_infonce_lies_above_the_exact_value_and_within_log_of_its_terms_of_the_base(
    k: int,
) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    q = base()
    action = Action(TWO_LAYERS, SITES)
    w = q.sample((4000,))
    estimate = Symmetrized(q, action, InfoNCE(k)).log_prob(w)
    exact = Symmetrized(q, action, ExactOrbit()).log_prob(w)
    gap = estimate - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))
    assert bool((estimate >= q.log_prob(w) - math.log(k + 1) - 1e-9).all())


@pytest.mark.parametrize("estimator", [ExactOrbit(), InfoNCE(6)])
@pytest.mark.parametrize("batch", [(), (4,)])
@pytest.mark.parametrize("sample", [(), (2, 3)])
def test_shapes_follow_torch_distributions(
    estimator: object, batch: tuple[int, ...], sample: tuple[int, ...]
) -> None:
    symmetrized = Symmetrized(base(*batch), Action(TWO_LAYERS, SITES), estimator)  # type: ignore[arg-type]
    assert symmetrized.batch_shape == batch
    assert symmetrized.event_shape == (DIM,)
    value = symmetrized.rsample(sample)
    assert value.shape == (*sample, *batch, DIM)
    assert symmetrized.log_prob(value).shape == (*sample, *batch)
    wider = symmetrized.expand((5, *batch))
    assert wider.rsample().shape == (5, *batch, DIM)
    assert wider.log_prob(wider.sample()).shape == (5, *batch)
    assert wider.estimator is symmetrized.estimator


def test_draws_visit_every_copy_and_have_the_density_of_the_base_s_draws() -> None:
    """InfoNCE without uniform elements is ``q`` itself, of the draw before it was moved.

    A fair coin shows one side 200 times with probability 2^-199.
    """
    group = Group.declare({"w": ("unit",)}, {"w": torch.Size([2])})
    q = dist.Normal(torch.tensor([-5.0, 5.0]), 0.1).to_event(1)
    symmetrized = Symmetrized(q, Action(group, ["w"]), InfoNCE(0))
    for draw in (symmetrized.sample, symmetrized.rsample):
        value = draw((200,))
        assert 0 < int((value[:, 0] < 0).sum()) < 200
        before = q.log_prob(value.sort(-1).values)
        for same in (value, value.detach(), track_provenance(value, {"site"})):
            torch.testing.assert_close(symmetrized.log_prob(same), before)
        changed = value.neg_()
        torch.testing.assert_close(symmetrized.log_prob(changed), q.log_prob(changed))
    assert bool((symmetrized.base_distribution.sample((200,))[:, 0] < 0).all())


def test_a_moved_draw_on_bounded_coordinates_has_the_jacobian_of_the_move() -> None:
    """Bounds that differ between entries: the log-density at the draw before it was
    moved, less the log-determinant, is that of the orbit's sum at the draw."""
    group = Group.declare({"w": ("unit",)}, {"w": torch.Size([2])})
    bounds = constraints.independent(
        constraints.interval(torch.zeros(2), torch.tensor([3.0, 5.0])), 1
    )
    q = dist.Normal(torch.tensor([-2.0, -3.0]).double(), 0.1).to_event(1)
    symmetrized = Symmetrized(q, Action(group, {"w": bounds}), ExactOrbit())
    value = symmetrized.sample((50,))
    elsewhere = Symmetrized(q, Action(group, {"w": bounds}), ExactOrbit())
    log_prob = symmetrized.log_prob(value)
    torch.testing.assert_close(log_prob, elsewhere.log_prob(value))


def test_a_simplex_is_permuted_as_a_simplex() -> None:
    """Against a density over the simplex itself, where permuting has no Jacobian at
    all.
    """
    group = Group.declare(
        {"weights": ("k",), "scales": ("k",)},
        {"weights": torch.Size([3]), "scales": torch.Size([3])},
    )
    action = Action(
        group, {"weights": constraints.simplex, "scales": constraints.positive}
    )
    q = dist.Normal(torch.randn(5, dtype=torch.float64), 0.8).to_event(1)
    u = q.sample((4,))

    def density_of_constrained(
        weights: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        to_simplex, to_positive = (
            biject_to(constraints.simplex),
            biject_to(constraints.positive),
        )
        v, s = to_simplex.inv(weights), to_positive.inv(scales)
        volume = to_simplex.log_abs_det_jacobian(
            v, weights
        ) + to_positive.log_abs_det_jacobian(s, scales).sum(-1)
        return q.log_prob(torch.cat([v, s], -1)) - volume

    constrained = action.layout.constrain(u)
    terms = [
        density_of_constrained(
            constrained["weights"][:, list(p)], constrained["scales"][:, list(p)]
        )
        for p in itertools.permutations(range(3))
    ]
    volume = q.log_prob(u) - density_of_constrained(
        constrained["weights"], constrained["scales"]
    )
    expected = torch.logsumexp(torch.stack(terms), 0) - math.log(6) + volume
    torch.testing.assert_close(
        Symmetrized(q, action, ExactOrbit()).log_prob(u), expected
    )


def test_no_value_falls_below_its_own_term_even_at_a_simplex_corner_in_float32() -> (
    None
):
    """log q̄ ≥ log q − log|G| holds for every single value; most of these are sparse
    mixtures' weights.
    """
    group = Group.declare({"weights": ("k",)}, {"weights": torch.Size([3])})
    action = Action(group, {"weights": constraints.simplex})
    q = dist.Normal(torch.full((2,), 6.0), 3.0).to_event(1)
    u = q.sample((2000,))
    single = Symmetrized(q, action, ExactOrbit()).log_prob(u)
    assert bool((single >= q.log_prob(u) - math.log(6) - 1e-4).all())
    wide = dist.Normal(torch.full((2,), 6.0, dtype=torch.float64), 3.0).to_event(1)
    double = Symmetrized(wide, action, ExactOrbit()).log_prob(u.double())
    torch.testing.assert_close(single.double(), double, atol=2e-2, rtol=1e-3)
