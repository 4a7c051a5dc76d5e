"""How Sphinx builds the site: ``make docs`` from the folder above. Nothing is fetched,
and no notebook is run.
"""

import argparse
import base64
import json
import operator
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import pyro_symmetric as ps  # noqa: E402
from pyro_symmetric.cli import build_parser  # noqa: E402

from external import resolve  # noqa: E402

os.environ["COLUMNS"] = "100"  # of the command line's help
project, author, copyright = (
    "pyro_symmetric",
    "The pyro_symmetric authors",
    "The pyro_symmetric authors",
)
version = release = ps.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
    "mathml",
]
html_math_renderer = "mathml"
exclude_patterns = ["_build", "jupyter_execute", "*.py"]
nitpicky = True

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests run notebooks; the site shows what they printed
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = f"pyro_symmetric {release}"
html_static_path = ["_static"]
html_logo = html_favicon = "_static/logo.svg"
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
if "urls" in PROJECT:  # once there is a public address: tools/address.py
    html_theme_options["source_repository"] = PROJECT["urls"]["Repository"]
    html_theme_options["source_branch"] = "main"
    html_theme_options["source_directory"] = "docs/"

EXAMPLES = """Every page has an example that runs by itself, and the tests run it. Examples take these as imported:

```python
import pyro, torch
import pyro.distributions as dist
import pyro_symmetric as ps
from torch import nn
```

Those that write files write them to the working directory."""


def write_pages(_app: object) -> None:
    """Pages that are made of what stands elsewhere: docstrings, the command line's
    help, results, tutorials.
    """
    write_api(HERE / "reference" / "api")
    (HERE / "reference" / "command-line.md").write_text(command_line())
    (HERE / "reference" / "results.md").write_text(
        results(HERE.parent / "benchmarks" / "results")
    )
    for name in ("CONTRIBUTING", "ARCHITECTURE", "CHANGELOG", "CODE_OF_CONDUCT"):
        text = (HERE.parent / f"{name}.md").read_text().replace("(docs/", "(")
        text = re.sub(
            r"\(([A-Z_]+)\.md\)", lambda match: f"({match[1].lower()}.md)", text
        )
        (HERE / f"{name.lower()}.md").write_text(text)
    (HERE / "tutorials" / "pictures").mkdir(exist_ok=True)
    for notebook in (HERE.parent / "tutorials").glob("*.ipynb"):
        write_tutorial(notebook)


def write_tutorial(notebook: Path) -> None:
    """A copy of a notebook that shows its main figure at the top, too."""
    content = json.loads(notebook.read_text())
    picture = f"pictures/{notebook.stem}.png"
    (HERE / "tutorials" / picture).write_bytes(main_picture(content["cells"]))
    content["cells"][0]["source"] += [f"\n\n![A figure of this page]({picture})"]
    (HERE / "tutorials" / notebook.name).write_text(json.dumps(content))


def main_picture(cells: list[dict]) -> bytes:
    """The figure of the cell whose metadata say ``cover``, or else the first, as
    PNG.
    """
    covers = [cell for cell in cells if cell["metadata"].get("cover")]
    for cell in covers or cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                return base64.b64decode(output["data"]["image/png"])
    raise ValueError("the notebook stores no figure")


ROOMS = ("groups", "discovery", "canonical", "alignment", "compare", "guides", "mcmc")


def groups() -> list[tuple[str, list[str]]]:
    """The public names under the headings of the package's own docstring, which
    ``help`` shows, then those of rooms.
    """
    found = re.findall(
        r"^(\S[^\n]*)\n((?:    [^\n]*\n)+)", ps.__doc__ or "", flags=re.MULTILINE
    )
    public = [(title, re.findall(r"\w+", names)) for title, names in found]
    rooms = {
        room: [name for name in getattr(ps, room).__all__ if name not in ps.__all__]
        for room in ROOMS
    }
    return public + [
        (f"In {room}", [f"{room}.{name}" for name in names])
        for room, names in rooms.items()
    ]


def write_api(folder: Path) -> None:
    """A page for each public name, and a table of them for each group."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    index, pages = ["# API", "", EXAMPLES], []
    for title, names in groups():
        index += ["", f"## {title}", "", "| | |", "| --- | --- |"]
        for name in names:
            thing, page = operator.attrgetter(name)(ps), f"pyro_symmetric.{name}"
            kind = (
                "module"
                if not callable(thing)
                else "class"
                if isinstance(thing, type)
                else "function"
            )
            body = (
                f".. automodule:: {thing.__name__}"
                if kind == "module"
                else f".. auto{kind}:: pyro_symmetric.{name}"
            )
            (folder / f"{page}.rst").write_text(
                f"{name}\n{'=' * len(name)}\n\n{body}\n"
            )
            summary = (
                (thing.__doc__ or "")
                .strip()
                .split("\n\n")[0]
                .replace("\n", " ")
                .replace("|", "\\|")
            )
            index.append(f"| [`{name}`]({page}.rst) | {plain(summary)} |")
            pages.append(page)
    index += ["", "```{toctree}", ":hidden:", "", *pages, "```", ""]
    (folder / "index.md").write_text("\n".join(index))


def command_line() -> str:
    """What ``--help`` says."""
    parser = build_parser()
    (commands,) = [
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    parts = ["# Command line", "", "```text", parser.format_help().rstrip(), "```"]
    for name, command in commands.choices.items():
        parts += [
            "",
            f"## pyro-symmetric {name}",
            "",
            "```text",
            command.format_help().rstrip(),
            "```",
        ]
    return "\n".join([*parts, ""])


def results(folder: Path) -> str:
    """The last results of all benchmarks."""
    parts = [
        "# Results",
        "",
        "What the benchmarks printed when they were last recorded, by `python -m "
        "benchmarks.record`.",
    ]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        machine = found["machine"]
        parts += [
            f"\n## {path.stem}\n",
            f"`{found['command']}`, {found['seconds']:.0f} s on {machine['cores']} "
            f"cores ({machine['processor']}), "
            f"{found['date']}, commit {found['commit']}, torch "
            f"{found['versions']['torch']}.\n",
            "````text",
            *found["output"],
            "````",
        ]
    return "\n".join([*parts, ""])


def plain(text: str) -> str:
    """A summary line in Markdown, without the roles of reStructuredText."""
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(
        r":\w+:`~?(?:[^`<]*<)?~?([\w.]+)>?`",
        lambda match: f"`{match[1].rsplit('.', 1)[-1]}`",
        text,
    )
    return text.replace("``", "`")


def setup(app) -> None:
    app.connect("builder-inited", write_pages)
    app.connect("missing-reference", resolve)
