"""Laplace approximations around trained networks, by laplace-torch (Daxberger et al. 2021)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pyro_symmetric._process import without_fast_attention
from pyro_symmetric.networks import prepare_torchvision
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.methods.base import Fit, TooLarge, register
from pyro_symmetric.study.methods.networks import NETWORKS, QUICK, draws_each, losses_of, train, weights_of
from pyro_symmetric.study.problem import Problem, noise_scale
from pyro_symmetric.weights import Weights, unflatten

MOST_WEIGHTS = 10_000  # a full covariance of more takes longer to invert than all else to run
# Numbers in the inputs of one batch. Curvature is a sum over rows, but of convolutions it takes per-row, per-class
# patches: 512 images of 28 x 28 filled 20 GB.
MOST_INPUTS = 32_768


@register("laplace-full", NETWORKS, quick=QUICK)
def full(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """A Laplace approximation (Daxberger et al. 2021): a Gaussian at a trained network, with the curvature of all
    weights together (laplace-torch)."""
    if (count := problem.num_weights) > MOST_WEIGHTS:
        raise TooLarge(f"it needs a covariance of {count} x {count} numbers")
    return _laplace(problem, budget, progress, "full")


@register("laplace-diagonal", NETWORKS, quick=QUICK)
def diagonal(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """A Laplace approximation with the curvature of each weight by itself (laplace-torch)."""
    return _laplace(problem, budget, progress, "diag")


@register("laplace-last-layer", NETWORKS, quick=QUICK)
def last_layer(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """A Laplace approximation with the curvature of the last layer as a Kronecker product (laplace-torch)."""
    return _laplace(problem, budget, progress, "kron", "last_layer")


def _laplace(problem: Problem, budget: Any, progress: bool, structure: str, subset: str = "all") -> Iterator[Fit]:
    trained = train(problem, budget, progress)
    weights, draws = weights_of(trained, problem), draws_each(problem, budget)
    each = [{site: value[mode] for site, value in weights.items()} for mode in range(budget.modes)]
    drawn = [_around(problem, mode, draws, structure, subset) for mode in each]
    samples = {site: torch.stack([mode[site] for mode in drawn]).cpu() for site in problem.model.site_shapes}
    yield Fit(Posterior(samples, kind="independent"), losses_of(trained, problem))


def _around(problem: Problem, mode: Weights, draws: int, structure: str, subset: str) -> Weights:
    """Weights ``(draws, ...)`` around one trained network. A noise that is learnt stays at its trained value."""
    prepare_torchvision()  # which laplace-torch imports on its way, if there is one
    from laplace import Laplace

    model = problem.model
    net = copy.deepcopy(model.net).requires_grad_(True)
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    net.load_state_dict({name: mode[name] for name in shapes}, strict=False)
    more: dict[str, Any] = {} if problem.is_classification else {"sigma_noise": noise_scale(model, mode)}
    if subset == "last_layer":
        more["last_layer_name"] = last = _last_layer(net)
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(f"{last}.")}
    prior: Any = model.prior
    precisions = [problem.x.new_tensor(prior.scale_of(name, shape) ** -2) for name, shape in shapes.items()]
    if structure != "kron":  # which takes one for each parameter, the others one for each weight
        pairs = zip(precisions, shapes.values(), strict=True)
        precisions = [value for one, shape in pairs for value in one.expand(shape.numel())]
    fitted = Laplace(
        net,
        "classification" if problem.is_classification else "regression",
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=torch.stack(precisions),
        temperature=model.likelihood.temperature,
        **more,
    )
    targets = problem.y if problem.is_classification else model.likelihood.targets(problem.y)[:, None].to(problem.x)
    size = max(1, min(512, MOST_INPUTS // problem.x[0].numel()))
    # laplace-torch makes an identity where the default device is, and maps gradients over rows.
    with problem.x.device, without_fast_attention():
        rows = torch.utils.data.TensorDataset(problem.x, targets)
        fitted.fit(torch.utils.data.DataLoader(rows, batch_size=size))
        moved = unflatten(fitted.sample(draws).detach(), shapes)
    return {**{site: value.expand(draws, *value.shape) for site, value in mode.items()}, **moved}


def _last_layer(net: nn.Module) -> str:
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("the network has no nn.Linear, which a last-layer Laplace approximation needs")
    return linear[-1]
