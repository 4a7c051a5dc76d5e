r"""Verification of a declared symmetry of a Pyro model.

A group is a symmetry of a model if the joint density is invariant, :math:`p(g \cdot w,
D) = p(w, D)`, which is tried at points in the support. If it isn't, the sites whose own
(conditional) density changes are named, and declarations with one axis fewer, or one
more, are tried. A posterior has the symmetries of its network only if the prior has
them: a prior may give the units of a layer different scales, say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import forked, running_pyro, without_warnings
from pyro_symmetric.arguments import Model, as_tensor
from pyro_symmetric.density import Density
from pyro_symmetric.discovery.model_density import ModelDensity
from pyro_symmetric.discovery.verify import (
    BrokenMove,
    Change,
    Verification,
    broken_moves,
)
from pyro_symmetric.groups.axes import Axis
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import evenly_spaced
from pyro_symmetric.weights import Shapes, Weights, first_value, map_values, select_rows

POSTERIOR_DRAWS = 4
COMPARED = 2  # draws at which a function is compared; all of them measure its noise
# changes pass up to this multiple of the noise, plus so many nats, by which evidence
# may err
NOISE = 10.0
NATS = 0.01
# evaluations of a function that is random: dropout may give one answer several times
REPEATS = 8


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run Pyro models without gradients or warnings, and without an effect on
    generators and handlers.
    """
    with forked(), torch.no_grad(), poutine.block(), running_pyro(), without_warnings():
        yield


@undisturbed()
def verify_model(
    symmetry: Any,
    model: Model,
    *args: Any,
    trials: int = 2,
    tolerance: float = 0.0,
    **kwargs: Any,
) -> Verification:
    """Compare a model's joint density before and after elements of a group, at points
    of several scales in its support.

    Discrete sites are summed out if they can be enumerated; subsampled plates keep one
    draw of their rows.

    >>> def model(data):
    ...     with pyro.plate("k", 3):
    ...         locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    ...         scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    ...     with pyro.plate("data", len(data)):
    ...         components = dist.Normal(locs, scales)
    ...         pyro.sample(
    ...             "x",
    ...             dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), components),
    ...             obs=data,
    ...         )
    >>> data, shapes = (
    ...     torch.randn(5),
    ...     {"locs": torch.zeros(3), "scales": torch.zeros(3)},
    ... )
    >>> bool(
    ...     ps.verify_model(
    ...         ps.Group.declare({"locs": ("k",), "scales": ("k",)}, shapes),
    ...         model,
    ...         data,
    ...     )
    ... )
    True
    >>> result = ps.verify_model(
    ...     ps.Group.declare({"locs": ("k",)}, shapes), model, data
    ... )
    >>> (
    ...     bool(result),
    ...     "axis 0 of 'scales'" in str(result),
    ... )  # the axis that the declaration lacks
    (False, True)

    :param symmetry: a declared group, or a symmetry; its permutations, signs and
        rotations count.
    :param model: any Pyro model; ``args`` and ``kwargs`` are its arguments, data
        included. (If some of these are called ``trials`` or ``tolerance``, give
        ``functools.partial(model, ...)``.)
    :param trials: the number of points of each of three scales.
    :param tolerance: relative change of a site's log-density (in the norm over its
        entries) that passes as rounding, if the density's own rounding is less.
    :raises ValueError: if the group moves sites that the model lacks.
    :raises InconclusiveError: if the density isn't a function of the sites (dropout,
        other randomness).
    """
    arguments.whole("trials", trials, 1)
    arguments.number("tolerance", tolerance, least=0)
    group = group_of(symmetry).compact
    density = ModelDensity(model, args, kwargs, trials)
    density.tolerance = max(density.tolerance, tolerance)
    _require_sites(group, density)
    return _verified(
        "the model's log-density",
        group,
        density.change,
        density.shapes,
        density.tolerance,
    )


def _require_sites(group: Group, density: ModelDensity) -> None:
    """Raise ``ValueError`` if a group moves sites that the model lacks, or has in
    another shape.
    """
    missing = sorted(set(group.required_sites) - set(density.shapes))
    if missing:
        enumeration = density.target.enumeration
        discrete = sorted(enumeration.batch_shapes) if enumeration else []
        raise ValueError(
            f"the model lacks the sites {missing} that the group moves; its "
            f"continuous latent sites are {list(density.shapes)}, and its discrete "
            f"ones {discrete}"
        )
    group.batch_shape(density.generic)  # names the site whose shape doesn't fit


