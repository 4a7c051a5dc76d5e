"""Canonical forms: the function stays, points of one orbit meet, a second pass changes
nothing.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pyro_symmetric.canonical import canonicalize, minimal_mass, sorting_permutation
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.groups import Axis, Group, Units

KEYS = st.sampled_from(["first", "max", "norm"])
RULES = st.sampled_from(["unit_norm", "minimal_mass", "minimal_norm"])
WIDTHS = st.lists(st.integers(1, 6), min_size=3, max_size=5)
SEEDS = st.integers(0, 2**31 - 1)
BATCHES = st.sampled_from([(), (3,), (2, 3)])
quick = settings(max_examples=40, deadline=None, derandomize=True)


def assert_same(a: dict, b: dict, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for site in a:
        torch.testing.assert_close(
            a[site],
            b[site],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, s=site: f"{s}: {m}",
        )


def assert_canonical(
    group: Group, weights: dict, form: dict, key: str = "max", rule: str = "unit_norm"
) -> None:
    """Other points of the orbits have the same forms, and forms are their own."""
    moved = group.sample(group.batch_shape(weights), dtype=torch.float64)(weights)
    assert_same(canonicalize(moved, group, key, rule), form, 1e-8)
    assert_same(canonicalize(form, group, key, rule), form, 1e-8)


# the properties that make a form canonical --------------------------------------------


@quick
@given(
    widths=WIDTHS,
    seed=SEEDS,
    batch=BATCHES,
    key=KEYS,
    rule=RULES,
    activation=st.sampled_from(["relu", "tanh"]),
)
def test_all_points_of_an_orbit_share_one_canonical_form_that_computes_their_function(
    mlp, widths, seed, batch, key, rule, activation
):
    torch.manual_seed(seed)
    net = mlp(widths, activation)
    weights, x = net.weights(*batch), torch.randn(5, widths[0], dtype=torch.float64)
    form = canonicalize(weights, net, key, rule)
    torch.testing.assert_close(
        net(form, x).softmax(-1), net(weights, x).softmax(-1), rtol=1e-8, atol=1e-10
    )
    assert_same(
        canonicalize(net.anywhere_on_orbit(weights, *batch), net, key, rule), form, 1e-8
    )
    assert_same(canonicalize(form, net, key, rule), form, 1e-8)


# what the form looks like -------------------------------------------------------------


def test_units_get_norm_one_or_stay(mlp):
    net = mlp([5, 7, 6, 2])
    weights = net.weights(4)
    for site in ("0.weight", "1.weight"):
        norm = canonicalize(weights, net, scalings="unit_norm")[site].norm(dim=-1)
        torch.testing.assert_close(norm, torch.ones_like(norm))
        assert torch.equal(
            canonicalize(weights, net, None, None, False, False)[site], weights[site]
        )


def test_units_are_sorted_by_the_key(mlp):
    net = mlp([5, 7, 6, 2])
    weights = net.weights(4)
    first = canonicalize(weights, net, "first", None)
    largest = canonicalize(weights, net, "max", None)
    norm = canonicalize(weights, net, "norm", None)
    for l in range(2):
        assert bool((first[f"{l}.weight"][..., 0].diff(dim=-1) > 0).all())
        assert bool((largest[f"{l}.weight"].amax(-1).diff(dim=-1) > 0).all())
        mass = norm[f"{l}.weight"].square().sum(-1) + norm[
            f"{l + 1}.weight"
        ].square().sum(-2)
        assert bool((mass.diff(dim=-1) > 0).all())


def test_the_largest_incoming_weight_of_an_odd_unit_is_positive_and_shifts_are_gone(
    mlp,
):
    net = mlp([5, 7, 6, 3], "tanh")
    form = canonicalize(net.weights(4), net)
    for site in ("0.weight", "1.weight"):
        biggest = form[site].gather(-1, form[site].abs().argmax(-1, keepdim=True))
        assert bool((biggest > 0).all())
    torch.testing.assert_close(
        form["2.bias"].mean(-1), torch.zeros(4, dtype=torch.float64)
    )


# hard cases ---------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["unit_norm", "minimal_mass", "minimal_norm"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("key", ["first", "max", "norm"])
def test_dead_units_have_canonical_forms_too(mlp, rule, activation, key):
    net = mlp([3, 5, 4, 4, 2], activation)
    weights, x = net.weights(6), torch.randn(5, 3, dtype=torch.float64)
    weights["0.weight"][:, 1] = 0.0  # constant: its bias is left
    # dead, though it has outgoing weights
    weights["0.weight"][:, 2], weights["0.bias"][:, 2] = 0.0, 0.0
    # nothing at all
    weights["0.weight"][0, 3], weights["0.bias"][0, 3], weights["1.weight"][0, :, 3] = (
        0.0,
        0.0,
        0.0,
    )
    # fed by a dead unit only
    weights["1.weight"][1, 0, [0, 1, 3, 4]], weights["1.bias"][1, 0] = 0.0, 0.0
    weights["2.weight"][2, :, 1] = 0.0  # feeds nothing
    form = canonicalize(weights, net, key, rule)
    torch.testing.assert_close(
        net(form, x).softmax(-1), net(weights, x).softmax(-1), rtol=1e-8, atol=1e-10
    )
    assert_same(
        canonicalize(net.anywhere_on_orbit(weights, 6), net, key, rule), form, 1e-8
    )
    assert_same(canonicalize(form, net, key, rule), form, 1e-8)


@pytest.mark.parametrize("key", ["first", "max", "norm"])
def test_equal_rows_are_told_apart_by_bias_and_outgoing_weights(mlp, key):
    net = mlp([2, 4, 2])
    weights = net.weights()
    weights["0.weight"][:] = 1.0
    weights["0.bias"][:2] = 0.5
    form = canonicalize(net.permutations.enumerate()(weights), net.permutations, key)
    assert_same(form, {k: v[:1].expand_as(v) for k, v in form.items()}, 0.0)


FINITE = ("permute", "flip")
SMALL = {
    "mixture": lambda: Group.declare(
        {"a": ("k", None), "b": ("k",)}, {"a": (3, 2), "b": (3,)}
    ),
    "matrix": lambda: Group.declare({"w": ("row", "column")}, {"w": (4, 3)}),
    "signs": lambda: Group.declare(
        {"w": (None, "f"), "v": ("f", None)}, {"w": (5, 3), "v": (3, 7)}, "flip"
    ),
    "factors": lambda: Group.declare(
        {"w": (None, "f"), "v": ("f",)},
        {"w": (5, 3), "v": (3,)},
        ("permute", "flip"),
        ["v"],
    ),
    "pairs": lambda: Group.declare(
        {"w": (None, "k", "k"), "v": (None, "k")}, {"w": (2, 4, 4), "v": (2, 4)}
    ),
}


@pytest.mark.parametrize("key", ["first", "max", "norm"])
@pytest.mark.parametrize("name", SMALL)
def test_small_groups_of_permutations_have_canonical_forms(name, key):
    group = SMALL[name]()
    weights = {
        site: torch.randn(30, *shape) for site, shape in group.site_shapes.items()
    }
    if name == "pairs":  # units whose largest weights are one and the same
        weights["w"][:, 0, 1, 2], weights["w"][:, 1, 2, 1] = 9.0, -9.0
    form = canonicalize(weights, group, key)
    assert_canonical(group, weights, form, key)


@pytest.mark.parametrize("rule", ["unit_norm", "minimal_mass", "minimal_norm"])
def test_scales_of_the_same_entries_have_one_form(rule):
    shapes = {"x": (2, 2), "y": (2, 2), "z": (2, 2)}
    exponents = {
        "a": [("x", 0, 1), ("y", 1, -2)],
        "b": [("x", 1, 1), ("y", 0, -1), ("y", 1, -1)],
    }
    exponents["c"] = [("y", 1, 1), ("z", 1, -1)]
    whole = torch.arange(2)[:, None]  # one multiplier for all
    group = Group(
        [
            Units(
                name,
                1,
                tuple(Axis(site, dim, whole, e) for site, dim, e in axes),
                moves={"scale"},
            )
            for name, axes in exponents.items()
        ],
        shapes,
    )
    weights = {
        site: torch.randn(500, *shape, dtype=torch.float64)
        for site, shape in shapes.items()
    }
    form = canonicalize(weights, group, scalings=rule)
    for _ in range(4):
        assert_same(
            canonicalize(
                group.sample((500,), spread=1.0)(weights), group, scalings=rule
            ),
            form,
            1e-9,
        )


@pytest.mark.parametrize("key", ["first", "max", "norm"])
@pytest.mark.parametrize("rule", ["unit_norm", "minimal_mass", "minimal_norm"])
def test_residual_streams_and_recurrent_weights_have_canonical_forms(key, rule):
    """A stream fed by two layers, and weights from a layer to itself: circles among the
    incoming weights.
    """
    s, h = torch.arange(4)[None], torch.arange(3)[None]
    shapes = {"in": (4, 5), "up": (3, 4), "loop": (3, 3), "down": (4, 3), "out": (2, 4)}
    where = {"stream": [("in", 0, 1), ("up", 1, -1), ("down", 0, 1), ("out", 1, -1)]}
    where["inner"] = [("up", 0, 1), ("loop", 0, 1), ("loop", 1, -1), ("down", 1, -1)]
    # The inner units come first, so that the order of work has to be found.
    group = Group(
        [
            Units(
                n,
                i.shape[1],
                tuple(Axis(site, d, i, e) for site, d, e in where[n]),
                moves={"permute", "scale"},
            )
            for n, i in {"inner": h, "stream": s}.items()
        ],
        shapes,
    )
    weights = {
        site: torch.randn(10, *shape, dtype=torch.float64)
        for site, shape in shapes.items()
    }

    def function(w: dict) -> torch.Tensor:
        x = torch.linspace(-1, 1, 5, dtype=torch.float64)
        stream = (w["in"] @ x).relu()
        state = torch.zeros(10, 3, dtype=torch.float64)
        for _ in range(3):
            state = (
                ((w["up"] @ stream.unsqueeze(-1)) + (w["loop"] @ state.unsqueeze(-1)))
                .squeeze(-1)
                .relu()
            )
        stream = stream + (w["down"] @ state.unsqueeze(-1)).squeeze(-1)
        return (w["out"] @ stream.unsqueeze(-1)).squeeze(-1)

    form = canonicalize(weights, group, key, rule)
    torch.testing.assert_close(function(form), function(weights), rtol=1e-9, atol=1e-9)
    assert_canonical(group, weights, form, key, rule)


@pytest.mark.parametrize("rule", ["unit_norm", "minimal_mass", "minimal_norm"])
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_statistics_that_have_a_scale_of_their_own_have_canonical_forms(rule, bias):
    """Batch normalisation: its weight may grow with its variance, and with what leaves
    it; biases are zero at first.
    """
    n, m = torch.arange(4)[None], torch.arange(3)[None]
    where = {
        "before": [
            ("0.weight", 0, 1),
            ("0.bias", 0, 1),
            ("1.running_mean", 0, 1),
            ("1.running_var", 0, 2),
        ],
        "own": [("1.weight", 0, 1), ("1.running_var", 0, 2)],
        "after": [("1.weight", 0, 1), ("1.bias", 0, 1), ("3.weight", 1, -1)],
        "next": [("3.weight", 0, 1), ("3.bias", 0, 1), ("5.weight", 1, -1)],
    }
    shapes = {
        "0.weight": (4, 2),
        "3.weight": (3, 4),
        "3.bias": (3,),
        "5.weight": (2, 3),
        "5.bias": (2,),
    }
    shapes |= dict.fromkeys(
        ("0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"), (4,)
    )
    units = []
    for name, axes in where.items():
        index = m if name == "next" else n
        own = [
            Axis(s, d, index, e, "running" in s, 1e-5 if "var" in s else None)
            for s, d, e in axes
        ]
        units.append(Units(name, index.shape[1], tuple(own), moves={"scale"}))
    group = Group(units, shapes)
    weights = {
        site: torch.randn(8, *shape, dtype=torch.float64)
        for site, shape in shapes.items()
    }
    weights = {
        s: v.exp() if "var" in s else bias * v if "bias" in s else v
        for s, v in weights.items()
    }
    form = canonicalize(weights, group, scalings=rule)
    assert_canonical(group, weights, form, rule=rule)


def test_biases_of_nearly_dead_units_stay_bounded_at_minimal_norm(mlp):
    r"""One unit by hand: :math:`s^2 (|w|^2 + b^2) + |a|^2 / s^2` is least at :math:`s^4
    = |a|^2 / (|w|^2 + b^2)`.
    """
    net = mlp([3, 5, 2])
    weights = net.weights(20)
    shrinking = torch.logspace(0, -30, 20, dtype=torch.float64)[:, None]
    weights["0.weight"][:, 1] *= shrinking**2
    # at minimal mass its bias grows like shrinking ** -0.5
    weights["1.weight"][:, :, 1] *= shrinking
    form = canonicalize(weights, net, None, "minimal_norm")
    inside = torch.cat([weights["0.weight"], weights["0.bias"][..., None]], -1).norm(
        dim=-1
    )
    factor = (weights["1.weight"].norm(dim=-2) / inside).sqrt()
    torch.testing.assert_close(
        form["0.bias"], weights["0.bias"] * factor, rtol=1e-9, atol=0
    )
    torch.testing.assert_close(
        form["0.weight"], weights["0.weight"] * factor[..., None], rtol=1e-9, atol=0
    )
    assert (
        float(canonicalize(weights, net, None, "minimal_mass")["0.bias"].abs().max())
        > 1e10
    )


@pytest.mark.parametrize(
    "form",
    [canonicalize, lambda net, symmetry: minimal_mass(net, symmetry).weights],
    ids=["form", "mass"],
)
def test_a_network_gives_a_new_network_that_computes_the_same(form):
    net = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    ).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    symmetry = find_symmetry(net, x)
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    found = form(net, symmetry)
    torch.testing.assert_close(found(x).softmax(-1), net(x).softmax(-1))
    assert_same(
        {name: value.detach() for name, value in found.named_parameters()},
        form(before, symmetry),
        0.0,
    )
    assert_same(
        {name: value.detach() for name, value in net.named_parameters()}, before, 0.0
    )
    assert sorting_permutation(net, symmetry).equal(
        sorting_permutation(before, symmetry)
    )
