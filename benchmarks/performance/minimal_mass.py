"""Time and accuracy of the minimum scaled representation.

    python -m benchmarks.performance.minimal_mass  # add --no-resnet to leave out the discovery of resnet18

For each network: time of ``minimal_mass``, mass before and after, and how far the answer from a randomly rescaled copy
is from the answer from the original. Laurent, Aldea & Franchi 2024, arXiv 2310.08287, report about ten minutes for a
ResNet-18 with a general convex solver.
"""

import argparse
import itertools
import time

import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric._torchvision import import_torchvision


def perceptron(widths: list[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def state(net: nn.Module, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    values = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {name: v.detach().to(dtype) if v.is_floating_point() else v.detach() for name, v in values.items()}


def measure(name: str, weights: dict[str, Tensor], symmetry: ps.Symmetry, scale_free: str = "leave_out") -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        found = ps.minimal_mass(weights, symmetry, scale_free=scale_free)
        times.append(time.perf_counter() - start)
    free = symmetry.scalings
    moved = free.sample(dtype=torch.float64)
    if scale_free == "hold":  # the answer is the same only from copies that leave pinned units where they are
        moved = free.element(log_scales={k: v for k, v in moved.log_scales.items() if not found.pinned[k].any()})
    scales = sum(int(units.sum()) for units in free.independent("scale").values())
    other = ps.minimal_mass(moved(weights), symmetry, scale_free=scale_free)
    before = sum(float(weights[site].square().sum()) for site in free.weight_sites)
    error = abs(float(other.mass / found.mass) - 1)
    pinned = sum(found.pinned_factors.values())
    print(
        f"{name:<28} {min(times):6.3f} s   scales {scales:5d} (pinned {pinned:4d})   mass {before:10.4f} -> "
        f"{float(found.mass):10.4f}   from a copy: {error:.1e}   imbalance {float(found.imbalance):.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-resnet", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    for name, widths in {
        "MLP 784-512-512-512-10": [784, 512, 512, 512, 10],
        "MLP of depth 50, width 16": [16] * 51,
        "MLP of depth 50, width 64": [64] * 51,
        "MLP of depth 50, width 256": [256] * 51,
    }.items():
        net = perceptron(widths)
        measure(name, state(net), ps.find_symmetry(net))
    if not arguments.no_resnet:
        net = import_torchvision().models.resnet18()
        symmetry = ps.find_symmetry(net, torch.randn(2, 3, 224, 224))
        measure("resnet18", state(net), symmetry)
        measure("resnet18, scale-free held", state(net), symmetry, "hold")


if __name__ == "__main__":
    main()
