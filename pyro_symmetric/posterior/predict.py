r"""Predictions of many weights: chunked over draws, for networks and for any Pyro model.

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
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
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
MOST_DRAWS = 1024


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
            raise ValueError(f"num_samples is {num_samples}, but the batch shape is {tuple(batch)}; it takes one axis")
        draws = {s: value[evenly_spaced(len(value), num_samples).to(value.device)] for s, value in draws.items()}
        batch = torch.Size([num_samples])

    count, place, results = batch.numel(), next(iter(draws.values())).device, list[Any]()
    with tqdm(total=count, desc="predictions", disable=not progress, delay=1.0) as bar:
        for part in slices(count, _at_once(place, predictor)):
            own = {site: value[part].to(predictor.device, predictor.dtype) for site, value in draws.items()}
            found = predictor(own)
            if average:
                found = tree_map(lambda leaf: leaf.sum(0, dtype=torch.float64), found)
                found = tree_map(torch.add, found, results.pop()) if results else found
            results.append(tree_map(lambda leaf: leaf.to(place), found))
            bar.update(part.stop - part.start)
    if not results or not tree_leaves(results[0]):
        raise ValueError("there is nothing to predict: the posterior holds no draws, or the model no targets")
    if average:
        return tree_map(lambda leaf: leaf / count, results[0])
    return tree_map(lambda *parts: torch.cat(parts).unflatten(0, batch) if batch else parts[0][0], *results)


def _at_once(place: torch.device, predictor: NetworkPredictor | TracedPredictor) -> int:
    """The number of draws to take at once, from the numbers that one meets, about."""
    fitting = (CPU_ENTRIES if (predictor.device or place).type == "cpu" else DEVICE_ENTRIES) // predictor.entries
    weights = max(1, sum(shape.numel() for shape in predictor.site_shapes.values()))
    return max(1, min(MOST_DRAWS, fitting, WEIGHT_ENTRIES // weights))
