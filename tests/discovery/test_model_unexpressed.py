"""Moves that leave a Pyro model's density unchanged are found or said: compared with
all permutations of small models, one by one."""

import itertools
import math
from collections.abc import Callable, Iterator

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.discovery.model_density import ModelDensity

Model = Callable[..., None]
X = torch.tensor([-3.0, -3.2, -2.9, 0.1, 0.2, -0.1, 3.0])


def normal(name: str, *shape: int) -> Tensor:
    fn = dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape))
    return pyro.sample(name, fn)


def observe(mean: Tensor) -> None:
    fn = dist.Normal(mean, 0.5).to_event(mean.dim())
    data = torch.linspace(-1.0, 2.0, mean.shape.numel()).exp()
    pyro.sample("y", fn, obs=data.reshape(mean.shape).to(mean))


def brute_force(
    model: Model, images: Callable[[Tensor], Iterator[Tensor]], joint: bool = False
) -> int:
    """Count the moves that leave the density unchanged.

    :param images: yields the images of points ``(points,) + shape`` of a site.
    :param joint: whether all sites, of one shape, move as one.
    """
    density = ModelDensity(model, (), {})
    points = density.generic
    if joint:
        together = torch.stack([*points.values()], 1)
        moved = [
            dict(zip(points, image.unbind(1), strict=True))
            for image in images(together)
        ]
    else:
        each_site = itertools.product(*map(images, points.values()))
        moved = [dict(zip(points, values, strict=True)) for values in each_site]
    same = [density.same(density.terms(m), density.before).all() for m in moved]
    inside = [density.inside(m).all() for m in moved]
    return sum(bool(s and i) for s, i in zip(same, inside, strict=True))


def permuted(points: Tensor) -> Iterator[Tensor]:
    for order in itertools.permutations(range(points.shape[1])):
        yield points[:, list(order)]


def require_right_or_said(model: Model, count: int) -> None:
    symmetry = ps.find_symmetry(model)
    order = round(math.exp(symmetry.log_order()))
    assert order <= count
    assert symmetry.at_least == (order < count)
    assert bool(symmetry.remarks) == symmetry.at_least


# sites that are conditioned -----------------------------------------------------------


def mixture() -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    with pyro.plate("rows", len(X)):
        components = dist.Normal(locs, 0.7)
        fn = dist.MixtureSameFamily(dist.Categorical(weights), components)
        pyro.sample("x", fn, obs=X)


@pytest.mark.parametrize(
    ("site", "value", "count"),
    [
        ("weights", [1 / 3, 1 / 3, 1 / 3], 6),
        ("weights", [0.25, 0.5, 0.25], 2),
        ("weights", [0.2, 0.5, 0.3], 1),
        ("locs", [1.0, -2.0, 1.0], 2),
    ],
)
@pytest.mark.parametrize("as_trace", [False, True])
def test_a_parameter_that_is_conditioned_keeps_its_value(site, value, count, as_trace):
    model = poutine.condition(mixture, data={site: torch.tensor(value)})
    if as_trace:
        held = poutine.trace(poutine.block(model, expose=[site])).get_trace()
        model = poutine.condition(mixture, data=held)
    assert brute_force(model, permuted) == count
    symmetry = ps.find_symmetry(model)
    assert symmetry.group.order() == count
    assert not symmetry.at_least


def test_data_that_are_conditioned_are_simulated():
    def responses() -> None:
        ability = normal("ability", 4)
        items = torch.tensor([-1.0, 0.5, 1.0])
        fn = dist.Bernoulli(logits=ability[:, None] - items).to_event(2)
        pyro.sample("y", fn)

    y = torch.tensor([[0.0, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1]])
    model = poutine.condition(responses, data={"y": y})
    assert ps.find_symmetry(model).group.order() == 1
    assert ps.find_symmetry(model, accidents=True).group.order() == 2


# data that can't be simulated at once -------------------------------------------------


class Rarely(dist.Bernoulli):
    """Draws at the third attempt."""

    attempts = 0

    def sample(self, *shape: torch.Size) -> Tensor:
        Rarely.attempts += 1
        if Rarely.attempts <= 2:
            raise ValueError("no draw")
        return super().sample(*shape)


def test_data_are_simulated_again_where_that_fails():
    def responses() -> None:
        ability = normal("ability", 4)
        items = torch.tensor([-1.0, 0.5, 1.0])
        y = torch.tensor([[0.0, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1]])
        fn = Rarely(logits=ability[:, None] - items).to_event(2)
        pyro.sample("y", fn, obs=y)

    symmetry = ps.find_symmetry(responses)
    assert symmetry.group.order() == 1
    assert symmetry.notes == ()


