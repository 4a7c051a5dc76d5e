import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.checkpoints import read_checkpoints, write_checkpoints
from pyro_symmetric.posterior import Posterior


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
    assert posterior.metadata["buffers"] == ["1.running_mean", "1.running_var"]
    assert posterior.metadata["left_out"] == ["1.num_batches_tracked"]
    net, x = network().eval(), torch.randn(5, 2)
    symmetry = ps.find_symmetry(net, x)
    canonical = posterior.map(ps.canonicalize, symmetry).get_samples()
    for i, state in enumerate(states):
        moved = torch.func.functional_call(net, {k: v[i] for k, v in canonical.items()}, (x,))
        expected = torch.func.functional_call(net, dict(state), (x,))
        torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-4)
    dropped = read_checkpoints(tmp_path, buffers="drop", progress=False)
    assert set(dropped.samples) == {name for name, _ in net.named_parameters()}
    assert "1.running_var" in dropped.metadata["left_out"]


@pytest.mark.parametrize("format", ["safetensors", "pt"])
def test_a_posterior_survives_the_round_trip(tmp_path, format):
    samples = {"w": torch.randn(2, 3, 4), "b": torch.randn(2, 3)}
    posterior = Posterior(samples, {"loss": torch.rand(2, 3)}, {"kernel": "ensemble"}, rows="chains")
    files = write_checkpoints(posterior, tmp_path / "nets", format=format, progress=False)
    assert len(files) == 6
    assert max(os.path.getsize(file) for file in files) < 4096  # one draw each, not the storage of all
    again = read_checkpoints(tmp_path / "nets", progress=False)
    for site, value in posterior.get_samples().items():
        assert torch.equal(again.get_samples()[site], value)
    torch.testing.assert_close(again.statistics["loss"].flatten(), posterior.statistics["loss"].flatten())
    assert again.metadata["kernel"] == "ensemble"
    some = read_checkpoints(tmp_path / "nets", pattern="*-0000[12].*", progress=False)
    torch.testing.assert_close(some.statistics["loss"][0], posterior.statistics["loss"].flatten()[1:3])


def test_files_given_one_by_one_keep_their_order_and_names_can_be_changed(tmp_path):
    states = saved(tmp_path)
    files = [tmp_path / f"net-{i}.pt" for i in (2, 0)]
    rename = lambda name: None if name.startswith("1.") else f"module.{name}"  # noqa: E731
    posterior = read_checkpoints(files, rename=rename, dtype=torch.float64, progress=False)
    assert torch.equal(posterior.samples["module.3.bias"][0, 1], states[0]["3.bias"].double())
    with pytest.raises(ValueError, match=r"net-2\.pt: rename gives 'same' to two tensors"):
        read_checkpoints(files, rename=lambda name: "same", progress=False)


def test_state_dicts_inside_training_checkpoints_are_found(tmp_path):
    state = network().state_dict()
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "a.pth")
    torch.save({"epoch": 4, "ema": state}, tmp_path / "b.pth")
    assert "0.weight" in read_checkpoints(tmp_path, pattern="a*", progress=False).samples
    assert "0.weight" in read_checkpoints(tmp_path, pattern="b*", key="ema", progress=False).samples
    with pytest.raises(ValueError, match=r"b\.pth holds no state dict"):
        read_checkpoints(tmp_path, pattern="b*", progress=False)
    with pytest.raises(ValueError, match=r"a\.pth has no entry 'ema'; found \['epoch', 'state_dict'\]"):
        read_checkpoints(tmp_path, key="ema", progress=False)


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_is_never_run(tmp_path):
    torch.save({"w": torch.zeros(2), "x": Harmful(tmp_path / "harm")}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=r"bad\.pt holds more than tensors"):
        read_checkpoints(tmp_path, progress=False)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_cut_short_is_named(tmp_path, suffix):
    write_checkpoints(
        Posterior({"w": torch.randn(1, 2, 50)}, rows="chains"), tmp_path / "nets", format=suffix, progress=False
    )
    file = tmp_path / "nets" / f"net-00001.{suffix}"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"net-00001.{suffix}"):
        read_checkpoints(tmp_path / "nets", progress=False)


def test_networks_that_differ_are_named(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.zeros(3)}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"b\.pt: 'w' has shape \(3,\), but \(2,\) in .*a\.pt"):
        read_checkpoints(tmp_path, progress=False)
    torch.save({"v": torch.zeros(2)}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"b\.pt lacks, unlike .*a\.pt, the sites \['w'\]"):
        read_checkpoints(tmp_path, progress=False)


