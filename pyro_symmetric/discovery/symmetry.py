"""The symmetry of a network's weights: its group, and an explanation of every axis."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyro_symmetric import arguments, plots
from pyro_symmetric._process import Replaced
from pyro_symmetric.arguments import Device, Json, Names
from pyro_symmetric.discovery.rotations import rotated
from pyro_symmetric.groups import Element, Group
from pyro_symmetric.groups.moves import MOVES, Move
from pyro_symmetric.groups.units import LISTED, table, unit_rows
from pyro_symmetric.posterior.tables import html_table
from pyro_symmetric.weights import (
    Tensors,
    Weights,
    batch_shape,
    map_values,
    pick,
    require_sites,
)

CONSTANT = 1e-3  # standard deviation below which a tensor counts as constant
Selection = str | Iterable[str]  # one name or several


class AxisExplanation(NamedTuple):
    """The fate of one axis of one site.

    :param site: the parameter or running statistic.
    :param dim: the axis.
    :param length: its number of positions, summed over slices that have units of their
        own (the columns of a grouped kernel).
    :param permuted: the number of positions that are permuted.
    :param units: the units along this axis.
    :param reason: why most of the other positions stay: the operator that pinned them,
        and its module.
    :param chain: the axes that tie this one to the first axis of its units, or to the
        operator that pins it, each with the operator that ties it.
    """

    site: str
    dim: int
    length: int
    permuted: int
    units: Names
    reason: str = ""
    chain: Names = ()

    def with_reasons(self, further: Sequence[str]) -> AxisExplanation:
        """Return the explanation with further reasons behind its own."""
        return self._replace(reason="; ".join(filter(None, [self.reason, *further])))

    def __str__(self) -> str:
        moved = f"{self.permuted} of {self.length} move with {', '.join(self.units)}"
        fate = moved if self.permuted else f"all {self.length} stay"
        head = "; ".join(filter(None, [fate, self.reason]))
        return "\n    -> ".join([f"{self.site}[{self.dim}]: {head}", *self.chain])


class Explanation(tuple[AxisExplanation, ...]):
    """One explanation for each axis of each site, printed line by line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


