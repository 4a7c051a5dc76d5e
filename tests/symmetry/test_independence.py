"""Orders of groups and numbers of scales, against enumeration of all elements and the rank of their action."""

from __future__ import annotations

import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.symmetry import FiniteGroup, PermutationGroup, SignGroup, WeightSymmetry, find_symmetry
from pyro_symmetric.symmetry.rescaling import ScalingGroup


class Product(nn.Module):
    """``einsum(equation, x, *factors)``: rows of one factor against columns of another, and the other way round."""

    def __init__(self, equation: str, *shapes: tuple[int, ...]):
        super().__init__()
        self.equation = equation
        self.factors = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, *self.factors)


class Experts(nn.Module):
    """A stacked mixture of experts: each has ReLU units of its own, and a weight that its input decides."""

    def __init__(self):
        super().__init__()
        self.gate, self.inner = nn.Linear(3, 2), nn.Parameter(torch.randn(2, 4, 3))
        self.outer = nn.Parameter(torch.randn(2, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("ehi,bi->beh", self.inner, x).relu()
        return torch.einsum("be,eoh,beh->bo", self.gate(x), self.outer, hidden)


def tanh(*widths: int, bias: bool = True) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    layers = [layer for i, o in pairs for layer in (nn.Linear(i, o, bias=bias), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


NETWORKS = {
    "product": (lambda: Product("b,hk,kh->b", (2, 3), (3, 2)), (4,), 4),
    "chain": (lambda: Product("b,hk,kl,lh->b", (2, 2), (2, 2), (2, 2)), (4,), 5),
    "three axes": (lambda: Product("b,hkl,hkl->b", (2, 2, 2), (2, 2, 2)), (4,), None),
    "one layer": (lambda: tanh(2, 3, 1), (4, 2), 3),
    "two layers": (lambda: tanh(2, 2, 2, 1, bias=False), (4, 2), 4),
    "experts": (Experts, (4, 3), None),
}


def generic(symmetry: WeightSymmetry) -> dict[str, Tensor]:
    return {site: torch.randn(shape, dtype=torch.float64) for site, shape in symmetry.site_shapes.items()}


def number_of_images(elements, weights: dict[str, Tensor]) -> int:
    images = elements(weights)
    return len(torch.cat([value.flatten(1) for value in images.values()], 1).unique(dim=0))


def all_signs(group: SignGroup):
    """Every combination of flips, whether or not some act alike."""
    units = sum(group.factors.values())
    flips = torch.tensor(list(itertools.product((1.0, -1.0), repeat=units)), dtype=torch.float64)
    return group.element(dict(zip(group.factors, flips.split(list(group.factors.values()), -1), strict=True)))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_order_of_a_group_is_the_number_of_its_images(name):
    make, shape, rank = NETWORKS[name]
    symmetry = find_symmetry(make(), torch.randn(shape))
    weights, group = generic(symmetry), symmetry.finite
    signs = number_of_images(all_signs(symmetry.signs), weights) if symmetry.signs.factors else 1
    assert symmetry.signs.order() == signs
    assert rank is None or signs == 2**rank
    assert symmetry.signs.log_order() == pytest.approx(math.log(signs))
    elements = group.enumerate()
    assert number_of_images(elements, weights) == group.order() == elements.batch_shape.numel()
    assert symmetry.log_order() == pytest.approx(math.log(group.order()))
    assert ps.equivalent_modes(symmetry).log_number == pytest.approx(math.log(group.order()))
    assert f"{symmetry.signs.dim} signs" in repr(symmetry)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["scalings", "signs"])
def test_the_number_of_scales_is_the_rank_of_their_action(name, kind):
    make, shape, _ = NETWORKS[name]
    group = getattr(find_symmetry(make(), torch.randn(shape)), kind)
    if kind == "signs":
        group = ScalingGroup(map(group.factor, group.factors), group.site_shapes)
    units = sum(group.factors.values())
    if not units:
        assert group.dim == 0
        return
    logs = torch.eye(units, dtype=torch.float64).exp().split(list(group.factors.values()), -1)
    each = group.element(dict(zip(group.factors, logs, strict=True)))
    ones = {site: torch.ones(shape, dtype=torch.float64) for site, shape in group.site_shapes.items()}
    jacobian = torch.cat([value.log().flatten(1) for value in each(ones).values()], 1)
    assert group.dim == int(torch.linalg.matrix_rank(jacobian))


def test_a_stacked_mixture_of_experts_counts_a_common_scale_once():
    """Scaling the inner weights of all experts is scaling all of their units: 7 of the 8 scales are independent."""
    symmetry = find_symmetry(Experts(), torch.randn(4, 3))
    assert sorted(symmetry.scalings.factors.values()) == [2, 2, 4]
    assert symmetry.scalings.dim == 7
    assert ", 7 scales" in repr(symmetry)


def test_independent_units_do_what_all_units_do():
    """Every image under all combinations of flips is one under flips of the independent units."""
    symmetry = find_symmetry(Product("b,hk,kh->b", (2, 3), (3, 2)), torch.randn(4))
    weights, group = generic(symmetry), symmetry.signs

    def images(elements):
        return {tuple(row) for row in torch.cat([v.flatten(1) for v in elements(weights).values()], 1).tolist()}

    assert images(all_signs(group)) == images(group.enumerate())


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3), (1, 2)])
def test_flips_of_rows_and_columns_of_one_site_share_one(sizes):
    signs = SignGroup.declare({"a": ("u", "v")}, {"a": torch.Size(sizes)})
    assert signs.order() == 2 ** (sum(sizes) - 1)
    shared = SignGroup.declare({"a": ("u", "v"), "b": ("u",)}, {"a": torch.Size(sizes), "b": torch.Size(sizes[:1])})
    assert shared.order() == 2 ** sum(sizes)


