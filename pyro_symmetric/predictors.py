"""What :mod:`pyro_symmetric.predict` evaluates in chunks: networks, and traces of any Pyro model, mapped over draws."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric.models import BayesianModel
from pyro_symmetric.symmetry.weights import Shapes, Weights


class Predictor(Protocol):
    """Predictions of a batch of weights ``(S,)``, as a tensor or a tree of tensors that begin with ``S``."""

    site_shapes: Shapes
    """The sites that it needs."""

    num_rows: int | None
    """How many rows its inputs have; ``None`` where rows can't be taken apart."""

    device: torch.device | None
    """Where it wants the weights; ``None`` takes them as they are."""

    dtype: torch.dtype | None
    """In which precision, likewise."""

    def __call__(self, weights: Weights, rows: slice) -> Any: ...


class NetworkPredictor:
    """A network, or a network with a likelihood."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str):
        if not args or not isinstance(args[0], Tensor) or args[0].dim() < 1:
            raise ValueError("predictions need the inputs: a tensor whose first axis are the rows")
        self.model, self.kind = model, kind
        if not isinstance(model, BayesianModel):
            if kind != "outputs":
                raise ValueError(
                    f"kind is {kind!r}, but a bare {type(model).__name__} has no likelihood; use kind='outputs', or "
                    "pass the BayesianModel"
                )
            self.model = copy.deepcopy(model).eval()
        net = model.net if isinstance(model, BayesianModel) else self.model
        parameters = dict(net.named_parameters())
        self.latents = (
            [] if not isinstance(model, BayesianModel) else [s for s in model.site_shapes if s not in parameters]
        )
        needs_latents = kind in ("samples", "log_likelihood")
        self.site_shapes: Shapes = {name: value.shape for name, value in parameters.items()}
        if needs_latents and isinstance(model, BayesianModel):
            self.site_shapes = model.site_shapes
        like = next(iter(parameters.values()))
        self.device: torch.device | None = like.device
        self.dtype: torch.dtype | None = like.dtype
        self.args = tuple(self._placed(value) for value in args)
        self.kwargs = {name: self._placed(value) for name, value in kwargs.items()}
        self.num_rows: int | None = len(args[0])

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device=self.device, dtype=self.dtype if value.is_floating_point() else None)

    def __call__(self, weights: Weights, rows: slice) -> Any:
        def cut(value: Any) -> Any:
            is_data = isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.num_rows
            return value[rows] if is_data else value

        args = tuple(cut(value) for value in self.args)
        kwargs = {name: cut(value) for name, value in self.kwargs.items()}
        if not isinstance(self.model, BayesianModel):
            return torch.func.vmap(lambda own: torch.func.functional_call(self.model, own, args, kwargs))(weights)
        if self.kind == "log_likelihood":
            return {"y": self.model.log_likelihood(weights, *args, **kwargs)}
        outputs = self.model.outputs(weights, *args, **kwargs)
        if self.kind == "outputs":
            return outputs
        if self.kind == "mean":
            return self.model.likelihood.mean(outputs)
        return self.model.likelihood.distribution(outputs, {name: weights[name] for name in self.latents}).sample()


class TracedPredictor:
    """Any Pyro model, its trace mapped over draws; one draw after another where that can't be."""

    num_rows: int | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, given: set[str]
    ):
        self.model, self.args, self.kwargs, self.kind = model, args, kwargs, kind
        with poutine.block():
            trace = poutine.trace(model).get_trace(*args, **kwargs)
        sites: dict[str, Any] = {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
        self.site_shapes: Shapes = {name: site["value"].shape for name, site in sites.items() if name in given}
        if not self.site_shapes:
            raise ValueError(
                f"the model has none of the sites {sorted(given)}; it has {sorted(sites)}. (The sites of a network are "
                "its parameters' names.)"
            )
        self._one_by_one = False

    def __call__(self, weights: Weights, rows: slice) -> Any:
        with pyro.validation_enabled(False):  # whose checks branch on values, which vmap forbids
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
            trace = poutine.trace(conditioned).get_trace(*self.args, **self.kwargs)
            observed: dict[str, Any] = {n: trace.nodes[n] for n in trace.observation_nodes if n not in weights}
            return {
                name: site["fn"].log_prob(site["value"])
                for name, site in observed.items()
                if not site_is_subsample(site)
            }
        with _Targets(weights, self.kind) as targets:
            returned = conditioned(*self.args, **self.kwargs)
        if self.kind != "outputs":
            return targets.values
        if not tree_leaves(returned) or not all(isinstance(leaf, Tensor) for leaf in tree_leaves(returned)):
            raise ValueError(
                f"the model returns {type(returned).__name__}, no tensors; return its outputs, or use kind='mean' or "
                "kind='samples'"
            )
        return returned


class _Targets(Messenger):
    """Draws what the posterior doesn't give, and keeps that or its mean."""

    def __init__(self, given: Mapping[str, Tensor], kind: str):
        super().__init__()
        self.given, self.kind = given, kind
        self.values: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.given or site_is_subsample(msg) or msg["infer"].get("_deterministic"):
            return
        # Not rsample, whose in-place noise vmap refuses. Data stay where only what they don't change is asked for.
        if self.kind == "samples" or not msg["is_observed"]:
            msg["value"] = msg["fn"].sample()
            msg["done"] = True
        self.values[msg["name"]] = msg["fn"].mean if self.kind == "mean" else msg["value"]


def predictor_of(given: set[str], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> Predictor:
    """The predictor of a model.

    :param given: the sites that the posterior has.
    """
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; it must be a BayesianModel, a network or a Pyro model")
    names = {name for name, _ in model.named_parameters()} if isinstance(model, nn.Module) else set()
    if isinstance(model, BayesianModel) or (names and names <= given):
        return NetworkPredictor(model, args, kwargs, kind)
    return TracedPredictor(model, args, kwargs, kind, given)
