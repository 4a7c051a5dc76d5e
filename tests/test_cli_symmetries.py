"""The command that prints the symmetries of a network."""

import json
from pathlib import Path

import pytest

from pyro_symmetric import Symmetry, cli


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cli_nets.py").write_text(
        "from torch import nn\n"
        "def mlp():\n"
        "    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))\n"
        "def number():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "cli_nets"


def test_the_table_the_order_and_the_explanation_are_printed(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["symmetries", f"{nets}:mlp", "--input", "1,3", "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "permutation" in printed
    # log 5! + log 4! + 4 log 2, the signs of the tanh units
    assert "exp(10.7)" in printed
    assert "0.weight[1]" in printed


def test_json_holds_the_whole_symmetry(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["symmetries", f"{nets}:mlp", "--input", "2,3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["log_order"] == pytest.approx(4.787 + 3.178 + 2.773, abs=1e-3)
    assert Symmetry.from_dict(data).permutations.factors == {"0": 5, "2": 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["resnet51"], "resnet51"), (["{nets}:number"], "returned a int"), (["{nets}:absent"], "no callable 'absent'")],
)
def test_unknown_nets_end_in_one_sentence(
    arguments: list[str], message: str, nets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["symmetries", *(part.format(nets=nets) for part in arguments)]) == 2
    assert message in capsys.readouterr().err
