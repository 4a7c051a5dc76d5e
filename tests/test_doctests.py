"""Every public name has an example in its docstring, and every example of a docstring
runs by itself and prints what it says.

An example takes ``torch``, ``nn``, ``pyro``, ``dist`` and ``ps`` as imported, as the
site's API page says; whatever else it needs, it brings. It runs in an empty folder.
"""

import ast
import doctest
import operator
from collections.abc import Iterator
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.discovery import registry
from pyro_symmetric.study.methods import METHODS

ROOMS = ("groups", "discovery", "canonical", "alignment", "compare", "guides", "mcmc")
# What stands in a room, and is shown by its whole name.
IN_ROOMS = [
    f"{room}.{name}"
    for room in ROOMS
    for name in getattr(ps, room).__all__
    if f"ps.{room}.{name}" in (getattr(getattr(ps, room), name).__doc__ or "")
]
PUBLIC = [*ps.__all__, *IN_ROOMS]
IMPORTED = {"torch": torch, "nn": nn, "pyro": pyro, "dist": dist, "ps": ps}


def _texts(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield every string that stands alone in a piece of source, docstrings and notes
    on constants alike, with the dotted name of what holds it.
    """
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}" if hasattr(child, "name") else name
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            if isinstance(child.value.value, str):
                yield name, child.value.value
        else:
            yield from _texts(child, inner)


def _other_examples() -> list[tuple[str, str]]:
    """List the examples of all docstrings but those of public names."""
    public = {_doc(name) for name in PUBLIC}
    package = Path(ps.__file__).parent
    examples = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        for name, text in _texts(ast.parse(file.read_text()), ".".join(parts)):
            if ">>>" in text and text not in public:
                examples.append((name, text))
    return examples


def _doc(name: str) -> str:
    return operator.attrgetter(name)(ps).__doc__ or ""


def _parsed(name: str, text: str) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(text, dict(IMPORTED), name, None, None)


def _run(example: doctest.DocTest, capsys: pytest.CaptureFixture[str]) -> None:
    failed = doctest.DocTestRunner().run(example).failed
    assert failed == 0, capsys.readouterr().out


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files, rules and methods of an example end with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    methods = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(methods)


@pytest.mark.cpu
@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name_runs_by_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = _parsed(name, _doc(name))
    assert example.examples, f"the docstring of {name} has no example"
    assert any(name in line.source for line in example.examples), (
        f"the example of {name} doesn't use it"
    )
    _run(example, capsys)


OTHERS = _other_examples()


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "text"), OTHERS, ids=[name for name, _ in OTHERS])
def test_every_other_example_runs_by_itself(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = _parsed(name, text)
    assert example.examples, f"{name} shows >>> but no example that doctest sees"
    _run(example, capsys)
