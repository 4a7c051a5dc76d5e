"""Parameters of guides in Pyro's store, under names that another process repeats.

The guides of a class are numbered in the order in which they are made, and their
parameters are called ``AutoSymmetrized_1.base.loc``. What was loaded into the store
wins over what a guide has, as with Pyro's own modules, and all of it is copied into the
guide's parameters, which optimisers know. A guide whose number has no entry, such as
the second of its class where one was saved, takes the entry that no other guide has.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import pyro
import torch
from pyro.nn import PyroModule
from pyro.params.param_store import param_with_module_name
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_NUMBERS: dict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
# The parameters of all guides of this process: entries of the store that aren't among
# them were loaded.
_KNOWN = WeakIdKeyDictionary()


class StoredGuide(PyroModule):
    """A guide whose parameters Pyro's store holds under a name of its own.

    :cvar reads_store: whether entries that were loaded replace the guide's values.
    :cvar is_fresh: whether its values are initial ones; it then takes an entry of
        another number, too.
    """

    reads_store = True
    is_fresh = True

    def take_name(self) -> None:
        """Take a name that no other guide of this process has."""
        kind = type(self).__name__
        self._rename(f"{kind}_{next(_NUMBERS[kind])}")

    def _rename(self, name: str) -> None:
        for module in self.modules():
            if isinstance(module, PyroModule):
                # which dask, unlike pickle, copies for each module
                module._pyro_context = self._pyro_context
        used = self._pyro_context.used
        self._pyro_context.used = False
        self._pyro_set_supermodule(name, self._pyro_context)
        self._pyro_context.used = used

    def read_store(self) -> None:
        """Take the values that were loaded into Pyro's store, if there are some."""
        is_part = "." in self._pyro_name
        if is_part or pyro.settings.get("module_local_params"):
            return
        for name in self._readable_names():
            if self._read(name):
                break
        store = pyro.get_param_store()._params
        while any(
            store.get(key, parameter) is not parameter
            for key, parameter in entries(self, self._pyro_name)
        ):
            self.take_name()  # the entries are those of another guide
        for parameter in self.parameters():
            _KNOWN[parameter] = None

    def _readable_names(self) -> list[str]:
        """Return the names whose entries this guide may take, the best first."""
        if not self.reads_store:
            return []
        names = [self._pyro_name]
        store = pyro.get_param_store()
        has_entries = any(key in store for key, _ in entries(self, self._pyro_name))
        if has_entries or self._pyro_context.used or not self.is_fresh:
            return names
        prefix = f"{type(self).__name__}_"
        numbers = set()
        for key in store:
            number = key.split(".")[0].removeprefix(prefix)
            if key.startswith(prefix) and number.isdecimal():
                numbers.add(int(number))
        return names + [f"{prefix}{number}" for number in sorted(numbers)]

    @torch.no_grad()
    def _read(self, name: str) -> bool:
        """Copy the entries of a name; return whether there were some that fit."""
        store = pyro.get_param_store()
        loaded = {}
        parameters = dict(entries(self, name))
        for key, parameter in parameters.items():
            if store._params.get(key, parameter) is not parameter:
                loaded[key] = store._params[key]
        if not loaded or any(value in _KNOWN for value in loaded.values()):
            return False
        if any(value.shape != parameters[key].shape for key, value in loaded.items()):
            return False
        if name != self._pyro_name:
            if len(loaded) < len(parameters):
                return False
            self._rename(name)
        for key, value in loaded.items():
            parameters[key].copy_(value)
            store._params[key] = parameters[key]
            store._param_to_name.pop(value, None)
            store._param_to_name[parameters[key]] = key
        return True


def entries(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names that Pyro's store gives the parameters of a module, and these."""
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        attribute = key.removesuffix("_unconstrained")
        is_constrained = attribute in getattr(module, "_pyro_params", {})
        yield f"{name}.{attribute if is_constrained else key}", parameter
    for key, child in module._modules.items():
        if isinstance(child, PyroModule):
            yield from entries(child, f"{name}.{key}")
        elif child is not None:
            for inner, parameter in child.named_parameters():
                yield param_with_module_name(f"{name}.{key}", inner), parameter
