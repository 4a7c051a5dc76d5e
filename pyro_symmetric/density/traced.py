"""Any Pyro model with its arguments, conditioned on values of its sites, for many draws
at once by vmap.

:class:`Traced` is shared by samplers and predictions; :class:`TracedTarget` is the
density that samplers move on. A model that :func:`torch.func.vmap` refuses, such as one
that branches on a sampled value, is run for one draw after another. Discrete latent
sites are summed out by :mod:`~pyro_symmetric.density.enumeration`, and what vmap
refuses has stand-ins (:mod:`~pyro_symmetric.density.stand_ins`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.autoguide import AutoGuide
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.nn import PyroModule
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Size, Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import LOCK, replaced, running_pyro, without_warnings
from pyro_symmetric.arguments import (
    Args,
    Device,
    Dtype,
    Entries,
    Function,
    Keywords,
    Model,
    Values,
    as_tensor,
    described,
    described_call,
    holding_nan,
)
from pyro_symmetric.density.enumeration import (
    Enumeration,
    LimitedTables,
    masked_log_prob,
)
from pyro_symmetric.density.graphs import graph_of
from pyro_symmetric.density.site_checks import (
    check_observed,
    hidden_sites,
    is_deterministic,
    require_declared_axes,
    require_possible_data,
    sampled,
    seen_through,
)
from pyro_symmetric.density.stand_ins import STAND_INS
from pyro_symmetric.errors import first_line
from pyro_symmetric.weights import (
    Shapes,
    Tensors,
    Weights,
    drop_names,
    first_value,
    map_values,
    select_rows,
    stacked,
    transform_of,
)

LAYOUT_RUNS = 10  # runs of a model whose sites, shapes and supports must agree
# draws of the discrete sites for which the enumerated model must agree with the model
# itself
DISCRETE_DRAWS = 8


class Traced:
    """A Pyro model with its arguments.

    :ivar enumeration: the discrete sites that are summed out; ``None`` without.
    :ivar one_by_one: why draws are evaluated one after another; empty if they are
        vmapped.
    """

    def __init__(self, model: Model, args: Args, kwargs: Entries):
        require_call(model, args, kwargs)
        self.model = seen_through(model)
        self.args = args
        self.kwargs = kwargs
        self.enumeration: Enumeration | None = None
        self.one_by_one = ""

    def run(self, values: Tensors, *, drawing: bool = False) -> Trace:
        """Trace the model conditioned on values of sites, with its discrete sites
        enumerated.

        :param drawing: whether to draw the discrete sites that aren't given, instead of
            enumerating them.
        """
        model = self.model
        if self.enumeration is not None and not drawing:
            model = self.enumeration(
                poutine.infer_config(model, config_fn=_enumerate_in_parallel)
            )
        return poutine.trace(poutine.condition(model, data=dict(values))).get_trace(
            *self.args, **self.kwargs
        )

    def mapped(
        self,
        function: Function,
        *batches: Tensors,
        randomness: str = "error",
    ) -> Any:
        """Map a function over draws and stack its results."""
        with _stand_ins(promoted(tree_leaves(batches))):
            if not self.one_by_one:
                return torch.func.vmap(function, randomness=randomness)(*batches)
            count = len(tree_leaves(batches)[0])
            results = [
                function(*(select_rows(b, s) for b in batches)) for s in range(count)
            ]
            return tree_map(lambda *leaves: torch.stack(leaves), *results)

    def give_up_map(self, reason: object) -> None:
        """Evaluate draws one after another from now on, with a warning."""
        # without PyTorch's request for a report
        message = first_line(reason).partition(" We don't support that yet")[0]
        message = message[:300].rstrip(".")
        self.one_by_one = (
            f"the model can't be mapped over draws (torch.func.vmap): {message}"
        )
        warnings.warn(
            "draws are evaluated one after another, which takes longer: "
            f"{self.one_by_one}. Usual causes: Python "
            "control flow or .item() on a sampled value, in-place changes, a "
            "distribution that PyTorch can't map",
            RuntimeWarning,
            stacklevel=6,  # the caller of predict
        )

    def sum_out(self, continuous: Tensors) -> None:
        """Sum out the discrete sites from now on.

        :param continuous: values of the continuous sites, at which the enumerated
            model is checked.
        :raises ValueError: naming a discrete site with a batch dimension outside all
            plates, or discrete sites for which the density of the enumerated model
            differs from that of the model itself.
        """
        with _stand_ins(promoted(list(continuous.values()))):
            sites = sampled(self.run(continuous))
            self.enumeration = Enumeration(
                sites, [site for site in sites if is_enumerated(site)]
            )
            names = ", ".join(map(repr, list(self.enumeration.batch_shapes)[:3]))
            refused = f"the discrete sites {names} can't be summed out:"
            try:
                with LimitedTables():
                    trace = self.run(continuous)
                    self.log_prob(trace)
            # caused by enumeration: the model runs if its discrete sites are drawn
            except Exception as error:
                raise ValueError(
                    f"{refused} the model fails on all of their values at once "
                    f"({type(error).__name__}: {first_line(error)}). Usual "
                    "causes: Python control flow on a discrete value (write "
                    "torch.where), indexing that doesn't "
                    "broadcast (pyro.ops.indexing.Vindex), or a long loop outside "
                    "pyro.plate and pyro.markov"
                ) from error
            nodes = Entries(trace.nodes).items()
            rows = {
                name: s["value"]
                for name, s in nodes
                if s["type"] == "sample" and site_is_subsample(s)
            }
            for _ in range(DISCRETE_DRAWS):
                likely, log_prob = self.enumeration.draw(trace)
                plain = self.run({**continuous, **rows, **likely}, drawing=True)
                agrees = _is_same_log_prob(log_prob, as_tensor(plain.log_prob_sum()))
                # Likely values may all be alike in a plate, or those of one site weigh
                # so much that others aren't seen.
                values, log_probs = self.enumeration.random_assignment(trace)
                plain = self.run({**continuous, **rows, **values}, drawing=True)
                agrees = agrees and all(
                    _is_same_log_prob(
                        site_log_prob,
                        as_tensor(masked_log_prob(plain.nodes[site])).sum(),
                    )
                    for site, site_log_prob in log_probs.items()
                )
                if not agrees:
                    raise ValueError(
                        f"{refused} the model has another density with all of their "
                        "values at once than with one value of each. Usual cause: a "
                        "site sums or averages over a discrete value's dimensions, as "
                        ".sum() or .mean() without dim= does; put the sites that "
                        "depend on a plate's discrete site into that plate, or write "
                        "the reduced value as a discrete site of its own (a Binomial "
                        "for a sum of Bernoullis)"
                    )

    def log_prob(self, trace: Trace) -> Tensor:
        """Return the log-density of a :meth:`run`, with the discrete sites summed
        out.
        """
        return (
            as_tensor(trace.log_prob_sum())
            if self.enumeration is None
            else self.enumeration.log_prob(trace)
        )


class TracedTarget(Traced):
    """The density of any Pyro model with its data, with the interface of
    ``NetworkTarget``.

    Mini-batches are the subsamples of its plates with ``subsample_size``.
    """

    def __init__(
        self,
        model: Model,
        args: Args,
        kwargs: Entries,
        device: Device = None,
        dtype: Dtype = None,
    ):
        super().__init__(model, args, kwargs)
        self._prior = PriorMessenger(device, dtype)
        self._programs = dict[Any, Callable[[Weights], Weights]]()
        with LOCK, explaining(model, args, kwargs):
            trace = self._prior_run()
        # of Pyro's store, or of the model's modules
        parameters = {name: trace.nodes[name]["value"] for name in trace.param_nodes}
        self.parameters = map_values(as_tensor, parameters)
        latent = latent_sites(trace)
        # The sites that samplers move: discrete sites are summed out.
        moved = {site["name"]: site for site in latent if not is_enumerated(site)}
        self.sites: Values = map_values(lambda site: site["fn"], moved)
        if not self.sites:
            names = [site["name"] for site in latent]
            reason = "no latent site"
            if names:
                reason = f"discrete latent sites only, {names}, which are summed out"
            elif hidden := hidden_sites(self._prior_run):
                reason += f" but {hidden}, which poutine.block hides"
            hint = (
                "; make a model of a network by BayesianModel(net)"
                if isinstance(model, nn.Module)
                else ""
            )
            raise ValueError(
                f"the model has {reason}, so there is nothing to sample{hint}"
            )
        observed: list[Any] = [trace.nodes[name] for name in trace.observation_nodes]
        if not observed and (hidden := hidden_sites(self._prior_run, observed=True)):
            warnings.warn(
                f"the model hides its observed sites {hidden} by poutine.block, so "
                "that its density is the prior's; pass the model without the block to "
                "condition on them",
                UserWarning,
                stacklevel=4,
            )
        check_observed(site for site in observed if not is_deterministic(site))
        require_declared_axes(trace.nodes.values())
        self.row_counts = _subsampled_plates(trace)
        values = map_values(lambda site: site["value"], moved)
        self._probes = {
            site: self._probe(site, value) for site, value in values.items()
        }
        for _ in range(LAYOUT_RUNS):
            self._require_same_layout(self._prior_run())
        if len(self.sites) < len(latent):
            self.sum_out(values)
        with _stand_ins():
            require_possible_data(trace.nodes.values())
            if self.enumeration is not None:
                self._require_same_layout(self.run(values))
            self.computed: Shapes = (
                {} if self.row_counts else self._deterministic_sites(trace, values)
            )

    def log_joint(self, weights: Weights, rows: Tensors | None) -> Tensor:
        return self.mapped(self._log_joint, weights, dict(rows or {}))

    def log_joint_of_one(self, weights: Weights) -> Tensor:
        """Return the log-joint density of one set of weights, without a map."""
        with _stand_ins(promoted(list(weights.values()))):
            return self._log_joint(weights, {})

    def _log_joint(self, weights: Weights, rows: Tensors) -> Tensor:
        trace = self.run({**weights, **rows})
        if self.one_by_one:  # the model may branch on values
            self._require_same_layout(trace)
        return self.log_prob(trace)

    def is_random(self) -> ValueError:
        """Return the error that two evaluations at one point differ, with the likely
        cause."""
        reason = (
            "the model's density isn't a function of its sites: two evaluations at one "
            "point differ"
        )
        blocked = hidden_sites(self._prior_run)  # around the call, perhaps all sites
        if hidden := [name for name in blocked if name not in self.sites]:
            return ValueError(
                f"{reason}. The model draws the sites {hidden} anew each time, as "
                "poutine.block hides them; leave them visible (a sampler moves "
                "continuous sites, and discrete ones are summed out)"
            )
        return ValueError(
            f"{reason}. Usual causes: dropout in train mode (call .eval()), or random "
            "numbers drawn outside of pyro.sample"
        )

    def compute(self, weights: Weights) -> Weights:
        """Compute the sites of :attr:`computed` for weights of batch shape ``(C,)``, by
        a graph that holds neither Pyro nor the density; it is traced once for each
        ``C``."""
        if not self.computed or self.one_by_one:
            return self.mapped(self._compute, weights) if self.computed else {}
        key = tuple(
            (value.shape, value.dtype, value.device) for value in weights.values()
        )
        if key not in self._programs:
            with LOCK, without_warnings():
                graph = graph_of(
                    lambda draws: self.mapped(self._compute, draws), {}, weights
                )
            graph.graph.eliminate_dead_code()
            graph.recompile()
            self._programs[key] = graph
        return self._programs[key](weights)

    def _compute(self, weights: Weights) -> Weights:
        nodes: Entries = self.run(weights).nodes
        weight = first_value(weights)
        return {site: nodes[site]["value"].to(weight.dtype) for site in self.computed}

    def prior_weights(self, num_chains: int) -> Weights:
        # Many distributions can't be sampled inside vmap. This loop takes milliseconds,
        # once a sampling run.
        draws = []
        for _ in range(num_chains):
            nodes: Entries = self._prior_run().nodes
            draws.append({site: nodes[site]["value"] for site in self.sites})
        return stacked(draws)

    def __getstate__(self) -> Entries:
        return {**vars(self), "_programs": {}}

    def __repr__(self) -> str:
        return f"sites={list(self.sites)}"

    def _prior_run(self) -> Trace:
        with LOCK, torch.no_grad():
            return poutine.trace(self._prior(self.model)).get_trace(
                *self.args, **self.kwargs
            )

    def _probe(self, site: str, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return unconstrained values of a site, and their images in its support."""
        transform = transform_of(site, self.sites[site])
        shape = Size(transform.inverse_shape(value.shape))
        probe = (
            torch.linspace(-1.5, 1.5, shape.numel(), device="cpu")
            .reshape(shape)
            .to(value)
        )
        return probe, transform(probe)

    def _require_same_layout(self, trace: Trace) -> None:
        """Raise ``ValueError`` if a run has other sites, shapes or supports than the
        first.
        """
        names = {
            site["name"] for site in latent_sites(trace) if not is_enumerated(site)
        }
        nodes = Entries(trace.nodes)
        known = self._probes.keys()
        if changed := sorted((names - known) | (known - nodes.keys())):
            raise ValueError(
                f"the sites {changed} exist in some runs of the model only; a sampler "
                "needs the same ones in all"
            )
        for name, (probe, expected) in self._probes.items():
            # In an enumerated trace the support is compared for each value of the
            # discrete sites.
            same_shape = nodes[name]["value"].shape == expected.shape
            if not (
                same_shape
                and (transform_of(name, nodes[name]["fn"])(probe) == expected).all()
            ):
                raise ValueError(
                    f"the support or shape of site {name!r} depends on other sites; a "
                    "sampler needs a fixed one. "
                    "Sample it on a fixed support and transform it, e.g. Uniform(0, 1) "
                    "times the bound"
                )

    def _deterministic_sites(
        self, trace: Trace, continuous: Weights
    ) -> dict[str, Size]:
        """Return the shapes of the deterministic sites, without complex ones and, with
        a warning, without those that depend on discrete sites, which have no single
        value once these are summed out."""
        shapes = {
            name: value.shape
            for name, value in deterministic_values(trace).items()
            if not value.is_complex()
        }
        if self.enumeration is None or not shapes:
            return shapes
        runs = [self.run(continuous, drawing=True) for _ in range(DISCRETE_DRAWS)]
        drawn = list(map(deterministic_values, runs))
        enumerated = deterministic_values(self.run(continuous))
        unclear = [
            name
            for name in shapes
            if not all(_is_close(enumerated[name], values[name]) for values in drawn)
        ]
        if unclear:
            warnings.warn(
                f"the deterministic sites {unclear} depend on discrete sites, which "
                "are summed out, so the posterior "
                "doesn't hold them",
                UserWarning,
                stacklevel=4,
            )
        return drop_names(shapes, unclear)


