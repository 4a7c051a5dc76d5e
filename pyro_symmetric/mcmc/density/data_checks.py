"""Do the data fit a Bayesian network? Asked once, of a few rows, before all chains meet the answer.

Labels out of range, above all, would pass for anything: be left out (-100), or stop a GPU for good.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.calls import described, input_problem
from pyro_symmetric.likelihoods import (
    CategoricalLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from pyro_symmetric.models import BayesianModel

FEW_ROWS = 2


def require_data(model: BayesianModel, x: Any, y: Any) -> None:
    """:raises TypeError: if ``x`` or ``y`` is no tensor of rows.
    :raises ValueError: if the network can't take ``x``, or the likelihood can't score ``y``: what was found, and what
        would be right.
    """
    for name, value in {"x": x, "y": y}.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise TypeError(f"{name} is {described(value)}; it must be a tensor whose first axis are the rows")
        if name == "y" and value.is_complex():
            raise ValueError("y holds complex numbers, of which the imaginary part would be lost; pass real targets")
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} rows but y has {len(y)}; they must be equally many")
    if x.device != y.device:
        raise ValueError(f"y lies on {y.device}, but x on {x.device}; move one of them, or pass device=")
    if not len(x):
        raise ValueError("x has no rows; there are no data to learn from")
    rows = x[:FEW_ROWS]
    if input_problem(model.net, (rows,)):
        rows = x  # a network may be made for so many rows and no others
        if problem := input_problem(model.net, (rows,)):
            raise ValueError(f"x doesn't fit: {problem}")
    known = (CategoricalLikelihood, GaussianLikelihood)
    if type(model.likelihood) in known:  # others may have targets of any shape
        with torch.no_grad():
            outputs = model.call({name: value.detach() for name, value in model.net.named_parameters()}, rows)
        _require_targets(model.likelihood, outputs, len(x), y)


def _require_targets(likelihood: Likelihood, outputs: Tensor, num_rows: int, y: Tensor) -> None:
    """:param outputs: of a few rows, ``(N, ..., D)``."""
    categorical, size = isinstance(likelihood, CategoricalLikelihood), outputs.shape[-1]
    if categorical and size < 2:
        raise ValueError("the network has one output, but class labels need an output for each class, at least 2")
    means = likelihood.mean(outputs).shape
    own = means[1:-1] if categorical or means[-1] == 1 else means[1:]
    if likelihood.targets(y).shape != (num_rows, *own):
        raise ValueError(
            f"y has shape {tuple(y.shape)}, but the network's outputs are {(num_rows, *outputs.shape[1:])}, so it must "
            f"have shape {(num_rows, *own)}"
        )
    if not categorical:
        return
    if y.is_floating_point() or y.is_complex():
        raise ValueError(f"y is {described(y)}; class labels are whole numbers: pass y.long()")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= size:
        raise ValueError(
            f"y holds labels from {low} to {high}, but the network has {size} outputs, so they must lie between 0 and "
            f"{size - 1}"
        )
