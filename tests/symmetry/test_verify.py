"""verify accepts right groups and catches wrong ones: an axis dropped, added, merged, scrambled."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_symmetric.symmetry import (
    Axis,
    BrokenSymmetry,
    Factor,
    PermutationGroup,
    RescalingFactor,
    ScalingGroup,
    SignGroup,
    WeightSymmetry,
    find_symmetry,
)
from pyro_symmetric.symmetry.verify import repaired


class Convolutional(nn.Module):
    """Convolutions, batch normalisation, a residual sum, flattening, tanh, and zero-initialised last weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.a, self.norm_a = nn.Conv2d(4, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.b = nn.Conv2d(5, 4, 1)
        self.hidden, self.odd, self.out = nn.Linear(16, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.b(F.relu(self.norm_a(self.a(x)))))
        x = F.relu(self.hidden(F.adaptive_avg_pool2d(x, 2).flatten(1)))
        return self.out(torch.tanh(self.odd(x)))


class Attending(nn.Module):
    """Attention, layer normalisation and a feed-forward block around a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.1, batch_first=True)
        self.lstm, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.layer(self.embed(x)))[0])


@functools.cache
def examples() -> list[tuple[nn.Module, Tensor, WeightSymmetry]]:
    torch.manual_seed(0)
    found = []
    for net, x in ((Convolutional(), torch.randn(2, 3, 4, 4)), (Attending(), torch.randn(2, 5, 3))):
        found.append((net, x, find_symmetry(net, x, verify=False)))
    return found


def with_factors(
    symmetry: WeightSymmetry,
    factors: list[Factor] | None = None,
    scalings: list[RescalingFactor] | None = None,
    signs: list[RescalingFactor] | None = None,
) -> WeightSymmetry:
    """The same symmetry with other factors."""
    shapes = symmetry.site_shapes
    return replace(
        symmetry,
        permutations=symmetry.permutations if factors is None else PermutationGroup(factors, shapes),
        scalings=symmetry.scalings if scalings is None else ScalingGroup(scalings, shapes),
        signs=symmetry.signs if signs is None else SignGroup(signs, shapes),
    )


def wrong_groups(symmetry: WeightSymmetry) -> Iterator[tuple[str, WeightSymmetry]]:
    """Every group that differs from the right one in one axis of one factor, or in two factors merged."""
    group = symmetry.permutations
    factors = [group.factor(name) for name in group.factors]
    used = {(axis.site, axis.dim) for factor in factors for axis in factor.axes}
    for i, factor in enumerate(factors):
        alike = [
            j for j, f in enumerate(factors) if f.parent and f.name.split("[")[0] == factor.name.split("[")[0]
        ] or [i]
        if i != alike[0] or any(f.parent == factor.name for f in factors):
            continue  # nested factors change in all slots at once; their owners hold them together

        def changed(change: Callable[[tuple[Axis, ...]], list[Axis]], alike: list[int] = alike) -> WeightSymmetry:
            new = [replace(f, axes=tuple(change(f.axes))) if j in alike else f for j, f in enumerate(factors)]
            return with_factors(symmetry, new)

        for k, axis in enumerate(factor.axes):
            where = f"{axis.site}[{axis.dim}]"
            yield f"{factor.name} without {where}", changed(lambda axes, k=k: [a for j, a in enumerate(axes) if j != k])
            if factor.parent is None:
                yield (
                    f"{factor.name} with {where} scrambled",
                    changed(
                        lambda axes, k=k: [
                            replace(a, index=a.index.roll(1, 1)) if j == k else a for j, a in enumerate(axes)
                        ]
                    ),
                )
        if factor.parent is not None:
            continue
        for site, shape in symmetry.site_shapes.items():
            for dim, length in enumerate(shape):
                if (site, dim) not in used and length == factor.size:
                    extra = Axis(site, dim, torch.arange(length)[None], "running" in site)
                    yield f"{factor.name} with {site}[{dim}]", changed(lambda axes, extra=extra: [*axes, extra])
        for other in factors[:i]:
            if other.size == factor.size and other.parent is None:
                mixed = [*factor.axes[:1], *other.axes[:1]]  # the inputs of two layers as if they were one
                yield f"{factor.name} merged with {other.name}", changed(lambda axes, mixed=mixed: mixed)
    for kind in ("scalings", "signs"):
        rescalings = getattr(symmetry, kind)
        own = [rescalings.factor(name) for name in rescalings.factors]
        for i, rescaling in enumerate(own):
            for k, moved in enumerate(rescaling.axes):
                if moved.site == "layer.self_attn.in_proj_bias":
                    continue  # biases of keys change nothing behind a softmax, so no group that moves them is wrong
                without = replace(rescaling, axes=tuple(a for j, a in enumerate(rescaling.axes) if j != k))
                changed_factors = [without if j == i else f for j, f in enumerate(own)]
                yield (
                    f"{kind}: {rescaling.name} without {moved.site}",
                    with_factors(symmetry, **{kind: changed_factors}),
                )
                if kind == "scalings":
                    inverse = replace(moved, exponent=-moved.exponent)
                    axes = tuple(inverse if j == k else a for j, a in enumerate(rescaling.axes))
                    changed_factors = [replace(rescaling, axes=axes) if j == i else f for j, f in enumerate(own)]
                    yield (
                        f"{kind}: {rescaling.name} with {moved.site} inverse",
                        with_factors(symmetry, **{kind: changed_factors}),
                    )


def test_right_groups_pass() -> None:
    for net, x, symmetry in examples():
        result = symmetry.verify(net, x, trials=3)
        assert result, result
        assert result.error < 1e-12


@pytest.mark.stochastic
def test_a_hundred_wrong_groups_are_all_caught() -> None:
    wrong = [(name, group, net, x) for net, x, symmetry in examples() for name, group in wrong_groups(symmetry)]
    chosen = random.Random(0).sample(wrong, 110)
    # A random permutation of four units is the identity once in 24 times: a wrong group passes all of four trials with
    # probability 3e-6.
    missed = [name for name, group, net, x in chosen if all(group.verify(net, x) for _ in range(4))]
    assert not missed


def test_zero_initialised_weights_hide_nothing() -> None:
    net, x, symmetry = examples()[0]
    group = symmetry.permutations
    factors = [group.factor(name) for name in group.factors]
    # With its zeros the network's output doesn't depend on anything: only a randomised copy can tell.
    broken = [replace(f, axes=f.axes[:-1]) if f.name == "odd" else f for f in factors]
    assert bool((net(x) == net.out.bias).all())
    assert not with_factors(symmetry, broken).verify(net, x)


def test_guilty_factors_are_dropped_and_named_and_the_others_kept() -> None:
    net, x, symmetry = examples()[0]
    group = symmetry.permutations
    factors = [group.factor(name) for name in group.factors]
    broken = [replace(f, axes=f.axes[:-1]) if f.name in ("a", "hidden") else f for f in factors]
    with pytest.warns(BrokenSymmetry, match=r"a \(permutations\), hidden \(permutations\)"):
        left = repaired(with_factors(symmetry, broken), net, [x])
    assert set(left.permutations.factors) == set(group.factors) - {"a", "hidden"}
    assert left.scalings == symmetry.scalings


def test_a_guilty_nested_factor_takes_its_likes_along_and_leaves_its_owner() -> None:
    net, x, symmetry = examples()[1]
    group = symmetry.permutations
    family = next(name for name in group.factors if name.endswith("[1]")).partition("[")[0]
    factors = [group.factor(n) for n in group.factors]
    broken = [replace(f, axes=f.axes[:1]) if f.name.startswith(family + "[") else f for f in factors]
    with pytest.warns(BrokenSymmetry):
        left = repaired(with_factors(symmetry, broken), net, [x])
    assert left.verify(net, x)
    assert set(left.permutations.factors) == {n for n in group.factors if not n.startswith(family + "[")}


def test_the_network_is_untouched() -> None:
    net, x, symmetry = examples()[0]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    symmetry.verify(net, x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert next(net.parameters()).dtype == torch.float32


def test_batch_statistics_and_training_branches_are_compared_in_train_mode() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.extra = nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = F.dropout(F.relu(self.a(x)), 0.5, self.training)
            return self.b(h) + self.extra(h) if self.training else self.b(h)

    net, x = Auxiliary(), torch.randn(4, 3)
    axes = {"a.weight": ("a", None), "a.bias": ("a",), "b.weight": (None, "a")}
    wrong = WeightSymmetry.from_axes(axes, dict(net.named_parameters()))
    result = wrong.verify(net, x)
    assert not result
    assert result.error < 1e-12 < 1e-3 < result.train_error
    right = WeightSymmetry.from_axes({**axes, "extra.weight": (None, "a")}, dict(net.named_parameters()))
    assert right.verify(net, x)


class Seen(nn.Module):
    """A convolutional network that remembers how many images it saw, and may refuse to see few."""

    def __init__(self, least: int = 1):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < self.least:
            raise RuntimeError("too few images")
        SEEN.append(len(x))
        return self.net(x)


SEEN: list[int] = []


@pytest.mark.parametrize(("pixels", "least", "compared"), [(256, 1, 1), (256, 3, 5), (128, 1, 3), (8, 1, 5)])
def test_of_large_images_no_more_are_compared_than_it_takes(pixels: int, least: int, compared: int) -> None:
    net, x = Seen(least), torch.randn(5, 3, pixels, pixels)
    axes = {"net.0.weight": ("a", None, None, None), "net.0.bias": ("a",), "net.2.weight": (None, "a", None, None)}
    SEEN.clear()
    assert WeightSymmetry.from_axes(axes, dict(net.named_parameters())).verify(net, x)
    assert SEEN[-1] == compared
    wrong = {site: names for site, names in axes.items() if site != "net.0.bias"}
    group = WeightSymmetry.from_axes(wrong, dict(net.named_parameters()))
    # A random permutation of four units is the identity once in 24 times.
    assert not all(group.verify(net, x) for _ in range(4))


def test_inputs_that_do_not_fit_are_named() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"fails on the example inputs, of shapes \[\(3,\)\]: IndexError"):
        find_symmetry(net, torch.tensor([1, 2, 7]))
    with pytest.raises(ValueError, match="Linear fails on the example inputs"):
        find_symmetry(nn.Linear(4, 2), torch.randn(2, 3))