def test_the_symmetrised_density_is_the_average_over_all_combinations_of_flips():
    """The average doesn't change if elements that act alike are counted once each; values and gradients."""
    symmetry = find_symmetry(Product("b,hk,kh->b", (2, 3), (3, 2)), torch.randn(4))
    group = symmetry.finite
    sites = list(symmetry.site_shapes)
    flat = group.flat(sites)
    loc = torch.randn(flat.dim, dtype=torch.float64, requires_grad=True)
    base = dist.Normal(loc, 0.8).to_event(1)
    value = torch.randn(5, flat.dim, dtype=torch.float64)
    permutations, flips = group.permutations.enumerate(), all_signs(symmetry.signs)
    first, second = (torch.arange(len(e.images[next(iter(e.images))])) for e in (permutations, flips))
    every = ps.FiniteGroup(group.permutations, group.signs).element(
        {k: v[first.repeat_interleave(len(second))] for k, v in permutations.images.items()},
        {k: v[second.repeat(len(first))] for k, v in flips.images.items()},
    )
    assert every.batch_shape.numel() == 12 * 32
    moved = flat(value[:, None], every.select((None, slice(None))))
    truth = base.log_prob(moved).logsumexp(1) - math.log(12 * 32)
    found = ps.Symmetrized(base, flat, ps.ExactOrbit()).log_prob(value)
    torch.testing.assert_close(found, truth)
    for mine, right in zip(torch.autograd.grad(found.sum(), loc), torch.autograd.grad(truth.sum(), loc), strict=True):
        torch.testing.assert_close(mine, right)


def test_permutations_and_flips_of_one_site_make_a_group_of_the_right_order():
    example = {"a": torch.Size([2, 2])}
    group = FiniteGroup(
        PermutationGroup.declare({"a": ("u", "v")}, example), SignGroup.declare({"a": ("u", "v")}, example)
    )
    weights = {"a": torch.randn(2, 2)}
    every = group.sample((4000,))
    assert number_of_images(every, weights) == group.order() == 4 * 8  # all are met: 32 (31/32)^4000 < 10^-53
