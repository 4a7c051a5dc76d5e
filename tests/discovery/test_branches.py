"""Branches with parameters of their own: which are exchanged, counted by hand, and that nothing else is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.discovery.symmetry import Symmetry, with_weights

LN2 = math.log(2.0)


def ln(n: int) -> float:
    """The logarithm of n factorial."""
    return math.lgamma(n + 1)


class Net(nn.Module):
    """A list of branches, a router for them, a last layer, and a function of these and of one tensor."""

    def __init__(self, run: Callable[[Net, Tensor], Tensor], *branches: nn.Module, last: int = 3):
        super().__init__()
        self.run, self.each = run, nn.ModuleList(branches)
        self.router, self.last = nn.Linear(3, len(branches)), nn.Linear(last, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self, x))


class Join(nn.Module):
    """A function of the results of some modules."""

    def __init__(self, join: Callable[..., Tensor], *own: nn.Module):
        super().__init__()
        self.join, self.own = join, nn.ModuleList(own)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(*(module(x) for module in self.own))


def mlp(hidden: int = 4, out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(3, hidden), nn.GELU(), nn.Linear(hidden, out))


def each(net: Net, x: Tensor) -> list[Tensor]:
    return [branch(x) for branch in net.each]


def routed(net: Net, x: Tensor) -> Tensor:
    gate = net.router(x).softmax(-1)
    return sum((gate[:, i : i + 1] * y for i, y in enumerate(each(net, x))), torch.zeros(()))


def selected(net: Net, x: Tensor) -> Tensor:
    gate = net.router(x).softmax(-1)
    y = 0
    for i, branch in enumerate(net.each):
        y = y + gate[:, i].unsqueeze(-1) * branch(x)
    return y


def top(net: Net, x: Tensor) -> Tensor:
    scores = net.router(x)
    kept = torch.where(scores >= scores.topk(2, -1).values[:, -1:], scores, -torch.inf)
    return torch.einsum("bn,bnd->bd", kept.softmax(-1), torch.stack(each(net, x), 1))


def summed(net: Net, x: Tensor) -> Tensor:
    return sum(each(net, x), torch.zeros(()))


def side_by_side(net: Net, x: Tensor) -> Tensor:
    return torch.cat(each(net, x), -1)


def stacked(net: Net, x: Tensor) -> Tensor:
    return torch.stack(each(net, x), 1).flatten(1)


def chunks(net: Net, x: Tensor) -> Tensor:
    return sum((f(y) for f, y in zip(net.each, net.last.read(x).tanh().chunk(3, -1), strict=True)), torch.zeros(()))


def found(net: nn.Module, shape: tuple[int, ...] = (5, 3)) -> Symmetry:
    """The symmetry found without a warning, so that nothing had to be repaired; tried with further elements."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    symmetry = ps.find_symmetry(net, x)
    assert ps.verify(symmetry, net, x, trials=5)
    return symmetry


@pytest.mark.parametrize("run", [routed, selected, top])
def test_experts_in_a_list_are_exchanged_with_their_rows_of_the_router(run: Callable[[Net, Tensor], Tensor]) -> None:
    symmetry = found(Net(run, *(mlp() for _ in range(4))))
    # 4 experts of 4 hidden units each; 3 units of the stream, which can be flipped.
    assert symmetry.log_order() == pytest.approx(ln(4) + 4 * ln(4) + ln(3) + 3 * LN2)
    assert symmetry.permutations.factors == {"each": 4, "each.{0-3}.0": 4, "each.{0-3}.2": 3}
    assert {"router.weight", "router.bias"} <= {axis.site for axis in symmetry.group["each"].axes}


def test_every_exchange_of_two_experts_is_an_element() -> None:
    net = Net(routed, *(mlp(2, 2) for _ in range(3)), last=2).double()
    symmetry, x = found(net), torch.randn(6, 3, dtype=torch.float64)
    weights = symmetry.weights_of(net)
    moved = {
        tuple(p): symmetry.group.element({"each": torch.tensor(p)})(weights) for p in itertools.permutations(range(3))
    }
    for order, values in moved.items():
        assert torch.equal(values["each.0.0.weight"], weights[f"each.{order[0]}.0.weight"])
        assert torch.equal(values["router.bias"], weights["router.bias"][list(order)])
        torch.testing.assert_close(with_weights(net, values)(x), net(x), rtol=0, atol=1e-12)
    # Without its row of the router, the exchange of two experts changes the function.
    wrong = moved[1, 0, 2] | {"router.bias": weights["router.bias"], "router.weight": weights["router.weight"]}
    assert (with_weights(net, wrong)(x) - net(x)).abs().max() > 1e-3


