"""Guides as files: parameters, layout, group and estimator in one safetensors file. A loaded guide draws without
data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_symmetric.distributions import ExactOrbit, InfoNCE, SinkhornImportance
from pyro_symmetric.groups import Group
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.gaussian import AutoGaussian, moments_of
from pyro_symmetric.guides.layout import GuideLayout, LayoutModel, layout_of
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.guides.unit_blocks import AutoUnitBlocks, gaussian_copy
from pyro_symmetric.storage import PathLike, StoreError, load_tensors, save_tensors

KIND = "guide"
VERSION = 3
ESTIMATORS: dict[str, Any] = {kind.__name__: kind for kind in (ExactOrbit, InfoNCE, SinkhornImportance)}


def save_guide(guide: AutoGuide, path: PathLike) -> None:
    """Write a set-up guide to one ``.safetensors`` file, atomically and without pickle.

    Takes our guides, symmetrised over a Gaussian base, and the stock Gaussian ones (``AutoNormal``,
    ``AutoDiagonalNormal``, ``AutoLowRankMultivariateNormal``, ``AutoMultivariateNormal``). Of others write
    ``guide.state_dict()``.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = pyro.infer.autoguide.AutoDiagonalNormal(model)
    >>> draw = guide()  # sets it up
    >>> ps.save_guide(guide, "guide.safetensors")
    >>> ps.load_guide("guide.safetensors").sample_posterior((20,))["w"].shape
    torch.Size([20, 3])

    :raises TypeError: for a guide that it doesn't know how to write.
    :raises OSError: if the file can't be written.
    """
    layout = layout_of(guide)
    if not isinstance(guide, AutoSymmetrized):
        guide = gaussian_copy(guide)
    header = {"sites": layout.to_dict(), "guide": _described(guide)}
    save_tensors(path, KIND, VERSION, guide.state_dict(), header)


def load_guide(path: PathLike, device: torch.device | str | None = None) -> WeightsGuide:
    """Read a guide that :func:`save_guide` wrote. ``sample_posterior`` works at once; stock SVI continues the training.

    Gaussian guides come back as :class:`AutoGaussian` or :class:`AutoUnitBlocks`, all others as what they were, with
    such guides inside.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = ps.AutoSymmetrized(model, ps.Group.declare({"w": ("k",)}, {"w": torch.zeros(3)})).setup()
    >>> ps.save_guide(guide, "guide.safetensors")
    >>> ps.load_guide("guide.safetensors").sample_posterior((20,))["w"].shape
    torch.Size([20, 3])

    :param device: where its parameters are to be, and so its draws; by default on the CPU, wherever they were.
    :raises OSError: if the file can't be read.
    :raises StoreError: if it is damaged (it is compared with its checksum) or no guide.
    """
    tensors, header = load_tensors(path, KIND, VERSION)
    if device is not None:
        tensors = {name: value.to(device) for name, value in tensors.items()}
    try:
        like = next(value for value in tensors.values() if value.is_floating_point())
        guide = _built(header["guide"], GuideLayout.from_dict(header["sites"]), like)
        guide.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError, StopIteration, AttributeError) as error:
        raise StoreError(f"{path} has a damaged header: {error!r}") from error
    return guide


# what a guide is, but for its parameters, as JSON -------------------------------------------------------------------


def _described(guide: Any) -> dict[str, Any]:
    kind = type(guide).__name__
    if isinstance(guide, AutoSymmetrized):
        if ESTIMATORS.get(type(guide.estimator).__name__) is not type(guide.estimator):
            raise TypeError(
                f"the estimator {guide.estimator!r} can't be written to a file; known are {sorted(ESTIMATORS)}"
            )
        return {
            "class": kind,
            "base": _described(guide.base),
            "group": guide.group.to_dict(),
            "estimator": {"name": type(guide.estimator).__name__, **asdict(guide.estimator)},
        }
    if isinstance(guide, AutoUnitBlocks):
        return {"class": kind, "group": guide.group.to_dict()}
    return {"class": "AutoGaussian", "moments": {name: list(value.shape) for name, value in moments_of(guide).items()}}


def _built(described: Mapping[str, Any], layout: GuideLayout, like: Tensor) -> Any:
    """A guide of this description, set up, with parameters of whatever values."""
    model, kind = LayoutModel(layout, like), described["class"]
    if kind == "AutoSymmetrized":
        fields = dict(described["estimator"])
        guide: WeightsGuide = AutoSymmetrized(
            model,
            Group.from_dict(described["group"]),
            base=_built(described["base"], layout, like),
            estimator=ESTIMATORS[fields.pop("name")](**fields),
        )
        return guide.setup()
    if kind == "AutoUnitBlocks":
        return AutoUnitBlocks(model, Group.from_dict(described["group"]), init_loc_fn=model.init_loc_fn).setup()
    moments = {name: like.new_ones(shape) for name, shape in described["moments"].items()}
    return AutoGaussian(layout, **{name: v.tril() if name == "scale_tril" else v for name, v in moments.items()})
