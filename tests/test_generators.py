"""The global generators while they are forked: what a seed reaches, and that nothing else is touched."""

import contextlib
import functools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pyro_symmetric._process import forked


def test_a_seed_reproduces_and_leaves_the_generator_as_it_was():
    torch.manual_seed(5)
    with forked(1):
        first = torch.rand(3, device="cpu")
    after = torch.rand(3, device="cpu")
    with forked(1):
        assert torch.equal(torch.rand(3, device="cpu"), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3, device="cpu"), after)


def test_a_generator_gives_other_numbers_each_time_and_the_same_ones_from_the_same_state():
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(2):
        with forked(generator):
            found.append(torch.rand(3, device="cpu"))
    assert not torch.equal(*found)
    with forked(torch.Generator().manual_seed(3)):
        assert torch.equal(torch.rand(3, device="cpu"), found[0])


@pytest.mark.parametrize("device", [None, "cpu"])
def test_cuda_sleeps_on_during_a_run_on_the_cpu(device, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("CUDA was woken up")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("get_rng_state", "set_rng_state", "manual_seed_all", "manual_seed", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    with forked(1, device):
        torch.rand(1)


@pytest.mark.cuda
def test_the_generator_of_the_runs_gpu_is_seeded_and_put_back():
    torch.cuda.manual_seed(5)
    with forked(1, "cuda"):
        first = torch.rand(3, device="cuda")
    after = torch.rand(3, device="cuda")
    with forked(2):  # seeds no GPU that it doesn't name, and puts back all that are in use
        assert not torch.equal(torch.rand(3, device="cuda"), first)
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(3, device="cuda"), after)


# threads ------------------------------------------------------------------------------------------------------------


def in_threads(*functions):
    """The results of functions that are called at once, each in a thread of its own."""
    gate = threading.Barrier(len(functions))

    def through_the_gate(function):
        gate.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as threads:
        futures = [threads.submit(through_the_gate, function) for function in functions]
        return [future.result(timeout=120) for future in futures]


def draws(seed):
    with forked(seed):
        values = []
        for _ in range(20):
            values.append(torch.rand(3, device="cpu"))
            time.sleep(1e-4)  # another thread's chance
        return torch.cat(values)


def test_seeds_of_several_threads_give_what_they_give_alone():
    alone = [draws(seed) for seed in range(6)]
    found = in_threads(*(functools.partial(draws, seed) for seed in range(6)), functools.partial(draws, None))
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=False))


HOST = {
    "PyTorch": lambda: torch.rand(3, device="cpu").tolist(),
    "NumPy": lambda: np.random.rand(3).tolist(),  # noqa: NPY002
    "Python": lambda: [random.random() for _ in range(3)],
}


@pytest.mark.parametrize("draw", HOST.values(), ids=HOST)
def test_numbers_are_repeated_whoever_draws_them_and_no_generator_is_disturbed(draw):
    found = []
    for seed in (1, 1, 2):
        with forked(seed, host=True):
            found.append(draw())
    assert found[0] == found[1] != found[2]
    torch.manual_seed(5), np.random.seed(5), random.seed(5)  # noqa: NPY002
    first = draw()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)  # noqa: NPY002
    with contextlib.suppress(ZeroDivisionError), forked(1, host=True):
        draw()
        raise ZeroDivisionError
    assert draw() == first
