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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.fingerprint import as_json, differences, digest
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import described
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.storage import StoreError

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
    def of(cls, path: Path | None, differing: Sequence[str], hint: str = "") -> OtherRun:
        """The words for it."""
        return cls(
            f"the draw store {path} holds another run; it was left as it is. What differs: {'; '.join(differing)}. "
            f"Name another folder, or call as before{hint}"
        )


def identify(settings: Settings, density: Density, seed: int) -> dict[str, Any]:
    """The fingerprint of a run.

    :param seed: the settings' own, or the one that was drawn for them.
    """
    call = {
        "kernel": type(settings.kernel).__name__,
        "settings": settings.kernel.settings(),
        "num_chains": settings.num_chains,
        "num_warmup": settings.num_warmup,
        "thinning": settings.thinning,
        "initial": described(settings),
        "data": digest([settings.args, settings.kwargs]),
        "sites": {site: list(shape) for site, shape in density.layout.site_shapes.items()},
        "device": density.device.type,  # cuda and cuda:0 are one; which GPU it is stands under rounding
        "dtype": str(density.dtype).removeprefix("torch."),
    }
    found = {"chain_chunk": density.chain_chunk, "engine": density.engine}
    code = digest(_without_weights(settings.kernel.model))
    around = {"versions": density.versions, "rounding": rounding_of(density.device)}
    return as_json(call=call, seed=seed, code=code, density=found, **around)


def rounding_of(device: torch.device) -> dict[str, Any]:
    """All that decides how sums are rounded."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"threads": threads, "matmul_precision": precision, "processor": processor, **gpu}


def require_same(settings: Settings, found: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check the fingerprint of a store against that of a call; only what decides is named.

    :raises OtherRun: naming what differs.
    """
    there, here, path = found["call"], now["call"], settings.store
    seeds = [] if settings.seed is None else differences(found["seed"], settings.seed, "seed")
    sites = f"the model: its sites are {_listed(there['sites'])} there, {_listed(here['sites'])} here"
    differing = (
        differences(there["kernel"], here["kernel"], "kernel")
        or [sites] * (there["sites"] != here["sites"])
        or differences(there, here) + seeds
    )
    differing += differences(found["density"]["chain_chunk"], now["density"]["chain_chunk"], "chain_chunk")
    newer = differences(found["versions"], now["versions"]) + [OTHER_CODE] * (found["code"] != now["code"])
    if differing or (newer and settings.resume is not True):
        raise OtherRun.of(path, differing or newer, "" if differing else "; or pass resume=True to resume all the same")
    engine = differences(found["density"]["engine"], now["density"]["engine"], "engine")
    if rounding := newer or engine + differences(found["rounding"], now["rounding"]):
        warnings.warn(
            f"the draw store {path} is resumed, but from here its draws may differ from an unbroken run's, since what "
            f"decides them or their rounding has changed: {'; '.join(rounding)}",
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


# small steps --------------------------------------------------------------------------------------------------------


def _without_weights(model: Any) -> Any:
    """A network whose weights, which are sampled, have no values of their own; any other model as it is."""
    if not isinstance(model, BayesianModel):
        return model
    model = copy.deepcopy(model)
    for name, weight in model.net.named_parameters():
        if name in model.priors():
            weight.data = torch.zeros_like(weight)
    return model


def _listed(sites: Mapping[str, Sequence[int]], most: int = 8) -> str:
    named = [f"{site} {tuple(shape)}" for site, shape in sites.items()]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")
