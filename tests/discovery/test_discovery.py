"""find_symmetry on small networks: exactly the groups that theory says, and nothing
that changes the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_symmetric.discovery.find import UnknownOperator, find_symmetry
from pyro_symmetric.discovery.flow import Flow
from pyro_symmetric.discovery.propagate import propagate
from pyro_symmetric.discovery.registry import RULES, register_rule
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.trace import Trace, UntraceableError
from pyro_symmetric.discovery.verify import verify


class Net(nn.Module):
    """A network from a function and its parts."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def checked(net: nn.Module, *inputs: Tensor) -> Symmetry:
    """The symmetry as the rules propose it, after a check that it is one."""
    symmetry = find_symmetry(net, *inputs, verify=False)
    result = verify(symmetry, net, *inputs, trials=2)
    assert result, result
    return symmetry


def sizes(symmetry: Symmetry) -> dict[str, int]:
    return symmetry.permutations.factors


def scales(symmetry: Symmetry) -> int:
    """The number of independent scales."""
    return sum(symmetry.group[n].count for n in symmetry.group.names("scale"))


def columns(n: int = 4) -> Tensor:
    return torch.randn(n, 3)


def images(channels: int = 3, pixels: int = 6) -> Tensor:
    return torch.randn(2, channels, pixels, pixels)


def test_an_mlp_has_one_factor_for_each_hidden_layer() -> None:
    net = nn.Sequential(
        nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2)
    )
    symmetry = checked(net, columns())
    assert sizes(symmetry) == {"0": 8, "2": 5}
    # ReLU is positively homogeneous, tanh isn't
    assert symmetry.scalings.factors == {"0": 8}
    assert symmetry.signs.factors == {"2": 5}  # tanh is odd, ReLU isn't
    assert symmetry.log_order() == pytest.approx(
        math.log(math.factorial(8) * math.factorial(5) * 2**5)
    )


def test_the_network_keeps_its_modes_and_its_weights() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    net[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    find_symmetry(net, columns())
    assert net.training
    assert not net[1].training
    assert all(
        torch.equal(value, before[name]) for name, value in net.state_dict().items()
    )


def test_running_statistics_move_with_their_channels_and_flattened_channels_become_blocks() -> (
    None
):
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    symmetry = checked(net, images())
    moved = {(axis.site, axis.dim): axis for axis in symmetry.permutations["0"].axes}
    assert set(moved) == {
        ("0.weight", 0), ("0.bias", 0), ("1.weight", 0), ("1.bias", 0), ("1.running_mean", 0),
        ("1.running_var", 0), ("5.weight", 1),
    }  # fmt: skip
    assert moved["1.running_var", 0].buffer
    assert not moved["1.weight", 0].buffer
    assert moved["5.weight", 1].index.tolist() == [
        [c * 4 + pixel for c in range(4)] for pixel in range(4)
    ]
    # What enters a batch normalisation may be rescaled without any compensation; what
    # leaves it is compensated.
    before, after = symmetry.scalings["0~2"], symmetry.scalings["0"]
    exponents = {axis.site: (axis.exponent, axis.epsilon) for axis in before.axes}
    assert exponents == {
        "0.weight": (1, None), "0.bias": (1, None), "1.running_mean": (1, None), "1.running_var": (2, 1e-5),
    }  # fmt: skip
    assert {axis.site: axis.exponent for axis in after.axes} == {
        "1.weight": 1,
        "1.bias": 1,
        "5.weight": -1,
    }


def test_residual_streams_tie_all_layers_that_write_to_them() -> None:
    net = Net(
        lambda s, x: s.out(s.b(F.relu(s.a(F.relu(s.stem(x))))) + F.relu(s.stem(x))),
        stem=nn.Linear(3, 6), a=nn.Linear(6, 7), b=nn.Linear(7, 6), out=nn.Linear(6, 2),
    )  # fmt: skip
    symmetry = checked(net, columns())
    assert sizes(symmetry) == {"stem": 6, "a": 7}
    assert {axis.site for axis in symmetry.permutations["stem"].axes} == {
        "stem.weight", "stem.bias", "a.weight", "b.weight", "b.bias", "out.weight",
    }  # fmt: skip


def test_concatenation_slices_and_shuffles_move_labels_like_data() -> None:
    net = Net(
        lambda s, x: s.out(s.shuffle(torch.cat([F.relu(s.a(x)), F.relu(s.b(x))], 1))),
        a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 2, 1), shuffle=nn.ChannelShuffle(2), out=nn.Conv2d(6, 2, 1),
    )  # fmt: skip
    symmetry = checked(net, images())
    assert sizes(symmetry) == {"a": 4, "b": 2}
    into = {axis.site: axis.index.tolist() for axis in symmetry.permutations["a"].axes}
    assert into["out.weight"] == [[0, 2, 4, 1]]
    halves = Net(
        lambda s, x: s.p(F.relu(s.i(x))[:, :5]) + s.q(F.relu(s.i(x))[:, 3:]),
        i=nn.Linear(3, 8), p=nn.Linear(5, 2), q=nn.Linear(5, 2),
    )  # fmt: skip
    assert sorted(sizes(checked(halves, columns())).values()) == [2, 3, 3]


