r"""Symmetries during training: how much the order of units changes from step to step.

The units of a layer are sorted by a key of their weights (see
:func:`~pyro_symmetric.canonical.forms.canonicalize`). Kendall's :math:`\tau` between
the sorting permutations of two successive training steps tells whether training moves
from one copy of a mode to another (Laurent et al. 2024, arXiv 2310.08287, section 5 and
figure 4):

.. math:: \tau = 1 - \frac{4 \cdot \#\text{swapped pairs}}{n (n - 1)} \in [-1, 1],

1 if no pair of units swapped, 0 on average between independent random orders.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.canonical.removal import PermutationKey, sorting_permutation
from pyro_symmetric.discovery.symmetry import Symmetry, plain_weights
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.weights import ByName, Tensors, require_finite


def kendall_tau(first: Tensor, second: Tensor) -> Tensor:
    """Compute Kendall's rank correlation between batches of permutations.

    Permutations are those of :class:`~pyro_symmetric.groups.elements.Element`: entry
    ``i`` is the unit at position ``i``. Time and memory are ``n²`` for each pair.

    >>> ps.compare.kendall_tau(
    ...     torch.tensor([0, 1, 2]), torch.tensor([[0, 1, 2], [2, 1, 0], [1, 0, 2]])
    ... )
    tensor([ 1.0000, -1.0000,  0.3333], dtype=torch.float64)

    :param first: ``batch_shape + (n,)``, each row a permutation of ``0 .. n-1``; batch
        shapes broadcast.
    :param second: likewise.
    :returns: ``batch_shape``, float64; 1 if ``n < 2``.
    """
    n = first.shape[-1]
    for name, orders in (("first", first), ("second", second)):
        identity = torch.arange(n, device=orders.device)
        if orders.shape[-1] != n or not (orders.sort(-1).values == identity).all():
            raise ValueError(
                f"{name} has shape {tuple(orders.shape)}; each row must be a "
                f"permutation of 0 .. {n - 1}"
            )
    shape = torch.broadcast_shapes(first.shape[:-1], second.shape[:-1])
    # The position in the second order of each unit, listed in the first order: descents
    # are swapped pairs.
    places = second.argsort(-1).expand(*shape, n)
    positions = places.gather(-1, first.expand(*shape, n))
    later = torch.ones(n, n, dtype=torch.bool, device=positions.device).triu(1)
    descends = positions[..., :, None] > positions[..., None, :]
    swapped = (descends & later).sum((-1, -2))
    return 1 - 4 * swapped.double() / max(1, n * (n - 1))


class SortingTracker:
    """A recorder of the order of units in any training loop.

    Call it after every step, or every few steps; it keeps one number for each set of
    units, and no weights. Removing the scales of units may change their order: for that
    of the canonical form pass weights of unit norms, ``tracker(canonicalize(weights,
    symmetry, permutations=None))``.

    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
    >>> tracker = ps.compare.SortingTracker(ps.find_symmetry(net, torch.randn(3, 2)))
    >>> for step in range(10):
    ...     tracker(net)  # after an optimiser's step
    >>> tracker.history["0"].shape
    torch.Size([9])

    :param symmetry: the group, or a network's symmetry.
    :param key: the sorting key of units, see
        :func:`~pyro_symmetric.canonical.forms.canonicalize`.
    """

    def __init__(self, symmetry: Symmetry | Group, key: PermutationKey = "max"):
        arguments.one_of("key", key, get_args(PermutationKey))
        self.group: Group = group_of(symmetry).permutations
        self.key: PermutationKey = key
        self._last: Element | None = None
        self._taus: dict[str, list[Tensor]] = {
            name: [] for name, size in self.group.factors.items() if size > 1
        }

    @torch.no_grad()
    def __call__(self, weights: nn.Module | Tensors) -> None:
        """Record the present order.

        :param weights: the network, or weights of any batch shape (an ensemble in
            training) that stays the same.
        """
        weights = (
            plain_weights(weights, self.group)
            if isinstance(weights, nn.Module)
            else weights
        )
        require_finite(weights)
        order = sorting_permutation(weights, self.group, self.key)
        last = self._last
        self._last = order
        if last is None:
            return
        if last.batch_shape != order.batch_shape:
            raise ValueError(
                f"weights has batch shape {tuple(order.batch_shape)}, but "
                f"{tuple(last.batch_shape)} the last time; a "
                "tracker follows one run (or one batch of runs)"
            )
        for name, taus in self._taus.items():
            tau = kendall_tau(last[name].to(order[name].device), order[name]).cpu()
            taus.append(tau.mean(-1) if self.group[name].copies > 1 else tau)

    @property
    def history(self) -> ByName:
        """Set of units -> Kendall's tau between successive calls, ``(calls - 1,) +
        batch_shape``. Copies of units (the rows of each attention head) are averaged
        over."""
        return {
            name: torch.stack(taus) if taus else torch.zeros(0, device="cpu")
            for name, taus in self._taus.items()
        }

    @property
    def mean(self) -> Tensor:
        """Kendall's tau averaged over all pairs of units."""
        pairs = {
            name: self.group[name].count * (self.group[name].size - 1) / 2
            for name in self._taus
        }
        return torch.stack(
            [pairs[name] * value for name, value in self.history.items()]
        ).sum(0) / sum(pairs.values())
