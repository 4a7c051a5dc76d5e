"""The wheel and the sdist of this tree: it installs into an empty environment, and
holds what it should.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
LEFT_OUT = (
    ".*",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "runs",
    "data",
    "tutorials",
)


def run(*command: object, **options) -> str:
    """Run a command, and show what it said if it fails."""
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """An sdist of the tree, and a wheel of that sdist, built without any network."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(TREE, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    # Without isolation the environment's setuptools builds it: the one that a network
    # would fetch.
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder / "dist",
        folder / "tree",
    )
    return folder / "dist"


@pytest.fixture(scope="module")
def empty_python(built, tmp_path_factory) -> Path:
    """The Python of a new environment that has the wheel, and sees our dependencies but
    not our working tree.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        wheel,
    )
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    ).strip()
    # A path named in a .pth file is searched last, and its own .pth files (our editable
    # installation) aren't run.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_and_the_sdist_contain_what_they_should(built):
    assert "contain what they should" in run(
        sys.executable, TREE / "tools" / "contents.py", built
    )


def test_the_installed_wheel_imports_without_its_extras_then_as_a_whole_and_brings_its_command(
    empty_python, tmp_path
):
    program = """
        import importlib, pkgutil, sys
        sys.modules.update(dict.fromkeys(sys.argv[1:]))  # as if they weren't installed
        import pyro_symmetric as ps
        for extra in sys.argv[1:]:
            del sys.modules[extra]
        for module in pkgutil.walk_packages(ps.__path__, "pyro_symmetric."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        print(ps.__file__, ps.__version__, sep="\\n")
    """
    extras = (
        "sklearn",
        "matplotlib",
        "arviz_plots",
        "jinja2",
        "torchmetrics",
        "torchvision",
    )
    options = {
        "cwd": tmp_path,
        "env": {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        },
    }
    file, version = run(
        empty_python, "-c", textwrap.dedent(program), *extras, **options
    ).splitlines()
    assert Path(file).is_relative_to(empty_python.parent.parent)
    assert version == PROJECT["version"]
    assert "compare" in run(empty_python.parent / "pyro-symmetric", "--help", **options)


def test_every_requirement_is_pinned_to_a_version_that_its_range_admits():
    from packaging.requirements import Requirement

    lines = [
        line
        for line in (TREE / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pinned = {
        name.lower().replace("_", "-"): version
        for name, version in (line.split("==") for line in lines)
    }
    extras = PROJECT["optional-dependencies"].values()
    for text in [
        *PROJECT["dependencies"],
        *(line for extra in extras for line in extra),
    ]:
        requirement = Requirement(text)
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pinned[requirement.name.lower()]), (
                text
            )
