"""Every estimator against the exact sum over the orbit, which is checked against enumeration by loops elsewhere."""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_symmetric.distributions import (
    ESTIMATORS,
    ExactOrbit,
    InfoNCE,
    OrbitEstimator,
    SinkhornImportance,
    Symmetrized,
    exact,
    sinkhorn_importance,
)
from pyro_symmetric.distributions.normals import normals_of, sites_of
from pyro_symmetric.distributions.orbit import BaseKind, estimator_from_dict, suggested
from pyro_symmetric.distributions.placements import Drawn
from pyro_symmetric.distributions.proposal import walkers_of
from pyro_symmetric.distributions.unit_densities import UnitDensities
from pyro_symmetric.distributions.unit_sets import log_order_of
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
    signed,
    two_layers,
)

# exact --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("batch", [(), (3,)])
def test_permanents_and_enumeration_agree_in_value_and_gradient(name: str, batch: tuple[int, ...]) -> None:
    action = action_of(GROUPS[name])
    loc = torch.randn(*batch, action.dim, dtype=torch.float64, requires_grad=True)
    scale = (0.3 + torch.rand(*batch, action.dim, dtype=torch.float64)).requires_grad_()
    q = dist.Normal(loc, scale).to_event(1)
    w = q.rsample((4,))
    weights = torch.randn(4, *batch, dtype=torch.float64)
    results = [ExactOrbit().log_prob(q, action, w), by_enumeration(q, action, w)]
    torch.testing.assert_close(results[0], results[1])
    gradients = [torch.autograd.grad((r * weights).sum(), (loc, scale), retain_graph=True) for r in results]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_exact_orbit_reaches_widths_that_cannot_be_enumerated() -> None:
    action = action_of(one_layer(14, inputs=9))
    q = base(action.dim, 20.0)
    w = q.sample((3,))
    # Units far apart: one term of the sum counts, so all of log 14! is found.
    torch.testing.assert_close(ExactOrbit().log_prob(q, action, w), q.log_prob(w) - math.lgamma(15))


def test_exact_orbit_names_what_is_too_large() -> None:
    action = action_of(one_layer(30))
    with pytest.raises(ValueError, match=r"exp\(74\.7\).*SinkhornImportance"):
        ExactOrbit().log_prob(base(action.dim, 1.0), action, torch.zeros(action.dim, dtype=torch.float64))


# SinkhornImportance -------------------------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("name", [*PERMUTED, *NESTED])
@pytest.mark.parametrize("separation", [0.0, 0.2, 0.5, 1.0, 4.0])
def test_sinkhorn_importance_is_close_to_the_exact_value_and_never_below(name: str, separation: float) -> None:
    """The margin is 0.2 nats, and twice that for a recurrent layer, whose densities are quadratic in the permutation.
    It is no law, but holds for these bases: of others drawn alike, one in a hundred has a gap of 0.2 to 0.7 nats, in
    deep networks whose units overlap, most of it from rare draws. On the wrong side: one-sided at 5 standard errors,
    false alarm below 1 in 10^6."""
    action = action_of(GROUPS[name])
    q = base(action.dim, separation, generator=torch.Generator(torch.empty(0).device).manual_seed(0))
    w = q.sample((400,))
    exact = ExactOrbit().log_prob(q, action, w)
    gap = SinkhornImportance(16).log_prob(q, action, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap)) - 1e-9
    assert float(gap.mean()) < (0.4 if name == "recurrent" else 0.2)


@pytest.mark.stochastic
@pytest.mark.parametrize("width", [3, 8, 12])
@pytest.mark.parametrize("separation", [0.0, 0.15, 0.3, 0.6, 3.0])
def test_one_hidden_layer_is_met_within_a_tenth_of_a_nat(width: int, separation: float) -> None:
    action = action_of(one_layer(width, inputs=10))
    q = base(action.dim, separation)
    w = q.sample((300,))
    gap = SinkhornImportance(16).log_prob(q, action, w) - ExactOrbit().log_prob(q, action, w)
    assert abs(float(gap.mean())) < 0.1


@pytest.mark.stochastic
@pytest.mark.parametrize("k", [1, 4])
def test_few_proposals_give_an_upper_bound_too(k: int) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    action = action_of(two_layers(4, 3))
    q = base(action.dim, 0.3)
    w = q.sample((4000,))
    gap = SinkhornImportance(k).log_prob(q, action, w) - ExactOrbit().log_prob(q, action, w)
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))


