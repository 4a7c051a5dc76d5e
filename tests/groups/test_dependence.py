"""Orders of groups and numbers of scales, against enumeration of all elements and the rank of their action."""

from __future__ import annotations

import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups import Action, Element, Group

from .cases import GROUPS, weights_of


class Product(nn.Module):
    """``einsum(equation, x, *factors)``: rows of one factor against columns of another, and the other way round."""

    def __init__(self, equation: str, *shapes: tuple[int, ...]):
        super().__init__()
        self.equation = equation
        self.factors = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, *self.factors)


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
}


def generic(symmetry: Symmetry) -> dict[str, Tensor]:
    return weights_of(symmetry.group)


def number_of_images(elements: Element, weights: dict[str, Tensor]) -> int:
    images = elements(weights)
    return len(torch.cat([value.flatten(1) for value in images.values()], 1).unique(dim=0))


def by_name(group: Group, numbers: Tensor, move: str) -> dict[str, Tensor]:
    """``(m, all units)`` -> name of the units -> ``(m,) + units.shape``."""
    pieces = numbers.split([group[name].count for name in group.names(move)], -1)
    return {name: v.reshape(-1, *group[name].shape) for name, v in zip(group.names(move), pieces, strict=True)}


def all_signs(group: Group) -> Element:
    """Every combination of flips, whether or not some act alike."""
    units = sum(group[name].count for name in group.names("flip"))
    flips = torch.tensor(list(itertools.product((1.0, -1.0), repeat=units)), dtype=torch.float64)
    return group.element(signs=by_name(group, flips, "flip"))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_order_of_a_group_is_the_number_of_its_images(name):
    make, shape, rank = NETWORKS[name]
    symmetry = find_symmetry(make(), torch.randn(shape))
    weights, group = generic(symmetry), symmetry.finite
    signs = number_of_images(all_signs(symmetry.signs), weights) if symmetry.signs.units else 1
    assert symmetry.signs.order() == signs
    assert rank is None or signs == 2**rank
    assert symmetry.signs.log_order() == pytest.approx(math.log(signs))
    elements = group.enumerate()
    assert number_of_images(elements, weights) == group.order() == elements.batch_shape.numel()
    assert symmetry.log_order() == pytest.approx(math.log(group.order()))
    independent = sum(int(units.sum()) for units in symmetry.group.independent("flip").values())
    assert signs == 2**independent
    assert f" {independent} signs" in repr(symmetry)


def rank_of_scales(group: Group) -> int:
    """The rank of the action of all scales on the logarithms of weights that are one."""
    units = sum(group[name].count for name in group.names("scale"))
    each = group.element(log_scales=by_name(group, torch.eye(units, dtype=torch.float64), "scale"))
    ones = {site: torch.ones(shape, dtype=torch.float64) for site, shape in group.site_shapes.items()}
    jacobian = torch.cat([value.log().flatten(1) for value in each(ones).values()], 1)
    return int(torch.linalg.matrix_rank(jacobian))


@pytest.mark.parametrize("name", ["layers", "attention", "grouped", "apart", "flipped wreath", "factors"])
def test_ranks_and_orders_of_units_inside_units(name):
    """Riders and grouped kernels included; the independent units alone have the same rank as all."""
    group = GROUPS[name]()
    if group.names("scale"):
        independent = group.independent("scale")
        scales = group.scalings
        assert sum(int(units.sum()) for units in independent.values()) == rank_of_scales(scales)
        kept = torch.cat([units.flatten() for units in independent.values()])
        rows = by_name(scales, torch.eye(len(kept), dtype=torch.float64)[kept], "scale")
        ones = {site: torch.ones(shape, dtype=torch.float64) for site, shape in group.site_shapes.items()}
        images = scales.element(log_scales=rows)(ones)
        jacobian = torch.cat([value.log().flatten(1) for value in images.values()], 1)
        assert int(torch.linalg.matrix_rank(jacobian)) == int(kept.sum())
    if 0 < sum(group[own].count for own in group.names("flip")) <= 14:
        assert group.signs.order() == number_of_images(all_signs(group.signs), weights_of(group))


