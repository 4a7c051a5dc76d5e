"""Threads that change what belongs to the whole process leave it as it was, in whatever
order they end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from pyro_symmetric import find_symmetry
from pyro_symmetric._process import forked, without_messages, without_warnings
from pyro_symmetric.discovery import UntraceableError


class Branching(nn.Linear):
    """Its pass depends on numbers, at which torch.export prints to standard error,
    warns and raises.
    """

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def process_state():
    return (
        sys.stderr,
        list(warnings.filters),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        logging.getLogger("torch.fx.experimental.symbolic_shapes").level,
        torch.get_rng_state().tolist(),
    )


def networks():
    attention = nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, batch_first=True
    ).eval()
    normalised = nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)
    ).eval()
    return [
        (attention, torch.randn(2, 4, 8)),
        (normalised, torch.randn(4, 3)),
        (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(4, 3)),
        (Branching(3, 2), torch.randn(4, 3)),
    ]


def found(pair):
    net, x = pair
    try:
        return find_symmetry(net, x).to_dict()
    except UntraceableError:
        return None


def test_symmetries_are_found_in_threads_as_one_by_one_and_the_process_stays_as_it_was():
    pairs = networks()
    before = process_state()
    expected = [found(pair) for pair in pairs]
    assert process_state() == before
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(found, pairs * 3))
    assert results == expected * 3
    assert process_state() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes to fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_finds_nothing_changed_and_waits_for_no_thread_of_its_parent():
    begun, before = threading.Event(), sys.stderr

    def hold():
        with without_messages("pyro_symmetric"):
            begun.set()
            threading.Event().wait(0.3)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(hold)
        begun.wait()
        child = os.fork()
        if child == 0:  # no test's clean-up in the child
            signal.alarm(20)
            with without_warnings():
                os._exit(0 if sys.stderr is before else 1)
        assert os.waitpid(child, 0)[1] == 0


# the global generators while they are forked ------------------------------------------


@pytest.mark.parametrize("device", [None, "cpu"])
def test_cuda_sleeps_on_during_a_run_on_the_cpu(device, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("CUDA was woken up")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in (
        "get_rng_state",
        "set_rng_state",
        "manual_seed_all",
        "manual_seed",
        "current_device",
    ):
        monkeypatch.setattr(torch.cuda, name, refuse)
    with forked(1, device):
        torch.rand(1)


@pytest.mark.cuda
def test_the_generator_of_the_runs_gpu_is_seeded_and_put_back():
    torch.cuda.manual_seed(5)
    with forked(1, "cuda"):
        first = torch.rand(3, device="cuda")
    after = torch.rand(3, device="cuda")
    # seeds no GPU that it doesn't name, and puts back all that are in use
    with forked(2):
        assert not torch.equal(torch.rand(3, device="cuda"), first)
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(3, device="cuda"), after)


HOST = {
    "PyTorch": lambda: torch.rand(3, device="cpu").tolist(),
    "NumPy": lambda: np.random.rand(3).tolist(),
    "Python": lambda: [random.random() for _ in range(3)],
}


@pytest.mark.parametrize("draw", HOST.values(), ids=HOST)
def test_numbers_are_repeated_whoever_draws_them_and_no_generator_is_disturbed(draw):
    found = []
    for seed in (1, 1, 2):
        with forked(seed, host=True):
            found.append(draw())
    assert found[0] == found[1] != found[2]
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    first = draw()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    with contextlib.suppress(ZeroDivisionError), forked(1, host=True):
        draw()
        raise ZeroDivisionError
    assert draw() == first
