"""Site checks: values count once, and densities are zero outside of supports.

Right values are written out by ``scipy`` and plain sums; what can't be right is
refused by the name of its site.
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import stats
from torch import Tensor

from pyro_symmetric import NUTS, BayesianModel, Group, log_joint, sample, verify_model
from pyro_symmetric.density import Density
from pyro_symmetric.density.eager import require_data
from pyro_symmetric.mcmc.starts import starting_points

X = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
Y = 3 * X[:, 0] + 0.1 * torch.sin(7 * X[:, 0])


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# values that count more than once -----------------------------------------------------


def slope() -> Tensor:
    return pyro.sample("w", dist.Normal(0.0, 10.0))


def in_plate() -> None:
    w = slope()
    with pyro.plate("data", 30):
        pyro.sample("y", dist.Normal(X * w, 0.5), obs=Y)


def without_plate() -> None:
    pyro.sample("y", dist.Normal(X * slope(), 0.5), obs=Y)


def column_of_data() -> None:
    w = slope()
    with pyro.plate("data", 30):
        pyro.sample("y", dist.Normal(X[:, 0] * w, 0.5), obs=Y[:, None])


def column_of_events() -> None:
    w = slope()
    with pyro.plate("data", 30):
        pyro.sample("y", dist.Normal(X * w, 0.5).to_event(1), obs=Y)


def column_of_factors() -> None:
    w = slope()
    with pyro.plate("data", 30):
        pyro.factor("y", dist.Normal(X * w, 0.5).log_prob(Y[:, None]))


def other_plate() -> None:
    w = slope()
    with pyro.plate("data", 30, dim=-2):
        pyro.sample("y", dist.Normal(X[:, 0] * w, 0.5), obs=Y)


def one_value() -> None:
    pyro.sample("y", dist.Normal(X[:, 0] * slope(), 0.5), obs=Y[0])


def short_event() -> None:
    loc = X[:3, 0] * slope()
    pyro.sample("y", dist.MultivariateNormal(loc, torch.eye(3)), obs=Y[:1])


def scaled() -> None:
    w = slope()
    with poutine.scale(scale=torch.ones(30)):
        pyro.sample("y", dist.Normal(w, 0.5), obs=Y[0])


def masked() -> None:
    w = slope()
    with poutine.mask(mask=torch.ones(30, dtype=torch.bool)):
        pyro.sample("y", dist.Normal(w, 0.5), obs=Y[0])


COUNTED_OFTEN = [
    in_plate,
    without_plate,
    column_of_data,
    column_of_events,
    column_of_factors,
    other_plate,
    one_value,
    short_event,
    scaled,
    masked,
]


@pytest.mark.parametrize("model", COUNTED_OFTEN)
def test_values_that_broadcasting_repeats_are_refused(model):
    with pytest.raises(ValueError, match=r"site 'y' has .* more than once"):
        Density(model)


def test_a_declaration_of_a_model_that_repeats_its_data_is_not_verified():
    group = Group.declare({"w": ("k",)}, {"w": torch.Size([2])})

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(X * w.sum(), 0.5), obs=Y)

    with pytest.raises(ValueError, match=r"site 'y' has .* more than once"):
        verify_model(group, model)


def rows_without_plate() -> None:
    pyro.sample("y", dist.Normal(X[:, 0] * slope(), 0.5), obs=Y)


def rows_in_plate() -> None:
    w = slope()
    with pyro.plate("data", 30):
        pyro.sample("y", dist.Normal(X[:, 0] * w, 0.5), obs=Y)


def rows_in_events() -> None:
    pyro.sample("y", dist.Normal(X[:, 0] * slope(), 0.5).to_event(1), obs=Y)


def factors() -> None:
    pyro.factor("y", dist.Normal(X[:, 0] * slope(), 0.5).log_prob(Y))


def table_of_rows() -> None:
    w = slope()
    with pyro.plate("data", 6, dim=-1):
        pyro.sample(
            "y", dist.Normal((X[:, 0] * w).reshape(5, 6), 0.5), obs=Y.reshape(5, 6)
        )


def masked_rows() -> None:
    w = slope()
    y = torch.cat([Y, torch.full((3,), torch.nan)])
    x = torch.cat([X[:, 0], torch.zeros(3)])
    with pyro.plate("data", 33), poutine.mask(mask=~y.isnan()):
        pyro.sample("y", dist.Normal(x * w, 0.5), obs=y.nan_to_num())


@pytest.mark.parametrize(
    "model",
    [
        rows_without_plate,
        rows_in_plate,
        rows_in_events,
        factors,
        table_of_rows,
        masked_rows,
    ],
)
def test_data_that_count_once_have_the_density_of_a_plain_sum(model):
    """And so does its gradient; Pyro's SVI asks for plates, for no other number."""
    w = torch.tensor([[2.9], [-0.4]])
    right = -stats.norm.logpdf(w.numpy()[:, 0], 0, 10) - stats.norm.logpdf(
        Y.numpy(), X.numpy()[:, 0] * w.numpy(), 0.5
    ).sum(1)
    slopes = w[:, 0] / 100 - 4 * ((Y - w * X[:, 0]) * X[:, 0]).sum(1)
    energy, gradient = Density(model).energy_and_gradient(w)
    torch.testing.assert_close(energy, torch.as_tensor(right))
    torch.testing.assert_close(gradient[:, 0], slopes)