@pytest.mark.parametrize("name", ["chain", "one layer", "two layers"])
def test_all_signs_of_single_weights_that_leave_the_function_alone_are_in_the_group(name):
    """By trying every sign of every weight: no such sign is missed, and none is counted twice."""
    make, shape, _ = NETWORKS[name]
    torch.manual_seed(0)
    net, x = make().double(), torch.randn(7, *shape[1:], dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    weights = {site: value.detach() for site, value in net.named_parameters()}
    sizes = [value.numel() for value in weights.values()]
    every = torch.tensor(list(itertools.product((1.0, -1.0), repeat=sum(sizes))), dtype=torch.float64)

    def outputs(signs: Tensor) -> Tensor:
        pieces = zip(weights.items(), signs.split(sizes), strict=True)
        own = {site: value * piece.reshape(value.shape) for (site, value), piece in pieces}
        return torch.func.functional_call(net, own, (x,)).flatten()

    alone = (torch.func.vmap(outputs, chunk_size=4096)(every) - outputs(every[0])).abs().amax(1) < 1e-9
    assert int(alone.sum()) == symmetry.signs.order()
    ones = {site: torch.ones_like(value) for site, value in weights.items()}
    images = symmetry.signs.enumerate()(ones)
    mine = torch.cat([images[site].flatten(1) for site in weights], 1)
    assert {tuple(row) for row in mine.tolist()} == {tuple(row) for row in every[alone].tolist()}


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3), (1, 2)])
def test_flips_of_rows_and_columns_of_one_site_share_one(sizes):
    signs = Group.declare({"a": ("u", "v")}, {"a": sizes}, moves="flip")
    assert signs.order() == 2 ** (sum(sizes) - 1) == number_of_images(signs.enumerate(), weights_of(signs))
    shared = Group.declare({"a": ("u", "v"), "b": ("u",)}, {"a": sizes, "b": sizes[:1]}, moves="flip")
    assert shared.order() == 2 ** sum(sizes)


def test_the_symmetrised_density_is_the_average_over_all_combinations_of_flips():
    """The average doesn't change if elements that act alike are counted once each; values and gradients."""
    symmetry = find_symmetry(Product("b,hk,kh->b", (2, 3), (3, 2)), torch.randn(4))
    group = symmetry.finite
    action = Action(group, list(symmetry.site_shapes))
    loc = torch.randn(action.dim, dtype=torch.float64, requires_grad=True)
    base = dist.Normal(loc, 0.8).to_event(1)
    value = torch.randn(5, action.dim, dtype=torch.float64)
    permutations, flips = group.permutations.enumerate(), all_signs(symmetry.signs)
    every = permutations.select((slice(None), None)) @ flips
    every = every.select(tuple(torch.cartesian_prod(torch.arange(12), torch.arange(32)).unbind(-1)))
    assert every.batch_shape.numel() == 12 * 32
    moved = action(value[:, None], every.select((None, slice(None))))
    truth = base.log_prob(moved).logsumexp(1) - math.log(12 * 32)
    found = ps.Symmetrized(base, action, ps.ExactOrbit()).log_prob(value)
    torch.testing.assert_close(found, truth)
    for mine, right in zip(torch.autograd.grad(found.sum(), loc), torch.autograd.grad(truth.sum(), loc), strict=True):
        torch.testing.assert_close(mine, right)


def test_permutations_and_flips_of_one_site_make_a_group_of_the_right_order():
    group = Group.declare({"a": ("u", "v")}, {"a": (2, 2)}, moves=("permute", "flip"))
    every = group.sample((4000,))
    assert number_of_images(every, weights_of(group)) == group.order() == 4 * 8  # all are met: 32 (31/32)^4000 < 10^-53
