"""Calls of a beginner's first hours that work as they are written."""

import functools
import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.density import Density
from pyro_symmetric.guides.evidence import EvidenceEstimate, doubts_of

DATA = torch.tensor([-3.0, -2.5, 2.0])
NET = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
X = torch.randn(6, 2)
Y = torch.tensor([0, 1, 0, 1, 1, 0])


def mixture(data: Tensor) -> None:
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    with pyro.plate("data", len(data)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.5, 0.5])))
        pyro.sample("x", dist.Normal(locs[z], 1.0), obs=data)


def log_joint_of_mixture(locs: Tensor) -> Tensor:
    """The density of locations, assignments summed by hand."""
    terms = dist.Normal(locs, 1.0).log_prob(DATA[:, None]) + math.log(0.5)
    return dist.Normal(0.0, 5.0).log_prob(locs).sum() + terms.logsumexp(1).sum()


BLOCKED = {
    "hide": poutine.block(config_enumerate(mixture), hide=["z"]),
    "expose": poutine.block(config_enumerate(mixture), expose=["locs", "x"]),
    "inside": poutine.scale(
        poutine.block(config_enumerate(mixture), hide=["z"]), scale=1.0
    ),
}


@pytest.mark.parametrize("name", ["hide", "expose", "inside"])
def test_a_model_that_blocks_its_enumerated_sites_is_seen_through(name: str) -> None:
    blocked = BLOCKED[name]
    density = Density(blocked, (DATA,))
    locs = torch.tensor([[0.3, -1.0], [2.0, -2.0]], requires_grad=True)
    energy, gradient = density.energy_and_gradient(locs.detach())
    expected = torch.stack([log_joint_of_mixture(row) for row in locs])
    torch.testing.assert_close(-energy, expected.detach())
    (slope,) = torch.autograd.grad(expected.sum(), locs)
    torch.testing.assert_close(-gradient, slope)
    assert ps.find_symmetry(blocked, DATA).permutations.order() == 2


def test_the_evidence_of_a_blocked_model_sums_its_sites_out() -> None:
    guide = ps.AutoSymmetrized(BLOCKED["hide"], init_scale=0.5).setup(DATA)
    found = ps.evidence(guide, DATA, num_samples=64)
    draws = guide.sample_posterior((2,))["locs"]
    joint = ps.log_joint(BLOCKED["hide"], DATA)({"locs": draws})
    expected = torch.stack([log_joint_of_mixture(row) for row in draws])
    torch.testing.assert_close(joint, expected)
    assert found.log_order == pytest.approx(math.log(2))


def test_data_that_a_block_hides_are_told() -> None:
    hidden = poutine.block(config_enumerate(mixture), expose=["locs"])
    with pytest.warns(UserWarning, match=r"hides its observed sites \['x'\]"):
        density = Density(hidden, (DATA,))
    locs = torch.tensor([[0.3, -1.0]])
    prior = dist.Normal(0.0, 5.0).log_prob(locs).sum()
    torch.testing.assert_close(-density.energy(locs)[0], prior)


@pytest.mark.parametrize("exposed", [["locs"], ["locs", "z"]])
def test_symmetries_of_a_part_that_hides_data_are_not_taken_for_the_models(
    exposed: list[str],
) -> None:
    part = poutine.block(config_enumerate(mixture), expose=exposed)
    with pytest.raises(ValueError, match=r"hides its observed sites \['x'\]"):
        ps.find_symmetry(part, DATA)
    with pytest.raises(ValueError, match="symmetry="):
        ps.AutoSymmetrized(part).setup(DATA)


def test_a_decorator_may_pass_data_to_the_model() -> None:
    @functools.wraps(mixture)
    def with_data() -> None:
        mixture(DATA)

    assert ps.find_symmetry(with_data).permutations.order() == 2


def test_networks_and_their_state_dicts_are_acted_on_alike() -> None:
    symmetry = ps.find_symmetry(NET, X)
    element = symmetry.sample()
    moved = symmetry.act(element, NET).state_dict()
    acted = symmetry.act(element, {**NET.state_dict(), "step": torch.tensor(3)})
    assert acted.pop("step") == 3
    torch.testing.assert_close(acted, {**moved})
    assert list(acted) == list(moved)


def test_no_progress_bar_starts_without_its_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ps.BayesianModel(NET)
    posterior = ps.sample(model, X, Y, num_samples=4, num_warmup=4, num_chains=2)
    ps.predict(posterior, model, X)
    ps.align_many(posterior)
    ps.loss_barrier(NET, NET, model, (X, Y), progress=True)
    ps.ensemble(NET, (X, Y), 2, epochs=2)
    bars = capsys.readouterr().err
    assert "8/8" in bars
    assert not re.search(r"(?<![\d.])0it", bars)


def test_the_evidence_of_an_unconverged_guide_is_doubted_in_words() -> None:
    estimate = EvidenceEstimate(-50.0, math.inf, 512, 0.3)
    (doubt,) = doubts_of(estimate, k=2.3, slow=2.52, elbo=-62.0)
    assert "inf" not in doubt
    assert "less than one effective" in doubt
    assert "train the guide for longer" in doubt
    assert doubts_of(EvidenceEstimate(-50.0, 0.01, 512, 400.0), 0.2, 0.1, -50.1) == ()


def test_data_that_were_forgotten_are_said_to_be_missing() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    guide = ps.AutoSymmetrized(model, None).setup(DATA, 2 * DATA)
    with pytest.raises(ValueError, match=r"\['y'\].* its arguments lack the data"):
        ps.evidence(guide, DATA)
