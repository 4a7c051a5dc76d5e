"""The door for those who come from ``pyro.infer``: what it asks of ``sample``, and what
it makes of the draws.
"""

import functools
import inspect
import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide.initialization import init_to_median, init_to_value

import pyro_symmetric as ps
from pyro_symmetric.infer import HMC, MCMC, NUTS
from pyro_symmetric.posterior.statistics import chain_statistics

quiet = functools.partial(MCMC, disable_progbar=True, engine="eager")


def conjugate(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def positive(rate=1.0):
    pyro.sample("scale", dist.Exponential(torch.full((3,), rate)).to_event(1))
    pyro.sample("shift", dist.Normal(0.0, 1.0))


def standard_errors_off(draws, truth, deviation):
    """The distance of the mean of chains' draws from the truth, in standard errors."""
    return abs(float(draws.mean()) - truth) / (
        deviation / float(chain_statistics(draws).ess_bulk) ** 0.5
    )


# draws --------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [HMC, functools.partial(NUTS, full_mass=True)])
def test_draws_are_those_of_the_posterior(kernel):
    y = torch.tensor([1.0, 2.5, 0.5, 3.0])
    precision = 1 / 4 + 4
    truth, deviation = float(y.sum()) / precision, precision**-0.5
    mcmc = quiet(kernel(conjugate), num_samples=100, warmup_steps=150, num_chains=16)
    mcmc.run(y)
    # Two checks of each of two kernels: a false alarm in 1 of 3,900 runs.
    draws = mcmc.get_samples(group_by_chain=True)["mean"]
    assert draws.shape == (16, 100)
    assert standard_errors_off(draws, truth, deviation) < 4
    assert (
        standard_errors_off(
            (draws - truth).square(), deviation**2, math.sqrt(2) * deviation**2
        )
        < 4
    )


def test_our_own_kernels_are_run_as_sample_runs_them():
    y, ours, options = (
        torch.randn(5),
        ps.NUTS(conjugate),
        {"num_chains": 3, "seed": 4, "engine": "eager"},
    )
    found = ps.MCMC(ours, 20, 30, disable_progbar=True, **options).run(y)
    expected = ps.sample(
        ours, y, num_samples=20, num_warmup=30, progress=False, **options
    )
    assert torch.equal(found.samples["mean"], expected.samples["mean"])
    assert found.source.args == (y,)


# what Pyro's kernels are asked for ----------------------------------------------------


def test_the_kernels_are_the_librarys_and_take_pyros_arguments():
    assert (HMC, NUTS) == (ps.HMC, ps.NUTS)
    arguments = {
        "step_size": 0.5,
        "adapt_step_size": False,
        "adapt_mass_matrix": False,
        "full_mass": True,
        "target_accept_prob": 0.7,
        "jit_compile": False,
        "jit_options": None,
        "ignore_jit_warnings": True,
        "max_plate_nesting": 1,
    }
    of_hmc = {**arguments, "trajectory_length": 1.5}
    of_nuts = {**arguments, "max_tree_depth": 4, "use_multinomial_sampling": True}
    for kind, given in (("HMC", of_hmc), ("NUTS", of_nuts)):
        theirs = getattr(pyro.infer, kind)(conjugate, **given)
        ours = getattr(ps.infer, kind)(conjugate, **given)
        assert theirs.step_size == ours.step_size == 0.5
        assert (
            ours.settings().items() <= given.items() | ps.HMC(None).settings().items()
        )
    assert ours.max_tree_depth == 4


WRONG = {
    "target_accept_prob": lambda: ps.NUTS(conjugate, target_accept=0.8),
    "max_tree_depth": lambda: ps.NUTS(conjugate, max_treedepth=5),
    "full_mass": lambda: ps.AdaptiveHMC(conjugate, mass="dense"),
    "adapt_mass_matrix": lambda: ps.HMC(conjugate, adapt_mass=False),
    "trajectory_length": lambda: ps.HMC(conjugate, trajectory_lenght=1.0),
    "num_steps": lambda: ps.HMC(conjugate, num_integration_steps=3),
    "step_size": lambda: ps.SGLD(conjugate, learning_rate=3),
    "pass it to sample": lambda: ps.NUTS(conjugate, num_chains=4),
    "num_warmup": lambda: ps.sample(ps.NUTS(conjugate), warmup_steps=5),
    "num_samples": lambda: ps.sample(ps.NUTS(conjugate), num_sample=5),
    "progress": lambda: ps.sample(ps.NUTS(conjugate), disable_progbar=True),
    "kwargs={...}": lambda: ps.sample(ps.NUTS(conjugate), y=torch.ones(3)),
    "warmup_steps": lambda: ps.MCMC(ps.NUTS(conjugate), 5, num_warmup=5),
    "disable_progbar": lambda: ps.MCMC(ps.NUTS(conjugate), 5, progress=False),
    "engine": lambda: ps.MCMC(ps.NUTS(conjugate), 5, engin="eager"),
}


@pytest.mark.parametrize("right", WRONG)
def test_the_error_of_a_wrong_keyword_names_the_right_one(right):
    with pytest.raises(
        TypeError, match=rf"has no argument '\w+'; .*{re.escape(right)}"
    ):
        WRONG[right]()


# what is made of the draws ------------------------------------------------------------


def test_diagnostics_have_pyros_form():
    mcmc = quiet(NUTS(positive), 50, 20, num_chains=2)
    posterior = mcmc.run()
    found = mcmc.diagnostics()
    statistics = chain_statistics(posterior.samples["scale"])
    assert found["scale"].keys() == {"n_eff", "r_hat"}
    assert torch.equal(found["scale"]["n_eff"], statistics.ess_bulk)
    assert torch.equal(found["scale"]["r_hat"], statistics.r_hat)
    assert found["scale"]["r_hat"].shape == (3,)
    assert found["shift"]["n_eff"].shape == ()
    assert (
        found["divergences"].keys()
        == found["acceptance rate"].keys()
        == {"chain 0", "chain 1"}
    )


def test_it_has_what_predictive_and_arvizs_from_pyro_read():
    y = torch.randn(4)
    mcmc = quiet(NUTS(conjugate), 5, 5, num_chains=2)
    mcmc.run(y=y)
    trace = pyro.poutine.trace(mcmc.kernel.model).get_trace(*mcmc._args, **mcmc._kwargs)
    assert trace.nodes["y"]["value"] is y
    assert pyro.infer.Predictive(conjugate, mcmc.get_samples())(y)["y"].shape == (10, 4)
    assert (mcmc.num_chains, mcmc.num_samples) == mcmc.get_samples(group_by_chain=True)[
        "mean"
    ].shape


# whose arguments they are -------------------------------------------------------------


def test_all_arguments_of_run_are_the_models():
    seen = []

    def model(y, *, seed, num_chains=3):
        seen.append((y, seed, num_chains))
        pyro.sample("mean", dist.Normal(0.0, 1.0))

    quiet(NUTS(model), 1, 1).run("data", seed=5)
    assert set(seen) == {("data", 5, 3)}


@pytest.mark.parametrize("method", ["get_samples", "diagnostics", "summary"])
def test_draws_that_are_not_there_yet_are_told(method):
    mcmc = MCMC(NUTS(positive), num_samples=5)
    with pytest.raises(RuntimeError, match=r"no draws yet; call run\(\.\.\.\)"):
        getattr(mcmc, method)()


# each argument of Pyro's works, or is refused with what to do instead -----------------


MODEL = {"model": conjugate}
SETTINGS = {
    "step_size": 0.5,
    "adapt_step_size": False,
    "adapt_mass_matrix": False,
    "full_mass": True,
    "max_plate_nesting": 1,
    "jit_compile": True,
    "jit_options": {},
    "ignore_jit_warnings": True,
    "target_accept_prob": 0.7,
    "init_strategy": init_to_median,
}
TAKEN = {
    "HMC": {**MODEL, **SETTINGS, "trajectory_length": 2.0, "num_steps": 3},
    "NUTS": {
        **MODEL,
        **SETTINGS,
        "max_tree_depth": 3,
        "use_multinomial_sampling": True,
    },
    "MCMC": {
        "kernel": None,
        "num_samples": 4,
        "warmup_steps": 4,
        "initial_params": {"mean": torch.zeros(2)},
        "num_chains": 2,
        "hook_fn": lambda kernel, params, stage, i: None,
        "mp_context": "spawn",
        "disable_progbar": True,
        "disable_validation": False,
        "save_params": ["mean"],
    },
}
REFUSED = {
    "HMC": {
        "potential_fn": (lambda z: 0.0, "pyro.factor"),
        "transforms": ({}, "reparam"),
        "min_stepsize": (1e-5, "leave it out"),
        "max_stepsize": (1.0, "leave it out"),
    },
    "NUTS": {
        "potential_fn": (lambda z: 0.0, "pyro.factor"),
        "transforms": ({}, "reparam"),
    },
    "MCMC": {"transforms": ({}, "reparam")},
}


def parameters_of(function):
    return inspect.signature(function).parameters


@pytest.mark.parametrize("name", TAKEN)
def test_each_argument_of_pyros_is_taken_or_refused(name):
    theirs = set(parameters_of(getattr(pyro.infer, name).__init__)) - {"self"}
    assert theirs == TAKEN[name].keys() | REFUSED[name].keys()
    ours = getattr(ps.infer, name)
    if name == "MCMC":
        given = {**TAKEN[name], "kernel": NUTS(conjugate)}
        mcmc = ours(**given)
        assert list(parameters_of(ours.__init__))[: len(theirs) + 1] == list(
            parameters_of(pyro.infer.MCMC.__init__)
        )
        mcmc.run(torch.ones(3))
        assert mcmc.get_samples()["mean"].shape == (8,)
        required = {"kernel": NUTS(conjugate), "num_samples": 5}
    else:
        kernel = ours(**TAKEN[name])
        assert MCMC(kernel, 3, 3, num_chains=2, disable_progbar=True).run(torch.ones(3))
        required = {"model": None}
    for argument, (value, advice) in REFUSED[name].items():
        with pytest.raises(TypeError, match=rf"takes no {argument}: .*{advice}"):
            ours(**required, **{argument: value})
        assert ours(**required, **{argument: None})


@pytest.mark.parametrize("method", ["run", "get_samples", "summary", "diagnostics"])
def test_methods_have_pyros_arguments(method):
    theirs, ours = (
        [(p.name, p.default, p.kind) for p in parameters_of(function).values()]
        for function in (getattr(pyro.infer.MCMC, method), getattr(MCMC, method))
    )
    assert theirs == ours


def test_chains_start_where_pyro_puts_them():
    """Without warm-up and with steps so small that they hardly move."""
    still = {"step_size": 1e-6, "adapt_step_size": False, "num_steps": 1}
    values = {"scale": torch.tensor([0.5, 2.0, 3.0]), "shift": torch.tensor(1.5)}
    strategies = [init_to_value(values=values), lambda site: values[site["name"]]]
    for strategy in strategies:
        kernel = HMC(positive, init_strategy=strategy, **still)
        posterior = quiet(kernel, 1, 0, num_chains=3).run()
        for site, value in values.items():
            drawn = posterior.samples[site][:, 0]
            torch.testing.assert_close(drawn, value.expand_as(drawn), atol=1e-3, rtol=0)
    starts = {"scale": torch.randn(2, 3), "shift": torch.randn(2)}
    posterior = quiet(HMC(positive, **still), 1, 0, starts, 2).run()
    torch.testing.assert_close(
        posterior.samples["scale"][:, 0], starts["scale"].exp(), atol=1e-3, rtol=1e-3
    )
    with pytest.raises(ValueError, match=r"initial_params\['shift'\].*3 chains"):
        quiet(HMC(positive), 1, 0, {"shift": torch.zeros(2)}, 3)


@pytest.mark.parametrize("chains", [1, 2])
def test_hooks_are_called_as_by_pyro(chains):
    seen = {"theirs": [], "ours": []}

    def hook(name):
        def call(kernel, params, stage, i):
            shapes = {site: tuple(value.shape) for site, value in params.items()}
            seen[name].append((stage, i, shapes))

        return call

    options = {"num_chains": chains, "disable_progbar": True}
    for _ in range(chains):
        theirs = pyro.infer.MCMC(
            pyro.infer.NUTS(positive),
            3,
            2,
            hook_fn=hook("theirs"),
            disable_progbar=True,
        )
        theirs.run()
    ours = MCMC(NUTS(positive), 3, 2, hook_fn=hook("ours"), **options)
    posterior = ours.run()
    stripped = [(stage.split()[0], i, shapes) for stage, i, shapes in seen["ours"]]
    assert sorted(map(str, stripped)) == sorted(map(str, seen["theirs"]))
    assert (
        {"Sample"}
        if chains == 1
        else {"Sample [0]", "Sample [1]"} <= {stage for stage, *_ in seen["ours"]}
    )
    assert posterior.num_samples == 3


def test_other_names_of_pyro_are_its_own():
    from pyro_symmetric.infer import SVI, Predictive, Trace_ELBO

    assert Predictive is pyro.infer.Predictive
    assert (SVI, Trace_ELBO) == (pyro.infer.SVI, pyro.infer.Trace_ELBO)
    with pytest.raises(AttributeError, match="has 'Predict'"):
        _ = ps.infer.Predict


def test_predictions_of_a_guide_that_is_not_set_up_say_so():
    guide = pyro.infer.autoguide.AutoNormal(conjugate)
    with pytest.raises(ValueError, match="AutoNormal hasn't been set up"):
        ps.predict(guide, conjugate, torch.zeros(3))
