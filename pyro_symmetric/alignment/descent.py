r"""Coordinate descent over a product of symmetric groups, one linear assignment problem per factor.

The objective is a constant minus the inner product of the reference's features :math:`A` with the permuted features
:math:`p \cdot B` of the source. With all factors but one held, it is linear in the permutation matrix of that one:

.. math:: \max_{\pi \in S_n} \sum_i S_{i \pi(i)}, \qquad S_{ij} = \langle A_i, (p_{\text{others}} \cdot B)_j \rangle

summed over every axis on which the factor lies. Where a factor lies on two axes of one site (a recurrent matrix, tied
streams) the objective is quadratic in it and :math:`S` its linearisation at the current permutation; the step is
shortened until the true objective falls.

Two habits make this fast and good (compare Ainsworth et al. 2023, arXiv 2209.04836, Algorithm 1, which starts at the
identity and visits every factor in every sweep): the *forward start* solves each factor from those terms alone whose
other permutations are already fixed, so that nothing is matched against units that lie in no meaningful order yet; the
*work-list* then re-solves only those factors whose neighbours have changed, from cached blocks of :math:`S`. Further
descents start from a *kick* of the best matching so far (iterated local search).

The factors of the group must not be nested: two factors may share an axis only at different positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_symmetric.alignment.costs import Cost
from pyro_symmetric.symmetry.permutation import Axis, Permutation, PermutationGroup

Images = dict[str, Tensor]

# How many units a kick shuffles. On random networks of widths 16 to 256, shares of 0.2 and 0.3 ended lowest among
# 0.1 to 1; in tiny layers, six units (that is, all) reached the enumerated optimum more often than two to four.
KICKED_UNITS = 6
KICKED_SHARE = 0.25
# How often at most to shorten the step of a factor that is coupled with itself; a third time was never needed.
SHORTER_STEPS = 3


@dataclass(frozen=True)
class Descent:
    """Where a descent ended.

    :param images: factor -> its permutation, LongTensor ``(n,)``.
    :param history: the cost at the start and after each accepted step.
    :param converged: whether no factor was left that could still improve.
    """

    images: Images
    history: tuple[float, ...]
    converged: bool

    @property
    def cost(self) -> float:
        return self.history[-1]


@dataclass(frozen=True, eq=False)
class _Term:
    """One axis of a factor, and its share of the factor's scores."""

    axis: Axis
    reference: Tensor  # (n, everything else): the reference's features, unit by unit
    depends: tuple[str, ...]  # the factors that move the site's other axes
    plain: bool  # whether unit i simply is position i


