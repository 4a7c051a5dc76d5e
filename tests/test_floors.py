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
    ["_process", "errors"],
    [
        "_torchvision",
        "_version",
        "calls",
        "placement",
        "plots",
    ],
    ["arguments", "enumeration", "networks"],
    ["datasets", "likelihoods", "storage", "weights"],
    ["fingerprint", "layout", "models", "store"],
    ["traced"],
    ["posterior"],
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
    "posterior": [
        ["statistics"],
        ["diagnostics", "predict", "tables"],
        ["arviz"],
        ["posterior"],
        ["checkpoints", "samples", WHOLE],
    ],
    "discovery": [
        ["arrays", "integer_bases", "invariance", "tensors_only"],
        ["densities", "nesting", "values"],
        ["flow"],
        ["cells", "rules"],
        ["explain", "units"],
        ["multiplied", "symmetry"],
        ["deterministic", "export", "model_check"],
        ["outputs", "trace"],
        ["linear_twin", "verify"],
        ["completeness", "conservation_law"],
        ["find"],
        [WHOLE],
    ],
    "alignment": [
        ["assignment", "gaussian", "proximity"],
        ["activations", "barrier", "features"],
        ["descent", "scales"],
        ["matching"],
        ["many"],
        ["relabel"],
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
