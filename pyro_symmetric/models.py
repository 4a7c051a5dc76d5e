r"""Bayesian neural networks as Pyro models, evaluated for batches of weights at once.

:class:`BayesianModel` turns any :class:`torch.nn.Module` into a Pyro model of

.. math:: p(w) \prod_{i=1}^{N} p(y_i \mid f_w(x_i))^{1/T}

whose latent sites are named after the parameters. :class:`~pyro.infer.SVI`,
:class:`~pyro.infer.Predictive` and MCMC accept it like any Pyro model. It also
evaluates outputs and log-densities for batches of weights by
:func:`torch.func.vmap`, where Pyro's particle plates fail on :class:`torch.nn.Linear`.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric import arguments
from pyro_symmetric._process import OwnLock, running_pyro, without_fast_attention
from pyro_symmetric.arguments import Args, Keywords
from pyro_symmetric.networks import naming_layer
from pyro_symmetric.weights import (
    Shapes,
    Tensors,
    Weights,
    batch_shape,
    first_value,
    map_values,
    require_sites,
)

Priors = dict[str, dist.TorchDistribution]  # of sites
PriorFunction = Callable[[str, Tensor], dist.TorchDistribution]


@dataclass(frozen=True)
class GaussianPrior:
    r"""Independent :math:`\mathcal N(0, s^2)` on every weight of a network.

    >>> prior = ps.GaussianPrior(1.0, fan_in=True, scales={"*.bias": 0.5})
    >>> net = nn.Sequential(nn.Linear(4, 3))
    >>> model = ps.BayesianModel(net, prior=prior)
    >>> {
    ...     name: float(prior.base_dist.scale.max())
    ...     for name, prior in model.priors().items()
    ... }
    {'0.weight': 0.5, '0.bias': 0.5}

    :param scale: standard deviation ``s``.
    :param fan_in: divide ``s`` by the square root of the number of inputs, for
        parameters with at least two axes.
    :param scales: overrides of ``scale`` by pattern on the parameter's name, e.g.
        ``{"0.*": 0.5, "*.bias": 1.0}``; the first match counts.
    """

    scale: float = 1.0
    fan_in: bool = False
    scales: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in {
            "scale": self.scale,
            **{f"scales[{k!r}]": v for k, v in self.scales.items()},
        }.items():
            arguments.positive(name, value)

    def scale_of(self, name: str, shape: torch.Size) -> float:
        """Return the standard deviation of the parameter ``name`` of the given
        shape.
        """
        scale = next(
            (
                s
                for pattern, s in self.scales.items()
                if fnmatch.fnmatchcase(name, pattern)
            ),
            self.scale,
        )
        return (
            scale / math.sqrt(math.prod(shape[1:]))
            if self.fan_in and len(shape) > 1
            else scale
        )

    def __call__(self, name: str, parameter: Tensor) -> dist.TorchDistribution:
        loc = torch.zeros_like(parameter)
        return dist.Normal(loc, self.scale_of(name, parameter.shape)).to_event(
            loc.dim()
        )


class BayesianModel(nn.Module):
    r"""A Pyro model ``model(x, y=None)`` of a neural network with a prior on every
    parameter that isn't frozen.

    The latent sites have the names of the network's parameters (``"0.weight"``), so the
    symmetry group of ``net`` acts on the posterior directly. The observed site is
    ``y``, in the plate ``data``; a mini-batch is scaled by ``num_data / len(x)``.
    Weights with leading (particle) dimensions are evaluated at once, so
    ``Trace_ELBO(vectorize_particles=True)`` and ``Predictive(parallel=True)`` work with
    ``max_plate_nesting=1``.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> model = ps.BayesianModel(net, prior=1.0, likelihood="categorical", num_data=100)
    >>> weights = {name: prior.sample((5,)) for name, prior in model.priors().items()}
    >>> model.outputs(weights, torch.randn(7, 2)).shape
    torch.Size([5, 7, 3])

    :param net: any module. It is copied, put in eval mode and never trained: dropout is
        off, and the running statistics of normalisation layers are data. A fresh
        network's mean 0 and variance 1 normalise nothing;
        ``torch.optim.swa_utils.update_bn`` fills them. Frozen parameters
        (``requires_grad`` is false) keep their values and aren't sites, unless all are
        frozen: freeze some for a posterior of the last layers, or of adapters. The
        values of the other parameters are :meth:`initial_weights`.
    :param prior: a standard deviation; a :class:`GaussianPrior`; or a function ``(name,
        parameter) -> distribution`` whose event shape is the parameter's shape.
    :param likelihood: ``"categorical"``, ``"gaussian"`` (noise learnt), or an object
        with the methods of
        :class:`Likelihood`.
    :param num_data: size ``N`` of the whole data set; ``None``: the rows of each call.
    :param temperature: ``T`` of a posterior :math:`\propto (p(y|x,w) p(w))^{1/T}`, cold
        below 1. A Gaussian prior is tempered by scaling its standard deviation by
        :math:`\sqrt T`; other priors and user-defined likelihoods raise ``ValueError``.
    """

    def __init__(
        self,
        net: nn.Module,
        prior: float | GaussianPrior | PriorFunction = 1.0,
        likelihood: str | Likelihood = "categorical",
        num_data: int | None = None,
        temperature: float = 1.0,
    ):
        super().__init__()
        arguments.instance("net", net, nn.Module, "a torch.nn.Module")
        if unexpected := [
            name
            for name, value in net.named_parameters()
            if not value.is_floating_point()
        ]:
            raise ValueError(
                f"the parameters {unexpected} aren't real numbers; build complex ones "
                "from two real parts"
            )
        num_data = arguments.whole(
            "num_data", num_data, 1, none="the rows of each call"
        )
        if isinstance(prior, str | type | Distribution):
            raise TypeError(
                f"prior is {arguments.described(prior)}; it must be a standard "
                "deviation, a GaussianPrior, or a function (name, parameter) -> "
                "distribution"
            )
        if not callable(prior):
            prior = GaussianPrior(arguments.positive("prior", prior))
        self._lock = OwnLock()
        self.net = copy.deepcopy(net).eval()
        hold_frozen(self.net)
        self.net.requires_grad_(False)
        self.prior: PriorFunction
        self.likelihood: Likelihood
        self.prior, self.likelihood = _tempered(
            prior, _named_likelihood(likelihood), temperature
        )
        self.num_data = num_data
        self._prior_cache: tuple[object, Priors] = (None, {})
        patterns = getattr(self.prior, "scales", {})
        names = list(self._parameters_of_net())
        if unmatched := [
            pattern for pattern in patterns if not fnmatch.filter(names, pattern)
        ]:
            raise ValueError(
                f"prior has scales for {unmatched}, but the network's parameters are "
                f"{names}"
            )
        self.priors()  # report a prior of the wrong shape here, not in the first step

    # sites ----------------------------------------------------------------------------

    def _parameters_of_net(self) -> Weights:
        return dict(self.net.named_parameters())

    def priors(self) -> Priors:
        """Return the prior of each latent site, on the network's device and in its
        dtype.
        """
        parameters = self._parameters_of_net()
        example = first_value(parameters)
        if self._prior_cache[0] != (example.device, example.dtype):
            priors = {
                name: self.prior(name, parameter.detach())
                for name, parameter in parameters.items()
            }
            for name, prior in priors.items():
                if prior.batch_shape or prior.event_shape != parameters[name].shape:
                    raise ValueError(
                        f"the prior of {name!r} has batch shape "
                        f"{tuple(prior.batch_shape)} and event shape "
                        f"{tuple(prior.event_shape)}; these must be () and the "
                        "parameter's shape (did you forget .to_event?)"
                    )
            latents = self.likelihood.latents(example)
            if clash := (latents.keys() | {"y", "data"}) & priors.keys():
                raise ValueError(
                    f"the network's parameters {sorted(clash)} have names of the "
                    "likelihood's sites"
                )
            self._prior_cache = ((example.device, example.dtype), {**priors, **latents})
        return self._prior_cache[1]

    @property
    def site_shapes(self) -> dict[str, torch.Size]:
        """Shape of each latent site: the network's parameters, then the likelihood's
        own.
        """
        return {
            name: prior.batch_shape + prior.event_shape
            for name, prior in self.priors().items()
        }

    def initial_weights(self) -> Weights:
        """Return the parameters of the given network as starting values, e.g. for
        ``init_to_value``.
        """
        return {
            name: parameter.detach().clone()
            for name, parameter in self._parameters_of_net().items()
        }

    # the Pyro model -------------------------------------------------------------------

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Sample weights and, in the plate ``data``, targets; return the network's
        outputs.
        """
        weights = {
            name: pyro.sample(name, prior) for name, prior in self.priors().items()
        }
        particles = _without_data_axis(weights, self.site_shapes)
        outputs = self.outputs(particles, x)
        size = len(x) if y is None else self._size(x)
        targets = None if y is None else self._targets(x, y)
        with (
            pyro.plate(
                "data", size=size, subsample=torch.arange(len(x), device=x.device)
            ),
            poutine.scale(scale=1 / self.likelihood.temperature),
        ):
            distribution = self.likelihood.distribution(outputs, self._latents(weights))
            if targets is not None:
                require_targets(self.likelihood, distribution, targets)
            per_row = (
                len(distribution.batch_shape)
                - len(batch_shape(particles, self.site_shapes))
                - 1
            )
            pyro.sample("y", distribution.to_event(per_row), obs=targets)
        return outputs

    def _latents(self, weights: Tensors) -> Weights:
        """Select the likelihood's own sites."""
        parameters = self._parameters_of_net()
        return {name: weights[name] for name in self.priors() if name not in parameters}

    def _size(self, x: Tensor) -> int:
        if self.num_data is not None and len(x) > self.num_data:
            raise ValueError(
                f"x has {len(x)} rows, but the model has num_data={self.num_data}"
            )
        return self.num_data or len(x)

    def _targets(self, x: Tensor, y: Tensor) -> Tensor:
        targets = self.likelihood.targets(y)
        if len(targets) != len(x):
            raise ValueError(
                f"x has {len(x)} rows but y has {len(targets)}; they must have the "
                "same number of rows"
            )
        return targets

    # batches of weights ---------------------------------------------------------------

    def outputs(
        self, weights: Tensors, x: Tensor, *, chunk_size: int | None = None
    ) -> Tensor:
        """Return the network's outputs ``batch_shape + (N, ...)`` for weights of any
        batch shape.

        :param weights: every parameter of the network; may also hold running
            statistics, in place of the network's.
        :param chunk_size: number of weights to evaluate at once; ``None`` for all.
        """
        shapes = map_values(
            lambda parameter: parameter.shape, self._parameters_of_net()
        )
        require_sites(weights, shapes)
        shapes |= {
            name: buffer.shape
            for name, buffer in self.net.named_buffers()
            if name in weights
        }
        shape = batch_shape(weights, shapes)
        weights = {name: weights[name].to(x.device) for name in shapes}
        # functional_call puts the weights into the network: one thread at a time
        with self._lock:
            if not shape:
                return self.call(weights, x)
            flat = {
                name: value.reshape(-1, *shapes[name])
                for name, value in weights.items()
            }
            result = over_weights(
                self.net, lambda w: self.call(w, x), flat, chunk_size=chunk_size
            )
        return result.reshape(*shape, *result.shape[1:])

    def twin(self) -> BayesianModel:
        """Copy the model but share its tensors, so that two threads may evaluate the
        model and its twin at once.
        """
        with self._lock:
            tensors = [*self.net.parameters(), *self.net.buffers()]
            return copy.deepcopy(self, {id(tensor): tensor for tensor in tensors})

    def call(self, weights: Weights, x: Tensor) -> Tensor:
        """Return the outputs ``(N, D)`` of one network; outputs ``(N,)`` get a second
        axis.
        """
        with naming_layer(self.net, x):
            outputs = call_with_weights(self.net, weights, (x,))
        return outputs[:, None] if outputs.dim() == 1 else outputs

    def log_prior(self, weights: Tensors, *, validate: bool = True) -> Tensor:
        """Return the log-density of the prior, ``batch_shape``.

        :param validate: whether the priors refuse values outside their support.
        """
        priors = self.priors()
        require_sites(weights, priors)
        batch_shape(weights, self.site_shapes)
        total: Any = 0
        # a posterior's draws are on the CPU
        device = next(self.net.parameters()).device
        for name, prior in priors.items():
            total = total + (prior if validate else _unvalidated(prior)).log_prob(
                weights[name].to(device)
            )
        return total

    def log_likelihood(
        self,
        weights: Tensors,
        x: Tensor,
        y: Tensor,
        *,
        validate: bool = True,
    ) -> Tensor:
        """Return the untempered log-likelihood of each row, ``batch_shape + (N,)``.

        :param validate: whether to check the targets, which synchronises with a GPU.
        :raises ValueError: if a target is outside the likelihood's support, such as a
            label that isn't a whole number.
        """
        require_sites(weights, self.site_shapes)
        outputs = self.outputs(weights, x)
        latents = map_values(lambda value: value.to(x.device), self._latents(weights))
        targets = self._targets(x, y)
        # vmap can't trace the validation in a user-defined likelihood.
        unvalidated = not validate and type(self.likelihood) not in (
            CategoricalLikelihood,
            GaussianLikelihood,
        )
        with running_pyro() if unvalidated else contextlib.nullcontext():
            distribution = self.likelihood.distribution(outputs, latents)
            if validate:
                require_targets(self.likelihood, distribution, targets)
            log_prob = (
                distribution if validate else _unvalidated(distribution)
            ).log_prob(targets)
        rows = batch_shape(weights, self.site_shapes) + torch.Size([len(x)])
        return log_prob.reshape(*rows, -1).sum(-1)

    def log_joint(
        self,
        weights: Tensors,
        x: Tensor,
        y: Tensor,
        *,
        validate: bool = True,
    ) -> Tensor:
        """Return the log of prior times tempered likelihood, ``batch_shape``; that of a
        mini-batch is scaled by ``num_data / len(x)``."""
        scale = self._size(x) / len(x) / self.likelihood.temperature
        log_prior = self.log_prior(weights, validate=validate)
        return log_prior + scale * self.log_likelihood(
            weights, x, y, validate=validate
        ).sum(-1)


