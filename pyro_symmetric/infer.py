r"""Drop-in ``MCMC``, ``HMC`` and ``NUTS``: change the import from ``pyro.infer``, keep
the rest.

>>> from pyro_symmetric.infer import MCMC, NUTS  # instead of pyro.infer
>>> def model(y):
...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
...     pyro.sample("y", dist.Normal(mean, 1.0).expand([3]).to_event(1), obs=y)
>>> mcmc = MCMC(
...     NUTS(model), num_samples=50, warmup_steps=50, num_chains=4, disable_progbar=True
... )
>>> posterior = mcmc.run(torch.tensor([1.0, 2.0, 3.0]))
>>> mcmc.get_samples()["mean"].shape
torch.Size([200])

Other names of ``pyro.infer``, such as ``Predictive`` and ``SVI``, are Pyro's own.

:class:`MCMC` runs all chains in one batch by :func:`~pyro_symmetric.sample`. The
kernels are this library's, with Pyro's names of arguments and defaults of their own:
``target_accept_prob`` is 0.9, and the times of ``HMC``'s trajectories are uniform with
the mean ``trajectory_length``, :math:`\pi / 2`, which avoids resonance.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch.distributions import biject_to

from pyro_symmetric import arguments, mcmc
from pyro_symmetric._process import forked
from pyro_symmetric.arguments import Args, Entries, Function, Keywords, Model, Values
from pyro_symmetric.density.traced import is_enumerated, latent_sites
from pyro_symmetric.mcmc import HMC, NUTS, Kernel
from pyro_symmetric.mcmc.kernels.adaptation import REFUSED
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import (
    Tensors,
    Weights,
    pick,
    require_sites,
    select_rows,
)

__all__ = ["HMC", "MCMC", "NUTS"]


def __getattr__(name: str) -> Any:
    """Return Pyro's object of a name that has no counterpart here."""
    if name in pyro.infer.__all__:
        return getattr(pyro.infer, name)
    raise AttributeError(f"neither {__name__} nor pyro.infer has {name!r}")


# of ``sample``, and the names here; what isn't among its options belongs to ``run``
GUESSES = {"num_warmup": "warmup_steps", "progress": "disable_progbar"}
NO_OPTIONS = {"kernel_or_model", "args", "kwargs", "num_warmup", "progress"}


