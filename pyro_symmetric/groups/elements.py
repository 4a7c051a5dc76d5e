r"""Elements of a group, which move its units.

An element :math:`g = p\,m\,t` acts by its shifts ``t``, then its multipliers ``m``
(signs times scales; or rotations, of units that rotate), then its permutations ``p``:

.. math:: (t \cdot w)_i = w_i + t_i, \qquad (m \cdot w)_i = m_i^{\,e}\, w_i,
    \qquad (p \cdot w)_i = w_{p(i)} .

The units of a group are numbered consecutively, and an element stores one tensor a
move, ``batch_shape + (units,)``, and the matrices of rotations, flattened. The *image*
of a unit is the unit whose weights it receives, under its own permutation and those of
all units around it. So a product of
permutations is one gather, :math:`(p r)(i) = r(p(i))`, and an inverse one argsort. They
normalise multipliers: :math:`p^{-1} m\, p = m'` with :math:`m'_i = m_{p^{-1}(i)}`.
Elements are unique but for signs: flipping all rows of a matrix flips all of its
columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Device, as_tensor
from pyro_symmetric.groups.axes import (
    along_axis,
    laid_out,
    permute_axis,
    rows,
    with_rows,
)
from pyro_symmetric.groups.moves import MOVES, Move, Rotate
from pyro_symmetric.weights import ByName, Tensors, Weights

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group


class Element:
    """A batch of elements of a :class:`~pyro_symmetric.groups.group.Group`, whose
    methods build them.

    ``g(weights)`` acts, ``(g @ h)(w) == g(h(w))``, ``g.inverse()`` inverts; batch
    shapes broadcast.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> g = group.element({"unit": torch.tensor([2, 0, 1])})
    >>> g({"w": torch.tensor([10.0, 20.0, 30.0])})
    {'w': tensor([30., 10., 20.])}
    >>> isinstance(g, ps.groups.Element), (g @ g.inverse()).equal(group.identity())
    (True, True)

    :param group: the group. The other arguments aren't checked: units left out stay,
        unknown names are ignored.
    :param permutations: name of the units -> LongTensor ``batch_shape + units.shape``:
        unit ``i`` of a copy receives the weights of unit ``permutations[..., i]`` of
        that copy, before the units around them move.
    :param signs: name -> 1 and -1.
    :param log_scales: name -> logarithms of multipliers.
    :param shifts: name -> constants to add.
    :param rotations: name -> orthogonal matrices, ``batch_shape + units.shape +
        (size,)``: unit ``i`` of a copy receives the sum of ``rotations[..., i, j]``
        times the weights of unit ``j``.
    :param batch_shape: broadcast with the batch shape of the numbers.
    :ivar numbers: move of the group -> the numbers of all units, ``batch_shape +
        (units,)``; of rotations, the entries of all matrices.
    """

    def __init__(
        self,
        group: Group,
        permutations: Tensors | None = None,
        signs: Tensors | None = None,
        log_scales: Tensors | None = None,
        shifts: Tensors | None = None,
        rotations: Tensors | None = None,
        *,
        batch_shape: Sequence[int] = (),
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        self.group = group
        numbers_of: dict[Move, ByName] = {}
        known = []
        shapes = [tuple(batch_shape)]
        parts = (permutations, signs, log_scales, shifts, rotations)
        for move, part in zip(MOVES, parts, strict=True):
            numbers_of[move] = {}
            for name in group.names(move):
                if part and name in part:
                    value = numbers_of[move][name] = part[name]
                    known.append(value)
                    ending = MOVES[move].shape(group[name])
                    shapes.append(value.shape[: value.dim() - len(ending)])
        device = device or (known[0].device if known else torch.device("cpu"))
        floating = (value.dtype for value in known if value.is_floating_point())
        dtype = dtype or next(floating, torch.get_default_dtype())
        # faster than torch's
        self.batch_shape = torch.Size(np.broadcast_shapes(*shapes))
        self.numbers = {}
        for move in (move for move in MOVES if group.names(move)):
            kind = MOVES[move]
            pieces = []
            for name, unit_set in kind.holders(group).items():
                named = numbers_of[move].get(name)
                filled = (
                    kind.neutral(unit_set, dtype, device) if named is None else named
                )
                full = filled.expand(*self.batch_shape, *kind.shape(unit_set))
                pieces.append(full.flatten(len(self.batch_shape)))
            self.numbers[move] = torch.cat(pieces, -1)
        if "permute" in self.numbers:
            steps = images = self.numbers["permute"] + group.nesting.first.to(device)
            for _ in range(group.depth):  # from one level of nesting to the next
                images = steps.gather(-1, _carried(group, images))
            self.numbers["permute"] = images

    def changed(
        self, change: Callable[[Move, Tensor], Tensor], batch_shape: Sequence[int]
    ) -> Element:
        """Return the element of the same group whose numbers are ``change(move,
        numbers)``.
        """
        element = Element.__new__(Element)
        element.group = self.group
        element.batch_shape = torch.Size(batch_shape)
        element.numbers = {
            move: change(move, value) for move, value in self.numbers.items()
        }
        return element

    # its numbers ----------------------------------------------------------------------

    @functools.cached_property
    def steps(self) -> Tensor:
        """The images if the units around stayed, among all units: ``batch_shape +
        (units,)``.
        """
        images = self.numbers["permute"]
        return (
            images.gather(-1, _carried(self.group, images).argsort(-1))
            if self.group.depth
            else images
        )

    @property
    def permutations(self) -> ByName:
        """Permutations by name, within each copy: ``batch_shape + units.shape``."""
        return self._by_name("permute")

    @property
    def signs(self) -> ByName:
        """Signs by name, 1 and -1."""
        return self._by_name("flip")

    @property
    def log_scales(self) -> ByName:
        """Logarithms of multipliers by name."""
        return self._by_name("scale")

    @property
    def shifts(self) -> ByName:
        """Added constants by name."""
        return self._by_name("shift")

    @property
    def rotations(self) -> ByName:
        """Orthogonal matrices by name, ``batch_shape + units.shape + (size,)``."""
        return self._by_name("rotate")

    @property
    def parts(self) -> tuple[ByName, ...]:
        """The numbers of each move by name, in the order of the moves."""
        return tuple(self._by_name(move) for move in MOVES)

    def _by_name(self, move: Move) -> ByName:
        if move not in self.numbers:
            return {}
        numbers = (
            self.steps - self.group.nesting.first.to(self.device)
            if move == "permute"
            else self.numbers[move]
        )
        return self.group.by_name(numbers, move)

    def __getitem__(self, name: str) -> Tensor:
        """Return the permutation of some units within each copy, ``batch_shape +
        units.shape``.
        """
        return self.permutations[name]

    def images(self, name: str) -> Tensor:
        """Return the images of some units, counted through all copies: LongTensor
        ``batch_shape + (count,)``.
        """
        slot = self.group.slots[name]
        if "permute" in self.numbers:
            return self.numbers["permute"][..., slot] - slot.start
        return torch.arange(self.group[name].count, device=self.device).expand(
            *self.batch_shape, -1
        )

    def __repr__(self) -> str:
        sizes = [f"{name}: {self.group[name].size_text}" for name in self.group.factors]
        return (
            f"Element(batch_shape={tuple(self.batch_shape)}, "
            f"{', '.join(sizes) or 'trivial'})"
        )

    @property
    def device(self) -> torch.device | None:
        """The device of the numbers; ``None`` if there are none."""
        return next((value.device for value in self.numbers.values()), None)

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Element:
        """Move to a device; cast signs, scales and shifts."""
        arguments.dtype("dtype", dtype)
        return self.changed(
            lambda move, value: value.to(
                device=device, dtype=None if move == "permute" else dtype
            ),
            self.batch_shape,
        )

    def select(self, index: int | slice | Tensor | tuple[Any, ...]) -> Element:
        """Index the batch: ``g.select(0)`` is the first element. Tensors may lie on any
        device.
        """
        device = self.device or torch.device("cpu")
        parts = index if isinstance(index, tuple) else (index,)
        index = tuple(
            part.to(device) if isinstance(part, Tensor) else part for part in parts
        )
        shape = torch.empty(self.batch_shape, device=device)[index].shape
        return self.changed(lambda _, value: value[index], shape)

    def expand(self, batch_shape: Sequence[int]) -> Element:
        """Expand to a larger batch."""
        return self.changed(
            lambda _, value: value.expand(*batch_shape, -1), batch_shape
        )

    def within(self, group: Group) -> Element:
        """Return the element of another group with the same numbers for common units;
        the others stay.

        Permutations and signs of units that rotate there become rotations.
        """
        permutations, signs, log_scales, shifts, rotations = self.parts
        for name in group.names("rotate"):
            if name in permutations or name in signs:
                rotations[name] = self._signed_matrices(name)
        return Element(
            group,
            permutations,
            signs,
            log_scales,
            shifts,
            rotations,
            batch_shape=self.batch_shape,
            device=self.device,
        )

    def _signed_matrices(self, name: str) -> Tensor:
        """Return the matrices that permute and flip some units of each copy."""
        units = self.group[name]
        device = self.device
        example = self.numbers.get("flip", torch.empty(0, device=device))
        order = self.permutations.get(name, torch.arange(units.size, device=device))
        signs = self.signs.get(name, torch.ones(units.size, device=device)).to(example)
        matrices = torch.eye(units.size, device=device).to(example)[order]
        return matrices * signs.unsqueeze(-2)

    def equal(self, other: Element) -> bool:
        """Return whether all numbers are equal, bit by bit."""
        arguments.instance("other", other, Element, "an Element")
        equal = (
            self.batch_shape == other.batch_shape
            and self.group.slots == other.group.slots
        )
        return (equal and self.numbers.keys() == other.numbers.keys()) and all(
            torch.equal(value, other.numbers[move].to(value))
            for move, value in self.numbers.items()
        )

    # algebra --------------------------------------------------------------------------

    def inverse(self) -> Element:
        """Return the inverse: ``g.inverse() @ g`` is the identity."""
        images = self.numbers.get("permute")

        def inverted(move: Move, value: Tensor) -> Tensor:
            value = MOVES[move].inverse(self.group, value)
            if images is None:
                return value
            return MOVES[move].followed(self.group, value, images)

        return self.changed(inverted, self.batch_shape)

    def __matmul__(self, other: Element) -> Element:
        if not isinstance(other, Element):
            return NotImplemented
        if self.group is not other.group and self.group != other.group:
            raise ValueError(
                "only elements of one group compose; bring one into the other by "
                "within(group)"
            )
        shape = torch.broadcast_shapes(self.batch_shape, other.batch_shape)
        first = self.expand(shape)
        second = other.expand(shape).to(self.device)
        back = (
            second.numbers["permute"].argsort(-1)
            if "permute" in second.numbers
            else None
        )

        def product(move: Move, value: Tensor) -> Tensor:
            kind = MOVES[move]
            if back is not None:
                value = kind.followed(self.group, value, back)
            return kind.product(self.group, value, second.numbers[move])

        return first.changed(product, shape)

    # action ---------------------------------------------------------------------------

    def __call__(self, weights: Tensors) -> Weights:
        """Act on weights; sites that the group doesn't move are expanded to the same
        batch shape.

        :raises ValueError: if sites, or buffers, are missing or of other shapes; if a
            network's group gets another's.
        """
        batch = acted_shape(self.group, weights)
        shape = torch.broadcast_shapes(self.batch_shape, batch)
        moved = self.on_sites(weights)
        return {
            site: value.expand((*shape, *weights[site].shape[len(batch) :]))
            for site, value in moved.items()
        }

    def on_sites(self, weights: Tensors) -> Weights:
        """Act on some sites; those that nothing moves keep their batch shape."""
        return {site: self.on_site(site, value) for site, value in weights.items()}

    def on_site(self, site: str, value: Tensor, site_dims: int | None = None) -> Tensor:
        """Act on one site; batch shapes broadcast. Site by site, large networks need no
        second copy.

        :param site_dims: the number of the site's axes, if its shape differs from the
            group's (unconstrained coordinates may have fewer entries along axes that
            nothing moves).
        """
        members = self.group.members(site)
        if not members:
            return value
        if site_dims is None:
            dims = len(self.group.view_shapes[site])
            moved = self.on_site(site, self.group.view(site, value), dims)
            return moved.reshape(
                *moved.shape[: moved.dim() - dims], *self.group.site_shapes[site]
            )
        for dim, pairs in members.items():
            for name, axis in pairs:
                if "shift" in self.group[name].moves:
                    shift = self.numbers["shift"][..., self.group.slots[name]].to(value)
                    length = self.group.view_shapes[site][dim]
                    shift = laid_out(shift, axis, length, 0.0)
                    value = value + along_axis(shift, dim, site_dims)
        if "flip" in self.numbers or "scale" in self.numbers:
            epsilon = self.group.epsilon(site)
            value = value + epsilon if epsilon else value
            for dim, pairs in members.items():
                if any(axis.exponent for _, axis in pairs):
                    multiplier = self._axis_multiplier(site, dim, value.dtype).to(value)
                    value = value * along_axis(multiplier, dim, site_dims)
            value = value - epsilon if epsilon else value
        if "rotate" in self.numbers:
            value = self._rotated(site, value, site_dims)
        for dim, pairs in members.items():
            if any("permute" in self.group[name].moves for name, _ in pairs):
                index = self._axis_index(site, dim).to(value.device)
                value = permute_axis(value, dim, index, site_dims)
        return value

    def _rotated(self, site: str, value: Tensor, site_dims: int) -> Tensor:
        """Turn the units that rotate along the axes of a site in the group's view."""
        kind = MOVES["rotate"]
        assert isinstance(kind, Rotate)
        rotations = self.rotations
        for pairs in self.group.members(site).values():
            for name, axis in pairs:
                if "rotate" in self.group[name].moves:
                    matrices = rotations[name].to(value)
                    if matrices.dim() == len(self.batch_shape) + 2:
                        matrices = matrices.unsqueeze(-3)
                    entries = rows(value, axis, site_dims)
                    turned = kind.along(entries, matrices)
                    value = with_rows(value, turned, axis, site_dims)
        return value

    def _axis_index(self, site: str, dim: int) -> Tensor:
        """Return the source of each position along an axis of the view, LongTensor
        ``batch_shape + (length,)``.
        """
        length = self.group.view_shapes[site][dim]
        sources = None
        for name, axis in reversed(self.group.members(site)[dim]):  # outer units first
            if "permute" not in self.group[name].moves:
                continue
            slot = self.group.slots[name]
            step = self.steps[..., slot] - slot.start
            if not axis.fills(length):
                positions = axis.index.T.to(step.device)  # of each unit
                moved = positions[step].flatten(-2)
                identity = torch.arange(length, device=step.device).repeat(
                    *self.batch_shape, 1
                )
                step = identity.scatter_(
                    -1, positions.reshape(-1).expand(moved.shape), moved
                )
            sources = step if sources is None else step.gather(-1, sources)
        return (
            torch.arange(length, device=self.device).expand(*self.batch_shape, -1)
            if sources is None
            else sources
        )

    def _axis_multiplier(self, site: str, dim: int, dtype: torch.dtype) -> Tensor:
        """Return the multiplier of each position, to apply before the permutation:
        ``batch_shape + (length,)``.
        """
        length = self.group.view_shapes[site][dim]
        multiplier = torch.ones(
            *self.batch_shape, length, dtype=dtype, device=self.device
        )
        for name, axis in self.group.members(site)[dim]:
            moves = self.group[name].moves
            slot = self.group.slots[name]
            if axis.exponent and "scale" in moves:
                logs = laid_out(self.numbers["scale"][..., slot], axis, length, 0.0)
                multiplier = (
                    multiplier
                    * (
                        axis.exponent * logs.to(torch.promote_types(logs.dtype, dtype))
                    ).exp()
                )
            if axis.exponent % 2 and "flip" in moves:
                multiplier = multiplier * laid_out(
                    self.numbers["flip"][..., slot], axis, length, 1.0
                )
        return multiplier


