"""Permutation groups: axioms, action on networks, wreath products, errors."""

import itertools
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_symmetric.symmetry.permutation import Axis, Factor, Permutation, PermutationGroup

WIDTHS = st.lists(st.integers(1, 6), min_size=3, max_size=5)
SEEDS = st.integers(0, 2**31 - 1)
BATCHES = st.sampled_from([(), (1,), (3,), (2, 3)])
quick = settings(max_examples=25, deadline=None, derandomize=True)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[site], b[site]) for site in a)


def wreath(outer: int, middle: int, inner: int) -> PermutationGroup:
    """``outer`` groups of ``middle`` heads of ``inner`` rows: keys and values permute their rows separately."""
    size = outer * middle * inner
    place = torch.arange(size).view(outer, middle, inner)
    groups = place.flatten(1).T
    factors = [Factor("group", outer, (Axis("key", 0, groups), Axis("value", 0, groups), Axis("out", 1, groups)))]
    for g in range(outer):
        heads = place[g].T
        axes = (Axis("key", 0, heads), Axis("value", 0, heads), Axis("out", 1, heads))
        factors.append(Factor(f"head.{g}", middle, axes, parent="group", slot=g))
    for g, h in itertools.product(range(outer), range(middle)):
        rows = place[g, h][None]
        factors.append(Factor(f"key.{g}.{h}", inner, (Axis("key", 0, rows),), parent=f"head.{g}", slot=h))
        axes = (Axis("value", 0, rows), Axis("out", 1, rows))
        factors.append(Factor(f"value.{g}.{h}", inner, axes, parent=f"head.{g}", slot=h))
    return PermutationGroup(factors, {"key": (size, 2), "value": (size,), "out": (3, size), "free": (2,)})


def numbered(group: PermutationGroup, *batch: int) -> dict[str, torch.Tensor]:
    """Weights whose entries are all different."""
    numel = math.prod(batch)
    return {
        site: torch.arange(numel * math.prod(shape)).reshape(*batch, *shape)
        for site, shape in group.site_shapes.items()
    }


# plain products -----------------------------------------------------------------------------------------------------


