"""The command line: ``compare`` and ``symmetries``. An error prints one sentence and
exits with a non-zero code.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields

import torch

from pyro_symmetric._version import __version__
from pyro_symmetric.arguments import Json, Names, Shape, did_you_mean
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.networks import import_torchvision, net_from_callable
from pyro_symmetric.study import StudySettings, run_study
from pyro_symmetric.study.methods import list_methods


def widths(text: str) -> Shape:
    """Parse ``32,32`` as (32, 32)."""
    return tuple(int(part) for part in text.split(","))


def names(text: str) -> Names:
    """Parse ``a,b`` as ("a", "b")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


# argparse reports a ValueError of these parsers with the option's name and value.
PARSERS = {
    "str": str,
    "int": int,
    "float": float,
    "tuple[int, ...]": widths,
    "tuple[str, ...]": names,
}
EXAMPLES = """\
examples:
  pyro-symmetric compare
      scikit-learn's digits, all methods, in runs/digits
  pyro-symmetric compare --quick --methods mean-field,hmc
      a first look in under two minutes
  pyro-symmetric compare --data uci/energy --data-root ~/data --hidden 50
  pyro-symmetric compare --data csv:houses.csv --target price
  pyro-symmetric compare --data fashion-mnist --download --max-train 5000 --ood mnist
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = build_parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():  # print warnings without file and source line
            warnings.showwarning = lambda message, *_, **__: print(
                f"pyro-symmetric: {message}", file=sys.stderr
            )
            return options.run(options)
    except KeyboardInterrupt:
        print(
            "\nStopped. Methods that had finished are kept; the same command resumes "
            "there.",
            file=sys.stderr,
        )
        return 130
    except (ValueError, OSError, ImportError) as error:
        if options.debug:
            raise
        print(f"pyro-symmetric: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="pyro-symmetric",
        description="Posteriors of neural networks, and their symmetries.",
    )
    parser.add_argument(
        "--version", action="version", version=f"pyro-symmetric {__version__}"
    )
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    add_compare(commands)
    add_symmetries(commands)
    return parser


def add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``compare``, with an option for each field of
    :class:`StudySettings`.
    """
    parser = commands.add_parser(
        "compare",
        help="fit one Bayesian network several ways and report how close each comes to "
        "a reference posterior",
        description="Fit one Bayesian neural network several ways, draw a reference "
        "posterior, and write a report of "
        "how close each way comes. Run again with the same --out, it resumes where it "
        "stopped.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in fields(StudySettings):
        option: Json = {"default": field.default, **field.metadata}
        if field.type == "bool":
            option["action"] = (
                argparse.BooleanOptionalAction if field.default else "store_true"
            )
            del option["metavar"]
        else:
            option["type"] = PARSERS[field.type.split(" |")[0]]
        parser.add_argument(f"--{field.name.replace('_', '-')}", **option)
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="output folder (default: runs/<data>, or runs/<data>-quick)",
    )
    parser.add_argument(
        "--no-progress", dest="progress", action="store_false", help="no progress bars"
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error"
    )
    parser.set_defaults(run=compare)


def compare(options: argparse.Namespace) -> int:
    """Run the study, and print its summary and the path of the report."""
    if options.methods == ("help",):
        print(list_methods(options.quick))
        return 0
    name = options.data.split(":")[-1].replace("/", "-")
    quick = "-quick" if options.quick else ""
    out = options.out or f"runs/{name}{quick}"
    study = run_study(settings_of(options), out, progress=options.progress)
    # imports matplotlib, which the study has required
    from pyro_symmetric.study.report import summary_table

    tables = summary_table(study.results["methods"], study.problem.is_classification)
    print(f"\n{tables}\n\nReport: {study.report}")
    return 0


def settings_of(options: argparse.Namespace) -> StudySettings:
    """Return the study's settings from the options of ``compare``."""
    return StudySettings(
        **{field.name: getattr(options, field.name) for field in fields(StudySettings)}
    )


def add_symmetries(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    """Add the command ``symmetries``."""
    parser = commands.add_parser(
        "symmetries",
        help="print the weight-space symmetries of a network",
        description="Find the permutations, scalings and signs of a network's weights "
        "that preserve its function, "
        "verify them on a copy, and explain for each axis of each parameter which of "
        "them moves it, or why none does.",
        epilog="examples:\n  pyro-symmetric symmetries resnet50\n"
        "  pyro-symmetric symmetries my_package.nets:build --input 2,3,32,32 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "net",
        help="name of a torchvision model; package.module:callable, called as "
        "callable(input_shape, num_outputs) or "
        "without arguments; or package.module:network",
    )
    shape_help = "shape of the network's input, batch first (default: 2,3,224,224)"
    parser.add_argument("--input", type=widths, metavar="N,N,...", help=shape_help)
    outputs_help = "num_outputs of a callable that takes it (default: 10)"
    parser.add_argument(
        "--outputs", type=int, default=10, metavar="N", help=outputs_help
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="explain what moves each axis, or why nothing does",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error"
    )
    parser.set_defaults(run=symmetries)


def symmetries(options: argparse.Namespace) -> int:
    """Print the symmetries of a network."""
    rows, *shape = options.input or (2, 3, 224, 224)
    net = load_net(options.net, tuple(shape), options.outputs)
    # a batch axis of length 1 looks like a broadcast axis
    x = torch.randn(max(2, rows), *shape, device="cpu")
    try:
        symmetry = find_symmetry(net, x)
    except ValueError as error:
        if options.input is not None:
            raise
        raise ValueError(
            f"{error}\n\nIf the network takes another input, give its shape: --input "
            "2,10"
        ) from error
    log_order = symmetry.log_order()
    if options.json:
        print(json.dumps({"log_order": log_order, **symmetry.to_dict()}))
        return 0
    count = (
        f"{round(math.exp(log_order)):,}"
        if log_order < math.log(1e6)
        else f"exp({log_order:.1f})"
    )
    print(
        f"{symmetry}\n\nlog |G| = {log_order:.1f}: permutations and signs give {count} "
        "copies of every mode."
    )
    if options.explain:
        print(f"\n{symmetry.explanation}")
    return 0


def load_net(name: str, input_shape: Shape, num_outputs: int) -> torch.nn.Module:
    """Build a torchvision model with random weights, or a user's network as ``compare
    --net`` does.

    :raises ValueError: if there is no network of that name.
    """
    if ":" in name:
        return net_from_callable(name, input_shape, num_outputs).eval()
    models = import_torchvision().models
    if name not in models.list_models():
        raise ValueError(
            f"torchvision has no model {name!r}; write its name as resnet50, or "
            "package.module:callable"
            f"{did_you_mean(name, models.list_models())}"
        )
    return models.get_model(name, weights=None).eval()
