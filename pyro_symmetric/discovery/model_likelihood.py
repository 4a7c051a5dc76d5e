r"""Scales and shifts of whole sites that a model's likelihood allows, but its prior
breaks.

They are no symmetry, but chains move slowly along them: the scale between ability and
discrimination in a model of answers, or a constant that is added to all logits. Moves
:math:`\theta_i \to e^{a_i t} \theta_i + b_i t` of the sites :math:`i` leave the
log-likelihood unchanged if the derivatives along them, measured by differences at
random points, cancel. So their exponents :math:`a_i` and :math:`b_i` are the null space
of a small matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.discovery.integer_algebra import echelon, small_integers
from pyro_symmetric.discovery.model_density import ModelDensity
from pyro_symmetric.weights import Weights

STEP = 1e-4  # of a difference
LARGE_STEP = 0.3  # at which a move is verified
NULL = 1e-6  # relative singular value of a move that changes nothing
MOST_MOVES = 24  # scales and shifts of sites that are looked at
SAME = 1e-7  # relative change of a log-likelihood that passes as rounding


class SiteStep(NamedTuple):
    """A scale or a shift of a whole site."""

    site: str
    is_scale: bool

    def act(self, value: Tensor, size: float) -> Tensor:
        """Move values by a step."""
        if self.is_scale:
            return value * torch.tensor(size, dtype=torch.float64, device="cpu").exp()
        return value + size


def moves_of_likelihood(density: ModelDensity) -> dict[str, str]:
    """Return the sites that move in ways which the likelihood allows, with a line on
    each.
    """
    observed = [n for n, term in enumerate(density.names) if term not in density.shapes]
    steps = _steps(density, observed)
    if not 0 < len(steps) <= MOST_MOVES or density.dtype is not torch.float64:
        return {}
    points = density.points_of_scale(len(steps) + 3, 1.0)
    columns = []
    for step in steps:
        forward = density.terms(_moved(points, {step: STEP})).values
        back = density.terms(_moved(points, {step: -STEP})).values
        columns.append((forward - back)[:, observed].flatten() / (2 * STEP))
    slopes = torch.stack(columns, 1)
    if not slopes.isfinite().all():
        return {}
    _, sizes, directions = torch.linalg.svd(slopes, full_matrices=False)
    null = directions[sizes <= NULL * sizes.max()]
    lines = dict[str, str]()
    for row in echelon(null.numpy())[0]:
        exponents = dict(zip(steps, small_integers(row), strict=False))
        for site, line in _lines(density, points, observed, exponents).items():
            lines[site] = f"{lines[site]}; {line}" if site in lines else line
    return lines


def _steps(density: ModelDensity, observed: list[int]) -> list[SiteStep]:
    """Return the scales and shifts that keep sites in their support, of sites on which
    the likelihood depends.
    """
    points = density.generic
    elsewhere = density.points_of_scale(len(density.before.values), 1.0)
    steps = []
    for site, value in points.items():
        after = density.terms({**points, site: elsewhere[site]}).values
        changes = (after - density.before.values)[:, observed]
        if not changes.any():
            continue
        if density.is_real(site):
            steps += [SiteStep(site, True), SiteStep(site, False)]
        elif density.site_inside(site, torch.cat([value / 3, value * 3])).all():
            steps.append(SiteStep(site, True))
    return steps


def _moved(points: Weights, sizes: dict[SiteStep, float]) -> Weights:
    moved = dict(points)
    for step, size in sizes.items():
        moved[step.site] = step.act(moved[step.site], size)
    return moved


def _lines(
    density: ModelDensity,
    points: Weights,
    observed: list[int],
    exponents: dict[SiteStep, int],
) -> dict[str, str]:
    """Return a line for each site of a move, if a large step confirms it."""
    sizes = {step: LARGE_STEP * power for step, power in exponents.items() if power}
    if not sizes:
        return {}
    before = density.terms(points)
    after = density.terms(_moved(points, sizes))
    changes = (after.values - before.values).abs()
    allowed = SAME * (1 + before.norms)
    if not (changes <= allowed)[:, observed].all():
        return {}
    broken = [name for name in density.changed_terms(after, before) if name]
    if not broken:
        return {}
    names = [f"{step.site}^{exponents[step]}" for step in sizes if step.is_scale]
    shifted = [step.site for step in sizes if not step.is_scale]
    moves = [f"scales of {', '.join(names)}"] * bool(names)
    moves += [f"a shift of {', '.join(shifted)}"] * bool(shifted)
    line = (
        f"the likelihood allows {' with '.join(moves)}, broken by the prior of "
        f"{', '.join(broken)}: chains move slowly along it"
    )
    return dict.fromkeys((step.site for step in sizes), line)
