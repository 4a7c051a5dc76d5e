"""Canonical forms of many small networks at once, against a loop over modules that computes the same.

    python -m benchmarks.performance.canonicalize --networks 10000

The network is OptuNet (392 parameters: two convolutions without biases, the second in two groups, and a linear layer)
of Laurent, Aldea & Franchi 2024, arXiv 2310.08287. The loop loads each set of weights into a module, gives each channel
unit norm, and sorts channels within groups, then groups, by their largest weight, with one vectorised step per layer.
"""

import argparse
import time

import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.networks import optunet


@torch.no_grad()
def canonicalize_module(net: nn.Module) -> None:
    """The loop's body, in place: unit norm, sorted channels and groups, biases of mean zero."""
    first, second, last = net[0], net[3], net[7]
    norm = first.weight.flatten(1).norm(dim=1)
    first.weight.div_(norm[:, None, None, None])
    second.weight.mul_(norm.repeat_interleave(5)[:, None, None, None])
    norm = second.weight.flatten(1).norm(dim=1)
    second.weight.div_(norm[:, None, None, None])
    last.weight.mul_(norm)
    key = second.weight.flatten(1).amax(1).view(2, 5)
    within = key.argsort(dim=1)
    outer = torch.maximum(first.weight.flatten(1).amax(1), key.amax(1)).argsort()
    order = (within + 5 * torch.arange(2)[:, None])[outer].flatten()
    first.weight.copy_(first.weight[outer])
    second.weight.copy_(second.weight[order])
    last.weight.copy_(last.weight[:, order])
    last.bias.sub_(last.bias.mean())


def in_a_loop(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    net = optunet()
    results = []
    for i in range(len(next(iter(weights.values())))):
        net.load_state_dict({site: value[i] for site, value in weights.items()})
        canonicalize_module(net)
        results.append({site: value.clone() for site, value in net.state_dict().items()})
    return {site: torch.stack([result[site] for result in results]) for site in weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    net = optunet()
    symmetry = ps.find_symmetry(net, torch.randn(2, 1, 28, 28), logits=True)
    print(symmetry)
    weights = {site: torch.randn(arguments.networks, *value.shape) for site, value in net.named_parameters()}
    print(f"{arguments.networks} networks of {sum(value[0].numel() for value in weights.values())} parameters")

    ps.canonicalize(weights, symmetry)  # once to warm up
    times = []
    for _ in range(5):
        start = time.perf_counter()
        batched = ps.canonicalize(weights, symmetry)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    looped = in_a_loop(weights)
    loop = time.perf_counter() - start
    # Network by network, relative to its largest weight.
    error = torch.stack([(batched[s] - looped[s]).abs().flatten(1).amax(1) for s in weights]).amax(0)
    error = error / torch.stack([looped[s].abs().flatten(1).amax(1) for s in weights]).amax(0)
    print(f"batched: {min(times):.4f} s, loop over modules: {loop:.2f} s, ratio {loop / min(times):.0f}")
    print(f"networks with the same result to a relative 1e-5: {int((error < 1e-5).sum())} of {arguments.networks}")


if __name__ == "__main__":
    main()
