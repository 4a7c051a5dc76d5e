"""Threads that change what belongs to the whole process leave it as it was, in whatever order they end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pyro
import pytest
import torch
from torch import nn
from torch.distributions import Distribution, Normal

from pyro_symmetric import UntraceableError, find_symmetry
from pyro_symmetric._process import without_messages, without_warnings
from pyro_symmetric.mcmc.compiled import _unchecked


class Branching(nn.Linear):
    """Its pass depends on numbers, at which torch.export prints to standard error, warns and raises."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def process_state():
    return (
        sys.stderr,
        list(warnings.filters),
        torch.backends.mha.get_fastpath_enabled(),
        logging.getLogger("torch.fx.experimental.symbolic_shapes").level,
        torch.get_rng_state().tolist(),
    )


def networks():
    attention = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).eval()
    normalised = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
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


@pytest.mark.parametrize("first_out", [0, 1])
def test_validation_is_off_in_the_threads_that_trace_alone_and_comes_back(first_out):
    checking = Distribution._validate_sample
    enter, leave, entered = [[threading.Event() for _ in range(2)] for _ in range(3)]
    passed = []

    def trace(k):
        enter[k].wait(10)
        with _unchecked():
            entered[k].set()
            leave[k].wait(10)
            passed.append(Normal(0.0, 1.0, validate_args=True).log_prob(torch.tensor(torch.nan)))

    threads = [threading.Thread(target=trace, args=(k,)) for k in range(2)]
    for k, thread in enumerate(threads):
        thread.start()
        enter[k].set()
        assert entered[k].wait(10)
    with pytest.raises(ValueError, match="Expected value argument"):  # this thread doesn't trace
        Normal(0.0, 1.0, validate_args=True).log_prob(torch.tensor(torch.nan))
    for k in (first_out, 1 - first_out):
        leave[k].set()
        threads[k].join(10)
    assert len(passed) == 2
    assert Distribution._validate_sample is checking
    with pytest.raises(ValueError, match="Expected value argument"), pyro.validation_enabled(True):
        Normal(0.0, 1.0).log_prob(torch.tensor(torch.nan))


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
