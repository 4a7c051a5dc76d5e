r"""Elements of a group: batches of shifts, signs, scales and permutations in reduced form.

An element :math:`g = p\,m\,t` acts by its shifts ``t``, then its multipliers ``m`` (signs times scales), then its
permutations ``p``:

.. math:: (t \cdot w)_i = w_i + t_i, \qquad (m \cdot w)_i = m_i^{\,e}\, w_i, \qquad (p \cdot w)_i = w_{p(i)} .

All units are numbered through, and of each move an element holds one tensor, ``batch_shape + (units,)``. The image of a
unit is where it comes from, with the moves of all that it lies inside. So permutations of a product are one gather and
those of an inverse one argsort, :math:`(p r)(i) = r(p(i))`; they carry multipliers into multipliers,
:math:`p^{-1} m\, p = m'` with :math:`m'_i = m_{p^{-1}(i)}`. Elements are unique but for signs: flipping all rows of a
matrix flips all of its columns, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import as_tensor
from pyro_symmetric.groups.units import MOVES, Move, along_axis, laid_out, permute_axes
from pyro_symmetric.weights import Weights

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group

ByName = dict[str, Tensor]


class Element:
    """A batch of elements of a :class:`~pyro_symmetric.groups.group.Group`, whose methods build them.

    ``g(weights)`` acts, ``(g @ h)(w) == g(h(w))``, ``g.inverse()`` inverts; batch shapes broadcast.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> g = group.element({"unit": torch.tensor([2, 0, 1])})
    >>> g({"w": torch.tensor([10.0, 20.0, 30.0])})
    {'w': tensor([30., 10., 20.])}
    >>> isinstance(g, ps.groups.Element), (g @ g.inverse()).equal(group.identity())
    (True, True)

    :param group: the group; the other arguments are trusted. Units that are left out stay, others' are passed over.
    :param permutations: name of the units -> LongTensor ``batch_shape + units.shape``: unit ``i`` of a copy receives
        what unit ``permutations[..., i]`` of that copy had, before what they lie inside moves.
    :param signs: name -> 1 and -1.
    :param log_scales: name -> logarithms of multipliers.
    :param shifts: name -> constants that are added.
    :param batch_shape: of the batch, if it is larger than what these tell.
    :ivar numbers: move that the group has -> the numbers of all units, ``batch_shape + (units,)``.
    """

    def __init__(
        self,
        group: Group,
        permutations: Mapping[str, Tensor] | None = None,
        signs: Mapping[str, Tensor] | None = None,
        log_scales: Mapping[str, Tensor] | None = None,
        shifts: Mapping[str, Tensor] | None = None,
        batch_shape: Sequence[int] = (),
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.group, given = group, {}
        for move, part in zip(MOVES, (permutations, signs, log_scales, shifts), strict=True):
            given[move] = {name: part[name] for name in group.names(move) if part and name in part}
        known = [(group[name], value) for part in given.values() for name, value in part.items()]
        device = device or (known[0][1].device if known else torch.device("cpu"))
        dtype = dtype or next((v.dtype for _, v in known if v.is_floating_point()), torch.get_default_dtype())
        shapes = (value.shape[: value.dim() - len(one.shape)] for one, value in known)
        self.batch_shape = torch.broadcast_shapes(tuple(batch_shape), *shapes)
        self.numbers: dict[Move, Tensor] = {}
        for move in (move for move in MOVES if group.names(move)):
            pieces = []
            for name, one in group.units.items():
                value = given[move].get(name)
                if value is None and move == "permute":
                    value = torch.arange(one.size, device=device).expand(one.shape)
                elif value is None:
                    value = torch.full(one.shape, float(move == "flip"), device=device, dtype=dtype)
                pieces.append(value.expand(*self.batch_shape, *one.shape).flatten(len(self.batch_shape)))
            self.numbers[move] = torch.cat(pieces, -1)
        if "permute" in self.numbers:
            steps = images = self.numbers["permute"] + group.nesting[0].to(device)
            for _ in range(group.depth):  # each time one level further inside moves along
                images = steps.gather(-1, _carried(group, images))
            self.numbers["permute"] = images

    def changed(self, change: Callable[[Move, Tensor], Tensor], batch_shape: Sequence[int]) -> Element:
        """An element of the same group whose numbers are these, changed move by move."""
        element = Element.__new__(Element)
        element.group, element.batch_shape = self.group, torch.Size(batch_shape)
        element.numbers = {move: change(move, value) for move, value in self.numbers.items()}
        return element

    # its numbers ----------------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> Tensor:
        """Images as if what units lie inside stayed, counted through all copies: ``batch_shape + (units,)``."""
        images = self.numbers["permute"]
        return images.gather(-1, _carried(self.group, images).argsort(-1)) if self.group.depth else images

    @property
    def permutations(self) -> ByName:
        """Name of the units -> images within each copy, ``batch_shape + units.shape``."""
        return self._by_name("permute")

    @property
    def signs(self) -> ByName:
        """Name of the units -> 1 and -1, likewise."""
        return self._by_name("flip")

    @property
    def log_scales(self) -> ByName:
        """Name of the units -> logarithms of multipliers, likewise."""
        return self._by_name("scale")

    @property
    def shifts(self) -> ByName:
        """Name of the units -> constants that are added, likewise."""
        return self._by_name("shift")

    @property
    def parts(self) -> tuple[ByName, ByName, ByName, ByName]:
        """Permutations, signs, log-scales and shifts."""
        return self.permutations, self.signs, self.log_scales, self.shifts

    def _by_name(self, move: Move) -> ByName:
        if move not in self.numbers:
            return {}
        numbers = self.steps - self.group.nesting[0].to(self.device) if move == "permute" else self.numbers[move]
        return self.group.by_name(numbers, move)

    def __getitem__(self, name: str) -> Tensor:
        """The permutation of some units within each copy, ``batch_shape + units.shape``."""
        return self.permutations[name]

    def images(self, name: str) -> Tensor:
        """The place that each unit, counted through all copies, comes from: LongTensor ``batch_shape + (count,)``."""
        at = self.group.slots[name]
        if "permute" in self.numbers:
            return self.numbers["permute"][..., at] - at.start
        return torch.arange(self.group[name].count, device=self.device).expand(*self.batch_shape, -1)

    def __repr__(self) -> str:
        sizes = [f"{name}: {self.group[name].number}" for name in self.group.factors]
        return f"Element(batch_shape={tuple(self.batch_shape)}, {', '.join(sizes) or 'trivial'})"

    @property
    def device(self) -> torch.device | None:
        """The device of the numbers; None if there are none."""
        return next((value.device for value in self.numbers.values()), None)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Element:
        """The same elements on another device; signs, scales and shifts in another precision."""
        arguments.dtype("dtype", dtype)
        return self.changed(
            lambda move, value: value.to(device=device, dtype=None if move == "permute" else dtype), self.batch_shape
        )

    def select(self, index: int | slice | Tensor | tuple[Any, ...]) -> Element:
        """Index the batch: ``g.select(0)`` is the first element. An index on another device is moved."""
        device, given = self.device or torch.device("cpu"), index if isinstance(index, tuple) else (index,)
        here = tuple(part.to(device) if isinstance(part, Tensor) else part for part in given)
        shape = torch.empty(self.batch_shape, device=device)[here].shape
        return self.changed(lambda _, value: value[here], shape)

    def expand(self, batch_shape: Sequence[int]) -> Element:
        """The same elements, repeated to a larger batch."""
        return self.changed(lambda _, value: value.expand(*batch_shape, -1), batch_shape)

    def within(self, group: Group) -> Element:
        """The element of another group that has the same numbers for the units of both, and leaves all others."""
        return Element(group, *self.parts, self.batch_shape, device=self.device)

    def equal(self, other: Element) -> bool:
        """True if both are the same elements, bit by bit."""
        arguments.instance("other", other, Element, "an Element")
        same = self.batch_shape == other.batch_shape and self.group.slots == other.group.slots
        return (same and self.numbers.keys() == other.numbers.keys()) and all(
            torch.equal(value, other.numbers[move].to(value)) for move, value in self.numbers.items()
        )

    # algebra --------------------------------------------------------------------------------------------------------

    def inverse(self) -> Element:
        """The element with ``g.inverse() @ g`` the identity."""
        images = self.numbers.get("permute")

        def inverted(move: Move, value: Tensor) -> Tensor:
            if move == "permute":
                return value.argsort(-1)
            value = value.reciprocal() if move == "flip" else -value
            return value if images is None or move == "shift" else value.gather(-1, images)

        return self.changed(inverted, self.batch_shape)

    def __matmul__(self, other: Element) -> Element:
        if not isinstance(other, Element):
            return NotImplemented
        if self.group is not other.group and self.group != other.group:
            raise ValueError("only elements of one group compose; these are of two different groups, see within(group)")
        shape = torch.broadcast_shapes(self.batch_shape, other.batch_shape)
        mine, theirs = self.expand(shape), other.expand(shape).to(self.device)
        back = theirs.numbers["permute"].argsort(-1) if "permute" in theirs.numbers else None

        def product(move: Move, own: Tensor) -> Tensor:
            if move == "permute":
                return theirs.numbers[move].gather(-1, own)
            if move != "shift" and back is not None:
                own = own.gather(-1, back)
            return own * theirs.numbers[move] if move == "flip" else own + theirs.numbers[move]

        return mine.changed(product, shape)

    # action ---------------------------------------------------------------------------------------------------------

    def __call__(self, weights: Mapping[str, Tensor]) -> Weights:
        """Act on weights; sites that the group doesn't move are expanded to the same batch shape, dtypes stay.

        :raises ValueError: if sites are missing, running statistics included, or don't fit; or another network's.
        """
        own = acted_shape(self.group, weights)
        shape = torch.broadcast_shapes(self.batch_shape, own)
        return {
            site: v.expand((*shape, *weights[site].shape[len(own) :])) for site, v in self.on_sites(weights).items()
        }

    def on_sites(self, weights: Mapping[str, Tensor]) -> Weights:
        """Act on the sites that are there, whatever is missing; those that nothing moves keep their batch shape."""
        return {site: self.on_site(site, value) for site, value in weights.items()}

    def on_site(self, site: str, value: Tensor, site_dims: int | None = None) -> Tensor:
        """Act on one site alone; batch shapes broadcast. Large networks are moved so, without a second copy.

        :param site_dims: the number of trailing axes that are the site's, if its shape isn't that which the group knows
            (unconstrained coordinates may have fewer entries along axes that nothing moves).
        """
        members = self.group.members(site)
        if not members:
            return value
        if site_dims is None:
            dims = len(self.group.view_shapes[site])
            moved = self.on_site(site, self.group.view(site, value), dims)
            return moved.reshape(*moved.shape[: moved.dim() - dims], *self.group.site_shapes[site])
        if "shift" in self.numbers:
            for dim in members:
                value = value + along_axis(self.axis_shift(site, dim).to(value), dim, site_dims)
        if "flip" in self.numbers or "scale" in self.numbers:
            epsilon = self.group.epsilon(site)
            value = value + epsilon if epsilon else value
            for dim in members:
                value = value * along_axis(self.axis_multiplier(site, dim, value.dtype).to(value), dim, site_dims)
            value = value - epsilon if epsilon else value
        permuted = (dim for dim, own in members.items() if any("permute" in self.group[name].moves for name, _ in own))
        return permute_axes(value, {dim: self.axis_index(site, dim).to(value.device) for dim in permuted}, site_dims)

    def axis_index(self, site: str, dim: int) -> Tensor:
        """LongTensor ``batch_shape + (length,)``: position ``i`` of this axis of the view receives what was there."""
        length, full = self.group.view_shapes[site][dim], None
        for name, axis in reversed(self.group.members(site)[dim]):  # outer units first
            if "permute" not in self.group[name].moves:
                continue
            at = self.group.slots[name]
            step = self.steps[..., at] - at.start
            if not axis.fills(length):
                places = axis.index.T.to(step.device)  # of each unit
                came = places[step].flatten(-2)
                every = torch.arange(length, device=step.device).repeat(*self.batch_shape, 1)
                step = every.scatter_(-1, places.reshape(-1).expand(came.shape), came)
            full = step if full is None else step.gather(-1, full)
        return torch.arange(length, device=self.device).expand(*self.batch_shape, -1) if full is None else full

    def axis_multiplier(self, site: str, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """The factor of each position before it is permuted, ``batch_shape + (length,)``, in this precision or more."""
        length = self.group.view_shapes[site][dim]
        factor = torch.ones(*self.batch_shape, length, dtype=dtype, device=self.device)
        for name, axis in self.group.members(site).get(dim, []):
            moves, at = self.group[name].moves, self.group.slots[name]
            if axis.exponent and "scale" in moves:
                logs = laid_out(self.numbers["scale"][..., at], axis, length, 0.0)
                logs = logs if dtype is None else logs.to(torch.promote_types(logs.dtype, dtype))
                factor = factor * (axis.exponent * logs).exp()
            if axis.exponent % 2 and "flip" in moves:
                factor = factor * laid_out(self.numbers["flip"][..., at], axis, length, 1.0)
        return factor

    def axis_shift(self, site: str, dim: int) -> Tensor:
        """The summand at each position of this axis, added first of all: ``batch_shape + (length,)``."""
        length = self.group.view_shapes[site][dim]
        total = torch.zeros(*self.batch_shape, length, device=self.device)
        for name, axis in self.group.members(site).get(dim, []):
            if "shift" in self.group[name].moves:
                total = total + laid_out(self.numbers["shift"][..., self.group.slots[name]], axis, length, 0.0)
        return total


def acted_shape(group: Group, weights: Mapping[str, Tensor]) -> torch.Size:
    """The batch shape of weights that an element is to move, which must be its own network's, and all of them."""
    arguments.weights("weights", weights)
    require_buffers(weights, group.buffers)
    group.require_own(weights)
    return group.batch_shape(weights)


