"""Pyro models with their symmetries by hand: mixtures, hidden Markov models, factor
models, networks written by hand, and models without any.

``find_symmetry`` must find these units and no others. They are written as their number
and the axes along which they lie, ``locs[0]``; a trailing ``-`` marks an axis whose
signs flip, ``x 3`` units inside others. ``not_expressed`` says what a group can't hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from pyro.ops.indexing import Vindex
from torch import Tensor, nn

Units = frozenset[tuple[str, frozenset[str]]]
Model = Callable[..., Any]


class ModelCase(NamedTuple):
    """A model with its symmetry by hand.

    :param units: number and axes of each set of units.
    :param not_expressed: a symmetry that no group holds; ``find_symmetry`` names it.
    """

    name: str
    model: Model
    args: tuple[Any, ...]
    units: Units
    not_expressed: str = ""


def by_hand(*units: tuple[str, str]) -> Units:
    """Return units written as number and axes separated by blanks."""
    return frozenset((number, frozenset(axes.split())) for number, axes in units)


def units_of(symmetry: Any) -> Units:
    """Return the units of a symmetry in the notation of this table."""
    units = list[tuple[str, str]]()
    for one_set in symmetry.group.units.values():
        axes = list[str]()
        for axis in one_set.axes:
            dims = ",".join(map(str, range(axis.dim, axis.dim + axis.span)))
            place = f"{axis.site}[{dims}]" if dims else axis.site
            flips = "flip" in one_set.moves and axis.exponent % 2
            axes.append(place + "-" * flips)
        units.append((one_set.size_text, " ".join(axes)))
    return by_hand(*units)


# data ---------------------------------------------------------------------------------

_generator = torch.Generator().manual_seed(0)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator, dtype=torch.float64)


def _bits(*shape: int) -> Tensor:
    drawn = torch.rand(*shape, generator=_generator, dtype=torch.float64)
    return (drawn > 0.5).double()


ROWS = 3 * _normal(40)
POINTS = _normal(30, 2)
FEATURES, TARGETS = _normal(25, 3), _normal(25)
ANSWERS = _bits(12, 6)
SERIES = _normal(6)


# mixtures -----------------------------------------------------------------------------


def _weights_and_locs(concentration: Tensor) -> tuple[Tensor, Tensor]:
    weights = pyro.sample("weights", dist.Dirichlet(concentration))
    with pyro.plate("components", len(concentration)):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    return weights, locs


def _observe_mixture(x: Tensor, weights: Tensor, locs: Tensor, scale: Any) -> None:
    fn = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scale))
    with pyro.plate("data", len(x)):
        pyro.sample("x", fn, obs=x)


def mixture(x: Tensor) -> None:
    weights, locs = _weights_and_locs(torch.ones(3))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    _observe_mixture(x, weights, locs, scale)


def mixture_with_assignments(x: Tensor) -> None:
    weights, locs = _weights_and_locs(torch.ones(3))
    with pyro.plate("scale_plate", 3):
        scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("x", dist.Normal(locs[z], scales[z]), obs=x)


def uneven_mixture(x: Tensor, concentration: Tensor) -> None:
    weights, locs = _weights_and_locs(concentration)
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("x", dist.Normal(locs[z], 1.0), obs=x)


def mixture_in_the_plane(x: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        sds = pyro.sample("sds", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        factor = pyro.sample("factor", dist.LKJCholesky(2, 1.5))
    components = dist.MultivariateNormal(locs, scale_tril=sds[..., :, None] * factor)
    with pyro.plate("data", len(x)):
        fn = dist.MixtureSameFamily(dist.Categorical(weights), components)
        pyro.sample("x", fn, obs=x)


def mixture_with_parameter(x: Tensor) -> None:
    positive = dist.constraints.positive
    scale = pyro.param("zoo_scale", torch.tensor(1.0), constraint=positive)
    _observe_mixture(x, *_weights_and_locs(torch.ones(3)), scale)


def mixture_with_missing_rows(x: Tensor, is_known: Tensor) -> None:
    weights, locs = _weights_and_locs(torch.ones(3))
    with pyro.plate("data", len(x)), poutine.mask(mask=is_known):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("x", dist.Normal(locs[z], 1.0), obs=x)


def subsampled_mixture(x: Tensor) -> None:
    weights, locs = _weights_and_locs(torch.ones(3))
    fn = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 1.0))
    with pyro.plate("data", len(x), subsample_size=10) as rows:
        pyro.sample("x", fn, obs=x[rows])


def two_mixtures(x: Tensor, y: Tensor) -> None:
    for name, data in (("a", x), ("b", y)):
        weights = pyro.sample(f"weights_{name}", dist.Dirichlet(torch.ones(3)))
        with pyro.plate(f"components_{name}", 3):
            locs = pyro.sample(f"locs_{name}", dist.Normal(0.0, 5.0))
        components = dist.Normal(locs, 1.0)
        with pyro.plate(f"data_{name}", len(data)):
            fn = dist.MixtureSameFamily(dist.Categorical(weights), components)
            pyro.sample(f"x_{name}", fn, obs=data)


def nested_mixture(x: Tensor) -> None:
    outer = pyro.sample("outer", dist.Dirichlet(torch.ones(2)))
    inner = pyro.sample("inner", dist.Dirichlet(torch.ones(2, 3)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2, 3), 5.0).to_event(2))
    log_prob = inner.log() + dist.Normal(locs, 1.0).log_prob(x[:, None, None])
    by_outer = outer.log() + log_prob.logsumexp(-1)
    pyro.factor("likelihood", by_outer.logsumexp(-1).sum())


def labelled_datum(x: Tensor) -> None:
    weights, locs = _weights_and_locs(torch.ones(3))
    pyro.sample("first", dist.Normal(locs[2], 1.0), obs=x[0])
    with pyro.plate("data", len(x) - 1):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("x", dist.Normal(locs[z], 1.0), obs=x[1:])


def ordered_mixture(x: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    base = dist.Normal(torch.zeros(3), 1.0).to_event(1)
    ordered = dist.transforms.OrderedTransform()
    locs = pyro.sample("locs", dist.TransformedDistribution(base, ordered))
    _observe_mixture(x, weights, locs, 1.0)


def stick_breaking(x: Tensor) -> None:
    beta = pyro.sample("beta", dist.Beta(torch.ones(3), 2.0).to_event(1))
    with pyro.plate("components", 4):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    one = torch.ones_like(beta[..., :1])
    weights = torch.cat([beta, one], -1) * torch.cat([one, (1 - beta).cumprod(-1)], -1)
    _observe_mixture(x, weights, locs, 1.0)


def components_in_blocks(x: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    theta = pyro.sample("theta", dist.Normal(torch.zeros(6), 2.0).to_event(1))
    _observe_mixture(x, weights, theta[:3], theta[3:].exp())


def sites_of_a_loop(x: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    locs = [pyro.sample(f"loc_{k}", dist.Normal(0.0, 5.0)) for k in range(3)]
    _observe_mixture(x, weights, torch.stack(locs, -1), 1.0)


def mixture_of_regressions(x: Tensor, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        slopes = pyro.sample("slopes", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    components = dist.Normal(x @ slopes.T, sigma)
    with pyro.plate("data", len(x)):
        fn = dist.MixtureSameFamily(dist.Categorical(weights), components)
        pyro.sample("y", fn, obs=y)


def mixture_of_experts(x: Tensor, y: Tensor) -> None:
    with pyro.plate("experts", 3):
        gate = pyro.sample("gate", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        gate_bias = pyro.sample("gate_bias", dist.Normal(0.0, 1.0))
        slopes = pyro.sample("slopes", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        bias = pyro.sample("bias", dist.Normal(0.0, 1.0))
    which = dist.Categorical(logits=x @ gate.T + gate_bias)
    components = dist.Normal(x @ slopes.T + bias, 1.0)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.MixtureSameFamily(which, components), obs=y)


# states, classes and topics -----------------------------------------------------------


def hidden_markov(x: Tensor) -> None:
    initial = pyro.sample("initial", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("states", 3):
        matrix = pyro.sample("matrix", dist.Dirichlet(torch.ones(3)))
        locs = pyro.sample("locs", dist.Normal(0.0, 3.0))
    state = pyro.sample("z0", dist.Categorical(initial))
    pyro.sample("x0", dist.Normal(locs[state], 1.0), obs=x[0])
    for t in pyro.markov(range(1, len(x))):
        state = pyro.sample(f"z{t}", dist.Categorical(Vindex(matrix)[state]))
        pyro.sample(f"x{t}", dist.Normal(locs[state], 1.0), obs=x[t])


def sticky_hidden_markov(x: Tensor) -> None:
    initial = pyro.sample("initial", dist.Dirichlet(torch.ones(3)))
    concentration = torch.ones(3, 3) + 4 * torch.eye(3)
    matrix = pyro.sample("matrix", dist.Dirichlet(concentration).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    emissions = dist.Normal(locs, 1.0)
    pyro.sample("x", dist.DiscreteHMM(initial.log(), matrix.log(), emissions), obs=x)


def topics(words: Tensor) -> None:
    with pyro.plate("topics", 3):
        topic = pyro.sample("topic", dist.Dirichlet(torch.ones(6)))
    with pyro.plate("documents", 4):
        share = pyro.sample("share", dist.Dirichlet(torch.ones(3) / 3))
        with pyro.plate("words", 8):
            z = pyro.sample("z", dist.Categorical(share))
            pyro.sample("word", dist.Categorical(topic[z]), obs=words)


def latent_classes(answers: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("classes", 3):
        probs = pyro.sample("probs", dist.Beta(torch.ones(6), 1.0).to_event(1))
    with pyro.plate("persons", len(answers)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("answers", dist.Bernoulli(probs[z]).to_event(1), obs=answers)


def block_model(edges: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    rates = pyro.sample("rates", dist.Beta(torch.ones(3, 3), 1.0).to_event(2))
    count = len(edges)
    z = [pyro.sample(f"z{i}", dist.Categorical(weights)) for i in range(count)]
    for i in range(count):
        for j in range(count):
            if i != j:
                edge = dist.Bernoulli(Vindex(rates)[z[i], z[j]])
                pyro.sample(f"edge_{i}_{j}", edge, obs=edges[i, j])


# factors ------------------------------------------------------------------------------


def factor_analysis(x: Tensor) -> None:
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(5, 2), 1.0).to_event(2))
    scores = pyro.sample("scores", dist.Normal(torch.zeros(2, 20), 1.0).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(torch.zeros(5), 1.0).to_event(1))
    pyro.sample("x", dist.Normal((loadings @ scores).T, noise).to_event(2), obs=x)


def relevance_determination(x: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfCauchy(torch.ones(2)).to_event(1))
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(5, 2), tau).to_event(2))
    scores = pyro.sample("scores", dist.Normal(torch.zeros(2, 20), 1.0).to_event(2))
    pyro.sample("x", dist.Normal((loadings @ scores).T, 1.0).to_event(2), obs=x)


def factors_of_two_scales(x: Tensor) -> None:
    scales = torch.tensor([1.0, 2.0])
    prior = dist.Normal(torch.zeros(5, 2), scales).to_event(2)
    loadings = pyro.sample("loadings", prior)
    scores = pyro.sample("scores", dist.Normal(torch.zeros(2, 20), 1.0).to_event(2))
    pyro.sample("x", dist.Normal((loadings @ scores).T, 1.0).to_event(2), obs=x)


def matrix_factorisation(x: Tensor, is_known: Tensor) -> None:
    with pyro.plate("rows", 8):
        u = pyro.sample("u", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("columns", 6):
        v = pyro.sample("v", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    fn = dist.Normal(u @ v.T, 0.5).mask(is_known).to_event(2)
    pyro.sample("x", fn, obs=x)


def item_response(answers: Tensor, discrimination: dist.Distribution) -> None:
    with pyro.plate("items", 6):
        slope = pyro.sample("slope", discrimination)
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0))
    with pyro.plate("persons", 12):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
    logits = ability[:, None] * slope - difficulty
    pyro.sample("answers", dist.Bernoulli(logits=logits).to_event(2), obs=answers)


def item_response_of_two_traits(answers: Tensor) -> None:
    with pyro.plate("items", 6):
        slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0))
    with pyro.plate("persons", 12):
        ability = pyro.sample("ability", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    logits = ability @ slope.T - difficulty
    pyro.sample("answers", dist.Bernoulli(logits=logits).to_event(2), obs=answers)


def triple_product(y: Tensor) -> None:
    a, b, c = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "abc")
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a * b * c, 1.0), obs=y)


def boltzmann_machine(v: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))
    visible = pyro.sample("visible", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    hidden = pyro.sample("hidden", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    def log_weight(v: Tensor) -> Tensor:
        return v @ visible + nn.functional.softplus(v @ w + hidden).sum(-1)

    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4).to(v)
    log_normaliser = log_weight(states).logsumexp(0)
    pyro.factor("likelihood", (log_weight(v) - log_normaliser).sum())


# networks -----------------------------------------------------------------------------


def _gaussian(site: str, *shape: int, scale: float = 1.0) -> Tensor:
    prior = dist.Normal(torch.zeros(shape), scale).to_event(len(shape))
    return pyro.sample(site, prior)


def tanh_network(x: Tensor, y: Tensor) -> None:
    h = torch.tanh(x @ _gaussian("w1", 3, 4) + _gaussian("b1", 4))
    h = torch.tanh(h @ _gaussian("w2", 4, 4) + _gaussian("b2", 4))
    mean = h @ _gaussian("w3", 4) + _gaussian("b3")
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, 0.1), obs=y)


def deep_network(x: Tensor, y: Tensor) -> None:
    h = torch.relu(x @ _gaussian("w1", 8, 16, scale=0.35) + _gaussian("b1", 16))
    for layer in range(2, 6):
        weight = _gaussian(f"w{layer}", 16, 16, scale=0.25)
        h = torch.relu(h @ weight + _gaussian(f"b{layer}", 16))
    mean = h @ _gaussian("w6", 16, scale=0.25)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, 0.1), obs=y)


class ReluNetwork(PyroModule):
    """A network of PyroModules with random parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = PyroModule[nn.Linear](3, 5)
        self.b = PyroModule[nn.Linear](5, 1)
        for layer in (self.a, self.b):
            for name, value in list(layer.named_parameters()):
                prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.dim())
                setattr(layer, name, PyroSample(prior))

    def forward(self, x: Tensor, y: Tensor) -> None:
        mean = self.b(torch.relu(self.a(x))).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.1), obs=y)


