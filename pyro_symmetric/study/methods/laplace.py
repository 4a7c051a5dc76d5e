"""Laplace approximations around trained networks, by laplace-torch (Daxberger et al. 2021)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pyro_symmetric._process import without_fast_attention
from pyro_symmetric._torchvision import prepare_torchvision
from pyro_symmetric.models import BayesianModel, GaussianPrior
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.methods.base import Fit, register
from pyro_symmetric.study.methods.networks import LOSS, _Networks, _on_cpu, losses_of, weights_of
from pyro_symmetric.study.problem import Problem, noise_scale
from pyro_symmetric.weights import Weights, unflatten

# A full covariance of more weights than this would take longer to invert than all else to run.
MOST_WEIGHTS = 10_000

# Numbers in the inputs of one batch. Curvature is a sum over rows, but of convolutions it takes per-row, per-class
# patches: 512 images of 28 x 28 filled 20 GB.
MOST_INPUTS = 32_768


@dataclass(frozen=True)
class _Laplace(_Networks):
    """A Gaussian at a mode whose precision is the Gauss-Newton curvature there, plus the prior's."""

    structure: ClassVar[str]
    subset: ClassVar[str] = "all"
    packages: ClassVar = {"laplace": "laplace-torch"}

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        model = problem.model
        count = sum(parameter.numel() for parameter in model.net.parameters())
        if self.structure == "full" and self.subset == "all" and count > MOST_WEIGHTS:
            raise ValueError(
                f"{self.title} needs a covariance of {count} x {count} numbers; it is meant for networks of at most "
                f"{MOST_WEIGHTS} weights: use laplace-diagonal or laplace-last-layer"
            )
        trained = self._train(problem, progress)
        weights, losses = weights_of(trained, problem), losses_of(trained, problem)
        draws = self._draws_each(problem)
        modes = [
            self._draw(problem, {site: value[mode] for site, value in weights.items()}, draws)
            for mode in range(self.modes)
        ]
        samples = {site: torch.stack([mode[site] for mode in modes]) for site in model.site_shapes}
        yield Fit(self.name, Posterior(_on_cpu(samples), kind="independent"), losses, LOSS)

    def _draw(self, problem: Problem, mode: Weights, draws: int) -> Weights:
        """Weights ``(draws, ...)`` around one trained network. A noise that is learnt stays at its trained value."""
        prepare_torchvision()  # which laplace-torch imports on its way, if there is one
        from laplace import Laplace

        model = problem.model
        net = copy.deepcopy(model.net).requires_grad_(True)
        shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
        net.load_state_dict({name: mode[name] for name in shapes}, strict=False)
        last = _last_layer(net)
        moved = {name: shape for name, shape in shapes.items() if self.subset == "all" or name.startswith(f"{last}.")}
        noise: dict[str, Any] = {} if problem.is_classification else {"sigma_noise": noise_scale(model, mode)}
        where = {"last_layer_name": last} if self.subset == "last_layer" else {}
        precision = prior_precision(model, moved, by_layer=self.structure == "kron")
        fitted = Laplace(
            net,
            "classification" if problem.is_classification else "regression",
            subset_of_weights=self.subset,
            hessian_structure=self.structure,
            prior_precision=precision,
            temperature=model.likelihood.temperature,
            **noise,
            **where,
        )
        targets = problem.y if problem.is_classification else model.likelihood.targets(problem.y)[:, None]
        rows = torch.utils.data.TensorDataset(problem.x, targets.to(problem.x.dtype) if noise else targets)
        size = max(1, min(512, MOST_INPUTS // problem.x[0].numel()))
        # laplace-torch makes an identity where the default device is, and maps gradients over rows.
        with problem.x.device, without_fast_attention():
            fitted.fit(torch.utils.data.DataLoader(rows, batch_size=size))
            flat = fitted.sample(draws).detach()
        drawn = unflatten(flat, moved, moved)
        return {**{site: value.expand(draws, *value.shape) for site, value in mode.items()}, **drawn}


@register
@dataclass(frozen=True)
class FullLaplace(_Laplace):
    """A Laplace approximation (Daxberger et al. 2021): a Gaussian at a trained network, with the curvature of all
    weights together (laplace-torch)."""

    name = "laplace-full"
    structure = "full"


@register
@dataclass(frozen=True)
class DiagonalLaplace(_Laplace):
    """A Laplace approximation with the curvature of each weight by itself (laplace-torch)."""

    name = "laplace-diagonal"
    structure = "diag"


@register
@dataclass(frozen=True)
class LastLayerLaplace(_Laplace):
    """A Laplace approximation with the curvature of the last layer as a Kronecker product (laplace-torch)."""

    name = "laplace-last-layer"
    structure = "kron"
    subset = "last_layer"


def prior_precision(model: BayesianModel, shapes: dict[str, torch.Size], by_layer: bool) -> Tensor:
    """The prior's precision, for each weight or (``by_layer``) for each parameter.

    :raises ValueError: if the prior isn't Gaussian around zero.
    """
    if not isinstance(model.prior, GaussianPrior):
        raise ValueError("the Laplace methods need a Gaussian prior (GaussianPrior, or a standard deviation)")
    like = next(model.net.parameters())
    precisions = [like.new_tensor(model.prior.scale_of(name, shape) ** -2) for name, shape in shapes.items()]
    if by_layer:
        return torch.stack(precisions)
    return torch.cat([value.expand(shape.numel()) for value, shape in zip(precisions, shapes.values(), strict=True)])


def _last_layer(net: nn.Module) -> str:
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("the network has no nn.Linear, which a last-layer Laplace approximation needs")
    return linear[-1]
