"""BoTorch's ``fit_fully_bayesian_model_nuts`` with Pyro's MCMC and with ours in its place: the same posterior?

    python -m benchmarks.performance.botorch_fit [--chains 1 16] [--warmup 128] [--draws 192]

Needs BoTorch 0.16, the last that samples by Pyro. ``botorch.fit.MCMC`` and ``botorch.fit.NUTS`` are replaced by those
of ``pyro_symmetric.infer``, and nothing else. Compared are the logs of the lengthscales, the other hyperparameters, and
mean and log variance of predictions at ten new points: differences of the posterior means in their standard errors
(by effective sample size; ``rms`` is about 1 if the posteriors are one), and effective draws of the worst site over
seconds of processor time, warm-up included. Pyro runs with ``jit_compile=True``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor

from benchmarks.contestants import coordinates
from benchmarks.harness import parse, parser, print_table
from benchmarks.performance.saas import data
from pyro_symmetric import infer
from pyro_symmetric.chain_statistics import chain_statistics


@dataclass
class Fit:
    """Quantities to compare ``(C, S, K)``, the worst site's effective draws, and seconds of processor time."""

    quantities: Tensor
    effective: float
    seconds: float

    def errors_off(self, other: Fit) -> Tensor:
        """Differences of the means in standard errors, ``(K,)``."""
        moments = [
            (q.flatten(0, 1).mean(0), q.flatten(0, 1).var(0) / chain_statistics(q).ess_bulk)
            for q in (self.quantities, other.quantities)
        ]
        (one, one_square), (two, two_square) = moments
        return (one - two) / (one_square + two_square).sqrt()


def fitted(chains: int | None, warmup: int, draws: int, rows: int, columns: int) -> Fit:
    """:param chains: of ours; ``None`` is Pyro's own."""
    import botorch.fit
    from botorch.models.fully_bayesian import SaasFullyBayesianSingleTaskGP

    kept: list[Any] = []
    theirs = botorch.fit.MCMC, botorch.fit.NUTS
    make = theirs[0] if chains is None else partial(infer.MCMC, num_chains=chains)
    kernel = theirs[1] if chains is None else infer.NUTS

    def remembered(*args: Any, **kwargs: Any) -> Any:
        kept.append(make(*args, **kwargs))
        return kept[0]

    pyro.set_rng_seed(1)
    x, y = (torch.as_tensor(array) for array in data(rows, columns))
    model = SaasFullyBayesianSingleTaskGP(x, y[:, None])
    options = {"warmup_steps": warmup, "num_samples": draws, "thinning": 1, "disable_progbar": True}
    botorch.fit.MCMC, botorch.fit.NUTS = remembered, kernel
    try:
        begun = time.process_time()
        botorch.fit.fit_fully_bayesian_model_nuts(model, jit_compile=chains is None, **options)
        seconds = time.process_time() - begun
    finally:
        botorch.fit.MCMC, botorch.fit.NUTS = theirs
    samples = kept[0].get_samples(group_by_chain=True)
    posterior = model.posterior(torch.rand(10, columns, generator=torch.Generator().manual_seed(0)).double())
    batch = samples["mean"].shape[:2]
    predicted = [value.detach().reshape(*batch, -1) for value in (posterior.mean, posterior.variance.log())]
    inverse = samples["kernel_tausq"].unsqueeze(-1) * samples["_kernel_inv_length_sq"]
    own = [inverse.log(), *(samples[site].log().reshape(*batch, -1) for site in ("outputscale", "noise"))]
    effective = chain_statistics(coordinates(samples)).ess_bulk.min().item()
    return Fit(torch.cat([*own, samples["mean"].reshape(*batch, -1), *predicted], -1), effective, seconds)


def main() -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--chains", type=int, nargs="+", default=[1, 16])
    arguments.add_argument("--warmup", type=int, default=128)
    arguments.add_argument("--draws", type=int, default=192, help="of all chains together")
    options = parse(arguments)
    rows, columns = (30, 20)
    if options.quick:
        rows, columns, options.warmup, options.draws = 8, 3, 20, 32
    pyros = fitted(None, options.warmup, options.draws, rows, columns)
    lines = [["Pyro, 1 chain", f"{pyros.effective:.4g}", f"{pyros.effective / pyros.seconds:.3g}", "", ""]]
    for chains in options.chains:
        found = fitted(chains, options.warmup, -(-options.draws // chains), rows, columns)
        off = found.errors_off(pyros)
        worst, rms = off.abs().max().item(), off.square().mean().sqrt().item()
        speed = f"{found.effective / found.seconds:.3g}"
        lines.append([f"ours, {chains} chains", f"{found.effective:.4g}", speed, f"{worst:.2f}", f"{rms:.2f}"])
    header = ["", "worst effective", "a second", "largest difference", "rms"]
    print_table("BoTorch's SAAS, differences from Pyro's means in standard errors", header, lines)


if __name__ == "__main__":
    main()
