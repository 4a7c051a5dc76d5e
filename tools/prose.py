"""Check the prose of pages, notebooks and docstrings against the house's rules, without
any network.

    python tools/prose.py

Docstrings open with a noun or a verb, never with a question word; those of the
package's functions open with a verb of ``VERBS``. Prose is in British spelling; names
in code keep theirs. Pages have no sentence of more than 40 words. ``RIDDLES`` lists
phrases with what to write instead. The exit status is 1 if anything is found.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
LONGEST = 40  # words of a sentence
SOURCES = ("pyro_symmetric", "tests", "benchmarks", "tools")

OPENING = re.compile(r"(What|Whether|How|Where)\b")
VERBS = set(  # in the imperative; add one of the field's if it is missing
    """
    Act Adapt Add Adjust Advance Align Alternate Annotate Append Apply Assign Attach Average Bin Bind Bring
    Broadcast Build Call Cast Change Check Choose Clear Collect Colour Combine Compare Complete Compute
    Concatenate Convert Convolve Copy Count Create Cut Declare Derive Describe Diagnose Disable Do Double Draw
    Drop End Equate Estimate Evaluate Expand Explain Export Extend Fall Fill Find Fit Flatten Format Gather Give
    Grade Group Hash Identify Import Index Individualise Insert Invert Iterate Join Keep Label Lay Leave Let
    List Load Locate Lock Look Make Map Mark Match Maximise Measure Merge Minimise Move Multiply Name Normalise
    Note Number Open Order Overwrite Pad Pair Parse Permute Perturb Pin Place Plot Predict Print Project
    Propose Put Raise Rank Read Rearrange Rebuild Record Reduce Refine Register Relabel Remove Rename Renumber
    Repeat Replace Report Require Resample Reshape Restart Restrict Return Round Run Sample Scale Scatter Score Seed
    Select Serialise Set Show Shuffle Skip Solve Sort Split Stack Standardise Start State Suggest Sum Summarise Suppress
    Tabulate Take Temper Test Thin Tie Trace Train Transform Translate Try Turn Unite Unwrap Update Verify
    Begin Kick View Wait Warn Write Yield
    """.split()  # noqa: SIM905
)
RIDDLES = {
    r"\bg(?:o|oes|oing|one) on (?:with|from)\b|\bwent on (?:with|from)\b": "write 'resume' or 'continue'",
    r"(?<=[.!?] )Where [^.?!]*, ": "write 'If' for a condition",
    r"\b[Tt]o take along\b": "write 'Takeaways'",
}
# US endings, and words that end so in British English, too.
US_ENDING = re.compile(
    r"\b[a-z]+(?:iz(?:e|es|ed|er|ers|ing|ation|ations)|yz(?:e|es|ed|ing))\b",
    re.IGNORECASE,
)
BRITISH_TOO = re.compile(
    r"(?:re|over|down|mid)?siz(?:e|es|ed|ing)|priz(?:e|es|ed)|seiz(?:e|es|ed|ing)",
    re.IGNORECASE,
)
US_WORDS = re.compile(
    r"\b(?:colors?|colored|behaviors?|neighbors?|neighboring|centers?|centered|favors?|favored|favorite|gray|labeled|"
    r"labeling|unlabeled|relabeled|modeling|modeled|traveled|artifacts?|catalogs?|barycenters?|meters?)\b",
    re.IGNORECASE,
)
# Not prose: code, formulas, addresses, roles, titles in quotes or italics, names with
# underscores or inner capitals.
CODE = re.compile(
    r"```.*?```|:param "
    r"\w+:|\"[^\"]{1,200}\"|~~~.*?~~~|``.*?``|\$\$.*?\$\$|:\w+:`[^`]*`|`[^`]*`|\$[^$\n]*\$|\]\([^)]*\)|https?://\S+|<[^>\n]*>"
    r"|(?<![\w*])\*[^*\s][^*]*\*(?![\w*])|\b\w*[a-z][A-Z]\w*\b|\b\w+_\w*|\b\w+\.\w[\w.]*|(?<=[(, ])\w+=\S+",
    re.DOTALL,
)

PUBLIC = set(
    re.findall(
        r'^    "(\w+)",$',
        (TREE / "pyro_symmetric" / "__init__.py").read_text(),
        re.MULTILINE,
    )
)

Finding = tuple[str, int, str]


def docstrings(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line and text of every docstring of a module, without its examples, and whether
    it is a function's.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            text = ast.get_docstring(node)
            if text:
                attribute = isinstance(node, ast.Module | ast.ClassDef) or any(
                    "property" in ast.unparse(decorator)
                    for decorator in node.decorator_list
                )
                yield (
                    node.body[0].lineno,
                    "\n".join(_without_literals(text.splitlines())),
                    not attribute,
                )


def _without_literals(lines: list[str]) -> Iterator[str]:
    """The lines outside of reStructuredText's literal blocks; what is left out leaves
    an empty line.
    """
    literal: int | None = None  # the indentation that a literal block is deeper than
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and depth <= literal:
            literal = None
        yield (
            ""
            if literal is not None or line.lstrip().startswith((">>>", "...", ".. "))
            else line
        )
        if literal is None and line.rstrip().endswith("::"):
            literal = depth


def pages() -> Iterator[tuple[str, int, str]]:
    """Name, first line and text of every page, and of every cell of text in a
    notebook.
    """
    made = {
        "architecture.md",
        "contributing.md",
        "changelog.md",
        "code_of_conduct.md",
        "command-line.md",
        "results.md",
    }
    found = [*sorted(TREE.glob("*.md")), *sorted((TREE / "docs").rglob("*.md"))]
    for path in found:
        inside = path.relative_to(TREE).as_posix()
        if path.parent == TREE or not (
            path.name in made or "_build" in inside or "/api/" in inside
        ):
            yield inside, 1, path.read_text(encoding="utf-8")
    for path in sorted((TREE / "tutorials").glob("*.ipynb")):
        for number, cell in enumerate(
            json.loads(path.read_text(encoding="utf-8"))["cells"]
        ):
            if cell["cell_type"] == "markdown":
                yield (
                    f"{path.relative_to(TREE)}, cell {number}",
                    1,
                    "".join(cell["source"]),
                )


def check(name: str, first: int, text: str) -> Iterator[Finding]:
    """Phrases and spelling, on each line."""
    prose = CODE.sub(lambda match: "\n" * match[0].count("\n") + "x", text)
    for number, paragraph in _paragraphs(prose):
        for pattern, advice in RIDDLES.items():
            for match in re.finditer(pattern, paragraph):
                yield name, first + number, f"'{match[0].strip()}': {advice}"
        for match in [*US_ENDING.finditer(paragraph), *US_WORDS.finditer(paragraph)]:
            if not BRITISH_TOO.fullmatch(match[0]) and match[0] not in PUBLIC:
                yield name, first + number, f"'{match[0]}': British spelling in prose"


def long_sentences(name: str, first: int, text: str) -> Iterator[Finding]:
    """Sentences of more than ``LONGEST`` words, outside of code and tables."""
    prose = CODE.sub(lambda match: "\n" * match[0].count("\n") + "x", text)
    for number, paragraph in _paragraphs(prose):
        for sentence in re.split(r"(?<=[.:;!?])[)*_\"]*\s+", paragraph):
            words = sentence.split()
            if len(words) > LONGEST:
                yield (
                    name,
                    first + number,
                    f"a sentence of {len(words)} words: '{' '.join(words[:8])} ...'",
                )


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text, in one line, of each paragraph and list item. Rows of
    tables are left out.
    """
    started, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""]):
        bare = line.strip()
        if (
            not bare
            or bare.startswith(("|", "#"))
            or re.match(r"([*+-]|\d+\.|:)\s", bare)
        ):
            if lines:
                yield started, " ".join(lines)
            lines = []
        if bare and not bare.startswith("|"):
            started = started if lines else number
            lines.append(re.sub(r"^(?:[*+:#-]+|\d+\.)\s+", "", bare))


def findings() -> Iterator[Finding]:
    for folder in SOURCES:
        for path in sorted((TREE / folder).rglob("*.py")):
            name = path.relative_to(TREE).as_posix()
            for line, text, of_function in docstrings(path):
                opening = OPENING.match(text)
                if opening:
                    yield (
                        name,
                        line,
                        f"a docstring opens with '{opening[0]}': begin with a noun or "
                        "a verb",
                    )
                elif (
                    folder == "pyro_symmetric"
                    and of_function
                    and text.split()[0].strip(".,:") not in VERBS
                ):
                    yield (
                        name,
                        line,
                        f"a function's docstring opens with '{text.split()[0]}': begin "
                        "with a verb of VERBS, or add it",
                    )
                yield from check(name, line, text)
    for page in pages():
        yield from check(*page)
        if page[0] != "CHANGELOG.md":
            yield from long_sentences(*page)


def main() -> int:
    found = sorted(set(findings()))
    for name, line, message in found:
        print(f"{name}:{line}: {message}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
