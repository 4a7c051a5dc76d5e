"""Units that a user declares by naming the axes of sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pyro_symmetric import arguments
from pyro_symmetric.groups.units import Axis, Move, Units, moves_of


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
    even = set(arguments.listed("even", even, str, "sites"))
    lying: dict[str, list[tuple[str, int]]] = {}
    for site, names in arguments.mapping("axes", axes, "site -> the name of units, or None, for each axis").items():
        _check_names(site, names, shapes)
        for dim, name in enumerate(names):
            if name is not None:
                lying.setdefault(name, []).append((site, dim))
    if unknown := sorted(even - set(axes)):
        raise ValueError(f"even holds {unknown}; axes declares the sites {list(axes)}")
    allowed = _moves_by_name(moves, lying)
    units = []
    for name, places in lying.items():
        n = shapes[places[0][0]][places[0][1]]
        for site, dim in places:
            if shapes[site][dim] != n:
                raise ValueError(
                    f"{name!r} has {n} units in {places[0][0]!r} but axis {dim} of {site!r} has length "
                    f"{shapes[site][dim]}; the axes of one set of units must be equally long"
                )
        index = torch.arange(n, device="cpu")[None]
        flips = "flip" in allowed[name]
        own = [Axis(site, dim, index, int(flips and site not in even)) for site, dim in places]
        if allowed[name] == {"flip"}:
            own = [axis for axis in own if axis.exponent]
        units.append(Units(name, n, tuple(own), moves=allowed[name]))
    return units


def _check_names(site: str, names: object, shapes: Mapping[str, torch.Size]) -> None:
    if site not in shapes:
        raise ValueError(f"axes declares site {site!r}, which example_weights lacks; it has {sorted(shapes)}")
    if not shapes[site]:
        raise ValueError(
            f"axes declares site {site!r}, a scalar, along which no units lie: leave it out, or give it an axis of "
            "length one, whose unit can flip"
        )
    if not isinstance(names, list | tuple) or len(names) != len(shapes[site]):
        raise ValueError(
            f"axes[{site!r}] is {names!r}, but the site has shape {tuple(shapes[site])}: "
            f"name units or None for each of its {len(shapes[site])} axes"
        )
    for dim, name in enumerate(names):
        if name is not None:
            arguments.instance(f"axes[{site!r}][{dim}]", name, str, "the name of units, or None")


def _moves_by_name(
    moves: str | Iterable[str] | Mapping[str, str | Iterable[str]], names: Iterable[str]
) -> dict[str, frozenset[Move]]:
    names = list(names)
    given = moves if isinstance(moves, Mapping) else dict.fromkeys(names, moves)
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"moves lacks the units {missing}; it has {list(given)}")
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"moves holds the units {unknown}; axes declares {names}")
    allowed = {name: moves_of("moves", value) for name, value in given.items()}
    for name, own in allowed.items():
        if not own <= {"permute", "flip"}:
            raise ValueError(f"moves lets {name!r} {sorted(own)}; declared units may only permute and flip")
    return allowed
