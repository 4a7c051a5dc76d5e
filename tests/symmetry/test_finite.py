"""Permutations and signs together: algebra, order and action against matrices, counting and loops."""

import itertools
import math

import pytest
import torch
from torch import nn

from pyro_symmetric.symmetry import PermutationGroup, RescaledAxis, RescalingFactor, SignGroup, find_symmetry
from pyro_symmetric.symmetry.finite import FiniteGroup, finite_group_from_dict, finite_part
from pyro_symmetric.symmetry.weights import Weights

AXES = {"loadings": (None, "factor"), "scores": ("factor", None), "scale": (None,)}
EXAMPLE = {"loadings": torch.Size([4, 3]), "scores": torch.Size([3, 5]), "scale": torch.Size([4])}


def hyperoctahedral() -> FiniteGroup:
    return FiniteGroup(PermutationGroup.declare(AXES, EXAMPLE), SignGroup.declare(AXES, EXAMPLE))


def weights(*batch: int) -> Weights:
    return {site: torch.randn(*batch, *shape, dtype=torch.float64) for site, shape in EXAMPLE.items()}


def tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))


def same(first: Weights, second: Weights) -> None:
    assert set(first) == set(second)
    for site, value in first.items():
        torch.testing.assert_close(value, second[site])


def test_the_action_equals_loops_over_permutations_and_signs() -> None:
    group, w = hyperoctahedral(), weights()
    moved = group.enumerate()(w)
    assert moved["loadings"].shape == (48, 4, 3)
    found = {tuple(row.reshape(-1).tolist()) for row in moved["loadings"]}
    expected = set()
    for order in itertools.permutations(range(3)):
        for signs in itertools.product((1.0, -1.0), repeat=3):
            flipped = w["loadings"] * torch.tensor(signs, dtype=torch.float64)
            expected.add(tuple(flipped[:, list(order)].reshape(-1).tolist()))
    assert found == expected
    torch.testing.assert_close(moved["loadings"] @ moved["scores"], (w["loadings"] @ w["scores"]).expand(48, 4, 5))
    assert torch.equal(moved["scale"], w["scale"].expand(48, 4))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_order_counts_distinct_elements(n: int) -> None:
    example = {"w": torch.Size([n])}
    group = FiniteGroup(PermutationGroup.declare({"w": ("u",)}, example), SignGroup.declare({"w": ("u",)}, example))
    assert group.order() == math.factorial(n) * 2**n
    assert group.log_order() == pytest.approx(math.log(group.order()))
    images = group.enumerate()({"w": torch.arange(1.0, n + 1)})["w"]
    assert len({tuple(row) for row in images.tolist()}) == group.order()
    assert images[0].tolist() == list(range(1, n + 1))


@pytest.mark.parametrize("kind", ["factors", "network"])
def test_products_and_inverses_act_as_one_after_the_other(kind: str) -> None:
    if kind == "factors":
        group, w = hyperoctahedral(), weights(7)
    else:
        found = find_symmetry(tanh_net(), torch.randn(2, 2)).finite
        assert isinstance(found, FiniteGroup)
        group = found
        w = {site: torch.randn(7, *shape, dtype=torch.float64) for site, shape in group.site_shapes.items()}
    g, h = group.sample((7,)), group.sample((7,))
    same((g @ h)(w), g(h(w)))
    same(g.inverse()(g(w)), w)
    assert (g.inverse() @ g).equal(group.identity((7,)))
    assert (g @ (h @ g)).equal((g @ h) @ g)


def test_permutations_carry_signs_from_one_sign_factor_to_another() -> None:
    shapes = {"a": torch.Size([4]), "b": torch.Size([2, 4])}
    halves = {"left": torch.tensor([[0, 1]]), "right": torch.tensor([[2, 3]])}
    signs = SignGroup(
        [
            RescalingFactor(name, 2, (RescaledAxis("a", 0, index, 1), RescaledAxis("b", 1, index, -1)))
            for name, index in halves.items()
        ],
        shapes,
    )
    group = FiniteGroup(PermutationGroup.declare({"a": ("u",), "b": (None, "u")}, shapes), signs)
    w = {site: torch.randn(shape, dtype=torch.float64) for site, shape in shapes.items()}
    g, h = group.sample((50,)), group.sample((50,))
    same((g @ h)(w), g(h(w)))
    same((g.inverse() @ g)(w), group.identity((50,))(w))