class PriorMessenger(Messenger):
    """Samples latent sites from their priors on a device and in a dtype; ``Normal(0.0,
    1.0)`` itself samples on the CPU in float32. Sites that can't be sampled (an
    improper prior, or no sampler) are uniform in (-2, 2) in unconstrained space, where
    chains start."""

    def __init__(self, device: Device, dtype: Dtype):
        super().__init__()
        self.device = device
        self.dtype = dtype

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is not None or msg["done"] or site_is_subsample(msg):
            return
        with contextlib.suppress(NotImplementedError):
            msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])
        if msg["value"] is None:
            transform = transform_of(msg["name"], msg["fn"])
            shape = transform.inverse_shape(
                Size(msg["fn"].batch_shape) + Size(msg["fn"].event_shape)
            )
            msg["value"] = transform(4 * torch.rand(shape, device="cpu") - 2)
        if isinstance(msg["value"], Tensor) and msg["value"].is_floating_point():
            msg["value"] = msg["value"].to(device=self.device, dtype=self.dtype)
        msg["done"] = True


# sites and plates ---------------------------------------------------------------------


def deterministic_values(trace: Trace) -> Weights:
    """Return the values of the deterministic sites of a run."""
    sites: Any = filter(is_deterministic, trace.nodes.values())
    return {site["name"]: site["value"] for site in sites}


