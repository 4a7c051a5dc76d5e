r"""Starting points of guides: off the fixed point of a group, with scales that suit, at the best of a few candidates.

What a group exchanges starts at a network's own values, or at a draw from the prior: at the prior's median all units
are alike, and no gradient can tell them apart. Other sites, a likelihood's scale of noise among them, start at their
prior's median: a draw from a wide prior may lie so far off that training ends before it is mended. As no median suits
every model, the other candidates draw these sites, too, and the largest joint density :math:`\log p(w, D)` of
unconstrained sites decides. Up to a constant that is the ELBO of a narrow guide, and costs one evaluation of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median, init_to_sample
from torch import Tensor

from pyro_symmetric._process import running_pyro
from pyro_symmetric.calls import require_drawable
from pyro_symmetric.guides.layout import layout_of
from pyro_symmetric.models import BayesianModel

InitLocFn = Callable[[dict[str, Any]], Tensor]


class Start:
    """A way to start, for ``init_loc_fn`` of any automatic guide.

    :param exchanged: the sites that a group moves; ``None``: all but a likelihood's.
    :param fresh: start a network at freshly initialised values instead of its own.
    :param drawn: draw the other sites from their prior, too, instead of starting at its median.
    """

    def __init__(
        self, model: Any, exchanged: Collection[str] | None = None, *, fresh: bool = False, drawn: bool = False
    ):
        self.values = model.initial_weights(fresh) if isinstance(model, BayesianModel) else {}
        self.exchanged = exchanged
        self.drawn = drawn

    def __call__(self, site: dict[str, Any]) -> Tensor:
        name = site["name"]
        if name in self.values:
            return self.values[name].clone()
        exchanged = not self.values if self.exchanged is None else name in self.exchanged
        if not (exchanged or self.drawn):
            return init_to_median(site)
        require_drawable(name, site["fn"])
        return init_to_sample(site)


def set_up_at_best(
    guide: Any,
    model: Any,
    init_loc_fn: InitLocFn | None,
    exchanged: Collection[str] | None,
    number: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    fresh: bool = False,
) -> tuple[float, ...]:
    """Set a guide up whose means are ``guide.loc``, at a given start, or at the best of ``number`` starts.

    :return: the log-densities of all of them; none if there was no choice: given starts, a network's own values.
    """
    first = init_loc_fn or Start(model, exchanged, fresh=fresh)
    guide._model = (InitMessenger(first)(model),)
    guide._setup_prototype(*args, **kwargs)
    layout = layout_of(guide)
    known = isinstance(model, BayesianModel) and not fresh and set(layout.site_shapes) <= set(model.initial_weights())
    if init_loc_fn or number == 1 or known or not hasattr(guide, "loc"):
        return ()
    starts, found = [], []
    with torch.no_grad(), running_pyro(), poutine.block():
        for k in range(number):
            start = Start(model, exchanged, fresh=fresh, drawn=k > 0)
            trace: Any = poutine.trace(InitMessenger(start)(model)).get_trace(*args, **kwargs)
            starts.append(
                layout.unconstrain({site: trace.nodes[site]["value"] for site in layout.site_shapes}).detach()
            )
            value = float(trace.log_prob_sum() + layout.log_det(starts[-1]))
            found.append(-torch.inf if math.isnan(value) else value)
        guide.loc.copy_(starts[found.index(max(found))])
    return tuple(found)