@pytest.mark.stochastic
def test_width_64_with_separated_units_finds_all_of_log_64_factorial() -> None:
    action = action_of(one_layer(64, inputs=10))
    q = base(action.dim, 5.0)
    w = q.sample((20,))
    gain = q.log_prob(w) - SinkhornImportance(4).log_prob(q, action, w)
    assert float(gain.mean()) == pytest.approx(math.lgamma(65), abs=0.1)
    capped = q.log_prob(w) - InfoNCE(255).log_prob(q, action, w)
    assert float(capped.max()) <= math.log(256) + 1e-9


def scores_of(group: Group, q: Any, w: torch.Tensor) -> UnitDensities:
    action = action_of(group)
    return UnitDensities(group, normals_of(q, action, w.shape[:1]), sites_of(action, w))


def proposal_probability(group: Group, q: Any, w: torch.Tensor, element: Any, walk: int) -> torch.Tensor:
    """``log τ_w(g)`` of given elements, one for each draw, by one of the walks."""
    units, element = scores_of(group, q, w), element.to(w.device)
    walker = walkers_of(units, 0)[walk]
    given = {}
    for name, own in units.sets.items():
        one, images = own.units, None
        if own.is_permuted:
            first = torch.arange(0, one.count, one.size, device=w.device).unsqueeze(-1)
            images = (element[name].reshape(len(w), one.copies, one.size) + first).reshape(1, len(w), -1)
        signs = element.signs[name].reshape(1, len(w), -1).double() if own.is_flipped else None
        given[name] = Drawn(images, signs)
    return walker.walk(given)[1][0]


@pytest.mark.parametrize("kind", list(GROUPS))
@pytest.mark.parametrize("walk", [0, 1, 2, 3])
def test_the_proposal_depends_on_the_orbit_alone(kind: str, walk: int) -> None:
    """``τ_w(g) = τ_{h·w}(g h⁻¹)``: which copy of the draw it is given must not matter, or the bound is none."""
    group = GROUPS[kind]
    action = action_of(group)
    q = base(action.dim, 0.4)
    w = q.sample((6,))
    if walk >= len(walkers_of(scores_of(group, q, w), 0)):
        return
    element, other = group.sample((6,)), group.sample((6,))
    own = proposal_probability(group, q, w, element, walk)
    moved = proposal_probability(group, q, action(w, other), element @ other.inverse(), walk)
    torch.testing.assert_close(moved, own)


@pytest.mark.parametrize("kind", [*NESTED, *SIGNED])
def test_the_probabilities_of_all_elements_sum_to_one(kind: str) -> None:
    group = GROUPS[kind]
    q = base(action_of(group).dim, 0.4)
    w, elements = q.sample((1,)), group.enumerate()
    units = scores_of(group, q, w)
    alike = math.exp(log_order_of(group, units.sets) - group.log_order())  # elements that act alike are drawn alike
    for walk in range(len(walkers_of(units, 0))):
        found = proposal_probability(group, q, w.expand(group.order(), -1), elements, walk)
        assert alike * float(found.exp().sum()) == pytest.approx(1.0)


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", ["loadings", "recurrent with signs"])
@pytest.mark.parametrize("k", [1, 16])
def test_signs_on_a_part_of_the_sites_give_an_upper_bound(kind: str, k: int) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    action = action_of(SIGNED[kind])
    q = base(action.dim, 0.4)
    w = q.sample((2000,))
    gap = SinkhornImportance(k).log_prob(q, action, w) - ExactOrbit().log_prob(q, action, w)
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))


@pytest.mark.stochastic
@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_sharp_units_among_loose_ones_keep_their_digits_in_float32(scale: float) -> None:
    """One pinned unit, and pairs of near-duplicates: log-densities of millions of which a few nats matter."""
    group = one_layer(6, inputs=300)
    action = action_of(group)
    loc = {site: torch.zeros(shape) for site, shape in group.site_shapes.items()}
    spread = {site: torch.ones(shape) for site, shape in group.site_shapes.items()}
    loc["weight"][0], spread["weight"][0] = torch.randn(300), scale
    loc["weight"][1], spread["weight"][1:3] = torch.randn(300), scale
    loc["weight"][2] = loc["weight"][1] + 0.05 * scale
    q = dist.Normal(action.layout.flatten(loc), action.layout.flatten(spread)).to_event(1)
    wide = dist.Normal(action.layout.flatten(loc).double(), action.layout.flatten(spread).double()).to_event(1)
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


