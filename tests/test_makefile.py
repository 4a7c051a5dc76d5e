"""``make check`` has tests of every room."""

import re
from pathlib import Path

TREE = Path(__file__).parent.parent
CHECK = re.search(r"^CHECK := \$\(addprefix (\S+), (.*?)\)$", (TREE / "Makefile").read_text(), re.DOTALL | re.MULTILINE)
LONG = {"statistical"}  # a folder of long runs only


def test_make_check_has_tests_of_every_room():
    prefix, names = CHECK[1], CHECK[2].replace("\\\n", " ").split()
    missing = [name for name in names if not (TREE / prefix / name).exists()]
    assert not missing, missing
    rooms = {path.parent.name for path in (TREE / "tests").glob("*/test_*.py")} - LONG
    assert rooms <= {name.split("/")[0] for name in names}
