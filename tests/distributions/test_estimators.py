"""Every estimator against the exact sum over the orbit, which is checked against enumeration by loops elsewhere."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_symmetric.distributions import (
    BetheBound,
    ExactOrbit,
    InfoNCE,
    SinkhornImportance,
    Symmetrized,
    exact,
    sinkhorn_importance,
)
from pyro_symmetric.distributions.normals import normals_of, sites_of
from pyro_symmetric.distributions.proposal import _Walker, walks
from pyro_symmetric.distributions.unit_sets import unit_sets
from pyro_symmetric.distributions.units import Placement, UnitDensities
from pyro_symmetric.symmetry import find_symmetry
from pyro_symmetric.symmetry.finite import FiniteGroup, SignedPermutation
from pyro_symmetric.symmetry.permutation import Axis, Factor, PermutationGroup
from pyro_symmetric.symmetry.rescaling import SignGroup


def one_layer(n: int, inputs: int = 3, outputs: int = 1) -> PermutationGroup:
    return PermutationGroup.declare(
        {"weight": ("hidden", None), "bias": ("hidden",), "out": (None, "hidden")},
        {"weight": torch.Size([n, inputs]), "bias": torch.Size([n]), "out": torch.Size([outputs, n])},
    )


def two_layers(n: int, m: int, inputs: int = 3) -> PermutationGroup:
    return PermutationGroup.declare(
        {"a": ("first", None), "b": ("second", "first"), "c": (None, "second")},
        {"a": torch.Size([n, inputs]), "b": torch.Size([m, n]), "c": torch.Size([2, m])},
    )


def recurrent(n: int) -> PermutationGroup:
    return PermutationGroup.declare(
        {"input": ("h", None), "hidden": ("h", "h"), "out": (None, "h")},
        {"input": torch.Size([n, 2]), "hidden": torch.Size([n, n]), "out": torch.Size([1, n])},
    )


def part_of_an_axis() -> PermutationGroup:
    """Units in blocks of two positions, on a part of the second site's axis only (a flattened, concatenated layer)."""
    axes = (
        Axis("w", 0, torch.arange(4)[None]),
        Axis("v", 1, torch.tensor([[1, 3, 5, 7], [2, 4, 6, 8]])),
    )
    return PermutationGroup([Factor("h", 4, axes)], {"w": torch.Size([4, 2]), "v": torch.Size([2, 10])})


def wide_and_deep() -> PermutationGroup:
    """Two branches that end in one matrix: two factors on different parts of one of its axes."""
    shapes = {"a": torch.Size([3, 2]), "b": torch.Size([4, 2]), "c": torch.Size([3, 4]), "out": torch.Size([1, 6])}
    axes = {
        "wide": (Axis("a", 0, torch.arange(3)[None]), Axis("out", 1, torch.arange(3)[None])),
        "deep": (Axis("b", 0, torch.arange(4)[None]), Axis("c", 1, torch.arange(4)[None])),
        "last": (Axis("c", 0, torch.arange(3)[None]), Axis("out", 1, torch.arange(3, 6)[None])),
    }
    return PermutationGroup([Factor(name, axes[name][0].index.shape[1], axes[name]) for name in axes], shapes)


def grouped_convolution() -> PermutationGroup:
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1, groups=2))
    return find_symmetry(net.eval(), torch.randn(1, 2, 2, 2)).permutations


GROUPS = {
    "wide and deep": wide_and_deep(),
    "one layer": one_layer(5),
    "two layers": two_layers(4, 3),
    "recurrent": recurrent(4),
    "part of an axis": part_of_an_axis(),
    "two unrelated factors": PermutationGroup.declare(
        {"a": ("x",), "b": ("y", None)}, {"a": torch.Size([4]), "b": torch.Size([3, 2]), "c": torch.Size([2])}
    ),
}


def flat_of(group: PermutationGroup) -> Any:
    return group.flat(list(group.site_shapes))


def base(dim: int, separation: float, *batch: int, generator: torch.Generator | None = None) -> dist.TorchDistribution:
    loc = separation * torch.randn(*batch, dim, dtype=torch.float64, generator=generator)
    return dist.Normal(loc, 0.3 + torch.rand(*batch, dim, dtype=torch.float64, generator=generator)).to_event(1)


