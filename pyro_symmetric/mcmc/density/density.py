r"""The potential energy of any Pyro model, for many chains at once; discrete sites are summed out.

.. math:: U(z) = -\log p(w(z), \text{data}) - \log\left|\det \frac{\partial w}{\partial z}\right|

over the unconstrained vectors of a :class:`~pyro_symmetric.weights.Layout`. Which engine computes it, and in what
chunks of chains, is settled when the density is made, by rules and not by timing, so that every run rounds alike.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.mcmc.density.compiled import LEAST_EVALUATIONS, Compiled, has_compiler
from pyro_symmetric.mcmc.density.eager import (
    Eager,
    Evaluation,
    NetworkTarget,
    Rows,
    Unavailable,
    in_chunks,
    same_evaluation,
)
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.traced import TracedTarget, placed, promoted, require_model
from pyro_symmetric.weights import Layout, Weights, batch_shape, require_sites

CHAIN_DTYPES = (torch.float32, torch.float64)
ENGINES = ("auto", "eager", "layers", "compiled")
"""The engines that compute energies and gradients. ``"eager"``: the model itself, mapped over chains. ``"layers"``: for
feed-forward networks, without the model. ``"compiled"``: programs by PyTorch's compiler, for any model and kernel; they
take some seconds, more for long models, and are kept."""
STEPS = 4  # of a trajectory in one dimension, of many regressions; in D about the fourth root of D times as many
CACHE_BYTES = 2**22  # that an intermediate result of a chunk of chains should fit into, on a CPU


def log_joint(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[Weights], Tensor]:
    """The log-joint density of any Pyro model as a function of batches of weights.

    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> density = ps.log_joint(model, torch.tensor(0.0))
    >>> density({"mean": torch.tensor([0.0, 1.0])})  # -log(2 pi), and 1 less
    tensor([-1.8379, -2.8379])

    :param model: a Pyro model, whose discrete sites are summed out, or a ``BayesianModel``; ``args`` and ``kwargs`` are
        what it is called with.
    :return: constrained weights ``batch_shape + site_shape`` -> ``batch_shape``, on the weights' device, computed on
        the model's.
    """
    density = Density(model, args, kwargs, engine="eager")
    shapes = density.layout.site_shapes

    def log_density(weights: Weights) -> Tensor:
        arguments.weights("weights", weights)
        require_sites(weights, shapes)
        batch = batch_shape(weights, shapes)  # names the site whose shape doesn't fit
        flat = {site: weights[site].to(density.device).reshape(-1, *shape) for site, shape in shapes.items()}
        return density.target.log_joint(flat, None).reshape(batch).to(weights[next(iter(shapes))].device)

    return log_density


class Density:
    """Potential energy and its gradient, chains first.

    >>> model = BayesianModel(nn.Linear(3, 2))
    >>> density = Density(model, (torch.randn(10, 3), torch.randint(2, (10,))))
    >>> energy, gradient = density.energy_and_gradient(density.draw_prior(16, torch.Generator()))
    >>> energy.shape, gradient.shape
    (torch.Size([16]), torch.Size([16, 8]))

    :param model: a Pyro model. Discrete latent sites are summed out; there must be continuous ones.
    :param args: the model's positional arguments, data included; ``kwargs`` are its keyword arguments.
    :param device: where to compute; by default where the model's sites are. A module is copied there, never moved.
    :param dtype: of the chains; by default that of the model's sites. Floating-point arguments are converted.
    :param chain_chunk: how many chains to evaluate at once. ``None``: on a CPU as many as keep intermediate results in
        the cache, about; on other devices, and where a network's loop goes chain by chain, all.
    :param engine: one of :data:`ENGINES`. ``"auto"``: ``"layers"`` for a feed-forward network; of other models
        ``"compiled"`` if so many ``iterations`` of ``num_steps`` are planned that it pays. If one can't serve
        ``"eager"`` does, with a warning if it was asked for by name or if a compiler is missing.
    :param batch_size: rows of each mini-batch of a ``BayesianModel``, for stochastic-gradient samplers; ``None``: all.
        Other models' mini-batches are what their plates with ``subsample_size`` draw.
    :param subsampled: whether mini-batches are allowed; otherwise a model that subsamples is refused.
    :ivar dim: number of unconstrained coordinates ``D``.
    :ivar row_counts: the rows of mini-batches: name -> (rows there are, rows in a batch); empty if all data are used.
    :raises ValueError: naming the site, plate or module that can't be sampled, with advice.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        chain_chunk: int | None = None,
        engine: str = "auto",
        batch_size: int | None = None,
        subsampled: bool = False,
        iterations: int = 0,
        num_steps: int | None = None,
    ):
        require_model(model)
        arguments.instance("args", args, (tuple, list), "a tuple of the model's arguments, as in (x, y)")
        self.chain_chunk = arguments.whole("chain_chunk", chain_chunk, 1, none="all chains at once")
        arguments.one_of("dtype", dtype, (None, *CHAIN_DTYPES))
        arguments.one_of("engine", engine, ENGINES)
        if batch_size is not None and not isinstance(model, BayesianModel):
            raise ValueError(
                "batch_size is of a BayesianModel's rows; in another model pass subsample_size to the data's plate, "
                "as in `with pyro.plate('data', len(x), subsample_size=32) as rows`"
            )
        _refuse_training_batch_norm(model)
        model, args, kwargs = placed(model, tuple(args), dict(kwargs or {}), device, dtype)
        with forked(0, device):  # a model is run from the prior, to see its sites and to try engines out
            self.target: NetworkTarget | TracedTarget
            if isinstance(model, BayesianModel):
                self.target = NetworkTarget(model, args, kwargs, batch_size)
            else:
                self.target = TracedTarget(model, args, kwargs, device, dtype)
            self.row_counts = self.target.row_counts
            if self.row_counts and not subsampled:
                sizes = ", ".join(f"{name!r}: {size} of {all_} rows" for name, (all_, size) in self.row_counts.items())
                raise ValueError(
                    f"the model subsamples its data ({sizes}); all of them are needed here. Pass the whole data "
                    "(and no subsample_size), or, to sample, use a stochastic-gradient sampler (SGHMC)"
                )
            self.layout = Layout.of(self.target.sites)
            self.dim = self.layout.dim
            if self.dim == 0:
                raise ValueError(f"the model's sites {list(self.target.sites)} hold no numbers, so nothing to sample")
            drawn = self.target.prior_weights(2)
            floats = [value for value in drawn.values() if value.is_floating_point()]
            self.device = torch.device(device) if device is not None else floats[0].device
            self.dtype = dtype or promoted(floats) or torch.get_default_dtype()
            if self.dtype not in CHAIN_DTYPES:
                raise ValueError(f"the model's sites are of {self.dtype}, too coarse; pass dtype=torch.float32")
            self._eager = Eager(self.target, self.layout)
            self.fast: Any = None
            self.engine_reason = ""
            steps = num_steps or STEPS * self.dim**0.25
            self._settle_engine(engine, self.unconstrain(drawn), steps * iterations)

    @property
    def is_network(self) -> bool:
        """True of a ``BayesianModel``."""
        return isinstance(self.target, NetworkTarget)

    @property
    def engine(self) -> str:
        """The one of :data:`ENGINES` that serves. They round differently."""
        return "eager" if self.fast is None else self.fast.name

    def __repr__(self) -> str:
        engine = f"{self.engine!r} ({self.engine_reason})" if self.engine_reason else repr(self.engine)
        return f"Density({self.target}, dim={self.dim}, device={self.device}, dtype={self.dtype}, engine={engine})"

    # energy ---------------------------------------------------------------------------------------------------------

    def energy(self, z: Tensor, rows: Rows | None = None) -> Tensor:
        """Energy ``(C,)`` of chains at ``z`` of shape ``(C, D)``; see :meth:`energy_and_gradient`."""
        return self.energy_and_gradient(z, rows)[0]

    def energy_and_gradient(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """Energy ``(C,)`` and gradient ``(C, D)``.

        :param z: unconstrained vectors of the chains, ``(C, D)``.
        :param rows: mini-batches, for each name in ``row_counts`` a LongTensor ``(C, B)``: each chain its own rows.
            The energy is then the unbiased estimate that counts each row ``N / B`` times.
        """
        return in_chunks(self._evaluated, z, rows, self.chain_chunk)

    def without_compiling(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """:meth:`energy_and_gradient` by the model itself."""
        return in_chunks(self._eager.energy_and_gradient, z, rows, self.chain_chunk)

    def _evaluated(self, z: Tensor, rows: Rows | None) -> Evaluation:
        if self.fast is not None:
            try:
                return self.fast.energy_and_gradient(z, rows)
            except torch.linalg.LinAlgError:
                pass  # below, chain by chain
            except Unavailable as error:
                self.give_up(error)
        return self._eager.energy_and_gradient(z, rows)

    # engines --------------------------------------------------------------------------------------------------------

    def give_up(self, reason: Exception) -> None:
        """Go on with the model itself, and warn."""
        better, self.fast, self.engine_reason = self.engine, None, str(reason)
        warnings.warn(f"engine 'eager' serves, not {better!r}: {reason}", RuntimeWarning, stacklevel=4)

    def _settle_engine(self, asked: str, z: Tensor, evaluations: float) -> None:
        """:param z: draws from the prior, at which the model itself and engines are evaluated."""
        counts = self.row_counts.items()
        rows = {name: torch.arange(size, device=self.device).expand(len(z), size) for name, (_, size) in counts} or None
        expected, named = self._probed(z, rows), asked != "auto"
        if not named:
            pays = evaluations >= LEAST_EVALUATIONS
            asked = "layers" if self.is_network else "compiled" if pays else "eager"
        if asked != "eager":
            self.engine_reason = self.target.one_by_one  # which was warned of
        try:
            if asked == "layers" and not self.engine_reason:
                from pyro_symmetric.mcmc.density.layers import Layers  # which takes long to load

                layers = Layers(self.target)
                known = all(bool(torch.isfinite(part).all()) for part in expected)
                if not (known and same_evaluation(layers.energy_and_gradient(z, rows), expected)):
                    raise Unavailable("the evaluation by hand differs from the model's own, or that isn't finite")
                self.fast = layers
            if asked == "compiled" and not self.engine_reason and not has_compiler(self.device):
                raise Unavailable("no C++ compiler was found (g++, clang++ or $CXX)")
        except Unavailable as error:
            self.engine_reason = str(error)
            if named or asked == "compiled":
                warnings.warn(f"engine 'eager' serves, not {asked!r}: {error}", RuntimeWarning, stacklevel=3)
        if self.chain_chunk is None and self.device.type == "cpu" and not getattr(self.fast, "tiled", False):
            given = [v.numel() for v in tree_leaves((self.target.args, self.target.kwargs)) if isinstance(v, Tensor)]
            # As many chains as have numbers of the size of the data, or of themselves, in the cache.
            numbers = max([self.dim, *given]) * self.dtype.itemsize
            self.chain_chunk = 2 ** int(math.log2(max(1, CACHE_BYTES // numbers)))
        if asked == "compiled" and not self.engine_reason:
            self.fast = Compiled(self._eager, self.chain_chunk or sys.maxsize)

    def _probed(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """The model's own evaluation; whether chains are evaluated one by one is settled on the way.

        :raises ValueError: in words, if the model can't be evaluated, or not twice alike.
        """
        evaluate, target = self._eager.energy_and_gradient, self.target
        if isinstance(target, NetworkTarget):
            return evaluate(z, rows)
        target.one_by_one = "not known yet"
        try:
            alone = evaluate(z, rows)
        except RuntimeError as error:
            said = (str(error).strip() or repr(error)).splitlines()[0]
            raise ValueError(f"the model's density, or its gradient, can't be evaluated: {said}") from error
        target.one_by_one, failure = "", None
        try:
            together = evaluate(z, rows)
        except Exception as error:  # the map over chains runs other people's code, which may raise anything
            failure = error
        if failure is None and same_evaluation(together, alone):
            return together
        target.one_by_one = "the results differ"
        if not same_evaluation(evaluate(z, rows), alone):
            raise ValueError(
                "the model's density isn't a function of its sites: two evaluations at one point differ. Usual causes: "
                "dropout in train mode (call .eval()), or random numbers drawn outside of pyro.sample"
            )
        target.give_up_map(failure or target.one_by_one)
        return alone

    # places ---------------------------------------------------------------------------------------------------------

    def draws(self, z: Tensor) -> Weights:
        """Weights at vectors ``(C, D)``, and the values of the model's deterministic sites."""
        weights = self.layout.constrain(z)
        return weights | self.target.compute(weights)

    def unconstrain(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Weights on any device and in any dtype -> unconstrained vectors ``batch_shape + (D,)`` of this density."""
        own = {site: value.detach().to(self.device, self.dtype) for site, value in weights.items()}
        return self.layout.unconstrain(own)

    def draw_prior(self, num: int, generator: torch.Generator) -> Tensor:
        """Draws ``(num, D)`` from the prior. The model is run with PyTorch's global generators seeded from
        ``generator``; afterwards they are as they were."""
        with forked(generator, self.device):
            return self.unconstrain(self.target.prior_weights(num))


def _refuse_training_batch_norm(model: Any) -> None:
    """:raises ValueError: naming the module."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"the module {name or type(module).__name__!r} is batch normalisation in train mode: a row's density "
                "would depend on the other rows. Call .eval() on the model, so that it uses its running statistics"
            )
