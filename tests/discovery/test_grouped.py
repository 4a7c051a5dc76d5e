"""Grouped convolutions: the inputs of each group move by themselves, along an axis that
spans two of the kernel's.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pyro_symmetric.alignment import align
from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.canonical.scales import minimal_mass
from pyro_symmetric.compare import invariance_tests
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.model_check import verify_model
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify
from pyro_symmetric.groups import Action, Group, Units
from pyro_symmetric.posterior.posterior import Posterior


def chain(*layers: nn.Module, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Layers with an activation after each but the last."""
    return nn.Sequential(
        *itertools.chain.from_iterable((layer, between()) for layer in layers[:-1]),
        layers[-1],
    )


def resnext_block(
    groups: int = 2,
    inputs: int = 2,
    outputs: int = 3,
    between: type[nn.Module] = nn.ReLU,
) -> nn.Module:
    wide, out = groups * inputs, groups * outputs
    return nn.Sequential(
        nn.Conv2d(3, wide, 1, bias=False), nn.BatchNorm2d(wide), between(),
        nn.Conv2d(wide, out, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(out), between(),
        nn.Conv2d(out, 2, 1),
    )  # fmt: skip


def images(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 4, 4)


def tensors(net: nn.Module, symmetry: Symmetry) -> dict[str, Tensor]:
    """Random weights, positive running variances."""
    with torch.no_grad():
        for name, value in symmetry.weights_of(net).items():
            value.copy_(
                torch.rand_like(value) + 0.5
                if name.endswith("running_var")
                else torch.randn_like(value)
            )
    return {
        site: value.detach().clone() for site, value in symmetry.weights_of(net).items()
    }


def assert_same_function(
    net: nn.Module, before: dict[str, Tensor], after: dict[str, Tensor], x: Tensor
) -> None:
    torch.testing.assert_close(
        functional_call(net, after, x),
        functional_call(net, before, x),
        rtol=1e-9,
        atol=1e-9,
    )


def scales_of(symmetry: Symmetry) -> int:
    """The number of independent scales."""
    return sum(symmetry.group[n].count for n in symmetry.group.names("scale"))


def checked(
    net: nn.Module, x: Tensor, order: int, scales: int = 0, signs: int = 0
) -> Symmetry:
    """The symmetry, after comparing its size with what was counted by hand, and all of
    it with the network.

    Elements must leave the output unchanged, and (here up to ten thousand) all act
    differently.
    """
    symmetry = find_symmetry(net, x, verify=False)
    assert symmetry.permutations.order() == order
    assert scales_of(symmetry) == scales
    assert (
        sum(symmetry.group[name].count for name in symmetry.group.names("flip"))
        == signs
    )
    net, x = net.double().eval(), x.double()
    weights = tensors(net, symmetry)
    for _ in range(20):
        assert_same_function(net, weights, symmetry.sample()(weights), x)
    exchanges = symmetry.permutations.sample((20,))
    for site, value in exchanges.inverse()(exchanges(weights)).items():
        assert torch.equal(value, weights[site].expand_as(value))
    if order <= 10_000:
        every = symmetry.permutations.enumerate()
        flat = torch.cat([value.flatten(1) for value in every(weights).values()], -1)
        assert len(flat.unique(dim=0)) == order
    return symmetry


def fact(n: int) -> int:
    return math.factorial(n)


# how large the group is ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "inputs", "outputs"),
    [(2, 2, 3), (3, 2, 1), (2, 1, 3), (3, 1, 1), (2, 3, 2)],
)
def test_a_block_of_resnext_exchanges_groups_and_channels_within_each(
    groups: int, inputs: int, outputs: int
) -> None:
    wide, out = groups * inputs, groups * outputs
    order = fact(groups) * fact(inputs) ** groups * fact(outputs) ** groups
    # Scales of each channel in front of its normalisation, behind, and of weight
    # against variance; a sign in front.
    symmetry = checked(
        resnext_block(groups, inputs, outputs),
        images(),
        order,
        3 * (wide + out),
        wide + out,
    )
    assert verify(symmetry, resnext_block(groups, inputs, outputs), images())


