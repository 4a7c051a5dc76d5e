"""A group that is declared for the model of a posterior is compared with that model wherever it changes results."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric import Group, Posterior

DATA = torch.cat([torch.randn(40, generator=torch.Generator().manual_seed(0)) + centre for centre in (-2.0, 2.0)])
EXCHANGE = Group.declare({"locs": ("k",)}, {"locs": torch.zeros(2)})


def mixture(data, weights):
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 1.0)), obs=data)


def drawn(*weights: float) -> Posterior:
    """Chains in either order of the components, which a posterior knows the model of."""
    locs = torch.tensor([-2.0, 2.0]) + 0.1 * torch.randn(4, 150, 2)
    locs[2:] = locs[2:].flip(-1)
    return Posterior({"locs": locs}, kind="chains").attach(mixture, DATA, torch.tensor(weights))


CALLS = {
    "diagnose": lambda posterior: ps.diagnose(posterior, EXCHANGE),
    "summary": lambda posterior: ps.summary(posterior, EXCHANGE, progress=False),
    "align_many": lambda posterior: ps.align_many(posterior, EXCHANGE, progress=False),
    "common_frame": lambda posterior: ps.common_frame(posterior, posterior, EXCHANGE),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_declared_exchange_of_unequal_components_is_refused(call):
    with pytest.raises(ValueError, match=r"not invariant under the units \['k'\].*verify_model|verify_model"):
        call(drawn(0.48, 0.52))
    call(drawn(0.5, 0.5))


@pytest.mark.parametrize(("spread", "expected"), [(1.0, "pass"), (1.5, "unknown")])
def test_copies_that_lie_far_apart_hide_no_temperature(spread, expected):
    modes = torch.tensor([[-20.0, 20.0], [20.0, -20.0]])

    def two_modes():
        pyro.sample(
            "locs", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(modes, 1.0).to_event(1))
        )

    generator = torch.Generator().manual_seed(0)
    noise = spread * torch.randn(8, 250, 2, generator=generator)
    posterior = Posterior({"locs": modes.repeat(4, 1)[:, None] + noise}, kind="chains").attach(two_modes)
    assert ps.diagnose(posterior)["temperature"].status == "unknown"
    diagnosis = ps.diagnose(posterior, EXCHANGE, num_draws=2_000)
    assert diagnosis["temperature"].status == expected
    assert diagnosis.ok == (expected == "pass")
