"""Examples in docstrings that bring all that they need: they run, and print what they say."""

import doctest

import pytest

import pyro_symmetric as ps


@pytest.mark.parametrize("documented", [ps.Kernel, ps.register_distance], ids=lambda thing: thing.__name__)
def test_an_example_runs_by_itself(documented, monkeypatch):
    monkeypatch.setattr("pyro_symmetric.compare.distance._REGISTERED", {})
    (example,) = doctest.DocTestFinder(recurse=False).find(documented, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