@quick
@given(widths=WIDTHS, seed=SEEDS, batch=BATCHES, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_network_outputs_do_not_change_under_permutations(mlp, widths, seed, batch, dtype):
    torch.manual_seed(seed)
    net = mlp(widths)
    weights, x = net.weights(*batch, dtype=dtype), torch.randn(5, widths[0], dtype=dtype)
    moved = net.permutations.sample(batch)(weights)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(net(moved, x), net(weights, x), rtol=tolerance, atol=tolerance)
    assert all(moved[site].dtype == dtype for site in moved)


@quick
@given(widths=WIDTHS, seed=SEEDS, batch=BATCHES)
def test_elements_satisfy_the_group_axioms(mlp, widths, seed, batch):
    torch.manual_seed(seed)
    group = mlp(widths).permutations
    p, r, s = (group.sample(batch) for _ in range(3))
    identity = group.identity(batch)
    assert ((p @ r) @ s).equal(p @ (r @ s))
    assert (p @ identity).equal(p)
    assert (identity @ p).equal(p)
    assert (p.inverse() @ p).equal(identity)
    assert (p @ p.inverse()).equal(identity)


@quick
@given(widths=WIDTHS, seed=SEEDS, batch=BATCHES)
def test_acting_is_a_homomorphism(mlp, widths, seed, batch):
    torch.manual_seed(seed)
    net = mlp(widths)
    group, weights = net.permutations, net.weights(*batch)
    p, r = group.sample(batch), group.sample(batch)
    assert same((p @ r)(weights), p(r(weights)))
    assert same(group.identity()(weights), weights)


def test_unit_i_receives_what_unit_p_of_i_had():
    group = PermutationGroup.declare({"a": ("unit", None), "b": (None, "unit")}, {"a": (3, 2), "b": (2, 3)})
    p = group.element({"unit": [2, 0, 1]})
    weights = numbered(group)
    moved = p(weights)
    for i, source in enumerate([2, 0, 1]):
        assert torch.equal(moved["a"][i], weights["a"][source])
        assert torch.equal(moved["b"][:, i], weights["b"][:, source])


@pytest.mark.parametrize(("element", "batch"), [((4,), ()), ((), (4,)), ((3, 1), (1, 4)), ((4,), (3, 4))])
def test_batches_of_elements_and_weights_broadcast_like_a_loop(mlp, element, batch):
    net = mlp([2, 4, 3, 2])
    p, weights = net.permutations.sample(element), net.weights(*batch)
    moved = p(weights)
    shape = torch.broadcast_shapes(element, batch)
    for where in itertools.product(*map(range, shape)):
        single = {site: v.expand(*shape, *net.site_shapes[site])[where] for site, v in weights.items()}
        one = Permutation(net.permutations, {n: im.expand(*shape, im.shape[-1])[where] for n, im in p.images.items()})
        assert same({site: v[where] for site, v in moved.items()}, one(single))


def test_composition_broadcasts_too(mlp):
    group = mlp([2, 4, 3, 2]).permutations
    p, r = group.sample((3, 1)), group.sample((4,))
    composed = p @ r
    assert composed.batch_shape == (3, 4)
    assert (p.select(2).select(0) @ r.select(1)).equal(composed.select(2).select(1))


@pytest.mark.stochastic
def test_sampling_is_uniform_over_the_symmetric_group():
    group = PermutationGroup.declare({"a": ("unit",)}, {"a": (4,)})
    codes = (group.sample((24_000,))["unit"] * torch.tensor([64, 16, 4, 1])).sum(-1)
    counts = codes.unique(return_counts=True)[1].double()
    assert len(counts) == 24
    # Chi-squared with 23 degrees of freedom: above 62 with probability 2e-5; seeded.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 62


def test_enumeration_lists_every_element_once_and_the_identity_first(mlp):
    group = mlp([2, 3, 4, 2]).permutations
    everything = group.enumerate()
    rows = torch.cat([everything["hidden.0"], everything["hidden.1"]], -1)
    assert everything.batch_shape == (144,)
    assert len(rows.unique(dim=0)) == 144 == group.order()
    assert everything.select(0).equal(group.identity())
    assert group.log_order() == pytest.approx(math.log(144))


def test_an_axis_with_an_index_map_moves_blocks_and_leaves_the_rest():
    # Two channels of three pixels, flattened, behind one position that stays.
    index = torch.tensor([[1, 4], [2, 5], [3, 6]])
    group = PermutationGroup([Factor("channel", 2, (Axis("w", 0, index),))], {"w": (7,)})
    moved = group.element({"channel": [1, 0]})({"w": torch.arange(7)})
    assert moved["w"].tolist() == [0, 4, 5, 6, 1, 2, 3]


def test_factors_that_share_an_axis_move_their_own_positions():
    left, right = torch.tensor([[0, 2, 4]]), torch.tensor([[1, 3]])
    group = PermutationGroup(
        [Factor("left", 3, (Axis("w", 0, left),)), Factor("right", 2, (Axis("w", 0, right),))], {"w": (5,)}
    )
    moved = group.element({"left": [1, 2, 0], "right": [1, 0]})({"w": torch.arange(5)})
    assert moved["w"].tolist() == [2, 3, 4, 1, 0]


def test_flat_action_equals_the_action_on_weights(mlp):
    net = mlp([3, 4, 5, 2])
    flat = net.permutations.flat(list(reversed(net.site_shapes)))
    p, weights = net.permutations.sample((6,)), net.weights(6)
    assert torch.equal(flat(flat.flatten(weights), p), flat.flatten(p(weights)))
    assert same(flat.unflatten(flat.flatten(weights)), {site: weights[site] for site in flat.sites})


def test_buffers_move_along_and_are_missed_where_absent():
    index = torch.arange(3)[None]
    axes = (Axis("w", 0, index), Axis("mean", 0, index, buffer=True))
    group = PermutationGroup([Factor("channel", 3, axes)], {"w": (3,), "mean": (3,)})
    p = group.element({"channel": [2, 0, 1]})
    assert p({"w": torch.arange(3), "mean": torch.arange(3)})["mean"].tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match=r"holds no running statistics \['mean'\]"):
        p({"w": torch.arange(3)})
    alone = group.without_buffers().element({"channel": [2, 0, 1]})
    assert alone({"w": torch.arange(3)})["w"].tolist() == [2, 0, 1]


@pytest.mark.parametrize("make", [lambda: wreath(2, 2, 3), lambda: PermutationGroup([], {"a": torch.Size((2,))})])
def test_groups_survive_a_round_trip_through_json(make):
    group = make()
    assert PermutationGroup.from_dict(group.to_dict()) == group