@pytest.mark.parametrize("run", [side_by_side, stacked])
def test_what_reads_branches_side_by_side_is_exchanged_with_them(run: Callable[[Net, Tensor], Tensor]) -> None:
    symmetry = found(Net(run, *(mlp() for _ in range(3)), last=9))
    assert symmetry.log_order() == pytest.approx(ln(3) + 3 * (ln(4) + ln(3) + 3 * LN2))
    assert "last.weight" in {axis.site for axis in symmetry.group["each"].axes}


@pytest.mark.parametrize(
    ("join", "signs"),
    [
        (lambda y: y.sum(0), 3),
        (lambda y: y.mean(0), 3),
        (lambda y: y.amax(0), 0),
        (lambda y: y.logsumexp(0), 0),
        (lambda y: y.topk(2, 0).values[1], 0),
        (lambda y: (y.softmax(0) * y).sum(0), 0),
    ],
)
def test_a_symmetric_function_of_a_stack_takes_branches_in_any_order(
    join: Callable[[Tensor], Tensor], signs: int
) -> None:
    symmetry = found(Net(lambda net, x: join(torch.stack(each(net, x))), mlp(), mlp(), mlp()))
    assert symmetry.log_order() == pytest.approx(ln(3) + 3 * ln(4) + ln(3) + signs * LN2)


@pytest.mark.parametrize(
    "join",
    [
        lambda y: y.cumsum(0).tanh().sum(0),
        lambda y: y.sum(0) + y.argmax(0),
        lambda y: y.topk(2, 0).indices[0] + y.sum(0),
        lambda y: (y.softmax(0) * y.flip(0)).sum(0),
    ],
)
def test_a_function_of_a_stack_that_knows_places_keeps_branches(join: Callable[[Tensor], Tensor]) -> None:
    assert not found(Net(lambda net, x: join(torch.stack(each(net, x))), mlp(), mlp(), mlp())).group.stacks


def test_branches_are_not_exchanged_at_the_price_of_signs_and_scales_inside_them() -> None:
    """A sign for each unit of each branch goes with its branch and with its unit of the sum: nothing nested has it."""
    symmetry = found(Net(lambda net, x: sum(y.abs() for y in each(net, x)), mlp(), mlp(), mlp()))
    assert symmetry.log_order() == pytest.approx(3 * ln(4) + ln(3) + 9 * LN2)

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    symmetry = found(nn.Sequential(Net(summed, normed(), normed(), normed(), last=4)))
    # A scale and a sign for each unit of each normalisation; one for each unit of the sum.
    assert symmetry.log_order() == pytest.approx(ln(4) + (12 + 4) * LN2)
    assert sum(symmetry.group[name].count for name in symmetry.group.names("scale")) == 12 + 4


def test_branches_of_other_widths_are_not_exchanged() -> None:
    symmetry = found(Net(summed, *(mlp(n) for n in (4, 5, 4, 2, 5, 4))))
    hidden = 3 * ln(4) + 2 * ln(5) + ln(2)
    assert symmetry.log_order() == pytest.approx(ln(3) + ln(2) + hidden + ln(3) + 3 * LN2)


@pytest.mark.parametrize(("order", "exchanged"), [((0, 0, 1), 1), ((0, 0, 1, 2), 2), ((0, 1, 2), 3)])
def test_a_module_that_is_used_twice_is_not_exchanged(order: tuple[int, ...], exchanged: int) -> None:
    made = [mlp() for _ in range(3)]
    symmetry = found(Net(summed, *(made[k] for k in order)))
    hidden = len(set(order)) * ln(4)
    assert symmetry.log_order() == pytest.approx(ln(exchanged) + hidden + ln(3) + 3 * LN2)


def test_branches_in_branches() -> None:
    def pair() -> nn.Module:
        return Join(lambda a, b: torch.tanh(a + b), mlp(2), mlp(2))

    symmetry = found(Net(summed, pair(), pair(), pair()))
    assert symmetry.log_order() == pytest.approx(ln(3) + 3 * (ln(2) + 2 * ln(2)) + ln(3) + 3 * LN2)
    inner = symmetry.group["each.{0-2}.own"]
    assert (inner.parent, inner.size, inner.copies) == ("each", 2, 3)


def test_heads_of_attention_in_a_list() -> None:
    def head() -> nn.Module:
        return Join(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *(nn.Linear(3, 2) for _ in range(3)))

    symmetry = found(Net(side_by_side, *(head() for _ in range(4)), last=8), (4, 5, 3))
    inside = 2 * (ln(2) + 2 * LN2)  # of queries with keys, and of values
    assert symmetry.log_order() == pytest.approx(ln(4) + 4 * inside)