def test_latent_values_without_to_event_have_one_density_each():
    def model() -> None:
        a = pyro.sample("a", dist.Normal(torch.zeros(2, 3), 2.0))
        with pyro.plate("columns", 3):
            b = pyro.sample("b", dist.Exponential(torch.ones(2, 3)))
        pyro.sample("y", dist.Normal((a * b).sum(), 1.0), obs=Y[0])

    weights = {"a": torch.randn(4, 2, 3), "b": torch.rand(4, 2, 3)}
    total = (weights["a"] * weights["b"]).sum((1, 2))
    right = (
        stats.norm.logpdf(weights["a"], 0, 2).sum((1, 2))
        - weights["b"].sum((1, 2)).numpy()
        + stats.norm.logpdf(Y[0].item(), total)
    )
    torch.testing.assert_close(log_joint(model)(weights), torch.as_tensor(right))


def test_a_plate_may_repeat_a_datum_as_it_says():
    def model() -> None:
        w = slope()
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(w, 0.5), obs=Y[0])

    right = stats.norm.logpdf(1.0, 0, 10) + 5 * stats.norm.logpdf(Y[0].item(), 1, 0.5)
    assert log_joint(model)({"w": torch.tensor(1.0)}).item() == pytest.approx(right)


# data outside of their support --------------------------------------------------------


IMPOSSIBLE = {
    "Bernoulli of 3": (lambda a: dist.Bernoulli(logits=a), 3.0),
    "Bernoulli of a share": (lambda a: dist.Bernoulli(logits=a), 0.5),
    "Exponential of -1": (lambda a: dist.Weibull(a.exp(), 2.0), -1.0),
    "Geometric of -2": (lambda a: dist.Geometric(logits=a), -2.0),
    "Poisson of 1.5": (lambda a: dist.Poisson(a.exp()), 1.5),
    "Beta of 1.5": (lambda a: dist.Beta(a.exp(), 1.0), 1.5),
    "label -1": (lambda a: dist.Categorical(logits=a * torch.ones(2)), -1.0),
    "label 2": (lambda a: dist.Categorical(logits=a * torch.ones(2)), 2.0),
    "shares of 1.2": (lambda a: dist.Dirichlet(a.exp() * torch.ones(2)), [0.5, 0.7]),
    "half hot": (
        lambda a: dist.OneHotCategorical(logits=a * torch.ones(2)),
        [0.5, 0.5],
    ),
    "long factor": (lambda a: dist.LKJCholesky(2, a.exp()), [[1.0, 0], [0.5, 0.5]]),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_data_outside_of_the_support_are_refused(name):
    make, value = IMPOSSIBLE[name]

    def model() -> None:
        pyro.sample("y", make(pyro.sample("a", dist.Normal(0.0, 1.0))), obs=value)

    value = torch.as_tensor(value)
    with pytest.raises(ValueError, match=r"'y' holds .* outside of its support"):
        Density(model)


def test_masked_rows_and_counts_of_other_trials_are_possible_data():
    counts, flags = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 7.0, 0.0])

    def model() -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("c", dist.Multinomial(logits=torch.stack([a, -a])), obs=counts)
        with pyro.plate("data", 3), poutine.mask(mask=flags < 2):
            pyro.sample("y", dist.Bernoulli(logits=a), obs=flags)

    right = (
        stats.norm.logpdf(0.3)
        + stats.binom.logpmf(2, 5, 1 / (1 + math.exp(-0.6)))
        + stats.bernoulli.logpmf([1, 0], 1 / (1 + math.exp(-0.3))).sum()
    )
    assert log_joint(model)({"a": torch.tensor(0.3)}).item() == pytest.approx(right)


