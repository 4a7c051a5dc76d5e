"""A check that a store holds the run that a call asks for, so that one never resumes from another's draws.

Runs are the same if all that decides their draws is: the kernel and its settings, sites, counts, seed, dtype, data
(compared by their hash, see :mod:`~pyro_symmetric.fingerprint`), and the density itself: whatever changed it, be it a
prior, a network's buffer or a parameter that isn't sampled, shows there, unless many data hide it; so the digest of the
model's code and of the values that it reads is compared, too. ``resume=True`` resumes though the digest differs. The
density is compared at fixed points near 0 and up
to 5 from it, of models that subsample their data on batches that go through them, and at places that the run itself
has passed. ``num_samples`` is left out, so that more may be added.

What differs at none of these places by more than rounding isn't seen: a model that is changed only where no chain has
been yet, a row among millions in single precision, rows of a plate beyond the first ``PIECES * NEAR`` batches.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.fingerprint import (
    COARSE,
    ELSEWHERE,
    TOLERANCE,
    agree,
    as_json,
    differences,
    digest,
    digest_of_code,
    surroundings,
)
from pyro_symmetric.mcmc.curves import Thinned
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.targets import ROWS, Rows
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import described
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.storage import StoreError

NEAR, FAR, NUMBERS = 16, 14, 2**24  # points to compare densities at, and how many numbers the far ones may have in all
PIECES = 64  # of NEAR batches each, at most
PASSED, PASSED_NUMBERS = 64, 2**18  # places that the run has passed, and numbers of all of them, but 4 at least
OTHER_MODEL = "the model (its density at the same weights is another)"
OTHER_CODE = "the model's code, or a value that it reads from outside (their digest is another)"


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


def identify(settings: Settings, density: Density | None, seed: int) -> dict[str, Any]:
    """The fingerprint of a run.

    :param density: ``None`` for what can be told without.
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
    }
    if density is not None:
        call["sites"] = {site: list(shape) for site, shape in density.layout.site_shapes.items()}
        call["device"] = density.device.type  # cuda and cuda:0 are one; which GPU it is stands under rounding
        call["dtype"] = str(density.dtype).removeprefix("torch.")
    device = None if density is None else density.device
    found = {} if density is None else {"chain_chunk": density.chain_chunk, "engine": density.engine}
    energies = [] if density is None else _energies_at_fixed_points(density, settings.num_chains)
    around = surroundings(device)
    if density is not None:
        around["versions"] = density.versions
    code = digest_of_code(_without_weights(settings.kernel.model))
    return as_json(call=call, seed=seed, code=code, energies=energies, density=found, **around)


