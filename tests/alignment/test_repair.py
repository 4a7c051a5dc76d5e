"""Statistics put right along a path, against PyTorch's own training mode and against measured activations."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pyro_symmetric.alignment import loss_barrier
from pyro_symmetric.alignment.repair import Repair
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Weights


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3),
        nn.BatchNorm2d(3, affine=False),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 2),
    )


def parameters(net: nn.Module) -> Weights:
    return {name: value.detach() for name, value in net.named_parameters()}


def stacked(nets: list[nn.Module]) -> Weights:
    each = [parameters(net) for net in nets]
    return {name: torch.stack([weights[name] for weights in each]) for name in each[0]}


def reset_and_trained(net: nn.Module, batches: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """PyTorch's way: reset running statistics, and let training mode average over the batches."""
    net = copy.deepcopy(net).eval()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    with torch.no_grad():
        for batch in batches:
            net(batch)
    return {name: value for name, value in net.named_buffers() if value.is_floating_point()}


def test_statistics_of_many_networks_are_those_of_pytorch_s_training_mode() -> None:
    nets: list[nn.Module] = [convolutional() for _ in range(3)]
    x = 3 * torch.randn(42, 1, 8, 8) + 1
    repair = Repair(nets[0], x, batch_size=16)
    assert repair.kind == "statistics"
    found = repair(stacked(nets), 0.5)
    for s, net in enumerate(nets):
        for name, expected in reset_and_trained(net, x.split(14)).items():
            torch.testing.assert_close(found[name][s], expected)
    before = dict(nets[0].named_buffers())
    assert all(not value.any() for name, value in before.items() if name.endswith("mean"))  # the net stays as it is


@pytest.mark.parametrize(("rows", "batch_size"), [(130, 128), (129, 128), (257, 64)])
def test_a_few_rows_over_a_batch_leave_statistics_near_those_of_all_rows_at_once(rows: int, batch_size: int) -> None:
    """Equal batches of 52 rows and more are within 15 % of the variances of all; a last batch of 2 rows, weighed like
    the others, was off by half of them. Means of the first layer, which no batch changes, are exact."""
    net, x = dense(), torch.randn(rows, 3)
    parts, whole = (Repair(net, x, batch_size=size)(stacked([net]), 0.0) for size in (batch_size, rows))
    for name in ("1.running_var", "4.running_var"):
        ratio = parts[name] / whole[name]
        assert float(ratio.min()) > 0.85
        assert float(ratio.max()) < 1.15
    torch.testing.assert_close(parts["1.running_mean"], whole["1.running_mean"])


def test_no_batch_is_a_single_row() -> None:
    net, x = dense(), torch.randn(5, 3)
    found = Repair(net, x, batch_size=2)(stacked([net]), 0.0)
    assert all(bool(torch.isfinite(value).all()) for value in found.values())


def dense() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)
    )


def deep(width: int = 12) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 2),
    )  # fmt: skip


def preactivations(net: nn.Module, weights: Weights, x: Tensor, name: str) -> Tensor:
    found: list[Tensor] = []
    handle = net.get_submodule(name).register_forward_hook(lambda m, a, out: found.append(out))
    with torch.no_grad():
        torch.func.functional_call(net, weights, (x,))
    handle.remove()
    return found[0]


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_rescaled_units_have_means_and_deviations_between_those_of_the_ends(t: float) -> None:
    first, second, x = deep(), deep(), torch.randn(50, 3)
    repair = Repair(first, x, (parameters(first), parameters(second)), batch_size=20)
    assert repair.kind == "rescaling"
    ends = parameters(first), parameters(second)
    middle = {name: torch.lerp(ends[0][name], ends[1][name], t) for name in ends[0]}
    found = {name: value[0] for name, value in repair({k: v[None] for k, v in middle.items()}, t).items()}
    for name in ("0", "2", "4"):
        z = preactivations(first, found, x, name)
        z0, z1 = preactivations(first, ends[0], x, name), preactivations(first, ends[1], x, name)
        torch.testing.assert_close(z.mean(0), torch.lerp(z0.mean(0), z1.mean(0), t), atol=1e-5, rtol=1e-4)
        expected = torch.lerp(z0.std(0, correction=0), z1.std(0, correction=0), t)
        torch.testing.assert_close(z.std(0, correction=0), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["6.weight"], middle["6.weight"])
    if t in (0.0, 1.0):
        torch.testing.assert_close(found, middle, atol=1e-5, rtol=1e-4)


def test_convolutions_are_rescaled_channel_by_channel_and_dead_ones_stay() -> None:
    nets = [nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2)) for _ in range(2)]
    with torch.no_grad():
        for net in nets:
            net[0].weight[0] = 0.0
    x = torch.randn(30, 1, 6, 6)
    ends = [parameters(net) for net in nets]
    repair = Repair(nets[0], x, ends)
    middle = {name: (ends[0][name] + ends[1][name])[None] / 2 for name in ends[0]}
    found = {name: value[0] for name, value in repair(middle, 0.5).items()}
    z, z0, z1 = (preactivations(nets[0], weights, x, "0") for weights in (found, *ends))
    deviations = [value.std((0, 2, 3), correction=0) for value in (z, z0, z1)]
    torch.testing.assert_close(deviations[0], (deviations[1] + deviations[2]) / 2, atol=1e-5, rtol=1e-4)
    assert bool(torch.isfinite(found["0.weight"]).all())


def test_batch_normalised_networks_lose_their_barrier_to_new_statistics() -> None:
    """One network, and its copy with the first layer's units scaled: by new statistics all is one function."""
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval().requires_grad_(False)
    x = torch.randn(200, 3)
    model = BayesianModel(net, 1.0, "categorical")
    net.load_state_dict(reset_and_trained(net, (x,)), strict=False)
    scaled = copy.deepcopy(net)
    for value in (scaled[0].weight, scaled[0].bias, scaled[1].running_mean):
        value *= 4.0
    scaled[1].running_var *= 16.0
    y = net(x).argmax(-1)
    stale = parameters(net), parameters(scaled)
    with pytest.warns(UserWarning, match="no running statistics"):
        plain = loss_barrier(*stale, model, (x, y), num_points=5)
    repaired = loss_barrier(*stale, model, (x, y), num_points=5, repair=x)
    assert float(plain.losses["loss"].max() - plain.losses["loss"].min()) > 0.05
    assert float(repaired.losses["loss"].max() - repaired.losses["loss"].min()) < 1e-3


def test_repair_helps_plain_networks() -> None:
    """Independent wide networks fall together half-way; units that vary as much as those of the ends do not."""
    nets = [deep(200).eval() for _ in range(2)]
    x = torch.randn(100, 3)
    middle = {name: value.mean(0, keepdim=True) for name, value in stacked([*nets]).items()}
    repair = Repair(nets[0], x, (parameters(nets[0]), parameters(nets[1])))
    found = repair(middle, 0.5)
    ends = torch.stack([preactivations(nets[0], parameters(net), x, "4").std(0).mean() for net in nets]).mean()
    fallen, mended = (
        preactivations(nets[0], {k: v[0] for k, v in w.items()}, x, "4").std(0).mean() for w in (middle, found)
    )
    assert float(fallen) < 0.8 * float(ends)
    assert float(mended) == pytest.approx(float(ends), rel=1e-3)


def test_what_cannot_be_repaired_is_named() -> None:
    with pytest.raises(ValueError, match="nothing to repair"):
        Repair(nn.Linear(2, 2), torch.randn(4, 2))
    with pytest.raises(ValueError, match="at least 2 rows"):
        Repair(deep(), torch.randn(1, 3))
