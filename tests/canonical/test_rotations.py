"""Canonical forms of units that rotate: principal axes, the same all along an orbit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyro_symmetric as ps
from pyro_symmetric.canonical.forms import doubtful_axes
from pyro_symmetric.canonical.removal import principal_axes, varimax_axes

from ..groups.cases import weights_of
from ..groups.test_random_groups import assert_same
from ..groups.test_rotations import drawn_group


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31 - 1))
def test_principal_axes_are_constant_on_orbits(seed):
    torch.manual_seed(seed)
    group = drawn_group(seed).rotations
    if not group.required_sites:
        return
    weights = weights_of(group, 3)
    form = ps.canonicalize(weights, group)
    assert_same(
        ps.canonicalize(group.sample((3,), dtype=torch.float64)(weights), group), form
    )
    assert_same(ps.canonicalize(form, group), form)


@pytest.mark.parametrize("signs", [True, False])
def test_moments_are_diagonal_and_decrease(signs):
    torch.manual_seed(0)
    group = ps.Group.declare(
        {"W": (None, "f"), "z": (None, "f")}, {"W": (8, 3), "z": (20, 3)}, "rotate"
    )
    weights = weights_of(group, 5)
    form = ps.canonicalize(weights, group, signs=signs)
    stacked = torch.cat([form["W"], form["z"]], 1)
    moments = stacked.mT @ stacked
    sizes = moments.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(moments, torch.diag_embed(sizes))
    assert bool((sizes.diff() < 0).all())
    torch.testing.assert_close(form["W"] @ form["z"].mT, weights["W"] @ weights["z"].mT)


@pytest.mark.parametrize(("spread", "doubtful"), [(0.2, []), (0.22, ["f"])])
def test_axes_are_doubtful_from_an_angle_of_0_15_on(spread, doubtful):
    """Second moments of 9 and 16 turn by ``5 / 7`` of the spread."""
    group = ps.Group.declare({"W": (None, "f")}, {"W": (2, 2)}, "rotate")
    mean = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    draws = torch.stack([mean + spread, mean - spread])
    assert doubtful_axes({"W": draws}, group) == doubtful


def test_axes_point_to_where_their_largest_entries_are_positive():
    torch.manual_seed(0)
    group = ps.Group.declare({"W": (None, "f")}, {"W": (6, 3)}, "rotate")
    weights = weights_of(group, 20)
    turned = principal_axes(weights, group.rotations).on_sites(weights)["W"]
    largest = turned.abs().argmax(-2, keepdim=True)
    assert bool((turned.take_along_dim(largest, -2) > 0).all())


def test_varimax_has_the_largest_criterion_of_all_angles():
    torch.manual_seed(0)
    group = ps.Group.declare({"W": (None, "f")}, {"W": (8, 2)}, "rotate")
    weights = {"W": 1.0 + torch.randn(8, 2, dtype=torch.float64)}
    turned = varimax_axes(weights, group.rotations, "W").on_sites(weights)["W"]
    angles = torch.linspace(0, torch.pi, 2001, dtype=torch.float64)
    cosine, sine = angles.cos(), angles.sin()
    turns = torch.stack([cosine, -sine, sine, cosine], -1).unflatten(-1, (2, 2))

    def criterion(loadings):
        return loadings.square().var(-2, correction=0).sum(-1)

    best = criterion(weights["W"] @ turns).max()
    assert float(criterion(turned)) == pytest.approx(float(best), rel=1e-4)
