"""Run tutorials from top to bottom, in full, and store what they print. The site shows
what is stored.

    python tools/tutorials.py 03 04          # by number; without a number, all of them

Each takes some minutes. A cell's metadata may hold ``short``: code that the tests run
after the cell, to make it quick. It is not run here. Warnings are stored without the
line that they come from. Any other output that names a folder of this machine is
refused, and the notebook stays as it was.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "tutorials"
# the place, and the line itself
WARNED_AT = re.compile(r"^/\S+\.py:\d+: (\w+Warning: .*\n)(?:  .*\n)?", re.MULTILINE)
# a path from the root of a file system
ABSOLUTE = re.compile(r"(?<![\w./…])/[\w.+-]+/[\w.+/-]+")


def without_places(notebook: nbformat.NotebookNode) -> None:
    """Warnings lose the folder of the code that they come from."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = WARNED_AT.sub(r"\1", output["text"])


def named_folders(notebook: nbformat.NotebookNode) -> list[str]:
    """The absolute paths in the text of a notebook's outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text", "") for output in outputs]
    texts += [
        str(value)
        for output in outputs
        for kind, value in output.get("data", {}).items()
        if "text" in kind
    ]
    return [path for text in texts for path in ABSOLUTE.findall(text)]


def run(path: Path) -> None:
    """Execute a notebook in a folder of its own, and write it back."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook,
            timeout=3600,
            kernel_name="python3",
            resources=resources,
            record_timing=False,
        ).execute()
    without_places(notebook)
    found = named_folders(notebook)
    if found:
        raise SystemExit(
            f"{path.name}: its outputs name folders of this machine: {found}"
        )
    nbformat.write(notebook, path)


def main(numbers: list[str]) -> None:
    # tqdm without widgets: plain progress bars will do
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not numbers or path.stem[:2] in numbers:
            started = time.perf_counter()
            run(path)
            print(f"{path.name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
