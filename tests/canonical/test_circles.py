"""Signs of units that are measured by one another, against all of their combinations."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pyro_symmetric.canonical.circles import Entries, agreed_signs
from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.groups import Axis, Group, Units


def flipped(values: Tensor, units: list[Tensor], signs: Tensor) -> Tensor:
    """A site ``batch + shape`` whose axes have one layer of units each."""
    whole = torch.cat([signs, torch.ones(*signs.shape[:-1], 1, dtype=signs.dtype)], -1)
    for dim, own in enumerate(units):
        factor = whole[..., own[0]]
        tail = [1] * (len(units) - 1 - dim)
        values = values * factor.reshape(*factor.shape[:-1], *[1] * dim, -1, *tail)
    return values


@pytest.mark.parametrize("seed", range(6))
def test_the_largest_weights_are_positive_as_far_as_any_signs_make_them(seed: int) -> None:
    """Of all combinations of signs, that whose entries, from the largest down, are positive first."""
    generator = torch.Generator(torch.empty(0).device).manual_seed(seed)
    count = 5
    units = [torch.tensor([[0, 1, 5]]), torch.tensor([[2, 3]]), torch.tensor([[4, 0, 5, 3]])]
    values = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64)
    vector = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    vector[0] = 0.0
    sites = [Entries(values, units), Entries(vector, [torch.tensor([[1, 2]])])]
    found = agreed_signs(sites, count)
    every = torch.tensor(list(itertools.product([1.0, -1.0], repeat=count)), dtype=torch.float64)
    for i in range(2):

        def entries(signs: Tensor, i: int = i) -> Tensor:
            parts = [flipped(site.values[i], list(site.units), signs).flatten(signs.dim() - 1) for site in sites]
            return torch.cat(parts, -1)

        flat = entries(every)
        order = flat[0].abs().argsort(descending=True)
        best = max((flat[:, order] >= 0).int().tolist())
        assert (entries(found[i])[order] >= 0).int().tolist() == best


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 4), (70, 65)])
def test_signs_of_both_sides_of_a_matrix_have_one_form(rows: int, columns: int) -> None:
    shapes = {"w": torch.Size([rows, columns])}
    group = Group(
        [
            Units("rows", rows, (Axis("w", 0, torch.arange(rows)[None], 1),), moves=frozenset({"flip", "permute"})),
            Units("columns", columns, (Axis("w", 1, torch.arange(columns)[None], 1),), moves=frozenset({"flip"})),
        ],
        shapes,
    )
    torch.manual_seed(0)
    weights = {"w": torch.randn(3, rows, columns, dtype=torch.float64)}
    form = canonicalize(weights, group, warn=False)["w"]
    other = canonicalize(group.sample((3,), dtype=torch.float64)(weights), group, warn=False)["w"]
    torch.testing.assert_close(other, form, rtol=0, atol=0)
    moved = form.abs().sort(1).values, weights["w"].abs().sort(1).values
    torch.testing.assert_close(*moved, rtol=0, atol=0)
