"""Every public name has an example in its docstring, which runs by itself and prints
what it says.

An example takes ``torch``, ``nn``, ``pyro``, ``dist`` and ``ps`` as imported, as the
site's API page says; whatever else it needs, it brings. It runs in an empty folder.
"""

import doctest
import operator
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.discovery import registry

ROOMS = ("groups", "discovery", "canonical", "alignment", "compare", "guides", "mcmc")
# What stands in a room, and is shown by its whole name.
IN_ROOMS = [
    f"{room}.{name}"
    for room in ROOMS
    for name in getattr(ps, room).__all__
    if f"ps.{room}.{name}" in (getattr(getattr(ps, room), name).__doc__ or "")
]
IMPORTED = {"torch": torch, "nn": nn, "pyro": pyro, "dist": dist, "ps": ps}


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and rules of an example end with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))


@pytest.mark.cpu
@pytest.mark.parametrize("name", [*ps.__all__, *IN_ROOMS])
def test_the_example_of_a_public_name_runs_by_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = operator.attrgetter(name)(ps).__doc__ or ""
    example = doctest.DocTestParser().get_doctest(
        text, dict(IMPORTED), name, None, None
    )
    assert example.examples, f"the docstring of {name} has no example"
    assert any(name in line.source for line in example.examples), (
        f"the example of {name} doesn't use it"
    )
    failed = doctest.DocTestRunner().run(example).failed
    assert failed == 0, capsys.readouterr().out
