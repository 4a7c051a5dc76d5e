"""Random small networks: elements of the symmetry leave their function alone, and
copies have one canonical form.

A network is a chain of blocks, each drawn from a list, over vectors, sequences or
images.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.discovery.find import UnknownOperator, find_symmetry

BATCH, LENGTH, SIDE = 3, 4, 4  # the sizes of a batch, a sequence and an image


class Block(nn.Module):
    """A function of its own parameters and modules and of one tensor."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **own: Any):
        super().__init__()
        self.run = run
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Sample(NamedTuple):
    """A random network and an input."""

    net: nn.Module
    x: Tensor


class Built(NamedTuple):
    """A block, and how many features leave it."""

    block: nn.Module
    width: int


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def modules(*own: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(own)


# vectors: (batch, features) -----------------------------------------------------------

ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    torch.relu, torch.tanh, F.gelu, torch.sin, torch.cos, torch.abs, F.leaky_relu, torch.sigmoid, F.hardtanh,
    torch.square, F.silu, F.elu, lambda x: F.threshold(x, 0.0, 0.0), lambda x: x.clamp(min=0), torch.erf,
    lambda x: torch.sqrt(x.abs()), lambda x: x * torch.relu(x), lambda x: torch.sign(x) * x, lambda x: x**3,
    lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: torch.maximum(x, -x), lambda x: torch.exp(-x.abs()),
    lambda x: x.clamp(-1, 2), lambda x: torch.where(x > 0.3, x, torch.zeros_like(x)), F.softplus, torch.atan,
    lambda x: F.relu(x) - F.relu(-x), lambda x: torch.cat([x, -x]).view(2, *x.shape).amax(0), torch.logcosh
    if hasattr(torch, "logcosh") else torch.tanh,
]  # fmt: skip


def activation(rng: random.Random, width: int) -> Built:
    own = rng.choice(ACTIVATIONS)
    return Built(Block(lambda m, x: own(x)), width)


def linear(rng: random.Random, width: int) -> Built:
    out = rng.choice([2, 3, 4, 6])
    return Built(nn.Linear(width, out, bias=rng.random() < 0.6), out)


def residual(rng: random.Random, width: int) -> Built:
    own, hidden = rng.choice(ACTIVATIONS), rng.choice([2, 3])
    one, two = (
        nn.Linear(width, hidden, bias=rng.random() < 0.5),
        nn.Linear(hidden, width, bias=rng.random() < 0.5),
    )
    return Built(Block(lambda m, x: x + m.two(own(m.one(x))), one=one, two=two), width)


def gated(rng: random.Random, width: int) -> Built:
    own, hidden = rng.choice(ACTIVATIONS), rng.choice([2, 3])
    how = rng.choice(
        [
            torch.mul,
            torch.maximum,
            torch.minimum,
            torch.add,
            torch.sub,
            lambda a, b: a / (1 + b.abs()),
        ]
    )
    one, two, down = (
        nn.Linear(width, hidden),
        nn.Linear(width, hidden),
        nn.Linear(hidden, width),
    )
    return Built(
        Block(
            lambda m, x: m.down(how(own(m.one(x)), m.two(x))),
            one=one,
            two=two,
            down=down,
        ),
        width,
    )


def branches(rng: random.Random, width: int) -> Built:
    own, count = rng.choice(ACTIVATIONS), rng.choice([2, 3])
    ups = modules(*(nn.Linear(width, 2) for _ in range(count)))
    downs = modules(*(nn.Linear(2, width, bias=False) for _ in range(count)))
    how = rng.choice(["sum", "max", "mean", "cat", "softmax"])
    router = nn.Linear(width, count)

    def run(m: Any, x: Tensor) -> Tensor:
        each = [down(own(up(x))) for up, down in zip(m.ups, m.downs, strict=True)]
        if how == "cat":
            return torch.cat(each, -1)
        if how == "softmax":
            gate = m.router(x).softmax(-1)
            return sum(gate[..., i : i + 1] * y for i, y in enumerate(each))
        y = torch.stack(each)
        return y.sum(0) if how == "sum" else y.amax(0) if how == "max" else y.mean(0)

    return Built(
        Block(run, ups=ups, downs=downs, router=router),
        width * count if how == "cat" else width,
    )


