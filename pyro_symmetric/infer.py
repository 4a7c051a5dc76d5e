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

:class:`MCMC` runs all chains in one batch by :func:`~pyro_symmetric.sample`, and
    accepts this library's kernels.
:func:`HMC` and :func:`NUTS` take Pyro's arguments and return such kernels.
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

# Arguments of Pyro's kernels that are accepted and ignored.
IGNORED = {
    "max_plate_nesting",
    "jit_compile",
    "jit_options",
    "ignore_jit_warnings",
    "use_multinomial_sampling",
}
RENAMED = {"adapt_mass_matrix": "adapt_mass", "target_accept_prob": "target_accept"}


def HMC(
    model: Callable[..., Any],
    *,
    step_size: float = 1.0,
    trajectory_length: float | None = None,
    num_steps: int | None = None,
    **settings: Any,
) -> mcmc.HMC:
    r"""Make a Hamiltonian Monte Carlo kernel from Pyro's arguments.

    >>> from pyro_symmetric.infer import HMC, MCMC
    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> mcmc = MCMC(HMC(model, trajectory_length=1.0), num_samples=200)

    :param step_size: step size of the leapfrog integrator; warm-up finds another unless
        ``adapt_step_size=False``.
    :param trajectory_length: mean integration time of a trajectory. The time of each
        trajectory is uniform between 0 and twice the mean, which avoids resonance; in
        Pyro it is constant.
    :param num_steps: sets the length to ``step_size * num_steps``. With neither, the
        length is :math:`2 \pi`.
    :param settings: as for :func:`NUTS`.
    """
    if trajectory_length is None:
        trajectory_length = 2 * math.pi if num_steps is None else step_size * num_steps
    return mcmc.HMC(
        model,
        trajectory_length=trajectory_length,
        max_steps=1024,
        **_settings(step_size, **settings),
    )


def NUTS(
    model: Callable[..., Any],
    *,
    step_size: float = 1.0,
    max_tree_depth: int = 10,
    **settings: Any,
) -> mcmc.NUTS:
    """Make a No-U-Turn sampler from Pyro's arguments.

    >>> from pyro_symmetric.infer import MCMC, NUTS
    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> mcmc = MCMC(NUTS(model, full_mass=True), num_samples=500, num_chains=4)

    :param max_tree_depth: a trajectory has at most ``2 ** max_tree_depth - 1`` steps.
    :param settings: ``adapt_step_size=True``; ``adapt_mass_matrix=True``;
        ``full_mass=False``, or ``True`` for a dense mass matrix;
        ``target_accept_prob=0.8``. Pyro's ``jit`` arguments and the like are ignored.
    """
    return mcmc.NUTS(
        model, max_treedepth=max_tree_depth, **_settings(step_size, **settings)
    )


def _settings(step_size: float, **given: Any) -> dict[str, Any]:
    """Translate Pyro's arguments to settings of our Hamiltonian kernels."""
    used = {
        "target_accept_prob": 0.8,
        **{name: value for name, value in given.items() if name not in IGNORED},
    }
    settings = {RENAMED.get(name, name): value for name, value in used.items()}
    settings |= {"mass": "dense"} if settings.pop("full_mass", False) else {}
    return (
        settings
        if settings.get("adapt_step_size", True) is True
        else {**settings, "step_size": step_size}
    )


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

    :param kernel: :func:`HMC` or :func:`NUTS` of this module, or any kernel of this
        library.
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
