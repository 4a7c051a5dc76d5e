"""One model, many samplers: this library's, NumPyro's, BlackJAX's and Pyro's, with
draws and processor time of each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.posterior.statistics import chain_statistics


@dataclass(frozen=True)
class Problem:
    """A model of either library.

    :param write: ``(distributions, sample, plate, library, data)``, where ``library``
        is ``torch`` or ``jax.numpy``.
    :param data: arrays; floating-point ones are computed with in the problem's
        precision.
    """

    write: Callable[..., None]
    data: tuple[NDArray[Any], ...]
    dtype: torch.dtype = torch.float32

    def in_pyro(self) -> Callable[[], None]:
        """The model; PyTorch's default dtype becomes the problem's, in which Pyro
        evaluates priors of plain numbers.
        """
        torch.set_default_dtype(self.dtype)
        tensors = (torch.as_tensor(array) for array in self.data)
        data = tuple(
            value.to(self.dtype) if value.is_floating_point() else value
            for value in tensors
        )

        def model() -> None:
            self.write(dist, pyro.sample, pyro.plate, torch, data)

        return model

    def in_numpyro(self) -> Callable[[], None]:
        import jax
        import jax.numpy as jnp
        import numpyro
        import numpyro.distributions as npd

        jax.config.update("jax_enable_x64", self.dtype == torch.float64)
        data = tuple(jnp.asarray(array) for array in self.data)

        def model() -> None:
            self.write(npd, numpyro.sample, numpyro.plate, jnp, data)

        return model


@dataclass(frozen=True)
class Run:
    """Draws ``(C, S, K)`` of all coordinates, and seconds of processor time;
    ``everything`` has compiling, too.
    """

    COLUMNS: ClassVar = (
        "worst effective",
        "R-hat",
        "draws a second",
        "with warm-up",
        "all",
    )

    draws: Tensor
    sampling: float
    warmup: float
    everything: float

    def row(
        self, function: Callable[[Tensor], Tensor] = Tensor.double
    ) -> dict[str, float]:
        """Effective draws of the worst coordinate, or of the worst value of a function
        of draws, and how many a second. Coordinates that never change, such as zeros of
        a triangular matrix, are left out; without others all are NaN.
        """
        statistics = chain_statistics(function(self.draws))
        moves = ~statistics.r_hat.isnan()
        if not moves.any():
            moves[:] = True
        worst = statistics.ess_bulk[moves].min().item()
        return {
            "worst effective": worst,
            "R-hat": statistics.r_hat[moves].max().item(),
            "draws a second": worst / self.sampling,
            "with warm-up": worst / (self.sampling + self.warmup),
            "all": worst / self.everything,
        }


def processor_seconds() -> float:
    """Of this process and of the compilers that it started."""
    children = os.times()  # in hundredths of a second
    return time.process_time() + children.children_user + children.children_system


def coordinates(samples: dict[str, Tensor]) -> Tensor:
    """Sites ``(C, S, ...)`` side by side, ``(C, S, K)``."""
    return torch.cat(
        [value.reshape(*value.shape[:2], -1) for value in samples.values()], -1
    )


def ours(
    problem: Problem,
    warmup: int | None,
    draws: int | None,
    kind: Callable[[Any], Any] = lambda model: model,
    chains: int | None = None,
    engine: str = "auto",
    args: tuple[Any, ...] = (),
    seed: int = 0,
) -> Run:
    """One of this library's samplers, twice: what the first run takes has compiling,
    unless programs were kept.

    :param warmup, draws: ``None``: as the library decides.
    :param kind: model -> kernel. By default the library chooses the sampler.
    :param args: arguments of the model, if ``kind`` takes another one.
    """
    model = problem.in_pyro()
    asked = {"num_warmup": warmup, "num_samples": draws, "num_chains": chains}

    def timed() -> tuple[ps.Posterior, float]:
        given: dict[str, Any] = {
            name: value for name, value in asked.items() if value is not None
        }
        begun = processor_seconds()
        found = ps.sample(
            kind(model),
            *args,
            engine=engine,
            dtype=problem.dtype,
            seed=seed,
            progress=False,
            **given,
        )
        return found, processor_seconds() - begun

    _, everything = timed()
    posterior, whole = timed()
    seconds = posterior.metadata["seconds"]
    share = seconds["sampling"] / (seconds["sampling"] + seconds["warmup"])
    return Run(
        coordinates(dict(posterior.samples)),
        whole * share,
        whole * (1 - share),
        everything,
    )


def numpyro_run(
    problem: Problem,
    warmup: int,
    draws: int,
    chains: int,
    dense: bool,
    method: str = "vectorized",
    seed: int = 0,
) -> Run:
    """NumPyro's NUTS: all chains at once (``"vectorized"``), or one after another
    (``"sequential"``).

    NumPyro's ``MCMC`` compiles its loop anew in every call, seconds each. Its calls are
    compiled here, once, so that the second run is all sampling.
    """
    import jax
    from numpyro.infer import MCMC, NUTS

    model = problem.in_numpyro()
    together = chains if method == "vectorized" else 1
    mcmc = MCMC(
        NUTS(model, dense_mass=dense),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=together,
        chain_method="vectorized",
        progress_bar=False,
    )

    @jax.jit
    def warmed_up(key: Any) -> Any:
        mcmc.warmup(key)
        return mcmc.last_state

    @jax.jit
    def drawn(state: Any, key: Any) -> Any:
        mcmc.post_warmup_state = state
        mcmc.run(key)
        return mcmc.get_samples(group_by_chain=True)

    keys = jax.random.split(jax.random.PRNGKey(seed), (chains // together, 2))
    return run_twice(
        model,
        lambda: [warmed_up(first) for first, _ in keys],
        lambda states: [
            drawn(state, key) for state, (_, key) in zip(states, keys, strict=True)
        ],
    )


def blackjax_run(
    problem: Problem, warmup: int, draws: int, chains: int, seed: int = 0
) -> Run:
    """BlackJAX's NUTS of NumPyro's density, all chains at once, each with a step size
    and a diagonal mass matrix of its own, as BlackJAX's window adaptation finds them.
    """
    import blackjax
    import jax
    from numpyro.infer.util import initialize_model

    model = problem.in_numpyro()
    start_key, warmup_key, draws_key = jax.random.split(jax.random.PRNGKey(seed), 3)
    start = initialize_model(jax.random.split(start_key, chains), model)

    def log_density(position: Any) -> Any:
        return -start.potential_fn(position)

    @jax.jit
    @jax.vmap
    def warmed_up(key: Any, position: Any) -> Any:
        adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
        adapted, _ = adaptation.run(key, position, warmup)
        return adapted.state, adapted.parameters

    @jax.jit
    @jax.vmap
    def drawn(key: Any, state: Any, parameters: Any) -> Any:
        kernel = blackjax.nuts(log_density, **parameters)

        def move(state: Any, key: Any) -> Any:
            state, _ = kernel.step(key, state)
            return state, start.postprocess_fn(state.position)

        return jax.lax.scan(move, state, jax.random.split(key, draws))[1]

    warmup_keys = jax.random.split(warmup_key, chains)
    draws_keys = jax.random.split(draws_key, chains)
    return run_twice(
        model,
        lambda: warmed_up(warmup_keys, start.param_info.z),
        lambda adapted: [drawn(draws_keys, *adapted)],
    )


def run_twice(
    model: Callable[[], None],
    warm_up: Callable[[], Any],
    draw: Callable[[Any], list[Any]],
) -> Run:
    """Run a sampler of JAX twice: what the first run takes has compiling. Sites come in
    the order of the model, which JAX forgets.

    :param model: NumPyro's.
    :param warm_up: returns states.
    :param draw: states -> draws of some chains each, by site, ``(chains, draws, ...)``.
    """
    import jax
    from numpyro import handlers

    def timed() -> tuple[Any, float, float]:
        begun = processor_seconds()
        states = jax.block_until_ready(warm_up())
        middle = processor_seconds()
        parts = jax.block_until_ready(draw(states))
        seconds = processor_seconds() - middle, middle - begun
        return jax.tree.map(lambda *parts: np.concatenate(parts), *parts), *seconds

    _, *compiling = timed()
    found, *seconds = timed()
    order = handlers.trace(handlers.seed(model, 0)).get_trace()
    return Run(
        coordinates(
            {name: torch.as_tensor(found[name]) for name in order if name in found}
        ),
        *seconds,
        sum(compiling),
    )


def pyro_run(
    problem: Problem, warmup: int, draws: int, part: float = 0.1, seed: int = 0
) -> Run:
    """Pyro's NUTS, one chain of a part of the iterations."""
    from pyro.infer import MCMC, NUTS

    model = problem.in_pyro()
    pyro.set_rng_seed(seed)
    draws, warmup = (max(10, round(part * count)) for count in (draws, warmup))
    mcmc = MCMC(
        NUTS(model), num_samples=draws, warmup_steps=warmup, disable_progbar=True
    )
    begun = processor_seconds()
    mcmc.run()
    whole = processor_seconds() - begun
    share = draws / (draws + warmup)
    found = {name: value[None] for name, value in mcmc.get_samples().items()}
    return Run(coordinates(found), whole * share, whole * (1 - share), whole)
