"""Units and axes: their shapes, and what doesn't fit a site."""

from __future__ import annotations

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
    shapes = {"w": torch.Size((6,)), "v": torch.Size((2, 3))}
    axes = (Axis("w", 0, plain(6), 1), Axis("v", 0, plain(6).flip(1), -1, True, 0.5, 2))
    one = Units("u", 2, axes, "heads", 3, frozenset({"permute", "scale"}))
    assert one.axes[0].fills(one.count)
    data = one.to_dict(shapes)
    assert data["axes"][0]["index"] is None
    again = Units.from_dict(data, shapes)
    assert again.to_dict(shapes) == data
    assert (again.parent, again.copies, again.moves) == ("heads", 3, {"permute", "scale"})
    assert torch.equal(again.axes[1].index, axes[1].index)
    assert (again.axes[1].epsilon, again.axes[1].span, again.axes[1].buffer) == (0.5, 2, True)
    with pytest.raises(ValueError, match="site"):
        Units.from_dict(data, {"w": torch.Size((6,))})