def tied(rng: random.Random, width: int) -> Built:
    own = rng.choice(ACTIVATIONS)
    weight, bias = weights(3, width), weights(width)
    return Built(
        Block(
            lambda m, x: own(x @ m.weight.T) @ m.weight + m.bias,
            weight=weight,
            bias=bias,
        ),
        width,
    )


def channels_second(m: Any, x: Tensor) -> Tensor:
    return m.own(x.transpose(1, -1)).transpose(1, -1)


def normed(rng: random.Random, width: int) -> Built:
    groups = 2 if width % 2 == 0 else 1
    own = rng.choice([
        lambda: nn.LayerNorm(width), lambda: nn.LayerNorm(width, elementwise_affine=False),
        lambda: nn.RMSNorm(width), lambda: Block(channels_second, own=nn.GroupNorm(groups, width)),
        lambda: Block(lambda m, x: x / x.norm(dim=-1, keepdim=True)),
        lambda: Block(lambda m, x: F.normalize(x, dim=-1)),
        lambda: Block(lambda m, x: x - x.mean(-1, keepdim=True)),
        lambda: Block(lambda m, x: x / (1 + x.abs().sum(-1, keepdim=True))),
        lambda: Block(lambda m, x: x.softmax(-1)), lambda: Block(lambda m, x: x.log_softmax(-1)),
        lambda: Block(lambda m, x: x * m.scale, scale=weights(width)),
        lambda: Block(lambda m, x: x * m.scale, scale=weights(1)),
        lambda: Block(lambda m, x: x / x.std(-1, keepdim=True)),
    ])  # fmt: skip
    return Built(own(), width)


def batch_norm(rng: random.Random, width: int) -> Built:
    return Built(nn.BatchNorm1d(width, affine=rng.random() < 0.7), width)


SHUFFLES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.flip(-1), lambda x: x.roll(1, -1), lambda x: x.cumsum(-1), lambda x: x.sort(-1).values,
    lambda x: torch.cat([x, -x], -1), lambda x: torch.cat([x, x.flip(-1)], -1), lambda x: x[..., 1:],
    lambda x: x.topk(min(2, x.shape[-1]), -1).values, lambda x: torch.cat([x, torch.relu(x)], -1),
    lambda x: x[..., ::2],
    lambda x: torch.cat([x, x.sum(-1, keepdim=True)], -1), lambda x: x.repeat(1, 2),
    lambda x: torch.cat([x, x.new_zeros((*x.shape[:-1], 1))], -1), lambda x: F.pad(x, (1, 0)),
    lambda x: x.repeat_interleave(2, -1), lambda x: x.unsqueeze(-1).expand(*x.shape, 2).flatten(-2),
    lambda x: torch.cat([x, x.unsqueeze(-1).expand(*x.shape, 2).flatten(-2)], -1),
    lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2), lambda x: x.tril(),
    lambda x: torch.where(x > x.mean(-1, keepdim=True), x, torch.zeros_like(x)),
    lambda x: torch.where(torch.arange(x.shape[-1]) > 0, x, 2 * x), lambda x: x * (x == x.amax(-1, keepdim=True)),
    lambda x: x.masked_fill(x < 0, 0.0), lambda x: x.prod(-1, keepdim=True) + x, lambda x: x.cumsum(0),
    lambda x: x.gather(-1, x.detach().argsort(-1)), lambda x: x.index_fill(-1, torch.tensor([0]), 0.0),
    lambda x: torch.cat([x[..., :1], x[..., 1:] * x[..., :-1]], -1), lambda x: torch.einsum("bi,bi,bj->bj", x, x, x),
    lambda x: x.max(-1, keepdim=True).values - x, lambda x: x.new_zeros(x.shape).scatter(-1, x.argsort(-1), x),
    lambda x: F.pad(x, (1, 1), value=1.0), lambda x: x.diff(dim=-1), lambda x: torch.cummax(x, -1).values,
    lambda x: torch.logsumexp(x, -1, keepdim=True) + x, lambda x: x * x.mean(), lambda x: x + x.max(),
    lambda x: torch.stack([x, x * 2], -1).flatten(-2), lambda x: torch.stack([x, x.flip(-1)], -2).flatten(-2),
]  # fmt: skip


