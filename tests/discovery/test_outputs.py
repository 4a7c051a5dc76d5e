"""Networks are functions from tensors to tensors, whatever their forward passes take
and return.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.verify import verify


@dataclass
class Record:
    """An output or input that PyTorch knows nothing of."""

    values: Tensor
    hidden: Tensor | None = None
    rest: dict[str, Any] = field(default_factory=dict)


class DynamicCache:
    """Keys and values of earlier tokens, as language models return them."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """An ordered dictionary whose entries are attributes, too."""


class Thing:
    """An object of another library."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)


class Attention(nn.Module):
    """Two heads of attention with a cache; what it returns is a function of its outputs
    and the cache.
    """

    def __init__(self, returned: Any):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.o, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.returned = returned

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, use_cache: bool = True
    ) -> Any:
        h = self.embed(tokens)
        q, k, v = (
            f(h).unflatten(-1, (2, 2)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scores = (
            q @ k.mT
            if mask is None
            else (q @ k.mT).masked_fill(~mask[:, None, None], -9.0)
        )
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        cache = DynamicCache()
        if use_cache:
            cache.layers.append((k, v))
        return self.returned(self.head(torch.tanh(h + self.o(mixed))), cache)


RETURNED = {
    "a list": lambda y, cache: [y, [cache, 3, None, "text"]],
    "a dictionary": lambda y, cache: {
        "logits": y,
        "past_key_values": [c for layer in cache.layers for c in layer],
    },
    "a model's output": lambda y, cache: ModelOutput(
        logits=y, past_key_values=cache, loss=None
    ),
    "a dataclass": lambda y, cache: Record(y, rest={"cache_params": cache.layers}),
    "a distribution": lambda y, cache: torch.distributions.Independent(
        torch.distributions.Normal(y, 1.0), 1
    ),
}
TOKENS = torch.randint(0, 11, (2, 5))


@pytest.mark.parametrize("name", RETURNED)
def test_outputs_of_any_kind_are_flattened_and_caches_left_out(name: str) -> None:
    net = Attention(RETURNED[name])
    symmetry = find_symmetry(net, TOKENS)
    # By hand: two heads, in each two rows of queries and keys and two of values; the
    # four features of the stream stay together in tanh, so that they are exchanged; and
    # so are heads.
    assert symmetry.permutations.order() == 2 * (2 * 2) ** 2 * 24
    assert verify(symmetry, net, TOKENS).error < 1e-12


def test_what_a_network_returns_besides_is_left_alone_too() -> None:
    net = Attention(lambda y, cache: Record(y, rest={"keys": cache.layers[0][0]}))
    symmetry = find_symmetry(net, TOKENS)
    assert symmetry.permutations.order() == 2**2 * 24  # of the values in each head


def test_keywords_reach_the_forward_pass() -> None:
    net, mask = Attention(RETURNED["a model's output"]), torch.rand(2, 5) < 0.7
    whole = find_symmetry(net, TOKENS)
    assert (
        find_symmetry(net, TOKENS, kwargs={"mask": mask, "use_cache": False}).group
        == whole.group
    )
    assert (
        find_symmetry(net, kwargs={"tokens": TOKENS, "mask": mask}).group == whole.group
    )
    assert verify(whole, net, tokens := TOKENS, kwargs={"mask": mask})
    assert verify(whole, net, kwargs={"tokens": tokens})


class Nested(nn.Module):
    """Takes its inputs out of whatever holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, given: Any, *, scale: float = 1.0) -> Tensor:
        x = given.values if isinstance(given, Record | Thing) else given["x"][0]
        return self.b(torch.tanh(self.a(x) * scale))


GIVEN = {
    "a dictionary of lists": {"x": [torch.randn(4, 3)], "y": None},
    "a dataclass": Record(torch.randn(4, 3), rest={"unused": "text"}),
    "an object": Thing(
        values=torch.randn(4, 3), edges=torch.zeros(2, 5, dtype=torch.long)
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_inputs_of_any_kind_are_found_and_compared_in_double_precision(
    name: str,
) -> None:
    net = Nested()
    symmetry = find_symmetry(net, GIVEN[name], kwargs={"scale": 0.5})
    assert symmetry.permutations.factors == {"a": 6}
    result = verify(symmetry, net, GIVEN[name], kwargs={"scale": 0.5}, trials=3)
    assert result.error < 1e-12
    assert result.tolerance == 1e-6
