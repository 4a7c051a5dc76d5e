"""Calls that aren't random take nothing from the caller's generators."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import nn

import pyro_symmetric as ps

Y = torch.linspace(-1.0, 1.0, 5)


def plain(y: torch.Tensor | None = None) -> torch.Tensor:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", 5):
        return pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)


def discrete(y: torch.Tensor) -> None:
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    with pyro.plate("rows", 5):
        z = pyro.sample("z", dist.Bernoulli(p), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


class Things:
    """A network, models, draws, groups and guides, for the calls."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        self.x, self.y = torch.randn(12, 2), torch.randn(12)
        self.model = ps.BayesianModel(self.net, likelihood="gaussian")
        self.symmetry = ps.find_symmetry(self.net, self.x)
        priors = self.model.priors().items()
        self.draws = {name: prior.sample((2, 30)) for name, prior in priors}
        chains = ps.Posterior(self.draws, kind="chains")
        self.chains = chains.attach(self.model, self.x, self.y)
        self.other = ps.Posterior(
            {name: prior.sample((2, 30)) for name, prior in priors}, kind="chains"
        )
        self.first, self.second = (
            {name: value[chain, 0] for name, value in self.draws.items()}
            for chain in (0, 1)
        )
        self.of_plain = ps.Posterior({"w": torch.randn(2, 30, 3)}, kind="chains")
        self.of_plain = self.of_plain.attach(plain, Y)
        self.group = ps.Group.declare({"w": ("k",)}, {"w": torch.zeros(3)})
        stock = AutoMultivariateNormal(plain)
        stock(Y)
        normal = dist.MultivariateNormal(torch.zeros(3), torch.eye(3))
        self.guide = ps.AutoGaussian(stock, normal)
        independent = dist.Normal(torch.zeros(3), 1.0).to_event(1)
        self.mean_field = ps.AutoGaussian(stock, independent)
        self.chains.save(folder / "draws")
        ps.save_guide(self.guide, folder / "guide")
        torch.save(self.net.state_dict(), folder / "net.pt")


