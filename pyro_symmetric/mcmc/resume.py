"""A check that a store holds the run that a call asks for, so that one never resumes from another's draws.

Runs are the same if all that decides their draws is: the kernel and its settings, sites, counts, seed, dtype, the data
by their hash, the model's code with the constants that it reads (:func:`~pyro_symmetric.fingerprint.digest`),
and the density where the chains stand. ``num_samples`` is left out, so that more may be added. ``resume=True`` resumes
though code or versions differ. All is told before anything is drawn.
"""

from __future__ import annotations

import copy
import platform
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.fingerprint import VERSIONS, as_json, differences, digest
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.storage import PathLike, StoreError

OTHER_MODEL = "the model (its density at the same weights is another)"
OTHER_CODE = "the model's code, or a value that it reads from outside (their digest is another)"
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative: another processor sums in another order
MOST_COMPARED = 64  # chains


class OtherRun(StoreError):
    """A store holds another run than the one that a call asks for.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(0.0, 1.0))
    >>> options = dict(num_warmup=20, num_chains=2, store="draws", progress=False)
    >>> posterior = ps.sample(ps.HMC(model, num_steps=3), num_samples=20, **options)
    >>> try:
    ...     ps.sample(ps.HMC(model, num_steps=4), num_samples=20, **options)
    ... except ps.mcmc.OtherRun:
    ...     print("the folder holds draws of 3 steps")
    the folder holds draws of 3 steps
    """

    @classmethod
    def of(cls, path: PathLike | None, differing: Sequence[str], hint: str = "") -> OtherRun:
        """The words for it."""
        return cls(
            f"the draw store {path} holds another run; it was left as it is. What differs: {'; '.join(differing)}. "
            f"Name another folder, or call as before{hint}"
        )


def identify(settings: Settings, density: Density, seed: int) -> dict[str, Any]:
    """The fingerprint of a run: what must be the same, what may differ if the user insists, and what rounds sums.

    :param seed: the settings' own, or the one that was drawn for them.
    """
    initial, device = settings.initial, density.device
    call = {
        "kernel": type(settings.kernel).__name__,
        "settings": settings.kernel.settings(),
        **{name: getattr(settings, name) for name in ("num_chains", "num_warmup", "thinning")},
        # Of guides and functions, whose draws can't be foretold, the type only.
        "initial": initial if isinstance(initial, Mapping | str | None) else type(initial).__name__,
        "data": digest([settings.args, settings.kwargs]),
        "sites": {site: list(shape) for site, shape in density.layout.site_shapes.items()},
        "device": device.type,  # cuda and cuda:0 are one; which GPU it is stands under rounding
        "dtype": str(density.dtype).removeprefix("torch."),
        "chain_chunk": density.chain_chunk,
        "seed": seed,
    }
    rounding = {
        "engine": density.engine,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
    return as_json(
        call=call, code=digest(_without_weights(settings.kernel.model)), versions=VERSIONS, rounding=rounding
    )


def require_same(settings: Settings, found: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check the fingerprint of a store against that of a call.

    :raises OtherRun: naming what differs.
    """
    differing = differences(found["call"], now["call"])
    newer = differences(found["versions"], now["versions"]) + [OTHER_CODE] * (found["code"] != now["code"])
    if differing or (newer and settings.resume is not True):
        hint = "" if differing else "; or pass resume=True to resume all the same"
        raise OtherRun.of(settings.store, differing or newer, hint)
    if changed := newer + differences(found["rounding"], now["rounding"]):
        warnings.warn(
            f"the draw store {settings.store} is resumed, but from here its draws may differ from an unbroken run's, "
            f"since what decides them or their rounding has changed: {'; '.join(changed)}",
            RuntimeWarning,
            stacklevel=3,
        )


def energies(density: Density, z: Tensor) -> Tensor:
    """Energies of the chains where they stand, of some of the chains if there are many; with all rows of the data."""
    z = z[:MOST_COMPARED]
    counts = density.row_counts.items()
    rows = {name: torch.arange(size, device=z.device).expand(len(z), size) for name, (_, size) in counts}
    with torch.no_grad():
        return density.without_compiling(z, rows or None)[0].to("cpu", torch.float64)


def agree(before: Tensor, now: Tensor, dtype: torch.dtype) -> bool:
    """True if energies are those of one model, but for rounding; if one isn't finite, the other mustn't be either."""
    finite, near = before.isfinite(), (before - now).abs() <= TOLERANCE.get(dtype, 1e-2) * before.abs().clamp(min=1.0)
    return before.shape == now.shape and bool(((finite == now.isfinite()) & (near | ~finite)).all())


def _without_weights(model: Any) -> Any:
    """A network whose weights, which are sampled, have no values of their own; any other model as it is."""
    if not isinstance(model, BayesianModel):
        return model
    model = copy.deepcopy(model)
    for name, weight in model.net.named_parameters():
        if name in model.priors():
            weight.data = torch.zeros_like(weight)
    return model
