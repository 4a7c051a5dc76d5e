"""Loading by name: splits, held-out classes, standardisation, out-of-distribution inputs, and what is refused."""

import re

import pytest
import torch
from sklearn import datasets as sklearn_datasets
from sklearn.preprocessing import StandardScaler

from pyro_symmetric import datasets


@pytest.fixture(scope="module")
def digits() -> datasets.Dataset:
    return datasets.load("digits", hold_out="auto")


def rows_of(x: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.flatten(1).round(decimals=4).tolist()}


def test_unstandardised_digits_are_the_original_pixels(digits):
    original = sklearn_datasets.load_digits()
    everything = torch.cat([digits.train_x, digits.test_x, digits.ood_x])
    pixels = ((everything * digits.x_scale + digits.x_mean) * 16).round()
    assert digits.input_shape == (1, 8, 8)
    assert sorted(map(tuple, pixels.flatten(1).int().tolist())) == sorted(
        map(tuple, original.data.astype(int).tolist())
    )


def test_each_label_stays_with_its_image_when_classes_in_the_middle_are_held_out():
    original = sklearn_datasets.load_digits()
    label_of = {
        tuple(row): label for row, label in zip(original.data.astype(int).tolist(), original.target, strict=True)
    }
    data = datasets.load("digits", hold_out=["3", 5])
    pixels = ((data.test_x * data.x_scale + data.x_mean) * 16).round().flatten(1).int()
    found = [data.class_names[index] for index in data.test_y]
    assert found == [str(label_of[tuple(row)]) for row in pixels.tolist()]
    assert data.class_names == ("0", "1", "2", "4", "6", "7", "8", "9")


def test_the_split_is_stratified_in_every_class(digits):
    train, test = torch.bincount(digits.train_y), torch.bincount(digits.test_y)
    torch.testing.assert_close(test / (train + test), torch.full((8,), 0.2), atol=0.01, rtol=0)


def test_a_subset_is_stratified_and_drawn_from_the_same_training_rows(digits):
    small = datasets.load("digits", hold_out="auto", max_train=80, max_test=40)
    assert torch.bincount(small.train_y).tolist() == pytest.approx([10] * 8, abs=1)
    assert (len(small.train_x), len(small.test_x), len(small.ood_x)) == (80, 40, 40)
    originals = rows_of(digits.train_x * digits.x_scale + digits.x_mean)
    assert rows_of(small.train_x * small.x_scale + small.x_mean) <= originals


def test_a_seed_repeats_the_split_and_another_seed_or_split_changes_it(digits):
    torch.manual_seed(123)  # the generator's state has no part in it
    torch.testing.assert_close(datasets.load("digits", hold_out="auto").train_x, digits.train_x, rtol=0, atol=0)
    for other in ({"seed": 1}, {"split": 1}):
        changed = datasets.load("digits", hold_out="auto", **other)
        assert not torch.equal(changed.train_y, digits.train_y)
        assert len(changed.train_x) == len(digits.train_x)


def test_tables_are_standardised_as_scikit_learn_does():
    data = datasets.load("wine", dtype=torch.float64)
    raw = data.train_x * data.x_scale + data.x_mean
    scaler = StandardScaler().fit(raw.numpy())
    torch.testing.assert_close(data.train_x, torch.from_numpy(scaler.transform(raw.numpy())))
    raw_test = data.test_x * data.x_scale + data.x_mean
    torch.testing.assert_close(data.test_x, torch.from_numpy(scaler.transform(raw_test.numpy())))
    assert rows_of(torch.cat([raw, raw_test])) == rows_of(torch.from_numpy(sklearn_datasets.load_wine().data))


def test_regression_targets_return_to_the_data_s_units():
    data = datasets.load("diabetes", dtype=torch.float64)
    assert (data.task, data.num_outputs) == ("regression", 1)
    torch.testing.assert_close(data.train_y.std(correction=0), torch.ones((), dtype=torch.float64))
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
                image.new("RGB", (20 + k, 12), colour).save(tmp_path / part / name / f"{k}.png")
    data = datasets.load(f"images:{tmp_path}", image_size=8)
    assert (data.train_x.shape, data.test_x.shape, data.class_names) == ((12, 3, 8, 8), (6, 3, 8, 8), ("blue", "red"))
    raw = data.train_x * data.x_scale + data.x_mean
    assert torch.allclose(raw[:, 0].mean((1, 2)) * 255, 200.0 * data.train_y, atol=1e-3)
    other = datasets.ood(f"images:{tmp_path / 'train'}", data)
    assert other.ood_x.shape == (12, 3, 8, 8)


def test_classes_are_held_out_only_if_that_is_asked_for():
    assert datasets.load("digits").num_outputs == 10
    assert datasets.load("wine", hold_out="auto").ood_x is None  # of so few


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("digits", {"hold_out": range(9)}, "it must leave at least 2 of the classes of digits"),
        ("digits", {"max_train": 5}, "too few rows: none of the 5 training rows is of"),
    ],
)
def test_what_would_leave_out_classes_is_refused(name, arguments, sentence):
    assert datasets.load("wine", hold_out="auto").ood_x is None  # of so few
    with pytest.raises(ValueError, match=re.escape(sentence)):
        datasets.load(name, **arguments)
