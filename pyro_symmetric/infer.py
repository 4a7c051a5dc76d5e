r"""A door for those who come from ``pyro.infer``: change the import, keep the rest.

>>> from pyro_symmetric.infer import MCMC, NUTS  # instead of: from pyro.infer import MCMC, NUTS
>>> mcmc = MCMC(NUTS(model), num_samples=500, warmup_steps=500, num_chains=4)
>>> mcmc.run(y)
>>> mcmc.summary()

:class:`MCMC` runs the chains by :func:`~pyro_symmetric.sample`, all in one batch of this process, and takes this
library's kernels as well. :func:`HMC` and :func:`NUTS` take Pyro's names of arguments and return ours.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor
from torch.distributions import Transform, biject_to

from pyro_symmetric import arguments, mcmc
from pyro_symmetric._process import running_pyro
from pyro_symmetric.calls import refuse_options
from pyro_symmetric.chain_statistics import also_of_one
from pyro_symmetric.chain_tables import chains_diagnostics
from pyro_symmetric.mcmc import Kernel
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.weights import Weights

__all__ = ["HMC", "MCMC", "NUTS"]

IDLE = {"max_plate_nesting", "jit_compile", "jit_options", "ignore_jit_warnings", "use_multinomial_sampling"}
"""Arguments of Pyro's kernels that have nothing left to say here; they are taken and not used."""


def HMC(
    model: Callable[..., Any],
    *,
    step_size: float = 1.0,
    trajectory_length: float | None = None,
    num_steps: int | None = None,
    **settings: Any,
) -> mcmc.HMC:
    r"""Hamiltonian Monte Carlo with Pyro's arguments, for :class:`MCMC`.

    >>> MCMC(HMC(model, trajectory_length=1.0), num_samples=200)

    :param model: any Pyro model.
    :param step_size: of the leapfrog; if it is adapted, warm-up finds it, wherever it starts.
    :param trajectory_length: mean integration time of a trajectory. Each one's is drawn anew between 0 and twice the
        mean, against resonance; in Pyro all are of one length.
    :param num_steps: instead of a length: it is ``step_size * num_steps``. With neither, the length is :math:`2 \pi`.
    :param settings: those that :func:`NUTS` has, too.
    """
    steps_length = 2 * math.pi if num_steps is None else step_size * num_steps
    length = steps_length if trajectory_length is None else trajectory_length
    return mcmc.HMC(model, trajectory_length=length, max_steps=1024, **_settings(step_size, settings))


def NUTS(model: Callable[..., Any], *, step_size: float = 1.0, max_tree_depth: int = 10, **settings: Any) -> mcmc.NUTS:
    """The No-U-Turn sampler with Pyro's arguments, for :class:`MCMC`.

    >>> MCMC(NUTS(model, full_mass=True), num_samples=500, num_chains=4)

    :param max_tree_depth: a trajectory has at most ``2 ** max_tree_depth - 1`` steps.
    :param settings: ``adapt_step_size=True``; ``adapt_mass_matrix=True``; ``full_mass=False``, or ``True`` for a dense
        mass matrix; ``target_accept_prob=0.8``. Those of :data:`IDLE` are taken, too.
    """
    return mcmc.NUTS(model, max_treedepth=max_tree_depth, **_settings(step_size, settings))


def _settings(step_size: float, given: dict[str, Any]) -> dict[str, Any]:
    """The settings that our Hamiltonian kernels share."""
    known = {"adapt_step_size": True, "adapt_mass_matrix": True, "full_mass": False, "target_accept_prob": 0.8}
    if unknown := sorted(set(given) - set(known) - IDLE):
        raise TypeError(f"{unknown[0]!r} is no argument here; there are step_size, {', '.join(known)}")
    known |= given
    return {
        "step_size": None if known["adapt_step_size"] is True else step_size,
        "adapt_step_size": known["adapt_step_size"],
        "adapt_mass": known["adapt_mass_matrix"],
        "mass": "dense" if arguments.flag("full_mass", known["full_mass"]) else "diagonal",
        "target_accept": known["target_accept_prob"],
    }


