"""The last word on a symmetry: outputs before and after random elements of the whole group.

A network that draws random numbers draws the same ones on both sides.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.calls import described
from pyro_symmetric.discovery.invariance import BrokenMove, InconclusiveError, Verification, verified
from pyro_symmetric.discovery.outputs import prepared
from pyro_symmetric.discovery.symmetry import Symmetry


class BrokenSymmetry(UserWarning):
    """A move of some units that discovery had proposed failed verification, and was left out.

    >>> import warnings
    >>> class Net(nn.Sequential):
    ...     def forward(self, x):  # another function if it is traced
    ...         hidden = self[0](x)
    ...         return self[1](hidden if torch.compiler.is_exporting() else hidden.cumsum(-1))
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     symmetry = ps.find_symmetry(Net(nn.Linear(2, 4), nn.Linear(4, 1)), torch.randn(3, 2))
    >>> any(warning.category is ps.discovery.BrokenSymmetry for warning in caught), symmetry.group.factors
    (True, {})
    """


class UnverifiedSymmetry(UserWarning):
    """Something about the symmetry couldn't be checked; the message says what.

    >>> import warnings
    >>> class Net(nn.Linear):
    ...     calls = 0
    ...     def forward(self, x):  # another function at each call
    ...         self.calls += 1
    ...         return super().forward(x) * self.calls
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     symmetry = ps.find_symmetry(Net(2, 2), torch.randn(3, 2))
    >>> any(warning.category is ps.discovery.UnverifiedSymmetry for warning in caught)
    True
    """


def verify(
    symmetry: Symmetry,
    net: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    trials: int | None = None,
) -> Verification:
    """Compare outputs before and after random elements of the whole group.

    >>> net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 3)
    >>> symmetry = ps.find_symmetry(net, x)
    >>> bool(ps.verify(symmetry, net, x))
    True
    >>> other = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 2))
    >>> bool(ps.verify(symmetry, other, x))  # softplus(c z) isn't c softplus(z)
    False

    Outputs are compared in float64, or in the network's own precision if it doesn't run in that. A change of 1e-6 of
    the largest output passes, or a larger one if rounding errors, which are measured, are as large. Both sides draw
    the same random numbers, from the generators of PyTorch, NumPy and Python. Masks of dropout, and the noise of train
    mode, count as their means.

    :param symmetry: what was found for the network, or for one like it.
    :param net: the network; it isn't changed.
    :param inputs: an example of what its ``forward`` takes. Floating-point inputs are replaced by random numbers if it
        takes these. In eval mode a batch of large images is cut to its first one or few, if the network takes so few.
    :param kwargs: keyword arguments of its ``forward``.
    :param trials: how many random elements are tried; by default so many that a wrong move passes less than once in a
        million times.
    :raises ValueError: if the network doesn't take the inputs.
    :raises InconclusiveError: if nothing can be told: the network draws random numbers that can't be drawn again, its
        rounding errors are as large as its outputs, or it is on the meta device.
    """
    arguments.instance("symmetry", symmetry, Symmetry, "a Symmetry, such as find_symmetry(net, x)")
    arguments.instance("net", net, nn.Module, "a torch.nn.Module")
    arguments.whole("trials", trials, 1, none="as many as it takes")
    for number, value in enumerate(inputs):
        if isinstance(value, Tensor) and not value.numel():
            raise ValueError(f"inputs[{number}] is {described(value)}, which is empty; there is nothing to compare")
    return verified(symmetry.group, prepared(symmetry, net, inputs, kwargs), trials)


def repaired(
    symmetry: Symmetry, net: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Symmetry:
    """The symmetry without the moves that fail, of which a warning names them.

    Another warning says if nothing can be told.
    """
    dropped: list[BrokenMove] = []
    try:
        outputs = prepared(symmetry, net, inputs, kwargs)
        while broken := verified(symmetry.group, outputs).broken:
            dropped += broken
            for one in broken:
                symmetry = symmetry.without([one.name], one.move)
    except InconclusiveError as error:
        warnings.warn(
            f"{error}. The group is what the rules prove; no element of it was tried.", UnverifiedSymmetry, stacklevel=3
        )
    if dropped:
        names = ", ".join(f"{one.name} ({one.move})" for one in dropped)
        warnings.warn(
            f"verification failed for the units {names}: these moves are left out of the group. A rule is wrong: one "
            "that you registered, or one of pyro_symmetric; then please report the network. "
            f"({'; '.join(map(str, dropped[:5]))}; {outputs.tolerance:.1g} would pass as rounding.)",
            BrokenSymmetry,
            stacklevel=3,
        )
    return symmetry