def test_a_unit_that_occurs_twice_is_a_block() -> None:
    net = Net(
        lambda s, x: s.out(torch.cat([F.relu(s.i(x)), F.relu(-s.i(x))], -1)),
        i=nn.Linear(3, 5),
        out=nn.Linear(10, 2),
    )
    symmetry = checked(net, columns())
    assert sizes(symmetry) == {"i": 5}
    into = {axis.site: axis.index.shape for axis in symmetry.permutations["i"].axes}
    assert into["out.weight"] == (2, 5)


def test_pixel_shuffle_moves_blocks_of_channels() -> None:
    net = Net(
        lambda s, x: s.out(F.pixel_shuffle(F.relu(s.i(x)), 2)),
        i=nn.Conv2d(3, 12, 1),
        out=nn.Conv2d(3, 2, 1),
    )
    assert torch.ops.aten.pixel_shuffle not in RULES  # PyTorch takes it apart
    symmetry = checked(net, images(pixels=4))
    assert sizes(symmetry) == {"i": 3}
    assert symmetry.permutations["i"].axes[0].index.shape == (4, 3)


def test_units_shifted_along_their_own_axis_are_pinned() -> None:
    net = Net(
        lambda s, x: s.out(s.h(x) + s.h(x).roll(1, -1)),
        h=nn.Linear(3, 6),
        out=nn.Linear(6, 2),
    )
    symmetry = checked(net, columns())
    assert sizes(symmetry) == {}
    assert symmetry.scalings.factors == {"h": 1}  # all units together


def test_weights_used_twice_are_one_site() -> None:
    shared = Net(
        lambda s, x: s.o(s.h(F.relu(s.h(F.relu(s.i(x)))))),
        i=nn.Linear(3, 6),
        h=nn.Linear(6, 6),
        o=nn.Linear(6, 2),
    )
    assert sizes(checked(shared, columns())) == {"i": 6}
    tied = Net(
        lambda s, x: F.linear(F.relu(s.h(s.e(x))), s.e.weight),
        e=nn.Embedding(11, 6),
        h=nn.Linear(6, 6),
    )
    symmetry = checked(tied, torch.randint(0, 11, (2, 4)))
    assert sizes(symmetry) == {"e": 6}
    assert {(axis.site, axis.dim) for axis in symmetry.permutations["e"].axes} == {
        ("e.weight", 1), ("h.weight", 0), ("h.weight", 1), ("h.bias", 0),
    }  # fmt: skip
    twin = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    twin[2].bias = twin[0].bias
    assert sizes(checked(twin, columns())) == {"0": 4}


def test_group_normalisation_allows_channels_within_groups_and_whole_groups() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.GroupNorm(3, 6), nn.ReLU(), nn.Conv2d(6, 2, 1)
    )
    symmetry = checked(net, images())
    assert symmetry.permutations.order() == 6 * 2**3


