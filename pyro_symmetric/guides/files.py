"""Guides as files: parameters, layout, group and estimator in one safetensors file. A loaded guide draws without
data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pyro.infer.autoguide
import torch
from pyro.distributions import transforms
from pyro.infer.autoguide import AutoGuide, AutoNormalizingFlow
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.distributions.orbit import ESTIMATORS, estimator_from_dict
from pyro_symmetric.groups import Group
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.flow import AutoFlow
from pyro_symmetric.guides.gaussian import AutoGaussian, moments_of
from pyro_symmetric.guides.layout import GuideLayout, LayoutModel, layout_of
from pyro_symmetric.guides.modes import AutoModes
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.guides.unit_blocks import AutoUnitBlocks, gaussian_copy
from pyro_symmetric.storage import PathLike, StoreError, load_tensors, save_tensors

KIND = "guide"
VERSION = 3


def save_guide(guide: AutoGuide, path: PathLike) -> None:
    """Write a set-up guide to one ``.safetensors`` file, atomically and without pickle.

    Takes our guides, symmetrised over whatever base, mixtures, unit blocks and flows included, and the stock Gaussian
    ones (``AutoNormal``, ``AutoDiagonalNormal``, ``AutoLowRankMultivariateNormal``, ``AutoMultivariateNormal``). A
    flow must be made of Pyro's own transforms: a file holds no functions. Of others write ``guide.state_dict()``.

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
    if not isinstance(guide, AutoSymmetrized | AutoModes | AutoFlow):
        guide = gaussian_copy(guide)
    header = {"sites": layout.to_dict(), "guide": _described(guide)}
    save_tensors(path, KIND, VERSION, guide.state_dict(), header)


def load_guide(path: PathLike, device: torch.device | str | None = None) -> WeightsGuide:
    """Read a guide that :func:`save_guide` wrote. ``sample_posterior`` works at once; stock SVI continues the training.

    Gaussian guides come back as :class:`AutoGaussian` or :class:`AutoUnitBlocks`, all others as what they were, with
    such guides inside.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = ps.AutoModes(model, num_modes=2)
    >>> guide()["w"].shape
    torch.Size([3])
    >>> ps.save_guide(guide, "guide.safetensors")
    >>> ps.load_guide("guide.safetensors").sample_posterior((20,))["w"].shape
    torch.Size([20, 3])

    :param device: where its parameters are to be, and so its draws; by default on the CPU, wherever they were.
    :raises OSError: if the file can't be read.
    :raises StoreError: if it is damaged (it is compared with its checksum) or no guide.
    """
    arguments.device("device", device)
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
            "sticking_the_landing": guide.sticking_the_landing,
            "estimator": guide.estimator.to_dict(),
        }
    if isinstance(guide, AutoModes):
        return {
            "class": kind,
            "modes": [_described(mode) for mode in guide.modes],
            "train_weights": guide.train_weights,
        }
    if isinstance(guide, AutoFlow):
        flow = type(guide.flow).__name__
        if getattr(pyro.infer.autoguide, flow, None) is not type(guide.flow):
            raise TypeError(f"a guide over {flow} can't be written to a file, only over Pyro's own flows")
        return {"class": kind, "flow": flow, "arguments": _as_json(guide.flow_arguments)}
    if isinstance(guide, AutoUnitBlocks):
        return {"class": kind, "group": guide.group.to_dict()}
    return {"class": "AutoGaussian", "moments": {name: list(value.shape) for name, value in moments_of(guide).items()}}


def _built(described: Mapping[str, Any], layout: GuideLayout, like: Tensor) -> Any:
    """A guide of this description, set up, with parameters of whatever values."""
    model, kind = LayoutModel(layout, like), described["class"]
    if kind == "AutoSymmetrized":
        guide: WeightsGuide = AutoSymmetrized(
            model,
            Group.from_dict(described["group"]),
            base=_built(described["base"], layout, like),
            estimator=estimator_from_dict(described["estimator"]),
            sticking_the_landing=described["sticking_the_landing"],
        )
        return guide.setup()
    if kind == "AutoModes":
        modes = [_built(mode, layout, like) for mode in described["modes"]]
        return AutoModes.from_guides(modes, train_weights=described["train_weights"])
    if kind == "AutoFlow":
        flow: type[AutoNormalizingFlow] = getattr(pyro.infer.autoguide, described["flow"])
        options = _from_json(described["arguments"])
        return AutoFlow(model, flow, init_loc_fn=model.init_loc_fn, **options).setup()
    if kind == "AutoUnitBlocks":
        return AutoUnitBlocks(model, Group.from_dict(described["group"]), init_loc_fn=model.init_loc_fn).setup()
    moments = {name: like.new_ones(shape) for name, shape in described["moments"].items()}
    return AutoGaussian(layout, **{name: v.tril() if name == "scale_tril" else v for name, v in moments.items()})


def _as_json(value: Any) -> Any:
    """The arguments of a flow; functions are Pyro's own transforms, by name, with the arguments that they are given."""
    if isinstance(value, functools.partial):
        arguments_of = {"args": _as_json(list(value.args)), "kwargs": _as_json(value.keywords)}
        return {**_as_json(value.func), **arguments_of}
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if callable(value) and getattr(value, "__name__", "") in transforms.__all__:
        return {"transform": value.__name__}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a flow made with {value!r} can't be written to a file; functions of pyro.distributions.transforms can, also "
        "within functools.partial. Write guide.state_dict() instead"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and "transform" in value:
        function = {name: getattr(transforms, name) for name in transforms.__all__}[value["transform"]]
        if "args" not in value:
            return function
        return functools.partial(function, *_from_json(value["args"]), **_from_json(value["kwargs"]))
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value