# permutations that no group expresses -------------------------------------------------


def chain(*moves: int) -> Model:
    """Return a chain of states that stay, or move to others, by fixed chances."""
    count = len(moves)
    transitions = 0.2 * torch.eye(count, dtype=torch.float64) + 0.1
    transitions[range(count), moves] += 0.8
    transitions = transitions / transitions.sum(-1, keepdim=True)

    def model() -> None:
        locs = normal("locs", count)
        log_prob = torch.zeros(count).to(locs)
        for value in X[2:6]:
            step = log_prob[..., None] + transitions.log().to(locs)
            log_prob = step.logsumexp(-2) + dist.Normal(locs, 0.7).log_prob(value)
        pyro.factor("data", log_prob.logsumexp(-1))

    return model


def quadric() -> None:
    a = normal("a", 4)
    observe(a[0] * a[1] + a[2] * a[3])


def directed_ring() -> None:
    a = pyro.sample("a", dist.LogNormal(torch.zeros(4), 1.0).to_event(1))
    observe((a * a.roll(1).square()).sum())


def ring_of_two_sites() -> None:
    a = pyro.sample("a", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    b = pyro.sample("b", dist.LogNormal(torch.zeros(3), 2.0).to_event(1))
    observe((a * b.roll(1)).sum() + (a * b.square()).sum())


def no_ring() -> None:
    a = pyro.sample("a", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    observe(a[0] + 2 * a[1] + 3 * a[2])


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (chain(1, 2, 0), 3),
        (chain(1, 2, 3, 0), 4),
        (chain(1, 0, 3, 2), 8),
        (chain(1, 2, 3, 4, 0), 5),
        (chain(1, 0, 2), 2),
        (chain(1, 2, 2), 1),
        (directed_ring, 4),
        (ring_of_two_sites, 3),
        (no_ring, 1),
    ],
)
def test_cycles_and_products_of_exchanges_are_said(model, count):
    assert brute_force(model, permuted) == count
    require_right_or_said(model, count)


def test_permutations_and_signs_of_a_quadric_are_said():
    assert brute_force(quadric, permuted) == 8
    symmetry = ps.find_symmetry(quadric)
    assert symmetry.at_least
    assert "of a[0] may take the order" in str(symmetry)


# sites that exchange as wholes --------------------------------------------------------


def sides() -> None:
    left = normal("left", 3, 2)
    right = normal("right", 3, 2)
    observe(left @ right.T + right @ left.T)


def entries() -> None:
    observe(normal("u", 3) * normal("v", 3))


def scalars() -> None:
    a, b, c, d = (pyro.sample(n, dist.LogNormal(0.0, 1.0)) for n in "abcd")
    observe(torch.stack([a * c.sqrt() + b * d.sqrt()]))


def components() -> None:
    mean_left = pyro.sample("mean_left", dist.Normal(0.0, 1.0))
    mean_right = pyro.sample("mean_right", dist.Normal(0.0, 1.0))
    scale_left = pyro.sample("scale_left", dist.LogNormal(0.0, 1.0))
    scale_right = pyro.sample("scale_right", dist.LogNormal(0.0, 1.0))
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    locs = torch.stack([mean_left, mean_right], -1)
    scales = torch.stack([scale_left, scale_right], -1)
    with pyro.plate("rows", len(X)):
        parts = dist.Normal(locs, scales)
        fn = dist.MixtureSameFamily(dist.Categorical(weights), parts)
        pyro.sample("x", fn, obs=X)


def test_sites_of_several_kinds_that_exchange_together_are_said():
    symmetry = ps.find_symmetry(components)
    assert symmetry.at_least
    sites = "mean_left, mean_right and scale_left, scale_right exchange as wholes"
    assert f"{sites}, together with weights[0]," in str(symmetry)


def uneven_sides() -> None:
    left, right = (pyro.sample(n, dist.LogNormal(0.0, 1.0)) for n in ("l", "r"))
    observe(torch.stack([left + 2 * right]))


@pytest.mark.parametrize("model", [sides, entries, scalars, uneven_sides])
def test_sites_of_any_names_that_exchange_as_wholes_are_said(model):
    is_symmetric = brute_force(model, permuted, joint=True) > 1
    symmetry = ps.find_symmetry(model)
    assert symmetry.at_least == is_symmetric
    assert ("the sites" in str(symmetry)) == is_symmetric


