"""Copies too large for memory: laid in a file without a name, whose pages the system writes out when it needs room."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LARGE = 2**28  # bytes, from where on it is worth a file


def concatenated(parts: Sequence[Tensor], folder: Path | None) -> Tensor:
    """``torch.cat(parts)`` of draws ``(chains, draws, ...)``.

    :param folder: where there may be room for a file if that is large. Without, or if there is none, it goes to memory.
    """
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    size = math.prod(shape) * parts[0].element_size()
    if folder is not None and size >= LARGE:
        with contextlib.suppress(OSError):
            # By draws, as the parts' own files, so that both are gone through from one end to the other.
            whole = _mapped(folder, size).view(parts[0].dtype).view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
            begin = 0
            for part in parts:
                whole[begin : begin + len(part)] = part
                begin += len(part)
            return whole
    return torch.cat(list(parts))


def _mapped(folder: Path, size: int) -> Tensor:
    """So many bytes of a new file that is gone as soon as nobody maps it.

    :raises OSError: if there is no room; writing to the map would end the process then.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(size,)))