@pytest.mark.parametrize(
    ("norm", "signs"),
    [
        (nn.LayerNorm(6), True),
        (nn.RMSNorm(6), True),
        (nn.InstanceNorm1d(6, affine=True, track_running_stats=True), True),
        (nn.BatchNorm1d(6, affine=False), True),
    ],
)
def test_normalisations_keep_permutations_and_rescale_their_weights(
    norm: nn.Module, signs: bool
) -> None:
    net = Net(
        lambda s, x: s.b(s.n(s.a(x))), a=nn.Linear(3, 6), n=norm, b=nn.Linear(6, 2)
    )
    if isinstance(norm, nn.InstanceNorm1d):
        net.function = lambda s, x: s.b(s.n(s.a(x).transpose(1, 2)).transpose(1, 2))
        symmetry = checked(net, torch.randn(2, 5, 3))
    else:
        symmetry = checked(net, columns())
    assert sizes(symmetry) == {"a": 6}
    assert bool(symmetry.signs.factors) == signs


def test_filter_response_normalisation_written_by_hand_is_understood() -> None:
    class FRN(nn.Module):
        def __init__(self, channels: int):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1, channels, 1, 1))
            self.b = nn.Parameter(torch.zeros(1, channels, 1, 1))
            self.t = nn.Parameter(torch.zeros(1, channels, 1, 1))
            self.epsilon = nn.Parameter(torch.tensor(1e-6))

        def forward(self, x: Tensor) -> Tensor:
            x = x * torch.rsqrt(
                x.pow(2).mean((2, 3), keepdim=True) + self.epsilon.abs()
            )
            return torch.max(self.w * x + self.b, self.t)

    symmetry = checked(
        nn.Sequential(nn.Conv2d(3, 5, 1), FRN(5), nn.SiLU(), nn.Conv2d(5, 2, 1)),
        images(),
    )
    assert sizes(symmetry) == {"0": 5}
    assert symmetry.scalings.factors == {}  # epsilon stands in the way
    # x / |x|: the sign reaches the weight, which takes it back
    assert symmetry.signs.factors == {"0": 5}


def test_what_enters_a_recurrent_layer_is_rescaled_by_its_input_weights() -> None:
    net = Net(
        lambda s, x: s.o(s.l(torch.tanh(s.a(x)))[0]) + s.p(s.m(F.relu(s.b(x)))[0]),
        a=nn.Linear(3, 6), l=nn.LSTM(6, 4), o=nn.Linear(4, 2), b=nn.Linear(3, 5), m=nn.GRU(5, 4), p=nn.Linear(4, 2),
    )  # fmt: skip
    symmetry = checked(net, torch.randn(5, 2, 3))
    # and hidden units, whose candidates are odd
    assert symmetry.signs.factors == {"a": 6, "l.l0": 4, "m.l0": 4}
    assert symmetry.scalings.factors == {"b": 5}


def test_the_last_hidden_state_belongs_to_the_last_layer() -> None:
    net = Net(lambda s, x: s.o(s.l(x)[1][0][-1]), l=nn.LSTM(3, 4, 2), o=nn.Linear(4, 2))
    assert sizes(checked(net, torch.randn(5, 2, 3))) == {"l.l0": 4, "l.l1": 4}


def test_a_state_that_comes_from_outside_pins_the_layer() -> None:
    net = Net(lambda s, x, h: s.o(s.l(x, h)[0]), l=nn.GRU(3, 4), o=nn.Linear(4, 2))
    assert sizes(checked(net, torch.randn(5, 2, 3), torch.randn(1, 2, 4))) == {}


