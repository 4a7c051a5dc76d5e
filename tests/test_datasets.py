"""Data sets by name: splits, standardisation, and readers of scikit-learn, images, UCI
folders, CSV files, pictures.
"""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from sklearn import datasets as sklearn_datasets
from sklearn.preprocessing import StandardScaler

from pyro_symmetric import datasets


@pytest.fixture(scope="module")
def digits() -> datasets.Dataset:
    return datasets.load("digits", hold_out="auto")


def rows_of(x: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.flatten(1).round(decimals=4).tolist()}


@pytest.mark.parametrize(
    ("held", "kept"), [("auto", "01234567"), (["3", 5], "01246789")]
)
def test_unstandardised_digits_are_the_original_pixels_and_each_label_stays_with_its_image(
    held, kept
):
    original = sklearn_datasets.load_digits()
    pixels_of = original.data.astype(int).tolist()
    label_of = {
        tuple(row): label for row, label in zip(pixels_of, original.target, strict=True)
    }
    data = datasets.load("digits", hold_out=held)
    assert (data.input_shape, data.class_names) == ((1, 8, 8), tuple(kept))
    x, y = (
        torch.cat([data.train_x, data.test_x, data.ood_x]),
        torch.cat([data.train_y, data.test_y]),
    )
    pixels = [
        tuple(row)
        for row in ((x * data.x_scale + data.x_mean) * 16)
        .round()
        .flatten(1)
        .int()
        .tolist()
    ]
    assert sorted(pixels) == sorted(map(tuple, pixels_of))
    assert [str(label_of[row]) for row in pixels[: len(y)]] == [
        kept[index] for index in y
    ]
    assert {str(label_of[row]) for row in pixels[len(y) :]} == set("0123456789") - set(
        kept
    )


def test_the_split_is_stratified_in_every_class(digits):
    train, test = torch.bincount(digits.train_y), torch.bincount(digits.test_y)
    torch.testing.assert_close(
        test / (train + test), torch.full((8,), 0.2), atol=0.01, rtol=0
    )


def test_a_subset_is_stratified_and_drawn_from_the_same_training_rows(digits):
    small = datasets.load("digits", hold_out="auto", max_train=80, max_test=40)
    assert torch.bincount(small.train_y).tolist() == pytest.approx([10] * 8, abs=1)
    assert (len(small.train_x), len(small.test_x), len(small.ood_x)) == (80, 40, 40)
    originals = rows_of(digits.train_x * digits.x_scale + digits.x_mean)
    assert rows_of(small.train_x * small.x_scale + small.x_mean) <= originals


def test_a_seed_repeats_the_split_and_another_seed_or_split_changes_it(digits):
    torch.manual_seed(123)  # the generator's state has no part in it
    torch.testing.assert_close(
        datasets.load("digits", hold_out="auto").train_x, digits.train_x, rtol=0, atol=0
    )
    for other in ({"seed": 1}, {"split": 1}):
        changed = datasets.load("digits", hold_out="auto", **other)
        assert not torch.equal(changed.train_y, digits.train_y)
        assert len(changed.train_x) == len(digits.train_x)


def test_tables_are_standardised_as_scikit_learn_does():
    data = datasets.load("wine", dtype=torch.float64)
    raw = data.train_x * data.x_scale + data.x_mean
    scaler = StandardScaler().fit(raw.numpy())
    torch.testing.assert_close(
        data.train_x, torch.from_numpy(scaler.transform(raw.numpy()))
    )
    raw_test = data.test_x * data.x_scale + data.x_mean
    torch.testing.assert_close(
        data.test_x, torch.from_numpy(scaler.transform(raw_test.numpy()))
    )
    assert rows_of(torch.cat([raw, raw_test])) == rows_of(
        torch.from_numpy(sklearn_datasets.load_wine().data)
    )


def test_regression_targets_return_to_the_data_s_units():
    data = datasets.load("diabetes", dtype=torch.float64)
    assert (data.task, data.num_outputs) == ("regression", 1)
    torch.testing.assert_close(
        data.train_y.std(correction=0), torch.ones((), dtype=torch.float64)
    )
    targets = data.unstandardize_y(torch.cat([data.train_y, data.test_y]))
    expected = torch.from_numpy(sklearn_datasets.load_diabetes().target)
    torch.testing.assert_close(targets.sort().values, expected.sort().values)


