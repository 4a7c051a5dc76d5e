"""Where chains start: the prior, a uniform box, given weights, another posterior's last draws, or draws of a guide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.batches import independent_rows
from pyro_symmetric.mcmc.targets import NetworkTarget, not_a_number
from pyro_symmetric.samples import Posterior
from pyro_symmetric.weights import Weights, batch_shape, require_sites

if TYPE_CHECKING:  # which asks this module for its starting points
    from pyro_symmetric.mcmc.potential import Potential

INITIALISATIONS = ("prior", "uniform")
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
        return initial_points(potential, num_chains, initial, max_tries=max_tries)
    z, bad = _redrawn(potential, lambda count: _drawn(potential, initial, count), num_chains, max_tries)
    if bad:
        raise ValueError(
            f"{bad} of {num_chains} chains found no starting point with finite energy and gradient among {max_tries} "
            f"draws of initial; does it fit the model and its data? {_where_to_look(potential)}"
        )
    return z


def initial_points(
    potential: Potential,
    num_chains: int,
    init: str | Mapping[str, Tensor] | None,
    radius: float = 2.0,
    max_tries: int = 100,
) -> Tensor:
    """See :meth:`Potential.initial`."""
    if num_chains < 1:
        raise ValueError(f"num_chains is {num_chains}; at least 1 is needed")
    if isinstance(init, Mapping):
        return _given(potential, num_chains, init)
    if init is None:
        init = "prior" if isinstance(potential.target, NetworkTarget) else "uniform"
    if init not in INITIALISATIONS:
        raise ValueError(f"initial is {init!r}; it must be one of {INITIALISATIONS} or a dict of weights")

    def draw(count: int) -> Tensor:
        if init == "uniform":
            box = torch.rand(count, potential.dim, device=potential.device, dtype=potential.dtype)
            return (2 * box - 1) * radius
        return potential.unconstrain(potential.target.prior_weights(count))

    z, bad = _redrawn(potential, draw, num_chains, max_tries)
    if bad:
        raise ValueError(
            f"no starting point with finite energy and gradient in {max_tries} tries of initial={init!r} for "
            f"{bad} of {num_chains} chains; {_where_to_look(potential)}"
        )
    return z


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
    z = potential.unconstrain(arguments.weights("what initial gave", draw(count)))
    if z.shape != (count, potential.dim):
        raise ValueError(f"initial gave weights of batch shape {tuple(z.shape[:-1])} for {count} chains")
    return z.clone()


def _redrawn(
    potential: Potential, draw: Callable[[int], Tensor], num_chains: int, max_tries: int
) -> tuple[Tensor, int]:
    """Draws, anew for chains that start nowhere, at most so often; and how many still do."""
    z = draw(num_chains)
    bad = ~_is_finite(potential, z)
    for _ in range(max_tries):
        if not bool(bad.any()):
            break
        z[bad] = draw(int(bad.sum()))
        bad = ~_is_finite(potential, z)
    return z, int(bad.sum())


def _given(potential: Potential, num_chains: int, weights: Mapping[str, Tensor]) -> Tensor:
    require_sites(weights, potential.layout.site_shapes, "initial")
    found = batch_shape(weights, potential.layout.site_shapes, "initial")
    z = potential.unconstrain(weights)
    if tuple(found) not in ((), (num_chains,)):
        raise ValueError(
            f"initial weights have batch shape {tuple(found)}; it must be ({num_chains},), one for each "
            "chain, or () for one start of all"
        )
    z = z.expand(num_chains, potential.dim).clone()
    if bad := (~_is_finite(potential, z)).nonzero().flatten().tolist():
        sites = potential.target.sites
        outside = [site for site, fn in sites.items() if not _is_inside(fn, weights[site].to(potential.device))]
        why = f"outside of its support, or not finite, is {', '.join(map(repr, outside))}"
        raise ValueError(
            f"the initial weights of chains {bad[:10]} have no finite energy and gradient; "
            f"{why if outside else _where_to_look(potential)}"
        )
    return z


def _is_inside(fn: Distribution, value: Tensor) -> bool:
    """Whether constrained values are finite and lie in their support."""
    support: Any = fn.support
    return bool(torch.isfinite(value).all()) and bool(support.check(value).all())


def _where_to_look(potential: Potential) -> str:
    if found := not_a_number(potential.target):
        return f"the data hold NaN or infinite values, in {', '.join(map(repr, found))}"
    return "the data hold no NaN; give initial= weights where the model's density is finite"


def _is_finite(potential: Potential, z: Tensor) -> Tensor:
    energy, gradient = potential.value_and_grad(z, independent_rows(potential.row_counts, len(z), z.device))
    return torch.isfinite(energy) & torch.isfinite(gradient).all(-1) & torch.isfinite(z).all(-1)