def test_branches_take_their_running_statistics_along() -> None:
    def branch() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 3, 1))

    symmetry = found(Net(lambda net, x: summed(net, x).mean((2, 3)), branch(), branch(), branch()), (5, 3, 4, 4))
    # 12 signs in front of the normalisation, 3 of the stream.
    assert symmetry.log_order() == pytest.approx(ln(3) + 3 * ln(4) + ln(3) + 15 * LN2)
    assert {f"each.{k}.1.{name}" for k in range(3) for name in ("running_mean", "running_var")} == set(symmetry.buffers)
    net = Net(lambda net, x: summed(net, x).mean((2, 3)), branch(), branch(), branch())
    with torch.no_grad():
        net.each[1][1].running_mean.fill_(1.0)  # now another branch's statistics aren't these
    assert "each" not in symmetry.holding(net).permutations.factors


@pytest.mark.parametrize(
    ("join", "signs"),
    [(torch.maximum, 0), (torch.minimum, 0), (torch.add, 4), (lambda a, b: a.sigmoid() * b.sigmoid(), 0)],
)
def test_rows_that_meet_in_a_commutative_operator_are_exchanged_one_by_one(
    join: Callable[[Tensor, Tensor], Tensor], signs: int
) -> None:
    net = nn.Sequential(Join(join, nn.Linear(3, 4), nn.Linear(3, 4)), nn.Linear(4, 2)).double()
    symmetry, x = found(net), torch.randn(6, 3, dtype=torch.float64)
    assert symmetry.log_order() == pytest.approx(ln(4) + 4 * LN2 + signs * LN2)
    weights = symmetry.weights_of(net)
    (pairs,) = (name for name in symmetry.permutations.factors if symmetry.group[name].parent)
    images = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]])
    moved = symmetry.group.element({pairs: images})(weights)
    assert torch.equal(moved["0.own.0.weight"][0], weights["0.own.1.weight"][0])
    assert torch.equal(moved["0.own.0.weight"][1:], weights["0.own.0.weight"][1:])
    torch.testing.assert_close(with_weights(net, moved)(x), net(x), rtol=0, atol=1e-12)


def halves(net: Net, x: Tensor) -> Tensor:
    one, other = side_by_side(net, x).tanh().tensor_split(2, -1)
    return torch.cat([one, other**3], -1)


def centred(net: Net, x: Tensor) -> Tensor:
    y = side_by_side(net, x).unflatten(-1, (3, 4))
    return (y - y.mean(-1, keepdim=True)).flatten(1).tanh()


@pytest.mark.parametrize(
    ("run", "orders", "signs"),
    [
        (lambda net, x: side_by_side(net, x).tanh(), ln(12), 12),
        (lambda net, x: torch.cat([y.tanh() for y in each(net, x)], -1), ln(12), 12),
        (halves, 2 * ln(6), 12),  # which cuts through the second map
        (centred, ln(3) + 3 * ln(4), 3),  # each map by itself; one sign flips all units of one map
        (lambda net, x: torch.cat([y.tanh() for y in each(net, x)], 0).unflatten(0, (3, 5)).sum(0), ln(4), 4),
    ],
)
def test_rows_that_lie_side_by_side_are_exchanged_one_by_one(
    run: Callable[[Net, Tensor], Tensor], orders: float, signs: int
) -> None:
    net = Net(run, *(nn.Linear(3, 4) for _ in range(3)), last=12 if signs != 4 else 4)
    assert found(net).log_order() == pytest.approx(orders + signs * LN2)


@pytest.mark.parametrize("padding", [1, "same"])
def test_channels_of_convolutions_are_exchanged_one_by_one(padding: int | str) -> None:
    def of(join: Callable[..., Tensor], width: int) -> nn.Module:
        own = (nn.Conv2d(3, 4, 3, padding=padding) for _ in range(3))
        return nn.Sequential(Join(join, *own), nn.Tanh(), nn.Conv2d(width, 2, 3))

    beside = found(of(lambda *y: torch.cat(y, 1), 12), (2, 3, 5, 5))
    assert beside.log_order() == pytest.approx(ln(12) + 12 * LN2)
    largest = found(of(lambda a, b, c: torch.maximum(torch.maximum(a, b), c), 4), (2, 3, 5, 5))
    assert largest.log_order() == pytest.approx(ln(4) + 4 * ln(3))