def test_data_below_a_latent_bound_have_no_density():
    """The normalised posterior of the scale of a Pareto, by its closed form."""
    y = torch.tensor([1.5, 2.0, 4.0])

    def model() -> None:
        bound = pyro.sample("bound", dist.Uniform(0.1, 3.0))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Pareto(bound, 2.0), obs=y)

    bounds = torch.tensor([0.5, 1.4, 1.6, 2.9])
    right = [stats.pareto.logpdf(y, 2, scale=b).sum() for b in bounds]
    found = log_joint(model)({"bound": bounds})
    torch.testing.assert_close(found, torch.tensor(right) - math.log(2.9))


class Flips:
    """A user's likelihood of two classes by one output."""

    temperature = 1.0

    def latents(self, like):
        return {}

    def distribution(self, outputs, latents):
        return dist.Bernoulli(logits=outputs.squeeze(-1))

    def targets(self, y):
        return y

    def mean(self, outputs):
        return outputs.sigmoid()


def test_targets_outside_of_a_likelihoods_support_are_refused():
    net = torch.nn.Linear(1, 1)
    model, labels = BayesianModel(net, likelihood=Flips()), (X[:, 0] > 0).double()
    require_data(model, X, labels)
    for wrong in (labels * 3, labels - 1, labels + 0.5):
        with pytest.raises(ValueError, match="outside of the support"):
            Density(model, (X, wrong))
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="y contains NaN or infinite"):
            Density(BayesianModel(net, likelihood="gaussian"), (X, Y * value))


# weights outside of their support -----------------------------------------------------


LATENT = {
    "simplex": (dist.Dirichlet(torch.ones(3)), [0.2, 0.3, 0.5], [0.5, 0.7, 0.1]),
    "positive": (dist.Gamma(1.0, 1.0), 1.0, -1.0),
    "log-normal at 0": (dist.LogNormal(0.0, 1.0), 1.0, 0.0),
    "interval": (dist.Uniform(2.0, 3.0), 2.5, 3.1),
    "unit interval": (dist.Beta(1.0, 1.0), 1.0, 1.2),
    "half-line": (dist.Pareto(1.0, 1.0), 2.0, 0.5),
    "factor of correlations": (
        dist.LKJCholesky(2, 1.0),
        [[1.0, 0.0], [0.0, 1.0]],
        [[1.0, 0.0], [0.9, 0.9]],
    ),
    "correlations": (
        dist.LKJ(2, 1.0),
        [[1.0, 0.3], [0.3, 1.0]],
        [[1.0, 2.0], [2.0, 1.0]],
    ),
    "scaled correlations": (
        dist.LKJ(2, 1.0),
        [[1.0, 0.3], [0.3, 1.0]],
        [[2.0, 0.0], [0.0, 2.0]],
    ),
    "ordered": (
        dist.TransformedDistribution(
            dist.Normal(torch.zeros(2), 1.0).to_event(1),
            dist.transforms.OrderedTransform(),
        ),
        [1.0, 2.0],
        [2.0, 1.0],
    ),
    "circle": (dist.VonMises(0.0, 1.0), 3.0, 4.0),
}