@dataclass(frozen=True, eq=False, repr=False)
class Symmetry:
    """The group of moves that leave a network's function unchanged, found by
    :func:`~pyro_symmetric.find_symmetry`.

    >>> net, x = (
    ...     nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    ...     torch.randn(5, 3),
    ... )
    >>> symmetry = ps.find_symmetry(net, x)
    >>> (
    ...     isinstance(symmetry, ps.Symmetry),
    ...     symmetry.finite.order(),
    ...     symmetry.scalings.factors,
    ... )
    (True, 24, {'0': 4})
    >>> moved = symmetry.act(symmetry.sample(), net)
    >>> torch.allclose(moved(x), net(x), atol=1e-4)
    True

    :param group: the units and their moves.
    :param explanation: for every axis of every parameter, its units or why it stays.
    :param logits: whether the outputs go through a softmax, and so matter up to a
        constant only.
    :param at_least: whether the network may have more symmetries: a module with
        parameters is called more than once, nothing that was tried switches some units
        on, or it has no derivatives.
    :param remarks: what holds but isn't in the group, in words: the symmetry of a model
        then says at least.
    :param notes: what else there is to say.
    :param rotating: the names of units that may also be mixed by orthogonal maps, which
        :meth:`with_rotations` lets them.
    :param seen_in_eval: moves, with the names of their units, that change outputs in
        train mode, though they scale no running statistics; see :attr:`eval_only`.
    """

    group: Group
    explanation: Explanation = field(default_factory=Explanation)
    logits: bool = False
    at_least: bool = False
    remarks: Names = ()
    rotating: Names = ()
    seen_in_eval: tuple[tuple[Move, str], ...] = ()
    notes: Names = ()

    def __repr__(self) -> str:
        units = self.group.units
        lines = [self._head(), *[table(units)] * bool(units), *self._remarks()]
        return "\n".join(lines)

    def plot(self, ax: Any = None) -> Any:
        """Plot each site as a row of its axes, in the colours of the units that move
        along them; return the axes."""
        units = {}
        for name, unit_set in self.group.units.items():
            units[name] = {(axis.site, axis.dim) for axis in unit_set.axes}
        return plots.coloured_axes(ax, self.site_shapes, units)

    def _repr_html_(self) -> str:
        return html_table(self._head(), unit_rows(self.group.units), self._remarks())

    def _head(self) -> str:
        group = self.group
        count = {
            move: sum(group[name].count for name in group.names(move)) for move in MOVES
        }
        least = "at least " if self.at_least else ""
        head = (
            f"Symmetry of log-order {least}{group.log_order():.1f}: {count['permute']} "
            "units that permute, "
            f"{count['scale']} scales, {count['flip']} signs, "
            f"{len(group.names('shift'))} shifts"
        )
        if count["rotate"]:
            head += f", {count['rotate']} units that rotate"
        return head

    def _remarks(self) -> list[str]:
        permuted = self.group.names("permute")
        remarks = [*self.remarks, *self.notes]
        if turning := ", ".join(name for name in self.rotating if name in permuted):
            remarks.append(
                f"{turning}: all orthogonal maps of the units hold as well; "
                "with_rotations() adds them"
            )
        if moves := self.eval_only:
            listed = ", ".join(f"{name} ({move})" for move, name in moves[:LISTED])
            further = f" and {len(moves) - LISTED} more" * (len(moves) > LISTED)
            remarks.append(
                f"{listed}{further}: in evaluation mode only, which reads running "
                "statistics; in_train_mode() leaves them out"
            )
        return remarks

    def with_rotations(self) -> Symmetry:
        """Let the units of :attr:`rotating` rotate, where the group has their
        permutations and signs only.

        That is the symmetry of a posterior whose prior is isotropic in these units, and
        of functions. Rotations take the place of other moves of these units: a function
        of two matrices in a row, or of queries and keys, allows all invertible maps of
        them, of which a group here holds scales with permutations, or rotations.
        Continuous, they can be removed and aligned. Guides are trained on the average
        over the permutations and signs among them; :func:`~pyro_symmetric.evidence`
        averages over rotations. Some may make up no group with others, as those of
        units that meet in one matrix: they are left out, and :attr:`notes` name them.

        >>> net, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
        >>> symmetry = ps.find_symmetry(net, x)
        >>> symmetry.rotating, symmetry.with_rotations().group["0"].moves
        (('0',), frozenset({'rotate'}))

        :raises ValueError: if no units rotate.
        """
        if not set(self.rotating) & set(self.group.names("permute")):
            raise ValueError(
                f"no units rotate; those that permute are "
                f"{list(self.group.names('permute'))}"
            )
        group = rotated(self.group, self.rotating)
        notes = [*self.notes]
        for name in self.rotating:
            if name in self.group.names("scale"):
                notes.append(self._maps_of(name))
            if name in group.names("permute"):
                notes.append(
                    f"{name}: rotations that make up no group with the others' are "
                    "left out"
                )
        return replace(
            self,
            group=group,
            explanation=Explanation(map(self._with_maps, self.explanation)),
            notes=tuple(notes),
            rotating=(),
        )

    # the group and its subgroups ------------------------------------------------------

    @property
    def finite(self) -> Group:
        """Permutations and signs, over which a guide can be averaged."""
        return self.group.finite

    @property
    def permutations(self) -> Group:
        """The permutations alone."""
        return self.group.permutations

    @property
    def signs(self) -> Group:
        """The flips of signs alone."""
        return self.group.signs

    @property
    def scalings(self) -> Group:
        """The positive scalings alone."""
        return self.group.scalings

    @property
    def shifts(self) -> Group:
        """The shifts alone."""
        return self.group.shifts

    @property
    def site_shapes(self) -> dict[str, torch.Size]:
        """Shape of every site, buffers with running statistics included."""
        return self.group.site_shapes

    @property
    def buffers(self) -> Names:
        """The buffers (running statistics) that the symmetry moves along with the
        parameters.
        """
        return self.group.buffers

    @property
    def eval_only(self) -> tuple[tuple[Move, str], ...]:
        """The moves, with the names of their units, that hold in evaluation mode only,
        as layers read running statistics there.
        """
        scaling = [
            ("scale", name)
            for name in self.group.names("scale")
            if any(axis.buffer and axis.exponent for axis in self.group[name].axes)
        ]
        return tuple(
            (move, name)
            for move in MOVES
            for name in self.group.names(move)
            if (move, name) in (*scaling, *self.seen_in_eval)
        )

    def log_order(self) -> float:
        """Return the natural logarithm of the number of permutations with signs, of
        which those that act alike count once.

        A posterior whose prior has these symmetries has as many equivalent modes.
        """
        return self.group.log_order()

    def explain(self, site: str) -> Explanation:
        """Explain why the axes of a site or module move or stay, one line each.

        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> symmetry = ps.find_symmetry(net, torch.randn(5, 2))
        >>> print(symmetry.explain("*.bias"))
        0.bias[0]: 3 of 3 move with 0
            -> 0.weight[0] by linear in 0 (Linear)
        2.bias[0]: all 1 stay; pinned by the network's output
            -> 2.weight[0] by linear in 2 (Linear)

        :param site: its name, or a pattern such as ``"*.bias"``;
            ``symmetry.explanation`` covers all sites.
        :raises ValueError: if no site has this name.
        """
        arguments.instance("site", site, str, "the name of a site or module")
        chosen = named(
            "site", site, dict.fromkeys(axis.site for axis in self.explanation)
        )
        return Explanation(
            self._with_maps(self._with_modes(axis))
            for axis in self.explanation
            if axis.site in chosen
        )

    def _with_modes(self, explained: AxisExplanation) -> AxisExplanation:
        """Name the moves of an axis that hold in evaluation mode only."""
        place = explained.site, explained.dim
        reasons = []
        for move, name in self.eval_only:
            axes = self.group[name].axes
            if place in {(axis.site, axis.dim) for axis in axes if axis.exponent}:
                reasons.append(f"{name} ({move}) in evaluation mode only")
        return explained.with_reasons(reasons)

    def _with_maps(self, explained: AxisExplanation) -> AxisExplanation:
        """Name the linear maps that may mix the units along an axis."""
        reasons = []
        for name in self.rotating:
            axes = self.group[name].axes if name in self.group.units else ()
            if (explained.site, explained.dim) in {(a.site, a.dim) for a in axes}:
                reasons.append(self._maps_of(name))
        return explained.with_reasons(reasons)

    def _maps_of(self, name: str) -> str:
        if name not in self.group.names("scale"):
            return f"all orthogonal maps of {name} hold as well"
        return (  # which scales and rotations generate
            f"all invertible maps of {name} hold as well, scales among them, of which "
            "an isotropic prior leaves the orthogonal ones"
        )

    # elements -------------------------------------------------------------------------

    def sample(
        self,
        shape: Sequence[int] = (),
        spread: float = 1.0,
        device: Device = None,
    ) -> Element:
        """Sample a batch of independent elements: permutations and signs uniform,
        log-scales and shifts normal.

        :param spread: standard deviation of log-scales and shifts.
        :param device: where to draw them, by default on the CPU; they act on weights on
            any device.
        """
        return self.group.sample(shape, spread, device)

    @overload
    def act(self, element: Element, net: nn.Module) -> nn.Module: ...

    @overload
    def act(self, element: Element, net: Tensors) -> Weights: ...

    def act(self, element: Element, net: Any) -> Any:
        """Return a copy of a network, or of its ``state_dict``, with transformed
        weights and running statistics.

        ``element(weights)`` transforms weights, or batches of them;
        ``posterior.map(element)`` a posterior, and
        :func:`~pyro_symmetric.push_forward` a Gaussian guide.

        :raises ValueError: if the element is a batch, or belongs to another network.
        """
        arguments.instance(
            "element",
            element,
            Element,
            "an element: symmetry.sample(), align(...).element",
        )
        if element.batch_shape.numel() != 1:
            raise ValueError(
                f"element has batch shape {tuple(element.batch_shape)}; one module "
                "takes one element"
            )
        if isinstance(net, Mapping):
            batch_shape(net, self.site_shapes, "net")
            return {**net, **element(pick(net, self.site_shapes))}
        return with_weights(net, element(self.weights_of(net)))

    def weights_of(self, net: nn.Module) -> Weights:
        """Return the network's own tensors, site -> parameter or buffer.

        :raises ValueError: if the names or shapes of its parameters differ from those
            of the symmetry's network.
        """
        arguments.instance("net", net, nn.Module, "a torch.nn.Module")
        parameters = dict(net.named_parameters())
        tensors = parameters | dict(net.named_buffers())
        wrong = {site: "missing" for site in self.site_shapes if site not in tensors}
        wrong |= {
            name: "unknown" for name in parameters if name not in self.site_shapes
        }
        for site, shape in self.site_shapes.items():
            if (
                site in tensors
                and not is_lazy(tensors[site])
                and tensors[site].shape != shape
            ):
                wrong[site] = (
                    f"of shape {tuple(tensors[site].shape)}, not {tuple(shape)}"
                )
        if wrong:
            raise ValueError(
                f"net isn't the network that the symmetry was found for: {wrong} (for "
                "a Pyro model, verify_model "
                "checks the invariance, and elements act on its sites as a dict)"
            )
        return pick(tensors, self.site_shapes)

    # restrictions, and other names ----------------------------------------------------

    def holding(self, net: nn.Module | Tensors) -> Symmetry:
        """Return the symmetries that keep running statistics fixed.

        These are the symmetries of a posterior over parameters alone, of a network with
        batch normalisation in eval mode: units whose running statistics differ aren't
        interchangeable, and can't be rescaled before the normalisation. Running
        statistics of an untrained network have mean 0 and variance 1: its units may be
        permuted.

        :param net: the network, or its buffers by site.
        :raises ValueError: if it lacks some of them.
        """
        if not self.buffers:
            return self
        buffers = dict(net.named_buffers()) if isinstance(net, nn.Module) else net
        require_sites(buffers, self.buffers, "net")
        fixed = {
            site: buffers[site].detach().double().reshape(self.site_shapes[site])
            for site in self.buffers
        }
        group = self.group
        for move in MOVES:
            for name in self.group.names(move):
                before = {
                    axis.site: fixed[axis.site]
                    for axis in self.group[name].axes
                    if axis.buffer
                }
                after = _moving_all(self.group, move, name).on_sites(before)
                if not all(
                    torch.allclose(after[site], before[site], 1e-9, 1e-12)
                    for site in before
                ):
                    group = group.without([name], move)
        return replace(
            self,
            group=group.without_buffers(self.buffers),
            seen_in_eval=self.eval_only,
        )

    def in_train_mode(self) -> Symmetry:
        """Return the symmetries that hold in train mode, too; see :attr:`eval_only`."""
        group = self.group
        for move, name in self.eval_only:
            group = group.without([name], move)
        return replace(self, group=group)

    def without(
        self, names: Sequence[str], moves: str | Sequence[str] | None = None
    ) -> Symmetry:
        """Leave units out, or some of their moves; units inside them stay.

        :param moves: the moves to leave out, all by default.
        """
        return replace(self, group=self.group.without(names, moves))

    def prefixed(self, prefix: str) -> Symmetry:
        """Rename sites for a network that is an attribute of a larger one: ``0.weight``
        -> ``net.0.weight``.
        """
        arguments.instance("prefix", prefix, str, "the name of an attribute")
        start = f"{prefix.rstrip('.')}." if prefix else ""
        explained = Explanation(
            axis._replace(site=start + axis.site) for axis in self.explanation
        )
        return replace(
            self,
            group=self.group.renamed(lambda site: start + site),
            explanation=explained,
        )

    def to_dict(self) -> Json:
        """Convert to JSON, which :meth:`from_dict` reads."""
        data = {
            "group": self.group.to_dict(),
            "explanation": [axis._asdict() for axis in self.explanation],
        }
        return data | {
            "logits": self.logits,
            "at_least": self.at_least,
            "remarks": [*self.remarks],
            "rotating": [*self.rotating],
            "seen_in_eval": [*self.seen_in_eval],
            "notes": [*self.notes],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Symmetry:
        """Read JSON that :meth:`to_dict` made."""
        axes = (
            axis | {name: tuple(axis[name]) for name in ("units", "chain")}
            for axis in data["explanation"]
        )
        explanation = Explanation(AxisExplanation(**axis) for axis in axes)
        return cls(
            Group.from_dict(data["group"]),
            explanation,
            data["logits"],
            data["at_least"],
            tuple(data["remarks"]),
            tuple(data.get("rotating", ())),
            tuple((move, name) for move, name in data.get("seen_in_eval", ())),
            tuple(data.get("notes", ())),
        )


def named(argument: str, names: Selection, sites: Iterable[str]) -> set[str]:
    """Select sites by name, by the name of a module, or by a pattern such as
    ``*.bias``.

    :param argument: the name of the argument that holds the names.
    :raises ValueError: if a name matches no site.
    """
    sites = list(sites)
    selected = set()
    for name in (
        [names]
        if isinstance(names, str)
        else arguments.listed(argument, names, str, "names")
    ):
        matches = {
            site
            for site in sites
            if site == name or site.startswith(f"{name}.") or fnmatchcase(site, name)
        }
        if not matches:
            raise ValueError(
                f"{argument} names {name!r}, which is no module, parameter or buffer "
                "of the network; its sites are "
                f"{sites[:6]}{' and others' if len(sites) > 6 else ''}, and '*' stands "
                "for any text"
            )
        selected |= matches
    return selected


def _moving_all(group: Group, move: Move, name: str) -> Element:
    """Return an element that moves all units at once: what it leaves unchanged, each
    move of these units does.
    """
    units = group[name]
    if move == "permute":  # cycle the units of each copy
        return group.element(
            {name: torch.arange(units.size, device="cpu").roll(1).expand(units.shape)}
        )
    if move == "rotate":
        return group.restricted(move).sample(dtype=torch.float64)
    ones = torch.ones(units.shape, dtype=torch.float64, device="cpu")
    numbers = {MOVES[move].argument: {name: -ones if move == "flip" else ones}}
    return group.element(**numbers)


def plain_weights(net: nn.Module, group: Group) -> Weights:
    """Return the detached weights of the network in which a group was found; see
    :meth:`Symmetry.weights_of`.
    """
    return map_values(Tensor.detach, Symmetry(group).weights_of(net))


def with_weights(net: nn.Module, weights: Tensors) -> nn.Module:
    """Copy a network, with one set of other weights: parameters and buffers by site."""
    result = copied(net)
    tensors = dict(result.named_parameters()) | dict(result.named_buffers())
    with torch.no_grad():
        for site, value in weights.items():
            tensors[site].copy_(value.reshape(tensors[site].shape))
    return result


def copied(
    net: nn.Module, dtype: torch.dtype | None = None, shared: bool = False
) -> nn.Module:
    """Copy a network deeply, also if it keeps computed tensors, as old weight norm
    does; see :func:`refreshed`.

    :param dtype: that of the copy's real numbers; complex numbers get the same
        precision. Unchanged by default.
    :param shared: whether the copy has modules of its own, but the network's parameters
        and buffers.
    """
    tensors = (*net.parameters(), *net.buffers()) if shared or dtype else ()
    memo = {}
    for value in (value for value in tensors if not is_lazy(value)):
        memo[id(value)] = value
        if not shared:  # cast at once: a copy in between would double the memory
            cast = value.detach().to(in_precision(value.dtype, dtype), copy=True)
            memo[id(value)] = (
                nn.Parameter(cast, value.requires_grad)
                if isinstance(value, nn.Parameter)
                else cast
            )
    with Replaced({Tensor.__deepcopy__: _detached}):
        return refreshed(copy.deepcopy(net, memo))


def _detached(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a tensor, without the graph that computed it: PyTorch refuses to copy
    that.
    """
    if tensor.is_leaf:
        return Tensor.__deepcopy__(tensor, memo)
    return memo.setdefault(id(tensor), tensor.detach().clone())


def refreshed(net: nn.Module, train: bool | None = None) -> nn.Module:
    """Clear what a network caches of its weights in eval mode (biases that it looked
    up, say), and return it.

    :param train: its new mode; each module keeps its own by default.
    """
    modes = [(module, module.training) for module in net.modules()]
    net.train()
    if train is not None:
        return net.train(train)
    for module, mode in modes:
        module.training = mode
    return net


def in_precision(own_dtype: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Replace a real or complex dtype by one of the precision of ``dtype``; integers
    stay.
    """
    if dtype is None or not (own_dtype.is_floating_point or own_dtype.is_complex):
        return own_dtype
    return dtype.to_complex() if own_dtype.is_complex else dtype


def fresh(
    value: Tensor, buffer: bool, generator: torch.Generator | None = None
) -> Tensor:
    """Draw normal numbers as large as a network's tensor, centred at zero.

    A bias of minus six is as likely plus six, so that units that the network's own
    weights never switch on are on as often as off. The deviation of a new layer's
    weights replaces the size of zeros. Buffers and integers stay near their own.
    """
    real = value.is_floating_point() or value.is_complex()
    if buffer or not real or not value.numel():
        return near(value, buffer, 0.3, generator)
    size = float(value.abs().square().mean().sqrt())
    if size <= CONSTANT:
        size = max(1, value.shape[1:].numel()) ** -0.5
    noise = torch.randn(
        value.shape, generator=generator, dtype=value.dtype, device="cpu"
    )
    return noise.to(value.device).mul_(size)


def near(
    value: Tensor,
    buffer: bool,
    far: float = 0.3,
    generator: torch.Generator | None = None,
    least: float = 0.0,
) -> Tensor:
    """Perturb a network's tensor at random, relative to the deviation of its entries.

    The deviation of a new layer's weights replaces that of a constant tensor. Buffers
    without a negative entry are variances, and stay positive.

    :param least: the least deviation that counts.
    """
    noise = torch.randn(
        value.shape, generator=generator, dtype=value.dtype, device="cpu"
    ).to(value.device)
    if buffer and value.is_floating_point() and (value >= 0).all() and value.any():
        return noise.mul_(far).exp_().mul_(value)
    spread = float(value.std(correction=0)) if value.numel() else 0.0
    spread = spread if spread > CONSTANT else max(1, value.shape[1:].numel()) ** -0.5
    return noise.mul_(far * max(spread, least)).add_(value)
