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
    sinkhorn_importance,
)
from pyro_symmetric.symmetry.finite import FiniteGroup
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


GROUPS = {
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


def base(dim: int, separation: float, *batch: int) -> dist.TorchDistribution:
    loc = separation * torch.randn(*batch, dim, dtype=torch.float64)
    return dist.Normal(loc, 0.3 + torch.rand(*batch, dim, dtype=torch.float64)).to_event(1)


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


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("separation", [0.0, 0.2, 0.5, 1.0, 4.0])
def test_sinkhorn_importance_is_close_to_the_exact_value_and_never_below(name: str, separation: float) -> None:
    """The margin is 0.2 nats, and twice that for a recurrent layer, whose densities are quadratic in the permutation.
    On the wrong side: one-sided at 5 standard errors, false alarm below 1 in 10^6."""
    flat = flat_of(GROUPS[name])
    q = base(flat.dim, separation)
    w = q.sample((400,))
    exact = ExactOrbit().log_prob(q, flat, w)
    gap = SinkhornImportance(16).log_prob(q, flat, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap)) - 1e-9
    assert float(gap.mean()) < (0.4 if name == "recurrent" else 0.2)


@pytest.mark.parametrize("width", [3, 8, 12])
@pytest.mark.parametrize("separation", [0.0, 0.15, 0.3, 0.6, 3.0])
def test_one_hidden_layer_is_met_within_a_tenth_of_a_nat(width: int, separation: float) -> None:
    flat = flat_of(one_layer(width, inputs=10))
    q = base(flat.dim, separation)
    w = q.sample((300,))
    gap = SinkhornImportance(16).log_prob(q, flat, w) - ExactOrbit().log_prob(q, flat, w)
    assert abs(float(gap.mean())) < 0.1


@pytest.mark.parametrize("k", [1, 4])
def test_few_proposals_give_an_upper_bound_too(k: int) -> None:
    """One-sided at 5 standard errors: false alarm below 1 in 10^6."""
    flat = flat_of(two_layers(4, 3))
    q = base(flat.dim, 0.3)
    w = q.sample((4000,))
    gap = SinkhornImportance(k).log_prob(q, flat, w) - ExactOrbit().log_prob(q, flat, w)
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))


def test_width_64_with_separated_units_finds_all_of_log_64_factorial() -> None:
    flat = flat_of(one_layer(64, inputs=10))
    q = base(flat.dim, 5.0)
    w = q.sample((20,))
    gain = q.log_prob(w) - SinkhornImportance(4).log_prob(q, flat, w)
    assert float(gain.mean()) == pytest.approx(math.lgamma(65), abs=0.1)
    capped = q.log_prob(w) - InfoNCE(256).log_prob(q, flat, w)
    assert float(capped.max()) <= math.log(256) + 1e-9


def test_a_draw_and_its_copies_get_proposals_of_the_same_quality() -> None:
    """On average over draws of the symmetrised density the estimate is no lower bound by chance of the labelling:
    relabelling positions and units of the base alike changes nothing (5 standard errors, two-sided: 1 in 10^6)."""
    group = one_layer(5)
    flat = flat_of(group)
    q = base(flat.dim, 0.3)
    element = group.sample()
    moved = dist.Normal(flat(q.base_dist.loc, element), flat(q.base_dist.scale, element)).to_event(1)
    estimates = []
    for density in (q, moved):
        w = density.sample((6000,))
        estimates.append(SinkhornImportance(2).log_prob(density, flat, w) - ExactOrbit().log_prob(density, flat, w))
    error = math.sqrt(sum(float(e.var()) for e in estimates) / 6000)
    assert abs(float(estimates[0].mean() - estimates[1].mean())) < 5 * error


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
        bend = (
            dist.transforms.AffineTransform(0.0, 1.0),
            dist.transforms.SinhArcsinhTransform(0.2, 0.9)
            if hasattr(dist.transforms, "SinhArcsinhTransform")
            else dist.transforms.TanhTransform(),
        )
        q = dist.TransformedDistribution(dist.Normal(0.7 * loc, 0.5).to_event(1), list(bend))
    w = q.sample((1500,))
    exact = ExactOrbit().log_prob(q, flat, w)
    gap = SinkhornImportance(16).log_prob(q, flat, w) - exact
    assert float(gap.mean()) > -5 * float(gap.std()) / math.sqrt(len(gap))
    assert float(gap.mean()) < 0.3 * float((q.log_prob(w) - exact).mean())


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
    with pytest.raises(ValueError, match="K is"):
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
