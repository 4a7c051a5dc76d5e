"""The weights dict: reading batch shapes, flattening, kind refusals."""

import numpy as np
import pytest
import torch

from pyro_symmetric import weights as w

SHAPES = {"a": torch.Size((2, 3)), "b": torch.Size((4,)), "scale": torch.Size(())}


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_batch_shape_is_what_precedes_every_site_shape(batch):
    weights = {site: torch.zeros((*batch, *shape)) for site, shape in SHAPES.items()}
    assert w.batch_shape(weights, SHAPES) == batch
    assert w.batch_shape({**weights, "other": torch.zeros(9)}, SHAPES) == batch
    assert w.batch_shape({"b": weights["b"]}, SHAPES) == batch


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_flatten_and_unflatten_are_inverse_in_any_order(batch):
    weights = {site: torch.randn((*batch, *shape)) for site, shape in SHAPES.items()}
    order = ["scale", "b", "a"]
    vector = w.flatten(weights, order, SHAPES)
    assert vector.shape == (*batch, 11)
    assert torch.equal(vector[..., 0], weights["scale"])
    assert torch.equal(vector[..., 5:], weights["a"].reshape(*batch, 6))
    back = w.unflatten(vector, order, SHAPES)
    assert all(torch.equal(back[site], weights[site]) for site in SHAPES)


def test_shapes_of_reads_tensors_and_shapes():
    assert w.shapes_of({"a": torch.zeros(2, 3), "b": (4,)}) == {"a": torch.Size((2, 3)), "b": torch.Size((4,))}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": torch.zeros(3, 2)}, r"'a'\] has shape \(3, 2\).*\(2, 3\)"),
        ({"a": torch.zeros(5, 2, 3), "b": torch.zeros(6, 4)}, r"'b'\] has batch shape \(6,\)"),
        ({"c": torch.zeros(2)}, "none of the expected sites"),
    ],
)
def test_weights_of_the_wrong_shape_are_refused_by_name(weights, words):
    with pytest.raises(ValueError, match=words):
        w.batch_shape(weights, SHAPES)


def test_missing_sites_are_named():
    with pytest.raises(ValueError, match=r"lacks the sites \['b'\]"):
        w.require_sites({"a": torch.zeros(1)}, ["a", "b"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(bad):
    w.require_finite({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"'b'\] holds 1 NaN or infinite"):
        w.require_finite({"a": torch.zeros(2), "b": torch.tensor([1.0, bad])})


def test_an_example_that_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"example_weights\['w'\] is a numpy.ndarray; it must be a tensor, or a shape"):
        w.shapes_of({"w": np.zeros(3)})
    assert w.shapes_of({"w": [3, 2], "b": torch.zeros(4)}) == {"w": torch.Size([3, 2]), "b": torch.Size([4])}
