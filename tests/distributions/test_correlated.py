"""Estimators for bases whose weights are correlated, against enumeration."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_symmetric.distributions import ExactOrbit, SinkhornImportance, UnitBlocks, conditional_walk
from pyro_symmetric.distributions.conditional_walk import ConditionalWalk
from pyro_symmetric.distributions.normals import normals_of, sites_of
from pyro_symmetric.distributions.orbit import suggested
from pyro_symmetric.distributions.placements import Drawn
from pyro_symmetric.distributions.proposal import walkers_of
from pyro_symmetric.distributions.unit_densities import UnitDensities
from pyro_symmetric.groups import Action, Axis, Group, Units

from .groups import (
    BOTH,
    action_of,
    by_enumeration,
    loadings,
    one_layer,
    part_of_an_axis,
    recurrent,
    signed,
    two_layers,
    wide_and_deep,
)

GROUPS = {
    "one layer": one_layer(4),
    "two layers": two_layers(3, 2, inputs=2),
    "signed one layer": signed("one layer"),
    "signed two layers": signed("two layers"),
    "signs alone": signed("signs alone"),
    "recurrent": recurrent(4),
    "part of an axis": part_of_an_axis(),
    "wide and deep": wide_and_deep(),
    "loadings": loadings(),
}


def full_rank(dim: int, separation: float = 0.5) -> Any:
    generator = torch.Generator(torch.empty(0).device).manual_seed(1)
    noise = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    scale = 0.3 + torch.rand(dim, dtype=torch.float64, generator=generator)
    loc = separation * torch.randn(dim, dtype=torch.float64, generator=generator)
    root = (torch.eye(dim, dtype=torch.float64) + 0.3 * noise.tril(-1)) * scale.unsqueeze(-1)
    return dist.MultivariateNormal(loc.requires_grad_(), scale_tril=root.requires_grad_())


def low_rank(dim: int, separation: float = 0.5) -> Any:
    generator = torch.Generator(torch.empty(0).device).manual_seed(1)
    factor = 0.5 * torch.randn(dim, 2, dtype=torch.float64, generator=generator)
    scale = 0.3 + torch.rand(dim, dtype=torch.float64, generator=generator)
    loc = separation * torch.randn(dim, dtype=torch.float64, generator=generator)
    return dist.LowRankMultivariateNormal(loc.requires_grad_(), factor.requires_grad_(), scale.requires_grad_())


def unit_blocks(group: Group, inputs: int, separation: float = 0.5) -> UnitBlocks:
    """Rows, biases and outgoing weights of one layer: ``weight (n, inputs)``, ``bias (n)``, ``out (1, n)``."""
    action, n = action_of(group), next(iter(group.units.values())).size
    pieces = action.layout.unflatten(torch.arange(action.dim))
    units = torch.cat([pieces["weight"], pieces["bias"][:, None], pieces["out"].mT], -1)
    generator = torch.Generator(torch.empty(0).device).manual_seed(1)
    noise = torch.randn(n, inputs + 2, inputs + 2, dtype=torch.float64, generator=generator)
    tril = (torch.eye(inputs + 2, dtype=torch.float64) + 0.7 * noise.tril(-1)) * 0.6
    loc = separation * torch.randn(action.dim, dtype=torch.float64, generator=generator)
    return UnitBlocks(loc.requires_grad_(), [units], [tril.requires_grad_()])


class Bent(dist.transforms.Transform):
    """``x + sin(x) / 2``, entry by entry: a flow."""

    domain = codomain = dist.constraints.independent(dist.constraints.real, 1)
    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        return x + x.sin() / 2

    def _inverse(self, y: Tensor) -> Tensor:
        x = y
        for _ in range(12):
            x = x - (x + x.sin() / 2 - y) / (1 + x.cos() / 2)
        return x

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return (1 + x.cos() / 2).log().sum(-1)


def flow(dim: int) -> Any:
    return dist.TransformedDistribution(full_rank(dim), [Bent()])


def units_of(group: Group, q: Any, w: Tensor) -> UnitDensities:
    action = action_of(group)
    return UnitDensities(group, normals_of(q, action, w.shape[:1]), sites_of(action, w))


def conditional_walks(units: UnitDensities, count: int = 0) -> list[ConditionalWalk]:
    return [walk for walk in walkers_of(units, count) if isinstance(walk, ConditionalWalk)]


def log_tau(walk: ConditionalWalk, units: UnitDensities, element: Any) -> Tensor:
    """``log τ_w(g)`` of given elements, one for each draw."""
    given, element = {}, element.to(units.like.device)
    for name, own in units.sets.items():
        images = element[name][None] if own.is_permuted else None
        given[name] = Drawn(images, element.signs[name].double()[None] if own.is_flipped else None)
    return walk.walk(given)[1][0]


# conditional walks --------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["listed", "step by step"])
def listed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With places filled at once as far as they go, and with two matchings at most."""
    conditional_walk._listed.cache_clear()
    if not request.param:
        monkeypatch.setattr(conditional_walk, "LISTED", 2)
    yield
    conditional_walk._listed.cache_clear()


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("kind", list(GROUPS))
def test_conditional_proposals_depend_on_the_orbit_alone_and_have_probabilities(kind: str) -> None:
    """``τ_w(g) = τ_{h·w}(g h⁻¹)``, and the sum over all elements is one."""
    group = GROUPS[kind]
    action = action_of(group)
    q = full_rank(action.dim)
    w, h = q.sample((4,)), group.sample((4,))
    element = group.sample((4,))
    here, there = units_of(group, q, w), units_of(group, q, action(w, h))
    assert conditional_walks(here)
    for own, moved in zip(conditional_walks(here), conditional_walks(there), strict=True):
        found = log_tau(moved, there, element @ h.inverse())
        torch.testing.assert_close(found, log_tau(own, here, element), rtol=1e-5, atol=1e-5)
    every = group.enumerate()
    count = every.batch_shape[0]
    units = units_of(group, q, w[:1].expand(count, -1))
    for walk in conditional_walks(units):
        assert float(log_tau(walk, units, every).logsumexp(0)) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.stochastic
