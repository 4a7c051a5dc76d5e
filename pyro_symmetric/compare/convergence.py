r"""Have chains converged? Asked of the weights, of the weights without their symmetries, and of the function.

Chains in different copies of a mode give a raw R-hat far above 1 although they predict alike, so R-hat on raw weights
says nothing of a model with symmetries. Three looks together do: at the weights as drawn; at the weights brought to one
frame, each draw to the canonical form of its orbit (Laurent et al. 2024, arXiv 2310.08287), and all of them aligned to
each other; and at what no symmetry touches, predictions and the log-density. R-hat and effective sample sizes are those
of :mod:`pyro_symmetric.chain_statistics`.

A frame is a function of a draw's orbit and of all draws together, never of the chain that the draw belongs to. So if
the chains' orbits are distributed alike, they are so in every frame, and disagreement in any one is real. Agreement in
one alone proves little: a canonical form sorts units by a key, and if two units' keys overlap it mixes them, which
hides that chains are apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.calls import described
from pyro_symmetric.chain_statistics import (
    ChainStatistics,
    chain_statistics,
    evenly_spaced,
    missing_energy,
    never_changing,
    non_finite,
    standing_still,
)
from pyro_symmetric.compare._results import table
from pyro_symmetric.compare.frames import canonical_frame, one_frame
from pyro_symmetric.compare.verdict import verdict
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.placement import placed, promoted
from pyro_symmetric.predict import predict
from pyro_symmetric.samples import Posterior

FEW_ABOVE = 0.01  # of thousands of quantities some exceed any threshold by chance
MOST_ROWS = 256
DRAWS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class SpaceConvergence:
    """What the chains' draws of one kind say.

    :param by_site: site (or ``"predictions"``, ``"log density"``) -> R-hat and effective sample sizes of every entry.
    :param threshold: above this R-hat, chains disagree on an entry.
    :param non_finite: site -> how many draws of each chain hold a NaN or an infinite value, ``(chains,)``; only sites
        that have any.
    :param fixed: site -> how many entries have one and the same value in all draws of all chains, such as the zeros of
        a triangle. They are left out.
    :param stuck: site -> how many entries never change in any chain, but differ between chains.
    """

    by_site: dict[str, ChainStatistics]
    threshold: float
    non_finite: dict[str, Tensor] = field(default_factory=dict)
    fixed: dict[str, int] = field(default_factory=dict)
    stuck: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, draws: Mapping[str, Tensor], threshold: float) -> SpaceConvergence:
        """Of draws ``(chains, draws, ...)`` by site."""
        lost, fixed, stuck = {}, {}, {}
        for site, value in draws.items():
            lost[site] = non_finite(value)
            alike = never_changing(value)
            fixed[site], stuck[site] = int(alike.sum()), int((standing_still(value).all(0) & ~alike).sum())
        return cls(
            {site: chain_statistics(value) for site, value in draws.items()},
            threshold,
            {site: count for site, count in lost.items() if bool(count.any())},
            {site: count for site, count in fixed.items() if count},
            {site: count for site, count in stuck.items() if count},
        )

    def values(self, name: str) -> Tensor:
        """``"r_hat"``, ``"ess_bulk"`` or ``"ess_tail"`` of all entries that have one, ``(K,)``."""
        values = torch.cat([getattr(statistics, name).flatten() for statistics in self.by_site.values()])
        return values[~torch.isnan(values)]

    @property
    def share_above(self) -> float:
        """Share of the entries whose R-hat is above the threshold; NaN if none is known."""
        values = self.values("r_hat")
        return float((values > self.threshold).double().mean()) if len(values) else float("nan")

    @property
    def agrees(self) -> bool | None:
        """Whether the chains agree: on all entries but one in a hundred. ``None`` if it can't be told: of one chain, of
        values that aren't finite, or that never change."""
        share = self.share_above
        return None if share != share or self.non_finite else share <= FEW_ABOVE

    @property
    def worst(self) -> dict[str, float]:
        """Largest R-hat, smallest effective sample sizes, over the entries that have one."""
        result = {}
        for name in ("r_hat", "ess_bulk", "ess_tail"):
            values = self.values(name)
            result[name] = float(values.max() if name == "r_hat" else values.min()) if len(values) else float("nan")
        return result

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "agrees": self.agrees,
            "share_above": self.share_above,
            **self.worst,
            "non_finite": {site: count.tolist() for site, count in self.non_finite.items()},
            "fixed": dict(self.fixed),
            "stuck": dict(self.stuck),
            "by_site": {site: statistics.summary() for site, statistics in self.by_site.items()},
        }


