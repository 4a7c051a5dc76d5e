"""The state that a run resumes from, and a check that it is the run that a call asks for, never another's.

Runs are the same if all that decides their draws is: the kernel and its settings, sites, counts, seed, dtype, the data
by their hash, the model's code with the constants that it reads (:func:`~pyro_symmetric.fingerprint.digest`),
and the density where the chains stand. ``num_samples`` is left out, so that more may be added. ``resume=True`` resumes
though code or versions differ. All is told before anything is drawn.
"""

from __future__ import annotations

import copy
import io
import pickle
import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_symmetric._process import LOCK
from pyro_symmetric.fingerprint import VERSIONS, as_json, differences, digest
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.storage import StoreError

if TYPE_CHECKING:
    from pyro_symmetric.mcmc.run import Settings

KERNELS = Kernel.__module__.rpartition(".")[0]
OTHER_MODEL = "the model (its density at the same weights is another)"
OTHER_CODE = "the model's code, or a value that it reads from outside (their digest is another)"
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative: another processor sums in another order
MOST_COMPARED = 64  # chains


# the run that a call asks for ---------------------------------------------------------------------------------------


def identify(settings: Settings, density: Density, seed: int) -> dict[str, Any]:
    """The fingerprint of a run: what must be the same, what may differ if the user insists, and what rounds sums.

    :param seed: the settings' own, or the one that was drawn for them.
    """
    initial, device, model = settings.initial, density.device, settings.kernel.model
    if isinstance(model, BayesianModel):  # whose weights are sampled, and have no values of their own
        model = copy.deepcopy(model)
        for name, weight in model.net.named_parameters():
            if name in model.priors():
                weight.data = torch.zeros_like(weight)
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
    return as_json(call=call, code=digest(model), versions=VERSIONS, rounding=rounding)


def require_same(settings: Settings, found: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check the fingerprint of a store against that of a call.

    :raises StoreError: naming what differs.
    """
    newer = differences(found["versions"], now["versions"]) + [OTHER_CODE] * (found["code"] != now["code"])
    if differing := differences(found["call"], now["call"]):
        raise _other_run(settings, differing)
    if newer and settings.resume is not True:
        raise _other_run(settings, newer, "; or pass resume=True to resume all the same")
    if changed := newer + differences(found["rounding"], now["rounding"]):
        warnings.warn(
            f"the draw store {settings.store} is resumed, but from here its draws may differ from an unbroken run's, "
            f"since what decides them or their rounding has changed: {'; '.join(changed)}",
            RuntimeWarning,
            stacklevel=3,
        )


def require_same_model(settings: Settings, density: Density, z: Tensor, before: Tensor) -> None:
    """Check the energies ``before`` of chains at ``z`` against those of the call's density, but for rounding; if one
    isn't finite, the other mustn't be either.

    :raises StoreError: if they differ.
    """
    now, near = energies(density, z), TOLERANCE.get(density.dtype, 1e-2) * before.abs().clamp(min=1.0)
    same = (before.isfinite() == now.isfinite()) & (((before - now).abs() <= near) | ~before.isfinite())
    if before.shape != now.shape or not bool(same.all()):
        raise _other_run(settings, [OTHER_MODEL])


def energies(density: Density, z: Tensor) -> Tensor:
    """Energies of the chains where they stand, of some of the chains if there are many; with all rows of the data."""
    z = z[:MOST_COMPARED]
    counts = density.row_counts.items()
    rows = {name: torch.arange(size, device=z.device).expand(len(z), size) for name, (_, size) in counts}
    with torch.no_grad():
        return density.without_compiling(z, rows or None)[0].to("cpu", torch.float64)


def _other_run(settings: Settings, differing: list[str], hint: str = "") -> StoreError:
    return StoreError(
        f"the draw store {settings.store} holds another run; it was left as it is. What differs: "
        f"{'; '.join(differing)}. Name another folder, or call as before{hint}"
    )


# the state that it resumes from -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RunState:
    """A run between two iterations.

    :param iteration: how many are done.
    :param generator: where the state's random generator stands.
    :param draws: how many are kept of each chain.
    :param num_warmup: how many of all are warm-up; while the chains are to end it, how many at most.
    :param r_hat: of the chains when they were last asked whether they agree; ``None`` if they weren't.
    """

    iteration: int
    state: State
    generator: Tensor
    draws: int
    num_warmup: int
    r_hat: float | None = None


def packed(at: RunState, more: dict[str, Any]) -> memoryview:
    """A boundary, and what else a run resumes from, as bytes that can be written without another copy.

    :raises TypeError: if the kernel's state holds what can't be stored.
    """
    state = replace(at.state, generator=None)  # type: ignore[arg-type]
    buffer = io.BytesIO()
    try:
        torch.save({**more, "at": {**vars(at), "state": state}}, buffer)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(f"the kernel's state holds what a store can't keep: {error}; see State") from error
    return buffer.getbuffer()


def unpacked(content: bytes | memoryview, kernel: Kernel) -> tuple[RunState, dict[str, Any]]:
    """The boundary that :func:`packed` was given: of tensors, plain values and dataclasses of the library's kernels and
    of the modules that this kernel's classes come from.

    :raises TypeError: if there is anything else.
    """
    names = {kind.__module__ for kind in type(kernel).__mro__}
    names |= {name for name in sys.modules if name.startswith(f"{KERNELS}.")}
    kinds = [value for name in names for value in vars(sys.modules[name]).values() if isinstance(value, type)]
    parts: list[Any] = [k for k in kinds if is_dataclass(k) and k.__module__ in names and not issubclass(k, Kernel)]
    try:
        with LOCK, torch.serialization.safe_globals(parts):  # a list of the whole process
            more = torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError as error:
        said = str(error).splitlines()[0]
        raise TypeError(f"the kernel's state holds what a store can't keep: {said}; see State") from error
    at = RunState(**more.pop("at"))
    generator = torch.Generator(at.state.z.device)
    generator.set_state(at.generator)
    return replace(at, state=replace(at.state, generator=generator)), more
