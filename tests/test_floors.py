"""The floors of the package: a room imports only from rooms on the floors below it.

Every module and every package at the top of ``pyro_symmetric`` is a room and stands on one floor. Rooms of one floor
don't know each other. An import counts wherever it stands: at the top of a module, inside a function, under
``TYPE_CHECKING``, relative, or by :func:`importlib.import_module`.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import pyro_symmetric

PACKAGE = Path(pyro_symmetric.__file__).parent
NAME = PACKAGE.name
WHOLE = "__init__"  # the package itself, which a user imports

# From below. What knows no symmetry comes first, the samplers included.
FLOORS = [
    ["_process", "plain_operators"],
    [
        "_torchvision",
        "_version",
        "calls",
        "elimination",
        "operations",
        "placement",
        "plots",
    ],
    ["arguments", "enumeration", "generators", "networks"],
    ["chain_statistics", "datasets", "likelihoods", "storage", "weights"],
    ["diagnostics", "draws", "fingerprint", "layout", "models", "store"],
    ["chain_tables"],
    ["posterior", "predictors"],
    ["checkpoints", "predict"],
    ["arviz_export"],
    ["mcmc"],
    ["groups", "infer"],
    ["discovery"],
    ["canonical"],
    ["distributions"],
    ["alignment"],
    ["compare"],
    ["ensembles", "guides"],
    ["study"],
    ["cli"],
    ["__main__", WHOLE],
]
# Floors inside a room, likewise.
INSIDE = {
    "discovery": [
        ["nodes"],
        ["invariance", "labels", "nullspace", "sizes", "tensors_only"],
        ["densities", "nesting", "slices"],
        ["facts"],
        ["plan", "recorder", "selection", "structure"],
        ["assembly", "combination", "common_signs", "explain"],
        ["attachment", "labeller", "multipliers", "symmetry"],
        ["calm", "rules"],
        ["operators", "statistics"],
        ["export"],
        ["trace"],
        ["jacobian", "outputs"],
        ["completeness", "verify"],
        ["find", "model_check"],
        [WHOLE],
    ],
    "alignment": [
        ["assignment", "elements", "gaussian"],
        ["exchanges"],
        ["costs", "paths"],
        ["decision", "moments", "relabel"],
        ["members"],
        ["descent"],
        ["matching", "rounds"],
        ["many"],
        [WHOLE],
    ],
}


def rooms(root: Path) -> set[str]:
    """The modules and packages of a folder."""
    packages = {path.name for path in root.iterdir() if (path / "__init__.py").is_file()}
    return packages | {path.stem for path in root.glob("*.py")}


def imported(file: Path, top: Path) -> Iterator[str]:
    """The full names that a file imports from the package whose folder is ``top``, at any depth of its code."""
    parts = [top.name, *file.relative_to(top).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "import_module",
            "__import__",
        ):
            names = [part.value for part in node.args[:1] if isinstance(part, ast.Constant)]
        yield from (name for name in names if f"{name}.".startswith(f"{top.name}."))


def upward(top: Path, floors: Sequence[Sequence[str]], inside: str = "") -> list[str]:
    """The imports that don't lead downwards, between the rooms of ``inside``, a folder of the package ``top``."""
    level = {room: number for number, floor in enumerate(floors) for room in floor}
    root, prefix = top / inside, [top.name, *filter(None, [inside])]
    found = []
    for file in sorted(root.rglob("*.py")):
        room = file.relative_to(root).parts[0].removesuffix(".py")
        for name in imported(file, top):
            path = name.split(".")
            if path[: len(prefix)] != prefix:
                continue
            other = next(iter(path[len(prefix) :]), WHOLE)
            other = other if other in level else WHOLE  # what is no room is a name of the folder's own __init__
            if other != room and level[other] >= level.get(room, -1):
                found.append(f"{file.relative_to(top)} imports {name}")
    return found


@pytest.mark.parametrize(("inside", "floors"), [("", FLOORS), *INSIDE.items()], ids=["package", *INSIDE])
def test_every_module_stands_on_one_floor(inside, floors):
    assigned = [room for floor in floors for room in floor]
    assert sorted(assigned) == sorted(rooms(PACKAGE / inside))


@pytest.mark.parametrize(("inside", "floors"), [("", FLOORS), *INSIDE.items()], ids=["package", *INSIDE])
def test_rooms_import_only_from_the_floors_below(inside, floors):
    assert upward(PACKAGE, floors, inside) == []


UPWARD = {
    "at the top": "from pyro_symmetric.alignment import align",
    "of a module": "import pyro_symmetric.alignment.many as many",
    "of a room": "from pyro_symmetric import alignment",
    "relative": "from ..alignment.many import align_many",
    "relative, of a room": "from .. import alignment",
    "in a function": "def late():\n    from pyro_symmetric.alignment import align\n",
    "for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pyro_symmetric.alignment\n",
    "in a branch": "try:\n    import torch\nexcept ImportError:\n    from pyro_symmetric.alignment import align\n",
    "by name": "import importlib\nimportlib.import_module('pyro_symmetric.alignment')\n",
    "of the package": "from pyro_symmetric import Posterior",
    "of the whole package": "import pyro_symmetric",
}
DOWNWARD = {
    "below": "from pyro_symmetric.weights import Weights",
    "relative": "from ..weights import Weights",
    "in the room": "from pyro_symmetric.mcmc.kernels.kernel import Kernel",
    "relative, in the room": "from .kernel import Kernel",
    "another package": "from torch import Tensor\nimport pyro_symmetric_extras",
}


@pytest.mark.parametrize("code", UPWARD.values(), ids=UPWARD)
@pytest.mark.parametrize("file", ["mcmc/planted.py", "mcmc/deeper/planted.py", "mcmc/__init__.py"])
def test_a_planted_upward_import_is_noticed(tmp_path, file, code):
    if "deeper" in file:
        code = code.replace("from ..", "from ...")
    assert upward(planted(tmp_path, file, code), FLOORS) != []


@pytest.mark.parametrize("code", DOWNWARD.values(), ids=DOWNWARD)
def test_an_import_from_below_is_allowed(tmp_path, code):
    assert upward(planted(tmp_path, "mcmc/planted.py", code), FLOORS) == []


def test_rooms_of_one_floor_do_not_know_each_other(tmp_path):
    top = planted(tmp_path, "guides/planted.py", "from pyro_symmetric.ensembles import ensemble")
    assert upward(top, FLOORS) == ["guides/planted.py imports pyro_symmetric.ensembles.ensemble"]


def test_a_planted_import_inside_a_room_is_noticed(tmp_path):
    lowest, highest = INSIDE["alignment"][0][0], INSIDE["alignment"][-2][0]
    code = f"def late():\n    from .{highest} import name\n"
    top = planted(tmp_path, f"alignment/{lowest}.py", code)
    assert upward(top, INSIDE["alignment"], "alignment") != []


def planted(folder: Path, file: str, code: str) -> Path:
    """A package of the same name that holds this file alone."""
    path = folder / NAME / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    return folder / NAME