def test_missing_and_full_folders_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        read_checkpoints(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no file"):
        read_checkpoints(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*x\.pt"):
        read_checkpoints([tmp_path / "x.pt"])
    saved(tmp_path, 1)
    with pytest.raises(ValueError, match="isn't empty"):
        write_checkpoints(Posterior({"w": torch.randn(1, 2)}, rows="chains"), tmp_path)
    with pytest.raises(ValueError, match="buffers is 'metadata'"):
        read_checkpoints(tmp_path, buffers="metadata")


def test_a_network_that_is_not_finite_is_warned_of_and_named(tmp_path):
    for k in range(3):
        state = {"w": torch.ones(2) if k != 1 else torch.tensor([1.0, torch.nan])}
        torch.save(state, tmp_path / f"net-{k}.pt")
    with pytest.warns(RuntimeWarning, match=r"1 checkpoints hold a NaN or an infinity: .*net-1\.pt"):
        posterior = read_checkpoints(tmp_path, progress=False)
    assert posterior.metadata["not_finite"] == ["net-1.pt"]
    with pytest.warns(RuntimeWarning, match="3 checkpoints"):
        read_checkpoints(_large(tmp_path / "large"), dtype=torch.float16, progress=False)


def _large(folder):
    folder.mkdir()
    for k in range(3):
        torch.save({"w": torch.tensor([1e30])}, folder / f"{k}.pt")  # more than half precision holds
    return folder


@pytest.mark.parametrize("suffix", ["ckpt", "bin"])
def test_files_of_lightning_and_transformers_are_read(tmp_path, suffix):
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / f"net.{suffix}")
    assert read_checkpoints(tmp_path, progress=False).samples["w"].shape == (1, 1, 2)
    torch.save({"w": torch.zeros(2)}, tmp_path / "net.pt")  # beside which such a file is something else
    assert read_checkpoints(tmp_path, progress=False).metadata["files"] == ["net.pt"]


@pytest.mark.parametrize("content", [b"abc", b"", b"version https://git-lfs.github.com/spec/v1\n", b"hello world"])
def test_another_kind_of_file_is_named(tmp_path, content):
    (tmp_path / "net.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"net\.pt .*pattern="):
        read_checkpoints(tmp_path, progress=False)


def test_entries_and_prefixes_are_pointed_to(tmp_path):
    torch.save({"net": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"entries \['epoch', 'net'\]; name the entry by key="):
        read_checkpoints(tmp_path, progress=False)
    torch.save({"w": torch.ones(2), "b": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"module.w": torch.ones(2), "module.b": torch.ones(1)}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="rename= can take a prefix"):
        read_checkpoints(tmp_path, progress=False)


def test_statistics_keep_their_dtypes(tmp_path):
    statistics = {"lp": torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64), "n": torch.tensor([[1, 2]])}
    posterior = Posterior({"w": torch.randn(1, 2, 3)}, statistics, rows="chains")
    write_checkpoints(posterior, tmp_path / "all", progress=False)
    found = read_checkpoints(tmp_path / "all", progress=False).statistics
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in statistics.items()
    )


@pytest.mark.parametrize(
    "prefix", ["", ".", "/", "../../x", "a/b", "a\\b", "/etc/x", "C:x", "a\0b", "a\n", "a/", "net/../x"]
)
def test_a_prefix_that_leaves_the_folder_is_refused(prefix, tmp_path):
    posterior = Posterior({"w": torch.randn(1, 2, 3)}, rows="independent")
    with pytest.raises(ValueError, match=r"prefix is .*it must be the beginning of a file's name"):
        write_checkpoints(posterior, tmp_path / "a" / "b" / "c", prefix=prefix, progress=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="prefix is 3; it must be a string"):
        write_checkpoints(posterior, tmp_path, prefix=3, progress=False)


@pytest.mark.parametrize("prefix", ["net", "..", "résumé", "a b.c-d", ".hidden"])
def test_a_plain_prefix_stays_in_the_folder(prefix, tmp_path):
    posterior = Posterior({"w": torch.randn(1, 2, 3)}, rows="independent")
    files = write_checkpoints(posterior, tmp_path / "c", prefix=prefix, progress=False)
    assert [file.resolve() for file in files] == [tmp_path / "c" / f"{prefix}-0000{i}.safetensors" for i in range(2)]
    assert all(file.is_file() for file in files)


class Tied(nn.Module):
    """Batch normalisation, a shared parameter and a buffer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))


@pytest.mark.parametrize("format", ["pt", "safetensors"])
def test_files_written_for_a_network_are_what_its_load_state_dict_takes(tmp_path: Path, format: str) -> None:
    net = Tied()
    net(torch.randint(5, (20,)))  # running statistics that aren't the initial ones
    samples = {name: torch.randn(2, 3, *value.shape) for name, value in net.named_parameters()}
    posterior = ps.Posterior({**samples, "noise_scale": torch.rand(2, 3)}, rows="chains")
    files = ps.write_checkpoints(posterior, tmp_path / "out", net=net, format=format, progress=False)
    for number, file in enumerate(files):
        fresh = Tied().eval()
        fresh.load_state_dict(torch.load(file, weights_only=True) if format == "pt" else load_file(file), strict=True)
        own = {name: value.flatten(0, 1)[number] for name, value in samples.items()}
        x = torch.randint(5, (7,))
        assert torch.equal(fresh(x), torch.func.functional_call(net.eval(), own, (x,)))
        assert torch.equal(fresh.positions, torch.arange(4))
    lacking = ps.Posterior({"norm.weight": torch.zeros(1, 1, 3)}, rows="chains")
    with pytest.raises(ValueError, match=r"embedding\.weight"):
        ps.write_checkpoints(lacking, tmp_path / "lacking", net=net, progress=False)
    assert not list((tmp_path / "lacking").glob("*"))
