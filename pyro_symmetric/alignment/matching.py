r"""Bring one posterior, or one network, as close as a symmetry allows to another.

.. math:: \min_{g \in G} W_2^2(g_\# q_1, q_0) = \|m_0 - g \cdot m_1\|^2 + \|s_0 - |g| \cdot s_1\|^2

for mean-field Gaussians with means :math:`m` and standard deviations :math:`s` (Rossi et al. 2023, arXiv 2310.10171,
section 4); for plain networks, :math:`s = 0`, it is weight matching (Ainsworth et al. 2023, arXiv 2209.04836). The
group is whatever ``find_symmetry`` or ``declare`` gives: permutations (nested ones, too), signs, positive scalings, the
shift of a softmax; no architecture is special. Over several coupled layers the problem is NP-hard: what comes back is a
local optimum, the best of several starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.alignment.costs.activation import ActivationCost
from pyro_symmetric.alignment.costs.cost import COSTS, EXPECTED, Cost
from pyro_symmetric.alignment.descent.given_scores import ScoreFunction, align_by_scores
from pyro_symmetric.alignment.descent.search import BAR_DELAY, Outcome, Search, chunks_of
from pyro_symmetric.alignment.gaussian import GaussianWeights, gaussian_of
from pyro_symmetric.alignment.moments import moments_of, varies
from pyro_symmetric.alignment.parts.problem import AnyGroup, Element, Problem, problem_of
from pyro_symmetric.alignment.parts.state import element_of
from pyro_symmetric.symmetry.permutation import Permutation
from pyro_symmetric.symmetry.weights import Weights

# How many restarts by default, and up to how many units in a factor. In a network with three hidden layers of 512 they
# lower the cost by 0.0007 of it, in five times the time.
RESTARTS, NARROW = 3, 256


@dataclass(frozen=True)
class Alignment:
    """What :func:`align` found.

    Of a batch of sources, ``cost``, ``initial_cost`` and ``converged`` are tensors of the batch's shape, ``history`` is
    a tuple of histories, source by source, and ``start_costs`` is a tuple of tensors.

    :param element: the element ``g`` for which ``g(source)`` is close to the reference; on the source's device. Of the
        kind that the group's own ``sample`` gives.
    :param cost: the cost that it attains, over all sites that the group knows, moved or not.
    :param initial_cost: the cost of the source as it came.
    :param history: the cost at the start of the best descent and after each of its accepted steps; it never rises.
    :param converged: whether that descent ended because nothing could improve, rather than by ``max_sweeps``.
    :param start_costs: the cost at the end of every descent: forward start first, then the restarts (and last a descent
        from the identity, made if all others ended above the initial cost).
    """

    element: Element
    cost: Any
    initial_cost: Any
    history: tuple[Any, ...]
    converged: Any
    start_costs: tuple[Any, ...]

    @property
    def permutation(self) -> Permutation:
        """The element, if it is a permutation and nothing else.

        :raises ValueError: if the group has other parts.
        """
        steps = [step for step in getattr(self.element, "steps", (self.element,)) if _acts(step)]
        if isinstance(self.element, Permutation):
            return self.element
        if len(steps) == 1 and isinstance(steps[0], Permutation):
            return steps[0]
        kinds = " and ".join(type(step).__name__ for step in steps)
        raise ValueError(f"the element consists of {kinds}: use .element, or align over the group's permutations alone")

    def __repr__(self) -> str:
        count = len(self.start_costs)
        tried = "one descent" if count == 1 else f"best of {count} descents"
        if isinstance(self.cost, Tensor):
            return (
                f"Alignment({self.cost.numel()} sources, mean cost {float(self.initial_cost.mean()):.6g} -> "
                f"{float(self.cost.mean()):.6g}, {tried}, {int(self.converged.sum())} converged, {self.element})"
            )
        ended = "converged" if self.converged else "cut short"
        return f"Alignment(cost {self.initial_cost:.6g} -> {self.cost:.6g}, {tried}, {ended}, {self.element})"


@torch.no_grad()
def align(
    source: Any,
    reference: Any,
    group: AnyGroup,
    cost: str | ScoreFunction = "wasserstein",
    *,
    draws: Literal["moments", "mean"] = "moments",
    net: torch.nn.Module | None = None,
    inputs: Any = None,
    restarts: int | None = None,
    max_sweeps: int = 100,
    tolerance: float = 1e-7,
    progress: bool = True,
) -> Alignment:
    """Find the element of ``group`` that brings ``source`` closest to ``reference``.

    >>> group = PermutationGroup.declare({"w": ("hidden", None)}, {"w": torch.zeros(3, 2)})
    >>> reference = {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])}
    >>> result = align({"w": reference["w"][[2, 0, 1]]}, reference, group)
    >>> result.cost, result.permutation["hidden"].tolist()
    (0.0, [1, 2, 0])

    *Scales.* A scale is chosen with the match, to minimise the cost. Where nothing but running statistics makes up for
    it (in front of batch normalisation) the source's rows shrink to their projections on the reference's.

    :param source: weights (site -> tensor; with leading batch dimensions, several sources at once), a network (its
        parameters and running statistics), a ``Posterior`` of draws, :class:`GaussianWeights`, or a Gaussian guide (see
        :func:`~pyro_symmetric.alignment.gaussian.to_gaussian`). Of a guide with correlations the marginal moments are
        aligned: the sum of marginal distances is a lower bound of the distance between correlated Gaussians, which
        isn't linear in a permutation, and equals it where correlations agree.
    :param reference: likewise, but one set; moved to the source's device.
    :param group: the symmetry, all of whose parts are decided over. Buffers (running statistics) and sites that it
        doesn't know are not looked at.
    :param cost: ``"wasserstein"`` (squared 2-Wasserstein distance of mean-field Gaussians), ``"l2"`` (squared distance
        of the means), ``"kl"`` (``KL(g#source || reference)``; see :mod:`pyro_symmetric.alignment.costs.cost`),
        ``"activation"`` (correlation of hidden activations, see :class:`~pyro_symmetric.alignment.ActivationCost`; with
        ``net`` and ``inputs``), or a function ``(source, reference, permutations) -> {factor: (n, n) scores}`` of one
        set of weights each: how well each unit of the reference (rows) goes with each of the source, more is better.
    :param draws: of a ``Posterior``, ``"moments"`` compares means and deviations over its draws; ``"mean"`` minimises
        the mean squared distance between draws of both, under ``"l2"`` and ``"wasserstein"`` alike.
    :param net: for ``"activation"``, the network.
    :param inputs: for ``"activation"``, what its forward takes: a tensor, or a tuple.
    :param restarts: further descents, each from the best matching so far with some units of one layer shuffled, drawn
        from PyTorch's generator. The best is kept. A group whose factors share no site is solved exactly without any.
        ``None``: three, or none where a factor has more than 256 units: in wide networks they take most of the time,
        and gain less than a thousandth of the cost.
    :param max_sweeps: how often one descent goes through what waits at most.
    :param tolerance: a step is accepted if it lowers the cost by more than this part of the initial cost.
    :param progress: whether to show a progress bar over the descents, if they take more than two seconds.
    :raises ValueError: naming the site, if the two don't fit each other or the group, or hold NaN or infinite values.
    :raises TypeError: if there are no Gaussian moments to read.
    """
    terms = _checked_cost(cost, draws, net, inputs)
    problem = problem_of(group)
    if restarts is None:
        restarts = RESTARTS if max(problem.parts.permutations.factors.values(), default=0) <= NARROW else 0
    arguments.whole("restarts", restarts, 0)
    arguments.whole("max_sweeps", max_sweeps, 1)
    arguments.number("tolerance", tolerance, least=0)
    first, second = gaussian_of(reference, "reference"), gaussian_of(source, "source")
    if draws == "mean" and varies(second, first, problem):
        terms = EXPECTED
    moments, moved, shape = moments_of(second, first, problem, terms)
    if not isinstance(cost, str) or cost == "activation":
        function = _activation(net, inputs) if isinstance(cost, str) else cost
        weights = _constrained(first)[0], _constrained(second, shape)
        return _result(
            problem, [align_by_scores(function, weights, (moments, moved), problem, max_sweeps, tolerance)], shape
        )
    chunks = chunks_of(problem, moved)
    search = Search(problem, terms, restarts, max_sweeps, tolerance)
    with tqdm(total=len(chunks) * (1 + restarts), desc="align", disable=not progress, delay=BAR_DELAY) as bar:
        outcomes = [
            search(moments, {site: v[rows] for site, v in moved.items()}, lambda: bar.update(1)) for rows in chunks
        ]
    return _result(problem, outcomes, shape)


# small steps --------------------------------------------------------------------------------------------------------


def _checked_cost(cost: str | ScoreFunction, draws: str, net: torch.nn.Module | None, inputs: Any) -> Cost:
    if draws not in ("moments", "mean"):
        raise ValueError(f"draws is {draws!r}; it must be 'moments' or 'mean'")
    if draws == "mean" and (callable(cost) or cost == "activation"):
        raise ValueError(
            "draws is 'mean', but these scores are of one set of weights each, at the means; cost must be 'l2'"
        )
    if callable(cost):
        return COSTS["l2"]
    if cost == "activation":
        for name, given in (("net", net), ("inputs", inputs)):
            if given is None:
                raise ValueError(f"cost is 'activation', which needs {name}: the network, and what its forward takes")
        return COSTS["l2"]
    if cost not in COSTS:
        raise ValueError(f"cost is {cost!r}; it must be one of {[*COSTS, 'activation']} or a function of weights")
    if draws == "mean" and cost == "kl":
        raise ValueError("draws is 'mean', but draws have no divergence from each other; cost must be 'l2'")
    return COSTS[cost]


def _activation(net: Any, inputs: Any) -> ScoreFunction:
    return ActivationCost(net, *(inputs if isinstance(inputs, tuple) else (inputs,)))


def _constrained(gaussian: GaussianWeights, shape: tuple[int, ...] = ()) -> list[Weights]:
    """The weights at the means, one set after the other."""
    weights = {}
    for site, loc in gaussian.loc.items():
        bijection = gaussian.bijection(site)
        value = loc if bijection is None else bijection(loc)
        weights[site] = value.reshape(-1, *value.shape[len(shape) :])
    count = len(next(iter(weights.values())))
    return [{site: value[k] for site, value in weights.items()} for k in range(count)]


def _result(problem: Problem, outcomes: list[Outcome], shape: torch.Size) -> Alignment:
    states = [outcome.descent.state for outcome in outcomes]
    joined = states[0].joined(states[1:])
    shifts = {site: torch.cat([o.shifts[site] for o in outcomes]) for site in outcomes[0].shifts}
    element = element_of(problem, joined, shifts, shape)
    cost = torch.cat([o.descent.cost for o in outcomes])
    initial = torch.cat([o.initial for o in outcomes])
    converged = torch.cat([o.descent.converged for o in outcomes])
    histories = tuple(history for o in outcomes for history in o.descent.histories())
    count = max(len(o.starts) for o in outcomes)
    starts = [torch.cat([o.starts[min(k, len(o.starts) - 1)] for o in outcomes]) for k in range(count)]
    if not shape:
        return Alignment(
            element, float(cost), float(initial), histories[0], bool(converged), tuple(float(s) for s in starts)
        )
    return Alignment(
        element,
        cost.reshape(shape),
        initial.reshape(shape),
        histories,
        converged.reshape(shape),
        tuple(start.reshape(shape) for start in starts),
    )


def _acts(step: Any) -> bool:
    return bool(getattr(step.group, "factors", ()) or getattr(step.group, "sites", ()))
