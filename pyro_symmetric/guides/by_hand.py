r"""Guides written by hand, averaged over the orbits of a symmetry group.

Draws ``w`` of the guide are moved by a uniform element, the same for all sites that
the group moves. Densities are evaluated at the draws before they were moved, where
they are the same. One of the sites, the *carrier*, takes the log-ratio of the
symmetrised density to the guide's, so that the log-densities sum to that of

.. math:: \bar q(w) = \frac1{|G|} \sum_g q(g \cdot w) .

As a part of a site that the model has, too, it takes part in what Pyro's objectives do
with sites: scores, baselines, divergences, weights of particles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.infer.autoguide import AutoGuide
from pyro.ops.provenance import extract_provenance, track_provenance
from pyro.poutine.messenger import Messenger
from pyro.util import ignore_jit_warnings
from torch import Tensor, nn
from torch.distributions import Distribution, constraints, kl_divergence, register_kl

from pyro_symmetric._process import forked
from pyro_symmetric.arguments import Model, as_tensor
from pyro_symmetric.discovery.model_carried import (
    AUTO,
    Auto,
    is_auto,
    symmetry_of_model,
)
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import OrbitEstimator, usual_estimator
from pyro_symmetric.distributions.symmetrized import MovedDraws, version_of
from pyro_symmetric.distributions.unit_densities import mean_field_moments
from pyro_symmetric.groups import Action, Element, Group, group_of
from pyro_symmetric.weights import (
    Shapes,
    Weights,
    first_value,
    map_values,
    pick,
    unflatten,
)

Guide = Callable[..., Any]

# Relative and absolute tolerance of two evaluations of one log-density.
SAME = 1e-4


def symmetrize(
    guide: Guide,
    symmetry: Group | Symmetry | Auto | None = AUTO,
    estimator: OrbitEstimator | None = None,
    *,
    model: Model | None = None,
) -> Guide:
    """Average a guide written by hand over the orbits of a group.

    >>> def guide():
    ...     loc = pyro.param("loc", torch.tensor([-1.0, 0.0, 1.0]))
    ...     pyro.sample("w", dist.Normal(loc, 0.5).to_event(1))
    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> svi = pyro.infer.SVI(
    ...     model,
    ...     ps.symmetrize(guide, group),
    ...     pyro.optim.Adam({"lr": 0.01}),
    ...     pyro.infer.Trace_ELBO(),
    ... )
    >>> loss = svi.step()

    Each draw of the guide is moved by a uniform element of the group, and its density
    becomes the symmetrised one, under any objective of Pyro, with or without
    ``rsample``. The plain ``guide`` draws one copy of every mode. For
    automatic guides take :class:`~pyro_symmetric.guides.AutoSymmetrized`, which also
    checks the model: check yours by ``ps.verify_model(group, model, *args)``.

    :param guide: a function with ``pyro.sample`` statements, or a module, which stays a
        module with the same parameters. The sites that the group moves must have
        densities, depend on no other site, and lie in no subsampled plate; other sites
        may depend on them in ways that the group leaves alone. It is run two or three
        times for each draw.
    :param symmetry: permutations and signs under which the model is invariant;
        ``"auto"``: those of ``model``, found at the first call with its arguments.
        ``None``, or a model without any: the guide as it is.
    :param model: the Pyro model, if its symmetry is to be found.
    :param estimator: of the symmetrised density; by default exact where that is cheap,
        else ``SinkhornImportance``.
    :raises ValueError: in a step, if a site is missing, has another shape, or depends
        on another site.
    """
    if isinstance(guide, AutoGuide):
        raise TypeError(
            "guide is an automatic one; take ps.AutoSymmetrized(model, group, "
            "base=guide)"
        )
    if symmetry is None:
        return guide
    if is_auto(symmetry) and model is None:
        raise ValueError(
            "symmetrize needs the model whose symmetry it should find: pass model=, or "
            "a symmetry"
        )
    average = _Average(guide, model if is_auto(symmetry) else symmetry, estimator)
    if isinstance(guide, nn.Module):
        return SymmetrizedModule(guide, average)
    return functools.update_wrapper(average, guide, updated=())


class _Average:
    """A guide averaged over the orbits of a group.

    :param origin: the group, or a model in which it is found at the first call, with
        its arguments.
    """

    def __init__(self, guide: Guide, origin: Any, estimator: OrbitEstimator | None):
        self.guide = guide
        self.origin = origin
        self.estimator = estimator

    @functools.cached_property
    def action(self) -> Action:
        """The action of the group on the guide's sites."""
        group = group_of(self.origin).finite
        return Action(group, group.required_sites)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the guide once, with the density of its moved sites replaced."""
        if not isinstance(self.origin, Group | Symmetry):
            self.origin = symmetry_of_model(self.origin, args, kwargs)
        if not self.action.group.units:
            return self.guide(*args, **kwargs)
        joint = _Joint(self.action, self.estimator)
        with _Moved(joint) as recorder:
            result = self.guide(*args, **kwargs)
        joint.require_sites()
        run = functools.partial(self.guide, *args, **kwargs)
        with torch.no_grad(), forked(), ignore_jit_warnings():
            _require_independence(joint, recorder, run)
        return result


class SymmetrizedModule(nn.Module):
    """A guide that is a module, averaged over the orbits of a group.

    Its parameters are those of ``guide``, and have the same names in Pyro's store.
    """

    def __init__(self, guide: nn.Module, average: _Average):
        super().__init__()
        self.guide = guide
        self.average = average

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the guide, with the symmetrised density."""
        return self.average(*args, **kwargs)


