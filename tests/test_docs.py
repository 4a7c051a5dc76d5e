"""The code of the README and of the site's pages runs as it stands, on fewer draws."""

import re
from pathlib import Path

import pyro
import pytest

from pyro_symmetric.networks import prepare_torchvision

TREE = Path(__file__).parent.parent
PAGES = {
    page: re.findall(
        r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    for page in (TREE / "README.md", *sorted((TREE / "docs").rglob("*.md")))
}
NEEDS = {"plots.md": "arviz_plots", "laplace-swag.md": "laplace"}  # of extras
FEWER = {
    "passes=100": "passes=2",
    "num_samples=200": "num_samples=10",
    "(4, 200)": "(4, 10)",
    "range(500)": "range(5)",
}
FEWER |= {"range(1_000)": "range(5)", "num_particles=200": "num_particles=2"}
FEWER |= {f"num_warmup={many}": "num_warmup=10" for many in (200, 300)}


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::UserWarning"
)  # few draws don't converge, and the library says so
@pytest.mark.parametrize(
    "page",
    [page for page, blocks in PAGES.items() if blocks],
    ids=lambda page: page.relative_to(TREE).as_posix(),
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in NEEDS:
        prepare_torchvision()  # which laplace-torch imports
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    code = "\n".join(PAGES[page])
    for many, few in FEWER.items():
        code = code.replace(many, few)
    pyro.clear_param_store()
    exec(compile(code, page.name, "exec"), {})


def test_the_readmes_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (TREE / "README.md").read_text())
    assert [
        link
        for link in links
        if not link.startswith("https://") and not (TREE / link).exists()
    ] == []
