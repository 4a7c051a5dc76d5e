"""The command line: the symmetries of a network, and how options are answered."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pyro_symmetric import Symmetry, cli
from pyro_symmetric.study.methods import make_method

NETS = """
from torch import nn
def mlp():
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cli_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "cli_nets"


def test_the_table_the_order_and_the_explanation_are_printed(
    nets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["symmetries", f"{nets}:mlp", "--input", "1,3", "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "permutation" in printed
    # 5! 4! 2^4, the last of which are the signs of the tanh units
    assert (
        "log |G| = 10.7: permutations and signs give 46,080 copies of every mode"
        in printed
    )
    assert "0.weight[1]" in printed


def test_json_holds_the_whole_symmetry(
    nets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["symmetries", f"{nets}:mlp", "--input", "2,3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["log_order"] == pytest.approx(4.787 + 3.178 + 2.773, abs=1e-3)
    assert Symmetry.from_dict(data).permutations.factors == {"0": 5, "2": 4}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--data 'csv:a b.csv' --target price --hidden 8,4 --prior-scale '2,1.*=.5' "
        "--no-prior-fan-in",
        "--quick --methods mean-field:learning_rate=.5,hmc:chains=4 --draws 50",
        "--data mnist --download --max-train 50 --max-test 9 --ood svhn --net optunet "
        "--seed 3 --device cpu",
    ],
)
def test_the_command_in_a_report_asks_for_the_study_that_it_is_of(line: str) -> None:
    parser = cli.build_parser()
    options = parser.parse_args(["compare", *shlex.split(line)])
    settings = cli.settings_of(options)
    again = parser.parse_args(shlex.split(settings.command("a b"))[1:])
    assert cli.settings_of(again) == settings
    assert again.out == "a b"


def without(
    *modules: str, arguments: list[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """The command line where these modules aren't installed."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
        f"from pyro_symmetric.cli import main; sys.exit(main({arguments!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{Path(cli.__file__).parent.parent}"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=environment,
    )


EXTRAS = (
    "matplotlib",
    "sklearn",
    "jinja2",
    "laplace",
    "torchvision",
    "arviz_plots",
    "torchmetrics",
)


def test_the_methods_and_budgets_are_listed_without_any_extra(tmp_path: Path) -> None:
    done = without(*EXTRAS, arguments=["compare", "--methods", "help"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "laplace-full" in done.stdout
    assert "modes=100" in done.stdout


def test_a_missing_package_is_answered_by_the_extra_that_brings_it_before_any_work(
    tmp_path: Path,
) -> None:
    done = without(
        "sklearn", "laplace", arguments=["compare", "--quick"], folder=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert "pip install '.[study]'" in done.stderr
    assert "pip install scikit-learn laplace-torch" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "word"),
    [("--methods=nutz", "nutz"), ("--data=minst", "minst"), ("--reference=x", "'x'")],
)
def test_options_are_checked_before_packages(
    option: str,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["compare", option]) == 2
    said = capsys.readouterr().err
    assert word in said
    assert "pip" not in said


def test_a_reference_of_too_few_draws_is_refused_before_anything_is_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "compare",
        "--quick",
        "--data",
        "wine",
        "--methods",
        "mean-field,ensemble:modes=2",
    ]
    assert (
        cli.main(
            [*arguments, "--reference", "ensemble", "--out", str(tmp_path / "out")]
        )
        == 2
    )
    printed = capsys.readouterr()
    assert "ensemble:modes=2 gives 2 draws" in printed.err
    assert "Fitting" not in printed.out
    assert not (tmp_path / "out").exists()


def test_the_default_study_of_the_makefile_has_few_images_and_a_method_of_each_kind():
    text = (Path(__file__).parents[1] / "Makefile").read_text()
    given = text.partition("COMPARE := ")[2].partition("\nARGS")[0]
    options = cli.build_parser().parse_args(
        ["compare", *given.replace("\\", "").split()]
    )
    settings = cli.settings_of(options)
    assert (settings.max_train, settings.hidden) == (100, (32,))
    methods = {make_method(title).name for title in settings.methods}
    assert {"mean-field", "symmetrized", "ensemble", "sghmc", "hmc"} <= methods