# exact --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("batch", [(), (3,)])
def test_permanents_and_enumeration_agree_in_value_and_gradient(name: str, batch: tuple[int, ...]) -> None:
    flat = flat_of(GROUPS[name])
    loc = torch.randn(*batch, flat.dim, dtype=torch.float64, requires_grad=True)
    scale = (0.3 + torch.rand(*batch, flat.dim, dtype=torch.float64)).requires_grad_()
    q = dist.Normal(loc, scale).to_event(1)
    w = q.rsample((4,))
    weights = torch.randn(4, *batch, dtype=torch.float64)
    results = [ExactOrbit().log_prob(q, flat, w), ExactOrbit()._by_enumeration(q, flat, w)]
    torch.testing.assert_close(results[0], results[1])
    gradients = [torch.autograd.grad((r * weights).sum(), (loc, scale), retain_graph=True) for r in results]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_exact_orbit_reaches_widths_that_cannot_be_enumerated() -> None:
    flat = flat_of(one_layer(14, inputs=9))
    q = base(flat.dim, 20.0)
    w = q.sample((3,))
    # Units far apart: one term of the sum counts, so all of log 14! is found.
    torch.testing.assert_close(ExactOrbit().log_prob(q, flat, w), q.log_prob(w) - math.lgamma(15))


def test_exact_orbit_names_what_is_too_large() -> None:
    flat = flat_of(one_layer(30))
    with pytest.raises(ValueError, match=r"exp\(74\.7\).*SinkhornImportance"):
        ExactOrbit().log_prob(base(flat.dim, 1.0), flat, torch.zeros(flat.dim, dtype=torch.float64))


# SinkhornImportance -------------------------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("separation", [0.0, 0.2, 0.5, 1.0, 4.0])
def test_sinkhorn_importance_is_close_to_the_exact_value_and_never_below(name: str, separation: float) -> None:
    """The margin is 0.2 nats, and twice that for a recurrent layer, whose densities are quadratic in the permutation.
    It is no law, but holds for these bases: of others drawn alike, one in a hundred has a gap of 0.2 to 0.7 nats, in
    deep networks whose units overlap, most of it from rare draws. On the wrong side: one-sided at 5 standard errors,
    false alarm below 1 in 10^6."""
    flat = flat_of(GROUPS[name])
    q = base(flat.dim, separation, generator=torch.Generator().manual_seed(0))
    w = q.sample((400,))
    exact = ExactOrbit().log_prob(q, flat, w)
    gap = SinkhornImportance(16).log_prob(q, flat, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap)) - 1e-9
    assert float(gap.mean()) < (0.4 if name == "recurrent" else 0.2)


@pytest.mark.stochastic
@pytest.mark.parametrize("width", [3, 8, 12])
@pytest.mark.parametrize("separation", [0.0, 0.15, 0.3, 0.6, 3.0])
def test_one_hidden_layer_is_met_within_a_tenth_of_a_nat(width: int, separation: float) -> None:
    flat = flat_of(one_layer(width, inputs=10))
    q = base(flat.dim, separation)
    w = q.sample((300,))
    gap = SinkhornImportance(16).log_prob(q, flat, w) - ExactOrbit().log_prob(q, flat, w)
    assert abs(float(gap.mean())) < 0.1


@pytest.mark.stochastic
@pytest.mark.parametrize("k", [1, 4])
def test_few_proposals_give_an_upper_bound_too(k: int) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    flat = flat_of(two_layers(4, 3))
    q = base(flat.dim, 0.3)
    w = q.sample((4000,))
    gap = SinkhornImportance(k).log_prob(q, flat, w) - ExactOrbit().log_prob(q, flat, w)
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))