@dataclass(frozen=True, eq=False)
class ConvergenceResult:
    """See :func:`convergence`.

    :param spaces: ``"weights"`` as drawn; ``"canonical"`` and ``"aligned"``, the weights in one frame, if a symmetry
        was given; ``"function"``, predictions and log-density, if known. Of weights that aren't finite, these alone.
    :param still: the chains of which no weight ever changes.
    :param settled: whether each chain's predictions move, and stay the same from its first to its second half; ``None``
        without predictions.
    :param divergent: share of the draws that diverged; ``None`` if the sampler doesn't say.
    :param energy_fraction: E-BFMI of each chain, ``(chains,)``, or ``None``.
    :param acceptance: mean acceptance rate of each chain, ``(chains,)``, or ``None``.
    :param step_size: mean step size of each chain, ``(chains,)``, or ``None``.
    """

    spaces: dict[str, SpaceConvergence]
    num_chains: int
    num_samples: int
    threshold: float
    still: tuple[int, ...]
    settled: bool | None
    divergent: float | None
    energy_fraction: Tensor | None
    acceptance: Tensor | None
    step_size: Tensor | None

    @property
    def verdict(self) -> str:
        """What it comes to, in a few sentences."""
        return verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        numbers = {name: None if v is None else v.tolist() for name, v in self._per_chain().items()}
        spaces = {name: space.to_dict() for name, space in self.spaces.items()}
        own = {"verdict": self.verdict, "still": list(self.still), "settled": self.settled, "divergent": self.divergent}
        return {**own, **numbers, **spaces}

    def plot(self) -> Any:
        """R-hat and bulk effective sample sizes of all entries, sorted: a curve for each space."""
        from pyro_symmetric.plots import chain_agreement  # which loads matplotlib

        spaces = {name: space for name, space in self.spaces.items() if len(space.values("ess_bulk"))}
        return chain_agreement(
            {name: space.values("r_hat").numpy() for name, space in spaces.items()},
            {name: space.values("ess_bulk").numpy() for name, space in spaces.items()},
            self.threshold,
        )

    def __repr__(self) -> str:
        head = ("space", "site", "entries", "R-hat worst", "median", f"above {self.threshold:g}")
        rows: list[tuple[str, ...]] = [(*head, "ESS bulk worst", "median", "ESS tail worst", "median")]
        for space, found in self.spaces.items():
            for site, statistics in found.by_site.items():
                s = statistics.summary()
                above = SpaceConvergence({site: statistics}, self.threshold).share_above
                r_hats = (f"{s['r_hat']:.3f}", f"{s['r_hat_median']:.3f}", _share_text(above))
                sizes = (f"{s[f'ess_{part}{kind}']:,.0f}" for part in ("bulk", "tail") for kind in ("", "_median"))
                rows.append((space, site, f"{statistics.r_hat.numel():,}", *r_hats, *sizes))
        chains = "1 chain" if self.num_chains == 1 else f"{self.num_chains} chains"
        lines = [f"Convergence of {chains} of {self.num_samples} draws: {self.verdict}"]
        lines.append(table(rows, left=(0, 1)))
        known = {name: value for name, value in self._per_chain().items() if value is not None}
        for name, value in known.items():
            lines.append(f"  {name.replace('_', ' ')} by chain: {float(value.min()):.3g} to {float(value.max()):.3g}")
        return "\n".join(lines)

    def _per_chain(self) -> dict[str, Tensor | None]:
        return {
            "energy_fraction": self.energy_fraction,
            "acceptance": self.acceptance,
            "step_size": self.step_size,
        }