def latent_sites(trace: Trace) -> list[Any]:
    """Return the latent sites of a run, without the rows of subsampled plates."""
    return [site for site in sampled(trace) if not site["is_observed"]]


def _subsampled_plates(trace: Trace) -> dict[str, tuple[int, int]]:
    """Return the plates that draw their own subsample: name -> (full size, subsample
    size).

    Warn of plates with a given subsample (``subsample=``), which never changes.

    :raises ValueError: naming a subsampled plate that holds a latent site.
    """
    plates = {}
    for site in trace.nodes.values():
        for frame in site.get("cond_indep_stack", ()):
            total = frame.full_size
            size = frame.size
            if total is None or not 0 <= size < total:
                continue
            if getattr(trace.nodes[frame.name]["fn"], "subsample_size", None) is None:
                warnings.warn(
                    f"the plate {frame.name!r} holds {size} of {total} rows, always "
                    "the same ones, and each counts "
                    f"{total / size:.3g} times. The posterior is narrower than these "
                    "rows justify; pass the whole "
                    "data, and subsample_size= to the plate for a stochastic-gradient "
                    "sampler",
                    stacklevel=2,
                )
                continue
            plates[frame.name] = int(total), int(size)
            if (
                site["type"] == "sample"
                and not site["is_observed"]
                and not is_enumerated(site)
            ):
                raise ValueError(
                    f"the latent site {site['name']!r} lies in the subsampled plate "
                    f"{frame.name!r}, so a mini-batch "
                    "would move only some of its values; samplers need global latent "
                    "sites"
                )
    return plates


