"""Alignment of networks: planted elements are found again, and the time that it takes
by width.

    python -m benchmarks.performance.alignment planted  # 10 trials for each of nine
    architectures; five minutes python -m benchmarks.performance.alignment planted
    --markdown docs/reference/planted.md python -m benchmarks.performance.alignment
    timing  # by width, as Fig. A2 of Rossi et al. 2023; --depths 1 2 3 4 python -m
    benchmarks.performance.alignment timing --widths --channels 4 16 64  # ResNet-20s
    instead

*planted*: weights are moved by a random element of the network's symmetry: permutations
alone, with signs, and with all else (scales). Alignment must undo it: bit by bit in the
permutations, and the weights must come back to 1e-6 of their norm.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import print_table, spread
from benchmarks.networks import Recurrent, perceptron, transformer
from pyro_symmetric.alignment import GaussianWeights, align
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.groups import Group
from pyro_symmetric.networks import import_torchvision, resnet20
from pyro_symmetric.weights import Weights

Case = tuple[Callable[[], nn.Module], Tensor]
TRIALS = 10  # elements that are planted in each network
PAGE = """# Planted elements, found again

Made by `python -m benchmarks.performance.alignment planted --markdown docs/reference/planted.md` on
{}, with torch {}.

The weights of each network, random ones, were moved by a random element of its symmetry (log-scales of
standard deviation 0.3), and `align` without restarts looked for the way back. An element counts as found if all of its
permutations are, bit by bit, and the weights, in float32, come back to one millionth of their norm. Each cell: how many
were found, the largest error relative to the norm, and the median of seconds of processor time on one core.

{}
"""


def vgg11() -> nn.Module:
    """VGG-11 with batch normalisation, for images of 32 x 32."""
    net = import_torchvision().models.vgg11_bn(weights=None)
    return nn.Sequential(net.features, nn.Flatten(), nn.Linear(512, 10))


class LlamaBlock(nn.Module):
    """Attention with rotary positions and a gated perceptron, both behind an RMS norm,
    without biases.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        read = nn.functional.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True
        )
        x = x + self.o(read.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: pairs of coordinates turn by an angle that grows with the
    position.
    """
    length, size = x.shape[-2:]
    angles = torch.arange(length, dtype=x.dtype)[:, None] / 100 ** (
        torch.arange(0, size, 2, dtype=x.dtype) / size
    )
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Llama(nn.Module):
    """A language model of Llama's shape."""

    def __init__(
        self, depth: int = 4, width: int = 64, heads: int = 4, words: int = 100
    ) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.RMSNorm(width)
        self.blocks = nn.Sequential(*(LlamaBlock(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))))


