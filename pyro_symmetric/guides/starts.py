"""Starting points of guides: beside the fixed point of a group, as near to it as other guides start.

What a group exchanges starts at a network's own values, else at the prior's mean and a little noise: at the mean itself
all units are alike, and no gradient can tell them apart; far from it, at a draw of the prior, units may stay for good
where they don't belong. Other sites, a likelihood's scale of noise among them, start at their prior's median.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from pyro.infer.autoguide.initialization import init_to_mean, init_to_median
from torch import Tensor
from torch.distributions import biject_to

from pyro_symmetric.models import BayesianModel

InitLocFn = Callable[[dict[str, Any]], Tensor]

# Deviation of the noise, in unconstrained coordinates; guides are 0.1 wide at the start.
APART = 0.01


class Start:
    """A way to start, for ``init_loc_fn`` of any automatic guide.

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