@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("kind", ["one layer", "signed one layer", "two layers"])
def test_elements_are_drawn_with_the_probabilities_that_are_told(kind: str) -> None:
    """Frequencies of each unit in each place, and of its flips: 6 standard errors, false alarm below 1 in 10^6."""
    group, count = GROUPS[kind], 4000
    q = full_rank(action_of(group).dim)
    w, every = q.sample((1,)), group.enumerate()
    units = units_of(group, q, w)
    many = units_of(group, q, w.expand(every.batch_shape[0], -1))
    for walk, enumerated in zip(conditional_walks(units, count), conditional_walks(many), strict=True):
        drawn, told = walk.walk(None)
        torch.testing.assert_close(walk.walk(drawn)[1], told)
        log_probability = log_tau(enumerated, many, every)
        for name, own in drawn.items():
            size = own.images.shape[-1]
            expected = log_probability.exp() @ torch.eye(size, dtype=torch.float64)[every[name]].flatten(1)
            found = torch.eye(size, dtype=torch.float64)[own.images[1:, 0]].flatten(1).mean(0)
            error = (expected * (1 - expected) / count).clamp(min=0).sqrt()
            assert bool(((found - expected).abs() < 6 * error + 20 / count).all())
            if own.signs is not None:
                expected = log_probability.exp() @ every.signs[name].double()
                assert bool(((own.signs[1:, 0].mean(0) - expected).abs() < 6 / count**0.5).all())


@pytest.mark.parametrize(
    ("group", "family"),
    [
        (one_layer(6, inputs=1), full_rank),
        (one_layer(5), low_rank),
        (one_layer(3, moves=BOTH), full_rank),
        (one_layer(7, moves="flip"), low_rank),
    ],
)
def test_few_units_are_drawn_from_the_posterior_of_the_element(group: Group, family: Callable[[int], Any]) -> None:
    """So that the bound is exact, whatever is drawn."""
    action = action_of(group)
    q = family(action.dim)
    w = q.rsample((5,))
    torch.testing.assert_close(SinkhornImportance(1).log_prob(q, action, w), ExactOrbit().log_prob(q, action, w))


@pytest.mark.parametrize("family", [full_rank, low_rank])
def test_sites_of_one_number_are_matched_like_others(family: Callable[[int], Any]) -> None:
    """One that stays, first among the sites, so that it shifts all entries."""
    three = torch.arange(3)[None]
    shapes = {"still": torch.Size([]), "w": torch.Size([3, 2])}
    group = Group([Units("k", 3, (Axis("w", 0, three),))], shapes)
    action = Action(group, ["still", "w"])
    q = family(action.dim)
    w = q.sample((5,))
    exact = by_enumeration(q, action, w)
    torch.testing.assert_close(ExactOrbit().log_prob(q, action, w), exact)
    torch.testing.assert_close(SinkhornImportance(1).log_prob(q, action, w), exact)
    moved = q.sample((5,))[:, torch.randperm(action.dim)]
    found = SinkhornImportance(1).log_prob_elsewhere(q, action, moved)
    torch.testing.assert_close(found, by_enumeration(q, action, moved))


@pytest.mark.parametrize("moves", ["permute", "flip", BOTH])
def test_unit_blocks_have_exact_permanents_and_proposals(moves: Any) -> None:
    group = one_layer(3, inputs=2, moves=moves)
    action, q = action_of(group), unit_blocks(group, 2)
    w = q.rsample((4,))
    found, expected = ExactOrbit().log_prob(q, action, w), by_enumeration(q, action, w)
    torch.testing.assert_close(found, expected)
    parameters = (q.loc, *q.scale_trils)
    gradients = [torch.autograd.grad(v.sum(), parameters, retain_graph=True) for v in (found, expected)]
    torch.testing.assert_close(gradients[0][0], gradients[1][0])
    torch.testing.assert_close(gradients[0][1].tril(), gradients[1][1].tril())  # numbers above a diagonal don't count
    torch.testing.assert_close(SinkhornImportance(1).log_prob(q, action, w), expected)


