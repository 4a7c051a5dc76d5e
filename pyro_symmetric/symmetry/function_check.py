"""Is a log-density, of which only values are known, invariant under a group? If not, under which factors.

As :mod:`~pyro_symmetric.symmetry.model_check`, for a function of weights in place of a model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_symmetric.generators import kept
from pyro_symmetric.symmetry.factored import moved_weights
from pyro_symmetric.symmetry.finite import AnyFiniteGroup
from pyro_symmetric.symmetry.joint_density import Point
from pyro_symmetric.symmetry.model_check import ModelVerification, broken_factors
from pyro_symmetric.symmetry.weights import Weights

# How many of the draws are moved; all of them show how large the noise is.
MOVED = 2
# Changes up to so many times the largest noise seen pass, and up to so many nats, by which evidence may err.
NOISE, NATS = 10.0, 0.01
# How often a density is asked again that answers the same draws differently: dropout may give one answer a few times.
REPEATS = 8


def check_function(
    group: AnyFiniteGroup, log_joint: Callable[[Weights], Tensor], draws: Weights, nearby: Weights
) -> ModelVerification:
    """Compare a log-density before and after elements of each factor.

    What passes is measured, not guessed: by how much the values change where the same draws are asked for again (which
    a function that subsamples its data, or is otherwise random, answers differently), or ``nearby``.

    :param log_joint: weights of batch shape ``(S,)`` -> ``(S,)``.
    :param draws: weights of batch shape ``(S,)`` at which the density matters.
    :param nearby: the same but for the last digit of each number.
    """
    with kept(), torch.no_grad():
        density = FunctionDensity(log_joint, draws, nearby)
        return ModelVerification(broken_factors(group, density, density.points, explain=True), len(density.points))


class FunctionDensity:
    """A log-density as a function of weights, with the noise of its values."""

    def __init__(self, log_joint: Callable[[Weights], Tensor], draws: Weights, nearby: Weights):
        self._log_joint = log_joint
        values = self._values(draws)
        others = [self._values(draws), self._values(nearby)]
        if not torch.equal(others[0], values):
            others += [self._values(draws) for _ in range(REPEATS)]
        noise = torch.cat([(other - values).abs() for other in others])
        digits = torch.finfo(min((v.dtype for v in draws.values()), key=lambda dtype: torch.finfo(dtype).bits)).eps
        sizes = torch.cat([noise, digits * values.abs()])
        self._allowed = NATS + NOISE * float(sizes[sizes.isfinite()].amax()) if bool(sizes.isfinite().any()) else NATS
        rows = [{site: value[row] for site, value in draws.items()} for row in range(min(MOVED, len(values)))]
        self.points = [Point(row, {}, {"": value}) for row, value in zip(rows, values, strict=False)]

    def _values(self, weights: Weights) -> Tensor:
        return torch.as_tensor(self._log_joint(weights)).detach().double().cpu()

    def change(self, point: Point, element: object) -> tuple[bool, float, tuple[str, ...]]:
        """Whether an element changes the density, and by how many nats; of which sites, a function can't tell."""
        device = next(iter(point.weights.values())).device
        # Running statistics may be missing: the density itself says whether it minds.
        moved = moved_weights(element.to(device), point.weights, ())  # type: ignore[attr-defined]
        before = float(point.log_probs[""])
        try:
            after = float(self._values({site: value.unsqueeze(0) for site, value in moved.items()}))
        except ValueError:  # the draw itself was accepted, but a distribution refuses the moved weights
            after = float("nan")
        if before == after or before != before:
            return False, 0.0, ()
        size = abs(after - before) if after == after else float("inf")
        return size > self._allowed, size, ()
