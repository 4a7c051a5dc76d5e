"""The README's examples run as they stand, on fewer steps."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
FEWER = {
    "num_samples=200": "num_samples=8",
    "num_warmup=200": "num_warmup=4",
}


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = EXAMPLES[number]
    for many, few in FEWER.items():
        code = code.replace(many, few)
    exec(compile(code, f"README example {number}", "exec"), {})
    assert capsys.readouterr().out


def test_the_picture_and_the_pages_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("https://")]
    assert links
    for link in links:
        assert (Path(__file__).parent.parent / link).exists(), link
