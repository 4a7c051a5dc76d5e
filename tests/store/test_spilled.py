"""Large copies lie in a file without a name rather than in memory; the numbers are those of ``torch.cat``."""

import errno
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from pyro_symmetric.store import spilled
from pyro_symmetric.store.spilled import concatenated


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(spilled, "LARGE", 1000)
    return [torch.randn(chains, 50, 3) for chains in (2, 1, 4)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_a_large_copy_is_what_cat_gives_and_leaves_no_file(parts, dtype, tmp_path):
    parts = [part.gt(0).to(dtype) if dtype is torch.bool else part.to(dtype) for part in parts]
    whole = concatenated(parts, tmp_path)
    assert torch.equal(whole, torch.cat(parts))
    assert not list(tmp_path.iterdir())
    whole[0, 0] = 0  # it can be written to, as any copy


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which files are mapped")
def test_only_large_copies_with_a_folder_are_in_a_file(parts, tmp_path, monkeypatch):
    def mapped():
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    small = concatenated([torch.randn(2, 5)], tmp_path)
    in_memory = concatenated(parts, None)
    assert not mapped()
    whole = concatenated(parts, tmp_path)
    assert mapped()
    assert torch.equal(whole, in_memory)
    del whole
    assert not mapped()
    assert small.shape == (2, 5)


def test_without_room_for_a_file_it_goes_to_memory(parts, tmp_path, monkeypatch):
    def full(**options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert torch.equal(concatenated(parts, tmp_path), torch.cat(parts))
