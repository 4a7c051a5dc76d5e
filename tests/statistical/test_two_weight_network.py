r"""The two-weight network, whose posterior is known by quadrature.

:math:`f(x) = \mathrm{relu}(w_1 x) + \mathrm{relu}(w_2 x)`: two hidden units without
biases, output weights fixed at one. Swapping the units changes nothing, so the
posterior has two copies of every mode (Gelberg et al. 2024, section 5.1).
"""

import math

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import Tensor, nn

from pyro_symmetric import Group
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.distributions import ExactOrbit, InfoNCE
from pyro_symmetric.guides import AutoSymmetrized
from pyro_symmetric.guides.evidence import evidence
from pyro_symmetric.models import BayesianModel, GaussianLikelihood

NOISE = 0.5
GROUP = Group.declare(
    {"hidden.weight": ("hidden", None)}, {"hidden.weight": torch.Size([2, 1])}
)


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(x)).sum(-1, keepdim=True)


def problem(distance: float) -> tuple[BayesianModel, Tensor, Tensor]:
    """Data from weights (a, -a) that lie ``distance`` from their mirror image (-a,
    a).
    """
    x = torch.linspace(-2, 2, 16)[:, None]
    a = distance / math.sqrt(8)
    y = torch.relu(a * x[:, 0]) + torch.relu(-a * x[:, 0]) + NOISE * torch.randn(16)
    return BayesianModel(TwoWeights(), 1.0, GaussianLikelihood(NOISE)), x, y


def log_evidence_of(model: BayesianModel, x: Tensor, y: Tensor) -> float:
    """On a grid that holds all mass, by the trapezoid rule in float64."""
    model = model.double()
    axis = torch.linspace(-7, 7, 561, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    log_joint = torch.cat(
        [
            model.log_joint({"hidden.weight": w[..., None]}, x.double(), y.double())
            for w in grid.split(50_000)
        ]
    )
    model.float()
    return float(log_joint.logsumexp(0)) + 2 * math.log(float(axis[1] - axis[0]))


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "distance",
    [
        pytest.param(1.0, marks=pytest.mark.slow),
        3.0,
        pytest.param(5.0, marks=pytest.mark.slow),
    ],
)
def test_symmetrised_elbos_lie_between_the_mean_field_one_and_the_evidence(
    distance: float,
) -> None:
    """Each comparison at 5 standard errors of estimates from 4,000 draws: false alarm
    below 1 in 10^5 in all.
    """
    pyro.set_rng_seed(int(10 * distance))
    model, x, y = problem(distance)
    log_evidence = log_evidence_of(model, x, y)
    found = {}
    for name, estimator in {
        "mean-field": InfoNCE(0),
        "exact": ExactOrbit(),
        "infonce": InfoNCE(3),
    }.items():
        guide = AutoSymmetrized(
            model, GROUP, base=AutoDiagonalNormal, estimator=estimator, init_scale=0.2
        )
        particles = Trace_ELBO(
            num_particles=8, vectorize_particles=True, max_plate_nesting=1
        )
        svi = SVI(
            model, guide, pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.995}), particles
        )
        for _ in range(500):
            svi.step(x, y)
        found[name] = evidence(
            guide,
            log_joint=lambda w: model.log_joint(w, x, y),
            symmetry=GROUP,
            estimator=estimator,
            num_samples=4000,
        )
    error = 5 * max(f.symmetrized_error for f in found.values())
    for name in ("exact", "infonce"):
        assert found[name].symmetrized_elbo < log_evidence + error
        assert found[name].symmetrized_elbo > found["mean-field"].elbo - error
    assert found["exact"].symmetrized_elbo > found["infonce"].symmetrized_elbo - error
    if distance >= 3:  # the two copies are apart, and a single Gaussian sees one of two
        gain = found["exact"].symmetrized_elbo - found["mean-field"].elbo
        assert gain == pytest.approx(math.log(2), abs=error + 0.1)
        assert found["exact"].symmetrized_elbo == pytest.approx(
            log_evidence, abs=error + 0.3
        )


@pytest.mark.stochastic
def test_a_fixed_guide_gains_what_enumeration_says() -> None:
    """The estimator of the symmetrised ELBO against the orbit sum of two terms, written
    out.
    """
    model, x, y = problem(2.0)
    guide = AutoSymmetrized(model, GROUP, estimator=ExactOrbit(), init_scale=0.7).setup(
        x, y
    )
    pyro.set_rng_seed(1)
    worth = evidence(
        guide,
        log_joint=lambda w: model.log_joint(w, x, y),
        symmetry=GROUP,
        estimator=ExactOrbit(),
        num_samples=64,
    )
    base = guide.base.get_posterior()
    pyro.set_rng_seed(1)
    with forked(drawn_seed()):  # the same draws
        latent = base.sample((64,))
    log_joint = model.log_joint({"hidden.weight": latent[..., None]}, x, y)
    both = torch.stack(
        [base.log_prob(latent), base.log_prob(latent.flip(-1))]
    ).logsumexp(0) - math.log(2)
    assert worth.elbo == pytest.approx(
        float((log_joint - base.log_prob(latent)).mean().detach()), rel=1e-5
    )
    assert worth.symmetrized_elbo == pytest.approx(
        float((log_joint - both).mean().detach()), rel=1e-5
    )
