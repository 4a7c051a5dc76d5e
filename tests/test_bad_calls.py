"""A value that would give a wrong number is refused in one sentence that names the argument, and not by PyTorch.

One bad call for each public function and class: what a user is likely to get wrong.
"""

import functools
import linecache
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
EXCHANGES = ps.Group.declare({"loadings": (None, "factor"), "scores": ("factor", None)}, FACTORS)
LONG = pyro.distributions.Normal(torch.zeros(18), 1.0).to_event(1)
PROBABILITIES = torch.full((4, 6, 2), 0.5)


def weights(*batch: int) -> dict[str, torch.Tensor]:
    return {site: torch.randn(*batch, *shape) for site, shape in GROUP.site_shapes.items()}


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


def unused() -> AutoDiagonalNormal:
    """A guide that isn't set up."""
    return AutoDiagonalNormal(MODEL)


def mixture() -> None:
    pyro.sample("w", pyro.distributions.Normal(torch.zeros(3), 1.0).to_event(1))


def symmetrized(**options: Any) -> ps.Symmetrized:
    action = ps.groups.Action(EXCHANGES, ["loadings", "scores"])
    return ps.Symmetrized(**{"base_distribution": LONG, "action": action, **options})


def sampled(*args: Any, **options: Any) -> ps.Posterior:
    return ps.sample(ps.NUTS(MODEL), *args, **{"num_samples": 2, "progress": False} | options)