# likelihoods --------------------------------------------------------------------------


class Likelihood(Protocol):
    """A distribution of targets given the network's outputs: the interface of
    user-defined likelihoods.
    """

    @property
    def temperature(self) -> float:
        """``T`` of the tempered likelihood ``p(y|x,w)^(1/T)``."""

    def latents(self, like: Tensor) -> Priors:
        """Return the priors of the likelihood's own latent sites, on the device and in
        the dtype of ``like``.
        """

    def distribution(self, outputs: Tensor, latents: Tensors) -> dist.TorchDistribution:
        """Return the distribution of targets, of batch shape ``batch_shape + (N,)``,
        given outputs ``batch_shape + (N, ...)``."""

    def targets(self, y: Tensor) -> Tensor:
        """Return the targets in the shape of a value of :meth:`distribution`."""

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the expected targets: class probabilities, or the regression
        function.
        """


@dataclass(frozen=True)
class CategoricalLikelihood:
    """Class labels; the network's outputs are logits ``(N, C)``.

    >>> model = ps.BayesianModel(
    ...     nn.Linear(4, 3), likelihood=ps.CategoricalLikelihood(temperature=0.5)
    ... )
    >>> model.log_likelihood(
    ...     model.initial_weights(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    ... ).shape
    torch.Size([5])

    :param temperature: ``T`` of the tempered likelihood ``p(y|x,w)^(1/T)``, cold below
        1.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        arguments.positive("temperature", self.temperature)

    def latents(self, like: Tensor) -> Priors:
        return {}

    def distribution(self, outputs: Tensor, latents: Tensors) -> dist.TorchDistribution:
        if outputs.shape[-1] < 2:
            raise ValueError(
                f"the network has {outputs.shape[-1]} output; a categorical likelihood "
                "needs at least 2"
            )
        return dist.Categorical(logits=outputs, validate_args=False)

    def targets(self, y: Tensor) -> Tensor:
        return y

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)


