r"""Predictions of many weights: chunked over draws and rows, for networks and for any Pyro model.

For draws :math:`w_s` of a posterior, the outputs :math:`f_{w_s}(x)`, the expected targets
:math:`\mathbb E[y \mid x, w_s]`, or draws :math:`y_s \sim p(y \mid x, w_s)` of the posterior predictive.

:class:`pyro.infer.Predictive` runs the model once for each draw and keeps every trace. Here the network, or the model's
trace, is mapped over draws by :func:`torch.func.vmap`, in chunks whose activations stay small, and only what is asked
for is kept. Targets are drawn after the map, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.predictors import NetworkPredictor, TracedPredictor
from pyro_symmetric.posterior.statistics import evenly_spaced
from pyro_symmetric.weights import Weights, batch_shape, require_sites

Predictor = NetworkPredictor | TracedPredictor
Kind = Literal["outputs", "mean", "samples", "discrete"]
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
    draw_chunk: int | None = None,
    row_chunk: int | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Any:
    """The predictions of each draw of a posterior.

    >>> model, x = ps.BayesianModel(nn.Linear(2, 3)), torch.randn(7, 2)
    >>> weights = {name: prior.sample((400,)) for name, prior in model.priors().items()}
    >>> ps.predict(weights, model, x).shape  # logits
    torch.Size([400, 7, 3])
    >>> ps.predict(weights, model, x, kind="mean", average=True).shape  # class probabilities
    torch.Size([7, 3])
    >>> ps.predict(weights, model, x, kind="samples", num_samples=50).shape
    torch.Size([50, 7])

    :param posterior: a ``Posterior``, whose draws count chain after chain; weights of any batch shape, which the result
        keeps (``posterior.samples`` keeps chains apart); or a guide of this library, which is asked for ``num_samples``
        draws (of a stock guide pass the draws: ``sample_posterior(guide, (100,))``). Running statistics that the draws
        hold (those of an ``ensemble``) take the place of the network's own.
    :param model: a :class:`BayesianModel`; a network, whose parameters' names are the sites (evaluated in eval mode);
        or any Pyro model.
    :param args: what it is called with: inputs, first axis rows. A Pyro model that takes targets is called without
        them, or with ``None``; observed sites are drawn anew even if it was given data. For ``"discrete"``: with them.
    :param kind: ``"outputs"`` of the network (logits, means), or what the Pyro model returns; ``"mean"``, the expected
        target given the draw (class probabilities, the regression function); ``"samples"``, a target for each draw.
        A discrete site that a sampler summed out is then drawn given the draw, not given data. ``"discrete"`` draws
        these sites, such as the component of each row of a mixture, from their joint posterior given the draw and the
        data that the model is called with, as :func:`pyro.infer.infer_discrete` does for one draw; scales don't count.
    :param num_samples: how many draws: evenly spaced ones of a posterior or of weights with one batch axis, by default
        all; of a guide, 100 by default.
    :param average: average over draws as they are made, so that memory holds one prediction: the posterior
        predictive mean.
    :param draw_chunk: draws evaluated at once; ``None``: as many as the cache holds, about.
    :param row_chunk: rows of the inputs evaluated at once, likewise; a Pyro model always gets all its data.
    :param progress: show a progress bar, if it takes longer than a second.
    :return: ``batch_shape + (N, ...)``, or if averaged ``(N, ...)`` in float64, where the draws are. Of a
        ``BayesianModel`` means and samples end with the axis of outputs or classes, also of a single output, as
        ``scores`` and ``total_variation`` take them; sampled labels have none. Of a Pyro model, for all but
        ``"outputs"``: site -> such a tensor, for each site that ``posterior`` doesn't give, and for each deterministic
        site, computed anew; for ``"outputs"``: as the model returns them.
    """
    arguments.one_of("kind", kind, get_args(Kind))
    if average and kind != "mean":
        raise ValueError(f"average=True is for kind='mean': the average of {kind} says nothing of the posterior")
    return _predicted(posterior, model, args, kwargs, kind, num_samples, average, draw_chunk, row_chunk, progress)


@torch.no_grad()
def pointwise_log_likelihood(
    posterior: Any,
    model: nn.Module | Callable[..., Any],
    *args: Any,
    num_samples: int | None = None,
    draw_chunk: int | None = None,
    row_chunk: int | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Log-likelihood of every observation under every draw: observed site -> ``batch_shape + observations``.

    Untempered, and not scaled up for mini-batches; 0 for observations that ``poutine.mask`` or ``obs_mask`` take out.
    Arguments as :func:`predict`'s, with the targets.

    :raises ValueError: if the posterior lacks a site, as discrete ones that were summed out.
    """
    result = _predicted(
        posterior, model, args, kwargs, "log_likelihood", num_samples, False, draw_chunk, row_chunk, progress
    )
    if not result:
        raise ValueError("the model has no observed site; pass the targets")
    return result


