"""The identity and the saved state of a run: a call resumes a stored run only if it
describes that very run.

Two calls describe one run if everything that decides its draws agrees: kernel and
settings, sites, counts, seed, dtype, hashes of the data and of the code of model and
kernel with all that they read (:mod:`~pyro_symmetric.mcmc.digest`), and the potential
energies at the stored positions. ``num_samples`` is left out, so that a run can be
extended. ``resume=True`` accepts other code and other versions. Differences are
reported before anything is drawn.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import platform
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_symmetric._process import LOCK
from pyro_symmetric._version import __version__
from pyro_symmetric.arguments import Entries, Json, Values
from pyro_symmetric.density.density import Density
from pyro_symmetric.mcmc.digest import complete_digest, digest, is_installed
from pyro_symmetric.mcmc.kernels.kernel import Kernel
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.store import MOST_EXPANDED, StoreError, load_pickled
from pyro_symmetric.weights import map_values

KERNELS = Kernel.__module__.rpartition(".")[0]
OTHER_MODEL = "the model (its density at the same weights differs)"
OTHER_CODE = (
    "the model's code, or a value that it reads from outside (their digest differs)"
)
# nats, where versions, processors or code differ; besides, units in the last place of
# the energy, as the order of summation may differ
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
LAST_PLACES = 16
MAX_COMPARED = 64  # chains
VERSIONS = {
    "pyro_symmetric": __version__,
    "torch": torch.__version__,
    "pyro": pyro.__version__,
}


# the identity of a run ----------------------------------------------------------------


def identify(settings: Settings, density: Density, seed: int) -> Json:
    """Return the fingerprint of a run: its call, which must match; its code and
    versions, which must match unless ``resume=True``; and its sources of rounding,
    which only warn.

    :param seed: from the settings, or drawn for this run.
    """
    initial = settings.initial
    device = density.device
    call = {
        "kernel": type(settings.kernel).__name__,
        "settings": settings.kernel.settings(),
        **{
            name: getattr(settings, name)
            for name in ("num_chains", "num_warmup", "thinning")
        },
        # Guides and functions count by type, since their draws aren't reproducible
        # here.
        "initial": initial
        if isinstance(initial, Mapping | str | None)
        else type(initial).__name__,
        "data": digest([settings.args, settings.kwargs]),
        "parameters": digest(getattr(density.target, "parameters", {})),
        "sites": map_values(list, density.layout.site_shapes),
        # "cuda" equals "cuda:0"; the model of the GPU belongs to rounding
        "device": device.type,
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
    codes = {digest(code_of(settings.kernel)), settings.code_before} - {None}
    return as_json(call=call, code=sorted(codes), versions=VERSIONS, rounding=rounding)


def code_of(kernel: Kernel) -> list[Any]:
    """Return what decides the density and the iterations, for its digest: the model,
    and the class of a user's kernel.
    """
    kind = None if is_installed(type(kernel)) else type(kernel)
    model = kernel.model
    if isinstance(model, BayesianModel):
        model = copy.deepcopy(model)
        # the initial values of sampled weights don't matter
        for name, weight in model.net.named_parameters():
            if name in model.priors():
                weight.data = torch.zeros_like(weight)
        del model._prior_cache  # depends on the device
    return [model, kind]


def digest_before_run(kernel: Kernel) -> str | None:
    """Return the digest of the code before the model is run, which may change
    attributes of its own; ``None`` if the code imports what isn't loaded yet.
    """
    return complete_digest(code_of(kernel))


def require_same(settings: Settings, stored: Values, current: Entries) -> bool:
    """Check that a stored fingerprint matches the current call's, and add the stored
    digests of its code to the current ones.

    :return: whether nothing differs that may change the rounding of an energy.
    :raises StoreError: listing the differences.
    """
    changed = differences(stored["versions"], current["versions"])
    same_code = not set(stored["code"]).isdisjoint(current["code"])
    if same_code:
        current["code"] = sorted({*stored["code"], *current["code"]})
    else:
        changed.append(OTHER_CODE)
    other_call = differences(stored["call"], current["call"])
    if other_call:
        raise _other_run(settings, other_call)
    if changed and settings.resume is not True:
        raise _other_run(
            settings, changed, "; or pass resume=True to resume all the same"
        )
    changed += differences(stored["rounding"], current["rounding"])
    if changed:
        warnings.warn(
            f"the draw store {settings.store} is resumed, but from here its draws may "
            "differ from an unbroken run's, "
            "since what decides them or their rounding has changed: "
            f"{'; '.join(changed)}",
            RuntimeWarning,
            stacklevel=3,
        )
    return not changed


def require_same_energies(
    settings: Settings, density: Density, z: Tensor, stored: Tensor, tolerance: Tensor
) -> None:
    """Check that the density gives the stored energies at the stored positions ``z``.

    :param tolerance: largest difference of each chain, in nats.
    :raises StoreError: if they differ, or only one of two is finite.
    """
    current = energies(density, z)
    close = ((stored - current).abs() <= tolerance) | ~stored.isfinite()
    agrees = close & (stored.isfinite() == current.isfinite())
    if not agrees.all():
        raise _other_run(settings, [OTHER_MODEL])


def allowed_difference(density: Density, stored: Tensor, same_rounding: bool) -> Tensor:
    """Return by how much the energy of each chain may differ from the stored one: not
    at all if nothing has changed that rounds otherwise, and the CPU computes it.
    """
    if same_rounding and density.device.type == "cpu":
        return torch.zeros_like(stored)
    absolute = TOLERANCE.get(density.dtype, 1e-1)
    last_place = torch.finfo(density.dtype).eps * stored.abs()
    return absolute + LAST_PLACES * last_place


def energies(density: Density, z: Tensor) -> Tensor:
    """Evaluate the potential energy of the first :data:`MAX_COMPARED` chains at ``z``,
    on the first rows of the data.
    """
    z = z[:MAX_COMPARED]
    with torch.no_grad():
        energy = density.without_compiling(z, density.first_rows(len(z)))[0]
    return energy.to("cpu", torch.float64)


def _other_run(settings: Settings, differing: list[str], hint: str = "") -> StoreError:
    return StoreError(
        f"the draw store {settings.store} holds another run; it was left as it is. "
        "What differs: "
        f"{'; '.join(differing)}. Name another folder, or call as before{hint}"
    )


# the saved state ----------------------------------------------------------------------


def pack(fields: Values, potential: Tensor) -> memoryview:
    """Serialise the fields of a run's state and the energies at its positions, without
    another copy in memory.
    """
    state = replace(fields["kernel_state"], generator=None)
    buffer = io.BytesIO()
    torch.save({"at": {**fields, "kernel_state": state}, "energies": potential}, buffer)
    return buffer.getbuffer()


def unpack(content: bytes | memoryview, kernel: Kernel) -> tuple[Entries, Tensor]:
    """Return the fields and energies that :func:`pack` serialised.

    :raises pickle.UnpicklingError: if they hold more than tensors, plain values, and
        dataclasses of this package's kernels and of the modules that define the classes
        of ``kernel``.
    """
    modules = {kind.__module__ for kind in type(kernel).__mro__}
    modules |= {name for name in sys.modules if name.startswith(f"{KERNELS}.")}
    kinds = [
        value
        for name in modules
        for value in vars(sys.modules[name]).values()
        if isinstance(value, type)
    ]
    allowed: list[Any] = [
        k
        for k in kinds
        if is_dataclass(k) and k.__module__ in modules and not issubclass(k, Kernel)
    ]
    with LOCK, torch.serialization.safe_globals(allowed):  # a list of the whole process
        saved = load_pickled(content, map_location=None)
    fields = saved["at"]
    _require_sizes([fields, saved["energies"]], len(content))
    generator = torch.Generator(fields["kernel_state"].z.device)
    generator.set_state(fields["generator"])
    fields["kernel_state"] = replace(fields["kernel_state"], generator=generator)
    return fields, saved["energies"]


def _require_sizes(values: Iterable[Any], size: int) -> None:
    """Raise ``ValueError`` if a tensor within the values is larger than the file of
    ``size`` bytes it was read from, as an expanded one can be.

    Those of an honest state are at most as large as its positions, which are in the
    file.
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.nbytes > MOST_EXPANDED * size:
                raise ValueError(
                    f"the state has {size:,} bytes, and a tensor of shape "
                    f"{tuple(value.shape)} within it would take {value.nbytes:,}"
                )
        elif isinstance(value, Mapping):
            _require_sizes(value.values(), size)
        elif isinstance(value, list | tuple):
            _require_sizes(value, size)
        elif is_dataclass(value):
            _require_sizes(vars(value).values(), size)


def require_storable(fields: Values, kernel: Kernel) -> None:
    """Raise ``TypeError`` if a store can't keep the kernel's state."""
    try:
        unpack(pack(fields, fields["kernel_state"].energy), kernel)
    except (AttributeError, TypeError, pickle.PickleError) as error:
        reason = str(error).splitlines()[0]
        raise TypeError(
            f"the kernel's state holds what a store can't keep: {reason}; see State"
        ) from error


# hashes of data and code --------------------------------------------------------------


def as_json(**parts: Any) -> Json:
    """Convert values to JSON; those that JSON can't represent are replaced by their
    hash.
    """
    return json.loads(
        json.dumps(
            parts, default=lambda value: f"{type(value).__name__} {digest(value)}"
        )
    )


def differences(stored: Any, current: Any, name: str = "") -> list[str]:
    """List the differences between a stored and a current fingerprint.

    :param name: of the entry that is compared.
    """
    if isinstance(stored, dict) and isinstance(current, dict):
        keys = sorted(stored.keys() | current.keys())
        return [
            line
            for k in keys
            for line in differences(
                stored.get(k), current.get(k), f"{name}.{k}".lstrip(".")
            )
        ]
    return [] if stored == current else [f"{name}: {stored!r} there, {current!r} here"]
