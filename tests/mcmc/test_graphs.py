"""The logic around CUDA graphs, with a capture that needs no GPU; on a GPU with one that does."""

import warnings

import pytest
import torch
from torch import nn

from pyro_symmetric.likelihoods import CategoricalLikelihood
from pyro_symmetric.mcmc.density import graphs
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.graphs import Graphs
from pyro_symmetric.models import BayesianModel


def repeated(evaluate):
    """As a graph does: results lie at one place, and a replay writes there."""
    results = tuple(part.clone() for part in evaluate())

    def replay():
        for old, new in zip(results, evaluate(), strict=True):
            old.copy_(new)

    return replay, results


def plain(z, rows):
    shift = 0.0 if rows is None else rows["rows"].double().mean(-1)
    return z.square().sum(-1) / 2 + shift, z.clone()


@pytest.fixture
def captures(monkeypatch):
    """Evaluations that were captured, in order."""
    seen = []

    def capture(evaluate):
        seen.append(evaluate)
        return repeated(evaluate)

    monkeypatch.setattr(graphs, "capture", capture)
    return seen


def test_a_graph_gives_what_the_evaluation_gives_and_results_are_the_callers(captures):
    engine = Graphs(None, plain)
    before = []
    for k in range(4):
        z, rows = torch.randn(3, 2, dtype=torch.float64), {"rows": torch.randint(9, (3, 4))}
        found, expected = engine.energy_and_gradient(z, rows), plain(z, rows)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right)
        before.append((found, expected))
        engine.energy_and_gradient(torch.randn(5, 2, dtype=torch.float64), None)  # another shape
        assert len(captures) == 2, k
    for found, expected in before:  # not overwritten by later calls
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("part", [0, 1])
def test_a_graph_that_forgets_its_points_is_given_up_loudly(monkeypatch, part):
    def frozen(evaluate):
        replay, results = repeated(evaluate)
        kept = results[part].clone()
        return lambda: (replay(), results[part].copy_(kept)), results

    monkeypatch.setattr(graphs, "capture", frozen)
    engine, z = Graphs(None, plain), torch.randn(3, 2)
    with pytest.warns(RuntimeWarning, match="results differ"):
        engine.energy_and_gradient(z, None)
    for _ in range(2):  # and isn't tried again
        z = torch.randn(3, 2)
        torch.testing.assert_close(engine.energy_and_gradient(z, None), plain(z, None))


def test_what_cannot_be_captured_is_evaluated_as_it_was(monkeypatch):
    def refuse(evaluate):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "capture", refuse)
    engine, z = Graphs(None, plain), torch.randn(3, 2)
    with pytest.warns(RuntimeWarning, match="not permitted"):
        found = engine.energy_and_gradient(z, None)
    torch.testing.assert_close(found, plain(z, None))
    torch.testing.assert_close(engine.energy_and_gradient(z + 1, None), plain(z + 1, None))


def test_no_graph_is_verified_where_no_energy_is_finite(captures):
    def walled(z, rows):
        energy, gradient = plain(z, rows)
        return torch.where(z[:, 0] > 0, energy, torch.inf), gradient

    engine, z = Graphs(None, walled), torch.ones(2, 2)
    assert torch.isinf(engine.energy_and_gradient(-z, None)[0]).all()
    assert not captures
    engine.energy_and_gradient(z, None)
    assert len(captures) == 1
    assert torch.isinf(engine.energy_and_gradient(-z, None)[0]).all()


def network(device="cpu"):
    model = BayesianModel(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), likelihood=CategoricalLikelihood()
    )
    return model.to(device), torch.randn(20, 3, device=device), torch.randint(2, (20,), device=device)


def test_a_networks_graph_has_working_memory_of_its_own(captures):
    model, *data = network()
    density = Density(model, data, engine="torch")
    inner = density._fast
    engine = Graphs(inner, density.without_compiling)
    for chains in (2, 7, 2):  # the larger one takes memory that the smaller one's engine had, if they share it
        z = torch.randn(chains, density.dim, device=density.device)
        engine.energy_and_gradient(z, None)
        for mine, right in zip(engine.energy_and_gradient(z, None), density.without_compiling(z), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    owners = [graph.owner._inner for graph in engine._graphs.values()]
    assert len({id(one._loss) for one in [inner, *owners]}) == 3
    assert not {id(room) for room in inner._loss._rooms.values()} & {
        id(room) for one in owners for room in one._loss._rooms.values()
    }


def test_without_a_gpu_pytorch_serves_and_a_warning_says_so():
    model, *data = network()
    with pytest.warns(RuntimeWarning, match="need a GPU"):
        density = Density(model, data, device="cpu", engine="graphs")
    assert density.engine == "torch"


@pytest.mark.cuda
@pytest.mark.parametrize("hidden", [False, True])
def test_on_a_gpu_values_and_gradients_are_those_of_pytorch(hidden):
    model, *data = network("cuda")
    form = (lambda x, y: model(x, y)) if hidden else model  # a function hides that it is a network
    density, right = Density(form, data, engine="graphs"), Density(form, data, engine="torch")
    assert density.engine == "graphs"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a device that can't capture
        for chains in (3, 3, 5, 3):
            z = torch.randn(chains, density.dim, device="cuda")
            for mine, expected in zip(density.energy_and_gradient(z), right.energy_and_gradient(z), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
