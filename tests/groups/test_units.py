"""Units and axes: their shapes, and what doesn't fit a site."""

from __future__ import annotations

import json

import pytest
import torch

from pyro_symmetric.groups import Axis, Group, Units

from .cases import plain


@pytest.mark.parametrize(
    "axis",
    [
        Axis("nowhere", 0, plain(3)),
        Axis("a", 1, plain(3)),
        Axis("a", 0, plain(3), span=2),
        Axis("a", 0, torch.tensor([[1, 2, 3]])),
        Axis("a", 0, torch.tensor([[0, 1, -1]])),
        Axis("a", 0, torch.tensor([[1, 1, 2]])),
    ],
    ids=["site", "dim", "span", "outside", "negative", "twice"],
)
def test_axes_that_do_not_fit_their_sites_are_refused(axis):
    with pytest.raises(ValueError, match="'unit'"):
        Group([Units("unit", 3, (axis,))], {"a": (3,)})


def test_units_go_through_json_and_leave_plain_indices_out():
    axes = (Axis("w", 0, plain(6), 1), Axis("v", 0, plain(6).flip(1), -1, True, 0.5, 2))
    one = Units("u", 6, axes, moves=frozenset({"permute", "scale"}))
    data = Group([one], {"w": (6,), "v": (2, 3)}).to_dict()
    assert [axis["index"] is None for axis in data["units"][0]["axes"]] == [True, False]
    again = Group.from_dict(json.loads(json.dumps(data)))["u"]
    assert again.moves == {"permute", "scale"}
    assert torch.equal(again.axes[1].index, axes[1].index)
    assert (again.axes[1].epsilon, again.axes[1].span, again.axes[1].buffer) == (0.5, 2, True)