def test_without_normalisation_each_unit_has_one_scale_and_touches_two_layers() -> None:
    net = chain(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 2, 1))
    group = checked(net, images(), 2 * 2**2 * 6**2, scales=10).scalings
    assert multiplied(group) == {
        "0": ["0.weight[0]^1", "0.bias[0]^1", "2.weight[0, 1]^-1"],
        "2": ["2.weight[0]^1", "2.bias[0]^1", "4.weight[1]^-1"],
    }
    depthwise = chain(
        nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 2, 1)
    )
    group = checked(depthwise, images(), fact(4) * 2**4, scales=12).scalings
    assert multiplied(group) == {
        "0.groups": ["0.weight[0]^1", "0.bias[0]^1", "2.weight[0]^-1"],
        "2": ["2.weight[0]^1", "2.bias[0]^1", "4.weight[1]^-1"],
    }


def multiplied(group: Group) -> dict[str, list[str]]:
    """The places that the multipliers of each set of units enter."""
    return {
        name: [str(a) for a in group[name].axes if a.exponent]
        for name in group.names("scale")
    }


def test_odd_activations_give_each_input_of_a_group_a_sign() -> None:
    net = chain(
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.Conv2d(6, 2, 1),
        between=nn.Tanh,
    )
    symmetry = checked(net, images(), 2 * 2**2 * 6**2, signs=10)
    assert_composes(symmetry, tensors(net, symmetry))


def test_signs_of_rows_compose_with_permutations_of_columns() -> None:
    """Normalised inputs have signs in front of the kernel only: all moves act on one
    view of it all the same.
    """
    net = resnext_block()
    symmetry = find_symmetry(net, images())
    assert all(
        axis.span == 1
        for name in symmetry.signs.factors
        for axis in symmetry.signs[name].axes
    )
    assert any(
        axis.span == 2
        for name in symmetry.permutations.factors
        for axis in symmetry.permutations[name].axes
    )
    assert_composes(symmetry, tensors(net, symmetry))


def assert_composes(symmetry: Symmetry, weights: dict[str, Tensor]) -> None:
    p, q = symmetry.finite.sample((5,)), symmetry.finite.sample((5,))
    one, other = (p @ q)(weights), p(q(weights))
    for site, value in one.items():
        torch.testing.assert_close(value, other[site])


def test_grouped_convolutions_in_a_row_with_the_same_groups_share_them() -> None:
    net = chain(
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 6, 1, groups=2),
        nn.Conv2d(6, 4, 1, groups=2),
        nn.Conv2d(4, 2, 1),
    )
    checked(net, images(), 2 * 2**2 * 6**2 * 2**2, scales=14)


def test_small_groups_move_inside_the_large_groups_of_the_next_convolution() -> None:
    net = chain(
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(8, 8, 1, groups=4),
        nn.Conv2d(8, 4, 1, groups=2),
        nn.Conv2d(4, 2, 1),
    )
    # Two large groups, in each two small ones of (2 inputs, 2 outputs), and 2 outputs
    # of its own.
    checked(net, images(), 2 * (2 * (2 * 2) ** 2 * 2) ** 2, scales=20)


def test_large_groups_are_split_by_the_small_groups_of_the_next_convolution() -> None:
    net = chain(
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 8, 1, groups=2),
        nn.Conv2d(8, 8, 1, groups=4),
        nn.Conv2d(8, 2, 1),
    )
    # Two large groups of 2 inputs; in each two small ones of (2 units between, 2
    # outputs).
    checked(net, images(), 2 * (2 * 2 * (2 * 2) ** 2) ** 2, scales=20)


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_transposed_convolutions_have_rows_for_inputs_and_columns_for_outputs(
    inputs: int, outputs: int
) -> None:
    net = chain(
        nn.Conv2d(3, 2 * inputs, 1),
        nn.ConvTranspose2d(2 * inputs, 2 * outputs, 2, groups=2),
        nn.Conv2d(2 * outputs, 2, 1),
    )
    symmetry = checked(
        net,
        images(),
        2 * fact(inputs) ** 2 * fact(outputs) ** 2,
        scales=2 * inputs + 2 * outputs,
    )
    spanning = {
        axis.span
        for name in symmetry.permutations.factors
        for axis in symmetry.permutations[name].axes
    }
    assert (2 in spanning) == (outputs > 1)


