"""Alignment of networks: planted elements, time and objective beside ``rebasin`` (PyPI), time by width, many at once.

    python -m benchmarks.performance.alignment planted  # 100 trials for each of nine architectures
    python -m benchmarks.performance.alignment peers --seeds 5  # needs ``pip install rebasin``; both in one run
    python -m benchmarks.performance.alignment timing  # by width, as Fig. A2 of Rossi et al. 2023; --depths 1 2 3 4
    python -m benchmarks.performance.alignment many  # 100 networks in one frame
    python -m benchmarks.performance.alignment solvers  # SciPy beside ``lap`` and ``lapjv``, where installed

*planted*: weights are moved by a random element of the network's symmetry (permutations, with ``--signs`` signs, and
with ``--whole`` scales and shifts as well); alignment must undo it, bit by bit in the permutations. *peers*: two
networks with independent random weights, as PyTorch starts them; the objective is the squared distance of the
parameters after alignment, of ``rebasin`` too, and whether its network still computes what it did. *timing*: seconds
for one alignment with the default settings, of two networks and of two mean-field Gaussians.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from pyro_symmetric._torchvision import import_torchvision
from pyro_symmetric.alignment import GaussianWeights, align, align_many, decision
from pyro_symmetric.alignment.assignment import assign
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.groups import Element
from pyro_symmetric.networks import resnet20

Case = tuple[Callable[[], nn.Module], Tensor]


def perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def vgg11() -> nn.Module:
    """VGG-11 with batch normalisation, for images of 32 x 32."""
    net = import_torchvision().models.vgg11_bn(weights=None)
    return nn.Sequential(net.features, nn.Flatten(), nn.Linear(512, 10))


class LSTM(nn.Module):
    def __init__(self, inputs: int = 16, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(inputs, width, layers, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.embed, self.out = nn.Linear(16, 64), nn.Linear(64, 10)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encode(self.embed(x)).mean(1))


class Encoder(nn.Module):
    """One encoder layer, and what it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).mean(1))


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
    "mlp 784-512-512-512-10": (lambda: perceptron(784, 512, 512, 512, 10), torch.randn(2, 784)),
    "resnet20": (resnet20, torch.randn(2, 3, 32, 32)),
    "vgg11-bn": (vgg11, torch.randn(2, 3, 32, 32)),
    "lstm 2 x 64": (LSTM, torch.randn(2, 7, 16)),
    "transformer 2 x 64": (Transformer, torch.randn(2, 7, 16)),
    "grouped convolutions, relu": (lambda: grouped(nn.ReLU), torch.randn(2, 4, 8, 8)),
    "grouped convolutions, tanh": (lambda: grouped(nn.Tanh), torch.randn(2, 4, 8, 8)),
    "encoder layer": (Encoder, torch.randn(2, 5, 16)),
    "lstm 1 x 12": (lambda: LSTM(5, 12, 1), torch.randn(2, 7, 5)),
}
PEERS: dict[str, Case] = {
    "mlp 784-512-512-512-10": (lambda: perceptron(784, 512, 512, 512, 10), torch.randn(2, 784)),
    "vgg11-bn": (vgg11, torch.randn(2, 3, 32, 32)),
    "resnet18": (lambda: torchvision_net("resnet18"), torch.randn(2, 3, 64, 64)),
    "squeezenet1_1": (lambda: torchvision_net("squeezenet1_1"), torch.randn(2, 3, 64, 64)),
    "resnet20": (resnet20, torch.randn(2, 3, 32, 32)),
}


def randomised(make: Callable[[], nn.Module]) -> nn.Module:
    """A network none of whose parameters is at a special value (PyTorch starts normalisations at one)."""
    net = make().eval()
    for parameter in net.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.5)
    return net


def parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in net.named_parameters()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] - other[name]).square().sum(dtype=torch.float64)) for name in one)


def planted(options: argparse.Namespace) -> None:
    print(f"{'network':<26} {'recovered':>9}   seconds each")
    for name, (make, x) in selected(PLANTED, options).items():
        torch.manual_seed(0)
        net = randomised(make)
        symmetry = find_symmetry(net, x)
        group = symmetry.group if options.whole else symmetry.finite if options.signs else symmetry.permutations
        weights = {site: value.detach() for site, value in symmetry.weights_of(net).items()}
        found, times = 0, []
        for seed in range(options.trials):
            torch.manual_seed(seed)
            element = group.sample(spread=0.3)
            source = element.inverse()(weights)
            start = time.perf_counter()
            result = align(source, weights, group, restarts=0)
            times.append(time.perf_counter() - start)
            found += recovered(result.element, element, weights)
        print(f"{name:<26} {found:>5}/{options.trials}   {statistics.median(times):.3f}", flush=True)