class MCMC:
    """Pyro's ``MCMC`` with all chains in one batch of this process.

    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     pyro.sample("y", dist.Normal(mean, 1.0).expand([3]).to_event(1), obs=y)
    >>> mcmc = ps.MCMC(
    ...     ps.NUTS(model), num_samples=20, num_chains=16, disable_progbar=True
    ... )
    >>> posterior = mcmc.run(torch.tensor([1.0, 2.0, 3.0]))
    >>> mcmc.get_samples()["mean"].shape
    torch.Size([320])

    :param kernel: any kernel of this library.
    :param num_samples: draws per chain.
    :param warmup_steps: warm-up iterations per chain. ``None``: ``num_samples``.
    :param initial_params: site -> unconstrained starting points, a row for each chain.
    :param hook_fn: called as ``hook_fn(kernel, params, stage, i)`` for each chain after
        each iteration, with its unconstrained sites; the kernel holds settings only.
    :param mp_context: of Pyro, and means nothing here; nor does
        ``disable_validation``.
    :param transforms: refused: sites are mapped by the bijections of their supports.
    :param save_params: the sites that :meth:`get_samples`, :meth:`diagnostics` and
        :meth:`summary` tell of.
    :param options: of :func:`~pyro_symmetric.sample`: ``initial``, ``hook``, ``seed``,
        ``engine``, ``store`` ...
    """

    def __init__(
        self,
        kernel: Kernel,
        num_samples: int,
        warmup_steps: int | None = None,
        initial_params: Tensors | None = None,
        num_chains: int = 1,
        hook_fn: Function | None = None,
        mp_context: str | None = None,
        disable_progbar: bool = False,
        disable_validation: bool | None = True,
        transforms: Any = None,
        save_params: Sequence[str] | None = None,
        **options: Any,
    ):
        self.kernel = arguments.instance(
            "kernel",
            kernel,
            Kernel,
            "HMC(model), NUTS(model) or another kernel of ours",
        )
        _require_options(options)
        if transforms is not None:
            raise TypeError(f"MCMC takes no transforms: {REFUSED['transforms']}")
        for name, pyros in (("initial", initial_params), ("hook", hook_fn)):
            if pyros is not None and options.get(name) is not None:
                raise TypeError(f"MCMC has {name}= and Pyro's name of it; pass one")
        for site, value in (initial_params or {}).items():
            if len(value) != num_chains:
                raise ValueError(
                    f"initial_params[{site!r}] has shape {tuple(value.shape)}; its "
                    f"first axis must be the {num_chains} chains"
                )
        self.num_samples = num_samples
        self.num_chains = num_chains
        self.initial_params = initial_params
        self.hook_fn = hook_fn
        self.save_params = save_params
        self._options = {
            "num_warmup": num_samples if warmup_steps is None else warmup_steps,
            **options,
        }
        self._posterior: Posterior | None = None
        self._options |= {
            "num_samples": num_samples,
            "num_chains": num_chains,
            "progress": not disable_progbar,
        }

    def run(self, *args: Any, **kwargs: Any) -> Posterior:
        """Run the chains; all arguments are passed to the model."""
        self._args = args  # read by ArviZ
        self._kwargs = kwargs
        options = dict(self._options)
        if self.initial_params is not None or self.hook_fn is not None:
            transforms = _bijections(self.kernel.model, args, kwargs)
        if self.initial_params is not None:
            options["initial"] = {
                site: transforms[site](value) if site in transforms else value
                for site, value in self.initial_params.items()
            }
        if self.hook_fn is not None:
            options["hook"] = functools.partial(self._call_hook, transforms)
        self._posterior = mcmc.sample(self.kernel, *args, kwargs=kwargs, **options)
        return self._posterior

    def _call_hook(self, transforms: Values, number: int, weights: Weights) -> None:
        """Call Pyro's hook for each chain, with its unconstrained sites."""
        num_warmup = self._options["num_warmup"]
        stage = "Warmup" if number < num_warmup else "Sample"
        iteration = number if number < num_warmup else number - num_warmup
        params = {site: transforms[site].inv(value) for site, value in weights.items()}
        for chain in range(self.num_chains):
            title = f"{stage} [{chain}]" if self.num_chains > 1 else stage
            of_chain = select_rows(params, chain)
            self.hook_fn(self.kernel, of_chain, title, iteration)  # type: ignore[misc]

    @property
    def posterior(self) -> Posterior:
        """The draws of :meth:`run`."""
        if self._posterior is None:
            raise RuntimeError(
                "there are no draws yet; call run(...) of this MCMC first"
            )
        return self._posterior

    def get_samples(
        self, num_samples: int | None = None, group_by_chain: bool = False
    ) -> Weights:
        """Return draws of the latent sites; see ``Posterior.get_samples``."""
        return self._saved().get_samples(num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, Entries]:
        """Return convergence diagnostics in Pyro's form; see
        ``Posterior.diagnostics``.
        """
        return self._saved().diagnostics()

    def summary(self, prob: float = 0.9) -> None:
        """Print a table of the sites; see ``Posterior.summary``."""
        self._saved().summary(prob)

    def _saved(self) -> Posterior:
        """Return the draws of the sites in ``save_params``."""
        if self.save_params is None:
            return self.posterior
        saved = arguments.listed("save_params", self.save_params, str, "sites")
        require_sites(self.posterior.samples, saved, "save_params: the model")
        samples = pick(self.posterior.samples, saved)
        return replace(self.posterior, samples=samples)


def _bijections(model: Model, args: Args, kwargs: Keywords) -> Entries:
    """Return the bijections from unconstrained values to a model's sites."""
    with torch.no_grad(), forked():
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return {
        site["name"]: biject_to(site["fn"].support)
        for site in latent_sites(trace)
        if not is_enumerated(site)
    }


def _require_options(options: Entries) -> None:
    """Require options of :func:`~pyro_symmetric.sample`."""
    known = inspect.signature(mcmc.sample).parameters.keys() - NO_OPTIONS
    of_pyro = inspect.signature(MCMC).parameters.keys() - {"options"}
    arguments.require_keywords("MCMC", {*known, *of_pyro}, options, GUESSES)
