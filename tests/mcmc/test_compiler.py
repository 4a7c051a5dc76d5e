"""The compiled code is built once, kept where nobody else can write, and never loaded if it isn't what was built."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pyro_symmetric.mcmc.density import Density
from pyro_symmetric.mcmc.density.engine import NoCompiler
from pyro_symmetric.mcmc.density.native import compiler
from pyro_symmetric.mcmc.density.native.compiler import library
from pyro_symmetric.models import BayesianModel

COMPILER = next(filter(shutil.which, ("g++", "clang++", "c++")), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory):
    """In place of ``compiler._run``: what the real compiler made once is copied from then on."""
    run, made = compiler._run, tmp_path_factory.mktemp("made") / "part.so"

    def compile_once(command):
        if command[0] != COMPILER or "-o" not in command:
            return run(command)
        if not made.exists():
            run([*command[:-1], str(made)])
        shutil.copy(made, command[-1])
        return ""

    return compile_once


@pytest.fixture
def cache(monkeypatch, tmp_path, compile_once):
    """A cache folder of the test's own, and builds that take a second since they aren't optimised."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler, "FLAGS", ["-O0", *(flag for flag in compiler.FLAGS if flag != "-O3")])
    monkeypatch.setattr(compiler, "_run", compile_once)
    compiler._outcome.cache_clear()
    yield tmp_path / "pyro_symmetric"
    compiler._outcome.cache_clear()


def again():
    compiler._outcome.cache_clear()
    assert library().vector_bytes() in (16, 32, 64)


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def builds(monkeypatch) -> list[Path]:
    """Folders that are built in from now on."""
    found, build = [], compiler._build
    monkeypatch.setattr(compiler, "_build", lambda name, folder, key: found.append(folder) or build(name, folder, key))
    return found


@needs_compiler
def test_a_build_is_kept_in_a_private_folder_and_used_again(cache, monkeypatch):
    again()
    (built,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    folders = builds(monkeypatch)
    again()
    assert folders == []
    assert list(cache.iterdir()) == [built]


@needs_compiler
@pytest.mark.parametrize("kept", [0, 100, 8192])
def test_a_library_that_was_cut_short_is_built_anew(cache, monkeypatch, kept):
    again()
    (built,) = cache.iterdir()
    whole = built.read_bytes()
    short = cache / "short"
    short.write_bytes(whole[:kept])
    os.replace(short, built)  # the one that is loaded stays as it is
    folders = builds(monkeypatch)
    again()
    assert folders == [cache]
    assert all(path.stem.endswith(compiler._digest(path)) for path in cache.iterdir() if path.read_bytes() != b"")


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files")
def test_a_library_that_others_may_have_written_is_not_loaded(cache, monkeypatch):
    again()
    (built,) = cache.iterdir()
    folders = builds(monkeypatch)
    built.chmod(0o666)
    again()
    assert folders == [cache]
    assert not built.stat().st_mode & 0o022
    moved = built.rename(cache.parent / "elsewhere.so")
    built.symlink_to(moved)
    again()
    assert folders == [cache, cache]
    assert not built.is_symlink()


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files")
@pytest.mark.parametrize("which", ["the folder", "the one above", "another user's"])
def test_a_folder_that_others_may_write_to_is_left_alone(cache, monkeypatch, which):
    cache.mkdir()
    if which == "another user's":
        monkeypatch.setattr(compiler.os, "getuid", lambda: cache.stat().st_uid + 1)
    else:
        (cache if which == "the folder" else cache.parent).chmod(0o777)
    folders = builds(monkeypatch)
    again()
    assert list(cache.iterdir()) == []
    (own,) = folders
    assert own != cache
    assert not own.exists()  # gone once it was loaded


@needs_compiler
def test_without_a_folder_to_write_to_it_is_built_for_the_process(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    again()
    assert not cache.exists()


@needs_compiler
@pytest.mark.slow
def test_processes_that_build_at_once_leave_one_library_that_all_of_them_loaded(tmp_path):
    code = "from pyro_symmetric.mcmc.density.native.compiler import library; print(library().vector_bytes())"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert len({process.communicate(timeout=300)[0] for process in both}) == 1
    assert [process.returncode for process in both] == [0, 0]
    left = list((tmp_path / "pyro_symmetric").iterdir())
    assert left
    assert all(path.stem.endswith(compiler._digest(path)) for path in left)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 1", "failed"),
        ('[ "$1" = --version ] && echo 1.0 || { echo "no such target" >&2; exit 1; }', "failed: no such target"),
        ('[ "$1" = --version ] && echo 1.0 || exit 0', "failed: .*part.so"),  # says it did, and didn't
    ],
)
def test_a_compiler_that_fails_is_reported_and_pytorch_serves(cache, monkeypatch, tmp_path, text, reason):
    monkeypatch.setenv("CXX", script(tmp_path / "broken", text))
    with pytest.raises(NoCompiler, match=reason):
        library()
    assert list(cache.iterdir()) == [] if cache.exists() else True
    with pytest.warns(RuntimeWarning, match="serves, not 'native'"):
        density = Density(BayesianModel(nn.Linear(3, 2)), args=(torch.randn(5, 3), torch.arange(5) % 2))
    assert density.engine == "torch"
    assert "broken failed" in repr(density)


@pytest.mark.cpu
def test_without_any_compiler_pytorch_serves(cache, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="serves, not 'native'"):
        density = Density(BayesianModel(nn.Linear(3, 2)), args=(torch.randn(5, 3), torch.arange(5) % 2))
    assert density.engine == "torch"
    assert "no C++ compiler was found" in repr(density)


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands for the compiler")
def test_a_broken_compiler_is_tried_once(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", script(tmp_path / "broken", f'echo run >> "{tmp_path / "runs"}"\nexit 1\n'))
    for _ in range(3):
        with pytest.raises(NoCompiler, match="broken failed"):
            library()
    assert (tmp_path / "runs").read_text() == "run\n"


@needs_compiler
def test_one_line_says_once_what_is_compiled_and_an_open_folder_is_closed(cache, capsys):
    cache.mkdir(mode=0o755)
    cache.chmod(0o755)
    again()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "dense.cpp" in said
    assert str(cache.resolve()) in said
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    again()
    assert capsys.readouterr().err == ""