@dataclass(frozen=True)
class GaussianLikelihood:
    r"""Real targets with homoscedastic noise; the network's outputs are means ``(N,
    D)``, ``(N, 1)`` or ``(N,)``.

    >>> model = ps.BayesianModel(
    ...     nn.Linear(4, 1), likelihood=ps.GaussianLikelihood(prior_scale=0.5)
    ... )
    >>> sorted(model.priors())
    ['bias', 'noise_scale', 'weight']

    :param scale: the noise's standard deviation, or ``None`` to learn it as the latent
        site ``noise_scale``.
    :param prior_scale: with ``scale=None``, the scale of the half-normal prior of
        ``noise_scale``.
    :param temperature: ``T`` of the tempered likelihood ``p(y|x,w)^(1/T)``.
    """

    scale: float | None = None
    prior_scale: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        arguments.positive("temperature", self.temperature)
        arguments.positive("scale", self.scale, none="one that is learnt")
        arguments.positive("prior_scale", self.prior_scale)

    def latents(self, like: Tensor) -> Priors:
        return (
            {"noise_scale": dist.HalfNormal(like.new_tensor(self.prior_scale))}
            if self.scale is None
            else {}
        )

    def distribution(self, outputs: Tensor, latents: Tensors) -> dist.TorchDistribution:
        outputs = outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs
        scale = (
            outputs.new_full((), self.scale)
            if self.scale is not None
            else latents["noise_scale"]
        )
        scale = scale.reshape(*scale.shape, *[1] * (outputs.dim() - scale.dim()))
        return dist.Normal(outputs, scale, validate_args=False)

    def targets(self, y: Tensor) -> Tensor:
        return y.squeeze(-1) if y.dim() > 1 and y.shape[-1] == 1 else y

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs


