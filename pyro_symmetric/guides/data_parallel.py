r"""Variational inference by several processes, each with a part of every mini-batch.

Where rank ``r`` holds :math:`b_r` of a mini-batch's ``B`` rows and scales them by :math:`N / b_r`, as a plate of size
``N`` does, the mean of the ranks' losses weighted by :math:`b_r / B` is the mini-batch's loss,

.. math:: \sum_r \frac{b_r}{B} \Bigl( R - \frac{N}{b_r} \sum_{i \in r} \log p(y_i \mid w) \Bigr)
          = R - \frac{N}{B} \sum_i \log p(y_i \mid w) ,

if all ranks draw the same weights ``w``, so that the rest ``R``, the divergence from the prior with its estimate of
what the symmetrisation adds, is the same everywhere. Gradients follow suit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from pyro import poutine
from pyro.infer.elbo import ELBO
from torch import Tensor

from pyro_symmetric.generators import drawn_seed, seeded


class DataParallel_ELBO(ELBO):
    """An objective whose losses and gradients are those of one process that holds all ranks' rows.

    Start the script below by ``torchrun --nproc-per-node=2 script.py``; on GPUs use the backend ``"nccl"``.

    >>> torch.distributed.init_process_group("gloo")
    >>> pyro.set_rng_seed(0)  # so that all ranks start from the same guide
    >>> model = BayesianModel(net, num_data=len(x))
    >>> guide = AutoSymmetrized(model, group)
    >>> svi = SVI(model, guide, Adam({"lr": 1e-2}), loss=DataParallel_ELBO(Trace_ELBO()))
    >>> for rows in batches:
    ...     part = rows.tensor_split(torch.distributed.get_world_size())[torch.distributed.get_rank()]
    ...     svi.step(x[part], y[part])

    All ranks draw the same weights at every step, from a seed that rank 0 draws; their own generators stay as they
    were. Parameters stay equal as long as they start equal and optimisers do the same everywhere. Parts may differ in
    length, but none may be empty. Without a process group it does the same in this one process.

    :param elbo: the objective of one process: ``Trace_ELBO()``, ``SymmetrizedMeanField_ELBO()`` or another with
        gradients for the guide's parameters.
    :raises ValueError: on all ranks, if the arguments of one hold no rows.
    """

    def __init__(self, elbo: ELBO):
        if not isinstance(elbo, ELBO):
            raise TypeError(f"elbo is a {type(elbo).__name__}; it must be an objective such as Trace_ELBO()")
        super().__init__(num_particles=elbo.num_particles)
        self.elbo: Any = elbo

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The negative ELBO of all ranks' rows; nothing is differentiated."""
        rows = _agreed_rows(args, kwargs)
        with _shared_noise():
            loss = self.elbo.loss(model, guide, *args, **kwargs)
        return float(_weighted_mean(torch.tensor([loss], dtype=torch.float64), rows))

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The same, adding its gradients to the parameters'."""
        rows = _agreed_rows(args, kwargs)
        with _shared_noise(), poutine.trace(param_only=True) as capture:
            loss = self.elbo.loss_and_grads(model, guide, *args, **kwargs)
        sites: list[tuple[str, Any]] = sorted(capture.trace.nodes.items())
        parameters = [site["value"].unconstrained() for _, site in sites]
        return average_gradients(parameters, rows, loss)

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return self.elbo._get_trace(model, guide, args, kwargs)

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "gradients are averaged after they are computed: use SVI, or the inner objective and average_gradients"
        )


def average_gradients(parameters: Any, rows: int = 1, loss: float = 0.0) -> float:
    """Replace each parameter's gradient by its mean over all ranks, weighted by their rows; one exchange for all.

    For training loops of your own: call it between ``loss.backward()`` and the optimiser's step. See
    :class:`DataParallel_ELBO`, which also sees to the ranks' drawing the same weights.

    :param parameters: a guide, or tensors in the same order everywhere; a gradient that is ``None`` counts as 0.
    :param rows: how many rows this rank holds; a rank without any takes part, and its loss and gradients don't count.
    :param loss: this rank's loss.
    :return: the loss, averaged likewise.
    """
    own: list[Tensor] = list(parameters.parameters() if hasattr(parameters, "parameters") else parameters)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
    like = gradients[0] if gradients else torch.zeros((), dtype=torch.float64)
    flat = torch.cat([like.new_tensor([loss], dtype=torch.float64), *(g.flatten().double() for g in gradients)])
    mean = _weighted_mean(flat, rows)
    for parameter, piece in zip(own, mean[1:].split([g.numel() for g in gradients]), strict=True):
        parameter.grad = piece.reshape(parameter.shape).to(parameter)
    return float(mean[0])


# small steps --------------------------------------------------------------------------------------------------------


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _weighted_mean(values: Tensor, rows: int) -> Tensor:
    """Mean over ranks of float64 values, weighted by rows."""
    if not _is_distributed():
        return values
    own = torch.cat([values, values.new_ones(1)])
    packed = _exchangeable(own * rows if rows else torch.zeros_like(own))  # where there are no rows, losses may be NaN
    torch.distributed.all_reduce(packed)
    return packed[:-1] / packed[-1]


class _shared_noise:
    """Random numbers that all ranks share, from a seed that rank 0 draws."""

    def __enter__(self) -> None:
        seed = _exchangeable(torch.tensor([drawn_seed()]))
        if _is_distributed():
            torch.distributed.broadcast(seed, 0)
        self._fork = seeded(int(seed))
        self._fork.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def _exchangeable(values: Tensor) -> Tensor:
    """Where the backend can exchange them: NCCL knows GPUs only."""
    nccl = _is_distributed() and torch.distributed.get_backend() == "nccl"
    return values.to("cuda" if nccl else "cpu")


def _agreed_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many rows this rank's arguments hold.

    :raises ValueError: on all ranks, if one holds none: it couldn't take part, and the others would wait forever.
    """
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 0)
    rows = next((len(value) for value in tensors if len(value) > 0), 0)
    least = _exchangeable(torch.tensor([rows]))
    if _is_distributed():
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    if int(least) == 0:
        whose = "this" if rows == 0 else "another"
        raise ValueError(f"{whose} rank's arguments hold no tensor with rows; give every rank a part of the mini-batch")
    return rows
