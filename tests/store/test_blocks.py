"""Draws in blocks: what arrives is what left, whatever its dtype and wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import pyro_symmetric.store.blocks as blocks
from pyro_symmetric.store import Blocks, MemoryRecorder
from pyro_symmetric.store.blocks import as_bytes, of_bytes

DRAWS = 5


def draw(k: int, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A draw of 3 chains in all dtypes and strides that samplers make."""
    w = torch.randn(3, 2, 4, generator=torch.Generator(torch.empty(0).device).manual_seed(k)).to(device)
    samples = {"w": w, "column": w[:, 0, 0], "turned": w.mT, "none": w[:, :0, 0], "half": w[:, :, 1].bfloat16()}
    lengths = torch.tensor([k, 2 * k, 3 * k], device=device)
    statistics = {"diverging": w[:, 0, 0] > 0, "n_steps": lengths, "one": w[0, 0, 0].double().expand(3)}
    return tuple({name: value[:, None] for name, value in kind.items()} for kind in (samples, statistics))


def test_numbers_of_one_chain_lie_where_their_dtype_can_be_read():
    """Of a single chain, the parts of a block are slices of its memory, which begin at any byte."""
    values = [
        torch.tensor([True]),
        torch.ones(1, 0),
        torch.tensor([1.5]),
        torch.tensor([7]),
        torch.tensor([[0.25, 2.0]]).double(),
    ]
    block = torch.cat([as_bytes(value) for value in values], 1)
    parts = block.split([as_bytes(value).shape[1] for value in values], 1)
    for value, part in zip(values, parts, strict=True):
        assert torch.equal(of_bytes(part, value), value)


class Broken(MemoryRecorder):
    """Is interrupted before it takes a draw, once."""

    def __init__(self, num_samples: int, at: int):
        super().__init__(num_samples)
        self.at: int | None = at
        self.numbers: list[int] = []

    def append(self, number: int, samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
        if number == self.at:
            self.at = None
            raise KeyboardInterrupt
        self.numbers.append(number)
        super().append(number, samples, statistics)


def test_a_broken_handing_over_resumes_where_it_broke() -> None:
    recorder = Broken(DRAWS, at=3)
    found = Blocks(recorder)
    found._held.extend((number, *draw(number)) for number in range(DRAWS))
    with pytest.raises(KeyboardInterrupt):
        found.hand_over()
    found.commit(DRAWS, dict, bytes)
    assert recorder.numbers == list(range(DRAWS))  # a writer has forgotten those that it has written
    assert found.diverged == sum(int(draw(number)[1]["diverging"].sum()) for number in range(DRAWS))


class Watched(MemoryRecorder):
    """Notes the numbers of the draws that it is given."""

    def __init__(self, num_samples: int):
        super().__init__(num_samples)
        self.numbers: list[int] = []

    def append(self, number: int, samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
        self.numbers.append(number)
        super().append(number, samples, statistics)


def test_a_tensor_survives_as_bytes() -> None:
    for values in draw(7):
        for name, value in values.items():
            found = of_bytes(as_bytes(value), value)
            assert found.dtype == value.dtype
            assert torch.equal(found, value), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("room", [0, 1000, 2**20])
def test_blocks_give_the_recorder_all_draws_in_order(device: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", room)
    recorder = Watched(DRAWS)
    found = Blocks(recorder)
    for number in (0, 1, 2, 1, 2, 3, 4):  # 1 and 2 twice, as after an interruption
        found.append(number, *draw(number, device))
        assert room != 2**20 or device == "cpu" or not recorder.numbers  # held back
    found.commit(DRAWS, dict, bytes)
    expected = [draw(number) for number in range(DRAWS)]
    kept = recorder.draws(DRAWS, {})
    for kind in (0, 1):
        for name in expected[0][kind]:
            assert torch.equal(kept[kind][name], torch.cat([one[kind][name] for one in expected], 1)), name
    if room == 0 or device == "cpu":
        assert found.diverged == sum(int(draw(number)[1]["diverging"].sum()) for number in (0, 1, 2, 1, 2, 3, 4))