def probabilities(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.ones(shape).softmax(-1)


def run(kernel: Any, *args: Any) -> Any:
    options = {"num_samples": 3, "num_warmup": 3, "num_chains": 2, "progress": False}
    return ps.sample(kernel, *args, seed=1, **options)


FIXED = {
    "find_symmetry": lambda it: ps.find_symmetry(it.net, it.x),
    "verify_model": lambda it: ps.verify_model(it.symmetry, it.model, it.x, it.y),
    "canonicalize": lambda it: ps.canonicalize(it.chains, it.symmetry),
    "minimal_mass": lambda it: ps.minimal_mass(it.chains, it.symmetry),
    "align": lambda it: ps.align(it.first, it.second, it.symmetry),
    "align_many, seeded": lambda it: ps.align_many(it.chains, it.symmetry, seed=0),
    "common_frame": lambda it: ps.common_frame(it.chains, it.other, it.symmetry),
    "interpolate": lambda it: ps.interpolate(it.first, it.second, 0.5),
    "barycentre": lambda it: ps.barycentre([it.mean_field, it.mean_field]),
    "push_forward": lambda it: ps.push_forward(
        it.guide, it.group.element({"k": torch.tensor([1, 2, 0])})
    ),
    "loss_barrier of networks": lambda it: ps.loss_barrier(
        it.first, it.second, it.model, (it.x, it.y)
    ),
    "mmd": lambda it: ps.mmd(it.chains, it.other),
    "marginal_wasserstein": lambda it: ps.marginal_wasserstein(it.chains, it.other),
    "total_variation": lambda it: ps.total_variation(
        probabilities((2, 5, 3)), probabilities((2, 5, 3))
    ),
    "diagnose": lambda it: ps.diagnose(it.chains),
    "diagnose modulo": lambda it: ps.diagnose(it.chains, it.symmetry, x=it.x),
    "diagnose, any model": lambda it: ps.diagnose(it.of_plain),
    "summary": lambda it: ps.summary(it.chains),
    "summary modulo, seeded": lambda it: ps.summary(it.chains, it.symmetry, seed=0),
    "Posterior.summary": lambda it: it.chains.summary(),
    "Posterior.diagnostics": lambda it: it.chains.diagnostics(),
    "Posterior.get_samples": lambda it: it.chains.get_samples(),
    "Posterior.select": lambda it: it.chains.select(chains=0).thin(2),
    "Posterior.map": lambda it: it.chains.map(ps.canonicalize, it.symmetry),
    "Posterior.concat": lambda it: ps.Posterior.concat([it.chains, it.chains]),
    "Posterior.from_samples": lambda it: ps.Posterior.from_samples(
        it.chains.get_samples(), kind="chains", num_chains=2
    ),
    "Posterior.save": lambda it: it.chains.save(it.folder / "again"),
    "Posterior.load": lambda it: ps.Posterior.load(it.folder / "draws"),
    "to_arviz": lambda it: it.chains.to_arviz(),
    "to_arviz, log-likelihood": lambda it: it.chains.to_arviz(log_likelihood=True),
    "to_arviz, log-likelihood of any model": lambda it: it.of_plain.to_arviz(
        log_likelihood=True
    ),
    "predict outputs": lambda it: ps.predict(it.chains, it.model, it.x),
    "predict mean": lambda it: ps.predict(it.chains, it.model, it.x, kind="mean"),
    "predict log-likelihood": lambda it: ps.predict(
        it.chains, it.model, it.x, it.y, kind="log_likelihood"
    ),
    "predict outputs of any model": lambda it: ps.predict(
        it.of_plain, plain, Y, kind="outputs"
    ),
    "predict mean of any model": lambda it: ps.predict(it.of_plain, plain, kind="mean"),
    "predict log-likelihood of any model": lambda it: ps.predict(
        it.of_plain, plain, Y, kind="log_likelihood"
    ),
    "log_joint": lambda it: ps.log_joint(it.model, it.x, it.y)(it.first),
    "log_joint of any model": lambda it: ps.log_joint(plain, Y)({"w": torch.ones(3)}),
    "log_joint, enumerated": lambda it: ps.log_joint(discrete, Y)(
        {"p": torch.tensor(0.5)}
    ),
    "save_guide": lambda it: ps.save_guide(it.guide, it.folder / "again.guide"),
    "load_guide": lambda it: ps.load_guide(it.folder / "guide"),
    "AutoSymmetrized": lambda it: ps.AutoSymmetrized(plain, it.group),
    "Symmetrized.log_prob": lambda it: ps.Symmetrized(
        dist.Normal(torch.arange(3.0), 1.0).to_event(1),
        ps.groups.Action(it.group, ["w"]),
    ).log_prob(torch.zeros(3)),
    "BayesianModel": lambda it: ps.BayesianModel(it.net, likelihood="gaussian"),
    "BayesianModel.log_likelihood": lambda it: it.model.log_likelihood(
        it.first, it.x, it.y
    ),
    "Symmetry.explain": lambda it: (it.symmetry.explain("*"), str(it.symmetry)),
    "Symmetry.from_dict": lambda it: ps.Symmetry.from_dict(it.symmetry.to_dict()),
    "sample, seeded": lambda it: run(ps.NUTS(plain), Y),
    "sample a network, seeded": lambda it: run(ps.HMC(it.model), it.x, it.y),
    "sample, enumerated, seeded": lambda it: run(ps.NUTS(discrete), Y),
    "sample in mini-batches, seeded": lambda it: run(
        ps.SGLD(it.model, batch_size=4), it.x, it.y
    ),
    "ensemble, seeded": lambda it: ps.ensemble(
        it.model, (it.x, it.y), 2, epochs=1, seed=1, progress=False
    ),
    "read_checkpoints": lambda it: ps.checkpoints.read_checkpoints(
        [it.folder / "net.pt"], progress=False
    ),
}


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Things:
    torch.manual_seed(0)
    return Things(tmp_path_factory.mktemp("things"))


def states() -> list[Any]:
    name, keys, *position = np.random.get_state()
    return [
        torch.get_rng_state().tolist(),
        [name, keys.tolist(), position],
        random.getstate(),
    ]


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FIXED)
def test_a_call_that_is_not_random_leaves_the_generators_alone(name, things):
    before = states()
    FIXED[name](things)
    assert states() == before


@pytest.mark.parametrize("kind", ["mean", "log_likelihood"])
def test_predictions_that_draw_nothing_are_equal_twice(kind, things):
    args = (Y,) if kind == "log_likelihood" else ()
    first, second = (
        ps.predict(things.of_plain, plain, *args, kind=kind)["y"] for _ in range(2)
    )
    assert torch.equal(first, second)
