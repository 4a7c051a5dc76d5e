r"""The multipliers of a group that are independent: some may do together what others do.

In ``einsum("b,hk,kh->b", x, w, v)`` each row of ``w`` can be flipped with its column of ``v``, and so can each column;
but flipping all rows is flipping all columns. A unit's multiplier :math:`f_u` enters an entry of a site with the power
that its axes add up to, so that the group acts through the linear forms :math:`\sum_u e_u \log f_u`, one for each entry
(for signs: modulo two), and the multipliers that act alike are the common zeros of these forms. There are as many
independent ones as the forms' rank: the units of its pivots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_symmetric.groups.units import Move

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group

# Ranks in rational numbers are taken modulo this: exponents are small, and no minor of theirs is a multiple of it.
PRIME = 2**31 - 1
Form = dict[int, int]


def independent_units(group: Group, move: Move) -> dict[str, Tensor]:
    """Name -> bool ``units.shape``: units whose multipliers are independent and together do what all units' do.

    :param move: ``"flip"``, of which only odd powers count, or ``"scale"``.
    """
    names, starts, count = group.names(move), {}, 0
    for name in names:
        starts[name] = count
        count += group[name].count
    modulus = 2 if move == "flip" else PRIME
    forms = {tuple(sorted(form.items())) for site in group.sites for form in _forms(group, site, starts, modulus)}
    independent = torch.zeros(count, dtype=torch.bool, device="cpu")
    independent[_pivots(map(dict, sorted(forms, key=len)), modulus)] = True
    return {n: independent[starts[n] : starts[n] + group[n].count].reshape(group[n].shape) for n in names}


def _forms(group: Group, site: str, starts: dict[str, int], modulus: int) -> Iterable[Form]:
    """Forms that span those of all entries of a site.

    An entry's form is the sum of one from each axis. These sums span what one entry's own form and, along each axis,
    the differences from that entry's place span.
    """
    entry: Form = {}
    for dim, members in group.members(site).items():
        along: list[Form] = [{} for _ in range(group.view_shapes[site][dim])]
        for name, axis in members:
            for unit, places in enumerate(axis.index.T.tolist() if name in starts else (), starts.get(name, 0)):
                for place in places:
                    along[place] = _plus(along[place], {unit: axis.exponent}, 1, modulus)
        origin = min(along, key=len)
        entry = _plus(entry, origin, 1, modulus)
        yield from (_plus(form, origin, -1, modulus) for form in along)
    yield entry


def _pivots(forms: Iterable[Form], modulus: int) -> list[int]:
    """The columns that no columns before them span."""
    found: dict[int, Form] = {}
    for form in forms:
        left = form
        while left and (lead := min(left)) in found:
            left = _plus(left, found[lead], -left[lead], modulus)
        if left:
            found[lead] = _plus({}, left, pow(left[lead], -1, modulus), modulus)
    return list(found)


def _plus(form: Form, other: Form, factor: int, modulus: int) -> Form:
    total = {**form, **{unit: form.get(unit, 0) + factor * power for unit, power in other.items()}}
    return {unit: power % modulus for unit, power in total.items() if power % modulus}
