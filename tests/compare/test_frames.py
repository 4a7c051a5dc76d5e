"""Frames in which two samples are compared, the summary in one, and declared groups
that a posterior's model lacks.
"""

import itertools
import re

import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.compare.frames import canonical_frame, one_frame, pooled_frame
from pyro_symmetric.groups.group import Group
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import chain_statistics

GROUP = Group.declare({"w": ("unit", None)}, {"w": torch.zeros(4, 2)})
# The largest weight, by which canonical forms sort, is alike for all units; the other
# tells them apart.
TIED = torch.stack([torch.full((4,), 50.0), 10 * torch.arange(4.0)], 1)
OVERLAPPING = torch.zeros(4, 2)
DISTANCES = {"mmd": ps.mmd, "marginal": ps.marginal_wasserstein}
# By which factor at least a distance sees more aligned than in canonical forms that mix
# all units. These spread the shift of one unit over four: that halves its length, but
# leaves the mean over marginals as it is, only noisier.
GAIN = {"mmd": 3, "marginal": 0}


def canonical_forms(p, q, symmetry):
    """Each draw in a frame that no other draw decides."""
    return canonical_frame(p, symmetry), canonical_frame(q, symmetry)


FRAMES = {"aligned": ps.common_frame, "canonical": canonical_forms}


def draws(centres, count, shift=0.0):
    """Each in a copy of its own."""
    w = centres + torch.randn(count, 4, 2)
    w[:, 1, 1] += shift
    return GROUP.sample((count,))({"w": w})


@pytest.mark.parametrize("centres", [TIED, OVERLAPPING], ids=["tied", "overlapping"])
def test_the_frame_depends_on_the_set_of_draws_only(centres):
    """Not on their order, on the copies that they came in, on whose they are, or on the
    generator, which it leaves.
    """
    sample = {"w": draws(centres, 120)["w"].double()}
    state = torch.get_rng_state()
    frame = one_frame(canonical_frame(sample, GROUP), GROUP)["w"]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    order = torch.randperm(120)
    moved = canonical_frame(GROUP.sample((120,))({"w": sample["w"][order]}), GROUP)
    assert torch.equal(one_frame(moved, GROUP)["w"], frame[order])
    for m in (1, 40):
        parts = pooled_frame([{"w": moved["w"][:m]}, {"w": moved["w"][m:]}], GROUP)
        assert torch.equal(torch.cat([part["w"] for part in parts]), frame[order])
    chains = Posterior({"w": moved["w"].unflatten(0, (3, 40))}, kind="chains")
    assert torch.equal(
        one_frame(chains, GROUP).samples["w"], frame[order].unflatten(0, (3, 40))
    )


def test_the_frame_of_few_draws_is_as_close_as_any_by_enumeration():
    """Two draws against one: least squares of all that differ, over all elements of
    both.
    """
    p, q = draws(OVERLAPPING, 2), draws(OVERLAPPING, 1)
    moved = torch.cat(
        [
            side["w"]
            for side in pooled_frame(
                [canonical_frame(side, GROUP) for side in (p, q)], GROUP
            )
        ]
    )
    every = torch.tensor(list(itertools.permutations(range(4))))
    first, second, third = p["w"][:1], p["w"][1][every], q["w"][0][every]
    shape = (len(every), len(every), 4, 2)
    together = torch.stack(
        [part.expand(shape) for part in (first[None], second[:, None], third[None])]
    )
    least = together.var(0, correction=0).sum((-1, -2)).min()
    assert float(moved.var(0, correction=0).sum()) <= 1.1 * float(least)


@pytest.mark.stochastic
@pytest.mark.parametrize("name", DISTANCES)
def test_distances_see_in_the_aligned_frame_what_canonical_forms_mix(name):
    # A shift of 3 deviations of one entry, tied keys, 300 draws: the aligned distance
    # rises above that between equal samples as it does where copies are known. False
    # alarm under 1 of 1,000.
    apart, alike = ([draws(TIED, 300), draws(TIED, 300, shift)] for shift in (3.0, 0.0))
    rise = {}
    for frame, bring in FRAMES.items():
        far, near = (
            DISTANCES[name](*bring(*pair, GROUP)).value for pair in (apart, alike)
        )
        rise[frame] = far - near
    assert rise["aligned"] > 0.01
    assert rise["aligned"] > GAIN[name] * rise["canonical"]
    known = [{"w": TIED + torch.randn(300, 4, 2)} for _ in range(2)]
    known[1]["w"][:, 1, 1] += 3
    truth = DISTANCES[name](*known).value - near_truth(name)
    assert rise["aligned"] == pytest.approx(truth, rel=0.4)


