"""Files appear whole or not at all."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pyro_symmetric.store import StoreError, load_tensors, save_tensors, write_whole


def test_tensors_and_header_come_back(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    tensors = {"a": shared[:3], "b": shared[3:], "c": torch.ones(2, 2).t()}
    save_tensors(tmp_path / "x", "thing", 2, tensors, {"n": [1, None, "é"]})
    loaded, header = load_tensors(tmp_path / "x", "thing", 2)
    assert header == {"n": [1, None, "é"]}
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())
    with safe_open(tmp_path / "x", framework="pt") as file:  # as everybody reads it
        assert torch.equal(file.get_tensor("b"), tensors["b"])


def test_another_kind_and_a_newer_version_are_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", "thing", 2, {"a": torch.ones(1)}, {})
    with pytest.raises(StoreError, match="no other"):
        load_tensors(tmp_path / "x", "other", 2)
    with pytest.raises(ValueError, match="newer pyro_symmetric"):
        load_tensors(tmp_path / "x", "thing", 1)


def test_what_stood_there_survives_a_failed_write(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", b"old")
    with pytest.raises(TypeError, match="JSON"):
        save_tensors(tmp_path / "x", "thing", 1, {"a": torch.ones(1)}, {"bad": object()})
    assert (tmp_path / "x").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]
