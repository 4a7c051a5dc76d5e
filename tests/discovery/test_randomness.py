"""Networks that draw random numbers are functions of their weights with these numbers
fixed.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.trace import Deterministic
from pyro_symmetric.discovery.verify import verify


class Between(nn.Module):
    """``b(f(a(x)))``, with six units after ``a``, and four more in front of the
    outputs.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 6), nn.Linear(6, 4), nn.Linear(4, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.b(self.function(self.a(x)))))


class Vae(nn.Module):
    """Encoder, a latent that is drawn, decoder; returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 6), nn.Tanh())
        self.mean, self.log_scale = nn.Linear(6, 4), nn.Linear(6, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> dict[str, object]:
        h = self.encoder(x)
        mean, scale = self.mean(h), self.log_scale(h).exp()
        latent = mean + scale * torch.randn_like(mean)
        return {
            "reconstruction": torch.distributions.Normal(self.decoder(latent), 1.0),
            "latent": [mean.sum(-1)],
        }


def quietly(net: nn.Module, *inputs: Tensor) -> Symmetry:
    """Found and verified without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return find_symmetry(net, *inputs)


def test_latents_that_are_drawn_stay_and_all_other_units_move() -> None:
    net, x = Vae(), torch.randn(4, 3)
    symmetry = quietly(net, x)
    assert symmetry.permutations.factors == {"encoder.0": 6, "decoder.0": 5}
    assert symmetry.signs.names("flip") == ("encoder.0", "decoder.0")
    # The latent's permutation is a symmetry in law, and none at fixed random numbers.
    axes = {
        "mean.weight": ("z", None),
        "log_scale.weight": ("z", None),
        "mean.bias": ("z",),
        "log_scale.bias": ("z",),
        "decoder.0.weight": (None, "z"),
    }
    declared = Symmetry(ps.Group.declare(axes, dict(net.named_parameters())))
    assert not verify(declared, net, x)


# All six units stay: each meets a number of its own.
STAY = {
    "rand": lambda h: h * torch.rand(6),
    "randn": lambda h: h + torch.randn(h.shape),
    "normal in place": lambda h: h + torch.empty_like(h).normal_(),
    "normal": lambda h: torch.normal(h, 0.1),
    "exponential": lambda h: h * torch.empty_like(h).exponential_(),
    "bernoulli of units": lambda h: h * torch.bernoulli(h.sigmoid()),
    "gamma": lambda h: torch.distributions.Gamma(h.exp(), 1.0).rsample(),
    "gumbel": lambda h: F.gumbel_softmax(h, hard=False),
    "a random unit": lambda h: h[:, torch.randperm(6)],
    "NumPy": lambda h: h + torch.as_tensor(np.random.rand(6), dtype=h.dtype),
    "Python": lambda h: h * torch.tensor([random.random() for _ in range(6)]),
}
# All six move: dropout, and numbers that rows or all entries have in common.
MOVE = {
    "dropout": lambda h: F.dropout(h, 0.4, training=True).tanh(),
    "dropout of features": lambda h: F.dropout1d(h[..., None], 0.4, training=True)[
        ..., 0
    ].tanh(),
    "stochastic depth": lambda h: (
        h + h.tanh() * (0.7 + torch.rand(len(h), 1)).floor()
    ).tanh(),
    "mask in place": lambda h: (h * torch.empty(len(h), 1).bernoulli_(0.7)).tanh(),
    "random rows": lambda h: h[torch.randint(len(h), (3,))].tanh(),
}


@pytest.mark.parametrize("name", [*STAY, *MOVE])
def test_units_that_meet_random_numbers_of_their_own_stay(name: str) -> None:
    torch.manual_seed(0)
    net, x = Between(STAY.get(name) or MOVE[name]), torch.randn(4, 3)
    symmetry = quietly(net, x)
    assert symmetry.permutations.factors == (
        {"b": 4} if name in STAY else {"a": 6, "b": 4}
    )
    result = verify(symmetry, net, x, trials=3)
    assert result
    assert result.error < 1e-6