def require_same(settings: Settings, found: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check the fingerprint of a store against that of a call.

    :raises OtherRun: naming what differs.
    """
    path, differing = settings.store, call_differences(settings, found, now)
    if not differing and not agree(found["energies"], now["energies"], tolerance_of(found, now)):
        differing = [OTHER_MODEL]
    chunk = differences(found["density"].get("chain_chunk"), now["density"].get("chain_chunk"), "chain_chunk")
    newer = differences(found["versions"], now["versions"])
    if not differing and found.get("code", now["code"]) != now["code"]:
        newer.append(OTHER_CODE)
    if differing or chunk or (newer and settings.resume is not True):
        hint = "" if differing or chunk else "; or pass resume=True to resume in spite of it"
        raise OtherRun.of(path, differing + chunk + newer, hint)
    engine = differences(found["density"].get("engine"), now["density"].get("engine"), "engine")
    warn_of_rounding(path, newer or engine + differences(found["rounding"], now["rounding"]))


def warn_of_rounding(path: Path | None, differing: Sequence[str]) -> None:
    """Say that a store is resumed though what decides rounding differs, in these words; nothing if there are none."""
    if differing:
        warnings.warn(
            f"the draw store {path} is resumed, but from here its draws may differ from an unbroken run's, since what "
            f"decides them or their rounding has changed: {'; '.join(differing)}",
            RuntimeWarning,
            stacklevel=3,
        )


def call_differences(settings: Settings, found: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences of two calls, in words; if kernels or sites do, all else follows from it."""
    there, here = ({name: said["call"][name] for name in now["call"].keys() & found["call"]} for said in (found, now))
    if there["kernel"] != here["kernel"]:
        return differences(there["kernel"], here["kernel"], "kernel")
    if there.get("sites") != here.get("sites"):
        return [f"the model: its sites are {_listed(there['sites'])} there, {_listed(here['sites'])} here"]
    seeds = [] if settings.seed is None else differences(found["seed"], settings.seed, "seed")
    return differences(there, here) + seeds


def tolerance_of(found: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """The largest relative difference between densities of one model."""
    alike = all(found[name] == now[name] for name in ("versions", "rounding", "density"))
    return TOLERANCE.get(now["call"].get("dtype", ""), COARSE) * (1.0 if alike else ELSEWHERE)


class Passed:
    """Places that a run has passed, with their energies there and then: by them its model is known again.

    Some earlier states, spread over the run, and the chains' last ones. There a model that differs shows, however alike
    it is at any points that could be fixed beforehand.

    :param num_chains: as many are evaluated at once as there are chains, which memory is known to hold.
    """

    def __init__(self, density: Density, num_chains: int):
        self._density, self._num_chains = density, num_chains
        self._states = Thinned(min(PASSED, max(4, PASSED_NUMBERS // density.dim // 2 * 2)))

    def note(self, iteration: int, z: Tensor) -> None:
        """Keep one chain's state, if it is its iteration's turn."""

        def chain() -> Tensor:
            one = z[iteration // self._states.stride % len(z)]
            return torch.cat([one, one.new_full((1,), torch.nan)])  # its energy, later

        self._states.note(iteration, chain)

    def to_dict(self, iteration: int, z: Tensor) -> dict[str, Any]:
        """The part that a checkpoint keeps after so many iterations, with chains at ``z``."""
        states = torch.stack(self._states.kept)
        new = states[:, -1].isnan()
        states[new, -1] = self._energies(states[new, :-1]).to(states)
        self._states.kept = list(states.unbind())
        return {**self._states.to_dict(iteration + 1), "last": self._energies(z[:PASSED])}

    def restore(self, found: dict[str, Any], z: Tensor, tolerance: float) -> bool:
        """Take up what :meth:`to_dict` gave, and say whether the energies are what they were then."""
        self._states.restore(found)
        states = found["kept"]
        before = torch.cat([states[:, -1].cpu().double(), found["last"]])
        return agree(before, self._energies(torch.cat([states[:, :-1], z[:PASSED]])), tolerance)

    def _energies(self, z: Tensor) -> Tensor:
        rows = {
            name: torch.arange(size, device=z.device).expand(len(z), size)
            for name, (_, size) in self._density.row_counts.items()
        }
        return _energies(self._density, z, rows or None, self._num_chains)


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


def _energies_at_fixed_points(density: Density, at_once: int) -> list[float]:
    wave = torch.arange(density.dim, dtype=torch.float64, device="cpu").cos().to(density.device, density.dtype)
    near = torch.stack([0.1 * wave, 0.3 * wave])
    points = torch.cat([near, _far_points(density).to(wave)])
    found = _energies(density, points, _batches(density, 0, len(points), len(points)), at_once).tolist()
    plates = [-(-total // size) for name, (total, size) in density.row_counts.items() if name != ROWS]
    pieces = min(PIECES, -(-max(plates, default=0) // NEAR))  # what the arguments hold is in the data's hash already
    near = near.repeat(NEAR // 2, 1)
    for piece in range(pieces):
        batches = _batches(density, piece * NEAR, NEAR, pieces * NEAR)
        found += _energies(density, near, batches, at_once).tolist()
    return found


def _far_points(density: Density) -> Tensor:
    """Up to 5 from 0; each coordinate takes as many different values as there are points (a Latin hypercube)."""
    count = min(FAR, NUMBERS // density.dim)
    steps = torch.linspace(-1.0, 1.0, count, device="cpu")
    order = torch.rand(count, density.dim, generator=torch.Generator("cpu").manual_seed(0), device="cpu").argsort(0)
    return (5.0 * steps * steps.abs())[order]


def _batches(density: Density, begin: int, count: int, parts: int) -> Rows | None:
    """Mini-batches for ``count`` points from the ``begin``-th on, of ``parts`` that are spread over the data."""
    k = torch.arange(begin, begin + count, device=density.device)[:, None]
    return {
        name: (k * total // parts + torch.arange(size, device=density.device)) % total
        for name, (total, size) in density.row_counts.items()
    } or None


def _energies(density: Density, z: Tensor, rows: Rows | None, at_once: int) -> Tensor:
    """Energies ``(C,)`` of states, so many at a time, in double precision on the CPU."""
    cuts = [slice(start, start + at_once) for start in range(0, len(z), at_once)]
    with torch.no_grad():
        parts = [density.without_compiling(z[s], rows and {name: i[s] for name, i in rows.items()})[0] for s in cuts]
    return torch.cat(parts).to("cpu", torch.float64) if parts else torch.empty(0, dtype=torch.float64, device="cpu")


def _listed(sites: Mapping[str, Sequence[int]], most: int = 8) -> str:
    named = [f"{site} {tuple(shape)}" for site, shape in sites.items()]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")
