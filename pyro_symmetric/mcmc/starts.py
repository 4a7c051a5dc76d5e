"""Starts of chains: the prior, a uniform box, given weights, another posterior's last draws, or draws of a guide."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.mcmc.density.compiled import evaluated_once
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import mini_batches
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import batch_shape, require_sites

INITIALISATIONS = ("prior", "uniform")
MOST_TRIES = 100  # of a chain that starts where nothing is finite
RADIUS = 2.0  # of the box that "uniform" draws from, on the unconstrained scale, as Pyro's MCMC has it
ROUNDING = 1e-3  # of initial weights that go to unconstrained coordinates and back, relative
Drawer = Callable[[int], Mapping[str, Tensor]]
Initial = str | Mapping[str, Tensor] | Posterior | AutoGuide | Drawer | None


def resolve(initial: Any, num_chains: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``initial`` as ``None``, a name, weights, or a function ``num_chains -> weights``.

    Of a posterior the last draw of each chain is taken; for more chains than it has, also the draws before.

    :raises TypeError: if it is none of what :func:`~pyro_symmetric.mcmc.sample` takes.
    """
    if isinstance(initial, Posterior):
        rounds = -(-num_chains // initial.num_chains)
        if rounds > initial.num_samples:
            held = f"{initial.num_chains} x {initial.num_samples} draws"
            raise ValueError(f"initial is a posterior of {held}, too few to start {num_chains} chains from")
        last = {site: value[:, -rounds:].flip(1).transpose(0, 1) for site, value in initial.samples.items()}
        return {site: value.flatten(0, 1)[:num_chains] for site, value in last.items()}
    if hasattr(initial, "sample_posterior"):
        return lambda count: initial.sample_posterior((count,))
    if isinstance(initial, AutoGuide):  # of Pyro's own, which gives one draw at a time

        def draws(count: int) -> dict[str, Tensor]:
            with torch.no_grad():
                found = [initial(*args, **kwargs) for _ in range(count)]
            return {site: torch.stack([draw[site] for draw in found]) for site in found[0]}

        return draws
    if isinstance(initial, str | Mapping | None) or callable(initial):
        return initial
    raise TypeError(
        f"initial is a {type(initial).__name__}; it must be one of {INITIALISATIONS}, weights, a Posterior, a guide "
        "or a function num_chains -> weights"
    )


def starting_points(
    density: Density, num_chains: int, initial: Any = None, generator: torch.Generator | None = None
) -> Tensor:
    """Points ``(C, D)`` of finite energy and gradient. Chains that start at others are drawn anew, unless by weights.

    :param initial: what :func:`resolve` returned. ``None``: ``"prior"`` for a ``BayesianModel``, whose energy is huge
        far out, and ``"uniform"`` for any other model.
    :param generator: what random numbers come from; ``None``: one that is seeded from PyTorch's global one.
    :raises ValueError: if there are none, or if given weights have none.
    """
    if generator is None:
        generator = torch.Generator(density.device).manual_seed(drawn_seed())
    if initial is None:
        initial = "prior" if density.is_network else "uniform"
    if isinstance(initial, str):
        arguments.one_of("initial", initial, INITIALISATIONS, "a dict of weights")
    z, tries = _drawn(density, num_chains, initial, generator), 1
    most = 1 if isinstance(initial, Mapping) else MOST_TRIES
    while bool((bad := _broken(density, z, generator)).any()):
        if tries == most:
            raise ValueError(
                f"chains {bad.nonzero().flatten().tolist()[:10]} of {num_chains} found no start with finite energy "
                f"and gradient among {tries} draws. Are all data finite, those under a mask, too, and in the supports "
                "of their distributions? If so, give initial= weights where the density is finite"
            )
        z[bad], tries = _drawn(density, int(bad.sum()), initial, generator), tries + 1
    _tell_of_flat_sites(density, z)
    return z


# small steps --------------------------------------------------------------------------------------------------------


def _drawn(density: Density, count: int, initial: Any, generator: torch.Generator) -> Tensor:
    """Points ``(C, D)``; guides and functions draw from global generators, which are put back afterwards."""
    if initial == "uniform":
        box = torch.rand(count, density.dim, generator=generator, device=density.device, dtype=density.dtype)
        return (2 * box - 1) * RADIUS
    if initial == "prior":
        return density.draw_prior(count, generator)
    if isinstance(initial, Mapping):
        return _placed(density, initial, count, all_known=True)
    with forked(generator, density.device):
        return _placed(density, initial(count), count, all_known=False)


def _placed(density: Density, weights: Mapping[str, Tensor], count: int, all_known: bool) -> Tensor:
    """Points ``(C, D)`` of weights, one for each chain or one for all.

    :raises ValueError: if chains would start elsewhere than at these weights. If not all need be known, those that
        aren't are to be drawn anew.
    """
    arguments.weights("initial", weights)
    shapes = density.layout.site_shapes
    require_sites(weights, shapes, "initial")
    found = batch_shape(weights, shapes, "initial")
    if tuple(found) not in ((), (count,)):
        raise ValueError(
            f"initial has batch shape {tuple(found)}; it must be ({count},), one for each chain, or () for one start"
        )
    z = density.unconstrain(weights).expand(count, density.dim)
    known = z.isfinite().all(-1) | all_known
    for site, value in density.layout.constrain(z[known]).items():
        given = weights[site].to(value).expand(count, *value.shape[1:])[known]
        if not bool(((value - given).abs() <= ROUNDING * (1 + given.abs())).all()):
            raise ValueError(f"no chain can start at initial: outside of its support, or not finite, is {site!r}")
    return z.clone()


def _tell_of_flat_sites(density: Density, z: Tensor) -> None:
    """Warn of entries on which the density doesn't depend, as its gradient is exactly zero at all starts and beside
    them. Proper priors have no such entries, and chains would go on along them for ever."""
    if density.row_counts:
        return
    flat = (evaluated_once(density, torch.cat([z, 0.9 * z + 0.1]))[1] == 0).all(0)
    entries = density.layout.unflatten(flat[None]).items() if bool(flat.any()) else ()
    if words := [f"{int(v.sum())} of {v.numel()} entries of {site!r}" for site, v in entries if bool(v.any())]:
        warnings.warn(
            f"the density doesn't depend on {', '.join(words)}: no chain can settle there. Give the site a proper "
            "prior, or leave it out; instead of obs_mask, observe the rows that are known alone",
            RuntimeWarning,
            stacklevel=2,
        )


def _broken(density: Density, z: Tensor, generator: torch.Generator) -> Tensor:
    """True for chains whose energy or gradient isn't finite, ``(C,)``."""
    energy, gradient = evaluated_once(density, z, mini_batches(density.row_counts, len(z), generator))
    return ~(torch.isfinite(energy) & torch.isfinite(gradient).all(-1) & torch.isfinite(z).all(-1))
