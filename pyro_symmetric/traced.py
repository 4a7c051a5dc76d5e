"""Any Pyro model with its arguments, run with its sites given, for many draws of them at once by vmap.

:class:`Traced` is what samplers and predictions share; :class:`TracedTarget` is what samplers move on. A model that
can't be mapped, such as one that branches on a sampled value, is run for one draw after another. Parts of Pyro that
:func:`torch.func.vmap` refuses have stand-ins, which choose or join in place of writing into a tensor; they compute the
same.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import Delta, hmm
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.infer.autoguide import AutoGuide
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.ops import gaussian, special, tensor_utils
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.distributions.utils import broadcast_all
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import LOCK, running_pyro, without_warnings
from pyro_symmetric.arguments import as_tensor, described, described_call
from pyro_symmetric.enumeration import Enumeration, is_enumerated
from pyro_symmetric.weights import Weights, transform_of

RUNS = 10  # of a model, to see whether its sites and supports are always the same


class Traced:
    """A Pyro model with its arguments.

    :ivar enumeration: its discrete sites, if they are summed out.
    :ivar one_by_one: why draws are evaluated one after another; empty if they are all at once.
    """

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.enumeration: Enumeration | None = None
        self.one_by_one = ""

    def run(self, given: Mapping[str, Tensor]) -> poutine.Trace:
        """Run with these values of sites, and with all values of discrete sites that are summed out."""
        model = _Unchecked()(self.model)
        if self.enumeration is not None:
            return self.enumeration.run(model, given, self.args, self.kwargs)
        return poutine.trace(poutine.condition(model, data=dict(given))).get_trace(*self.args, **self.kwargs)

    def mapped(self, function: Callable[..., Any], *batches: Mapping[str, Tensor], randomness: str = "error") -> Any:
        """Results of a function of each draw, stacked."""
        with running_pyro(promoted(tree_leaves(batches))):
            if not self.one_by_one:
                with _stand_ins():
                    return torch.func.vmap(function, randomness=randomness)(*batches)
            count = len(tree_leaves(batches)[0])
            results = [function(*({n: value[s] for n, value in b.items()} for b in batches)) for s in range(count)]
            return tree_map(lambda *leaves: torch.stack(leaves), *results)

    def give_up_map(self, reason: object) -> None:
        """Evaluate draws one after another from now on, and say so."""
        said = (str(reason).strip() or repr(reason)).splitlines()[0]
        said = said.partition(" We don't support that yet")[0][:300].rstrip(".")  # PyTorch asks for a report of it
        self.one_by_one = f"the model can't be mapped over draws (torch.func.vmap): {said}"
        warnings.warn(
            f"draws are evaluated one after another, which takes longer: {self.one_by_one}. Usual causes: Python "
            "control flow or .item() on a sampled value, in-place changes, a distribution that PyTorch can't map",
            RuntimeWarning,
            stacklevel=5,
        )


class TracedTarget(Traced):
    """Any Pyro model with its data; attributes and methods as of a density's ``NetworkTarget``.

    Mini-batches are what its plates with ``subsample_size`` draw. It runs alone, since Pyro's handlers belong to the
    process.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(model, args, kwargs)
        self._placement, self._programs = Placement(device, dtype), dict[Any, Callable[[Weights], Weights]]()
        with LOCK, explaining(model, args, kwargs):
            trace = self._prior_run()
        latent = _latent(trace)
        # Those that samplers move: discrete ones that can be summed out aren't.
        self.sites: Mapping[str, Any] = {site["name"]: site["fn"] for site in latent if not is_enumerated(site)}
        if not self.sites:
            names = [site["name"] for site in latent]
            why = f"discrete latent sites only, {names}, which are summed out" if names else "no latent site"
            hint = "; make a model of a network by BayesianModel(net)" if isinstance(model, torch.nn.Module) else ""
            raise ValueError(f"{name_of(model)} has {why}, so there is nothing to sample{hint}")
        observed: list[Any] = [trace.nodes[name] for name in trace.observation_nodes]
        check_observed(site for site in observed if not is_deterministic(site))
        self.row_counts = _subsampled_plates(trace)
        given = {site["name"]: site["value"] for site in latent if site["name"] in self.sites}
        self._probes = {site: _probe(site, self.sites[site], self._placement, value) for site, value in given.items()}
        for _ in range(RUNS):
            self._require_same_layout(self._prior_run())
        with running_pyro():
            if len(self.sites) < len(latent):
                self.enumeration = Enumeration(model, trace, given, args, kwargs)
                self._require_same_layout(self.run(given))
            self.computed: Mapping[str, torch.Size] = {} if self.row_counts else self._deterministic_sites(trace)

    def log_joint(self, weights: Weights, rows: Mapping[str, Tensor] | None) -> Tensor:
        return self.mapped(self._log_joint, weights, dict(rows or {}))

    def _log_joint(self, weights: Weights, rows: Mapping[str, Tensor]) -> Tensor:
        trace = self._checked_run({**weights, **rows})
        return as_tensor(trace.log_prob_sum() if self.enumeration is None else self.enumeration.log_prob(trace))

    def compute(self, weights: Weights) -> Weights:
        """Values of :attr:`computed` for weights of batch shape ``(C,)``, by a program without Pyro and without what
        only the density needs; it is traced once for each ``C``."""
        if not self.computed or self.one_by_one:
            return self.mapped(self._compute, weights) if self.computed else {}
        key = tuple((value.shape, value.dtype, value.device) for value in weights.values())
        if key not in self._programs:
            from torch.fx.experimental.proxy_tensor import make_fx  # which takes long to load

            with LOCK, without_warnings():
                graph = make_fx(lambda own: self.mapped(self._compute, own))(weights)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            self._programs[key] = graph
        return self._programs[key](weights)

    def _compute(self, weights: Weights) -> Weights:
        nodes: dict[str, Any] = self._checked_run(weights).nodes
        like = next(iter(weights.values()))
        return {site: nodes[site]["value"].to(like.dtype) for site in self.computed}

    def prior_weights(self, num_chains: int) -> Weights:
        # A model draws as it runs, one prior draw a run, and drawing inside vmap fails for many distributions. Starting
        # points are drawn once a sampling run, so this loop costs milliseconds.
        runs: list[dict[str, Any]] = [self._prior_run().nodes for _ in range(num_chains)]
        return {site: torch.stack([nodes[site]["value"] for nodes in runs]) for site in self.sites}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}

    def __repr__(self) -> str:
        return f"sites={list(self.sites)}"

    # runs -----------------------------------------------------------------------------------------------------------

    def _prior_run(self) -> poutine.Trace:
        with LOCK, torch.no_grad():
            return poutine.trace(_Drawn()(self._placement(self.model))).get_trace(*self.args, **self.kwargs)

    def _checked_run(self, given: Weights) -> poutine.Trace:
        trace = self.run(given)
        # Only of a run by itself, which may branch on values, can the numbers be looked at.
        self._require_same_layout(trace, supports=bool(self.one_by_one))
        return trace

    def _require_same_layout(self, trace: poutine.Trace, supports: bool = True) -> None:
        """:raises ValueError: if a run has other sites, shapes or supports than the first."""
        drawn, nodes = {site["name"] for site in _latent(trace) if not is_enumerated(site)}, dict[str, Any](trace.nodes)
        if changed := sorted(set(self._probes) ^ (drawn | (set(self._probes) & set(nodes)))):
            raise ValueError(
                f"the sites {changed} exist in some runs of the model only; a sampler needs the same ones in all"
            )
        for name, (probe, expected) in self._probes.items() if supports else ():
            # With discrete sites summed out, each value's support is compared.
            same_shape = nodes[name]["value"].shape == expected.shape
            if not (same_shape and bool((transform_of(name, nodes[name]["fn"])(probe) == expected).all())):
                raise ValueError(
                    f"the support or shape of site {name!r} depends on other sites; a sampler needs a fixed one. "
                    "Sample it on a fixed support and transform it, e.g. Uniform(0, 1) times the bound"
                )

    def _deterministic_sites(self, trace: poutine.Trace) -> dict[str, torch.Size]:
        """Deterministic sites and their shapes. Those of complex numbers are left out, and those that depend on
        discrete sites, which have no value if these are summed out."""
        found: dict[str, Any] = {name: site["value"] for name, site in trace.nodes.items() if is_deterministic(site)}
        shapes = {name: value.shape for name, value in found.items() if not value.is_complex()}
        unclear = self.enumeration.depending(list(shapes)) if self.enumeration is not None and shapes else []
        if unclear:
            warnings.warn(
                f"the deterministic sites {unclear} depend on discrete sites, which are summed out, so the posterior "
                "doesn't hold them",
                UserWarning,
                stacklevel=4,
            )
        return {name: shape for name, shape in shapes.items() if name not in unclear}


