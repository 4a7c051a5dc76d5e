"""Training loops of the study: a guide by stock SVI, and many independent networks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import biject_to
from tqdm import tqdm

from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Weights


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


def fit_networks(
    model: BayesianModel,
    x: Tensor,
    y: Tensor,
    *,
    num_networks: int,
    steps: int,
    learning_rate: float,
    batch_size: int,
    label: str = "networks",
    progress: bool = True,
    start: Weights | None = None,
    descent: bool = False,
    perturb: Callable[[Weights], Weights] | None = None,
    watch: Callable[[int, Weights], None] | None = None,
) -> tuple[Weights, list[float]]:
    r"""Train independent networks to a mode of the posterior each, all at once.

    Every network has its own initial values and its own order of mini-batches and minimises
    :math:`-\log p(w) - \frac{N}{B} \sum_{i \in \text{batch}} \frac1T \log p(y_i \mid x_i, w)` by Adam with a cosine
    schedule.

    :param start: initial weights of batch shape ``(num_networks,)``; by default the network's own way of initialising.
    :param descent: take plain stochastic gradient steps with momentum instead, at a constant rate, on the loss a row.
    :param perturb: weights -> the weights at which the likelihood is evaluated (dropout, say).
    :param watch: called after every step with its number and the weights.
    :return: weights of batch shape ``(num_networks,)``, and the mean loss over the networks at each step.
    """
    priors = model.priors()
    transforms = {site: biject_to(prior.support) for site, prior in priors.items()}
    start = fresh_starts(model, num_networks) if start is None else start
    free = {site: transforms[site].inv(value).detach().clone().requires_grad_(True) for site, value in start.items()}

    def constrained() -> Weights:
        return {site: transforms[site](value) for site, value in free.items()}

    optimiser: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    if descent:
        optimiser = torch.optim.SGD(list(free.values()), lr=learning_rate / len(x), momentum=0.9)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimiser, factor=1.0)
    else:
        optimiser = torch.optim.Adam(list(free.values()), lr=learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    losses = []
    with tqdm(total=steps, desc=label, unit="step", disable=not progress) as bar:
        for step, rows in zip(range(steps), mini_batches(len(x), batch_size, x.device, num_networks), strict=False):
            weights = constrained()
            loss = _negative_log_posterior(model, weights if perturb is None else perturb(weights), weights, x, y, rows)
            optimiser.zero_grad()
            loss.sum().backward()
            optimiser.step()
            schedule.step()
            losses.append(float(loss.detach().mean()))
            if watch is not None:
                with torch.no_grad():
                    watch(step, constrained())
            bar.update()
    with torch.no_grad():
        return {site: value.detach() for site, value in constrained().items()}, losses


def _negative_log_posterior(
    model: BayesianModel, seen: Weights, weights: Weights, x: Tensor, y: Tensor, rows: Tensor
) -> Tensor:
    """The loss ``(networks,)``: the likelihood of mini-batches at the weights ``seen``, the prior at ``weights``."""
    in_net = set(dict(model.net.named_parameters()))
    outputs = torch.func.vmap(model.call)({site: seen[site] for site in seen if site in in_net}, x[rows])
    latents = {site: value for site, value in weights.items() if site not in in_net}
    log_prob = model.likelihood.distribution(outputs, latents).log_prob(model.likelihood.targets(y)[rows])
    scale = len(x) / (rows.shape[-1] * model.likelihood.temperature)
    return -(model.log_prior(weights) + scale * log_prob.reshape(len(rows), -1).sum(-1))


def mini_batches(rows: int, batch_size: int, device: torch.device, streams: int | None = None) -> Iterator[Tensor]:
    """Endless mini-batches of row numbers, each epoch in a new random order; a smaller last batch is left out.

    :param streams: as many independent orders at once, ``(streams, batch)`` instead of ``(batch,)``.
    """
    batch_size = min(batch_size, rows)
    while True:
        shape = (rows,) if streams is None else (streams, rows)
        order = torch.rand(shape, device=device).argsort(-1)
        for start in range(0, rows - batch_size + 1, batch_size):
            yield order[..., start : start + batch_size]


def fresh_starts(model: BayesianModel, count: int) -> Weights:
    """``count`` sets of initial values of every site: the network's own way of initialising; the likelihood's sites at
    their prior."""
    starts = [model.initial_weights(fresh=True) for _ in range(count)]
    weights = {site: torch.stack([start[site] for start in starts]) for site in starts[0]}
    others = {site: prior.sample((count,)) for site, prior in model.priors().items() if site not in weights}
    return {**weights, **others}