# densities ----------------------------------------------------------------------------


class _Joint:
    """The moved sites of one run of a guide, and their joint density.

    :ivar laws: site -> its distribution as the guide has it, outside of plates around
        the guide.
    :ivar values: site -> its value, in all plates.
    :ivar drawn: site -> its draws before and after they were moved; sites whose values
        were replayed are left out.
    :ivar plates: site, moved or not, -> the plates inside the guide that it lies in.
    :ivar scores: the sites without ``rsample``.
    """

    def __init__(self, action: Action, estimator: OrbitEstimator | None):
        self.action = action
        self.estimator = estimator
        self.shapes = action.layout.site_shapes
        self.laws: dict[str, Any] = {}
        self.values: Weights = {}
        self.drawn: dict[str, MovedDraws] = {}
        self._element: Element | None = None
        self.scales: dict[str, Any] = {}
        self.plates: dict[str, frozenset[str]] = {}
        self.scores: set[str] = set()

    def require_sites(self) -> None:
        """Raise ``ValueError`` unless all sites are drawn, and scaled alike."""
        for site in self.shapes:
            if site not in self.values:
                raise ValueError(
                    f"the group moves the site {site!r}, which the guide doesn't draw"
                )
        first = next(iter(self.shapes))
        for site, scale in self.scales.items():
            if not torch.equal(as_tensor(scale), as_tensor(self.scales[first])):
                raise ValueError(
                    f"poutine.scale counts site {first!r} {self.scales[first]} times, "
                    f"but {site!r} {scale} times; sites that the group moves need the "
                    "same scale"
                )

    def move(self, site: str, base: Tensor, copies: Sequence[int]) -> Tensor:
        """Move draws of a site by the run's element, uniform for each particle.

        :param copies: the leading axes of draws that the sites don't share, as each has
            its own in tensor Monte Carlo: one element moves them all.
        """
        group = self.action.group
        if not group.moves:
            return base
        shape = self.shapes[site]
        particles = base.shape[len(copies) : base.dim() - len(shape)]
        count = math.prod(map(int, particles))
        if self._element is None:
            self._element = group.without_buffers().sample((count,), device=base.device)
        if self._element.batch_shape != (count,):
            raise ValueError(
                f"site {site!r} is drawn {count} times, but sites that the group moves "
                f"with it {self._element.batch_shape[0]} times; draw them in the same "
                "plates"
            )
        moved = self._element.on_site(site, base.reshape(*copies, count, *shape))
        value = moved.reshape(base.shape)
        self.drawn[site] = MovedDraws(base, value, version=version_of(value))
        return value

    def before(self, site: str, value: Tensor) -> Tensor:
        """Return the draw that a value was before it was moved; the value itself if
        values were replayed."""
        if self.drawn.keys() != self.shapes.keys():
            return value
        drawn = self.drawn[site].of(value)
        return value if drawn is None else drawn.base

    @functools.cached_property
    def carrier(self) -> str:
        """The site that takes the log-ratio: one with ``rsample`` where there is one,
        outside of the plates of sites that need a score."""
        return min(
            self.laws,
            key=lambda site: (bool(self.cut_off(site)), site in self.scores),
        )

    def cut_off(self, site: str) -> list[str]:
        """Return the sites without ``rsample`` that share a plate with this one.

        Pyro lets the score of a row of a plate see only what other sites contribute to
        the same row.
        """
        return sorted(
            score for score in self.scores if self.plates[score] & self.plates[site]
        )

    def log_ratio(self, site: str, value: Tensor) -> Tensor:
        """Return ``log q̄(w) - log q(w)``, with another value of one site.

        Its shape is that of one number a particle, with an axis of size one for each
        plate inside the guide; without particles it has none.
        """
        self.require_sites()
        values = {**self.values, site: value}
        if self.values[site].requires_grad and not value.requires_grad:
            # An objective that detaches one value of a trace detaches all.
            values = map_values(Tensor.detach, values)
        values = {name: self.before(name, held) for name, held in values.items()}
        extracted: Any = extract_provenance(values)
        values, provenance = extracted
        w = torch.cat([*self.vectors(values).values()], -1)
        base = _joint(pick(self.laws, self.shapes), self.shapes)
        estimator = self.estimator or usual_estimator(base, self.action)
        if not self.action.group.moves or self.drawn.keys() == self.shapes.keys():
            log_q_bar = estimator.log_prob(base, self.action, w)
        else:  # values that are replayed may be any
            log_q_bar = estimator.log_prob_elsewhere(base, self.action, w)
        ratio = log_q_bar - base.log_prob(w)
        if w.dim() > 1:
            ratio = ratio.reshape(*w.shape[:-1], *[1] * self.inner)
        return track_provenance(ratio, provenance)

    def vectors(self, values: Weights) -> Weights:
        """Return the values of all sites as vectors, ``particles + (numbers,)``."""
        flat = {name: self._flattened(name, values[name]) for name in self.shapes}
        outer = np.broadcast_shapes(*(part.shape[:-1] for part in flat.values()))
        return map_values(lambda part: part.expand(*outer, -1), flat)

    @functools.cached_property
    def inner(self) -> int:
        """The number of axes that plates inside the guide take."""
        counts = [
            len(shape) - self.laws[site].event_dim
            for site, shape in self.shapes.items()
        ]
        return max(counts)

    def absent(self, site: str) -> int:
        """Return the number of plates inside the guide that a site doesn't lie in."""
        return self.inner - (len(self.shapes[site]) - self.laws[site].event_dim)

    def _flattened(self, site: str, value: Tensor) -> Tensor:
        shape = self.shapes[site]
        lead = value.shape[: value.dim() - len(shape)]
        # Axes of plates that only other sites lie in have size one.
        particles = lead[: max(0, len(lead) - self.absent(site))]
        return value.reshape(*particles, shape.numel())