# small steps --------------------------------------------------------------------------------------------------------


class _Drawn(Messenger):
    """Draws latent sites; those that have no draws (an improper prior, or no sampler) from the box of unconstrained
    values in (-2, 2), where chains start."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is not None or msg["done"] or site_is_subsample(msg):
            return
        with contextlib.suppress(NotImplementedError):
            msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])
        if msg["value"] is None:
            transform = transform_of(msg["name"], msg["fn"])
            shape = transform.inverse_shape(torch.Size(msg["fn"].batch_shape) + torch.Size(msg["fn"].event_shape))
            msg["value"] = transform(4 * torch.rand(shape, device="cpu") - 2)
        msg["done"] = True


def _probe(site: str, fn: Any, placement: Placement, like: Tensor) -> tuple[Tensor, Tensor]:
    """Unconstrained values of a site, and what its first support makes of them."""
    transform = transform_of(site, fn)
    free = torch.Size(transform.inverse_shape(like.shape))
    probe = torch.linspace(-1.5, 1.5, free.numel(), device="cpu").reshape(free)
    probe = probe.to(placement.device or like.device, placement.dtype or like.dtype)
    return probe, transform(probe)


def _latent(trace: poutine.Trace) -> list[Any]:
    return [site for _, site in trace.iter_stochastic_nodes() if not site_is_subsample(site)]


def _subsampled_plates(trace: poutine.Trace) -> dict[str, tuple[int, int]]:
    """Plates that draw their own subsample: name -> (full size, subsample size).

    A warning tells of those whose subsample the model gives (``subsample=``): it never changes.

    :raises ValueError: naming a subsampled plate that holds a latent site.
    """
    plates = dict[str, tuple[int, int]]()
    for site in trace.nodes.values():
        for frame in site.get("cond_indep_stack", ()):
            total, size = frame.full_size, frame.size
            if total is None or not 0 <= size < total:
                continue
            if getattr(trace.nodes[frame.name]["fn"], "subsample_size", None) is None:
                warnings.warn(
                    f"the plate {frame.name!r} holds {size} of {total} rows, always the same ones, and each counts "
                    f"{total / size:.3g} times. The posterior is narrower than these rows can make it; pass the whole "
                    "data, and subsample_size= to the plate for a stochastic-gradient sampler",
                    stacklevel=2,
                )
                continue
            plates[frame.name] = int(total), int(size)
            if site["type"] == "sample" and not site["is_observed"] and not is_enumerated(site):
                raise ValueError(
                    f"the latent site {site['name']!r} lies in the subsampled plate {frame.name!r}, so a mini-batch "
                    "would move some of its values only; samplers here need global latent sites"
                )
    return plates


def require_model(model: Any) -> None:
    """:raises TypeError: if it can't be one."""
    if not callable(model) or isinstance(model, type | AutoGuide | MCMCKernel):
        raise TypeError(f"model is {described(model)}; it must be a Pyro model: callable, no class, guide or kernel")