def grouped(activation: type[nn.Module]) -> nn.Module:
    """Grouped convolutions whose groups, inputs and outputs meet in one kernel."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2),
        activation(),
        nn.Conv2d(8, 8, 3, groups=4),
        *([nn.Tanh()] if activation is nn.Tanh else []),
        nn.Flatten(),
        nn.Linear(8 * 16, 3),
    )


def torchvision_net(name: str) -> nn.Module:
    return getattr(import_torchvision().models, name)(weights=None)


PLANTED: dict[str, Case] = {
    "mlp 784-512-512-512-10": (
        lambda: perceptron(784, 512, 512, 512, 10),
        torch.randn(2, 784),
    ),
    "resnet18": (lambda: torchvision_net("resnet18"), torch.randn(2, 3, 64, 64)),
    "resnet20, filter response": (resnet20, torch.randn(2, 3, 32, 32)),
    "vgg11-bn": (vgg11, torch.randn(2, 3, 32, 32)),
    "bidirectional lstm 2 x 8": (lambda: Recurrent(nn.LSTM), torch.randn(2, 7, 5)),
    "transformer 2 x 16": (transformer, torch.randn(2, 7, 5)),
    "llama 4 x 64": (Llama, torch.randint(0, 100, (2, 7))),
    "grouped convolutions, relu": (lambda: grouped(nn.ReLU), torch.randn(2, 4, 8, 8)),
    "grouped convolutions, tanh": (lambda: grouped(nn.Tanh), torch.randn(2, 4, 8, 8)),
}


def randomised(make: Callable[[], nn.Module]) -> nn.Module:
    """A network none of whose parameters is at a special value (PyTorch starts
    normalisations at one).
    """
    net = make().eval()
    for parameter in net.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.5)
    return net


def parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in net.named_parameters()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(
        float((one[name] - other[name]).square().sum(dtype=torch.float64))
        for name in one
    )


def planted(options: argparse.Namespace) -> None:
    head = ("network", "permutations", "with signs", "with scales")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    print("\n".join(lines))
    for name, (make, x) in PLANTED.items():
        torch.manual_seed(0)
        net = randomised(make)
        symmetry = find_symmetry(net, x, verify=False)
        weights = {
            site: value.detach() for site, value in symmetry.weights_of(net).items()
        }
        found = (
            undone(getattr(symmetry, kind), weights)
            for kind in ("permutations", "finite", "group")
        )
        lines.append(f"| {name} | {' | '.join(found)} |")
        print(lines[-1], flush=True)
    if options.markdown:
        Path(options.markdown).write_text(
            PAGE.format(datetime.date.today(), torch.__version__, "\n".join(lines))
        )


def undone(group: Group, weights: Weights) -> str:
    """The number of planted elements found again, the largest error of the weights, and
    median processor seconds.
    """
    found, times, errors = 0, [], []
    for seed in range(TRIALS):
        torch.manual_seed(seed)
        element = group.sample(spread=0.3, dtype=torch.float64)
        source = element.inverse()(weights)
        start = time.process_time()
        result = align(source, weights, group, restarts=0, progress=False)
        times.append(time.process_time() - start)
        errors.append(error_of(result.element(source), weights))
        same = all(
            torch.equal(result.element[one], element[one])
            for one in element.permutations
        )
        found += same and errors[-1] <= 1e-6
    return f"{found}/{TRIALS}, {max(errors):.0e}, {statistics.median(times):.2f}"


def error_of(found: Weights, weights: Weights) -> float:
    """The distance of weights, relative to their norm."""
    return (
        distance(found, weights)
        / sum(float(v.square().sum(dtype=torch.float64)) for v in weights.values())
    ) ** 0.5


def timing(options: argparse.Namespace) -> None:
    cases: dict[str, Case] = {}
    for sizes in (
        (784, *[width] * depth, 10)
        for depth in options.depths
        for width in options.widths
    ):
        cases["-".join(map(str, sizes))] = (
            partial(perceptron, *sizes),
            torch.randn(2, 784),
        )
    for width in options.channels:
        cases[f"resnet20, {width} channels"] = (
            partial(resnet20, width=width),
            torch.randn(2, 3, 32, 32),
        )
    lines = []
    for name, (make, x) in cases.items():
        group = find_symmetry(make(), x, verify=False).permutations
        found = [timed(make, group, seed) for seed in range(options.seeds)]
        columns = zip(*found, strict=True)
        lines.append([name, *(spread(values) for values in columns)])
    print_table(
        "seconds of an alignment, and cost as a share of the initial one; "
        f"mean ± standard error over {options.seeds} pairs",
        ["network", "seconds", "cost", "seconds, Gaussians", "cost, Gaussians"],
        lines,
    )


def timed(make: Callable[[], nn.Module], group: Group, seed: int) -> list[float]:
    """Align a pair of networks, and of Gaussians of their moments: seconds, costs."""
    torch.manual_seed(seed)
    pair = [parameters(make()) for _ in range(2)]
    deviations = [
        {site: value.abs() for site, value in weights.items()} for weights in pair
    ]
    gaussians = [
        GaussianWeights(*moments) for moments in zip(pair, deviations, strict=True)
    ]
    found = []
    for source, reference in (pair, gaussians):
        start = time.perf_counter()
        result = align(source, reference, group)
        found += [time.perf_counter() - start, result.cost / result.initial_cost]
    return found


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    command.__name__: command for command in (planted, timing)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*COMMANDS])
    parser.add_argument("--markdown", help="planted: write the table to this page")
    parser.add_argument(
        "--widths", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 2048]
    )
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[3], help="timing: hidden layers"
    )
    parser.add_argument(
        "--channels",
        type=int,
        nargs="*",
        default=[],
        help="timing: of the first layers of ResNet-20s",
    )
    parser.add_argument("--seeds", type=int, default=3, help="timing: pairs")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    COMMANDS[options.what](options)


if __name__ == "__main__":
    main()
