"""Guides as files: moments, sites, group and estimator in one safetensors file."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints as pyro_constraints
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.constraints import Constraint

from pyro_symmetric.arguments import Device, Json, instance
from pyro_symmetric.distributions import (
    ExactOrbit,
    InfoNCE,
    RotationImportance,
    SinkhornImportance,
    UnitBlocks,
)
from pyro_symmetric.groups import Group
from pyro_symmetric.guides.base import Message, WeightsGuide, layout_of
from pyro_symmetric.guides.gaussian import AutoGaussian, plain_posterior
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.store import PathLike, StoreError, load_tensors, save_tensors
from pyro_symmetric.weights import Tensors, map_values, require_finite

KIND = "guide"
VERSION = 4
ESTIMATORS: Json = {
    kind.__name__: kind
    for kind in (ExactOrbit, InfoNCE, RotationImportance, SinkhornImportance)
}


def save_guide(guide: AutoGuide, path: PathLike) -> None:
    """Write a set-up guide to one ``.safetensors`` file, atomically and without pickle.

    Supported are our guides, symmetrised over a Gaussian base or plain, and the stock
    Gaussian ones (``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal``,
    ``AutoLowRankMultivariateNormal``, which becomes one of full rank). Of others save
    ``guide.state_dict()``.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = pyro.infer.autoguide.AutoDiagonalNormal(model)
    >>> draw = guide()  # sets it up
    >>> ps.save_guide(guide, "guide.safetensors")
    >>> ps.load_guide("guide.safetensors").sample_posterior((20,))["w"].shape
    torch.Size([20, 3])

    :raises TypeError: for any other guide or estimator.
    :raises ValueError: for a guide that isn't set up, or holds NaN or infinite values.
    :raises OSError: if the file can't be written.
    """
    wanted = (
        "an AutoGuide; of a guide written by hand save the parameters, "
        "pyro.get_param_store() or its module's state_dict()"
    )
    instance("guide", guide, AutoGuide, wanted)
    header: Json = {"sites": _sites_of(guide), "group": None}
    require_finite(dict(guide.named_parameters()), "guide")
    moments = AutoGaussian(guide, plain_posterior(guide))
    if isinstance(guide, AutoSymmetrized):
        name = type(guide.estimator).__name__
        if ESTIMATORS.get(name) is not type(guide.estimator):
            raise TypeError(
                f"the estimator {guide.estimator!r} can't be written; known are "
                f"{sorted(ESTIMATORS)}"
            )
        header |= {
            "group": guide.group.to_dict(),
            "estimator": {"name": name, **asdict(guide.estimator)},
        }
    save_tensors(path, KIND, VERSION, moments.state_dict(), header)


def load_guide(path: PathLike, device: Device = None) -> WeightsGuide:
    """Read a guide that :func:`save_guide` wrote: an :class:`AutoGaussian`, or an
    :class:`AutoSymmetrized` over one.

    ``sample_posterior`` works at once, and stock SVI continues the training.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = ps.AutoSymmetrized(
    ...     model, ps.Group.declare({"w": ("k",)}, {"w": torch.zeros(3)})
    ... ).setup()
    >>> ps.save_guide(guide, "guide.safetensors")
    >>> ps.load_guide("guide.safetensors").sample_posterior((20,))["w"].shape
    torch.Size([20, 3])

    :param device: the device of its parameters and draws; by default the CPU.
    :raises OSError: if the file can't be read.
    :raises StoreError: if its checksum doesn't fit, or it is no guide.
    :raises ValueError: if a moment is NaN or infinite.
    """
    tensors, header = load_tensors(path, KIND, VERSION)
    require_finite(tensors, str(path))
    if device is not None:
        tensors = map_values(lambda value: value.to(device), tensors)
    try:
        _require_sizes(header, tensors)
        loc = tensors["loc"]
        sites = _of_sites(header["sites"], loc)
        positions, trils = [], []
        for number in range((len(tensors) - 2) // 2):
            positions.append(tensors[f"positions_{number}"])
            shape = tensors[f"scale_tril_{number}_unconstrained"].shape
            identity = torch.eye(shape[-1], dtype=loc.dtype, device=loc.device)
            trils.append(identity.expand(shape))
        blocks = UnitBlocks(torch.zeros_like(loc), positions, trils)
        guide: Any = AutoGaussian(sites, blocks)
        guide.load_state_dict(tensors)
        if header["group"] is not None:
            fields = dict(header["estimator"])
            group = Group.from_dict(header["group"])
            estimator = ESTIMATORS[fields.pop("name")](**fields)
            guide = AutoSymmetrized(sites.model, group, guide, estimator).setup()
            guide._raw_model = None  # only its sites are known
        guide.reads_store = False  # its values are those of the file
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise StoreError(f"{path} has a damaged header: {error!r}") from error
    return guide


# sites as JSON ------------------------------------------------------------------------

_MEMBERS = [*vars(constraints).values(), *vars(pyro_constraints).values()]
_KINDS = {
    kind.__name__: kind
    for kind in _MEMBERS
    if isinstance(kind, type) and issubclass(kind, Constraint)
}


def _sites_of(guide: AutoGuide) -> list[Json]:
    """Describe the sites of a guide, with their supports and the plates around them."""
    shapes = layout_of(guide).site_shapes  # raises before set-up
    nodes = guide.prototype_trace.nodes  # type: ignore[union-attr]
    return [
        {
            "name": name,
            "shape": list(shape),
            "support": _support_to_dict(nodes[name]["fn"].support),
            "event_dim": nodes[name]["fn"].event_dim,
            "plates": [
                [p.name, int(p.full_size or p.size), int(p.size), p.dim]
                for p in nodes[name]["cond_indep_stack"]
            ],
        }
        for name, shape in shapes.items()
    ]


def _require_sizes(header: Json, tensors: Tensors) -> None:
    """Raise ``ValueError`` if a header names sizes that the file's tensors don't have,
    before anything of these sizes is made.
    """
    # Entries that a support determines, such as the upper half of a Cholesky factor,
    # come on top of as many coordinates as there are moments.
    most = 4 * sum(value.numel() for value in tensors.values())
    sizes = {site["name"]: math.prod(site["shape"]) for site in header["sites"]}
    sizes["all sites"] = sum(sizes.values())
    for site in header["sites"]:
        batch_shape = site["shape"][: len(site["shape"]) - site["event_dim"]]
        for name, _, size, dim in site["plates"]:
            if dim is not None and size != batch_shape[dim]:
                raise ValueError(f"plate {name!r} of size {size} around {batch_shape}")
    if header["group"] is not None:
        for name, shape in header["group"]["site_shapes"].items():
            sizes[name] = math.prod(shape)
        for units in header["group"]["units"]:
            sizes[f"units {units['name']}"] = units["size"] * units["copies"]
    for name, size in sizes.items():
        if not 0 <= size <= most:
            raise ValueError(f"{name} of {size} entries")


def _of_sites(sites: Sequence[Json], example: Tensor) -> WeightsGuide:
    """Set up a guide of a model with these sites and no data, with the device and dtype
    of a tensor.
    """
    supports = {site["name"]: _support_from_dict(site["support"]) for site in sites}

    def model(*args: Any, **kwargs: Any) -> None:
        plates = {}
        for site in sites:
            shape = torch.Size(site["shape"])
            split = len(shape) - site["event_dim"]
            with ExitStack() as stack:
                for name, size, subsample, dim in site["plates"]:
                    if name not in plates:
                        # drawing rows would permute all of them
                        rows = torch.arange(subsample, device=example.device)
                        plates[name] = pyro.plate(name, size, subsample=rows, dim=dim)
                    stack.enter_context(plates[name])
                pyro.sample(
                    site["name"],
                    dist.ImproperUniform(
                        supports[site["name"]], shape[:split], shape[split:]
                    ),
                )

    def start(site: Message) -> Tensor:
        transform = biject_to(site["fn"].support)
        shape = site["fn"].shape()
        return transform(example.new_zeros(transform.inverse_shape(shape)))

    return WeightsGuide(model, start).setup()


def _support_to_dict(support: Constraint) -> Json:
    """Describe a constraint by its class and the arguments of its constructor, read
    from its attributes.
    """
    kind = type(support)
    data: Json = {"kind": kind.__name__}
    for name in (
        inspect.signature(kind).parameters
        if _KINDS.get(kind.__name__) is kind
        else ("kind",)
    ):
        value = getattr(support, name, None)
        if isinstance(value, Constraint):
            data[name] = _support_to_dict(value)
        elif isinstance(value, int | float) or (
            isinstance(value, Tensor) and value.numel() == 1
        ):
            data[name] = value if isinstance(value, int) else float(value)
        else:
            raise ValueError(f"the support {support} can't be written to a file")
    return data


def _support_from_dict(data: Json) -> Constraint:
    fields = {
        name: _support_from_dict(v) if isinstance(v, dict) else v
        for name, v in data.items()
        if name != "kind"
    }
    return _KINDS[data["kind"]](**fields)