@pytest.mark.parametrize(
    ("need_weights", "batch_first"), [(False, True), (True, False)]
)
def test_attention_permutes_heads_and_rows_within_heads(
    need_weights: bool, batch_first: bool
) -> None:
    net = Net(
        lambda s, x: s.o(s.a(s.i(x), s.i(x), s.i(x), need_weights=need_weights)[0]),
        i=nn.Linear(3, 12), a=nn.MultiheadAttention(12, 3, batch_first=batch_first), o=nn.Linear(12, 2),
    )  # fmt: skip
    symmetry = checked(net, torch.randn(2, 5, 3))
    head = math.factorial(4) ** 2  # rows of queries and keys together, rows of values
    assert (
        symmetry.permutations.order()
        == math.factorial(12) ** 2 * math.factorial(3) * head**3
    )
    assert symmetry.permutations["a.heads"].size == 3


def attention(
    s: Any, x: Tensor, heads: int, shared: int = 1, rotary: bool = False
) -> Tensor:
    """Attention by hand, with grouped queries and rotary positions if wanted."""
    batch, time, _ = x.shape
    q = s.q(x).view(batch, time, heads, -1).transpose(1, 2)
    k, v = (
        f(x).view(batch, time, heads // shared, -1).transpose(1, 2) for f in (s.k, s.v)
    )
    if rotary:
        angle = torch.arange(time)[:, None] * torch.tensor([1.0, 0.3])
        cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
        q, k = (
            y * cos + torch.cat([-y[..., 2:], y[..., :2]], -1) * sin for y in (q, k)
        )
    k, v = (y.repeat_interleave(shared, 1) for y in (k, v))
    scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
    return s.o((scores @ v).transpose(1, 2).reshape(batch, time, -1))


def attention_net(**options: Any) -> Net:
    shared = options.get("shared", 1)
    return Net(
        lambda s, x: attention(s, x, 4, **options),
        q=nn.Linear(3, 16), k=nn.Linear(3, 16 // shared), v=nn.Linear(3, 16 // shared), o=nn.Linear(16, 2),
    )  # fmt: skip


def test_heads_that_are_merged_with_the_batch_and_split_again_cost_no_products() -> (
    None
):
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (
                nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.one, self.two):
                x = x + layer(x, x, x, need_weights=False)[0]
            return x.sum(1)

    sizes = []
    for length in (3, 30):
        flow = Flow()
        propagate(flow, Trace(Attends().eval(), (torch.randn(2, length, 8),)))
        sizes.append(flow.size)
    # a product with every token would take all memory at some hundreds of them
    assert sizes[0] == sizes[1]


def test_grouped_queries_move_with_the_head_of_keys_that_serves_them() -> None:
    symmetry = checked(attention_net(shared=2), torch.randn(2, 5, 3))
    # Two heads of keys; inside each two heads of queries, four rows of queries and
    # keys, four rows of values.
    assert symmetry.permutations.order() == 2 * (2 * 24 * 24) ** 2


def test_rotary_positions_pin_queries_and_keys_but_not_heads() -> None:
    symmetry = checked(attention_net(rotary=True), torch.randn(2, 5, 3))
    assert symmetry.permutations.order() == 24 * 24**4
    # pairs of rows of queries and keys; rows of values
    assert scales(symmetry) == 8 + 16


@pytest.mark.parametrize("shared", [1, 2])
def test_pairs_of_rotary_rows_are_one_set_inside_the_heads(shared: bool) -> None:
    symmetry = checked(attention_net(rotary=True, shared=shared), torch.randn(2, 5, 3))
    group = symmetry.group
    pairs = [
        one
        for one in group.units.values()
        if any(a.site == "k.weight" and a.exponent for a in one.axes)
    ]
    assert [one.count for one in pairs] == [4 // shared] * 2
    assert all({"flip", "scale"} <= one.moves for one in pairs)
    # Rows i and i + 2 of a head turn together: all of its queries by a factor, its keys
    # by the inverse.
    own = {
        tuple(sorted(column))
        for one in pairs
        for axis in one.axes
        if axis.site == "k.weight" and axis.exponent
        for column in axis.index.T.tolist()
    }
    assert own == {
        (4 * head + row, 4 * head + row + 2)
        for head in range(4 // shared)
        for row in range(2)
    }
    element = group.element(
        log_scales={one.name: torch.full(one.shape, math.log(2.0)) for one in pairs}
    )
    weights = symmetry.weights_of(attention_net(rotary=True, shared=shared))
    ratios = {
        site: (value / weights[site]).detach()
        for site, value in element(weights).items()
    }
    factor = ratios["k.weight"][0, 0]
    assert float(factor) in (0.5, 2.0)
    assert bool((ratios["k.weight"] == factor).all())
    assert bool((ratios["q.weight"] == 1 / factor).all())


def test_grouped_queries_inside_scaled_dot_product_attention() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (s.q, s.k, s.v))
        return s.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )

    net = Net(
        forward,
        q=nn.Linear(3, 16),
        k=nn.Linear(3, 8),
        v=nn.Linear(3, 8),
        o=nn.Linear(16, 2),
    )
    assert (
        checked(net, torch.randn(2, 5, 3)).permutations.order()
        == 2 * (2 * 24 * 24) ** 2
    )


def test_a_bias_for_each_head_moves_with_the_heads() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        place = torch.arange(5)
        bias = (
            s.table[(place[:, None] - place + 4).flatten()]
            .view(5, 5, 2)
            .permute(2, 0, 1)
        )
        return s.o(
            ((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v)
            .transpose(1, 2)
            .flatten(2)
        )

    net = Net(
        forward,
        qkv=nn.Linear(3, 24),
        table=nn.Parameter(torch.randn(9, 2)),
        o=nn.Linear(8, 2),
    )
    symmetry = checked(net, torch.randn(2, 5, 3))
    assert symmetry.permutations.order() == 2 * 24**4
    assert any(
        a.site == "table" and a.dim == 1
        for a in symmetry.permutations["table.heads"].axes
    )


def test_a_mask_that_differs_between_heads_pins_them_but_not_what_is_inside() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        place = torch.arange(5.0)
        mask = (
            -(place[:, None] - place).abs() * torch.tensor([0.5, 2.0])[:, None, None]
        )  # linear biases, one slope a head
        return s.o(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
            .transpose(1, 2)
            .flatten(2)
        )

    symmetry = checked(
        Net(forward, qkv=nn.Linear(3, 24), o=nn.Linear(8, 2)), torch.randn(2, 5, 3)
    )
    assert symmetry.permutations.order() == 24**4


def test_units_of_one_are_rescaled_though_not_permuted() -> None:
    symmetry = checked(
        nn.Sequential(nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 2)), columns()
    )
    assert sizes(symmetry) == {}
    assert symmetry.scalings.factors == {"0": 1}


@pytest.mark.parametrize("width", [8, 300])
@pytest.mark.parametrize(
    ("function", "signs"),
    [
        (F.relu6, False),
        (lambda x: F.hardtanh(x, -50, 60), False),
        (lambda x: F.hardtanh(x, -50, 50), True),
        (lambda x: torch.where(x > 9, 9, x), False),
        (lambda x: x * (x < 9).logical_not().logical_not(), False),
        (torch.tanh, True),
    ],
)
def test_functions_that_are_linear_as_far_as_inputs_reach_pass_no_scale(
    function: Callable[[Tensor], Tensor], signs: bool, width: int
) -> None:
    net = Net(
        lambda s, x: s.o(function(0.01 * s.h(x))),
        h=nn.Linear(80, width),
        o=nn.Linear(width, 3),
    )
    symmetry = find_symmetry(net, torch.randn(4, 80), verify=False)
    assert not symmetry.group.names("scale")
    assert bool(symmetry.group.names("flip")) == signs


def test_symmetric_functions_of_the_outputs_free_the_last_layer() -> None:
    net = Net(
        lambda s, x: s.o(F.relu(s.h(x))).max(-1)[0],
        h=nn.Linear(3, 4),
        o=nn.Linear(4, 5),
    )
    symmetry = checked(net, columns())
    assert sorted(sizes(symmetry).values()) == [4, 5]


def test_the_last_bias_is_shifted_in_front_of_a_softmax() -> None:
    layers = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)]
    assert checked(nn.Sequential(*layers), columns()).shifts.sites == ()
    assert checked(
        nn.Sequential(*layers, nn.LogSoftmax(-1)), columns()
    ).shifts.sites == ("2.bias",)
    assert checked(nn.Sequential(*layers, nn.Softmax(0)), columns()).shifts.sites == ()
    symmetry = find_symmetry(nn.Sequential(*layers), columns(), logits=True)
    assert symmetry.shifts.sites == ("2.bias",)
    assert verify(symmetry, nn.Sequential(*layers), columns())


