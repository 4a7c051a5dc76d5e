"""The distances that a study reports: one protocol, and a register that third parties add to.

A distance takes two sets of draws (or of predictions) and returns a
:class:`~pyro_symmetric.compare.results.DistanceResult`. One that is registered (:func:`register_distance`) appears in
the report of every study. With no import at all it is by an entry point of the package that it comes in:

.. code-block:: toml

    [project.entry-points."pyro_symmetric.distances"]
    energy = "my_package.distances:ENERGY"
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, get_args

from pyro_symmetric import arguments
from pyro_symmetric.compare.frames import AnySymmetry, FrameKind
from pyro_symmetric.compare.layers import PairedSamples
from pyro_symmetric.compare.mmd import mmd
from pyro_symmetric.compare.predictive_distance import total_variation
from pyro_symmetric.compare.results import DistanceResult
from pyro_symmetric.compare.wasserstein import marginal_wasserstein

ENTRY_POINTS = "pyro_symmetric.distances"

Between = Literal["weights", "predictions"]


@dataclass(frozen=True)
class Shown:
    """A column of the report.

    >>> column = ps.Shown("gap", "means", "The largest distance between the means of one weight.", form=".2f")
    >>> format(0.12345, column.form)
    '0.12'

    :param total: which of the result's totals it shows.
    :param title: its heading.
    :param meaning: what the number says, in a sentence.
    :param form: how it is printed, as :func:`format` takes it.
    """

    total: str
    title: str
    meaning: str
    form: str = ".4f"

    def __post_init__(self) -> None:
        for name in ("total", "title", "meaning", "form"):
            arguments.instance(name, getattr(self, name), str, "a text")
        try:
            format(1.0, self.form)
        except ValueError as error:
            raise ValueError(f"form is {self.form!r}; it must be a format of numbers, such as '.4f'") from error


@dataclass(frozen=True)
class Distance:
    """A way to say how far two approximations of a posterior are apart; smaller is closer.

    >>> def largest_gap(p, q, like=None):
    ...     gap = float((p["w"].mean(0) - q["w"].mean(0)).abs().max())
    ...     return ps.DistanceResult(title="Gap", num_samples=(len(p["w"]), len(q["w"])), totals={"gap": gap})
    >>> distance = ps.Distance("largest gap", largest_gap)
    >>> distance({"w": torch.zeros(10, 3)}, {"w": torch.ones(20, 3)}).value
    1.0

    :param name: what it is called in results; no other distance may have that name.
    :param function: ``function(p, q, like)`` returns a :class:`~pyro_symmetric.compare.results.DistanceResult`.
        ``like`` is ``None``, or an earlier result of the same distance whose choices (kernels) are to be used again, so
        that several comparisons can be compared.
    :param between: what ``p`` and ``q`` are: ``"weights"``, site -> samples ``(S,) + site_shape``; or
        ``"predictions"``, as :func:`~pyro_symmetric.compare.total_variation` takes them.
    :param shows: the columns of the report. Of weights the first is shown twice, of the draws as they come and with
        symmetries removed, the others with symmetries removed only.
    """

    name: str
    function: Callable[[Any, Any, DistanceResult | None], DistanceResult]
    between: Between = "weights"
    shows: tuple[Shown, ...] = ()

    def __post_init__(self) -> None:
        arguments.instance("name", self.name, str, "a name")
        arguments.function("function", self.function, "a function of two sets of draws and an earlier result")
        arguments.one_of("between", self.between, get_args(Between))
        object.__setattr__(self, "shows", tuple(arguments.listed("shows", self.shows, Shown, "columns (Shown)")))

    def __call__(
        self,
        p: Any,
        q: Any,
        like: DistanceResult | None = None,
        *,
        symmetry: AnySymmetry | None = None,
        frame: FrameKind = "aligned",
    ) -> DistanceResult:
        """The distance between two sets of draws.

        >>> group = Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
        >>> distance(p, q, symmetry=group)  # of any distance between weights, in a frame common to both

        :param symmetry: of weights, remove it first, as :func:`~pyro_symmetric.compare.mmd` does; the function is given
            samples ``(S,) + site_shape`` of both sides in one frame, chains end to end.
        :param frame: ``"aligned"`` or ``"canonical"``, see there.
        :raises TypeError: if the function returns anything else than a result.
        :raises ValueError: if a symmetry of weights is to be removed from predictions.
        """
        arguments.one_of("frame", frame, get_args(FrameKind))
        if symmetry is not None:
            if self.between != "weights":
                raise ValueError(f"symmetry must be None: distance {self.name!r} is one between {self.between}")
            p, q = PairedSamples(p, q, symmetry=symmetry, frame=frame).weights
        found = self.function(p, q, like)
        return arguments.instance(f"what distance {self.name!r} returned", found, DistanceResult, "a DistanceResult")


_REGISTERED: dict[str, Distance] = {}


def register_distance(distance: Distance) -> Distance:
    """Let a distance appear in the reports of studies.

    >>> def between_means(p, q, like=None):
    ...     gap = max(float((p[site].mean(0) - q[site].mean(0)).abs().max()) for site in p)
    ...     sizes = tuple(len(next(iter(side.values()))) for side in (p, q))
    ...     return ps.DistanceResult(title="Between means", num_samples=sizes, totals={"gap": gap})
    >>> column = ps.Shown("gap", "means", "The largest distance between the means of one weight.")
    >>> distance = ps.register_distance(ps.Distance("between means", between_means, shows=(column,)))
    >>> distance({"w": torch.zeros(10, 3)}, {"w": torch.ones(20, 3)})
    Between means, 10 against 20 samples: gap 1

    :raises ValueError: if another distance has its name.
    """
    arguments.instance("distance", distance, Distance, "a Distance")
    if _REGISTERED.setdefault(distance.name, distance) != distance:
        raise ValueError(f"distance has the name {distance.name!r}, which another distance has; give it its own")
    return distance


def distances(between: Between | None = None) -> list[Distance]:
    """All registered distances, those of entry points last; by default of weights and of predictions.

    An entry point that can't be loaded, or isn't a :class:`Distance`, is warned of and left out.
    """
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            register_distance(entry.load())
        except Exception as error:  # whatever another package's module raises
            warnings.warn(f"the distance {entry.name!r} of {entry.value} can't be used: {error}", stacklevel=2)
    return [distance for distance in _REGISTERED.values() if between in (None, distance.between)]


TOTAL_VARIATION = register_distance(
    Distance(
        "total_variation",
        lambda p, q, like: total_variation(p, q),
        "predictions",
        (
            Shown(
                "mean",
                "TV predictions",
                "Total variation of the predictive distributions, averaged over test rows, 0 to 1: the most by which "
                "the two differ in the probability of any event. Symmetries don't matter here.",
            ),
        ),
    )
)

MMD = register_distance(
    Distance(
        "mmd",
        lambda p, q, like: mmd(p, q, bandwidths=like),
        shows=(
            Shown(
                "median",
                "MMD²",
                "Squared maximum mean discrepancy, unbiased (so it may fall under 0): median over ten Gaussian and ten "
                "Laplace kernels, averaged over layers by their number of weights.",
            ),
            Shown("maximum", "MMD² max", "The same by the kernel that tells the two apart best."),
        ),
    )
)

WASSERSTEIN = register_distance(
    Distance(
        "wasserstein",
        lambda p, q, like: marginal_wasserstein(p, q),
        shows=(
            Shown(
                "mean",
                "W₁",
                "One-dimensional Wasserstein distance of each weight's marginal, averaged over weights. Even between "
                "equal distributions it falls to zero only with the number of draws.",
            ),
        ),
    )
)
