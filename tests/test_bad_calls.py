"""A value that would give a wrong number is refused in one sentence that names the
argument, and not by PyTorch.

One bad call for each public function that would compute on: what a user is likely to
get wrong.
"""

import functools
import linecache
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.compare import functional_collapse

PACKAGE = str(Path(ps.__file__).parent)
NAN = math.nan
X = torch.randn(6, 2)
Y = (X[:, 0] > 0).long()
NET = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
MODEL = ps.BayesianModel(NET)
SYMMETRY = ps.find_symmetry(NET, X)
GROUP = SYMMETRY.permutations
FACTORS = {"loadings": torch.zeros(4, 2), "scores": torch.zeros(2, 5)}
EXCHANGES = ps.Group.declare(
    {"loadings": (None, "factor"), "scores": ("factor", None)}, FACTORS
)
PROBABILITIES = torch.full((4, 6, 2), 0.5)


def weights(*batch: int) -> dict[str, torch.Tensor]:
    return {
        site: torch.randn(*batch, *shape) for site, shape in GROUP.site_shapes.items()
    }


def broken(*batch: int) -> dict[str, torch.Tensor]:
    """Draws with one NaN."""
    found = weights(*batch)
    found["0.weight"].view(-1)[0] = NAN
    return found


def transposed(*batch: int) -> dict[str, torch.Tensor]:
    """Draws of a layer with its axes exchanged, as other libraries have them."""
    found = weights(*batch)
    return {**found, "0.weight": found["0.weight"].mT}


def posterior() -> ps.Posterior:
    return ps.Posterior(weights(2, 8), {"lp": torch.randn(2, 8)}, kind="chains")


@functools.cache
def guide() -> Any:
    stock = AutoDiagonalNormal(MODEL)
    stock(X, Y)
    return ps.push_forward(stock, GROUP.identity())


def mixture() -> None:
    pyro.sample("w", pyro.distributions.Normal(torch.zeros(3), 1.0).to_event(1))


def conjugate(y: Any) -> None:
    mean = pyro.sample("mean", pyro.distributions.Normal(0.0, 1.0))
    pyro.sample(
        "y", pyro.distributions.Normal(mean, 1.0).expand([3]).to_event(1), obs=y
    )


def sampled(*args: Any, **options: Any) -> ps.Posterior:
    return ps.sample(
        ps.NUTS(MODEL), *args, **{"num_samples": 2, "progress": False} | options
    )