def require_targets(
    likelihood: Likelihood, distribution: dist.TorchDistribution, targets: Tensor
) -> None:
    """Raise ``ValueError`` if a target is outside the support: a label that isn't a
    whole number, or NaN.

    Nothing is checked for user-defined likelihoods, or if Pyro's validation is off.
    """
    if not Distribution._validate_args or type(likelihood) not in (
        CategoricalLikelihood,
        GaussianLikelihood,
    ):
        return
    support: Any = distribution.support
    inside = support.check(targets)
    if not inside.all():
        value = targets[~inside][0].item()
        raise ValueError(
            f"y holds {value:g}, which isn't within the support of "
            f"{type(likelihood).__name__}: {support}"
        )


def _named_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood of a name; return a likelihood object unchanged."""
    named: dict[str, Likelihood] = {
        "categorical": CategoricalLikelihood(),
        "gaussian": GaussianLikelihood(),
    }
    interface = ("temperature", "latents", "distribution", "targets", "mean")
    if not isinstance(likelihood, type) and all(
        hasattr(likelihood, name) for name in interface
    ):
        return cast(Likelihood, likelihood)
    return named[
        arguments.one_of("likelihood", likelihood, sorted(named), "a likelihood object")
    ]


# vmap over networks -------------------------------------------------------------------

# Networks that vmap has failed on -> the reason.
UNMAPPABLE: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def over_weights(
    net: nn.Module,
    function: Callable[..., Any],
    *args: Any,
    in_dims: Sequence[int | None] | None = None,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Any:
    """Map a function over the first axis of its arguments by :func:`torch.func.vmap`,
    or, with a warning, by a loop if the network has an operator that vmap refuses. The
    options are those of ``vmap``."""
    axes = tuple(in_dims or [0] * len(args))
    failure: Exception | None = None
    if net not in UNMAPPABLE:
        try:
            return torch.func.vmap(
                function, axes, randomness=randomness, chunk_size=chunk_size
            )(*args)
        except (torch.OutOfMemoryError, torch.linalg.LinAlgError):
            raise
        except (RuntimeError, ValueError) as error:
            # A loop would draw other dropout masks. On a CPU, out of memory is a plain
            # RuntimeError.
            if "randomness" in str(error) or "memory" in str(error):
                raise
            failure = error
    mapped = [value for value, axis in zip(args, axes, strict=True) if axis == 0]
    results = []
    for k in range(len(tree_leaves(mapped)[0])):
        entry = operator.itemgetter(k)
        results.append(
            function(
                *(
                    v if a is None else tree_map(entry, v)
                    for v, a in zip(args, axes, strict=True)
                )
            )
        )
    if failure is not None:  # of vmap, not of the network, which the loop has evaluated
        reason = str(failure.__cause__ or failure).splitlines()[0]
        UNMAPPABLE[net] = (
            f"the network can't be mapped over weights (torch.func.vmap): {reason}"
        )
        warnings.warn(
            f"networks are evaluated one by one, which takes longer: {UNMAPPABLE[net]}",
            stacklevel=3,
        )
    return tree_map(lambda *leaves: torch.stack(leaves), *results)


def call_with_weights(
    net: nn.Module,
    weights: Tensors,
    args: Args,
    kwargs: Keywords | None = None,
) -> Any:
    """Call a network with these weights in place of its own, also under
    :func:`torch.func.vmap`.
    """
    modules = [
        module
        for module in net.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    before = [
        (module, module._parameters.copy(), module._buffers.copy())
        for module in modules
    ]
    try:
        with without_fast_attention():
            return torch.func.functional_call(
                net, dict(weights), args, dict(kwargs or {})
            )
    finally:  # functional_call leaves the weights in a module that has two names
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


# small steps --------------------------------------------------------------------------


def _unvalidated(fn: Any) -> Any:
    """Copy a distribution, and those inside it, without validation: a diverging chain
    mustn't stop the others, and vmap can't trace the checks."""
    result = copy.copy(fn)
    inner = {
        name: _unvalidated(part)
        for name, part in vars(fn).items()
        if isinstance(part, Distribution)
    }
    vars(result).update(inner, _validate_args=False)
    return result


def _tempered(
    prior: PriorFunction, likelihood: Likelihood, temperature: float
) -> tuple[PriorFunction, Likelihood]:
    """Temper prior and likelihood: the power ``1 / temperature`` of the joint
    density.
    """
    if arguments.positive("temperature", temperature) == 1:
        return prior, likelihood
    if not isinstance(prior, GaussianPrior) or not isinstance(
        likelihood, CategoricalLikelihood | GaussianLikelihood
    ):
        raise ValueError(
            f"temperature is {temperature:g}, which needs a GaussianPrior and one of "
            "this library's likelihoods, not "
            f"{prior!r} and {likelihood!r}; temper these yourself"
        )
    root = math.sqrt(temperature)
    prior = replace(
        prior,
        scale=root * prior.scale,
        scales=map_values(lambda s: root * s, prior.scales),
    )
    if isinstance(likelihood, GaussianLikelihood):
        likelihood = replace(likelihood, prior_scale=root * likelihood.prior_scale)
    return prior, replace(likelihood, temperature=temperature * likelihood.temperature)


def hold_frozen(net: nn.Module) -> None:
    """Convert parameters that don't require a gradient to buffers, unless none does."""
    if not any(parameter.requires_grad for parameter in net.parameters()):
        return
    for module in list(net.modules()):
        for name, parameter in list(
            module.named_parameters(recurse=False, remove_duplicate=False)
        ):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


def _without_data_axis(weights: Weights, shapes: Shapes) -> Weights:
    """Remove the axis of length 1 for the plate ``data`` from weights that were drawn
    in particle plates.

    Weights have shape ``particles + (1,) + site_shape``, but
    ``Predictive(parallel=True)`` omits the 1 if the site's own axes fill its place, so
    each site is treated separately.
    """
    result = {}
    for name, value in weights.items():
        axis = -1 - len(shapes[name])
        padded = value.dim() + axis >= 0 and value.shape[axis] == 1
        result[name] = value.squeeze(axis) if padded else value
    return result
