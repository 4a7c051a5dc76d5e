r"""Weight matching as in the textbook: Algorithm 1 of Ainsworth et al. 2023, arXiv 2209.04836.

.. math:: \max_{\pi_1 \dots \pi_L} \sum_l \langle A_l,\; P_l B_l P_{l-1}^\top \rangle

for permutations of units that lie in no others, from the identity, one set after the other in random order, until a
sweep changes nothing. It is what :func:`~pyro_symmetric.alignment.align` does at heart, to read and to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group


def weight_matching(source: Mapping[str, Tensor], reference: Mapping[str, Tensor], group: Group) -> Element:
    """The permutations that bring ``source`` close to ``reference``: a local optimum.

    :param group: permutations of units each of which is one row of every axis along which it lies.
    """
    source, reference = ({site: v.detach().cpu() for site, v in w.items()} for w in (source, reference))
    images = {name: torch.arange(n, device="cpu") for name, n in group.factors.items()}
    changed = True
    while changed:
        changed = False
        names = list(images)
        for name in (names[k] for k in torch.randperm(len(names), device="cpu")):
            scores = torch.zeros(group.factors[name], group.factors[name], dtype=torch.float64, device="cpu")
            for axis in group[name].axes:
                moved = source[axis.site]
                for dim, members in group.members(axis.site).items():
                    if dim != axis.dim:
                        moved = moved.index_select(dim, images[members[0][0]])
                one, other = (
                    v.movedim(axis.dim, 0).reshape(v.shape[axis.dim], -1).double()
                    for v in (reference[axis.site], moved)
                )
                scores += one @ other.mT
            found = torch.from_numpy(linear_sum_assignment(scores.numpy(), maximize=True)[1])
            gain = scores.gather(1, found[:, None]).sum() - scores.gather(1, images[name][:, None]).sum()
            if float(gain) > 1e-12 * float(scores.abs().sum()):
                images[name], changed = found, True
    return group.element(images)
