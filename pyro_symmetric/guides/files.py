"""Guides as files: parameters, layout, group and estimator in one safetensors file. A loaded guide draws without
data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)

from pyro_symmetric import arguments
from pyro_symmetric.distributions import BetheBound, ExactOrbit, InfoNCE, SinkhornImportance
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.gaussian import FAMILIES, family_and_moments
from pyro_symmetric.guides.layout import LayoutModel, SiteLayout, layout_of
from pyro_symmetric.guides.modes import AutoModes
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.storage import PathLike, StoreError, load_tensors, save_tensors
from pyro_symmetric.symmetry.finite import finite_group_from_dict

KIND = "guide"
VERSION = 2

_BASES: dict[str, type[AutoContinuous]] = {
    base.__name__: base
    for base in (AutoDiagonalNormal, AutoLowRankMultivariateNormal, AutoModes, AutoMultivariateNormal)
}
_ESTIMATORS: dict[str, type] = {kind.__name__: kind for kind in (BetheBound, ExactOrbit, InfoNCE, SinkhornImportance)}


def save_guide(guide: AutoGuide, path: PathLike) -> None:
    """Write a set-up guide to one ``.safetensors`` file, atomically and without pickle.

    Takes our guides, mixtures included, and the stock Gaussian ones (``AutoNormal``, ``AutoDiagonalNormal``,
    ``AutoLowRankMultivariateNormal``, ``AutoMultivariateNormal``).

    :raises TypeError: for a guide that it doesn't know how to write.
    :raises OSError: if the file can't be written.
    """
    sites = layout_of(guide)
    header: dict[str, Any] = {"sites": [site.to_dict() for site in sites]}
    if isinstance(guide, AutoSymmetrized):
        if guide.base_class.__name__ not in _BASES:
            raise TypeError(
                f"a guide over {guide.base_class.__name__} can't be written to a file; over {sorted(_BASES)} it can"
            )
        estimator = guide.get_posterior().estimator
        if type(estimator).__name__ not in _ESTIMATORS:
            raise TypeError(f"the estimator {estimator!r} can't be written to a file; known are {sorted(_ESTIMATORS)}")
        header |= {
            "class": "AutoSymmetrized",
            "base": guide.base_class.__name__,
            "options": _options(guide),
            "group": guide.group.to_dict(),
            "sticking_the_landing": guide.sticking_the_landing,
            "estimator": {"name": type(estimator).__name__, **asdict(estimator)},  # type: ignore[call-overload]
        }
        tensors = guide.state_dict()
    elif isinstance(guide, AutoModes):
        header |= {"class": "AutoModes", "options": _options(guide)}
        tensors = guide.state_dict()
    else:
        try:
            family, tensors = family_and_moments(guide)
        except TypeError as error:
            raise TypeError(
                f"{type(guide).__name__} can't be written to a file; AutoSymmetrized, AutoModes and Gaussian guides can"
            ) from error
        header["class"] = family.__name__
    save_tensors(path, KIND, VERSION, tensors, header)


def load_guide(path: PathLike, device: torch.device | str | None = None) -> WeightsGuide:
    """Read a guide that :func:`save_guide` wrote; ``sample_posterior`` works at once, training goes on with stock SVI.

    Gaussian guides come back as :class:`AutoMeanField`, :class:`AutoLowRank` or :class:`AutoFullRank`, symmetrised ones
    as :class:`AutoSymmetrized` over the same base, mixtures as :class:`AutoModes`.

    :raises OSError: if the file can't be read.
    :raises StoreError: if it is damaged (it is compared with its checksum) or no guide.
    """
    arguments.device("device", device)
    tensors, header = load_tensors(path, KIND, VERSION)
    if device is not None:
        tensors = {name: value.to(device) for name, value in tensors.items()}
    try:
        return _built(tensors, header)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StoreError(f"{path} has a damaged header: {error!r}") from error


def _built(tensors: dict[str, torch.Tensor], header: dict[str, Any]) -> WeightsGuide:
    sites = tuple(SiteLayout.from_dict(site) for site in header["sites"])
    if header["class"] in FAMILIES:
        return FAMILIES[header["class"]](sites, **tensors)
    model = LayoutModel(sites, next(iter(tensors.values())))
    options = header["options"]
    guide: WeightsGuide
    if header["class"] == "AutoModes":
        guide = AutoModes(model, init_loc_fn=model.init_loc_fn, **options)
    else:
        fields = dict(header["estimator"])
        guide = AutoSymmetrized(
            model,
            finite_group_from_dict(header["group"]),
            base=_BASES[header["base"]],
            estimator=_ESTIMATORS[fields.pop("name")](**fields),
            sticking_the_landing=header.get("sticking_the_landing", False),
            init_loc_fn=model.init_loc_fn,
            **options,
        )
    guide.setup()
    guide.load_state_dict(tensors)
    return guide


def _options(guide: Any) -> dict[str, Any]:
    """The arguments of a base that its parameters' shapes depend on."""
    if isinstance(guide, AutoModes):
        return guide.options()
    return {"rank": guide.rank} if isinstance(guide, AutoLowRankMultivariateNormal) else {}