def shuffled(rng: random.Random, width: int) -> Built:
    own = rng.choice(SHUFFLES)
    return Built(Block(lambda m, x: own(x)), own(torch.zeros(1, width)).shape[-1])


def regrouped(rng: random.Random, width: int) -> Built:
    """Views with two axes of features, mixed along one of them or both."""
    d = rng.choice([n for n in range(1, width + 1) if width % n == 0])
    h = width // d
    how = rng.choice(
        [
            "t",
            "left",
            "right",
            "flip",
            "sum",
            "cat",
            "both",
            "max",
            "softmax",
            "cat_flip",
            "scale",
        ]
    )
    out = {"sum": d, "cat": width + d, "max": h, "cat_flip": 2 * width}.get(how, width)

    def run(m: Any, x: Tensor) -> Tensor:
        y = x.view(-1, h, d)
        if how == "t":
            y = y.transpose(1, 2)
        elif how == "left":
            y = torch.einsum("hk,bhd->bkd", m.left, y)
        elif how == "right":
            y = y @ m.right
        elif how == "both":
            y = torch.relu(m.left @ y) @ m.right
        elif how == "flip":
            y = y.flip(2)
        elif how == "sum":
            y = y.sum(1)
        elif how == "max":
            y = y.amax(2)
        elif how == "softmax":
            y = y.softmax(1) * y
        elif how == "scale":
            y = y * m.left[0, :, None]
        elif how == "cat":
            y = torch.cat([y, y.mean(1, keepdim=True)], 1)
        else:
            y = torch.cat([y, y.flip(2)], 1)
        return y.flatten(1)

    return Built(Block(run, left=weights(h, h), right=weights(d, d)), out)


def experts(rng: random.Random, width: int) -> Built:
    """Stacked weights, met by einsum, bmm, a loop, or by the number that the data
    choose.
    """
    count, hidden = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    own, how = (
        rng.choice(ACTIVATIONS),
        rng.choice(["einsum", "bmm", "loop", "argmax", "topk", "cat", "flip", "sum"]),
    )
    up, down, bias = (
        weights(count, width, hidden),
        weights(count, hidden, width),
        weights(count, hidden),
    )

    def run(m: Any, x: Tensor) -> Tensor:
        gate = m.router(x).softmax(-1)
        if how == "argmax":
            chosen = gate.argmax(-1)
            h = own(torch.einsum("bi,bih->bh", x, m.up[chosen]) + m.bias[chosen])
            return torch.einsum("bh,bho->bo", h, m.down[chosen])
        if how == "topk":
            value, chosen = gate.topk(1, -1)
            h = own(torch.einsum("bi,bih->bh", x, m.up[chosen[:, 0]]))
            return x + torch.einsum("bh,bho->bo", h, m.down[chosen.squeeze(-1)]) * value
        if how == "bmm":
            h = own(torch.baddbmm(m.bias.unsqueeze(1), x.expand(count, *x.shape), m.up))
            return (torch.bmm(h, m.down) * gate.T.unsqueeze(-1)).sum(0)
        if how == "loop":
            return x + sum(
                own(x @ m.up[e] + m.bias[e]) @ m.down[e] * gate[:, e : e + 1]
                for e in range(count)
            )
        h = own(torch.einsum("bi,eih->beh", x, m.up) + m.bias)
        if how == "cat":
            return torch.einsum("beh,eho->beo", h, m.down).flatten(1)
        if how == "flip":
            return torch.einsum("beh,eho->bo", h, m.down.flip(0))
        if how == "sum":
            return (h.sum(1) @ m.down[0]) * h.mean(1).sum(-1, keepdim=True)
        return torch.einsum("beh,eho,be->bo", h, m.down, gate)

    out = width * count if how == "cat" else width
    return Built(
        Block(run, up=up, down=down, bias=bias, router=nn.Linear(width, count)), out
    )