def test_folders_of_pictures_are_read_by_class_and_serve_as_other_inputs(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 6), ("val", 3)):
        for number, name in enumerate(("blue", "red")):
            (tmp_path / part / name).mkdir(parents=True)
            for k in range(count):
                colour = (200 * number, 0, 250 - 200 * number)
                image.new("RGB", (20 + k, 12), colour).save(
                    tmp_path / part / name / f"{k}.png"
                )
    data = datasets.load(f"images:{tmp_path}", image_size=8)
    assert (data.train_x.shape, data.test_x.shape, data.class_names) == (
        (12, 3, 8, 8),
        (6, 3, 8, 8),
        ("blue", "red"),
    )
    raw = data.train_x * data.x_scale + data.x_mean
    assert torch.allclose(raw[:, 0].mean((1, 2)) * 255, 200.0 * data.train_y, atol=1e-3)
    other = datasets.ood(f"images:{tmp_path / 'train'}", data)
    assert other.ood_x.shape == (12, 3, 8, 8)


def test_labels_are_whole_numbers_when_a_part_of_a_folder_has_no_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("blue", "red"):
        for part in ("train", "test"):
            (tmp_path / part / name).mkdir(parents=True)
        for k in range(2):
            image.new("RGB", (8, 8), (100 * k, 0, 0)).save(
                tmp_path / "train" / name / f"{k}.png"
            )
    data = datasets.load(f"images:{tmp_path}", image_size=8)
    assert (data.train_y.tolist(), data.train_y.dtype, len(data.test_y)) == (
        [0, 0, 1, 1],
        torch.int64,
        0,
    )


def test_classes_are_held_out_only_if_that_is_asked_for():
    assert datasets.load("digits").num_outputs == 10
    assert datasets.load("wine", hold_out="auto").ood_x is None  # of so few


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        (
            "digits",
            {"hold_out": range(9)},
            "it must leave at least 2 of the classes of digits",
        ),
        (
            "digits",
            {"max_train": 5},
            "too few rows: the 5 training rows lack the classes",
        ),
    ],
)
def test_what_would_leave_out_classes_is_refused(name, arguments, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        datasets.load(name, **arguments)


def write_idx(folder: Path, part: str, pixels: np.ndarray, labels: np.ndarray) -> None:
    """The IDX format: magic number (type 8 = bytes, number of dimensions), big-endian
    sizes, bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">BBBB3I", 0, 0, 8, 3, *pixels.shape)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(
        header + pixels.astype(np.uint8).tobytes()
    )
    header = struct.pack(">BBBBI", 0, 0, 8, 1, len(labels))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(
        header + labels.astype(np.uint8).tobytes()
    )


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, size=(60, 28, 28))


@pytest.fixture
def root(tmp_path, pixels) -> Path:
    """An MNIST of 40 training and 20 test images, labelled 0 to 9 in turn."""
    labels = np.arange(60) % 10
    for name in ("MNIST", "FashionMNIST"):
        write_idx(tmp_path / name / "raw", "train", pixels[:40], labels[:40])
        write_idx(tmp_path / name / "raw", "t10k", pixels[40:], labels[40:])
    return tmp_path


def test_the_official_parts_are_kept_and_pixels_come_back_exactly(root, pixels):
    data = datasets.load("mnist", root=root)
    assert (data.train_x.shape, data.test_x.shape) == ((40, 1, 28, 28), (20, 1, 28, 28))
    assert data.train_y.tolist() == [i % 10 for i in range(40)]
    found = ((data.test_x * data.x_scale + data.x_mean) * 255).round().squeeze(1)
    assert torch.equal(found.long(), torch.from_numpy(pixels[40:]))
    torch.testing.assert_close(
        data.x_mean.squeeze(), torch.tensor(pixels[:40].mean() / 255).float()
    )
    torch.testing.assert_close(
        data.x_scale.squeeze(), torch.tensor(pixels[:40].std() / 255).float()
    )


def test_held_out_classes_come_from_the_test_part_only(root, pixels):
    data = datasets.load("fashion-mnist", root=root, hold_out="auto")
    assert data.class_names[0] == "T-shirt/top"
    assert data.ood_name.endswith(": Bag, Ankle boot")
    found = ((data.ood_x * data.x_scale + data.x_mean) * 255).round().squeeze(1).long()
    assert torch.equal(found, torch.from_numpy(pixels[[48, 49, 58, 59]]))


def test_svhn_and_cifar_arrays_are_read_channels_first(tmp_path, monkeypatch):
    datasets.import_torchvision()
    from torchvision.datasets import SVHN

    pixels = np.random.default_rng(1).integers(
        0, 256, size=(32, 32, 3, 20), dtype=np.uint8
    )
    labels = np.arange(20)[:, None] % 10 + 1  # SVHN writes the digit 0 as 10
    for part in ("train", "test"):
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", {"X": pixels, "y": labels})
    # the official checksums
    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    data = datasets.load("svhn", root=tmp_path)
    assert data.input_shape == (3, 32, 32)
    assert data.test_y[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    found = ((data.test_x * data.x_scale + data.x_mean) * 255).round().long()
    assert torch.equal(found, torch.from_numpy(pixels).permute(3, 2, 0, 1).long())
    torch.testing.assert_close(
        data.train_x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0
    )

    class Cifar:
        data, targets = pixels.transpose(3, 0, 1, 2), [0] * 20

    assert np.array_equal(datasets._arrays(Cifar)[0], pixels.transpose(3, 2, 0, 1))


def test_another_data_set_gives_the_inputs_from_out_of_the_distribution(root, pixels):
    data = datasets.ood("fashion-mnist", datasets.load("mnist", root=root), root=root)
    assert data.ood_name == "fashion-mnist"
    found = ((data.ood_x * data.x_scale + data.x_mean) * 255).round().squeeze(1).long()
    assert sorted(found.flatten(1).tolist()) == sorted(
        pixels[40:].reshape(20, -1).tolist()
    )
    with pytest.raises(
        ValueError,
        match=r"rows of digits have shape \(1, 8, 8\), but of mnist \(1, 28, 28\)",
    ):
        datasets.ood("digits", datasets.load("mnist", root=root))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A set of 12 rows, 3 columns; column 1 is the target; two splits."""
    folder = tmp_path / "uci" / "tiny"
    folder.mkdir(parents=True)
    values = np.random.default_rng(0).normal(size=(12, 3)) * [1.0, 10.0, 100.0] + [
        0.0,
        5.0,
        -3.0,
    ]
    np.savetxt(folder / "data.txt", values)
    # as floats, as the shared files have it
    np.savetxt(folder / "index_features.txt", [0, 2])
    np.savetxt(folder / "index_target.txt", [1], fmt="%d")
    for split, test in enumerate(([0, 1, 2], [9, 4])):
        np.savetxt(folder / f"index_test_{split}.txt", test, fmt="%d")
        np.savetxt(
            folder / f"index_train_{split}.txt",
            np.setdiff1d(np.arange(12), test),
            fmt="%d",
        )
    return folder


def load(folder: Path, **arguments) -> datasets.Dataset:
    return datasets.load(
        "uci/tiny", root=folder.parent.parent, dtype=torch.float64, **arguments
    )


def test_rows_and_columns_are_those_of_the_index_files(folder):
    values = torch.from_numpy(np.loadtxt(folder / "data.txt"))
    data = load(folder, split=1)
    assert data.task == "regression"
    torch.testing.assert_close(
        (data.test_x * data.x_scale + data.x_mean), values[[9, 4]][:, [0, 2]]
    )
    torch.testing.assert_close(data.unstandardize_y(data.test_y), values[[9, 4], 1])
    train = values[[0, 1, 2, 3, 5, 6, 7, 8, 10, 11]]
    torch.testing.assert_close(data.x_mean, train[:, [0, 2]].mean(0))
    torch.testing.assert_close(data.y_scale, train[:, 1].std(correction=0))
    torch.testing.assert_close(
        data.train_y.mean(), torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0
    )


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


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "table.csv").write_text(text, encoding="utf-8")
        return f"csv:{tmp_path / 'table.csv'}"

    return write


