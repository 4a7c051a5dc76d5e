"""Draws by chain and number: the result of samplers and other methods, stored, and read
by ArviZ.

``get_samples``, ``diagnostics`` and ``summary`` are those of Pyro's
:class:`~pyro.infer.MCMC`. On disk a posterior is a Zarr group, see
:mod:`~pyro_symmetric.store`. Functions take draws as a posterior, or as a dictionary
from sites to tensors, by one convention:

* Functions of samples (``mmd``, ``common_frame``, ``invariance_tests``, ``align_many``
  ...) take the draws of a posterior chain after chain, as ``posterior.get_samples()``
  gives them. A dictionary holds independent samples ``(samples, *site_shape)``; one of
  chains is refused wherever a group or the other side knows the sites' shapes.
* Functions of chains (``diagnose``, ``summary``, ``relabel``) take a dictionary as
  successive states of Markov chains, ``(chains, draws, *site_shape)``.
* Functions of single draws (``canonicalize``, ``minimal_mass``, ``predict``) take a
  dictionary of any batch shape and keep it; of a posterior they return a number for
  each draw, chain after chain.
* Functions that return draws return a posterior if they were given one, and a
  dictionary otherwise.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Size, Tensor

from pyro_symmetric import arguments, plots
from pyro_symmetric.arguments import (
    Args,
    Device,
    Entries,
    Json,
    Keywords,
    Model,
    Names,
    Values,
    as_tensor,
    described,
)
from pyro_symmetric.posterior.predict import FROM_ABOVE as FROM_ABOVE
from pyro_symmetric.posterior.statistics import chain_statistics
from pyro_symmetric.posterior.tables import html_table, metadata_as_json, to_arviz
from pyro_symmetric.store import PathLike, StoreError, read_store, save_store
from pyro_symmetric.weights import (
    ByName,
    Shapes,
    Tensors,
    Weights,
    batch_shape,
    drop_names,
    first_value,
    keep_names,
    map_values,
)

if TYPE_CHECKING:
    from pyro_symmetric.posterior.summaries import Summary

Kind = Literal["chains", "independent"]
FEW_DRAWS = 50  # of four times as many chains, which may be sites' entries


class _Call(NamedTuple):
    model: Model
    args: Args = ()
    kwargs: Keywords = MappingProxyType({})
    device: Device = None
    subsampled: bool | None = None


class Source(_Call):
    """The model behind draws, kept in memory only.

    :param args: the model's arguments, data included; ``kwargs`` likewise.
    :param device: of the computation; ``None`` if it is unknown or was left to the
        model.
    :param subsampled: whether the sampler took mini-batches; ``None`` if unknown.
    """

    @functools.cached_property
    def symmetry(self) -> Any:
        """The model's symmetry, found when it is first asked for."""
        return FROM_ABOVE.find_symmetry(self)


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """Draws from a posterior or an approximation of it.

    >>> posterior = ps.Posterior(
    ...     {"w": torch.randn(4, 100, 3)}, {"lp": torch.zeros(4, 100)}, kind="chains"
    ... )
    >>> posterior.get_samples()["w"].shape
    torch.Size([400, 3])

    :param samples: site -> draws ``(chains, draws, *site_shape)``.
    :param statistics: name -> ``(chains, draws)``; named as ArviZ names sample
        statistics (``diverging``, ``acceptance_rate``, ``energy``, ``lp``, ``n_steps``,
        ``step_size`` ...).
    :param metadata: anything that JSON can represent: the sampler and its settings,
        seed, time.
    :param kind: ``"chains"``: each row holds successive, dependent states of a Markov
        chain. ``"independent"``: all draws are independent (members of an ensemble,
        draws of a guide). Tests count chains by their effective sample size and
        independent draws one by one, so this has no default.
    :param source: the model behind the draws, if known; see :meth:`attach`.
    :param saved_symmetry: that of a model which was left behind, as JSON.
    """

    samples: Weights
    statistics: ByName = field(default_factory=dict)
    metadata: Json = field(default_factory=dict)
    kind: Kind = field(kw_only=True)
    source: Source | None = field(default=None, kw_only=True)
    saved_symmetry: Values | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("samples", "statistics", "metadata"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        arguments.one_of("kind", self.kind, get_args(Kind))
        arguments.weights("samples", self.samples)
        first = next(iter(self.samples))
        shape = self.samples[first].shape[:2]
        for argument, site_axes in (("samples", ", ..."), ("statistics", "")):
            for name, value in getattr(self, argument).items():
                if (
                    not isinstance(value, Tensor)
                    or value.is_complex()
                    or value.shape[:2] != shape
                    or len(shape) < 2
                    or (not site_axes and value.dim() > 2)
                ):
                    raise ValueError(
                        f"{argument}[{name!r}] is {described(value)}; it must be real, "
                        f"(chains, draws{site_axes}), and samples[{first!r}] has "
                        f"{tuple(shape)}"
                    )

    @classmethod
    def from_samples(
        cls, weights: Tensors, *, kind: Kind, num_chains: int = 1
    ) -> Posterior:
        """Build a posterior from flat draws: independent ones (an ensemble, draws of a
        guide), or concatenated chains.

        >>> posterior = ps.Posterior.from_samples(
        ...     {"w": torch.randn(400, 3)}, kind="independent", num_chains=4
        ... )
        >>> posterior.samples["w"].shape
        torch.Size([4, 100, 3])

        :param weights: site -> ``(S, *site_shape)``.
        :param num_chains: number of chains, of ``S / num_chains`` consecutive draws
            each.
        """
        arguments.weights("weights", weights)
        arguments.whole("num_chains", num_chains, 1)
        first, total = next((site, v.shape[:1]) for site, v in weights.items())
        for site, value in weights.items():
            if value.shape[:1] != total or value.dim() == 0:
                raise ValueError(
                    f"weights[{site!r}] has shape {tuple(value.shape)}; it must begin "
                    f"with the draws, and weights[{first!r}] has {total.numel():,}"
                )
        if total.numel() % num_chains:
            raise ValueError(
                f"num_chains is {num_chains}; it must divide the {total.numel():,} "
                "draws"
            )
        shape = (num_chains, total.numel() // num_chains)
        return cls(
            map_values(lambda value: value.unflatten(0, shape), weights),
            kind=kind,
        )

    @classmethod
    def concat(cls, parts: Sequence[Posterior]) -> Posterior:
        """Concatenate the chains of several posteriors, such as those of separate runs.

        :param parts: with the same sites, statistics and number of draws.
        :return: a posterior with the metadata that all share and the sums of their
            ``seconds`` and ``restarts``; ``metadata["parts"]`` holds the rest, with
            each part's number of chains.
        :raises ValueError: if there are none, or their kinds, sites, shapes or numbers
            of draws differ.
        """
        parts = arguments.listed("parts", parts, Posterior, "posteriors")
        if not parts:
            raise ValueError("parts is empty; it must hold at least one posterior")
        layouts = [
            (p.kind, p.site_shapes, list(p.statistics), f"num_samples={p.num_samples}")
            for p in parts
        ]
        for number, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise ValueError(
                    f"parts[{number}] has {layout}, but parts[0] has {layouts[0]}; "
                    "they must agree"
                )
        samples, statistics = (
            {
                name: torch.cat([getattr(part, entries)[name] for part in parts])
                for name in getattr(parts[0], entries)
            }
            for entries in ("samples", "statistics")
        )
        metadata = _joint(
            [part.metadata for part in parts], [part.num_chains for part in parts]
        )
        return cls(
            samples,
            statistics,
            metadata,
            kind=parts[0].kind,
            source=parts[0].source,
            saved_symmetry=parts[0].saved_symmetry,
        )

    def attach(self, model: Model, *args: Any, **kwargs: Any) -> Posterior:
        """Attach the model and its arguments, data included, as :attr:`source`, and
        return the new posterior.

        :func:`~pyro_symmetric.mcmc.sample` does so; a file holds no model. It lets
        ``diagnose`` check the energy, and ``to_arviz(log_likelihood=True)`` needs it.

        >>> model = ps.BayesianModel(nn.Linear(2, 1), likelihood="gaussian")
        >>> draws = {name: v.sample((4, 50)) for name, v in model.priors().items()}
        >>> ps.Posterior(draws, kind="chains").save("draws")
        >>> x, y = torch.randn(5, 2), torch.randn(5)
        >>> posterior = ps.Posterior.load("draws").attach(model, x, y)
        >>> posterior.source.model is model
        True
        """
        return replace(self, source=Source(model, args, kwargs))

    # its contents ---------------------------------------------------------------------

    @property
    def symmetry(self) -> Any:
        """The :class:`~pyro_symmetric.Symmetry` of the posterior's model, found when it
        is first asked for, or read from the file; ``None`` for draws without a model.

        >>> def model():
        ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        >>> posterior = ps.Posterior({"w": torch.randn(4, 50, 3)}, kind="chains")
        >>> posterior.attach(model).symmetry.finite.order()  # permutations and signs
        48
        """
        if self.source is not None:
            return self.source.symmetry
        if self.saved_symmetry is not None:
            return FROM_ABOVE.read_symmetry(self.saved_symmetry)
        return None

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return first_value(self.samples).shape[0]

    @property
    def num_samples(self) -> int:
        """Number of draws of each chain."""
        return first_value(self.samples).shape[1]

    def __getitem__(self, site: str) -> Tensor:
        """Return the draws of a site, ``(chains, draws, *site_shape)``.

        >>> ps.Posterior({"w": torch.randn(4, 100, 3)}, kind="chains")["w"].shape
        torch.Size([4, 100, 3])
        """
        if site not in self.samples:
            hint = arguments.did_you_mean(site, self.samples)
            raise KeyError(f"no site {site!r}; there are {list(self.samples)}{hint}")
        return self.samples[site]

    @property
    def site_shapes(self) -> dict[str, Size]:
        """Shape of every site, without chains and draws."""
        return map_values(lambda value: value.shape[2:], self.samples)

    def get_samples(
        self, num_samples: int | None = None, group_by_chain: bool = False
    ) -> Weights:
        """Return the draws as Pyro's ``MCMC.get_samples`` does, without deterministic
        sites, which ``Predictive`` would keep instead of recomputing (:attr:`samples`
        has them).

        :param num_samples: number of draws, with replacement. ``None``: all of them,
            once.
        :param group_by_chain: batch shape ``(chains, draws)`` instead of ``(chains *
            draws,)``.
        """
        arguments.whole("num_samples", num_samples, 1, none="all")
        weights = self._latent()
        count = self.num_samples
        if not group_by_chain:
            weights = map_values(lambda value: value.flatten(0, 1), weights)
            count *= self.num_chains
        if num_samples is None:
            return weights
        axis = int(group_by_chain)
        index = torch.randint(count, (num_samples,), device="cpu")
        return map_values(
            lambda value: value.index_select(axis, index.to(value.device)), weights
        )

    def select(self, chains: Any = slice(None), draws: Any = slice(None)) -> Posterior:
        """Select chains and draws; return them as a posterior.

        >>> posterior = ps.Posterior({"w": torch.randn(4, 800, 3)}, kind="chains")
        >>> posterior.select(chains=[0, 2], draws=slice(500, None))
        Posterior(2 chains of 300 draws, 3 weights)
          w  (3,)

        :param chains: a slice (which gives a view), indices, or a mask; a single index
            keeps its axis.
        :param draws: likewise.
        """
        chains, draws = (
            i if isinstance(i, slice) else as_tensor(i).reshape(-1)
            for i in (chains, draws)
        )
        samples, statistics = (
            map_values(lambda value: value[chains][:, draws], entries)
            for entries in (self.samples, self.statistics)
        )
        return replace(self, samples=samples, statistics=statistics)

    def thin(self, every: int) -> Posterior:
        """Keep every ``every``-th draw of each chain, the last one included, as a
        view.
        """
        arguments.whole("every", every, 1)
        return self.select(
            draws=slice(
                (self.num_samples - 1) % every if self.num_samples else 0, None, every
            )
        )

    def map(
        self, function: Callable[..., Tensors], *args: Any, **kwargs: Any
    ) -> Posterior:
        """Apply a function of weights to all draws; return the new posterior, with the
        old statistics and metadata.

        >>> group = ps.Group.declare({"w": ("k",)}, {"w": torch.zeros(3)})
        >>> posterior = ps.Posterior(
        ...     {"w": torch.tensor([[[3.0, 1.0, 2.0]]])}, kind="chains"
        ... )
        >>> element = group.element({"k": torch.tensor([1, 2, 0])})
        >>> posterior.map(element).samples["w"]  # an element moves every draw
        tensor([[[1., 2., 3.]]])
        >>> canonical = posterior.map(ps.canonicalize, group)
        >>> canonical.samples["w"]  # the representatives of their orbits
        tensor([[[1., 2., 3.]]])

        Deterministic sites are dropped, since they belong to the old draws;
        :func:`predict` recomputes them.

        :param function: takes and returns weights of batch shape ``(chains, draws)``.
        :param args: further arguments of ``function``; ``kwargs`` likewise.
        """
        weights = arguments.weights(
            "the result of function", function(self._latent(), *args, **kwargs)
        )
        batch = Size([self.num_chains, self.num_samples])
        if misfits := {
            site: tuple(value.shape)
            for site, value in weights.items()
            if value.shape[:2] != batch
        }:
            raise ValueError(
                f"function returned {misfits}; they must begin with the chains and "
                f"draws, {tuple(batch)}"
            )
        return replace(self, samples=dict(weights))

    def _latent(self) -> Weights:
        """Return the draws without deterministic sites."""
        return drop_names(self.samples, self.metadata.get("deterministic", ()))

    # as tables and trees --------------------------------------------------------------

    to_arviz = to_arviz

    def diagnostics(self) -> dict[str, Entries]:
        """Diagnose convergence as Pyro's ``MCMC.diagnostics`` does: site -> ``n_eff``
        (bulk effective sample size) and ``r_hat`` (rank-normalised split R-hat) of its
        entries; ``"divergences"`` -> ``{"chain 0": [draws], ...}``; if the sampler has
        one, ``"acceptance rate"`` -> ``{"chain 0": mean, ...}``.

        Modulo a symmetry: ``ps.align_many(posterior,
        symmetry).posterior.diagnostics()``.
        """
        numbers = map_values(chain_statistics, self.samples)
        result = map_values(lambda n: {"n_eff": n.ess_bulk, "r_hat": n.r_hat}, numbers)
        no_flags = torch.zeros(self.num_chains, 0, device="cpu")
        flags = self.statistics.get("diverging", no_flags)
        result["divergences"] = _by_chain(
            row.nonzero().flatten().tolist() for row in flags
        )
        if (rates := self.statistics.get("acceptance_rate")) is not None:
            result["acceptance rate"] = _by_chain(rates.double().mean(1).tolist())
        return result

    def summary(self, prob: float = 0.9) -> None:
        """Print a line for every entry of the smaller sites, as Pyro does.

        Chains also get a line for every site: worst and median R-hat and effective
        sample sizes. The table itself is ``ps.summary(posterior, None)``. With a
        symmetry, whose copies of a mode mix in the draws, ``ps.summary(posterior,
        symmetry)`` aligns them first.

        :param prob: probability of the interval between quantiles.
        """
        print(self.summarised(prob))

    def summarised(self, prob: float, lead: Sequence[str] = ()) -> Summary:
        """Return :meth:`summary` as a table.

        :param lead: lines above it.
        """
        from pyro_symmetric.posterior.summaries import Summary  # imports pandas

        arguments.fraction("prob", prob)
        total = self.counted()
        if "diverging" in self.statistics:
            total += (
                f"; {int(self.statistics['diverging'].sum())} of "
                f"{self.num_chains * self.num_samples} diverged"
            )
        if "acceptance_rate" in self.statistics:
            total += (
                "; mean acceptance "
                f"{float(self.statistics['acceptance_rate'].double().mean()):.2f}"
            )
        return Summary.of(self.samples, prob, self.kind == "chains", lead, total)

    def __repr__(self) -> str:
        weights = sum(shape.numel() for shape in self.site_shapes.values())
        width = max(map(len, self.samples))
        maker = f", by {self.metadata['kernel']}" if "kernel" in self.metadata else ""
        lines = [
            f"Posterior({self.counted()}, {weights} "
            f"weight{'s' * (weights != 1)}{maker})"
        ]
        lines += [
            f"  {site:<{width}}  {tuple(shape)}"
            for site, shape in self.site_shapes.items()
        ]
        restarts = self.metadata.get("restarts")
        remarks = {
            "chosen": self.metadata.get("chosen"),
            "restarts": restarts and f"{restarts} from modes of negligible mass",
            "ended": self.metadata.get("ended"),
            "statistics": ", ".join(self.statistics),
        }
        return "\n".join(
            [*lines, *(f"  {name}: {text}" for name, text in remarks.items() if text)]
        )

    def plot(self, site: str, ax: Any = None, symmetry: Any = None) -> Any:
        """Plot traces and marginals of a site's entries, a line for each chain; return
        the pair of axes.

        :param symmetry: modulo which draws are aligned first; ``"auto"``: the model's.
        """
        if symmetry is not None:
            return FROM_ABOVE.align(self, symmetry).plot(site, ax)
        return plots.traces(
            ax, site, self[site].cpu().reshape(self.num_chains, self.num_samples, -1)
        )

    def _repr_html_(self) -> str:
        head, *lines = repr(self).splitlines()
        rows = [(site, tuple(shape)) for site, shape in self.site_shapes.items()]
        return html_table(head, [("site", "shape"), *rows], lines[len(rows) :])

    def counted(self) -> str:
        """Count the draws in words, such as ``4 chains of 100 draws``."""
        chains = self.kind == "chains"
        unit = (
            f"{self.num_chains} "
            f"{'chain' if chains else 'row'}{'s' * (self.num_chains != 1)} of "
        )
        one_row = self.num_chains == 1 and not chains
        return (
            f"{unit * (not one_row)}{self.num_samples} "
            f"{'' if chains else 'independent '}draws"
        )

    # the store ------------------------------------------------------------------------

    def save(self, path: PathLike) -> None:
        """Write the posterior to a folder, a Zarr group that
        ``xarray.open_datatree(path, engine="zarr")`` opens.

        The folder appears whole or not at all: it is written under a temporary name,
        synced and renamed. It replaces another saved posterior. The model stays behind;
        its symmetry is found and written, too.

        :raises OSError: if it can't be written (full disk, missing or read-only
            folder), or would replace other files.
        :raises ValueError: if the metadata can't be written as JSON.
        """
        metadata_as_json(self.metadata)  # refuses before anything is written
        attributes = {**self.metadata, "kind": self.kind}
        if self.symmetry is not None:
            attributes["symmetry"] = self.symmetry.to_dict()
        save_store(path, (self.samples, self.statistics, attributes))

    @classmethod
    def load(cls, path: PathLike, *, verify: bool = True) -> Posterior:
        """Load a saved posterior, or the folder of ``sample(store=...)``, even while it
        is being written.

        Draws are on the CPU, mapped from the files, and needn't fit into memory. A run
        in tasks has one folder for each task; :meth:`concat` joins them.

        :param verify: read everything once and compare checksums, at some gigabytes a
            second. ``False``: open at once and read draws on access, damaged ones
            included.
        :raises OSError: if there is no such folder or it can't be read.
        :raises StoreError: if it holds no draws yet, is truncated, differs from its
            checksum, or is of a newer version.
        """
        samples, statistics, metadata = read_store(path, verify=verify)
        try:
            return cls(
                samples,
                statistics,
                metadata,
                kind=metadata.pop("kind", "chains"),
                saved_symmetry=metadata.pop("symmetry", None),
            )
        # a checkpoint that this library didn't write
        except (TypeError, ValueError) as error:
            raise StoreError(f"{path} is damaged: {error!r}") from error


def _by_chain(values: Iterable[Any]) -> Entries:
    """Name values by the chains that they belong to, as Pyro does."""
    return {f"chain {number}": value for number, value in enumerate(values)}


def _joint(runs: Sequence[Entries], chains: Sequence[int]) -> Json:
    """Join metadata: entries that all runs share, the sums of their ``seconds`` and
    ``restarts``, and the rest as ``parts``.
    """
    shared = {
        name: value
        for name, value in runs[0].items()
        if name not in ("seconds", "restarts")
        and all(run.get(name, run) == value for run in runs)
    }
    parts = [
        {"chains": count} | drop_names(run, shared)
        for count, run in zip(chains, runs, strict=True)
    ]
    if restarts := sum(run.get("restarts", 0) for run in runs):
        shared["restarts"] = restarts
    if all("interrupted" in run for run in runs):
        shared["interrupted"] = any(run["interrupted"] for run in runs)
    seconds: list[Any] = [run.get("seconds") for run in runs]
    if all(isinstance(times, dict) for times in seconds):
        shared["seconds"] = {
            phase: sum(times.get(phase, 0.0) for times in seconds)
            for phase in seconds[0]
        }
    # ensembles have no phases
    elif all(isinstance(time, int | float) for time in seconds):
        shared["seconds"] = sum(seconds)
    return {**shared, "parts": parts}


# draws as arguments -------------------------------------------------------------------

Draws = Tensors | Posterior


def samples_of(
    draws: Any, name: str = "weights", shapes: Shapes | None = None
) -> Tensors:
    """Convert draws to samples ``(samples, *site_shape)``: all draws of a posterior,
    chain after chain.

    :param name: of the argument, for messages.
    :param shapes: of the sites, as far as known; then batches of another shape are
        refused.
    """
    if isinstance(draws, Posterior):
        draws = draws.get_samples()
    elif not isinstance(draws, Mapping):
        raise TypeError(
            f"{name} are {described(draws)}; they must be a Posterior, or map each "
            "site to its samples (of a guide, "
            "take draws: Predictive(model, guide=guide, num_samples=1000))"
        )
    _require_shapes(arguments.weights(name, draws), name, shapes, ("samples",))
    return draws


def chains_of(
    draws: Any, name: str = "posterior", shapes: Shapes | None = None
) -> Posterior:
    """Convert draws to a posterior of chains; a dictionary holds ``(chains, draws,
    *site_shape)``.
    """
    if isinstance(draws, Posterior):
        return draws
    _require_shapes(
        arguments.weights(name, draws, "a Posterior"), name, shapes, ("chains", "draws")
    )
    chains = Posterior(dict(draws), kind="chains")
    if 4 * chains.num_samples < chains.num_chains and chains.num_samples < FEW_DRAWS:
        warnings.warn(
            f"{name} is read as {chains.counted()}; if its first axis are draws, pass "
            "get_samples(group_by_chain=True), or Posterior.from_samples(samples, "
            "kind='independent')",
            stacklevel=3,
        )
    return chains


def as_given(draws: Any, moved: Weights) -> Any:
    """Return moved samples ``(samples, *site_shape)`` in the form that was given to
    :func:`samples_of`.
    """
    if not isinstance(draws, Posterior):
        return moved
    batch = (draws.num_chains, draws.num_samples)
    return draws.map(
        lambda _: map_values(lambda value: value.unflatten(0, batch), moved)
    )


def _require_shapes(
    weights: Tensors, name: str, shapes: Shapes | None, leading: Names
) -> None:
    for site, shape in keep_names(shapes or {}, weights).items():
        found_shape = tuple(weights[site].shape)
        if len(found_shape) != len(leading) + len(shape):
            raise ValueError(
                f"{name}[{site!r}] has shape {found_shape}; it must be "
                f"({', '.join(map(str, (*leading, *shape)))}), or pass "
                "a Posterior, which says what its axes are"
            )
        batch_shape({site: weights[site]}, {site: shape}, name)
