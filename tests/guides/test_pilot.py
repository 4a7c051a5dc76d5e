"""Of targets that are Gaussians averaged over a group, the pilot suggests the base that the Gaussian is."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.guides import GuideSuggestion, pilot
from pyro_symmetric.guides.bounds import Evidence
from pyro_symmetric.guides.log_ratios import Estimate

SHAPES = {"w": torch.Size([3, 2])}
GROUP = ps.Group.declare({"w": ("unit", None)}, SHAPES)
CENTRES = torch.tensor([[-4.0, 0.0], [0.0, 4.0], [4.0, -4.0]])
WIDE = 5.0


def covariance(kind: str) -> Tensor:
    """Of six weights: independent; correlated inside each unit; one against all others."""
    pairs = torch.tensor([[1.0, 0.95], [0.95, 1.0]])
    return {
        "independent": torch.eye(6),
        "inside units": torch.block_diag(pairs, pairs, pairs),
        "across units": 0.1 * torch.eye(6) + 0.9,
    }[kind]


def target(kind: str):
    """A model whose likelihood is the mean of a Gaussian's images under all permutations of three units."""
    centres, elements = CENTRES.flatten(), GROUP.enumerate()
    gaussian = dist.MultivariateNormal(centres, covariance(kind), validate_args=False)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), WIDE).to_event(2))
        moved = torch.stack([w[..., order, :] for order in elements.permutations["unit"].tolist()])
        pyro.factor("density", gaussian.log_prob(moved.flatten(-2)).logsumexp(0) - GROUP.log_order())

    return model


def evidence_of(kind: str) -> float:
    """The prior knows no unit from another: all images have the same integral, N(centres; 0, WIDE² + covariance)."""
    spread = covariance(kind) + WIDE**2 * torch.eye(6)
    return float(dist.MultivariateNormal(torch.zeros(6), spread).log_prob(CENTRES.flatten()))


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        ("independent", {"AutoDiagonalNormal"}),
        ("inside units", {"AutoUnitBlocks"}),
        ("across units", {"AutoLowRankMultivariateNormal", "AutoMultivariateNormal"}),
    ],
)
def test_the_base_that_the_target_is_made_of_is_suggested(kind: str, bases: set[str]) -> None:
    """The gains are 0, 3.4 and 4.6 nats; the least that counts is 1, ten standard errors."""
    pyro.set_rng_seed(1)
    evidence = evidence_of(kind)
    found = ps.suggest_guide(target(kind), GROUP, steps=300, learning_rate=0.15, progress=False)
    assert isinstance(found, GuideSuggestion)
    assert type(found.guide.base).__name__ in bases
    best = next(t for t in found.trials if t.base == type(found.guide.base).__name__).evidence
    assert best.symmetrized_elbo == pytest.approx(evidence, abs=0.6)
    assert best.symmetrized_elbo < evidence + 5 * best.symmetrized_error + 1e-3
    assert best.symmetrized_elbo - best.elbo == pytest.approx(GROUP.log_order(), abs=0.05)
    assert "apart" in found.reason
    assert found.reason in repr(found)
    assert [trial.base for trial in found.trials] == [line.split()[0] for line in repr(found).splitlines()[1:-1]]


def test_a_pilot_that_has_not_settled_says_so() -> None:
    pyro.set_rng_seed(3)
    found = ps.suggest_guide(target("independent"), GROUP, steps=20, learning_rate=0.05, progress=False)
    assert found.reason.startswith("The pilot hasn't settled")


def test_bases_that_cost_too_much_are_left_out_and_the_guide_can_be_trained_further(monkeypatch) -> None:
    pyro.set_rng_seed(2)
    model = target("independent")
    monkeypatch.setattr(pilot, "LARGEST", 15)  # blocks have 12 numbers, a rank of 2 as many, the full rank 36
    found = ps.suggest_guide(model, GROUP, steps=2, progress=False)
    bases = ["AutoDiagonalNormal", "AutoUnitBlocks", "AutoLowRankMultivariateNormal"]
    assert [trial.base for trial in found.trials] == bases
    svi = SVI(model, found.guide, Adam({"lr": 0.01}), loss=Trace_ELBO())
    assert svi.step() < float("inf")


@pytest.mark.parametrize(
    ("added", "gap", "log_order", "words"),
    [(5.0, 0.0, 5.0, "apart"), (2.0, 0.5, 5.0, "overlap,"), (2.0, 4.0, 5.0, "known"), (0.0, 0.0, 0.0, "nothing")],
)
def test_the_reason_tells_no_more_than_the_bound(added: float, gap: float, log_order: float, words: str) -> None:
    estimate = Estimate(0.0, 0.1, 256, 200.0)
    found = Evidence(
        -added, 0.1, 0.0, 0.1, "SinkhornImportance(K=16)", "lower", log_order, estimate, 0.1, density_gap=gap
    )
    reason = pilot._reason((pilot.Trial("AutoDiagonalNormal", 12, found, 1e-3),), 0)
    assert words in reason
    assert "In training" not in reason
    doubtful = replace(found, doubts=("training: 4.0 of 5.0 nats are open",))
    reason = pilot._reason((pilot.Trial("AutoDiagonalNormal", 12, doubtful, 1e-3),), 0)
    assert reason.endswith("In training: 4.0 of 5.0 nats are open.") == (log_order > 0)


def test_a_model_without_the_symmetry_is_refused() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(torch.arange(6.0).reshape(3, 2), 1.0).to_event(2))

    with pytest.raises(ValueError, match="unit"):
        ps.suggest_guide(model, GROUP, steps=1, progress=False)