def recovered(found: Element, planted: Element, weights: dict[str, Tensor]) -> bool:
    """Whether permutations agree bit by bit, and what both do to weights to their precision.

    (Flips of some units may do together what flips of others do.)
    """
    if any(not torch.equal(found[name], planted[name]) for name in planted.permutations):
        return False
    undone = planted.inverse()(weights)
    return all(torch.allclose(v, weights[site], rtol=1e-3, atol=1e-4) for site, v in found(undone).items())


def peers(options: argparse.Namespace) -> None:
    try:
        rebasin = importlib.import_module("rebasin")
    except ImportError:
        raise SystemExit("rebasin is not installed, so there is nothing to compare with: pip install rebasin") from None
    print(
        f"{'network':<24} {'seeds':>5}  {'objective / initial: ours':>26} {'(3 restarts)':>13} {'rebasin':>8}"
        f"   {'seconds: ours':>13} {'(3 restarts)':>13} {'rebasin':>8}   {'ratio':>6}   tracing: ours, rebasin"
    )
    for name, (make, x) in selected(PEERS, options).items():
        rows: list[list[float]] = []
        failure = ""
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            nets = make().eval(), make().eval()
            reference, source = map(parameters, nets)
            start = time.perf_counter()
            symmetry = find_symmetry(nets[0], x, verify=False)
            tracing = time.perf_counter() - start
            row = [distance(source, reference)]
            for restarts in (None, 3):
                start = time.perf_counter()
                # Weights are compared here, and predict nothing: running statistics stay where they are.
                group = symmetry.permutations.without_buffers()
                result = align(source, reference, group, restarts=restarts)
                seconds = time.perf_counter() - start
                row += [distance(result.element(source), reference), seconds]
            try:
                row += with_rebasin(rebasin, nets, reference, x)
            except Exception as error:  # whatever it stumbles over is what is to be reported
                failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                break
            rows.append([*row, tracing])
        if failure:
            print(f"{name:<24} rebasin fails: {failure}", flush=True)
            continue
        mean = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        initial, ours, seconds, again, again_seconds, theirs, their_seconds, their_tracing, broken, tracing = mean
        note = f"   rebasin changed the function by {broken:.1e}" if broken > 1e-3 else ""
        print(
            f"{name:<24} {len(rows):>5}  {ours / initial:>26.5f} {again / initial:>13.5f} {theirs / initial:>8.5f}"
            f"   {seconds:>13.2f} {again_seconds:>13.2f} {their_seconds:>8.2f}   {their_seconds / seconds:>5.1f}x"
            f"   {tracing:.2f} {their_tracing:.2f}{note}",
            flush=True,
        )


def with_rebasin(rebasin: object, nets: Sequence[nn.Module], reference: dict[str, Tensor], x: Tensor) -> list[float]:
    """Objective, seconds, seconds of tracing, relative change of the function."""
    moved = copy.deepcopy(nets[1])
    start = time.perf_counter()
    descent = rebasin.PermutationCoordinateDescent(copy.deepcopy(nets[0]), moved, x)  # type: ignore[attr-defined]
    traced = time.perf_counter()
    descent.calculate_permutations()
    done = time.perf_counter()
    descent.apply_permutations()
    with torch.no_grad():
        before, after = nets[1](x), moved.eval()(x)
    change = float((after - before).norm() / before.norm())
    return [distance(parameters(moved), reference), done - traced, traced - start, change]


def timing(options: argparse.Namespace) -> None:
    print(f"{'seconds, and cost as a share of the initial':<44} {'networks':>17} {'Gaussians':>20}")
    for depth in options.depths:
        for width in options.widths:
            widths = (784, *[width] * depth, 10)
            group = find_symmetry(perceptron(*widths), torch.randn(2, 784), verify=False).permutations
            torch.manual_seed(0)
            pair = [parameters(perceptron(*widths)) for _ in range(2)]
            spread = [{site: value.abs() for site, value in weights.items()} for weights in pair]
            columns = []
            for sources in (pair, [GaussianWeights(*moments) for moments in zip(pair, spread, strict=True)]):
                start = time.perf_counter()
                result = align(sources[0], sources[1], group)
                columns.append((time.perf_counter() - start, result.cost / result.initial_cost))
            (plain, ratio), (gaussian, gaussian_ratio) = columns
            name = "-".join(map(str, widths))
            print(f"{name:<44} {plain:>8.3f} {ratio:>8.5f}   {gaussian:>8.3f} {gaussian_ratio:>8.5f}", flush=True)


