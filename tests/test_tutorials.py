"""Every tutorial runs from top to bottom, in a short setting, and holds the outputs of a full run."""

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
    """One process for all notebooks, which import the same: nothing of one is left for the next, see ``CLEAR``."""
    metadata = {"path": str(tmp_path_factory.mktemp("tutorials"))}
    client = NotebookClient(
        nbformat.v4.new_notebook(), timeout=300, kernel_name="python3", resources={"metadata": metadata}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYRO_SYMMETRIC_SHORT", "1")
        with client.setup_kernel():
            yield client


@pytest.mark.filterwarnings("ignore")  # of Jupyter's own machinery; the notebook runs in a process of its own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorial_runs(path: Path, client: NotebookClient) -> None:
    client.nb = nbformat.read(path, as_version=4)
    client.nb.cells.insert(0, nbformat.v4.new_code_cell(CLEAR))
    client.execute(cleanup_kc=False)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorial_holds_its_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells), "run it in full and save it"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
