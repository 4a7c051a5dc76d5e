r"""A door for those who come from ``pyro.infer``: change the import, keep the rest.

>>> from pyro_symmetric.infer import MCMC, NUTS  # instead of: from pyro.infer import MCMC, NUTS
>>> mcmc = MCMC(NUTS(model), num_samples=500, warmup_steps=500, num_chains=4)
>>> mcmc.run(y)
>>> mcmc.summary()

:class:`MCMC` runs the chains by :func:`~pyro_symmetric.sample`, all in one batch of this process, and takes this
library's kernels as well. :func:`HMC` and :func:`NUTS` take Pyro's names of arguments and return ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pyro_symmetric import arguments, mcmc
from pyro_symmetric.mcmc import Kernel
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Weights

__all__ = ["HMC", "MCMC", "NUTS"]

# Arguments of Pyro's kernels that have nothing left to say here; they are taken and not used.
IDLE = {"max_plate_nesting", "jit_compile", "jit_options", "ignore_jit_warnings", "use_multinomial_sampling"}
OURS = {"adapt_mass_matrix": "adapt_mass", "target_accept_prob": "target_accept"}


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

    :param step_size: of the leapfrog; if it is adapted, warm-up finds it, wherever it starts.
    :param trajectory_length: mean integration time of a trajectory. Each one's is drawn anew between 0 and twice the
        mean, against resonance; in Pyro all are of one length.
    :param num_steps: instead of a length: it is ``step_size * num_steps``. With neither, the length is :math:`2 \pi`.
    :param settings: those that :func:`NUTS` has, too.
    """
    if trajectory_length is None:
        trajectory_length = 2 * math.pi if num_steps is None else step_size * num_steps
    return mcmc.HMC(model, trajectory_length=trajectory_length, max_steps=1024, **_settings(step_size, **settings))


def NUTS(model: Callable[..., Any], *, step_size: float = 1.0, max_tree_depth: int = 10, **settings: Any) -> mcmc.NUTS:
    """The No-U-Turn sampler with Pyro's arguments, for :class:`MCMC`.

    >>> MCMC(NUTS(model, full_mass=True), num_samples=500, num_chains=4)

    :param max_tree_depth: a trajectory has at most ``2 ** max_tree_depth - 1`` steps.
    :param settings: ``adapt_step_size=True``; ``adapt_mass_matrix=True``; ``full_mass=False``, or ``True`` for a dense
        mass matrix; ``target_accept_prob=0.8``; those of Pyro's that have nothing to say here.
    """
    return mcmc.NUTS(model, max_treedepth=max_tree_depth, **_settings(step_size, **settings))


def _settings(step_size: float, **pyros: Any) -> dict[str, Any]:
    """The settings that our Hamiltonian kernels share, of Pyro's."""
    given = {"target_accept_prob": 0.8, **{name: value for name, value in pyros.items() if name not in IDLE}}
    own = {OURS.get(name, name): value for name, value in given.items()}
    own |= {"mass": "dense"} if own.pop("full_mass", False) else {}
    return own if own.get("adapt_step_size", True) is True else {**own, "step_size": step_size}


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
    :param options: of :func:`~pyro_symmetric.sample`: ``initial``, ``hook``, ``seed``, ``engine``, ``store`` ...
    """

    posterior: Posterior  # all that ``sample`` gave, once there are draws

    def __init__(
        self,
        kernel: Kernel,
        num_samples: int,
        warmup_steps: int | None = None,
        *,
        num_chains: int = 1,
        disable_progbar: bool = False,
        **options: Any,
    ):
        self.kernel = arguments.instance("kernel", kernel, Kernel, "HMC(model), NUTS(model) or another kernel of ours")
        self.num_samples, self.num_chains = num_samples, num_chains
        self._options = {"num_warmup": num_samples if warmup_steps is None else warmup_steps, **options}
        self._options |= {"num_samples": num_samples, "num_chains": num_chains, "progress": not disable_progbar}

    def run(self, *args: Any, **kwargs: Any) -> Posterior:
        """Run the chains; all arguments are the model's. The draws come with all that is known of them."""
        self._args, self._kwargs = args, kwargs  # which ArviZ reads
        self.posterior = mcmc.sample(self.kernel, *args, kwargs=kwargs, **self._options)
        return self.posterior

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> Weights:
        """Draws of the latent sites; see ``Posterior.get_samples``."""
        return self.posterior.get_samples(num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Convergence in Pyro's form; see ``Posterior.diagnostics``."""
        return self.posterior.diagnostics()

    def summary(self, prob: float = 0.9) -> None:
        """Print a table of the sites; see ``Posterior.summary``."""
        self.posterior.summary(prob)