# Public name: a call of it -> a word of the message.
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    # symmetry
    "find_symmetry": (
        lambda: ps.find_symmetry(NET, torch.zeros(5, 3)),
        "example inputs",
    ),
    "verify_model": (lambda: ps.verify_model(EXCHANGES, MODEL, X, Y), "loadings"),
    "Symmetry": (lambda: SYMMETRY.group.identity()(transposed()), "0.weight"),
    "Group.element": (lambda: GROUP.element({"0": [0, 0, 1]}), "permutations"),
    "canonicalize": (lambda: ps.canonicalize(broken(4), SYMMETRY), "0.weight"),
    "canonical.sorting_permutation": (
        lambda: ps.canonical.sorting_permutation(3, SYMMETRY),
        "weights is 3",
    ),
    "minimal_mass": (lambda: ps.minimal_mass(broken(4), SYMMETRY), "0.weight"),
    # models
    "BayesianModel": (
        lambda: ps.BayesianModel(NET, ps.GaussianPrior(scales={"0.wait": 2.0})),
        "0.wait",
    ),
    "BayesianModel.log_likelihood": (
        lambda: MODEL.log_likelihood(weights(4), X, Y[:5]),
        "y",
    ),
    "GaussianPrior": (lambda: ps.GaussianPrior(scales={"*": NAN}), "scales"),
    "CategoricalLikelihood": (lambda: ps.CategoricalLikelihood(NAN), "temperature"),
    "GaussianLikelihood": (lambda: ps.GaussianLikelihood(-1.0), "scale"),
    "log_joint": (lambda: ps.log_joint(MODEL, X, Y)(transposed(4)), "0.weight"),
    # guides
    "AutoSymmetrized": (lambda: ps.AutoSymmetrized(mixture, GROUP)(), "0.weight"),
    "AutoUnitBlocks": (
        lambda: ps.AutoUnitBlocks(mixture, GROUP, init_scale=-1.0),
        "init_scale",
    ),
    "AutoGaussian": (lambda: guide().pack(transposed(4)), "0.weight"),
    "barycentre": (
        lambda: ps.barycentre([guide(), guide()], weights=[-1.0, 2.0]),
        "weights",
    ),
    # samplers and posteriors
    "sample": (lambda: sampled(X), "y"),
    "sample, an array": (lambda: ps.sample(conjugate, np.zeros(3)), "torch.as_tensor"),
    "NUTS": (lambda: ps.NUTS(MODEL, target_accept_prob=1.5), "target_accept_prob"),
    "HMC": (lambda: ps.HMC(MODEL, trajectory_length=NAN), "trajectory_length"),
    "AdaptiveHMC": (
        lambda: ps.AdaptiveHMC(MODEL, target_accept_prob=NAN),
        "target_accept_prob",
    ),
    "MCLMC": (lambda: ps.MCLMC(MODEL, energy_error=-1.0), "energy_error"),
    "SGHMC": (lambda: ps.SGHMC(MODEL, step_size=0.1, friction=NAN), "friction"),
    "Posterior": (
        lambda: ps.Posterior(
            {"w": torch.zeros(2, 3), "v": torch.zeros(3, 2)}, kind="chains"
        ),
        "v",
    ),
    "Posterior.from_samples": (
        lambda: ps.Posterior.from_samples({"w": [1.0]}, kind="chains"),
        "weights",
    ),
    "Posterior.concat": (
        lambda: ps.Posterior.concat([posterior(), posterior().thin(2)]),
        "num_samples",
    ),
    "Posterior.map": (
        lambda: posterior().map(lambda own: {site: v[:1] for site, v in own.items()}),
        "function",
    ),
    "predict": (
        lambda: ps.predict(transposed(4), MODEL, X, progress=False),
        "0.weight",
    ),
    "diagnose": (
        lambda: ps.diagnose(posterior(), predictions=torch.zeros(3, 8, 2)),
        "predictions",
    ),
    "summary": (lambda: ps.summary(posterior(), EXCHANGES, prob=1.5), "prob"),
    # alignment
    "align": (lambda: ps.align(broken(), weights(), GROUP), "0.weight"),
    "loss_barrier": (
        lambda: ps.loss_barrier(weights(), broken(), MODEL, (X, Y)),
        "0.weight",
    ),
    "relabel": (
        lambda: ps.relabel(posterior(), GROUP, torch.randn(2, 8, 5, 3)),
        "probabilities",
    ),
    "alignment.GaussianWeights": (
        lambda: ps.alignment.GaussianWeights(
            {"w": torch.zeros(2)}, {"w": -torch.ones(2)}
        ),
        "scale",
    ),
    # comparison
    "common_frame": (
        lambda: ps.common_frame(transposed(4), weights(4), GROUP),
        "weights_p",
    ),
    "mmd": (lambda: ps.mmd(weights(20), broken(20)), "weights_q"),
    "mmd_test": (
        lambda: ps.mmd_test(weights(20), weights(20), num_permutations=3),
        "num_permutations",
    ),
    "marginal_wasserstein": (
        lambda: ps.marginal_wasserstein(weights(9), weights(9), 0.5),
        "p",
    ),
    "invariance_tests": (lambda: ps.invariance_tests(weights(1), GROUP), "1 draws"),
    "total_variation": (
        lambda: ps.total_variation(PROBABILITIES + 0.1, PROBABILITIES),
        "p",
    ),
    "compare.functional_collapse": (
        lambda: functional_collapse(-PROBABILITIES, PROBABILITIES),
        "logits",
    ),
    "scores.classification": (
        lambda: ps.scores.classification(PROBABILITIES, Y + 1),
        "labels",
    ),
    "scores.regression": (
        lambda: ps.scores.regression(torch.zeros(4, 6), 1.0, torch.zeros(6)),
        "targets",
    ),
    "scores.detect": (
        lambda: ps.scores.detect(torch.rand(4), torch.full((3,), NAN)),
        "scores_out",
    ),
    # what is left
    "ensemble": (
        lambda: ps.ensemble(NET, (X, Y[:5]), 2, epochs=1, progress=False),
        "data",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_refused_in_one_sentence_that_names_the_argument(
    name: str,
) -> None:
    call, word = CALLS[name]
    with pytest.raises((ValueError, TypeError)) as refusal:
        call()
    said, frame = (
        str(refusal.value),
        traceback.extract_tb(refusal.value.__traceback__)[-1],
    )
    assert frame.filename.startswith(PACKAGE), said
    assert "raise" in linecache.getline(frame.filename, frame.lineno), said
    assert "\n" not in said
    assert word in said