def is_enumerated(site: Any) -> bool:
    """Return whether a sample site is latent with finitely many values, so that it can
    be summed out.
    """
    fn = site["fn"]
    return (
        not site["is_observed"]
        and isinstance(fn, TorchDistributionMixin)
        and bool(fn.has_enumerate_support)
    )


@dataclass(frozen=True)
class ContinuousStart:
    """A starting strategy of Pyro's that draws discrete sites, which are summed out,
    and leaves the others to another strategy.
    """

    strategy: Callable[[Any], Any]

    def __call__(self, site: Any) -> Any:
        return site["fn"].sample() if is_enumerated(site) else self.strategy(site)


def _enumerate_in_parallel(site: Any) -> Any:
    """Annotate a discrete latent site for enumeration, whatever its own ``infer``
    says.
    """
    return (
        {"enumerate": "parallel", "expand": False, "num_samples": None}
        if is_enumerated(site)
        else {}
    )


def _is_same_log_prob(log_prob: Tensor, expected: Tensor) -> bool:
    """Return whether two log-densities agree; NaN, or ``-inf`` twice, tells nothing."""
    is_possible = bool((log_prob > -torch.inf) | (expected > -torch.inf))
    return not is_possible or _is_close(log_prob, expected)


def _is_close(value: Any, expected: Any) -> bool:
    """Return whether two values agree but for rounding; NaN agrees with NaN."""
    value = as_tensor(value)
    expected = as_tensor(expected)
    same_shape = value.shape == expected.shape
    return same_shape and bool(
        torch.isclose(
            value.double(), expected.double(), 1e-4, 1e-6, equal_nan=True
        ).all()
    )