@torch.no_grad()
def convergence(
    posterior: Posterior,
    symmetry: Symmetry | Group | None = None,
    *,
    aligned: Posterior | None = None,
    model: BayesianModel | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    predictions: Tensor | None = None,
    threshold: float = 1.05,
    **canonical: Any,
) -> ConvergenceResult:
    """Whether chains agree: on weights, on weights without their symmetries, on the function.

    >>> print(convergence(posterior, find_symmetry(net, x), model=model, x=x))

    Takes memory for a canonical and an aligned copy of all draws and for the predictions, and time to align them: some
    seconds for 4,000 draws of 50 units. ``posterior.thin(k)`` takes less.

    :param posterior: two chains or more, so that they can be compared.
    :param symmetry: what to remove, e.g. ``find_symmetry(net, x)``: by canonical form, and by alignment of all draws.
    :param aligned: the same draws, brought to one frame otherwise, to stand for the alignment that is done here. Each
        draw must have been moved by itself: an element for each chain (``each="chain"``) looks at the chain.
    :param model: the network's model; by default the one that the posterior was drawn from, with its data.
    :param x: inputs to predict at; of more than 256 rows, 256 evenly spaced ones.
    :param y: all targets of the data ``x``, to take the log-density from the model. Without them it is the sampler's
        own statistic ``lp`` (of a stochastic-gradient sampler a mini-batch's estimate).
    :param predictions: instead of ``model`` and ``x``: anything that is a function of the weights alone, ``(chains,
        draws, ...)``, such as ``predict(posterior.samples, any_model, x, kind="mean")``.
    :param threshold: R-hat above which chains disagree.
    :param canonical: options of :func:`~pyro_symmetric.canonical.forms.canonicalize`.
    :raises TypeError: if ``model`` is no ``BayesianModel``.
    :raises ValueError: if arguments don't fit.
    """
    arguments.instance("posterior", posterior, Posterior, "a Posterior")
    arguments.number("threshold", threshold, above=1, below=math.inf)
    if canonical and symmetry is None:
        raise TypeError(f"the options {list(canonical)} are those of canonicalize, but symmetry is None")
    if aligned is not None:
        arguments.instance("aligned", aligned, Posterior, "a Posterior, or None")
    for name, value in {"x": x, "y": y, "predictions": predictions}.items():
        if value is not None:
            arguments.tensor(name, value)
    _check_grouping(posterior, "aligned", aligned.samples if aligned is not None else {})
    _check_grouping(posterior, "predictions", {} if predictions is None else {"": predictions})
    spaces = {"weights": SpaceConvergence.of(posterior.samples, threshold)}
    if not spaces["weights"].non_finite:
        if predictions is None:
            model, x, y = _from_origin(posterior, model, x, y)
            predictions = None if model is None or x is None else _predictions(posterior, model, x)
        spaces |= _frames(posterior, symmetry, aligned, canonical, threshold)
        function = {"predictions": predictions, "log density": _log_density(posterior, model, x, y)}
        if known := {name: value for name, value in function.items() if value is not None}:
            spaces["function"] = SpaceConvergence.of(known, threshold)
    still = torch.stack(
        [standing_still(value).reshape(posterior.num_chains, -1).all(1) for value in posterior.samples.values()]
    ).all(0)
    return ConvergenceResult(
        spaces,
        posterior.num_chains,
        posterior.num_samples,
        threshold,
        tuple(still.nonzero().flatten().tolist()),
        None if predictions is None else _settled(predictions, threshold),
        _share(posterior, "diverging"),
        missing_energy(posterior.statistics["energy"]) if "energy" in posterior.statistics else None,
        _mean_by_chain(posterior, "acceptance_rate"),
        _mean_by_chain(posterior, "step_size"),
    )


# small steps --------------------------------------------------------------------------------------------------------


