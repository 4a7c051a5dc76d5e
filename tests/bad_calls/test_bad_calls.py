"""No bad call of a public function is taken, and none ends in an error of PyTorch, Pyro, NumPy or Python's own."""

import importlib
import linecache
import pkgutil
import re
import traceback
import warnings
from pathlib import Path

import pytest
import torch

import pyro_symmetric as ps

from .table import Calls, made

PACKAGE = str(Path(ps.__file__).parent)
ROOMS = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if "test" not in module.name]
CALLS = [calls for room in ROOMS if room != "table" for calls in importlib.import_module(f".{room}", __package__).CALLS]
SIGNATURE = re.compile(r"unexpected keyword argument|missing \d+ required|positional argument|No parameter named")


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.name)
def test_bad_calls_are_refused_in_one_sentence_that_names_the_argument_and_the_good_one_is_taken(
    calls, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    good = dict(calls.good())  # all calls share it, and the good call comes last: a bad one changes nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        faults = [
            f"{name}: {fault}"
            for name, argument, value in calls.rows()
            if (fault := fault_of(calls, {**good, argument: made(value)}, argument))
        ]
        assert not faults, "\n".join(faults)
        if calls.quick:
            calls.call(**good)


def fault_of(calls, arguments, argument):
    """The fault in the refusal of a bad call, or None."""
    try:
        accepted = calls.call(**arguments)
    except Exception as raised:
        error = raised
    else:
        return f"accepted: {type(accepted).__name__}"
    said = str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = frame.filename.startswith(PACKAGE) and "raise" in linecache.getline(frame.filename, frame.lineno)
    signature = isinstance(error, TypeError) and argument == "banana" and SIGNATURE.search(said)
    if not isinstance(error, ValueError | TypeError | OSError | NotImplementedError) or isinstance(error, UnicodeError):
        return f"{type(error).__name__}: {said}"
    if not (ours or signature):
        return f"raised by {frame.filename}:{frame.lineno}: {said}"
    if "\n" in said or len(said) >= 500:
        return f"no short sentence: {said}"
    if calls.words.get(argument, argument) not in said:
        return f"the argument isn't named: {said}"
    return None


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda n: n, "accepted: int"),
        (lambda n: int("three"), "raised by"),
        (lambda n: {}[n], "KeyError"),
        (lambda n: ps.Posterior({}, rows="chains"), "isn't named"),
        (lambda n: ps.Posterior.from_samples({"w": torch.zeros(6)}, rows="chains", num_chains=n), None),
    ],
)
def test_faults_are_noticed(call, fault):
    found = fault_of(Calls("call", call, words={"n": "num_chains"}), {"n": 4}, "n")
    assert (fault is None) == (found is None)
    assert fault is None or fault in found
