"""Enumeration: discrete sites are summed out as brute force sums them, in values and in
gradients.
"""

from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.ops.indexing import Vindex
from pyro.poutine.util import site_is_subsample
from scipy import stats
from torch import Tensor

from pyro_symmetric.density import enumeration
from pyro_symmetric.mcmc import HMC, Density, sample
from pyro_symmetric.posterior.predict import predict

Y = torch.tensor([0.3, -1.2, 2.0, 0.8], dtype=torch.float64)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mixture(y: Tensor) -> None:
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 3.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(shares))
        pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)


def hidden_markov(y: Tensor) -> None:
    moves = pyro.sample("moves", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    z = 0
    for t in pyro.markov(range(len(y))):
        z = pyro.sample(f"z{t}", dist.Categorical(moves[z]))
        pyro.sample(f"y{t}", dist.Normal(locs[z], 1.0), obs=y[t])


def chains_in_a_plate(y: Tensor) -> None:
    """Two series side by side, of which the second is shorter."""
    moves = pyro.sample("moves", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("series", 2):
        z = torch.tensor(0)
        for t in pyro.markov(range(2)):
            with poutine.mask(mask=torch.tensor([True, t < 1])):
                z = pyro.sample(f"z{t}", dist.Categorical(moves[z]))
                pyro.sample(
                    f"y{t}", dist.Normal(locs[z], 1.0), obs=y[2 * t : 2 * t + 2]
                )


def dependent(y: Tensor) -> None:
    """A global discrete site, two local ones of which one depends on the other and on
    the global one, nested plates.
    """
    logit = pyro.sample("logit", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
    count = pyro.sample("count", dist.Binomial(2, logits=logit))
    with pyro.plate("outer", 2, dim=-1):
        a = pyro.sample("a", dist.Bernoulli(torch.sigmoid(logit + count)))
        with pyro.plate("inner", 2, dim=-2):
            b = pyro.sample("b", dist.Bernoulli(torch.sigmoid(logit - a)))
            pyro.sample("y", dist.Normal(a + 2 * b - count, scale), obs=y.reshape(2, 2))


def one_hot(y: Tensor) -> None:
    logits = pyro.sample("logits", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 2):
        k = pyro.sample("k", dist.OneHotCategorical(logits=logits))
        pyro.sample("y", dist.Normal((k * torch.arange(3.0)).sum(-1), 1.0), obs=y[:2])


def outside_of_plates(y: Tensor) -> None:
    k = pyro.sample("k", dist.Bernoulli(0.3))
    locs = pyro.sample("locs", dist.Normal(0.0, 2.0).expand([2]))
    pyro.sample("y", dist.Normal(locs[0] + k * locs[1], 1.0), obs=y)


def two_indices(y: Tensor) -> None:
    table = pyro.sample("table", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    i = pyro.sample("i", dist.Categorical(torch.tensor([0.3, 0.7])))
    with pyro.plate("data", len(y)):
        j = pyro.sample("j", dist.Categorical(table[i].exp()))
        pyro.sample("y", dist.Normal(Vindex(table)[i, j], 1.0), obs=y)


def law_masked(y: Tensor) -> None:
    """A site whose values weigh alike where the mask leaves it out."""
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("data", 4):
        law = dist.Categorical(torch.tensor([0.3, 0.7])).mask(
            torch.tensor([True, True, False, True])
        )
        z = pyro.sample("z", law)
        pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)


MODELS = {
    "mixture": mixture,
    "mixture, annotated": config_enumerate(mixture),
    "mixture, annotated as sequential": config_enumerate(mixture, "sequential"),
    "hidden Markov": hidden_markov,
    "dependent": dependent,
    "one-hot": one_hot,
    "two indices": two_indices,
    "outside of plates": outside_of_plates,
    "series, masked": chains_in_a_plate,
    "law, masked": law_masked,
}


def brute_force(model, weights: dict[str, Tensor]) -> Tensor:
    """The log of the sum of the joint density over all assignments, each a run of the
    model by itself.
    """
    trace = poutine.trace(poutine.condition(model, data=weights)).get_trace(Y)
    choices = []
    for name, site in trace.iter_stochastic_nodes():
        fn = site["fn"]
        if not fn.has_enumerate_support:
            continue
        values = fn.enumerate_support(expand=False).reshape(-1, *fn.event_shape)
        every = product(values, repeat=fn.batch_shape.numel())
        choices.append(
            [
                (name, torch.stack(entry).reshape(fn.batch_shape + fn.event_shape))
                for entry in every
            ]
        )
    with pyro.validation_enabled(False):
        joint = [
            poutine.trace(
                poutine.condition(model, data={**weights, **dict(assignment)})
            )
            .get_trace(Y)
            .log_prob_sum()
            for assignment in product(*choices)
        ]
    return torch.logsumexp(torch.stack(joint), 0)


@pytest.mark.parametrize("name", MODELS)
def test_discrete_sites_are_summed_out_as_by_brute_force(name):
    model = MODELS[name]
    density = Density(model, (Y,))
    assert not any(
        site.startswith(("z", "a", "k", "i", "j"))
        for site in density.layout.site_shapes
    )
    z = torch.randn(
        3, density.dim, generator=torch.Generator(torch.empty(0).device).manual_seed(2)
    )
    energy, gradient = density.energy_and_gradient(z)
    for chain in range(3):
        leaf = z[chain].clone().requires_grad_()
        weights, log_det = density.layout.constrain_with_log_det(leaf)
        expected = -brute_force(model, weights) - log_det
        torch.testing.assert_close(energy[chain], expected)
        torch.testing.assert_close(
            gradient[chain],
            torch.autograd.grad(expected, leaf)[0],
            rtol=1e-7,
            atol=1e-9,
        )
    torch.testing.assert_close(density.energy_and_gradient(z[:1])[0], energy[:1])


def prior_weights(model) -> dict[str, Tensor]:
    trace = poutine.trace(model).get_trace(Y)
    latent = {
        name: site
        for name, site in trace.iter_stochastic_nodes()
        if not site["fn"].has_enumerate_support
    }
    return {
        name: site["value"]
        for name, site in latent.items()
        if not site_is_subsample(site)
    }


@pytest.mark.stochastic
@pytest.mark.parametrize("name", MODELS)
def test_discrete_sites_are_drawn_from_their_joint_posterior(name):
    """Frequencies of whole assignments beside brute force, by chi-squared. False
    alarms: 1e-5 of each case.
    """
    model = MODELS[name]
    torch.manual_seed(1)
    weights, count = prior_weights(model), 4000
    drawn = predict(
        {n: v.expand(count, *v.shape) for n, v in weights.items()},
        model,
        Y,
        kind="discrete",
    )
    names = sorted(drawn)
    rows = torch.cat([drawn[own].double().reshape(count, -1) for own in names], 1)
    rows, found = torch.unique(rows, dim=0, return_counts=True)
    shares, evidence = [], brute_force(model, weights)
    for row in rows:
        parts = row.split([drawn[own][0].numel() for own in names])
        values = {
            own: part.reshape(drawn[own].shape[1:])
            for own, part in zip(names, parts, strict=True)
        }
        values = {own: value.to(drawn[own].dtype) for own, value in values.items()}
        joint = (
            poutine.trace(poutine.condition(model, data={**weights, **values}))
            .get_trace(Y)
            .log_prob_sum()
        )
        shares.append((joint - evidence).exp())
    expected = count * torch.stack(shares)
    often = expected > 5
    observed = torch.cat([found[often], count - found[often].sum()[None]]).double()
    wanted = torch.cat([expected[often], count - expected[often].sum()[None]])
    kept = wanted > 5
    statistic = ((observed - wanted) ** 2 / wanted)[kept].sum().item()
    assert often.any()
    assert stats.chi2.sf(statistic, max(1, int(kept.sum()) - 1)) > 1e-5


def test_what_depends_on_drawn_discrete_sites_is_computed_with_them():
    def model(y: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            loc = pyro.deterministic("loc", locs[z.long()])
            pyro.sample("y", dist.Normal(loc, 0.1), obs=y)

    locs = torch.tensor([[0.3, 2.0], [-1.2, 0.8]])
    drawn = predict({"locs": locs}, model, Y[:3], kind="discrete")
    # the closer one, by ten deviations
    assert torch.equal(drawn["z"], torch.tensor([[0.0, 0, 1], [1, 0, 1]]))
    assert torch.equal(drawn["loc"], locs.gather(1, drawn["z"].long()))


def coins(y: Tensor | None = None) -> None:
    shares = pyro.sample("shares", dist.Beta(torch.ones(2), 1.0).to_event(1))
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Bernoulli(0.4))
        pyro.sample("y", dist.Bernoulli(shares[z.long()]), obs=y)


def test_impossible_data_are_refused():
    shares, y = (
        torch.tensor([[0.2, 0.8], [torch.nan, 0.8]]),
        torch.tensor([0.0, 1.0, 0.0]),
    )
    with pytest.raises(
        ValueError, match="of 2 draws, 1 leave the data no possible values"
    ):
        predict({"shares": shares}, coins, y, kind="discrete")


def test_a_long_chain_costs_no_more_than_its_length():
    """Against the forward recursion, over 60 steps: 2 ** 60 assignments."""
    y = torch.sin(torch.arange(60.0))
    density = Density(hidden_markov, (y,))
    z = torch.randn(
        2, density.dim, generator=torch.Generator(torch.empty(0).device).manual_seed(4)
    ).requires_grad_()
    weights, log_det = density.layout.constrain_with_log_det(z)
    moves, locs = weights["moves"], weights["locs"]
    log_prior = dist.Dirichlet(torch.ones(2, 2)).to_event(1).log_prob(moves)
    log_prior = log_prior + dist.Normal(torch.zeros(2), 2.0).to_event(1).log_prob(locs)
    forward = moves[:, 0].log() + dist.Normal(locs, 1.0).log_prob(y[0])
    for value in y[1:]:
        forward = torch.logsumexp(forward[:, :, None] + moves.log(), 1) + dist.Normal(
            locs, 1.0
        ).log_prob(value)
    expected = -(log_prior + forward.logsumexp(-1) + log_det)
    energy, gradient = density.energy_and_gradient(z.detach())
    torch.testing.assert_close(energy, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), z)[0])


def test_rows_of_a_mini_batch_count_with_the_log_of_their_sum():
    """Not with a power of each assignment's density: the estimate over all mini-batches
    is the energy itself.
    """

    def in_parts(y: Tensor) -> None:
        shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("components", 3):
            locs = pyro.sample("locs", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y), subsample_size=2) as rows:
            z = pyro.sample("z", dist.Categorical(shares))
            pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y[rows])

    whole, parts = Density(mixture, (Y,)), Density(in_parts, (Y,), subsampled=True)
    z = torch.randn(1, whole.dim).expand(6, -1)
    batches = torch.combinations(torch.arange(4), 2)
    energy, gradient = parts.energy_and_gradient(z, {"data": batches})
    right, slope = whole.energy_and_gradient(z[:1])
    torch.testing.assert_close(energy.mean(0, keepdim=True), right)
    torch.testing.assert_close(gradient.mean(0, keepdim=True), slope)


