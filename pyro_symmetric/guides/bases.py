"""The guides that other guides hold: the base of a symmetrised guide."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from pyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal, AutoGuide, AutoNormal

from pyro_symmetric import arguments
from pyro_symmetric.calls import did_you_mean
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.gaussian import plain
from pyro_symmetric.guides.layout import layout_of
from pyro_symmetric.guides.starts import InitLocFn
from pyro_symmetric.guides.unit_blocks import gaussian_copy


def held_guide(
    holder: type[AutoGuide], base: Any, model: Any, start: InitLocFn, options: Mapping[str, Any]
) -> AutoContinuous:
    """A guide for another one to hold.

    :param holder: the class of that one, which passes ``options`` on.
    :param base: its class (``AutoNormal`` is taken as ``AutoDiagonalNormal``), or a guide
        that has been set up, of which a copy is made.
    :param start: where its means start, unless ``options`` hold ``init_loc_fn``.
    :param options: arguments of the class.
    :raises TypeError: naming an option that neither class has.
    """
    if isinstance(base, AutoGuide):
        if options:
            own = inspect.signature(holder).parameters
            hint = did_you_mean(next(iter(options)), own)
            raise ValueError(f"base is a guide, which takes no more arguments; found {sorted(options)}{hint}")
        return _copied(base)
    if "init_scale" in options:
        arguments.positive("init_scale", options["init_scale"])
    arguments.whole("rank", options.get("rank"), 1, none="the square root of the number of weights")
    if base is AutoNormal:
        base = AutoDiagonalNormal
    if not (isinstance(base, type) and issubclass(base, AutoContinuous)):
        raise TypeError(f"base is {arguments.shown(base)}; it must be AutoDiagonalNormal or another AutoContinuous")
    arguments.options(holder, options, base)
    if "init_loc_fn" in inspect.signature(base.__init__).parameters:
        options = {"init_loc_fn": start, **options}
    return base(model, **options)


def _copied(guide: AutoGuide) -> AutoContinuous:
    layout_of(guide)
    guide = plain(guide)
    copied = copy.deepcopy(guide) if isinstance(guide, WeightsGuide) else gaussian_copy(guide)
    copied._pyro_context.used = False  # it hasn't run under any name yet
    return copied
