"""Slices of stacked and fused parameters: experts, heads, streams, each with rows and columns of its own."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pyro_symmetric.alignment import align
from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.slices import narrowed
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify
from pyro_symmetric.groups import Axis


def fact(n: int) -> int:
    return math.factorial(n)


def normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def tensors(net: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(value) for name, value in net.named_parameters()}


def checked(net: nn.Module, *inputs: Tensor, order: int) -> Symmetry:
    """The symmetry, after comparing its order with what was counted by hand, and elements with the network.

    Elements must leave the output unchanged; few enough permutations must all act differently.
    """
    net, inputs = net.double().eval(), tuple(x.double() if x.is_floating_point() else x for x in inputs)
    symmetry = find_symmetry(net, *inputs, verify=False)
    assert symmetry.permutations.order() == order
    weights = tensors(net)
    before = functional_call(net, weights, inputs)
    for _ in range(10):
        after = functional_call(net, symmetry.group.sample(dtype=torch.float64)(weights), inputs)
        torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)
    if order <= 10_000:
        every = symmetry.permutations.enumerate()(weights)
        assert len(torch.cat([value.flatten(1) for value in every.values()], -1).unique(dim=0)) == order
    assert verify(symmetry, net, *inputs)
    return symmetry


# mixtures of experts --------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A mixture of two-layer experts whose weights are stacked.

    :param how: how the products are written.
    """

    def __init__(self, how: str = "einsum", experts: int = 3, width: int = 4, hidden: int = 3):
        super().__init__()
        self.how = how
        self.inputs, self.outputs = nn.Linear(2, width), nn.Linear(width, 2)
        self.router = nn.Linear(width, experts)
        self.up, self.bias, self.down = (
            normal(experts, width, hidden),
            normal(experts, hidden),
            normal(experts, hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inputs(x))
        gate = self.router(x).softmax(-1)
        if self.how == "einsum":
            h = F.relu(torch.einsum("bi,eih->beh", x, self.up) + self.bias)
            y = torch.einsum("beh,eho,be->bo", h, self.down, gate)
        elif self.how == "bmm":
            h = F.relu(torch.baddbmm(self.bias.unsqueeze(1), x.expand(len(self.up), *x.shape), self.up))
            y = (torch.bmm(h, self.down) * gate.T.unsqueeze(-1)).sum(0)
        else:  # a loop
            y = x.new_zeros(())
            for e in range(len(self.up)):
                y = y + (F.relu(x @ self.up[e] + self.bias[e]) @ self.down[e]) * gate[:, e : e + 1]
        return self.outputs(x + y)


@pytest.mark.parametrize("how", ["einsum", "bmm"])
def test_experts_are_exchanged_and_each_exchanges_its_own_units(how: str) -> None:
    symmetry = checked(Experts(how), torch.randn(5, 2), order=fact(4) * fact(3) * fact(3) ** 3)
    # A scale for each hidden unit, and no other: what is left of each expert's is the router's, behind a softmax.
    assert sum(symmetry.group[n].count for n in symmetry.group.names("scale")) == 9


def test_experts_in_a_loop_exchange_their_own_units() -> None:
    checked(Experts("loop"), torch.randn(5, 2), order=fact(4) * fact(3) ** 3)


def test_the_order_is_that_of_all_permutations_that_leave_the_function_alone() -> None:
    """All rearrangements of the hidden units of all experts, with all rearrangements of the router's rows."""
    net = Experts(experts=2, width=1, hidden=2).double()
    x = 3.0 * torch.randn(50, 2).double()
    weights = tensors(net)
    weights["inputs.bias"].zero_()  # no unit is idle on all inputs
    weights["bias"] = 0.1 * torch.rand(2, 2).double()
    before = functional_call(net, weights, (x,))
    count = 0
    for units in itertools.permutations(range(4)):
        for rows in ([0, 1], [1, 0]):
            moved = dict(weights)
            moved["up"] = weights["up"].transpose(0, 1).reshape(1, 4)[:, units].reshape(1, 2, 2).transpose(0, 1)
            moved["bias"] = weights["bias"].reshape(4)[list(units)].reshape(2, 2)
            moved["down"] = weights["down"].reshape(4, 1)[list(units)].reshape(2, 2, 1)
            moved["router.weight"], moved["router.bias"] = weights["router.weight"][rows], weights["router.bias"][rows]
            count += bool(torch.allclose(functional_call(net, moved, (x,)), before, rtol=1e-9))
    assert count == find_symmetry(net, x).permutations.order() == 2 * 2**2


class Routed(nn.Module):
    """Experts that the data choose for each token, the best two of them.

    :param grouped: by one product for all tokens, sorted by their expert; else by looking up each token's weights.
    """

    def __init__(self, grouped: bool, experts: int = 3, width: int = 4, hidden: int = 3):
        super().__init__()
        self.grouped = grouped
        self.inputs, self.outputs = nn.Linear(2, width), nn.Linear(width, 2)
        self.router = nn.Linear(width, experts)
        self.up, self.down = normal(experts, 2 * hidden, width), normal(experts, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inputs(x))
        weight, chosen = self.router(x).softmax(-1).topk(2)
        wide = x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, x.shape[-1])
        expert = chosen.reshape(-1)
        if self.grouped:
            order = expert.argsort()
            ends = (expert.unsqueeze(-1) == torch.arange(len(self.up))).sum(0).cumsum(0).to(torch.int32)
            gate, up = torch.ops.symmetric_test.grouped_mm(wide[order], self.up.mT, ends).chunk(2, -1)
            y = torch.ops.symmetric_test.grouped_mm(F.silu(gate) * up, self.down.mT, ends)[order.argsort()]
        else:
            gate, up = torch.bmm(self.up[expert], wide.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
            y = torch.bmm(self.down[expert], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return self.outputs(x + (y * weight.reshape(-1, 1)).reshape(len(x), 2, -1).sum(1))


@torch.library.custom_op("symmetric_test::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    pieces = torch.tensor_split(x, ends[:-1].cpu().long())
    return torch.cat([piece @ own for piece, own in zip(pieces, weight, strict=True)])


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@pytest.fixture
def _grouped_rule() -> None:
    from pyro_symmetric.discovery.rules.contraction import grouped_mm as rule
    from pyro_symmetric.discovery.rules.registry import register_rule

    register_rule("symmetric_test::grouped_mm", sliced=True)(rule)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.usefixtures("_grouped_rule")
def test_experts_that_the_data_choose_exchange_their_own_units(grouped: bool) -> None:
    """As in Mixtral: gates and products of an expert's units move together.

    Experts that are looked up by number move with the rows of the router. Where tokens are sorted by them they stay.
    """
    symmetry = checked(Routed(grouped), torch.randn(5, 2), order=fact(4) * fact(3) ** 3 * (1 if grouped else fact(3)))
    assert sum(symmetry.group[n].count for n in symmetry.group.names("scale")) == 9  # of products and outputs


class Numbers(nn.Module):
    """Linear experts, two of four for each token, in several ways.

    :param how: what happens to the experts' numbers.
    """

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.inputs, self.router = nn.Linear(2, 3), nn.Linear(3, 4)
        self.bias, self.experts = nn.Parameter(torch.randn(4) / 10), normal(4, 3, 2)
        self.last = normal(4, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = torch.tanh(self.inputs(x))
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2, sorted=False)[1] if self.how != "best" else scores.argmax(-1, True)
        weight = scores.gather(-1, chosen)
        if self.how in ("one_hot", "best"):
            mask = F.one_hot(chosen, 4).to(x.dtype)
            return torch.einsum("tke,tk,edo,td->to", mask, weight, self.experts, x)
        if self.how == "shifted":
            chosen = (chosen + 1) % 4
        flat = chosen.reshape(-1)
        wide = x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 1, 3)
        y = torch.bmm(wide, self.experts[flat]).squeeze(1) + self.last.index_select(0, flat)
        if self.how == "compared":
            y = y * (flat > 1).unsqueeze(-1)
        y = (y.unflatten(0, (-1, 2)) * weight.unsqueeze(-1)).sum(1)
        return (y, chosen) if self.how == "returned" else y


@pytest.mark.parametrize(
    ("how", "experts"),
    # Numbers modulo four may be counted from anywhere, pairs of those that are compared alike may exchange: 4 and 4.
    [("looked up", 24), ("one_hot", 24), ("best", 24), ("shifted", 4), ("compared", 4), ("returned", 1)],
)
def test_experts_move_with_their_numbers_unless_these_mean_anything_else(how: str, experts: int) -> None:
    """The permutations of experts are counted by trying each; beside them there are 6 of the units that all read.

    A group that isn't all permutations of something isn't found.
    """
    torch.manual_seed(0)
    net = Numbers(how).double()
    x = 3 * torch.randn(500, 2, dtype=torch.float64)
    symmetry = find_symmetry(net, x, verify=False)
    assert symmetry.permutations.order() == 6 * (experts if experts == 24 else 1)
    assert verify(symmetry, net, x)
    count, before = 0, net(x)
    weights = {name: value.detach() for name, value in net.named_parameters()}
    for order in map(list, itertools.permutations(range(4))):
        moved = {name: v if name.startswith("inputs") else v[order] for name, v in weights.items()}
        after = functional_call(net, moved, (x,))
        pairs = zip(before, after, strict=True) if isinstance(before, tuple) else [(before, after)]
        count += all(torch.allclose(a.double(), b.double()) for a, b in pairs)
    assert count == experts


class TwoRouters(nn.Module):
    """Weights of one expert, on what another one has computed."""

    def __init__(self, same: bool):
        super().__init__()
        self.same = same
        self.up, self.down = normal(3, 2, 4), normal(3, 4, 2)

    def forward(self, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        h = torch.relu(torch.bmm(x.unsqueeze(1), self.up[one]))
        return torch.bmm(h, self.down[one if self.same else other]).squeeze(1)


def test_labels_of_one_routers_choice_do_not_meet_those_of_another() -> None:
    x, one, other = torch.randn(5, 2), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 2, 2, 1, 0])
    checked(TwoRouters(True), x, one, other, order=fact(4) ** 3)
    checked(TwoRouters(False), x, one, other, order=fact(4))  # the same order in all experts


# heads ----------------------------------------------------------------------------------------------------------------

LAYOUTS = {"hdk": (0, 1, 2), "dhk": (1, 0, 2), "dkh": (1, 2, 0)}


class Heads(nn.Module):
    """Attention by einsum, with weights of each layout (h: heads, d: width, k: size of a head)."""

    def __init__(self, layout: str, heads: int = 3, width: int = 3, size: int = 2):
        super().__init__()
        self.layout = layout
        sizes = {"h": heads, "d": width, "k": size}
        shape = [sizes[letter] for letter in layout]
        self.inputs, self.outputs = nn.Linear(2, width), nn.Linear(width, 2)
        self.q, self.k, self.v, self.o = (normal(*shape) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inputs(x))
        q, k, v = (torch.einsum(f"btd,{self.layout}->bhtk", x, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("bhtk,bhsk->bhts", q, k).softmax(-1)
        return self.outputs(x + torch.einsum(f"bhts,bhsk,{self.layout}->btd", scores, v, self.o))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_of_stacked_weights_have_rows_of_their_own(layout: str) -> None:
    """Heads, and in each of them rows of queries with keys and rows of values; and the stream."""
    symmetry = checked(Heads(layout), torch.randn(4, 5, 2), order=fact(3) * (2 * 2) ** 3 * fact(3))
    assert sum(symmetry.group[n].count for n in symmetry.group.names("scale")) == 12


@pytest.mark.parametrize("rotary", [False, True])
def test_heads_that_share_the_weight_of_a_norm_are_exchanged(rotary: bool) -> None:
    """As in Qwen 3 and Gemma 3: one norm weight for all heads' queries, one for all keys, then a rotary embedding."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.outputs = nn.Linear(2, 3), nn.Linear(3, 2)
            self.q, self.k, self.v = (nn.Linear(3, n * 4, bias=False) for n in (4, 2, 2))
            self.o = nn.Linear(16, 3)
            self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.inputs(x))
            q, k, v = (own(x).unflatten(-1, (-1, 4)).transpose(1, 2) for own in (self.q, self.k, self.v))
            q, k = self.q_norm(q), self.k_norm(k)
            if rotary:
                angle = torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.1])).repeat(1, 2).to(x)
                q, k = (y * angle.cos() + torch.cat([-y[..., 2:], y[..., :2]], -1) * angle.sin() for y in (q, k))
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
            return self.outputs(x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))

    # Groups of keys, the two queries of each, and the values' rows in each group; the places of a head only if nothing
    # is rotated, and for all heads alike, as they share a weight.
    shared = 1 if rotary else fact(4)
    checked(Normed(), torch.randn(3, 5, 2), order=fact(3) * fact(2) * 2**2 * fact(4) ** 2 * shared)


# fused streams --------------------------------------------------------------------------------------------------------


def test_the_two_streams_of_a_transformer_move_by_themselves() -> None:
    """Encoder and decoder meet in one fused weight only, whose slices read one of them each."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target, self.outputs = nn.Linear(2, 4), nn.Linear(3, 4), nn.Linear(4, 2)
            self.body = nn.Transformer(4, 2, 1, 1, dim_feedforward=3, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return self.outputs(self.body(self.source(source), self.target(target)))

    # Two streams; three attentions of two heads, with rows of queries and of values; two feed-forward layers.
    checked(
        Translator(),
        torch.randn(2, 5, 2),
        torch.randn(2, 4, 3),
        order=fact(4) ** 2 * (2 * (2 * 2) ** 2) ** 3 * fact(3) ** 2,
    )


class Fused(nn.Module):
    """One weight whose first rows read one stream, and whose other rows read another."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.a, self.b, self.outputs = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(6, 2)
        self.weight = normal(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = torch.tanh(self.a(x)), torch.tanh(self.b(y))
        first, second = self.weight.split([2, 4])
        if self.how == "whole":  # reads the whole weight, too
            x = x + (self.weight.sum(0) if self.how == "whole" else 0)
        if self.how == "flipped":
            second = second.flip(1)
        if self.how == "one":
            y = x
        return self.outputs(torch.relu(torch.cat([F.linear(x, first), F.linear(y, second)], -1)))


@pytest.mark.parametrize(
    ("how", "streams"),
    # Read whole, both streams have the same order of columns; so they have if there is one stream only, and then the
    # second layer is idle.
    [("apart", fact(3) ** 2), ("flipped", fact(3) ** 2), ("whole", fact(3)), ("one", fact(3))],
)
def test_slices_of_a_fused_weight_belong_to_the_streams_that_they_read(how: str, streams: int) -> None:
    net = Fused(how)
    if how == "one":
        net.b = nn.Identity()
    checked(net, torch.randn(5, 2), torch.randn(5, 2), order=streams * fact(2) * fact(4))


def test_a_slice_that_nothing_reads_is_no_symmetry() -> None:
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.outputs, self.table = nn.Linear(2, 3), nn.Linear(3, 2), normal(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.outputs(torch.tanh(self.inputs(x)) + self.table[:4].sum(0))

    checked(Partial(), torch.randn(5, 2), order=fact(3) * fact(4))


# whatever else is done with a stack -----------------------------------------------------------------------------------


def _normed(w: Tensor) -> Tensor:
    return w / w.norm(dim=1, keepdim=True)


ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled": lambda w, v: 2.0 * w,
    "product": lambda w, v: w * v,
    "sum": lambda w, v: w + v,
    "normed": lambda w, v: _normed(w),
    "centred": lambda w, v: w - w.mean(2, keepdim=True),
    "flat": lambda w, v: w.flatten(0, 1).reshape(w.shape),
    "reversed": lambda w, v: w.flip(0),
    "transposed": lambda w, v: w.transpose(1, 2).contiguous().transpose(1, 2),
    "first": lambda w, v: torch.cat([w[:1], v[1:]]),
    "mean": lambda w, v: w + v.mean(0),
    "abs": lambda w, v: w.abs(),
    "masked": lambda w, v: w * torch.ones(w.shape[1:]).tril().to(w),
    "shared": lambda w, v: w[:1].expand_as(w) + v,
    "chosen": lambda w, v: w[torch.tensor([2, 0, 1])],
    "twice": lambda w, v: w[torch.tensor([0, 0, 1])],
    "matmul": lambda w, v: w @ v.mT @ v,
}


@pytest.mark.parametrize("how", ARITHMETIC)
def test_any_arithmetic_on_stacked_weights_keeps_the_function(how: str) -> None:
    class Computed(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.other = normal(*self.up.shape)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.inputs(x))
            h = F.relu(torch.einsum("bi,eih->beh", x, ARITHMETIC[how](self.up, self.other)) + self.bias)
            return self.outputs(x + torch.einsum("beh,eho,be->bo", h, self.down, self.router(x).softmax(-1)))

    net, x = Computed().double(), torch.randn(5, 2).double()
    symmetry = find_symmetry(net, x, verify=False)
    weights = tensors(net)
    before = functional_call(net, weights, (x,))
    for _ in range(20):
        after = functional_call(net, symmetry.group.sample(dtype=torch.float64)(weights), (x,))
        torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)
    assert symmetry.permutations.order() >= fact(3) if how != "mean" else True


# what is done with the group ------------------------------------------------------------------------------------------


def test_planted_elements_of_a_mixture_are_recovered() -> None:
    net = Experts(experts=3, width=5, hidden=6).double()
    symmetry = find_symmetry(net, torch.randn(5, 2).double())
    torch.manual_seed(0)
    weights = tensors(net)
    planted = symmetry.permutations.sample()
    moved = planted(weights)
    found = align(moved, weights, symmetry.permutations, progress=False)
    for site, value in found.element(moved).items():
        torch.testing.assert_close(value, weights[site])


def test_canonical_forms_of_equivalent_mixtures_agree() -> None:
    net = Experts().double()
    symmetry = find_symmetry(net, torch.randn(5, 2).double())
    weights = tensors(net)
    moved = symmetry.group.sample((10,), dtype=torch.float64)(weights)
    one, other = canonicalize(weights, symmetry), canonicalize(moved, symmetry)
    for site, value in other.items():
        torch.testing.assert_close(value, one[site].expand_as(value))


def test_axes_that_units_cross_alike_are_one_axis() -> None:
    index = torch.arange(24).reshape(2, 3, 4)
    plain = narrowed(Axis("w", 0, index.movedim(1, -1).reshape(8, 3), span=3), (2, 3, 4))
    assert (plain.dim, plain.span, plain.index.tolist()) == (1, 1, [[0, 1, 2]])
    within = Axis("w", 0, index.permute(2, 0, 1).reshape(4, 6), span=3)  # rows of each slice
    assert narrowed(within, (2, 3, 4)) is within
    half = Axis("w", 0, index[:1].movedim(1, -1).reshape(4, 3), span=3)  # in the first slice only
    assert narrowed(half, (2, 3, 4)) is half


def test_one_router_may_choose_from_lists_of_two_lengths() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.up, self.down = nn.Linear(2, 3), normal(3, 2, 3), normal(4, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            which = self.router(x).argmax(-1)
            hidden = F.relu(torch.einsum("bi,bih->bh", x, self.up[which]))
            return torch.einsum("bh,bho->bo", hidden, self.down[which])

    # The same exchange in all experts, though each could exchange its own.
    checked(Chosen(), torch.randn(5, 2), order=fact(3))


class Configured(nn.Module):
    """A mixture of experts that sorts tokens or looks up weights, as its configuration says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Routed(grouped=True)
        self.config = types.SimpleNamespace(_experts_implementation="grouped_mm")

    def forward(self, x: Tensor) -> Tensor:
        self.net.grouped = self.config._experts_implementation == "grouped_mm"
        return self.net(x)


@pytest.mark.usefixtures("_grouped_rule")
def test_mixtures_that_can_look_up_their_experts_are_traced_so() -> None:
    net = Configured()
    checked(net, torch.randn(5, 2), order=fact(4) * fact(3) ** 3 * fact(3))
    assert net.config._experts_implementation == "grouped_mm"


class GraphAttention(nn.Module):
    """Attention over the edges of a graph, which vectors of each head weigh, as PyTorch Geometric's GATConv has it."""

    def __init__(self, activation: Callable[[Tensor], Tensor], heads: int = 2, size: int = 3):
        super().__init__()
        self.activation, self.heads = activation, heads
        self.lin = nn.Linear(4, heads * size, bias=False)
        self.src, self.dst, self.bias = normal(1, heads, size), normal(1, heads, size), normal(heads * size)
        self.out = nn.Linear(heads * size, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.lin(x).unflatten(-1, (self.heads, -1))
        scores = (h * self.src).sum(-1)[None] + (h * self.dst).sum(-1)[:, None]
        scores = F.leaky_relu(scores, 0.2).masked_fill(~edges[:, :, None], -math.inf).softmax(1)
        return self.out(self.activation(torch.einsum("ijh,jhc->ihc", scores, h).flatten(1) + self.bias))


@pytest.mark.parametrize(("activation", "scales", "flips"), [(F.relu, 6, 0), (torch.tanh, 0, 6)])
def test_units_of_each_head_of_graph_attention_are_exchanged(
    activation: Callable[[Tensor], Tensor], scales: int, flips: int
) -> None:
    torch.manual_seed(0)
    net, edges = GraphAttention(activation), (torch.rand(5, 5) < 0.5) | torch.eye(5, dtype=torch.bool)
    x = torch.randn(5, 4, dtype=torch.float64)
    symmetry = checked(net, x, edges, order=2 * fact(3) ** 2)
    assert sum(symmetry.group[name].count for name in symmetry.group.names("scale")) == scales
    assert sum(symmetry.group[name].count for name in symmetry.group.names("flip")) == flips
    # Of all orders of the six hidden units just as many leave the outputs alone.
    weights, kept = tensors(net), 0
    with torch.no_grad():
        expected = functional_call(net, weights, (x, edges))
        for order in itertools.permutations(range(6)):
            moved = {site: value[list(order)] for site, value in weights.items() if site in ("lin.weight", "bias")}
            moved |= {site: weights[site].flatten()[list(order)].reshape(1, 2, 3) for site in ("src", "dst")}
            moved["out.weight"] = weights["out.weight"][:, list(order)]
            kept += torch.allclose(functional_call(net, {**weights, **moved}, (x, edges)), expected)
    assert kept == symmetry.permutations.order()
