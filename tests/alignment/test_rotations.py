"""Alignment of units that rotate: polar factors, heads that are permuted with them, and
draws of one posterior turned at random.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric.canonical.forms import doubtful_axes
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.posterior.statistics import chain_statistics

HEADS, WIDTH, IN = 3, 4, 6


def weights_of(group: Group, *batch: int) -> dict[str, torch.Tensor]:
    return {
        site: torch.randn(*batch, *shape, dtype=torch.float64)
        for site, shape in group.site_shapes.items()
    }


def factors() -> Group:
    axes = {"W": (None, "f"), "z": (None, "f")}
    return Group.declare(axes, {"W": (8, 3), "z": (20, 3)}, "rotate")


def attention() -> Group:
    """Heads that permute, in each of which queries with keys, and values with outputs,
    rotate; beside them a hidden layer that permutes and scales.
    """
    total = HEADS * WIDTH
    rows, whole = torch.arange(total)[None], torch.arange(total).view(HEADS, WIDTH).T
    of_heads = [("q", 0), ("k", 0), ("q bias", 0), ("v", 0), ("o", 1)]
    rotate, hidden = frozenset({"rotate"}), torch.arange(5)[None]

    def lying(*axes: tuple[str, int, int]) -> tuple[Axis, ...]:
        return tuple(Axis(site, dim, rows, e) for site, dim, e in axes)

    qk = lying(("q", 0, 1), ("k", 0, 1), ("q bias", 0, 1))
    vo = lying(("v", 0, 1), ("o", 1, -1))
    mlp = (Axis("up", 0, hidden, 1), Axis("down", 1, hidden, -1))
    units = [
        Units("heads", HEADS, tuple(Axis(s, d, whole) for s, d in of_heads)),
        Units("qk", WIDTH, qk, "heads", HEADS, rotate),
        Units("vo", WIDTH, vo, "heads", HEADS, rotate),
        Units("mlp", 5, mlp, moves=frozenset({"permute", "scale"})),
    ]
    shapes = {site: (total, IN) for site in "qkv"}
    shapes |= {"o": (IN, total), "q bias": (total,), "up": (5, IN), "down": (IN, 5)}
    return Group(units, shapes)


@pytest.mark.parametrize("seed", range(5))
def test_planted_rotations_of_heads_come_back(seed):
    torch.manual_seed(seed)
    group = attention()
    reference = weights_of(group)
    planted = group.compact.sample(dtype=torch.float64).within(group)
    found = ps.align(planted(reference), reference, group, progress=False)
    assert found.cost < 1e-12
    for site, value in found.element(planted(reference)).items():
        assert (value - reference[site]).abs().max() < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_heads_are_matched_as_all_assignments_say(seed):
    """Against each of the 3! permutations of heads, with the polar factors of each."""
    torch.manual_seed(seed)
    group = attention().without(["mlp"])
    reference, source = weights_of(group), weights_of(group)
    found = ps.align(source, reference, group, progress=False)
    product = found.initial_cost - found.cost
    best = 0.0
    for images in itertools.permutations(range(HEADS)):
        score = 0.0
        for sites in (("q", "k", "q bias"), ("v", "o")):
            mine, theirs = (
                torch.cat([_by_head(w, site) for site in sites], -1)
                for w in (reference, source)
            )
            scores = mine @ theirs[list(images)].mT
            score += float(torch.linalg.svdvals(scores).sum())
            score -= float((mine * theirs).sum())
        best = max(best, 2 * score)
    assert product == pytest.approx(best, rel=1e-9)
    assert found.exact


def _by_head(weights: dict[str, torch.Tensor], site: str) -> torch.Tensor:
    value = weights[site].mT if site == "o" else weights[site]
    return value.reshape(HEADS, WIDTH, -1)


def turned_draws(seed: int, spread: float = 0.05) -> ps.Posterior:
    """Four chains about one point, each draw turned at random."""
    torch.manual_seed(seed)
    centre = weights_of(factors())
    centre["W"] = centre["W"] * torch.tensor([2.0, 1.4, 1.0], dtype=torch.float64)
    draws = {
        site: value + spread * torch.randn(4, 60, *value.shape, dtype=torch.float64)
        for site, value in centre.items()
    }
    turns = factors().sample((4, 60), dtype=torch.float64)
    return ps.Posterior(turns(draws), kind="chains")


@pytest.mark.parametrize("seed", range(3))
def test_turned_draws_are_one_mode_again(seed):
    posterior, group = turned_draws(seed), factors()
    frame = ps.align_many(posterior, group, progress=False, seed=0)
    for value in frame.posterior.samples.values():
        assert value.std((0, 1)).max() < 0.08  # drawn with 0.05
    mean = {s: v.mean((0, 1)) for s, v in frame.posterior.samples.items()}
    stacked = torch.cat([mean["W"], mean["z"]])
    moments = stacked.mT @ stacked
    sizes = moments.diagonal()
    torch.testing.assert_close(moments, torch.diag(sizes), atol=1e-8, rtol=1e-8)
    assert bool((sizes.diff() < 0).all())


def test_what_rotations_cannot_align_is_refused():
    group, weights = factors(), weights_of(factors(), 3)
    with pytest.raises(ValueError, match="rotate"):
        ps.align_many(weights, group, cost="gaussian", progress=False)
    moments = ps.alignment.GaussianWeights(
        {site: value[0] for site, value in weights.items()},
        {site: torch.ones_like(value[0]) for site, value in weights.items()},
    )
    with pytest.raises(ValueError, match="deviations"):
        ps.align_many([moments, moments], group, progress=False)
    with pytest.raises(ValueError, match="deviations"):
        ps.align(moments, moments, group, progress=False)


@pytest.mark.parametrize("seed", range(3))
def test_chains_that_are_turned_agree_modulo_rotations(seed, capsys):
    """One rotation a chain, as chains of a factor model settle: R-hat falls to that of
    chains that weren't turned. Equal moments are a doubt.
    """
    torch.manual_seed(seed)
    group = factors()
    centre = weights_of(group)
    centre["W"] = centre["W"] * torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    draws = {
        site: value + 0.05 * torch.randn(4, 200, *value.shape, dtype=torch.float64)
        for site, value in centre.items()
    }
    turns = group.sample((4, 1), dtype=torch.float64)
    posterior = ps.Posterior(turns(draws), kind="chains")
    frame = ps.align_many(posterior, group, progress=False, seed=0)
    for site in draws:
        raw = chain_statistics(posterior.samples[site]).r_hat
        modulo = chain_statistics(frame.posterior.samples[site]).r_hat
        assert raw.max() > 2.0
        assert modulo.max() < 1.05
    assert doubtful_axes(frame.posterior.samples, group) == []
    equal = torch.linalg.qr(torch.randn(28, 3, dtype=torch.float64))[0].split([8, 20])
    tied = {
        site: value + 0.05 * torch.randn(4, 200, *value.shape, dtype=torch.float64)
        for site, value in zip(("W", "z"), equal, strict=True)
    }
    print(ps.summary(turns(tied), group))
    assert "close to arbitrary" in capsys.readouterr().out
