"""The methods of a study, and their registry. To add one, write a small class, whose docstring describes it in reports:

>>> @register
... @dataclass(frozen=True)
... class Prior(Method):
...     "Draws from the prior."
...
...     draws: int = 400  # a part of the budget: --budget prior.draws=100
...     name = "prior"
...
...     def fit(self, problem, progress):
...         weights = {site: prior.sample((self.draws,)) for site, prior in problem.model.priors().items()}
...         yield Fit(self.name, Posterior.from_samples(weights, kind="independent"))

A method of several independent runs says how many by the field that ``counted`` names: ``modes``, or ``chains``. Those
that know it by ``many`` can be asked for as ``single-<name>`` (one run) and ``multi-<name>`` (``many`` runs), too.
"""

from __future__ import annotations

import inspect
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pyro_symmetric.calls import did_you_mean
from pyro_symmetric.posterior.draws import beside
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.study.settings import StudySettings

PREFIXES = ("single-", "multi-")


@dataclass(frozen=True)
class Fit:
    """A method's answer to a problem: draws of the weights, and what else it can tell.

    :param label: the row of the report.
    :param posterior: the draws; chains where the method has chains, else independent draws.
    :param losses: a curve to look at, one number a step.
    :param loss_label: what that number is.
    :param evidence: ELBO and symmetrised ELBO, for variational methods.
    :param barrier: a loss barrier curve, for methods that measure one.
    :param details: further numbers, by name.
    """

    label: str
    posterior: Posterior
    losses: list[float] = field(default_factory=list)
    loss_label: str = ""
    evidence: dict[str, Any] | None = None
    barrier: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        """Seconds that the draws took, where that was noted as they were made."""
        noted = self.posterior.metadata.get("seconds", 0.0)
        return float(sum(noted.values()) if isinstance(noted, Mapping) else noted)

    @property
    def is_chain(self) -> bool:
        """True if draws are successive states of Markov chains, so that R-hat and ESS mean something."""
        return self.posterior.kind == "chains"


@dataclass(frozen=True)
class Method(ABC):
    """One way of approximating the posterior.

    Subclasses are dataclasses whose fields are the method's budget; ``quick_budget`` replaces some of them under
    ``--quick``. ``fit`` may draw from the global generators and use Pyro's parameter store: the study lends it some of
    its own, which no other thread has meanwhile. A method that takes all random numbers from ``problem.seed`` says
    ``draws_globally = False``. ``packages`` names what it needs beyond the library: module -> the package.

    :param prefix: ``"single-"`` or ``"multi-"`` where it was asked for in that form.
    """

    prefix: str = ""

    name: ClassVar[str]
    labels: ClassVar[tuple[str, ...]] = ()
    quick_budget: ClassVar[Mapping[str, Any]] = {}
    many: ClassVar[int | None] = None
    quick_many: ClassVar[int] = 2
    counted: ClassVar[str] = "modes"
    draws_globally: ClassVar[bool] = True
    packages: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        """Fit, and yield one :class:`Fit` for each of ``labels`` (by default the name), in that order."""

    def too_large(self, problem: Problem) -> str:
        """The sentence why this problem is too large for the method, which is left out then; empty if it isn't."""
        return ""

    def num_draws(self, settings: StudySettings) -> int:
        """The draws that it gives at most; a reference needs some."""
        return settings.draws

    @property
    def title(self) -> str:
        """The name under which it was asked for."""
        return self.prefix + self.name

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows of the report that it makes."""
        return tuple(self.prefix + label for label in self.labels or (self.name,))

    @property
    def description(self) -> str:
        """The sentences that describe it in the report."""
        if self.prefix == "multi-":
            return f"{about(type(self))} {getattr(self, self.counted)} independent runs, in equal shares."
        return about(type(self)) + (f" One {self.counted.removesuffix('s')} only." if self.prefix else "")

    @property
    def budget(self) -> dict[str, Any]:
        """Its settings, as JSON."""
        return dict(vars(self))


METHODS: dict[str, type[Method]] = {}


def register(cls: type[Method]) -> type[Method]:
    """Make a method known by its name.

    :raises ValueError: if another method has its name.
    """
    if METHODS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"there is a method {cls.name!r} already; give {cls.__qualname__} another name")
    return cls


def make_method(name: str, quick: bool = False, budget: Mapping[str, Any] | None = None) -> Method:
    """The method of that name, ``single-`` and ``multi-`` included, with its default, or its quick, budget.

    :param budget: overrides of parts of the budget.
    :raises ValueError: if there is none, or a part of the budget isn't known or has another type.
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    kind = METHODS.get(name.removeprefix(prefix))
    if kind is None or (prefix and kind.many is None):
        every = [*METHODS, *(prefix + one for prefix in PREFIXES for one in METHODS if METHODS[one].many)]
        raise ValueError(f"there is no method {name!r}; known are {', '.join(every)}{did_you_mean(name, every)}")
    method = kind(**kind.quick_budget if quick else {})
    known = {part: value for part, value in method.budget.items() if part != "prefix"}
    if prefix:
        runs = 1 if prefix == "single-" else kind.quick_many if quick else kind.many
        method = replace(method, prefix=prefix, **{kind.counted: runs})
    for part, value in (budget or {}).items():
        if part not in known:
            hint = did_you_mean(part, known)
            raise ValueError(f"the budget of {name} has no {part!r}; it has {', '.join(known)}{hint}")
        kinds = (int, float) if isinstance(known[part], float) else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            raise ValueError(f"{part} of {name} is {value!r}; it must be a positive number like {known[part]!r}")
    return replace(method, **(budget or {}))


def about(kind: type[Method]) -> str:
    """The first paragraph of a method's docstring."""
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")


def list_methods() -> str:
    """All methods and what they are, for a person to read."""
    forms = {name: f" Also as single-{name} and multi-{name}." for name, kind in METHODS.items() if kind.many}
    return _listed({name: about(kind) + forms.get(name, "") for name, kind in METHODS.items()})


def list_budgets(quick: bool = False) -> str:
    """The budget of every method, for a person to read: each part with its default."""
    budgets = {name: make_method(name, quick).budget for name in METHODS}
    return _listed({n: ", ".join(f"{k}={v}" for k, v in own.items() if k != "prefix") for n, own in budgets.items()})


def _listed(entries: Mapping[str, str]) -> str:
    return "\n".join(
        textwrap.fill(text or "none", 110, initial_indent=f"{name:<20}", subsequent_indent=" " * 20)
        for name, text in entries.items()
    )


def pooled(fits: list[Fit]) -> Fit:
    """One fit whose draws are those of several independent ones, with equal shares."""
    if len(fits) == 1:
        return fits[0]
    draws = Posterior(beside([fit.posterior.samples for fit in fits]), kind=fits[0].posterior.kind)
    return replace(fits[0], posterior=draws, evidence=None, details={"modes": len(fits)})
