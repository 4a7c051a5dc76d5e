"""Units in front of a batch normalisation, whose scale only running statistics make up
for, don't vanish.
"""

import pytest
import torch
from torch import nn

from pyro_symmetric.alignment import align
from pyro_symmetric.discovery.find import find_symmetry


def shallow():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 3),
    )


def deep():
    blocks = [
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
    ]
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def trained(make, x, y, steps):
    net = make().train()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    net(x)
    return net.eval()


@pytest.mark.parametrize("shown", [False, True], ids=["weights", "activations"])
@pytest.mark.parametrize(("make", "steps"), [(shallow, 0), (deep, 0), (deep, 10)])
def test_units_that_match_badly_keep_their_size_and_the_network_its_outputs(
    make, steps, shown
):
    torch.manual_seed(0)
    x, y = torch.randn(40, 1, 8, 8), torch.randint(3, (40,))
    net, *others = (trained(make, x, y, steps) for _ in range(21))
    symmetry = find_symmetry(net, x[:2])
    reference, *sources = (symmetry.weights_of(own) for own in (net, *others))
    batch = {
        site: torch.stack([own[site].detach() for own in sources]) for site in reference
    }
    element = align(
        batch, reference, symmetry, activations=(net, x) if shown else None, restarts=0
    ).element
    for number, other in enumerate(others):
        moved, expected = symmetry.act(element.select(number), other), other(x)
        assert (moved(x) - expected).abs().max() < 1e-5 * expected.abs().max()
        # Two scales, each within a factor of four, make 1 / 256; the rest is what the
        # variances differ by themselves.
        for name, value in moved.named_buffers():
            assert (
                not name.endswith("running_var")
                or value.min() > 1e-4 * net.get_buffer(name).min()
            )


def test_planted_scales_of_any_size_are_found_behind_a_normalisation():
    x = torch.randn(40, 1, 8, 8)
    net = trained(deep, x, torch.randint(3, (40,)), 3).double()
    symmetry = find_symmetry(net, x[:2].double())
    for spread in (0.5, 3.0):
        source = symmetry.act(symmetry.scalings.sample(spread=spread), net)
        moved = symmetry.act(align(source, net, symmetry, restarts=0).element, source)
        torch.testing.assert_close(
            moved.state_dict(), net.state_dict(), rtol=1e-6, atol=1e-8
        )