class _Unchecked(Messenger):
    """Without the checks of distributions that were made with them, such as a ``PyroSample``'s.

    A chain that left all numbers behind mustn't stop the others, and no trace can hold a check.
    """

    def _pyro_sample(self, msg: Any) -> None:
        msg["fn"] = unchecked(msg["fn"])


def unchecked(fn: Any) -> Any:
    """A distribution that doesn't check values; a copy if it, or one that it is made of, did."""
    if not isinstance(fn, Distribution):
        return fn
    parts = {name: unchecked(part) for name, part in vars(fn).items() if isinstance(part, Distribution)}
    if not fn._validate_args and all(vars(fn)[name] is part for name, part in parts.items()):
        return fn
    own = copy.copy(fn)
    vars(own).update(parts, _validate_args=False)
    return own


# sites and places ----------------------------------------------------------------------------------------------------


def is_deterministic(site: Any) -> bool:
    """True if a site's value follows from others: a ``pyro.deterministic``, or what ``poutine.reparam`` made of a site.

    Pyro makes an observed sample site of both: its distribution is a :class:`~pyro.distributions.Delta` at its value,
    whose density is switched off, or stands for the change of variables.
    """
    if site["type"] != "sample" or not site["is_observed"]:
        return False
    fn = site["fn"]
    switched_off = isinstance(fn, MaskedDistribution) and fn._mask is False and isinstance(fn.base_dist, Delta)
    at_its_value = isinstance(fn, Delta) and fn.v is site["value"]
    return bool(site["infer"].get("_deterministic")) or switched_off or at_its_value