# Public name: a call of it -> a word of the message.
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    # symmetry
    "find_symmetry": (lambda: ps.find_symmetry(NET, torch.zeros(5, 3)), "example inputs"),
    "verify": (lambda: ps.verify(SYMMETRY, nn.Linear(3, 3), X), "0.weight"),
    "verify_model": (lambda: ps.verify_model(EXCHANGES, MODEL, X, Y), "loadings"),
    "Symmetry": (lambda: SYMMETRY.group.identity()(transposed()), "0.weight"),
    "Symmetry.without": (lambda: SYMMETRY.without(["1"]), "'1'"),
    "Group": (lambda: ps.Group([GROUP["0"], GROUP["0"]], GROUP.site_shapes), "'0'"),
    "Group.declare": (lambda: ps.Group.declare({"loadings": ("factor",)}, FACTORS), "loadings"),
    "Group.element": (lambda: GROUP.element({"0": [0, 0, 1]}), "permutations"),
    "Group.batch_shape": (lambda: GROUP.batch_shape(transposed(4)), "0.weight"),
    "groups.Axis": (lambda: ps.Group([units([ps.groups.Axis("0.weight", 7, OWN)])], GROUP.site_shapes), "0.weight"),
    "groups.Units": (lambda: ps.groups.Units("k", 2, GROUP["0"].axes), "index"),
    "groups.Element": (lambda: GROUP.identity()(transposed(4)), "0.weight"),
    "groups.Action": (lambda: ps.groups.Action(GROUP, ["0.weight"] * 2), "sites"),
    "canonicalize": (lambda: ps.canonicalize(broken(4), SYMMETRY), "0.weight"),
    "minimal_mass": (lambda: ps.minimal_mass(broken(4), SYMMETRY), "0.weight"),
    # models
    "BayesianModel": (lambda: ps.BayesianModel(NET, ps.GaussianPrior(scales={"0.wait": 2.0})), "0.wait"),
    "BayesianModel.forward": (lambda: MODEL(X, Y[:5]), "y"),
    "BayesianModel.log_likelihood": (lambda: MODEL.log_likelihood(weights(4), X, Y[:5]), "y"),
    "GaussianPrior": (lambda: ps.GaussianPrior(scales={"*": NAN}), "scales"),
    "CategoricalLikelihood": (lambda: ps.CategoricalLikelihood(NAN), "temperature"),
    "GaussianLikelihood": (lambda: ps.GaussianLikelihood(-1.0), "scale"),
    "log_joint": (lambda: ps.log_joint(MODEL, X, Y)(transposed(4)), "0.weight"),
    # guides
    "AutoSymmetrized": (lambda: ps.AutoSymmetrized(mixture, GROUP)(), "0.weight"),
    "AutoUnitBlocks": (lambda: ps.AutoUnitBlocks(mixture, GROUP, init_scale=-1.0), "init_scale"),
    "AutoGaussian": (lambda: guide().pack(transposed(4)), "0.weight"),
    "symmetrize": (lambda: ps.symmetrize(lambda: None, {}), "group"),
    "Symmetrized.mutual_information": (
        lambda: symmetrized().mutual_information(1),
        "num_samples",
    ),
    "InfoNCE": (lambda: ps.InfoNCE(-1), "K"),
    "SinkhornImportance": (lambda: ps.SinkhornImportance(0), "K"),
    "ExactOrbit": (lambda: ps.ExactOrbit(0), "limit"),
    "push_forward": (lambda: ps.push_forward(unused(), GROUP.identity()), "guide"),
    "interpolate": (lambda: ps.interpolate(guide(), guide(), 1.1), "t"),
    "barycentre": (lambda: ps.barycentre([guide(), guide()], weights=[-1.0, 2.0]), "weights"),
    "save_guide": (lambda: ps.save_guide(unused(), "guide.safetensors"), "guide"),
    "load_guide": (lambda: ps.load_guide("missing.safetensors"), "missing.safetensors"),
    "evidence": (lambda: ps.evidence(unused(), X, Y), "guide"),
    # samplers and posteriors
    "sample": (lambda: sampled(X), "y"),
    "NUTS": (lambda: ps.NUTS(MODEL, target_accept=1.5), "target_accept"),
    "HMC": (lambda: ps.HMC(MODEL, trajectory_length=NAN), "trajectory_length"),
    "AdaptiveHMC": (lambda: ps.AdaptiveHMC(MODEL, target_accept=NAN), "target_accept"),
    "MCLMC": (lambda: ps.MCLMC(MODEL, energy_error=-1.0), "energy_error"),
    "SGHMC": (lambda: ps.SGHMC(MODEL, step_size=0.1, friction=NAN), "friction"),
    "SGLD": (lambda: ps.SGLD(MODEL, batch_size=0), "batch_size"),
    "pSGLD": (lambda: ps.pSGLD(MODEL, batch_size=1.5), "batch_size"),
    "MCMC": (lambda: ps.MCMC(ps.infer.NUTS(mixture), num_samples=0), "num_samples"),
    "Posterior": (lambda: ps.Posterior({"w": torch.zeros(2, 3), "v": torch.zeros(3, 2)}, kind="chains"), "v"),
    "Posterior.from_samples": (lambda: ps.Posterior.from_samples({"w": [1.0]}, kind="chains"), "weights"),
    "Posterior.concat": (lambda: ps.Posterior.concat([posterior(), posterior().thin(2)]), "num_samples"),
    "Posterior.map": (lambda: posterior().map(lambda own: {site: v[:1] for site, v in own.items()}), "function"),
    "Posterior.to_arviz": (lambda: posterior().to_arviz(dims={"0.weight": ["one"]}), "dims"),
    "predict": (lambda: ps.predict(transposed(4), MODEL, X, progress=False), "0.weight"),
    "diagnose": (lambda: ps.diagnose(posterior(), predictions=torch.zeros(3, 8, 2)), "predictions"),
    "summary": (lambda: ps.summary(posterior(), EXCHANGES, prob=1.5), "prob"),
    # alignment
    "align": (lambda: ps.align(broken(), weights(), GROUP), "0.weight"),
    "align_many": (lambda: ps.align_many(weights(), GROUP), "sources"),
    "loss_barrier": (lambda: ps.loss_barrier(weights(), broken(), MODEL, (X, Y)), "0.weight"),
    "relabel": (lambda: ps.relabel(posterior(), GROUP, torch.randn(2, 8, 5, 3)), "probabilities"),
    "alignment.to_gaussian": (lambda: ps.alignment.to_gaussian(unused()), "guide"),
    "alignment.GaussianWeights": (
        lambda: ps.alignment.GaussianWeights({"w": torch.zeros(2)}, {"w": -torch.ones(2)}),
        "scale",
    ),
    # comparison
    "common_frame": (lambda: ps.common_frame(transposed(4), weights(4), GROUP), "weights_p"),
    "mmd": (lambda: ps.mmd(weights(20), broken(20)), "weights_q"),
    "mmd_test": (lambda: ps.mmd_test(weights(20), weights(20), num_permutations=3), "num_permutations"),
    "marginal_wasserstein": (lambda: ps.marginal_wasserstein(weights(9), weights(9), 0.5), "p"),
    "invariance_tests": (lambda: ps.invariance_tests(weights(1), GROUP), "1 draws"),
    "total_variation": (lambda: ps.total_variation(PROBABILITIES + 0.1, PROBABILITIES), "p"),
    "compare.functional_collapse": (lambda: functional_collapse(-PROBABILITIES, PROBABILITIES), "logits"),
    "scores.classification": (lambda: ps.scores.classification(PROBABILITIES, Y + 1), "labels"),
    "scores.regression": (lambda: ps.scores.regression(torch.zeros(4, 6), 1.0, torch.zeros(6)), "targets"),
    "scores.detect": (lambda: ps.scores.detect(torch.rand(4), torch.full((3,), NAN)), "scores_out"),
    # what is left
    "ensemble": (lambda: ps.ensemble(NET, (X, Y[:5]), 2, epochs=1, progress=False), "data"),
    "ensemble, broken": (lambda: ps.ensemble(NET, (X * NAN, Y), 2, epochs=1, progress=False), "data"),
    "datasets.load": (lambda: ps.datasets.load("wine", test_fraction=1.5), "test_fraction"),
    "datasets.ood": (lambda: ps.datasets.ood("wine", ps.datasets.load("digits")), "wine"),
    "networks.optunet": (lambda: ps.networks.optunet((28,)), "images"),
    "checkpoints.read_checkpoints": (lambda: ps.checkpoints.read_checkpoints("missing"), "missing"),
}
OWN = torch.arange(3)[None]


def units(axes: list[ps.groups.Axis]) -> ps.groups.Units:
    return ps.groups.Units("0", 3, axes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_refused_in_one_sentence_that_names_the_argument(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, word = CALLS[name]
    with pytest.raises((ValueError, TypeError, OSError)) as refusal:
        call()
    said, frame = str(refusal.value), traceback.extract_tb(refusal.value.__traceback__)[-1]
    assert frame.filename.startswith(PACKAGE), said
    assert "raise" in linecache.getline(frame.filename, frame.lineno), said
    assert "\n" not in said
    assert len(said) < 500
    assert word in said


def test_every_public_name_is_called_badly_once() -> None:
    tried = {name.split(",")[0].split(".")[0] for name in CALLS}
    assert set(ps.__all__) - tried == {"Error"}
