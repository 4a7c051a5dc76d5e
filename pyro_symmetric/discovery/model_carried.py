"""The symmetry that draws carry: that of the model that they were drawn from, found
when it is first asked for.

Functions of draws take ``symmetry="auto"``. Then the symmetry is that of the
posterior's model, rotations included where they hold; draws without a model are taken
as they are, and so are those of a model without symmetries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from pyro_symmetric._process import without_warnings
from pyro_symmetric.arguments import Keywords, Model, described
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.model_check import require_of_posterior
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.posterior import (
    FROM_ABOVE,
    Posterior,
    Source,
)
from pyro_symmetric.weights import map_values

Auto = Literal["auto"]
AUTO: Auto = "auto"
EXAMPLES = 8  # rows of a network's inputs at which its symmetry is found
SHOWN = 3  # sets of units that a line names, of four sites each

NO_MODEL = (
    "draws taken as drawn: they carry no model, so that no symmetry is known; pass "
    "symmetry=, or give a posterior its model by posterior.attach(model, ...)"
)


class Carried(NamedTuple):
    """A symmetry to remove from draws.

    :param group: of no units if draws are taken as they are.
    :param line: what it is and where it comes from; empty if the caller gave it without
        rotations, or if it was looked for and there is none.
    :param is_found: whether it was found, not given.
    :param at_least: whether there may be more.
    """

    group: Group
    line: str = ""
    is_found: bool = False
    at_least: bool = False

    @property
    def is_trivial(self) -> bool:
        """True if nothing moves."""
        return not self.group.units

    def without_rotations(self) -> Carried:
        """Return the permutations and signs, if units rotate."""
        if not self.group.names("rotate"):
            return self
        group = self.group.finite
        line = f"modulo {moves_in_words(group)}, found in the model"
        return self._replace(group=group, line=line)


def is_auto(symmetry: Any) -> bool:
    """Return whether a symmetry is to be found."""
    return isinstance(symmetry, str) and symmetry == AUTO


def carried_symmetry(symmetry: Any, *draws: Any) -> Carried:
    """Return the symmetry that is given, or the one that some draws carry.

    :param symmetry: ``"auto"``: that of the first posterior that knows its model, or
        none; ``None``: none.
    :param draws: what the symmetry should act on.
    :raises ValueError: if a posterior's model lacks a declared group.
    """
    unmoved = Group([], _shapes_of(draws[0]))
    if symmetry is None:
        return Carried(unmoved)
    if not is_auto(symmetry):
        for side in draws:
            require_of_posterior(symmetry, side)
        group = group_of(symmetry)
        line = ""
        if group.names("rotate"):
            line = f"modulo {moves_in_words(group)}"
        return Carried(group, line, at_least=getattr(symmetry, "at_least", False))
    for side in draws:
        side_symmetry = side.symmetry if isinstance(side, Posterior) else None
        if side_symmetry is not None:
            return _of_posterior(side_symmetry, side)
    return Carried(unmoved, NO_MODEL, is_found=True)


def required_symmetry(symmetry: Any, draws: Any) -> Group:
    """Return the symmetry that is given, or the one that draws carry.

    :raises ValueError: if draws carry none that is known, since there is nothing that
        could be done without.
    """
    carried = carried_symmetry(symmetry, draws)
    if carried.line == NO_MODEL:
        raise ValueError(
            "the draws carry no model whose symmetry could be found; pass symmetry="
        )
    return carried.group


def _shapes_of(draws: Any) -> dict[str, torch.Size]:
    """Return the shapes of the sites of samples."""
    if isinstance(draws, Posterior):
        return draws.site_shapes
    if isinstance(draws, Mapping):
        return map_values(lambda value: value.shape[1:], draws)
    return {}


def _of_posterior(symmetry: Symmetry, posterior: Posterior) -> Carried:
    """Return a found symmetry, unless it moves sites that the draws lack."""
    if {*symmetry.rotating} & {*symmetry.group.names("permute")}:
        symmetry = symmetry.with_rotations()
    lines = [*symmetry.remarks, *symmetry.notes]
    group = symmetry.group
    shapes = posterior.site_shapes
    missing = sorted(s for s in group.required_sites if s not in shapes)
    if missing:
        lines = [f"draws taken as drawn: the model's symmetry moves {missing} as well"]
    elif group.units:
        lines = [f"modulo {moves_in_words(group)}, found in the model", *lines]
    if missing or not group.units:
        group = Group([], shapes)
    return Carried(group, "\n".join(lines), is_found=True, at_least=symmetry.at_least)


def moves_in_words(group: Group) -> str:
    """Return what a group moves, such as ``3! labels of (weights, locs)``."""
    words = []
    for name, units in group.units.items():
        if "permute" in units.moves:
            sites = _sites_in_words([axis.site for axis in units.axes])
            power = f"^{units.copies}" if units.copies > 1 else ""
            words.append(f"{units.size}!{power} labels of {sites}")
        if name in group.names("flip"):
            odd = [axis.site for axis in units.axes if axis.exponent % 2]
            words.append(f"2^{units.count} signs of {_sites_in_words(odd)}")
        if "rotate" in units.moves:
            turned = _sites_in_words([axis.site for axis in units.axes])
            words.append(f"rotations of {turned}")
    if len(words) > SHOWN:
        words[SHOWN:] = [f"{len(words) - SHOWN} more"]
    return ", ".join(words)


def _sites_in_words(sites: Sequence[str]) -> str:
    names = [*dict.fromkeys(sites)]
    if len(names) > SHOWN + 1:
        names[SHOWN:] = ["..."]
    return f"({', '.join(names)})"


# the model behind draws ---------------------------------------------------------------


def symmetry_of_model(model: Model, args: Sequence[Any], kwargs: Keywords) -> Symmetry:
    """Find the symmetry of a model's sites; a network's at few of its inputs."""
    if isinstance(model, BayesianModel):
        x = kwargs["x"] if "x" in kwargs else args[0]
        args = (x[:EXAMPLES],)
        kwargs = {}
    with without_warnings():
        return find_symmetry(model, *args, kwargs=kwargs)


def _of_source(source: Source) -> Symmetry:
    """Find the symmetry behind draws, or say why it isn't known."""
    try:
        return symmetry_of_model(source.model, source.args, source.kwargs)
    except Exception as error:  # of any kind, by the user's model
        reason = str(error).partition("\n")[0] or described(error)
        remark = f"draws taken as drawn: no symmetry could be looked for: {reason}"
        return Symmetry(Group([], {}), at_least=True, remarks=(remark,))


FROM_ABOVE.find_symmetry = _of_source
FROM_ABOVE.read_symmetry = Symmetry.from_dict
