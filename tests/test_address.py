"""The tool that writes the repository's public address."""

import tomllib
from pathlib import Path

from tools.address import citation, project, readme

TREE = Path(__file__).parent.parent
ADDRESS = "https://example.org/owner/name"


def test_an_address_is_written_everywhere_once():
    for name, write in {
        "README.md": readme,
        "pyproject.toml": project,
        "CITATION.cff": citation,
    }.items():
        written = write((TREE / name).read_text(), ADDRESS)
        assert ADDRESS in written
        assert write(written, ADDRESS) == written


def test_readme_links_become_absolute_and_others_stay():
    text = "# Title\n\n![a](docs/a.svg) [b](docs/b.md) [c](https://x.org) [d](#part)\n"
    written = readme(text, ADDRESS)
    assert f"![a]({ADDRESS}/raw/main/docs/a.svg)" in written
    assert f"[b]({ADDRESS}/blob/main/docs/b.md)" in written
    assert "[c](https://x.org) [d](#part)" in written


def test_pyproject_names_the_repository():
    written = project((TREE / "pyproject.toml").read_text(), ADDRESS)
    assert tomllib.loads(written)["project"]["urls"]["Repository"] == ADDRESS