@pytest.mark.parametrize("batches", [((), (6,)), ((6,), ()), ((4, 1), (3,)), ((2,), (2,))])
def test_flat_action_equals_the_action_on_weights(batches: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    group = hyperoctahedral()
    flat = group.flat(["scale", "scores", "loadings"])
    w, g = weights(*batches[0]), group.sample(batches[1])
    vector = flat.flatten(w)
    moved = flat(vector, g)
    shape = torch.broadcast_shapes(*batches)
    assert moved.shape == (*shape, flat.dim)
    same(flat.unflatten(moved), g(w))
    assert torch.equal(flat.log_abs_det(vector, g), torch.zeros(shape, dtype=torch.float64))


def test_signs_alone_enumerate_from_the_identity() -> None:
    signs = SignGroup.declare({"a": ("u", "v")}, {"a": torch.Size([2, 3])})
    elements = signs.enumerate()
    assert elements.batch_shape == (signs.order(),) == (16,)
    # Flipping all rows is flipping all columns: of 2^5 combinations half act alike.
    images = elements({"a": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])})["a"]
    assert len({tuple(row) for row in images.flatten(1).tolist()}) == 16
    assert elements.select(0).equal(signs.identity())
    many = SignGroup.declare({"a": ("u",)}, {"a": torch.Size([30])})
    with pytest.raises(ValueError, match=r"2\^30"):
        many.enumerate()


@pytest.mark.stochastic
def test_draws_are_uniform_over_the_group() -> None:
    """Chi-squared with 7 degrees of freedom over 8,000 draws: above 40 with probability 10^-6."""
    example = {"w": torch.Size([2])}
    group = FiniteGroup(PermutationGroup.declare({"w": ("u",)}, example), SignGroup.declare({"w": ("u",)}, example))
    images = group.sample((8000,))({"w": torch.tensor([1.0, 2.0])})["w"]
    counts = torch.unique(images, dim=0, return_counts=True)[1].double()
    assert len(counts) == 8
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 40


def test_the_finite_part_of_a_network_has_its_permutations_and_signs() -> None:
    symmetry = find_symmetry(tanh_net(), torch.randn(2, 2))
    assert symmetry.finite.order() == math.factorial(3) * 2**3 * math.factorial(2) * 2**2
    relu = find_symmetry(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(2, 2))
    assert relu.finite is relu.permutations  # scalings are continuous and left out
    assert finite_part(symmetry.permutations) is symmetry.permutations
    only_signs = finite_part(symmetry.signs)
    assert isinstance(only_signs, FiniteGroup)
    assert only_signs.order() == 2**5
    with pytest.raises(TypeError, match="ScalingGroup"):
        finite_part(symmetry.scalings)  # type: ignore[arg-type]


def test_groups_survive_json() -> None:
    group = hyperoctahedral()
    assert finite_group_from_dict(group.to_dict()) == group
    assert finite_group_from_dict(group.permutations.to_dict()) == group.permutations
    assert group != FiniteGroup(group.permutations, SignGroup((), EXAMPLE))


def test_permutations_that_tear_sign_units_apart_are_no_group() -> None:
    shapes = {"a": torch.Size([3]), "b": torch.Size([3])}
    signs = SignGroup.declare({"a": ("u",), "b": ("u",)}, shapes)
    with pytest.raises(ValueError, match=r"permutations \['p'\].*no group"):
        FiniteGroup(PermutationGroup.declare({"a": ("p",)}, shapes), signs)
    part = SignGroup.declare({"c": ("u",)}, {"c": torch.Size([3]), **shapes})
    elsewhere = FiniteGroup(PermutationGroup.declare({"a": ("p",)}, shapes), part)  # flips what isn't permuted
    assert elsewhere.required_sites == ("a", "c")
    with pytest.raises(ValueError, match=r"'a' has shape \(3,\).*\(4,\)"):
        FiniteGroup(
            PermutationGroup.declare({"a": ("p",)}, shapes), SignGroup.declare({"a": ("u",)}, {"a": torch.Size([4])})
        )


def test_a_declaration_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="name a factor or None"):
        SignGroup.declare({"a": ("u",)}, {"a": torch.Size([3, 2])})
    with pytest.raises(ValueError, match=r"'u' has size 3 in 'a' but axis 0 of 'b'"):
        SignGroup.declare({"a": ("u",), "b": ("u",)}, {"a": torch.Size([3]), "b": torch.Size([2])})
