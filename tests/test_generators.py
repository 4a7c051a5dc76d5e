"""Seeds: what they reach, and that nothing else is touched."""

import functools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyro_symmetric.generators import lent, seeded


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


# threads ------------------------------------------------------------------------------------------------------------


def in_threads(*functions):
    """What each returns, called in a thread of its own, all at once."""
    gate = threading.Barrier(len(functions))

    def through_the_gate(function):
        gate.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as threads:
        futures = [threads.submit(through_the_gate, function) for function in functions]
        return [future.result(timeout=120) for future in futures]


def draws(seed):
    with seeded(seed):
        values = []
        for _ in range(20):
            values.append(torch.rand(3))
            time.sleep(1e-4)  # another thread's chance
        return torch.cat(values)


def test_seeds_of_several_threads_give_what_they_give_alone():
    alone = [draws(seed) for seed in range(6)]
    found = in_threads(*(functools.partial(draws, seed) for seed in range(6)), functools.partial(draws, None))
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=False))


def test_a_lent_turn_leaves_the_lender_and_the_others_undisturbed():
    """The others go on with the user's numbers, which the lender had put aside, and the lender with its own."""
    torch.manual_seed(5)
    users = torch.rand(6)
    with seeded(1):
        first = torch.rand(2)
        with seeded(2):
            second = torch.rand(6)
        third = torch.rand(2)
    torch.manual_seed(5)
    with seeded(1):
        assert torch.equal(torch.rand(2), first)
        with seeded(2):
            assert torch.equal(torch.rand(3), second[:3])
            with lent():
                (theirs,) = in_threads(lambda: (draws(3), torch.rand(4))[1])
            assert torch.equal(torch.rand(3), second[3:])
        assert torch.equal(torch.rand(2), third)
    assert torch.equal(theirs, users[:4])
    assert torch.equal(torch.rand(2), users[4:])


def test_who_has_no_turn_lends_none():
    torch.manual_seed(5)
    with lent():
        torch.rand(1)
    first = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2)[1:], first)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes to fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent():
    begun, end = threading.Event(), threading.Event()

    def hold():
        with seeded(1):
            begun.set()
            end.wait()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(hold)
        begun.wait()
        child = os.fork()
        if child == 0:  # no test's clean-up in the child
            signal.alarm(20)
            with seeded(2):
                os._exit(0)
        end.set()
        assert os.waitpid(child, 0)[1] == 0
