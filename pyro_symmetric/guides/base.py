"""The base class of this library's guides, their initial means, and of any set-up guide
the layout of its vector and a group's action on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta, Distribution
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoContinuous, AutoGuide
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.infer.autoguide.initialization import init_to_mean, init_to_median
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import biject_to, register_kl

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Json, Keywords
from pyro_symmetric.density.traced import is_enumerated
from pyro_symmetric.groups import Action, Group
from pyro_symmetric.guides.stored import StoredGuide
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Layout, Tensors, Weights, map_values

Message = dict[str, Any]  # of a site, in a handler of Pyro
InitLocFn = Callable[[Message], Tensor]

# deviation of initial means, unconstrained; the initial scale of guides is 0.1
INIT_NOISE = 0.01


def hidden_from_guides(msg: Message) -> bool:
    """Return whether a message is no latent site of a guide: discrete sites are summed
    out, by ``TraceEnum_ELBO`` or by this library."""
    if prototype_hide_fn(msg) or is_enumerated(msg):
        return True
    if msg["fn"].support.is_discrete:
        raise ValueError(
            f"site {msg['name']!r} is discrete, and can't be summed out, as it has "
            "infinitely many values; marginalise it in the model"
        )
    return False


class WeightsGuide(StoredGuide, AutoContinuous):
    """An :class:`~pyro.infer.autoguide.AutoContinuous` guide over weights.

    Beyond Pyro's: it shares its parameters with no other guide, :meth:`setup` creates
    them before the first step, and :meth:`sample_posterior` draws weights without data.
    What is loaded into Pyro's store in another process, where guides of this class are
    made in the same order, or this one alone, is taken at the next call. Pickling
    leaves the guide intact; pickles and copies have their own parameters, in any
    process. A set-up guide is pickled without its model, which it no longer needs.
    """

    _prototype_hide_fn = staticmethod(hidden_from_guides)

    def __init__(self, model: Any, *args: Any, **kwargs: Any):
        super().__init__(model, *args, **kwargs)
        # in a tuple, so that a module isn't registered as a submodule
        self._raw_model: Any = (model,)
        self.take_name()

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Create the parameters by tracing the model on its arguments, unless the guide
        is set up.

        Afterwards ``guide.parameters()``, ``guide.to(...)`` and ``load_state_dict`` see
        all parameters.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        self.read_store()
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # outside of Pyro's context: parameters belong to the module
        self.setup(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Weights:
        """Draw the latent vector and sample every site, as a Delta with the Jacobian of
        its transform.
        """
        latent = self.sample_latent(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {}
        trace: Any = self.prototype_trace
        shapes = self._unconstrained_shapes
        nodes = trace.nodes
        # one operation backward, too
        pieces = latent.split([shape.numel() for shape in shapes.values()], -1)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            fn = nodes[name]["fn"]
            event_dim = (
                nodes[name]["fn"].event_dim + len(shape) - nodes[name]["value"].dim()
            )
            # particles lead
            value = piece.view(
                np.broadcast_shapes(shape, (*latent.shape[:-1], *[1] * event_dim))
            )
            with ExitStack() as stack:
                for frame in self._cond_indep_stacks[name]:
                    stack.enter_context(plates[frame.name])
                result[name] = pyro.sample(name, _Transformed.of(value, fn))
        return result

    def sample_posterior(self, sample_shape: Sequence[int] = ()) -> Weights:
        """Draw weights, ``sample_shape + site_shape``, without data; detached and on
        the guide's device.
        """
        shape = arguments.shape("sample_shape", sample_shape)
        layout = layout_of(self)
        self.read_store()
        with torch.no_grad():
            return layout.constrain(self.get_posterior().sample(shape))

    def median(self, *args: Any, **kwargs: Any) -> Weights:
        """Return the median of every site."""
        self.read_store()
        return super().median(*args, **kwargs)

    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> Weights:
        """Return quantiles of every site, at each of some probabilities."""
        self.read_store()
        return super().quantiles(quantiles, *args, **kwargs)

    def unpack(self, latent: Tensor) -> Weights:
        """Return the weights of flat unconstrained vectors, ``batch_shape + (D,)``."""
        return layout_of(self).constrain(latent)

    def pack(self, weights: Tensors) -> Tensor:
        """Return the flat unconstrained vectors of weights: the inverse of
        :meth:`unpack`.
        """
        return layout_of(self).unconstrain(weights)

    def _adopt(self, guide: AutoGuide) -> None:
        """Copy the prototype trace of a set-up guide, without the data."""
        layout, trace = layout_of(guide), guide.prototype_trace.copy()  # type: ignore[union-attr]
        for name in {"_INPUT", "_RETURN"} & set(trace.nodes):
            trace.remove_node(name)
        stacks = {
            name: trace.nodes[name]["cond_indep_stack"] for name in layout.site_shapes
        }
        self.prototype_trace = trace
        self._cond_indep_stacks = stacks
        self._prototype_frames = {
            frame.name: frame for stack in stacks.values() for frame in stack
        }
        self._unconstrained_shapes = layout.unconstrained_shapes
        self.latent_dim = layout.dim

    def __setattr__(self, name: str, value: Any) -> None:
        # Pyro's makes this guide the master of a guide that it holds, by a weak
        # reference that dask can't pickle.
        PyroModule.__setattr__(self, name, value)

    def __setstate__(self, state: Keywords) -> None:
        nn.Module.__setstate__(self, state)
        self.take_name()
        for value in (*self.parameters(), *self.buffers()):
            if value.is_shared():  # process pools send tensors by reference
                value.data = value.data.clone()

    def __getstate__(self) -> Json:
        # Pyro's removes the model from the guide that is pickled, not from the pickle.
        state = {**PyroModule.__getstate__(self), "master": None}
        if self.prototype_trace is not None:
            state |= {"_model": None, "_raw_model": None}
        return state


class Start:
    """An ``init_loc_fn`` near a group's fixed point, but not at it.

    Sites that a group moves start at a network's own values, else at the prior's mean
    with a little noise: at the mean itself all units are alike, and no gradient
    separates them; at a draw of the prior, far from it, units may never leave a poor
    place. Other sites, such as the noise scale of a likelihood, start at their prior's
    median.

    :param moved: the sites that a group moves.
    """

    def __init__(self, model: Any, moved: Collection[str]):
        self.values = (
            model.initial_weights() if isinstance(model, BayesianModel) else {}
        )
        self.moved = moved

    def __call__(self, site: Message) -> Tensor:
        name = site["name"]
        if name in self.values:
            return self.values[name].clone()
        if name not in self.moved:
            return init_to_median(site)
        transform = biject_to(site["fn"].support)
        unconstrained = transform.inv(init_to_mean(site, fallback=init_to_median))
        return transform(unconstrained + INIT_NOISE * torch.randn_like(unconstrained))


def layout_of(guide: AutoGuide) -> Layout:
    """Return the layout of a set-up guide's flat vector, its sites in the order of
    concatenation.
    """
    trace = getattr(guide, "prototype_trace", None)
    if trace is None:
        raise ValueError(
            f"this {type(guide).__name__} hasn't been set up: call "
            "guide.setup(*model_args) (or guide(*model_args), "
            "for a stock guide) or take one SVI step first"
        )
    nodes = dict(trace.iter_stochastic_nodes())
    shapes = map_values(lambda node: node["value"].shape, nodes)
    return Layout(shapes, map_values(lambda node: biject_to(node["fn"].support), nodes))


def action_on(guide: AutoGuide, group: Group) -> Action:
    """Return the action of a group on a guide's vectors.

    :raises ValueError: if the guide lacks a site that the group moves, or its shape or
        support doesn't fit.
    """
    shapes: Any = layout_of(guide).site_shapes
    for site in group.required_sites:
        if site not in shapes:
            raise ValueError(
                f"the group moves the site {site!r}, which the guide doesn't have; the "
                "guide's sites are "
                f"{list(shapes)}. If the network is an attribute 'net' of the model, "
                "take symmetry.prefixed('net')"
            )
        if shapes[site] != group.site_shapes[site]:
            raise ValueError(
                f"site {site!r} has shape {tuple(shapes[site])} in the guide, but "
                f"{tuple(group.site_shapes[site])} in "
                "the group"
            )
    nodes = guide.prototype_trace.nodes  # type: ignore[union-attr]
    return Action(group, {name: nodes[name]["fn"].support for name in shapes}, shapes)


class _Transformed(Delta):
    """A point mass at a constrained value, with the log-density of the transform from
    the unconstrained one.

    Pyro's Delta compares the value with itself, takes a logarithm and adds zero.
    """

    @classmethod
    def of(cls, unconstrained: Tensor, fn: Any) -> _Transformed:
        """Transform to the support of a distribution."""
        transform = biject_to(fn.support)
        event_dim = fn.event_dim
        value = transform(unconstrained)
        batch = value.shape[: value.dim() - event_dim]
        # the identity, or a density that isn't asked for
        if value is unconstrained or poutine.get_mask() is False:
            # A scalar on the CPU combines with tensors on any device.
            device = unconstrained.device if batch else "cpu"
            log_density = torch.zeros(
                (), dtype=unconstrained.dtype, device=device
            ).expand(batch)
        else:
            log_density = transform.inv.log_abs_det_jacobian(value, unconstrained)
            log_density = sum_rightmost(
                log_density, log_density.dim() - value.dim() + event_dim
            )
        return cls(value, log_density, event_dim, validate_args=False)

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        return super().rsample(sample_shape) if sample_shape else self.v

    def log_prob(self, x: Tensor) -> Tensor:
        return self.log_density if x is self.v else super().log_prob(x)


@register_kl(_Transformed, Distribution)
def _kl_transformed(site: _Transformed, prior: Distribution) -> Tensor:
    # Pyro's, of a Delta, leaves out the density of the transform.
    return site.log_density - prior.log_prob(site.v)
