"""The command line: reads arguments, calls the study, prints. Errors end in one sentence and a non-zero exit."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pyro_symmetric._version import __version__

if TYPE_CHECKING:
    import torch

    from pyro_symmetric.study import StudySettings

EXAMPLES = """\
examples:
  pyro-symmetric compare                                   scikit-learn's digits, all methods, in runs/digits
  pyro-symmetric compare --quick --methods mean-field,hmc  a first look in under two minutes
  pyro-symmetric compare --data uci/energy --data-root ~/data --hidden 50 --activation tanh
  pyro-symmetric compare --data csv:houses.csv --target price
  pyro-symmetric compare --data fashion-mnist --download --max-train 5000 --ood mnist
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the return value is the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():  # without the file and the line of source that raised one
            warnings.showwarning = lambda said, *_, **__: print(f"pyro-symmetric: {said}", file=sys.stderr)
            return options.run(options)
    except KeyboardInterrupt:
        print("\nStopped. Methods that had finished are kept; the same command resumes there.", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        if options.debug:
            raise
        print(f"pyro-symmetric: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="pyro-symmetric", description="Posteriors of neural networks, and their symmetries."
    )
    parser.add_argument("--version", action="version", version=f"pyro-symmetric {__version__}")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    add_compare(commands)
    add_symmetries(commands)
    return parser


def add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``compare``: the study, an option for each of its settings."""
    from pyro_symmetric.study.settings import StudySettings

    parser = commands.add_parser(
        "compare",
        help="fit one Bayesian network several ways and report how close each comes to a reference posterior",
        description="Fit one Bayesian neural network several ways, draw a reference posterior, and write a report of "
        "how close each way comes. Run again with the same --out, it resumes where it stopped.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    many: dict[str, Any] = {"type": assignment, "action": "append", "default": []}
    kinds: dict[str, Callable[[str], Any]] = {"hidden": widths, "methods": names}
    for one in fields(StudySettings):
        said: dict[str, Any] = {"default": one.default, **one.metadata}
        if one.type == "bool":
            said["action"] = argparse.BooleanOptionalAction if one.default else "store_true"
            del said["metavar"]
        else:
            said["type"] = {"int": int, "float": float}.get(one.type.split(" |")[0], kinds.get(one.name, str))
        if one.metadata:
            said |= many if one.name == "prior_scale" else {}
            parser.add_argument(f"--{one.name.replace('_', '-')}", **said)
    help_ = "change a part of a method's budget, e.g. ensemble.modes=1000 or hmc.chains=64; may be repeated"
    parser.add_argument("--budget", metavar="METHOD.PART=N", help=help_, **many)
    parser.add_argument("--out", metavar="FOLDER", help="where everything is written (default: runs/<data>)")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bars")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=compare)


def compare(options: argparse.Namespace) -> int:
    """Run the study and say where the report is."""
    from pyro_symmetric.study import run_study
    from pyro_symmetric.study.methods import list_methods
    from pyro_symmetric.study.tables import summary_table

    if options.methods == ("help",):
        print(list_methods(options.quick))
        return 0
    out = options.out or f"runs/{options.data.replace('csv:', '').replace('/', '-')}{'-quick' if options.quick else ''}"
    study = run_study(settings_of(options), out, progress=options.progress)
    tables = summary_table(study.results["methods"], study.problem.is_classification)
    print(f"\n{tables}\n\nReport: {study.report}")
    return 0


def settings_of(options: argparse.Namespace) -> StudySettings:
    """The settings that the options of ``compare`` describe."""
    from pyro_symmetric.study import StudySettings

    given: dict[str, Any] = {one.name: getattr(options, one.name, None) for one in fields(StudySettings)}
    scales, budgets = dict(options.prior_scale), dict[str, dict[str, int | float]]()
    for name, number in options.budget:
        method, _, part = name.partition(".")
        budgets.setdefault(method, {})[part] = int(number) if number.is_integer() else number
    given |= {"prior_scale": scales.pop("", StudySettings.prior_scale), "prior_scales": scales, "budgets": budgets}
    return StudySettings(**given)


def add_symmetries(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``symmetries``: the group of a network."""
    parser = commands.add_parser(
        "symmetries",
        help="print the weight-space symmetries of a network",
        description="Find the permutations, scalings and signs of a network's weights that leave its function alone, "
        "check them on a copy, and say of every axis of every parameter which of them moves it, or why none does.",
        epilog="examples:\n  pyro-symmetric symmetries resnet50\n"
        "  pyro-symmetric symmetries my_package.nets:build --input 2,3,32,32 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "net",
        help="name of a torchvision model, or package.module:callable, called as callable(input_shape, num_outputs) or "
        "without arguments; or package.module:network",
    )
    parser.add_argument(
        "--input",
        type=widths,
        metavar="N,N,...",
        help="shape of the network's input, batch first (default: 2,3,224,224)",
    )
    parser.add_argument(
        "--outputs", type=int, default=10, metavar="N", help="num_outputs of a callable that takes it (default: 10)"
    )
    parser.add_argument("--explain", action="store_true", help="say of every axis what moves it, or why it stays")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--strict", action="store_true", help="fail if an operator isn't understood")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=symmetries)


def symmetries(options: argparse.Namespace) -> int:
    """Print the symmetries of a network."""
    import torch

    from pyro_symmetric.discovery.find import find_symmetry

    rows, *shape = options.input or (2, 3, 224, 224)
    net = load_net(options.net, tuple(shape), options.outputs)
    x = torch.randn(max(2, rows), *shape, device="cpu")  # a batch of one can't be told from an axis that is broadcast
    try:
        symmetry = find_symmetry(net, x, strict=options.strict)
    except ValueError as error:
        if options.input is not None:
            raise
        raise ValueError(f"{error}\n\nIf the network takes another input, say its shape: --input 2,10") from error
    if options.json:
        explanation = symmetry.explanation.to_dict()
        print(json.dumps({"log_order": symmetry.log_order(), **symmetry.to_dict(), "explanation": explanation}))
        return 0
    print(symmetry)
    print(f"\nlog |G| = {symmetry.log_order():.1f}: {copies(symmetry.log_order())}.")
    if options.explain:
        print(f"\n{symmetry.explanation}")
    return 0


def copies(log_order: float) -> str:
    """The meaning of a finite group's order for a mode, in words."""
    if log_order == 0:
        return "no permutation or sign gives a mode an equivalent copy"
    count = f"{round(math.exp(log_order)):,}" if log_order < math.log(1e6) else f"exp({log_order:.1f})"
    return f"every mode has {count} equivalent copies by permutations and signs"


def load_net(name: str, input_shape: tuple[int, ...], num_outputs: int) -> torch.nn.Module:
    """A torchvision model, with random weights, or what a user's callable returns, as ``compare --net`` calls it.

    :raises ValueError: if there is none of that name.
    """
    from pyro_symmetric._torchvision import import_torchvision
    from pyro_symmetric.calls import did_you_mean
    from pyro_symmetric.networks import net_from_callable

    if ":" in name:
        return net_from_callable(name, input_shape, num_outputs).eval()
    models = import_torchvision().models
    if name not in models.list_models():
        raise ValueError(
            f"torchvision has no model {name!r}; write its name as resnet50, or package.module:callable"
            f"{did_you_mean(name, models.list_models())}"
        )
    return models.get_model(name, weights=None).eval()


# argparse answers a ValueError of these by the option's name and what was given


def widths(text: str) -> tuple[int, ...]:
    """``32,32`` -> (32, 32)."""
    return tuple(int(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """``a,b`` -> ("a", "b")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def assignment(text: str) -> tuple[str, float]:
    """``0.5`` or ``name=0.5`` -> (name or "", 0.5)."""
    name, _, number = text.rpartition("=")
    return name, float(number)
