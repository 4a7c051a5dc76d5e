"""Posterior predictions of networks and of any Pyro model, in chunks of draws.

:class:`pyro.infer.Predictive` runs the model once for each draw and keeps every trace.
Here :func:`torch.func.vmap` maps the network, or the model's trace, over chunks of
draws whose activations fit into memory, and keeps only the requested values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Size, Tensor, nn
from torch.distributions import Categorical
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import LOCK, forked
from pyro_symmetric.arguments import (
    Args,
    Device,
    Dtype,
    Entries,
    Model,
    Values,
    described_call,
)
from pyro_symmetric.density.enumeration import masked_log_prob
from pyro_symmetric.density.site_checks import check_observed, is_deterministic, sampled
from pyro_symmetric.density.traced import (
    PriorMessenger,
    Traced,
    deterministic_values,
    explaining,
    is_enumerated,
    placed,
    promoted,
)
from pyro_symmetric.models import BayesianModel, call_with_weights, over_weights
from pyro_symmetric.networks import naming_layer
from pyro_symmetric.posterior.statistics import evenly_spaced, slices
from pyro_symmetric.weights import (
    Tensors,
    Weights,
    base_of,
    batch_shape,
    drop_names,
    first_value,
    keep_names,
    map_values,
    pick,
    require_sites,
    select_rows,
    shapes_of,
)

Kind = Literal["outputs", "mean", "samples", "discrete", "log_likelihood"]
GUIDE_DRAWS = 100
# Numbers in the largest activation of a chunk: on a CPU as many as its cache holds,
# elsewhere enough for the device.
CPU_ENTRIES = 2**21
DEVICE_ENTRIES = 2**26
WEIGHT_ENTRIES = 2**24
MAX_DRAWS = 1024


class FromAbove:
    """Functions of rooms on the floors above, which register them for posteriors when
    they are imported.

    :ivar find_symmetry: finds the symmetry of the model behind draws.
    :ivar read_symmetry: restores the symmetry of a saved posterior.
    :ivar align: aligns the draws of a posterior modulo a symmetry.
    :ivar chains_agree: tells whether a posterior's chains agree modulo its symmetry.
    :ivar modulo_symmetry: returns a posterior's samples modulo its symmetry; none if
        that isn't known, or would take long.
    :ivar sample_guide: draws weights from a guide.
    """

    find_symmetry: Callable[[Any], Any]
    read_symmetry: Callable[[Mapping[str, Any]], Any]
    align: Callable[[Any, Any], Any]
    chains_agree: Callable[[Any], bool]
    modulo_symmetry: Callable[[Any], Weights]
    sample_guide: Callable[[Any, Sequence[int]], Weights]


FROM_ABOVE = FromAbove()


@torch.no_grad()
def predict(
    posterior: Any,
    model: nn.Module | Model,
    *args: Any,
    kind: Kind = "outputs",
    num_samples: int | None = None,
    average: bool = False,
    progress: bool = True,
    **kwargs: Any,
) -> Any:
    """Predict with each draw of a posterior.

    >>> model, x = ps.BayesianModel(nn.Linear(2, 3)), torch.randn(7, 2)
    >>> weights = {name: prior.sample((400,)) for name, prior in model.priors().items()}
    >>> ps.predict(weights, model, x, kind="mean").shape  # class probabilities
    torch.Size([400, 7, 3])

    :param posterior: a ``Posterior``, taken chain after chain; weights, whose batch
        shape the result keeps; or an automatic guide. Running statistics in the draws
        replace those of the network.
    :param model: a :class:`BayesianModel`; a network, whose parameters' names are the
        sites; or any Pyro model.
    :param args: the model's arguments: inputs, rows first. Targets are left out, or
        redrawn where they are given.
    :param kind: ``"outputs"`` of the network or return values of the Pyro model;
        ``"mean"``, the expected target given the draw (class probabilities, the
        regression function); ``"samples"``, a target for each draw; ``"discrete"``,
        sites that a sampler summed out, drawn jointly given the draw and the data, as
        :func:`pyro.infer.infer_discrete` does; ``"log_likelihood"`` of each
        observation, untempered: observed site -> ``batch_shape + observations``.
    :param num_samples: number of draws, evenly spaced along one batch axis. ``None``:
        all; of a guide, 100.
    :param average: average means over the draws in float64, holding one prediction in
        memory.
    :return: ``batch_shape + (N, ...)`` on the draws' device. Of a ``BayesianModel``,
        means and samples (but not labels) end with the axis of outputs or classes. Of a
        Pyro model, for all but ``"outputs"``: site -> such a tensor, for deterministic
        sites and sites that ``posterior`` lacks.
    """
    arguments.one_of("kind", kind, get_args(Kind))
    if average and kind != "mean":
        raise ValueError(
            f"average=True is for kind='mean': the average of {kind} says nothing "
            "about the posterior"
        )
    arguments.whole("num_samples", num_samples, 1, none="all")
    weights = posterior
    if isinstance(posterior, AutoGuide):
        weights = FROM_ABOVE.sample_guide(posterior, (num_samples or GUIDE_DRAWS,))
        num_samples = None
    elif hasattr(posterior, "get_samples"):
        weights = posterior.get_samples()
    arguments.weights("posterior", weights, "a Posterior, or an automatic guide")
    predictor: NetworkPredictor | TracedPredictor
    if isinstance(model, nn.Module) and (
        isinstance(model, BayesianModel)
        or any(name in weights for name, _ in model.named_parameters())
    ):  # which names weights that are missing
        predictor = NetworkPredictor(model, args, kwargs, kind, weights)
    else:
        source_device = getattr(getattr(posterior, "source", None), "device", None)
        predictor = TracedPredictor(model, args, kwargs, kind, weights, source_device)

    require_sites(weights, predictor.site_shapes)
    batch = batch_shape(weights, predictor.site_shapes)
    draws = {
        s: weights[s].detach().reshape(-1, *shape)
        for s, shape in predictor.site_shapes.items()
    }
    if num_samples is not None:
        if len(batch) != 1 or num_samples > batch[0]:
            raise ValueError(
                f"num_samples is {num_samples}, but the batch shape is {tuple(batch)}; "
                "it takes one axis"
            )
        draws = select_rows(draws, evenly_spaced(batch[0], num_samples))
        batch = Size([num_samples])

    results = _in_chunks(predictor, draws, batch.numel(), average, progress)
    if not results or not tree_leaves(results[0]):
        raise ValueError(
            "there is nothing to predict: the posterior holds no draws, or the model "
            "no targets"
        )
    if average:
        return tree_map(lambda leaf: leaf / batch.numel(), results[0])
    return tree_map(
        lambda *parts: torch.cat(parts).unflatten(0, batch) if batch else parts[0][0],
        *results,
    )


def _in_chunks(
    predictor: Any, draws: Weights, count: int, add_up: bool, progress: bool
) -> list[Any]:
    """Predict in chunks of draws; return the chunks' predictions or, added up over the
    draws, a single one.
    """
    device = first_value(draws).device
    results = list[Any]()
    max_entries = (
        CPU_ENTRIES if (predictor.device or device).type == "cpu" else DEVICE_ENTRIES
    )
    num_weights = max(1, sum(shape.numel() for shape in predictor.site_shapes.values()))
    chunk_size = min(
        MAX_DRAWS, max_entries // predictor.entries, WEIGHT_ENTRIES // num_weights
    )
    with tqdm(total=count, desc="predictions", disable=not progress, delay=1.0) as bar:
        for chunk in slices(count, chunk_size):
            part = map_values(
                lambda value: value.to(predictor.device, predictor.dtype),
                select_rows(draws, chunk),
            )
            predictions = predictor(part)
            if add_up:
                predictions = tree_map(
                    lambda leaf: leaf.sum(0, dtype=torch.float64), predictions
                )
                predictions = (
                    tree_map(torch.add, predictions, results.pop())
                    if results
                    else predictions
                )
            results.append(tree_map(lambda leaf: leaf.to(device), predictions))
            bar.update(chunk.stop - chunk.start)
    return results


# Functions that are mapped over draws. ``entries`` is about the size of the largest
# activation of one draw.


class NetworkPredictor:
    """A network, or a network with a likelihood.

    Running statistics come from the draws if these hold them (as an ensemble's do),
    otherwise from the network.
    """

    def __init__(
        self,
        model: Any,
        args: Args,
        kwargs: Entries,
        kind: str,
        draws: Tensors,
    ):
        bare = not isinstance(model, BayesianModel)
        if not args or not isinstance(args[0], Tensor) or args[0].dim() < 1:
            raise ValueError(
                "predictions need the inputs, a tensor whose first axis are the rows; "
                f"found {described_call(args, kwargs)}"
            )
        expected = 2 if kind == "log_likelihood" else 1
        if not bare and len(args) + len(kwargs) != expected:
            raise TypeError(
                "a BayesianModel takes the inputs and, for log-likelihoods, the "
                f"targets; found {described_call(args, kwargs)}"
            )
        if kind == "discrete" or (bare and kind != "outputs"):
            lacks = "no discrete latent sites"
            if kind != "discrete":
                lacks = "no likelihood; pass the BayesianModel"
            raise ValueError(
                f"kind is {kind!r}, but a {'bare ' * bare}network has {lacks}"
            )
        self.model = copy.deepcopy(model).eval() if bare else model
        self.bare = bare
        self.kind = kind
        net = self.model if bare else self.model.net
        parameters = dict(net.named_parameters())
        tensors = parameters | dict(net.named_buffers())
        # A posterior may lack frozen parameters, and hold running statistics.
        trained = [name for name, value in parameters.items() if value.requires_grad]
        needed = {*(trained or parameters), *draws}
        self.site_shapes = shapes_of(keep_names(tensors, needed))
        self.latents: list[str] = []
        if not bare and kind in ("samples", "log_likelihood"):
            self.site_shapes = {**self.model.site_shapes, **self.site_shapes}
            self.latents = [site for site in self.site_shapes if site not in tensors]
        parameter = first_value(parameters)
        self.device: torch.device | None = parameter.device
        self.dtype: Dtype = parameter.dtype
        _, self.args, self.kwargs = placed(None, args, kwargs, self.device, self.dtype)
        widest = max(
            (value.shape[0] for value in parameters.values() if value.dim()), default=1
        )
        rows = len(args[0])
        pixels = args[0].shape[2:].numel()
        self.entries = max(1, args[0].numel(), rows * widest * pixels)

    def __call__(self, weights: Weights) -> Any:
        args = self.args
        kwargs = self.kwargs
        if self.bare:
            with naming_layer(self.model, *args):
                return over_weights(
                    self.model,
                    lambda draw: call_with_weights(self.model, draw, args, kwargs),
                    weights,
                )
        if self.kind == "log_likelihood":
            return {"y": self.model.log_likelihood(weights, *args, **kwargs)}
        outputs = self.model.outputs(weights, *args, **kwargs)
        if self.kind == "outputs":
            return outputs
        mean = self.model.likelihood.mean(outputs)
        if self.kind == "mean":
            return mean
        distribution = self.model.likelihood.distribution(
            outputs, pick(weights, self.latents)
        )
        targets = distribution.sample()
        return targets[..., None] if mean.shape == (*targets.shape, 1) else targets


class TracedPredictor(Traced):
    """Any Pyro model, in the draws' precision, on ``device`` or else on that of the
    arguments.
    """

    def __init__(
        self,
        model: Model,
        args: Args,
        kwargs: Entries,
        kind: str,
        draws: Tensors,
        device: Device,
    ):
        self.dtype = promoted(list(draws.values()))
        self.kind = kind
        super().__init__(*placed(model, args, kwargs, device, self.dtype))
        inputs = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        self.entries = max([1, *(leaf.numel() for leaf in inputs)])
        if isinstance(self.model, nn.Module):
            inputs += self.model.parameters()
        known = [torch.device(device)] if device is not None else []
        known += [leaf.device for leaf in inputs]
        self.device = next(iter(known), None)
        # The trace draws sites for their shapes only: what isn't random takes nothing
        # from the caller's generator.
        draws_are_kept = kind in ("samples", "discrete")
        with (
            LOCK if draws_are_kept else forked(None, self.device),
            poutine.block(),
            explaining(self.model, args, kwargs),
            PriorMessenger(self.device, self.dtype),
        ):
            trace = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
        random = {
            site["name"]: site for site in sampled(trace) if not is_deterministic(site)
        }
        self.site_shapes = {
            name: site["value"].shape for name, site in random.items() if name in draws
        }
        if not self.site_shapes:
            latent = sorted(n for n, site in random.items() if not site["is_observed"])
            raise ValueError(
                f"the model has none of the sites {sorted(draws)}; its latent sites "
                f"are {latent}"
            )
        drawn = drop_names(random, self.site_shapes)
        check_observed(site for site in drawn.values() if site["is_observed"])
        self._last = next(reversed(drawn), None)
        _require_whole_plates(trace, drawn.values())
        if kind in ("discrete", "log_likelihood"):
            self._require_given(drawn, draws)

    def _require_given(self, drawn: Values, draws: Tensors) -> None:
        """Raise ``ValueError`` unless ``draws`` has all sites but, for ``"discrete"``,
        enumerated ones.
        """
        latent = {name: site for name, site in drawn.items() if not site["is_observed"]}
        if missing := [
            n
            for n, s in latent.items()
            if self.kind == "log_likelihood" or not is_enumerated(s)
        ]:
            raise ValueError(
                f"kind is {self.kind!r}, which needs values of all other sites; "
                f"{missing} have none"
            )
        if self.kind == "discrete":
            if not latent or len(latent) == len(drawn):
                raise ValueError(
                    "kind is 'discrete', but there are no discrete latent sites to "
                    "draw, or no data"
                )
            draw = {
                n: draws[n].reshape(-1, *shape)[0].to(self.device)
                for n, shape in self.site_shapes.items()
            }
            self.sum_out(draw)

    def __call__(self, weights: Weights) -> Any:
        try:
            values = self.mapped(self._one, weights, randomness="different")
        except RuntimeError as error:
            if self.one_by_one:
                raise
            self.one_by_one = "not known yet"
            # raises if the model is to blame rather than vmap
            values = self.mapped(self._one, weights)
            self.give_up_map(error)
        if self.kind == "discrete":
            values, possible = values
            if not possible.all():
                impossible = (
                    f"{int((~possible).sum())} leave the data no possible values of "
                    "the discrete sites"
                )
                raise ValueError(
                    f"of {len(possible)} draws, {impossible}: their density is 0 or "
                    "not a number"
                )
        return values

    def _one(self, weights: Weights) -> Any:
        """Predict with one draw."""
        if self.kind == "log_likelihood":
            return {
                site["name"]: masked_log_prob(site)
                for site in sampled(self.run(weights))
                if site["is_observed"]
                and site["name"] not in weights
                and not is_deterministic(site)
            }
        if self.enumeration is not None:  # kind is "discrete"
            drawn, log_prob = self.enumeration.draw(self.run(weights))
            trace = self.run({**weights, **drawn}, drawing=True)
            return {**drawn, **deterministic_values(trace)}, log_prob.isfinite()
        with _Targets(weights, self.kind, self._last) as targets:
            returned = poutine.condition(self.model, data=weights)(
                *self.args, **self.kwargs
            )
        if self.kind != "outputs":
            return targets.values
        leaves = tree_leaves(returned)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            kind = type(returned).__name__
            raise ValueError(
                f"the model returns {kind}, no tensors; return its outputs, or use "
                "another kind"
            )
        return returned


def _require_whole_plates(trace: Trace, sites: Iterable[Any]) -> None:
    """Raise ``ValueError`` that names plates of sites which draw their own rows."""
    names = {frame.name for site in sites for frame in site["cond_indep_stack"]}
    partial = []
    for name in names & trace.nodes.keys():
        fn: Any = trace.nodes[name]["fn"]
        if fn.subsample_size is not None and fn.subsample_size < fn.size:
            partial.append(name)
    if partial:
        raise ValueError(
            f"the plates {partial} draw other rows for each draw, whose order and "
            "average would mean nothing; pass the model without subsample_size, whose "
            "sites are the same"
        )


class _Targets(Messenger):
    """Handler that draws the sites that the posterior lacks. It records them or their
    means, and deterministic sites.

    :param last: the last site that the posterior lacks; no mean depends on its value.
    """

    def __init__(self, draws: Tensors, kind: str, last: str | None):
        super().__init__()
        self.given = draws
        self.kind = kind
        self.last = last
        self.values: Weights = {}

    def _pyro_sample(self, msg: Any) -> None:
        if is_deterministic(msg):
            self.values[msg["name"]] = msg["value"]
        if msg["name"] in self.given or not _is_random(msg):
            return
        # other kinds keep the data
        if self.kind == "samples" or not msg["is_observed"]:
            # vmap refuses in-place noise, as in rsample and in many a distribution's
            # sample. So draw only if needed.
            unused = (
                self.kind == "mean"
                and msg["name"] == self.last
                and msg["fn"].has_rsample
            )
            msg["value"] = (
                _mean(msg["name"], msg["fn"]) if unused else msg["fn"].sample()
            )
            msg["done"] = True
        self.values[msg["name"]] = (
            _mean(msg["name"], msg["fn"]) if self.kind == "mean" else msg["value"]
        )


def _mean(site: str, fn: Any) -> Tensor:
    """Return the mean; of a categorical site its probabilities, as of a classifying
    ``BayesianModel``.

    :raises ValueError: naming the site, if its distribution has no mean in closed form.
    """
    base = base_of(fn)
    try:
        if isinstance(base, Categorical):
            return base.probs.expand(
                *fn.batch_shape, *fn.event_shape, base.probs.shape[-1]
            )
        return fn.mean
    except NotImplementedError as error:
        raise ValueError(
            f"the mean of site {site!r} ({type(fn).__name__}) isn't known; use "
            "kind='samples'"
        ) from error


def _is_random(site: Any) -> bool:
    """Return whether a sample site is random: neither the rows of a plate nor
    deterministic.
    """
    return not site_is_subsample(site) and not is_deterministic(site)
