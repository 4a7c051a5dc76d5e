"""A program that was edited between two calls doesn't resume the other program's run,
wherever the edit is; the same program does, wherever its file is and however it looks.

Each case is a program of one or more files with a place ``?``, which holds 1.0 before
the edit and 0.5 after it, in another folder.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pyro_symmetric.mcmc import HMC, sample
from pyro_symmetric.mcmc.resume import OTHER_CODE, OTHER_MODEL
from pyro_symmetric.store import StoreError

PRELUDE = """
import contextlib, dataclasses, enum, functools, importlib, os, pathlib, sys
import numpy as np
import pyro, torch
import pyro.distributions as dist
from torch import nn

def site(scale):
    pyro.sample("w", dist.Normal(torch.zeros(2), scale).to_event(1))

"""
CLASS = "class Prior:\n    scale = ?\n    def width(self): return self.scale\n"
KERNEL = """
from dataclasses import dataclass, replace
from pyro_symmetric.mcmc import Kernel, State

def model():
    site(1.0)

{helper}
@dataclass(frozen=True, eq=False, repr=False)
class Walk(Kernel):
    model: object
    {field}

    def init(self, density, z, num_warmup, generator):
        return State(z, 0 * z, density.energy(z), 0 * z, None, generator)

    def step(self, density, state):
        noise = torch.randn(state.z.shape, generator=state.generator)
        z = state.z + {spread} * noise
        energy = density.energy(z)
        chance = torch.rand(len(z), generator=state.generator)
        accept = chance < (state.energy - energy).exp()
        z = torch.where(accept[:, None], z, state.z)
        energy = torch.where(accept, energy, state.energy)
        return replace(state, z=z, energy=energy)

