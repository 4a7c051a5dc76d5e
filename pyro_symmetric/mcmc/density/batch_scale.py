"""Does a model count the rows of a mini-batch as often as they must be, ``N / B`` times?

A likelihood that is scaled wrongly against the prior is the most common error with mini-batches, and a silent one: the
sampler draws from another posterior without any complaint.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from pyro_symmetric.placement import as_tensor

CLOSE = 1e-3


def warn_of_batch_scale(observed: Sequence[Any], batch_size: int, rows: int) -> None:
    """Warn of observed sites that count a mini-batch of ``batch_size`` of ``rows`` rows too often or too seldom.

    A further factor on top of the right one, a temperature say, is taken as meant, unless it is ``N / B`` once more.

    :param observed: the observed sites of a trace of the model on a mini-batch.
    """
    wanted = rows / batch_size
    of_rows = [site for site in observed if batch_size in (*site["fn"].batch_shape, *site["fn"].event_shape)]
    if not of_rows and all(_scale(site) == 1 for site in observed):
        _warn("no observed site is scaled so", 1.0, batch_size, rows)
    for site in of_rows:
        scale, by_plates = _scale(site), _scale_by_plates(site)
        by_hand = scale / by_plates
        if _equal(scale, wanted) or (_equal(by_plates, wanted) and not _equal(by_hand, wanted)):
            continue
        sizes = [frame for frame in site["cond_indep_stack"] if frame.size == batch_size and frame.full_size != rows]
        hint = f" (its plate {sizes[0].name!r} has size {sizes[0].full_size})" if sizes else ""
        _warn(f"the site {site['name']!r} is scaled by {scale:.4g}{hint}", scale, batch_size, rows)


def warn_of_plate_scale(observed: Sequence[Any]) -> None:
    """Warn of observed sites in plates that draw a subsample, and so scale them, that are scaled once more by hand."""
    for site in observed:
        by_plates, scale = _scale_by_plates(site), _scale(site)
        if not _equal(by_plates, 1.0) and _equal(scale / by_plates, by_plates):
            warnings.warn(
                f"the site {site['name']!r} counts {scale:.4g} times: its plate already counts its subsample "
                f"{by_plates:.4g} times, and a scale of the same size comes on top. Leave that out",
                UserWarning,
                stacklevel=2,
            )


def _warn(what: str, scale: float, batch_size: int, rows: int) -> None:
    wanted = rows / batch_size
    ratio = scale / wanted
    error = f"{1 / ratio:.3g} times too little" if ratio < 1 else f"{ratio:.3g} times too much"
    warnings.warn(
        f"mini-batches hold {batch_size} of {rows} rows, so each row must count {wanted:.4g} times, but {what}: the "
        f"likelihood counts {error} against the prior. Put the data in pyro.plate(name, {rows}, subsample=...), or "
        f"under poutine.scale(scale={wanted:.4g})",
        UserWarning,
        stacklevel=2,
    )


def _scale(site: Any) -> float:
    return float(as_tensor(site["scale"]).double().mean())


def _scale_by_plates(site: Any) -> float:
    """The scale that the site's plates give it, for what they leave out."""
    frames = [frame for frame in site["cond_indep_stack"] if frame.full_size is not None and frame.size > 0]
    return math.prod(int(frame.full_size) / int(frame.size) for frame in frames)


def _equal(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= CLOSE * abs(wanted)