def scattered(rng: random.Random, width: int) -> Built:
    """Messages along the edges of a graph whose nodes are the batch."""
    source, target = torch.tensor([0, 1, 2, 2, 0]), torch.tensor([1, 2, 0, 1, 0])
    how = rng.choice(
        [
            "index_add",
            "scatter_add",
            "amax",
            "amin",
            "prod",
            "mean",
            "put",
            "put_add",
            "copy",
            "cols",
        ]
    )
    back = nn.Linear(width, width, bias=rng.random() < 0.5)

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.back(x)[m.source]
        wide = m.target[:, None].expand_as(y)
        if how == "index_add":
            return x.new_zeros(x.shape).index_add(0, m.target, y)
        if how == "scatter_add":
            return torch.tanh(x).scatter_add(0, wide, y)
        if how == "put":
            return x.index_put((m.target[:3],), torch.relu(y[:3]))
        if how == "put_add":
            return x.index_put((m.target,), y, accumulate=True)
        if how == "copy":
            return x.index_copy(0, m.target[:2], y[:2])
        if how == "cols":
            return x.scatter(1, m.source[None, :1].expand(len(x), 1), y[:3, :1])
        return x.scatter_reduce(0, wide, y, how, include_self=True)

    block = Block(run, back=back)
    block.register_buffer("source", source)
    block.register_buffer("target", target)
    return Built(block, width)


def weird(rng: random.Random, width: int) -> Built:
    """Noise, dropout, comparisons, distances, data-dependent sizes, all entries
    together.
    """
    how = rng.choice(
        [
            "noise",
            "dropout",
            "cdist",
            "compare",
            "nonzero",
            "norm",
            "fft",
            "bilinear",
            "outer",
            "shared",
        ]
    )
    one, two, both = (
        nn.Linear(width, 3),
        nn.Linear(width, 3),
        nn.Bilinear(width, width, 3),
    )
    codes = weights(4, width)

    def run(m: Any, x: Tensor) -> Tensor:
        if how == "noise":
            return m.one(x) + torch.randn(len(x), 1) * m.two(x).exp()
        if how == "dropout":
            return F.dropout(m.one(x), 0.5, training=False)
        if how == "cdist":
            return torch.cdist(x, m.codes)
        if how == "compare":
            return torch.where(m.one(x) > m.two(x), m.one(x), x.mean(-1, keepdim=True))
        if how == "nonzero":
            return m.one(x) * (x[x[:, 0] > 0].sum() + 1)
        if how == "norm":
            return m.one(x) / m.two(x).norm()
        if how == "fft":
            return torch.fft.rfft(x, dim=-1).abs()
        if how == "bilinear":
            return m.both(x, x)
        if how == "shared":
            return m.one(x) * (x @ m.codes.T).sum(-1, keepdim=True) * m.codes.sum()
        return torch.einsum("bi,bj->bij", m.one(x), m.two(x)).flatten(1)

    out = {"cdist": 4, "fft": width // 2 + 1, "outer": 9}.get(
        how, width if how == "none" else 3
    )
    return Built(Block(run, one=one, two=two, both=both, codes=codes), out)


VECTOR = [linear, linear, linear, activation, activation, residual, gated, branches, tied, normed, batch_norm,
          shuffled, shuffled, regrouped, regrouped, experts, experts, scattered, weird]  # fmt: skip


# sequences: (batch, length, features) -------------------------------------------------


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of the last axis, by position along the last but one."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * torch.tensor([0.3, 0.7, 1.1])[:half]
    cos, sin = (
        torch.cat([angle, angle], -1).cos().to(x),
        torch.cat([angle, angle], -1).sin().to(x),
    )
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def attention(rng: random.Random, width: int) -> Built:
    heads, d = rng.choice([1, 2, 4]), rng.choice([1, 2])
    groups = rng.choice([n for n in (1, 2, 4) if heads % n == 0])
    rotary, normal, bias = (
        rng.random() < 0.3 and d == 2,
        rng.random() < 0.3,
        rng.random() < 0.5,
    )
    how = rng.choice(["sdpa", "causal", "matmul", "einsum"])
    own = {
        "q": nn.Linear(width, heads * d, bias=bias), "k": nn.Linear(width, groups * d, bias=bias),
        "v": nn.Linear(width, groups * d, bias=bias), "o": nn.Linear(heads * d, width, bias=bias),
        "qn": nn.RMSNorm(d), "kn": nn.RMSNorm(d),
    }  # fmt: skip

    def run(m: Any, x: Tensor) -> Tensor:
        q = m.q(x).view(*x.shape[:2], heads, d).transpose(1, 2)
        k, v = (f(x).view(*x.shape[:2], groups, d).transpose(1, 2) for f in (m.k, m.v))
        q, k = (m.qn(q), m.kn(k)) if normal else (q, k)
        q, k = (rotated(q), rotated(k)) if rotary else (q, k)
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        if how in ("sdpa", "causal"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=how == "causal")
        elif how == "matmul":
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            y = torch.einsum(
                "bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
            )
        return x + m.o(y.transpose(1, 2).flatten(2))

    return Built(Block(run, **own), width)


