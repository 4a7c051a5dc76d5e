"""The README's examples run as they stand, on fewer steps."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
FEWER = {
    "range(1_000)": "range(5)",
    "num_particles=200": "num_particles=2",
    "num_samples=200": "num_samples=8",
    "num_warmup=200": "num_warmup=4",
}


def test_the_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for number, code in enumerate(EXAMPLES):
        for many, few in FEWER.items():
            code = code.replace(many, few)
        exec(compile(code, f"README example {number}", "exec"), names)
        assert capsys.readouterr().out
    assert EXAMPLES[0].count("svi.step(data)") == 1  # stock SVI comes first


def test_the_picture_and_the_pages_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("https://")]
    assert links
    for link in links:
        assert (Path(__file__).parent.parent / link).exists(), link
