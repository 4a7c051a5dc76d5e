"""Symmetries found in Pyro models: right groups by hand, by brute force, and by the
network's own; what breaks them is seen, and accidents of the data are told apart."""

import itertools
import math
from collections.abc import Callable, Iterator

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.discovery import InconclusiveError
from pyro_symmetric.discovery.model_density import ModelDensity

Units = set[tuple[str, frozenset[str]]]  # number, and axes with a trailing - if flipped


def units_of(symmetry: ps.Symmetry) -> Units:
    found = set()
    for units in symmetry.group.units.values():
        signed = "flip" in units.moves
        axes = frozenset(
            f"{axis.site}[{axis.dim}]" + "-" * (signed and axis.exponent % 2)
            for axis in units.axes
        )
        found.add((units.size_text, axes))
    return found


def units(number: str, axes: str) -> tuple[str, frozenset[str]]:
    return number, frozenset(axes.split())


def mixture(x: Tensor, concentration: Tensor, scales: bool = False) -> None:
    count = len(concentration)
    weights = pyro.sample("weights", dist.Dirichlet(concentration))
    with pyro.plate("components", count):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
        scale = pyro.sample("scales", dist.LogNormal(0.0, 1.0)) if scales else 1.0
    with pyro.plate("data", len(x)):
        components = dist.Normal(locs, scale)
        fn = dist.MixtureSameFamily(dist.Categorical(weights), components)
        pyro.sample("x", fn, obs=x)


def factor_analysis(x: Tensor, scale: Tensor) -> None:
    loadings = pyro.sample(
        "loadings", dist.Normal(torch.zeros(4, 2), scale).to_event(2)
    )
    scores = pyro.sample("scores", dist.Normal(torch.zeros(2, 6), 1.0).to_event(2))
    pyro.sample("x", dist.Normal((loadings @ scores).T, 1.0).to_event(2), obs=x)


def hierarchical(y: Tensor, group: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", 5):
        theta = pyro.sample("theta", dist.Normal(mu, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(theta[group], 1.0), obs=y)


def flat(x: Tensor) -> None:
    theta = pyro.sample("theta", dist.Normal(torch.zeros(6), 2.0).to_event(1))
    components = dist.Normal(theta[:3], theta[3:].exp())
    with pyro.plate("data", len(x)):
        fn = dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), components)
        pyro.sample("x", fn, obs=x)


def responses(y: Tensor) -> None:
    with pyro.plate("persons", 4):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
    items = torch.tensor([-1.0, 0.5, 1.0])
    fn = dist.Bernoulli(logits=ability[:, None] - items).to_event(2)
    pyro.sample("y", fn, obs=y)


X = torch.linspace(-3, 3, 7).exp()
ONES = torch.ones(3)
CASES: list[tuple[Callable[..., None], tuple[Tensor, ...], Units]] = [
    (mixture, (X, ONES), {units("3", "weights[0] locs[0]")}),
    (mixture, (X, ONES, True), {units("3", "weights[0] locs[0] scales[0]")}),
    (mixture, (X, torch.tensor([1.0, 1.0, 4.0])), {units("2", "weights[0] locs[0]")}),
    (mixture, (X, torch.tensor([1.0, 2.0, 4.0])), set()),
    (
        factor_analysis,
        (torch.randn(6, 4), torch.ones(2)),
        {units("2", "loadings[1]- scores[0]-")},
    ),
    (
        factor_analysis,
        (torch.randn(6, 4), torch.tensor([1.0, 2.0])),
        {units("2", "loadings[1]- scores[0]-")},
    ),
    (hierarchical, (torch.randn(10), torch.arange(10) % 5), set()),
    (hierarchical, (torch.randn(9), torch.arange(9) % 3), {units("2", "theta[0]")}),
    (flat, (X,), {units("3", "theta[0]")}),
]


@pytest.mark.parametrize(("model", "args", "expected"), CASES)
def test_units_are_those_by_hand(model, args, expected):
    assert units_of(ps.find_symmetry(model, *args)) == expected


