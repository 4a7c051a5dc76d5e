"""A store is resumed by the model that began it, in any process, and by no other."""

import functools
import os
import re
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_symmetric.mcmc import HMC, resume, run, sample
from pyro_symmetric.mcmc.resume import OTHER_MODEL, digest
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.store import StoreError

QUICK = {
    "num_chains": 3,
    "num_warmup": 10,
    "num_samples": 40,
    "seed": 1,
    "progress": False,
}
pytestmark = pytest.mark.filterwarnings("ignore:.*of the draws diverged:RuntimeWarning")


def of_width(width: float):
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(3), width).to_event(1))

    return model


@pytest.mark.parametrize("resuming", ["auto", True])
def test_another_model_is_known_by_the_energies_where_its_chains_stand(
    resuming, tmp_path, monkeypatch
):
    monkeypatch.setattr(resume, "digest", lambda model: "")
    options = {**QUICK, "store": tmp_path / "s"}
    sample(HMC(of_width(3.0), num_steps=3), **options)
    before = {
        file: file.read_bytes()
        for file in (tmp_path / "s").rglob("*.*")
        if file.is_file()
    }
    with pytest.raises(
        StoreError,
        match=re.escape(f"it was left as it is. What differs: {OTHER_MODEL}"),
    ):
        sample(HMC(of_width(3.1), num_steps=3), resume=resuming, **options)
    changed = [
        file.name for file, content in before.items() if file.read_bytes() != content
    ]
    assert set(changed) <= {".pyro_symmetric.lock"}


MANY = torch.tensor([5.0, -5.0]).repeat(50_000)
WIDTH = [10.0]


def of_closure(width: float):
    def model():
        mean = pyro.sample("mean", dist.Normal(0.0, width))
        pyro.sample(
            "y", dist.Normal(mean, 1.0).expand([len(MANY)]).to_event(1), obs=MANY
        )

    return model


def of_globals():
    prior = prior_of_globals()
    mean = pyro.sample("mean", prior)
    pyro.sample("y", dist.Normal(mean, 1.0).expand([len(MANY)]).to_event(1), obs=MANY)


def prior_of_globals():
    return dist.Normal(0.0, WIDTH[0])


@pytest.mark.parametrize("kind", ["a closure", "a global"])
def test_a_prior_that_many_data_hide_is_told_before_anything_is_drawn(
    kind, tmp_path, monkeypatch
):
    first, other = (
        (of_globals,) * 2 if kind == "a global" else (of_closure(10.0), of_closure(3.0))
    )
    sample(HMC(first, num_steps=3), store=tmp_path / "s", **QUICK)
    longer = {**QUICK, "num_samples": 50, "store": tmp_path / "s"}
    with monkeypatch.context() as patch:
        patch.setattr("tests.mcmc.test_identity.WIDTH", [3.0])
        with pytest.raises(
            StoreError,
            match=r"the model's code, or a value that it reads.*pass resume=True",
        ):
            sample(HMC(other, num_steps=3), **longer)
        with pytest.warns(
            RuntimeWarning, match="the model's code, or a value that it reads"
        ):
            assert (
                sample(HMC(other, num_steps=3), resume=True, **longer).num_samples == 50
            )


def test_a_run_with_other_values_of_pyros_store_is_refused(tmp_path):
    """Also where no position that is stored feels the difference."""

    def model():
        limit = pyro.param("limit", torch.tensor(6.0))
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("beyond", torch.where(x > limit, -5.0, 0.0))

    kernel = HMC(model, num_steps=3)
    sample(kernel, store=tmp_path / "s", **QUICK)
    longer = {**QUICK, "num_samples": 50, "store": tmp_path / "s"}
    pyro.get_param_store()["limit"] = torch.tensor(8.0)
    with pytest.raises(StoreError, match="parameters"):
        sample(kernel, **longer)
    pyro.get_param_store()["limit"] = torch.tensor(6.0)
    assert sample(kernel, **longer).num_samples == 50


def test_networks_with_other_initial_weights_are_one_model_and_with_other_priors_another():
    models = [
        BayesianModel(nn.Linear(2, 1), prior, "gaussian") for prior in (1.0, 1.0, 2.0)
    ]
    x, y = torch.zeros(3, 2), torch.zeros(3)
    calls = [run.Settings(HMC(model), (x, y), engine="eager") for model in models]
    first, second, other = (
        resume.identify(call, call.build_density(), 0)["code"] for call in calls
    )
    assert first == second != other


def test_a_run_keeps_all_digests_that_its_code_had():
    """As those of a model that changes its own attributes when it is run: the next
    process may meet either.
    """
    settings = run.Settings(HMC(of_width(3.0)), engine="eager")
    current = resume.identify(settings, settings.build_density(), 0)
    stored = current | {"code": ["before", *current["code"]]}
    resume.require_same(settings, stored, current)
    assert current["code"] == sorted(stored["code"])


