"""The eleven ordinary models of the benchmarks are the same in both libraries, and
their draws are judged in one frame.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.slow
def test_numpyros_models_have_the_densities_of_ours() -> None:
    """At draws of the priors, in double precision; JAX's log gamma is off by 1e-8."""
    numpyro = pytest.importorskip("numpyro")
    import jax.numpy as jnp
    import numpy as np
    import pyro
    import torch
    from pyro.poutine import block, condition, trace, uncondition
    from pyro.poutine.util import site_is_subsample

    from benchmarks.performance.eleven_densities import DENSITIES
    from benchmarks.performance.eleven_models import models
    from benchmarks.performance.eleven_numpyro import in_numpyro

    ours = models()
    assert list(ours) == list(DENSITIES)
    numpyro.enable_x64()
    torch.set_default_dtype(torch.float64)
    try:
        for name, (model, args) in ours.items():
            arrays = [np.asarray(value) for value in args]
            doubled = [v.astype(float) if v.dtype.kind == "f" else v for v in arrays]
            data = [torch.as_tensor(v) for v in doubled]
            theirs = tuple(map(jnp.asarray, doubled))
            for seed in range(2):
                pyro.set_rng_seed(seed)
                prior = trace(block(uncondition(model), hide=["y"])).get_trace(*data)
                point = {
                    site: node["value"]
                    for site, node in prior.iter_stochastic_nodes()
                    if not site_is_subsample(node)
                }
                density = trace(condition(model, point)).get_trace(*data).log_prob_sum()
                their_density, _ = numpyro.infer.util.log_density(
                    in_numpyro(DENSITIES[name]),
                    theirs,
                    {},
                    {site: value.numpy() for site, value in point.items()},
                )
                assert density.item() == pytest.approx(float(their_density), rel=1e-7)
    finally:
        numpyro.enable_x64(False)
        torch.set_default_dtype(torch.float32)


def test_labels_of_a_mixture_are_ordered_by_their_means() -> None:
    import torch

    from benchmarks.performance.effective_samples import ordered

    sites = torch.randn(2, 5, 3, 4)
    exchanged = torch.stack([row[:, torch.randperm(4)] for row in sites.flatten(0, 1)])
    result = ordered(exchanged.flatten(1).unflatten(0, (2, 5)))
    assert (result == ordered(sites.flatten(2))).all()
    weights, means, _ = result.unflatten(-1, (3, 4)).unbind(2)
    assert (means.diff() > 0).all()
    assert (weights.sort().values == sites[:, :, 0].sort().values).all()
    first = (weights[0, 0, 0], means[0, 0, 0])
    pairs = sites[0, 0, :2].T.tolist()
    assert [value.item() for value in first] in pairs


def test_ratios_are_those_of_one_model_and_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from benchmarks.harness import Results
    from benchmarks.performance.side_by_side import NUMPYRO, OURS, print_ratios

    results = Results(None, {})
    seconds = {("line", 0): (1, 4), ("line", 1): (3, 4), ("curve", 0): (6, 2)}
    for (model, seed), (mine, theirs) in seconds.items():
        results.add({"model": model, "seed": seed, "library": OURS, "cold": mine})
        peer = {"model": model, "seed": seed, "library": NUMPYRO, "cold": theirs}
        results.add(peer)
    results.add({"model": "alone", "seed": 0, "library": OURS, "cold": 1})
    print_ratios(results, "seconds", ["cold"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-5:] == [
        ["line", "0.50", "±", "0.25"],
        ["curve", "3.00"],
        ["median", "1.75"],
        ["least", "0.50"],
        ["greatest", "3.00"],
    ]
