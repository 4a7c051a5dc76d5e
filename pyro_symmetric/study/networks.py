"""Methods that start from trained networks: ensembles, Monte Carlo dropout, SWAG,
Laplace approximations (by laplace-torch, Daxberger et al. 2021). All networks train at
once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric._process import without_fast_attention
from pyro_symmetric.arguments import Json
from pyro_symmetric.ensembles import ensemble
from pyro_symmetric.groups import Element, Group
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.networks import prepare_torchvision
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.methods import Fit, TooLarge, register
from pyro_symmetric.study.problem import Problem, noise_scale
from pyro_symmetric.weights import (
    Layout,
    Weights,
    first_value,
    map_values,
    pick,
    select_rows,
    stacked,
    unflatten,
)

TOGETHER = 100  # networks of an ensemble trained at once
NETWORKS = {"modes": 1, "steps": 1500, "learning_rate": 0.01, "batch_size": 256}
QUICK = {"steps": 300, "learning_rate": 0.02}
# of a full covariance: inverting a larger one takes longer than the rest of a study
MOST_WEIGHTS = 10_000
# Numbers in a batch of inputs. Curvature is a sum over rows, but that of convolutions
# takes patches per row and class: 512 images of 28 x 28 filled 20 GB.
MOST_INPUTS = 32_768


@register(
    "ensemble",
    {**NETWORKS, "modes": 100},
    quick={**QUICK, "modes": 40},
    most_draws=lambda budget: budget.modes,
)
def deep_ensemble(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Train a deep ensemble: independent networks, each to a mode of the posterior
    (MAP).
    """
    trained = train(problem, budget, progress)
    yield Fit(trained, losses_of(trained, problem))


