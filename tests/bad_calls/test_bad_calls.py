"""No bad call of a public function is taken, and none ends in an error of PyTorch, Pyro, NumPy or Python's own."""

import inspect
import linecache
import re
import traceback
import warnings
from pathlib import Path

import pytest

import pyro_symmetric as ps

from . import (
    alignment,
    checkpoints,
    compare,
    datasets,
    distributions,
    ensembles,
    groups,
    guides,
    mcmc,
    models,
    posterior,
    predict,
    symmetry,
)
from .table import made

PACKAGE = str(Path(ps.__file__).parent)
ROOMS = (
    alignment,
    checkpoints,
    compare,
    datasets,
    distributions,
    ensembles,
    groups,
    guides,
    mcmc,
    models,
    posterior,
    predict,
    symmetry,
)
CALLS = [calls for room in ROOMS for calls in room.CALLS]
ROWS = [row for calls in CALLS for row in calls.rows()]
SIGNATURE = re.compile(r"unexpected keyword argument|missing \d+ required|positional argument|No parameter named")


@pytest.mark.parametrize(("calls", "argument", "value"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_bad_call_is_refused_in_one_sentence_that_names_the_argument(calls, argument, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {**calls.good(), argument: made(value)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            accepted = calls.call(**arguments)
        except Exception as raised:
            error = raised
        else:
            pytest.fail(f"accepted: {type(accepted).__name__}")
    said = str(error)
    assert isinstance(error, ValueError | TypeError | OSError | NotImplementedError), f"{type(error).__name__}: {said}"
    assert not isinstance(error, UnicodeError)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = frame.filename.startswith(PACKAGE) and "raise" in linecache.getline(frame.filename, frame.lineno)
    signature = isinstance(error, TypeError) and argument == "banana" and SIGNATURE.search(said)
    assert ours or signature, f"raised by {frame.filename}:{frame.lineno}: {said}"
    assert "\n" not in said
    assert len(said) < 500, said
    assert calls.words.get(argument, argument) in said


@pytest.mark.parametrize("calls", [calls for calls in CALLS if calls.quick], ids=lambda calls: calls.name)
def test_the_good_call_that_each_bad_one_changes_is_taken(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls.call(**calls.good())


def test_there_are_at_least_four_hundred_bad_calls():
    assert len(ROWS) >= 400


PUBLIC = {"datasets": ("load", "ood"), "scores": ("classification", "detect", "regression")}  # of modules
# Results, errors and warnings of the library.
NOT_CALLED_BY_USERS = {
    *("Alignment", "BarrierCurve", "Frame", "Matched", "NotADensityError", "Scores"),
    *("BrokenSymmetry", "InconclusiveError", "UnknownOperator", "UntraceableError"),
}
# What the library calls itself, in its inner loops: the contracts of kernels, likelihoods, distributions and elements.
CONTRACTS = {
    *("step", "init", "adapt", "walk", "best_step", "extra_statistics", "first_tuning", "root_preconditioner"),
    *("latents", "distribution", "targets", "mean", "call", "scale_of", "require_matches"),
    *("suggested", "bijection", "log_prob", "score_parts", "entropy", "stratified"),
    *("on_site", "select", "expand", "within", "axis_index", "axis_multiplier", "axis_shift", "unit_index", "along"),
    *("riders",),
    *("pairs", "matched", "costs"),
    *("flatten", "unflatten", "constrain", "log_abs_det", "length"),
}


def test_every_public_function_class_and_method_with_arguments_is_tried():
    tried = {calls.name for calls in CALLS}
    missing = []
    for name in ps.__all__:
        thing = getattr(ps, name)
        if inspect.ismodule(thing):
            missing += [f"{name}.{f}" for f in PUBLIC[name] if f"{name}.{f}" not in tried]
        elif name not in tried | NOT_CALLED_BY_USERS:
            missing.append(name)
        if inspect.isclass(thing) and name not in NOT_CALLED_BY_USERS:
            missing += [method for method in methods_of(thing, name) if method not in tried]
    assert not missing, missing


def methods_of(kind, name):
    for method, function in vars(kind).items():
        function = getattr(function, "__func__", function)
        if method.startswith("_") or method in CONTRACTS or not inspect.isfunction(function):
            continue
        if [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]:
            yield f"{name}.{method}"