@pytest.mark.parametrize("estimator", [SinkhornImportance(3), ExactOrbit()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_correlated_base_whose_training_broke_down_has_no_density(estimator: Any, bad: float) -> None:
    """And nothing is raised, so that Pyro can say that the loss is NaN."""
    action = action_of(one_layer(7))
    root = torch.eye(action.dim).index_fill(0, torch.tensor([2]), bad)
    q = dist.MultivariateNormal(torch.zeros(action.dim), scale_tril=root, validate_args=False)
    assert estimator.log_prob(q, action, torch.randn(4, action.dim)).isnan().all()


def test_the_exact_sum_can_be_cached_in_inference_mode_and_trained_with_afterwards() -> None:
    action = action_of(one_layer(9, inputs=2))
    loc = torch.randn(action.dim, requires_grad=True)
    for estimator in (ExactOrbit(), SinkhornImportance(2)):
        with torch.inference_mode():
            estimator.log_prob(dist.Normal(loc, 1.0).to_event(1), action, torch.randn(action.dim))
        estimator.log_prob(dist.Normal(loc, 1.0).to_event(1), action, torch.randn(action.dim)).backward()


def test_permanents_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    action = action_of(two_layers(4, 3))
    loc = torch.randn(2, action.dim, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 2, action.dim, dtype=torch.float64)

    def value_and_gradient() -> tuple[torch.Tensor, ...]:
        value = ExactOrbit().log_prob(dist.Normal(loc, 1.0).to_event(1), action, w)
        return value, *torch.autograd.grad(value.sum(), loc)

    whole = value_and_gradient()
    monkeypatch.setattr(exact, "CHUNK_NUMBERS", 500)
    torch.testing.assert_close(value_and_gradient(), whole)


def test_sinkhorn_importance_says_that_it_cannot_be_traced() -> None:
    action = action_of(one_layer(4))
    q = dist.Normal(torch.zeros(action.dim), 1.0).to_event(1)
    with pytest.raises(NotImplementedError, match="JitTrace_ELBO"):
        torch.jit.trace(lambda w: SinkhornImportance(2).log_prob(q, action, w), torch.randn(action.dim))


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("separation", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_short_way_to_values_and_gradients_is_the_long_one(
    name: str, separation: float, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same random numbers: only what moves is scored, against scoring moved vectors as wholes."""
    action = action_of(GROUPS[name])
    loc = (separation * torch.randn(*batch, action.dim, dtype=torch.float64)).requires_grad_()
    scale = (0.3 + torch.rand(*batch, action.dim, dtype=torch.float64)).requires_grad_()
    noise, weights = torch.randn(5, *batch, action.dim, dtype=torch.float64), torch.rand(5, *batch, dtype=torch.float64)

    def value_and_gradients() -> tuple[torch.Tensor, ...]:
        pyro.set_rng_seed(3)
        value = SinkhornImportance(6).log_prob(dist.Normal(loc, scale).to_event(1), action, loc + scale * noise)
        return value, *torch.autograd.grad((value * weights).sum(), (loc, scale))

    short = value_and_gradients()
    monkeypatch.setattr(sinkhorn_importance, "is_mean_field", lambda *_: False)
    torch.testing.assert_close(value_and_gradients(), short)


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", ["full", "low", "flow"])
def test_other_bases_are_bounded_too(kind: str) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6; and most of what InfoNCE misses is found."""
    action = action_of(one_layer(4))
    loc, factor = 0.7 * torch.randn(action.dim), 0.4 * torch.randn(action.dim, 3)
    diagonal = 0.2 + torch.rand(action.dim)
    q: Any = dist.LowRankMultivariateNormal(loc, factor, diagonal)
    if kind == "full":
        q = dist.MultivariateNormal(loc, factor @ factor.T + diagonal.diag())
    elif kind == "flow":
        bend = dist.transforms.AffineTransform(0.0, 1.0), dist.transforms.TanhTransform()
        q = dist.TransformedDistribution(dist.Normal(0.7 * loc, 0.5).to_event(1), list(bend))
    w = q.sample((1500,))
    exact = ExactOrbit().log_prob(q, action, w)
    gap = SinkhornImportance(16).log_prob(q, action, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))
    assert float(gap.mean()) < 0.3 * float((q.log_prob(w) - exact).mean())


@pytest.mark.parametrize("batch", [(), (4,)])
@pytest.mark.parametrize("sample", [(), (2, 3)])
def test_shapes_and_dtypes_follow_the_base(batch: tuple[int, ...], sample: tuple[int, ...]) -> None:
    action = action_of(one_layer(4))
    for dtype in (torch.float32, torch.float64):
        q = dist.Normal(torch.randn(*batch, action.dim, dtype=dtype), 1.0).to_event(1)
        symmetrized = Symmetrized(q, action, SinkhornImportance(3))
        value = symmetrized.log_prob(symmetrized.rsample(sample))
        assert value.shape == (*sample, *batch)
        assert value.dtype == dtype


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_a_number_of_proposals_that_is_none_is_refused(k: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="K is"):
        SinkhornImportance(k)


# signs --------------------------------------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", ["one layer", "two layers", "signs alone", "signs of one layer, exchanges of both"])
@pytest.mark.parametrize("separation", [0.0, 0.3, 1.0, 4.0])
def test_signs_are_averaged_over_too(kind: str, separation: float) -> None:
    """Against enumeration; on the wrong side: one-sided at 5 standard errors, false alarm below 1 in 10^6."""
    group = signed(kind)
    action = action_of(group)
    q = base(action.dim, separation)
    w = q.sample((400,))
    exact = ExactOrbit().log_prob(q, action, w)
    gap = SinkhornImportance(16).log_prob(q, action, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap)) - 1e-9
    assert float(gap.mean()) < 0.25
    # Ignoring the signs would miss log 2 for each unit where units are far apart.
    if separation == 4.0:
        assert float((q.log_prob(w) - exact).mean()) > group.log_order() - 0.5


@pytest.mark.stochastic
def test_a_wide_layer_with_signs_finds_all_of_its_nats() -> None:
    action = action_of(one_layer(40, inputs=8, moves=("permute", "flip")))
    q = base(action.dim, 4.0)
    w = q.sample((20,))
    gain = q.log_prob(w) - SinkhornImportance(4).log_prob(q, action, w)
    assert float(gain.mean()) == pytest.approx(math.lgamma(41) + 40 * math.log(2), abs=0.2)


def test_exact_orbit_sums_the_signs_of_a_layer_too_wide_to_enumerate() -> None:
    action = action_of(one_layer(8, moves=("permute", "flip")))
    q = base(action.dim, 20.0)
    w = q.sample((3,))
    nats = math.lgamma(9) + 8 * math.log(2)
    torch.testing.assert_close(ExactOrbit().log_prob(q, action, w), q.log_prob(w) - nats)


# units inside units -------------------------------------------------------------------------------------------------


def test_the_sum_over_heads_and_their_rows_equals_loops() -> None:
    """On the matrices themselves: rows inside each head in both orders, and both heads in both."""
    group = heads()
    action = action_of(group)
    q = base(action.dim, 0.5)
    for w in q.sample((3,)):
        rows, columns, gates = w[:8].reshape(4, 2), w[8:16].reshape(2, 4), w[16:]
        terms = []
        for order, first, second in itertools.product([(0, 1), (1, 0)], repeat=3):
            inside = [list(first), [2 + i for i in second]]
            images = inside[order[0]] + inside[order[1]]
            moved = [rows[images].reshape(-1), columns[:, images].reshape(-1), gates[list(order)]]
            terms.append(q.log_prob(torch.cat(moved)))
        expected = torch.stack(terms).logsumexp(0) - math.log(8)
        torch.testing.assert_close(ExactOrbit().log_prob(q, action, w), expected)


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", list(NESTED))
@pytest.mark.parametrize("separation", [0.0, 0.4, 1.0])
def test_a_single_proposal_over_nested_units_gives_an_upper_bound(kind: str, separation: float) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    action = action_of(NESTED[kind])
    q = base(action.dim, separation)
    w = q.sample((2000,))
    gap = SinkhornImportance(1).log_prob(q, action, w) - ExactOrbit().log_prob(q, action, w)
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap)) - 1e-9


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", list(NESTED))
def test_nested_units_far_apart_give_all_of_their_nats(kind: str) -> None:
    group = NESTED[kind]
    action = action_of(group)
    q = base(action.dim, 30.0)  # so far that no two units are alike by chance
    w = q.sample((50,))
    gain = q.log_prob(w) - SinkhornImportance(16).log_prob(q, action, w)
    assert float(gain.mean()) > 0.95 * group.log_order()


