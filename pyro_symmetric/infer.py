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

:class:`MCMC` runs all chains in one batch by :func:`~pyro_symmetric.sample`. The
kernels are this library's, with Pyro's names of arguments and defaults of their own:
``target_accept_prob`` is 0.9, and the times of ``HMC``'s trajectories are uniform with
the mean ``trajectory_length``, :math:`\pi / 2`, which avoids resonance.
"""

from __future__ import annotations

import inspect
from typing import Any

from pyro_symmetric import arguments, mcmc
from pyro_symmetric.mcmc import HMC, NUTS, Kernel
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Weights

__all__ = ["HMC", "MCMC", "NUTS"]

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
    :param options: of :func:`~pyro_symmetric.sample`: ``initial``, ``hook``, ``seed``,
        ``engine``, ``store`` ...
    """

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
        self.kernel = arguments.instance(
            "kernel",
            kernel,
            Kernel,
            "HMC(model), NUTS(model) or another kernel of ours",
        )
        _require_options(options)
        self.num_samples, self.num_chains = num_samples, num_chains
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
        self._args, self._kwargs = args, kwargs  # read by ArviZ
        self._posterior = mcmc.sample(
            self.kernel, *args, kwargs=kwargs, **self._options
        )
        return self._posterior

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
        return self.posterior.get_samples(num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Return convergence diagnostics in Pyro's form; see
        ``Posterior.diagnostics``.
        """
        return self.posterior.diagnostics()

    def summary(self, prob: float = 0.9) -> None:
        """Print a table of the sites; see ``Posterior.summary``."""
        self.posterior.summary(prob)


def _require_options(options: dict[str, Any]) -> None:
    """Require options of :func:`~pyro_symmetric.sample`."""
    known = inspect.signature(mcmc.sample).parameters.keys() - NO_OPTIONS
    own = inspect.signature(MCMC).parameters.keys() - {"options"}
    arguments.require_keywords("MCMC", {*known, *own}, options, GUESSES)
