"""Runs that are killed, again and again, and the draws they end with: each must equal
the unbroken run's, bit by bit.

A child process samples into a store; this one sends it ``kill -9`` after a random time,
in warm-up or sampling, in the middle of a step, of a write or of a commit. Then, as
after a power cut, whatever no commit had counted may be garbage: half of the time it is
overwritten. Then the same call resumes, in a new process.

    python -m benchmarks.performance.kill_and_resume --kills 50
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pyro_symmetric.mcmc as mcmc
import pyro_symmetric.store as recorders
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import CHECKPOINT, Checkpoint, raw_bytes

KERNELS = ["HMC", "NUTS", "AdaptiveHMC", "MCLMC", "SGLD", "pSGLD", "SGHMC"]
SHORT_TRAJECTORIES: dict[str, dict[str, Any]] = {
    "HMC": {"num_steps": 5},
    "NUTS": {"max_tree_depth": 4},
    "AdaptiveHMC": {"max_steps": 16},
    "MCLMC": {"max_steps": 16},
}


def run(kernel: str, store: Path | None, scale: int) -> Posterior:
    """Eight chains of a small network; ``scale`` lengthens them."""
    torch.manual_seed(0)
    x = torch.randn(100, 3)
    y = x.sum(1) + 0.5 * torch.randn(100)
    net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1))
    model = BayesianModel(net, likelihood="gaussian")
    kind: Any = getattr(mcmc, kernel)
    settings = (
        {"step_size": 3e-3, "batch_size": 20}
        if kind.subsampled
        else SHORT_TRAJECTORIES.get(kernel, {})
    )
    counts = {"num_warmup": 60 * scale, "num_samples": 60 * scale, "num_chains": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return mcmc.sample(
            kind(model, **settings), x, y, seed=1, store=store, progress=False, **counts
        )


def in_child(kernel: str, store: Path, scale: int, kill_after: float | None) -> bool:
    """Run in a process of its own, killed after so many seconds; whether it came to its
    end.
    """
    child = os.fork()
    if child == 0:
        try:
            run(kernel, store, scale)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"the run in {store} failed instead of resuming")
    return os.WIFEXITED(status)


def cut_power(store: Path, chance: random.Random) -> None:
    """Whatever no commit counts becomes other bytes: the places of later draws."""
    if not (store / CHECKPOINT).exists():
        return
    commit = Checkpoint.read(store)
    for array in commit.arrays:
        with open(array.file(store), "r+b") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(commit.draws * array.size)
            handle.write(chance.randbytes(size - commit.draws * array.size))


def same(found: Posterior, expected: Posterior) -> bool:
    pairs = [(found.samples, expected.samples), (found.statistics, expected.statistics)]
    return all(
        torch.equal(raw_bytes(have[name]), raw_bytes(value))
        for have, want in pairs
        for name, value in want.items()
    )  # bytes, since a lost chain's NaN equals itself only so


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=50,
        help="in all, shared among the kernels (default 50)",
    )
    parser.add_argument("--kernels", nargs="+", default=KERNELS)
    parser.add_argument(
        "--kills-per-run",
        type=int,
        default=5,
        help="before a run is let to its end (default 5)",
    )
    parser.add_argument(
        "--commit-seconds", type=float, default=0.05, help="least time between commits"
    )
    parser.add_argument(
        "--scale",
        type=int,
        default=4,
        help="length of the runs, in 60 iterations of each phase",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process can't use the parent's threads
    recorders.COMMIT_SECONDS, recorders.COMMIT_SHARE = options.commit_seconds, 0.5
    chance = random.Random(options.seed)
    killed, differing, phases = 0, 0, {"start": 0, "warm-up": 0, "sampling": 0}
    with tempfile.TemporaryDirectory() as folder:
        for trial in range(-(-options.kills // options.kills_per_run)):
            kernel = options.kernels[trial % len(options.kernels)]
            began = time.perf_counter()
            expected = run(kernel, None, options.scale)
            duration = time.perf_counter() - began
            store = Path(folder) / f"{trial}"
            planned = min(options.kills_per_run, options.kills - killed)
            for _ in range(planned):
                # a run that is faster is begun anew: its draws are complete
                within = 1.5 * duration / planned
                while in_child(kernel, store, options.scale, chance.uniform(0, within)):
                    for file in sorted(store.rglob("*"), reverse=True):
                        file.rmdir() if file.is_dir() else file.unlink()
                killed += 1
                begun = (store / CHECKPOINT).exists()
                phase = (
                    "start"
                    if not begun
                    else "sampling"
                    if Checkpoint.read(store).draws
                    else "warm-up"
                )
                phases[phase] += 1
                if chance.random() < 0.5:
                    cut_power(store, chance)
            in_child(kernel, store, options.scale, None)
            equal = same(Posterior.load(store), expected)
            differing += not equal
            print(
                f"{kernel:<12} {planned} kills in {duration:.1f} s: draws "
                f"{'identical' if equal else 'DIFFER'}",
                flush=True,
            )
    print(
        json.dumps(
            {
                "kills": killed,
                "last commit when killed": phases,
                "runs that differ": differing,
            }
        )
    )
    raise SystemExit(differing > 0)


if __name__ == "__main__":
    main()