@pytest.mark.stochastic
def test_width_64_with_separated_units_finds_all_of_log_64_factorial() -> None:
    flat = flat_of(one_layer(64, inputs=10))
    q = base(flat.dim, 5.0)
    w = q.sample((20,))
    gain = q.log_prob(w) - SinkhornImportance(4).log_prob(q, flat, w)
    assert float(gain.mean()) == pytest.approx(math.lgamma(65), abs=0.1)
    capped = q.log_prob(w) - InfoNCE(256).log_prob(q, flat, w)
    assert float(capped.max()) <= math.log(256) + 1e-9


def proposal_probability(group: Any, q: Any, w: torch.Tensor, element: Any, walk: int) -> torch.Tensor:
    """``log τ_w(g)`` of given elements, one for each draw, by one of the walks."""
    flat, sets = group.flat(list(group.site_shapes)), unit_sets(group)
    units = UnitDensities(sets, normals_of(q, flat, w.shape[:1]), sites_of(flat, w))
    walker = _Walker(units, walks(units)[walk], 0, len(w), w)
    permutation = element.permutation if isinstance(element, SignedPermutation) else element
    given = {}
    for name, n in sets.permutations.factors.items():
        where = torch.arange(n).expand(1, len(w), n) if name in sets.fixed else permutation[name][None]
        signs = element.sign.images[sets.sign_of[name]][None].double() if name in sets.sign_of else None
        given[name] = Placement(where, signs)
    return walker.walk(given)[1][0]


def loadings() -> FiniteGroup:
    """Signs flip one site of their units and not the other; the rows of the first are exchanged as well."""
    shapes = {"L": torch.Size([3, 4]), "tau": torch.Size([4])}
    permutations = PermutationGroup.declare({"L": ("row", "factor"), "tau": ("factor",)}, shapes)
    return FiniteGroup(permutations, SignGroup.declare({"L": (None, "factor")}, shapes))


def recurrent_with_signs() -> FiniteGroup:
    shapes = {"W": torch.Size([4, 4])}
    axes = {"W": ("h", "h")}
    return FiniteGroup(PermutationGroup.declare(axes, shapes), SignGroup.declare(axes, shapes))


@pytest.mark.parametrize("kind", [*GROUPS, "signed two layers", "signs alone", "loadings", "recurrent with signs"])
@pytest.mark.parametrize("walk", [0, 1, 2])
def test_the_proposal_depends_on_the_orbit_alone(kind: str, walk: int) -> None:
    """``τ_w(g) = τ_{h·w}(g h⁻¹)``: which copy of the draw it is given must not matter, or the bound is none."""
    special = {
        "signed two layers": lambda: signed("two layers"),
        "signs alone": lambda: signed("signs alone"),
        "loadings": loadings,
        "recurrent with signs": recurrent_with_signs,
    }
    group: Any = special[kind]() if kind in special else GROUPS[kind]
    flat = group.flat(list(group.site_shapes))
    q = base(flat.dim, 0.4)
    w = q.sample((6,))
    if walk >= len(walks(UnitDensities(unit_sets(group), normals_of(q, flat, (6,)), sites_of(flat, w)))):
        return
    element, other = group.sample((6,)), group.sample((6,))
    own = proposal_probability(group, q, w, element, walk)
    moved = proposal_probability(group, q, flat(w, other), element @ other.inverse(), walk)
    torch.testing.assert_close(moved, own)


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", ["loadings", "recurrent with signs"])
@pytest.mark.parametrize("k", [1, 16])
def test_signs_on_a_part_of_the_sites_give_an_upper_bound(kind: str, k: int) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    group = loadings() if kind == "loadings" else recurrent_with_signs()
    flat = group.flat(list(group.site_shapes))
    q = base(flat.dim, 0.4)
    w = q.sample((2000,))
    gap = SinkhornImportance(k).log_prob(q, flat, w) - ExactOrbit().log_prob(q, flat, w)
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))


