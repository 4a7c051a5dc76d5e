"""Run a benchmark and keep what it printed, with the command, the machine and the
commit.

    python -m benchmarks.record performance.mmd --threads 2
    python -m benchmarks.record --part factors performance.evidence --only factors

The results are ``benchmarks/results/performance.mmd.json`` and
``performance.evidence.factors.json``; the last run of each benchmark, or of each named
part of it, stands there. Everything that the benchmark prints to the terminal is kept,
line by line, so that a table can be read in the file as it was shown. Uncommitted
changes are noted beside the commit: such figures can't be reproduced from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "pyro-ppl", "numpy", "scipy")
PEERS = ("numpyro", "blackjax", "jax")  # where they are installed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "module",
        help="for example performance.mmd, or experiments.laurent_2024.two_blobs",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="passed on to the benchmark"
    )
    parser.add_argument(
        "--part",
        metavar="NAME",
        help="name of this run, if several of one benchmark are kept",
    )
    options = parser.parse_args(argv)
    command = ["python", "-m", f"benchmarks.{options.module}", *options.arguments]
    began = time.perf_counter()
    lines, code = run([sys.executable, *command[1:]])
    seconds = time.perf_counter() - began
    if code:
        print(
            f"{' '.join(command)} ended with status {code}; nothing was written",
            file=sys.stderr,
        )
        return code
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / ".".join(filter(None, [options.module, options.part, "json"]))
    found = {
        "command": shlex.join(command),
        "seconds": round(seconds, 1),
        **surroundings(),
        "output": lines,
    }
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}")
    return 0


def run(command: list[str]) -> tuple[list[str], int]:
    """Show what a command prints, and return it with the command's exit status.
    Progress bars aren't kept.
    """
    lines = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as own:
        assert own.stdout is not None
        for line in own.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return lines, own.returncode


def surroundings() -> dict[str, Any]:
    """Date, commit, machine and versions: what a figure depends on besides the
    command.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "uncommitted changes": bool(
            git("status", "--porcelain", "--untracked-files=no", "--", "pyro_symmetric")
        ),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(terse=True),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            **{name: version(name) for name in PEERS if find_spec(name)},
        },
    }


def git(*arguments: str) -> str:
    found = subprocess.run(
        ["git", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=RESULTS.parent.parent,
    )
    return found.stdout.strip()


def processor() -> str:
    """The processor's name, if Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
