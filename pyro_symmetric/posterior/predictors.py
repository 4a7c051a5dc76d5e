"""Networks, and traces of any Pyro model, mapped over draws; ``predict`` evaluates them in chunks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from pyro import poutine
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Categorical, Independent
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import PYRO, running_pyro
from pyro_symmetric.calls import (
    described,
    described_call,
    explaining,
    is_deterministic,
    is_enumerated,
    over_weights,
    with_weights,
)
from pyro_symmetric.enumeration import Enumeration, masked_log_prob
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.placement import Placement, placed, promoted
from pyro_symmetric.weights import Shapes, Weights


class Predictor(Protocol):
    """Predictions of a batch of weights ``(S,)``, as a tensor or a tree of tensors that begin with ``S``."""

    site_shapes: Shapes  # of the sites that it needs
    num_rows: int | None  # of its inputs; None if rows can't be taken apart
    row_entries: int  # numbers that a row of one draw meets on the way, about; without rows, those of a draw
    device: torch.device | None  # that it wants the weights on; None takes them as they are
    dtype: torch.dtype | None  # likewise

    def __call__(self, weights: Weights, rows: slice) -> Any: ...


class NetworkPredictor:
    """A network, or a network with a likelihood.

    Draws that hold running statistics (an ensemble's) are predicted with their own, others with the network's.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, given: Mapping[str, Tensor]
    ):
        if not args or not isinstance(args[0], Tensor) or args[0].dim() < 1:
            raise ValueError(
                "predictions need the inputs, right after the network: a tensor whose first axis are the rows; found "
                f"{described_call(args, kwargs)}"
            )
        wanted = 2 if kind == "log_likelihood" else 1
        if kind == "discrete":
            raise ValueError("kind is 'discrete', but a network has no discrete latent sites")
        if isinstance(model, BayesianModel) and len(args) + len(kwargs) != wanted:
            wants = "the inputs and the targets" if wanted == 2 else "the inputs only, no targets"
            raise TypeError(f"a BayesianModel takes {wants} here; found {described_call(args, kwargs)}")
        if not isinstance(model, BayesianModel):
            if kind != "outputs":
                raise ValueError(
                    f"kind is {kind!r}, but a bare {type(model).__name__} has no likelihood; use kind='outputs', or "
                    "pass the BayesianModel"
                )
            model = copy.deepcopy(model).eval()
        self.model, self.kind = model, kind
        net = model.net if isinstance(model, BayesianModel) else model
        parameters = dict(net.named_parameters())
        if any(value.requires_grad for value in parameters.values()):  # a posterior may lack those that are frozen
            parameters = {name: value for name, value in parameters.items() if value.requires_grad or name in given}
        shapes = model.site_shapes if isinstance(model, BayesianModel) else {}
        self.latents = [site for site in shapes if site not in parameters]
        if kind not in ("samples", "log_likelihood"):
            shapes = {name: value.shape for name, value in parameters.items()}
        held = {name: value.shape for name, value in net.named_buffers() if name in given}
        self.site_shapes: Shapes = {**shapes, **held}
        like = next(iter(parameters.values()))
        self.device: torch.device | None = like.device
        self.dtype: torch.dtype | None = like.dtype
        _, self.args, self.kwargs = placed(None, args, kwargs, self.device, self.dtype)
        self.num_rows: int | None = len(args[0])
        widest = max((value.shape[0] for value in parameters.values() if value.dim()), default=1)
        self.row_entries = max(1, args[0].shape[1:].numel(), widest * args[0].shape[2:].numel())

    def __call__(self, weights: Weights, rows: slice) -> Any:
        def cut(value: Any) -> Any:
            is_data = isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.num_rows
            return value[rows] if is_data else value

        args = tuple(cut(value) for value in self.args)
        kwargs = {name: cut(value) for name, value in self.kwargs.items()}
        values = self._predicted(weights, args, kwargs)
        if any(leaf.shape[1:2] != args[0].shape[:1] for leaf in tree_leaves(values)):
            shapes = [tuple(leaf.shape[1:]) for leaf in tree_leaves(values)]
            raise ValueError(
                f"the network makes {', '.join(map(str, shapes))} of {described(args[0])}: not one row for each row. "
                "The first axis of the inputs are the rows; one row by itself is x[None]"
            )
        return values

    def _predicted(self, weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(self.model, BayesianModel):
            return over_weights(self.model, lambda own: with_weights(self.model, own, args, kwargs), weights)
        if self.kind == "log_likelihood":
            return {"y": self.model.log_likelihood(weights, *args, **kwargs)}
        outputs = self.model.outputs(weights, *args, **kwargs)
        if self.kind == "outputs":
            return outputs
        mean = self.model.likelihood.mean(outputs)
        mean = mean[..., None] if mean.dim() == 2 else mean  # a network of one output may return (N,)
        if self.kind == "mean":
            return mean
        drawn = self.model.likelihood.distribution(outputs, {name: weights[name] for name in self.latents}).sample()
        return drawn[..., None] if mean.shape == (*drawn.shape, 1) else drawn


class TracedPredictor:
    """Any Pyro model, its trace mapped over draws; one draw after another if that can't be.

    Computed in the draws' precision, whatever the arguments' is; on ``device``, or else where the arguments are.
    """

    num_rows: int | None = None

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kind: str,
        given: Mapping[str, Tensor],
        device: torch.device | str | None,
    ):
        self.dtype: torch.dtype | None = promoted(list(given.values()))
        names = sorted(given)
        sizes = [leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.row_entries = max([1, *sizes])
        self.model, self.args, self.kwargs = placed(model, args, kwargs, device, self.dtype)
        self.kind = kind
        self.device: torch.device | None = _place_of(self.model, (self.args, self.kwargs), device)
        with PYRO, poutine.block(), explaining(self.model, args, kwargs), Placement(self.device, self.dtype):
            trace = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
        sites: dict[str, Any] = {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
        given = {name: value for name, value in given.items() if name in sites and not is_deterministic(sites[name])}
        drawn = [name for name, site in sites.items() if name not in given and _is_random(site)]
        self._last = drawn[-1] if drawn else None
        self.site_shapes: Shapes = {name: site["value"].shape for name, site in sites.items() if name in given}
        if not self.site_shapes:
            raise ValueError(f"the model has none of the sites {names} that are given; {_has(model, sites)}")
        _require_all_rows(trace, drawn, kind)
        self._enumeration = self._enumerated(given) if kind in ("discrete", "log_likelihood") else None
        self._one_by_one = False

    def _enumerated(self, given: Mapping[str, Tensor]) -> Enumeration | None:
        """The discrete sites that the posterior leaves, if there are.

        :raises ValueError: if it leaves others, or none though they are asked for.
        """
        if not all(value.numel() for value in given.values()):
            raise ValueError("the posterior holds no draws; there is nothing to predict")
        shapes = self.site_shapes
        one = {name: value.reshape(-1, *shapes[name])[0].to(self.device) for name, value in given.items()}
        with running_pyro(self.dtype):
            trace = poutine.trace(poutine.condition(self.model, data=one)).get_trace(*self.args, **self.kwargs)
            sites: dict[str, Any] = {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
            others = {name: site for name, site in sites.items() if name not in given and _is_random(site)}
            latent = {name: site for name, site in others.items() if not site["is_observed"]}
            missing = [
                name for name, site in latent.items() if self.kind == "log_likelihood" or not is_enumerated(site)
            ]
            if missing:
                what = "draws discrete sites" if self.kind == "discrete" else "is the density of each row"
                raise ValueError(
                    f"kind is {self.kind!r}, which {what} given all others and the data; neither the posterior nor the "
                    f"model's arguments give {missing}"
                )
            if self.kind == "log_likelihood":
                return None
            if not latent:
                raise ValueError("kind is 'discrete', but the posterior leaves no discrete latent site of the model")
            if len(latent) == len(others):
                raise ValueError(
                    f"kind is {self.kind!r}, which asks for the data, but the model observes none; pass the data as "
                    "the sampler had them, or ask for kind='samples'"
                )
            enumeration = Enumeration(trace)
            enumeration.require_enumerable(self.model, one, self.args, self.kwargs)
        return enumeration

    def __call__(self, weights: Weights, rows: slice) -> Any:
        values = self._evaluated(weights)
        if self.kind == "discrete":
            values, possible = values
            if not bool(possible.all()):
                raise ValueError(
                    f"of {len(possible)} draws, {int((~possible).sum())} leave the data no possible values of the "
                    "discrete sites: the density of all of them is 0 or not a number. Look for NaN in the data, values "
                    "outside of a distribution's support, and draws of another model"
                )
        if self.kind == "mean":
            for site, value in values.items():
                if value.numel() and bool(value.isnan().all()):
                    raise ValueError(_no_mean(site, "whose mean isn't a number"))
        return values

    def _evaluated(self, weights: Weights) -> Any:
        with running_pyro():
            if not self._one_by_one:
                try:
                    return torch.func.vmap(self._one, randomness="different")(weights)
                except RuntimeError as error:
                    failure = error
            count = len(next(iter(weights.values())))
            draws = [self._one({site: value[s] for site, value in weights.items()}) for s in range(count)]
        if not self._one_by_one:  # the model itself is in order, then: it was the map that failed
            self._one_by_one = True
            warnings.warn(
                "the model can't be evaluated for many draws at once (torch.func.vmap), so they are taken one by one: "
                f"{str(failure).splitlines()[0]}",
                UserWarning,
                stacklevel=4,
            )
        return tree_map(lambda *leaves: torch.stack(leaves), *draws)

    def _one(self, weights: Weights) -> Any:
        conditioned = poutine.condition(self.model, data=weights)
        if self.kind == "log_likelihood":
            return self._by_rows(weights)
        if self._enumeration is not None:
            enumerated = self._enumeration.trace(self.model, weights, self.args, self.kwargs)
            drawn, possible = self._enumeration.draw(enumerated)
            given = poutine.condition(self.model, data={**weights, **drawn})
            trace = poutine.trace(given).get_trace(*self.args, **self.kwargs)
            computed = {name: site["value"] for name, site in trace.nodes.items() if is_deterministic(site)}
            return {**drawn, **computed}, possible
        with _Targets(weights, self.kind, self._last) as targets:
            returned = conditioned(*self.args, **self.kwargs)
        if self.kind != "outputs":
            return targets.values
        if not tree_leaves(returned) or not all(isinstance(leaf, Tensor) for leaf in tree_leaves(returned)):
            raise ValueError(
                f"the model returns {type(returned).__name__}, no tensors; return its outputs, or use kind='mean' or "
                "kind='samples'"
            )
        return returned

    def _by_rows(self, weights: Weights) -> Weights:
        """The log-density of each observation; 0 if it is masked out, as in the model's own density."""
        trace = poutine.trace(poutine.condition(self.model, data=weights)).get_trace(*self.args, **self.kwargs)
        nodes: dict[str, Any] = {name: trace.nodes[name] for name in trace.observation_nodes if name not in weights}
        observed = {name: site for name, site in nodes.items() if _is_random(site)}
        return {name: masked_log_prob(site) for name, site in observed.items()}


class _Targets(Messenger):
    """Draws what the posterior doesn't give, and keeps that or its mean, and deterministic sites.

    :param last: the last such site of the model, on whose value no mean depends.
    """

    def __init__(self, given: Mapping[str, Tensor], kind: str, last: str | None):
        super().__init__()
        self.given, self.kind, self.last = given, kind, last
        self.values: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if is_deterministic(msg):
            self.values[msg["name"]] = msg["value"]
        if msg["name"] in self.given or not _is_random(msg):
            return
        # Not rsample, whose in-place noise vmap refuses. Data stay where only what they don't change is asked for.
        if self.kind == "samples" or not msg["is_observed"]:
            # Many distributions draw by noise in place, which vmap refuses too; so no more is drawn than is needed.
            idle = self.kind == "mean" and msg["name"] == self.last and msg["fn"].has_rsample
            msg["value"] = _mean(msg["name"], msg["fn"]) if idle else msg["fn"].sample()
            msg["done"] = True
        self.values[msg["name"]] = _mean(msg["name"], msg["fn"]) if self.kind == "mean" else msg["value"]


def _mean(site: str, fn: Any) -> Tensor:
    """The mean, which of a categorical site are its probabilities, as of a classifying ``BayesianModel``.

    :raises ValueError: naming the site, if its distribution has none in closed form.
    """
    inner = fn
    while isinstance(inner, Independent | MaskedDistribution | ExpandedDistribution):
        inner = inner.base_dist
    try:
        if isinstance(inner, Categorical):  # OneHotCategorical's mean are its probabilities
            return inner.probs.expand(*fn.batch_shape, *fn.event_shape, inner.probs.shape[-1])
        return fn.mean
    except NotImplementedError as error:
        raise ValueError(_no_mean(site, f"({type(fn).__name__}) whose mean isn't known")) from error


def _no_mean(site: str, what: str) -> str:
    return f"kind='mean' is asked for, but site {site!r} has a distribution {what}; use kind='samples'"


def predictor_of(
    given: Mapping[str, Tensor],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: str,
    device: torch.device | str | None = None,
) -> Predictor:
    """The predictor of a model.

    :param given: draws of the sites that the posterior has.
    :param device: where to run a traced model; ``None``: where its arguments are. A network stays where it is.
    """
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; it must be a BayesianModel, a network or a Pyro model")
    names = {name for name, _ in model.named_parameters()} if isinstance(model, nn.Module) else set()
    if isinstance(model, BayesianModel) or names & set(
        given
    ):  # of a network's weights, if some are missing they are named
        return NetworkPredictor(model, args, kwargs, kind, given)
    return TracedPredictor(model, args, kwargs, kind, given, device)


# small steps --------------------------------------------------------------------------------------------------------


def _is_random(site: Any) -> bool:
    """True if a sample site is one, and not the rows of a plate or a deterministic site, which Pyro makes alike."""
    return not site_is_subsample(site) and not is_deterministic(site)


def _require_all_rows(trace: poutine.Trace, drawn: list[str], kind: str) -> None:
    """Every draw would be asked about rows of its own, so that neither their order nor their average meant anything.

    :raises ValueError: if a plate with ``subsample_size`` holds what is to be predicted. (What a model returns may have
        nothing to do with it, so that is warned of.)
    """
    for name in drawn:
        for frame in trace.nodes[name]["cond_indep_stack"]:
            rows = getattr(trace.nodes[frame.name]["fn"], "subsample_size", None)
            if rows is None or frame.full_size is None or rows >= frame.full_size:
                continue
            found = (
                f"the site {name!r} lies in the plate {frame.name!r}, which draws {rows} of {frame.full_size} rows "
                "anew for each draw of the posterior. Pass the model without subsample_size; its sites stay the same"
            )
            if kind != "outputs":
                raise ValueError(found)
            warnings.warn(f"what the model returns may be of other rows each time: {found}", UserWarning, stacklevel=6)
            return


def _has(model: Any, sites: Mapping[str, Any]) -> str:
    """The sites that a model has instead of those that were expected."""
    latent = sorted(name for name, site in sites.items() if not site["is_observed"] and not site_is_subsample(site))
    parameters = sorted(name for name, _ in model.named_parameters()) if isinstance(model, nn.Module) else []
    if not latent and parameters:
        return f"as a network it has the sites {parameters}, its parameters' names"
    return f"its latent sites are {latent}"


def _place_of(model: Any, arguments: Any, device: torch.device | str | None) -> torch.device | None:
    if device is not None:
        return torch.device(device)
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    return next((leaf.device for leaf in (*tree_leaves(arguments), *parameters) if isinstance(leaf, Tensor)), None)