def test_different_groups_are_not_equal(mlp):
    assert mlp([2, 3, 2]).permutations != mlp([2, 3, 3]).permutations
    assert mlp([2, 3, 2]).permutations == mlp([2, 3, 2]).permutations


def test_acting_on_ten_thousand_networks_of_a_thousand_parameters_takes_under_a_second(mlp):
    net = mlp([10, 22, 22, 10])
    weights, p = net.weights(10_000, dtype=torch.float32), net.permutations.sample((10_000,))
    assert sum(v[0].numel() for v in weights.values()) > 950
    start = time.process_time()
    p(weights)
    assert time.process_time() - start < 1.0


# wreath products ----------------------------------------------------------------------------------------------------


def by_hand(p: Permutation, weights: dict, outer: int, middle: int, inner: int) -> dict:
    """Rows inside heads first, then heads inside groups, then groups: one at a time."""
    shape = (outer, middle, inner)
    key, value = weights["key"].clone().view(*shape, 2), weights["value"].clone().view(shape)
    out = weights["out"].clone().view(3, *shape)
    for g, h in itertools.product(range(outer), range(middle)):
        key[g, h] = key[g, h][p[f"key.{g}.{h}"]]
        value[g, h] = value[g, h][p[f"value.{g}.{h}"]]
        out[:, g, h] = out[:, g, h][:, p[f"value.{g}.{h}"]]
    for g in range(outer):
        key[g], value[g], out[:, g] = (key[g][p[f"head.{g}"]], value[g][p[f"head.{g}"]], out[:, g][:, p[f"head.{g}"]])
    key, value, out = key[p["group"]], value[p["group"]], out[:, p["group"]]
    return {
        "key": key.reshape(-1, 2),
        "value": value.reshape(-1),
        "out": out.reshape(3, -1),
        "free": weights["free"],
    }


@quick
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), seed=SEEDS)
def test_wreath_elements_act_inside_first_and_then_outside(shape, seed):
    torch.manual_seed(seed)
    group = wreath(*shape)
    weights, p = numbered(group), group.sample()
    assert same(p(weights), by_hand(p, weights, *shape))


@quick
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), seed=SEEDS, batch=BATCHES)
def test_wreath_products_satisfy_the_group_axioms_and_act_as_a_group(shape, seed, batch):
    torch.manual_seed(seed)
    group = wreath(*shape)
    weights, identity = numbered(group), group.identity(batch)
    p, r, s = (group.sample(batch) for _ in range(3))
    assert same((p @ r)(weights), p(r(weights)))
    assert ((p @ r) @ s).equal(p @ (r @ s))
    assert (p.inverse() @ p).equal(identity)
    assert (p @ p.inverse()).equal(identity)
    assert same(p.inverse()(p(weights)), identity(weights))


def test_wreath_enumeration_reaches_every_arrangement_once():
    place = torch.arange(6).view(3, 2)
    rows = [Factor(f"row.{h}", 2, (Axis("w", 0, place[h][None]),), "head", h) for h in range(3)]
    group = PermutationGroup([Factor("head", 3, (Axis("w", 0, place.T),)), *rows], {"w": (6,)})
    moved = group.enumerate()({"w": torch.arange(6)})["w"]
    assert group.order() == 6 * 2**3 == len(moved) == len(moved.unique(dim=0))
    # Every arrangement keeps rows of a head together.
    assert bool((moved.view(-1, 3, 2).sort(-1).values.diff(dim=-1) == 1).all())


@pytest.mark.stochastic
def test_sampling_a_wreath_product_is_uniform():
    place = torch.arange(6).view(3, 2)
    rows = [Factor(f"row.{h}", 2, (Axis("w", 0, place[h][None]),), "head", h) for h in range(3)]
    group = PermutationGroup([*rows, Factor("head", 3, (Axis("w", 0, place.T),))], {"w": (6,)})
    draws = group.sample((24_000,)) @ group.sample()
    moved = draws({"w": torch.arange(6)})["w"]
    counts = moved.unique(dim=0, return_counts=True)[1].double()
    assert len(counts) == 48
    # Chi-squared with 47 degrees of freedom: above 100 with probability 1e-5; seeded.
    assert float(((counts - 500) ** 2 / 500).sum()) < 100