def test_rows_side_by_side_in_branches_that_are_exchanged() -> None:
    def branch() -> nn.Module:
        beside = Join(lambda *y: torch.cat(y, -1), nn.Linear(3, 2), nn.Linear(3, 2))
        return nn.Sequential(beside, nn.GELU(), nn.Linear(4, 3))

    symmetry = found(Net(summed, branch(), branch(), branch()))
    assert symmetry.log_order() == pytest.approx(ln(3) + 3 * ln(4) + ln(3) + 3 * LN2)


def test_factors_with_multipliers_of_their_own_keep_these() -> None:
    net = nn.Sequential(Join(torch.mul, nn.Linear(3, 4), nn.Linear(3, 4)), nn.Linear(4, 2))
    symmetry = found(net)  # 2 signs and 2 scales for each product
    assert symmetry.log_order() == pytest.approx(ln(4) + 8 * LN2)
    assert sum(int(own.sum()) for own in symmetry.group.independent("scale").values()) == 8


def test_rows_are_exchanged_inside_branches_that_are_exchanged() -> None:
    def branch() -> nn.Module:
        return nn.Sequential(Join(torch.maximum, nn.Linear(3, 4), nn.Linear(3, 4)), nn.Linear(4, 3))

    symmetry = found(Net(summed, branch(), branch(), branch()))
    assert symmetry.log_order() == pytest.approx(ln(3) + 3 * (ln(4) + 4 * LN2) + ln(3) + 3 * LN2)


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: sum(branch(x.roll(i, -1)) for i, branch in enumerate(net.each)),
        lambda net, x: sum((i + 1) * branch(x) for i, branch in enumerate(net.each)),
        lambda net, x: net.each[0](x) - net.each[1](x) / net.each[2](x),
        lambda net, x: net.each[2](net.each[1](net.each[0](x))),
        lambda net, x: sum(each(net, x)) + torch.cat([x + y for y in each(net, x)], -1)[:, 1:4],
        lambda net, x: torch.cat([x + y for y in each(net, x)], -1)[:, 2:5],
    ],
)
def test_branches_that_differ_in_their_use_are_not_exchanged(run: Callable[[Net, Tensor], Tensor]) -> None:
    symmetry = found(Net(run, mlp(), mlp(), mlp()))
    assert not symmetry.group.stacks


def test_branches_whose_results_are_returned_are_not_exchanged() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ModuleList(mlp() for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            results = [branch(x) for branch in self.own]
            return results[0] + results[1] + results[2], results[1]

    symmetry = found(Two())
    assert symmetry.log_order() == pytest.approx(ln(2) + 3 * ln(4))
    assert symmetry.explain(site="own.1.0").about(only="moved")[0].units == ("own.1.0",)


def test_a_branch_that_stays_is_not_exchanged_but_the_others_are() -> None:
    net = Net(summed, mlp(), mlp(), mlp())
    net.each[1][2].bias.requires_grad_(False)
    assert found(net).log_order() == pytest.approx(3 * ln(4) + ln(2))
    x = torch.randn(5, 3)
    for name in ("each.0", "each.0.0.weight"):
        assert not ps.find_symmetry(Net(summed, mlp(), mlp()), x, freeze=name).group.stacks


def test_a_constant_of_a_branch_alone_tells_it_apart() -> None:
    def branch(value: float) -> nn.Module:
        own = Join(lambda y: y, mlp())
        own.register_buffer("shift", torch.full((3,), value), persistent=False)
        own.join = lambda y: y * own.shift
        return own

    assert not found(Net(summed, branch(1.0), branch(2.0))).group.stacks


def test_a_canonical_form_and_an_alignment_undo_an_exchange_of_branches() -> None:
    torch.manual_seed(1)
    net = Net(routed, *(mlp() for _ in range(4))).double()
    symmetry = found(net)
    element = symmetry.sample((3,))
    weights = {site: value.detach() for site, value in symmetry.weights_of(net).items()}
    copies = element(weights)
    form, forms = (ps.canonicalize(own, symmetry, warn=False) for own in (weights, copies))
    for site, value in forms.items():
        torch.testing.assert_close(value, form[site].expand_as(value), rtol=0, atol=1e-10)
    result = ps.align(copies, weights, symmetry.finite, progress=False)
    assert result.cost.max() < 1e-3 * result.initial_cost.max() or symmetry.group.names("scale")


def test_an_explanation_speaks_of_parameters_and_not_of_stacks() -> None:
    symmetry = found(Net(routed, mlp(), mlp()))
    entry = symmetry.explain(site="each.1.0.weight")[0]
    assert (entry.length, entry.permuted, entry.units) == (4, 4, ("each", "each.{0-1}.0"))
    assert set(symmetry.site_shapes) == set(dict(Net(routed, mlp(), mlp()).named_parameters()))