def _predicted(
    posterior: Any,
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: str,
    num_samples: int | None,
    average: bool,
    draw_chunk: int | None,
    row_chunk: int | None,
    progress: bool,
) -> Any:
    """Evaluate a predictor in chunks of draws and rows."""
    for name, number in (("num_samples", num_samples), ("draw_chunk", draw_chunk), ("row_chunk", row_chunk)):
        arguments.whole(name, number, 1, none="a number that suits")
    weights, keeps, device = posterior, True, None
    if hasattr(posterior, "source_device"):  # a Posterior
        weights, keeps, device = posterior.samples, False, posterior.source_device
    elif hasattr(posterior, "sample_posterior"):
        weights, num_samples = posterior.sample_posterior((num_samples or GUIDE_DRAWS,)), None
    else:
        hint = "a Posterior, a guide of this library, or sample_posterior(guide) of another"
        arguments.weights("posterior", posterior, hint)
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; it must be a BayesianModel, a network or a Pyro model")
    names = {name for name, _ in model.named_parameters()} if isinstance(model, nn.Module) else set()
    predictor: Predictor
    if isinstance(model, BayesianModel) or names & set(weights):  # if some of a network's are missing they are named
        predictor = NetworkPredictor(model, args, kwargs, kind, weights)
    else:
        predictor = TracedPredictor(model, args, kwargs, kind, weights, device)
    draws, batch = _draws(weights, predictor.site_shapes, num_samples, keeps)
    count, place, num_rows = batch.numel(), next(iter(draws.values())).device, predictor.num_rows
    draws_at_once, rows_at_once = _chunks(place, predictor, draw_chunk, row_chunk)
    rows = [slice(None)] if num_rows is None else _ranges(num_rows, rows_at_once)
    totals, spec = list[Tensor](), None
    bar = tqdm(total=count, desc="predictions", disable=not progress, delay=1.0)
    for part in _ranges(count, draws_at_once):
        own = {site: value[part].to(predictor.device, predictor.dtype) for site, value in draws.items()}
        for some in rows:
            leaves, spec = tree_flatten(predictor(own, some))
            if not totals:
                shapes = [leaf.shape[1:] if num_rows is None else (num_rows, *leaf.shape[2:]) for leaf in leaves]
                totals = [
                    torch.zeros(shape, dtype=torch.float64, device=place)
                    if average
                    else torch.empty((count, *shape), dtype=leaf.dtype, device=place)
                    for shape, leaf in zip(shapes, leaves, strict=True)
                ]
            for total, leaf in zip(totals, leaves, strict=True):
                if average:
                    (total if num_rows is None else total[some]).add_(leaf.sum(0, dtype=total.dtype).to(place))
                else:
                    total[part if num_rows is None else (part, some)] = leaf.to(place)
        bar.update(part.stop - part.start)
    bar.close()
    if spec is None:
        raise ValueError("the posterior holds no draws, or there are no rows; there is nothing to predict")
    return tree_unflatten([t / count if average else t.reshape(*batch, *t.shape[1:]) for t in totals], spec)


def _draws(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], num_samples: int | None, keeps: bool
) -> tuple[Weights, torch.Size]:
    """The draws that are asked for, of batch shape ``(S,)``, and the batch shape of the result."""
    require_sites(weights, shapes)
    batch = batch_shape({site: weights[site] for site in shapes}, shapes)
    draws = {site: weights[site].detach().reshape(-1, *shape) for site, shape in shapes.items()}
    result = batch if keeps else torch.Size([batch.numel()])
    if num_samples is None:
        return draws, result
    if len(result) != 1 or num_samples > batch.numel():
        raise ValueError(
            f"num_samples is {num_samples}, of weights of batch shape {tuple(batch)}; it takes as many or fewer, "
            "evenly spaced, along one batch axis"
        )
    index = evenly_spaced(batch.numel(), num_samples)
    return {site: value[index.to(value.device)] for site, value in draws.items()}, torch.Size([num_samples])


def _ranges(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _chunks(
    place: torch.device, predictor: Predictor, draw_chunk: int | None, row_chunk: int | None
) -> tuple[int, int]:
    """The numbers of draws and rows to take at once, from the numbers that a row of one draw meets, about."""
    rows = max(1, predictor.num_rows or 1)
    entries = CPU_ENTRIES if (predictor.device or place).type == "cpu" else DEVICE_ENTRIES
    numbers = sum(shape.numel() for shape in predictor.site_shapes.values())
    if draw_chunk is None:
        fitting = max(LEAST_DRAWS, min(MOST_DRAWS, entries // (predictor.row_entries * rows)))
        draw_chunk = max(1, min(fitting, WEIGHT_ENTRIES // max(1, numbers)))
    return draw_chunk, row_chunk or max(1, entries // (draw_chunk * predictor.row_entries))
