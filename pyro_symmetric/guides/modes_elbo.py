r"""An ELBO for guides with several modes that draws every mode in every step.

.. math:: \mathrm{ELBO}(q) = \sum_k \pi_k\, \mathbb E_{q_k}[\log p(w, D) - \log q(w)]

Drawn as it stands, with one draw of each component, the sum is differentiated exactly in the weights :math:`\pi`: the
noise of a score function, which is as large as the ELBO itself, doesn't arise, nor do rare modes go without gradient.
The price is one run of the model for each mode.

Reference: Roeder, Wu & Duvenaud 2017 (arXiv 1703.09194), section 6 (stratified mixtures).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pyro
import torch
from pyro.infer.util import torch_item
from torch import Tensor

from pyro_symmetric.distributions import Modes
from pyro_symmetric.guides.objectives import OwnParticle_ELBO, base_of


class Modes_ELBO(OwnParticle_ELBO):
    """The ELBO of :class:`~pyro_symmetric.guides.AutoModes`, symmetrised or not, by one draw of each mode.

    >>> svi = SVI(model, guide, optim, loss=Modes_ELBO())

    It estimates the same number as :class:`~pyro.infer.Trace_ELBO`, with the same arguments and less noise.

    :param num_particles: how often every mode is drawn in a step.
    :param vectorize_particles: run all draws of all modes in one batched pass, if the model can be run under a plate of
        particles: every :class:`~pyro_symmetric.models.BayesianModel` can.
    :raises TypeError: in the first step, for a guide without modes.
    """

    def __init__(self, num_particles: int = 1, *args: Any, **kwargs: Any):
        super().__init__(num_particles, *args, **kwargs)
        self._alone = num_particles == 1  # Pyro then makes no room for a plate of particles, but there are the modes'
        if self.vectorize_particles and self._alone:
            self.max_plate_nesting += 1

    def _guess_max_plate_nesting(self, *args: Any) -> None:
        super()._guess_max_plate_nesting(*args)
        if self.vectorize_particles and self._alone:
            self.max_plate_nesting += 1

    def _get_traces(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        if not hasattr(guide, "stratified"):
            raise TypeError(
                f"Modes_ELBO needs a guide with several modes, AutoModes or AutoSymmetrized over it; found "
                f"{type(guide).__name__}. Use Trace_ELBO for it"
            )
        if not self.vectorize_particles:
            for draw in range(self.num_particles * guide.num_modes):
                with guide.stratified(draw % guide.num_modes):
                    traces = self._get_trace(model, guide, args, kwargs)
                yield traces
            return
        if math.isinf(self.max_plate_nesting):
            self._guess_max_plate_nesting(model, guide, args, kwargs)
        count = self.num_particles * guide.num_modes
        plate = pyro.plate("modes_vectorized", count, dim=-self.max_plate_nesting)
        with guide.stratified(0):
            traces = self._get_trace(plate(model), plate(guide), args, kwargs)
        yield traces

    def _differentiable_loss_particle(self, model_trace: Any, guide_trace: Any) -> tuple[float, Tensor]:
        mixture, count = _mixture(guide_trace)
        log_ratio: Any = 0.0
        for trace, sign in ((model_trace, 1), (guide_trace, -1)):
            for site in trace.nodes.values():
                if site["type"] == "sample":
                    log_ratio = log_ratio + sign * _by_draw(site["log_prob"], count)
        which = ((mixture.stratum or 0) + torch.arange(count, device=log_ratio.device)) % len(mixture.components)
        elbo = (mixture.log_weights.exp()[which] * log_ratio).sum()
        return -torch_item(elbo), -elbo


def _mixture(guide_trace: Any) -> tuple[Modes, int]:
    """The guide's distribution, and of how many draws the trace is made."""
    for site in guide_trace.nodes.values():
        if site["type"] == "sample" and site["infer"].get("is_auxiliary"):
            return base_of(site["fn"]), site["value"].shape[:-1].numel()
    raise TypeError("the guide draws no flat vector of all sites")


def _by_draw(log_prob: Tensor, count: int) -> Tensor:
    """Summed over all but the draws, whose plate is the outermost."""
    return log_prob.sum().reshape(1) if count == 1 else log_prob.reshape(count, -1).sum(-1)
