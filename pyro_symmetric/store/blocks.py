"""Draws on their way from a device to a recorder: many draws in one copy.

A copy from a GPU makes the host wait until all that it has asked for is done. So draws stay on their device until they
fill a block, and then one concatenation and one copy bring all of it, whatever the dtypes, as bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.store.recorders import Recorder

BLOCK = 2**25  # bytes that are kept on the device

Values = Mapping[str, Tensor]


class Blocks:
    """A recorder's draws, handed over in blocks; draws on the CPU go there at once.

    :param recorder: what they are for.
    """

    def __init__(self, recorder: Recorder):
        self.diverged = 0
        """The number of draws handed over so far whose statistic ``diverging`` is true."""
        self._recorder = recorder
        self._held: deque[tuple[int, Values, Values]] = deque()
        self._bytes = 0  # that are held on a device, at most

    def append(self, number: int, samples: Values, statistics: Values) -> None:
        """As :meth:`~pyro_symmetric.store.recorders.Recorder.append`; the tensors must stay as they are."""
        while self._held and self._held[-1][0] >= number:  # a draw that is made anew
            self._held.pop()
        self._held.append((number, samples, statistics))
        values = (*samples.values(), *statistics.values())
        size = sum([value.numel() * value.element_size() for value in values if value.device.type != "cpu"])
        self._bytes += size
        if self._bytes + size > BLOCK or not size:
            self.hand_over()

    def hand_over(self) -> None:
        """Give the recorder what is held. After an interruption the next call resumes at the draw that was broken."""
        self._held, self._bytes = deque(on_cpu(self._held)), 0
        while self._held:
            number, samples, statistics = self._held[0]
            self._recorder.append(number, samples, statistics)
            self._held.popleft()
            self.diverged += int(statistics["diverging"].sum()) if "diverging" in statistics else 0

    def commit(
        self, draws: int, metadata: Callable[[], dict[str, Any]], state: Callable[[], bytes | memoryview]
    ) -> None:
        """As :meth:`~pyro_symmetric.store.recorders.Recorder.commit`."""
        self.hand_over()
        self._recorder.commit(draws, metadata, state)


def on_cpu(draws: Sequence[tuple[int, Values, Values]]) -> Sequence[tuple[int, Values, Values]]:
    """The same draws on the CPU: what lies elsewhere comes in one copy."""
    pieces = [
        as_bytes(value)
        for _, *kinds in draws
        for values in kinds
        for value in values.values()
        if value.device.type != "cpu"
    ]
    if not pieces:
        return draws
    parts = iter(torch.cat(pieces, 1).cpu().split([piece.shape[1] for piece in pieces], 1))

    def arrived(value: Tensor) -> Tensor:
        return value if value.device.type == "cpu" else of_bytes(next(parts), value)

    return [
        (number, *({name: arrived(value) for name, value in values.items()} for values in kinds))  # type: ignore[misc]
        for number, *kinds in draws
    ]


def as_bytes(value: Tensor) -> Tensor:
    """A tensor's rows as bytes ``(C, bytes)``, of its own memory if that lies well."""
    rows = value.reshape(len(value), math.prod(value.shape[1:]))
    if rows.shape[1] <= 1:  # whose second stride means nothing
        rows = rows.as_strided(rows.shape, (rows.stride(0), 1))
    return (rows if rows.stride(1) == 1 else rows.contiguous()).view(torch.uint8)


def of_bytes(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`as_bytes`: values in their dtype and shape."""
    whole = torch.empty(rows.numel(), dtype=torch.uint8, device=rows.device)  # slices begin anywhere
    whole.view(rows.shape).copy_(rows)
    return whole.view(like.dtype).view(like.shape)
