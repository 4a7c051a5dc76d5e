"""Pyro's ``MCMC`` over :func:`~pyro_symmetric.sample` and :class:`~pyro_symmetric.Posterior`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Normal
from pyro.infer.autoguide.initialization import InitMessenger, init_to_uniform
from torch import Tensor
from torch.distributions import Transform

from pyro_symmetric import arguments, mcmc
from pyro_symmetric.calls import refuse_options
from pyro_symmetric.chain_statistics import also_of_one
from pyro_symmetric.chain_tables import chains_diagnostics
from pyro_symmetric.infer.kernels import Potential, PyroKernel, require_transforms, warn
from pyro_symmetric.layout import Layout
from pyro_symmetric.mcmc import Kernel
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.weights import Weights, batch_shape, require_sites

_SAMPLE = {
    name
    for name, parameter in inspect.signature(mcmc.sample).parameters.items()
    if parameter.kind.name == "KEYWORD_ONLY"
}
_RENAMED = {"args", "kwargs", "num_samples", "num_warmup", "num_chains", "progress", "hook"}  # or set by MCMC itself
OPTIONS = tuple(sorted(_SAMPLE - _RENAMED))
"""Options of :func:`~pyro_symmetric.sample` that :class:`MCMC` takes as they are."""


class MCMC:
    """Pyro's ``MCMC``, whose chains run in one batch of this process.

    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     pyro.sample("y", dist.Normal(mean, 1.0).expand([3]).to_event(1), obs=y)
    >>> mcmc = ps.MCMC(ps.NUTS(model), num_samples=20, num_chains=16, disable_progbar=True)
    >>> posterior = mcmc.run(torch.tensor([1.0, 2.0, 3.0]))
    >>> mcmc.get_samples()["mean"].shape
    torch.Size([320])

    Chains cost little beside one chain and learn their step size and mass matrix together, so use many.

    :param kernel: :func:`HMC` or :func:`NUTS` of this module, or any kernel of this library.
    :param num_samples: draws to keep of each chain.
    :param warmup_steps: iterations of each chain before them. ``None``: as many as draws.
    :param initial_params: where chains start, site -> unconstrained values; for more than one chain, these come first.
    :param num_chains: how many chains.
    :param hook_fn: is called as ``hook_fn(kernel, values, stage, i)`` after every iteration, for each chain in turn:
        its unconstrained values by site, ``"Warmup"`` or ``"Sample"``, and the iteration's number within that stage.
    :param mp_context: has no meaning here, since no processes are started; a warning says so.
    :param disable_progbar: show no progress bar.
    :param disable_validation: ``True`` or ``None``. Values aren't validated: a chain that diverges mustn't stop others.
    :param transforms: of a ``potential_fn`` only: site -> map from its constrained to its unconstrained values.
    :param save_params: the sites to keep. ``None``: all.
    :param options: of :func:`~pyro_symmetric.sample`: ``seed``, ``engine``, ``device``, ``dtype``, ``store`` ...
    """

    def __init__(
        self,
        kernel: PyroKernel | Kernel,
        num_samples: int,
        warmup_steps: int | None = None,
        initial_params: Mapping[str, Tensor] | None = None,
        num_chains: int = 1,
        hook_fn: Callable[..., Any] | None = None,
        mp_context: Any = None,
        disable_progbar: bool = False,
        disable_validation: bool | None = True,
        transforms: Mapping[str, Transform] | None = None,
        save_params: Sequence[str] | None = None,
        **options: Any,
    ):
        kinds = (PyroKernel, Kernel)
        arguments.instance("kernel", kernel, kinds, "HMC(model), NUTS(model) or another kernel of this library")
        self.kernel = kernel
        self.num_samples = arguments.whole("num_samples", num_samples, 1)
        warmup_steps = arguments.whole("warmup_steps", warmup_steps, 0, none="num_samples")
        self.warmup_steps = self.num_samples if warmup_steps is None else warmup_steps
        self.num_chains = arguments.whole("num_chains", num_chains, 1)
        self.save_params = None if save_params is None else arguments.listed("save_params", save_params, str, "sites")
        self._described = kernel if isinstance(kernel, PyroKernel) else PyroKernel(kernel)
        self._transforms = self._described.transforms if transforms is None else transforms
        require_transforms(self._transforms, self._described.potential_fn)
        self._hook_fn = arguments.function("hook_fn", hook_fn, "a function (kernel, values, stage, i)", none="none")
        self._progress = not arguments.flag("disable_progbar", disable_progbar)
        if not (disable_validation is None or disable_validation is True):
            found = arguments.shown(disable_validation)
            raise ValueError(
                f"disable_validation is {found}, but values are never validated here: a chain that diverges mustn't "
                "stop the others; pass True or None"
            )
        if mp_context is not None:
            warn(f"mp_context is {mp_context!r}, which has no meaning here: all chains run in this process")
        if unknown := [name for name in options if name not in OPTIONS]:
            raise TypeError(
                f"MCMC got an unexpected keyword argument {unknown[0]!r}; it takes {', '.join(_NAMED)}, and sample's "
                f"{', '.join(OPTIONS)}"
            )
        self._initial_params = _per_chain(initial_params, self.num_chains)
        if self._described.potential_fn is not None and self._initial_params is None:
            raise ValueError("initial_params is None, but potential_fn says nothing of its sites; pass where to start")
        if "initial" in options and self._initial_params is not None:
            raise ValueError("initial and initial_params are both given; pass one of them")
        self._options = options
        self._posterior: Posterior | None = None
        self._shown: Posterior | None = None

    def run(self, *args: Any, **kwargs: Any) -> Posterior:
        """Run the chains; all arguments are the model's. (A ``potential_fn`` takes none, and a warning says so.)

        :return: the draws with all that is known of them, which :attr:`posterior` keeps.
        :raises TypeError: if a keyword argument is an option of the constructor and no named argument of the model.
        """
        kernel, potential_fn = self._described.kernel, self._described.potential_fn
        if potential_fn is not None:
            if any(value is not None for value in (*args, *kwargs.values())):
                warn("run is given arguments, but potential_fn takes none but the sites' values")
            args, kwargs = (), {}
            model = _model_of(potential_fn, self._initial_params or {})
            kernel = replace(kernel, model=model)  # type: ignore[type-var]
        refuse_options(kernel.model, kwargs, _SAMPLE | set(inspect.signature(MCMC).parameters) - {"options"}, "MCMC")
        self._args, self._kwargs = args, kwargs
        placed: dict[str, Any] = {name: self._options.get(name) for name in ("device", "dtype")}
        layout = Settings(kernel, args, kwargs, engine="torch", **placed).density().layout
        if unknown := sorted(set(self.save_params or ()) - set(layout.site_shapes)):
            raise ValueError(f"save_params names {unknown}; the latent sites are {sorted(layout.site_shapes)}")
        posterior = mcmc.sample(
            kernel,
            *args,
            kwargs=kwargs,
            num_samples=self.num_samples,
            num_warmup=self.warmup_steps,
            num_chains=self.num_chains,
            progress=self._progress,
            hook=None if self._hook_fn is None else self._hook(layout),
            **{"initial": self._initial(layout, kernel.model, args, kwargs), **self._options},
        )
        transforms = self._transforms or {}
        samples = {site: transforms[site].inv(v) if site in transforms else v for site, v in posterior.samples.items()}
        self._posterior = replace(posterior, samples=samples)
        self._shown = replace(
            posterior, samples={site: samples[site] for site in self.save_params or layout.site_shapes}
        )
        return self._posterior

    def __repr__(self) -> str:
        held = "not run yet" if self._posterior is None else f"holding {str(self._posterior).splitlines()[0]}"
        return f"MCMC({self.kernel!r}, {self.num_chains} chains, {held})"

    @property
    def posterior(self) -> Posterior:
        """All that :func:`~pyro_symmetric.sample` gave.

        :raises RuntimeError: if :meth:`run` hasn't been called.
        """
        return self._drawn(self._posterior)

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> Weights:
        """Draws of the latent sites, or of ``save_params``; see ``Posterior.get_samples``."""
        return self._drawn(self._shown).get_samples(num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Convergence, entry by entry, in Pyro's form.

        :return: site -> ``n_eff`` and ``r_hat`` of shape ``site_shape`` (the bulk's effective sample size and the
            rank-normalised split R-hat; of one chain, between its halves); ``"divergences"`` and
            ``"acceptance rate"``: ``"chain 0"`` -> numbers.
        """
        found: dict[str, dict[str, Any]] = {}
        shown = self._drawn(self._shown)
        for site, draws in shown.samples.items():
            statistics = also_of_one(draws)
            found[site] = {"n_eff": statistics.ess_bulk, "r_hat": statistics.r_hat}
        return found | chains_diagnostics(shown.statistics, self.num_chains)

    def summary(self, prob: float = 0.9) -> None:
        """Print a table of these sites; see ``Posterior.summary``."""
        self._drawn(self._shown).summary(prob)

    # small steps ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _drawn(posterior: Posterior | None) -> Posterior:
        if posterior is None:
            raise RuntimeError("there are no draws yet; call run(...) first")
        return posterior

    def _initial(self, layout: Layout, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The starts of chains, as ``sample`` takes it."""
        if (given := self._initial_params) is not None:
            require_sites(given, layout.unconstrained_shapes, "initial_params")
            found = batch_shape(given, layout.unconstrained_shapes, "initial_params")
            if found != (self.num_chains,):
                shapes = {site: tuple(shape) for site, shape in layout.unconstrained_shapes.items()}
                first = "" if self.num_chains == 1 else f", with {self.num_chains} chains in front of them"
                raise ValueError(f"initial_params has other shapes than the unconstrained ones, {shapes}{first}")
            return {site: transform(given[site]) for site, transform in layout.transforms.items()}
        if self._described.init_strategy is init_to_uniform:
            return None

        def draw(count: int) -> Weights:
            started = poutine.trace(InitMessenger(self._described.init_strategy)(model))
            with torch.no_grad():
                traces: list[Any] = [started.get_trace(*args, **kwargs) for _ in range(count)]
            sites = [name for name, _ in traces[0].iter_stochastic_nodes()]
            return {name: torch.stack([trace.nodes[name]["value"] for trace in traces]) for name in sites}

        return draw

    def _hook(self, layout: Layout) -> Callable[[int, Weights], None]:
        def hook(iteration: int, weights: Weights) -> None:
            assert self._hook_fn is not None
            free = {site: transform.inv(weights[site]) for site, transform in layout.transforms.items()}
            warming_up = iteration < self.warmup_steps
            stage, i = ("Warmup", iteration) if warming_up else ("Sample", iteration - self.warmup_steps)
            for chain in range(self.num_chains):  # a chain at a time: what a hook for Pyro takes
                self._hook_fn(self.kernel, {site: value[chain] for site, value in free.items()}, stage, i)

        return hook


_NAMED = tuple(inspect.signature(MCMC).parameters)[:-1]  # the last one are the options


# small steps --------------------------------------------------------------------------------------------------------


def _model_of(potential_fn: Potential, initial_params: Mapping[str, Tensor]) -> Callable[[], None]:
    """A model whose density is that of a potential: its sites have a prior that counts nothing, only shapes."""

    def model() -> None:
        values = {}
        for site, start in initial_params.items():
            prior = Normal(start[0], 1.0).to_event(start.dim() - 1)
            values[site] = pyro.sample(site, prior.mask(False))
        with poutine.block():  # a potential may run a model of its own
            energy = potential_fn(values)
        if not isinstance(energy, Tensor) or energy.numel() != 1:
            raise ValueError(f"potential_fn gave {arguments.shown(energy)}; it must be a tensor of one number")
        pyro.factor("potential_fn", -energy.reshape(()))

    return model


def _per_chain(initial_params: Any, num_chains: int) -> Mapping[str, Tensor] | None:
    """Unconstrained values with chains first."""
    if initial_params is None:
        return None
    arguments.weights("initial_params", initial_params)
    if num_chains == 1:
        return {site: value.detach()[None] for site, value in initial_params.items()}
    for site, value in initial_params.items():
        if value.dim() < 1 or len(value) != num_chains:
            raise ValueError(
                f"initial_params[{site!r}] has shape {tuple(value.shape)}; its first axis must be {num_chains} chains"
            )
    return {site: value.detach() for site, value in initial_params.items()}