def stacked_heads(rng: random.Random, width: int) -> Built:
    heads, d, last = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.random() < 0.5
    q, k, v = (weights(heads, width, d) for _ in range(3))

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bti,hid->bhtd", x, w) for w in (m.q, m.k, m.v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + (
            torch.einsum("bhtd,hdi->bti", y, m.o)
            if last
            else y.transpose(1, 2).flatten(2) @ m.o.flatten(0, 1)
        )

    return Built(Block(run, q=q, k=k, v=v, o=weights(heads, d, width)), width)


def fused(rng: random.Random, width: int) -> Built:
    heads = 2 if width % 2 == 0 else 1
    how = rng.choice(["mha", "encoder", "chunk", "view"])
    if how == "mha":
        own: nn.Module = nn.MultiheadAttention(
            width, heads, batch_first=True, bias=rng.random() < 0.5
        )
        return Built(
            Block(lambda m, x: x + m.own(x, x, x, need_weights=False)[0], own=own),
            width,
        )
    if how == "encoder":
        own = nn.TransformerEncoderLayer(
            width, heads, 3, 0.0, batch_first=True, norm_first=rng.random() < 0.5
        )
        return Built(own, width)

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.qkv(x)
        if how == "chunk":
            q, k, v = (
                t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in y.chunk(3, -1)
            )
        else:
            q, k, v = (
                y.view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            )
        return x + m.o(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )

    return Built(
        Block(run, qkv=nn.Linear(width, 3 * width), o=nn.Linear(width, width)), width
    )


def recurrent(rng: random.Random, width: int) -> Built:
    kind, hidden = rng.choice([nn.LSTM, nn.GRU, nn.RNN]), rng.choice([2, 3])
    two, bias, layers = rng.random() < 0.3, rng.random() < 0.7, rng.choice([1, 1, 2])
    own = kind(width, hidden, layers, bias=bias, batch_first=True, bidirectional=two)
    return Built(Block(lambda m, x: m.own(x)[0], own=own), hidden * (1 + two))


def convolved(rng: random.Random, width: int) -> Built:
    groups = rng.choice([n for n in (1, 2, width) if width % n == 0])
    own = nn.Conv1d(
        width,
        groups * rng.choice([1, 2]),
        3,
        padding=1,
        groups=groups,
        bias=rng.random() < 0.5,
    )
    return Built(
        Block(lambda m, x: m.own(x.transpose(1, 2)).transpose(1, 2), own=own),
        own.out_channels,
    )


TIMES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.flip(1), lambda x: x.cumsum(1), lambda x: x + x.mean(1, keepdim=True), lambda x: x.softmax(1),
    lambda x: x.roll(1, 1), lambda x: x.sort(1).values, lambda x: torch.cat([x, x[:, :1]], 1)[:, :LENGTH],
    lambda x: torch.tril(x), lambda x: x @ x.transpose(1, 2) @ x, lambda x: x * torch.arange(LENGTH)[:, None],
    lambda x: torch.fft.fft(x, dim=1).real, lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    lambda x: torch.cat([x, x.mean(1, keepdim=True).expand_as(x)], -1),
]  # fmt: skip


def through_time(rng: random.Random, width: int) -> Built:
    own = rng.choice(TIMES)
    return Built(
        Block(lambda m, x: own(x)), own(torch.zeros(1, LENGTH, width)).shape[-1]
    )


def positions(rng: random.Random, width: int) -> Built:
    own = weights(LENGTH, width) if rng.random() < 0.5 else weights(1, 1, width)
    return Built(Block(lambda m, x: x + m.own, own=own), width)


SEQUENCE = [linear, linear, activation, residual, gated, branches, tied, normed, attention, attention, stacked_heads,
            fused, recurrent, convolved, through_time, positions]  # fmt: skip


# images: (batch, channels, rows, columns) ---------------------------------------------


