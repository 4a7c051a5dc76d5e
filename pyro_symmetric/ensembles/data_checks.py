"""Do the data fit the network and its loss? Asked once, before thousands of members meet the answer.

By itself a loss broadcasts targets of another shape and scores labels that can't be; training would go on to the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric.calls import described, input_problem
from pyro_symmetric.ensembles.members import evaluating

FEW_ROWS = 2
IGNORED = -100  # the label of rows that cross_entropy leaves out


def require_data(net: nn.Module, loss: Any, x: Tensor, y: Tensor) -> None:
    """Ask of a few rows, in eval mode, whether ``net`` takes ``x`` and ``loss`` can score ``y``.

    :param loss: the name of a loss; of a function of the user's own nothing is asked, targets may hold NaN then.
    :raises ValueError: if they don't fit: what was found, and what would be right.
    """
    if isinstance(loss, str) and (bad := int((~_finite_rows(y)).sum())):
        raise ValueError(f"data: {bad} rows of the targets aren't finite; fill or remove them")
    with evaluating(net), torch.no_grad():
        if problem := input_problem(net, (x[:FEW_ROWS],)):
            raise ValueError(f"data: the inputs don't fit: {problem}")
        outputs, missing = net(x[:FEW_ROWS]), ~_finite_rows(x)
        if bool(missing.any()) and not bool(_finite_rows(net(x[missing][:FEW_ROWS])).all()):
            raise ValueError(f"data: {int(missing.sum())} rows of the inputs aren't finite; fill or remove them")
    if not isinstance(loss, str) or not isinstance(outputs, Tensor):
        return
    if loss == "cross_entropy":
        _require_labels(outputs, y)
    else:
        _require_values(outputs, y)
    if loss == "binary_cross_entropy" and not bool(((y >= 0) & (y <= 1)).all()):
        raise ValueError(f"data: the targets lie from {_extent(y)}; for binary_cross_entropy they must lie in 0 to 1")


def _require_labels(outputs: Tensor, y: Tensor) -> None:
    """Class labels for outputs ``(N, classes, ...)``, or their probabilities."""
    classes, wanted = outputs.shape[1] if outputs.dim() > 1 else 1, (len(y), *outputs.shape[2:])
    if classes < 2:
        raise ValueError(
            f"the network's outputs are {_shape(outputs, y)}, but cross_entropy needs an output for each class, at "
            "least 2; for a single logit there is loss='binary_cross_entropy'"
        )
    if y.is_floating_point():
        if y.shape[1:] == outputs.shape[1:]:
            return
        raise ValueError(f"data: the targets are {described(y)}; class labels are whole numbers: pass y.long()")
    if tuple(y.shape) != wanted:
        raise ValueError(f"data: the targets have shape {tuple(y.shape)}; class labels must have shape {wanted}")
    scored = y[y != IGNORED]
    if len(scored) and (int(scored.min()) < 0 or int(scored.max()) >= classes):
        raise ValueError(
            f"data: the targets hold labels from {_extent(scored)}, but the network has {classes} outputs, so they "
            f"must lie between 0 and {classes - 1}"
        )


def _require_values(outputs: Tensor, y: Tensor) -> None:
    """Targets like the outputs, whose last axis of one may be left out."""
    wanted = {outputs.shape[1:], outputs.shape[1:-1] if outputs.shape[-1:] == (1,) else outputs.shape[1:]}
    if y.shape[1:] not in wanted:
        raise ValueError(
            f"data: the targets have shape {tuple(y.shape)}, but the network's outputs are {_shape(outputs, y)}; they "
            "must be alike" + ("; pass y.squeeze(-1)" if y.shape[1:] == (*outputs.shape[1:], 1) else "")
        )


def _finite_rows(value: Tensor) -> Tensor:
    """Which rows have finite entries only."""
    return torch.isfinite(value.reshape(len(value), -1)).all(-1)


def _shape(outputs: Tensor, y: Tensor) -> tuple[int, ...]:
    return (len(y), *outputs.shape[1:])


def _extent(y: Tensor) -> str:
    return f"{y.min().item():g} to {y.max().item():g}"
