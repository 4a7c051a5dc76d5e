"""Do data fit a Bayesian network, and do mini-batches count as often as they must, ``N / B`` times?

Labels out of range would pass for anything: be left out (-100), or stop a GPU for good. A likelihood that is scaled
wrongly against the prior draws from another posterior without any complaint.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.calls import described, input_problem
from pyro_symmetric.likelihoods import CategoricalLikelihood, GaussianLikelihood
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.placement import as_tensor

ROWS = "rows"  # the name of mini-batches that are cut from the arguments, rather than by a plate
FEW_ROWS = 2
CLOSE = 1e-3


def require_data(model: BayesianModel, x: Any, y: Any) -> None:
    """Check a few rows, before all chains meet them.

    :raises TypeError: if ``x`` or ``y`` is no tensor of rows.
    :raises ValueError: if the network can't take ``x``, or the likelihood can't score ``y``.
    """
    for name, value in {"x": x, "y": y}.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise TypeError(f"{name} is {described(value)}; it must be a tensor whose first axis are the rows")
    if y.is_complex():
        raise ValueError("y holds complex numbers, of which the imaginary part would be lost; pass real targets")
    if len(x) != len(y) or not len(x):
        raise ValueError(f"x has {len(x)} rows but y has {len(y)}; they must be equally many, and some")
    rows = x[:FEW_ROWS]
    if input_problem(model.net, rows):
        rows = x  # a network may be made for so many rows and no others
        if problem := input_problem(model.net, rows):
            raise ValueError(f"x doesn't fit: {problem}")
    categorical = type(model.likelihood) is CategoricalLikelihood
    if not categorical and type(model.likelihood) is not GaussianLikelihood:
        return  # which may have targets of any shape
    with torch.no_grad():
        found = model.call({name: value.detach() for name, value in model.net.named_parameters()}, rows)
    size = found.shape[-1]
    if categorical and size < 2:
        raise ValueError("the network has one output, but class labels need an output for each class, at least 2")
    shape = (len(x), *(found.shape[1:-1] if categorical or size == 1 else found.shape[1:]))
    if model.likelihood.targets(y).shape != shape:
        outputs = (len(x), *found.shape[1:])
        raise ValueError(f"y has shape {tuple(y.shape)}; of outputs {outputs} it must have shape {shape}")
    if categorical and y.is_floating_point():
        raise ValueError(f"y is {described(y)}; class labels are whole numbers: pass y.long()")
    if categorical and not 0 <= int(y.min()) <= int(y.max()) < size:
        raise ValueError(f"y holds labels from {int(y.min())} to {int(y.max())}, but the network has {size} outputs")


def require_batch_size(batch_size: int, rows: int) -> None:
    """:raises ValueError: if there aren't so many rows."""
    if not 1 <= batch_size <= rows:
        raise ValueError(f"batch_size is {batch_size}; it must lie between 1 and the {rows} rows of the data")


def warn_of_batch_scale(observed: Sequence[Any], batch_size: int, rows: int) -> None:
    """Warn of observed sites that count a mini-batch of ``batch_size`` of ``rows`` rows too often or too seldom.

    A further factor on top of the right one, a temperature say, is taken as meant, unless it is ``N / B`` once more.
    """
    wanted, found = rows / batch_size, list[tuple[str, float]]()
    of_rows = [site for site in observed if batch_size in (*site["fn"].batch_shape, *site["fn"].event_shape)]
    if not of_rows and all(_scale(site) == 1 for site in observed):
        found.append(("no observed site is scaled so", 1.0))
    for site in of_rows:
        frames = [frame for frame in site["cond_indep_stack"] if frame.full_size is not None and frame.size > 0]
        scale, by_plates = _scale(site), math.prod(int(frame.full_size) / int(frame.size) for frame in frames)
        if not _equal(scale, wanted) and (not _equal(by_plates, wanted) or _equal(scale / by_plates, wanted)):
            found.append((f"the site {site['name']!r} is scaled by {scale:.4g}", scale))
    for what, scale in found:
        error = f"{wanted / scale:.3g} times too little" if scale < wanted else f"{scale / wanted:.3g} times too much"
        warnings.warn(
            f"mini-batches hold {batch_size} of {rows} rows, so each row must count {wanted:.4g} times, but {what}: "
            f"the likelihood counts {error} against the prior. Put the data in pyro.plate(name, {rows}, "
            f"subsample=...), or under poutine.scale(scale={wanted:.4g})",
            UserWarning,
            stacklevel=2,
        )


def _scale(site: Any) -> float:
    return float(as_tensor(site["scale"]).double().mean())


def _equal(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= CLOSE * abs(wanted)
