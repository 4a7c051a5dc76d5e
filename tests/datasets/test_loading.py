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


def test_all_classes_are_there_unless_some_are_asked_to_be_held_out():
    data = datasets.load("digits")
    assert data.class_names == tuple("0123456789")
    assert len(data.train_x) + len(data.test_x) == 1797
    assert data.ood_x is None


def test_digits_hold_the_last_two_classes_out_and_keep_every_row_once(digits):
    labels = torch.from_numpy(sklearn_datasets.load_digits().target)
    assert digits.class_names == tuple("01234567")
    assert digits.num_classes == digits.num_outputs == 8
    assert len(digits.ood_x) == (labels >= 8).sum()
    counts = torch.bincount(digits.train_y, minlength=8) + torch.bincount(digits.test_y, minlength=8)
    assert counts.tolist() == torch.bincount(labels)[:8].tolist()
    assert digits.ood_name == "digits: classes 8, 9"


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


def test_images_are_standardised_by_the_training_pixels(digits):
    torch.testing.assert_close(digits.train_x.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(digits.train_x.std(correction=0), torch.tensor(1.0))


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
    assert (data.task, data.num_classes, data.num_outputs) == ("regression", None, 1)
    torch.testing.assert_close(data.train_y.std(correction=0), torch.ones((), dtype=torch.float64))
    targets = data.unstandardize_y(torch.cat([data.train_y, data.test_y]))
    expected = torch.from_numpy(sklearn_datasets.load_diabetes().target)
    torch.testing.assert_close(targets.sort().values, expected.sort().values)


def test_of_few_classes_auto_holds_none_out():
    assert datasets.load("wine", hold_out="auto").num_classes == 3
    assert datasets.load("breast-cancer", hold_out="auto").ood_x is None
    assert datasets.load("wine", hold_out=["class_1"]).class_names == ("class_0", "class_2")


def test_dtype_applies_to_inputs_and_targets_but_not_to_class_indices():
    assert datasets.load("diabetes", dtype=torch.float64).train_y.dtype == torch.float64
    data = datasets.load("digits", hold_out="auto", dtype=torch.float64)
    assert (data.ood_x.dtype, data.x_scale.dtype, data.train_y.dtype) == (torch.float64, torch.float64, torch.int64)
    assert data.to(dtype=torch.float32).test_x.dtype == torch.float32


def test_descriptions_say_what_a_report_needs(digits):
    assert "digits: 1,154 training and 289 test rows; images of 1x8x8" in repr(digits)
    assert "354 out-of-distribution rows (digits: classes 8, 9)" in repr(digits)
    assert "8 classes (0, 1, 2, 3, 4, 5, 6, 7)" in digits.describe()
    assert "Kept out of training and test: classes 8, 9." in digits.describe()
    assert "features: 10; one target (mean" in datasets.load("diabetes").describe()


def test_tables_of_the_same_width_serve_as_out_of_distribution_inputs(tmp_path):
    like = datasets.load("wine", dtype=torch.float64)
    (tmp_path / "other.csv").write_text(
        ",".join(like.feature_names) + "\n" + "\n".join(",".join(["1.5"] * 13) for _ in range(4)) + "\n"
    )
    data = datasets.ood(f"csv:{tmp_path / 'other.csv'}", like, max_rows=3)
    assert data.ood_x.shape == (3, 13)
    torch.testing.assert_close((data.ood_x * data.x_scale + data.x_mean), torch.full((3, 13), 1.5, dtype=torch.float64))
    torch.testing.assert_close(data.train_x, like.train_x)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("imagenet", {}, "no data set 'imagenet'; known are digits, wine"),
        ("digits", {"task": "regression"}, "digits is a classification data set"),
        ("digits", {"hold_out": ["eight"]}, "hold_out names ['eight'], but the classes of digits are 0, 1, 2"),
        ("digits", {"hold_out": range(9)}, "leaves 1 of the 10 classes"),
        ("digits", {"hold_out": "8"}, "it must be 'auto', None or a list"),
        ("diabetes", {"hold_out": ["1"]}, "diabetes is a regression"),
        ("digits", {"test_fraction": 1.0}, "test_fraction is 1.0"),
        ("digits", {"max_train": 0}, "max_train is 0; it must be at least 2"),
        ("digits", {"max_train": 5}, "too few rows: none of the 5 training rows is of"),
        ("mnist", {"split": 1}, "mnist has one official split"),
    ],
)
def test_what_can_t_be_loaded_is_refused_in_a_sentence_that_says_what_was_found(name, arguments, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        datasets.load(name, **arguments)


@pytest.mark.parametrize(
    ("name", "like", "sentence"),
    [
        ("wine", "digits", "rows of wine have shape (13,), but of digits (1, 8, 8)"),
        ("breast-cancer", "wine", "rows of breast-cancer have shape (30,), but of wine (13,)"),
        ("wine", "wine", "which is the data set itself"),
    ],
)
def test_impossible_out_of_distribution_data_are_refused(name, like, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        datasets.ood(name, datasets.load(like))
