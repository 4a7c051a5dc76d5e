"""Canonical forms of units that rotate: principal axes, the same all along an orbit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyro_symmetric as ps

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