def test_wreath_flat_action_agrees_and_repr_names_each_kind_once():
    group = wreath(2, 3, 2)
    flat = group.flat(["out", "key", "value"])
    p, weights = group.sample((5,)), numbered(group, 5)
    assert torch.equal(flat(flat.flatten(weights), p), flat.flatten(p(weights)))
    text = repr(group)
    assert "key.0.0 (and 5 alike)" in text
    assert "key.0.1" not in text


def test_children_and_ancestors_are_named():
    group = wreath(2, 2, 3)
    assert group.children("group") == ("head.0", "head.1")
    assert group.ancestors("value.1.0") == ("head.1", "group")


# errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ({"unit": [0, 0, 1]}, "no permutation"),
        ({"unit": [0, 1]}, "must be 3 long"),
        ({"unit": [0.0, 1.0, 2.0]}, "integers"),
        ({"units": [0, 1, 2]}, "units"),
    ],
)
def test_elements_that_are_no_permutations_are_refused(images, words):
    group = PermutationGroup.declare({"a": ("unit",)}, {"a": (3,)})
    with pytest.raises(ValueError, match=words):
        group.element(images)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"b": torch.zeros(3)}, r"lacks the sites \['a'\]"),
        ({"a": torch.zeros(2)}, "shape"),
        ({"a": torch.zeros(5, 3), "b": torch.zeros(4, 2)}, "same batch shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, words):
    group = PermutationGroup.declare({"a": ("unit",)}, {"a": (3,), "b": (2,)})
    with pytest.raises(ValueError, match=words):
        group.identity()(weights)


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (Axis("nowhere", 0, torch.arange(3)[None]), "known sites"),
        (Axis("a", 1, torch.arange(3)[None]), "has shape"),
        (Axis("a", 0, torch.tensor([[1, 2, 3]])), "reaches outside"),
        (Axis("a", 0, torch.tensor([[1, 1, 2]])), "names a position twice"),
    ],
)
def test_axes_that_do_not_fit_their_sites_are_refused(axis, words):
    with pytest.raises(ValueError, match=words):
        PermutationGroup([Factor("unit", 3, (axis,))], {"a": (3,)})


def test_slots_that_are_exchanged_must_be_alike_inside():
    place = torch.arange(6).view(2, 3)
    head = Factor("head", 2, (Axis("w", 0, place.T),))
    row = Factor("row.0", 3, (Axis("w", 0, place[0][None]),), "head", 0)
    with pytest.raises(ValueError, match="alike inside"):
        PermutationGroup([head, row], {"w": (6,)})
    shorter = Factor("row.1", 2, (Axis("w", 0, place[1][None, :2]),), "head", 1)
    with pytest.raises(ValueError, match="alike inside"):
        PermutationGroup([head, row, shorter], {"w": (6,)})
    astray = Factor("row.1", 3, (Axis("w", 0, place[0][None]),), "head", 1)
    with pytest.raises(ValueError, match="outside slot 1"):
        PermutationGroup([head, row, astray], {"w": (6,)})
    with pytest.raises(ValueError, match="lies in 'heads'"):
        PermutationGroup([Factor("row", 3, (Axis("w", 0, place[:1]),), "heads", 0)], {"w": (6,)})


def test_two_factors_of_one_name_are_refused():
    axis = (Axis("a", 0, torch.arange(3)[None]),)
    with pytest.raises(ValueError, match="two factors are called 'unit'"):
        PermutationGroup([Factor("unit", 3, axis), Factor("unit", 3, axis)], {"a": (3,)})


def test_elements_of_different_groups_do_not_compose(mlp):
    with pytest.raises(ValueError, match="one group"):
        mlp([2, 3, 2]).permutations.sample() @ mlp([2, 3, 3]).permutations.sample()


def test_enumerating_a_large_group_is_refused(mlp):
    with pytest.raises(ValueError, match="can be enumerated"):
        mlp([2, 30, 2]).permutations.enumerate()


@pytest.mark.cuda
def test_elements_act_on_the_device_of_the_weights():
    group = wreath(2, 2, 3)
    weights, p, r = numbered(group, 5), group.sample((5,)), group.sample((5,))
    there = {site: value.cuda() for site, value in weights.items()}
    moved = (p @ r)(there)
    assert all(value.is_cuda for value in moved.values())
    assert same({site: value.cpu() for site, value in moved.items()}, (p @ r)(weights))
    assert group.sample((3,), device="cuda")["group"].is_cuda
