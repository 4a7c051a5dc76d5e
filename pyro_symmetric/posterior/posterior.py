"""Draws by chain and number: what samplers and other methods return, what is stored, what ArviZ reads.

``get_samples``, ``diagnostics`` and ``summary`` are those of Pyro's :class:`~pyro.infer.MCMC`. On disk a posterior is a
Zarr group, see :mod:`~pyro_symmetric.store`. Functions take draws as a posterior, or as a dictionary from site to
tensor, all by one convention:

* Functions of samples (``mmd``, ``common_frame``, ``invariance_tests``, ``align_many`` ...) see the draws of a
  posterior chain after chain, as ``posterior.get_samples()`` gives them. A dictionary is taken as independent samples
  ``(samples, *site_shape)``; one of chains is refused wherever a group or the other side knows the sites' shapes.
* Functions of chains (``diagnose``, ``summary``, ``relabel``) take a dictionary as successive states of Markov chains,
  ``(chains, draws, *site_shape)``.
* Functions of each draw by itself (``canonicalize``, ``minimal_mass``, ``predict``) take a dictionary
  of any batch shape, which their results keep; of a posterior they return a number for each draw, chain after chain.
* What are draws again is a posterior, if one was given, and a dictionary otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import as_tensor, described
from pyro_symmetric.posterior.statistics import chain_statistics
from pyro_symmetric.posterior.tables import summary_tables, to_arviz
from pyro_symmetric.store import PathLike, StoreError, read_store, save_store
from pyro_symmetric.weights import Shapes, Weights

Kind = Literal["chains", "independent"]


class Source(NamedTuple):
    """The source of draws, kept in memory only.

    :param args: what the model was called with, data included; ``kwargs`` likewise.
    :param device: where it was asked to compute; ``None`` if that isn't known or was left to the model.
    :param subsampled: whether the sampler took mini-batches, if that is known.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    device: torch.device | str | None = None
    subsampled: bool | None = None


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
        for name in ("samples", "statistics", "metadata"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        arguments.one_of("kind", self.kind, get_args(Kind))
        arguments.weights("samples", self.samples)
        first, shape = next((site, value.shape[:2]) for site, value in self.samples.items())
        for held, entries, dims in (("samples", self.samples, 2), ("statistics", self.statistics, 0)):
            for name, value in entries.items():
                fits = isinstance(value, Tensor) and value.shape[:2] == shape and len(shape) == 2
                if not fits or value.is_complex() or (not dims and value.dim() != 2):
                    wanted = f"real, (chains, draws{', ...' * bool(dims)}), and samples[{first!r}] has {tuple(shape)}"
                    raise ValueError(f"{held}[{name!r}] is {described(value)}; it must be {wanted}")

    @classmethod
    def from_samples(cls, weights: Mapping[str, Tensor], *, kind: Kind, num_chains: int = 1) -> Posterior:
        """A posterior of flat draws: independent ones (an ensemble, draws of a guide), or chains laid end to end.

        >>> posterior = Posterior.from_samples(guide.sample_posterior((400,)), kind="independent")

        :param weights: site -> ``(S, *site_shape)``.
        :param num_chains: into how many chains of ``S / num_chains`` consecutive draws to cut them.
        """
        arguments.weights("weights", weights)
        shape = (num_chains, len(next(iter(weights.values()))) // num_chains)
        return cls({site: value.unflatten(0, shape) for site, value in weights.items()}, kind=kind)

    @classmethod
    def concat(cls, parts: Sequence[Posterior]) -> Posterior:
        """The chains of several posteriors side by side, as of runs that were made by themselves.

        :param parts: of the same sites and statistics, with as many draws of each chain.
        :return: a posterior with the metadata in which all agree and their ``seconds`` added up; in
            ``metadata["parts"]`` the rest, with each part's number of chains.
        :raises ValueError: if there are none, or their kinds, sites, shapes or numbers of draws differ.
        """
        parts = arguments.listed("parts", parts, Posterior, "posteriors")
        if not parts:
            raise ValueError("parts is empty; it must hold at least one posterior")
        told = [(p.kind, p.site_shapes, list(p.statistics), f"num_samples={p.num_samples}") for p in parts]
        for number, found in enumerate(told):
            if found != told[0]:
                raise ValueError(f"parts[{number}] has {found}, but parts[0] has {told[0]}; they must agree")
        samples, statistics = (
            {name: torch.cat([getattr(part, held)[name] for part in parts]) for name in getattr(parts[0], held)}
            for held in ("samples", "statistics")
        )
        metadata = _joint([part.metadata for part in parts], [part.num_chains for part in parts])
        return cls(samples, statistics, metadata, kind=parts[0].kind, source=parts[0].source)

    def attach(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Posterior:
        """This posterior, remembering its model and what that was called with, data included, as :attr:`source`.

        :func:`~pyro_symmetric.mcmc.sample` does it; a file holds no model. ``diagnose`` looks at the energy then, and
        ``to_arviz(log_likelihood=True)`` needs it.

        >>> posterior = Posterior.load(path).attach(model, x, y)
        """
        return replace(self, source=Source(model, args, kwargs))

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

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> Weights:
        """The draws as weights, as Pyro's ``MCMC.get_samples`` gives them: without deterministic sites, which
        ``Predictive`` would keep instead of computing them anew. :attr:`samples` has them.

        :param num_samples: ``None`` for all; otherwise as many, drawn with replacement.
        :param group_by_chain: keep the chains apart: batch shape ``(chains, draws)`` instead of ``(chains * draws,)``.
        """
        arguments.whole("num_samples", num_samples, 1, none="all")
        found, axis = self._free(), int(group_by_chain)
        found = found if group_by_chain else {site: value.flatten(0, 1) for site, value in found.items()}
        if num_samples is None:
            return found
        count = self.num_samples if group_by_chain else self.num_chains * self.num_samples
        index = torch.randint(count, (num_samples,), device="cpu")
        return {site: value.index_select(axis, index.to(value.device)) for site, value in found.items()}

    def select(self, chains: Any = slice(None), draws: Any = slice(None)) -> Posterior:
        """Some chains and some draws, in a posterior of their own.

        >>> posterior.select(chains=[0, 2], draws=slice(500, None))

        :param chains: a slice (a view, which copies nothing), or indices, or a mask; a single index keeps its axis.
        :param draws: likewise.
        """
        chains, draws = (i if isinstance(i, slice) else as_tensor(i).reshape(-1) for i in (chains, draws))
        samples, statistics = (
            {name: value[chains][:, draws] for name, value in entries.items()}
            for entries in (self.samples, self.statistics)
        )
        return replace(self, samples=samples, statistics=statistics)

    def thin(self, every: int) -> Posterior:
        """Every ``every``-th draw of each chain, as a view; the last draw is kept."""
        arguments.whole("every", every, 1)
        return self.select(draws=slice((self.num_samples - 1) % every if self.num_samples else 0, None, every))

    def map(self, function: Callable[..., Mapping[str, Tensor]], *args: Any, **kwargs: Any) -> Posterior:
        """The same posterior with a function of weights applied to its draws; statistics and metadata are kept.

        >>> posterior.map(element)                        # an element of a symmetry group moves every draw
        >>> posterior.map(ps.canonicalize, symmetry)      # every draw becomes the representative of its orbit

        Deterministic sites are left out: they are those of the draws as they were. :func:`predict` computes them anew.

        :param function: takes weights of batch shape ``(chains, draws)`` and returns weights of that batch shape.
        :param args: what it is called with after the weights; ``kwargs`` likewise.
        """
        found = arguments.weights("what function returned", function(self._free(), *args, **kwargs))
        batch = torch.Size([self.num_chains, self.num_samples])
        if other := {site: tuple(value.shape) for site, value in found.items() if value.shape[:2] != batch}:
            raise ValueError(f"function returned {other}; they must begin with the chains and draws, {tuple(batch)}")
        return replace(self, samples=dict(found))

    def _free(self) -> dict[str, Tensor]:
        """The draws without deterministic sites."""
        return {site: v for site, v in self.samples.items() if site not in self.metadata.get("deterministic", ())}

    # as tables and trees --------------------------------------------------------------------------------------------

    to_arviz = to_arviz

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Convergence in Pyro's form: site -> ``n_eff`` and ``r_hat`` of its entries (the bulk's effective sample size
        and the rank-normalised split R-hat); ``"divergences"`` -> ``{"chain 0": [draws], ...}``; and ``"acceptance
        rate"`` -> ``{"chain 0": mean, ...}`` if the sampler knows one.

        Modulo a symmetry: ``ps.align_many(posterior, symmetry).posterior.diagnostics()``.
        """
        numbers = {site: chain_statistics(value) for site, value in self.samples.items()}
        found: dict[str, dict[str, Any]] = {s: {"n_eff": n.ess_bulk, "r_hat": n.r_hat} for s, n in numbers.items()}
        flags = self.statistics.get("diverging", torch.zeros(self.num_chains, 0, device="cpu"))
        found["divergences"] = {f"chain {c}": row.nonzero().flatten().tolist() for c, row in enumerate(flags)}
        if (rates := self.statistics.get("acceptance_rate")) is not None:
            found["acceptance rate"] = {f"chain {c}": rate for c, rate in enumerate(rates.double().mean(1).tolist())}
        return found

    def summary(self, prob: float = 0.9) -> None:
        """Print a line for every entry of sites with few of them, as Pyro does; of chains one for each site, too: worst
        and median R-hat and effective sample sizes.

        If the model has a symmetry, draws may come from different copies of a mode. Then
        :func:`~pyro_symmetric.compare.summary` aligns them first: ``ps.summary(posterior, symmetry)``.

        :param prob: how much of an entry's draws its interval holds, between quantiles.
        """
        arguments.fraction("prob", prob)
        told = self.counted()
        if "diverging" in self.statistics:
            told += f"; {int(self.statistics['diverging'].sum())} of {self.num_chains * self.num_samples} diverged"
        if "acceptance_rate" in self.statistics:
            told += f"; mean acceptance {float(self.statistics['acceptance_rate'].double().mean()):.2f}"
        print("\n".join([*summary_tables(self.samples, prob, chains=self.kind == "chains"), told]))

    def __repr__(self) -> str:
        weights, width = sum(shape.numel() for shape in self.site_shapes.values()), max(map(len, self.samples))
        maker = f", by {self.metadata['kernel']}" if "kernel" in self.metadata else ""
        lines = [f"Posterior({self.counted()}, {weights} weight{'s' * (weights != 1)}{maker})"]
        lines += [f"  {site:<{width}}  {tuple(shape)}" for site, shape in self.site_shapes.items()]
        more = {"chosen": self.metadata.get("chosen"), "statistics": ", ".join(self.statistics)}
        return "\n".join([*lines, *(f"  {name}: {text}" for name, text in more.items() if text)])

    def counted(self) -> str:
        """The number of draws in words, such as ``4 chains of 100 draws``."""
        chains = self.kind == "chains"
        unit = f"{self.num_chains} {'chain' if chains else 'row'}{'s' * (self.num_chains != 1)} of "
        alone = self.num_chains == 1 and not chains
        return f"{unit * (not alone)}{self.num_samples} {'' if chains else 'independent '}draws"

    # the store ------------------------------------------------------------------------------------------------------

    def save(self, path: PathLike) -> None:
        """Write everything to a folder, a Zarr group that ``xarray.open_datatree(path, engine="zarr")`` opens.

        The folder appears whole or not at all: it is written beside its place, synced and then moved there. Another
        saved posterior there is replaced.

        :raises OSError: if it can't be written (full disk, missing or read-only folder), or if there is something else.
        :raises ValueError: if the metadata can't be written as JSON.
        """
        save_store(path, (self.samples, self.statistics, {**self.metadata, "kind": self.kind}))

    @classmethod
    def load(cls, path: PathLike, *, verify: bool = True) -> Posterior:
        """Read what :meth:`save` wrote, or the folder that ``sample(store=...)`` writes, also while it does.

        On the CPU; draws are mapped from the files, so that they needn't fit into memory. A run in tasks has a folder
        for each; :meth:`concat` joins what they hold.

        :param verify: read everything once and compare it with its checksums, at some gigabytes a second.  ``False``:
            open at once, and read draws when they are touched, right or damaged.
        :raises OSError: if there is no such folder or it can't be read.
        :raises StoreError: if it holds no draws yet, is truncated, differs from its checksum, or is of a newer version.
        """
        samples, statistics, metadata = read_store(path, verify=verify)
        try:
            return cls(samples, statistics, metadata, kind=metadata.pop("kind", "chains"))
        except (TypeError, ValueError) as error:  # a checkpoint that nothing of ours has written
            raise StoreError(f"{path} is damaged: {error!r}") from error


def _joint(every: Sequence[dict[str, Any]], chains: Sequence[int]) -> dict[str, Any]:
    """The metadata in which all runs agree, the ``seconds`` of all, and the rest by ``parts``."""
    same = {n: v for n, v in every[0].items() if n != "seconds" and all(n in own and own[n] == v for own in every)}
    parts = [{"chains": k} | {n: v for n, v in o.items() if n not in same} for k, o in zip(chains, every, strict=True)]
    if all("interrupted" in own for own in every):
        same["interrupted"] = any(own["interrupted"] for own in every)
    seconds: list[Any] = [own.get("seconds") for own in every]
    if all(isinstance(own, dict) for own in seconds):
        same["seconds"] = {phase: sum(own.get(phase, 0.0) for own in seconds) for phase in seconds[0]}
    elif all(isinstance(own, int | float) for own in seconds):  # of an ensemble, which has no phases
        same["seconds"] = sum(seconds)
    return {**same, "parts": parts}


# what functions take ------------------------------------------------------------------------------------------------

Draws = Mapping[str, Tensor] | Posterior


def samples_of(draws: Any, name: str = "weights", shapes: Shapes | None = None) -> Mapping[str, Tensor]:
    """Samples ``(samples, *site_shape)``: of a posterior all draws, chain after chain.

    :param name: what messages call them.
    :param shapes: the shapes of the sites, as far as they are known.
    """
    if isinstance(draws, Posterior):
        draws = draws.get_samples()
    elif not isinstance(draws, Mapping):
        raise TypeError(
            f"{name} are {described(draws)}; they must be a Posterior, or map each site to its samples (of a guide, "
            "take draws: Predictive(model, guide=guide, num_samples=1000))"
        )
    _require_shapes(arguments.weights(name, draws), name, shapes, ("samples",))
    return draws


def chains_of(draws: Any, name: str = "posterior", shapes: Shapes | None = None) -> Posterior:
    """A posterior: a dictionary holds Markov chains ``(chains, draws, *site_shape)``."""
    if isinstance(draws, Posterior):
        return draws
    _require_shapes(arguments.weights(name, draws, "a Posterior"), name, shapes, ("chains", "draws"))
    return Posterior(dict(draws), kind="chains")


def as_given(given: Any, moved: Weights) -> Any:
    """Samples that were moved, ``(samples, *site_shape)``, in the form in which :func:`samples_of` was given them."""
    if not isinstance(given, Posterior):
        return moved
    batch = (given.num_chains, given.num_samples)
    return given.map(lambda _: {site: value.unflatten(0, batch) for site, value in moved.items()})


def _require_shapes(weights: Mapping[str, Tensor], name: str, shapes: Shapes | None, leading: tuple[str, ...]) -> None:
    for site, shape in (shapes or {}).items():
        found = tuple(weights[site].shape) if site in weights else None
        if found is not None and (len(found) != len(leading) + len(shape) or found[len(leading) :] != tuple(shape)):
            raise ValueError(
                f"{name}[{site!r}] has shape {found}; it must be ({', '.join(map(str, (*leading, *shape)))}), or pass "
                "a Posterior, which says what its axes are"
            )
