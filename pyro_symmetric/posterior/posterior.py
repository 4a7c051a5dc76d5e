"""Draws by chain and number: what samplers and other methods return, what is stored, what ArviZ reads.

A :class:`Posterior` holds draws of every site with shape ``(chains, draws, *site_shape)``, statistics of every draw,
and JSON metadata. Its :meth:`~Posterior.get_samples`, ``num_chains``, ``num_samples``, :meth:`~Posterior.diagnostics`
and :meth:`~Posterior.summary` are those of Pyro's :class:`~pyro.infer.MCMC`, so it stands where an ``MCMC`` stands: in
``Predictive(model, posterior.get_samples())`` and, while it remembers the model that it was drawn from
(:meth:`~Posterior.attach`), in ArviZ's ``from_pyro``.

On disk it is a Zarr group, see :mod:`~pyro_symmetric.store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.placement import as_tensor
from pyro_symmetric.posterior.arviz import to_arviz
from pyro_symmetric.posterior.diagnostics import counts, description, diagnostics, entries_table, sites_table
from pyro_symmetric.posterior.draws import Metadata, beside, in_chains, long_frame, redrawn, require_draws, wide_frame
from pyro_symmetric.storage import PathLike, StoreError
from pyro_symmetric.store import CHECKPOINT, Contents, read_store, save_store
from pyro_symmetric.weights import Weights

if TYPE_CHECKING:
    import pandas
    import xarray

Kind = Literal["chains", "independent"]

KINDS: tuple[Kind, ...] = get_args(Kind)
FORMS = {"wide": wide_frame, "long": long_frame}


class Source(NamedTuple):
    """The source of draws, kept in memory only.

    :param kernel: the sampler; ``kernel.model`` is the model.
    :param args: what the model was called with; ``kwargs`` likewise.
    :param device: where it was asked to compute; ``None`` if that isn't known or was left to the model.
    """

    kernel: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    device: torch.device | str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """Draws from a posterior, or from what stands for it.

    >>> posterior = ps.Posterior({"w": torch.randn(4, 100, 3)}, {"lp": torch.zeros(4, 100)}, kind="chains")
    >>> posterior.get_samples()["w"].shape
    torch.Size([400, 3])

    :param samples: site -> draws ``(chains, draws, *site_shape)``.
    :param statistics: name -> ``(chains, draws)``; named as ArviZ names sample statistics (``diverging``,
        ``acceptance_rate``, ``energy``, ``lp``, ``n_steps``, ``step_size`` ...).
    :param metadata: anything that JSON can hold: the sampler and its settings, seed, time.
    :param kind: ``"chains"``: each row holds successive states of a Markov chain, of which one depends on the last.
        ``"independent"``: every draw is independent of every other (members of an ensemble, draws of a guide). Tests
        count chains by their effective sample size and independent draws one by one, so this has no default.
    :param source: what they were drawn from, if that is known; see :meth:`attach`.
    """

    samples: Weights
    statistics: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    kind: Kind = field(kw_only=True)
    source: Source | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("samples", "statistics"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        object.__setattr__(self, "metadata", Metadata(self.metadata))
        if self.kind not in KINDS:
            raise ValueError(
                f"kind is {self.kind!r}; it must be 'chains' (successive states of Markov chains) or 'independent'"
            )
        if not self.samples:
            raise ValueError("samples is empty; a posterior needs the draws of at least one site")
        require_draws(self.samples, self.statistics)

    @classmethod
    def from_samples(
        cls,
        weights: Mapping[str, Tensor],
        *,
        kind: Kind,
        num_chains: int = 1,
        statistics: Mapping[str, Tensor] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Posterior:
        """A posterior of flat draws: independent ones (an ensemble, draws of a guide), or chains laid end to end.

        >>> posterior = Posterior.from_samples(guide.sample_posterior((400,)), kind="independent")

        :param weights: site -> ``(S, *site_shape)``.
        :param kind: ``"independent"`` or ``"chains"``, as of a :class:`Posterior`.
        :param num_chains: into how many chains of ``S / num_chains`` consecutive draws to cut them.
        :param statistics: name -> ``(S,)``.
        """
        arguments.weights("weights", weights)
        arguments.whole("num_chains", num_chains, 1)
        kinds = ("weights", weights), ("statistics", statistics or {})
        samples, numbers = (in_chains(kind, entries, num_chains) for kind, entries in kinds)
        return cls(samples, numbers, {} if metadata is None else metadata, kind=kind)

    @classmethod
    def concat(cls, parts: Sequence[Posterior]) -> Posterior:
        """The chains of several posteriors side by side, as of runs that were made by themselves.

        :param parts: of the same sites and statistics, with as many draws of each chain.
        :return: a posterior with ``metadata`` in which all agree; its ``seconds`` are added up, and
            ``metadata["parts"]`` keeps how many chains came from each and what else differs.
        :raises ValueError: if their rows, sites, shapes or numbers of draws differ.
        """
        parts = arguments.listed("parts", parts, Posterior, "posteriors")
        if not parts:
            raise ValueError("parts is empty; it must hold at least one posterior")
        told = [(p.kind, dict(p.site_shapes), list(p.statistics), f"num_samples={p.num_samples}") for p in parts]
        for number, found in enumerate(told):
            if found != told[0]:
                raise ValueError(f"parts[{number}] has {found}, but parts[0] has {told[0]}; they must agree")
        samples, statistics = (beside([getattr(part, kind) for part in parts]) for kind in ("samples", "statistics"))
        metadata = _joint([part.metadata for part in parts], [part.num_chains for part in parts])
        return cls(samples, statistics, metadata, kind=parts[0].kind, source=parts[0].source)

    # where it comes from --------------------------------------------------------------------------------------------

    def attach(self, kernel_or_model: Any, *args: Any, **kwargs: Any) -> Posterior:
        """This posterior, remembering what it was drawn from.

        :func:`~pyro_symmetric.mcmc.sample` does it; do it again for a posterior that comes from a file, which holds no
        model. Its method :meth:`to_arviz` with ``log_likelihood=True`` needs it.

        >>> posterior = Posterior.load(path).attach(model, x, y)

        :param kernel_or_model: a sampler that holds its model as ``kernel.model``, or the model itself.
        :param args: what the model was called with, data included; ``kwargs`` likewise.
        """
        is_kernel = callable(getattr(kernel_or_model, "model", None)) and not callable(kernel_or_model)
        kernel = kernel_or_model if is_kernel else SimpleNamespace(model=kernel_or_model)
        return replace(self, source=Source(kernel, args, kwargs))

    @property
    def source_device(self) -> torch.device | str | None:
        """The device on which its model was asked to compute; ``None`` if that isn't known or was left to the model."""
        return None if self.source is None else self.source.device

    @property
    def kernel(self) -> Any:
        """The sampler; ``kernel.model`` is the model.

        :raises AttributeError: if this posterior remembers none; see :meth:`attach`.
        """
        return self._drawn_from.kernel

    @property
    def model(self) -> Callable[..., Any]:
        """The model, as :attr:`kernel`."""
        return self._drawn_from.kernel.model

    @property
    def is_attached(self) -> bool:
        """True if :attr:`model` and its arguments are known."""
        return self.source is not None

    @property
    def _args(self) -> tuple[Any, ...]:  # the names that Pyro's MCMC has and ArviZ reads
        return self._drawn_from.args

    @property
    def _kwargs(self) -> Mapping[str, Any]:
        return self._drawn_from.kwargs

    @property
    def _drawn_from(self) -> Source:
        if self.source is None:
            raise AttributeError(
                "this posterior doesn't know the model that it was drawn from (files hold none); say it by "
                "posterior.attach(model, *args)"
            )
        return self.source

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
        """Number of divergent draws of each chain, ``(chains,)``; zeros if the sampler knows no divergence."""
        diverging = self.statistics.get("diverging")
        return (
            torch.zeros(self.num_chains, dtype=torch.long, device="cpu")
            if diverging is None
            else diverging.long().sum(1)
        )

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> Weights:
        """The draws as weights, as Pyro's ``MCMC.get_samples`` gives them: without deterministic sites, which
        ``Predictive`` would keep instead of computing them anew. :attr:`samples` has them.

        :param num_samples: ``None`` for all; otherwise as many, drawn with replacement.
        :param group_by_chain: keep the chains apart: batch shape ``(chains, draws)`` instead of ``(chains * draws,)``.
        """
        arguments.whole("num_samples", num_samples, 1, none="all")
        found = {site: value if group_by_chain else value.flatten(0, 1) for site, value in self._free().items()}
        return found if num_samples is None or not found else redrawn(found, num_samples, int(group_by_chain))

    def select(self, chains: Any = slice(None), draws: Any = slice(None)) -> Posterior:
        """Some chains and some draws, in a posterior of their own.

        >>> posterior.select(chains=[0, 2], draws=slice(500, None))

        :param chains: a slice (a view, which copies nothing), or indices, or a mask; a single index keeps its axis.
        :param draws: likewise.
        """
        chains, draws = (i if isinstance(i, slice) else as_tensor(i).reshape(-1) for i in (chains, draws))

        def cut(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: value[chains][:, draws] for name, value in entries.items()}

        return replace(self, samples=cut(self.samples), statistics=cut(self.statistics), metadata=dict(self.metadata))

    def thin(self, every: int) -> Posterior:
        """Every ``every``-th draw of each chain, as a view; the last draw is kept."""
        arguments.whole("every", every, 1)
        return self.select(draws=slice((self.num_samples - 1) % every if self.num_samples else 0, None, every))

    def __repr__(self) -> str:
        return description(self.samples, self.statistics, self.metadata, self.kind)

    def _free(self) -> dict[str, Tensor]:
        """The draws without deterministic sites."""
        return {site: v for site, v in self.samples.items() if site not in self.metadata.get("deterministic", ())}

    def map(self, function: Callable[..., Mapping[str, Tensor]], *args: Any, **kwargs: Any) -> Posterior:
        """The same posterior with a function of weights applied to its draws; statistics and metadata are kept.

        >>> posterior.map(element)                        # an element of a symmetry group moves every draw
        >>> posterior.map(ps.canonicalize, symmetry)      # every draw becomes the representative of its orbit

        Deterministic sites are left out: they are those of the draws as they were. :func:`predict` computes them anew.

        :param function: takes weights of batch shape ``(chains, draws)`` and returns weights of that batch shape.
        :param args: what it is called with after the weights; ``kwargs`` likewise.
        :raises TypeError: if it isn't callable, or returns no weights.
        :raises ValueError: if it returns another number of chains or draws.
        """
        found = function(self._free(), *args, **kwargs)
        name, batch = "what function returned", (self.num_chains, self.num_samples)
        for site, value in arguments.weights(name, found).items():
            if value.shape[:2] != batch:
                raise ValueError(
                    f"function returned {site!r} of shape {tuple(value.shape)}; it must begin with the {batch[0]} "
                    f"chains and {batch[1]} draws that it is given"
                )
        return replace(self, samples=dict(found))

    def to_dataframe(
        self, names: Iterable[str] | None = None, *, form: Literal["wide", "long"] = "wide"
    ) -> pandas.DataFrame:
        """The draws as a pandas data frame, for tables and plots of one's own.

        >>> posterior = ps.Posterior({"w": torch.randn(4, 100, 2), "s": torch.rand(4, 100)}, kind="chains")
        >>> wide = posterior.to_dataframe()
        >>> wide.shape, list(wide.columns), wide.index.names
        ((400, 3), ['w[0]', 'w[1]', 's'], FrozenList(['chain', 'draw']))
        >>> posterior.to_dataframe(form="long").columns.tolist()
        ['chain', 'draw', 'site', 'entry', 'value']

        Entries are named as in :meth:`summary`: ``w[0]``, ``w[0,1]``, and ``s`` for a site that is one number; they
        stand in the order in which a tensor is flattened. Chains and draws are counted from 0.

        :param names: sites to take, or names of statistics, such as ``["w", "diverging"]``; by default all sites.
        :param form: ``"wide"``: a row for each draw, ``chains * draws`` of them, indexed by ``(chain, draw)``, and a
            column for each entry, in the site's own dtype. ``"long"``: a row for each number, ``chains * draws *
            entries`` of them, with the columns ``chain``, ``draw``, ``site``, ``entry`` and ``value``; ``site`` and
            ``entry`` are categories.
        :raises ValueError: if there is no such site or statistic.
        """
        arguments.one_of("form", form, FORMS)
        known = {**self.statistics, **self.samples}
        chosen = list(self.samples) if names is None else arguments.listed("names", names, str, "names of sites")
        if not chosen:
            raise ValueError("names is empty; name one site at least, or leave it out for all")
        frame = FORMS[form]
        return frame({name: known[arguments.one_of("names", name, known)] for name in dict.fromkeys(chosen)})

    def to_arviz(
        self,
        dims: Mapping[str, list[str]] | None = None,
        coords: Mapping[str, Any] | None = None,
        *,
        log_likelihood: bool | tuple[Any, ...] = False,
        posterior_predictive: bool | tuple[Any, ...] = False,
    ) -> xarray.DataTree:
        """An ArviZ ``DataTree``, as ``arviz_stats`` takes it: ``summary``, ``ess``, ``bfmi``, ``loo``, ``compare``.

        Its groups are ``posterior``, ``sample_stats`` if the posterior has statistics, and on request

        * ``log_likelihood`` of every row, as ``arviz_stats.loo`` needs it, with ``observed_data``, and
        * ``posterior_predictive``, draws of the targets.

        >>> model, x, y = ps.BayesianModel(nn.Linear(2, 1), likelihood="gaussian"), torch.randn(5, 2), torch.randn(5)
        >>> draws = {name: prior.sample((4, 50)) for name, prior in model.priors().items()}
        >>> posterior = ps.Posterior(draws, kind="chains")
        >>> tree = posterior.to_arviz(log_likelihood=(model, x, y), posterior_predictive=(model, x))
        >>> sorted(tree.children), dict(tree["log_likelihood"].sizes)
        (['log_likelihood', 'observed_data', 'posterior', 'posterior_predictive'], {'chain': 4, 'draw': 50, 'row': 5})

        The axes of a layer's ``0.weight`` and ``0.bias`` are called ``0.out`` and ``0.in``; other sites' axes
        ``<site>_dim_<k>``.

        :param dims: site -> names of its axes, to replace those above; the axis of rows is called ``row``.
        :param coords: name of an axis -> its labels.
        :param log_likelihood: the model and what it is called with, or ``True`` for what the posterior was drawn from.
        :param posterior_predictive: likewise; leave targets out (or pass ``y=None``) to predict other inputs.
        """
        asked = {"log_likelihood": log_likelihood, "posterior_predictive": posterior_predictive}
        return to_arviz(self, dims, coords, **asked)

    # how good it is -------------------------------------------------------------------------------------------------

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Convergence, for every site over its weights; see :func:`~pyro_symmetric.posterior.diagnostics.diagnostics`.

        Modulo a symmetry: ``ps.align_many(posterior, symmetry).posterior.diagnostics()``.

        :return: site -> ``r_hat``, ``ess_bulk``, ``ess_tail`` of the worst weight, each also as ``_median``, and
            ``n_eff``, Pyro's name for ``ess_bulk``; and, as in Pyro, ``"divergences"`` and ``"acceptance rate"``.
        """
        return diagnostics(self.samples, self.statistics)

    def summary_table(self) -> str:
        """One line for each site: worst and median R-hat and effective sample sizes; then divergences, acceptance."""
        return sites_table(self.samples, self.statistics, counts(self.kind, self.num_chains, self.num_samples))

    def summary(self, prob: float = 0.9) -> None:
        """Print :meth:`summary_table`, and before it, as Pyro does, a line for every entry of sites with few of them.

        If the model has a symmetry, draws may come from different copies of a mode. Then
        :func:`~pyro_symmetric.compare.summary` aligns them first: ``ps.summary(posterior, symmetry)``.

        :param prob: how much of an entry's draws its interval holds, between quantiles.
        """
        arguments.fraction("prob", prob)
        print("\n\n".join(filter(None, (entries_table(self.samples, prob), self.summary_table()))))

    # the store ------------------------------------------------------------------------------------------------------

    def save(self, path: PathLike) -> None:
        """Write everything to a folder, a Zarr group that ``xarray.open_datatree(path, engine="zarr")`` opens.

        The folder appears whole or not at all: it is written beside its place, synced and then moved there. Another
        saved posterior there is replaced.

        :raises OSError: if it can't be written (full disk, missing or read-only folder), or if there is something else.
        :raises ValueError: if the metadata can't be written as JSON.
        """
        save_store(path, Contents(self.samples, self.statistics, {**self.metadata, "kind": self.kind}))

    @classmethod
    def load(cls, path: PathLike, *, verify: bool = True) -> Posterior:
        """Read what :meth:`save` wrote, or the folder that ``sample(store=...)`` writes, also while it does.

        On the CPU; draws are mapped from the files, so that they needn't fit into memory. Of a run in tasks, those of
        the tasks that have finished stand side by side; if none has, as far as all of them have come.

        :param verify: read everything once and compare it with its checksums, at some gigabytes a second.  ``False``:
            open at once, and read draws when they are touched, right or damaged.
        :raises OSError: if there is no such folder or it can't be read.
        :raises StoreError: if it is truncated, differs from its checksum, or is of a newer version of the format.
        """
        folder = Path(path)
        if tasks := sorted(folder.glob("task-*")):
            begun = [cls.load(task, verify=verify) for task in tasks if (task / CHECKPOINT).exists()]
            done = [part for part in begun if not part.metadata.get("interrupted")] or begun
            fewest = min((part.num_samples for part in done), default=0)
            joint = cls.concat([part.select(draws=slice(fewest)) for part in done])
            broken = joint.metadata["interrupted"] or len(done) < len(tasks)
            return replace(joint, metadata={**joint.metadata, "interrupted": broken})
        samples, statistics, metadata = read_store(folder, verify=verify)
        try:
            return cls(samples, statistics, metadata, kind=metadata.pop("kind", "chains"))
        except (TypeError, ValueError) as error:  # a checkpoint that nothing of ours has written
            raise StoreError(f"{path} is damaged: {error!r}") from error


def _joint(every: Sequence[dict[str, Any]], chains: Sequence[int]) -> dict[str, Any]:
    """The metadata of several runs together: what they agree in, ``seconds`` of all, and the rest by ``parts``."""
    summed = ("seconds", "interrupted")
    same = {n: v for n, v in every[0].items() if n not in summed and all(own.get(n) == v for own in every)}
    parts = [{"chains": k} | {n: v for n, v in o.items() if n not in same} for k, o in zip(chains, every, strict=True)]
    joint = {**same, "parts": parts}
    if all(isinstance(own.get("seconds"), dict) for own in every):
        joint["seconds"] = {phase: sum(own["seconds"][phase] for own in every) for phase in every[0]["seconds"]}
    if any("interrupted" in own for own in every):
        joint["interrupted"] = any(own.get("interrupted", False) for own in every)
    return joint