def test_in_place_operations_on_parts_of_a_tensor_are_followed() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.relu(s.a(x), inplace=True).clone()
        h[:, :2] = 0.0
        return s.b(h)

    net = Net(forward, a=nn.Linear(3, 6), b=nn.Linear(6, 2))
    assert sorted(sizes(checked(net, columns())).values()) == [2, 4]


@pytest.mark.parametrize("through", ["a view", "the tensor itself"])
def test_what_is_written_in_place_is_read_wherever_it_is_shared(through: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        shared = h.view(-1, 6) if through == "a view" else h
        shared.mul_(torch.arange(6.0)).relu_()
        return s.b(h)

    symmetry = checked(Net(forward, a=nn.Linear(3, 6), b=nn.Linear(6, 2)), columns())
    assert sizes(symmetry) == {}
    assert symmetry.scalings.factors == {"a": 6}


def test_training_branches_are_followed_where_the_eval_pass_leaves_parameters_out() -> (
    None
):
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.extra = (
                nn.Linear(3, 6),
                nn.Linear(6, 2),
                nn.Linear(6, 2),
            )

        def forward(self, x: Tensor) -> Any:
            h = F.relu(self.a(x))
            return (self.b(h), self.extra(h)) if self.training else self.b(h)

    symmetry = checked(Auxiliary(), columns())
    assert {axis.site for axis in symmetry.permutations["a"].axes} >= {
        "extra.weight",
        "b.weight",
    }


def test_parameters_that_no_pass_uses_stay_where_they_are() -> None:
    net = Net(
        lambda s, x: s.b(F.relu(s.a(x))),
        a=nn.Linear(3, 6),
        b=nn.Linear(6, 2),
        unused=nn.Linear(4, 4),
    )
    symmetry = checked(net, columns())
    assert sizes(symmetry) == {"a": 6}
    assert "no forward pass uses it" in symmetry.explain("unused.weight")[0].reason


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("linalg_qr", lambda h: torch.linalg.qr(h).R),
        ("view in Net", lambda h: h.view(torch.int32).float()[:, :6]),
    ],
)
def test_unknown_operators_pin_and_are_named(name: str, function: Any) -> None:
    net = Net(lambda s, x: s.b(function(s.a(x))), a=nn.Linear(3, 6), b=nn.Linear(6, 2))
    with pytest.warns(UnknownOperator, match=name):
        symmetry = find_symmetry(net, columns())
    assert sizes(symmetry) == {}
    assert name in symmetry.explain("a.weight")[0].reason


