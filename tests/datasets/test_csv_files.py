"""A user's own CSV file: what is read from it, and each way in which it can be unusable."""

import re

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


def test_out_of_distribution_rows_are_taken_by_their_columns_names(write, tmp_path):
    like = datasets.load(write(lines("a,b,y", "{i},{m},{i}.5")), target="y", dtype=torch.float64)
    other = tmp_path / "other.csv"
    other.write_text("b,a\n1,7\n2,7\n")
    rows = datasets.ood(f"csv:{other}", like)
    assert sorted((rows.ood_x * rows.x_scale + rows.x_mean).round().tolist()) == [[7.0, 1.0], [7.0, 2.0]]
    other.write_text("a\n7\n8\n")
    with pytest.raises(ValueError, match=r"columns expected but not found: \['b'\]"):
        datasets.ood(f"csv:{other}", like)


@pytest.mark.parametrize(
    ("text", "target", "sentence"),
    [
        (lines("a,y", "{i},{i}.5"), "z", "needs a target column (--target), not 'z'; its columns are ['a', 'y']"),
        (lines("a,y", "{i},") + "1,2\n", "y", "missing values in the columns ['y']"),
        (lines("a,y", "{i},{i}.5") + "abc,2\n", "y", "the columns ['a'] hold words"),
    ],
)
def test_an_unusable_file_is_refused_in_a_sentence(write, text, target, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        datasets.load(write(text), target=target)
