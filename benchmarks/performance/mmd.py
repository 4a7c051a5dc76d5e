"""The time of the maximum mean discrepancy, beside a naive double loop over pairs of
samples.

    python -m benchmarks.performance.mmd --threads 2

Two sets of samples with 10⁴, 10⁵ and 10⁶ parameters each; ten Gaussian and ten Laplace
kernels. The naive version visits every pair and takes both distances and twenty
exponentials there. It is timed on the first ``--naive-samples`` of each side, where the
two results are compared, and its time for all pairs is *extrapolated* by their number.
The ratio is one of processor time, which other work on the machine changes less.
"""

from __future__ import annotations

import functools
import math
import time

import torch
from torch import Tensor

from benchmarks.harness import Results, Row, parse, parser
from pyro_symmetric.compare import mmd


def naive(x: Tensor, y: Tensor, bandwidths: Tensor) -> Tensor:
    """The twenty unbiased estimates by a loop over pairs."""
    gaussian_bandwidths, laplace_bandwidths = bandwidths.split(10)

    def kernels(a: Tensor, b: Tensor) -> Tensor:
        difference = a.double() - b.double()
        gaussian = (-((difference.norm() / gaussian_bandwidths) ** 2)).exp()
        laplace = (-(difference.abs().sum() / laplace_bandwidths)).exp()
        return torch.cat([gaussian, laplace])

    pooled, m, n = torch.cat([x, y]), len(x), len(y)
    total = torch.zeros(20, dtype=torch.float64)
    for i in range(m + n):
        for j in range(m + n):
            across = (i < m) != (j < m)
            within = m * (m - 1) if i < m else n * (n - 1)
            if i != j:
                total += kernels(pooled[i], pooled[j]) * (
                    -1 / (m * n) if across else 1 / within
                )
    return total


def measure(count: int, parameters: int, seed: int, few: int) -> Row:
    torch.manual_seed(seed)
    x, y = torch.randn(2, count, parameters)
    y += 0.5 / math.sqrt(parameters)
    began, began_cpu = time.perf_counter(), time.process_time()
    result = mmd({"w": x}, {"w": y})
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    part = mmd({"w": x[:few]}, {"w": y[:few]}).parts["w"]
    began = time.process_time()
    expected = naive(x[:few], y[:few], torch.from_numpy(part["bandwidth"]))
    per_pair = (time.process_time() - began) / (2 * few * (2 * few - 1))
    error = float((torch.from_numpy(part["squared"]) - expected).abs().max())
    return {
        "seconds": seconds,
        "cpu": cpu,
        "naive_seconds": per_pair * (2 * count * (2 * count - 1)),
        "error": error,
        "median": result["median"],
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--samples", type=int, default=1_000, help="on each side")
    arguments.add_argument(
        "--parameters", type=int, nargs="+", default=[10_000, 100_000, 1_000_000]
    )
    arguments.add_argument("--naive-samples", type=int, default=12)
    options = parse(arguments, argv)
    if options.quick:
        options.samples, options.parameters = 200, [1_000, 10_000]
    measure(20, 100, 0, 12)  # once to warm up
    results = Results.of(options, "samples", "naive_samples", "threads")
    measured = functools.partial(measure, options.samples, few=options.naive_samples)
    results.fill(measured, seed=range(options.seeds), parameters=options.parameters)
    results.table(
        f"{options.samples:,} samples against {options.samples:,}; the loop's time is "
        "extrapolated from "
        f"{options.naive_samples} of each",
        ["parameters"],
        {
            "seconds": ("seconds", 2),
            "processor": ("cpu", 2),
            "loop seconds": ("naive_seconds", 0),
            "ratio": (lambda row: row["naive_seconds"] / row["cpu"], 0),
            "largest difference": ("error", 12),
        },
    )


if __name__ == "__main__":
    main()