def conv(rng: random.Random, width: int) -> Built:
    groups = rng.choice([n for n in (1, 1, 2, width) if width % n == 0])
    out = groups * rng.choice([1, 2, 3])
    kind = rng.choice([nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d])
    return Built(
        kind(width, out, 3, padding=1, groups=groups, bias=rng.random() < 0.5), out
    )


def bottleneck(rng: random.Random, width: int) -> Built:
    one, two = nn.Conv2d(width, 3, 1, bias=False), nn.Conv2d(3, width, 3, padding=1)
    run = lambda m, x: x + m.two(F.relu(m.norm(m.one(x))))  # noqa: E731
    return Built(Block(run, one=one, two=two, norm=nn.BatchNorm2d(3)), width)


def normed_image(rng: random.Random, width: int) -> Built:
    groups = rng.choice([n for n in (1, 2, width) if width % n == 0])
    own = rng.choice([
        lambda: nn.BatchNorm2d(width), lambda: nn.GroupNorm(groups, width), lambda: nn.InstanceNorm2d(width),
        lambda: nn.InstanceNorm2d(width, affine=True), lambda: nn.LocalResponseNorm(3), lambda: nn.PReLU(width),
        lambda: nn.Softmax2d(), lambda: nn.AvgPool2d(3, 1, 1), lambda: nn.MaxPool2d(3, 1, 1), nn.PReLU,
        lambda: nn.Upsample((SIDE, SIDE), mode="bilinear"), lambda: nn.ChannelShuffle(groups),
    ])  # fmt: skip
    return Built(own(), width)


def squeezed(rng: random.Random, width: int) -> Built:
    one, two = nn.Linear(width, 2), nn.Linear(2, width)
    gate = rng.choice([torch.sigmoid, F.hardsigmoid, lambda x: x, F.softplus])
    run = lambda m, x: x * gate(m.two(F.relu(m.one(x.mean((2, 3))))))[:, :, None, None]  # noqa: E731
    return Built(Block(run, one=one, two=two), width)


PIXELS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.cat([x, x.flip(1)], 1), lambda x: torch.cat([x, F.relu(-x)], 1), lambda x: x.transpose(2, 3),
    lambda x: x + x.amax((2, 3), keepdim=True), lambda x: x.view(len(x), -1, 2, SIDE, SIDE).sum(2)
    if x.shape[1] % 2 == 0 else x, lambda x: F.pixel_unshuffle(F.interpolate(x, scale_factor=2), 2),
    lambda x: x * torch.eye(SIDE), lambda x: F.unfold(x, 3, padding=1).view(len(x), -1, SIDE, SIDE),
    lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1), lambda x: x - x.mean(1, keepdim=True),
    lambda x: F.interpolate(F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), (SIDE, SIDE)),
]  # fmt: skip


def pixels(rng: random.Random, width: int) -> Built:
    own = rng.choice(PIXELS)
    return Built(
        Block(lambda m, x: own(x)), own(torch.zeros(1, width, SIDE, SIDE)).shape[1]
    )


IMAGE = [
    conv,
    conv,
    conv,
    activation,
    activation,
    bottleneck,
    normed_image,
    normed_image,
    squeezed,
    pixels,
]


# whole networks -----------------------------------------------------------------------


def chain(
    rng: random.Random, kinds: Sequence[Callable[..., Built]], width: int, depth: int
) -> tuple[list[Any], int]:
    """Blocks one after the other, and the width behind them; a block that would be too
    wide is left out.
    """
    blocks: list[Any] = []
    while len(blocks) < depth:
        built = rng.choice(kinds)(rng, width)
        if 1 <= built.width <= 12:
            blocks.append(built.block)
            width = built.width
    return blocks, width


