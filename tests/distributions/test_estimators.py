"""Every estimator against the exact sum over the orbit, which is checked against
enumeration by loops elsewhere.
"""

import math
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_symmetric.distributions import (
    ExactOrbit,
    InfoNCE,
    OrbitEstimator,
    SinkhornImportance,
    Symmetrized,
    estimators,
    proposals,
    random_matchings,
    usual_estimator,
)
from pyro_symmetric.distributions.estimators import log_prob_on_orbit
from pyro_symmetric.distributions.proposals import propose
from pyro_symmetric.distributions.unit_densities import UnitDensities
from pyro_symmetric.groups import Action, Axis, Group, Units

from .groups import (
    GROUPS,
    NESTED,
    PERMUTED,
    SIGNED,
    action_of,
    base,
    by_enumeration,
    heads,
    one_layer,
    two_layers,
)

# exact --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("batch", [(), (3,)])
def test_permanents_and_enumeration_agree_in_value_and_gradient(
    name: str, batch: tuple[int, ...]
) -> None:
    action = action_of(GROUPS[name])
    loc = torch.randn(*batch, action.dim, dtype=torch.float64, requires_grad=True)
    scale = (0.3 + torch.rand(*batch, action.dim, dtype=torch.float64)).requires_grad_()
    q = dist.Normal(loc, scale).to_event(1)
    w = q.rsample((4,))
    weights = torch.randn(4, *batch, dtype=torch.float64)
    results = [ExactOrbit().log_prob(q, action, w), by_enumeration(q, action, w)]
    torch.testing.assert_close(results[0], results[1])
    gradients = [
        torch.autograd.grad((r * weights).sum(), (loc, scale), retain_graph=True)
        for r in results
    ]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_exact_orbit_reaches_widths_that_cannot_be_enumerated() -> None:
    action = action_of(one_layer(14, inputs=9))
    q = base(action.dim, 20.0)
    w = q.sample((3,))
    # Units far apart: one term of the sum counts, so all of log 14! is found.
    torch.testing.assert_close(
        ExactOrbit().log_prob(q, action, w), q.log_prob(w) - math.lgamma(15)
    )


# SinkhornImportance -------------------------------------------------------------------


MEETING = {
    "square": ({"W": ("r", "c")}, {"W": (4, 4)}),
    "rectangle": ({"W": ("r", "c")}, {"W": (3, 5)}),
    "chain": ({"W": ("r", "c"), "V": ("c", "d")}, {"W": (3, 4), "V": (4, 3)}),
    "biases": ({"W": ("r", "c"), "b": ("r",)}, {"W": (4, 4), "b": (4,)}),
}


@pytest.mark.stochastic
@pytest.mark.parametrize("name", MEETING)
def test_sets_that_meet_in_one_matrix_have_the_density_of_the_exact_sum(
    name: str,
) -> None:
    """Ten bases of little overlap, at draws and at these moved: values to 0.05 nats
    and gradients to 20 %, which none of 20 seeds exceeded. By row sums alone the value
    is off by up to thousands of nats, and beside close biases by tens."""
    axes, shapes = MEETING[name]
    group = Group.declare(axes, {site: torch.Size(s) for site, s in shapes.items()})
    action = action_of(group)
    for _ in range(10):
        loc = torch.randn(action.dim, dtype=torch.float64, requires_grad=True)
        q = dist.Normal(loc, 0.05).to_event(1)
        w = q.sample((4,))
        moved, matched = action(w, group.sample((4,))), SinkhornImportance(16)
        for value, found in (
            (w, matched.log_prob(q, action, w)),
            (moved, matched.log_prob_elsewhere(q, action, moved)),
        ):
            exact = ExactOrbit().log_prob(q, action, value)
            torch.testing.assert_close(found, exact, rtol=0.0, atol=0.05)
            right, gradient = (
                torch.autograd.grad(result.sum(), loc, retain_graph=True)[0]
                for result in (exact, found)
            )
            assert (gradient - right).norm() < 0.2 * right.norm()


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "name", [*PERMUTED, *(name for name in SIGNED if "recurrent" not in name)]
)
@pytest.mark.parametrize("separation", [0.0, 0.2, 0.5, 1.0, 4.0])
def test_sinkhorn_importance_is_close_to_the_exact_value_and_never_below(
    name: str, separation: float
) -> None:
    """The margin is a quarter of a nat, and more for a recurrent layer, whose densities
    are quadratic in the move. It is no law, but holds for these bases: of others drawn
    alike, one in a hundred has a gap of up to 0.7 nats, in deep networks whose units
    overlap, most of it from rare draws. On the wrong side: one-sided at 5 standard
    errors, false alarm below 1 in 10^6."""
    action = action_of(GROUPS[name])
    q = base(
        action.dim,
        separation,
        generator=torch.Generator(torch.empty(0).device).manual_seed(0),
    )
    w = q.sample((400,))
    gap = SinkhornImportance(16).log_prob(q, action, w) - ExactOrbit().log_prob(
        q, action, w
    )
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap)) - 1e-9
    assert float(gap.mean()) < (0.5 if "recurrent" in name else 0.25)


