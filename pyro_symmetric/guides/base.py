"""What all guides of this library share: names of their own, set-up without a step, draws without data, files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from pyro.infer.autoguide import AutoContinuous, AutoDelta, AutoGuide, AutoNormal
from torch import Tensor
from torch.distributions import biject_to

from pyro_symmetric import arguments
from pyro_symmetric.guides.layout import layout_of
from pyro_symmetric.guides.quantiles import checked
from pyro_symmetric.symmetry.weights import Weights, batch_shape, require_sites

AnyGuide = TypeVar("AnyGuide", bound=AutoGuide)

_counter = itertools.count()


def distinct(guide: AnyGuide) -> AnyGuide:
    """Give a guide a name of its own in Pyro's parameter store, and return it.

    Pyro names every stock guide after its class, so that two guides of one class silently share all parameters. Our own
    guides are distinct from the start; wrap stock guides, before their first use:

    >>> first, second = distinct(AutoNormal(model)), distinct(AutoNormal(model))
    """
    arguments.instance("guide", guide, AutoGuide, "an automatic guide")
    if getattr(guide, "prototype_trace", None) is not None:
        raise ValueError("the guide has been used already, under its old name; call distinct() right after building it")
    guide._pyro_name = f"{type(guide).__name__}_{next(_counter)}"
    return guide


class WeightsGuide(AutoContinuous):
    """An :class:`~pyro.infer.autoguide.AutoContinuous` guide over weights.

    Beyond Pyro's: its parameters are never shared with another guide by accident; :meth:`setup` creates them before the
    first step; :meth:`sample_posterior` draws weights and needs no data.

    :ivar starts: log-densities of the starts that were compared, ``log p(w, D)`` of unconstrained sites; the guide
        began at the largest. A guide that was told where to start compared none.
    """

    chooses_starts: ClassVar[bool] = False
    starts: tuple[float, ...] = ()

    def __init__(self, model: Any, *args: Any, **kwargs: Any):
        super().__init__(arguments.function("model", model, "a Pyro model"), *args, **kwargs)
        distinct(self)

    def setup(self, *args: Any, **kwargs: Any) -> WeightsGuide:
        """Create the parameters, by tracing the model on its own arguments; does nothing the second time.

        Afterwards ``guide.parameters()``, ``guide.to(...)`` and ``load_state_dict`` see everything there is. Parameters
        under that guide's name in the parameter store are reset, so call it before training.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        return self

    def sample_posterior(self, sample_shape: Sequence[int] = ()) -> Weights:
        """Draws of the weights, ``sample_shape + site_shape``, detached and on the guide's device. Needs no data."""
        return sample_posterior(self, sample_shape)

    def get_base_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """The distribution over flat unconstrained vectors, before any symmetrisation."""
        return self.get_posterior(*args, **kwargs)

    def median(self, *args: Any, **kwargs: Any) -> Weights:
        """Medians of the weights, by site."""
        layout_of(self)
        return super().median(*args, **kwargs)

    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> Weights:
        """Marginal quantiles of the weights, by site, ``(len(quantiles), *site_shape)``."""
        layout_of(self)
        return super().quantiles(checked(quantiles).tolist(), *args, **kwargs)

    def unpack(self, latent: Tensor) -> Weights:
        """Flat unconstrained vectors ``batch_shape + (D,)`` -> weights."""
        sites = layout_of(self)
        dim = sum(site.unconstrained_shape.numel() for site in sites)
        if arguments.tensor("latent", latent).shape[-1:] != (dim,):
            raise ValueError(f"latent has shape {tuple(latent.shape)}; its last axis must be {dim} long")
        pieces = latent.split([site.unconstrained_shape.numel() for site in sites], dim=-1)
        return {
            site.name: biject_to(site.support)(piece.reshape((*latent.shape[:-1], *site.unconstrained_shape)))
            for site, piece in zip(sites, pieces, strict=True)
        }

    def pack(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Weights -> flat unconstrained vectors; the inverse of :meth:`unpack`."""
        sites = layout_of(self)
        shapes = {site.name: torch.Size(site.shape) for site in sites}
        require_sites(weights, shapes)
        batch_shape(weights, shapes)
        pieces = []
        for site in sites:
            value = biject_to(site.support).inv(weights[site.name])
            batch = value.shape[: value.dim() - len(site.unconstrained_shape)]
            pieces.append(value.reshape(*batch, -1))
        return torch.cat(pieces, dim=-1)

    def __repr__(self) -> str:
        if self.prototype_trace is None:
            return f"{type(self).__name__}(not set up)"
        parameters = sum(p.numel() for p in self.parameters())
        spread = f"{min(self.starts):.1f} to {max(self.starts):.1f}" if self.starts else ""
        starts = f", starts={len(self.starts)} of log-density {spread}" if self.starts else ""
        return f"{type(self).__name__}(latent_dim={self.latent_dim}, parameters={parameters}{starts})"


def sample_posterior(guide: AutoGuide, sample_shape: Sequence[int] = ()) -> Weights:
    """Draws of the weights of any automatic guide, stock ones included, without data: ``sample_shape + site_shape``.

    :raises TypeError: for a guide that is neither continuous nor ``AutoNormal`` nor ``AutoDelta``.
    """
    shape = arguments.shape("sample_shape", sample_shape)
    sites = layout_of(guide)
    with torch.no_grad():
        if isinstance(guide, AutoContinuous):
            return WeightsGuide.unpack(guide, guide.get_posterior().sample(shape))  # type: ignore[arg-type]
        if isinstance(guide, AutoNormal):
            moments = {site.name: guide._get_loc_and_scale(site.name) for site in sites}
            draws = {name: torch.distributions.Normal(*pair).sample(shape) for name, pair in moments.items()}
            return {site.name: biject_to(site.support)(draws[site.name]) for site in sites}
        if isinstance(guide, AutoDelta):
            return {name: value.expand(*shape, *value.shape) for name, value in guide.median().items()}
    raise TypeError(f"sample_posterior doesn't know the guide {type(guide).__name__}; use pyro.infer.Predictive for it")