def lines(header: str, row: str, count: int = 20) -> str:
    """``count`` rows, ``{i}`` in each replaced by its number."""
    return (
        header
        + "\n"
        + "".join(
            row.replace("{i}", str(i)).replace("{m}", str(i % 2)) + "\n"
            for i in range(count)
        )
    )


def test_numbers_are_features_and_fractional_targets_make_a_regression(write):
    data = datasets.load(
        write(lines("a,b,y", "{i},-{i},{i}.5")), target="y", dtype=torch.float64
    )
    assert (data.task, data.feature_names, len(data.train_x), len(data.test_x)) == (
        "regression",
        ("a", "b"),
        16,
        4,
    )
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
    like = datasets.load(
        write(lines("a,b,y", "{i},{m},{i}.5")), target="y", dtype=torch.float64
    )
    other = tmp_path / "other.csv"
    other.write_text("b,a\n1,7\n2,7\n")
    rows = datasets.ood(f"csv:{other}", like)
    assert sorted((rows.ood_x * rows.x_scale + rows.x_mean).round().tolist()) == [
        [7.0, 1.0],
        [7.0, 2.0],
    ]
    other.write_text("a\n7\n8\n")
    with pytest.raises(ValueError, match=r"columns expected but not found: \['b'\]"):
        datasets.ood(f"csv:{other}", like)


@pytest.mark.parametrize(
    ("text", "target", "sentence"),
    [
        (lines("a,y", "{i},") + "1,2\n", "y", "missing values in the columns ['y']"),
        (lines("a,y", "{i},{i}.5") + "abc,2\n", "y", "the columns ['a'] hold words"),
    ],
)
def test_an_unusable_file_is_refused_in_a_sentence(write, text, target, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        datasets.load(write(text), target=target)
