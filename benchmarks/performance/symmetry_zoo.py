"""Is find_symmetry sound, and how fast, on networks that people use? A table of more
than 150 networks.

    python -m benchmarks.performance.symmetry_zoo  # all; about forty minutes on two
    cores python -m benchmarks.performance.symmetry_zoo torch graphs  # some libraries
    python -m benchmarks.performance.symmetry_zoo --only resnet18 gpt2 --json zoo.json
    --markdown networks.md

Networks have random weights; those of transformers are of reduced width and depth. Each
runs in a process of its own with a limit of processor time, on one thread. Columns:
parameters in millions; sets of units that permute, the log of the order of the group of
permutations, free scales and signs; sets of units that rotate, counted in each head, and
the dimension of their rotations; processor seconds to find and to verify, and how many
forward passes of a batch that is; the largest relative change of an output under random
elements of the whole group in float64 (eval and train mode), rotations apart; of
networks with few weights, the directions that the Jacobian's null space holds: found,
and others.
Networks that can't be traced, fail, or take too long are listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import pyro_symmetric as ps
from benchmarks.zoo import Case, Cases, graphs, images, language, plain
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.discovery.verify import verify

SOURCES: dict[str, Callable[[], Cases]] = {
    "torch": plain.plain, "graphs": graphs.geometric,
    "transformers": language.transformers, "torchvision": images.torchvision, "timm": images.timm,
}  # fmt: skip
HEADER = (
    "architecture", "M", "factors", "log-order", "scales", "signs", "rotations", "find s", "verify s", "passes", "null directions",
    "verified",
)  # fmt: skip
MOVES = {"scales": "scale", "signs": "flip"}
# weights whose Jacobian is looked at, if that takes no more processor seconds
FEW, PATIENCE = 2_000, 20.0


def measure(case: Case) -> Iterator[Any]:
    """All numbers of one network, then its null directions if it is small."""
    torch.manual_seed(0)
    net, inputs = case.build()
    net.eval()
    with torch.no_grad():
        net(*inputs)
        start = time.process_time()
        net(*inputs)
    forward = time.process_time() - start
    start = time.process_time()
    symmetry = find_symmetry(net, *inputs, verify=False)
    found = time.process_time()
    outcome = verify(symmetry, net, *inputs)
    verified = time.process_time()
    parameters, group = sum(p.numel() for p in net.parameters()), symmetry.group
    yield {
        "completeness": None,
        "parameters": parameters,
        "forward_seconds": forward,
        "seconds_to_find": found - start,
        "seconds_to_verify": verified - found,
        "factors": len(symmetry.permutations.factors),
        "log_order": symmetry.permutations.log_order(),
        **{
            name: sum(group[n].count for n in group.names(move))
            for name, move in MOVES.items()
        },
        "error": outcome.error,
        "tolerance": outcome.tolerance,
        "sound": bool(outcome),
        "broken": [f"{one.name} ({one.move})" for one in outcome.broken],
        **rotations(symmetry, net, inputs),
    }
    if symmetry.rotating:
        symmetry = symmetry.with_rotations()
    yield completeness(symmetry, net, inputs) if parameters <= FEW else None


def rotations(
    symmetry: Symmetry, net: nn.Module, inputs: tuple[Any, ...]
) -> dict[str, int]:
    """The number of sets of units that rotate, a set in each unit around it, and the
    dimension of their rotations; of those that verification confirms.
    """
    sets = dimension = 0
    if symmetry.rotating:
        turned = symmetry.with_rotations()
        group = turned.group.rotations
        broken = {move.name for move in verify(turned, net, *inputs).broken}
        for name in set(group.names("rotate")) - broken:
            sets += group[name].copies
            dimension += group.only([name]).dimension
    return {"rotating_sets": sets, "dimension": dimension}


def completeness(
    symmetry: Symmetry, net: nn.Module, inputs: tuple[Any, ...]
) -> str | None:
    """Null directions of the Jacobian: found, and others; None if nothing can be
    told.
    """
    try:
        report = ps.discovery.completeness(symmetry, net, *inputs)
    except Exception:
        return None
    return (
        f"{report.found} + {report.null - report.found}{'?' if report.doubts else ''}"
    )


def work(case: Case, pipe: Connection, limit: float) -> None:
    """One network in a process of its own, which ends when its processor time is
    spent.
    """
    signal.setitimer(signal.ITIMER_PROF, limit)
    null = os.open(os.devnull, os.O_WRONLY)  # for what libraries print
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            numbers = measure(case)
            result = next(numbers)
        result["left_out"] = sorted(
            {str(w.message) for w in caught if "left out" in str(w.message)}
        )
    except Exception as error:
        text = " ".join(str(error).split())
        result = {"sound": False, "failed": f"{type(error).__name__}: {text}"[:300]}
    pipe.send(result)
    if "failed" not in result:
        signal.setitimer(signal.ITIMER_PROF, PATIENCE)
        pipe.send(next(numbers))


def run(library: str, case: Case, limit: float) -> dict[str, Any]:
    """The result of one network, within a limit of processor seconds."""
    context = multiprocessing.get_context("fork")  # libraries are imported once
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(case, writer, limit))
    process.start()
    writer.close()
    result = None
    with contextlib.suppress(EOFError):
        result = reader.recv()
        if "failed" not in result:
            result["completeness"] = reader.recv()
    process.join()
    if result is None:
        late = process.exitcode == -signal.SIGPROF
        result = {
            "sound": False,
            "failed": f"longer than {limit:g} seconds" if late else "the process died",
        }
    return {"library": library, "name": case.name, **result}


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    if "failed" in result:
        return f"| {result['name']} | | | | | | | | | | | {result['failed'].replace('|', '/')} |"
    passes = (result["seconds_to_find"] + result["seconds_to_verify"]) / max(
        result["forward_seconds"], 1e-4
    )
    text = "yes" if result["sound"] else f"NO: {', '.join(result['broken'])}"
    text += " (units left out)" if result["left_out"] else ""
    numbers = (
        f"{result['parameters'] / 1e6:.2f}", result["factors"], f"{result['log_order']:.0f}", result["scales"],
        result["signs"], f"{result['rotating_sets']} ({result['dimension']})", f"{result['seconds_to_find']:.1f}", f"{result['seconds_to_verify']:.1f}", f"{passes:.0f}",
        result["completeness"] or "-",
    )  # fmt: skip
    return f"| {result['name']} | {' | '.join(map(str, numbers))} | {text}, {result['error']:.0e} |"


def versions() -> str:
    """The versions of all libraries that matter."""
    names = (
        "pyro-symmetric",
        "torch",
        "torchvision",
        "timm",
        "transformers",
        "torch_geometric",
    )
    known = {
        distribution.metadata["Name"].replace("_", "-").lower()
        for distribution in importlib.metadata.distributions()
    }
    found = (name for name in names if name.replace("_", "-") in known)
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found)


def table(results: list[dict[str, Any]]) -> str:
    """All results as Markdown, library by library."""
    sound, failed = (
        sum(r["sound"] for r in results),
        [r for r in results if "failed" in r],
    )
    lines = [
        "# Symmetries of networks that people use",
        "",
        "Made by `python -m benchmarks.performance.symmetry_zoo "
        f"{' '.join(sys.argv[1:])}` on "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, with {versions()}.",
        "",
        "Seconds are of one core's time, of a busy machine. Null directions: "
        "directions in which weights can move "
        "without changing outputs to first order: found as scales, shifts and "
        "rotations, and others; "
        f"for networks of at most {FEW} weights (`?`: with a doubt). Rotations: sets "
        "of units that rotate, in each head, and the dimension of their rotations. Last "
        "comes "
        "the largest relative change of an output, in float64, under random elements "
        "of the whole group.",
        "",
        f"{len(results)} networks: {sound} found and verified, "
        f"{len(results) - sound - len(failed)} with a move that "
        f"fails verification, {len(failed)} refused or failed. What is found is right; "
        "[Orbits](../explanation/orbits.md) lists what isn't: exchanges of whole "
        "modules (experts, parallel "
        "branches), matrices between queries and keys, and the like.",
    ]
    for library in dict.fromkeys(r["library"] for r in results):
        own = [r for r in results if r["library"] == library]
        lines += [
            "",
            f"## {library}",
            "",
            f"| {' | '.join(HEADER)} |",
            f"|{' --- |' * len(HEADER)}",
            *map(row, own),
        ]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "libraries", nargs="*", help=f"of {', '.join(SOURCES)}; all by default"
    )
    parser.add_argument("--only", nargs="*", help="networks by name")
    parser.add_argument(
        "--json",
        help="write all numbers to this file; networks that it holds already aren't "
        "run again",
    )
    parser.add_argument("--markdown", help="write the table to this file")
    parser.add_argument(
        "--limit", type=float, default=240.0, help="processor seconds for each network"
    )
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    if options.json and os.path.exists(options.json):
        with open(options.json) as file:
            results = json.load(file)
    # imports, once for all
    find_symmetry(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.randn(4, 2))
    done = {(r["library"], r["name"]) for r in results}
    for library in options.libraries or SOURCES:
        for case in SOURCES[library]():
            if (library, case.name) in done or (
                options.only and case.name not in options.only
            ):
                continue
            results.append(run(library, case, options.limit))
            print(row(results[-1]), flush=True)
            for path, text in (
                (options.json, json.dumps(results, indent=1)),
                (options.markdown, table(results)),
            ):
                if path:
                    with open(path, "w") as file:
                        file.write(text)
    return 0 if all(result["sound"] or "failed" in result for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
