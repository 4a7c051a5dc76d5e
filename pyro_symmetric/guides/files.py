"""Guides as files: parameters, layout, group and estimator in one safetensors file. A loaded guide draws without
data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pyro.infer.autoguide as autoguide
import torch
from pyro.infer.autoguide import AutoContinuous, AutoGuide

from pyro_symmetric.alignment.gaussian import to_gaussian
from pyro_symmetric.distributions import ExactOrbit, InfoNCE
from pyro_symmetric.guides.aligned import AutoMeanField, flat_moments
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.layout import LayoutModel, SiteLayout, layout_of
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.storage import PathLike, load_tensors, save_tensors
from pyro_symmetric.symmetry.permutation import PermutationGroup

KIND = "guide"
VERSION = 1

_BASES = ("AutoDiagonalNormal", "AutoLowRankMultivariateNormal", "AutoMultivariateNormal")
_ESTIMATORS: dict[str, type] = {"InfoNCE": InfoNCE, "ExactOrbit": ExactOrbit}


def save_guide(guide: AutoGuide, path: PathLike) -> None:
    """Write a set-up guide to one ``.safetensors`` file, atomically and without pickle.

    Takes our guides and the stock mean-field ones (``AutoNormal``, ``AutoDiagonalNormal``).

    :raises TypeError: for a guide that it doesn't know how to write.
    :raises OSError: if the file can't be written.
    """
    sites = layout_of(guide)
    header: dict[str, Any] = {"sites": [site.to_dict() for site in sites]}
    if isinstance(guide, AutoSymmetrized):
        if guide.base_class.__name__ not in _BASES:
            raise TypeError(
                f"a guide over {guide.base_class.__name__} can't be written to a file; over {_BASES} it can"
            )
        estimator = guide.get_posterior().estimator
        if type(estimator).__name__ not in _ESTIMATORS:
            raise TypeError(f"the estimator {estimator!r} can't be written to a file; known are {sorted(_ESTIMATORS)}")
        header |= {
            "class": "AutoSymmetrized",
            "base": guide.base_class.__name__,
            "rank": getattr(guide, "rank", None),
            "group": guide.group.to_dict(),
            "estimator": {"name": type(estimator).__name__, **asdict(estimator)},  # type: ignore[call-overload]
        }
        tensors = guide.state_dict()
    elif isinstance(guide, AutoMeanField | autoguide.AutoDiagonalNormal | autoguide.AutoNormal):
        header["class"] = "AutoMeanField"
        loc, scale = flat_moments(to_gaussian(guide), sites)
        tensors = {"loc": loc, "scale": scale}
    else:
        raise TypeError(
            f"{type(guide).__name__} can't be written to a file; AutoSymmetrized and mean-field Gaussian guides can"
        )
    save_tensors(path, KIND, VERSION, tensors, header)


def load_guide(path: PathLike, device: torch.device | str | None = None) -> WeightsGuide:
    """Read a guide that :func:`save_guide` wrote; ``sample_posterior`` works at once, training goes on with stock SVI.

    Mean-field guides come back as :class:`AutoMeanField`, symmetrised ones as :class:`AutoSymmetrized` over the same
    base.

    :raises OSError: if the file can't be read.
    :raises ValueError: if it is damaged or no guide.
    """
    tensors, header = load_tensors(path, KIND, VERSION)
    if device is not None:
        tensors = {name: value.to(device) for name, value in tensors.items()}
    sites = tuple(SiteLayout.from_dict(site) for site in header["sites"])
    if header["class"] == "AutoMeanField":
        return AutoMeanField(sites, tensors["loc"], tensors["scale"])
    model = LayoutModel(sites, next(iter(tensors.values())))
    fields = dict(header["estimator"])
    base: type[AutoContinuous] = getattr(autoguide, header["base"])
    guide = AutoSymmetrized(
        model,
        PermutationGroup.from_dict(header["group"]),
        base=base,
        estimator=_ESTIMATORS[fields.pop("name")](**fields),
        init_loc_fn=model.init_loc_fn,
        **({} if header["rank"] is None else {"rank": header["rank"]}),
    )
    guide.setup()
    guide.load_state_dict(tensors)
    return guide