@pytest.mark.stochastic
def test_wide_heads_are_averaged_over_from_outside_to_inside() -> None:
    group = heads(6, 12)
    action = action_of(group)
    q = base(action.dim, 30.0)
    w = q.sample((10,))
    gain = q.log_prob(w) - SinkhornImportance(4).log_prob(q, action, w)
    assert float(gain.mean()) == pytest.approx(math.lgamma(7) + 6 * math.lgamma(13), abs=0.1)


@pytest.mark.parametrize("estimator", [ExactOrbit(), SinkhornImportance(8)])
def test_units_of_buffers_alone_change_nothing(estimator: OrbitEstimator) -> None:
    """Running statistics have no density, so that the average over their units is one over equal terms."""
    four = torch.arange(4)[None]
    weights = Units("hidden", 4, (Axis("w", 0, four), Axis("mean", 0, four, buffer=True)))
    alone = Units("statistics", 3, (Axis("count", 0, torch.arange(3)[None], buffer=True),))
    shapes = {"w": torch.Size([4, 2]), "mean": torch.Size([4]), "count": torch.Size([3])}
    both, one = (Action(Group(units, shapes), ["w"]) for units in ([weights, alone], [weights]))
    q = base(8, 0.5)
    w = q.sample((5,))
    torch.testing.assert_close(estimator.log_prob(q, both, w), by_enumeration(q, one, w))


