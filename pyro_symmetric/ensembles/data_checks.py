"""Do the data fit the network and its loss? Asked once, before thousands of members meet the answer.

By itself a loss broadcasts targets of another shape and scores labels that can't be; training would go on to the end.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pyro_symmetric._process import forked
from pyro_symmetric.calls import described, input_problem
from pyro_symmetric.ensembles.members import evaluating

FEW_ROWS = 3
IGNORED = -100  # the label of rows that cross_entropy leaves out


def require_data(net: nn.Module, loss: Any, x: Tensor, y: Tensor) -> None:
    """Ask of a few rows, in eval mode, whether ``net`` takes ``x`` and ``loss`` can score ``y``.

    :param loss: the name of a loss; a function of the user's own takes what it likes, NaN included, but it mustn't
        pair every output with every target.
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
    if not isinstance(outputs, Tensor):
        return
    if not isinstance(loss, str):
        _require_no_crossing(loss, outputs, y[:FEW_ROWS])
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


def _require_no_crossing(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, y: Tensor) -> None:
    """Refuse a function that broadcasts outputs ``(B, 1)`` against targets ``(B,)``, or the other way round."""
    rows = len(y)
    if rows < 2 or {tuple(outputs.shape), tuple(y.shape)} != {(rows, 1), (rows,)}:
        return
    with forked(), warnings.catch_warnings(record=True) as told, _Crossings(rows) as mode, torch.enable_grad():
        warnings.simplefilter("always")
        with contextlib.suppress(Exception):  # which training shows as it is
            loss(outputs.detach().requires_grad_(), y)
    if mode.found or any("target size" in str(warning.message) for warning in told):  # as PyTorch's own losses say
        raise ValueError(
            f"loss pairs every output with every target: outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(y.shape)} broadcast to {(rows, rows)}; pass targets of the outputs' shape, or squeeze in the loss"
        )


class _Crossings(TorchFunctionMode):
    """Notices an operation that makes ``(B, B)`` of outputs, which require a gradient, and targets, which don't."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows, self.found = rows, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and tuple(result.shape) == (self.rows, self.rows):
            given = [part for part in (*args, *(kwargs or {}).values()) if isinstance(part, Tensor)]
            shapes = {tuple(part.shape) for part in given}
            sides = {part.requires_grad for part in given}
            self.found |= sides == {True, False} and shapes == {(self.rows, 1), (self.rows,)}
        return result


def _finite_rows(value: Tensor) -> Tensor:
    """Which rows have finite entries only."""
    return torch.isfinite(value.reshape(len(value), -1)).all(-1)


def _shape(outputs: Tensor, y: Tensor) -> tuple[int, ...]:
    return (len(y), *outputs.shape[1:])


def _extent(y: Tensor) -> str:
    return f"{y.min().item():g} to {y.max().item():g}"