kernel = Walk(model)
"""


def kernel(spread: str, helper: str = "", field: str = "") -> dict[str, str]:
    text = KERNEL.format(spread=spread, helper=helper, field=field)
    return {"program": text}


def program(text: str, **modules: str) -> dict[str, str]:
    return {"program": text, **modules}


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
"""
CONSTANT = "SCALE = ?\n"
EDITS = {
    # what the model itself holds
    "a number in the model": program("def model(): site(?)"),
    "a default": program("def model(scale=?): site(scale)"),
    "a default by keyword": program("def model(*, scale=?): site(scale)"),
    "a closure": program(
        "def of(scale):\n    def model(): site(scale)\n    return model\nmodel = of(?)"
    ),
    "a closure in a closure": program(
        "def of(scale):\n    def width(): return scale\n"
        "    def model(): site(width())\n    return model\nmodel = of(?)"
    ),
    "a lambda": program("model = lambda: site(?)"),
    "a partial": program("model = functools.partial(site, ?)"),
    "an attribute of the function": program(
        "def model(): site(model.scale)\nmodel.scale = ?"
    ),
    "a decorator": program(
        "def scaled(scale):\n    def wrap(fn):\n        @functools.wraps(fn)\n"
        "        def model(): return fn(scale)\n        return model\n    return wrap\n"
        "@scaled(?)\ndef model(scale): site(scale)"
    ),
    "behind a cache": program(
        "@functools.lru_cache\ndef width(): return ?\ndef model(): site(width())"
    ),
    "a generator's function": program(
        "def widths():\n    yield ?\ndef model(): site(next(widths()))"
    ),
    "a context manager": program(
        "@contextlib.contextmanager\ndef width():\n    yield ?\n"
        "def model():\n    with width() as scale: site(scale)"
    ),
    # globals
    "a global": program(f"{CONSTANT}def model(): site(SCALE)"),
    "a global in a class in the model": program(
        f"{CONSTANT}def model():\n    class Prior: scale = SCALE\n    site(Prior.scale)"
    ),
    "a global by its name": program(f"{CONSTANT}def model(): site(globals()['SCALE'])"),
    "a global of a called function": program(
        f"{CONSTANT}def width(): return SCALE\ndef model(): site(width())"
    ),
    "a global dictionary": program("SCALES = {'w': ?}\ndef model(): site(SCALES['w'])"),
    "a dictionary that counts": program(
        "import collections\nSCALES = collections.defaultdict(lambda: ?)\n"
        "def model(): site(SCALES['w'])"
    ),
    "a method of a dictionary": program(
        "scale = {'w': ?}.get\ndef model(): site(scale('w'))"
    ),
    "an array": program(
        "SCALE = np.array([?, 1.0])\ndef model(): site(float(SCALE[0]))"
    ),
    "a tensor": program("SCALE = torch.tensor(?)\ndef model(): site(SCALE)"),
    "a distribution": program(
        "PRIOR = dist.Normal(torch.zeros(2), ?).to_event(1)\n"
        "def model(): pyro.sample('w', PRIOR)"
    ),
    # modules
    "module.NAME": program(
        "import priors\ndef model(): site(priors.SCALE)", priors=CONSTANT
    ),
    "module.NAME under another name": program(
        "import priors as p\ndef model(): site(p.SCALE)", priors=CONSTANT
    ),
    "a name from a module": program(
        "from priors import SCALE\ndef model(): site(SCALE)", priors=CONSTANT
    ),
    "module.function": program(
        "import priors\ndef model(): site(priors.width())",
        priors="def width(): return ?\n",
    ),
    "a global of module.function": program(
        "import priors\ndef model(): site(priors.width())",
        priors=f"{CONSTANT}def width(): return SCALE\n",
    ),
    "module.function through two modules": program(
        "import widths\ndef model(): site(widths.width())",
        widths="import priors\ndef width(): return priors.width()\n",
        priors="def width(): return ?\n",
    ),
    "module.module.NAME": program(
        "import widths\ndef model(): site(widths.priors.SCALE)",
        widths="import priors\n",
        priors=CONSTANT,
    ),
    "module.Class": program(
        "import priors\ndef model(): site(priors.Prior().width())", priors=CLASS
    ),
    "a module in a closure": program(
        "import priors as p\ndef of(priors):\n    def model(): site(priors.SCALE)\n"
        "    return model\nmodel = of(p)",
        priors=CONSTANT,
    ),
    "a module in an object": program(
        "import priors as p, types\nheld = types.SimpleNamespace(priors=p)\n"
        "def model(): site(held.priors.SCALE)",
        priors=CONSTANT,
    ),
    "a module by getattr": program(
        "import priors\ndef model(): site(getattr(priors, 'SCALE'))", priors=CONSTANT
    ),
    "a module's getattr": program(
        "import priors\ndef model(): site(priors.SCALE)",
        priors="def __getattr__(name):\n    return {'SCALE': ?}[name]\n",
    ),
    "an import in the model": program(
        "def model():\n    import priors\n    site(priors.SCALE)", priors=CONSTANT
    ),
    "an import from in the model": program(
        "def model():\n    from priors import SCALE\n    site(SCALE)", priors=CONSTANT
    ),
    "an import in a called function": program(
        "def width():\n    import priors\n    return priors.width()\n"
        "def model(): site(width())",
        priors="def width(): return ?\n",
    ),
    "an import by a string": program(
        "def model(): site(importlib.import_module('priors').SCALE)", priors=CONSTANT
    ),
    # classes and objects
    "a class attribute": program(f"{CLASS}def model(): site(Prior.scale)"),
    "a class attribute of an object": program(
        f"{CLASS}prior = Prior()\ndef model(): site(prior.width())"
    ),
    "a class attribute of a base": program(
        f"{CLASS}class Wide(Prior): pass\ndef model(): site(Wide().width())"
    ),
    "a method": program(
        "class Prior:\n    def width(self): return ?\n"
        "def model(): site(Prior().width())"
    ),
    "a bound method": program(
        "class Prior:\n    def __init__(self): self._scale = ?\n"
        "    def model(self): site(self._scale)\nmodel = Prior().model"
    ),
    "a property": program(
        "class Prior:\n    @property\n    def width(self): return ?\n"
        "def model(): site(Prior().width)"
    ),
    "a cached property": program(
        "class Prior:\n    @functools.cached_property\n    def width(self): return ?\n"
        "prior = Prior()\ndef model(): site(prior.width)"
    ),
    "slots": program(
        "class Prior:\n    __slots__ = ('scale',)\nprior = Prior()\nprior.scale = ?\n"
        "def model(): site(prior.scale)"
    ),
    "what can't be pickled": program(
        "class Prior:\n    def __init__(self): self.scale = ?\n"
        "    def __reduce_ex__(self, protocol): raise TypeError\n"
        "prior = Prior()\ndef model(): site(prior.scale)"
    ),
    "a dataclass": program(
        "@dataclasses.dataclass\nclass Prior:\n    scale: float\n"
        "prior = Prior(?)\ndef model(): site(prior.scale)"
    ),
    "a dataclass's default": program(
        "@dataclasses.dataclass\nclass Prior:\n    scale: float = ?\n"
        "def model(): site(Prior().scale)"
    ),
    "a dataclass's factory": program(
        "@dataclasses.dataclass\nclass Prior:\n"
        "    scales: list = dataclasses.field(default_factory=lambda: [?])\n"
        "def model(): site(Prior().scales[0])"
    ),
    "a member of an enumeration": program(
        "class Prior(enum.Enum):\n    W = ?\ndef model(): site(Prior.W.value)"
    ),
    "a named tuple's method": program(
        "from typing import NamedTuple\nclass Prior(NamedTuple):\n    loc: float\n"
        "    def width(self): return ?\nprior = Prior(0.0)\n"
        "def model(): site(prior.width())"
    ),
    "a dictionary's method": program(
        "class Prior(dict):\n    def width(self): return ?\nprior = Prior()\n"
        "def model(): site(prior.width())"
    ),
    "an attribute of a metaclass": program(
        "class Meta(type):\n    scale = ?\nclass Prior(metaclass=Meta): pass\n"
        "def model(): site(Prior.scale)"
    ),
    # networks
    "a private attribute of a network": program(
        NET + "        self._scale = ?\n"
        "    def forward(self): site(self._scale)\nmodel = Net()"
    ),
    "private data of a network": program(
        NET + "        self._scale = torch.tensor([?, 1.0])\n"
        "    def forward(self): site(self._scale)\nmodel = Net()"
    ),
    "a private attribute of a Pyro module": program(
        "from pyro.nn import PyroModule\nclass Net(PyroModule):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self._scale = ?\n"
        "    def forward(self): site(self._scale)\nmodel = Net()"
    ),
    "a buffer of a nested module": program(
        NET + "        self.inner = nn.Module()\n"
        "        scale = torch.tensor(?)\n"
        "        self.inner.register_buffer('scale', scale, persistent=False)\n"
        "    def forward(self): site(self.inner.scale)\nmodel = Net()"
    ),
    "a class attribute of a network": program(
        "class Net(nn.Module):\n    _scale = ?\n"
        "    def forward(self): site(self._scale)\nmodel = Net()"
    ),
    "a hook": program(
        "net = nn.Identity()\nnet.register_forward_hook(lambda m, x, y: ? * y)\n"
        "def model(): site(net(torch.tensor(1.0)))"
    ),
    "a sample of a Pyro module": program(
        "from pyro.nn import PyroModule, PyroSample\nclass Net(PyroModule):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.w = PyroSample(dist.Normal(torch.zeros(2), ?).to_event(1))\n"
        "    def forward(self): return self.w\nmodel = Net()"
    ),
    # the environment
    "os.environ": program(
        "os.environ['PRIOR_SCALE'] = '?'\n"
        "def model(): site(float(os.environ['PRIOR_SCALE']))"
    ),
    "os.getenv": program(
        "os.environ['PRIOR_SCALE'] = '?'\n"
        "def model(): site(float(os.getenv('PRIOR_SCALE', '2.0')))"
    ),
    "an imported environ": program(
        "from os import environ as env\nNAME = 'PRIOR_SCALE'\nenv[NAME] = '?'\n"
        "def model(): site(float(env[NAME]))"
    ),
    # kernels
    "a kernel's step": kernel("?"),
    "a global of a kernel's step": kernel("SPREAD", helper="SPREAD = ?"),
    "a function of a kernel's step": kernel(
        "spread()", helper="def spread(): return ?\n"
    ),
    "a class attribute of a kernel": kernel("self._spread", field="_spread = ?"),
}
# not a word of these decides the density
HARMLESS = {
    "nothing": (
        "import priors\ndef model():\n    site(priors.SCALE)\n",
        "import priors\ndef model():\n    site(priors.SCALE)\n",
    ),
    "comments and lines": (
        "import priors\ndef model():\n    site(priors.SCALE)\n",
        "# The model.\n\nimport priors\n\n\ndef model():  # of two weights\n"
        "    # their prior:\n    site(\n        priors.SCALE,\n    )\n",
    ),
    "branches on more lines": (
        "def model():\n    scale = 1.0 if os.name else 2.0\n"
        "    for _ in range(3): scale = scale * 1.0\n    site(scale)\n",
        "def model():\n    scale = (\n        1.0\n"
        "        if os.name\n        else 2.0\n"
        "    )\n    for _ in range(3):\n\n        scale = scale * 1.0\n    site(\n"
        "        scale\n    )\n",
    ),
    "docstrings": (
        "def model():\n    site(1.0)\n",
        "def model():\n    '''Two weights.'''\n    site(1.0)\n",
    ),
    "annotations": (
        "def model(scale=1.0):\n    site(scale)\n",
        "def model(scale: float = 1.0) -> None:\n    site(scale)\n",
    ),
    "names of variables": (
        "def model():\n    scale = 1.0\n    site(scale)\n",
        "def model():\n    width = 1.0\n    site(width)\n",
    ),
    "another function": (
        "import priors\ndef model():\n    site(priors.SCALE)\n",
        "import priors\ndef model():\n    site(priors.SCALE)\n"
        "def plot():\n    print(priors.SCALE, 3)\n",
    ),
    "the file's own name": (
        "from pathlib import Path\ndef model():\n    Path(__file__).exists()\n"
        "    site(1.0)\n",
    )
    * 2,
    "a counter of calls": (
        NET
        + "        self._calls = 0\n    def forward(self):\n        self._calls += 1\n"
        "        site(1.0)\nmodel = Net()\n",
    )
    * 2,
    "a cache that the first call fills": (
        NET + "        self._scale = None\n    def forward(self):\n"
        "        if self._scale is None: self._scale = torch.tensor(1.0)\n"
        "        site(self._scale)\nmodel = Net()\n",
    )
    * 2,
    "a network": (
        "from pyro_symmetric import BayesianModel\n"
        "net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))\n"
        "model = BayesianModel(net, likelihood='gaussian', num_data=4)\n"
        "data = torch.ones(4, 2), torch.ones(4)\n",
    )
    * 2,
    "the environment that isn't read": (
        "def model():\n    float(os.environ.get('NO_SUCH_NAME', 1.0))\n    site(1.0)\n",
        "os.environ['PRIOR_OTHER'] = '2'\n"
        "def model():\n    float(os.environ.get('NO_SUCH_NAME', 1.0))\n    site(1.0)\n",
    ),
}
SETTINGS = {
    "engine": "eager",
    "num_chains": 2,
    "num_warmup": 4,
    "seed": 1,
    "progress": False,
}
QUICK = pytest.mark.filterwarnings(
    "ignore:.*(diverged|hardly move|no chain moves|agree):RuntimeWarning"
)


