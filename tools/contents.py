"""Check that a folder holds one wheel and one sdist, and that they contain what they
should.

    python tools/contents.py dist

The wheel holds every module, template and source of the package, the mark of its type
hints and the licence, and no test, notebook or benchmark. The sdist holds what it takes
to build the wheel and to cite the work. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

TREE = Path(__file__).resolve().parent.parent
PACKAGE = "pyro_symmetric"
SHIPPED = {".py", ".html", ".toml", ".cpp", ".typed"}
NEEDED = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CITATION.cff",
    f"{PACKAGE}/py.typed",
}
ELSEWHERE = ("tests/", "tutorials/", "benchmarks/", "docs/", "tools/", "runs/", "data/")


def wrong_in_wheel(path: Path, tree: Path) -> Iterator[str]:
    names = set(zipfile.ZipFile(path).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    sources = {
        found.relative_to(tree).as_posix()
        for found in (tree / PACKAGE).rglob("*")
        if found.suffix in SHIPPED
    }
    yield from (f"{path.name} lacks {name}" for name in sorted(sources - packed))
    yield from (
        f"{path.name} has {name}, which is no part of the package"
        for name in sorted(packed - sources)
    )
    about = {PurePosixPath(name).name for name in names - packed}
    yield from (
        f"{path.name} lacks {name}"
        for name in ("LICENSE", "METADATA", "entry_points.txt")
        if name not in about
    )


def wrong_in_sdist(path: Path) -> Iterator[str]:
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    yield from (f"{path.name} lacks {name}" for name in sorted(NEEDED - names))
    yield from (
        f"{path.name} has {name}"
        for name in sorted(names)
        if name.startswith(ELSEWHERE)
    )


def wrong(folder: Path, tree: Path = TREE) -> list[str]:
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [
            f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists; it should "
            "have one of each"
        ]
    return [*wrong_in_wheel(wheels[0], tree), *wrong_in_sdist(sdists[0])]


if __name__ == "__main__":
    found = wrong(Path(sys.argv[1]))
    print("\n".join(found) or "the wheel and the sdist contain what they should")
    sys.exit(bool(found))