def require_model(model: Any) -> None:
    """Raise ``TypeError`` unless an object can be a Pyro model."""
    if not callable(model) or isinstance(model, type | AutoGuide | MCMCKernel):
        raise TypeError(
            f"model is {described(model)}; it must be a Pyro model: callable, no "
            "class, guide or kernel"
        )


def title_of(model: Any) -> str:
    """Return the name of a model, also inside partials."""
    while isinstance(model, functools.partial):
        model = model.func
    return getattr(model, "__name__", type(model).__name__)


def require_call(
    model: Any, args: Sequence[Any], kwargs: Keywords, name: str = "model"
) -> None:
    """Raise ``TypeError`` if a model doesn't take these arguments."""
    is_module = isinstance(model, nn.Module)
    try:
        call = model.forward if is_module else model
        # a decorator may give the arguments of what it wraps
        signature = inspect.signature(call, follow_wrapped=False)
    except (TypeError, ValueError):  # of a builtin, say
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        network = is_module and not isinstance(model, PyroModule)
        hint = "; make a model of a network by ps.BayesianModel(net)" * network
        raise TypeError(
            f"{name} {title_of(model)} takes {signature}, and was called with "
            f"{described_call(args, kwargs)}: {error}{hint}"
        ) from None


@contextlib.contextmanager
def explaining(model: Any, args: Sequence[Any], kwargs: Keywords) -> Iterator[None]:
    """Run a Pyro model; add a note with its name and arguments to its errors."""
    try:
        yield
    except Exception as error:
        kind = "module" if isinstance(model, nn.Module) else "model"
        error.add_note(
            f"This came from the {kind} {title_of(model)}, called with "
            f"{described_call(args, kwargs)}{holding_nan(model, args, kwargs)}."
        )
        raise


