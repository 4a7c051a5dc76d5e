"""Engine ``"eager"``: the model mapped over chains, and autograd. It is the reference
for the other engines.

A network with its data is a :class:`NetworkTarget`, any other Pyro model a
:class:`~pyro_symmetric.density.traced.TracedTarget`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves

from pyro_symmetric._process import forked, replaced, running_pyro
from pyro_symmetric.arguments import Args, Entries, described, described_call
from pyro_symmetric.density.site_checks import require_possible_targets
from pyro_symmetric.density.traced import TracedTarget, explaining, placed
from pyro_symmetric.models import (
    UNMAPPABLE,
    BayesianModel,
    CategoricalLikelihood,
    GaussianLikelihood,
    over_weights,
)
from pyro_symmetric.weights import Layout, Tensors, Weights, map_values, select_rows

Evaluation = tuple[Tensor, Tensor]
Evaluate = Callable[..., Evaluation]
Rows = Tensors  # mini-batches: name -> (C, B)
ROWS = "rows"  # name of a network's mini-batches
# relative errors of gradients and of energies in single precision
COARSE = 1e-2
FINE = 3e-4
TRIAL_ROWS = 2  # on which a network is tried


class Unavailable(Exception):
    """Reason why an engine can't evaluate a model."""


class Eager:
    """Evaluation of a target by its own log-joint density and autograd."""

    def __init__(self, target: NetworkTarget | TracedTarget, layout: Layout):
        self.target = target
        self.layout = layout

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``. Chains with a singular
        matrix have infinite energy."""
        # Errors hold the memory of evaluations, so none is handled during another.
        with contextlib.suppress(torch.linalg.LinAlgError):
            return self.raw(z, rows)
        with contextlib.suppress(torch.linalg.LinAlgError):
            return despite_singular(lambda: self.raw(z, rows))
        if len(z) == 1:
            return torch.full_like(z[:, 0], torch.inf), torch.zeros_like(z)
        return in_chunks(self.energy_and_gradient, z, rows, -(-len(z) // 2))

    def are_alike(
        self, actual: Evaluation, expected: Evaluation, z: Tensor, rows: Rows | None
    ) -> bool:
        """Return whether two evaluations at ``z`` agree. If rounding errors of single
        precision are large, as of ill-conditioned matrices, double precision decides.
        """
        if same_evaluation(actual, expected):
            return True
        if rows or z.dtype != torch.float32:
            return False
        # the model may not run in double precision
        with contextlib.suppress(Exception):
            exact = self.in_double().energy_and_gradient(z.double(), None)
            return is_as_exact(actual, expected, exact)
        return False

    def in_double(self) -> Eager:
        """Return the evaluation of the density of a Pyro model in double precision."""
        target: Any = copy.copy(self.target)
        target.model, target.args, target.kwargs = placed(
            target.model, target.args, target.kwargs, None, torch.float64
        )
        return Eager(target, self.layout)

    def raw(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """Evaluate all chains at once. One backward pass gives all gradients, since
        chains are independent.

        :raises torch.linalg.LinAlgError: if a matrix of a chain is singular.
        """
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            energy = self._energy(leaf, lambda w: self.target.log_joint(w, rows))
            return energy.detach(), torch.autograd.grad(energy.sum(), leaf)[0]

    def raw_of_one(self, z: Tensor) -> Evaluation:
        """Evaluate one chain, ``(D,)``, of a Pyro model without mapping it, by
        transforms that can be traced.
        """
        target: Any = self.target
        energy_of = functools.partial(self._energy, log_joint=target.log_joint_of_one)
        gradient, energy = torch.func.grad_and_value(energy_of)(z)
        return energy, gradient

    def _energy(self, z: Tensor, log_joint: Callable[[Weights], Tensor]) -> Tensor:
        weights, log_det = self.layout.constrain_with_log_det(z)
        # a model may use double precision
        return -(log_joint(weights) + log_det).to(z.dtype)


# evaluations --------------------------------------------------------------------------


def in_chunks(
    evaluate: Evaluate, z: Tensor, rows: Rows | None, size: int | None
) -> Evaluation:
    """Evaluate at most ``size`` chains at once; ``None``: all."""
    if size is None or len(z) <= size:
        return evaluate(z, rows)
    cuts = [slice(start, start + size) for start in range(0, len(z), size)]
    parts = [evaluate(z[cut], rows and select_rows(rows, cut)) for cut in cuts]
    energy, gradient = (torch.cat(values) for values in zip(*parts, strict=True))
    return energy, gradient


def despite_singular(evaluate: Callable[[], Evaluation]) -> Evaluation:
    """Evaluate with infinite energy for chains of which a matrix has no Cholesky
    factor, instead of an error for all.
    """
    calls = []

    def factor_or_nan(matrix: Tensor, **options: Any) -> Tensor:
        calls.append(matrix.shape)
        factor, info = torch.linalg.cholesky_ex(matrix, **options)
        return torch.where((info == 0)[..., None, None], factor, torch.nan)

    with replaced(torch.linalg, "cholesky", factor_or_nan):
        energy, gradient = evaluate()
    if not calls:
        return energy, gradient
    is_singular = energy.isnan()
    return (
        torch.where(is_singular, torch.inf, energy),
        torch.where(is_singular[..., None], 0.0, gradient),
    )


def catches_errors(evaluate: Callable[[], Evaluation]) -> bool:
    """Return whether the model itself handles matrices without a Cholesky factor."""
    calls = []

    def fail(matrix: Tensor, **options: Any) -> Tensor:
        calls.append(matrix.shape)
        raise torch.linalg.LinAlgError("a trial")

    with replaced(torch.linalg, "cholesky", fail):
        try:
            evaluate()
        except torch.linalg.LinAlgError:
            return len(calls) > 1
        # whatever the model does after an error of each of its matrices
        except Exception:
            return bool(calls)
    return bool(calls)


def same_evaluation(actual: Evaluation, expected: Evaluation) -> bool:
    """Return whether two evaluations agree up to rounding wherever the expected energy
    is finite.

    The tolerance of gradients is larger: they are discontinuous, as at the kink of a
    ReLU. Two NaN gradients agree.
    """
    (energy, gradient), (expected_energy, expected_gradient) = actual, expected
    coarse, fine = (
        (COARSE, FINE) if expected_energy.dtype == torch.float32 else (1e-6, 1e-8)
    )
    equal = (energy - expected_energy).abs() <= fine * (1 + expected_energy.abs())
    close = (gradient - expected_gradient).norm(dim=-1) <= coarse * (
        1 + expected_gradient.norm(dim=-1)
    )
    close |= (gradient.isnan() & expected_gradient.isnan()).any(dim=-1)
    return bool((equal & close | ~torch.isfinite(expected_energy)).all())


def is_as_exact(actual: Evaluation, expected: Evaluation, exact: Evaluation) -> bool:
    """Return whether errors in single precision are like those of the expected
    evaluation: the least, the second and so on at most a few times as large.
    """
    finite = expected[0].isfinite() & exact[0].isfinite()

    def errors(evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        differences = [
            (value.double() - right)[finite]
            for value, right in zip(evaluation, exact, strict=True)
        ]
        energy = differences[0].abs() / (1 + exact[0][finite].abs())
        gradient = differences[1].norm(dim=-1)
        return energy, gradient / (1 + exact[1][finite].norm(dim=-1))

    return all(
        bool((error.sort().values <= tolerance + 4 * usual.sort().values).all())
        for error, usual, tolerance in zip(
            errors(actual), errors(expected), (FINE, COARSE), strict=True
        )
    )


# networks -----------------------------------------------------------------------------


class NetworkTarget:
    """A :class:`BayesianModel` with its data. Threads may evaluate it in parallel.

    :ivar sites: latent site -> its prior, in the order of the layout.
    :ivar row_counts: of mini-batches, name -> (rows in the data, rows in a mini-batch);
        empty without.
    :ivar computed: shapes of the deterministic sites.
    :ivar one_by_one: reason for evaluating chains one by one; empty if they are mapped.
    """

    computed: Mapping[str, torch.Size] = {}

    def __init__(
        self,
        model: BayesianModel,
        args: Args,
        kwargs: Entries,
        batch_size: int | None,
    ):
        data = {**dict(zip(("x", "y"), args, strict=False)), **kwargs}
        if set(data) != {"x", "y"} or data["y"] is None or len(args) > 2:
            raise ValueError(
                "sampling a BayesianModel takes x and y, tensors with all rows, as in "
                "sample(kernel, x, y); found "
                f"{described_call(args, kwargs)}; mini-batches are drawn by kernels "
                "with a batch_size"
            )
        # evaluation writes weights into the network
        model = model.twin()
        x = data["x"]
        y = data["y"]
        require_data(model, x, y)
        if batch_size is not None and not 1 <= batch_size <= len(x):
            raise ValueError(
                f"batch_size is {batch_size}; it must be between 1 and the {len(x)} "
                "rows of the data"
            )
        if model.num_data not in (None, len(x)):
            raise ValueError(
                f"x has {len(x)} rows, but the model has num_data={model.num_data}"
            )
        labels = type(model.likelihood) is CategoricalLikelihood
        self.args = args
        self.kwargs = kwargs
        self.model = model
        self.x = x
        self.y = y.long() if labels else y
        self.sites: Mapping[str, Distribution] = model.priors()
        self.row_counts = (
            {ROWS: (len(x), batch_size)}
            if batch_size is not None and batch_size < len(x)
            else {}
        )

    @property
    def one_by_one(self) -> str:
        return UNMAPPABLE.get(self.model.net, "")

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        """Return the log-joint density ``(C,)`` of constrained weights, of mini-batches
        ``(C, B)`` if given.
        """
        model = self.model
        if rows is None:
            # see require_data
            return model.log_joint(weights, self.x, self.y, validate=False)
        index = rows[ROWS]
        # without the prior: maps are slow
        score = functools.partial(model.log_likelihood, validate=False)
        by_row: Tensor = over_weights(
            model.net, score, weights, self.x[index], self.y[index]
        )
        scale = len(self.x) / index.shape[-1] / model.likelihood.temperature
        return model.log_prior(weights, validate=False) + scale * by_row.sum(-1)

    def compute(self, weights: Weights) -> Weights:
        """Return the values of :attr:`computed`."""
        return {}

    def prior_weights(self, num_chains: int) -> Weights:
        """Draw weights of batch shape ``(C,)`` from the prior."""
        return map_values(lambda prior: prior.sample((num_chains,)), self.sites)

    def __repr__(self) -> str:
        return repr(self.model)


def require_data(model: BayesianModel, x: Any, y: Any) -> None:
    """Check that the network accepts ``x`` and that ``y`` fits its outputs and
    likelihood.

    Labels out of range would otherwise be ignored (-100), or crash a GPU.

    :raises TypeError: if ``x`` or ``y`` isn't a tensor of rows.
    :raises ValueError: if the likelihood can't score ``y``.
    """
    for name, value in {"x": x, "y": y}.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise TypeError(
                f"{name} is {described(value)}; it must be a tensor with rows along "
                "its first axis"
            )
    if y.is_complex():
        raise ValueError(
            "y is complex, and its imaginary part would be lost; pass real targets"
        )
    if len(x) != len(y) or not len(x):
        raise ValueError(
            f"x has {len(x)} rows but y has {len(y)}; pass the same number of rows, at "
            "least one"
        )
    weights = {name: value.detach() for name, value in model.net.named_parameters()}
    with torch.no_grad(), explaining(model.net, (x,), {}):
        try:
            outputs = model.call(weights, x[:TRIAL_ROWS])
        except Exception:  # a network may accept one number of rows only
            outputs = model.call(weights, x)
    categorical = type(model.likelihood) is CategoricalLikelihood
    if not categorical and type(model.likelihood) is not GaussianLikelihood:
        # Other likelihoods may have outputs and targets of any shape.
        with forked(0), running_pyro(), torch.no_grad():
            priors = model.likelihood.latents(outputs)
            latents = map_values(lambda prior: prior.sample(), priors)
            distribution = model.likelihood.distribution(outputs, latents)
        require_possible_targets(distribution, model.likelihood.targets(y))
        return
    size = outputs.shape[-1]
    if categorical and size < 2:
        raise ValueError(
            "the network has one output, but class labels need an output for each "
            "class, at least 2"
        )
    event = outputs.shape[1:-1] if categorical or size == 1 else outputs.shape[1:]
    shape = (len(x), *event)
    if model.likelihood.targets(y).shape != shape:
        raise ValueError(
            f"y has shape {tuple(y.shape)}; for outputs "
            f"{(len(x), *outputs.shape[1:])} it must have shape {shape}"
        )
    if not categorical:
        if not y.isfinite().all():
            raise ValueError("y contains NaN or infinite values; leave these rows out")
        return
    if y.is_floating_point():
        raise ValueError(
            f"y is {described(y)}; class labels are whole numbers: pass y.long()"
        )
    low = int(y.min())
    high = int(y.max())
    if not 0 <= low <= high < size:
        raise ValueError(
            f"y has labels from {low} to {high}, but the network has {size} outputs"
        )


# sizes of results ---------------------------------------------------------------------


def largest_size(nested: Any) -> int:
    """Return how many numbers the largest tensor in a nested value holds."""
    tensors = [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]
    return max(map(num_stored, tensors), default=0)


def num_stored(value: Tensor) -> int:
    """Return how many numbers a tensor holds, of those repeated along an axis one."""
    if value.layout is not torch.strided or value.is_nested:
        return value.numel()
    axes = zip(value.shape, value.stride(), strict=True)
    return math.prod(size for size, stride in axes if stride or not size)
