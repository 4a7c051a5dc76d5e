"""States travel through JSON and tensors unchanged to the last bit, and nothing but known dataclasses comes back."""

import json
import math
from dataclasses import dataclass, fields, is_dataclass

import pytest
import torch

import pyro_symmetric.mcmc as mcmc
from pyro_symmetric.mcmc.adaptation import DualAveraging
from pyro_symmetric.mcmc.codec import decode, encode
from pyro_symmetric.mcmc.kernel import State
from pyro_symmetric.storage import StoreError, load_tensors, save_tensors

CPU = torch.device("cpu")


def through(tree, path, modules=()):
    """Encode, write to disk, read, decode."""
    tensors = {}
    header = encode(tree, tensors, modules)
    save_tensors(path, "state", 1, tensors, {"tree": header})
    tensors, found = load_tensors(path, "state", 1)
    return decode(found["tree"], tensors, CPU, modules)


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    elif is_dataclass(a):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))


TENSORS = {
    "zero-dimensional": torch.tensor(0.1, dtype=torch.float64),
    "not finite": torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 5e-324], dtype=torch.float64),
    "half": torch.randn(3).bfloat16(),
    "bool": torch.tensor([True, False]),
    "long": torch.tensor([2**62 + 1]),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 4).t(),
    "expanded": torch.tensor(0.3).expand(4),
    "partly expanded": torch.randn(3, 1).expand(3, 4),
    "gaps": torch.randn(4, 6)[:, ::2],
}
LEAVES = {
    "none": None,
    "bool": True,
    "int": 10**30,
    "str": 'a "b" \u00fc',
    "float": 0.1 + 0.2,
    "nan": math.nan,
    "infinity": -math.inf,
    "negative zero": -0.0,
    "tiny": 5e-324,
    "device": CPU,
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "tuple": (1, (2.5, None), ()),
    "list": [1, [torch.tensor(2)]],
    "dict": {"0.weight": (64, 32), "": {"b": torch.ones(2)}},
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_with_its_bits_and_strides(name, tmp_path):
    assert_same(TENSORS[name], through(TENSORS[name], tmp_path / "f"))


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_comes_back(name, tmp_path):
    back = through(LEAVES[name], tmp_path / "f")
    assert_same(LEAVES[name], back)
    if name == "negative zero":
        assert math.copysign(1, back) == -1


def test_a_state_comes_back(tmp_path):
    tuning = DualAveraging.start(torch.tensor(0.1))
    z = torch.randn(3, 2)
    state = State(z, z + 1, z[:, 0], z - 1, tuning, {"lp": z[:, 1], "step_size": torch.tensor(0.1).expand(3)})
    assert_same(state, through(state, tmp_path / "f"))


@dataclass(frozen=True, eq=False)
class Own:
    """A tuning of somebody's own kernel."""

    step_size: torch.Tensor


def test_dataclasses_of_other_modules_are_refused_unless_they_are_the_kernels(tmp_path):
    own = Own(torch.tensor(1.0))
    assert_same(own, through(own, tmp_path / "f", {__name__}))
    with pytest.raises(TypeError, match="Own in a kernel's state is neither"):
        encode(own, {})


@pytest.mark.parametrize(
    "tree",
    [
        {"class": ["os", "system"], "fields": {}},
        {"class": ["pyro_symmetric.mcmc_evil", "State"], "fields": {}},
        {"class": ["builtins", "eval"], "fields": {}},
        {"class": ["pyro_symmetric.mcmc.watch", "Watch"], "fields": {"folder": "/", "task": 1}},  # no part of a state
        {"class": ["pyro_symmetric.mcmc.job", "Job"], "fields": {}},
        {"class": ["pyro_symmetric.mcmc.run", "Posterior"], "fields": {}},  # defined elsewhere
        {"class": ["pyro_symmetric.mcmc.psgld", "pSGLD"], "fields": {"model": None}},  # a kernel
        {"class": ["pyro_symmetric.mcmc.psgld", "dataclass"], "fields": {}},
        {"class": [["pyro_symmetric.mcmc.kernel"], 1], "fields": {}},
    ],
)
def test_a_file_cannot_name_other_classes(tree):
    with pytest.raises(StoreError, match="no part of this kernel's states"):
        decode(tree, {}, CPU)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"class": ["pyro_symmetric.mcmc.kernel", "Kernel"], "fields": {}}, "no part of this kernel's states"),
        ({"class": ["pyro_symmetric.mcmc.kernel", "Gone"], "fields": {}}, "no part of this kernel's states"),
        ({"class": ["pyro_symmetric.mcmc.kernel", "field.x"], "fields": {}}, "no part of this kernel's states"),
        ({"class": ["pyro_symmetric.mcmc.kernel", "State"], "fields": {"z": None}}, "this version has others"),
        ({"what": 1}, "damaged"),
        ({"float": 1}, "damaged"),
        ({"dtype": "load"}, "unknown dtype"),
        ({"tensor": "0", "stride": [1], "host": True}, "damaged"),
        ({"tensor": "a", "stride": [-1], "host": True}, "damaged"),
        ({"tensor": "a", "stride": [1, 1], "host": True}, "damaged"),
        ({"tensor": "a", "stride": [2**62], "host": True}, "damaged"),
        ({"size": ["a"]}, "damaged"),
    ],
)
def test_a_tree_that_this_version_cannot_build_is_told(tree, message):
    with pytest.raises(StoreError, match=message):
        decode(tree, {"a": torch.ones(3)}, CPU)


def test_no_module_is_imported_for_a_file(tmp_path, monkeypatch):
    (tmp_path / "crafted_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    tree = {"class": ["crafted_module", "State"], "fields": {}}
    for modules in ((), {"crafted_module"}):
        with pytest.raises(StoreError, match="no part"):
            decode(tree, {}, CPU, modules)


@pytest.mark.parametrize("leaf", [object(), {1: 2}, {1, 2}, print, complex(1, 2)])
def test_other_leaves_are_refused(leaf):
    with pytest.raises(TypeError, match="which a store can't keep"):
        encode(leaf, {})


def test_an_encoded_tree_is_json():
    tree = encode({"x": [math.nan, torch.ones(2)]}, {})
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree


def test_the_rooms_own_classes_are_where_the_codec_trusts_them():
    assert mcmc.State.__module__.startswith("pyro_symmetric.mcmc.")
