"""A network's loss by PyTorch's batched products: value and gradient equal autograd's, in any layout and thread."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyro_symmetric.mcmc.density.batched import BatchedLoss
from pyro_symmetric.mcmc.density.feedforward import NetworkProblem, read_layers
from pyro_symmetric.weights import unflatten

ACTIVATIONS = {
    "relu": nn.ReLU(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "softplus": nn.Softplus(2.0, 3.0),
    "leaky_relu": nn.LeakyReLU(0.2),
    "elu": nn.ELU(0.7),
    "hardtanh": nn.Hardtanh(-0.3, 0.4),
}


def loss_of(net: nn.Module, x: Tensor, y: Tensor, batch_size: int | None = None) -> BatchedLoss:
    sizes = {name: parameter.numel() for name, parameter in net.named_parameters()}
    ends = itertools.accumulate(sizes.values())
    offsets = {name: end - size for (name, size), end in zip(sizes.items(), ends, strict=True)}
    categorical = not y.is_floating_point()
    return BatchedLoss(
        NetworkProblem(
            read_layers(net),
            offsets,
            sum(sizes.values()),
            x,
            y,
            "cross-entropy" if categorical else "squares",
            batch_size,
        )
    )


def autograd(net: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of one flat weight and its gradient."""
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    leaf = w.clone().requires_grad_()
    outputs = functional_call(net, unflatten(leaf, shapes, shapes), (x,))
    squares = 0.5 * (outputs - y).square().sum() if y.is_floating_point() else None
    loss = nn.functional.cross_entropy(outputs, y, reduction="sum") if squares is None else squares
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def case(activation: nn.Module, classes: bool) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 5, bias=False), activation, nn.Linear(5, 2)).double()
    x = torch.randn(20, 3, dtype=torch.float64)
    y = torch.randint(2, (20,)) if classes else torch.randn(20, 2, dtype=torch.float64)
    return net, x, y, torch.randn(6, sum(p.numel() for p in net.parameters()), dtype=torch.float64)


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_losses_and_gradients_equal_autograds_with_all_rows_and_with_each_chains_own(name, classes):
    net, x, y, w = case(ACTIVATIONS[name], classes)
    scale, index = torch.rand(6, dtype=torch.float64), torch.randint(20, (6, 7))
    for rows, loss in ((None, loss_of(net, x, y)), (index, loss_of(net, x, y, 7))):
        found, gradient = loss.loss_and_gradient(w, scale, rows)
        for chain in range(6):
            own = slice(None) if rows is None else rows[chain]
            expected, slope = autograd(net, x[own], y[own], w[chain])
            assert found[chain].item() == pytest.approx(expected.item(), rel=1e-12)
            assert torch.allclose(gradient[chain], scale[chain] * slope, rtol=1e-10, atol=1e-12)


def test_weights_may_be_laid_out_in_any_way_and_results_outlive_the_working_memory():
    net, x, y, w = case(nn.Tanh(), True)
    loss, one = loss_of(net, x, y), torch.ones(6, dtype=torch.float64)
    expected = loss.loss_and_gradient(w, one, None)
    kept = [value.clone() for value in expected]
    for given in (w.T.contiguous().T, torch.cat([w, w], 1)[:, : w.shape[1]]):
        for a, b in zip(loss.loss_and_gradient(given, one, None), kept, strict=True):
            assert torch.allclose(a, b, rtol=1e-12)
    loss.loss_and_gradient(w + 1, one, None)
    assert all(torch.equal(a, b) for a, b in zip(expected, kept, strict=True))


def test_threads_that_share_a_loss_dont_disturb_each_other():
    net, x, y, _ = case(nn.SiLU(), False)
    loss, one = loss_of(net, x, y), torch.ones(16, dtype=torch.float64)
    weights = torch.randn(4, 16, sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    expected = [loss.loss_and_gradient(w, one, None)[1] for w in weights]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            found = list(threads.map(lambda w: loss.loss_and_gradient(w, one, None)[1], weights))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
