"""Variational inference on two processes: gradients, losses and parameters are those of one process."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_symmetric.guides.data_parallel import DataParallel_ELBO, average_gradients

WORKER = Path(__file__).with_name("data_parallel_worker.py")


def worker():
    spec = importlib.util.spec_from_file_location("data_parallel_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[dict]:
    """What each of two processes under torchrun found."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("PyTorch has no gloo here")
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    found = subprocess.run(
        [*launch, f"--master-port={port}", str(WORKER), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["sampled", "analytic"])
def test_two_processes_follow_the_gradients_of_one(two_ranks, objective):
    alone = worker().train(None, objective == "analytic")
    for rank in two_ranks:
        found = rank[objective]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        for what in ("gradients", "parameters"):
            assert found[what] == pytest.approx(alone[what], rel=1e-9, abs=1e-9)
    assert two_ranks[0][objective]["next"] == alone["next"]  # rank 0's generator is used as one process's is
    assert two_ranks[1][objective]["next"] != alone["next"]
    # Half of the rows alone give something else, so that the comparison can fail.
    half = worker().train(0, objective == "analytic")
    assert half["gradients"] != pytest.approx(alone["gradients"], rel=0.1)


@pytest.mark.slow
def test_a_rank_without_rows_leaves_no_other_waiting(two_ranks):
    assert two_ranks[0]["without rows"].startswith("this rank's arguments hold no tensor with rows")
    assert two_ranks[1]["without rows"].startswith("another rank's arguments hold no tensor with rows")
    for rank in two_ranks:
        assert rank["averaged"] == [3.0, 2.0]


def test_it_is_an_unbiased_objective_of_one_process():
    together, plain = worker().train(None, False), worker().train(None, False, parallel=False)
    # Other random numbers, the same quantity: losses of 12 of 40 rows with 27 weights' noise differ by some nats only.
    assert together["losses"] != plain["losses"]
    assert together["losses"] == pytest.approx(plain["losses"], rel=0.3)


def test_without_a_process_group_gradients_stay():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float32))
    idle = torch.nn.Parameter(torch.ones(2))
    (parameter.square().sum()).backward()
    assert average_gradients([parameter, idle], rows=4, loss=3.0) == 3.0
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))
    assert torch.equal(idle.grad, torch.zeros(2))


def test_what_it_cannot_do_is_said():
    with pytest.raises(TypeError, match="elbo is a function"):
        DataParallel_ELBO(lambda: None)
    objective = DataParallel_ELBO(Trace_ELBO())
    with pytest.raises(NotImplementedError, match="average_gradients"):
        objective.differentiable_loss(None, None)
    with pytest.raises(ValueError, match="no tensor with rows"):
        objective.loss(lambda *_: None, lambda *_: None, torch.empty(0, 3))
