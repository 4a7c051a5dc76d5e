r"""All weight-space symmetries of one network: permutations, scalings, signs and shifts, and elements of them together.

An element acts as :math:`g = p\,s\,\sigma\,t`: first shifts, then signs, then scalings, then permutations. Products and
inverses keep their factors in order, so that ``(g @ h)(w) == g(h(w))`` and ``g.inverse()(g(w)) == w``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.explain import Explanation
from pyro_symmetric.symmetry.finite import AnyFiniteGroup, SignedPermutation, finite_part
from pyro_symmetric.symmetry.formats import table, to_axes
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.rescaling import ScalingGroup, ShiftGroup, SignGroup
from pyro_symmetric.symmetry.weights import Weights

P = TypeVar("P")


class Action(Protocol):
    """Anything that acts on weights: a permutation, scaling, sign, shift, or a :class:`SymmetryElement`."""

    @property
    def batch_shape(self) -> torch.Size: ...
    def __call__(self, weights: Mapping[str, Tensor]) -> Weights: ...
    def inverse(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class SymmetryElement:
    """A product of elements of the four groups; ``steps`` act one after the other, the first one first."""

    steps: tuple[Any, ...]

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(*(step.batch_shape for step in self.steps))

    def __call__(self, weights: Mapping[str, Tensor]) -> Weights:
        result = dict(arguments.weights("weights", weights))
        for step in self.steps:
            result = step(result)
        return result

    def moved(self, site: str, value: Tensor) -> Tensor:
        """Act on one site alone; batch shapes broadcast. Large networks are moved so, without a second copy."""
        for step in self.steps:
            value = step.moved(site, value)
        return value

    def __matmul__(self, other: Any) -> SymmetryElement:
        """``(g @ h)(w) == g(h(w))``."""
        return SymmetryElement((*_steps(other), *self.steps))

    def inverse(self) -> SymmetryElement:
        """The element with ``g.inverse() @ g`` the identity."""
        return SymmetryElement(tuple(step.inverse() for step in reversed(self.steps)))

    def to(self, device: torch.device | str) -> SymmetryElement:
        """The same element on another device."""
        return SymmetryElement(tuple(step.to(device) for step in self.steps))

    def select(self, index: int | slice | Tensor) -> SymmetryElement:
        """Index the batch."""
        return SymmetryElement(tuple(step.select(index) for step in self.steps))


def _steps(element: Any) -> tuple[Any, ...]:
    return element.steps if isinstance(element, SymmetryElement | SignedPermutation) else (element,)


@dataclass(frozen=True, eq=False, repr=False)
class WeightSymmetry:
    """What leaves a network's function unchanged.

    :param permutations: exchanges of units, nested where groups of units (heads) move as wholes.
    :param scalings: positive multipliers of units.
    :param signs: sign flips of units.
    :param shifts: constants added in front of a softmax.
    :param explanation: for every axis of every parameter, what moves it or why it stays.
    :param logits: whether the outputs go through a softmax, so that they matter up to a constant only.
    """

    permutations: PermutationGroup
    scalings: ScalingGroup
    signs: SignGroup
    shifts: ShiftGroup
    explanation: Explanation = field(default_factory=Explanation)
    logits: bool = False

    def __post_init__(self) -> None:
        kinds = {"permutations": PermutationGroup, "scalings": ScalingGroup, "signs": SignGroup, "shifts": ShiftGroup}
        for name, kind in kinds.items():
            arguments.instance(name, getattr(self, name), kind, f"a {kind.__name__}")
        arguments.flag("logits", self.logits)

    @property
    def site_shapes(self) -> dict[str, torch.Size]:
        """Shape of every site, buffers with running statistics included."""
        return self.permutations.site_shapes

    @property
    def finite(self) -> AnyFiniteGroup:
        """Permutations, and signs where there are any: what a guide can be averaged over."""
        return finite_part(self)

    def log_order(self) -> float:
        """Natural logarithm of the number of elements of the finite part, permutations and signs.

        It is the number of equivalent modes of a posterior whose prior has these symmetries.
        """
        return self.permutations.log_order() + self.signs.log_order()

    def explain(self) -> Explanation:
        """Which axis is moved by which factor, and which operator in which module pinned the others."""
        return self.explanation

    # elements -------------------------------------------------------------------------------------------------------

    def identity(self, shape: Sequence[int] = (), device: torch.device | str | None = None) -> SymmetryElement:
        """The neutral element, as a batch of the given shape."""
        groups = (self.shifts, self.signs, self.scalings, self.permutations)
        return SymmetryElement(tuple(group.identity(shape, device=device) for group in groups))

    def sample(
        self, shape: Sequence[int] = (), spread: float = 1.0, device: torch.device | str | None = None
    ) -> SymmetryElement:
        """A batch of independent elements: permutations and signs uniform, scales log-normal, shifts normal.

        :param spread: standard deviation of log-scales and shifts.
        """
        return SymmetryElement(
            (
                self.shifts.sample(shape, spread, device=device),
                self.signs.sample(shape, device=device),
                self.scalings.sample(shape, spread, device=device),
                self.permutations.sample(shape, device=device),
            )
        )

    @overload
    def act(self, element: Action, target: nn.Module) -> nn.Module: ...
    @overload
    def act(self, element: Action, target: Mapping[str, Tensor]) -> Weights: ...
    @overload
    def act(self, element: Action, target: P) -> P: ...
    def act(self, element: Action, target: Any) -> Any:
        """Transform a network, weights, a posterior, or a Gaussian guide; the input isn't changed.

        :param element: of any of the four groups, or of all together; batch shapes broadcast against those of weights.
        :param target: a module (a new one is returned, with transformed weights and running statistics); a dict of
            weights; a dataclass with a field ``samples`` of them, such as ``Posterior``; or a Gaussian guide (see
            :func:`~pyro_symmetric.guides.push_forward`).
        :raises ValueError: if a module or a guide meets a batch of elements: it holds one set of weights; if the
            element, or what it acts on, is of another network, or lacks running statistics that the element moves (see
            :meth:`holding`).
        """
        if not callable(element) or not hasattr(element, "batch_shape"):
            raise TypeError(f"element is {arguments.shown(element)}; it must be an element, such as symmetry.sample()")
        self._require_own(element)
        return acted_on(target, element, self)

    def weights_of(self, net: nn.Module) -> Weights:
        """The network's own tensors, site -> parameter or buffer.

        :raises ValueError: if its parameters aren't those, with the shapes, of the network that the symmetry was found
            in.
        """
        arguments.instance("net", net, nn.Module, "a torch.nn.Module")
        parameters = dict(net.named_parameters())
        tensors = parameters | dict(net.named_buffers())
        missing = [site for site in self.site_shapes if site not in tensors]
        if missing:
            raise ValueError(
                f"net lacks the sites {missing}; is it the network that the symmetry was found for? (A Pyro model's "
                "invariance is checked by symmetry.permutations.verify(model, ...), and its sites are moved as a dict)"
            )
        unknown = [name for name in parameters if name not in self.site_shapes]
        if unknown:
            raise ValueError(
                f"net has the parameters {unknown}, which the symmetry doesn't know; is it the network that the "
                "symmetry was found for?"
            )
        for site, shape in self.site_shapes.items():
            if not is_lazy(tensors[site]) and tensors[site].shape != shape:
                raise ValueError(
                    f"{site!r} has shape {tuple(tensors[site].shape)} in net, but {tuple(shape)} in the symmetry; is "
                    "it the network that the symmetry was found for?"
                )
        return {site: tensors[site] for site in self.site_shapes}

    def verify(self, net: nn.Module, *inputs: Any, tolerance: float = 1e-6, trials: int = 1) -> Any:
        """Compare outputs before and after random elements of the whole group; see :func:`verify.verify`."""
        from pyro_symmetric.symmetry.verify import verify

        return verify(self, net, *inputs, tolerance=tolerance, trials=trials)

    def _require_own(self, element: Action) -> None:
        """:raises ValueError: if an element is of a network with other sites or other shapes."""
        for step in _steps(element):
            shapes: Mapping[str, torch.Size] = getattr(step, "group", self).site_shapes
            others = [site for site in {**self.site_shapes, **shapes} if self.site_shapes.get(site) != shapes.get(site)]
            # A subgroup that holds running statistics doesn't know them.
            others = [site for site in others if site in shapes or site not in self.buffers]
            if others:
                raise ValueError(
                    f"element is of another network: its sites and those of the symmetry differ in {others[:10]}. Draw "
                    "it from the symmetry itself, or from one of its groups"
                )

    # networks whose statistics stay ---------------------------------------------------------------------------------

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers (running statistics) that the symmetry moves along with the parameters."""
        groups = (self.permutations, self.scalings, self.signs)
        return tuple(dict.fromkeys(site for group in groups for site in group.buffers))

    def holding(self, net: nn.Module | Mapping[str, Tensor]) -> WeightSymmetry:
        """What is left of the symmetry if running statistics stay as they are: for weights that hold parameters alone.

        A posterior over parameters alone, of a network with batch normalisation in eval mode, has these symmetries and
        no more: units whose running statistics differ aren't interchangeable, and can't be rescaled in front of the
        normalisation. In a fresh network all have mean 0 and variance 1, so that permutations stay.

        :param net: the network, or its buffers by site.
        :raises ValueError: if it lacks some.
        """
        from pyro_symmetric.symmetry.holding import holding

        return holding(self, net)

    def without_buffers(self) -> WeightSymmetry:
        """The same symmetry acting on parameters alone, whatever that does to predictions: to compare weights."""
        return self.leaving(self.buffers)

    def leaving(self, sites: Sequence[str]) -> WeightSymmetry:
        """The same factors without their axes along ``sites``, of which the symmetry then knows nothing.

        :raises ValueError: if it doesn't know one of them.
        """
        sites = arguments.listed("sites", sites, str, "sites")
        if unknown := [site for site in sites if site not in self.site_shapes]:
            raise ValueError(f"sites holds {unknown}; the symmetry knows {list(self.site_shapes)}")
        return WeightSymmetry(
            self.permutations.leaving(sites),
            self.scalings.leaving(sites),
            self.signs.leaving(sites),
            self.shifts.leaving(sites),
            self.explanation,
            self.logits,
        )

    # other names, other formats -------------------------------------------------------------------------------------

    def renamed(self, rename: Callable[[str], str]) -> WeightSymmetry:
        """The same group for weights whose sites have other names."""
        arguments.function("rename", rename, "a function of a site's name")

        def axes(axes: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(replace(axis, site=rename(axis.site)) for axis in axes)

        shapes = {rename(site): shape for site, shape in self.site_shapes.items()}
        if len(shapes) < len(self.site_shapes):
            raise ValueError("rename gives two sites the same name")
        factors = [replace(f, axes=axes(f.axes)) for f in map(self.permutations.factor, self.permutations.factors)]
        scalings = [replace(f, axes=axes(f.axes)) for f in map(self.scalings.factor, self.scalings.factors)]
        signs = [replace(f, axes=axes(f.axes)) for f in map(self.signs.factor, self.signs.factors)]
        explained = Explanation(tuple(replace(axis, site=rename(axis.site)) for axis in self.explanation.axes))
        return WeightSymmetry(
            PermutationGroup(factors, shapes),
            ScalingGroup(scalings, shapes),
            SignGroup(signs, shapes),
            ShiftGroup(map(rename, self.shifts.sites), shapes),
            explained,
            self.logits,
        )

    def prefixed(self, prefix: str) -> WeightSymmetry:
        """The same group for a network that is an attribute of a larger one: ``0.weight`` -> ``net.0.weight``."""
        arguments.instance("prefix", prefix, str, "the name of an attribute")
        return self.renamed(lambda site: f"{prefix.rstrip('.')}.{site}" if prefix else site)

    def without(self, names: Mapping[str, Sequence[str]]) -> WeightSymmetry:
        """Leave factors out: ``{"permutations": [...], "scalings": [...], "signs": [...], "shifts": [...]}``.

        What lies inside a left-out permutation factor stays as a group of its own; leaving out a nested factor leaves
        out its likes in all slots.
        """
        self._require_names(names)
        left_out = _with_siblings(self.permutations, set(names.get("permutations", ())))
        factors = []
        for name in self.permutations.factors:
            factor = self.permutations.factor(name)
            if name not in left_out:
                orphan = factor.parent in left_out
                factors.append(replace(factor, parent=None, slot=None) if orphan else factor)
        scalings, signs, shifts = (set(names.get(kind, ())) for kind in ("scalings", "signs", "shifts"))
        shapes = self.site_shapes
        return WeightSymmetry(
            PermutationGroup(factors, shapes),
            ScalingGroup([self.scalings.factor(n) for n in self.scalings.factors if n not in scalings], shapes),
            SignGroup([self.signs.factor(n) for n in self.signs.factors if n not in signs], shapes),
            ShiftGroup([site for site in self.shifts.sites if site not in shifts], shapes),
            self.explanation,
            self.logits,
        )

    def _require_names(self, names: Mapping[str, Sequence[str]]) -> None:
        known = {kind: list(getattr(self, kind).factors) for kind in ("permutations", "scalings", "signs")}
        known["shifts"] = list(self.shifts.sites)
        for kind, given in arguments.mapping("names", names, "kind -> names of factors").items():
            if kind not in known:
                raise ValueError(f"names has the key {kind!r}; its keys must be among {list(known)}")
            for name in arguments.listed(f"names[{kind!r}]", given, str, "names"):
                if name not in known[kind]:
                    raise ValueError(f"names[{kind!r}] holds {name!r}; the symmetry has {known[kind]} of that kind")

    def to_dict(self) -> dict[str, Any]:
        """As JSON; :meth:`from_dict` reads it back."""
        return {
            "permutations": self.permutations.to_dict(),
            "scalings": self.scalings.to_dict(),
            "signs": self.signs.to_dict(),
            "shifts": self.shifts.to_dict(),
            "logits": self.logits,
            "explanation": self.explanation.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WeightSymmetry:
        """From JSON."""
        kinds = ("permutations", "scalings", "signs", "shifts", "explanation", "logits")
        arguments.entries("data", data, kinds)
        return cls(
            PermutationGroup.from_dict(data["permutations"]),
            ScalingGroup.from_dict(data["scalings"]),
            SignGroup.from_dict(data["signs"]),
            ShiftGroup.from_dict(data["shifts"]),
            Explanation.from_dict(data["explanation"]),
            data["logits"],
        )

    def to_axes(self, strict: bool = True) -> dict[str, tuple[str | None, ...]]:
        """The permutations as Git Re-Basin's per-axis specification: site -> for each axis, a factor's name or None.

        :param strict: raise if a factor can't be written so, because its units are blocks, or part of an axis, or
            nested; otherwise such factors are left out.
        :raises ValueError: naming the first factor that doesn't fit.
        """
        return to_axes(self.permutations, arguments.flag("strict", strict))

    @classmethod
    def from_axes(
        cls, axes: Mapping[str, Sequence[str | None]], example_weights: Mapping[str, Tensor | torch.Size]
    ) -> WeightSymmetry:
        """From a per-axis specification, as Git Re-Basin writes them by hand; permutations only."""
        group = PermutationGroup.declare(axes, example_weights)
        shapes = group.site_shapes
        return cls(group, ScalingGroup((), shapes), SignGroup((), shapes), ShiftGroup((), shapes))

    def __repr__(self) -> str:
        return table(self)


@functools.singledispatch
def acted_on(target: Any, element: Action, symmetry: WeightSymmetry) -> Any:
    """What :meth:`WeightSymmetry.act` does for one kind of target; higher floors register kinds of their own."""
    if not (dataclasses.is_dataclass(target) and hasattr(target, "samples")):
        raise TypeError(
            f"target is a {type(target).__name__}; elements act on a module, on a dict of weights, on a Posterior, or "
            "on a Gaussian guide"
        )
    return replace(target, samples=element(target.samples))  # type: ignore[type-var]


@acted_on.register(Mapping)
def _(target: Mapping[str, Tensor], element: Action, symmetry: WeightSymmetry) -> Weights:
    return element(target)


@acted_on.register(nn.Module)
def _(target: nn.Module, element: Action, symmetry: WeightSymmetry) -> nn.Module:
    if element.batch_shape.numel() != 1:
        raise ValueError(f"element has batch shape {tuple(element.batch_shape)}; one module takes one element")
    result = copied(target)
    weights = symmetry.weights_of(result)
    with torch.no_grad():
        for site, value in element(weights).items():
            weights[site].copy_(value.reshape(weights[site].shape))
    return result


def _with_siblings(group: PermutationGroup, names: set[str]) -> set[str]:
    """Nested factors come in all slots of their owner or in none."""
    families = {_family(name) for name in names if group.factor(name).parent is not None}
    return names | {n for n in group.factors if group.factor(n).parent is not None and _family(n) in families}


def _family(name: str) -> str:
    return name.partition("[")[0]


def copied(net: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A deep copy, also of modules that keep computed weights as attributes (the old weight and spectral norm).

    :param dtype: of the copy's floating-point tensors; they are copied and converted in one go.
    """
    memo: dict[int, Any] = {}
    for module in net.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    if dtype is None:
        return copy.deepcopy(net, memo)
    for tensor in (*net.parameters(), *net.buffers()):
        if type(tensor) in (nn.Parameter, Tensor) and tensor.is_floating_point():
            value = tensor.detach().to(dtype, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return copy.deepcopy(net, memo).to(dtype)