NOISE = {
    "normal": lambda h: h + torch.randn_like(h),
    "uniform in place": lambda h: h + torch.empty_like(h).uniform_(-2, 2),
    "exponential": lambda h: h * torch.empty_like(h).exponential_(2.0),
    "dropout": lambda h: F.dropout(h, 0.3),
    "leaky": lambda h: F.rrelu(h, training=True),
}


@pytest.mark.parametrize("name", NOISE)
def test_noise_of_train_mode_alone_breaks_no_symmetry(name: str) -> None:
    class Regularised(Between):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h = NOISE[name](h) if self.training else F.leaky_relu(h)
            return self.out(torch.relu(self.b(h)))

    net, x = Regularised(torch.relu), torch.randn(4, 3)
    assert quietly(net, x).permutations.factors == {"a": 6, "b": 4}
    # Train mode is still compared: a layer that it alone uses is missed if it doesn't
    # move.
    axes = {"a.weight": ("a", None), "a.bias": ("a",)}
    assert (
        verify(
            Symmetry(ps.Group.declare(axes, dict(net.named_parameters()))), net, x
        ).error
        > 1e-3
    )


def test_operators_that_draw_and_compute_from_their_operands_are_taken_apart() -> None:
    def attended(h: Tensor) -> Tensor:
        # two heads of three units, of queries, keys and values alike
        heads = h.view(1, 4, 2, 3).transpose(1, 2)
        h = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            heads, heads, heads
        )[0]
        return h.transpose(1, 2).reshape(4, 6)

    net, x = Between(attended), torch.randn(4, 3)
    symmetry = find_symmetry(net, x, verify=False)
    assert symmetry.permutations.log_order() == pytest.approx(math.log(2 * 6**2 * 24))
    assert verify(symmetry, net, x)


def test_means_of_noise_are_those_of_many_draws() -> None:
    draws = {
        "randn": lambda n: torch.randn(n),
        "rand": lambda n: torch.rand(n),
        "normal": lambda n: torch.empty(n).normal_(2.0, 0.5),
        "uniform": lambda n: torch.empty(n).uniform_(-1.0, 4.0),
        "exponential": lambda n: torch.empty(n).exponential_(0.5),
    }
    for draw in draws.values():
        with Deterministic(torch.float64, noise=False):
            mean = draw(3)
        assert (mean == mean[0]).all()
        sample = draw(100_000)
        # Six standard errors: a false alarm once in 5e8 runs.
        assert (
            abs(float(sample.mean()) - float(mean[0]))
            < 6 * float(sample.std()) / 100_000**0.5
        )


def test_a_unit_chosen_by_numpy_is_dropped_when_another_draw_shows_it() -> None:
    net, x = Between(lambda h: h[:, np.random.permutation(6)]), torch.randn(4, 3)
    with pytest.warns(ps.discovery.BrokenSymmetry):
        symmetry = find_symmetry(net, x)
    assert symmetry.permutations.factors == {"b": 4}


class Unseeded(nn.Module):
    """Its noise comes from no generator that can be seeded."""

    def __init__(self, size: float):
        super().__init__()
        self.net, self.size = (
            nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)),
            size,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.size * (time.perf_counter_ns() % 1009)


def test_what_cannot_be_drawn_again_is_inconclusive_and_what_the_rules_prove_is_kept() -> (
    None
):
    net, x = Unseeded(1.0), torch.randn(4, 3)
    with pytest.warns(
        ps.discovery.UnverifiedSymmetry, match="inconclusive: the network is random"
    ):
        symmetry = find_symmetry(net, x)
    alone = find_symmetry(net.net, x)
    assert symmetry.log_order() == alone.log_order() > 0
    assert [
        (axis.site, axis.dim)
        for one in symmetry.group.units.values()
        for axis in one.axes
    ] == [
        (f"net.{axis.site}", axis.dim)
        for one in alone.group.units.values()
        for axis in one.axes
    ]
    with pytest.raises(ps.discovery.InconclusiveError):
        verify(symmetry, net, x)


def test_generators_are_left_as_they_were() -> None:
    net, x = (
        Between(lambda h: (h * np.random.rand() * random.random()).tanh()),
        torch.randn(4, 3),
    )
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    quietly(net, x)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2][1]).all()
