"""Which base of a symmetrised guide is worth its price: a short pilot of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups import Group, group_of
from pyro_symmetric.guides.bounds import Evidence, evidence
from pyro_symmetric.guides.layout import GuideLayout, layout_of
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.guides.unit_blocks import AutoUnitBlocks, unit_positions
from pyro_symmetric.mcmc import log_joint
from pyro_symmetric.weights import Weights

# Bases from the cheapest to the dearest.
BASES: tuple[type[AutoContinuous], ...] = (
    AutoDiagonalNormal,
    AutoUnitBlocks,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)
# Numbers of a covariance beyond which a base isn't tried: a step would cost more than most models do.
LARGEST = 300_000
JUDGED_BY = 256  # draws of the symmetrised ELBO
ERRORS = 3.0  # standard errors by which a gain must exceed zero
APART = 0.9  # of log |G|; if symmetrising adds less, copies overlap
FALL = 0.05  # of the step size, over the pilot


@dataclass(frozen=True)
class Trial:
    """A pilot of one base.

    :param base: the name of its class.
    :param parameters: how many numbers it trains.
    :param evidence: after the pilot, its ELBO, and that of it symmetrised.
    :param seconds: processor time of a step.
    """

    base: str
    parameters: int
    evidence: Evidence
    seconds: float


@dataclass(frozen=True, repr=False)
class GuideSuggestion:
    """A symmetrised guide that suits a model, and why.

    :param guide: as the pilot left it; stock SVI continues the training.
    :param reason: for a person to read.
    :param trials: of all bases that were tried, from the cheapest on.
    """

    guide: AutoSymmetrized
    reason: str
    trials: tuple[Trial, ...]

    def __repr__(self) -> str:
        lines = [f"{'base':<32}{'parameters':>11}{'ELBO':>11}{'symmetrised':>13}{'±':>6}{'ms a step':>11}"]
        for trial in self.trials:
            found = trial.evidence
            lines.append(
                f"{trial.base:<32}{trial.parameters:>11,}{found.elbo:>11.2f}{found.symmetrized_elbo:>13.2f}"
                f"{found.symmetrized_error:>6.2f}{1e3 * trial.seconds:>11.2f}"
            )
        return "\n".join([*lines, self.reason])


def suggest_guide(
    model: Any,
    group: Group | Symmetry,
    *args: Any,
    steps: int = 400,
    num_particles: int = 8,
    learning_rate: float = 0.05,
    least_gain: float = 1.0,
    progress: bool = True,
) -> GuideSuggestion:
    r"""Fit several bases of a symmetrised guide for a few hundred steps, and take the one that is worth its price.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(2)})
    >>> found = ps.suggest_guide(model, group, steps=20, progress=False)
    >>> type(found.guide).__name__
    'AutoSymmetrized'

    A mean-field base is fitted first; independent normals, unit blocks, a low rank and a full rank then all start from
    its moments and take as many steps again, on the symmetrised ELBO, by the default estimator. (The families contain
    the mean-field one, so what they gain is theirs.) From the cheapest on, a base takes over if its symmetrised ELBO is
    higher by ``least_gain``, and by three standard errors. Bases of more than 300 000 numbers aren't tried. The
    evidence bounds of all are kept, so that another choice needs no other pilot.

    The pilot ranks; it doesn't end the training: rich bases often gain more with more steps. If the mean-field base
    itself gained ``least_gain`` by its second round, ``reason`` begins by saying that the pilot hasn't settled.

    :param model: the Pyro model; it must run under :func:`torch.func.vmap`, see :func:`~pyro_symmetric.mcmc.log_joint`.
    :param group: what to average over, or a symmetry.
    :param args: what the model is called with, data included; all data, as the ELBO is that of these.
    :param steps: of each pilot, twice.
    :param num_particles: draws a step.
    :param learning_rate: of Adam at the start; it falls to a twentieth.
    :param least_gain: nats that a dearer base must add.
    :param progress: whether to show a bar.
    :raises ValueError: if the model isn't invariant under the group, or the ELBO stops being finite.
    """
    arguments.whole("steps", steps, 1)
    arguments.whole("num_particles", num_particles, 1)
    arguments.positive("learning_rate", learning_rate)
    arguments.number("least_gain", least_gain, least=0, below=math.inf)
    arguments.flag("progress", progress)
    group = group_of(group).finite
    first = AutoSymmetrized(model, group).setup(*args)
    density = log_joint(model, *args)
    bases = _affordable(layout_of(first), group)
    with tqdm(total=(1 + len(bases)) * steps, desc="pilots", unit="step", disable=not progress) as bar:
        fit = _Fit(density, steps, num_particles, learning_rate, bar)
        fit(first)
        before = evidence(first, density, group, num_samples=JUDGED_BY)
        guides = [_richer(first, base, model, args) for base in bases]
        seconds = [fit(guide) for guide in guides]
    trials = tuple(
        Trial(
            type(guide.base).__name__,
            sum(value.numel() for value in guide.parameters()),
            evidence(guide, density, group, num_samples=JUDGED_BY),
            spent / steps,
        )
        for guide, spent in zip(guides, seconds, strict=True)
    )
    best = _worth_it(trials, least_gain)
    return GuideSuggestion(guides[best], _unsettled(before, trials[0], least_gain) + _reason(trials, best), trials)


# small steps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fit:
    """Adam on the ELBO, its step size falling."""

    density: Callable[[Weights], Tensor]
    steps: int
    num_particles: int
    learning_rate: float
    bar: tqdm

    def __call__(self, guide: AutoSymmetrized) -> float:
        """Train a guide; processor seconds."""
        self.bar.set_description(type(guide.base).__name__)
        began, layout = time.process_time(), layout_of(guide)
        optimizer = torch.optim.Adam(guide.parameters(), lr=self.learning_rate)
        falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, FALL ** (1 / self.steps))
        for _ in range(self.steps):
            q = guide.get_posterior()
            latent = q.rsample((self.num_particles,))
            log_p = self.density(layout.constrain(latent)) + layout.log_det(latent)
            optimizer.zero_grad()
            (q.log_prob(latent) - log_p).mean().backward()
            optimizer.step()
            falling.step()
            self.bar.update()
        if not all(bool(value.isfinite().all()) for value in guide.parameters()):
            raise ValueError(
                f"the pilot of {type(guide.base).__name__} ended with parameters that aren't finite; take a smaller "
                f"learning_rate than {self.learning_rate:g}, or look for data or priors that aren't sensible"
            )
        return time.process_time() - began


def _affordable(layout: GuideLayout, group: Group) -> list[type[AutoContinuous]]:
    """The bases whose covariance has few enough numbers; mean-field always."""
    blocks = unit_positions(layout.action(group)).values()
    sizes = {
        AutoUnitBlocks: sum(len(where) * where.shape[1] ** 2 for where in blocks),
        AutoLowRankMultivariateNormal: layout.dim * round(layout.dim**0.5),
        AutoMultivariateNormal: layout.dim**2,
    }
    return [base for base in BASES if sizes.get(base, 0) <= LARGEST]


def _richer(first: AutoSymmetrized, base: type[AutoContinuous], model: Any, args: tuple[Any, ...]) -> AutoSymmetrized:
    """A guide over another base with the means and deviations of a fitted mean-field one."""
    moments = first.base._loc_scale()
    guide = AutoSymmetrized(model, first.group, base=base, num_starts=1).setup(*args)
    inner: Any = guide.base
    with torch.no_grad():
        inner.loc.copy_(moments[0])
        # A low rank starts with half of the variance in its factors.
        inner.scale = moments[1] * (0.5**0.5 if base is AutoLowRankMultivariateNormal else 1.0)
    return guide


def _worth_it(trials: tuple[Trial, ...], least_gain: float) -> int:
    best = 0
    for number, trial in enumerate(trials):
        ours, theirs = trial.evidence, trials[best].evidence
        error = math.hypot(ours.symmetrized_error, theirs.symmetrized_error)
        if ours.symmetrized_elbo - theirs.symmetrized_elbo > max(least_gain, ERRORS * error):
            best = number
    return best


def _unsettled(before: Evidence, after: Trial, least_gain: float) -> str:
    """A warning if independent normals gained as much by more steps as a dearer base must gain."""
    gain = after.evidence.symmetrized_elbo - before.symmetrized_elbo
    if gain <= max(least_gain, ERRORS * math.hypot(before.symmetrized_error, after.evidence.symmetrized_error)):
        return ""
    return (
        f"The pilot hasn't settled, as independent normals gained {gain:.1f} nats in the second half of their steps: "
        "take more steps or a larger learning_rate before you believe what follows. "
    )


def _reason(trials: tuple[Trial, ...], best: int) -> str:
    chosen, cheapest = trials[best], trials[0]
    found = chosen.evidence
    if best == 0:
        text = "No richer base gains enough: independent normals do."
    else:
        gain = found.symmetrized_elbo - cheapest.evidence.symmetrized_elbo
        text = (
            f"{chosen.base} gains {gain:.1f} nats over independent normals, for "
            f"{chosen.seconds / cheapest.seconds:.1f} times the time of a step."
        )
    if found.log_order == 0:
        return f"{text} The group moves nothing, so that there is nothing to symmetrise."
    added = found.symmetrized_elbo - found.elbo
    if added >= APART * found.log_order:
        apart = "its units lie apart, so that only the evidence changes, and the fit is that of the plain ELBO"
    elif added + found.density_gap < APART * found.log_order:
        apart = "its units overlap, and training on the symmetrised ELBO can change the fit"
    else:
        apart = f"that is a bound, {found.density_gap:.1f} nats are open, so that it isn't known whether units overlap"
    missed = "".join(f" In {doubt}." for doubt in found.doubts if doubt.startswith("training"))
    return f"{text} Symmetrising it adds {added:.1f} of {found.log_order:.1f} nats: {apart}.{missed}"