def test_deterministic_sites_that_depend_on_summed_ones_are_left_out_with_a_warning():
    def model(y: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.deterministic("twice", 2 * locs)
        with pyro.plate("data", 2):  # drawn values often have the mean of all values
            k = pyro.sample("k", dist.Bernoulli(0.5))
            pyro.deterministic("shifted", locs[0] + k)
            pyro.sample("y", dist.Normal(locs[k.long()], 1.0), obs=y[:2])
        pyro.deterministic("average", locs[k.long()].mean())

    with pytest.warns(
        UserWarning, match=r"\['shifted', 'average'\] depend on discrete sites"
    ):
        posterior = sample(
            HMC(model),
            Y,
            num_samples=5,
            num_warmup=5,
            num_chains=2,
            seed=0,
            progress=False,
        )
    assert set(posterior.samples) == {"locs", "twice"}
    torch.testing.assert_close(
        posterior.samples["twice"], 2 * posterior.samples["locs"]
    )


# what is refused ----------------------------------------------------------------------


def all_at_once(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    total = sum(pyro.sample(f"k{i}", dist.Bernoulli(p)) for i in range(40))
    pyro.sample("y", dist.Normal(total, 1.0), obs=y[0])


def branching(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    k = pyro.sample("k", dist.Bernoulli(p))
    pyro.sample("y", dist.Normal(1.0 if k > 0 else p, 1.0), obs=y[0])


def without_plate(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    k = pyro.sample("k", dist.Bernoulli(p.expand(4)))
    pyro.sample("y", dist.Normal(k, 1.0), obs=y)


def added_up(y: Tensor) -> None:
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Bernoulli(0.3))
    pyro.factor("fit", dist.Normal(locs[k.long()], 1.0).log_prob(y).sum())


def product_outside(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("data", 3):
        u, v = (
            pyro.sample("u", dist.Bernoulli(p)),
            pyro.sample("v", dist.Bernoulli(0.4)),
        )
    pyro.sample("y", dist.Normal((u * v).sum(-1), 1.0), obs=y[0])


def mean_inside(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("data", 3):
        u = pyro.sample("u", dist.Bernoulli(p))
        pyro.sample("y", dist.Normal(u + u.mean(-1, keepdim=True), 1.0), obs=y[:3])


def maximum_outside(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("data", 3):
        u = pyro.sample("u", dist.Bernoulli(p))
    pyro.sample("y", dist.Normal(u.max(-1)[0], 1.0), obs=y[0])


def sum_in_other_plate(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("data", 3):
        u = pyro.sample("u", dist.Bernoulli(p))
    with pyro.plate("others", 2):
        pyro.sample("y", dist.Normal(u.sum(-1), 1.0), obs=y[:2])


def sum_over_inner_plate(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("outer", 2, dim=-2):
        u = pyro.sample("u", dist.Bernoulli(p))
        with pyro.plate("inner", 3, dim=-1):
            v = pyro.sample("v", dist.Bernoulli(p))
        loc = u + v.sum(-1, keepdim=True)
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y[:2, None])


def plate_forgotten(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("data", 4):
        u = pyro.sample("u", dist.Bernoulli(p))
    pyro.sample("y", dist.Normal(u, 1.0), obs=y)


def sharp_posterior(y: Tensor) -> None:
    """Whose likely assignments are the same throughout the plate."""
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("data", 3):
        u = pyro.sample("u", dist.Bernoulli(p))
        pyro.sample("x", dist.Normal(u, 1e-3), obs=torch.ones(3))
        centred = u - u.mean(-1, keepdim=True)
        pyro.sample("y", dist.Normal(centred, 1.0), obs=y[:3])


def weighted(y: Tensor) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with (
        pyro.plate("data", len(y)),
        poutine.scale(scale=torch.linspace(0.5, 2.0, len(y))),
    ):
        k = pyro.sample("k", dist.Bernoulli(0.3))
        pyro.sample("y", dist.Normal(loc + k, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (added_up, "'k' can't be summed out: the model has another density"),
        (product_outside, "'u', 'v' can't be summed out: the model has another"),
        (mean_inside, "'u' can't be summed out: the model has another density"),
        (maximum_outside, "'u' can't be summed out: the model has another density"),
        (sum_in_other_plate, "'u' can't be summed out: the model has another density"),
        (sum_over_inner_plate, "'u', 'v' can't be summed out: the model has another"),
        (plate_forgotten, "'u' can't be summed out: the model has another density"),
        (sharp_posterior, "'u' can't be summed out: the model has another density"),
        (weighted, "only supports scalar poutine.scale"),
        (all_at_once, "'k0', 'k1', 'k2' can't be summed out"),
        (branching, "'k' can't be summed out.*torch.where"),
        (without_plate, r"'k' has batch shape \(4,\).* lie in no pyro.plate"),
    ],
)
def test_discrete_sites_that_cannot_be_summed_out_are_named(
    model, message, monkeypatch
):
    monkeypatch.setattr(enumeration, "MOST_ENTRIES", 2**16)
    with pytest.raises(ValueError, match=message):
        Density(model, (Y,))
