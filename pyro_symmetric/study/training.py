"""The training of a guide: stock Pyro's ELBO, in the loop that ensembles are trained by."""

from __future__ import annotations

import math

import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide
from pyro.optim.clipped_adam import ClippedAdam
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric._process import drawn_seed
from pyro_symmetric.ensembles.descent import batches_of, descend
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
    """Maximise the guide's ELBO with Adam, its step size falling a hundredfold; the mean loss of each pass.

    :raises ValueError: if the loss stops being finite.
    """
    guide(x[:2], y[:2])  # creates a stock guide's parameters
    elbo = Trace_ELBO(num_particles=num_particles, vectorize_particles=num_particles > 1, max_plate_nesting=1)
    optimizer = ClippedAdam(guide.parameters(), lr=learning_rate, lrd=0.01 ** (1 / steps), clip_norm=1e3)
    generator = torch.Generator(x.device).manual_seed(drawn_seed())
    batch_size = min(batch_size, len(x))
    batches, steps_a_pass = batches_of(len(x), batch_size, 1), len(x) // batch_size

    def losses(rows: Tensor | None) -> Tensor:
        batch = (x, y) if rows is None else (x[rows[0]], y[rows[0]])
        loss = elbo.differentiable_loss(model, guide, *batch)
        return loss.as_subclass(Tensor).reshape(1)  # the ELBO of a bound is one, too, and may be shown

    curve: list[float] = []
    with tqdm(total=steps, desc=label, unit="step", disable=not progress) as bar:
        for start in range(0, steps, steps_a_pass):
            now = range(start, min(start + steps_a_pass, steps))
            curve.append(float(descend(losses, optimizer, now, batches, generator)))
            if not math.isfinite(curve[-1]):
                raise ValueError(
                    f"{label}: the loss is {curve[-1]} at step {start}; are the data and the prior sensible?"
                )
            bar.update(len(now))
            bar.set_postfix(loss=f"{curve[-1]:.4g}", refresh=False)
    return curve