# regressions without symmetry, and a prior alone --------------------------------------


def hierarchical(group: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    with pyro.plate("groups", 6):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(theta[group], 1.0), obs=y)


def many_groups(group: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    with pyro.plate("groups", int(group.max()) + 1):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        phi = pyro.sample("phi", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(theta[group], phi[group]), obs=y)


def crossed_effects(i: Tensor, j: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("rows", 4):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("columns", 5):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu + a[i] + b[j], 1.0), obs=y)


def horseshoe(x: Tensor, y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    with pyro.plate("features", 3):
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ (z * scale * tau), 1.0), obs=y)


def softmax_regression(x: Tensor, label: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("label", dist.Categorical(logits=x @ w), obs=label)


def prior_alone() -> None:
    pyro.sample("a", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    pyro.sample("scale", dist.LogNormal(0.0, 1.0))


LABELS = by_hand(("3", "weights[0] locs[0]"))
PAIR = by_hand(("2", "weights[0] locs[0]"))
NOTHING = by_hand()
UNEVEN = torch.tensor([1.0, 2.0, 3.0])
TWO_EVEN = torch.tensor([1.0, 1.0, 5.0])
WORDS = torch.randint(6, (8, 4), generator=_generator)
CLASSES = torch.randint(3, (25,), generator=_generator)
TABLE, KNOWN = _normal(8, 6), _bits(8, 6).bool()
INDEX = torch.arange(18) % 6
HIDDEN = by_hand(*(("16", f"w{i}[1] b{i}[0] w{i + 1}[0]") for i in range(1, 6)))

MODELS = [
    ModelCase("mixture", mixture, (ROWS,), LABELS),
    ModelCase(
        "mixture with assignments",
        mixture_with_assignments,
        (ROWS,),
        by_hand(("3", "weights[0] locs[0] scales[0]")),
    ),
    ModelCase("mixture, Dirichlet(1, 2, 3)", uneven_mixture, (ROWS, UNEVEN), NOTHING),
    ModelCase("mixture, Dirichlet(1, 1, 5)", uneven_mixture, (ROWS, TWO_EVEN), PAIR),
    ModelCase(
        "mixture in the plane",
        mixture_in_the_plane,
        (POINTS,),
        by_hand(("3", "weights[0] locs[0] sds[0] factor[0]")),
    ),
    ModelCase("mixture with a parameter", mixture_with_parameter, (ROWS,), LABELS),
    ModelCase(
        "mixture with missing rows",
        mixture_with_missing_rows,
        (ROWS, _bits(40).bool()),
        LABELS,
    ),
    ModelCase("subsampled mixture", subsampled_mixture, (ROWS,), LABELS),
    ModelCase(
        "two mixtures",
        two_mixtures,
        (ROWS, _normal(30)),
        by_hand(("3", "weights_a[0] locs_a[0]"), ("3", "weights_b[0] locs_b[0]")),
    ),
    ModelCase(
        "nested mixture",
        nested_mixture,
        (ROWS,),
        by_hand(("2", "outer[0] inner[0] locs[0]"), ("2 x 3", "inner[0,1] locs[0,1]")),
    ),
    ModelCase("a labelled datum", labelled_datum, (ROWS,), PAIR),
    ModelCase("ordered mixture", ordered_mixture, (ROWS,), NOTHING),
    ModelCase("stick breaking", stick_breaking, (ROWS,), NOTHING),
    ModelCase(
        "components in blocks",
        components_in_blocks,
        (ROWS,),
        by_hand(("3", "weights[0] theta[0]")),
    ),
    ModelCase(
        "sites of a loop", sites_of_a_loop, (ROWS,), NOTHING, "loc_0, loc_1, loc_2"
    ),
    ModelCase(
        "mixture of regressions",
        mixture_of_regressions,
        (POINTS, _normal(30)),
        by_hand(("3", "weights[0] slopes[0] sigma[0]")),
    ),
    ModelCase(
        "mixture of experts",
        mixture_of_experts,
        (POINTS, _normal(30)),
        by_hand(("3", "gate[0] gate_bias[0] slopes[0] bias[0]")),
    ),
    ModelCase(
        "hidden Markov model",
        hidden_markov,
        (SERIES,),
        by_hand(("3", "initial[0] matrix[0] matrix[1] locs[0]")),
    ),
    ModelCase(
        "sticky hidden Markov model",
        sticky_hidden_markov,
        (SERIES,),
        by_hand(("3", "initial[0] matrix[0] matrix[1] locs[0]")),
    ),
    ModelCase(
        "latent Dirichlet allocation",
        topics,
        (WORDS,),
        by_hand(("3", "topic[0] share[1]")),
    ),
    ModelCase(
        "latent classes",
        latent_classes,
        (ANSWERS,),
        by_hand(("3", "weights[0] probs[0]")),
    ),
    ModelCase(
        "stochastic block model",
        block_model,
        (_bits(5, 5),),
        by_hand(("3", "weights[0] rates[0] rates[1]")),
    ),
    ModelCase(
        "factor analysis",
        factor_analysis,
        (_normal(20, 5),),
        by_hand(("2", "loadings[1]- scores[0]-")),
    ),
    ModelCase(
        "automatic relevance",
        relevance_determination,
        (_normal(20, 5),),
        by_hand(("2", "loadings[1]- scores[0]- tau[0]")),
    ),
    ModelCase(
        "factors of two scales",
        factors_of_two_scales,
        (_normal(20, 5),),
        by_hand(("2", "loadings[1]- scores[0]-")),
    ),
    ModelCase(
        "matrix factorisation",
        matrix_factorisation,
        (TABLE, KNOWN),
        by_hand(("3", "u[1]- v[1]-")),
    ),
    ModelCase(
        "item response, real slopes",
        item_response,
        (ANSWERS, dist.Normal(0.0, 1.0)),
        by_hand(("1", "ability[0]- slope[0]-")),
    ),
    ModelCase(
        "item response, positive slopes",
        item_response,
        (ANSWERS, dist.LogNormal(0.0, 1.0)),
        NOTHING,
    ),
    ModelCase(
        "item response of two traits",
        item_response_of_two_traits,
        (ANSWERS,),
        by_hand(("2", "ability[1]- slope[1]-")),
    ),
    ModelCase(
        "triple product",
        triple_product,
        (_normal(10),),
        by_hand(("1", "a- c-"), ("1", "b- c-")),
        "the sites a, b, c exchange",
    ),
    ModelCase(
        "restricted Boltzmann machine",
        boltzmann_machine,
        (_bits(15, 4),),
        by_hand(("3", "w[1] hidden[0]")),
    ),
    ModelCase(
        "tanh network",
        tanh_network,
        (FEATURES, TARGETS),
        by_hand(("4", "w1[1]- b1[0]- w2[0]-"), ("4", "w2[1]- b2[0]- w3[0]-")),
    ),
    ModelCase(
        "network of PyroModules",
        ReluNetwork(),
        (FEATURES.float(), TARGETS.float()),
        by_hand(("5", "a.weight[0] a.bias[0] b.weight[1]")),
    ),
    ModelCase(
        "five hidden layers", deep_network, (_normal(100, 8), _normal(100)), HIDDEN
    ),
    ModelCase("hierarchical", hierarchical, (INDEX, _normal(18)), NOTHING),
    ModelCase(
        "hierarchical, two groups empty",
        hierarchical,
        (INDEX % 4, _normal(18)),
        by_hand(("2", "theta[0]")),
    ),
    ModelCase(
        "hierarchical, 200 groups",
        many_groups,
        (torch.arange(400) % 200, _normal(400)),
        NOTHING,
    ),
    ModelCase(
        "crossed effects",
        crossed_effects,
        (torch.arange(20) % 4, torch.arange(20) % 5, _normal(20)),
        NOTHING,
    ),
    ModelCase("horseshoe", horseshoe, (FEATURES, TARGETS), NOTHING),
    ModelCase("softmax regression", softmax_regression, (FEATURES, CLASSES), NOTHING),
    ModelCase("a prior alone", prior_alone, (), by_hand(("4", "a[0]-"))),
]
