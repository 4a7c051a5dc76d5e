"""UCI folders in the literature's layout."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pyro_symmetric import datasets


@pytest.fixture
def folder(tmp_path) -> Path:
    """A set of 12 rows, 3 columns; column 1 is the target; two splits."""
    folder = tmp_path / "uci" / "tiny"
    folder.mkdir(parents=True)
    values = np.random.default_rng(0).normal(size=(12, 3)) * [1.0, 10.0, 100.0] + [0.0, 5.0, -3.0]
    np.savetxt(folder / "data.txt", values)
    np.savetxt(folder / "index_features.txt", [0, 2])  # as floats, as the shared files have it
    np.savetxt(folder / "index_target.txt", [1], fmt="%d")
    for split, test in enumerate(([0, 1, 2], [9, 4])):
        np.savetxt(folder / f"index_test_{split}.txt", test, fmt="%d")
        np.savetxt(folder / f"index_train_{split}.txt", np.setdiff1d(np.arange(12), test), fmt="%d")
    return folder


def load(folder: Path, **arguments) -> datasets.Dataset:
    return datasets.load("uci/tiny", root=folder.parent.parent, dtype=torch.float64, **arguments)


def test_rows_and_columns_are_those_of_the_index_files(folder):
    values = torch.from_numpy(np.loadtxt(folder / "data.txt"))
    data = load(folder, split=1)
    assert data.task == "regression"
    torch.testing.assert_close((data.test_x * data.x_scale + data.x_mean), values[[9, 4]][:, [0, 2]])
    torch.testing.assert_close(data.unstandardize_y(data.test_y), values[[9, 4], 1])
    train = values[[0, 1, 2, 3, 5, 6, 7, 8, 10, 11]]
    torch.testing.assert_close(data.x_mean, train[:, [0, 2]].mean(0))
    torch.testing.assert_close(data.y_scale, train[:, 1].std(correction=0))
    torch.testing.assert_close(data.train_y.mean(), torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0)


def test_a_constant_feature_becomes_zeros(folder):
    values = np.loadtxt(folder / "data.txt")
    values[:, 0] = 0.1
    np.savetxt(folder / "data.txt", values)
    assert load(folder).train_x[:, 0].abs().max() < 1e-12


def test_a_whole_number_target_can_be_taken_as_classes(folder):
    values = np.loadtxt(folder / "data.txt")
    values[:, 1] = np.arange(12) % 3 + 4
    np.savetxt(folder / "data.txt", values)
    data = load(folder, task="classification")
    assert data.class_names == ("4", "5", "6")
    assert data.test_y.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("index_target.txt", "0\n1\n", "one target column"),
        ("index_test_0.txt", "0\n5\n", "no row in both the training and the test part"),
        ("data.txt", "1 2 nan\n" * 12, "NaN, infinite"),
    ],
)
def test_a_folder_that_breaks_the_layout_is_refused(folder, file, content, sentence):
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load(folder)