def _with_gaps(h: Tensor) -> Tensor:
    h = h.clone()
    h[torch.tensor([0, 1]), :, torch.tensor([1, 0])] = 0.0
    return h[:, 0]


@pytest.mark.parametrize(
    ("forward", "operator"),
    [
        (lambda s, x: _with_gaps(s.a(x).unflatten(1, (2, 2))), "index_put"),
        (
            lambda s, x: s.a(x).scatter_add(0, torch.zeros(4, 2).long(), s.a(x))[:, :2],
            "scatter_add",
        ),
        (lambda s, x: s.a(x)[:, :2] + (s.a(x) > 0.3).nonzero().shape[0], "nonzero"),
    ],
)
def test_a_rule_that_gives_up_says_so_and_where(forward: Any, operator: str) -> None:
    net = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(2, 2))
    net.function = lambda s, x: s.b(forward(s, x))
    with pytest.warns(UnknownOperator, match=f"{operator} in Net"):
        symmetry = find_symmetry(net, columns())
    assert sizes(symmetry) == {}


def test_a_registered_rule_is_used() -> None:
    @torch.library.custom_op("tests::centred", mutates_args=())
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    centred.register_fake(torch.empty_like)
    net = Net(lambda s, x: s.b(centred(s.a(x))), a=nn.Linear(3, 6), b=nn.Linear(6, 2))
    with pytest.warns(UnknownOperator):
        assert sizes(find_symmetry(net, columns())) == {}
    register_rule("tests::centred")(lambda flow, call: flow.normalise(call["x"], [-1]))
    try:
        assert sizes(checked(net, columns())) == {"a": 6}
    finally:
        del RULES["tests::centred"]


