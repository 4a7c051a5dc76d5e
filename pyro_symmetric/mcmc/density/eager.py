"""Engine ``"eager"``: the model itself, mapped over chains, and autograd; what all other engines are compared with.

A network with its data is a :class:`NetworkTarget`, any other Pyro model a
:class:`~pyro_symmetric.traced.TracedTarget`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric.arguments import described, described_call
from pyro_symmetric.models import UNMAPPABLE, BayesianModel, CategoricalLikelihood, GaussianLikelihood, over_weights
from pyro_symmetric.traced import TracedTarget, explaining
from pyro_symmetric.weights import Layout, Weights

Evaluation = tuple[Tensor, Tensor]
Evaluate = Callable[..., Evaluation]
Rows = Mapping[str, Tensor]  # mini-batches: name -> (C, B)
ROWS = "rows"  # the name of a network's mini-batches
FEW_ROWS = 2


class Unavailable(Exception):
    """Why an engine can't serve."""


class Eager:
    """Evaluations of a target as it is."""

    def __init__(self, target: NetworkTarget | TracedTarget, layout: Layout):
        self.target, self.layout = target, layout

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``; of chains whose matrices are singular energies are
        infinite: half of the chains are tried again, until such a chain is alone."""
        try:
            return self.raw(z, rows)
        except torch.linalg.LinAlgError:
            if len(z) == 1:
                return torch.full_like(z[:, 0], torch.inf), torch.zeros_like(z)
            return in_chunks(self.energy_and_gradient, z, rows, -(-len(z) // 2))

    def raw(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """Evaluate all chains at once. They are independent, so one backward pass gives every chain's gradient.

        :raises torch.linalg.LinAlgError: if a chain's matrix is singular.
        """
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            weights, log_det = self.layout.constrain_with_log_det(leaf)
            energy = -(self.target.log_joint(weights, rows) + log_det).to(z.dtype)  # a model may hold finer numbers
            return energy.detach(), torch.autograd.grad(energy.sum(), leaf)[0]


# evaluations ----------------------------------------------------------------------------------------------------------


def in_chunks(evaluate: Evaluate, z: Tensor, rows: Rows | None, size: int | None) -> Evaluation:
    """Evaluate so many chains at once; ``None``: all."""
    if size is None or len(z) <= size:
        return evaluate(z, rows)
    cuts = [slice(start, start + size) for start in range(0, len(z), size)]
    parts = [evaluate(z[cut], rows and {name: index[cut] for name, index in rows.items()}) for cut in cuts]
    energy, gradient = (torch.cat(values) for values in zip(*parts, strict=True))
    return energy, gradient


def same_evaluation(found: Evaluation, expected: Evaluation) -> bool:
    """True if two evaluations are the same, up to rounding, where the expected energy is finite.

    Energies are continuous, but where the sign of a ReLU's input hangs on rounding, gradients are not. Gradients that
    are no numbers are alike.
    """
    (energy, gradient), (right, slope) = found, expected
    coarse, fine = (1e-2, 3e-4) if right.dtype == torch.float32 else (1e-6, 1e-8)
    near = (energy - right).abs() <= fine * (1 + right.abs())
    close = (gradient - slope).norm(dim=-1) <= coarse * (1 + slope.norm(dim=-1))
    close |= (gradient.isnan() & slope.isnan()).any(dim=-1)
    return bool((near & close | ~torch.isfinite(right)).all())


# networks -------------------------------------------------------------------------------------------------------------


class NetworkTarget:
    """A :class:`BayesianModel` with its data. Networks run in parallel threads.

    :ivar sites: latent site -> its distribution, in the order of the layout.
    :ivar row_counts: mini-batches: name -> (rows there are, rows in a batch); empty without.
    :ivar computed: deterministic sites, and their shapes.
    :ivar one_by_one: why chains are evaluated one after another; empty if they are all at once.
    """

    computed: Mapping[str, torch.Size] = {}

    def __init__(self, model: BayesianModel, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int | None):
        data = {**dict(zip(("x", "y"), args, strict=False)), **kwargs}
        if set(data) != {"x", "y"} or data["y"] is None or len(args) > 2:
            raise ValueError(
                "a BayesianModel is sampled given x and y, tensors with all rows, as in sample(kernel, x, y); found "
                f"{described_call(args, kwargs)}; mini-batches are drawn by kernels that have a batch_size"
            )
        model, x, y = model.twin(), data["x"], data["y"]  # a network holds the weights while it is evaluated
        require_data(model, x, y)
        if batch_size is not None and not 1 <= batch_size <= len(x):
            raise ValueError(f"batch_size is {batch_size}; it must lie between 1 and the {len(x)} rows of the data")
        if model.num_data not in (None, len(x)):
            raise ValueError(f"x has {len(x)} rows, but the model was told num_data={model.num_data}")
        labels = type(model.likelihood) is CategoricalLikelihood
        self.args, self.kwargs = args, kwargs
        self.model, self.x, self.y = model, x, y.long() if labels else y
        self.sites: Mapping[str, Distribution] = model.priors()
        self.row_counts = {ROWS: (len(x), batch_size)} if batch_size is not None and batch_size < len(x) else {}

    @property
    def one_by_one(self) -> str:
        return UNMAPPABLE.get(self.model.net, "")

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        """Log-density ``(C,)`` of constrained weights of batch shape ``(C,)``, on mini-batches ``(C, B)`` if given."""
        model = self.model
        if rows is None:
            return model.log_joint(weights, self.x, self.y, validate=False)  # see require_data
        index = rows[ROWS]
        score = functools.partial(model.log_likelihood, validate=False)  # alone, as maps make operators slower
        by_row: Tensor = over_weights(model.net, score, weights, self.x[index], self.y[index])
        scale = len(self.x) / index.shape[-1] / model.likelihood.temperature
        return model.log_prior(weights, validate=False) + scale * by_row.sum(-1)

    def compute(self, weights: Weights) -> Weights:
        """Values of :attr:`computed`."""
        return {}

    def prior_weights(self, num_chains: int) -> Weights:
        """Draws from the prior, of batch shape ``(C,)``."""
        return {name: prior.sample((num_chains,)) for name, prior in self.sites.items()}

    def __repr__(self) -> str:
        return repr(self.model)


def require_data(model: BayesianModel, x: Any, y: Any) -> None:
    """Check a few rows, before all chains meet them. Labels out of range would be left out (-100), or stop a GPU.

    :raises TypeError: if ``x`` or ``y`` is no tensor of rows.
    :raises ValueError: if the likelihood can't score ``y``.
    """
    for name, value in {"x": x, "y": y}.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise TypeError(f"{name} is {described(value)}; it must be a tensor whose first axis are the rows")
    if y.is_complex():
        raise ValueError("y holds complex numbers, of which the imaginary part would be lost; pass real targets")
    if len(x) != len(y) or not len(x):
        raise ValueError(f"x has {len(x)} rows but y has {len(y)}; they must be equally many, and some")
    weights = {name: value.detach() for name, value in model.net.named_parameters()}
    with torch.no_grad(), explaining(model.net, (x,), {}):
        try:
            found = model.call(weights, x[:FEW_ROWS])
        except Exception:  # a network may be made for so many rows and no others
            found = model.call(weights, x)
    categorical = type(model.likelihood) is CategoricalLikelihood
    if not categorical and type(model.likelihood) is not GaussianLikelihood:
        return  # which may have outputs and targets of any shape
    size = found.shape[-1]
    if categorical and size < 2:
        raise ValueError("the network has one output, but class labels need an output for each class, at least 2")
    shape = (len(x), *(found.shape[1:-1] if categorical or size == 1 else found.shape[1:]))
    if model.likelihood.targets(y).shape != shape:
        outputs = (len(x), *found.shape[1:])
        raise ValueError(f"y has shape {tuple(y.shape)}; of outputs {outputs} it must have shape {shape}")
    if not categorical and y.isnan().any():
        raise ValueError("y holds NaN, which is no target; leave these rows out")
    if categorical and y.is_floating_point():
        raise ValueError(f"y is {described(y)}; class labels are whole numbers: pass y.long()")
    if categorical and not 0 <= int(y.min()) <= int(y.max()) < size:
        raise ValueError(f"y holds labels from {int(y.min())} to {int(y.max())}, but the network has {size} outputs")
