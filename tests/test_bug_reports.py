"""Models of public bug reports have their exact density, or are refused."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# of the reports, whose command is `python -m benchmarks.checks.bug_reports`
KINDS = ("plate", "mask", "enumeration", "support", "mixture", "block")


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_bug_reports_are_right_or_refused(kind, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.checks.bug_reports import REPORTS, outcome

    reports = [report for report in REPORTS if kind in report.name]
    outcomes = {report.name: outcome(report) for report in reports}
    assert len(reports) > (kind != "block")
    wrong = {
        name: result for name, result in outcomes.items() if result.startswith("wrong")
    }
    assert not wrong
    refused = [
        name for name, result in outcomes.items() if result.startswith("refused")
    ]
    assert refused == [report.name for report in reports if report.exact is None]
