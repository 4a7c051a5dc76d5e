"""Weight samples by chain and draw: what samplers return, what is stored, what ArviZ reads.

A :class:`Posterior` holds draws of every site with shape ``(chains, draws, *site_shape)``, statistics of every draw,
and JSON metadata. Its :meth:`~Posterior.get_samples`, ``num_chains``, ``num_samples``, :meth:`~Posterior.diagnostics`
and :meth:`~Posterior.summary` are those of Pyro's :class:`~pyro.infer.MCMC`, so it stands where an ``MCMC`` stands.

The store is one ``.safetensors`` file (no pickle): tensors ``samples/<site>`` and ``statistics/<name>``, and in the
header's metadata the format's name, its version and a JSON text.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pyro.infer.mcmc.util import select_samples
from torch import Tensor

from pyro_symmetric.storage import PathLike, load_tensors, save_tensors
from pyro_symmetric.symmetry.canonical import Symmetry, canonicalize
from pyro_symmetric.symmetry.finite import FiniteGroup
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.rescaling import SignGroup
from pyro_symmetric.symmetry.weights import Weights

KIND = "posterior"
VERSION = 1


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """Draws from a posterior, or from what stands for it.

    >>> posterior = Posterior({"w": torch.randn(4, 100, 3)}, {"diverging": torch.zeros(4, 100, dtype=torch.bool)})
    >>> posterior.get_samples()["w"].shape
    torch.Size([400, 3])

    :param samples: site -> draws ``(chains, draws, *site_shape)``.
    :param statistics: name -> ``(chains, draws)``; named as ArviZ names sample statistics (``diverging``,
        ``acceptance_rate``, ``energy``, ``lp``, ``n_steps``, ``step_size`` ...).
    :param metadata: anything that JSON can hold: the sampler and its settings, seed, time, trace of the warm-up.
    """

    samples: Weights
    statistics: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", dict(self.samples))
        object.__setattr__(self, "statistics", dict(self.statistics))
        object.__setattr__(self, "metadata", dict(self.metadata))
        if not self.samples:
            raise ValueError("samples is empty; a posterior needs the draws of at least one site")
        for site, value in self.samples.items():
            if not isinstance(value, Tensor) or value.dim() < 2:
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"samples[{site!r}] is of {found}; it must be a tensor (chains, draws, *site_shape)")
        first = next(iter(self.samples))
        shape = self.samples[first].shape[:2]
        for kind, entries in (("samples", self.samples), ("statistics", self.statistics)):
            for name, value in entries.items():
                if value.shape[:2] != shape or (kind == "statistics" and value.dim() != 2):
                    raise ValueError(
                        f"{kind}[{name!r}] has shape {tuple(value.shape)}, but samples[{first!r}] holds "
                        f"{shape[0]} chains of {shape[1]} draws"
                    )

    @classmethod
    def from_samples(
        cls,
        weights: Mapping[str, Tensor],
        num_chains: int = 1,
        statistics: Mapping[str, Tensor] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Posterior:
        """A posterior of flat draws: independent ones (an ensemble, draws of a guide), or chains laid end to end.

        :param weights: site -> ``(S, *site_shape)``.
        :param num_chains: into how many chains of ``S / num_chains`` consecutive draws to cut them.
        :param statistics: name -> ``(S,)``.
        """
        if not weights:
            raise ValueError("weights is empty; a posterior needs the draws of at least one site")
        for name, value in {**weights, **(statistics or {})}.items():
            if value.dim() < 1 or num_chains < 1 or len(value) % num_chains:
                raise ValueError(
                    f"{name!r} has shape {tuple(value.shape)}, which can't be cut into num_chains={num_chains} chains "
                    "of equal length along its first axis"
                )

        def cut(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {k: v.reshape(num_chains, len(v) // num_chains, *v.shape[1:]) for k, v in entries.items()}

        return cls(cut(weights), cut(statistics or {}), dict(metadata or {}))

    # what it holds --------------------------------------------------------------------------------------------------

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return next(iter(self.samples.values())).shape[0]

    @property
    def num_samples(self) -> int:
        """Number of draws of each chain."""
        return next(iter(self.samples.values())).shape[1]

    @property
    def site_shapes(self) -> dict[str, torch.Size]:
        """Shape of every site, without chains and draws."""
        return {site: value.shape[2:] for site, value in self.samples.items()}

    @property
    def divergences(self) -> Tensor:
        """Number of divergent draws of each chain, ``(chains,)``; zeros where the sampler knows no divergence."""
        diverging = self.statistics.get("diverging")
        return torch.zeros(self.num_chains, dtype=torch.long) if diverging is None else diverging.long().sum(1)

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> Weights:
        """The draws as weights, as Pyro's ``MCMC.get_samples`` gives them.

        :param num_samples: ``None`` for all; otherwise as many, drawn with replacement.
        :param group_by_chain: keep the chains apart: batch shape ``(chains, draws)`` instead of ``(chains * draws,)``.
        """
        return select_samples(self.samples, num_samples, group_by_chain)

    def __repr__(self) -> str:
        weights = sum(shape.numel() for shape in self.site_shapes.values())
        maker = f", by {self.metadata['kernel']}" if "kernel" in self.metadata else ""
        width = max(len(site) for site in self.samples)
        lines = [f"Posterior({self.num_chains} chains of {self.num_samples} draws, {weights} weights{maker})"]
        lines += [f"  {site:<{width}}  {tuple(shape)}" for site, shape in self.site_shapes.items()]
        if self.statistics:
            lines.append(f"  statistics: {', '.join(self.statistics)}")
        return "\n".join(lines)

    def canonicalize(
        self, symmetry: Symmetry | PermutationGroup | SignGroup | FiniteGroup, **options: Any
    ) -> Posterior:
        """The same draws with their symmetries removed, each brought to the representative of its orbit.

        R-hat and means over such draws compare like with like; statistics and metadata are kept.

        :param symmetry: what to remove, e.g. ``find_symmetry(net, x)``.
        :param options: see :func:`~pyro_symmetric.symmetry.canonicalize`.
        """
        return Posterior(canonicalize(self.samples, symmetry, **options), self.statistics, self.metadata)

    # how good it is -------------------------------------------------------------------------------------------------

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Convergence, summarised for every site over its weights.

        Rank-normalised split R-hat and bulk and tail effective sample size (Vehtari et al. 2021), each as the worst and
        the median over the site's weights. NaN where it can't be told: fewer than 4 draws, R-hat of one chain, weights
        that are constant or not finite.

        :return: site -> ``r_hat``, ``r_hat_median``, ``ess_bulk``, ``ess_bulk_median``, ``ess_tail``,
            ``ess_tail_median`` (without suffix: the worst); and ``"divergences"`` -> ``{"chain 0": [draws], ...}``.
        """
        table: dict[str, dict[str, Any]] = {site: _diagnose(value) for site, value in self.samples.items()}
        if "diverging" in self.statistics:
            table["divergences"] = {
                f"chain {c}": flags.nonzero().flatten().tolist() for c, flags in enumerate(self.statistics["diverging"])
            }
        return table

    def summary_table(self) -> str:
        """One line for each site: worst and median R-hat and effective sample sizes; then divergences, acceptance."""
        diagnostics = self.diagnostics()
        columns = ["r_hat", "r_hat_median", "ess_bulk", "ess_bulk_median", "ess_tail", "ess_tail_median"]
        width = max(len("site"), *(len(site) for site in self.samples))
        lines = [f"{'site':<{width}}  weights  R-hat worst  median  ESS bulk worst    median  ESS tail worst    median"]
        for site, shape in self.site_shapes.items():
            r, r_median, bulk, bulk_median, tail, tail_median = (diagnostics[site][column] for column in columns)
            lines.append(
                f"{site:<{width}}  {shape.numel():>7}  {r:>11.3f}  {r_median:>6.3f}  {bulk:>14.0f}  {bulk_median:>8.0f}"
                f"  {tail:>14.0f}  {tail_median:>8.0f}"
            )
        total = self.num_chains * self.num_samples
        lines.append(f"{self.num_chains} chains of {self.num_samples} draws")
        if "diverging" in self.statistics:
            lines[-1] += f"; {int(self.divergences.sum())} of {total} diverged"
        if "acceptance_rate" in self.statistics:
            lines[-1] += f"; mean acceptance {float(self.statistics['acceptance_rate'].double().mean()):.2f}"
        return "\n".join(lines)

    def summary(self) -> None:
        """Print :meth:`summary_table`."""
        print(self.summary_table())

    def to_arviz(self, dims: Mapping[str, list[str]] | None = None, coords: Mapping[str, Any] | None = None) -> Any:
        """An ArviZ ``DataTree`` with the groups ``posterior`` and, where there are any, ``sample_stats``.

        :param dims: site -> names of its axes; axes that are not named are called ``<site>_dim_<k>``.
        :param coords: name of an axis -> its labels.
        """
        import arviz_base

        groups = {"posterior": {site: _numpy(value) for site, value in self.samples.items()}}
        if self.statistics:
            groups["sample_stats"] = {name: _numpy(value) for name, value in self.statistics.items()}
        attributes = {"/": {"metadata": json.dumps(self.metadata), "inference_library": "pyro_symmetric"}}
        # Many short chains are what a vectorised sampler makes; ArviZ's check takes them for swapped axes.
        return arviz_base.from_dict(groups, dims=dims, coords=coords, check_conventions=False, attrs=attributes)

    # the store ------------------------------------------------------------------------------------------------------

    def save(self, path: PathLike) -> None:
        """Write everything to one ``.safetensors`` file.

        The file appears whole or not at all: it is written beside its place, synced and then moved there, so what was
        at ``path`` survives any failure.

        :raises OSError: if it can't be written (full disk, missing or read-only folder).
        :raises ValueError: if the metadata can't be written as JSON.
        """
        tensors = {f"samples/{site}": value for site, value in self.samples.items()}
        tensors |= {f"statistics/{name}": value for name, value in self.statistics.items()}
        header = {"sites": list(self.samples), "statistics": list(self.statistics), "metadata": self.metadata}
        save_tensors(path, KIND, VERSION, tensors, header)

    @classmethod
    def load(cls, path: PathLike) -> Posterior:
        """Read what :meth:`save` wrote, on the CPU. Draws are mapped from the file and read when they are touched.

        :raises OSError: if there is no such file or it can't be read.
        :raises ValueError: if it is truncated, of another kind, or of a newer version of the format.
        """
        tensors, header = load_tensors(path, KIND, VERSION)
        try:
            samples = {site: tensors[f"samples/{site}"] for site in header["sites"]}
            statistics = {name: tensors[f"statistics/{name}"] for name in header["statistics"]}
            return cls(samples, statistics, header["metadata"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} has a damaged header: {error!r}") from error


# small steps --------------------------------------------------------------------------------------------------------


def _numpy(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _diagnose(draws: Tensor) -> dict[str, float]:
    """Worst and median of R-hat and effective sample sizes over the weights of one site."""
    series = np.moveaxis(_numpy(draws.flatten(2) if draws.dim() > 2 else draws[..., None]), -1, 0).astype(np.float64)
    result = {}
    for name, method, worst in (("r_hat", "rhat", np.max), ("ess_bulk", "bulk", np.min), ("ess_tail", "tail", np.min)):
        values = _per_weight(series, method)
        result[name] = float(worst(values)) if values.size else float("nan")
        known = values[~np.isnan(values)]
        result[f"{name}_median"] = float(np.median(known)) if known.size else float("nan")
    return result


def _per_weight(series: np.ndarray, method: str) -> np.ndarray:
    """R-hat or an effective sample size of every row of ``(weights, chains, draws)``; NaN where it is undefined."""
    from arviz_stats.base import array_stats

    values = np.full(len(series), np.nan)
    _, chains, length = series.shape
    if length < 4 or (method == "rhat" and chains < 2):
        return values
    usable = np.isfinite(series).all((1, 2)) & (np.ptp(series, axis=(1, 2)) > 0)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        if method == "rhat":
            values[usable] = array_stats.rhat(series[usable]) if usable.any() else []
        else:
            options = {"prob": (0.05, 0.95)} if method == "tail" else {}
            values[usable] = array_stats.ess(series[usable], method=method, **options) if usable.any() else []
    return values
