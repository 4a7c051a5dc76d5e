"""No bad call of a public function is taken, and none ends in an error of PyTorch, Pyro, NumPy or Python's own."""

import importlib
import inspect
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


def test_there_are_at_least_four_hundred_bad_calls():
    assert sum(1 for calls in CALLS for _ in calls.rows()) >= 400


PUBLIC = {"datasets": ("load", "ood"), "scores": ("classification", "detect", "regression")}  # of modules
# Results, errors and warnings of the library.
NOT_CALLED_BY_USERS = {
    *("Alignment", "BarrierCurve", "DistanceResult", "Frame", "Matched", "MatchCost"),
    *("BrokenSymmetry", "InconclusiveError", "UnknownOperator", "UntraceableError", "UnverifiedSymmetry"),
    *("OtherRun", "StoreError"),
    *("Kernel", "State"),  # what the kernels, which are tried, derive from and hand on
}
# What the library calls itself, in its inner loops: the contracts of kernels, likelihoods, distributions and elements.
CONTRACTS = {
    *("step", "steps", "steps_of", "init", "adapt", "walk", "best_step", "move", "first_moment", "preconditioner"),
    *("latents", "distribution", "targets", "mean", "call", "scale_of", "require_matches"),
    *("suggested", "bijection", "log_prob", "log_prob_elsewhere", "score_parts", "entropy"),
    *(
        "on_site",
        "on_sites",
        "select",
        "expand",
        "within",
        "axis_index",
        "axis_multiplier",
        "axis_shift",
        "unit_index",
        "along",
    ),
    *("riders", "fills", "shape_of", "constrained", "each"),
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
