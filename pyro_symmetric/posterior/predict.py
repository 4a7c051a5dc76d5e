r"""Predictions of many weights: chunked over draws and rows, for networks and for any Pyro model.

For draws :math:`w_s` of a posterior, the outputs :math:`f_{w_s}(x)`, the expected targets
:math:`\mathbb E[y \mid x, w_s]`, or draws :math:`y_s \sim p(y \mid x, w_s)` of the posterior predictive.

:class:`pyro.infer.Predictive` runs the model once for each draw and keeps every trace. Here the network, or the model's
trace, is mapped over draws by :func:`torch.func.vmap`, in chunks whose activations stay small, and only what is asked
for is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.predictors import NetworkPredictor, TracedPredictor
from pyro_symmetric.posterior.statistics import evenly_spaced, slices
from pyro_symmetric.weights import batch_shape, require_sites

Kind = Literal["outputs", "mean", "samples", "discrete", "log_likelihood"]
GUIDE_DRAWS = 100
# Numbers in the largest activation of a chunk: on a CPU what its cache holds, elsewhere what keeps the device busy.
CPU_ENTRIES, DEVICE_ENTRIES = 2**21, 2**26
WEIGHT_ENTRIES = 2**24
LEAST_DRAWS, MOST_DRAWS = 8, 1024


@torch.no_grad()
def predict(
    posterior: Any,
    model: nn.Module | Callable[..., Any],
    *args: Any,
    kind: Kind = "outputs",
    num_samples: int | None = None,
    average: bool = False,
    progress: bool = True,
    **kwargs: Any,
) -> Any:
    """The predictions of each draw of a posterior.

    >>> model, x = ps.BayesianModel(nn.Linear(2, 3)), torch.randn(7, 2)
    >>> weights = {name: prior.sample((400,)) for name, prior in model.priors().items()}
    >>> ps.predict(weights, model, x, kind="mean").shape  # class probabilities
    torch.Size([400, 7, 3])

    :param posterior: a ``Posterior``, whose draws count chain after chain; weights, whose batch shape the result keeps;
        or a guide of this library (of another, pass ``sample_posterior(guide, (100,))``). Running statistics among them
        take the place of the network's own.
    :param model: a :class:`BayesianModel`; a network, whose parameters' names are the sites; or any Pyro model.
    :param args: what it is called with: inputs, first axis rows. Targets are left out, or drawn anew where given.
    :param kind: ``"outputs"`` of the network, or what the Pyro model returns; ``"mean"``, the expected target given the
        draw (class probabilities, the regression function); ``"samples"``, a target for each draw; ``"discrete"``, the
        sites that a sampler summed out, jointly given the draw and the data, as :func:`pyro.infer.infer_discrete`;
        ``"log_likelihood"`` of each observation, untempered: observed site -> ``batch_shape + observations``.
    :param num_samples: how many draws, evenly spaced along one batch axis; by default all, of a guide 100.
    :param average: of means over draws as they are made, in float64, so that memory holds one prediction.
    :return: ``batch_shape + (N, ...)`` where the draws are. Of a ``BayesianModel`` means and samples end with the axis
        of outputs or classes, sampled labels don't. Of a Pyro model, for all but ``"outputs"``: site -> such a tensor,
        for each site that ``posterior`` doesn't give and each deterministic one.
    """
    arguments.one_of("kind", kind, get_args(Kind))
    if average and kind != "mean":
        raise ValueError(f"average=True is for kind='mean': the average of {kind} says nothing of the posterior")
    arguments.whole("num_samples", num_samples, 1, none="all")
    weights = posterior
    if hasattr(posterior, "sample_posterior"):
        weights, num_samples = posterior.sample_posterior((num_samples or GUIDE_DRAWS,)), None
    elif hasattr(posterior, "get_samples"):
        weights = posterior.get_samples()
    arguments.weights("posterior", weights, "a Posterior, a guide of this library, or draws of another")
    predictor: NetworkPredictor | TracedPredictor
    if isinstance(model, nn.Module) and (
        isinstance(model, BayesianModel) or any(name in weights for name, _ in model.named_parameters())
    ):  # a network's; if some of its weights are missing they are named
        predictor = NetworkPredictor(model, args, kwargs, kind, weights)
    else:
        device = getattr(getattr(posterior, "source", None), "device", None)
        predictor = TracedPredictor(model, args, kwargs, kind, weights, device)

    require_sites(weights, predictor.site_shapes)
    batch = batch_shape(weights, predictor.site_shapes)
    draws = {s: weights[s].detach().reshape(-1, *shape) for s, shape in predictor.site_shapes.items()}
    if num_samples is not None:
        if len(batch) != 1 or num_samples > batch[0]:
            raise ValueError(
                f"num_samples is {num_samples}, of weights of batch shape {tuple(batch)}, one axis of more"
            )
        draws = {s: value[evenly_spaced(len(value), num_samples).to(value.device)] for s, value in draws.items()}
        batch = torch.Size([num_samples])

    count, place, num_rows = batch.numel(), next(iter(draws.values())).device, predictor.num_rows
    draws_at_once, rows_at_once = _chunks(place, predictor)
    rows = [()] if num_rows is None else [(part,) for part in slices(num_rows, rows_at_once)]
    totals, spec = list[Tensor](), None
    with tqdm(total=count, desc="predictions", disable=not progress, delay=1.0) as bar:
        for part in slices(count, draws_at_once):
            own = {site: value[part].to(predictor.device, predictor.dtype) for site, value in draws.items()}
            for some in rows:
                leaves, spec = tree_flatten(predictor(own, *some))
                totals = totals or [_room(leaf, count, num_rows, average, place) for leaf in leaves]
                for total, leaf in zip(totals, leaves, strict=True):
                    if average:
                        total[some] += leaf.sum(0, dtype=total.dtype).to(place)
                    else:
                        total[part, *some] = leaf.to(place)
            bar.update(part.stop - part.start)
    if spec is None or not totals:
        raise ValueError("there is nothing to predict: the posterior holds no draws, the data no rows or no targets")
    return tree_unflatten([t / count if average else t.reshape(*batch, *t.shape[1:]) for t in totals], spec)


def _room(leaf: Tensor, count: int, num_rows: int | None, average: bool, place: torch.device) -> Tensor:
    """The room for all of a result, of which a part is at hand."""
    shape = leaf.shape[1:] if num_rows is None else (num_rows, *leaf.shape[2:])
    if average:
        return torch.zeros(shape, dtype=torch.float64, device=place)
    return torch.empty((count, *shape), dtype=leaf.dtype, device=place)


def _chunks(place: torch.device, predictor: NetworkPredictor | TracedPredictor) -> tuple[int, int]:
    """The numbers of draws and rows to take at once, from the numbers that a row of one draw meets, about."""
    entries = CPU_ENTRIES if (predictor.device or place).type == "cpu" else DEVICE_ENTRIES
    fitting = entries // (predictor.row_entries * max(1, predictor.num_rows or 1))
    numbers = max(1, sum(shape.numel() for shape in predictor.site_shapes.values()))
    draws = max(1, min(max(LEAST_DRAWS, min(MOST_DRAWS, fitting)), WEIGHT_ENTRIES // numbers))
    return draws, max(1, entries // (draws * predictor.row_entries))
