import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.stats import wasserstein_distance

from pyro_symmetric.compare import marginal_wasserstein


@pytest.mark.parametrize(("m", "n"), [(20, 20), (20, 30), (17, 5), (1, 4), (12, 18)])
def test_first_order_equals_scipy(m, n):
    p, q = {"0.w": torch.randn(m, 3, 2)}, {"0.w": 2 * torch.randn(n, 3, 2) + 1}
    found = marginal_wasserstein(p, q).each["0.w"].numpy()
    for i, j in np.ndindex(3, 2):
        expected = wasserstein_distance(p["0.w"][:, i, j].numpy(), q["0.w"][:, i, j].numpy())
        assert float(found[i, j]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("order", [1, 2, 3.5])
def test_every_order_equals_the_transport_problem(order):
    x, y = torch.randn(5, dtype=torch.float64), torch.randn(7, dtype=torch.float64) + 0.5
    cost = (x[:, None] - y).abs() ** order
    rows, columns = np.kron(np.eye(5), np.ones(7)), np.kron(np.ones(5), np.eye(7))
    solution = linprog(
        cost.reshape(-1).numpy(),
        A_eq=np.vstack([rows, columns]),
        b_eq=np.concatenate([np.full(5, 1 / 5), np.full(7, 1 / 7)]),
    )
    found = marginal_wasserstein({"w": x}, {"w": y}, order)["mean"]
    assert found == pytest.approx(solution.fun ** (1 / order), rel=1e-6)


def test_layers_are_summarised(monkeypatch):
    p = {"0.w": torch.randn(9, 4, 2), "0.b": torch.randn(9, 4), "1.w": torch.randn(9, 3)}
    q = {site: torch.randn_like(value) for site, value in p.items()}
    whole = marginal_wasserstein(p, q)
    monkeypatch.setattr("pyro_symmetric.compare.wasserstein._CHUNK_ENTRIES", 18 * 3)
    result = marginal_wasserstein(p, q)
    values = {site: result.each[site].numpy().reshape(-1) for site in p}
    first = np.concatenate([values["0.w"], values["0.b"]])
    layer = result.parts["0"]
    expected = {"num_weights": 12, "median": np.median(first), "mean": first.mean(), "maximum": first.max()}
    assert layer == pytest.approx(expected)
    everything = np.concatenate([first, values["1.w"]])
    assert result.totals == pytest.approx(
        {"median": np.median(everything), "mean": everything.mean(), "maximum": everything.max()}
    )
    assert result.value == result["mean"]
    assert result.each["0.w"].shape == (4, 2)
    assert result.parts == whole.parts


@pytest.mark.parametrize(("p", "scale"), [(8, 1e-45), (20, 1e-17), (50, 1e-8), (50, 1e8), (400, 1.0)])
def test_high_orders_of_small_and_large_weights_keep_their_digits(p: float, scale: float) -> None:
    """Two samples of one shape, apart by twice the scale: any order has that distance."""
    x = {"w": torch.linspace(0, 1, 50, dtype=torch.float64)[:, None] * scale}
    y = {"w": x["w"] + 2 * scale}
    assert marginal_wasserstein(x, y, p)["mean"] == pytest.approx(2 * scale)
