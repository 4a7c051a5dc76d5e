"""A value that would give a wrong number, and a beginner's mistake, is refused in one
sentence that names what was found and what would be right, and not by PyTorch.
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
Y = torch.tensor([0, 1, 0, 1, 1, 0])
NET = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
MODEL = ps.BayesianModel(NET)
SYMMETRY = ps.find_symmetry(NET, X)
GROUP = SYMMETRY.permutations
FACTORS = {"loadings": torch.zeros(4, 2), "scores": torch.zeros(2, 5)}
EXCHANGES = ps.Group.declare(
    {"loadings": (None, "factor"), "scores": ("factor", None)}, FACTORS
)
PROBABILITIES = torch.full((4, 6, 2), 0.5)


def unnamed_plate() -> None:
    with pyro.plate(3):
        pyro.sample("w", pyro.distributions.Normal(0.0, 1.0))


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


def mixture_of(data: torch.Tensor) -> None:
    weights = pyro.sample("weights", pyro.distributions.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", pyro.distributions.Normal(0.0, 5.0))
    with pyro.plate("data", len(data)):
        z = pyro.sample("z", pyro.distributions.Categorical(weights))
        pyro.sample("x", pyro.distributions.Normal(locs[z], 1.0), obs=data)


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


WIDER = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2))
ANOTHER = ps.find_symmetry(WIDER, X)
LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y))
APART = ("don't belong together", "symmetry")
LAYER = ("layer '0'", "in_features=2", "(3, 2)", "(2, 3)")

# A beginner's mistake -> the call, words of the message.
MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    # a network is no model, a class no kernel, a guide no model
    "sample of a network": (
        lambda: ps.sample(NET, X, Y),
        ("ps.BayesianModel(net)", "Sequential", "(input)"),
    ),
    "NUTS of a network": (
        lambda: ps.sample(ps.NUTS(NET), X, Y, num_samples=2),
        ("ps.BayesianModel(net)",),
    ),
    "log_joint of a network": (
        lambda: ps.log_joint(NET, X, Y),
        ("ps.BayesianModel(net)",),
    ),
    "verify_model of a network": (
        lambda: ps.verify_model(GROUP, NET, X, Y),
        ("ps.BayesianModel(net)",),
    ),
    "symmetrised network": (
        lambda: ps.AutoSymmetrized(NET)(X, Y),
        ("ps.BayesianModel(net)",),
    ),
    "sample of a kernel's class": (lambda: ps.sample(ps.NUTS, X, Y), ("class NUTS",)),
    "sample of a guide": (
        lambda: ps.sample(AutoDiagonalNormal(MODEL), X, Y),
        ("AutoDiagonalNormal", "a Pyro model"),
    ),
    "sample of weights": (
        lambda: ps.sample(NET.state_dict(), X, Y),
        ("OrderedDict", "a Pyro model"),
    ),
    "symmetrised guide": (
        lambda: ps.AutoSymmetrized(AutoDiagonalNormal(MODEL)),
        ("AutoDiagonalNormal", "a Pyro model"),
    ),
    "symmetry of a class": (
        lambda: ps.find_symmetry(nn.Sequential, X),
        ("class Sequential", "torch.nn.Module"),
    ),
    "symmetry of weights": (
        lambda: ps.find_symmetry(NET.state_dict(), X),
        ("OrderedDict", "torch.nn.Module"),
    ),
    "Bayesian class": (
        lambda: ps.BayesianModel(nn.Linear),
        ("class Linear", "torch.nn.Module"),
    ),
    "Bayesian function": (
        lambda: ps.BayesianModel(mixture_of),
        ("function", "torch.nn.Module"),
    ),
    "MCMC of a model": (lambda: ps.MCMC(mixture_of, 2), ("function", "NUTS(model)")),
    # data that are missing, of another shape, type or library
    "model without data": (
        lambda: ps.find_symmetry(mixture_of),
        ("mixture_of takes (data", "no arguments"),
    ),
    "sample without data": (
        lambda: ps.sample(mixture_of),
        ("mixture_of takes (data", "no arguments"),
    ),
    "sample without targets": (lambda: sampled(X), ("x and y", "(6, 2)")),
    "sample of arrays": (lambda: sampled(X.numpy(), Y.numpy()), ("ndarray", "tensor")),
    "labels as floats": (lambda: sampled(X, Y.float()), ("float32", "y.long()")),
    "labels from one": (lambda: sampled(X, Y + 1), ("from 1 to 2", "2 outputs")),
    "sample with wrong features": (lambda: sampled(X[:, [0, 1, 0]], Y), LAYER),
    "predict with wrong features": (
        lambda: ps.predict(posterior(), MODEL, X[:, [0, 1, 0]], progress=False),
        LAYER,
    ),
    "predict by a network, wrong features": (
        lambda: ps.predict(weights(4), NET, X[:, [0, 1, 0]], progress=False),
        LAYER,
    ),
    "symmetry with wrong features": (
        lambda: ps.find_symmetry(NET, X[:, [0, 1, 0]]),
        LAYER,
    ),
    "ensemble with wrong features": (
        lambda: ps.ensemble(NET, (X[:, [0, 1, 0]], Y), 2, epochs=1, progress=False),
        LAYER,
    ),
    "barrier with wrong features": (
        lambda: ps.loss_barrier(NET, NET, MODEL, (X[:, [0, 1, 0]], Y)),
        LAYER,
    ),
    "symmetry of a shape": (
        lambda: ps.find_symmetry(NET, (6, 2)),
        ("example inputs", "must be Tensor, not tuple"),
    ),
    "barrier of a loader": (
        lambda: ps.loss_barrier(NET, NET, MODEL, LOADER),
        ("DataLoader", "(x, y)"),
    ),
    "barrier of a triple": (
        lambda: ps.loss_barrier(NET, NET, MODEL, {"test": (X, Y, Y)}),
        ("data['test']", "(x, y)"),
    ),
    "barrier of a network's outputs": (
        lambda: ps.loss_barrier(NET, NET, NET, (X, Y)),
        ("Sequential", "a BayesianModel"),
    ),
    "barrier without data": (
        lambda: ps.loss_barrier(NET, NET, MODEL),
        ("needs data: (x, y)",),
    ),
    "ensemble of a loader": (
        lambda: ps.ensemble(NET, LOADER, 2, epochs=1),
        ("DataLoader", "pair of tensors"),
    ),
    "ensemble of x, y": (
        lambda: ps.ensemble(NET, X, Y),
        ("a tensor (6, 2)", "pair of tensors"),
    ),
    "scores of logits": (
        lambda: ps.scores.classification(torch.randn(4, 6, 2), Y),
        ("probabilities", "logits"),
    ),
    "orders that repeat a unit": (
        lambda: ps.compare.kendall_tau(torch.tensor([0, 0]), torch.tensor([0, 1])),
        ("first has shape (2,)", "permutation of 0 .. 1"),
    ),
    "distance of two kinds of predictions": (
        lambda: ps.total_variation(PROBABILITIES, (torch.zeros(4, 6, 2), 0.3)),
        ("both be class probabilities", "both pairs"),
    ),
    "barycentre of nothing": (
        lambda: ps.barycentre([]),
        ("guides is empty", "at least one"),
    ),
    "save a function": (
        lambda: ps.save_guide(unnamed_plate, "guide.safetensors"),  # type: ignore[arg-type]
        ("guide is a function", "AutoGuide"),
    ),
    "evidence modulo a tensor": (
        lambda: ps.evidence(
            ps.AutoSymmetrized(MODEL, GROUP).setup(X, Y), X, Y, symmetry=X
        ),
        ("symmetry is a tensor (6, 2)", "Group"),
    ),
    # another network's symmetry
    "align, another's symmetry": (lambda: ps.align(NET, NET, ANOTHER), APART),
    "align_many, another's symmetry": (
        lambda: ps.align_many(posterior(), ANOTHER),
        APART,
    ),
    "canonicalize, another's symmetry": (
        lambda: ps.canonicalize(weights(4), ANOTHER),
        APART,
    ),
    "common_frame, another's symmetry": (
        lambda: ps.common_frame(weights(4), weights(4), ANOTHER),
        APART,
    ),
    "invariance_tests, another's symmetry": (
        lambda: ps.invariance_tests(weights(40), ANOTHER),
        APART,
    ),
    "diagnose, another's symmetry": (
        lambda: ps.diagnose(posterior().samples, ANOTHER),
        APART,
    ),
    "summary, another's symmetry": (lambda: ps.summary(posterior(), ANOTHER), APART),
    "act, another's element": (lambda: SYMMETRY.act(ANOTHER.sample(), NET), APART),
    "act on another's weights": (
        lambda: SYMMETRY.act(SYMMETRY.sample(), WIDER.state_dict()),
        APART,
    ),
    "act on another network": (
        lambda: SYMMETRY.act(SYMMETRY.sample(), WIDER),
        ("the network that the symmetry was found for",),
    ),
    "verify another network": (
        lambda: ps.verify(ANOTHER, NET, X),
        ("the network that the symmetry was found for",),
    ),
    "symmetrised, another's symmetry": (
        lambda: ps.AutoSymmetrized(MODEL, ANOTHER)(X, Y),
        ("(3, 2) in the guide", "(5, 2) in the group"),
    ),
    "barrier of different networks": (
        lambda: ps.loss_barrier(NET, WIDER, MODEL, (X, Y)),
        ("same sites", "0.weight"),
    ),
    # arguments in another order, or of another kind
    "align, arguments exchanged": (
        lambda: ps.align(SYMMETRY, NET, NET),
        ("Sequential", "find_symmetry(net, x)"),
    ),
    "act, arguments exchanged": (
        lambda: SYMMETRY.act(NET, SYMMETRY.sample()),
        ("Sequential", "an element"),
    ),
    "predict, arguments exchanged": (
        lambda: ps.predict(MODEL, posterior(), X),
        ("BayesianModel", "Posterior"),
    ),
    "diagnose of a model": (
        lambda: ps.diagnose(posterior(), MODEL),
        ("BayesianModel", "find_symmetry(net, x)"),
    ),
    "summary of a network": (lambda: ps.summary(NET), ("Sequential", "Posterior")),
    "mmd of networks": (lambda: ps.mmd(NET, NET), ("Sequential", "Posterior")),
    "push_forward by a symmetry": (
        lambda: ps.push_forward(guide(), SYMMETRY),
        ("Symmetry", "an element"),
    ),
    "a distribution as prior": (
        lambda: ps.BayesianModel(NET, pyro.distributions.Normal(0.0, 1.0)),
        ("Normal", "GaussianPrior"),
    ),
    "a likelihood as prior": (
        lambda: ps.BayesianModel(NET, "categorical"),
        ("prior is 'categorical'", "GaussianPrior"),
    ),
    "a likelihood's name": (
        lambda: ps.BayesianModel(NET, likelihood="softmax"),
        ("'softmax'", "'categorical'"),
    ),
    "axes by number": (
        lambda: ps.Group.declare({"w": (0,)}, {"w": torch.zeros(3)}),
        ("(0,)", "name units or None"),
    ),
    "another library's argument": (
        lambda: sampled(X, Y, warmup_steps=3),
        ("warmup_steps", "'num_warmup'"),
    ),
    "a kind of prediction": (
        lambda: ps.predict(posterior(), MODEL, X, kind="prob"),
        ("'prob'", "'mean'"),
    ),
    "a site that isn't there": (lambda: posterior()["0.wait"], ("0.wait", "0.weight")),
    "an alignment of draws with nothing": (
        lambda: ps.align(AutoDiagonalNormal(MODEL), NET, SYMMETRY),
        ("AutoDiagonalNormal", "guide.setup"),
    ),
    "evidence of a stock guide": (
        lambda: ps.evidence(AutoDiagonalNormal(MODEL), X, Y),
        ("AutoDiagonalNormal", "AutoSymmetrized(model, base=guide)"),
    ),
    "an alignment without a symmetry": (
        lambda: ps.align(NET, NET),
        ("symmetry is None", "find_symmetry(net, x)"),
    ),
    "a plate without a name": (
        lambda: ps.find_symmetry(unnamed_plate),
        ("called 3", "pyro.plate('rows', 3)"),
    ),
    "data that are NaN": (
        lambda: ps.sample(mixture_of, X[:, 0] * NAN, num_warmup=2, progress=False),
        ("no start", "'data' holds NaN"),
    ),
    "data of a symmetry that are NaN": (
        lambda: ps.find_symmetry(mixture_of, X[:, 0] * NAN),
        ("isn't finite", "'data' holds NaN"),
    ),
    "a guide of a network that is no model": (
        lambda: ps.AutoSymmetrized(NET).setup(X),
        ("Sequential", "BayesianModel(net)"),
    ),
    "hidden sites": (
        lambda: ps.sample(pyro.poutine.block(mixture_of, hide=["z"]), X[:, 0]),
        ("['z']", "poutine.block"),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CALLS, *MISTAKES])
def test_a_bad_call_is_refused_in_one_sentence_that_names_the_argument(
    name: str,
) -> None:
    call, words = MISTAKES.get(name) or (CALLS[name][0], [CALLS[name][1]])
    with pytest.raises((ValueError, TypeError, KeyError)) as refusal:
        call()
    said, frame = (
        str(refusal.value),
        traceback.extract_tb(refusal.value.__traceback__)[-1],
    )
    assert frame.filename.startswith(PACKAGE), said
    assert "raise" in linecache.getline(frame.filename, frame.lineno), said
    assert "\n" not in said
    assert all(word in said for word in words), said
