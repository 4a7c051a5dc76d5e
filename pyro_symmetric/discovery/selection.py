"""The parameters and buffers of a network that may move."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from pyro_symmetric import arguments

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


def frozen_sites(net: nn.Module, first_names: dict[str, str], only: Names | None, freeze: Names) -> dict[str, str]:
    """The sites that stay, and why; see :func:`~pyro_symmetric.find_symmetry`.

    :param first_names: every name of a site -> its first name, for weights that are tied.
    """
    if only is None:
        trained = {name: value.requires_grad for name, value in net.named_parameters()}
        still = (name for name, trains in trained.items() if any(trained.values()) and not trains)
        frozen = dict.fromkeys(still, "is frozen (requires_grad=False)")
    else:
        chosen = {first_names[name] for name in named("only", only, first_names)}
        if not chosen:
            raise ValueError("only is empty; it must name at least one module, parameter or buffer that may move")
        frozen = dict.fromkeys(set(first_names.values()) - chosen, "isn't among those that may move")
    return frozen | {first_names[name]: "is among those that stay" for name in named("freeze", freeze, first_names)}