def test_an_energy_that_is_finite_again_is_another_models():
    settings = run.Settings(HMC(of_width(3.0)), engine="eager")
    density = settings.build_density()
    z = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, torch.inf]])
    stored = resume.energies(density, z)
    assert stored.isfinite().tolist() == [True, False]
    exact = torch.zeros(2).double()
    resume.require_same_energies(settings, density, z, stored, exact)
    finite = z[:1].repeat(2, 1)
    with pytest.raises(StoreError, match=re.escape(OTHER_MODEL)):
        resume.require_same_energies(settings, density, finite, stored, exact)


# digests ------------------------------------------------------------------------------


@dataclass
class Settings:
    scale: float
    names: tuple[str, ...] = ()


def scaled(by):
    return lambda x: by * x


def tanh_or_relu(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), kind())


DIFFERENT = {
    "digits": ([1, 12], [11, 2]),
    "nesting": ([[1], [2]], [[1, 2]]),
    "a truth and a number": ([True], [1]),
    "sets": ({1, 2}, {1, 3}),
    "keys": ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    "dataclasses": (Settings(1.0), Settings(2.0)),
    "methods": tuple(type("Prior", (), {"width": scaled(by)})() for by in (1.0, 2.0)),
    "constants of functions": (lambda x: x + 1, lambda x: x + 2),
    "closures": (scaled(1.0), scaled(2.0)),
    "partial": (functools.partial(scaled, 1), functools.partial(scaled, 2)),
    "networks": (tanh_or_relu(nn.Tanh), tanh_or_relu(nn.ReLU)),
    "slopes": (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtypes": (torch.zeros(2), torch.zeros(1, dtype=torch.float64)),
    "distributions": (dist.Normal(0.0, 1.0), dist.Normal(0.0, 2.0)),
    "sparse": (
        torch.eye(2, device="cpu").to_sparse(),
        torch.ones(2, 2, device="cpu").to_sparse(),
    ),
}
SAME = {
    "order of keys": ({"a": 1, "b": 2}, OrderedDict([("b", 2), ("a", 1)])),
    "order of sets": ({"a", "b", "c"}, {"c", "b", "a"}),
    "list and tuple": ([1, 2], (1, 2)),
    "functions made anew": (scaled(1.0), scaled(1.0)),
    "dataclasses made anew": (Settings(1.0, ("a",)), Settings(1.0, ("a",))),
    "networks made anew": (tanh_or_relu(nn.Tanh), tanh_or_relu(nn.Tanh)),
    "what can't be pickled": ((i for i in range(2)), (i for i in range(3))),
    "strides": (
        torch.arange(6).reshape(2, 3).t().contiguous(),
        torch.arange(6).reshape(2, 3).t(),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_has_another_digest(name):
    a, b = DIFFERENT[name]
    assert digest(a) != digest(b)
    assert digest([a, a]) != digest([a, b])
    assert digest(a) == digest(a)


@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same_has_the_same_digest(name):
    a, b = SAME[name]
    assert digest(a) == digest(b)


def test_what_an_object_has_only_cached_does_not_count():
    law = dist.MultivariateNormal(torch.zeros(2), torch.eye(2))
    before = digest(law)
    assert law.precision_matrix.shape == (2, 2)
    assert digest(law) == before


def test_containers_that_hold_themselves_have_a_digest():
    one, other = [1], [2]
    one.append(one)
    other.append(other)
    assert digest(one) != digest(other)


SCRIPT = """
import functools, dataclasses, torch, pyro, pyro.distributions as dist
from torch import nn
from pyro_symmetric.mcmc.resume import digest

@dataclasses.dataclass
class Settings:
    names: frozenset

WORDS, WIDTH = {"a", "b", "c"}, 1.0

class Prior(nn.Module):
    def width(self):
        return WIDTH * len(WORDS) / 3

held = Prior()

def prior():
    return dist.Normal(torch.zeros(2), held.width()).to_event(1) if "a" in {"a", "b", "c"} else held.prior()

def model(y, link, net, settings):
    w = pyro.sample("w", prior())
    pyro.sample("y", dist.Normal(link(w).sum(-1), 1.0).expand([len(y)]).to_event(1), obs=y)

torch.manual_seed(0)
kwargs = {"link": lambda w: 2 * w, "net": nn.Linear(2, 2), "settings": Settings(frozenset(map(str, range(50))))}
kwargs["settings"].law = dist.Normal(0.0, 1.0)
kwargs["settings"].half = functools.partial(torch.mul, 0.5)
kwargs["settings"].words = {str(i): object for i in range(20)}
print(digest([model, kwargs]))
"""


def test_another_process_finds_the_same_digest():
    """Sets, lambdas and objects are made anew there, at other addresses and in another
    order.
    """
    runs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
        runs.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    found = [run.communicate()[0] for run in runs]
    assert found[0] == found[1] != ""
