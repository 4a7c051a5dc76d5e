"""Whatever happens to a file by itself is told, with the file's name; never are other
draws given for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import nn

from pyro_symmetric.guides.files import load_guide, save_guide
from pyro_symmetric.mcmc import HMC, sample
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import LOCK, StoreError

Values = dict[str, torch.Tensor]
NET = nn.Linear(2, 2)


def model(y: torch.Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean.sum(-1), 1.0), obs=y)


def values_of(posterior: Posterior) -> Values:
    return {**posterior.samples, **posterior.statistics}


def run(path: Path, seed: int, num_samples: int = 6, **options) -> Posterior:
    """A short run in a store, in two commits at least."""
    options |= {
        "num_warmup": 4,
        "num_chains": 4,
        "seed": seed,
        "progress": False,
        "engine": "eager",
        "store": path,
    }
    data = torch.linspace(-1, 1, 5)
    sample(HMC(model, num_steps=2), data, num_samples=num_samples // 2, **options)
    return sample(HMC(model, num_steps=2), data, num_samples=num_samples, **options)


run_tasks = functools.partial(run, chains_per_task=2)


def joined(path: Path) -> Values:
    return values_of(
        Posterior.concat([Posterior.load(task) for task in sorted(path.iterdir())])
    )


def save(path: Path, seed: int) -> None:
    generator = torch.Generator(torch.empty(0).device).manual_seed(seed)
    draws = {
        "w": torch.randn(2, 50, 3, generator=generator),
        "b": torch.randn(2, 50, generator=generator).double(),
    }
    path.mkdir()
    Posterior(draws, {"lp": draws["b"]}, {"seed": seed}, kind="chains").save(
        path / "draws"
    )


def save_a_guide(path: Path, seed: int) -> None:
    pyro.clear_param_store()
    torch.manual_seed(seed)
    guide = AutoDiagonalNormal(model)
    guide(torch.zeros(3))
    path.mkdir()
    save_guide(guide, path / "guide")


def parameters(path: Path) -> Values:
    return {
        name: value.detach()
        for name, value in load_guide(path / "guide").named_parameters()
    }


@dataclass(frozen=True)
class Kind:
    """A maker and a reader of a folder of files; ``files``: those of which each is
    damaged in turn.
    """

    make: Callable[[Path, int], object]
    read: Callable[[Path], Values]
    files: str
    # the call that goes on with it
    again: Callable[[Path, int], Posterior] | None = None


KINDS = {
    "a saved posterior": Kind(
        save, lambda path: values_of(Posterior.load(path / "draws")), "draws/**/*"
    ),
    "a run": Kind(run, lambda path: values_of(Posterior.load(path)), "**/*", run),
    "a run in tasks": Kind(run_tasks, joined, "**/*", run_tasks),
    "a guide": Kind(save_a_guide, parameters, "guide"),
}


@functools.cache
def made(name: str, seed: int, root: Path) -> Path:
    path = root / f"{name.replace(' ', '-')}-{seed}"
    KINDS[name].make(path, seed)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("made")


def same(found: Values, expected: Values) -> bool:
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name].double(), value.double(), 0, 0, equal_nan=True)
        for name, value in expected.items()
    )


def outcome(attempt: Callable[[], Values]) -> tuple[Values | None, str]:
    """The result: values, or an error's words."""
    try:
        return attempt(), ""
    except ValueError as error:  # StoreError, or of checkpoints their reader's own
        return None, str(error)


def says_the_same(found: bytes, before: bytes) -> bool:
    """Such as JSON's 1e-5 and 1E-5."""
    if found == before:
        return True
    with contextlib.suppress(ValueError):
        return json.loads(found) == json.loads(before)
    return False


def flipped(whole: bytes, chance: random.Random, other: Path) -> bytes:
    place = chance.randrange(len(whole))
    return (
        whole[:place]
        + bytes([whole[place] ^ 1 << chance.randrange(8)])
        + whole[place + 1 :]
    )


def cut(whole: bytes, chance: random.Random, other: Path) -> bytes:
    return whole[: chance.randrange(len(whole))]


def zeroed(whole: bytes, chance: random.Random, other: Path) -> bytes:
    return bytes(len(whole))


def zeroed_at_the_end(whole: bytes, chance: random.Random, other: Path) -> bytes:
    begin = chance.randrange(len(whole))
    return whole[:begin] + bytes(len(whole) - begin)


def replaced(whole: bytes, chance: random.Random, other: Path) -> bytes:
    return other.read_bytes()


DAMAGES = {flipped: 25, cut: 6, zeroed: 6, zeroed_at_the_end: 6, replaced: 6}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", KINDS)
def test_no_damage_gives_other_draws(name, damage, root, tmp_path):
    kind, whole = KINDS[name], made(name, 1, root)
    expected = kind.read(whole)
    chance = random.Random(f"{name} {damage.__name__}")
    told = 0
    files = [
        file
        for file in sorted(whole.glob(kind.files))
        if file.is_file() and file.name not in (LOCK, "zarr.json")
    ]
    if damage is replaced and name == "a guide":
        pytest.skip("a whole file by itself is what it says, wherever it lies")
    other = made(name, 2, root)
    for trial in range(DAMAGES[damage]):
        file = chance.choice(files)
        path = tmp_path / str(trial)
        shutil.copytree(whole, path)
        broken = path / file.relative_to(whole)
        before = broken.read_bytes()
        broken.write_bytes(damage(before, chance, other / file.relative_to(whole)))
        harmless = says_the_same(broken.read_bytes(), before)
        # of two files that disagree, either may be named
        named = path.name if damage is replaced else broken.name
        attempts = [functools.partial(kind.read, path)]
        if kind.again is not None and trial % 10 == 0:
            attempts.append(lambda kind=kind, path=path: values_of(kind.again(path, 1)))
        for attempt in attempts:
            found, message = outcome(attempt)
            if found is None:
                told += 1
                assert named in message
            else:
                assert same(found, expected), f"{file.name} gave other draws"
                assert harmless
    assert told


def test_checks_may_be_left_out(root, tmp_path):
    shutil.copytree(made("a saved posterior", 1, root), tmp_path / "s")
    file = tmp_path / "s/draws/posterior/w/c/0/0/0"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(
        StoreError,
        match=r"posterior/w/c/0/0/0 differs from its checksum. Restore it from a copy",
    ):
        Posterior.load(tmp_path / "s/draws")
    assert Posterior.load(tmp_path / "s/draws", verify=False).num_samples == 50