@register("mc-dropout", {**NETWORKS, "rate": 0.1}, quick=QUICK)
def mc_dropout(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Train a network with dropout of its hidden units, and keep dropping them (Monte
    Carlo dropout, Gal & Ghahramani 2016). A draw is the weights of the network without
    the dropped units."""
    group = outgoing_scales(problem.symmetry.permutations)
    model = copy.deepcopy(problem.model)
    call = model.call
    model.call = lambda weights, x: call(drop_units(weights, group, budget.rate), x)  # type: ignore[method-assign]
    trained = train(replace(problem, model=model), budget, progress)
    shape = (budget.modes, draws_per_mode(problem, budget))
    repeated = {
        s: v[:, None].expand(*shape, *v.shape[1:])
        for s, v in weights_of(trained, problem).items()
    }
    yield independent_fit(drop_units(repeated, group, budget.rate), trained, problem)


@register(
    "swag",
    {**NETWORKS, "iterates": 40, "every": 20, "rank": 20, "descent_rate": 0.02},
    quick={**QUICK, "iterates": 20, "every": 10},
)
def swag_networks(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Fit SWAG (Maddox et al. 2019): a Gaussian, diagonal plus low rank, with the
    moments of the iterates of stochastic gradient descent at a constant step size,
    started at a trained network."""
    trained = train(problem, budget, progress)
    path: list[Weights] = []

    def watch(step: int, weights: Weights) -> None:
        if (step + 1) % budget.every == 0 and len(path) < budget.iterates:
            path.append(map_values(Tensor.clone, weights))

    ended = train(
        problem,
        budget,
        progress,
        # an epoch more, against rounding
        steps=budget.iterates * budget.every + len(problem.x) // budget.batch_size,
        initial=lambda count: weights_of(trained, problem),
        optimizer=functools.partial(
            torch.optim.SGD, lr=budget.descent_rate, momentum=0.9
        ),
        cosine=False,
        members_at_once=budget.modes,
        watch=watch,
    )
    if ended.num_samples < budget.modes:
        raise ValueError(
            f"swag: the descent diverged; its descent_rate {budget.descent_rate} is "
            "too large"
        )
    by_mode = map_values(lambda value: value.transpose(0, 1), stacked(path))
    iterates = map_values(Tensor.contiguous, by_mode)
    draws = swag(problem.model, iterates, budget.rank, draws_per_mode(problem, budget))
    yield independent_fit(draws, trained, problem)


@register("laplace-full", NETWORKS, quick=QUICK)
def laplace_full(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Fit a Laplace approximation: a Gaussian at a trained network, with the curvature
    of all weights jointly (laplace-torch, Daxberger et al. 2021)."""
    if (count := problem.num_weights) > MOST_WEIGHTS:
        raise TooLarge(f"it needs a covariance of {count} x {count} numbers")
    return _laplace(problem, budget, progress, "full")


@register("laplace-diagonal", NETWORKS, quick=QUICK)
def laplace_diagonal(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Fit a Laplace approximation with the diagonal of the curvature
    (laplace-torch).
    """
    return _laplace(problem, budget, progress, "diag")


@register("laplace-last-layer", NETWORKS, quick=QUICK)
def laplace_last_layer(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Fit a Laplace approximation of the last layer, with its curvature as a Kronecker
    product (laplace-torch).
    """
    return _laplace(problem, budget, progress, "kron", "last_layer")


# small steps --------------------------------------------------------------------------


def train(
    problem: Problem,
    budget: Any,
    progress: bool,
    steps: int | None = None,
    **further: Any,
) -> Posterior:
    """Train ``modes`` networks, each to a mode of the posterior, for about ``steps``
    steps (default: the budget's).
    """
    batch_size = min(budget.batch_size, len(problem.x))
    epochs = round((steps or budget.steps) / (len(problem.x) // batch_size))
    options = {
        "epochs": max(1, epochs),
        "batch_size": batch_size,
        "optimizer": functools.partial(torch.optim.Adam, lr=budget.learning_rate),
        "members_at_once": min(budget.modes, TOGETHER),
        "seed": problem.seed,
        "progress": progress,
        **further,
    }
    data = (problem.x, problem.y)
    return ensemble(problem.model, data, budget.modes, **options)


def independent_fit(draws: Weights, trained: Posterior, problem: Problem) -> Fit:
    """Return independent draws ``(modes, draws, ...)`` around trained networks as a
    fit.
    """
    samples = map_values(Tensor.cpu, draws)
    return Fit(Posterior(samples, kind="independent"), losses_of(trained, problem))


def losses_of(trained: Posterior, problem: Problem) -> Json:
    """Return the mean loss of each epoch in nats; networks are trained on the loss per
    row.
    """
    in_nats = [len(problem.x) * loss for loss in trained.metadata["losses"]]
    return {"losses": {"negative log-posterior (nats)": in_nats}}


def weights_of(trained: Posterior, problem: Problem) -> Weights:
    """Return the weights of trained networks, of batch shape ``(modes,)``, on the
    study's device.
    """
    return map_values(lambda value: value[0].to(problem.x.device), trained.samples)


def draws_per_mode(problem: Problem, budget: Any) -> int:
    """Return how many draws each mode must give for all together to be as many as are
    compared.
    """
    return -(-problem.settings.draws // budget.modes)


@torch.no_grad()
def swag(model: BayesianModel, iterates: Weights, rank: int, count: int) -> Weights:
    """Draw from the SWAG posterior (Maddox et al. 2019, section 3); constrained sites
    are averaged unconstrained.

    The low-rank part takes the deviations of the last ``rank`` iterates from the final
    mean, where the paper takes those from the running mean: with all iterates, it is
    half of their covariance.

    :param iterates: weights of batch shape ``(..., S)``, in the order of SGD's path.
    :returns: draws of batch shape ``(..., count)``.
    """
    layout = Layout.of(model.priors())
    path = layout.unconstrain(iterates)
    mean = path.mean(-2, keepdim=True)
    variance = path.var(-2, correction=0, keepdim=True)
    last = path[..., -rank:, :] - mean
    batch = path.shape[:-2]
    size = last.shape[-2]
    noise = path.new_empty(*batch, count, layout.dim).normal_()
    spread = (variance / 2).sqrt() * noise
    combinations = path.new_empty(*batch, count, size).normal_()
    low_rank = combinations @ last / (2 * (size - 1)) ** 0.5
    return layout.constrain(mean + spread + low_rank)


def outgoing_scales(group: Group) -> Group:
    """Return the group that scales the outgoing weights of innermost permuted units.

    Outgoing weights lie along second axes or, into a grouped convolution, along several
    axes at once.
    """
    parents = {units.parent for units in group.units.values()}
    scaled = []
    for units in group.units.values():
        axes = []
        for axis in units.axes:
            if axis.dim == 1 or axis.span > 1:
                axes.append(replace(axis, exponent=1))
        if units.name not in parents:
            moves: frozenset[Move] = frozenset({"scale"})
            scaled.append(replace(units, axes=tuple(axes), parent=None, moves=moves))
    return Group(scaled, group.site_shapes)


def drop_units(weights: Weights, outgoing: Group, rate: float) -> Weights:
    """Drop random hidden units: their outgoing weights become zero, those of the others
    are divided by ``1 - rate``.

    :param weights: of any batch shape; each member drops units of its own.
    :param outgoing: the group of :func:`outgoing_scales`.
    :param rate: the probability of dropping a unit.
    """
    batch = outgoing.batch_shape(weights)
    example = first_value(weights)
    log_scales = Weights()
    for name, units in outgoing.units.items():
        shape = (*batch, *units.shape)
        chances = torch.rand(shape, dtype=example.dtype, device=example.device)
        factors = (chances >= rate) / (1 - rate)
        log_scales[name] = factors.log()
    return Element(outgoing, log_scales=log_scales).on_sites(weights)


def _laplace(
    problem: Problem, budget: Any, progress: bool, structure: str, subset: str = "all"
) -> Iterator[Fit]:
    """Draw around trained networks; ``structure`` and ``subset`` of the curvature as
    laplace-torch names them.
    """
    trained = train(problem, budget, progress)
    weights = weights_of(trained, problem)
    draws = draws_per_mode(problem, budget)
    drawn = []
    for k in range(budget.modes):
        mode = select_rows(weights, k)
        drawn.append(_laplace_draws(problem, mode, draws, structure, subset))
    samples = pick(stacked(drawn), problem.model.site_shapes)
    yield independent_fit(samples, trained, problem)


def _laplace_draws(
    problem: Problem, mode: Weights, draws: int, structure: str, subset: str
) -> Weights:
    """Draw weights ``(draws, ...)`` around one trained network. A learnt noise keeps
    its trained value.
    """
    prepare_torchvision()  # laplace-torch imports it if it is installed
    from laplace import Laplace

    model = problem.model
    net = copy.deepcopy(model.net).requires_grad_(True)
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    net.load_state_dict(pick(mode, shapes), strict=False)
    further: Json = {}
    targets = problem.y
    if not problem.is_classification:
        further["sigma_noise"] = noise_scale(model, mode)
        targets = model.likelihood.targets(problem.y)[:, None].to(problem.x)
    if subset == "last_layer":
        linear = []
        for name, module in net.named_modules():
            if isinstance(module, nn.Linear):
                linear.append(name)
        if not linear:
            raise ValueError(
                "a last-layer Laplace approximation needs a network with an nn.Linear"
            )
        further["last_layer_name"] = linear[-1]
        inside = [name for name in shapes if name.startswith(f"{linear[-1]}.")]
        shapes = pick(shapes, inside)
    prior: Any = model.prior
    scales = [prior.scale_of(name, shape) for name, shape in shapes.items()]
    precisions = problem.x.new_tensor([scale**-2 for scale in scales])
    if structure != "kron":  # one precision per weight; "kron" takes one per parameter
        sizes = [shape.numel() for shape in shapes.values()]
        counts = torch.tensor(sizes, device=precisions.device)
        precisions = precisions.repeat_interleave(counts)
    fitted = Laplace(
        net,
        "classification" if problem.is_classification else "regression",
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=precisions,
        temperature=model.likelihood.temperature,
        **further,
    )
    size = max(1, min(512, MOST_INPUTS // problem.x[0].numel()))
    # laplace-torch makes an identity on the default device, and maps gradients over
    # rows.
    with problem.x.device, without_fast_attention():
        rows = torch.utils.data.TensorDataset(problem.x, targets)
        fitted.fit(torch.utils.data.DataLoader(rows, batch_size=size))
        drawn = unflatten(fitted.sample(draws).detach(), shapes)
    return {
        **map_values(lambda value: value.expand(draws, *value.shape), mode),
        **drawn,
    }
