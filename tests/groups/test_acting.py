"""A symmetry acts on the whole of its own network, running statistics included, or
nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pyro_symmetric as ps
from pyro_symmetric.discovery.find import find_symmetry

BUFFERS = ("1.running_mean", "1.running_var")


def normalised(trained: bool = True) -> nn.Sequential:
    """Batch normalisation between two linear layers, with statistics of its own."""
    net = nn.Sequential(
        nn.Linear(3, 5),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Linear(5, 4),
        nn.ReLU(),
        nn.Linear(4, 2),
    )
    if trained:
        for _ in range(20):
            net(1.0 + 2.0 * torch.randn(50, 3))
    return net.double().eval()


def draws(net: nn.Module, count: int = 6, buffers: bool = False) -> dict[str, Tensor]:
    held = {
        name: value.expand(count, *value.shape).clone()
        for name, value in net.named_buffers()
        if value.dim()
    }
    weights = {
        name: torch.randn(count, *p.shape, dtype=p.dtype)
        for name, p in net.named_parameters()
    }
    return weights | held if buffers else weights


def outputs(net: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.stack(
        [
            functional_call(net, {s: v[k] for s, v in weights.items()}, (x,))
            for k in range(6)
        ]
    )


MOVES = {
    "canonicalize": lambda weights, symmetry: ps.canonicalize(weights, symmetry),
    "minimal_mass": lambda weights, symmetry: (
        ps.minimal_mass(weights, symmetry).weights
    ),
    "element": lambda weights, symmetry: symmetry.sample((6,))(weights),
    "align": lambda weights, symmetry: ps.align(
        weights, {s: v[0] for s, v in weights.items()}, symmetry
    ).element(weights),
    "align_many": lambda weights, symmetry: ps.align_many(weights, symmetry).aligned,
    "posterior": lambda weights, symmetry: (
        ps.Posterior.from_samples(weights, kind="independent")
        .map(ps.canonicalize, symmetry)
        .get_samples()
    ),
}


@pytest.mark.parametrize("how", MOVES)
def test_predictions_stay_or_weights_without_running_statistics_are_refused(how):
    torch.manual_seed(0)
    net, x = normalised(), torch.randn(7, 3, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    assert set(symmetry.buffers) == set(BUFFERS)
    weights = draws(net)
    with pytest.raises(
        ValueError,
        match=r"running statistics \['1.running_(mean|var)'.* symmetry.holding\(net\)",
    ):
        MOVES[how](weights, symmetry)
    for own, kept in (
        (draws(net, buffers=True), symmetry),
        (weights, symmetry.holding(net)),
    ):
        moved = MOVES[how](own, kept)
        torch.testing.assert_close(
            outputs(net, moved, x), outputs(net, own, x), rtol=1e-6, atol=1e-6
        )
        assert not all(torch.equal(moved[site], own[site]) for site in own)


def test_holding_leaves_the_global_generator_alone():
    net = normalised()
    symmetry, before = (
        find_symmetry(net, torch.randn(7, 3, dtype=torch.float64)),
        torch.get_rng_state(),
    )
    symmetry.holding(net)
    assert torch.equal(torch.get_rng_state(), before)


def test_holding_keeps_what_leaves_the_statistics_as_they_are():
    x = torch.randn(7, 3, dtype=torch.float64)
    trained, fresh = normalised(), normalised(trained=False)
    symmetry, new = find_symmetry(trained, x), find_symmetry(fresh, x)
    held, still = symmetry.holding(trained), new.holding(fresh)
    # Units of equal statistics can be exchanged, and flipped around a mean of zero;
    # none can be scaled before them.
    assert held.permutations.factors == {"3": 4}
    assert still.permutations.factors == {"0": 5, "3": 4}
    flips = {
        s: sum(s.signs[name].count for name in s.signs.names("flip"))
        for s in (held, still, symmetry, new)
    }
    assert flips[held] == flips[symmetry] - 5
    assert flips[still] == flips[new]
    assert held.scalings.factors == still.scalings.factors == {"3": 4}
    assert all(not set(BUFFERS) & set(s.site_shapes) for s in (held, still))
    for kept, net in ((held, trained), (still, fresh)):
        assert ps.verify(kept, net, x)
        torch.testing.assert_close(
            kept.act(kept.sample(), net)(x), net(x), rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(
            symmetry.act(kept.sample(), net)(x), net(x), rtol=1e-6, atol=1e-6
        )
    # one unit apart: all are left out, and the one that lies at 1 can't be flipped
    fresh[1].running_mean[0] = 1.0
    assert new.holding(fresh).permutations.factors == {"3": 4}


# another network's --------------------------------------------------------------------


class Stack(nn.Module):
    """A stem and residual blocks, the sites of fewer of which are among those of
    more.
    """

    def __init__(self, blocks: int, width: int = 4):
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def plain_weights(net: nn.Module, count: int | None = None) -> dict[str, Tensor]:
    batch = () if count is None else (count,)
    return {name: torch.randn(*batch, *p.shape) for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("own", "other"),
    [((1,), (2,)), ((2,), (1,)), ((1, 4), (1, 5))],
    ids=["more", "fewer", "wide"],
)
@pytest.mark.parametrize("part", ["permutations", "scalings", "all"])
def test_elements_act_on_their_own_network_alone(own, other, part):
    x = torch.randn(5, 3)
    net, foreign = Stack(*own), Stack(*other)
    symmetry, theirs = find_symmetry(net, x), find_symmetry(foreign, x)
    element = (symmetry if part == "all" else getattr(symmetry, part)).sample()
    weights, named = plain_weights(foreign), "stem|blocks|head"
    for call in (
        lambda: symmetry.act(element, foreign),
        lambda: theirs.act(element, foreign),
        lambda: theirs.act(element, net),
        lambda: element(weights),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    torch.testing.assert_close(
        symmetry.act(element, net)(x), net(x), rtol=1e-4, atol=1e-4
    )


def test_a_declared_group_may_leave_out_sites_whatever_their_names():
    """Parameters that a network's group doesn't know are another network's; a model's
    sites are the user's choice.
    """
    weights = {
        name: torch.randn(2, 8, *shape)
        for name, shape in {"net.0.weight": (4, 3), "net.0.bias": (4,)}.items()
    }
    weights["net.1.weight"] = torch.randn(2, 8, 2, 4)
    weights |= {
        "net.1.bias": torch.randn(2, 8, 2),
        "noise.weight": torch.randn(2, 8, 1),
    }
    axes = {
        "net.0.weight": ("unit", None),
        "net.0.bias": ("unit",),
        "net.1.weight": (None, "unit"),
    }
    group = ps.Group.declare(axes, {site: weights[site].shape[2:] for site in axes})
    posterior = ps.Posterior(weights, kind="chains")
    assert group.sample((2, 8))(weights)["net.1.bias"].equal(weights["net.1.bias"])
    ps.align_many(posterior, group)
    ps.summary(posterior, group)
    assert (
        ps.Group.from_dict(group.to_dict()).sample((2, 8))(weights).keys()
        == weights.keys()
    )


def test_other_sites_of_a_model_are_passed_on():
    """A noise scale, a second network, buffers of the architecture: what isn't the
    symmetry's business.
    """
    symmetry = find_symmetry(Stack(1), torch.randn(5, 3))
    weights = plain_weights(Stack(1)) | {"noise_scale": torch.ones(())}
    assert float(symmetry.sample()(weights)["noise_scale"]) == 1.0
    encoder = symmetry.prefixed("model.encoder")
    both = {
        f"model.encoder.{site}": value
        for site, value in plain_weights(Stack(1)).items()
    }
    both |= {
        f"model.decoder.{site}": value
        for site, value in plain_weights(Stack(2)).items()
    }
    moved = encoder.sample()(both)
    assert all(
        torch.equal(moved[site], both[site]) for site in both if "decoder" in site
    )
    assert not torch.equal(
        moved["model.encoder.stem.weight"], both["model.encoder.stem.weight"]
    )
