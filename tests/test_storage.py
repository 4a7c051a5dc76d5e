"""Files appear whole or not at all."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from pyro_symmetric import storage
from pyro_symmetric.storage import load_tensors, make_folder, save_tensors, write_text, write_whole


def test_tensors_and_header_come_back(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    tensors = {"a": shared[:3], "b": shared[3:], "c": torch.ones(2, 2).t()}
    save_tensors(tmp_path / "x", "thing", 2, tensors, {"n": [1, None, "é"]})
    loaded, header = load_tensors(tmp_path / "x", "thing", 2)
    assert header == {"n": [1, None, "é"]}
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())


def test_another_kind_and_a_newer_version_are_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", "thing", 2, {"a": torch.ones(1)}, {})
    with pytest.raises(ValueError, match="no other"):
        load_tensors(tmp_path / "x", "other", 2)
    with pytest.raises(ValueError, match="newer pyro_symmetric"):
        load_tensors(tmp_path / "x", "thing", 1)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", "thing", 1, {"a": torch.ones(1000)}, {})
    whole = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut short"):
        load_tensors(tmp_path / "x", "thing", 1)


def test_what_stood_there_survives_a_failed_write(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "old")
    with pytest.raises(ValueError, match="JSON"):
        save_tensors(tmp_path / "x", "thing", 1, {"a": torch.ones(1)}, {"bad": object()})
    assert (tmp_path / "x").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"couldn't be saved to .*absent"):
        write_text(tmp_path / "absent" / "x", "text")


@pytest.mark.parametrize(
    ("failure", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 28),
        (SafetensorError("Error while serializing: InvalidHeader"), None),
    ],
)
def test_a_failed_write_keeps_the_systems_error_number(tmp_path: Path, failure: Exception, number: int | None) -> None:
    def fail(path: str) -> None:
        raise failure

    with pytest.raises(OSError, match="the file couldn't be saved to") as error:
        write_whole(tmp_path / "x", fail)
    assert error.value.errno == number
    assert list(tmp_path.iterdir()) == []


def test_folders_are_made_with_those_above_and_kept_if_they_are_there(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "mine").write_text("kept")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "mine").read_text() == "kept"


@pytest.mark.parametrize("length", [3, 1000])
def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch, length: int) -> None:
    """safetensors opens it twice: by itself it gives the metadata of one file and the values of the other."""
    save_tensors(tmp_path / "x", "thing", 1, {"a": torch.zeros(1000)}, {"n": 0})
    others = [1, 2]

    def opened(*args, **kwargs):
        store = safe_open(*args, **kwargs)
        if others:
            n = others.pop(0)
            save_tensors(tmp_path / "x", "thing", 1, {"a": torch.full((length,), float(n))}, {"n": n})
        return store

    monkeypatch.setattr(storage, "safe_open", opened)
    tensors, header = load_tensors(tmp_path / "x", "thing", 1)
    assert header == {"n": 2}
    assert torch.equal(tensors["a"], torch.full((length,), 2.0))
