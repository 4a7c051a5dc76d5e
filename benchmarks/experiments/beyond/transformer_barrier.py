"""Two small transformers, trained from two starts: how close do permutations, signs and
rotations of their units bring them, and what is left of the barrier between them?

    python -m benchmarks.experiments.beyond.transformer_barrier --json barrier.json

Digits as 16 patches of 2 x 2 pixels, two blocks of width 32 with two heads, RMSNorm
without gains, so that the residual stream rotates, as queries with keys and values with
outputs do in each head. Zhang et al. 2025 (arXiv 2502.00264) and Theus et al. 2025
(arXiv 2506.22712) merge large transformers by rotations.

Shown are the squared distance of the weights that is left, as a share of that of the
networks as trained, and the barriers of test loss and test error on the straight line
between the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser

WIDTH, HEADS, HIDDEN = 32, 2, 64
RATE, DECAY, ROWS = 3e-3, 0.1, 128
MATCHES = ("as trained", "permutations", "permutations and signs", "rotations")


def norm() -> nn.Module:
    return nn.RMSNorm(WIDTH, elementwise_affine=False)


class Attention(nn.Module):
    """Self-attention without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def by_head(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query = self.by_head(self.query(x))
        key = self.by_head(self.key(x))
        weights = torch.softmax(query @ key.mT / (WIDTH // HEADS) ** 0.5, -1)
        mixed = weights @ self.by_head(self.value(x))
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a layer of rectifiers on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norms = nn.ModuleList([norm(), norm()])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Two blocks on the 16 patches of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(16, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = norm()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        stream = self.blocks(self.embed(patches) + self.position)
        return self.head(self.norm(stream).mean(1))


def trained(seed: int, steps: int, data: ps.datasets.Dataset) -> Transformer:
    torch.manual_seed(seed)
    net = Transformer()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        rows = torch.randint(len(data.train_x), (ROWS,))
        outputs = net(data.train_x[rows])
        loss = nn.functional.cross_entropy(outputs, data.train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


class Pairs:
    """Pairs of networks, trained when they are asked for."""

    def __init__(self, options: Any):
        self.steps = options.steps
        self.data = ps.datasets.load("digits", dtype=torch.float32)
        self.seed = -1
        self.networks: list[Transformer] = []

    def of(self, seed: int) -> list[Transformer]:
        if seed != self.seed:
            self.networks = [
                trained(start, self.steps, self.data)
                for start in (2 * seed, 2 * seed + 1)
            ]
            self.seed = seed
        return self.networks

    def run(self, seed: int, match: str) -> Row:
        reference, source = self.of(seed)
        row: Row = {"left": 1.0}
        moved: nn.Module = source
        if match != "as trained":
            symmetry = ps.find_symmetry(reference, self.data.train_x[:4])
            rotating = symmetry.with_rotations()
            group = {
                "permutations": symmetry.permutations,
                "permutations and signs": symmetry.finite,
                "rotations": rotating.group.compact,
            }[match]
            result = ps.align(source, reference, group)
            row["left"] = result.cost / result.initial_cost
            acting = rotating if match == "rotations" else symmetry
            moved = acting.act(result.element, source)
        model = ps.BayesianModel(reference, 1.0, "categorical")
        test = {"test": (self.data.test_x, self.data.test_y)}
        barriers = ps.loss_barrier(reference, moved, model, test).barriers
        accuracy = moved(self.data.test_x).argmax(-1) == self.data.test_y
        row["accuracy"] = float(accuracy.float().mean())
        return row | {"loss": barriers["test"], "error": barriers["test error"]}


def main() -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--steps", type=int, default=800)
    options = parse(arguments)
    if options.quick:
        options.steps, options.seeds = 20, 1
    results = Results.of(options, "steps")
    pairs = Pairs(options)
    results.fill(pairs.run, seed=range(options.seeds), match=MATCHES)
    columns = {
        "distance left": ("left", 2),
        "barrier of loss": ("loss", 2),
        "barrier of error": ("error", 2),
        "accuracy of the source": ("accuracy", 3),
    }
    results.table("Pairs of transformers", ["match"], columns)


if __name__ == "__main__":
    main()