def many(options: argparse.Namespace) -> None:
    """100 networks in one frame: noisy copies of one, moved at random, and independent ones."""
    widths = (784, 64, 64, 10)
    group = find_symmetry(perceptron(*widths), torch.randn(2, 784), verify=False).permutations
    print(f"{options.trials} networks {'-'.join(map(str, widths))}; distances are mean squares to the barycentre")
    for kind in ("noisy copies", "independent"):
        torch.manual_seed(0)
        nets = [parameters(perceptron(*widths)) for _ in range(options.trials)]
        members = {site: torch.stack([weights[site] for weights in nets]) for site in nets[0]}
        planted = group.sample((options.trials,))
        if kind == "noisy copies":
            members = planted.inverse()({site: value[:1] + 0.5 * value for site, value in members.items()})
        frames, seconds = [], []
        for seed in range(2):  # another seed starts from another member
            torch.manual_seed(seed)
            start = time.perf_counter()
            frames.append(align_many(members, group, progress=False))
            seconds.append(time.perf_counter() - start)
        star = align(members, {site: value[0] for site, value in members.items()}, group).element(members)
        to_star = sum(float((v - v.mean(0)).square().sum(dtype=torch.float64)) for v in star.values()) / options.trials
        apart = sum(float((v - v.mean(0)).square().sum(dtype=torch.float64)) for v in members.values()) / options.trials
        print(f"{kind}: {apart:.4f} as they came, {to_star:.4f} all aligned to the first member")
        for frame, time_taken in zip(frames, seconds, strict=True):
            common = "" if kind == "independent" else f", one frame: {in_one_frame(frame.element, planted):.2f} of them"
            rounds = len(frame.history) - 1
            print(f"  {frame.history[-1]:.4f} in one frame ({rounds} rounds, {time_taken:.2f} s{common})", flush=True)


def in_one_frame(element: Element, planted: Element) -> float:
    """The share of members that the element which undoes the planted one, up to one common element, was found of."""
    relative = torch.cat([*(element @ planted.inverse()).permutations.values()], 1)
    return float(relative.unique(dim=0, return_counts=True)[1].max()) / len(relative)


def solvers(options: argparse.Namespace) -> None:
    """Time on the scores that alignments of networks with two hidden layers meet, one line a width and kind."""
    from scipy.optimize import linear_sum_assignment

    found: dict[str, Callable[[Tensor], object]] = {"scipy": lambda cost: linear_sum_assignment(cost.numpy())}
    for name in ("lap", "lapjv"):
        try:
            solver = importlib.import_module(name).lapjv
        except ImportError:
            print(f"{name} is not installed: skipped")
            continue
        found[name] = lambda cost, solver=solver: solver(cost.numpy())
    print(
        f"{'networks':<12} {'width':>5} {'problems':>8}   mean milliseconds of each solver; of all that assign() does"
    )
    for kind in ("independent", "trained", "noisy copy"):
        for n in options.widths:
            problems = [reduced(scores) for scores in met_scores(kind, n)]
            times = {name: statistics.fmean(fastest(solve, cost) for cost in problems) for name, solve in found.items()}
            times["assign"] = statistics.fmean(fastest(lambda cost: assign(-cost), cost) for cost in problems)
            columns = "  ".join(f"{name} {1e3 * seconds:9.3f}" for name, seconds in times.items())
            print(f"{kind:<12} {n:5d} {len(problems):8d}   {columns}", flush=True)


def met_scores(kind: str, n: int) -> list[Tensor]:
    """The scores of all assignment problems that one alignment meets, without those that are solved at sight."""
    torch.manual_seed(n)
    x = torch.randn(256, 64)
    y = perceptron(64, 16, 10)(x).argmax(-1)
    nets = [perceptron(64, n, n, 10) for _ in range(2)]
    for net in nets if kind == "trained" else ():
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(30):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
    group = find_symmetry(nets[0], x[:2], verify=False).permutations
    reference, source = map(parameters, nets)
    if kind == "noisy copy":
        noise = {site: value.std() * torch.randn_like(value) for site, value in source.items()}
        source = group.sample()({site: reference[site] + value for site, value in noise.items()})
    met: list[Tensor] = []

    def recording(scores: Tensor) -> Tensor:
        met.extend(scores.reshape(-1, n, n))
        return assign(scores)

    with mock.patch.object(decision, "assign", recording):
        align(source, reference, group, restarts=1)
    unsolved = [scores for scores in met if len(scores.argmax(-1).unique()) < n]
    return unsolved[:8] or met[:1]


def reduced(scores: Tensor) -> Tensor:
    """Scores as costs, what is common to rows or columns taken off."""
    cost = (scores.mean(0, keepdim=True) - scores).double()
    cost -= cost.amin(1, keepdim=True)
    return cost - cost.amin(0, keepdim=True)


def fastest(solve: Callable[[Tensor], object], cost: Tensor) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        solve(cost)
        times.append(time.perf_counter() - start)
    return min(times)


def selected(cases: dict[str, Case], options: argparse.Namespace) -> dict[str, Case]:
    return {name: case for name, case in cases.items() if not options.only or name.startswith(tuple(options.only))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["planted", "peers", "timing", "many", "solvers"])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="networks whose names start so")
    parser.add_argument("--whole", action="store_true", help="planted: signs, scales and shifts as well")
    parser.add_argument("--signs", action="store_true", help="planted: signs as well")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--depths", type=int, nargs="+", default=[3], help="timing: hidden layers")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    globals()[options.what](options)


if __name__ == "__main__":
    main()
