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

import torch
from pyro.infer.util import torch_item
from torch import Tensor

from pyro_symmetric.guides.gaussian import plain
from pyro_symmetric.guides.modes import AutoModes
from pyro_symmetric.guides.objectives import OwnParticle_ELBO, base_of, flat_latent_site


class Modes_ELBO(OwnParticle_ELBO):
    """The ELBO of :class:`~pyro_symmetric.guides.AutoModes`, symmetrised or not, by one draw of each mode.

    >>> svi = SVI(model, guide, optim, loss=Modes_ELBO())

    It estimates the same number as :class:`~pyro.infer.Trace_ELBO`, with the same arguments and less noise.

    :param num_particles: how often every mode is drawn in a step.
    :param vectorize_particles: run all draws of all modes in one batched pass, if the model can be run under a plate of
        particles: every :class:`~pyro_symmetric.models.BayesianModel` can.
    :raises TypeError: in the first step, for a guide without modes.
    """

    num_modes = 2  # of the guide that ran last; before the first, it makes room for a plate of particles

    @property
    def num_particles(self) -> int:
        """All draws of a step."""
        return self._draws_of_each * self.num_modes

    @num_particles.setter
    def num_particles(self, value: int) -> None:
        self._draws_of_each = value

    def _get_traces(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        modes = plain(guide)
        if not isinstance(modes, AutoModes):
            raise TypeError(
                f"Modes_ELBO needs a guide with several modes, AutoModes or AutoSymmetrized over it; found "
                f"{type(guide).__name__}. Use Trace_ELBO for it"
            )
        self.num_modes = modes.num_modes
        if self.vectorize_particles and math.isinf(self.max_plate_nesting):
            self._guess_max_plate_nesting(model, guide, args, kwargs)
        run = self._get_vectorized_trace if self.vectorize_particles else self._get_trace
        for draw in range(1 if self.vectorize_particles else self.num_particles):
            with modes.stratified(draw % self.num_modes):
                traces = run(model, guide, args, kwargs)
            yield traces

    def _differentiable_loss_particle(self, model_trace: Any, guide_trace: Any) -> tuple[float, Tensor]:
        latent = flat_latent_site(model_trace, guide_trace)
        mixture, count = base_of(latent["fn"]), latent["value"].shape[:-1].numel()
        log_ratio: Any = 0.0
        for trace, sign in ((model_trace, 1), (guide_trace, -1)):
            for site in trace.nodes.values():
                if site["type"] == "sample":
                    log_ratio = log_ratio + sign * _by_draw(site["log_prob"], count)
        which = ((mixture.stratum or 0) + torch.arange(count, device=log_ratio.device)) % self.num_modes
        elbo = self.num_modes * (mixture.log_weights.exp()[which] * log_ratio).sum()
        return -torch_item(elbo), -elbo


def _by_draw(log_prob: Tensor, count: int) -> Tensor:
    """Summed over all but the draws, whose plate is the outermost."""
    return log_prob.sum().reshape(1) if count == 1 else log_prob.reshape(count, -1).sum(-1)