@pytest.mark.parametrize("name", ["bump", "add"])
def test_a_custom_operator_that_writes_is_none_of_pytorchs(name: str) -> None:
    @torch.library.custom_op(f"tests::{name}_", mutates_args=("x",))
    def written(x: Tensor) -> None:
        x += torch.arange(x.shape[-1])

    net = Net(
        lambda s, x: s.b(_with(written, s.a(x).clone())),
        a=nn.Linear(3, 6),
        b=nn.Linear(6, 2),
    )
    with pytest.warns(UnknownOperator, match="in Net"):
        assert sizes(find_symmetry(net, columns())) == {}


def _with(operator: Callable[[Tensor], None], h: Tensor) -> Tensor:
    operator(h)
    return h


def test_what_cannot_be_traced_gets_an_error_that_shows_how_to_declare_the_group() -> (
    None
):
    net = Net(
        lambda s, x: s.a(x) if x.sum() > 0 else s.b(x),
        a=nn.Linear(3, 2),
        b=nn.Linear(3, 2),
    )
    with pytest.raises(UntraceableError, match=r"Group\.declare"):
        find_symmetry(net, columns())


def test_signs_that_cancel_within_a_site_are_none() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.last, self.weights = (
                nn.Linear(3, 8),
                nn.Linear(2, 2),
                nn.Parameter(torch.randn(1, 2, 4)),
            )

        def forward(self, x: Tensor) -> Tensor:
            weighed = torch.relu(self.own(x)).unflatten(-1, (2, 4)) * self.weights
            return self.last(weighed.sum(-1).relu())

    symmetry = find_symmetry(Weighed(), torch.randn(4, 3))
    assert not symmetry.group.names("flip")
    # each of the two units behind permutes its own four
    assert symmetry.log_order() == pytest.approx(2 * math.log(24) + math.log(2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scales_are_found_where_no_gradients_are_recorded(mode: Any) -> None:
    net, x = (
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)),
        torch.randn(4, 3),
    )
    with mode():
        assert find_symmetry(net, x).scalings.factors == {"0": 8}


@pytest.mark.parametrize("gains", [(1.0, 1.0), (1e-4, 1e-2, 1e-5, 1.0)])
def test_scales_of_a_fixed_stream_need_neither_loud_gradients_nor_every_parameter(
    gains: tuple[float, ...],
) -> None:
    """A norm's gain and shift scale against the columns of the layer that reads it, in
    each of the blocks.
    """

    def forward(net: Any, x: Tensor) -> Tensor:
        for gain, norm, layer in zip(gains, net.norms, net.layers, strict=True):
            x = x + gain * F.gelu(layer(norm(x)))
        return x

    norms, layers = (
        nn.ModuleList(make() for _ in gains)
        for make in (lambda: nn.LayerNorm(5), lambda: nn.Linear(5, 5))
    )
    symmetry = checked(
        Net(forward, norms=norms, layers=layers, unread=nn.Parameter(torch.ones(5))),
        torch.randn(5, 5),
    )
    assert sum(symmetry.scalings.factors.values()) == 5 * len(gains)
    assert sum(
        symmetry.group[name].count for name in symmetry.group.names("flip")
    ) == 5 * len(gains)
