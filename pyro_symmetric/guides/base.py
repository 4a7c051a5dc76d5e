"""The base of all guides of this library: parameters of their own, set-up without a step, draws without data.

And where they start, and what any set-up guide says of its sites: the layout of its vector, a group's action on that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta, Distribution
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoContinuous, AutoGuide
from pyro.infer.autoguide.initialization import init_to_mean, init_to_median
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import biject_to, register_kl

from pyro_symmetric import arguments
from pyro_symmetric.groups import Action, Group
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Layout, Weights

InitLocFn = Callable[[dict[str, Any]], Tensor]

APART = 0.01  # deviation of the noise of starts, in unconstrained coordinates; guides are 0.1 wide at the start
# Pyro's store holds parameters under names that start with the guide's: two guides of one name would share them.
_NUMBERS = itertools.count(1)


class WeightsGuide(AutoContinuous):
    """An :class:`~pyro.infer.autoguide.AutoContinuous` guide over weights.

    Beyond Pyro's: it shares its parameters with no other guide; :meth:`setup` creates them before the first step;
    :meth:`sample_posterior` draws weights and needs no data. Pickles and copies leave the guide as it is, and have
    parameters of their own in whatever process. A guide that has been set up is pickled without its model, which it
    needs no longer.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any):
        super().__init__(model, *args, **kwargs)
        self._given: tuple[Any, ...] | None = (model,)  # in a tuple, so that a module isn't a part of the guide
        self._take_name()

    def _take_name(self) -> None:
        """Take a name that no other guide of this process has."""
        for part in self.modules():
            if isinstance(part, PyroModule):
                part._pyro_context = self._pyro_context  # which dask, unlike pickle, copies for each part
        self._pyro_context.used = False
        self._pyro_set_supermodule(f"{type(self).__name__}_{next(_NUMBERS)}", self._pyro_context)

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Create the parameters, by tracing the model on its own arguments; does nothing the second time.

        Afterwards ``guide.parameters()``, ``guide.to(...)`` and ``load_state_dict`` see everything there is.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.setup(*args, **kwargs)  # before Pyro's store comes into play: parameters belong to the module
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Weights:
        """A draw, site by site, as any guide's; a site whose map is trivial costs nothing."""
        latent, plates, result = self.sample_latent(*args, **kwargs), self._create_plates(*args, **kwargs), {}
        trace: Any = self.prototype_trace
        shapes, nodes = self._unconstrained_shapes, trace.nodes
        pieces = latent.split([shape.numel() for shape in shapes.values()], -1)  # one operation on the way back, too
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            fn, events = nodes[name]["fn"], nodes[name]["fn"].event_dim + len(shape) - nodes[name]["value"].dim()
            free = piece.view(np.broadcast_shapes(shape, (*latent.shape[:-1], *[1] * events)))  # particles lead
            with ExitStack() as stack:
                for frame in self._cond_indep_stacks[name]:
                    stack.enter_context(plates[frame.name])
                result[name] = pyro.sample(name, _Image.of(free, fn))
        return result

    def sample_posterior(self, sample_shape: Sequence[int] = ()) -> Weights:
        """Draws of the weights, ``sample_shape + site_shape``, detached and on the guide's device. Needs no data."""
        shape, layout = arguments.shape("sample_shape", sample_shape), layout_of(self)
        with torch.no_grad():
            return layout.constrain(self.get_posterior().sample(shape))

    def unpack(self, latent: Tensor) -> Weights:
        """Flat unconstrained vectors ``batch_shape + (D,)`` -> weights."""
        return layout_of(self).constrain(latent)

    def pack(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Weights -> flat unconstrained vectors; the inverse of :meth:`unpack`."""
        return layout_of(self).unconstrain(weights)

    def _adopt(self, guide: AutoGuide) -> None:
        """Know of the model what a guide that was set up on it knows, but for the data."""
        layout, trace = layout_of(guide), guide.prototype_trace.copy()  # type: ignore[union-attr]
        for name in {"_INPUT", "_RETURN"} & set(trace.nodes):
            trace.remove_node(name)
        stacks = {name: trace.nodes[name]["cond_indep_stack"] for name in layout.site_shapes}
        self.prototype_trace, self._cond_indep_stacks = trace, stacks
        self._prototype_frames = {frame.name: frame for stack in stacks.values() for frame in stack}
        self._unconstrained_shapes, self.latent_dim = layout.unconstrained_shapes, layout.dim

    def __setattr__(self, name: str, value: Any) -> None:
        # Pyro's own makes this guide the master of one that it holds, by a weak reference that dask can't pickle.
        PyroModule.__setattr__(self, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._take_name()
        for value in (*self.parameters(), *self.buffers()):
            if value.is_shared():  # pools of processes send tensors by reference
                value.data = value.data.clone()

    def __getstate__(self) -> dict[str, Any]:
        # Pyro's own takes the model away from the guide that is pickled.
        state = {**PyroModule.__getstate__(self), "master": None}
        if self.prototype_trace is not None:
            state |= {"_model": None, "_given": None}
        return state


class Start:
    """A way to start for any automatic guide: beside the fixed point of a group, as near to it as other guides start.

    What a group exchanges starts at a network's own values, else at the prior's mean and a little noise: at the mean
    itself all units are alike, and no gradient can tell them apart; far from it, at a draw of the prior, units may stay
    for good where they don't belong. Other sites, a likelihood's scale of noise among them, start at their prior's
    median.

    :param exchanged: the sites that a group moves.
    """

    def __init__(self, model: Any, exchanged: Collection[str]):
        self.values = model.initial_weights() if isinstance(model, BayesianModel) else {}
        self.exchanged = exchanged

    def __call__(self, site: dict[str, Any]) -> Tensor:
        name = site["name"]
        if name in self.values:
            return self.values[name].clone()
        if name not in self.exchanged:
            return init_to_median(site)
        transform = biject_to(site["fn"].support)
        free = transform.inv(init_to_mean(site, fallback=init_to_median))
        return transform(free + APART * torch.randn_like(free))


def layout_of(guide: AutoGuide) -> Layout:
    """The layout of a guide's flat vector, in the order in which it concatenates its sites.

    :raises ValueError: if the guide hasn't seen its model yet.
    """
    trace = getattr(guide, "prototype_trace", None)
    if trace is None:
        raise ValueError(
            f"this {type(guide).__name__} hasn't been set up: call guide.setup(*model_args) (or guide(*model_args), "
            "for a stock guide) or take one SVI step first"
        )
    nodes = dict(trace.iter_stochastic_nodes())
    if not nodes:
        raise ValueError("the model has no latent site; a guide needs at least one")
    shapes = {name: node["value"].shape for name, node in nodes.items()}
    return Layout(shapes, {name: biject_to(node["fn"].support) for name, node in nodes.items()})


def action_on(guide: AutoGuide, group: Group) -> Action:
    """The action of a group on a guide's vectors.

    :raises ValueError: if the group moves sites that aren't there, or whose shapes or supports don't fit.
    """
    shapes: Any = layout_of(guide).site_shapes
    for site in group.required_sites:
        if site not in shapes:
            raise ValueError(
                f"the group moves the site {site!r}, which the guide doesn't have; the guide's sites are "
                f"{list(shapes)}. If the network is an attribute 'net' of the model, take symmetry.prefixed('net')"
            )
        if shapes[site] != group.site_shapes[site]:
            raise ValueError(
                f"site {site!r} has shape {tuple(shapes[site])} in the guide, but {tuple(group.site_shapes[site])} in "
                "the group"
            )
    nodes = guide.prototype_trace.nodes  # type: ignore[union-attr]
    return Action(group, {name: nodes[name]["fn"].support for name in shapes}, shapes)


class _Image(Delta):
    """A site's value, the image of an unconstrained one, whose log-density is that of the map.

    Pyro's compares the value with itself, takes a logarithm and adds zero.
    """

    @classmethod
    def of(cls, free: Tensor, fn: Any) -> _Image:
        """The image under the map to a distribution's support."""
        transform, events = biject_to(fn.support), fn.event_dim
        value = transform(free)
        batch = value.shape[: value.dim() - events]
        if value is free or poutine.get_mask() is False:  # of the identity
            # A zero beside which nothing is computed: a GPU takes it along with numbers of its own.
            log_density = torch.zeros((), dtype=free.dtype, device=free.device if batch else "cpu").expand(batch)
        else:
            log_density = transform.inv.log_abs_det_jacobian(value, free)
            log_density = sum_rightmost(log_density, log_density.dim() - value.dim() + events)
        return cls(value, log_density, events, validate_args=False)

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        return super().rsample(sample_shape) if sample_shape else self.v

    def log_prob(self, x: Tensor) -> Tensor:
        return self.log_density if x is self.v else super().log_prob(x)


@register_kl(_Image, Distribution)
def _kl_image(image: _Image, prior: Distribution) -> Tensor:
    # Pyro's, of a Delta, leaves the density of the map out.
    return image.log_density - prior.log_prob(image.v)