def test_unit_blocks_have_permanents_at_widths_that_cannot_be_enumerated() -> None:
    group = one_layer(13, inputs=2)
    action, q = action_of(group), unit_blocks(group, 2, separation=30.0)
    w = q.sample((2,))
    torch.testing.assert_close(ExactOrbit().log_prob(q, action, w), q.log_prob(w) - math.lgamma(14))


@pytest.mark.stochastic
@pytest.mark.parametrize("family", [full_rank, low_rank])
def test_seven_correlated_units_keep_95_percent_of_the_gain_at_the_default(family: Callable[[int], Any]) -> None:
    """And the bound isn't crossed: one-sided at 5 standard errors, false alarm below 1 in 10^6."""
    group = one_layer(7, inputs=1)
    action = action_of(group)
    with torch.no_grad():
        q = family(action.dim)
        w = q.sample((150,))
        exact = ExactOrbit().log_prob(q, action, w)
        gap, gain = SinkhornImportance().log_prob(q, action, w) - exact, q.log_prob(w) - exact
    assert float(gap.mean()) < 0.05 * float(gain.mean())
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))


@pytest.mark.stochastic
def test_a_batch_of_expanded_bases_is_matched_as_one() -> None:
    group = one_layer(4)
    action = action_of(group)
    for q in (full_rank(action.dim), low_rank(action.dim), unit_blocks(group, 3)):
        many = q.expand((6,))
        w = many.sample()
        torch.testing.assert_close(SinkhornImportance(1).log_prob(many, action, w), ExactOrbit().log_prob(q, action, w))


def test_draws_that_are_not_finite_are_matched_anyhow() -> None:
    group = one_layer(4)
    action = action_of(group)
    q = dist.MultivariateNormal(torch.zeros(action.dim), torch.eye(action.dim), validate_args=False)
    w = torch.zeros(2, action.dim).index_fill(0, torch.tensor([1]), math.inf)
    found = SinkhornImportance(2).log_prob(q, action, w)
    assert bool(found[0].isfinite())
    assert not bool(found[1].isfinite())


# gradients ----------------------------------------------------------------------------------------------------------

SUPPORTS = {
    "locs": dist.constraints.real,
    "scales": dist.constraints.positive,
    "weights": dist.constraints.simplex,
}


def components(count: int) -> Group:
    return Group.declare(dict.fromkeys(SUPPORTS, ("component",)), dict.fromkeys(SUPPORTS, torch.Size([count])))


COMPONENTS = components(3)


def mean_field(dim: int) -> Any:
    loc = torch.randn(dim, dtype=torch.float64, requires_grad=True)
    return dist.Normal(loc, torch.full((dim,), 0.7, dtype=torch.float64)).to_event(1)


@pytest.mark.parametrize(
    ("group", "family", "kind"),
    [
        (one_layer(5), mean_field, "mean field"),
        (one_layer(5), low_rank, "normal"),
        (one_layer(6, inputs=1), full_rank, "normal"),
        (one_layer(4), flow, "other"),
        (one_layer(3, moves=BOTH), mean_field, "mean field"),
        (signed("one layer"), full_rank, "normal"),
        (two_layers(4, 3), mean_field, "mean field"),
        (two_layers(4, 3), low_rank, "normal"),
        (COMPONENTS, mean_field, "other"),
    ],
)
def test_the_default_s_gradient_is_that_of_enumeration(group: Group, family: Callable[[int], Any], kind: Any) -> None:
    estimator = suggested(group, kind, True)
    action = Action(group, SUPPORTS if group is COMPONENTS else list(group.site_shapes))
    torch.manual_seed(0)
    q = family(action.dim)
    w = q.rsample((2,))
    values = [estimator.log_prob(q, action, w), by_enumeration(q, action, w)]
    gradients = [torch.autograd.grad(v.sum(), w, retain_graph=True)[0] for v in values]
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.stochastic
def test_components_are_matched_in_coordinates_that_are_normal() -> None:
    """Coordinates, and centred logarithms of weights: of overlapping components, four matchings then miss 0.01 of
    3 nats; by positive values and plain logarithms, 0.4. The mean's error is about 0.004."""
    action = Action(components(5), SUPPORTS)
    torch.manual_seed(0)
    base = dist.Normal(0.7 * torch.randn(action.dim), 0.3 + torch.rand(action.dim)).to_event(1)
    w = base.sample((2000,))
    missed = SinkhornImportance(4).log_prob(base, action, w) - ExactOrbit().log_prob(base, action, w)
    assert float(missed.mean()) < 0.06