@pytest.mark.stochastic
@pytest.mark.parametrize("width", [3, 8, 12])
@pytest.mark.parametrize("separation", [0.0, 0.15, 0.3, 0.6, 3.0])
def test_one_hidden_layer_is_met_within_a_tenth_of_a_nat(
    width: int, separation: float
) -> None:
    action = action_of(one_layer(width, inputs=10))
    q = base(action.dim, separation)
    w = q.sample((300,))
    gap = SinkhornImportance(16).log_prob(q, action, w) - ExactOrbit().log_prob(
        q, action, w
    )
    assert abs(float(gap.mean())) < 0.1


@pytest.mark.stochastic
def test_width_64_with_separated_units_finds_all_of_log_64_factorial() -> None:
    action = action_of(one_layer(64, inputs=10))
    q = base(action.dim, 5.0)
    w = q.sample((20,))
    gain = q.log_prob(w) - SinkhornImportance(4).log_prob(q, action, w)
    assert float(gain.mean()) == pytest.approx(math.lgamma(65), abs=0.1)
    capped = q.log_prob(w) - InfoNCE(255).log_prob(q, action, w)
    assert float(capped.max()) <= math.log(256) + 1e-9


@pytest.mark.parametrize(
    ("kind", "sure"), [(kind, sure) for kind in GROUPS for sure in (0.5, 30.0)]
)
def test_the_proposal_depends_on_the_orbit_alone(
    kind: str, sure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``τ_w(g)`` is what the identity has at ``g·w``, or the bound is none; and these
    add up to one. Some places are sure."""
    monkeypatch.setattr(random_matchings, "CERTAIN", sure)
    group = GROUPS[kind]
    action = action_of(group)
    q = base(action.dim, 0.4)

    def proposed(draws: Tensor, count: int) -> Any:
        return propose(UnitDensities(q, action, draws[None]), count)

    w = q.sample((6,))
    elements, log_tau = proposed(w, 5)
    at_copies = proposed(action(w, elements).flatten(0, 1), 0)[1]
    if kind not in NESTED:  # there, what lies inside others is drawn at random first
        torch.testing.assert_close(at_copies.reshape(6, 6), log_tau)
        copies = action(w[0], group.enumerate())
        matched = UnitDensities(q, action, copies[None]).sets
        alike = math.exp(
            UnitDensities(q, action, copies[None]).log_order(matched)
            - group.log_order()
        )
        log_taus = proposed(copies, 0)[1] - UnitDensities(
            q, action, copies[None]
        ).log_order(matched)
        # elements that act alike are drawn alike
        assert alike * float(log_taus.exp().sum()) == pytest.approx(1.0)


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", [*NESTED, "recurrent with signs"])
@pytest.mark.parametrize(
    ("separation", "k"), [(0.0, 16), (0.4, 1), (0.4, 16), (1.0, 1)]
)
def test_few_proposals_over_any_units_give_an_upper_bound(
    kind: str, separation: float, k: int
) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    action = action_of(GROUPS[kind])
    q = base(action.dim, separation)
    w = q.sample((800,))
    gap = SinkhornImportance(k).log_prob(q, action, w) - ExactOrbit().log_prob(
        q, action, w
    )
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap)) - 1e-9


@pytest.mark.stochastic
@pytest.mark.parametrize("separation", [0.3, 1.0])
@pytest.mark.parametrize("sure", [3.0, 30.0])
def test_places_that_are_sure_give_an_upper_bound(
    separation: float, sure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a few nats are enough for a place to be sure, and uniform proposals make
    up for it. One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    monkeypatch.setattr(random_matchings, "CERTAIN", sure)
    if sure < 30.0:
        monkeypatch.setattr(random_matchings, "UNIFORM_SHARE", 0.02)
    action = action_of(two_layers(6, 4))
    q = base(
        action.dim,
        separation,
        generator=torch.Generator(torch.empty(0).device).manual_seed(1),
    )
    w = q.sample((800,))
    gap = SinkhornImportance(4).log_prob(q, action, w) - ExactOrbit().log_prob(
        q, action, w
    )
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap)) - 1e-9
    assert sure < 30.0 or float(gap.mean()) < 0.1 * action.group.log_order()


def test_matrices_that_overflow_in_float32_are_made_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proposals, "FEW_PRODUCTS", 0)
    group = one_layer(4)
    action = action_of(group)
    # whose square is 0 in float32
    q = dist.Normal(torch.zeros(action.dim), 1e-20, validate_args=False).to_event(1)
    densities = UnitDensities(q, action, 1e-20 * torch.randn(1, action.dim))
    matrix = proposals.Matching(densities, 1).matrix(next(iter(densities.sets)))
    assert bool(matrix.densities.isfinite().all())


def test_draws_that_are_not_finite_are_matched_anyhow() -> None:
    action = action_of(one_layer(4))
    q = dist.MultivariateNormal(
        torch.zeros(action.dim), torch.eye(action.dim), validate_args=False
    )
    w = torch.zeros(2, action.dim).index_fill(0, torch.tensor([1]), math.inf)
    found = SinkhornImportance(2).log_prob(q, action, w)
    assert bool(found[0].isfinite())
    assert not bool(found[1].isfinite())


@pytest.mark.stochastic
@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_sharp_units_among_loose_ones_keep_their_digits_in_float32(
    scale: float,
) -> None:
    """One pinned unit, and pairs of near-duplicates: log-densities of millions of which
    a few nats matter.
    """
    group = one_layer(6, inputs=300)
    action = action_of(group)
    loc = {site: torch.zeros(shape) for site, shape in group.site_shapes.items()}
    spread = {site: torch.ones(shape) for site, shape in group.site_shapes.items()}
    loc["weight"][0], spread["weight"][0] = torch.randn(300), scale
    loc["weight"][1], spread["weight"][1:3] = torch.randn(300), scale
    loc["weight"][2] = loc["weight"][1] + 0.05 * scale
    q = dist.Normal(action.layout.flatten(loc), action.layout.flatten(spread)).to_event(
        1
    )
    wide = dist.Normal(
        action.layout.flatten(loc).double(), action.layout.flatten(spread).double()
    ).to_event(1)
    w = q.sample((40,))
    exact = ExactOrbit().log_prob(wide, action, w.double()) - wide.log_prob(w.double())
    found = SinkhornImportance(8).log_prob(q, action, w) - q.log_prob(w)
    torch.testing.assert_close(found.double(), exact, atol=0.1, rtol=0)


@pytest.mark.parametrize("estimator", [SinkhornImportance(3), ExactOrbit()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])
def test_one_draw_that_is_no_number_spoils_no_other(estimator: Any, bad: float) -> None:
    action = action_of(one_layer(7))
    q = dist.Normal(torch.randn(action.dim), 0.5, validate_args=False).to_event(1)
    w = q.sample((4,))
    w[1, 3] = bad
    value = estimator.log_prob(q, action, w)
    assert torch.isfinite(value[[0, 2, 3]]).all()
    assert not bool(value[1] > -1e20)


def test_chunks_of_draws_and_elements_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    action = action_of(two_layers(4, 3))
    loc = torch.randn(action.dim, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 2, action.dim, dtype=torch.float64)

    def value_and_gradient(estimator: OrbitEstimator) -> tuple[torch.Tensor, ...]:
        value = estimator.log_prob(dist.Normal(loc, 1.0).to_event(1), action, w)
        return value, *torch.autograd.grad(value.sum(), loc)

    whole = value_and_gradient(ExactOrbit())
    shape = (
        SinkhornImportance(2)
        .log_prob(dist.Normal(loc, 1.0).to_event(1), action, w)
        .shape
    )
    monkeypatch.setattr(estimators, "CHUNK_NUMBERS", 500)
    torch.testing.assert_close(value_and_gradient(ExactOrbit()), whole)
    assert shape == (5, 2) == value_and_gradient(SinkhornImportance(2))[0].shape


def test_matchings_whose_number_of_draws_depends_on_the_draws_are_not_traced() -> None:
    action = action_of(one_layer(4))
    q = dist.Normal(torch.zeros(action.dim), 1.0).to_event(1)
    with pytest.raises(NotImplementedError, match="traced"):
        torch.jit.trace(
            lambda w: SinkhornImportance(2).log_prob(q, action, w),
            torch.randn(action.dim),
        )


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("uniform", [True, False])
def test_terms_gathered_from_matrices_are_densities_of_moved_draws(
    name: str, batch: tuple[int, ...], uniform: bool
) -> None:
    """In value and gradient."""
    action = action_of(GROUPS[name])
    loc = torch.randn(*batch, action.dim, dtype=torch.float64, requires_grad=True)
    scale = (0.3 + torch.rand(*batch, action.dim, dtype=torch.float64)).requires_grad_()
    q = dist.Normal(loc, scale).to_event(1)
    w = q.rsample((5,))
    own = q.log_prob(w)
    elements = action.group.sample((4, *own.shape), dtype=torch.float64)
    if not uniform:
        elements = propose(UnitDensities(q, action, w[None]), 3)[0]
    units = UnitDensities(q, action, w[None])
    gains, expected = (
        log_prob_on_orbit(q, action, w, elements, units, own),
        q.log_prob(action(w, elements)),
    )
    torch.testing.assert_close(gains, expected)
    weights = torch.rand(expected.shape, dtype=torch.float64)
    both = [
        torch.autograd.grad((v * weights).sum(), (loc, scale), retain_graph=True)
        for v in (gains, expected)
    ]
    torch.testing.assert_close(both[0], both[1])


@pytest.mark.parametrize("estimator", [ExactOrbit(), SinkhornImportance(8)])
def test_units_of_buffers_alone_change_nothing(estimator: OrbitEstimator) -> None:
    """Running statistics have no density, so that the average over their units is one
    over equal terms.
    """
    four = torch.arange(4)[None]
    weights = Units(
        "hidden", 4, (Axis("w", 0, four), Axis("mean", 0, four, buffer=True))
    )
    alone = Units(
        "statistics", 3, (Axis("count", 0, torch.arange(3)[None], buffer=True),)
    )
    shapes = {
        "w": torch.Size([4, 2]),
        "mean": torch.Size([4]),
        "count": torch.Size([3]),
    }
    both, one = (
        Action(Group(units, shapes), ["w"]) for units in ([weights, alone], [weights])
    )
    q = base(8, 0.5)
    w = q.sample((5,))
    torch.testing.assert_close(
        estimator.log_prob(q, both, w), by_enumeration(q, one, w)
    )


# the default --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "base", "training", "expected"),
    [
        (one_layer(12), "mean field", True, ExactOrbit()),
        (one_layer(13), "mean field", True, SinkhornImportance(4)),
        (one_layer(13), "mean field", False, ExactOrbit()),
        (two_layers(8, 4), "mean field", True, ExactOrbit()),
        (two_layers(6, 6), "mean field", True, SinkhornImportance(4)),
        (one_layer(12), "normal", False, SinkhornImportance(16)),
        (one_layer(6), "normal", True, ExactOrbit()),
        (one_layer(7), "other", True, SinkhornImportance(4)),
        (heads(), "mean field", True, ExactOrbit()),
        (one_layer(8, moves=("permute", "flip")), "mean field", True, ExactOrbit()),
    ],
)
def test_the_default_is_exact_if_that_is_cheap(
    group: Group, base: str, training: bool, expected: OrbitEstimator
) -> None:
    action = action_of(group)
    q: Any = dist.Normal(torch.zeros(action.dim), 1.0).to_event(1)
    if base != "mean field":
        q = dist.LowRankMultivariateNormal(
            q.mean, torch.ones(action.dim, 1), q.variance
        )
    q = dist.TransformedDistribution(q, []) if base == "other" else q
    assert usual_estimator(q, action, training) == expected
    if training:
        assert Symmetrized(q, action).estimator == expected
