"""The pages of the site: their code runs as it stands, on fewer draws, and every public name has its place."""

import re
from pathlib import Path

import pyro
import pytest

import pyro_symmetric as ps
from pyro_symmetric._torchvision import prepare_torchvision

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    page: re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for page in sorted(DOCS.rglob("*.md"))
}
NEEDS = {"plots.md": "arviz_plots", "laplace-swag.md": "laplace"}  # of extras
FEWER = {"passes=100": "passes=2", "num_samples=200": "num_samples=10", "(4, 200)": "(4, 10)", "range(500)": "range(5)"}
FEWER |= {f"num_warmup={many}": "num_warmup=10" for many in (200, 300)}


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::UserWarning"
)  # few draws don't converge, and the library says so
@pytest.mark.parametrize(
    "page", [page for page, blocks in PAGES.items() if blocks], ids=lambda page: page.relative_to(DOCS).as_posix()
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in NEEDS:
        prepare_torchvision()  # which laplace-torch imports
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    code = "\n".join(PAGES[page])
    for many, few in FEWER.items():
        code = code.replace(many, few)
    pyro.clear_param_store()
    exec(compile(code, page.name, "exec"), {})


def test_the_package_says_what_each_public_name_is_for() -> None:
    names = [
        name
        for names in re.findall(r"^\S[^\n]*\n((?:    [^\n]*\n)+)", ps.__doc__, re.MULTILINE)
        for name in names.split()
    ]
    assert sorted(names) == sorted(ps.__all__)


def test_every_page_is_in_a_table_of_contents() -> None:
    for index in DOCS.rglob("index.md"):
        listed = " ".join(re.findall(r"```{toctree}(.*?)```", index.read_text(), re.DOTALL)).split()
        for page in index.parent.glob("*.md"):
            assert page.stem in {*listed, "index"}, page