@pytest.mark.stochastic
@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_sharp_units_among_loose_ones_keep_their_digits_in_float32(scale: float) -> None:
    """One pinned unit, and pairs of near-duplicates: log-densities of millions of which a few nats matter."""
    group = one_layer(6, inputs=300)
    flat = flat_of(group)
    loc = {site: torch.zeros(shape) for site, shape in group.site_shapes.items()}
    spread = {site: torch.ones(shape) for site, shape in group.site_shapes.items()}
    loc["weight"][0], spread["weight"][0] = torch.randn(300), scale
    loc["weight"][1], spread["weight"][1:3] = torch.randn(300), scale
    loc["weight"][2] = loc["weight"][1] + 0.05 * scale
    q = dist.Normal(flat.flatten(loc), flat.flatten(spread)).to_event(1)
    wide = dist.Normal(flat.flatten(loc).double(), flat.flatten(spread).double()).to_event(1)
    w = q.sample((40,))
    exact = ExactOrbit().log_prob(wide, flat, w.double()) - wide.log_prob(w.double())
    found = SinkhornImportance(8).log_prob(q, flat, w) - q.log_prob(w)
    torch.testing.assert_close(found.double(), exact, atol=0.1, rtol=0)


@pytest.mark.stochastic
def test_factors_within_grouped_convolutions_are_enumerated_or_left_out() -> None:
    group = grouped_convolution()
    assert any(axis.span > 1 for name in group.factors for axis in group.factor(name).axes)
    flat = flat_of(group)
    q = base(flat.dim, 0.5)
    w = q.sample((300,))
    exact = ExactOrbit().log_prob(q, flat, w)
    torch.testing.assert_close(exact, ExactOrbit()._by_enumeration(q, flat, w))
    gap = SinkhornImportance(4).log_prob(q, flat, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))
    with pytest.raises(ValueError, match="BetheBound"):
        BetheBound().log_prob(q, flat, w)


@pytest.mark.parametrize("estimator", [SinkhornImportance(3), ExactOrbit(), BetheBound()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])
def test_one_draw_that_is_no_number_spoils_no_other(estimator: Any, bad: float) -> None:
    flat = flat_of(one_layer(7))
    q = dist.Normal(torch.randn(flat.dim), 0.5, validate_args=False).to_event(1)
    w = q.sample((4,))
    w[1, 3] = bad
    value = estimator.log_prob(q, flat, w)
    assert torch.isfinite(value[[0, 2, 3]]).all()
    assert not bool(value[1] > -1e20)


def test_the_exact_sum_can_be_cached_in_inference_mode_and_trained_with_afterwards() -> None:
    flat = flat_of(one_layer(9, inputs=2))
    loc = torch.randn(flat.dim, requires_grad=True)
    for estimator in (ExactOrbit(), SinkhornImportance(2)):
        with torch.inference_mode():
            estimator.log_prob(dist.Normal(loc, 1.0).to_event(1), flat, torch.randn(flat.dim))
        estimator.log_prob(dist.Normal(loc, 1.0).to_event(1), flat, torch.randn(flat.dim)).backward()


def test_permanents_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flat_of(two_layers(4, 3))
    loc = torch.randn(2, flat.dim, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 2, flat.dim, dtype=torch.float64)

    def value_and_gradient() -> tuple[torch.Tensor, ...]:
        value = ExactOrbit().log_prob(dist.Normal(loc, 1.0).to_event(1), flat, w)
        return value, *torch.autograd.grad(value.sum(), loc)

    whole = value_and_gradient()
    monkeypatch.setattr(exact, "CHUNK_NUMBERS", 500)
    torch.testing.assert_close(value_and_gradient(), whole)


