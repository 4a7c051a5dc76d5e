"""The linter of prose finds what it should, and nothing in code, formulas, titles and names."""

import importlib.util
from pathlib import Path

import pytest

PLACE = Path(__file__).parent.parent / "tools" / "prose.py"
SPEC = importlib.util.spec_from_file_location("prose", PLACE)
prose = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prose)

LONG = "It has " + "very " * 40 + "many words."
FAULTS = {
    "The same call goes on with the run.": "goes on with",
    "It draws. Where units are equal, nothing moves.": "Where units are equal,",
    "The density is symmetrized.": "symmetrized",
    "It analyzes behavior.": "analyzes",
    "A centered\nmean of neighbors": "centered",
    "* first\n* the normalization of the second": "normalization",
}
FINE = [
    "Use `ps.Symmetrized` and ``optimizer=``; :func:`~ps.canonicalize` sorts.",
    "Its size was resized; a prize is seized.",
    "Seyboldt et al. 2026, *Preconditioning by minimizing Fisher divergence*, arXiv.",
    'Efron 2004, "A generalized color", says so.',
    "```python\ncolor = normalize(x)\n```",
    "Chains sit where the energy is low, and stay there.",
    "See [the page](https://example.org/center_of_gray) and $normalize(x)$.",
    "A class such as SymmetrizedGuide or init_optimizer or torch.optimizer.step.",
]


@pytest.mark.parametrize(("text", "found"), FAULTS.items())
def test_a_fault_is_found(text, found):
    assert any(found in message for _, _, message in prose.check("page", 1, text))


@pytest.mark.parametrize("text", FINE)
def test_what_is_fine_passes(text):
    assert list(prose.check("page", 1, text)) == []
    assert list(prose.long_sentences("page", 1, text)) == []


def test_the_line_of_a_fault_is_told():
    assert [line for _, line, _ in prose.check("page", 1, "one\n\n```\ncode\n```\n\nthe color")] == [7]


def test_a_long_sentence_is_found_in_text_and_not_in_code_or_tables():
    assert len(list(prose.long_sentences("page", 1, LONG))) == 1
    for text in (f"```\n{LONG}\n```", f"| {LONG} |", LONG.replace("very very", "very: very")):
        assert list(prose.long_sentences("page", 1, text)) == []


def test_docstrings_are_read_without_their_examples(tmp_path):
    source = 'def f():\n    """Whether it holds.\n\n    ::\n\n        color = 1\n\n    >>> color\n    """\n'
    (tmp_path / "a.py").write_text(source)
    [(line, text)] = prose.docstrings(tmp_path / "a.py")
    assert line == 2
    assert prose.OPENING.match(text)
    assert list(prose.check("a", line, text)) == []
