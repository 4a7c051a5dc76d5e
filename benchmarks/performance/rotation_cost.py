"""Time of a search for rotations: processor seconds of ``find_symmetry``, with the law
of rotations and without it, in turn in one process.

    python -m benchmarks.performance.rotation_cost        # ViT-B/16, GPT-2; some minutes
    python -m benchmarks.performance.rotation_cost --only ViT-B/16 --rounds 5

Both networks have their full depth and width, and random weights; GPT-2 needs
``transformers``. Moves are verified. Without the law no units are proposed, and none
tried. A ratio compares the least times of all rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import torch

from benchmarks.zoo import Built, Tensors
from pyro_symmetric.discovery.conservation_law import Law
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.networks import import_torchvision


def vision() -> Built:
    torchvision = import_torchvision()
    return torchvision.models.vit_b_16(weights=None), (torch.randn(2, 3, 224, 224),)


def language() -> Built:
    import_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return Tensors(net, ("input_ids",)), (torch.randint(0, 50_000, (2, 16)),)


NETWORKS: dict[str, Callable[[], Built]] = {"ViT-B/16": vision, "GPT-2": language}


def seconds(built: Built, with_law: bool) -> tuple[float, int]:
    """Processor seconds of a search, and how many sets of units rotate."""
    net, inputs = built
    torch.manual_seed(0)
    start = time.process_time()
    if with_law:
        symmetry = find_symmetry(net, *inputs)
    else:
        with mock.patch.object(Law, "rotating", return_value=()):
            symmetry = find_symmetry(net, *inputs)
    return time.process_time() - start, len(symmetry.rotating)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # imports, once for all
    find_symmetry(torch.nn.Linear(2, 2), torch.randn(4, 2))
    for name in options.only:
        torch.manual_seed(0)
        net, inputs = NETWORKS[name]()
        built = (net.eval(), inputs)
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.rounds):
            for with_law in (True, False):
                spent, sets = seconds(built, with_law)
                times[with_law].append(spent)
                print(f"{name}: {spent:.1f} s, {sets} sets rotate", flush=True)
        ratio = min(times[True]) / min(times[False])
        print(f"{name}: {ratio:.3f} times as long with the law of rotations")


if __name__ == "__main__":
    main()
