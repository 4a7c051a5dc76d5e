"""The parameters and buffers of a network that may move, and what is left of a symmetry if others stay."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import numpy as np
from torch import nn

from pyro_symmetric import arguments
from pyro_symmetric.discovery.facts import Facts, Leaf

Names = str | Iterable[str]


def named(argument: str, names: Names, sites: Iterable[str]) -> set[str]:
    """Those of some sites that are named: by their own name, by that of a module, or by a pattern such as ``*.bias``.

    :param argument: the name of the argument that holds the names.
    :raises ValueError: if a name fits no site.
    """
    sites, found = list(sites), set()
    for name in [names] if isinstance(names, str) else arguments.listed(argument, names, str, "names"):
        own = {site for site in sites if site == name or site.startswith(f"{name}.") or fnmatchcase(site, name)}
        if not own:
            raise ValueError(
                f"{argument} names {name!r}, which is no module, parameter or buffer of the network; its sites are "
                f"{sites[:6]}{' and others' if len(sites) > 6 else ''}, and '*' stands for any text"
            )
        found |= own
    return found


def held_sites(net: nn.Module, first_names: dict[str, str], only: Names | None, freeze: Names) -> dict[str, str]:
    """The sites that stay, and why; see :func:`~pyro_symmetric.find_symmetry`.

    :param first_names: every name of a site -> its first name, for weights that are tied.
    """
    held = {}
    if only is None:
        trained = {name: value.requires_grad for name, value in net.named_parameters()}
        if any(trained.values()):
            held = {name: "is frozen (requires_grad=False)" for name, trains in trained.items() if not trains}
    else:
        chosen = {first_names[name] for name in named("only", only, first_names)}
        if not chosen:
            raise ValueError("only is empty; it must name at least one module, parameter or buffer that may move")
        held = {site: "isn't among those that may move" for site in first_names.values() if site not in chosen}
    frozen = {first_names[name] for name in named("freeze", freeze, first_names)}
    return held | {site: "is among those that stay" for site in frozen}


def hold(facts: Facts, leaf: Leaf, why: str) -> None:
    """A site stays as it is, whatever its values: its units stay, and the multipliers of its axes cancel out."""
    why = f"because {leaf.site} {why}"
    if leaf.slices is not None:
        for atoms in leaf.labels:
            facts.pin(atoms, why)
        return
    for atoms in leaf.labels:
        facts.refine(atoms, np.arange(atoms.size), why)
        facts.balance([(1.0, atoms[1:]), (-1.0, np.broadcast_to(atoms[:1], atoms[1:].shape))])
    if all(atoms.size for atoms in leaf.labels) and leaf.labels:
        facts.balance([(1.0, atoms[:1]) for atoms in leaf.labels])