def require_buffers(weights: Mapping[str, Any], buffers: Sequence[str], name: str = "weights") -> None:
    """:raises ValueError: if buffers that a group moves aren't there, so that moving the rest changes predictions."""
    if missing := [site for site in buffers if site not in weights]:
        raise ValueError(
            f"{name} holds no running statistics {missing}, which the symmetry moves along with the parameters. If "
            "they stay in the network as it is (a posterior over parameters alone), take symmetry.holding(net), which "
            "leaves them as they are; if every set of weights has its own, add them"
        )


def checked(argument: str, group: Group, move: Move, given: Mapping[str, Any] | None) -> ByName:
    """A user's numbers for one move, as tensors that are what they must be."""
    found = {}
    for name, value in (given or {}).items():
        if move not in group[name].moves:
            raise ValueError(f"{argument} holds {name!r}; only {list(group.names(move))} admit the move {move!r}")
        shape, numbers = group[name].shape, as_tensor(value)
        if move == "permute":
            wanted = f"rows, each a permutation of 0 .. {shape[-1] - 1}"
            right = numbers.sort(-1).values == torch.arange(numbers.shape[-1], device=numbers.device)
            numbers = numbers.long()
        else:
            wanted = "1 and -1" if move == "flip" else "finite numbers"
            right = numbers.abs() == 1 if move == "flip" else torch.isfinite(numbers)
            numbers = numbers if numbers.is_floating_point() else numbers.to(torch.get_default_dtype())
        if numbers.shape[max(0, numbers.dim() - len(shape)) :] != shape or not bool(right.all()):
            raise ValueError(f"{argument}[{name!r}] is {numbers}; its shape must end in {shape}, with {wanted}")
        found[name] = numbers
    return found


def _carried(group: Group, images: Tensor) -> Tensor:
    """The place that each unit comes from if only what it lies inside moves, as images tell."""
    _, parent, size = group.nesting.to(images.device)
    return torch.arange(group.size, device=images.device) + size * (images[..., parent] - parent)
