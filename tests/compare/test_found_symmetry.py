"""Functions of draws and guides find the symmetry of the model by themselves, remove it
where labels are certain, and say what they did."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.compare.diagnosis import agree_modulo_symmetry
from pyro_symmetric.posterior.statistics import chain_statistics

X = torch.cat([torch.randn(20) - 6, torch.randn(20), torch.randn(20) + 6])


def mixture(x: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    fn = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", fn, obs=x)


def regression(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.ones(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def groups_without_data(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    with pyro.plate("groups", 2):
        pyro.sample("theta", dist.Normal(mean, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def drawn(sites: dict[str, Tensor], model, *args) -> ps.Posterior:
    return ps.Posterior(sites, kind="chains").attach(model, *args)


@pytest.fixture
def switching() -> ps.Posterior:
    """Chains of separated components, each in a copy of its own."""
    locs = torch.tensor([-6.0, 0.0, 6.0]) + 0.2 * torch.randn(6, 100, 3)
    weights = dist.Dirichlet(torch.tensor([20.0, 20, 20])).sample((6, 100))
    group = ps.find_symmetry(mixture, X).group
    samples = group.sample((6, 1))({"locs": locs, "weights": weights})
    return drawn(samples, mixture, X)


def test_separated_components_agree_modulo_the_labels_that_are_found(switching, capsys):
    diagnosis = ps.diagnose(switching)
    assert diagnosis.statistics["weights"]["locs"].r_hat.max() > 2
    assert diagnosis.statistics["modulo symmetry"]["locs"].r_hat.max() < 1.05
    line = "modulo 3! labels of (locs, weights), found in the model"
    assert line in repr(diagnosis)
    assert ps.diagnose(switching, None).remarks == ()
    print(ps.summary(switching))
    printed = capsys.readouterr().out
    assert printed.startswith(line)
    means = sorted(
        float(row.split()[1]) for row in printed.splitlines() if " locs[" in row
    )
    assert means == pytest.approx([-6, 0, 6], abs=0.1)


def test_forms_fits_and_tests_of_draws_take_the_symmetry_that_is_found(switching):
    symmetry = ps.find_symmetry(mixture, X)
    forms = ps.canonicalize(switching, warn=False).samples
    expected = ps.canonicalize(switching, symmetry, warn=False).samples
    for site, values in expected.items():
        assert forms[site].equal(values)
    fitted = ps.guides.fit_gaussian(switching)
    assert fitted.group.units.keys() == symmetry.group.units.keys()
    assert ps.invariance_tests(switching).p_value == pytest.approx(
        ps.invariance_tests(switching, symmetry).p_value, rel=0.2
    )


@pytest.mark.parametrize("call", [ps.canonicalize, ps.invariance_tests])
def test_draws_without_a_model_need_a_symmetry_where_one_must_be_removed(call):
    with pytest.raises(ValueError, match=r"carry no model.*pass symmetry="):
        call({"locs": torch.randn(40, 3)})


def test_labels_of_groups_without_data_are_left_alone(capsys):
    """The two means are one normal number each: sorted, they would be -0.56 and 0.56."""
    samples = {"theta": torch.randn(4, 500, 2), "mean": 0.1 * torch.randn(4, 500)}
    posterior = drawn(samples, groups_without_data, torch.randn(20))
    assert posterior.symmetry.permutations.order() == 2
    print(ps.summary(posterior))
    printed = capsys.readouterr().out
    assert (
        "left as drawn: 2! labels of (theta), of which two may as well swap" in printed
    )
    posterior.summary()
    assert printed.endswith(capsys.readouterr().out)
    diagnosis = ps.diagnose(posterior)
    assert "so both count: as drawn R-hat" in str(diagnosis.remarks)


def test_nothing_changes_for_a_model_without_a_symmetry(capsys):
    x = torch.randn(20, 2)
    posterior = drawn({"w": torch.randn(4, 100, 2)}, regression, x, x[:, 0])
    assert posterior.symmetry.log_order() == 0
    print(ps.summary(posterior))
    found = capsys.readouterr().out
    print(ps.summary(posterior, None))
    assert capsys.readouterr().out == found
    assert repr(ps.diagnose(posterior)) == repr(ps.diagnose(posterior, None))
    frame = ps.align_many(posterior)
    assert torch.equal(frame.posterior.samples["w"], posterior.samples["w"])


def test_draws_without_a_model_are_taken_as_drawn_with_a_line(switching, capsys):
    plain = dict(switching.samples)
    assert "they carry no model" in repr(ps.diagnose(plain))
    print(ps.summary(plain))
    assert capsys.readouterr().out.startswith("draws taken as drawn: they carry")
    samples = switching.get_samples()
    frame = ps.align_many(samples)
    assert torch.equal(frame.aligned["locs"], samples["locs"])
    assert "they carry no model" in repr(frame)
    with pytest.warns(UserWarning, match="they carry no model"):
        assert ps.common_frame(samples, samples)[0] is samples
    with pytest.raises(ValueError, match="carry no symmetry"):
        ps.align_many([{"locs": torch.zeros(3)}])


def test_a_saved_posterior_keeps_its_symmetry_without_the_model(switching, tmp_path):
    switching.save(tmp_path / "draws")
    loaded = ps.Posterior.load(tmp_path / "draws")
    assert loaded.source is None
    assert loaded.metadata == switching.metadata
    assert loaded.symmetry.group == switching.symmetry.group
    assert ps.diagnose(loaded).statistics["modulo symmetry"]
    loaded.thin(2).save(tmp_path / "again")
    again = ps.Posterior.load(tmp_path / "again")
    assert again.symmetry.explain("locs") == switching.symmetry.explain("locs")


def test_the_symmetry_is_found_once_and_only_if_asked_for(monkeypatch):
    calls = []

    def counting(x: Tensor) -> None:
        calls.append(1)
        mixture(x)

    posterior = drawn({"locs": torch.randn(2, 100, 3)}, counting, X)
    posterior.summary()
    posterior.thin(2).select(chains=[0])
    assert not calls
    assert posterior.symmetry is posterior.thin(2).symmetry
    assert calls


def test_a_model_whose_symmetry_is_unknown_is_said_to_be_so(capsys):
    def noisy(x: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        mean = torch.nn.functional.dropout(w, 0.5).sum()
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    posterior = drawn({"w": torch.randn(4, 100, 2)}, noisy, torch.tensor(0.3))
    print(ps.summary(posterior))
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.startswith("draws taken as drawn: no symmetry could be looked for:")
    assert "two evaluations" in line


def test_common_frame_and_relabel_take_the_posteriors_symmetry(switching):
    halves = switching.select(slice(3)), switching.select(slice(3, None))
    frames = ps.common_frame(*halves)
    assert abs(ps.mmd(*frames).value) < 0.05 < ps.mmd(*halves).value
    locs = switching.samples["locs"][..., None, :]
    logits = dist.Normal(locs, 1.0).log_prob(X[::4, None])
    relabelled = ps.relabel(switching, probabilities=logits.softmax(-1))
    assert relabelled.samples["locs"].std((0, 1)).max() < 0.5
    with pytest.warns(UserWarning, match="nothing is relabelled"):
        ps.relabel(switching, None, logits.softmax(-1))
    with pytest.raises(ValueError, match="probabilities is missing"):
        ps.relabel(switching)


def test_guides_find_the_models_symmetry_at_their_first_call():
    guide = ps.AutoSymmetrized(mixture, init_scale=0.3)
    guide(X)
    assert guide.group == ps.find_symmetry(mixture, X).finite
    assert ps.AutoSymmetrized(mixture, base=guide).setup(X).group == guide.group
    for base in (ps.AutoUnitBlocks, pyro.infer.autoguide.AutoMultivariateNormal):
        assert ps.AutoSymmetrized(mixture, base=base).setup(X).group == guide.group
    assert ps.evidence(guide, X, num_samples=8).log_order == pytest.approx(math.log(6))
    x = torch.randn(9, 2)
    for plain in (
        ps.AutoSymmetrized(regression).setup(x, x[:, 0]),
        ps.AutoSymmetrized(regression, None).setup(x, x[:, 0]),
    ):
        draw = torch.randn(5, 2)
        base = plain.base.get_posterior()
        assert torch.equal(plain.get_posterior().log_prob(draw), base.log_prob(draw))


def test_a_guide_by_hand_is_symmetrised_over_the_models_symmetry():
    def guide(x: Tensor) -> None:
        pyro.sample("weights", dist.Dirichlet(torch.tensor([3.0, 2.0, 4.0])))
        with pyro.plate("components", 3):
            pyro.sample("locs", dist.Normal(torch.tensor([-1.0, 0.0, 2.0]), 0.7))

    losses = []
    for symmetrized in (
        ps.symmetrize(guide, model=mixture),
        ps.symmetrize(guide, ps.find_symmetry(mixture, X)),
        ps.symmetrize(guide, None),
        guide,
    ):
        pyro.set_rng_seed(0)
        losses.append(pyro.infer.Trace_ELBO().loss(mixture, symmetrized, X))
    assert losses[0] == losses[1] != losses[2] == losses[3]
    with pytest.raises(ValueError, match="pass model="):
        ps.symmetrize(guide)


def factor_analysis(x: Tensor) -> None:
    prior = dist.Laplace(torch.zeros(3, 2), 1.0).to_event(2)
    loadings = pyro.sample("loadings", prior)
    covariance = loadings @ loadings.mT + torch.eye(3)
    with pyro.plate("rows", len(x)):
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(3), covariance), obs=x)


def network(x: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    v = pyro.sample("v", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(torch.tanh(x[:, None] * w) @ v, 0.1), obs=x.sin())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # few draws don't converge
@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (mixture, X[::4], "3! labels of (locs, weights)"),
        (
            factor_analysis,
            torch.randn(8, 3),
            "2! labels of (loadings), 2^2 signs of (loadings)",
        ),
        (network, X[:8], "3! labels of (v, w), 2^3 signs of (v, w)"),
    ],
)
def test_a_model_goes_through_guide_chains_and_tables_without_a_group(
    model, data, words, capsys
):
    guide = ps.AutoSymmetrized(model)
    optimiser = pyro.optim.Adam({"lr": 0.01})
    pyro.infer.SVI(model, guide, optimiser, pyro.infer.Trace_ELBO()).step(data)
    posterior = ps.sample(
        ps.HMC(model, num_steps=2),
        data,
        num_samples=50,
        num_warmup=10,
        num_chains=2,
        engine="eager",
        progress=False,
    )
    assert posterior.symmetry.finite == guide.group
    assert f"modulo {words}, found in the model" in repr(ps.diagnose(posterior))
    print(ps.summary(posterior, progress=False))
    assert words.partition(" ")[0] in capsys.readouterr().out
    tree = ps.align_many(posterior, progress=False).posterior.to_arviz()
    assert set(tree["posterior"].data_vars) == set(posterior.samples)


def root(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 10.0).to_event(1))
    pyro.sample("y", dist.Normal(w.square().sum(), 1.0), obs=y)


def test_a_run_warns_of_chains_that_disagree_modulo_the_symmetry_only(switching):
    """Chains that start in two copies of the mode are no news (warnings are errors)."""
    start = {"w": torch.tensor([[-3.0], [3.0], [-3.0], [3.0]])}
    posterior = ps.sample(
        ps.HMC(root, step_size=0.1, num_steps=4),
        torch.tensor(9.0),
        initial=start,
        num_samples=200,
        num_warmup=60,
        num_chains=4,
        engine="eager",
        seed=0,
        progress=False,
    )
    assert chain_statistics(posterior.samples["w"]).r_hat > 1.3
    assert agree_modulo_symmetry(switching)
    shifts = torch.tensor([0.0, 0, 0, 0.5, 0.5, 0.5]).view(6, 1, 1)
    shifted = {"locs": switching.samples["locs"] + shifts}
    assert not agree_modulo_symmetry(switching.map(lambda sites: {**sites, **shifted}))
    broken = {"locs": switching.samples["locs"] / 0}
    assert not agree_modulo_symmetry(switching.map(lambda sites: {**sites, **broken}))


@pytest.mark.parametrize("call", [ps.diagnose, ps.summary])
def test_more_chains_than_draws_are_asked_about(call):
    with pytest.warns(UserWarning, match=r"100 chains of 3 draws.*group_by_chain"):
        call({"locs": torch.randn(100, 3)})
    call({"locs": torch.randn(100, 25)})
