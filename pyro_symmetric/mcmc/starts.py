"""Where chains start: the prior, a uniform box, given weights, another posterior's last draws, or draws of a guide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_symmetric.mcmc.batches import independent_rows
from pyro_symmetric.mcmc.potential import INITIALISATIONS, Potential
from pyro_symmetric.samples import Posterior
from pyro_symmetric.symmetry.weights import Weights

Drawer = Callable[[int], Mapping[str, Tensor]]
Initial = str | Mapping[str, Tensor] | Posterior | AutoGuide | Drawer | None


def resolve(initial: Any, num_chains: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``initial`` as ``None``, a name, weights, or a function ``num_chains -> weights``.

    :raises TypeError: if it is none of what :func:`~pyro_symmetric.mcmc.sample` takes.
    """
    if initial is None or isinstance(initial, str | Mapping):
        return initial
    if isinstance(initial, Posterior):
        return _last_draws(initial, num_chains)
    if hasattr(initial, "sample_posterior"):
        return lambda count: initial.sample_posterior((count,))
    if isinstance(initial, AutoGuide):
        return lambda count: _draws_of(initial, count, args, kwargs)
    if callable(initial):
        return initial
    raise TypeError(
        f"initial is a {type(initial).__name__}; it must be one of {INITIALISATIONS}, weights, a Posterior, a guide "
        "or a function num_chains -> weights"
    )


def starting_points(potential: Potential, num_chains: int, initial: Any, max_tries: int = 100) -> Tensor:
    """Points ``(C, D)`` of finite energy and gradient, from what :func:`resolve` returned.

    :raises ValueError: if there are none, or given weights have none.
    """
    if not callable(initial):
        return potential.initial(num_chains, initial)
    z, bad = _drawn(potential, initial, num_chains), torch.ones(num_chains, dtype=torch.bool, device=potential.device)
    for _ in range(max_tries):
        bad = ~_is_finite(potential, z)
        if not bool(bad.any()):
            return z
        z[bad] = _drawn(potential, initial, int(bad.sum()))
    raise ValueError(
        f"{int(bad.sum())} of {num_chains} chains found no starting point with finite energy and gradient among "
        f"{max_tries} draws of initial; does it fit the model and its data?"
    )


# small steps --------------------------------------------------------------------------------------------------------


def _last_draws(posterior: Posterior, num_chains: int) -> Weights:
    """The last draw of each chain; for more chains than it has, also the draws before."""
    rounds = -(-num_chains // posterior.num_chains)
    if rounds > posterior.num_samples:
        raise ValueError(
            f"initial is a posterior of {posterior.num_chains} x {posterior.num_samples} draws, too few to start "
            f"{num_chains} chains from"
        )
    return {
        site: value[:, -rounds:].flip(1).transpose(0, 1).flatten(0, 1)[:num_chains]
        for site, value in posterior.samples.items()
    }


def _draws_of(guide: AutoGuide, count: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Weights:
    """Draws of a guide of Pyro's own, which gives one at a time."""
    with torch.no_grad():
        draws = [guide(*args, **kwargs) for _ in range(count)]
    return {site: torch.stack([draw[site] for draw in draws]) for site in draws[0]}


def _drawn(potential: Potential, draw: Drawer, count: int) -> Tensor:
    z = potential.unconstrain(draw(count))
    if z.shape != (count, potential.dim):
        raise ValueError(f"initial gave weights of batch shape {tuple(z.shape[:-1])} for {count} chains")
    return z.clone()


def _is_finite(potential: Potential, z: Tensor) -> Tensor:
    energy, gradient = potential.value_and_grad(z, independent_rows(potential.row_counts, len(z), z.device))
    return torch.isfinite(energy) & torch.isfinite(gradient).all(-1) & torch.isfinite(z).all(-1)