def check_observed(observed: Iterable[Any]) -> None:
    """:raises ValueError: naming the observed sites that hold complex numbers, or arrays of NumPy and lists, which
    only a distribution of one's own may score."""
    sites = {site["name"]: site for site in observed}
    values = {name: site["value"] for name, site in sites.items() if isinstance(site["value"], Tensor | Number)}
    packages = {name: type(site["fn"]).__module__.partition(".")[0] for name, site in sites.items()}
    if others := [name for name in sites if name not in values and packages[name] in ("pyro", "torch")]:
        found = ", ".join(described(sites[name]["value"]) for name in others)
        raise ValueError(f"the observed sites {others} hold {found}; pass tensors, as torch.as_tensor gives them")
    if several := [name for name, value in values.items() if as_tensor(value).is_complex()]:
        raise ValueError(
            f"the observed sites {several} hold complex numbers, whose imaginary parts would be lost; observe both "
            "parts, as torch.view_as_real gives them"
        )


@contextlib.contextmanager
def explaining(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Around a call of a Pyro model: add to its error what it was called with."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This came from {name_of(model)}, called with {described_call(args, kwargs)}.")
        raise


def name_of(model: Any) -> str:
    """A model in words: a function by its name, a module by its class."""
    kind = "module" if isinstance(model, nn.Module) else "model"
    return f"the {kind} {getattr(model, '__name__', type(model).__name__)}"


def placed(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model and its arguments on the device and, if floating-point, in the dtype; ``None``: as they are.

    The caller's own objects stay as they are: a module that isn't there yet is copied. Tensors are found in lists,
    tuples and dictionaries too, at any depth.
    """

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

    if isinstance(model, nn.Module):
        parts = [*model.parameters(), *model.buffers()]
        if any(place(part) is not part for part in parts):
            model = copy.deepcopy(model).to(device=device, dtype=dtype)
    return model, tree_map(place, args), tree_map(place, kwargs)


class Placement(Messenger):
    """Moves what a model draws to a device and dtype: a prior ``Normal(0.0, 1.0)`` draws on the CPU in float32."""

    def __init__(self, device: torch.device | str | None, dtype: torch.dtype | None):
        super().__init__()
        self.device, self.dtype = device, dtype

    def _pyro_post_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and isinstance(msg["value"], Tensor) and msg["value"].is_floating_point():
            msg["value"] = msg["value"].to(device=self.device, dtype=self.dtype)


def promoted(values: list[Tensor]) -> torch.dtype | None:
    """The dtype that holds all floating-point tensors of a list; ``None`` if it has none."""
    dtypes = [value.dtype for value in values if value.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


# stand-ins ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Let the parts below stand in for the originals. Enter it with the lock ``LOCK`` held."""
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in _PARTS]
    for owner, name, part in _PARTS:
        setattr(owner, name, part)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


class _SafeLog(torch.autograd.Function):
    """The logarithm, whose slope at 0 is finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / x.clamp(min=torch.finfo(x.dtype).eps)


def _safe_cholesky(x: Tensor) -> Tensor:
    """With a jitter on the diagonal that no gradient goes through."""
    relative = tensor_utils.CHOLESKY_RELATIVE_JITTER
    if x.size(-1) == 1:
        return (x.clamp(min=torch.finfo(x.dtype).tiny) if relative else x).sqrt()
    jitter = relative * torch.finfo(x.dtype).eps * x.detach().abs().max(-1).values
    return torch.linalg.cholesky(x + jitter.diag_embed())


def _ordered_logistic(self: Any, predictor: Tensor, cutpoints: Tensor, validate_args: bool | None = None) -> None:
    below = torch.sigmoid(cutpoints - predictor.unsqueeze(-1))
    self.predictor, self.cutpoints = predictor.expand(below.shape[:-1]), cutpoints.expand(below.shape)
    steps = torch.cat([below[..., :1], below[..., 1:] - below[..., :-1], 1 - below[..., -1:]], -1)
    super(dist.OrderedLogistic, self).__init__(steps, validate_args=validate_args)


def _multinomial_log_prob(self: Any, value: Tensor) -> Tensor:
    if self._validate_args:
        self._validate_sample(value)
    logits, value = broadcast_all(self.logits, value)
    logits = torch.where((value == 0) & (logits == -torch.inf), 0.0, logits)
    ways = torch.lgamma(value.sum(-1) + 1) - torch.lgamma(value + 1).sum(-1)
    return ways + (logits * value).sum(-1)


_PARTS: list[tuple[Any, str, Any]] = [
    (special, "_SafeLog", _SafeLog),
    (gaussian, "safe_cholesky", _safe_cholesky),
    (hmm, "safe_cholesky", _safe_cholesky),
    (dist.OrderedLogistic, "__init__", _ordered_logistic),
    (torch.distributions.Multinomial, "log_prob", _multinomial_log_prob),
]
