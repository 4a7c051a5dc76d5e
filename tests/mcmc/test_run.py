"""The runner: shapes, seeds, thinning, interruption, what is recorded."""

import sys
import threading
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

import pyro_symmetric as ps
from pyro_symmetric.mcmc import HMC, NUTS, SGHMC, AdaptiveHMC, sample
from pyro_symmetric.models import BayesianModel

QUICK = {"num_chains": 3, "num_warmup": 10, "num_samples": 6, "progress": False}


def model() -> None:
    pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("b", dist.Gamma(2.0, 1.0))


KERNELS = {
    "hmc": lambda: HMC(model, step_size=0.3, num_steps=3),
    "sghmc": lambda: SGHMC(model, step_size=0.1, num_steps=2),
}


@pytest.fixture(params=KERNELS)
def kernel(request):
    return KERNELS[request.param]()


def test_draws_have_chains_then_draws_then_the_sites_shape(kernel):
    posterior = sample(kernel, **QUICK)
    assert {site: value.shape for site, value in posterior.samples.items()} == {
        "a": (3, 6, 2),
        "b": (3, 6),
    }
    assert all(value.shape == (3, 6) for value in posterior.statistics.values())
    assert {"lp", "diverging", "step_size", "n_steps"} <= set(posterior.statistics)
    assert (posterior.samples["b"] > 0).all()
    assert posterior.to_arviz()["sample_stats"]["diverging"].dtype == bool


def test_a_seed_reproduces_a_run_and_leaves_the_global_generator_alone_which_decides_without_one(
    kernel,
):
    before = torch.get_rng_state()
    first, second, other = (sample(kernel, seed=seed, **QUICK) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    third = sample(kernel, **QUICK)
    assert not torch.equal(torch.get_rng_state(), before)
    again = sample(kernel, seed=third.metadata["seed"], **QUICK)
    for site in first.samples:
        assert torch.equal(first.samples[site], second.samples[site])
        assert not torch.equal(first.samples[site], other.samples[site])
        assert torch.equal(third.samples[site], again.samples[site])


def test_a_network_runs_in_double_precision_and_chunks(tmp_path):
    torch.manual_seed(0)
    net = BayesianModel(
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)),
        likelihood="gaussian",
    )
    data = torch.randn(12, 2), torch.randn(12)
    kernel = HMC(net, num_steps=3)
    whole = sample(kernel, *data, seed=2, dtype=torch.float64, **QUICK)
    chunked = sample(kernel, *data, seed=2, dtype=torch.float64, chain_chunk=2, **QUICK)
    assert whole.samples["0.weight"].dtype == torch.float64
    for site, value in whole.samples.items():
        assert torch.allclose(value, chunked.samples[site], atol=1e-6)
    whole.save(tmp_path / "p")
    assert torch.equal(
        type(whole).load(tmp_path / "p").samples["0.bias"], whole.samples["0.bias"]
    )


def test_starts_of_another_number_of_chains_are_refused():
    with pytest.raises(ValueError, match=r"must be \(3,\), one for each chain"):
        sample(
            HMC(model), initial={"a": torch.zeros(4, 2), "b": torch.ones(4)}, **QUICK
        )


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:.* of the draws diverged")  # in so short a run
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        (HMC, "auto"),
        (AdaptiveHMC, "auto"),
        (SGHMC, "auto"),
        (NUTS, "auto"),
        (NUTS, "eager"),
    ],
)
def test_chains_run_on_a_cuda_device_and_draws_come_back(kind, engine):
    torch.manual_seed(0)
    net = BayesianModel(
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)),
        likelihood="gaussian",
    )
    posterior = sample(
        kind(net),
        torch.randn(12, 2),
        torch.randn(12),
        device="cuda",
        engine=engine,
        seed=2,
        **QUICK,
    )
    assert posterior.metadata["device"].startswith("cuda")
    assert posterior.samples["0.weight"].device.type == "cpu"
    assert torch.isfinite(posterior.samples["0.weight"]).all()


def test_deterministic_sites_may_be_as_near_to_one_as_numbers_are():
    def model():
        pyro.deterministic(
            "near",
            pyro.sample("a", dist.Normal(0.0, 1.0)) * 0
            + 1
            - torch.finfo(torch.float32).eps,
        )

    posterior = sample(
        NUTS(model),
        num_samples=100,
        num_warmup=50,
        num_chains=2,
        seed=0,
        progress=False,
    )
    assert (posterior.samples["near"] < 1).all()


@pytest.fixture
def bars(monkeypatch):
    """The progress bars of a test's runs, as they are made."""
    made = []

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr("pyro_symmetric.mcmc.run.tqdm", Bar)
    return made


def test_the_progress_bar_counts_draws_however_thin_they_are(bars):
    sample(
        NUTS(model),
        num_samples=10,
        num_warmup=6,
        thinning=5,
        num_chains=2,
        progress=True,
    )
    assert (bars[0].total, bars[0].n) == (16, 16)


def test_the_progress_bar_predicts_from_iterations_that_compile_nothing(bars):
    class SlowAtFirst(NUTS):
        def step(self, density, state):
            if not bars[0].n:
                time.sleep(0.5)
            return super().step(density, state)

    before = time.time()
    kernel = SlowAtFirst(model)
    sample(kernel, num_samples=4, num_warmup=4, num_chains=2, progress=True)
    assert bars[0].start_t >= before + 0.5


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_the_progress_bar_says_that_the_first_iteration_compiles(engine, capsys):
    class Stopped(NUTS):
        def step(self, density, state):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(Stopped(model), num_samples=4, num_warmup=4, engine=engine)
    assert ("compiling:" in capsys.readouterr().err) == (engine == "compiled")


def noises(y: Tensor) -> None:
    scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0, scale), obs=y)


# how much of the library a run touches ------------------------------------------------

MOST_FILES = 18


@pytest.mark.cpu
def test_a_run_in_memory_touches_few_files():
    seen, root = set(), str(Path(ps.__file__).parent)

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        sample(
            NUTS(noises),
            torch.randn(5),
            num_chains=2,
            num_warmup=30,
            num_samples=5,
            progress=False,
        )
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = sorted({file.removeprefix(root) for file in seen})
    assert len(files) <= MOST_FILES, files
