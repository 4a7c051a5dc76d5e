"""engine="jax": the draws of the uncompiled engine, up to rounding, in stretches of any length."""

import sys

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_symmetric.mcmc.run as runs
from pyro_symmetric.mcmc import HMC, MCLMC, NUTS, AdaptiveHMC, Density, sample
from pyro_symmetric.mcmc.density import xla
from pyro_symmetric.posterior import Posterior

Y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
DEVIATIONS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
OPTIONS = {"num_chains": 4, "num_warmup": 20, "num_samples": 24, "seed": 0, "dtype": torch.float64, "progress": False}
# Quick runs are no good ones, and JAX and its libraries are others' code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(of the draws diverged|chains hardly move|energy errors are):RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def schools(y: torch.Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * z, DEVIATIONS.to(y)), obs=y)


def largest_difference(found: Posterior, expected: Posterior) -> float:
    pairs = [(found.samples[site], expected.samples[site]) for site in expected.samples]
    return max(float((one - other).abs().max()) for one, other in pairs)


def test_without_jax_it_says_what_to_install(monkeypatch):
    for name in ("jax", "torchax", "torchax.ops.jaten", "torchax.ops.ops_registry"):
        monkeypatch.setitem(sys.modules, name, None)
    xla.operators.cache_clear()
    with pytest.raises(ImportError, match=r"engine is 'jax'.*pyro-symmetric\[jax\]"):
        sample(HMC(schools), Y, engine="jax", **OPTIONS)


@pytest.fixture
def jax():
    found = pytest.importorskip("jax")
    try:
        xla.require_jax()
    except ImportError as error:
        pytest.skip(str(error))
    return found


def test_energies_and_gradients_are_those_of_the_model_in_both_precisions(jax):
    before = jax.config.jax_enable_x64
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        compiled, plain = (Density(schools, (Y,), dtype=dtype, engine=engine) for engine in ("jax", "torch"))
        z = torch.randn(5, plain.dim, dtype=dtype, generator=torch.Generator().manual_seed(0))
        for one, other in zip(compiled.energy_and_gradient(z), plain.energy_and_gradient(z), strict=True):
            assert one.dtype == dtype
            assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)
        assert compiled.engine == "jax"
    assert jax.config.jax_enable_x64 == before


@pytest.mark.parametrize("kernel", [HMC, AdaptiveHMC, NUTS, MCLMC])
@pytest.mark.parametrize("mass", ["diagonal", "dense"])
def test_draws_are_those_of_the_uncompiled_engine_up_to_rounding(jax, kernel, mass):
    found, plain = (sample(kernel(schools, mass=mass), Y, engine=engine, **OPTIONS) for engine in ("jax", "torch"))
    assert found.metadata["engine"] == "jax"
    assert {"jax", "torchax"} <= found.metadata["versions"].keys()
    assert largest_difference(found, plain) < 1e-6
    assert list(found.statistics) == list(plain.statistics)
    for name, value in plain.statistics.items():
        assert found.statistics[name].dtype == value.dtype
        if name != "occupancy":
            assert torch.allclose(found.statistics[name].double(), value.double(), rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("kernel", [HMC, AdaptiveHMC, NUTS])
def test_stretches_and_breaks_change_no_draw(jax, kernel, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "STRETCH_SECONDS", 0.0)
    whole = sample(kernel(schools), Y, engine="jax", **OPTIONS)
    thinned = sample(kernel(schools), Y, engine="jax", **{**OPTIONS, "thinning": 3, "num_samples": 8})
    monkeypatch.setattr(runs, "STRETCH_SECONDS", 1e9)
    at_once = sample(kernel(schools), Y, engine="jax", **OPTIONS)
    for count in (5, 11, 24):
        broken = sample(kernel(schools), Y, engine="jax", store=tmp_path / "s", **{**OPTIONS, "num_samples": count})
    for found in (at_once, broken):
        assert largest_difference(found, whole) == 0
        assert all(torch.equal(found.statistics[name], value) for name, value in whole.statistics.items())
        assert found.metadata["trace"] == whole.metadata["trace"]
    assert torch.equal(thinned.samples["z"], whole.samples["z"][:, 2::3])


@pytest.mark.parametrize("kernel", [HMC, AdaptiveHMC, NUTS])
@pytest.mark.parametrize("mass", ["diagonal", "dense"])
def test_a_warm_up_broken_within_its_stretches_gives_the_unbroken_draws(jax, kernel, mass, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "STRETCH_SECONDS", 1e9)
    options = {**OPTIONS, "num_warmup": 60}
    whole = sample(kernel(schools, mass=mass), Y, engine="jax", **options)
    advance, place = runs.Run._advance, [0]

    def breaking(self):
        if self.at.iteration >= place[0]:
            raise KeyboardInterrupt
        advance(self)

    monkeypatch.setattr(runs.Run, "_advance", breaking)
    for place[0] in (4, 30, 55):
        with pytest.raises(KeyboardInterrupt):
            sample(kernel(schools, mass=mass), Y, engine="jax", store=tmp_path / "s", **options)
    place[0] = 1000
    broken = sample(kernel(schools, mass=mass), Y, engine="jax", store=tmp_path / "s", **options)
    assert largest_difference(broken, whole) == 0
    assert broken.metadata["trace"] == whole.metadata["trace"]


def test_an_operation_that_is_missing_is_named_and_the_run_goes_on_without(jax, monkeypatch):
    known = {target: own for target, own in xla.operators().items() if "sum" not in str(target)}
    monkeypatch.setattr(xla, "operators", lambda: known)
    with pytest.warns(RuntimeWarning, match="engine 'torch' serves, not 'jax'.*torchax has no aten.sum"):
        found = sample(HMC(schools), Y, engine="jax", **{**OPTIONS, "num_chains": 3})
    plain = sample(HMC(schools), Y, engine="torch", **{**OPTIONS, "num_chains": 3})
    assert found.metadata["engine"] == "torch"
    assert largest_difference(found, plain) == 0