@pytest.fixture
def load(tmp_path, monkeypatch) -> Iterator[Callable[..., ModuleType]]:
    """``load(files, value)``: write a program into a new folder, and import it anew."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def load(files: dict[str, str], value: str = "1.0") -> ModuleType:
        folder = tmp_path / f"edition{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
        for name, text in files.items():
            text = PRELUDE + text.replace("?", value)
            (folder / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        return importlib.import_module("program")

    environment = dict(os.environ)
    yield load
    os.environ.clear()
    os.environ.update(environment)
    for name in set(sys.modules) - before:
        if name in ("program", "priors", "widths"):
            del sys.modules[name]


def run(edition: ModuleType, store: Path, num_samples: int, **options) -> None:
    kernel = getattr(edition, "kernel", None) or HMC(edition.model, num_steps=2)
    data = getattr(edition, "data", ())
    settings = {**SETTINGS, **options}
    sample(kernel, *data, num_samples=num_samples, store=store, **settings)


@QUICK
@pytest.mark.parametrize("place", EDITS)
def test_a_program_that_was_edited_does_not_resume(place, load, tmp_path):
    run(load(EDITS[place], "1.0"), tmp_path / "s", 2)
    with pytest.raises(StoreError, match="holds another run") as error:
        run(load(EDITS[place], "0.5"), tmp_path / "s", 4)
    assert OTHER_CODE in str(error.value)


@QUICK
@pytest.mark.parametrize("change", HARMLESS)
def test_a_program_that_looks_different_and_is_not_resumes(change, load, tmp_path):
    before, after = HARMLESS[change]
    priors = {"priors": "SCALE = 1.0\n"}
    more = {"priors": "'''Priors.'''\nSCALE = 1.0  # wide\nPLOTS = 3\n"}
    run(load({"program": before, **priors}), tmp_path / "s", 2)
    edition = load({"program": after, **more})
    run(edition, tmp_path / "s", 4)
    if change != "a counter of calls":  # goes on counting
        run(edition, tmp_path / "s", 6)
    run(load({"program": after, **more}), tmp_path / "s", 8)


@QUICK
def test_a_package_may_be_moved_into_another(load, tmp_path):
    text = "from {} import priors\ndef model():\n    site(priors.SCALE)\n"
    for number, package in enumerate(("inner", "outer.inner")):
        folder = tmp_path / f"packages{number}" / package.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "priors.py").write_text("SCALE = 1.0\n")
        sys.path.insert(0, str(tmp_path / f"packages{number}"))
        edition = load({"program": text.format(package)})
        run(edition, tmp_path / "s", 2 * number + 2)


@QUICK
def test_chains_are_not_added_to_those_of_another_program(load, tmp_path):
    """Ten thousand rows and a wide prior: the energies hardly differ."""
    text = (
        "import priors\ny = torch.linspace(-1, 1, 10_000)\ndef model():\n"
        "    mean = pyro.sample('mean', dist.Normal(0.0, 100 * priors.SCALE))\n"
        "    with pyro.plate('rows', len(y)):\n"
        "        pyro.sample('y', dist.Normal(mean, 1.0), obs=y)\n"
    )
    files = {"program": text, "priors": CONSTANT}
    run(load(files), tmp_path / "s", 2, num_chains=4, chains_per_task=2)
    with pytest.raises(StoreError, match="holds another run"):
        run(load(files, "0.99"), tmp_path / "s", 2, num_chains=6, chains_per_task=2)


@QUICK
def test_energies_are_equal_unless_the_rounding_may_differ(load, tmp_path, monkeypatch):
    """The model reads a file, which no digest can see."""
    number = tmp_path / "scale.txt"
    text = (
        "y = torch.linspace(-1, 1, 1000)\ndef model():\n"
        f"    scale = float(pathlib.Path({str(number)!r}).read_text())\n"
        "    mean = pyro.sample('mean', dist.Normal(0.0, scale))\n"
        "    with pyro.plate('rows', len(y)):\n"
        "        pyro.sample('y', dist.Normal(mean, 1.0), obs=y)\n"
    )
    number.write_text("1.0")
    run(load({"program": text}), tmp_path / "s", 2)
    number.write_text("1.001")
    edition = load({"program": text})
    with pytest.raises(StoreError, match=OTHER_MODEL[:9]):
        run(edition, tmp_path / "s", 4)
    number.write_text("1.0")
    run(edition, tmp_path / "s", 4)
    # with other threads, sums are rounded otherwise
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    number.write_text("1.001")
    with pytest.warns(RuntimeWarning, match="threads: 1 there, 77 here"):
        run(edition, tmp_path / "s", 6)
    number.write_text("1.1")
    with pytest.raises(StoreError, match=OTHER_MODEL[:9]):
        run(edition, tmp_path / "s", 8)
