"""The methods of a study, by name. To add one, write a function, whose docstring describes it in reports:

>>> @register("prior", {"draws": 400})  # its budget: --budget prior.draws=100
... def prior(problem, budget, progress):
...     "Draws from the prior."
...     weights = {site: prior.sample((budget.draws,)) for site, prior in problem.model.priors().items()}
...     yield Fit(Posterior.from_samples(weights, kind="independent"))
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from pyro_symmetric.calls import did_you_mean
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.problem import Problem

PREFIXES = ("single-", "multi-")


@dataclass(frozen=True)
class Fit:
    """A method's answer to a problem: draws of the weights, and what else it can tell.

    :param posterior: the draws; chains where the method has chains, else independent draws.
    :param losses: a curve to look at, one number a step.
    :param loss_label: what that number is.
    :param evidence: ELBO and symmetrised ELBO, for variational methods.
    :param barrier: a loss barrier curve, for methods that measure one.
    :param details: further numbers, by name.
    :param seconds: how long its method took, as the study notes.
    """

    posterior: Posterior
    losses: list[float] = field(default_factory=list)
    loss_label: str = ""
    evidence: dict[str, Any] | None = None
    barrier: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


FitFunction = Callable[[Problem, Any, bool], Iterator[Fit]]


@dataclass(frozen=True)
class Method:
    """One way of approximating the posterior, on a budget.

    :param name: its name, without ``prefix``.
    :param fit: (problem, budget, progress) -> a :class:`Fit` for each of ``labels``. It may draw from the global
        generators and use Pyro's parameter store: the study lends it its own, which begin at ``problem.seed``.
    :param budget: part -> number.
    :param quick: the parts that are others under ``--quick``.
    :param labels: its rows in the report; by default its name.
    :param counted: the part of the budget that counts independent runs.
    :param many: how many runs ``multi-<name>`` stands for, as usual and quick; ``None``: there is no such form, and no
        ``single-<name>``, of one run.
    :param most_draws: budget -> the draws that it gives at most, if that isn't what the study compares.
    :param too_large: (problem, budget) -> why this problem is too large for it; empty if it isn't.
    :param packages: what it needs beyond the library: module -> package.
    :param prefix: ``"single-"`` or ``"multi-"``, if it was asked for in that form.
    """

    name: str
    fit: FitFunction
    budget: Mapping[str, Any]
    quick: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    counted: str = "modes"
    many: tuple[int, int] | None = None
    most_draws: Callable[[Any], int] | None = None
    too_large: Callable[[Problem, Any], str] = lambda problem, budget: ""
    packages: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    @property
    def title(self) -> str:
        """The name under which it was asked for."""
        return self.prefix + self.name

    @property
    def rows(self) -> list[str]:
        """The rows of the report that it makes."""
        return [self.prefix + label for label in self.labels or (self.name,)]

    @property
    def parts(self) -> SimpleNamespace:
        """The parts of its budget, by name."""
        return SimpleNamespace(**self.budget)

    @property
    def description(self) -> str:
        """The sentences that describe it in the report."""
        about = " ".join((inspect.getdoc(self.fit) or "").split())
        if self.prefix == "multi-":
            return f"{about} {self.budget[self.counted]} independent runs, in equal shares."
        return about + (f" One {self.counted.removesuffix('s')} only." if self.prefix else "")


METHODS: dict[str, Method] = {}


def register(name: str, budget: Mapping[str, Any], **more: Any) -> Callable[[FitFunction], FitFunction]:
    """Make a function known as a method; ``more`` are fields of :class:`Method`.

    :raises ValueError: if another method has its name.
    """

    def registered(fit: FitFunction) -> FitFunction:
        if name in METHODS:
            raise ValueError(f"there is a method {name!r} already; give this one another name")
        METHODS[name] = Method(name, fit, budget, **more)
        return fit

    return registered


def make_method(name: str, quick: bool = False, budget: Mapping[str, Any] | None = None) -> Method:
    """The method of that name, ``single-`` and ``multi-`` included, with its default, or its quick, budget.

    :param budget: overrides of parts of the budget.
    :raises ValueError: if there is none, or a part of the budget isn't known or has another type.
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    method = METHODS.get(name.removeprefix(prefix))
    if method is None or (prefix and method.many is None):
        every = [*METHODS, *(prefix + one for prefix in PREFIXES for one in METHODS if METHODS[one].many)]
        raise ValueError(f"there is no method {name!r}; known are {', '.join(every)}{did_you_mean(name, every)}")
    known = {**method.budget, **(method.quick if quick else {})}
    if prefix and method.many:
        known[method.counted] = method.many[quick] if prefix == "multi-" else 1
    for part, value in (budget or {}).items():
        if part not in known:
            hint = did_you_mean(part, known)
            raise ValueError(f"the budget of {name} has no {part!r}; it has {', '.join(known)}{hint}")
        kinds = (int, float) if isinstance(known[part], float) else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            raise ValueError(f"{part} of {name} is {value!r}; it must be a positive number like {known[part]!r}")
    return replace(method, prefix=prefix, budget={**known, **(budget or {})})


def list_methods(quick: bool = False) -> str:
    """All methods, what they are, and their budgets, for a person to read."""
    lines = []
    for name, method in METHODS.items():
        parts = ", ".join(f"{part}={value}" for part, value in make_method(name, quick).budget.items())
        forms = f" Also as single-{name} and multi-{name}." if method.many else ""
        text = f"{method.description}{forms} Budget: {parts}."
        lines.append(textwrap.fill(text, 110, initial_indent=f"{name:<20}", subsequent_indent=" " * 20))
    return "\n".join(lines)


def pooled(fits: list[Fit]) -> Fit:
    """One fit whose draws are those of several independent ones, with equal shares."""
    if len(fits) == 1:
        return fits[0]
    draws = Posterior.concat([Posterior(fit.posterior.samples, kind=fit.posterior.kind) for fit in fits])
    return replace(fits[0], posterior=draws, evidence=None, details={"modes": len(fits)})
