"""A user's own CSV file: what is read from it, and each way in which it can be unusable."""

import re
from pathlib import Path

import pytest
import torch

from pyro_symmetric import datasets


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "table.csv").write_text(text, encoding="utf-8")
        return f"csv:{tmp_path / 'table.csv'}"

    return write


def lines(header: str, row: str, count: int = 20) -> str:
    """``count`` rows, ``{i}`` in each replaced by its number."""
    return header + "\n" + "".join(row.replace("{i}", str(i)).replace("{m}", str(i % 2)) + "\n" for i in range(count))


def test_numbers_are_features_and_fractional_targets_make_a_regression(write):
    data = datasets.load(write(lines("a,b,y", "{i},-{i},{i}.5")), target="y", dtype=torch.float64)
    assert (data.task, data.feature_names, len(data.train_x), len(data.test_x)) == ("regression", ("a", "b"), 16, 4)
    a, b = (data.train_x * data.x_scale + data.x_mean).unbind(1)
    torch.testing.assert_close(a, -b)
    torch.testing.assert_close(data.unstandardize_y(data.train_y), a + 0.5)


def test_words_and_few_whole_numbers_make_a_classification(write):
    words = datasets.load(write(lines("a,y", "{i},class {m}")), target="y")
    assert (words.task, words.class_names) == ("classification", ("class 0", "class 1"))
    numbers = datasets.load(write(lines("a,y", "{i},{m}")), target="y")
    assert numbers.class_names == ("0", "1")
    raw = (numbers.train_x * numbers.x_scale + numbers.x_mean)[:, 0].round().long()
    assert torch.equal(raw % 2, numbers.train_y)


def test_the_guessed_task_can_be_overridden(write):
    name = write(lines("a,y", "{i},{m}"))
    assert datasets.load(name, target="y", task="regression").task == "regression"
    many = write(lines("a,y", "{i},{i}", count=21))
    assert datasets.load(many, target="y").task == "regression"


def test_a_column_of_words_becomes_one_feature_a_word(write):
    rows = "\n".join(f"{'red' if i % 3 == 0 else 'blue'},{i},{i}.5" for i in range(12))
    data = datasets.load(write(f"colour,a,y\n{rows}\n"), target="y", dtype=torch.float64)
    assert data.feature_names == ("colour=blue", "colour=red", "a")
    blue, red, a = (data.train_x * data.x_scale + data.x_mean).unbind(1)
    torch.testing.assert_close(red, (a.round() % 3 == 0).double())
    torch.testing.assert_close(blue + red, torch.ones_like(a))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_separators_quotes_blank_lines_and_a_byte_order_mark_are_understood(write, delimiter):
    text = lines('"a","y"', '"{i}", {i}.5 ').replace(",", delimiter).replace("\n", "\r\n\r\n")
    data = datasets.load(write("\ufeff" + text), target="y")
    assert (data.feature_names, len(data.train_x)) == (("a",), 16)


def test_out_of_distribution_rows_are_coded_like_the_training_table(write, tmp_path):
    like = datasets.load(
        write("colour,a,y\n" + "\n".join(f"{'red' if i % 2 else 'blue'},{i},{i}.5" for i in range(12))),
        target="y",
        dtype=torch.float64,
    )
    other = tmp_path / "other.csv"
    other.write_text("a,colour\n7,red\n7,green\n")
    rows = datasets.ood(f"csv:{other}", like)
    raw = (rows.ood_x * rows.x_scale + rows.x_mean).round()
    assert sorted(raw.tolist()) == [[0.0, 0.0, 7.0], [0.0, 1.0, 7.0]]
    other.write_text("a\n7\n8\n")
    with pytest.raises(ValueError, match="has no column 'colour'; its columns are 'a'"):
        datasets.ood(f"csv:{other}", like)


@pytest.mark.parametrize(
    ("text", "target", "sentence"),
    [
        (lines("a,y", "{i},{i}.5"), None, "needs a target column (--target), not None; its columns are 'a', 'y'"),
        (lines("a,y", "{i},{i}.5"), "z", "needs a target column (--target), not 'z'; its columns are 'a', 'y'"),
        (lines("y", "{i}.5"), "y", "has no column beside the target 'y'"),
        (lines("a,y", "{i},") + "1,2\n", "y", "column 'y' of"),
        (lines("a,y", "{i},{i}.5") + "nan,2\n", "y", "has a missing value in row 21"),
        (lines("a,y", "{i},{i}.5") + "inf,2\n", "y", "holds numbers that single precision can't"),
        (lines("a,y", "{i},{i}.5") + "abc,2\n", "y", "mixes numbers and words ('abc')"),
        (lines("a,y", "id{i},{i}.5", 21), "y", "column 'a' holds 21 different words"),
        (lines("a,y", "{i},{i}.5") + "1,2,3\n", "y", "in line 22, saw 3"),
        (lines("a,y", "{i},{i}.5,7"), "y", "can't be read as a CSV file"),
        (lines("a,b,y", "{i},1,{i}.5") + "1,2\n", "y", "has a missing value in row 21"),
        ("a,y\n", "y", "has no rows below its header"),
        ("", "y", "No columns to parse"),
        ("a,y\n1,2.5\n2,3.5\n", "y", "has 2 rows, too few to train on 2 and test on 1"),
        (lines("a,y", "{i},only"), "y", "is only in every training row"),
        (lines("a,y", "{i},7"), "y", "is 7 in every training row"),
    ],
)
def test_an_unusable_file_is_refused_in_a_sentence_that_names_the_column_or_row(write, text, target, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        datasets.load(write(text), target=target)


def test_words_can_t_be_a_regression_s_target(write):
    with pytest.raises(ValueError, match=r"holds words .*; regression needs numbers"):
        datasets.load(write(lines("a,y", "{i},w{m}")), target="y", task="regression")


def test_a_missing_or_binary_file_is_told_apart(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        datasets.load(f"csv:{tmp_path / 'none.csv'}", target="y")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81,y\n1,2\n")
    with pytest.raises(ValueError, match="can't be read as a CSV file"):
        datasets.load(f"csv:{tmp_path / 'binary.csv'}", target="y")
