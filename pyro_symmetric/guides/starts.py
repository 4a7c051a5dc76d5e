r"""Where guides start: off the fixed point of a group, with scales that suit, at the best of a few candidates.

What a group exchanges starts at a network's own values, or at a draw from the prior: at the prior's median all units
are alike, and no gradient can tell them apart. Other sites, a likelihood's scale of noise among them, start at their
prior's median: a draw from a wide prior may lie so far off that training ends before it is mended. As no median suits
every model, the other candidates draw these sites, too, and the largest joint density :math:`\log p(w, D)` of
unconstrained sites decides. Up to a constant that is the ELBO of a narrow guide, and costs one evaluation of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median, init_to_sample
from torch import Tensor
from torch.distributions import biject_to

from pyro_symmetric.guides.layout import SiteLayout
from pyro_symmetric.models import BayesianModel

InitLocFn = Callable[[dict[str, Any]], Tensor]


def init_loc_fn(
    model: Any, moved: Collection[str] | None = None, *, fresh: bool = False, drawn: bool = False
) -> InitLocFn:
    """A way to start, for ``init_loc_fn`` of any automatic guide.

    :param moved: the sites that a group moves; ``None``: all but a likelihood's.
    :param fresh: start a network at freshly initialised values instead of its own.
    :param drawn: draw the other sites from their prior, too, instead of starting at its median.
    """
    values = model.initial_weights(fresh) if isinstance(model, BayesianModel) else {}

    def start(site: dict[str, Any]) -> Tensor:
        name = site["name"]
        if name in values:
            return values[name].clone()
        moves = not values if moved is None else name in moved
        return init_to_sample(site) if moves or drawn else init_to_median(site)

    return start


def candidates(
    model: Any, sites: Sequence[SiteLayout], moved: Collection[str] | None, number: int, *, fresh: bool = False
) -> list[InitLocFn]:
    """Ways to start that are worth comparing: ``number`` of them, or one if a network's own values leave no choice."""
    if isinstance(model, BayesianModel) and not fresh and {site.name for site in sites} <= set(model.initial_weights()):
        number = 1
    return [init_loc_fn(model, moved, fresh=fresh, drawn=k > 0) for k in range(number)]


def best_start(
    model: Any, sites: Sequence[SiteLayout], ways: Sequence[InitLocFn], *args: Any, **kwargs: Any
) -> tuple[Tensor, tuple[float, ...]]:
    """The candidate at which the joint density of the model is largest, as a flat unconstrained vector ``(D,)``, and
    the log-densities of all of them, none if there is but one."""
    starts, found = [], []
    with torch.no_grad(), poutine.block(), pyro.validation_enabled(False):
        for way in ways:
            trace = poutine.trace(InitMessenger(way)(model)).get_trace(*args, **kwargs)
            parts, density = [], trace.log_prob_sum()
            for site in sites:
                value = cast(Tensor, trace.nodes[site.name]["value"]).detach()
                transform, free = biject_to(site.support), site.unconstrain(value)
                density = density + transform.log_abs_det_jacobian(free, value).sum()
                parts.append(free.reshape(-1))
            starts.append(torch.cat(parts))
            found.append(float(density))
    found = [value if value == value else -torch.inf for value in found]
    return starts[found.index(max(found))], tuple(found) if len(found) > 1 else ()