def test_one_dimensional_kernels_have_groups_too() -> None:
    net = chain(nn.Conv1d(3, 4, 1), nn.Conv1d(4, 6, 3, groups=2), nn.Conv1d(6, 2, 1))
    checked(net, torch.randn(2, 3, 5), 2 * 2**2 * 6**2, scales=10)


def test_groups_at_the_ends_of_a_network_stay_but_what_lies_inside_them_moves() -> None:
    last = chain(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1, groups=2))
    symmetry = checked(last, images(), 2 * 2, scales=4)
    assert all(one.parent is None for one in symmetry.permutations.units.values())
    first = chain(nn.Conv2d(4, 6, 1, groups=2), nn.Conv2d(6, 2, 1))
    checked(first, images(4), 6 * 6, scales=6)


def test_a_grouped_kernel_that_is_used_twice_moves_rows_and_columns_alike() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (
                nn.Conv2d(3, 6, 1),
                nn.Conv2d(6, 6, 1, groups=2),
                nn.Conv2d(6, 2, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.a(x))
            return self.c(torch.tanh(self.b(torch.tanh(self.b(x)))))

    symmetry = checked(Twice(), images(), 2 * 6**2, signs=6)
    drawn = symmetry.permutations.sample((40,))(
        {k: torch.randn(40, *s) for k, s in symmetry.site_shapes.items()}
    )
    tested = invariance_tests(
        Posterior.from_samples(drawn, kind="independent"), symmetry.permutations
    ).parts["a"]["sites"]
    assert "b.weight" not in tested.split(", ")
    assert "b.bias" in tested.split(", ")


class Scrambled(nn.Module):
    """A shuffle between a convolution and the groups of the next."""

    def __init__(self, order: list[int]):
        super().__init__()
        self.order = order
        self.a, self.b, self.c = (
            nn.Conv2d(3, 6, 1),
            nn.Conv2d(6, 4, 1, groups=2),
            nn.Conv2d(4, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x))[:, self.order])))


@pytest.mark.parametrize(
    "order", [[1, 0, 2, 4, 5, 3], [5, 1, 3, 0, 4, 2], [3, 4, 5, 0, 1, 2]]
)
def test_groups_whose_inputs_come_in_different_orders_are_exchanged_all_the_same(
    order: list[int],
) -> None:
    checked(Scrambled(order), images(), 2 * 6**2 * 2**2, scales=10)


def test_a_channel_shuffle_between_grouped_convolutions_is_followed() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 1)
            self.b, self.c = nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1, groups=2)
            self.d = nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.b(torch.relu(self.a(x))))
            x = x.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)
            return self.d(torch.relu(self.c(x)))

    # Unit (g, h) comes from group g and goes to group h: both exchanges, and 2 inputs
    # (outputs) in each group. Inputs and outputs have four scales each, and two pairs
    # of the units between one.
    checked(Shuffled(), images(), 2 * 2 * 2**2 * 2**2, scales=10)


# what is not understood stays ---------------------------------------------------------