def near_truth(name):
    """Of equal samples in a known frame."""
    return DISTANCES[name](
        *({"w": TIED + torch.randn(300, 4, 2)} for _ in range(2))
    ).value


def test_nearly_dead_units_do_not_decide_a_distance():
    """At unit norm the bias of a unit whose weights are 1e-5 of the others' is
    multiplied by 1e5.
    """
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    symmetry = ps.find_symmetry(net, torch.randn(2, 2))
    centre = {
        "0.weight": 3 + torch.arange(6.0).reshape(3, 2),
        "0.bias": torch.arange(3.0) - 1,
    }
    centre |= {"2.weight": torch.tensor([[3.0, -4.0, 5.0]]), "2.bias": torch.zeros(1)}
    p, q = (
        {
            site: value + 0.1 * torch.randn(200, *value.shape)
            for site, value in centre.items()
        }
        for _ in range(2)
    )
    known = {name: function(p, q).value for name, function in DISTANCES.items()}
    for side in (p, q):
        # in 5 of 200 draws one unit is nearly dead, but for a bias of about 0.1
        side["0.weight"][:5, 1] *= 1e-5
    for name, function in DISTANCES.items():
        found = {
            frame: function(*bring(p, q, symmetry)).value
            for frame, bring in FRAMES.items()
        }
        assert max(found.values()) < known[name] + 0.2
    unit_norm = [
        ps.canonicalize(side, symmetry, scalings="unit_norm", warn=False)
        for side in (p, q)
    ]
    assert ps.marginal_wasserstein(*unit_norm).value > 1  # as it would be


CLUSTERS = ps.Group.declare(
    {"mu": ("k", None), "weights": ("k",)},
    {"mu": torch.Size([4, 2]), "weights": torch.Size([4])},
)
MU = torch.tensor([[0.0, 0.0], [2.5, 0.5], [0.3, 2.8], [3.0, 3.0]])


def clusters(*batch):
    """Draws around four clusters in two dimensions, of which no coordinate tells all of
    them apart.
    """
    weights = torch.distributions.Dirichlet(
        torch.tensor([20.0, 40.0, 60.0, 80.0])
    ).sample(batch)
    return {"mu": MU + 0.4 * torch.randn(*batch, 4, 2), "weights": weights}


@pytest.mark.stochastic
def test_the_summary_modulo_a_symmetry_shows_aligned_draws_and_says_so(capsys):
    posterior = Posterior(CLUSTERS.sample((4, 200))(clusters(4, 200)), kind="chains")
    torch.manual_seed(0)
    print(ps.summary(posterior, CLUSTERS, progress=False))
    shown = capsys.readouterr().out
    head = shown.splitlines()[0]
    assert head.startswith("modulo Group of log-order 3.2: aligned, ")
    assert re.search(
        r"aligned, \d+ of 800 draws moved, mean gaussian cost [\d.e+-]+ -> [\d.e+-]+$",
        head,
    )
    torch.manual_seed(0)
    ps.align_many(posterior, CLUSTERS, progress=False).posterior.summary()
    assert shown.split("\n\n", 1)[1] == capsys.readouterr().out
    # Of the 0.4 of each cluster; mixed labels would spread by 1 and more.
    deviations = [
        float(line.split()[2])
        for line in shown.splitlines()
        if line.strip().startswith("mu[")
    ]
    assert len(deviations) == 8
    assert max(deviations) < 0.55


def test_the_summary_is_a_data_frame_of_what_the_draws_say():
    draws = {
        "mu": torch.randn(4, 100, 2) + torch.tensor([1.0, 5.0]),
        "s": torch.zeros(4, 100),
    }
    table = ps.summary({**draws, "large": torch.randn(4, 100, 40)}, None, prob=0.5)
    assert list(table.index) == ["mu[0]", "mu[1]", "s"]
    flat = draws["mu"].double().flatten(0, 1)
    quantile = torch.quantile(flat, 0.25, 0)
    for name, expected in {"mean": flat.mean(0), "25.0%": quantile}.items():
        shown = torch.tensor(table[name].tolist()[:2]).double()
        torch.testing.assert_close(shown, expected)
    r_hat = chain_statistics(draws["mu"]).r_hat
    assert table.loc["mu[1]", "r_hat"] == pytest.approx(float(r_hat[1]))
    assert set(table.sites) == {"mu", "s", "large"}
    for selected in (table.loc[["s"]], table.round(2), table.copy()):
        assert type(selected) is pd.DataFrame
    shown = table._repr_html_()
    assert "<th>mu[0]</th>" in shown
    assert "<td>large</td>" in shown
    assert "4 chains of 100 draws" in shown


