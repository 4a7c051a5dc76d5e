"""Units that a user declares by naming the axes of sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pyro_symmetric import arguments
from pyro_symmetric.groups.units import Axis, Units, moves_of


def declared_units(
    axes: Mapping[str, Sequence[str | None]],
    shapes: Mapping[str, torch.Size],
    moves: str | Iterable[str] | Mapping[str, str | Iterable[str]],
    even: Iterable[str],
) -> list[Units]:
    """The units of a declaration; see :meth:`~pyro_symmetric.groups.group.Group.declare`.

    :raises ValueError: if a site is unknown, an axis is left out, the axes of one set of units differ in length, or
        units are declared to do what only discovery can tell (scale, shift).
    """
    even = arguments.listed("even", even, str, "sites")
    lying: dict[str, list[tuple[str, int]]] = {}
    for site, names in axes.items():
        if not isinstance(names, list | tuple) or len(names) != len(shapes.get(site, ())) or not names:
            raise ValueError(
                f"axes[{site!r}] is {names!r}; it must name units or None for each axis of that site, whose shape is "
                f"{shapes.get(site, 'unknown')} (a scalar has none: give it an axis of length one, whose unit can flip)"
            )
        for dim, name in enumerate(names):
            if name is not None:
                lying.setdefault(name, []).append((site, dim))
    given = moves if isinstance(moves, Mapping) else dict.fromkeys(lying, moves)
    if set(given) != set(lying) or not set(even) <= set(axes):
        raise ValueError(f"moves tells of {list(given)} and even of {even}; axes holds {list(lying)} in {list(axes)}")
    units = []
    for name, places in lying.items():
        lengths, allowed = {shapes[site][dim] for site, dim in places}, moves_of("moves", given[name])
        if len(lengths) > 1 or not allowed <= {"permute", "flip"}:
            raise ValueError(
                f"{name!r} lies along the axes {places} of lengths {sorted(lengths)}, and its moves are "
                f"{sorted(allowed)}; lengths must be equal, and declared units may only permute and flip"
            )
        index = torch.arange(lengths.pop(), device="cpu")[None]
        own = [Axis(site, dim, index, int("flip" in allowed and site not in even)) for site, dim in places]
        own = [axis for axis in own if axis.touched(allowed)]
        units.append(Units(name, index.shape[1], tuple(own), moves=allowed))
    return units
