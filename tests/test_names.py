"""Misspelt names are answered by the nearest right one, public signatures are real, and objects say what they are."""

import inspect
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoIAFNormal
from torch import nn

import pyro_symmetric as ps

GROUP = ps.Group.declare({"w": ("k",)}, {"w": torch.zeros(3)})


def model() -> None:
    pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))


NET = nn.Linear(2, 2)
BAYESIAN = ps.BayesianModel(NET)
DRAWS = ps.Posterior.from_samples({"w": torch.randn(8, 3)}, rows="independent")
WEIGHTS = {name: torch.randn(4, *shape) for name, shape in BAYESIAN.site_shapes.items()}


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: ps.AutoSymmetrized(model, GROUP, estimater=ps.ExactOrbit()), "estimator"),
        (lambda: ps.AutoSymmetrized(model, GROUP, base=AutoIAFNormal, estimater=ps.ExactOrbit()), "estimator"),
        (lambda: ps.AutoSymmetrized(model, GROUP, init_scal=0.1), "init_scale"),
        (lambda: ps.predict(WEIGHTS, BAYESIAN, torch.zeros(3, 2), avrage=True), "average"),
        (lambda: ps.predict(WEIGHTS, NET, torch.zeros(3, 2), avrage=True), "average"),
        (lambda: ps.verify_model(GROUP, model, tolerence=1e-3), "tolerance"),
        (lambda: ps.summary(DRAWS, GROUP, restart=3), "restarts"),
        (lambda: ps.BayesianModel(NET, likelihood="gausian"), "gaussian"),
        (lambda: ps.align({"w": torch.zeros(3)}, {"w": torch.zeros(3)}, GROUP, cost="wasserstien"), "wasserstein"),
        (lambda: ps.datasets.load("digit"), "digits"),
    ],
)
def test_a_misspelt_name_is_answered_by_the_nearest(call: Callable[[], Any], meant: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"did you mean '{meant}'"):
        call()


def test_what_a_base_takes_is_passed_on() -> None:
    guide = ps.AutoSymmetrized(model, GROUP, base=AutoIAFNormal, hidden_dim=[4], log_scale_min_clip=-3.0)
    assert guide()["w"].shape == (3,)


def test_a_table_of_priors_takes_no_arguments() -> None:
    with pytest.raises(TypeError, match="priors"):
        ps.discovery.check_priors(GROUP, {"w": dist.Normal(torch.zeros(3), 1.0).to_event(1)}, torch.zeros(3))


# Arguments that are another callable's: the model's, a net's, a guide's base, an alignment's.
PASSED_ON = {
    "args",
    "kwargs",
    "inputs",
    "example_inputs",
    "operators",
    "base_arguments",
    "alignment",
    "options",
}


@pytest.mark.parametrize("name", [name for name in ps.__all__ if callable(getattr(ps, name))])
def test_the_signature_of_a_public_name_names_its_arguments(name: str) -> None:
    value = getattr(ps, name)
    if isinstance(value, type) and issubclass(value, Exception):
        return
    parameters = inspect.signature(value).parameters.values()
    parameters = [p for p in parameters if p.annotation != "Never"]  # which is there to be refused in words
    unnamed = {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    assert unnamed <= PASSED_ON
    if {"args", "kwargs"} & unnamed:  # a model's, which is among the arguments
        assert any(word in p.name for p in parameters for word in ("model", "priors", "guide")), name


def test_objects_say_what_they_are_in_words() -> None:
    group = ps.Group.declare({"w": ("k", None)}, {"w": torch.zeros(3, 2)}, moves=("permute", "flip"))
    units = group.units["k"]
    state = ps.mcmc.State(*(torch.zeros(shape) for shape in ((4, 3), (4, 3), (4,), (4, 3))), None, torch.Generator())
    table = ps.alignment.TableCost(GROUP, {"k": torch.zeros(2, 3, 3)})
    for value, words in (
        (units, "Units('k', 3, permute, flip; w[0]^1)"),
        (units.axes[0], "Axis(w[0]^1, 3 positions)"),
        (table, "TableCost(2 sources, units of k)"),
        (ps.alignment.ActivationCost(NET, torch.zeros(2, 2)), "ActivationCost(Linear)"),
        (state, "State(4 chains of 3 numbers, torch.float32)"),
    ):
        assert repr(value) == words
