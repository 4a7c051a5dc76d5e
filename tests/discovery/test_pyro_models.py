"""Hand-written Pyro models around a network: one symmetry for the model's sites, its
prior, and its guides.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn

from pyro_symmetric.alignment import align
from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.model_check import verify_model
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify
from pyro_symmetric.guides import AutoSymmetrized, push_forward, sample_posterior
from pyro_symmetric.models import BayesianModel

Prior = Callable[[str, Tensor], dist.Distribution]


def standard(name: str, parameter: Tensor) -> dist.Distribution:
    return dist.Normal(torch.zeros_like(parameter), 1.0).to_event(parameter.dim())


class Regression(PyroModule):
    """A model as a user of Pyro writes it: a network with priors on its parameters, and
    a likelihood.
    """

    def __init__(self, net: nn.Module, prior: Prior = standard):
        super().__init__()
        self.net = copy.deepcopy(net)
        to_pyro_module_(self.net)
        for prefix, module in self.net.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(
                    module,
                    name,
                    PyroSample(prior(f"{prefix}.{name}", parameter.detach())),
                )

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mean = self.net(x).squeeze(-1)
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, noise), obs=y)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)
    )


def problem() -> tuple[nn.Module, Symmetry, Tensor, Tensor]:
    torch.set_default_dtype(torch.float64)
    net, x = network(), torch.randn(20, 2)
    return net, find_symmetry(net, x).prefixed("net"), x, torch.sin(x.sum(-1))


def fitted(model: Regression, x: Tensor, y: Tensor) -> AutoNormal:
    guide = AutoNormal(
        model, init_scale=0.1, init_loc_fn=pyro.infer.autoguide.init_to_sample
    )
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), Trace_ELBO())
    for _ in range(20):
        svi.step(x, y)
    return guide


def test_the_models_sites_have_the_networks_symmetry() -> None:
    net, symmetry, x, y = problem()
    model = Regression(net)
    assert {site for site in symmetry.site_shapes} < set(fitted(model, x, y).median())
    assert verify_model(symmetry, model, x, y)
    assert symmetry.group.names("flip")


def test_draws_of_its_posterior_move_and_the_density_stays() -> None:
    net, symmetry, x, y = problem()
    model = Regression(net)
    draws = sample_posterior(fitted(model, x, y), (6,))
    moved = symmetry.finite.sample((6,))(draws)

    def log_joint(weights: dict[str, Tensor], i: int) -> float:
        values = {site: value[i] for site, value in weights.items()}
        return float(
            pyro.poutine.trace(pyro.condition(model, values))
            .get_trace(x, y)
            .log_prob_sum()
        )

    for i in range(6):
        assert log_joint(moved, i) == pytest.approx(log_joint(draws, i))
    assert not torch.allclose(moved["net.2.weight"], draws["net.2.weight"])
    forms = [canonicalize(weights, symmetry) for weights in (draws, moved)]
    torch.testing.assert_close(forms[0]["net.2.weight"], forms[1]["net.2.weight"])
    assert torch.equal(forms[1]["noise"], draws["noise"])


def test_guides_of_the_model_are_symmetrised_pushed_forward_and_aligned() -> None:
    net, symmetry, x, y = problem()
    model = Regression(net)
    guide = fitted(model, x, y)
    element = symmetry.permutations.sample()
    pushed = push_forward(guide, element)
    back = push_forward(pushed, align(pushed, guide, symmetry.permutations).element)
    torch.testing.assert_close(back.median(), guide.median())
    symmetrised = AutoSymmetrized(model, symmetry.permutations).setup(x, y)
    loss = SVI(model, symmetrised, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO()).step(
        x, y
    )
    assert math.isfinite(loss)


def test_a_prior_with_its_own_scale_for_each_unit_is_detected_and_named() -> None:
    net, symmetry, x, y = problem()

    def graded(name: str, parameter: Tensor) -> dist.Distribution:
        scale = (
            torch.linspace(0.5, 2.0, 4)[:, None]
            if name == "2.weight"
            else torch.ones(())
        )
        return dist.Normal(torch.zeros_like(parameter), scale).to_event(parameter.dim())

    model = Regression(net, graded)
    report = verify_model(symmetry, model, x, y)
    assert not report
    assert [(found.move, found.name) for found in report.broken] == [("permute", "2")]
    assert report.broken[0].sites == ("net.2.weight",)
    with pytest.raises(ValueError, match=r"'2'.*'net\.2\.weight'"):
        AutoSymmetrized(model, symmetry.permutations).setup(x, y)


def test_priors_inside_plates_and_under_other_sites_are_read_off_the_model() -> None:
    """One scale for each unit, itself random: the weights' prior tells units apart
    unless the scales move along.
    """
    symmetry = find_symmetry(
        nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(4, 2)
    )

    def model(shared: bool) -> None:
        with pyro.plate("units", 5):
            scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
            pyro.sample("0.bias", dist.Normal(0.0, 1.0 if shared else scale))
        scale = torch.ones(5) if shared else scale
        pyro.sample(
            "0.weight", dist.Normal(torch.zeros(5, 2), scale[:, None]).to_event(2)
        )
        pyro.sample("2.weight", dist.Normal(torch.zeros(1, 5), 1.0).to_event(2))
        pyro.sample("2.bias", dist.Normal(torch.zeros(1), 1.0).to_event(1))

    assert verify_model(symmetry, model, shared=True)
    (broken,) = verify_model(symmetry, model, shared=False).broken
    assert (broken.move, broken.name, set(broken.sites)) == (
        "permute",
        "0",
        {"0.weight", "0.bias"},
    )


def test_random_networks_are_refused_with_a_word_on_the_plain_one() -> None:
    net, symmetry, x, _ = problem()
    with pytest.raises(
        TypeError, match=r"no parameters \['0\.weight'.*prefixed\('net'\)"
    ):
        find_symmetry(Regression(net).net, x)
    with pytest.raises(ValueError, match="verify_model"):
        verify(symmetry, Regression(net), x)
    found = find_symmetry(BayesianModel(net, likelihood="gaussian"), x)
    assert found.log_order() == symmetry.log_order()
