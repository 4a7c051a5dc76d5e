"""Variational inference on two processes by PyTorch's own DistributedDataParallel: the numbers of one process."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("data_parallel_worker.py")


def worker() -> Any:
    spec = importlib.util.spec_from_file_location("data_parallel_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The findings of two processes under torchrun."""
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
def test_two_processes_follow_the_gradients_of_one(two_ranks: list[dict[str, Any]], objective: str) -> None:
    alone = worker().train(None, 1, objective == "analytic")
    for rank in two_ranks:
        for what in ("losses", "gradients", "parameters"):
            assert rank[objective][what] == pytest.approx(alone[what], rel=1e-9, abs=1e-9)