@pytest.mark.parametrize("name", LATENT)
def test_the_density_is_zero_outside_of_a_support(name):
    prior, inside, outside = LATENT[name]
    values = torch.tensor([inside, outside, inside])
    density = log_joint(lambda: pyro.sample("a", prior))
    expected = prior.log_prob(values[0])
    found = density({"a": values})
    torch.testing.assert_close(found[[0, 2]], expected.expand(2))
    assert found[1] == -math.inf
    single = density({"a": values.float()})
    torch.testing.assert_close(single[[0, 2]], expected.float().expand(2))
    assert density({"a": values * math.nan}).isnan().all()


def test_a_simplex_of_many_shares_is_one_in_single_precision():
    prior = dist.Dirichlet(torch.ones(2000))
    shares = prior.sample((20,)).float()
    assert log_joint(lambda: pyro.sample("a", prior))({"a": shares}).isfinite().all()


# what is said -------------------------------------------------------------------------


def linear(hidden: dist.TorchDistribution):
    def model() -> None:
        z, a = pyro.sample("z", hidden), pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(5 * z + a, 1.0), obs=Y[0])

    return poutine.block(model, hide=["z"])


@pytest.mark.parametrize("hidden", [dist.Normal(0.0, 1.0), dist.Bernoulli(0.2)])
def test_sites_that_poutine_block_hides_are_named(hidden):
    with pytest.raises(ValueError, match=r"sites \['z'\] anew.*poutine.block"):
        Density(linear(hidden))


def test_a_hidden_site_that_is_the_only_one_is_named():
    def model() -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=Y[0])

    with pytest.raises(ValueError, match=r"no latent site but \['z'\], which poutine"):
        Density(poutine.block(model, hide=["z"]))


def test_hidden_sites_without_effect_on_the_density_may_stay():
    def model() -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with poutine.block():
            pyro.sample("replicate", dist.Normal(a, 1.0))

    with pytest.warns(RuntimeWarning, match="random operation"):
        density = Density(model)
    right = -stats.norm.logpdf([0.0, 2.0])
    found = density.energy(torch.tensor([[0.0], [2.0]]))
    torch.testing.assert_close(found, torch.as_tensor(right))


def test_bounds_that_a_support_does_not_tell_are_told():
    """The first of two ordered values is uniform in (0, 1), the log of their distance
    as well, but the support are all ordered values."""

    def model() -> None:
        uniforms = dist.Uniform(torch.zeros(2), 1.0).to_event(1)
        ordered = dist.transforms.OrderedTransform()
        pyro.sample("a", dist.TransformedDistribution(uniforms, ordered))

    with pytest.warns(RuntimeWarning, match=r"of 2 entries of 'a' and ends at bounds"):
        starting_points(Density(model), 4)


def test_improper_entries_are_told():
    def model() -> None:
        improper = dist.ImproperUniform(dist.constraints.real, (), (2,))
        a = pyro.sample("a", improper)
        pyro.sample("y", dist.Normal(a[0], 1.0), obs=Y[0])

    with pytest.warns(RuntimeWarning, match=r"doesn't depend on 1 of 2 entries of 'a'"):
        starting_points(Density(model), 4)


@pytest.mark.filterwarnings("ignore:the chains disagree")
@pytest.mark.stochastic
@pytest.mark.parametrize(("loc", "told"), [(0.0, False), (3.1, True)])
def test_angles_at_the_cut_are_told(loc, told, recwarn):
    """A mode of deviation 0.27 at 0 has no draws near pi, one at 3.1 has all of them:
    false alarms need a draw 10 deviations away."""
    sample(
        NUTS(lambda: pyro.sample("a", dist.VonMises(loc, 15.0))),
        num_samples=100,
        num_warmup=100,
        num_chains=2,
        progress=False,
    )
    messages = [str(warning.message) for warning in recwarn]
    assert any("the angle 'a' lie at pi" in message for message in messages) == told
