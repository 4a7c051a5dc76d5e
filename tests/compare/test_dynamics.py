import pytest
import torch
from scipy.stats import kendalltau
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.compare.dynamics import SortingTracker, kendall_tau


def orders(*shape):
    return torch.rand(shape).argsort(-1)


def test_tau_equals_scipy_on_the_ranks_of_units():
    first, second = orders(3, 1, 9), orders(4, 9)
    found = kendall_tau(first, second)
    assert found.shape == (3, 4)
    for i in range(3):
        for j in range(4):
            expected = kendalltau(
                first[i, 0].argsort().numpy(), second[j].argsort().numpy()
            ).statistic
            assert float(found[i, j]) == pytest.approx(expected, abs=1e-12)


def relu_net(width=5):
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))


def test_tracker_sees_the_swaps_that_were_made():
    net = relu_net()
    symmetry = ps.find_symmetry(net, torch.randn(3, 2))
    tracker = SortingTracker(symmetry)
    with torch.no_grad():
        net[0].weight.copy_(
            torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])[:, None] * torch.tensor([1.0, 0.5])
        )
        tracker(net)
        net[0].weight.mul_(1.1)  # no unit overtakes another
        tracker(net)
        net[0].weight[0] = 10.0  # the first overtakes four
        tracker(net)
    (name,) = tracker.history
    torch.testing.assert_close(
        tracker.history[name], torch.tensor([1.0, 1 - 2 * 4 / 10]).double()
    )
    torch.testing.assert_close(tracker.mean, tracker.history[name])


def test_tracker_follows_a_batch_of_runs_and_refuses_another_batch():
    symmetry = ps.find_symmetry(relu_net(), torch.randn(3, 2))
    tracker = SortingTracker(symmetry.permutations, key="norm")
    runs = [
        {name: torch.randn(7, *p.shape) for name, p in relu_net().named_parameters()}
        for _ in range(3)
    ]
    for weights in runs:
        tracker(weights)
    assert tracker.mean.shape == (2, 7)
    # independent orders of 5 units: sd of tau 0.41; the mean of 14 lies within 0.5 but
    # for a chance of 5e-6
    assert abs(float(tracker.mean.mean())) < 0.5
    with pytest.raises(
        ValueError, match=r"batch shape \(2,\), but \(7,\) the last time"
    ):
        tracker({site: value[:2] for site, value in runs[0].items()})
