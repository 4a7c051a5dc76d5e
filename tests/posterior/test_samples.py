"""One convention of draws: what every function takes a Posterior, samples and chains
for.
"""

import pytest
import torch

import pyro_symmetric as ps

CHAINS, DRAWS = 3, 40
GROUP = ps.Group.declare(
    {"w": ("k", None), "b": ("k",)}, {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
)
NET = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
SYMMETRY = ps.find_symmetry(NET, torch.zeros(3, 2))


def draws(shapes) -> ps.Posterior:
    torch.manual_seed(0)
    return ps.Posterior(
        {site: torch.randn(CHAINS, DRAWS, *shape) for site, shape in shapes.items()},
        kind="chains",
    )


def flat(found, site: str = "w") -> torch.Tensor:
    return found.get_samples()[site] if isinstance(found, ps.Posterior) else found[site]


DECLARED, NETWORKS = draws(GROUP.site_shapes), draws(SYMMETRY.site_shapes)
OTHER = {site: torch.randn(50, *shape) for site, shape in GROUP.site_shapes.items()}
PROBABILITIES = torch.rand(CHAINS, DRAWS, 10, 2).softmax(-1)

# Functions of samples, of each draw by itself, and of chains: posterior -> numbers.
OF_SAMPLES = {
    "mmd": lambda p: ps.mmd(p, OTHER).value,
    "marginal_wasserstein": lambda p: ps.marginal_wasserstein(p, OTHER).value,
    "common_frame": lambda p: flat(ps.common_frame(p, OTHER, GROUP)[0]),
    "align_many": lambda p: flat(
        ps.align_many(p, GROUP, seed=0, progress=False).aligned
    ),
}
OF_EACH = {
    "canonicalize": (lambda p: flat(ps.canonicalize(p, GROUP, warn=False)), DECLARED),
    "minimal_mass": (lambda p: ps.minimal_mass(p, SYMMETRY).mass, NETWORKS),
    "minimal_mass's weights": (
        lambda p: flat(ps.minimal_mass(p, SYMMETRY).weights, "0.weight"),
        NETWORKS,
    ),
    "predict": (
        lambda p: ps.predict(
            p, ps.BayesianModel(NET), torch.ones(4, 2), progress=False
        ),
        NETWORKS,
    ),
}
OF_CHAINS = {
    "diagnose": lambda p: str(ps.diagnose(p, GROUP).to_dict()),
    "diagnose, without a group": lambda p: str(ps.diagnose(p).to_dict()),
    "summary": lambda p: repr(ps.summary(p, GROUP, seed=0, progress=False)),
    "summary, without a group": lambda p: repr(ps.summary(p)),
    "relabel": lambda p: flat(ps.relabel(p, GROUP, PROBABILITIES)),
}


@pytest.mark.parametrize("call", OF_SAMPLES.values(), ids=OF_SAMPLES)
def test_to_functions_of_samples_a_posterior_is_its_draws_and_a_dictionary_of_chains_is_none(
    call,
) -> None:
    assert torch.equal(
        *map(torch.as_tensor, (call(DECLARED), call(DECLARED.get_samples())))
    )
    with pytest.raises(ValueError, match="shape"):
        call(DECLARED.samples)


@pytest.mark.parametrize(("call", "posterior"), OF_EACH.values(), ids=OF_EACH)
def test_what_is_asked_of_each_draw_keeps_the_batch_shape_of_a_dictionary(
    call, posterior
) -> None:
    one_by_one, chains = call(posterior), call(posterior.samples)
    assert torch.equal(one_by_one, call(posterior.get_samples()))
    assert chains.shape[:2] == (CHAINS, DRAWS)
    assert torch.allclose(chains.flatten(0, 1), one_by_one)


@pytest.mark.parametrize("name", OF_CHAINS)
def test_where_chains_matter_a_dictionary_holds_chains(name) -> None:
    found = []
    for given in (DECLARED, DECLARED.samples):
        torch.manual_seed(0)  # of random starts
        result = OF_CHAINS[name](given)
        found.append(result.tolist() if isinstance(result, torch.Tensor) else result)
    assert found[0] == found[1]
    if "without" not in name:
        with pytest.raises(
            ValueError,
            match=r"has shape \(120, 2, 3\); it must be \(chains, draws, 2, 3\)",
        ):
            OF_CHAINS[name](DECLARED.get_samples())


def test_tests_of_invariance_take_a_dictionary_as_independent_samples_and_thin_chains() -> (
    None
):
    independent = ps.invariance_tests(DECLARED.get_samples(), GROUP)
    assert independent.num_samples == (CHAINS * DRAWS,)
    assert ps.invariance_tests(DECLARED, GROUP).num_samples < independent.num_samples
    assert (
        ps.invariance_tests(DECLARED, GROUP, thin=False).p_value == independent.p_value
    )
    assert ps.mmd_test(
        DECLARED.get_samples(), OTHER, num_permutations=20
    ).num_samples == (CHAINS * DRAWS, 50)
    with pytest.raises(
        ValueError,
        match=r"weights\['w'\] has shape \(3, 40, 2, 3\); it must be \(samples, 2, 3\)",
    ):
        ps.invariance_tests(DECLARED.samples, GROUP)


def test_draws_of_a_posterior_come_back_as_a_posterior() -> None:
    for found in (
        ps.canonicalize(DECLARED, GROUP, warn=False),
        ps.minimal_mass(NETWORKS, SYMMETRY).weights,
        ps.common_frame(DECLARED, OTHER, GROUP)[0],
        ps.align_many(DECLARED, GROUP, progress=False).aligned,
        ps.relabel(DECLARED, GROUP, PROBABILITIES),
    ):
        assert isinstance(found, ps.Posterior)
        assert (found.num_chains, found.kind) == (CHAINS, "chains")
