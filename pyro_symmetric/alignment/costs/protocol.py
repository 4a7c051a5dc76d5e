r"""The questions that the descent asks of a cost: weights, activations and a user's own answer alike.

Let a batch of sources be brought to a reference by elements :math:`g` of a group. For one set of units, with all else
held where ``element`` has it, scores tell how well each unit of the reference goes with each unit of the source,

.. math:: S_{ij}, \qquad \text{so that the descent takes} \quad \max_\pi \sum_i S_{i \pi(i)},

and what a whole element costs. The descent never looks at weights. A cost of your own is a class derived from
:class:`MatchCost`; :class:`~pyro_symmetric.alignment.costs.table.TableCost` serves if no score depends on where other
units are. ``align`` takes a function of (weights of the sources, weights of the reference, group) that returns one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, device

from pyro_symmetric.alignment.exchanges import Quadratic
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.weights import Weights

# The part of the cost below which a step of all scales no longer counts.
SETTLED = 1e-10


@dataclass(frozen=True, eq=False)
class Matched:
    """The contribution of the units that are in place, with their best multipliers.

    :param score: of each unit of the reference, ``batch_shape + (count,)``.
    :param pulls: name of units that flip -> what speaks for the sign 1, minus what speaks for -1, for what is in the
        place of each unit of the reference, ``batch_shape + (count,)``.
    :param log_scales: likewise, name of units that scale -> their best log-scale.
    """

    score: Tensor
    pulls: Mapping[str, Tensor] = field(default_factory=dict)
    log_scales: Mapping[str, Tensor] = field(default_factory=dict)


class MatchCost(ABC):
    """The cost of matching a batch of sources with a reference.

    Elements come with batch shape ``(..., R)``, for the sources whose numbers are ``rows``, a LongTensor ``(R,)``.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> cost = ps.alignment.TableCost(group, {"unit": torch.eye(3)[None]})
    >>> isinstance(cost, ps.alignment.MatchCost), cost.batch
    (True, 1)

    :ivar group: the units. A set of one unit inside each unit of another, which multiplies and nothing else, rides
        along: :meth:`pairs` chooses its multipliers with those of the units themselves, see :meth:`riders`.
    :ivar batch: the number of sources.
    :ivar device: where elements live.
    :ivar parts: name of units -> the numbers of the parts of the cost that they enter.
    :ivar rescales: whether :meth:`rescaled` fits the scales of all units together. They are then fitted between sweeps,
        and steps that change scales alone aren't taken.
    """

    group: Group
    batch: int
    device: device | None
    parts: Mapping[str, Sequence[int]]
    rescales: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch} sources, units of {', '.join(self.parts) or 'none'})"

    @abstractmethod
    def pairs(self, name: str, element: Element, rows: Tensor, known: Collection[str]) -> Tensor:
        """Scores that tell how well units go together, at their best signs and scales.

        :param name: units that have no others inside them but riders.
        :param element: all else stays as it is here; of units that lie inside others, only what is in the same unit of
            these now is compared.
        :param known: names of the units whose places mean something already. What others have a part in is left out.
        :return: ``batch_shape + (copies, size, size)``: the units of the reference (rows), those of the source.
        """

    @abstractmethod
    def matched(self, name: str, element: Element, rows: Tensor, known: Collection[str]) -> Matched:
        """The contribution of the units in place, all inside them included, and their best multipliers."""

    @abstractmethod
    def costs(self, element: Element | None, rows: Tensor, parts: Sequence[int] | None = None) -> Tensor:
        """The cost in parts, float64 ``(R, number of parts)``, on the CPU; some of them, or all.

        :param element: None for the identity.
        """

    def rescaled(self, element: Element, rows: Tensor, settled: float = SETTLED) -> Element:
        """The element with the scales of all units at their best together; places and signs stay.

        It is asked of costs with :attr:`rescales`; of others, scales are those that :meth:`matched` chooses.

        :param settled: a step that lowers the cost by less than this part of it is the last.
        """
        raise NotImplementedError

    def share(self, name: str, known: Collection[str]) -> float:
        """The part of what :meth:`pairs` compares that it can use if these units are known: it says who comes next."""
        return 1.0

    def quadratic(self, name: str, element: Element, rows: Tensor, known: Collection[str]) -> Quadratic | None:
        """The objective of the places of units that are coupled with themselves, counted from where they are now.

        :param element: of batch shape ``(R,)``; signs and scales stay as they are here.
        :return: None if there is none, or too large a one: these units are then matched by :meth:`pairs` alone.
        """
        return None

    def riders(self, name: str) -> tuple[str, ...]:
        """The sets of one unit inside each of these whose multipliers are chosen with the match."""
        return ()

    def coupled(self, one: str, other: str) -> bool:
        """True if the scores of ``other`` change when ``one`` moves; with ``one == other``, if they are a
        linearisation only."""
        return False


CostFunction = Callable[[Weights, Weights, Group], MatchCost]