class Reused(nn.Module):
    """The kernel of a grouped convolution that something else reads, too."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.a, self.b, self.c = (
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(4, 4, 1, groups=2),
            nn.Conv2d(4, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.b.weight
        x = torch.relu(self.a(x))
        if self.how == "columns":
            x = x * kernel[:, :1, 0]
        elif self.how == "sum":
            x = x + kernel.sum()
        elif self.how == "plain":
            x = torch.cat([F.conv2d(x[:, :2], kernel), x], 1)[:, :4]
        else:
            x = torch.relu(
                F.conv2d(torch.cat([x, x], 1), kernel, groups=4)
                if self.how == "groups"
                else x
            )
        return self.c(torch.relu(self.b(x)))


@pytest.mark.parametrize("how", ["columns", "sum", "plain", "groups"])
def test_kernels_with_another_use_keep_only_what_both_uses_allow(how: str) -> None:
    if how == "groups":
        net = chain(
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(4, 4, 1, groups=2),
            nn.Conv2d(8, 4, 1, groups=4),
            nn.Conv2d(4, 2, 1),
        )
        net[4].weight = net[2].weight

        class Wide(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.cat([x, x], 1)

        net[3] = Wide()
    else:
        net = Reused(how)
    symmetry = find_symmetry(net, images(), verify=False)
    net, x = net.double(), images().double()
    weights = tensors(net, symmetry)
    for _ in range(20):
        assert_same_function(net, weights, symmetry.sample()(weights), x)


@pytest.mark.parametrize("alone", [False, True])
def test_a_kernel_that_training_reads_in_another_way_has_the_same_columns_in_all_groups(
    alone: bool,
) -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (
                nn.Conv2d(3, 4, 1),
                nn.Conv2d(4, 4, 1, groups=2),
                nn.Conv2d(4, 2, 1),
            )
            self.extra = nn.Parameter(torch.randn(2))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            if self.training and alone:
                return (self.b.weight[:, :, 0, 0] @ self.extra,)
            y = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
            return (
                (y, self.b.weight[:, :, 0, 0] @ self.extra) if self.training else (y,)
            )

    net = Auxiliary()
    symmetry = find_symmetry(net, images(), verify=False)
    # that branch shows rows one by one, and columns of both groups alike
    assert symmetry.permutations.order() == 2
    assert scales_of(symmetry) == 2  # of what training reads those columns with
    assert verify(symmetry, net, images())


def test_computed_kernels_keep_the_permutations_that_all_groups_share() -> None:
    net = chain(
        nn.Conv2d(3, 4, 1),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 1, groups=2)),
        nn.Conv2d(6, 2, 1),
    )
    symmetry = find_symmetry(net, images(), verify=False)
    # not 2**2: the inputs of both groups move alike
    assert symmetry.permutations.order() == 2 * 2 * 6**2
    assert verify(symmetry, net, images())


# whatever reads axes ------------------------------------------------------------------


@pytest.fixture(scope="module")
def block() -> tuple[nn.Module, Symmetry, dict[str, Tensor]]:
    """A network, its symmetry and 30 draws of its weights; nobody changes them."""
    torch.manual_seed(0)
    net = chain(
        nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 2, groups=2), nn.Conv2d(6, 2, 1)
    ).double()
    symmetry = find_symmetry(net, images().double())
    weights = {
        site: torch.randn(30, *shape, dtype=torch.float64)
        for site, shape in symmetry.site_shapes.items()
    }
    return net, symmetry, weights


def test_elements_act_as_written_by_hand(block) -> None:
    _, symmetry, weights = block
    p = symmetry.permutations.sample()
    kernel = weights["2.weight"][0]
    expected = torch.empty_like(kernel)
    for g, i, j in itertools.product(range(2), range(3), range(2)):
        old = int(p["0.groups"][g])
        row, column = int(p["2"][old, i]), int(p["0"][old, j])
        expected[3 * g + i, j] = kernel[3 * old + row, column]
    assert torch.equal(
        p({site: value[0] for site, value in weights.items()})["2.weight"], expected
    )


def test_composition_inverse_and_the_flat_action_agree_with_acting(block) -> None:
    _, symmetry, weights = block
    group = symmetry.permutations
    p, q = group.sample((30,)), group.sample((30,))
    one, other = (p @ q)(weights), p(q(weights))
    back = p.inverse()(p(weights))
    flat = Action(group, list(weights))
    assert torch.equal(
        flat(flat.layout.flatten(weights), p), flat.layout.flatten(p(weights))
    )
    for site, value in weights.items():
        assert torch.equal(one[site], other[site])
        assert torch.equal(back[site], value)
    broadcast = group.sample((7, 1))(weights)
    assert broadcast["2.weight"].shape == (7, 30, 6, 2, 2, 2)


def test_symmetries_survive_json_with_their_spans(block) -> None:
    _, symmetry, weights = block
    again = Symmetry.from_dict(json.loads(json.dumps(symmetry.to_dict())))
    assert again.group == symmetry.group
    p = symmetry.permutations.sample()
    assert torch.equal(
        again.permutations.element(p.permutations)(weights)["2.weight"],
        p(weights)["2.weight"],
    )


@pytest.mark.parametrize("key", ["first", "max", "norm"])
@pytest.mark.parametrize("rule", ["unit_norm", "minimal_mass", "minimal_norm"])
def test_canonical_forms_are_equal_on_orbits(block, key: str, rule: str) -> None:
    net, symmetry, weights = block
    form = canonicalize(weights, symmetry, key, rule)
    moved = canonicalize(symmetry.sample((30,))(weights), symmetry, key, rule)
    again = canonicalize(form, symmetry, key, rule)
    x = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    for site, value in form.items():
        torch.testing.assert_close(moved[site], value, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(again[site], value, rtol=1e-7, atol=1e-7)
    for i in range(3):
        before, after = (
            {site: value[i] for site, value in w.items()} for w in (weights, form)
        )
        torch.testing.assert_close(
            functional_call(net, after, x),
            functional_call(net, before, x),
            rtol=1e-8,
            atol=1e-8,
        )


def test_the_minimal_mass_balances_each_channel_of_a_group(block) -> None:
    _, symmetry, weights = block
    found = minimal_mass(weights, symmetry)
    assert not any(bool(pinned.any()) for pinned in found.pinned.values())
    rows = found.weights["0.weight"].square().flatten(2).sum(-1)
    # (batch, group, out, in)
    kernel = found.weights["2.weight"].square().unflatten(1, (2, 3)).sum((-1, -2))
    # what enters a unit weighs as much as what leaves it
    torch.testing.assert_close(rows, kernel.sum(2).flatten(1))
    torch.testing.assert_close(
        kernel.sum(3).flatten(1), found.weights["4.weight"].square().sum((1, 3, 4))
    )
    moved = minimal_mass(
        symmetry.scalings.sample((30,), dtype=torch.float64)(weights), symmetry
    )
    torch.testing.assert_close(moved.mass, found.mass, rtol=1e-8, atol=0)
    torch.testing.assert_close(
        moved.weights["2.weight"], found.weights["2.weight"], rtol=1e-6, atol=1e-8
    )


def test_priors_that_tell_the_columns_of_a_group_apart_are_named(block) -> None:
    import pyro
    from pyro import distributions as dist

    _, symmetry, _ = block
    priors = {
        site: dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape))
        for site, shape in symmetry.site_shapes.items()
    }

    def model() -> None:
        for site, prior in priors.items():
            pyro.sample(site, prior)

    assert verify_model(symmetry, model)
    scale = torch.ones(symmetry.site_shapes["2.weight"])
    scale[3:, 1] = 2.0  # the second column of the second group
    priors["2.weight"] = dist.Normal(torch.zeros_like(scale), scale).to_event(4)
    found = {
        (found.move, found.name): found.sites
        for found in verify_model(symmetry, model).broken
    }
    assert found["permute", "0"] == ("2.weight",)


@pytest.mark.stochastic
def test_invariance_of_draws_is_tested_within_groups(block) -> None:
    _, symmetry, _ = block
    drawn = {
        site: torch.randn(400, *shape) for site, shape in symmetry.site_shapes.items()
    }
    # the first input of the first group is another; false alarms: level 0.01
    drawn["2.weight"][:, :3, 0] += 1.0
    for group, rejected in ((0, True), (1, False)):
        posterior = Posterior.from_samples(drawn, kind="independent")
        result = invariance_tests(posterior, _columns_of(symmetry, group), level=0.01)
        assert bool(result.rejected) == rejected


def _columns_of(symmetry: Symmetry, group: int) -> Group:
    """The inputs of one group of the kernel, alone."""
    (axis,) = (
        axis for axis in symmetry.permutations["0"].axes if axis.site == "2.weight"
    )
    index = axis.index[:, 2 * group : 2 * group + 2]
    return Group(
        [Units("columns", 2, (replace(axis, index=index, exponent=0),))],
        symmetry.site_shapes,
    )


def test_a_permutation_planted_in_inputs_and_outputs_is_found(block) -> None:
    _, symmetry, weights = block
    planted = {site: value[0] for site, value in weights.items()}
    moved = symmetry.permutations.sample()(planted)
    aligned = align(moved, planted, symmetry.permutations).element(moved)
    for site, value in planted.items():
        torch.testing.assert_close(aligned[site], value, rtol=0, atol=0)