def test_states_permute_along_both_axes_of_their_transitions():
    vectorised = units("3", "matrix[0] matrix[1] locs[0]")

    def hmm(x: Tensor) -> None:
        matrix = pyro.sample("matrix", dist.Dirichlet(torch.ones(3, 3)).to_event(1))
        locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 3.0).to_event(1))
        state = pyro.sample("z0", dist.Categorical(torch.ones(3)))
        pyro.sample("x0", dist.Normal(locs[state], 1.0), obs=x[0])
        for t in pyro.markov(range(1, len(x))):
            state = pyro.sample(f"z{t}", dist.Categorical(Vindex(matrix)[state]))
            pyro.sample(f"x{t}", dist.Normal(locs[state], 1.0), obs=x[t])

    assert units_of(ps.find_symmetry(hmm, torch.randn(4))) == {vectorised}


def _images(shape: torch.Size) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield all products of permutations along the axes of a site."""
    orders = [itertools.permutations(range(length)) for length in shape]
    for chosen in itertools.product(*orders):

        def act(value: Tensor, chosen: tuple[tuple[int, ...], ...] = chosen) -> Tensor:
            for dim, order in enumerate(chosen):
                value = value.index_select(dim + 1, torch.tensor(order))
            return value

        yield act


@pytest.mark.parametrize(
    ("model", "args"),
    [(mixture, (X, ONES)), (mixture, (X, torch.tensor([1.0, 1.0, 4.0]))), (flat, (X,))],
)
def test_the_group_has_as_many_permutations_as_brute_force_finds(model, args):
    density = ModelDensity(model, args, {})
    points, valid = density.generic, 0
    for images in itertools.product(*map(_images, density.shapes.values())):
        moved = {
            site: image(points[site])
            for site, image in zip(points, images, strict=True)
        }
        valid += bool(density.same(density.terms(moved), density.before).all())
    assert ps.find_symmetry(model, *args).permutations.order() == valid


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.0, 2.0)])
def test_the_group_has_as_many_signs_as_brute_force_finds(scales):
    def product(y: Tensor) -> None:
        a = pyro.sample(
            "a", dist.Normal(torch.zeros(2), torch.tensor(scales)).to_event(1)
        )
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        c = pyro.sample("c", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        pyro.sample("y", dist.Normal((a * b).sum(-1) * c, 1.0).to_event(1), obs=y)

    density = ModelDensity(product, (torch.ones(1),), {})
    points, valid = density.generic, 0
    sizes = [shape.numel() for shape in density.shapes.values()]
    for signs in itertools.product((1.0, -1.0), repeat=sum(sizes)):
        parts = torch.tensor(signs).split(sizes)
        moved = {
            site: points[site] * part for site, part in zip(points, parts, strict=True)
        }
        valid += bool(density.same(density.terms(moved), density.before).all())
    symmetry = ps.find_symmetry(product, torch.ones(1))
    assert symmetry.signs.log_order() == pytest.approx(math.log(valid))


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.GELU, nn.Sigmoid])
@pytest.mark.parametrize("widths", [(3,), (3, 2), (4, 4, 2)])
def test_a_bayesian_network_has_its_networks_symmetry_by_both_ways(activation, widths):
    sizes, x = (2, *widths, 1), torch.randn(5, 2)
    layers = list[nn.Module]()
    for number, (width, following) in enumerate(itertools.pairwise(sizes)):
        layers += [activation()] * (number > 0) + [nn.Linear(width, following)]
    net = nn.Sequential(*layers)
    model = ps.BayesianModel(net, likelihood="gaussian")
    expected = ps.find_symmetry(net, x).log_order()
    assert ps.find_symmetry(model, x).log_order() == pytest.approx(expected)
    as_density = ps.find_symmetry(lambda x, y: model(x, y), x, torch.randn(5, 1))
    assert as_density.log_order() == pytest.approx(expected)


def test_a_prior_that_tells_units_apart_restricts_a_bayesian_network():
    net, x = (
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)),
        torch.randn(5, 2),
    )

    def prior(name: str, parameter: Tensor) -> dist.Distribution:
        scale = torch.ones_like(parameter)
        if name == "0.weight":
            scale[2] = 2.0
        return dist.Normal(torch.zeros_like(parameter), scale).to_event(parameter.dim())

    model = ps.BayesianModel(net, prior=prior, likelihood="gaussian")
    symmetry = ps.find_symmetry(model, x)
    assert symmetry.permutations.order() == 1
    assert "changes the prior" in str(symmetry)
    assert symmetry.at_least


def test_a_prior_scale_off_by_one_in_a_hundred_thousand_is_seen_beside_many_rows():
    def model(x: Tensor, scale: Tensor) -> None:
        with pyro.plate("components", 2):
            locs = pyro.sample("locs", dist.Normal(0.0, scale))
        fn = dist.MixtureSameFamily(
            dist.Categorical(torch.ones(2)), dist.Normal(locs, 1.0)
        )
        with pyro.plate("data", len(x)):
            pyro.sample("x", fn, obs=x)

    x = torch.randn(30_000)
    even, odd = torch.ones(2), torch.tensor([1.0, 1.0 + 1e-5])
    assert ps.find_symmetry(model, x, even).permutations.order() == 2
    assert ps.find_symmetry(model, x, odd).permutations.order() == 1


def test_persons_with_equal_answers_exchange_by_accident_only():
    y = torch.tensor([[0.0, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1]])
    symmetry = ps.find_symmetry(responses, y)
    assert symmetry.permutations.order() == 1
    assert "accidents=True" in str(symmetry.explain("ability"))
    assert ps.find_symmetry(responses, y, accidents=True).permutations.order() == 2


def test_sites_of_a_loop_are_told_to_move_into_a_plate():
    def looped(x: Tensor) -> None:
        locs = [pyro.sample(f"loc_{k}", dist.Normal(0.0, 5.0)) for k in range(3)]
        components = dist.Normal(torch.stack(locs, -1), 1.0)
        with pyro.plate("data", len(x)):
            fn = dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), components)
            pyro.sample("x", fn, obs=x)

    symmetry = ps.find_symmetry(looped, X)
    assert symmetry.at_least
    assert "loc_0, loc_1, loc_2 exchange as wholes" in str(symmetry)
    assert "pyro.plate('loc_plate', 3)" in str(symmetry)


def test_sites_of_several_loops_that_exchange_together_are_told():
    def looped(x: Tensor) -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        locs, scales = [], []
        for k in range(3):
            locs.append(pyro.sample(f"loc_{k}", dist.Normal(0.0, 5.0)))
            scales.append(pyro.sample(f"scale_{k}", dist.LogNormal(0.0, 1.0)))
        components = dist.Normal(torch.stack(locs, -1), torch.stack(scales, -1))
        with pyro.plate("data", len(x)):
            fn = dist.MixtureSameFamily(dist.Categorical(weights), components)
            pyro.sample("x", fn, obs=x)

    symmetry = ps.find_symmetry(looped, X)
    assert symmetry.at_least
    sites = "loc_0, loc_1, loc_2 and scale_0, scale_1, scale_2"
    assert f"{sites} exchange as wholes, together with weights[0]," in str(symmetry)


def test_without_verification_no_random_elements_are_tried(monkeypatch):
    from pyro_symmetric.discovery import model_symmetry

    def refused(*_: object) -> None:
        raise AssertionError("tried")

    monkeypatch.setattr(model_symmetry, "_repaired", refused)
    symmetry = ps.find_symmetry(mixture, X, ONES, verify=False)
    assert symmetry.permutations.order() == 6
    with pytest.raises(AssertionError, match="tried"):
        ps.find_symmetry(mixture, X, ONES)


def test_moves_that_the_likelihood_allows_and_the_prior_breaks_are_named():
    def answers(y: Tensor) -> None:
        ability = pyro.sample("ability", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        slope = pyro.sample("slope", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
        hard = pyro.sample("hard", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        logits = slope * (ability[..., :, None] - hard)
        pyro.sample("y", dist.Bernoulli(logits=logits).to_event(2), obs=y)

    def choices(y: Tensor) -> None:
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        logits = pyro.sample("logits", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Categorical(logits=logits).expand([5]).to_event(1), obs=y)
        pyro.sample("x", dist.Normal(0.0, spread), obs=torch.tensor(1.0))

    scale = "the likelihood allows scales of ability^1, slope^-1, hard^1, broken by"
    shift = "the likelihood allows a shift of ability, hard, broken by the prior of"
    symmetry = ps.find_symmetry(answers, torch.ones(4, 3).tril())
    explained = str(symmetry.explain("ability"))
    assert scale in explained
    assert shift in explained
    assert scale in str(symmetry.explain("slope"))
    symmetry = ps.find_symmetry(choices, torch.tensor([0, 1, 2, 2, 1]))
    line = "the likelihood allows a shift of logits, broken by the prior of logits"
    assert line in str(symmetry.explain("logits"))
    assert "spread" not in str(symmetry.explanation)
    for args in ((X, ONES), (X, ONES, True)):
        assert "allows" not in str(ps.find_symmetry(mixture, *args).explanation)


def test_dropout_is_refused():
    def noisy(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        mean = nn.functional.dropout(w, 0.5).sum()
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    with pytest.raises((InconclusiveError, RuntimeError), match=r"dropout|random"):
        ps.find_symmetry(noisy, torch.tensor(0.3))


def test_a_model_that_hides_sites_is_told_their_names():
    def hidden() -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(w.sum() + z, 1.0), obs=torch.tensor(0.3))

    with pytest.raises(InconclusiveError, match=r"\['z'\].*poutine\.block"):
        ps.find_symmetry(pyro.poutine.block(hidden, hide=["z"]))


def test_only_and_freeze_choose_sites():
    free = ps.find_symmetry(mixture, X, ONES)
    assert free.permutations.order() == 6
    for options in ({"freeze": "locs"}, {"only": "weights"}):
        assert ps.find_symmetry(mixture, X, ONES, **options).permutations.order() == 1


def test_the_callers_generator_and_parameters_stay():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ps.find_symmetry(mixture, X, ONES)
    assert torch.equal(torch.get_rng_state(), before)
    assert not list(pyro.get_param_store())


def test_constants_in_single_precision_are_no_obstacle():
    design = torch.randn(8, 3)

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 4), 1.0).to_event(2))
        v = pyro.sample("v", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        mean = torch.tanh(design @ w) @ v
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    expected = math.lgamma(5) + 4 * math.log(2)
    assert ps.find_symmetry(model, torch.randn(8)).log_order() == pytest.approx(
        expected
    )


def test_data_in_double_precision_suit_a_model_of_the_default_precision():
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        mean = (x @ w).sigmoid().sum(-1)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    x = torch.randn(5, 2).double()
    symmetry = ps.find_symmetry(model, x, torch.randn(5).double())
    assert symmetry.group.order() == 6


def test_a_model_that_branches_on_values_is_run_point_by_point():
    def model(x: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        spread = 2.0 if float(locs.sum()) > 0 else 1.0
        pyro.sample("x", dist.Normal(locs.sum(), spread), obs=x)

    assert ps.find_symmetry(model, torch.tensor(0.5)).permutations.order() == 2


class WithoutSampler(dist.Normal):
    """A normal that can't be sampled, as many distributions that users write."""

    has_rsample = False

    def sample(self, *shape: torch.Size) -> Tensor:
        raise NotImplementedError


def test_a_note_that_no_data_are_simulated_is_none_that_moves_are_missing():
    def model(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("x", WithoutSampler(w.sum(), 1.0), obs=x)

    symmetry = ps.find_symmetry(model, torch.tensor(0.3))
    assert symmetry.permutations.order() == 6
    assert "can't simulate data" in " ".join(symmetry.notes)
    assert not symmetry.at_least
    assert symmetry.remarks == ()
    assert ps.Symmetry.from_dict(symmetry.to_dict()).notes == symmetry.notes
    assert symmetry.notes[0] in str(symmetry)
