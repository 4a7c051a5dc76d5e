"""The training loop of a guide, by stock SVI."""

from __future__ import annotations

from collections.abc import Iterator

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric.models import BayesianModel


def fit_guide(
    model: BayesianModel,
    guide: AutoGuide,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    learning_rate: float,
    batch_size: int,
    num_particles: int = 4,
    label: str = "SVI",
    progress: bool = True,
) -> list[float]:
    """Maximise the guide's ELBO by stock SVI with Adam, its step size falling a hundredfold; the loss at each step.

    :raises ValueError: if the loss stops being finite.
    """
    guide(x[:2], y[:2])  # creates a stock guide's parameters, in the parameter store
    optimiser = pyro.optim.ClippedAdam({"lr": learning_rate, "lrd": 0.01 ** (1 / steps), "clip_norm": 1e3})
    elbo = Trace_ELBO(num_particles=num_particles, vectorize_particles=num_particles > 1, max_plate_nesting=1)
    svi = SVI(model, guide, optimiser, elbo)
    losses = []
    with tqdm(total=steps, desc=label, unit="step", disable=not progress) as bar:
        for step, rows in zip(range(steps), mini_batches(len(x), batch_size, x.device), strict=False):
            losses.append(float(svi.step(x[rows], y[rows])))
            if losses[-1] != losses[-1] or abs(losses[-1]) == float("inf"):
                raise ValueError(
                    f"{label}: the loss is {losses[-1]} at step {step}; are the data and the prior sensible?"
                )
            bar.update()
            if step % 50 == 0:
                bar.set_postfix(loss=f"{losses[-1]:.4g}", refresh=False)
    return losses


def mini_batches(rows: int, batch_size: int, device: torch.device) -> Iterator[Tensor]:
    """Endless mini-batches of row numbers, each epoch in a new random order; a smaller last batch is left out."""
    batch_size = min(batch_size, rows)
    while True:
        yield from torch.randperm(rows, device=device).split(batch_size)[: rows // batch_size]