def acted_shape(group: Group, weights: Tensors) -> torch.Size:
    """Return the batch shape of weights to act on, checked to be all that the group
    moves.
    """
    arguments.weights("weights", weights)
    require_buffers(weights, group.buffers)
    group.require_own(weights)
    return group.batch_shape(weights)


def require_buffers(
    weights: Mapping[str, Any], buffers: Sequence[str], name: str = "weights"
) -> None:
    """Raise ``ValueError`` if buffers that a group moves are missing: moving the rest
    would change predictions.
    """
    if missing := [site for site in buffers if site not in weights]:
        raise ValueError(
            f"{name} holds no running statistics {missing}, which the symmetry moves "
            "along with the parameters. If "
            "they stay in the network (a posterior over parameters alone), take "
            "symmetry.holding(net); if every set of "
            "weights has its own, add them"
        )


def checked(
    argument: str, group: Group, move: Move, numbers_by_name: Mapping[str, Any] | None
) -> ByName:
    """Check a user's numbers of one move; return them as tensors."""
    tensors = {}
    for name, value in (numbers_by_name or {}).items():
        if move not in group[name].moves:
            raise ValueError(
                f"{argument} holds {name!r}; only {list(group.names(move))} admit the "
                f"move {move!r}"
            )
        kind = MOVES[move]
        numbers = as_tensor(value)
        shape = kind.shape(group[name])
        wanted = kind.wanted
        if move == "permute":
            wanted = f"rows, each a permutation of 0 .. {shape[-1] - 1}"
            right = kind.valid(numbers)
            numbers = numbers.long()
        elif not numbers.is_floating_point():
            right = kind.valid(numbers.to(torch.get_default_dtype()))
            numbers = numbers.to(torch.get_default_dtype())
        else:
            right = kind.valid(numbers)
        if (
            numbers.shape[max(0, numbers.dim() - len(shape)) :] != shape
            or not right.all()
        ):
            raise ValueError(
                f"{argument}[{name!r}] is {numbers}; its shape must end in {shape}, "
                f"with {wanted}"
            )
        tensors[name] = numbers
    return tensors


def _carried(group: Group, images: Tensor) -> Tensor:
    """Return the images of all units if only the units around them move, by the images
    of these.
    """
    parent = group.nesting.parent.to(images.device)
    copy_size = group.nesting.copy_size.to(images.device)
    unmoved = torch.arange(group.size, device=images.device)
    return unmoved + copy_size * (images[..., parent] - parent)
