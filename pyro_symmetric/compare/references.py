"""Draws beside a reference posterior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from pyro_symmetric import arguments
from pyro_symmetric.compare.distances import marginal_wasserstein, mmd
from pyro_symmetric.compare.frames import common_frame
from pyro_symmetric.compare.results import DistanceResult
from pyro_symmetric.compare.scores import total_variation
from pyro_symmetric.posterior.posterior import Draws, Posterior, samples_of
from pyro_symmetric.posterior.statistics import evenly_spaced
from pyro_symmetric.references import Reference, reference
from pyro_symmetric.store import PathLike
from pyro_symmetric.weights import (
    Weights,
    first_value,
    map_values,
    require_finite,
    select_rows,
)

if TYPE_CHECKING:
    import pandas as pd

LEAST = 50  # draws that can be compared
Distances = dict[str, DistanceResult]


def against_reference(
    draws: Draws, name: str, root: PathLike | None = None
) -> pd.DataFrame:
    """Measure how far draws are from a reference posterior, modulo its symmetry.

    The draws, at most half as many as the reference's and evenly spaced, are compared
    with both halves of the reference; shown are the means of both distances. The column
    ``noise floor`` holds the distances between one half and as many draws of the other:
    what is near it can't be told from the reference by so many draws. Draws count as
    independent; thin chains that aren't nearly so.

    :param draws: a ``Posterior``, or site -> tensor or array ``(S, *site_shape)`` of
        any library, in any precision, with the sites of the reference.
    :param name: of the reference, see :func:`~pyro_symmetric.datasets.reference`.
    :param root: the folder that holds it.
    :returns: a row for each: the squared MMD of the weights (unbiased, so that it may
        be below 0), the mean Wasserstein distance of single weights, in their unit, and
        the mean total variation of predictions.
    :raises ValueError: if sites or shapes differ from the reference's, a draw isn't
        finite, or there are fewer than :data:`LEAST`.
    """
    import pandas as pd  # takes half a second

    target = reference(name, root)
    samples = dict(samples_of(target.posterior))
    halves = [select_rows(samples, slice(half, None, 2)) for half in (0, 1)]
    compared = _like(samples, draws, name)
    count = len(first_value(compared))
    other_half = select_rows(
        halves[1], evenly_spaced(len(first_value(halves[1])), count)
    )
    floor = _distances(halves[0], other_half, target)
    measured = [_distances(half, compared, target, floor) for half in halves]
    table = pd.DataFrame(
        {
            "distance": {
                title: (measured[0][title].value + measured[1][title].value) / 2
                for title in floor
            },
            "noise floor": {title: result.value for title, result in floor.items()},
        }
    )
    return table.rename_axis(f"against {name}, {count:,} draws")


def _like(samples: Weights, draws: Draws, name: str) -> Weights:
    """Return draws with the sites, devices and dtypes of a reference's, at most half as
    many."""
    if not isinstance(draws, Posterior):
        arguments.instance("draws", draws, Mapping, "a Posterior, or sites with draws")
        draws = map_values(lambda value: torch.as_tensor(value, device="cpu"), draws)
    shapes = map_values(lambda value: value.shape[1:], samples)
    flat = samples_of(draws, "draws", shapes)
    if missing := sorted(samples.keys() - flat.keys()):
        raise ValueError(
            f"draws lack {missing}; the sites of {name!r} are {sorted(samples)}"
        )
    alike = {site: flat[site].to(value) for site, value in samples.items()}
    require_finite(alike, "draws")
    total, half = len(first_value(alike)), len(first_value(samples)) // 2
    if total < LEAST:
        raise ValueError(f"draws are {total}; at least {LEAST} can be compared")
    return select_rows(alike, evenly_spaced(total, half))


def _distances(
    p: Weights, q: Weights, target: Reference, floor: Distances | None = None
) -> Distances:
    """Measure all distances; with the kernels of earlier ones, if there are any."""
    framed = common_frame(p, q, target.symmetry)
    kernels = None if floor is None else floor["squared MMD"]
    predict = target.problem.predict
    return {
        "squared MMD": mmd(*framed, bandwidths=kernels),
        "Wasserstein": marginal_wasserstein(*framed),
        "predictions": total_variation(predict(p), predict(q)),
    }
