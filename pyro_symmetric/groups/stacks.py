"""Stacks: sites of one shape, behind one another along a new first axis, so that units may lie across sites.

The experts of a mixture may be modules of their own: what exchanges them exchanges whole parameters. A group that does
this looks at such parameters as at one site, their *stack*: experts are units along its first axis, hidden units of all
experts lie along the first and the second. Weights come and go site by site; only what acts on them, or compares them,
sees stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric.weights import Weights

Stacks = Mapping[str, tuple[str, ...]]  # name of a stack -> the sites behind one another in it


def stack_name(sites: Sequence[str]) -> str:
    """``a.0.weight, a.1.weight`` -> ``a.{0-1}.weight``: the parts of their names that differ in braces.

    >>> stack_name(["gate.weight", "up.weight"])
    '{gate,up}.weight'
    """
    split = [re.split(r"([.])", site) for site in sites]
    if len({len(parts) for parts in split}) > 1:
        return f"{{{','.join(sites)}}}"
    levels = [list(dict.fromkeys(level)) for level in zip(*split, strict=True)]
    return "".join(own[0] if len(own) == 1 else f"{{{_listed(own)}}}" for own in levels)


def is_stack(name: str) -> bool:
    """True if a name is that of a stack, or begins with one."""
    return "{" in name


def list_name(name: str, inner: bool = False) -> str:
    """``a.{0-1}.weight`` -> ``a``, the list that the sites of a stack come from; the braces, if it has no name.

    :param inner: of lists in lists, the innermost.
    """
    before, brace, after = name.rpartition("{") if inner else name.partition("{")
    return before.rstrip(".") or brace + after.partition("}")[0] + "}"


def _listed(names: Sequence[str]) -> str:
    numbers = [int(name) for name in names if name.isdecimal()]
    if len(numbers) == len(names) > 1 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(names)


def stacked(weights: Mapping[str, Tensor], stacks: Stacks, shapes: Mapping[str, torch.Size]) -> Weights:
    """Weights, ``batch_shape + site_shape``, with the sites of each stack as one. What has stacks already stays.

    :param shapes: the shape of each stack, by its name.
    :raises ValueError: if a stack's sites aren't all there, or don't fit.
    """
    result = dict(weights)
    for name, sites in stacks.items():
        missing = [site for site in sites if site not in weights]
        if name in weights or len(missing) == len(sites):
            continue
        if missing:
            raise ValueError(f"weights lacks the sites {missing}; the symmetry exchanges them with others that it has")
        parts = [result.pop(site) for site in sites]
        own = shapes[name][1:]
        for site, part in zip(sites, parts, strict=True):
            if part.dim() < len(own) or part.shape[part.dim() - len(own) :] != own:
                raise ValueError(f"weights[{site!r}] has shape {tuple(part.shape)}; its last axes must be {tuple(own)}")
            if part.shape != parts[0].shape:
                batch, first = (tuple(v.shape[: v.dim() - len(own)]) for v in (part, parts[0]))
                raise ValueError(
                    f"weights[{site!r}] has batch shape {batch}, but weights[{sites[0]!r}] has {first}; every site "
                    "needs the same batch shape"
                )
        result[name] = torch.stack(parts, -len(shapes[name]))
    return result


def unstacked(weights: Mapping[str, Tensor], stacks: Stacks, shapes: Mapping[str, torch.Size]) -> Weights:
    """The inverse of :func:`stacked`."""
    result: Weights = {}
    for name, value in weights.items():
        if name in stacks:
            result |= zip(stacks[name], value.unbind(-len(shapes[name])), strict=True)
        else:
            result[name] = value
    return result


def check_stacks(stacks: Stacks, shapes: Mapping[str, torch.Size]) -> None:
    """:raises ValueError: if a stack isn't as long as it has sites, or a site lies in two, or is a site besides."""
    seen: set[str] = set(shapes)
    for name, sites in stacks.items():
        if name not in shapes:
            raise ValueError(f"stacks holds {name!r}, of which site_shapes has no shape; it has {sorted(shapes)}")
        if not shapes[name] or shapes[name][0] != len(sites):
            raise ValueError(
                f"the stack {name!r} has shape {tuple(shapes[name])} and {len(sites)} sites; its first axis must be "
                "as long as it has sites"
            )
        if twice := [site for site in sites if site in seen]:
            raise ValueError(f"the stack {name!r} holds {twice}, which are sites by themselves, or lie in two stacks")
        seen |= set(sites)
