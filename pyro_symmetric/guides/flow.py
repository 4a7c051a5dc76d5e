"""Normalising flows that start where other guides do."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.transforms import AffineTransform
from pyro.infer.autoguide import AutoIAFNormal, AutoNormalizingFlow
from pyro.infer.autoguide.initialization import init_to_median
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.starts import InitLocFn


class AutoFlow(WeightsGuide):
    """A stock normalising flow, followed by a trainable shift and scale of each coordinate.

    Pyro's flows start around zero, the fixed point of a group of permutations and signs, about as wide as a standard
    normal. This one starts around given values, and as narrow as other guides.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = ps.AutoFlow(model, pyro.infer.autoguide.AutoIAFNormal, hidden_dim=[16])
    >>> svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=pyro.infer.Trace_ELBO())
    >>> loss = svi.step()
    >>> ps.sample_posterior(guide, (20,))["w"].shape
    torch.Size([20, 3])

    :param model: the Pyro model.
    :param flow: the stock guide: ``AutoIAFNormal``, ``AutoNormalizingFlow`` or a class derived from it.
    :param init_loc_fn: where the shift starts.
    :param init_scale: the scale at the start.
    :param flow_arguments: of the stock guide, such as ``hidden_dim`` or ``init_transform_fn``.
    """

    loc: Any
    scale: Any

    def __init__(
        self,
        model: Any,
        flow: type[AutoNormalizingFlow] = AutoIAFNormal,
        *,
        init_loc_fn: InitLocFn = init_to_median,
        init_scale: float = 0.1,
        **flow_arguments: Any,
    ):
        if not (isinstance(flow, type) and issubclass(flow, AutoNormalizingFlow)):
            raise TypeError(f"flow is {arguments.shown(flow)}; it must be AutoIAFNormal or another AutoNormalizingFlow")
        arguments.options(AutoFlow, flow_arguments, flow)
        arguments.function("init_loc_fn", init_loc_fn, "a function of a site")
        self._init_scale = arguments.positive("init_scale", init_scale)
        super().__init__(model, init_loc_fn)
        self.flow_arguments = flow_arguments
        self.flow = flow(model, **flow_arguments)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self._adopt(self)
        self.loc = nn.Parameter(self._init_loc())
        self.scale = PyroParam(torch.full_like(self.loc, self._init_scale), constraints.softplus_positive)
        self.flow.transform = self.flow._init_transform_fn(self.latent_dim)
        if isinstance(self.flow.transform, nn.Module):
            self.flow.transform.to(device=self.loc.device, dtype=self.loc.dtype)

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """The flow's distribution over flat unconstrained vectors."""
        standard = dist.Normal(self.loc.new_zeros(1), self.loc.new_ones(1)).expand([self.latent_dim]).to_event(1)
        steps = [self.flow.get_transform(*args, **kwargs), AffineTransform(self.loc, self.scale, event_dim=1)]
        return dist.TransformedDistribution(standard, steps)

    def __getstate__(self) -> dict[str, Any]:
        if self.flow.transform is not None:
            _forget(self.flow.transform)
        return super().__getstate__()

    def require_inverse(self) -> None:
        """:raises TypeError: if the flow can tell the density of its own draws only."""
        try:
            with torch.no_grad():
                self.get_posterior().log_prob(self.loc + self.scale / 2)
        except (KeyError, NotImplementedError) as error:
            raise TypeError(
                "the flow knows the inverse of its own draws only, but symmetrising asks for the density of their "
                "copies; take a flow that inverts everywhere: AutoIAFNormal (as many passes as there are weights), or "
                "affine_coupling or spline_coupling (one pass)"
            ) from error


def _forget(transform: Any) -> None:
    """Drop the last draw, which transforms keep with its graph, and which can be neither pickled nor copied."""
    inner = transform.modules() if isinstance(transform, nn.Module) else ()
    for part in (transform, *getattr(transform, "parts", ()), *inner):
        for name, value in list(vars(part).items()):
            if name.startswith("_cache") and isinstance(value, Tensor | tuple):
                setattr(part, name, (None, None) if isinstance(value, tuple) else None)
