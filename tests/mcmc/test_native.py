"""The compiled engine by itself: its functions to rounding, its inputs as they come, its threads apart."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from pyro_symmetric.mcmc.density.engine import Unavailable
from pyro_symmetric.mcmc.density.feedforward import NetworkProblem, read_layers
from pyro_symmetric.mcmc.density.native import NativeLoss
from pyro_symmetric.mcmc.density.native.compiler import library
from pyro_symmetric.mcmc.density.native.loss import WEIGHT_BYTES

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _with_a_compiler():
    try:
        library()
    except Unavailable as reason:
        pytest.skip(str(reason))


def engine(net: nn.Module, x: Tensor, y: Tensor, categorical: bool = False, batch_size: int | None = None):
    offsets, dim = {}, 0
    for name, parameter in net.named_parameters():
        offsets[name], dim = dim, dim + parameter.numel()
    return NativeLoss(
        NetworkProblem(read_layers(net), offsets, dim, x, y, "cross-entropy" if categorical else "squares", batch_size)
    )


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.2),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "silu": nn.SiLU(),
    "elu": nn.ELU(0.7),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 6e-7), (torch.float64, 2e-15)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes_are_right_to_rounding_wherever_the_input_is(name, dtype, tolerance):
    # One row, x = 1, weights (w, 1): the loss is f(w)² / 2, its gradients are f(w) f'(w) and f(w)².
    net = nn.Sequential(nn.Linear(1, 1, bias=False), ACTIVATIONS[name], nn.Linear(1, 1, bias=False)).to(dtype)
    w = torch.cat([torch.linspace(-120, 120, 20_001), torch.linspace(-1, 1, 20_001), torch.tensor([1e4, -1e4])])
    w = torch.stack([w, torch.ones_like(w)], 1).to(dtype)
    one, zero = torch.ones(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    loss, gradient = engine(net, one, zero).loss_and_gradient(w, torch.ones_like(w[:, 0]), None)
    exact = w[:, 0].double().requires_grad_()
    value = ACTIVATIONS[name](exact)
    (slope,) = torch.autograd.grad(value.sum(), exact)
    value = value.detach()
    size = value.abs().clamp(min=1)
    assert ((loss - 0.5 * value.square()).abs() <= tolerance * size.square()).all()
    assert ((gradient[:, 0] - value * slope).abs() <= 2 * tolerance * size).all()
    assert ((gradient[:, 1] - value.square()).abs() <= 2 * tolerance * size.square()).all()


def test_weights_scales_and_batches_may_be_laid_out_in_any_way():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    found = engine(net, x, y, categorical=True, batch_size=5)
    dim = sum(parameter.numel() for parameter in net.parameters())
    w, scale, index = torch.randn(6, dim), torch.rand(6), torch.randint(20, (6, 5))
    expected = found.loss_and_gradient(w, scale, index)
    layouts = [
        (w.T.contiguous().T, scale, index),
        (torch.cat([w, w], 1)[:, :dim], scale.repeat_interleave(2)[::2], index.T.contiguous().T),
        (w, scale, index.int()),
    ]
    for given in layouts:
        for a, b in zip(found.loss_and_gradient(*given), expected, strict=True):
            assert torch.equal(a, b)
    once = found.loss_and_gradient(w[:1].expand(6, -1), scale[:1].expand(6), index[:1].expand(6, -1))
    assert torch.equal(once[1], expected[1][:1].expand(6, -1))


def test_threads_that_share_an_engine_dont_disturb_each_other():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 30), nn.SiLU(), nn.Linear(30, 1))
    shared = engine(net, torch.randn(300, 5), torch.randn(300, 1))
    weights = torch.randn(4, 16, sum(parameter.numel() for parameter in net.parameters()))
    one = torch.ones(16)
    expected = [shared.loss_and_gradient(w, one, None)[1] for w in weights]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            found = list(threads.map(lambda w: shared.loss_and_gradient(w, one, None)[1], weights))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_it_does_not_serve_it_says():
    x, y = torch.randn(4, 3), torch.randn(4, 1)
    with pytest.raises(Unavailable, match="lacks gelu"):
        engine(nn.Sequential(nn.Linear(3, 2), nn.GELU(), nn.Linear(2, 1)), x, y)
    with pytest.raises(Unavailable, match=r"not in torch\.float16 on cpu"):
        engine(nn.Linear(3, 1), x.half(), y.half())
    width = WEIGHT_BYTES // 4
    with pytest.raises(Unavailable, match="wide enough"):
        engine(nn.Linear(width + 1, 1), torch.zeros(2, width + 1), torch.zeros(2, 1))