def test_the_summary_names_sites_that_the_declaration_leaves_out(capsys):
    example = {"mu": torch.Size([2]), "tau": torch.Size([2]), "noise": torch.Size([])}
    draws = {site: torch.rand(2, 50, *shape) for site, shape in example.items()}
    print(ps.summary(draws, ps.Group.declare({"mu": ("k",)}, example), progress=False))
    assert "left as drawn: the sites ['tau']" in capsys.readouterr().out


@pytest.mark.parametrize("moves", ["permute", "flip"])
def test_units_that_are_alike_are_said_to_have_uncertain_labels(moves, capsys):
    group = ps.Group.declare({"u": ("k",)}, {"u": torch.Size((4,))}, moves=moves)
    posterior = Posterior({"u": torch.randn(4, 250, 4)}, kind="chains")
    print(ps.summary(posterior, group, progress=False))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("modulo ")
    assert shown[1].startswith("labels are uncertain: in ")
    means = [float(line.split()[1]) for line in shown if line.startswith("u[")]
    # All means are 0: units that are alike get means of their own all the same, which
    # is what the line is about.
    assert (
        max(means) - min(means) > 1.5
        if moves == "permute"
        else min(map(abs, means)) > 0.5
    )


DATA = torch.cat(
    [
        torch.randn(40, generator=torch.Generator().manual_seed(0)) + centre
        for centre in (-2.0, 2.0)
    ]
)
EXCHANGE = Group.declare({"locs": ("k",)}, {"locs": torch.zeros(2)})


def mixture(data, weights):
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    with pyro.plate("data", len(data)):
        pyro.sample(
            "x",
            dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 1.0)),
            obs=data,
        )


def drawn(*weights: float) -> Posterior:
    """Chains in either order of the components, which a posterior knows the model
    of.
    """
    locs = torch.tensor([-2.0, 2.0]) + 0.1 * torch.randn(4, 150, 2)
    locs[2:] = locs[2:].flip(-1)
    return Posterior({"locs": locs}, kind="chains").attach(
        mixture, DATA, torch.tensor(weights)
    )


CALLS = {
    "diagnose": lambda posterior: ps.diagnose(posterior, EXCHANGE),
    "summary": lambda posterior: ps.summary(posterior, EXCHANGE, progress=False),
    "align_many": lambda posterior: ps.align_many(posterior, EXCHANGE, progress=False),
    "common_frame": lambda posterior: ps.common_frame(posterior, posterior, EXCHANGE),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_declared_exchange_of_unequal_components_is_refused(call):
    with pytest.raises(
        ValueError,
        match=r"not invariant under the units \['k'\].*verify_model|verify_model",
    ):
        call(drawn(0.48, 0.52))
    call(drawn(0.5, 0.5))


@pytest.mark.parametrize(("spread", "expected"), [(1.0, "pass"), (1.5, "unknown")])
def test_copies_that_lie_far_apart_hide_no_temperature(spread, expected):
    modes = torch.tensor([[-20.0, 20.0], [20.0, -20.0]])

    def two_modes():
        pyro.sample(
            "locs",
            dist.MixtureSameFamily(
                dist.Categorical(torch.ones(2)), dist.Normal(modes, 1.0).to_event(1)
            ),
        )

    generator = torch.Generator().manual_seed(0)
    noise = spread * torch.randn(8, 250, 2, generator=generator)
    posterior = Posterior(
        {"locs": modes.repeat(4, 1)[:, None] + noise}, kind="chains"
    ).attach(two_modes)
    assert ps.diagnose(posterior, None)["temperature"].status == "unknown"
    diagnosis = ps.diagnose(posterior, EXCHANGE, num_draws=2_000)
    assert diagnosis["temperature"].status == expected
    assert diagnosis.ok == (expected == "pass")
