"""No reader believes a size that a file names: it compares it with the bytes that are
there, before it makes anything of that size.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.guides.files import KIND, VERSION
from pyro_symmetric.mcmc import HMC, sample
from pyro_symmetric.posterior.checkpoints import read_checkpoints
from pyro_symmetric.store import Checkpoint, StoreError, load_tensors, save_tensors

MANY = 10**8  # numbers, 400 MB of them
MOST_MEMORY = 250e6  # bytes that all readers may take, the libraries they import too


class File(NamedTuple):
    """A small file that claims to be large."""

    make: Callable[[Path], None]
    read: Callable[[Path], object]
    error: type[Exception]
    words: str


# checkpoints --------------------------------------------------------------------------


def read_checkpoint(path: Path) -> object:
    return read_checkpoints([path], progress=False)


def expanded(path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(MANY)}, path)


def expanded_in_the_old_format(path: Path) -> None:
    torch.save(
        {"w": torch.zeros(1).expand(MANY)}, path, _use_new_zipfile_serialization=False
    )


def many_a_little_expanded(path: Path) -> None:
    value = torch.zeros(1000)
    torch.save({f"w{k}": value.expand(100, 1000) for k in range(1000)}, path)


def deflated(path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(MANY // 2)}, buffer)
    with (
        zipfile.ZipFile(buffer) as stored,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        for name in stored.namelist():
            archive.writestr(name, stored.read(name))


def tensor_beyond_its_storage(path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(7)}, buffer)
    with zipfile.ZipFile(buffer) as stored, zipfile.ZipFile(path, "w") as archive:
        for name in stored.namelist():
            content = stored.read(name)
            if name.endswith("data.pkl"):  # 7 as one byte becomes a number of four
                content = content.replace(b"K\x07", b"J" + MANY.to_bytes(4, "little"))
            archive.writestr(name, content)


def header_beyond_the_file(path: Path) -> None:
    save_file({"w": torch.zeros(7)}, path)
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    larger = header.replace(b"[7]", f"[{MANY}]".encode())
    larger = larger.replace(b"[0,28]", f"[0,{4 * MANY}]".encode())
    path.write_bytes(len(larger).to_bytes(8, "little") + larger + content[-28:])


# guides -------------------------------------------------------------------------------


def model() -> None:
    pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))


def guide_with(change: Callable[[Any, Any], None]) -> Callable[[Path], None]:
    """Make a guide whose header and tensors are changed."""

    def make(path: Path) -> None:
        pyro.clear_param_store()
        group = ps.Group.declare({"w": ("k", None)}, {"w": torch.zeros(3, 2)})
        base = ps.AutoUnitBlocks
        ps.save_guide(ps.AutoSymmetrized(model, group, base=base).setup(), path)
        tensors, header = load_tensors(path, KIND, VERSION)
        change(header, tensors)
        save_tensors(path, KIND, VERSION, tensors, header)

    return make


def large_site(header: Any, tensors: Any) -> None:
    header["sites"][0]["shape"] = [MANY, 2]


def site_without_coordinates(header: Any, tensors: Any) -> None:
    simplex = {"kind": "_Simplex"}
    site = {"name": "p", "shape": [MANY, 1], "support": simplex, "event_dim": 1}
    header["sites"].append({**site, "plates": []})


def large_plates(header: Any, tensors: Any) -> None:
    header["sites"][0]["event_dim"] = 1
    header["sites"][0]["support"]["reinterpreted_batch_ndims"] = 1
    header["sites"][0]["plates"] = [["plate", MANY, MANY, -1]]


def large_units(header: Any, tensors: Any) -> None:
    header["group"]["units"][0]["size"] = MANY


def large_group(header: Any, tensors: Any) -> None:
    header["group"]["site_shapes"]["w"] = [MANY, 2]


def large_blocks(header: Any, tensors: Any) -> None:
    tensors["positions_0"] = torch.zeros(1, 10**4, dtype=torch.int64)


# data ---------------------------------------------------------------------------------


def read_data(name: str, **options: Any) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        return ps.datasets.load(name.format(path), root=path, **options)

    return read


def compressed_table(path: Path) -> None:
    with gzip.open(path, "wb") as file:
        file.write(b"a,b\n" + b"1,2\n" * 10**7)


def short_rows(path: Path) -> None:
    names = ",".join(f"c{k}" for k in range(10**4))
    path.write_text(names + "\n" + "1\n" * 10**4)


def compressed_indices(path: Path) -> None:
    folder = path / "uci" / "tiny"
    folder.mkdir(parents=True)
    (folder / "data.txt").write_text("1 2\n3 4\n")
    with gzip.open(folder / "index_features.txt.gz", "wb") as file:
        file.write(b"0\n" * 10**7)


def large_picture(path: Path) -> None:
    """A PNG whose header names 8,000 x 8,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + crc

    size = 2 * (8_000).to_bytes(4, "big")
    for label in ("a", "b"):
        (path / label).mkdir(parents=True)
        (path / label / "x.png").write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", size + bytes([8, 0, 0, 0, 0]))
            + chunk(b"IDAT", zlib.compress(bytes(1000)))
            + chunk(b"IEND", b"")
        )