class Matcher:
    """The matching of one source to one reference.

    :param group: the group; its factors must not be nested.
    :param reference: site -> moments, ``site_shape + (channels,)``.
    :param source: site -> moments, likewise.
    :param cost: which cost to minimise.
    """

    def __init__(
        self, group: PermutationGroup, reference: Mapping[str, Tensor], source: Mapping[str, Tensor], cost: Cost
    ):
        self.group = group
        self._cost = cost
        self._reference = {site: _viewed(value, site, group) for site, value in reference.items()}
        self._source = {site: _viewed(value, site, group) for site, value in source.items()}
        self._features = {site: cost.source_features(value) for site, value in self._source.items()}
        features = {site: cost.reference_features(value) for site, value in self._reference.items()}
        self._moved_dims = {site: tuple(group.members(site)) for site in reference}
        self._check_not_nested()
        self._terms = {
            name: [self._term(axis, features[axis.site]) for axis in group.axes(name) if axis.site in features]
            for name in group.factors
        }
        self._blocks: dict[tuple[str, int], tuple[tuple[Tensor, ...], Tensor]] = {}
        # Dicts as ordered sets: a seed must reproduce the order of visits.
        self._coupled: dict[str, dict[str, None]] = {name: {} for name in group.factors}
        for name, terms in self._terms.items():
            for term in terms:
                for other in term.depends:
                    self._coupled[other][name] = None

    @property
    def separable(self) -> bool:
        """Whether no factor shares a site with another or itself: then one assignment each is the exact optimum."""
        return not any(self._coupled.values())

    def costs(self, images: Images, sites: Sequence[str] | None = None) -> dict[str, float]:
        """Cost of each site, summed in float64."""
        element = Permutation(self.group, images)
        return {
            site: float(
                self._cost.distance(
                    self._reference[site], self._permuted(self._source[site], site, self._moved_dims[site], element)
                ).sum(dtype=torch.float64)
            )
            for site in dict.fromkeys(self._reference if sites is None else sites)
        }

    def forward_start(self) -> tuple[Images, list[str]]:
        """Fix one factor after the other, each from the terms whose other permutations are fixed already.

        Next comes the factor of which the largest part is known, so a chain of layers is walked from its wide end.

        :returns: the permutations, and the factors for which some term could not be used yet.
        """
        images = dict(self.group.identity(device=self.device).images)
        waiting, unsettled = list(images), []
        fixed: set[str] = set()
        while waiting:
            name = max(waiting, key=lambda name: self._known_share(name, fixed))  # the first of several
            usable = [k for k, term in enumerate(self._terms[name]) if fixed.issuperset(term.depends)]
            if usable:
                images[name] = _assign(self._score(name, images, usable))
            if len(usable) < len(self._terms[name]):
                unsettled.append(name)
            waiting.remove(name)
            fixed.add(name)
        return images, unsettled

    def kicked_start(self, images: Images) -> tuple[Images, list[str]]:
        """Shuffle some units of one random coupled factor: a start near a good matching, in another basin.

        Starts that are random altogether hardly ever beat the forward start in wide networks; small kicks mostly do.

        :returns: the permutations, and the factors to look at: the kicked one after its neighbours, in random order.
        """
        names = [name for name, others in self._coupled.items() if others]
        name = names[int(torch.randint(len(names), ()))]
        n = len(images[name])
        units = torch.randperm(n)[: max(KICKED_UNITS, int(KICKED_SHARE * n))]
        kicked = images[name].clone()
        kicked[units] = images[name][units[torch.randperm(len(units))]]
        neighbours = [other for other in self._coupled[name] if other != name]
        return images | {name: kicked}, [*(neighbours[i] for i in torch.randperm(len(neighbours))), name]

    def descend(self, images: Images, unsettled: Sequence[str], *, max_sweeps: int, threshold: float) -> Descent:
        """Re-solve factors until none improves the cost by more than ``threshold``.

        :param unsettled: the factors to look at first; others follow when a neighbour of theirs changes.
        :param max_sweeps: how often at most to go through the factors that wait.
        """
        images = dict(images)
        costs = self.costs(images)
        history = [sum(costs.values())]
        waiting = dict.fromkeys(unsettled)
        for _ in range(max_sweeps):
            for name in list(waiting):
                del waiting[name]
                for proposal in self._proposals(name, images):
                    proposed = costs | self.costs(proposal, [term.axis.site for term in self._terms[name]])
                    total = sum(proposed.values())
                    if history[-1] - total > threshold:
                        images, costs = proposal, proposed
                        history.append(total)
                        waiting |= self._coupled[name]
                        break
            if not waiting:
                break
        return Descent(images, tuple(history), converged=not waiting)

    # small steps ----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        return next((value.device for value in self._source.values()), None)

    def _proposals(self, name: str, images: Images) -> Iterator[Images]:
        """The best permutation of one factor given the others, if it is another than now.

        Of a factor that is coupled with itself, that is a guess by linearisation. Shorter steps follow, by a growing
        bonus for units that stay. It adds a constant to the (maximised) objective and makes it convex in the end; a
        convex objective lies nowhere below its linearisation, so that the step can't fail.
        """
        score = self._score(name, images)
        stay = torch.arange(len(score), device=score.device), images[name]
        bonus = score.std(correction=0) if name in self._coupled[name] else None
        for step in range(1 if bonus is None else 1 + SHORTER_STEPS):
            found = _assign(score)
            if torch.equal(found, images[name]):
                return
            yield images | {name: found}
            if bonus is not None:
                score[stay] += 2**step * bonus

    def _check_not_nested(self) -> None:
        for site, dims in self._moved_dims.items():
            for dim in dims:
                positions = torch.cat([axis.index.reshape(-1) for _, axis in self.group.members(site)[dim]])
                if positions.unique().numel() != positions.numel():
                    names = [name for name, _ in self.group.members(site)[dim]]
                    raise ValueError(
                        f"the factors {names} move the same positions of axis {dim} of {site!r}; alignment is not "
                        "supported over nested factors, nor over the inputs and outputs of a grouped convolution"
                    )

    def _term(self, axis: Axis, reference: Tensor) -> _Term:
        length = reference.shape[axis.dim]
        plain = axis.index.shape == (1, length) and torch.equal(axis.index[0].cpu(), torch.arange(length))
        depends = dict.fromkeys(
            name for dim, members in self.group.members(axis.site).items() if dim != axis.dim for name, _ in members
        )
        return _Term(axis, _units(reference, axis, plain), tuple(depends), plain)

    def _known_share(self, name: str, fixed: set[str]) -> float:
        """Which part of a factor's weights lies in terms whose other permutations are fixed."""
        sizes = [(term.reference.numel(), fixed.issuperset(term.depends)) for term in self._terms[name]]
        return sum(size for size, known in sizes if known) / max(1, sum(size for size, _ in sizes))

    def _score(self, name: str, images: Images, terms: Sequence[int] | None = None) -> Tensor:
        """Inner products ``(n, n)`` of the reference's units with the source's, given the other permutations."""
        n = self.group.factors[name]
        score = torch.zeros(n, n, dtype=torch.float64, device=self.device)
        for k in range(len(self._terms[name])) if terms is None else terms:
            score += self._block(name, k, images)
        return score

    def _block(self, name: str, k: int, images: Images) -> Tensor:
        """One term's share of the scores, kept until one of the permutations that it depends on is another."""
        term = self._terms[name][k]
        depends = tuple(images[other] for other in term.depends)
        known, block = self._blocks.get((name, k), (None, None))
        if known is None or block is None or any(old is not new for old, new in zip(known, depends, strict=True)):
            site = term.axis.site
            others = [dim for dim in self._moved_dims[site] if dim != term.axis.dim]
            moved = self._permuted(self._features[site], site, others, Permutation(self.group, images))
            block = term.reference @ _units(moved, term.axis, term.plain).T
            self._blocks[name, k] = depends, block
        return block

    def _permuted(self, value: Tensor, site: str, dims: Sequence[int], element: Permutation) -> Tensor:
        for dim in dims:
            value = value.index_select(dim, element.axis_index(site, dim))
        return value


def _viewed(value: Tensor, site: str, group: PermutationGroup) -> Tensor:
    """``site_shape + (channels,)`` with the axes flattened that some factor's axis spans."""
    return group.view(site, value.movedim(-1, 0)).movedim(0, -1)


def _units(value: Tensor, axis: Axis, plain: bool) -> Tensor:
    """``site_shape + (channels,)`` -> ``(n, everything else)`` along one axis."""
    if plain:
        return value.movedim(axis.dim, 0).flatten(1)
    blocks, n = axis.index.shape
    selected = value.index_select(axis.dim, axis.index.reshape(-1).to(value.device))
    return selected.unflatten(axis.dim, (blocks, n)).movedim(axis.dim + 1, 0).reshape(n, -1)


def _assign(score: Tensor) -> Tensor:
    """The permutation with the largest sum of scores: unit ``i`` of the reference receives unit ``p[i]``.

    What is common to a row or a column changes no choice, but costs SciPy's solver time: up to ten times at width 2048,
    where all features are positive, as deviations are. So it is taken off first.
    """
    cost = score.mean(0, keepdim=True) - score
    cost -= cost.amin(1, keepdim=True)
    cost -= cost.amin(0, keepdim=True)
    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(columns, device=score.device)
