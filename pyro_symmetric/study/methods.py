"""The methods of a study, by name. A new one is a function whose docstring describes it
in reports:

>>> from pyro_symmetric.study.methods import Fit, register
>>> @register("prior", {"draws": 400})  # its budget: --methods prior:draws=100
... def prior(problem, budget, progress):
...     "Draw from the prior."
...     weights = {
...         site: prior.sample((budget.draws,))
...         for site, prior in problem.model.priors().items()
...     }
...     yield Fit(ps.Posterior.from_samples(weights, kind="independent"), {})
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from pyro_symmetric.arguments import Json, Names, did_you_mean
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.problem import Problem


class TooLarge(ValueError):
    """A problem too large for a method, which is then left out of the study."""


class Fit(NamedTuple):
    """A method's answer to a problem.

    :param posterior: draws of the weights: chains, or independent draws.
    :param found: further results, as JSON: ``"losses"``, label -> the training curve;
        ``"evidence"``, ELBO and symmetrised ELBO; ``"barrier"``, loss barrier curves;
        ``"details"``, other numbers.
    """

    posterior: Posterior
    found: Json


FitFunction = Callable[[Problem, Any, bool], Iterator[Fit]]


@dataclass(frozen=True)
class Method:
    """An approximation of the posterior, on a budget.

    :param fit: (problem, budget, progress) -> a :class:`Fit` for each of ``labels``. It
        may draw from the global generators and use Pyro's parameter store: the study
        lends it its own, seeded with ``problem.seed``. If the problem is too large for
        it, it raises :class:`TooLarge`.
    :param budget: part -> number.
    :param quick: the parts that differ under ``--quick``.
    :param labels: its rows in the report; by default its name.
    :param most_draws: budget -> the largest number of draws that it gives; by default
        as many as the study compares.
    :param asked: the parts of the budget that the user set, as typed: ``":modes=10"``.
    """

    name: str
    fit: FitFunction
    budget: Json
    quick: Json = field(default_factory=dict)
    labels: Names = ()
    most_draws: Callable[[Any], int] | None = None
    asked: str = ""

    @property
    def title(self) -> str:
        """The name as typed, with its budget."""
        return self.name + self.asked

    @property
    def rows(self) -> list[str]:
        """The names of its rows in the report."""
        return [label + self.asked for label in self.labels or (self.name,)]

    @property
    def parts(self) -> SimpleNamespace:
        """The parts of its budget, as attributes."""
        return SimpleNamespace(**self.budget)

    @property
    def description(self) -> str:
        """Its description in the report."""
        budget = ", ".join(f"{part}={value}" for part, value in self.budget.items())
        return f"{' '.join((inspect.getdoc(self.fit) or '').split())} Budget: {budget}."


METHODS: dict[str, Method] = {}


def register(
    name: str, budget: Json, **further: Any
) -> Callable[[FitFunction], FitFunction]:
    """Register a function as a method; ``further`` are fields of :class:`Method`.

    :raises ValueError: if the name is taken.
    """

    def registered(fit: FitFunction) -> FitFunction:
        if name in METHODS:
            raise ValueError(
                f"there is a method {name!r} already; give this one another name"
            )
        METHODS[name] = Method(name, fit, budget, **further)
        return fit

    return registered


def make_method(title: str, quick: bool = False) -> Method:
    """Make the method of ``name:part=number:...``; the other parts of its budget keep
    their (quick) defaults.

    :raises ValueError: if the method or a part of its budget is unknown, or a number
        isn't one.
    """
    name, *asked = title.split(":")
    if name not in METHODS:
        raise ValueError(
            f"there is no method {name!r}; known are "
            f"{', '.join(METHODS)}{did_you_mean(name, METHODS)}"
        )
    method = METHODS[name]
    budget = {**method.budget, **(method.quick if quick else {})}
    for part, _, text in (option.partition("=") for option in asked):
        if part not in budget:
            hint = did_you_mean(part, budget)
            raise ValueError(
                f"the budget of {name} has no {part!r}; it has "
                f"{', '.join(budget)}{hint}"
            )
        try:
            number = type(budget[part])(text)
        except ValueError:
            number = 0
        if not number > 0:
            raise ValueError(
                f"{part} of {name} is {text!r}; it must be a positive number like "
                f"{budget[part]!r}"
            )
        budget[part] = number
    return replace(method, budget=budget, asked=title.removeprefix(name))


def list_methods(quick: bool = False) -> str:
    """Describe all methods and their budgets, for the terminal."""
    lines = [f"{name}: {make_method(name, quick).description}" for name in METHODS]
    return "\n".join(
        textwrap.fill(line, 110, subsequent_indent="    ") for line in lines
    )
