"""Seeds: what they reach, and that nothing else is touched."""

import pytest
import torch

from pyro_symmetric.mcmc.generators import seeded


def test_a_seed_reproduces_and_leaves_the_generator_as_it_was():
    torch.manual_seed(5)
    with seeded(1):
        first = torch.rand(3)
    after = torch.rand(3)
    with seeded(1):
        assert torch.equal(torch.rand(3), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_cuda_sleeps_on_during_a_run_on_the_cpu(device, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("CUDA was woken up")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("get_rng_state", "set_rng_state", "manual_seed_all", "manual_seed", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    with seeded(1, device):
        torch.rand(1)


@pytest.mark.cuda
def test_the_generator_of_the_runs_gpu_is_seeded_and_put_back():
    torch.cuda.manual_seed(5)
    with seeded(1, "cuda"):
        first = torch.rand(3, device="cuda")
    after = torch.rand(3, device="cuda")
    with seeded(1):  # CUDA is in use by now
        assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(3, device="cuda"), after)