@undisturbed()
def check_function(
    group: Group, log_joint: Callable[[Weights], Tensor], draws: Weights
) -> Verification:
    """Verify a log-density of which only values are known, as :func:`verify_model` does
    a model.

    The tolerance is measured, by the changes of the values at the same draws (of a
    function that subsamples its data, or is otherwise random), and at draws that differ
    in the last digit.

    :param log_joint: weights of batch shape ``(S,)`` -> ``(S,)``.
    :param draws: weights of batch shape ``(S,)`` at which the density matters.
    :raises ValueError: if a site's shape isn't the group's.
    """
    group = group.compact
    group.batch_shape(draws)

    def values(weights: Weights) -> Tensor:
        return as_tensor(log_joint(weights)).detach().double().cpu()

    def change(element: Element) -> Change:
        after = values(element.on_sites(compared))
        unchanged = (after == before[:COMPARED]) | before[:COMPARED].isnan()
        changes = (
            (after - before[:COMPARED])
            .abs()
            .nan_to_num(nan=torch.inf, posinf=torch.inf)
        )
        size = float(torch.where(unchanged, 0.0, changes).max())
        return Change(size > tolerance, size)

    before = values(draws)
    compared = select_rows(draws, slice(COMPARED))
    digits = map_values(lambda value: torch.finfo(value.dtype).eps, draws)
    nearby = {
        site: v * (1 + digits[site] * (4 * torch.randint_like(v, 2) - 2))
        for site, v in draws.items()
    }
    repeated = [values(draws), values(nearby)]
    if not torch.equal(repeated[0], before):
        repeated += [values(draws) for _ in range(REPEATS)]
    noise = torch.cat(
        [
            max(digits.values()) * before.abs(),
            *((again - before).abs() for again in repeated),
        ]
    )
    tolerance = NATS + NOISE * float(torch.where(noise.isfinite(), noise, 0.0).amax())
    shapes = map_values(lambda value: value.shape[1:], draws)
    return _verified("the log-density", group, change, shapes, tolerance)


@undisturbed()
def require_of_posterior(symmetry: Any, posterior: Any) -> None:
    """Raise ``ValueError`` if a declared group changes the density of a posterior's
    model at some of the draws.

    Nothing is checked for draws without a model, nor for a network's symmetry, which
    was verified on the network.
    """
    declared = isinstance(symmetry, Group) and isinstance(posterior, Posterior)
    if (
        not declared
        or posterior.source is None
        or posterior.num_chains * posterior.num_samples == 0
    ):
        return
    dtype = first_value(posterior.samples).dtype
    density = Density(
        *posterior.source[:3],
        device=posterior.source.device,
        dtype=dtype,
        subsampled=True,
    )
    sites = density.layout.site_shapes
    draws = posterior.get_samples()
    if density.row_counts or not all(site in draws for site in sites):
        return  # a subsampled density is random; some sites of the draws were dropped
    chosen = evenly_spaced(len(first_value(draws)), POSTERIOR_DRAWS)
    points = density.layout.constrain(
        density.unconstrain({site: draws[site][chosen] for site in sites})
    )
    result = check_function(
        symmetry, lambda weights: density.target.log_joint(weights, None), points
    )
    if not result:
        raise ValueError(
            f"at draws of the posterior, {result}\nModulo that group they would be "
            "draws of another posterior: give "
            "the group that the model has (verify_model(group, model, ...) names the "
            "sites), or mend the prior or the "
            "likelihood that treats units differently"
        )


# remedies -----------------------------------------------------------------------------


def _verified(
    name: str,
    group: Group,
    change: Callable[[Element], Change],
    shapes: Shapes,
    tolerance: float,
) -> Verification:
    def changed(element: Element) -> Change:
        # Running statistics may be missing, or stay in the model: the density shows
        # whether that matters.
        try:
            return change(element)
        # a distribution accepted the draws, but refuses the moved weights
        except ValueError:
            return Change(True, float("inf"))

    broken, error = broken_moves(group, changed)
    named = tuple(
        move._replace(remedy=_remedy(move, group, changed, shapes)) for move in broken
    )
    return Verification(name, named, error, tolerance, "nats")


def _remedy(
    broken: BrokenMove,
    group: Group,
    change: Callable[[Element], Change],
    shapes: Shapes,
) -> str:
    """Find the axis to leave out, or to add, with which the declaration of some units
    holds, in words.
    """
    units = replace(
        group.restricted(broken.move)[broken.name],
        parent=None,
        moves=frozenset({broken.move}),
    )
    if untouched := sorted(
        {axis.site for axis in units.axes} & set(group.buffers) - set(shapes)
    ):
        return (
            f"if running statistics {untouched} moved along, which stay in the model; "
            "symmetry.holding(net) leaves them"
        )
    places = {(axis.site, axis.dim) for axis in units.axes}
    free = {
        (site, dim)
        for site, shape in shapes.items()
        for dim, n in enumerate(shape)
        if n == units.count
    }
    index = torch.arange(units.count, device="cpu")[None]
    for site, dim in sorted(places | free):
        axes = tuple(
            axis for axis in units.axes if (axis.site, axis.dim) != (site, dim)
        )
        axes += () if len(axes) < len(units.axes) else (Axis(site, dim, index, 1),)
        if not axes:
            continue
        amended_group = Group(
            [replace(units, axes=axes)], {**group.site_shapes, **shapes}
        )
        if not broken_moves(amended_group, change)[0]:
            if (
                broken.move == "flip"
                and (site, dim) in places
                and "permute" in group[broken.name].moves
            ):
                return f"with even=[{site!r}] in the declaration, whose signs then stay"
            return (
                f"{'without' if (site, dim) in places else 'with'} axis {dim} of "
                f"{site!r}"
            )
    return ""
