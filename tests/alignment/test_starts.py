"""Frames of many draws don't depend on where the search began."""

import pytest
import torch

from pyro_symmetric.alignment import Frame, align_many
from pyro_symmetric.compare import summary
from pyro_symmetric.groups import Group
from pyro_symmetric.posterior.posterior import Posterior


def far_apart(components, chains, generator):
    """Components 40 deviations apart, of nearly equal weights; half of the chains have
    them in another order.
    """
    shape = chains, 50, components
    locs = 6.0 * torch.arange(components) + 0.15 * torch.randn(
        shape, generator=generator
    )
    weights = 1 / components + 0.055 * torch.randn(shape, generator=generator)
    for chain in range(chains // 2):
        order = torch.arange(components).roll(1 + chain % (components - 1))
        locs[chain], weights[chain] = locs[chain][:, order], weights[chain][:, order]
    group = Group.declare(
        {"locs": ("k",), "weights": ("k",)}, {"locs": shape[2:], "weights": shape[2:]}
    )
    return Posterior({"locs": locs, "weights": weights}, kind="chains"), group


@pytest.mark.stochastic
@pytest.mark.parametrize(("components", "chains"), [(2, 4), (2, 8), (5, 8)])
def test_components_that_are_far_apart_are_never_mixed(components, chains):
    """None of 1,000 seeds failed, of five kinds; from a random draw alone, one of five
    and more did.
    """
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        posterior, group = far_apart(components, chains, generator)
        frame = align_many(posterior, group, progress=False)
        assert frame.objective == "gaussian"
        assert float(frame.posterior.samples["locs"].flatten(0, 1).std(0).max()) < 0.3


def test_the_same_seed_finds_the_same_frame_and_leaves_the_global_generator_alone():
    posterior, group = far_apart(3, 4, torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    one, other = (
        align_many(posterior, group, seed=3, progress=False) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.element["k"], other.element["k"])
    assert one.ends == other.ends
    with pytest.raises(ValueError, match="seed is -1"):
        align_many(posterior, group, seed=-1)


def test_starts_that_disagree_are_told_of_and_the_best_is_kept(capsys):
    group = Group.declare(
        {"in": ("a", None), "mid": ("b", "a")}, {"in": (6, 3), "mid": (5, 6)}
    )
    members = {"in": torch.randn(8, 6, 3), "mid": torch.randn(8, 5, 6)}
    frame = align_many(members, group, restarts=4, progress=False)
    assert len(frame.ends) == 5
    assert frame.history[-1] == min(frame.ends)
    assert not frame.starts_agree
    assert "starts disagree" in repr(frame)
    posterior = Posterior.from_samples(members, kind="chains", num_chains=2)
    print(summary(posterior, group, restarts=4))
    assert "starts disagree" in capsys.readouterr().out
    alike = Frame(*[None] * 4, True, "l2", (1.0, 1.0 + 1e-6))
    assert alike.starts_agree
