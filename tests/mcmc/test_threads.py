"""Runs in several threads of one process: each gives the draws that it gives alone, and
none waits for ever.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_symmetric import Group, find_symmetry, verify_model
from pyro_symmetric.compare import diagnose, mmd_test
from pyro_symmetric.ensembles import ensemble
from pyro_symmetric.mcmc import HMC, NUTS, SGHMC, log_joint, sample
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.predict import predict
from pyro_symmetric.store import Recorder

X, Y = torch.linspace(-1, 1, 12).reshape(6, 2), torch.linspace(-1, 1, 6)
NET = BayesianModel(
    nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), likelihood="gaussian"
)
OPTIONS = {"num_chains": 2, "num_warmup": 10, "num_samples": 10, "progress": False}
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws diverged|chains hardly move):RuntimeWarning"
)


def components(y):
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(locs.sum(), 1.0), obs=y)


def run(kernel, args, **options):
    return sample(kernel, *args, **{**OPTIONS, **options}).samples


def same(found, expected):
    return all(torch.equal(found[site], value) for site, value in expected.items())


RUNS = [
    functools.partial(run, HMC(NET, num_steps=3), (X, Y), seed=1),
    functools.partial(run, NUTS(components), (Y,), seed=2),
    functools.partial(run, SGHMC(NET, batch_size=3), (X, Y), seed=3),
    functools.partial(
        run, HMC(components, num_steps=3), (Y,), seed=4, chains_per_task=1
    ),
]


def test_distributions_of_another_thread_check_values_while_a_model_runs():
    prior, refused = dist.Bernoulli(0.5, validate_args=True), []

    def ask():
        with pytest.raises(ValueError, match="support"):
            prior.log_prob(torch.tensor(2.0))
        return True

    def asking(y):
        refused.append(pool.submit(ask).result())
        components(y)

    with ThreadPoolExecutor(1) as pool:
        log_joint(asking, Y)({"locs": torch.zeros(3, 2)})
    assert all(refused)


@pytest.mark.cpu
def test_seeded_runs_of_several_threads_give_the_draws_that_they_give_alone():
    """Whatever else is asked meanwhile of the same models, and of the generators."""
    alone = [one() for one in RUNS]
    posterior = sample(HMC(NET, num_steps=3), X, Y, seed=1, **OPTIONS)
    before = {name: value.clone() for name, value in NET.net.named_parameters()}
    group = Group.declare({"locs": ("component",)}, {"locs": torch.zeros(2)})
    others = [
        functools.partial(run, HMC(components, num_steps=3), (Y,)),  # unseeded
        lambda: bool(verify_model(group, components, Y)) or None,
        lambda: log_joint(components, Y)({"locs": torch.zeros(3, 2)}),
        lambda: find_symmetry(NET.net, X[:2]),
        lambda: predict(posterior, NET, X, kind="mean", progress=False),
        lambda: NET.log_joint(
            {site: value[0] for site, value in posterior.samples.items()}, X, Y
        ),
        lambda: mmd_test(posterior, posterior, num_permutations=19),
        lambda: diagnose(posterior),
    ]
    gate, done = threading.Barrier(len(RUNS) + 2), threading.Event()

    def start(one):
        gate.wait()
        return one()

    def ask(askers):
        while not done.is_set():
            assert all(asker() is not None for asker in askers)

    with ThreadPoolExecutor(gate.parties) as threads:
        asking = [
            threads.submit(start, functools.partial(ask, others[k::2]))
            for k in range(2)
        ]
        try:
            futures = [threads.submit(start, one) for one in RUNS]
            found = [future.result(timeout=300) for future in futures]
        finally:
            done.set()
        for future in asking:
            future.result(timeout=120)
    assert all(same(*pair) for pair in zip(found, alone, strict=True))
    assert all(
        torch.equal(value, before[name]) for name, value in NET.net.named_parameters()
    )


def test_ensembles_of_several_threads_are_those_of_one_thread_after_another():
    options = {"loss": "mse", "epochs": 5, "batch_size": 3, "progress": False}
    train = functools.partial(ensemble, nn.Linear(2, 1), (X, Y), 5, **options)
    torch.manual_seed(5)
    alone = [train().samples for _ in range(3)]
    torch.manual_seed(5)
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(train) for _ in range(3)]
        found = [future.result(timeout=300).samples for future in futures]
    # whichever drew its seed first
    assert all(any(same(one, other) for one in found) for other in alone)


def test_a_run_that_a_store_refuses_has_touched_no_generator(tmp_path):
    before = torch.get_rng_state()
    with Recorder(tmp_path / "s", 1), pytest.raises(BlockingIOError):
        RUNS[0](store=tmp_path / "s", seed=None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_may_ask_for_another_by_threads_from_its_starting_points_function():
    """Itself or through an executor; neither waits for ever nor disturbs."""
    alone = RUNS[0]()

    def initial(count, executor):
        with executor or ThreadPoolExecutor(1):
            inner = run(
                HMC(NET, num_steps=3),
                (X, Y),
                seed=9,
                chains_per_task=1,
                executor=executor,
            )
        asked.append(inner)
        return {site: prior.sample((count,)) for site, prior in NET.priors().items()}

    asked = []
    for executor in (None, ThreadPoolExecutor(2)):
        assert same(
            RUNS[0](initial=functools.partial(initial, executor=executor)), alone
        )
    assert same(*asked)
