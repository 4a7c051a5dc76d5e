r"""Potential energy of any Pyro model, for many chains at once; discrete sites are
summed out.

.. math:: U(z) = -\log p(w(z), \text{data})
    - \log\left|\det \frac{\partial w}{\partial z}\right|

for the unconstrained vectors of a :class:`~pyro_symmetric.weights.Layout`. The engine
and the number of chains in a chunk are chosen when the density is made, by rules
instead of timings, so that rounding is reproducible.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.arguments import Device, Dtype, Function, Keywords, Model
from pyro_symmetric.density.compiled import MIN_EVALUATIONS, Compiled, has_compiler
from pyro_symmetric.density.eager import (
    Eager,
    Evaluation,
    NetworkTarget,
    Rows,
    Unavailable,
    in_chunks,
    largest_size,
    same_evaluation,
)
from pyro_symmetric.density.site_checks import in_support
from pyro_symmetric.density.traced import TracedTarget, placed, promoted, require_model
from pyro_symmetric.errors import first_line
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import (
    Layout,
    Tensors,
    Weights,
    batch_shape,
    map_values,
    require_sites,
)

CHAIN_DTYPES = (torch.float32, torch.float64)
ENGINES = ("auto", "eager", "layers", "compiled")
"""The engines that compute energies and gradients. ``"eager"``: the model mapped over
chains. ``"layers"``: a loop over the layers of feed-forward networks. ``"compiled"``:
programs of PyTorch's compiler, for any model and kernel. They take some seconds to
compile, more for long models, and are cached."""
# leapfrog steps of a trajectory in one dimension, typical of regressions; in D they
# grow as D^(1/4). In warm-up, in which scales are unknown, any model has about as many.
STEPS, WARMUP_STEPS = 4, 12
REPEATS = 8  # evaluations that must agree if the model draws random numbers
CACHE_BYTES = 2**22  # limit of an intermediate result of a chunk of chains, on a CPU


def log_joint(model: Model, *args: Any, **kwargs: Any) -> Callable[[Weights], Tensor]:
    """Return the log-joint density of any Pyro model as a function of batches of
    weights.

    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> density = ps.log_joint(model, torch.tensor(0.0))
    >>> density({"mean": torch.tensor([0.0, 1.0])})  # -log(2 pi), and 1 less
    tensor([-1.8379, -2.8379])

    :param model: a Pyro model, whose discrete sites are summed out, or a
        ``BayesianModel``; ``args`` and ``kwargs`` are its arguments.
    :return: function of constrained weights ``batch_shape + site_shape``, with values
        ``batch_shape`` on the device of the weights, computed on that of the model. It
        is ``-inf`` outside of the support of a site: off the simplex, say.
    """
    density = Density(model, args, kwargs, engine="eager")
    shapes = density.layout.site_shapes

    inner = density.layout.constrain(torch.zeros(1, density.dim, device=density.device))

    def log_density(weights: Weights) -> Tensor:
        arguments.weights("weights", weights)
        remedy = ". If the model observes them, its arguments lack the data"
        require_sites(weights, shapes, remedy=remedy)
        batch = batch_shape(weights, shapes)  # raises for a site of the wrong shape
        flat = {
            site: weights[site].to(density.device).reshape(-1, *shape)
            for site, shape in shapes.items()
        }
        is_possible = torch.ones(batch.numel(), dtype=torch.bool, device=density.device)
        is_nan = torch.zeros_like(is_possible)
        for site, value in flat.items():
            inside = in_support(density.target.sites[site], value.nan_to_num(nan=0.0))
            is_possible = is_possible & inside.reshape(len(value), -1).all(-1)
            is_nan = is_nan | value.isnan().reshape(len(value), -1).any(-1)
        is_usable = is_possible & ~is_nan
        # A distribution may fail outside of its support, or give a finite density.
        possible = {}
        for site, value in flat.items():
            rows = is_usable.reshape(-1, *[1] * len(shapes[site]))
            possible[site] = torch.where(rows, value, inner[site].to(value))
        values = density.target.log_joint(possible, None)
        outside = torch.where(is_nan, torch.nan, -torch.inf).to(values)
        log_probs = torch.where(is_usable, values, outside).reshape(batch)
        return log_probs.to(weights[next(iter(shapes))].device)

    return log_density


class Density:
    """Potential energy and gradient of many chains.

    >>> from pyro_symmetric.density.density import Density
    >>> model = ps.BayesianModel(nn.Linear(3, 2))
    >>> density = Density(model, (torch.randn(10, 3), torch.randint(2, (10,))))
    >>> energy, gradient = density.energy_and_gradient(
    ...     density.draw_prior(16, torch.Generator())
    ... )
    >>> energy.shape, gradient.shape
    (torch.Size([16]), torch.Size([16, 8]))

    :param model: a Pyro model with continuous latent sites. Discrete latent sites are
        summed out.
    :param args: positional arguments of the model, including data; ``kwargs`` are its
        keyword arguments.
    :param device: device of the computation, by default that of the model's sites.
        Modules are copied, never moved.
    :param dtype: dtype of the chains, by default that of the model's sites.
        Floating-point arguments are converted.
    :param chain_chunk: number of chains to evaluate at once. ``None``: on a CPU, as
        many as keep intermediate results in the cache; all on other devices and in a
        loop over chains.
    :param engine: one of :data:`ENGINES`. ``"auto"``: ``"layers"`` for feed-forward
        networks; for other models ``"compiled"`` if iterations of ``num_steps``
        gradients are enough to repay it. ``"eager"`` replaces an engine that fails,
        with a warning if that was asked for by name or if a compiler is missing.
    :param batch_size: rows in a mini-batch of a ``BayesianModel``, for
        stochastic-gradient samplers; ``None``: all. The mini-batches of other models
        come from their plates with ``subsample_size``.
    :param subsampled: whether the model may subsample its data.
    :param num_warmup: expected iterations of warm-up; ``num_samples``: after it.
    :param num_steps: gradients of an iteration; ``None``: :data:`WARMUP_STEPS` in
        warm-up, :data:`STEPS` times the fourth root of ``D`` after it.
    :ivar dim: number of unconstrained coordinates ``D``.
    :ivar row_counts: of mini-batches, name -> (rows in the data, rows in a mini-batch);
        empty if all data are used.
    :raises ValueError: naming a site, plate or module that can't be sampled, with
        advice.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any] = (),
        kwargs: Keywords | None = None,
        *,
        device: Device = None,
        dtype: Dtype = None,
        chain_chunk: int | None = None,
        engine: str = "auto",
        batch_size: int | None = None,
        subsampled: bool = False,
        num_warmup: int = 0,
        num_samples: int = 0,
        num_steps: int | None = None,
    ):
        require_model(model)
        arguments.instance(
            "args",
            args,
            (tuple, list),
            "a tuple of the model's arguments, as in (x, y)",
        )
        self.chain_chunk = arguments.whole(
            "chain_chunk", chain_chunk, 1, none="all chains at once"
        )
        arguments.one_of("dtype", dtype, (None, *CHAIN_DTYPES))
        arguments.one_of("engine", engine, ENGINES)
        if batch_size is not None and not isinstance(model, BayesianModel):
            raise ValueError(
                "batch_size is for a BayesianModel; in another model pass "
                "subsample_size to the data's plate, as in "
                "`with pyro.plate('data', len(x), subsample_size=32) as rows`"
            )
        _refuse_training_batch_norm(model)
        model, args, kwargs = placed(
            model, tuple(args), dict(kwargs or {}), device, dtype
        )
        with forked(0, device):  # running the model draws from its prior
            self.target: NetworkTarget | TracedTarget
            if isinstance(model, BayesianModel):
                self.target = NetworkTarget(model, args, kwargs, batch_size)
            else:
                self.target = TracedTarget(model, args, kwargs, device, dtype)
            self.row_counts = self.target.row_counts
            if self.row_counts and not subsampled:
                sizes = ", ".join(
                    f"{name!r}: {size} of {all_} rows"
                    for name, (all_, size) in self.row_counts.items()
                )
                raise ValueError(
                    f"the model subsamples its data ({sizes}), but all rows are needed "
                    "here. Pass the whole data (and "
                    "no subsample_size), or sample with a stochastic-gradient kernel "
                    "(SGHMC)"
                )
            self.layout = Layout.of(self.target.sites)
            self.dim = self.layout.dim
            if self.dim == 0:
                raise ValueError(
                    f"the model's sites {list(self.target.sites)} are empty, so there "
                    "is nothing to sample"
                )
            weights = self.target.prior_weights(2)
            floats = [value for value in weights.values() if value.is_floating_point()]
            self.device = (
                torch.device(device) if device is not None else floats[0].device
            )
            self.dtype = dtype or promoted(floats) or torch.get_default_dtype()
            if self.dtype not in CHAIN_DTYPES:
                raise ValueError(
                    f"the model's sites are {self.dtype}, too imprecise; pass "
                    "dtype=torch.float32"
                )
            self._eager = Eager(self.target, self.layout)
            self._largest_result = 0  # of a chain, if known
            self.fast: Any = None
            self.engine_reason = ""
            gradients = num_warmup * (num_steps or WARMUP_STEPS)
            gradients += num_samples * (num_steps or STEPS * self.dim**0.25)
            self._choose_engine(engine, self.unconstrain(weights), gradients)

    @property
    def is_network(self) -> bool:
        """True for a ``BayesianModel``."""
        return isinstance(self.target, NetworkTarget)

    @property
    def engine(self) -> str:
        """The engine in use, one of :data:`ENGINES`. Engines round differently."""
        return "eager" if self.fast is None else self.fast.name

    def __repr__(self) -> str:
        engine = (
            f"{self.engine!r} ({self.engine_reason})"
            if self.engine_reason
            else repr(self.engine)
        )
        return (
            f"Density({self.target}, dim={self.dim}, device={self.device}, "
            f"dtype={self.dtype}, engine={engine})"
        )

    # energy ---------------------------------------------------------------------------

    def energy(self, z: Tensor, rows: Rows | None = None) -> Tensor:
        """Return energies ``(C,)`` at positions ``(C, D)``; see
        :meth:`energy_and_gradient`.
        """
        return self.energy_and_gradient(z, rows)[0]

    def energy_and_gradient(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``.

        :param z: unconstrained positions of the chains, ``(C, D)``.
        :param rows: mini-batches of each chain, a LongTensor ``(C, B)`` for each name
            in ``row_counts``. The energy is then the unbiased estimate that counts each
            row ``N / B`` times.
        """
        return in_chunks(self._evaluate, z, rows, self.chain_chunk)

    def without_compiling(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """Return :meth:`energy_and_gradient` by the eager engine."""
        return in_chunks(self._eager.energy_and_gradient, z, rows, self.chain_chunk)

    def _evaluate(self, z: Tensor, rows: Rows | None) -> Evaluation:
        if self.fast is not None:
            try:
                return self.fast.energy_and_gradient(z, rows)
            except torch.linalg.LinAlgError:
                pass  # a singular matrix, isolated by the eager engine
            except Unavailable as error:
                self.give_up(error)
        return self._eager.energy_and_gradient(z, rows)

    # engines --------------------------------------------------------------------------

    def give_up(self, reason: Exception) -> None:
        """Fall back to the eager engine, with a warning."""
        failed = self.engine
        self.fast = None
        self.engine_reason = str(reason)
        warnings.warn(
            f"using engine 'eager' instead of {failed!r}: {reason}",
            RuntimeWarning,
            stacklevel=4,
        )

    def first_rows(self, count: int) -> Rows | None:
        """Return the first rows of the data as the mini-batches of some chains."""
        return {
            name: torch.arange(size, device=self.device).expand(count, size)
            for name, (_, size) in self.row_counts.items()
        } or None

    def _choose_engine(self, engine: str, z: Tensor, evaluations: float) -> None:
        """Choose the engine and ``chain_chunk``. Engines are compared with the model at
        draws ``z`` of the prior.
        """
        rows = self.first_rows(len(z))
        expected = self._try_model(z, rows)
        named = engine != "auto"
        if not named:
            pays = evaluations >= MIN_EVALUATIONS
            engine = "layers" if self.is_network else "compiled" if pays else "eager"
        if engine != "eager":
            self.engine_reason = self.target.one_by_one  # has been warned of
        is_possible = not self.engine_reason
        try:
            if engine == "layers" and is_possible:
                self.fast = self._layers(z, rows, expected)
            if engine == "compiled" and is_possible and not has_compiler(self.device):
                raise Unavailable("no C++ compiler was found (g++, clang++ or $CXX)")
        except Unavailable as error:
            self.engine_reason = str(error)
            if named or engine == "compiled":
                warnings.warn(
                    f"using engine 'eager' instead of {engine!r}: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
        is_tiled = getattr(self.fast, "tiles", None) is not None
        if self.chain_chunk is None and self.device.type == "cpu" and not is_tiled:
            # Results of a network's chain aren't measured; they are taken to be as
            # large as its data.
            data = (self.target.args, self.target.kwargs)
            numbers = max(self.dim, largest_size(data), self._largest_result)
            chains = CACHE_BYTES // (numbers * self.dtype.itemsize)
            self.chain_chunk = 2 ** int(math.log2(max(1, chains)))
        if engine == "compiled" and not self.engine_reason:
            self.fast = Compiled(self._eager, self.chain_chunk or sys.maxsize, z)

    def _layers(self, z: Tensor, rows: Rows | None, expected: Evaluation) -> Any:
        """Return the engine of feed-forward networks, if it agrees with the model."""
        from pyro_symmetric.density.layers import Layers  # slow to import

        layers = Layers(self.target)
        finite = all(bool(part.isfinite().all()) for part in expected)
        if finite and same_evaluation(layers.energy_and_gradient(z, rows), expected):
            return layers
        raise Unavailable("its results differ from the model's, or those aren't finite")

    def _try_model(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """Evaluate the model, and decide whether its chains are mapped or evaluated one
        by one.

        :raises ValueError: if the model can't be evaluated, or two evaluations differ.
        """
        evaluate = self._eager.energy_and_gradient
        target = self.target
        if isinstance(target, NetworkTarget):
            return evaluate(z, rows)
        target.one_by_one = "not known yet"
        generator_state = torch.get_rng_state()
        try:
            # not mapped yet, so that results are those of one chain
            with _LargestResult() as results:
                unmapped = evaluate(z, rows)
        except RuntimeError as error:
            raise ValueError(
                "the model's density, or its gradient, can't be evaluated: "
                f"{first_line(error)}"
            ) from error
        self._largest_result = results.size
        # A model whose sites all have values draws no numbers, except for sites that
        # it hides; a discrete one seldom shows in the density.
        if not torch.equal(generator_state, torch.get_rng_state()):
            repeated = [evaluate(z, rows) for _ in range(REPEATS)]
            if not all(same_evaluation(again, unmapped) for again in repeated):
                raise target.is_random()
        target.one_by_one = ""
        failure = None
        try:
            mapped = evaluate(z, rows)
        except Exception as error:  # the model's code under vmap may raise anything
            failure = error
        if failure is None and same_evaluation(mapped, unmapped):
            return mapped
        target.one_by_one = "the results differ"
        if failure is None and self._eager.are_alike(mapped, unmapped, z, rows):
            target.one_by_one = ""
            return mapped
        if not same_evaluation(evaluate(z, rows), unmapped):
            raise target.is_random()
        target.give_up_map(failure or target.one_by_one)
        return unmapped

    # positions ------------------------------------------------------------------------

    def draws(self, z: Tensor) -> Weights:
        """Return weights and deterministic sites at positions ``(C, D)``."""
        weights = self.layout.constrain(z)
        return weights | self.target.compute(weights)

    def unconstrain(self, weights: Tensors) -> Tensor:
        """Transform weights of any device and dtype to unconstrained vectors
        ``batch_shape + (D,)``.
        """
        return self.layout.unconstrain(
            map_values(lambda v: v.detach().to(self.device, self.dtype), weights)
        )

    def draw_prior(self, num: int, generator: torch.Generator) -> Tensor:
        """Draw positions ``(num, D)`` from the prior. PyTorch's global generators are
        seeded from ``generator`` meanwhile, and then restored."""
        with forked(generator, self.device):
            return self.unconstrain(self.target.prior_weights(num))


# parts of a kernel's step -------------------------------------------------------------


def fused(density: Any, function: Function, *inputs: Any) -> Any:
    """Return ``function(evaluate, *inputs)``, computed by one program if the density's
    engine compiles.

    :param density: a :class:`Density`, or any object with its
        ``energy_and_gradient(z)``.
    :param function: a module-level function, since it identifies the program. It
        computes with tensors, draws no random numbers and doesn't branch on values.
        ``evaluate`` takes positions ``(C, D)``.
    :param inputs: tensors, or tuples and dataclasses of tensors. The first tensor has
        shape ``(C, D)``.
    :return: a tensor, or tuples and dataclasses of tensors.
    """
    if _have_program(density, inputs):
        try:
            return density.fast.run(function, *inputs)
        except Unavailable as error:
            density.give_up(error)
        # a singular matrix of one chain, which must not affect the others
        except RuntimeError:
            return function(density.without_compiling, *inputs)
    return function(density.energy_and_gradient, *inputs)


def iterated(
    density: Any, function: Function, count: int, point: Any, *inputs: Any
) -> Any:
    """Apply a function ``count`` times, at least once, as :func:`fused` does, each time
    to its last result; at first to ``point``.
    """
    if _have_program(density, (point, *inputs)):
        try:
            return density.fast.run(function, point, *inputs, count=count)
        except Unavailable as error:
            density.give_up(error)
        except RuntimeError:  # a singular matrix of one chain, at one of the steps
            pass
    for _ in range(count):
        point = fused(density, function, point, *inputs)
    return point


def _have_program(density: Any, inputs: Any) -> bool:
    """Return whether programs are compiled for inputs, of which the first tensor has
    shape ``(C, D)``.
    """
    z = inputs
    while not isinstance(z, Tensor):
        z = z[0]
    return compiles(density) and len(z) <= density.fast.most_chains


def compiles(density: Any) -> bool:
    """Return whether :func:`fused` compiles programs for a density."""
    return isinstance(getattr(density, "fast", None), Compiled)


class Uncompiled(NamedTuple):
    """A density of which :func:`fused` compiles no programs."""

    density: Any

    def energy_and_gradient(self, z: Tensor, *rows: Rows | None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``."""
        return evaluated_once(self.density, z, *rows)


def evaluated_once(density: Any, z: Tensor, *rows: Rows | None) -> Evaluation:
    """Return energies and gradients without compiling, as at initial positions."""
    evaluate = (
        density.without_compiling if compiles(density) else density.energy_and_gradient
    )
    energy, gradient = evaluate(z, *rows)
    return energy, gradient


class _LargestResult(TorchDispatchMode):
    """Mode that records how many numbers an operator's largest result holds."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.size = max(self.size, largest_size(result))
        return result


def _refuse_training_batch_norm(model: Any) -> None:
    """Raise ``ValueError`` for batch normalisation in train mode, which makes the
    density of a row depend on others.
    """
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"the module {name or type(module).__name__!r} is batch normalisation "
                "in train mode: the density of a "
                "row would depend on the other rows. Call .eval() on the model to use "
                "running statistics"
            )
