import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.posterior.checkpoints import read_checkpoints


def network():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))


def saved(folder, count=3):
    states = []
    for i in range(count):
        net = network()
        net(torch.randn(8, 2))
        states.append(net.state_dict())
        torch.save(states[-1], folder / f"net-{i}.pt")
    return states


def test_state_dicts_become_draws_in_natural_order(tmp_path):
    states = saved(tmp_path, 11)  # net-10 comes last, not after net-1
    posterior = read_checkpoints(tmp_path, progress=False)
    assert (posterior.num_chains, posterior.num_samples) == (1, 11)
    for i, state in enumerate(states):
        assert torch.equal(posterior.samples["0.weight"][0, i], state["0.weight"])
    assert posterior.metadata["files"][-1] == "net-10.pt"


def test_running_statistics_are_kept_so_that_symmetries_can_be_removed(tmp_path):
    states = saved(tmp_path)
    posterior = read_checkpoints(tmp_path, progress=False)
    assert "1.num_batches_tracked" not in posterior.samples
    net, x = network().eval(), torch.randn(5, 2)
    symmetry = ps.find_symmetry(net, x)
    canonical = posterior.map(ps.canonicalize, symmetry).get_samples()
    for i, state in enumerate(states):
        moved = torch.func.functional_call(
            net, {k: v[i] for k, v in canonical.items()}, (x,)
        )
        expected = torch.func.functional_call(net, dict(state), (x,))
        torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-4)


def test_files_given_one_by_one_keep_their_order_and_names_can_be_changed(tmp_path):
    states = saved(tmp_path)
    files = [tmp_path / f"net-{i}.pt" for i in (2, 0)]
    rename = lambda name: None if name.startswith("1.") else f"module.{name}"  # noqa: E731
    posterior = read_checkpoints(files, rename=rename, progress=False)
    assert torch.equal(posterior.samples["module.3.bias"][0, 1], states[0]["3.bias"])
    with pytest.raises(
        ValueError, match=r"net-2\.pt: rename gives 'same' to two tensors"
    ):
        read_checkpoints(files, rename=lambda name: "same", progress=False)


def test_state_dicts_inside_training_checkpoints_are_found(tmp_path):
    state = network().state_dict()
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "a.pth")
    torch.save({"epoch": 4, "ema": state}, tmp_path / "b.pth")
    assert (
        "0.weight" in read_checkpoints(tmp_path, pattern="a*", progress=False).samples
    )
    assert (
        "0.weight"
        in read_checkpoints(tmp_path, pattern="b*", key="ema", progress=False).samples
    )
    with pytest.raises(ValueError, match=r"b\.pth holds no state dict"):
        read_checkpoints(tmp_path, pattern="b*", progress=False)


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_is_never_run(tmp_path):
    torch.save(
        {"w": torch.zeros(2), "x": Harmful(tmp_path / "harm")}, tmp_path / "bad.pt"
    )
    with pytest.raises(ValueError, match=r"bad\.pt .*more than tensors"):
        read_checkpoints(tmp_path, progress=False)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_cut_short_is_named(tmp_path, suffix):
    file = tmp_path / f"net-00001.{suffix}"
    (torch.save if suffix == "pt" else save_file)({"w": torch.randn(50)}, file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"net-00001.{suffix}"):
        read_checkpoints(tmp_path, progress=False)


def test_a_network_that_is_not_finite_is_warned_of_and_named(tmp_path):
    for k in range(3):
        torch.save({"w": torch.ones(2) / (k != 1)}, tmp_path / f"net-{k}.pt")
    with pytest.warns(
        RuntimeWarning, match=r"1 checkpoints hold a NaN or an infinity: .*net-1\.pt"
    ):
        posterior = read_checkpoints(tmp_path, progress=False)
    assert posterior.metadata["not_finite"] == ["net-1.pt"]


@pytest.mark.parametrize(
    "wrap",
    [torch.compile, nn.DataParallel, lambda net: nn.DataParallel(torch.compile(net))],
)
def test_compiled_and_parallel_networks_have_the_sites_of_the_plain_one(tmp_path, wrap):
    states = [network().state_dict() for _ in range(2)]
    torch.save(states[0], tmp_path / "net-0.pt")
    net = network()
    net.load_state_dict(states[1])
    torch.save(wrap(net).state_dict(), tmp_path / "net-1.pt")
    samples = read_checkpoints(tmp_path, progress=False).samples
    for number, state in enumerate(states):
        assert all(torch.equal(samples[s][0, number], state[s]) for s in samples)
    files = [tmp_path / "net-1.pt"]
    named = read_checkpoints(files, rename=lambda name: name, progress=False)
    assert set(named.samples).isdisjoint(samples)


def test_a_submodule_may_be_compiled_or_called_module(tmp_path):
    net = nn.Sequential(torch.compile(nn.Linear(2, 3)), nn.Linear(3, 1))
    net[1].module = nn.Linear(2, 2)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    samples = read_checkpoints(tmp_path, progress=False).samples
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert set(samples) == {*names, "1.module.weight", "1.module.bias"}


def test_a_key_that_names_a_number_is_told_what_the_file_holds(tmp_path):
    torch.save({"epoch": 3, "net": network().state_dict()}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"no state dict, but \['epoch', 'net'\]"):
        read_checkpoints(tmp_path, key="epoch", progress=False)
