"""Declarations that are right pass; wrong ones are named by units, site and axis."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import config_enumerate
from torch import nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.model_check import require_of_posterior, verify_model
from pyro_symmetric.discovery.model_density import site_entries
from pyro_symmetric.discovery.verify import InconclusiveError
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.mcmc import sample
from pyro_symmetric.models import BayesianModel

DATA = torch.tensor([-2.0, -1.5, 0.3, 0.7, 2.5, 3.0, 3.1])
SHAPES = {
    "weights": torch.Size([3]),
    "locs": torch.Size([3]),
    "scales": torch.Size([3]),
    "offsets": torch.Size([3]),
}
RIGHT = {"weights": ("k",), "locs": ("k",), "scales": ("k",)}


def mixture(data: torch.Tensor) -> None:
    """A mixture of three, and three offsets of ordered groups of data that have nothing
    to do with its components.
    """
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
        scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    offsets = pyro.sample("offsets", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    shift = offsets @ torch.tensor([1.0, 2.0, 3.0])
    with pyro.plate("data", len(data)):
        pyro.sample(
            "x",
            dist.MixtureSameFamily(
                dist.Categorical(weights), dist.Normal(locs + shift, scales)
            ),
            obs=data,
        )


def declare(axes: dict[str, tuple[str | None, ...]]) -> Group:
    return Group.declare(axes, SHAPES)


SITES = tuple(RIGHT)


@pytest.mark.parametrize(
    ("declared", "remedy"),
    [
        (SITES[1:], "with axis 0 of 'weights'"),
        (SITES[:2], "with axis 0 of 'scales'"),
        (("locs",), ""),  # two are missing
        ((*SITES, "offsets"), "without axis 0 of 'offsets'"),
    ],
)
def test_a_right_declaration_holds_and_an_axis_that_is_left_out_or_too_many_is_named(
    declared: tuple[str, ...], remedy: str
) -> None:
    assert verify_model(declare(RIGHT), mixture, DATA)
    (broken,) = verify_model(
        declare(dict.fromkeys(declared, ("k",))), mixture, DATA
    ).broken
    assert (broken.name, broken.sites, broken.remedy) == ("k", ("x",), remedy)


@pytest.mark.parametrize("validate", [True, False])
def test_an_ordered_prior_breaks_the_symmetry_outside_of_its_support(
    validate: bool,
) -> None:
    def ordered(data: torch.Tensor) -> None:
        prior = dist.TransformedDistribution(
            dist.Normal(torch.zeros(3), 1.0, validate_args=validate).to_event(1),
            dist.transforms.OrderedTransform(),
        )
        locs = pyro.sample("locs", prior)
        with pyro.plate("data", len(data)):
            pyro.sample(
                "x",
                dist.MixtureSameFamily(
                    dist.Categorical(torch.ones(3)), dist.Normal(locs, 1.0)
                ),
                obs=data,
            )

    result = verify_model(declare({"locs": ("k",)}), ordered, DATA)
    (broken,) = result.broken
    assert broken.change == float("inf")
    assert "locs" in broken.sites
    assert not broken.remedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("noise", [0.1, 0.01, 0.001])
def test_a_sharp_likelihood_hides_no_lopsided_prior(
    dtype: torch.dtype, noise: float
) -> None:
    """A change that passes as rounding of a log-likelihood of up to 10^10 is no excuse
    for the prior's own nats.
    """
    y = torch.randn(2000, dtype=dtype)

    def model(prior_mean: float) -> None:
        loc = torch.tensor([0.0, prior_mean, 0.0], dtype=dtype)
        w = pyro.sample("w", dist.Normal(loc, 1.0).to_event(1))
        pyro.sample(
            "y", dist.Normal(w.square().sum(), noise).expand([2000]).to_event(1), obs=y
        )

    group = Group.declare({"w": ("k",)}, {"w": torch.Size([3])})
    assert verify_model(group, model, 0.0)
    (broken,) = verify_model(group, model, 2.0).broken
    assert broken.sites == ("w",)


def test_a_prior_that_the_likelihood_makes_up_for_breaks_nothing() -> None:
    """The joint density counts, not its factors: here the likelihood takes the prior's
    mean back.
    """

    def model(size: float) -> None:
        w = pyro.sample(
            "w",
            dist.Normal(torch.tensor([0.0, 2.0], dtype=torch.float64), 1.0).to_event(1),
        )
        pyro.factor("y", size * w.sum().cos() - 2 * w[1])

    group = Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    for size in (1.0, 1e6):
        assert verify_model(group, model, size)


def test_a_cyclic_symmetry_does_not_pass_for_all_permutations() -> None:
    def ring() -> None:
        a = pyro.sample("a", dist.Normal(torch.zeros(5), 1.0).to_event(1))
        pyro.sample("y", dist.Normal((a * a.roll(1)).sum(), 1.0), obs=torch.tensor(0.3))

    assert not verify_model(Group.declare({"a": ("k",)}, {"a": torch.Size([5])}), ring)


@pytest.mark.stochastic
def test_one_unit_of_many_with_another_prior_is_noticed() -> None:
    """Each of 4 draws is compared twice with another value at the odd unit, whose
    square passes for alike with probability 0.15: false alarms below 1e-6."""
    scale = torch.ones(5000)
    scale[137] = 1.1

    def model() -> None:
        pyro.sample("a", dist.Normal(torch.zeros(5000), scale).to_event(1))

    group = Group.declare({"a": ("k",)}, {"a": torch.Size([5000])})
    assert not verify_model(group, model, trials=4)


def test_masks_and_scales_are_those_of_the_batch_where_events_have_entries_of_their_own() -> (
    None
):
    mask = torch.tensor([True, False])

    def model() -> None:
        with (
            pyro.plate("rows", 2),
            pyro.poutine.mask(mask=mask),
            pyro.poutine.scale(scale=3.0),
        ):
            pyro.sample(
                "a",
                dist.Normal(torch.zeros(2, 2), torch.tensor([[1.0], [2.0]])).to_event(
                    1
                ),
            )

    trace = pyro.poutine.trace(model).get_trace()
    trace.compute_log_prob()
    entries = site_entries(trace.nodes["a"])
    assert entries.numel() == 4
    assert float(entries.sum()) == pytest.approx(float(trace.log_prob_sum()))


def test_signs_of_a_factor_model_hold_and_wrong_ones_are_named() -> None:
    axes = {"loadings": (None, "factor"), "scores": ("factor", None)}
    shapes = {"loadings": torch.Size([4, 2]), "scores": torch.Size([2, 20])}

    def model(data: torch.Tensor, mean: float = 0.0) -> None:
        loadings = pyro.sample(
            "loadings", dist.Normal(torch.full((4, 2), mean), 1.0).to_event(2)
        )
        scores = pyro.sample("scores", dist.Normal(torch.zeros(2, 20), 1.0).to_event(2))
        pyro.sample("x", dist.Normal(loadings @ scores, 0.5).to_event(2), obs=data)

    data = torch.randn(4, 20)
    group = Group.declare(axes, shapes, ("permute", "flip"))
    assert verify_model(group, model, data)
    (lopsided,) = verify_model(group, model, data, mean=0.5).broken
    assert (lopsided.move, lopsided.name, lopsided.sites) == (
        "flip",
        "factor",
        ("loadings",),
    )
    (partial,) = verify_model(
        Group.declare({"loadings": (None, "factor")}, shapes, "flip"), model, data
    ).broken
    assert partial.remedy == "with axis 0 of 'scores'"


def test_signs_of_positive_sites_are_to_stay() -> None:
    def model() -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0).expand((2,)).to_event(1))
        pyro.sample(
            "loadings", dist.Normal(torch.zeros(2, 3), tau[:, None]).to_event(2)
        )

    axes, shapes = (
        {"loadings": ("f", None), "tau": ("f",)},
        {"loadings": torch.Size([2, 3]), "tau": torch.Size([2])},
    )
    (broken,) = verify_model(
        Group.declare(axes, shapes, ("permute", "flip")), model
    ).broken
    assert (
        broken.remedy == "with even=['tau'] in the declaration, whose signs then stay"
    )
    assert verify_model(
        Group.declare(axes, shapes, ("permute", "flip"), even=["tau"]), model
    )


def test_signs_and_permutations_of_a_discovered_network_hold() -> None:
    net = nn.Sequential(
        nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)
    )
    x, y = torch.randn(500, 2), torch.randint(3, (500,))
    group = find_symmetry(net, x).finite
    assert verify_model(group, BayesianModel(net, 1.0), x, y)
    relu = nn.Sequential(
        nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    )
    broken = verify_model(group, BayesianModel(relu, 1.0), x, y).broken
    assert {found.move for found in broken} == {"flip"}
    assert len(broken) == 2


def test_running_statistics_that_stay_in_the_model_are_named() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    x, y = torch.randn(50, 2), torch.randint(3, (50,))
    net(x)
    symmetry, model = find_symmetry(net.eval(), x), BayesianModel(net, 1.0)
    assert all(
        "1.running_mean" in found.remedy
        for found in verify_model(symmetry, model, x, y).broken
    )
    assert verify_model(symmetry.holding(net), model, x, y)


@pytest.mark.parametrize("count", [2, 4])
def test_a_group_of_another_size_than_a_posteriors_draws_is_told_by_site(
    count: int,
) -> None:
    posterior = sample(
        mixture, DATA, num_samples=4, num_warmup=0, num_chains=2, progress=False
    )
    group = Group.declare({"locs": ("k",)}, {"locs": torch.zeros(count)})
    with pytest.raises(ValueError, match=r"'locs'\] has shape \(4, 3\)"):
        require_of_posterior(group, posterior)


@config_enumerate
def assigned(data: torch.Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    with pyro.plate("data", len(data)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("x", dist.Normal(locs[z], 1.0), obs=data)


def test_discrete_assignments_are_summed_out() -> None:
    shapes = {"weights": torch.Size([3]), "locs": torch.Size([3])}
    assert verify_model(
        Group.declare({"weights": ("k",), "locs": ("k",)}, shapes), assigned, DATA
    )
    (broken,) = verify_model(
        Group.declare({"locs": ("k",)}, shapes), assigned, DATA
    ).broken
    assert broken.remedy == "with axis 0 of 'weights'"
    assert broken.sites == ()  # the sum over assignments is no site's density


def test_rows_of_a_subsampled_plate_are_kept() -> None:
    def model(data: torch.Tensor) -> None:
        with pyro.plate("components", 3):
            locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(data), subsample_size=3) as rows:
            pyro.sample(
                "x",
                dist.MixtureSameFamily(
                    dist.Categorical(torch.ones(3)), dist.Normal(locs, 1.0)
                ),
                obs=data[rows],
            )

    assert verify_model(declare({"locs": ("k",)}), model, DATA)


def test_a_density_with_randomness_of_its_own_is_inconclusive() -> None:
    dropout = nn.Dropout(0.5)

    def model() -> None:
        a = pyro.sample("a", dist.Normal(torch.zeros(5), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(dropout(a).sum(), 1.0), obs=torch.tensor(0.3))

    with pytest.raises(InconclusiveError, match="dropout"):
        verify_model(Group.declare({"a": ("k",)}, {"a": torch.Size([5])}), model)


def test_the_check_leaves_the_generator_and_the_parameters_alone() -> None:
    state = torch.get_rng_state()
    verify_model(declare(RIGHT), mixture, DATA)
    assert torch.equal(state, torch.get_rng_state())
    assert not list(pyro.get_param_store().keys())


def nested(*, within: bool) -> Group:
    """Two heads of two rows each; of ``w``, and of ``v`` if rows within heads are
    exchanged together with those of ``w``."""
    row = torch.arange(4)[None]
    sites = ("w", "v") if within else ("w",)
    heads = Units(
        "head", 2, tuple(Axis(site, 0, row.view(2, 2).T) for site in ("w", "v"))
    )
    rows = Units(
        "row", 2, tuple(Axis(site, 0, row) for site in sites), parent="head", copies=2
    )
    return Group([heads, rows], {"w": torch.Size([4]), "v": torch.Size([4])})


def test_units_inside_others_hold_and_are_named() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        v = pyro.sample("v", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        pyro.sample(
            "y",
            dist.Normal((w * v).reshape(2, 2).sum(-1).square().sum(), 1.0),
            obs=torch.tensor(0.3),
        )

    assert verify_model(nested(within=True), model)
    (broken,) = verify_model(nested(within=False), model).broken
    assert (broken.move, broken.name, broken.remedy) == (
        "permute",
        "row",
        "with axis 0 of 'v'",
    )


def test_copies_that_only_move_together_do_not_pass() -> None:
    """The rows of both heads may be exchanged at once, but not those of one alone."""

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        v = pyro.sample("v", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        first, second = (w * v).reshape(2, 2)
        pyro.sample("y", dist.Normal(first @ second, 1.0), obs=torch.tensor(0.3))

    (broken,) = verify_model(nested(within=True), model).broken
    assert broken.name == "row"


def test_complex_observations_are_refused_rather_than_called_invariant() -> None:
    def waves() -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(locs[0], 1.0), obs=torch.tensor(1.0 + 2.0j))

    group = Group.declare({"locs": ("k",)}, {"locs": torch.Size([2])})
    with (
        pyro.validation_enabled(False),
        pytest.raises(ValueError, match=r"\['x'\] hold complex numbers"),
    ):
        verify_model(group, waves)