# signs of sites without axes ------------------------------------------------------------


def product_of_scalars() -> None:
    observe(torch.stack([normal("a") * normal("b") * normal("c")]))


def scalar_and_vector() -> None:
    observe(normal("a") * normal("b", 3))


def even_scalar() -> None:
    observe(torch.stack([normal("a").square() + normal("b")]))


def scaled_columns() -> None:
    observe(normal("gain") * normal("left", 2, 2) @ normal("right", 2, 2))


def signed_wholes(points: Tensor) -> Iterator[Tensor]:
    yield from (points, -points)


@pytest.mark.parametrize("model", [product_of_scalars, scalar_and_vector, even_scalar])
def test_signs_of_scalar_sites_flip_as_often_as_by_brute_force(model):
    symmetry = ps.find_symmetry(model)
    assert symmetry.group.order() == brute_force(model, signed_wholes)
    assert "flip" not in str(symmetry.remarks)


def test_the_sign_of_a_scalar_joins_those_of_matrices():
    group = ps.find_symmetry(scaled_columns).group
    # two factors that permute and flip, and the gain with either matrix
    assert group.order() == 2 * 2**2 * 2
    moved_sites = {axis.site for units in group.units.values() for axis in units.axes}
    assert moved_sites == {"gain", "left", "right"}


def test_a_scalar_changes_its_sign_like_a_site_of_length_one():
    scalar = ps.find_symmetry(scalar_and_vector).group
    values = {"a": torch.tensor([0.5, -2.0]), "b": torch.randn(2, 3)}
    element = scalar.element({}, signs={scalar.roots[0]: torch.tensor([-1.0])})
    moved = element(values)
    assert moved["a"].tolist() == [-0.5, 2.0]
    assert torch.equal(moved["b"], -values["b"])
    assert ps.Group.from_dict(scalar.to_dict()) == scalar
    assert (ps.canonicalize(moved, scalar)["a"] > 0).all()


# signs of sites that aren't real ------------------------------------------------------


def correlated() -> None:
    factor = pyro.sample("factor", dist.LKJCholesky(3, 2.0))
    slopes = normal("slopes", 3)
    fn = dist.MultivariateNormal(torch.zeros(3), scale_tril=factor)
    scores = pyro.sample("scores", fn)
    observe(torch.stack([(scores * slopes).sum()]))


def bounded() -> None:
    fn = dist.Uniform(-torch.ones(2), torch.ones(2)).to_event(1)
    observe(pyro.sample("slopes", fn) * torch.tensor([1.0, 2.0]) * normal("w", 2))


def bounded_scalar() -> None:
    slope = pyro.sample("slope", dist.Uniform(-1.0, 1.0))
    observe(torch.stack([slope.square() + slope.cos()]))


def uneven_bounds() -> None:
    slope = pyro.sample("slope", dist.Uniform(-1.0, 1.1))
    observe(torch.stack([slope.square()]))


@pytest.mark.parametrize(
    ("model", "is_symmetric"),
    [
        (correlated, True),
        (bounded, True),
        (bounded_scalar, True),
        (uneven_bounds, False),
    ],
)
def test_signs_of_bounded_sites_and_correlations_are_said(model, is_symmetric):
    symmetry = ps.find_symmetry(model)
    assert symmetry.at_least == is_symmetric
    assert ("can't take every real number" in str(symmetry)) == is_symmetric


def test_the_signs_of_a_correlation_leave_its_models_density_unchanged():
    density = ModelDensity(correlated, (), {})
    points = density.generic
    for signs in itertools.product((1.0, -1.0), repeat=3):
        sign = torch.tensor(signs).double()
        moved = {
            "factor": sign[:, None] * points["factor"] * sign,
            "slopes": points["slopes"] * sign,
            "scores": points["scores"] * sign,
        }
        assert density.same(density.terms(moved), density.before).all()


def signed(points: Tensor) -> Iterator[Tensor]:
    for signs in itertools.product((1.0, -1.0), repeat=points.shape[1]):
        yield points * torch.tensor(signs)


def pair_of_signs() -> None:
    a = normal("a", 3)
    observe(torch.stack([2 * a[0] * a[1].exp().log() + a[2].exp()]))


def signs_of_a_quadric() -> None:
    a = normal("a", 4)
    observe(torch.stack([a[0] * a[1] + 2 * a[2] * a[3].tanh()]))


def no_signs() -> None:
    a = normal("a", 3)
    observe(torch.stack([a[0] + a[1].square() * a[2].exp()]))