class Placed(NamedTuple):
    """A model and its arguments."""

    model: Any
    args: Args
    kwargs: Entries


def placed(
    model: Any,
    args: Args,
    kwargs: Entries,
    device: Device,
    dtype: Dtype,
) -> Placed:
    """Move a model and the tensors in its arguments, at any depth, to a device, and
    those in floating point to a dtype; ``None`` keeps either.

    So are the arguments that a ``functools.partial`` holds. The caller's own objects
    don't change: a module elsewhere, or in another dtype, is copied.
    """

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(
            device=device, dtype=dtype if value.is_floating_point() else None
        )

    if isinstance(model, nn.Module):
        parts = [*model.parameters(), *model.buffers()]
        if any(place(part) is not part for part in parts):
            model = copy.deepcopy(model).to(device=device, dtype=dtype)
    # exactly: what handlers of Pyro wrap is a partial of another kind
    if type(model) is functools.partial and (device or dtype):
        inner = placed(model.func, model.args, model.keywords, device, dtype)
        model = functools.partial(inner.model, *inner.args, **inner.kwargs)
    return Placed(model, tree_map(place, args), tree_map(place, kwargs))


def promoted(values: list[Tensor]) -> Dtype:
    """Return the promoted dtype of the floating-point tensors of a list; ``None`` if it
    has none.
    """
    dtypes = [value.dtype for value in values if value.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


@contextlib.contextmanager
def _stand_ins(dtype: Dtype = None) -> Iterator[None]:
    """Run models as in :func:`running_pyro`, with stand-ins for the parts that vmap
    refuses.
    """
    with running_pyro(dtype), contextlib.ExitStack() as stack:
        for stand_in in STAND_INS:
            stack.enter_context(replaced(*stand_in))
        yield