def _frames(
    posterior: Posterior,
    symmetry: Symmetry | Group | None,
    aligned: Posterior | None,
    options: Mapping[str, Any],
    threshold: float,
) -> dict[str, SpaceConvergence]:
    """The weights without their symmetries."""
    frames = {}
    if symmetry is not None:
        canonical = canonical_frame(posterior, symmetry, **options)
        frames = {"canonical": canonical, "aligned": aligned or one_frame(canonical, symmetry)}
    elif aligned is not None:
        frames = {"aligned": aligned}
    return {name: SpaceConvergence.of(frame.samples, threshold) for name, frame in frames.items()}


def _share_text(share: float) -> str:
    return "-" if share != share else f"{share:.1%}"


def _check_grouping(posterior: Posterior, name: str, entries: Mapping[str, Tensor]) -> None:
    shape = (posterior.num_chains, posterior.num_samples)
    for value in entries.values():
        if tuple(value.shape[:2]) != shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; it must begin with the posterior's {shape} chains and draws"
            )


def _from_origin(
    posterior: Posterior, model: BayesianModel | None, x: Tensor | None, y: Tensor | None
) -> tuple[BayesianModel | None, Tensor | None, Tensor | None]:
    """The model and data; those that the posterior was drawn from, if none are given."""
    if not isinstance(model, BayesianModel | None):
        raise TypeError(
            f"model is {described(model)}; it must be a BayesianModel. Of another Pyro model, pass "
            "predictions=predict(posterior.samples, model, x, kind='mean')"
        )
    if model is None and x is not None and not posterior.is_attached:
        raise ValueError("x is given, but no model; pass model=, or predictions=")
    if model is not None or not posterior.is_attached or not isinstance(posterior.model, BayesianModel):
        return model, x, y
    data = {**dict(zip(("x", "y"), posterior._args, strict=False)), **posterior._kwargs}
    return posterior.model, *((data.get("x"), data.get("y")) if x is None else (x, y))


def _predictions(posterior: Posterior, model: BayesianModel, x: Tensor) -> Tensor:
    """Expected targets ``(chains, draws, rows, ...)``."""
    rows = x if len(x) <= MOST_ROWS else x[evenly_spaced(len(x), MOST_ROWS)]
    return predict(posterior.samples, model, rows, kind="mean", progress=False)


def _log_density(
    posterior: Posterior, model: BayesianModel | None, x: Tensor | None, y: Tensor | None
) -> Tensor | None:
    if model is None or x is None or y is None:
        return posterior.statistics.get("lp")
    model, (x, y), _ = placed(model, (x, y), {}, None, promoted(list(posterior.samples.values())))
    device = next(model.net.parameters()).device
    pieces = []
    for start in range(0, posterior.num_samples, step := max(1, DRAWS_AT_ONCE // posterior.num_chains)):
        part = {site: value[:, start : start + step].to(device) for site, value in posterior.samples.items()}
        pieces.append(model.log_joint(part, x, y).cpu())
    return torch.cat(pieces, dim=1)


def _settled(predictions: Tensor, threshold: float) -> bool | None:
    """Whether the halves of each chain agree: a half is taken for a chain, each chain's prediction for a quantity.

    Predictions that are the same in all draws of all chains say nothing of it.
    """
    predictions = predictions[:, :, ~never_changing(predictions).to(predictions.device)]
    half = predictions.shape[1] // 2
    halves = torch.stack([predictions[:, :half], predictions[:, predictions.shape[1] - half :]])
    compared = chain_statistics(halves.transpose(1, 2))
    stuck = bool(torch.isnan(compared.r_hat).any())
    return False if stuck else SpaceConvergence({"": compared}, threshold).agrees


def _share(posterior: Posterior, name: str) -> float | None:
    flags = posterior.statistics.get(name)
    return None if flags is None else float(flags.double().mean())


def _mean_by_chain(posterior: Posterior, name: str) -> Tensor | None:
    values = posterior.statistics.get(name)
    return None if values is None else values.double().mean(1)