@pytest.mark.parametrize(
    ("model", "count"), [(pair_of_signs, 2), (signs_of_a_quadric, 4), (no_signs, 2)]
)
def test_signs_of_two_positions_that_flip_together_are_said(model, count):
    assert brute_force(model, signed) == count
    symmetry = ps.find_symmetry(model)
    found = round(math.exp(symmetry.signs.log_order()))
    assert ("flip together" in str(symmetry)) == (found < count)


def entries_permuted(points: Tensor) -> Iterator[Tensor]:
    for image in permuted(points.flatten(1)):
        yield image.reshape(points.shape)


def all_entries_alike() -> None:
    observe(normal("A", 3, 2).exp().sum())


def two_plates() -> None:
    with pyro.plate("columns", 3), pyro.plate("rows", 2):
        entries = pyro.sample("A", dist.Normal(0.0, 1.0))
    observe(entries.exp().mean())


@pytest.mark.parametrize("model", [all_entries_alike, two_plates])
def test_entries_of_a_matrix_permute_if_rows_and_columns_do_by_themselves(model):
    symmetry = ps.find_symmetry(model)
    assert symmetry.group.factors == {"A": 6}
    assert not symmetry.at_least
    assert math.exp(symmetry.group.log_order()) == pytest.approx(
        brute_force(model, entries_permuted)
    )


def test_entries_that_further_axes_permute_are_said_to_have_more() -> None:
    symmetry = ps.find_symmetry(lambda: observe(normal("A", 2, 2, 2).exp().sum()))
    assert symmetry.group.factors == {"A": 4}
    assert symmetry.at_least
    assert "A[2]" in str(symmetry)


def of_matrix(function: Callable[[Tensor], Tensor], *shape: int) -> Model:
    return lambda: observe(function(normal("A", *shape)))


def rows_of(A: Tensor) -> Tensor:
    """A function of the rows of a matrix, whose entries it exchanges within rows."""
    return A.exp().sum(1).square().sum()


@pytest.mark.parametrize(
    ("model", "order"),
    [
        # 24 exchanges of the first four entries, 8 of those of a squared determinant
        (of_matrix(lambda A: A[:, :2].exp().sum() + A[:, 2:].det() ** 2, 2, 4), 192),
        (of_matrix(lambda A: rows_of(A[:2]) + A[2:].det() ** 2, 4, 2), 64),
        (
            of_matrix(lambda A: A[:, :2].exp().sum() + 2 * A[:, 2:].exp().sum(), 2, 4),
            576,
        ),
        (of_matrix(lambda A: A[:2].exp().sum() + 2 * A[2:].exp().sum(), 4, 2), 576),
        (of_matrix(lambda A: A[:2].exp().sum() + 2 * A[2].exp().sum(), 3, 2), 48),
        (of_matrix(lambda A: A[:, :2].exp().sum() + 2 * A[:, 2].exp().sum(), 2, 3), 48),
        (of_matrix(lambda A: rows_of(A[:2]) + 2 * rows_of(A[2:]), 4, 2), 64),
        (of_matrix(lambda A: rows_of(A[:2]) + A[2:].exp().sum(), 4, 2), 192),
        (of_matrix(lambda A: A.exp().sum((0, 2)).square().sum(), 2, 2, 2), 1152),
        (of_matrix(rows_of, 3, 2), 48),
        (of_matrix(lambda A: rows_of(A.T), 3, 2), 72),
    ],
)
def test_entries_of_parts_of_a_matrix_are_exchanged_or_said_to_be(model, order) -> None:
    # without verification, which would leave out what doesn't hold
    symmetry = ps.find_symmetry(model, verify=False)
    density = ModelDensity(model, (), {})
    for _ in range(20):
        element = symmetry.permutations.sample(dtype=torch.float64)
        moved = {**density.generic, **element.on_sites(density.generic)}
        assert density.same(density.terms(moved), density.before).all()
    found = round(math.exp(symmetry.permutations.log_order()))
    assert order % found == 0
    assert symmetry.at_least or found in (order, order // 4)  # of the determinant


def test_tables_of_two_sites_permute_together_as_their_rows_and_columns_lie() -> None:
    def model() -> None:
        observe((normal("A", 3, 2) @ normal("B", 2, 3)).trace())

    symmetry = ps.find_symmetry(model)
    assert symmetry.permutations.factors == {"A": 6}
    sites = {axis.site for axis in symmetry.permutations.axes("A")}
    assert sites == {"A", "B"}
