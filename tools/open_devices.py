"""List the calls of a package's sources that make a tensor or a generator, and don't
say on which device.

    python tools/open_devices.py pyro_symmetric

Such a call follows ``torch.set_default_device``: under a GPU's, tables meant for the
CPU land on the GPU, and beside weights on another device the call fails.
``device=None`` counts as said: the default is then meant. The exit status is 1 if there
are any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAKERS = frozenset(
    [
        "arange",
        "as_tensor",
        "asarray",
        "bartlett_window",
        "blackman_window",
        "empty",
        "empty_permuted",
        "empty_strided",
        "eye",
        "full",
        "hamming_window",
        "hann_window",
        "kaiser_window",
        "linspace",
        "logspace",
        "normal",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "range",
        "scalar_tensor",
        "sparse_coo_tensor",
        "tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
        "Generator",
    ]
)


def open_calls(source: str) -> Iterator[int]:
    """The lines of a module on which ``torch.<maker>(...)`` stands without a device."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in MAKERS
            and not any(keyword.arg in ("device", None) for keyword in node.keywords)
            and not (node.func.attr == "Generator" and node.args)
        ):
            yield node.lineno


def main(folders: list[str]) -> int:
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    if not files:
        print(f"{folders} hold no Python files", file=sys.stderr)
        return 2
    found = [
        f"{file}:{line}"
        for file in files
        for line in sorted(open_calls(file.read_text(encoding="utf-8")))
    ]
    for place in found:
        print(
            f"{place}: say on which device (device=..., or new_zeros, zeros_like and "
            "the like)"
        )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