class _Moved(Messenger):
    """A handler around a guide that replaces the distributions of the moved sites.

    :ivar sites: name -> the message of every site when it was drawn.
    """

    def __init__(self, joint: _Joint):
        super().__init__()
        self.joint = joint
        self.sites: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        joint = self.joint
        name = msg["name"]
        frames = [frame for frame in msg["cond_indep_stack"] if frame.vectorized]
        joint.plates[name] = frozenset(frame.name for frame in frames)
        if not msg["is_observed"] and not getattr(msg["fn"], "has_rsample", False):
            joint.scores.add(name)
        if type(msg["fn"]).__name__ == "_Subsample":
            joint.scores.discard(name)
        if name not in joint.shapes:
            return
        _require_site(name, msg, joint)
        joint.laws[name] = msg["fn"]
        joint.scales[name] = msg["scale"]
        msg["fn"] = _CopiedSite(name, msg["fn"], joint)

    def _pyro_post_sample(self, msg: Any) -> None:
        self.sites[msg["name"]] = msg.copy()
        if msg["name"] in self.joint.shapes:
            self.joint.values[msg["name"]] = msg["value"]


class _CopiedSite(TorchDistribution):
    """The distribution of a site that a group moves, in a symmetrised guide.

    It is the guide's own, but for the carrier's log-density.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (torch's own declaration)

    def __init__(self, name: str, law: Any, joint: _Joint):
        self.name = name
        self.law = law
        self.joint = joint
        super().__init__(law.batch_shape, law.event_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """The flag of the guide's own distribution."""
        return self.law.has_rsample

    @constraints.dependent_property
    def support(self) -> Any:
        return self.law.support

    def expand(
        self, batch_shape: Sequence[int], _instance: _CopiedSite | None = None
    ) -> _CopiedSite:
        return _CopiedSite(self.name, self.law.expand(batch_shape), self.joint)

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        base = self.law.sample(torch.Size(sample_shape))
        return self.joint.move(self.name, base, sample_shape)

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        base = self.law.rsample(torch.Size(sample_shape))
        return self.joint.move(self.name, base, sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        log_prob = self.law.log_prob(self.joint.before(self.name, value))
        if self.name != self.joint.carrier:
            return log_prob
        return log_prob + self._share(value)

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        """Return the parts of Pyro's gradient estimators.

        The score function of a site without ``rsample`` is its own; the gradient of the
        log-ratio at fixed draws, whose mean is zero, is then left out.
        """
        parts = self.law.score_parts(self.joint.before(self.name, x))
        if self.name != self.joint.carrier:
            return parts
        if cut_off := self.joint.cut_off(self.name):
            plate = min(self.joint.plates[self.name])
            raise ValueError(
                f"site {cut_off[0]!r} is drawn without rsample in the plate {plate!r}; "
                "Pyro would take its score of one row at a time, but the average over "
                "the group ties all rows: draw it outside of plates, by .to_event"
            )
        share = self._share(x)
        log_prob, score_function, entropy_term = parts
        if self.has_rsample:
            entropy_term = entropy_term + share
        return ScoreParts(log_prob + share, score_function, entropy_term)

    def _share(self, value: Tensor) -> Tensor:
        """Return the log-ratio, shared evenly by the rows of plates inside the
        guide."""
        ratio = self.joint.log_ratio(self.name, value)
        shape = self.joint.shapes[self.name]
        rows = shape[: len(shape) - self.law.event_dim].numel()
        return ratio / rows


@register_kl(_CopiedSite, Distribution)
def _kl_of_copies(site: _CopiedSite, prior: Distribution) -> Tensor:
    """Return the divergence of the guide's own distribution, and the carrier's
    log-ratio of the draw."""
    divergence = kl_divergence(site.law, prior)
    if site.name != site.joint.carrier:
        return divergence
    return divergence + site._share(site.joint.values[site.name])


class _Product(TorchDistribution):
    """A joint distribution of independent sites over the vector of their values."""

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (torch's own declaration)
    support = constraints.real_vector

    def __init__(self, sites: Mapping[str, Any], shapes: Shapes):
        self.sites = sites
        self.shapes = shapes
        super().__init__(
            torch.Size(), torch.Size([sum(shape.numel() for shape in shapes.values())])
        )

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        parts = [
            fn.sample(sample_shape).reshape(*sample_shape, -1)
            for fn in self.sites.values()
        ]
        return torch.cat(parts, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        pieces = unflatten(value, self.shapes)
        terms = [
            fn.log_prob(pieces[site]).reshape(*value.shape[:-1], -1)
            for site, fn in self.sites.items()
        ]
        return torch.cat(terms, -1).sum(-1)


def _joint(sites: Mapping[str, Any], shapes: Shapes) -> Any:
    """Return the joint distribution of independent sites: a normal if all are, as
    estimators know more of that.
    """
    locs = []
    scales = []
    for site, fn in sites.items():
        moments = mean_field_moments(fn)
        if moments is None:
            return _Product(sites, shapes)
        loc, scale = moments
        locs.append(loc.expand(shapes[site]).reshape(-1))
        scales.append(scale.expand(shapes[site]).reshape(-1))
    return dist.Normal(torch.cat(locs), torch.cat(scales)).to_event(1)


# what a site must be ------------------------------------------------------------------


def _require_site(site: str, msg: Any, joint: _Joint) -> None:
    """Raise ``ValueError`` for a site without a density that can be averaged."""
    fn = msg["fn"]
    shape = joint.shapes[site]
    if isinstance(fn, _CopiedSite):
        raise ValueError(
            f"site {site!r} is symmetrised already; take one group of both symmetries"
        )
    if msg["is_observed"]:
        raise ValueError(f"site {site!r} is observed in the guide; a guide draws it")
    if tuple(fn.shape()) != tuple(shape):
        raise ValueError(
            f"site {site!r} has shape {tuple(fn.shape())}; the group's is "
            f"{tuple(shape)}"
        )
    if isinstance(_innermost(fn), dist.Delta):
        raise ValueError(
            f"site {site!r} is a point mass, or computed from another site; a "
            "symmetrised guide needs its density"
        )
    joint.action.require_real(site, fn.support)
    if any(
        frame.full_size and frame.size < frame.full_size
        for frame in msg["cond_indep_stack"]
    ):
        raise ValueError(
            f"site {site!r} lies in a subsampled plate; a symmetrised guide takes "
            "no local variables"
        )
    mask = msg["mask"]
    if isinstance(mask, Tensor) and not mask.all():
        raise ValueError(
            f"poutine.mask hides entries of site {site!r}; the average over the group "
            "needs them all"
        )


def _innermost(fn: Any) -> Any:
    """Return a distribution without the wrappers that make events of its batch."""
    while isinstance(fn, dist.Independent | dist.MaskedDistribution):
        fn = fn.base_dist
    return fn


def _dependent(site: str) -> ValueError:
    return ValueError(
        f"site {site!r} depends on another site of the guide, or on random numbers "
        "drawn outside of sites; those that the group moves must not"
    )


def _require_independence(
    joint: _Joint, recorder: _Moved, guide: Callable[[], Any]
) -> None:
    """Raise ``ValueError`` if a moved site depends on others, or others change as it
    is moved: their distributions are compared with those of another run."""
    dependent = [
        name
        for name, msg in recorder.sites.items()
        if name not in joint.shapes and type(msg["fn"]).__name__ != "_Subsample"
    ]
    if not dependent and len(joint.shapes) == 1:
        return
    with poutine.block():
        again = poutine.trace(guide).get_trace()
    for site, law in joint.laws.items():
        value, _ = extract_provenance(joint.before(site, joint.values[site]))
        if not _alike(law, again.nodes[site]["fn"], value):
            raise _dependent(site)
    if not dependent:
        return
    replayed = poutine.trace(poutine.replay(guide, trace=_moved_trace(joint, recorder)))
    with poutine.block():  # plates of particles, too: all values are replayed
        moved = replayed.get_trace()
    for name in dependent:
        value, _ = extract_provenance(recorder.sites[name]["value"])
        if not _alike(recorder.sites[name]["fn"], moved.nodes[name]["fn"], value):
            raise ValueError(
                f"site {name!r} changes its distribution as the group moves "
                f"{list(joint.shapes)}; a site of the guide that depends on these must "
                "not, or must be moved along"
            )


def _alike(fn: Any, again: Any, value: Any) -> bool:
    """Return whether two distributions have the same log-density of a value."""
    try:
        log_prob, _ = extract_provenance(getattr(fn, "law", fn).log_prob(value))
        log_prob_again, _ = extract_provenance(
            getattr(again, "law", again).log_prob(value)
        )
    except ValueError:  # outside of a support
        return False
    log_prob, log_prob_again = torch.broadcast_tensors(log_prob, log_prob_again)
    return torch.allclose(log_prob, log_prob_again, SAME, SAME, equal_nan=True)


def _moved_trace(joint: _Joint, recorder: _Moved) -> poutine.Trace:
    """Return a trace of a guide's draws, the moved sites moved by an element."""
    extracted: Any = extract_provenance(joint.values)
    values, _ = extracted
    group = joint.action.group.without_buffers()
    weights = {
        name: part.reshape(*part.shape[:-1], *joint.shapes[name])
        for name, part in joint.vectors(values).items()
    }
    device = first_value(weights).device
    moved = _thorough(group, device)(weights)
    trace = poutine.Trace()
    for name, msg in recorder.sites.items():
        value, _ = extract_provenance(msg["value"])
        if name in joint.shapes:
            shape = joint.shapes[name]
            outer = moved[name].shape[: moved[name].dim() - len(shape)]
            value = moved[name].reshape(*outer, *[1] * joint.absent(name), *shape)
        trace.add_node(name, **{**msg, "value": value})
    return trace


def _thorough(group: Group, device: torch.device) -> Element:
    """Return a random element that moves all units: along a cycle, with other signs."""
    cycles = {}
    for name in group.names("permute"):
        shape = group[name].shape
        cycles[name] = torch.arange(shape[-1], device=device).roll(1).expand(shape)
    signs = {
        name: -torch.ones(group[name].shape, device=device)
        for name in group.names("flip")
    }
    element = group.sample(device=device)
    return element @ group.element(cycles, signs=signs) @ element.inverse()
