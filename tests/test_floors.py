"""The house stands: a room imports only from rooms on the floors below it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyro_symmetric

PACKAGE = Path(pyro_symmetric.__file__).parent
# Rooms by floor, from below; a module that isn't named may be imported from everywhere.
HOUSE = [["symmetry"], ["mcmc", "alignment", "distributions"], ["compare"], ["guides"], ["study"], ["cli"]]
ALIGNMENT = [
    ["gaussian", "parts"],
    ["costs"],
    ["moments", "descent"],
    ["members", "common"],
    ["matching", "many", "relabel", "paths"],
]


def imported(file: Path) -> Iterator[str]:
    """The modules of the package that one of its files imports as it is loaded itself."""
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize(("inside", "floors"), [("", HOUSE), ("alignment", ALIGNMENT)], ids=["house", "alignment"])
def test_rooms_import_only_from_the_floors_below(inside, floors):
    root = PACKAGE / inside
    prefix = ".".join(["pyro_symmetric", *filter(None, [inside])]) + "."
    level = {room: number for number, rooms in enumerate(floors) for room in rooms}
    assert all((root / room).is_dir() or (root / f"{room}.py").is_file() for room in level)
    upwards = []
    for file in root.rglob("*.py"):
        room = file.relative_to(root).parts[0].removesuffix(".py")
        for name in imported(file):
            other = name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else room
            if room in level and other != room and level.get(other, -1) >= level[room]:
                upwards.append(f"{file.relative_to(PACKAGE)} imports {name}")
    assert not upwards