# the registry -------------------------------------------------------------------------------------------------------


def test_whoever_defines_an_estimator_has_registered_it() -> None:
    @dataclass(frozen=True)
    class BaseAlone(OrbitEstimator):
        """Averages over nothing."""

        note: str = "none"
        bound: ClassVar[Any] = "upper"

        def log_prob(self, base: Any, action: Any, value: torch.Tensor) -> torch.Tensor:
            return base.log_prob(value)

    try:
        assert ESTIMATORS["BaseAlone"] is BaseAlone
        assert estimator_from_dict(BaseAlone("some").to_dict()) == BaseAlone("some")
        assert isinstance(suggested(one_layer(40), "mean field", True), SinkhornImportance)
    finally:
        del ESTIMATORS["BaseAlone"]
    with pytest.raises(ValueError, match="BaseAlone"):
        estimator_from_dict({"name": "BaseAlone"})


@pytest.mark.parametrize("estimator", [SinkhornImportance(3), InfoNCE(2), ExactOrbit(50)])
def test_estimators_go_to_json_and_back(estimator: OrbitEstimator) -> None:
    assert estimator_from_dict(estimator.to_dict()) == estimator


@pytest.mark.parametrize(
    ("group", "base", "training", "expected"),
    [
        (one_layer(4), "mean field", True, ExactOrbit()),
        (one_layer(12), "mean field", True, ExactOrbit()),
        (one_layer(13), "mean field", True, SinkhornImportance(4)),
        (one_layer(13), "mean field", False, ExactOrbit()),
        (two_layers(8, 4), "mean field", True, ExactOrbit()),
        (two_layers(6, 6), "mean field", True, SinkhornImportance(16)),
        (two_layers(40, 40), "mean field", True, SinkhornImportance(4)),
        (one_layer(12), "normal", False, SinkhornImportance(64)),
        (one_layer(120), "normal", True, SinkhornImportance(4)),
        (one_layer(12), "unit blocks", False, ExactOrbit()),
        (two_layers(5, 5), "unit blocks", True, SinkhornImportance(16)),
        (one_layer(6), "normal", True, ExactOrbit()),
        (one_layer(6, inputs=20), "normal", True, SinkhornImportance(16)),
        (one_layer(7), "normal", True, SinkhornImportance(16)),
        (one_layer(6), "other", True, ExactOrbit()),
        (one_layer(7), "other", True, SinkhornImportance(16)),
        (heads(), "mean field", True, ExactOrbit()),
        (one_layer(8, moves=("permute", "flip")), "mean field", True, ExactOrbit()),
    ],
)
def test_what_is_suggested_is_exact_if_that_is_cheap(
    group: Group, base: BaseKind, training: bool, expected: OrbitEstimator
) -> None:
    assert suggested(group, base, training) == expected
