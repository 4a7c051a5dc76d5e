"""Every tutorial runs from top to bottom, in a short setting, and holds the outputs of
a full run.

The short setting is in the metadata of cells, out of a reader's sight: what ``short``
holds runs after its cell.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "tutorials").glob("*.ipynb"))

CLEAR = """
%reset -f
import matplotlib.pyplot, pyro, torch
matplotlib.pyplot.close("all")
pyro.clear_param_store()
pyro.set_rng_seed(0)
torch.set_default_dtype(torch.float32)
%reset -f
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotebookClient]:
    """One process for all notebooks, which import the same: nothing of one is left for
    the next, see ``CLEAR``.
    """
    metadata = {"path": str(tmp_path_factory.mktemp("tutorials"))}
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=300,
        kernel_name="python3",
        resources={"metadata": metadata},
    )
    with client.setup_kernel():
        yield client


def shortened(cells: list[nbformat.NotebookNode]) -> Iterator[nbformat.NotebookNode]:
    for cell in cells:
        yield cell
        if "short" in cell.metadata:
            yield nbformat.v4.new_code_cell("\n".join(cell.metadata["short"]))


# of Jupyter's own machinery; the notebook runs in a process of its own
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorial_runs(path: Path, client: NotebookClient) -> None:
    client.nb = nbformat.read(path, as_version=4)
    client.nb.cells = [nbformat.v4.new_code_cell(CLEAR), *shortened(client.nb.cells)]
    client.execute(cleanup_kc=False)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorial_holds_its_outputs(path: Path) -> None:
    cells = [
        cell
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
    ]
    assert all(cell.execution_count for cell in cells), "run it in full and save it"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    texts = [
        f"{output.get('text', '')}{output.get('data', {}).get('text/plain', '')}"
        for output in outputs
    ]
    assert not [
        path
        for text in texts
        for path in re.findall(r"(?<![\w./…])/[\w.+-]+/[\w.+/-]+", text)
    ], "a folder"


def shown_verdicts(path: Path) -> list[str]:
    """The first lines of all diagnoses that a notebook shows."""
    verdicts = []
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            text = str(output.get("text", ""))
            verdicts += re.findall(
                r"^\d+ chains of \d+ draws: (.+)$", text, re.MULTILINE
            )
    return verdicts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_last_verdict_of_a_tutorial_on_its_chains_is_ok(path: Path) -> None:
    verdicts = shown_verdicts(path)
    draws_and_judges = re.search(r"ps\.diagnose\(", path.read_text())
    assert bool(verdicts) == bool(draws_and_judges)
    assert not verdicts or verdicts[-1] == "ok"
