"""The command line: the symmetries of a network, and how options are answered."""

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
        "def made(shape, outputs):\n"
        "    return nn.Sequential(nn.Linear(shape[0], 7), nn.ReLU(), nn.Linear(7, outputs))\n"
        "net = mlp()\n"
        "def three(a, b, c):\n"
        "    return mlp()\n"
        "def fails():\n"
        "    raise RuntimeError('boom')\n"
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
    [
        (["resnet51"], "did you mean 'resnet"),
        (["{nets}:number"], "returned a int"),
        (["{nets}:absent"], "no callable 'absent'"),
        (["{nets}:three"], "needs 3 arguments"),
        (["{nets}:fails"], "boom"),
        (["{nets}:mlp"], "--input"),
    ],
)
def test_unknown_nets_end_in_one_sentence(
    arguments: list[str], message: str, nets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["symmetries", *(part.format(nets=nets) for part in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_factory_is_called_as_compare_calls_it_and_a_network_is_taken_as_it_is(
    nets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["symmetries", f"{nets}:made", "--input", "2,3", "--outputs", "4", "--json"]) == 0
    made = Symmetry.from_dict(json.loads(capsys.readouterr().out))
    assert {site: tuple(shape) for site, shape in made.site_shapes.items()}["2.weight"] == (4, 7)
    assert cli.main(["symmetries", f"{nets}:net", "--input", "2,3", "--json"]) == 0
    assert Symmetry.from_dict(json.loads(capsys.readouterr().out)).permutations.factors == {"0": 5, "2": 4}


def test_budget_help_lists_the_parts_of_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--budget", "help"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")}
    assert "chains=16" in lines["hmc"]
    assert "modes" not in lines["hmc"]
    assert "modes=100" in lines["ensemble"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--methods", "hmcc"], "hmc"),
        (["--methods", "hmc", "--budget", "hmc.chain=4"], "chains"),
        (["--activation", "rellu"], "relu"),
        (["--data", "digit"], "digits"),
    ],
)
def test_a_misspelt_name_is_answered_by_the_nearest(
    given: list[str], meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *given, "--out", str(tmp_path / "out")]) == 2
    assert f"did you mean '{meant}'" in capsys.readouterr().err
