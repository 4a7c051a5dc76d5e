"""The code of the README and of the site's pages runs as it stands, on fewer draws."""

import json
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
# what is long on a page -> what is enough to run it
FEWER = {
    r"\bpasses=100\b": "passes=2",
    r"\b(num_samples|num_warmup|warmup_steps)=\d+": r"\1=10",
    r"\(4, 200\)": "(4, 10)",
    r"range\((500|1_000)\)": "range(5)",
    r"\bnum_particles=\d+": "num_particles=2",
}


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
        code = re.sub(many, few, code)
    pyro.clear_param_store()
    exec(compile(code, page.name, "exec"), {})


def test_the_readmes_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (TREE / "README.md").read_text())
    assert [
        link
        for link in links
        if not link.startswith("https://") and not (TREE / link).exists()
    ] == []


NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"


def quotations(page: Path) -> list[tuple[str, str]]:
    """Return the records that items of a list quote, with the text of each item."""
    text = page.read_text()
    text = (
        text.partition("## What was measured\n")[2].partition("\n## Where")[0] or text
    )
    items = re.findall(r"^\* (.*?)(?=^\* |^$|\Z)", text, re.DOTALL | re.MULTILINE)
    quoted = [re.fullmatch(r"(.*)\(`([\w.]+)`\)\W*", i, re.DOTALL) for i in items]
    return [(match[2], match[1]) for match in quoted if match]


def split_into_pairs(text: str) -> tuple[set[tuple[str, str]], set[str]]:
    """Return the values with errors of a text, and its other numbers."""
    plain = text.replace(",", "")
    pairs = re.findall(rf"({NUMBER})\s+±\s+({NUMBER})", plain)
    rest = re.sub(rf"{NUMBER}\s+±\s+{NUMBER}", "", plain)
    return set(pairs), set(re.findall(NUMBER, rest))


def rounds_to(recorded: str, quoted: str) -> bool:
    """Return whether a recorded number is the quoted one to all of its digits."""
    last_digit = 10 ** -len(quoted.partition(".")[2])
    return abs(float(recorded) - float(quoted)) <= 0.5 * last_digit * (1 + 1e-9)


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/measured.md"])
def test_quoted_figures_stand_in_their_records(page: str) -> None:
    quoted = quotations(TREE / page)
    assert len(quoted) >= 6
    for record, text in quoted:
        file = TREE / "benchmarks" / "results" / f"{record}.json"
        held = json.loads(file.read_text())
        recorded, numbers = split_into_pairs("\n".join(held["output"]))
        everything = numbers | set(re.findall(NUMBER, held["command"]))
        everything |= {number for pair in recorded for number in pair}
        pairs, others = split_into_pairs(text)
        assert others <= everything, (record, others - everything)
        for value, error in pairs:
            assert any(
                rounds_to(recorded_value, value) and rounds_to(recorded_error, error)
                for recorded_value, recorded_error in recorded
            ), (record, value, error)
