"""Write the repository's public address wherever one is needed.

    python tools/address.py https://github.com/OWNER/NAME

For the day when there is one: README's pictures and links become absolute, as an index
of packages shows them, and get a badge of the tests; ``[project.urls]`` of
``pyproject.toml``, from which the site takes the link to its sources, and
``CITATION.cff`` name the repository. A second run changes nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def readme(text: str, address: str) -> str:
    """README with absolute links, and the badge below its title."""

    def absolute(link: re.Match[str]) -> str:
        is_picture, words, path = link.groups()
        folder = "raw" if is_picture else "blob"
        return f"{is_picture}[{words}]({address}/{folder}/main/{path})"

    text = RELATIVE.sub(absolute, text)
    tests = f"{address}/actions/workflows/test.yml"
    badge = f"[![tests]({tests}/badge.svg)]({tests})"
    if badge in text:
        return text
    title, newline, body = text.partition("\n")
    return f"{title}{newline}\n{badge}\n{body}"


def project(text: str, address: str) -> str:
    """``pyproject.toml`` with the address of the repository and of its issues."""
    urls = f'[project.urls]\nRepository = "{address}"\nIssues = "{address}/issues"\n'
    if urls in text:
        return text
    return text.replace(
        "[project.optional-dependencies]", f"{urls}\n[project.optional-dependencies]", 1
    )


def citation(text: str, address: str) -> str:
    """``CITATION.cff`` with the address of the repository."""
    line = f"repository-code: {address}\n"
    return text if line in text else f"{text.rstrip()}\n{line}"


def main(address: str) -> None:
    writers = {"README.md": readme, "pyproject.toml": project, "CITATION.cff": citation}
    for name, written in writers.items():
        path = TREE / name
        path.write_text(written(path.read_text(), address.rstrip("/")))


if __name__ == "__main__":
    main(*sys.argv[1:])