def old_images(path: Path) -> None:
    folder = path / "MNIST" / "processed"
    folder.mkdir(parents=True)
    images = torch.zeros(1, dtype=torch.uint8).expand(MANY // 784, 28, 28)
    for part in ("training", "test"):
        labels = torch.zeros(len(images), dtype=torch.long)
        torch.save((images, labels[:1].expand(len(images))), folder / f"{part}.pt")


def image_header(path: Path) -> None:
    folder = path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        sizes = b"".join(n.to_bytes(4, "big") for n in (0x803, MANY, 28, 28))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(sizes + bytes(784))
        sizes = b"".join(n.to_bytes(4, "big") for n in (0x801, MANY))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(sizes + bytes(1))


# draws --------------------------------------------------------------------------------


def run(path: Path, num_samples: int = 4) -> object:
    options: dict[str, Any] = {"num_warmup": 2, "num_chains": 2, "seed": 0}
    options |= {"progress": False, "engine": "eager", "store": path}
    return sample(HMC(model, num_steps=2), num_samples=num_samples, **options)


def run_on(path: Path) -> object:
    return run(path, 6)


def many_draws(path: Path) -> None:
    run(path)
    replace(Checkpoint.read(path), draws=MANY).write(path)


def large_draws(path: Path) -> None:
    run(path)
    checkpoint = Checkpoint.read(path)
    arrays = [replace(array, shape=(2, MANY)) for array in checkpoint.arrays]
    replace(checkpoint, arrays=tuple(arrays)).write(path)


def large_state(path: Path) -> None:
    """A state from which to resume, with an expanded tensor in it."""
    run(path)
    checkpoint, buffer = Checkpoint.read(path), io.BytesIO()
    state = torch.load(io.BytesIO(checkpoint.state), weights_only=False)
    state["energies"] = torch.zeros((), dtype=torch.float64).expand(MANY)
    torch.save(state, buffer)
    replace(checkpoint, state=buffer.getvalue()).write(path)


def compressed_state(path: Path) -> None:
    run(path)
    deflated(path / "state")
    content = (path / "state").read_bytes()
    (path / "state").unlink()
    replace(Checkpoint.read(path), state=content).write(path)


CHECKPOINT = (read_checkpoint, ValueError)
GUIDE = (ps.load_guide, StoreError)
FILES = {
    "expanded.pt": File(expanded, *CHECKPOINT, "its tensors would take 400,000,000"),
    "old.pt": File(expanded_in_the_old_format, *CHECKPOINT, "they are expanded"),
    "many.pt": File(many_a_little_expanded, *CHECKPOINT, "they are expanded"),
    "deflated.pt": File(deflated, *CHECKPOINT, "torch.save doesn't compress"),
    "beyond.pt": File(tensor_beyond_its_storage, *CHECKPOINT, "can't be read"),
    "header.safetensors": File(header_beyond_the_file, *CHECKPOINT, "can't be read"),
    "site": File(guide_with(large_site), *GUIDE, "all sites of 200000000 entries"),
    "simplex": File(
        guide_with(site_without_coordinates), *GUIDE, "p of 100000000 entries"
    ),
    "plates": File(guide_with(large_plates), *GUIDE, "plate 'plate' of size"),
    "units": File(guide_with(large_units), *GUIDE, "units k of 100000000 entries"),
    "group": File(guide_with(large_group), *GUIDE, "w of 200000000 entries"),
    "blocks": File(guide_with(large_blocks), *GUIDE, "positions are .n, d."),
    "table.csv.gz": File(
        compressed_table, read_data("csv:{}", target="a"), ValueError, "unpack it"
    ),
    "table.csv": File(
        short_rows, read_data("csv:{}", target="c0"), ValueError, "rows are too short"
    ),
    "indices": File(
        compressed_indices, read_data("uci/tiny"), FileNotFoundError, "index_features"
    ),
    "pictures": File(
        large_picture, read_data("images:{}"), ValueError, "8000 x 8000 pixels"
    ),
    "old_images": File(
        old_images, read_data("mnist"), FileNotFoundError, "they are expanded"
    ),
    "image_header": File(
        image_header, read_data("mnist"), FileNotFoundError, "can't be read"
    ),
    "draws": File(many_draws, ps.Posterior.load, StoreError, "cut short"),
    "large_draws": File(large_draws, ps.Posterior.load, StoreError, "cut short"),
    "state": File(large_state, run_on, StoreError, "would take 800,000,000"),
    "compressed_state": File(compressed_state, run_on, StoreError, "doesn't compress"),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_claims_more_than_it_holds_is_refused(name, tmp_path):
    file = FILES[name]
    file.make(tmp_path / name)
    with pytest.raises(file.error, match=file.words):
        file.read(tmp_path / name)


def read_all(folder: Path) -> None:
    """Read all files, and print by how much the most memory held has grown."""
    peak = _peak_memory()
    for name, file in FILES.items():
        with contextlib.suppress(file.error):
            file.read(folder / name)
    print(json.dumps(_peak_memory() - peak))


def _peak_memory() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if "VmHWM" in line)


@pytest.mark.cpu
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_none_of_them_takes_the_memory_that_it_claims(tmp_path):
    for name, file in FILES.items():
        file.make(tmp_path / name)
    command = f"import runpy, pathlib; runpy.run_path({__file__!r})['read_all']"
    child = subprocess.run(
        [sys.executable, "-c", f"{command}(pathlib.Path({str(tmp_path)!r}))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(child.stdout) < MOST_MEMORY


def test_weights_that_share_their_memory_are_read(tmp_path):
    net = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    net[1].weight = net[0].weight
    torch.save(net.state_dict(), tmp_path / "net.pt")
    draws = read_checkpoint(tmp_path / "net.pt").samples
    assert torch.equal(draws["0.weight"][0, 0], net[1].weight)
    assert torch.equal(draws["1.weight"][0, 0], net[1].weight)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3).to(torch.float8_e4m3fn), "of dtype float8_e4m3fn"),
        (torch.zeros(3).to(torch.float8_e5m2), "of dtype float8_e5m2"),
        (torch.zeros(3, dtype=torch.complex64), "of dtype complex64"),
        (torch.eye(3).to_sparse(), "sparse or nested"),
        (torch.zeros(3, device="meta"), "on the device 'meta'"),
    ],
)
def test_a_checkpoint_of_other_numbers_is_refused_by_its_true_reason(
    value, words, tmp_path
):
    torch.save({"v": torch.zeros(2), "w": value}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=f"net.pt: 'w' is {words}"):
        read_checkpoint(tmp_path / "net.pt")
    kept = read_checkpoints(
        [tmp_path / "net.pt"],
        rename=lambda name: None if name == "w" else name,
        progress=False,
    )
    assert list(kept.samples) == ["v"]


def test_a_float8_safetensors_file_is_refused(tmp_path):
    save_file({"w": torch.zeros(3).to(torch.float8_e4m3fn)}, tmp_path / "n.safetensors")
    with pytest.raises(ValueError, match="of dtype float8_e4m3fn"):
        read_checkpoint(tmp_path / "n.safetensors")