def network(seed: int) -> Sample:
    """A random network: an input layer, two to six blocks, and a last linear layer."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.choice(["vector", "vector", "vector", "sequence", "sequence", "image"])
    width = rng.choice([2, 3, 4, 6])
    depth = rng.randint(1, 5)
    if kind == "vector":
        blocks, last = chain(rng, VECTOR, width, depth)
        first: nn.Module = nn.Linear(2, width, bias=rng.random() < 0.7)
        x = torch.randn(BATCH, 2, dtype=torch.float64)
        ends: list[Any] = [nn.Linear(last, 2)]
    elif kind == "sequence":
        blocks, last = chain(rng, SEQUENCE, width, depth)
        first = nn.Embedding(5, width) if rng.random() < 0.5 else nn.Linear(2, width)
        number = isinstance(first, nn.Embedding)
        x = (
            torch.randint(5, (BATCH, LENGTH))
            if number
            else torch.randn(BATCH, LENGTH, 2, dtype=torch.float64)
        )
        if number and last == width and rng.random() < 0.5:  # tied with the last layer
            head = nn.Linear(width, 5, bias=False)
            head.weight = first.weight
            ends = [head]
        else:
            ends = (
                [nn.Linear(last, 2)]
                if rng.random() < 0.7
                else [nn.Flatten(), nn.Linear(LENGTH * last, 2)]
            )
    else:
        blocks, last = chain(rng, IMAGE, width, depth)
        first = nn.Conv2d(2, width, 3, padding=1)
        x = torch.randn(BATCH, 2, SIDE, SIDE, dtype=torch.float64)
        pooled = rng.random() < 0.5
        ends = [nn.AdaptiveAvgPool2d(1)] if pooled else []
        ends += [nn.Flatten(), nn.Linear(last * (1 if pooled else SIDE * SIDE), 2)]
    net = nn.Sequential(first, *blocks, *ends).double().eval()
    return Sample(net, x)


def random_tensors(net: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Other weights and running statistics of a network, drawn at random."""
    drawn = {
        name: torch.randn(v.shape, generator=generator, dtype=v.dtype)
        for name, v in net.named_parameters()
    }
    for name, value in net.named_buffers():
        if value.is_floating_point():
            own = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            drawn[name] = own.exp() if name.endswith("var") else own
    return drawn


# checks -------------------------------------------------------------------------------


def check(seed: int) -> None:
    net, x = network(seed)
    with warnings.catch_warnings():
        # what a network is left without is no error
        warnings.simplefilter("ignore", UnknownOperator)
        symmetry = find_symmetry(net, x, verify=False)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        tensors = {
            name: 0.7 * value for name, value in random_tensors(net, generator).items()
        }
        sites = {site: tensors[site] for site in symmetry.site_shapes}
        torch.manual_seed(0)  # of networks that draw random numbers
        before = functional_call(net, tensors, (x,)).detach()
        for _ in range(2):
            moved = symmetry.group.sample(spread=0.5, dtype=torch.float64)(sites)
            torch.manual_seed(0)
            after = functional_call(net, tensors | moved, (x,)).detach()
            # NaN: of a division by the deviation of one number
            size = before.nan_to_num().abs().max().item() + 1e-6
            same = {"rtol": 0, "atol": 1e-7 * size, "equal_nan": True}
            torch.testing.assert_close(
                after, before, **same, msg=lambda m: f"{m}\n{symmetry}"
            )
        # Signs of rows and columns of one matrix that cancel out in a circle stay in
        # canonical forms: without signs.
        unsigned = symmetry.without(symmetry.group.names("flip"), "flip")
        moved = unsigned.group.sample(spread=0.5, dtype=torch.float64)(sites)
        form = canonicalize(sites, unsigned, warn=False)
        for site, value in canonicalize(moved, unsigned, warn=False).items():
            atol = 1e-8 * (1 + value.abs().max().item() if value.numel() else 1)
            torch.testing.assert_close(
                value, form[site], rtol=0, atol=atol, msg=lambda m: f"{m}\n{symmetry}"
            )


# 67 and 231 have features side by side with their mirror images, 6 and 54 signs that
# are measured by one another. 399 has scales of the same entries, 485 two units whose
# largest weight is one and the same, 568 one batch norm behind another, 1087 statistics
# of a feature that is always zero, 1878 a grouped convolution whose outputs are tied to
# its inputs; 361, 397 and 4047 have functions of which few inputs show that they aren't
# homogeneous.
@pytest.mark.parametrize(
    "seed",
    [*range(1, 13), 54, 67, 231, 361, 397, 399, 485, 568, 1087, 1878, 2125, 4047],
)
def test_elements_leave_the_function_alone_and_copies_have_one_form(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(300, 900, 20))
def test_elements_of_many_more_networks_leave_their_function_alone(start: int) -> None:
    for seed in range(start, start + 20):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"network {seed}") from error
