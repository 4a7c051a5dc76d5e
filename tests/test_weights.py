"""The weights dict: reading batch shapes, flattening, kind refusals."""

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
def test_vectors_are_taken_apart_in_any_order(batch):
    weights = {site: torch.randn((*batch, *shape)) for site, shape in SHAPES.items()}
    order = ["scale", "b", "a"]
    vector = torch.cat([weights[site].reshape(*batch, -1) for site in order], -1)
    back = w.unflatten(vector, {site: SHAPES[site] for site in order})
    assert all(torch.equal(back[site], weights[site]) for site in SHAPES)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": torch.zeros(3, 2)}, r"'a'\] has shape \(3, 2\).*\(2, 3\)"),
        ({"a": torch.zeros(5, 2, 3), "b": torch.zeros(6, 4)}, r"one batch shape.*'b': \(6,\)"),
        ({"c": torch.zeros(2)}, "none of the expected sites"),
    ],
)
def test_weights_of_the_wrong_shape_are_refused_by_name(weights, words):
    with pytest.raises(ValueError, match=words):
        w.batch_shape(weights, SHAPES)