def test_sinkhorn_importance_says_that_it_cannot_be_traced() -> None:
    flat = flat_of(one_layer(4))
    q = dist.Normal(torch.zeros(flat.dim), 1.0).to_event(1)
    with pytest.raises(NotImplementedError, match="JitTrace_ELBO"):
        torch.jit.trace(lambda w: SinkhornImportance(2).log_prob(q, flat, w), torch.randn(flat.dim))


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("separation", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_short_way_to_values_and_gradients_is_the_long_one(
    name: str, separation: float, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same random numbers: only what moves is scored, against scoring moved vectors as wholes."""
    flat = flat_of(GROUPS[name])
    loc = (separation * torch.randn(*batch, flat.dim, dtype=torch.float64)).requires_grad_()
    scale = (0.3 + torch.rand(*batch, flat.dim, dtype=torch.float64)).requires_grad_()
    noise, weights = torch.randn(5, *batch, flat.dim, dtype=torch.float64), torch.rand(5, *batch, dtype=torch.float64)

    def value_and_gradients() -> tuple[torch.Tensor, ...]:
        pyro.set_rng_seed(3)
        value = SinkhornImportance(6).log_prob(dist.Normal(loc, scale).to_event(1), flat, loc + scale * noise)
        return value, *torch.autograd.grad((value * weights).sum(), (loc, scale))

    short = value_and_gradients()
    monkeypatch.setattr(sinkhorn_importance, "is_mean_field", lambda *_: False)
    torch.testing.assert_close(value_and_gradients(), short)


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", ["full", "low", "flow"])
def test_other_bases_are_bounded_too(kind: str) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6; and most of what InfoNCE misses is found."""
    flat = flat_of(one_layer(4))
    loc, factor = 0.7 * torch.randn(flat.dim), 0.4 * torch.randn(flat.dim, 3)
    diagonal = 0.2 + torch.rand(flat.dim)
    q: Any = dist.LowRankMultivariateNormal(loc, factor, diagonal)
    if kind == "full":
        q = dist.MultivariateNormal(loc, factor @ factor.T + diagonal.diag())
    elif kind == "flow":
        bend = dist.transforms.AffineTransform(0.0, 1.0), dist.transforms.TanhTransform()
        q = dist.TransformedDistribution(dist.Normal(0.7 * loc, 0.5).to_event(1), list(bend))
    w = q.sample((1500,))
    exact = ExactOrbit().log_prob(q, flat, w)
    gap = SinkhornImportance(16).log_prob(q, flat, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))
    assert float(gap.mean()) < 0.3 * float((q.log_prob(w) - exact).mean())


@pytest.mark.stochastic
def test_nested_factors_are_averaged_over_from_outside_and_stay_an_upper_bound() -> None:
    inner = [
        Factor(f"inner[{k}]", 2, (Axis("w", 0, torch.tensor([[2 * k, 2 * k + 1]])),), "outer", k) for k in range(3)
    ]
    outer = Factor("outer", 3, (Axis("w", 0, torch.tensor([[0, 2, 4], [1, 3, 5]])),))
    group = PermutationGroup([outer, *inner], {"w": torch.Size([6, 2])})
    flat = flat_of(group)
    q = base(flat.dim, 0.5)
    w = q.sample((2000,))
    gap = SinkhornImportance(8).log_prob(q, flat, w) - ExactOrbit().log_prob(q, flat, w)
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))
    assert bool((SinkhornImportance(8).log_prob(q, flat, w) < q.log_prob(w)).float().mean() > 0.5)


@pytest.mark.parametrize("estimator", [SinkhornImportance(3), BetheBound()])
@pytest.mark.parametrize("batch", [(), (4,)])
@pytest.mark.parametrize("sample", [(), (2, 3)])
def test_shapes_and_dtypes_follow_the_base(estimator: Any, batch: tuple[int, ...], sample: tuple[int, ...]) -> None:
    flat = flat_of(one_layer(4))
    for dtype in (torch.float32, torch.float64):
        q = dist.Normal(torch.randn(*batch, flat.dim, dtype=dtype), 1.0).to_event(1)
        symmetrized = Symmetrized(q, flat, estimator)
        value = symmetrized.log_prob(symmetrized.rsample(sample))
        assert value.shape == (*sample, *batch)
        assert value.dtype == dtype


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_a_number_of_proposals_that_is_none_is_refused(k: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="K is"):
        SinkhornImportance(k)


# signs --------------------------------------------------------------------------------------------------------------


