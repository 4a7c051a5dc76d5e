"""Starting points of chains: draws of the prior, in a box, or where they are put."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Generator, Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.arguments import Args, Keywords, Model
from pyro_symmetric.density.density import Density, evaluated_once
from pyro_symmetric.density.traced import ContinuousStart, latent_sites
from pyro_symmetric.mcmc.kernels.kernel import mini_batches
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import (
    Tensors,
    Weights,
    batch_shape,
    map_values,
    require_sites,
    stacked,
)

INITIALISATIONS = ("prior", "uniform")
MAX_TRIES = 100  # to find a start of finite energy and gradient
# nats above the best uniform start; starts beyond it are redrawn a few times
MAX_EXCESS = 1e6
FEW_TRIES = 10
# of the box of "uniform" starts, on the unconstrained scale, as in Pyro's MCMC
RADIUS = 2.0
# relative error of initial weights that are mapped to unconstrained coordinates and
# back
ROUNDING = 1e-3
FAR, MOST_FLAT = 30.0, 100  # a distance from all bounds; entries that are tried there
Initial = str | Tensors | Posterior | AutoGuide | Callable[[int], Tensors] | None


def resolve(initial: Any, num_chains: int, args: Args, kwargs: Keywords) -> Any:
    """Convert ``initial`` to ``None``, a name, weights, or a function ``num_chains ->
    weights``.

    A posterior gives the last draw of each of its chains and, for more chains than it
    has, the draws before.

    :raises TypeError: unless :func:`~pyro_symmetric.mcmc.sample` takes it.
    """
    if isinstance(initial, Posterior):
        rounds = -(-num_chains // initial.num_chains)
        if rounds > initial.num_samples:
            size = f"{initial.num_chains} x {initial.num_samples} draws"
            raise ValueError(
                f"initial is a posterior of {size}, too few to start {num_chains} "
                "chains from"
            )
        last = map_values(
            lambda value: value[:, -rounds:].flip(1).transpose(0, 1), initial.samples
        )
        return map_values(lambda value: value.flatten(0, 1)[:num_chains], last)
    if hasattr(initial, "sample_posterior"):
        return lambda count: initial.sample_posterior((count,))
    if isinstance(initial, AutoGuide):  # Pyro's guides give one draw at a time

        def draw(count: int) -> Weights:
            with torch.no_grad():
                return stacked([initial(*args, **kwargs) for _ in range(count)])

        return draw
    if isinstance(initial, str | Mapping | None) or callable(initial):
        return initial
    raise TypeError(
        f"initial is a {type(initial).__name__}; it must be one of {INITIALISATIONS}, "
        "weights, a Posterior, a guide "
        "or a function num_chains -> weights"
    )


@torch.no_grad()
def placed_by(
    strategy: Callable[[Any], Any],
    model: Model,
    args: Args,
    kwargs: Keywords,
    count: int,
) -> Weights:
    """Start chains where one of Pyro's strategies, such as ``init_to_median``, puts the
    sites of a model."""
    starts = []
    for _ in range(count):
        with InitMessenger(ContinuousStart(strategy)):
            trace = poutine.trace(model).get_trace(*args, **kwargs)
        starts.append({site["name"]: site["value"] for site in latent_sites(trace)})
    return stacked(starts)


def starting_points(
    density: Density,
    num_chains: int,
    initial: Any = None,
    generator: Generator | None = None,
) -> Tensor:
    """Find starting points ``(C, D)`` of finite energy and gradient.

    Others are redrawn, but for given weights. So are, a few times, points in the
    uniform box whose energy exceeds the best one by :data:`MAX_EXCESS`, from which only
    tiny steps would lead back.

    :param initial: as :func:`resolve` returns it. ``None``: ``"prior"`` for a
        ``BayesianModel``, whose energy is huge far from it, and ``"uniform"`` for any
        other model.
    :param generator: source of all random numbers. ``None``: a new one, seeded from
        PyTorch's global generator.
    :raises ValueError: if no such points are found.
    """
    if generator is None:
        generator = Generator(density.device).manual_seed(drawn_seed())
    if initial is None:
        initial = "prior" if density.is_network else "uniform"
    if isinstance(initial, str):
        arguments.one_of("initial", initial, INITIALISATIONS, "a dict of weights")
    max_tries = 1 if isinstance(initial, Mapping) else MAX_TRIES
    z = _draw_starts(density, num_chains, initial, generator)
    for tries in range(1, max_tries + 1):
        energy, gradient = evaluated_once(
            density, z, mini_batches(density.row_counts, len(z), generator)
        )
        bad = ~(
            torch.isfinite(energy)
            & torch.isfinite(gradient).all(-1)
            & torch.isfinite(z).all(-1)
        )
        if initial == "uniform" and tries < FEW_TRIES and not bad.all():
            bad |= energy > energy[~bad].min() + MAX_EXCESS
        if not bad.any():
            break
        if tries == max_tries:
            target = density.target
            nan = arguments.holding_nan(target.model, target.args, target.kwargs)
            raise ValueError(
                f"chains {bad.nonzero().flatten().tolist()[:10]} of {num_chains} found "
                "no start with finite energy "
                f"and gradient in {tries} draws. Check that all data, masked rows "
                "included, are finite and in the "
                "supports of their distributions; if they are, pass initial= weights "
                f"where the density is finite{nan}"
            )
        z[bad] = _draw_starts(density, int(bad.sum()), initial, generator)
    _warn_of_flat_entries(density, z)
    return z


def _draw_starts(
    density: Density, count: int, initial: Any, generator: Generator
) -> Tensor:
    """Draw points ``(C, D)``. Guides and functions use the global generators, whose
    states are restored afterwards.

    :raises ValueError: if weights are outside their support, so that chains would start
        elsewhere; or if given ones aren't finite (of a guide or a function, such points
        are left to be redrawn).
    """
    if initial == "uniform":
        box = torch.rand(
            count,
            density.dim,
            generator=generator,
            device=density.device,
            dtype=density.dtype,
        )
        return (2 * box - 1) * RADIUS
    if initial == "prior":
        return density.draw_prior(count, generator)
    weights = initial
    if not isinstance(initial, Mapping):
        with forked(generator, density.device):
            weights = initial(count)
    arguments.weights("initial", weights)
    require_sites(weights, density.layout.site_shapes, "initial")
    batch = batch_shape(weights, density.layout.site_shapes, "initial")
    if tuple(batch) not in ((), (count,)):
        raise ValueError(
            f"initial has batch shape {tuple(batch)}; it must be ({count},), one for "
            "each chain, or () for one start"
        )
    z = density.unconstrain(weights).expand(count, density.dim)
    checked = z.isfinite().all(-1) | isinstance(initial, Mapping)
    for site, value in density.layout.constrain(z[checked]).items():
        wanted = weights[site].to(value).expand(count, *value.shape[1:])[checked]
        if not ((value - wanted).abs() <= ROUNDING * (1 + wanted.abs())).all():
            raise ValueError(
                "no chain can start at initial: outside of its support, or not "
                f"finite, is {site!r}"
            )
    return z.clone()


def _warn_of_flat_entries(density: Density, z: Tensor) -> None:
    """Warn of entries whose gradient is exactly zero at all starts and near them, as
    under no proper prior. The density doesn't depend on them, and chains would drift
    along them for ever."""
    if density.row_counts:
        return
    flat = (evaluated_once(density, torch.cat([z, 0.9 * z + 0.1]))[1] == 0).all(0)
    ends = _ends_somewhere(density, z[0], flat)
    if bounded := _entries(density, ends):
        warnings.warn(
            f"the density is constant along {bounded} and ends at bounds that the "
            "support doesn't tell: chains step over them. Sample uniform values "
            "on their own support, and transform them by pyro.deterministic",
            RuntimeWarning,
            stacklevel=2,
        )
    if named := _entries(density, flat & ~ends):
        warnings.warn(
            f"the density doesn't depend on {named}: no chain can settle "
            "there. Give the site a proper "
            "prior, or leave it out; instead of obs_mask, observe only the rows that "
            "are known",
            RuntimeWarning,
            stacklevel=2,
        )


def _entries(density: Density, mask: Tensor) -> str:
    """Describe the entries of a mask ``(D,)`` by their sites; empty without any."""
    if not mask.any():
        return ""
    return ", ".join(
        f"{int(v.sum())} of {v.numel()} entries of {site!r}"
        for site, v in density.layout.unflatten(mask[None]).items()
        if v.any()
    )


def _ends_somewhere(density: Density, start: Tensor, flat: Tensor) -> Tensor:
    """Return which of the flat entries have a density that is zero far from a start:
    those of a uniform law, which is constant within its bounds."""
    ends = torch.zeros_like(flat)
    for entry in flat.nonzero().flatten()[:MOST_FLAT].tolist():
        far = start.repeat(2, 1)
        far[:, entry] = start.new_tensor([-FAR, FAR])
        energy, _ = evaluated_once(density, far)
        ends[entry] = bool((energy == torch.inf).any())
    return ends
