"""Images through torchvision, from tiny files in the official formats."""

import struct
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch

from pyro_symmetric import datasets
from pyro_symmetric.datasets import sources


def write_idx(folder: Path, part: str, pixels: np.ndarray, labels: np.ndarray) -> None:
    """The IDX format: magic number (type 8 = bytes, number of dimensions), big-endian sizes, bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">BBBB3I", 0, 0, 8, 3, *pixels.shape)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.astype(np.uint8).tobytes())
    header = struct.pack(">BBBBI", 0, 0, 8, 1, len(labels))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())


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
    torch.testing.assert_close(data.x_mean.squeeze(), torch.tensor(pixels[:40].mean() / 255).float())
    torch.testing.assert_close(data.x_scale.squeeze(), torch.tensor(pixels[:40].std() / 255).float())


def test_held_out_classes_come_from_the_test_part_only(root, pixels):
    data = datasets.load("fashion-mnist", root=root, hold_out="auto")
    assert data.class_names[0] == "T-shirt/top"
    assert data.ood_name.endswith(": Bag, Ankle boot")
    found = ((data.ood_x * data.x_scale + data.x_mean) * 255).round().squeeze(1).long()
    assert torch.equal(found, torch.from_numpy(pixels[[48, 49, 58, 59]]))


def test_absent_data_are_named_with_the_place_that_was_searched(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"svhn .*{tmp_path} .*--download.*--data-root"):
        datasets.load("svhn", root=tmp_path)


def test_svhn_and_cifar_arrays_are_read_channels_first(tmp_path, monkeypatch):
    sources.import_torchvision()
    from torchvision.datasets import SVHN

    pixels = np.random.default_rng(1).integers(0, 256, size=(32, 32, 3, 20), dtype=np.uint8)
    labels = np.arange(20)[:, None] % 10 + 1  # SVHN writes the digit 0 as 10
    for part in ("train", "test"):
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", {"X": pixels, "y": labels})
    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)  # the official checksums
    data = datasets.load("svhn", root=tmp_path)
    assert data.input_shape == (3, 32, 32)
    assert data.test_y[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    found = ((data.test_x * data.x_scale + data.x_mean) * 255).round().long()
    assert torch.equal(found, torch.from_numpy(pixels).permute(3, 2, 0, 1).long())
    torch.testing.assert_close(data.train_x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)

    class Cifar:
        data, targets = pixels.transpose(3, 0, 1, 2), [0] * 20

    assert np.array_equal(sources._arrays(Cifar)[0], pixels.transpose(3, 2, 0, 1))


def test_another_data_set_gives_the_inputs_from_out_of_the_distribution(root, pixels):
    data = datasets.ood("fashion-mnist", datasets.load("mnist", root=root), root=root)
    assert data.ood_name == "fashion-mnist"
    found = ((data.ood_x * data.x_scale + data.x_mean) * 255).round().squeeze(1).long()
    assert sorted(found.flatten(1).tolist()) == sorted(pixels[40:].reshape(20, -1).tolist())
    with pytest.raises(ValueError, match=r"rows of digits have shape \(1, 8, 8\), but of mnist \(1, 28, 28\)"):
        datasets.ood("digits", datasets.load("mnist", root=root))