def signed(kind: str) -> FiniteGroup:
    shapes = {"a": torch.Size([3, 2]), "b": torch.Size([2, 3]), "c": torch.Size([1, 2])}
    axes: dict[str, tuple[str | None, ...]] = {"a": ("first", None), "b": ("second", "first"), "c": (None, "second")}
    if kind == "signs alone":
        return FiniteGroup(PermutationGroup((), shapes), SignGroup.declare(axes, shapes))
    if kind == "one layer":
        axes = {"a": ("first", None), "b": (None, "first")}
    flips = axes
    if kind == "signs of one layer, exchanges of both":
        flips = {"a": ("first", None), "b": (None, "first")}
    return FiniteGroup(PermutationGroup.declare(axes, shapes), SignGroup.declare(flips, shapes))


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", ["one layer", "two layers", "signs alone", "signs of one layer, exchanges of both"])
@pytest.mark.parametrize("separation", [0.0, 0.3, 1.0, 4.0])
def test_signs_are_averaged_over_too(kind: str, separation: float) -> None:
    """Against enumeration; on the wrong side: one-sided at 5 standard errors, false alarm below 1 in 10^6."""
    group = signed(kind)
    flat = group.flat(list(group.site_shapes))
    q = base(flat.dim, separation)
    w = q.sample((400,))
    exact = ExactOrbit().log_prob(q, flat, w)
    gap = SinkhornImportance(16).log_prob(q, flat, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap)) - 1e-9
    assert float(gap.mean()) < 0.25
    # Ignoring the signs would miss log 2 for each unit where units are far apart.
    if separation == 4.0:
        assert float((q.log_prob(w) - exact).mean()) > group.log_order() - 0.5


@pytest.mark.stochastic
def test_a_wide_layer_with_signs_finds_all_of_its_nats() -> None:
    shapes = {"in": torch.Size([40, 8]), "out": torch.Size([1, 40])}
    axes = {"in": ("unit", None), "out": (None, "unit")}
    group = FiniteGroup(PermutationGroup.declare(axes, shapes), SignGroup.declare(axes, shapes))
    flat = group.flat(["in", "out"])
    q = base(flat.dim, 4.0)
    w = q.sample((20,))
    gain = q.log_prob(w) - SinkhornImportance(4).log_prob(q, flat, w)
    assert float(gain.mean()) == pytest.approx(math.lgamma(41) + 40 * math.log(2), abs=0.2)


# BetheBound ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one layer", "part of an axis", "two unrelated factors"])
@pytest.mark.parametrize("separation", [0.0, 0.5, 4.0])
def test_bethe_brackets_the_exact_value_at_every_draw(name: str, separation: float) -> None:
    flat = flat_of(GROUPS[name])
    q = base(flat.dim, separation)
    w = torch.cat([q.sample((50,)), 3 * torch.randn(50, flat.dim, dtype=torch.float64)])
    exact = ExactOrbit().log_prob(q, flat, w)
    lower, upper = BetheBound().bracket(q, flat, w)
    assert bool((lower <= exact + 1e-8).all())
    assert bool((upper >= exact - 1e-8).all())
    torch.testing.assert_close(BetheBound().log_prob(q, flat, w), upper)


def test_the_gradient_of_the_bethe_bound_is_that_of_finite_differences() -> None:
    flat = flat_of(one_layer(4, inputs=2))
    loc = torch.randn(flat.dim, dtype=torch.float64, requires_grad=True)
    w = torch.randn(flat.dim, dtype=torch.float64)

    def bound(m: torch.Tensor) -> torch.Tensor:
        return BetheBound(3000).log_prob(dist.Normal(m, 1.5).to_event(1), flat, w)

    gradient = torch.autograd.grad(bound(loc), loc)[0]
    step = 1e-3
    for i in range(flat.dim):
        shift = step * torch.eye(flat.dim, dtype=torch.float64)[i]
        difference = (bound((loc + shift).detach()) - bound((loc - shift).detach())) / (2 * step)
        assert float(gradient[i]) == pytest.approx(float(difference), abs=2e-3)


def test_bethe_refuses_what_its_theorem_does_not_cover() -> None:
    flat = flat_of(two_layers(3, 3))
    q = base(flat.dim, 1.0)
    with pytest.raises(ValueError, match=r"no two share a site.*'first', 'second'"):
        BetheBound().log_prob(q, flat, q.sample())
    full = dist.MultivariateNormal(torch.zeros(flat.dim), torch.eye(flat.dim))
    with pytest.raises(ValueError, match="mean-field"):
        BetheBound().log_prob(full, flat, full.sample())