class MCMC:
    """Pyro's ``MCMC``, whose chains run in one batch of this process.

    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     pyro.sample("y", dist.Normal(mean, 1.0).expand([3]).to_event(1), obs=y)
    >>> mcmc = ps.MCMC(ps.NUTS(model), num_samples=20, num_chains=16, disable_progbar=True)
    >>> posterior = mcmc.run(torch.tensor([1.0, 2.0, 3.0]))
    >>> mcmc.get_samples()["mean"].shape
    torch.Size([320])

    :param kernel: :func:`HMC` or :func:`NUTS` of this module, or any kernel of this library.
    :param num_samples: draws to keep of each chain.
    :param warmup_steps: iterations of each chain before them. ``None``: as many as draws.
    :param initial_params: where chains start, site -> unconstrained values; for more than one chain, these come first.
    :param num_chains: how many chains.
    :param hook_fn: is called as ``hook_fn(kernel, values, stage, i)`` after every iteration, for each chain in turn:
        its unconstrained values by site, ``"Warmup"`` or ``"Sample"``, and the iteration's number within that stage.
    :param disable_progbar: show no progress bar.
    :param save_params: the sites to keep. ``None``: all.
    :param options: of :func:`~pyro_symmetric.sample`: ``seed``, ``engine``, ``device``, ``dtype``, ``store`` ...
        ``mp_context`` and ``disable_validation`` are taken and not used.
    """

    def __init__(
        self,
        kernel: Kernel,
        num_samples: int,
        warmup_steps: int | None = None,
        initial_params: Mapping[str, Tensor] | None = None,
        num_chains: int = 1,
        hook_fn: Callable[..., Any] | None = None,
        *,
        disable_progbar: bool = False,
        save_params: Sequence[str] | None = None,
        **options: Any,
    ):
        self.kernel = arguments.instance("kernel", kernel, Kernel, "HMC(model), NUTS(model) or another kernel of ours")
        self.num_samples = arguments.whole("num_samples", num_samples, 1)
        warmup_steps = arguments.whole("warmup_steps", warmup_steps, 0, none="num_samples")
        self.warmup_steps = self.num_samples if warmup_steps is None else warmup_steps
        self.num_chains = arguments.whole("num_chains", num_chains, 1)
        self.save_params = None if save_params is None else arguments.listed("save_params", save_params, str, "sites")
        self.hook_fn = arguments.function("hook_fn", hook_fn, "a function (kernel, values, stage, i)", none="none")
        self.initial_params = initial_params
        self._options = {
            name: value for name, value in options.items() if name not in ("mp_context", "disable_validation")
        }
        self._options["progress"] = not arguments.flag("disable_progbar", disable_progbar)
        self._posterior: Posterior | None = None

    def run(self, *args: Any, **kwargs: Any) -> Posterior:
        """Run the chains; all arguments are the model's.

        :return: the draws with all that is known of them, which :attr:`posterior` keeps.
        :raises TypeError: if a keyword argument is an option of the constructor and no named argument of the model.
        """
        own = set(inspect.signature(MCMC).parameters) | set(inspect.signature(mcmc.sample).parameters)
        refuse_options(self.kernel.model, kwargs, own - {"options", "args", "kwargs"}, "MCMC")
        self._args, self._kwargs = args, kwargs
        transforms = _transforms(self.kernel.model, args, kwargs)
        if unknown := sorted(set(self.save_params or ()) - set(transforms)):
            raise ValueError(f"save_params names {unknown}; the latent sites are {sorted(transforms)}")
        self._posterior = mcmc.sample(
            self.kernel,
            *args,
            kwargs=kwargs,
            num_samples=self.num_samples,
            num_warmup=self.warmup_steps,
            num_chains=self.num_chains,
            hook=None if self.hook_fn is None else self._hook(transforms),
            **{**self._options, **self._initial(transforms)},
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
        if self._posterior is None:
            raise RuntimeError("there are no draws yet; call run(...) first")
        return self._posterior

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> Weights:
        """Draws of the latent sites, or of ``save_params``; see ``Posterior.get_samples``."""
        return self._shown().get_samples(num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Convergence, entry by entry, in Pyro's form.

        :return: site -> ``n_eff`` and ``r_hat`` of shape ``site_shape`` (the bulk's effective sample size and the
            rank-normalised split R-hat; of one chain, between its halves); ``"divergences"`` and
            ``"acceptance rate"``: ``"chain 0"`` -> numbers.
        """
        found: dict[str, dict[str, Any]] = {}
        for site, draws in self._shown().samples.items():
            statistics = also_of_one(draws)
            found[site] = {"n_eff": statistics.ess_bulk, "r_hat": statistics.r_hat}
        return found | chains_diagnostics(self.posterior.statistics, self.num_chains)

    def summary(self, prob: float = 0.9) -> None:
        """Print a table of these sites; see ``Posterior.summary``."""
        self._shown().summary(prob)

    def _shown(self) -> Posterior:
        samples = self.posterior.samples
        return replace(self.posterior, samples={site: samples[site] for site in self.save_params or samples})

    def _initial(self, transforms: Mapping[str, Transform]) -> dict[str, Any]:
        """The option of ``sample`` that says where chains start."""
        if self.initial_params is None:
            return {}
        given = arguments.weights("initial_params", self.initial_params)
        if set(given) != set(transforms):
            raise ValueError(f"initial_params has sites {sorted(given)}; the latent sites are {sorted(transforms)}")
        free = given if self.num_chains > 1 else {site: value[None] for site, value in given.items()}
        return {"initial": {site: transforms[site](value.detach()) for site, value in free.items()}}

    def _hook(self, transforms: Mapping[str, Transform]) -> Callable[[int, Weights], None]:
        def hook(iteration: int, weights: Weights) -> None:
            assert self.hook_fn is not None
            free = {site: transform.inv(weights[site]) for site, transform in transforms.items()}
            warming_up = iteration < self.warmup_steps
            stage, i = ("Warmup", iteration) if warming_up else ("Sample", iteration - self.warmup_steps)
            for chain in range(self.num_chains):  # a chain at a time: what a hook for Pyro takes
                self.hook_fn(self.kernel, {site: value[chain] for site, value in free.items()}, stage, i)

        return hook


def _transforms(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Transform]:
    """Site -> the map from unconstrained values, of the sites that chains move."""
    with running_pyro(), poutine.block():
        trace: Any = prune_subsample_sites(poutine.trace(model).get_trace(*args, **kwargs))
    laws = {name: node["fn"] for name, node in trace.iter_stochastic_nodes()}
    return {name: biject_to(law.support) for name, law in laws.items() if not law.support.is_discrete}
