"""The door for those who come from ``pyro.infer``: what it asks of ``sample``, and what
it makes of the draws.
"""

import functools
import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch

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
