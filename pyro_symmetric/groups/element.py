r"""Elements of a group: batches of shifts, signs, scales and permutations in reduced form.

An element :math:`g = p\,m\,t` acts by its shifts ``t``, then its multipliers ``m`` (signs times scales), then its
permutations ``p``, with one image for each unit, counted through all copies, the moves of what it lies inside included:

.. math:: (t \cdot w)_i = w_i + t_i, \qquad (m \cdot w)_i = m_i^{\,e}\, w_i, \qquad (p \cdot w)_i = w_{p(i)} .

So permutations of a product are one gather and those of an inverse one argsort, :math:`(p r)(i) = r(p(i))`;
permutations carry multipliers into multipliers, :math:`p^{-1} m\, p = m'` with :math:`m'_i = m_{p^{-1}(i)}`. Elements
are unique but for signs: flipping all rows of a matrix flips all of its columns, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.groups.places import along_axis, lay_out, permute_axes
from pyro_symmetric.groups.units import MOVES, Axis, Move, Units
from pyro_symmetric.placement import as_tensor
from pyro_symmetric.weights import Weights

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group

ByName = dict[str, Tensor]


class Element:
    """A batch of elements of a :class:`~pyro_symmetric.groups.group.Group`, in reduced form; its methods build them.

    ``g(weights)`` acts, ``g @ h`` composes (``(g @ h)(w) == g(h(w))``), ``g.inverse()`` inverts. Batch shapes of
    elements and weights broadcast.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> g = group.element({"unit": torch.tensor([2, 0, 1])})
    >>> g({"w": torch.tensor([10.0, 20.0, 30.0])})
    {'w': tensor([30., 10., 20.])}
    >>> isinstance(g, ps.groups.Element), (g @ g.inverse()).equal(group.identity())
    (True, True)

    :param group: the group; the other arguments are trusted. Of each move, the units that are left out stay, and those
        that the group doesn't have are passed over.
    :param permutations: name of the units -> LongTensor ``batch_shape + units.shape``: unit ``i`` of a copy receives
        what unit ``permutations[..., i]`` of that copy had, before what they lie inside moves.
    :param signs: name -> 1 and -1.
    :param log_scales: name -> logarithms of multipliers.
    :param shifts: name -> constants that are added.
    :param batch_shape: of the batch, if it is larger than what these tell.
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
        self.group = group
        given = [part or {} for part in (permutations, signs, log_scales, shifts)]
        known = [value for part in given for value in part.values()]
        device = device or (known[0].device if known else torch.device("cpu"))
        real = dtype or next((v.dtype for v in known if v.is_floating_point()), torch.get_default_dtype())
        parts: list[ByName] = []
        for move, part in zip(MOVES, given, strict=True):
            names = group.names(move)
            parts.append({n: part[n] if n in part else _neutral(move, group[n], device, real) for n in names})
        shapes = {v.shape[: v.dim() - len(group[name].shape)] for part in parts for name, v in part.items()}
        shapes.add(torch.Size(batch_shape))
        # Of few elements, broadcasting takes longer than anything else.
        self.batch_shape = next(iter(shapes)) if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
        if len(shapes) > 1:
            parts = [{n: v.expand(*self.batch_shape, *group[n].shape) for n, v in part.items()} for part in parts]
        images, self.signs, self.log_scales, self.shifts = parts
        self.images: ByName = {}
        for name in group.carried:
            outer = self.images.get(group[name].parent or "")
            self.images[name] = _through_copies(group[name], images.get(name), outer)

    @classmethod
    def _made(cls, group: Group, parts: Sequence[ByName], batch_shape: Sequence[int]) -> Element:
        """An element of complete numbers of one batch shape, its permutations counted through all copies."""
        element = cls.__new__(cls)
        element.group, element.batch_shape = group, torch.Size(batch_shape)
        element.images, element.signs, element.log_scales, element.shifts = parts
        return element

    @classmethod
    def _of_parts(cls, group: Group, parts: Sequence[ByName], batch_shape: Sequence[int]) -> Element:
        permutations, signs, log_scales, shifts = parts
        return cls(group, permutations, signs, log_scales, shifts, batch_shape)

    @cached_property
    def permutations(self) -> ByName:
        """Name of the units -> images within each copy, ``batch_shape + units.shape``."""
        return {name: self._inside(self.group[name]) for name in self.group.names("permute")}

    def _inside(self, units: Units) -> Tensor:
        images, outer = self.images[units.name], self.images.get(units.parent or "")
        if units.copies == 1:
            return images
        inside = images.unflatten(-1, (units.copies, units.size)) % units.size
        return inside if outer is None else inside.gather(-2, outer.argsort(-1).unsqueeze(-1).expand_as(inside))

    def __getitem__(self, name: str) -> Tensor:
        """The permutation of some units within each copy, ``batch_shape + units.shape``."""
        if name not in self.group.names("permute"):
            raise ValueError(f"the units {name!r} aren't permuted; those that are: {list(self.group.names('permute'))}")
        return self.permutations[name]

    def unit_index(self, name: str) -> Tensor:
        """The place that each unit, counted through all copies, comes from: LongTensor ``batch_shape + (count,)``."""
        if name in self.images:
            return self.images[name]
        return torch.arange(self.group[name].count, device=self.device).expand(*self.batch_shape, -1)

    def __repr__(self) -> str:
        sizes = [f"{name}: {self.group[name].number}" for name in self.group.factors]
        return f"Element(batch_shape={tuple(self.batch_shape)}, {', '.join(sizes) or 'trivial'})"

    @property
    def parts(self) -> tuple[ByName, ByName, ByName, ByName]:
        """Permutations, signs, log-scales and shifts."""
        return self.permutations, self.signs, self.log_scales, self.shifts

    @property
    def _parts(self) -> tuple[ByName, ByName, ByName, ByName]:
        return self.images, self.signs, self.log_scales, self.shifts

    @property
    def device(self) -> torch.device | None:
        """The device of the numbers; None if there are none."""
        return next((value.device for part in self._parts for value in part.values()), None)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Element:
        """The same elements on another device; signs, scales and shifts in another precision."""
        arguments.dtype("dtype", dtype)
        return self._each(
            lambda value, _: value.to(device=device, dtype=dtype if value.is_floating_point() else None),
            self.batch_shape,
        )

    def select(self, index: int | slice | Tensor | tuple[Any, ...]) -> Element:
        """Index the batch: ``g.select(0)`` is the first element. An index on another device is moved."""
        device, given = self.device or torch.device("cpu"), index if isinstance(index, tuple) else (index,)
        here = tuple(part.to(device) if isinstance(part, Tensor) else part for part in given)
        shape = torch.empty(self.batch_shape, device=device)[here].shape
        return self._each(lambda value, _: value[here] if self.batch_shape else value, shape)

    def expand(self, batch_shape: Sequence[int]) -> Element:
        """The same elements, repeated to a larger batch."""
        return self._each(lambda value, own: value.expand(*batch_shape, *own), batch_shape)

    def within(self, group: Group) -> Element:
        """The element of another group that has the same numbers for the units of both, and leaves all others."""
        return Element(group, *self.parts, self.batch_shape, device=self.device)

    def equal(self, other: Element) -> bool:
        """True if both are the same elements, bit by bit."""
        arguments.instance("other", other, Element, "an Element")
        return self.batch_shape == other.batch_shape and all(
            mine.keys() == theirs.keys() and all(torch.equal(v, theirs[name].to(v)) for name, v in mine.items())
            for mine, theirs in zip(self._parts, other._parts, strict=True)
        )

    def _each(self, change: Callable[[Tensor, tuple[int, ...]], Tensor], batch_shape: Sequence[int]) -> Element:
        """Change all numbers, given with the shape that those of one element have."""
        images = {name: change(value, value.shape[-1:]) for name, value in self.images.items()}
        parts = [{n: change(value, self.group[n].shape) for n, value in part.items()} for part in self._parts[1:]]
        return Element._made(self.group, [images, *parts], batch_shape)

    # algebra --------------------------------------------------------------------------------------------------------

    def inverse(self) -> Element:
        """The element with ``g.inverse() @ g`` the identity."""
        parts = [
            {name: images.argsort(-1) for name, images in self.images.items()},
            {name: self._carried(name, value.reciprocal(), False) for name, value in self.signs.items()},
            {name: self._carried(name, -value, False) for name, value in self.log_scales.items()},
            {name: -value for name, value in self.shifts.items()},
        ]
        return Element._made(self.group, parts, self.batch_shape)

    def __matmul__(self, other: Element) -> Element:
        if not isinstance(other, Element):
            return NotImplemented
        mine, theirs, whole = self, other, self.group.whole
        if mine.group is not theirs.group and mine.group != theirs.group:
            if whole is not theirs.group.whole and whole != theirs.group.whole:
                raise ValueError("only elements of one group compose; these belong to two different groups")
            mine, theirs = mine.within(whole), theirs.within(whole)  # of two restrictions of one group
        shape = torch.broadcast_shapes(mine.batch_shape, theirs.batch_shape)
        mine, theirs = mine.expand(shape), theirs.expand(shape).to(mine.device)
        parts = [
            {name: theirs.images[name].gather(-1, images) for name, images in mine.images.items()},
            {name: theirs._carried(name, own, True) * theirs.signs[name] for name, own in mine.signs.items()},
            {name: theirs._carried(name, own, True) + theirs.log_scales[name] for name, own in mine.log_scales.items()},
            {name: own + theirs.shifts[name] for name, own in mine.shifts.items()},
        ]
        return Element._made(mine.group, parts, shape)

    def _carried(self, name: str, numbers: Tensor, back: bool) -> Tensor:
        r"""Numbers of units as this element's permutations carry them: :math:`m_{p(i)}`, or with the inverse."""
        if name not in self.images:
            return numbers
        index = self.images[name].argsort(-1) if back else self.images[name]
        return numbers.reshape(index.shape).gather(-1, index).reshape(numbers.shape)

    # action ---------------------------------------------------------------------------------------------------------

    def __call__(self, weights: Mapping[str, Tensor]) -> Weights:
        """Act on weights: ``batch_shape`` of the result is that of the element and of the weights, broadcast.

        Sites that the group doesn't move are passed on, expanded to the same batch shape; dtypes stay.

        :raises ValueError: if sites are missing, running statistics included, or don't fit; if there are another
            network's.
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
        dims = tuple(self.group.members(site))
        if not dims:
            return value
        if site_dims is None:
            viewed = self.on_site(site, self.group.view(site, value), len(self.group.view_shapes[site]))
            return self.group.view_back(site, viewed)
        for dim in dims if self.shifts else ():
            value = value + along_axis(self.axis_shift(site, dim).to(value), dim, site_dims)
        if self.signs or self.log_scales:
            epsilon = self.group.epsilon(site)
            value = value + epsilon if epsilon else value
            for dim in dims:
                value = value * along_axis(self.axis_multiplier(site, dim, value.dtype).to(value), dim, site_dims)
            value = value - epsilon if epsilon else value
        moved = {dim: self.axis_index(site, dim).to(value.device) for dim in dims if self.group.movers(site, dim)}
        return permute_axes(value, moved, site_dims)

    def axis_index(self, site: str, dim: int) -> Tensor:
        """LongTensor ``batch_shape + (length,)``: position ``i`` of this axis receives what was at ``index[i]``.

        :param dim: the axis, counted in the group's view of the site, see ``group.view``.
        """
        length = self.group.view_shapes[site][dim]
        every = full = torch.arange(length, device=self.device).expand(*self.batch_shape, -1)
        for name, axis in self.group.movers(site, dim):
            units, step = self.group[name], self[name]
            if units.copies > 1:
                step = (step + torch.arange(0, units.count, units.size, device=step.device).unsqueeze(-1)).flatten(-2)
            if not axis.fills(length):
                places = axis.index.T.to(step.device)  # of each unit
                came = places[step].flatten(-2)
                step = every.clone().scatter_(-1, places.reshape(-1).expand(came.shape), came)
            full = step if full is every else step.gather(-1, full)
        return full

    def axis_multiplier(self, site: str, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """The factor of each position of this axis before it is permuted: ``batch_shape + (length,)``.

        :param dtype: computed in at least this precision.
        """
        length = self.group.view_shapes[site][dim]
        full = torch.ones(*self.batch_shape, length, dtype=dtype, device=self.device)
        for name, axis in self.group.members(site).get(dim, []):
            numbers = [self.signs[name]] if axis.exponent % 2 and name in self.signs else []
            if axis.exponent and name in self.log_scales:
                logs = self.log_scales[name]
                logs = logs if dtype is None else logs.to(torch.promote_types(logs.dtype, dtype))
                numbers.append((axis.exponent * logs).exp())
            for own in numbers:
                full = full * self._laid_out(own, axis, 1.0, length)
        return full

    def axis_shift(self, site: str, dim: int) -> Tensor:
        """The summand at each position of this axis, added first of all."""
        length = self.group.view_shapes[site][dim]
        full = torch.zeros(*self.batch_shape, length, device=self.device)
        for name, axis in self.group.members(site).get(dim, []):
            if name in self.shifts:
                full = full + self._laid_out(self.shifts[name], axis, 0.0, length)
        return full

    def _laid_out(self, numbers: Tensor, axis: Axis, filler: float, length: int) -> Tensor:
        flat = numbers.flatten(len(self.batch_shape))
        return flat if axis.fills(length) else lay_out(flat, axis.index, filler, length)


def acted_shape(group: Group, weights: Mapping[str, Tensor]) -> torch.Size:
    """The batch shape of weights that an element is to move.

    :raises TypeError: if they are no weights.
    :raises ValueError: if sites are missing, running statistics included, or don't fit; if there are another network's.
    """
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
    """A user's numbers for one move, as tensors.

    :param argument: what messages call it.
    :raises ValueError: if units are unknown or don't admit the move, or numbers aren't what they must be.
    """
    found = {}
    for name, value in (given or {}).items():
        if move not in group[name].moves:
            raise ValueError(f"{argument} holds {name!r}; only {list(group.names(move))} admit the move {move!r}")
        called, shape = f"{argument}[{name!r}]", group[name].shape
        numbers = as_tensor(value)
        if move == "permute":
            wanted = f"rows, each a permutation of 0 .. {shape[-1] - 1}"
            right = numbers.sort(-1).values == torch.arange(numbers.shape[-1], device=numbers.device)
            numbers = numbers.long()
        else:
            wanted = "1 and -1" if move == "flip" else "finite numbers"
            right = numbers.abs() == 1 if move == "flip" else torch.isfinite(numbers)
            numbers = numbers if numbers.is_floating_point() else numbers.to(torch.get_default_dtype())
        if numbers.shape[max(0, numbers.dim() - len(shape)) :] != shape or not bool(right.all()):
            raise ValueError(f"{called} has shape {tuple(numbers.shape)}: {numbers}; it must end in {shape}, {wanted}")
        found[name] = numbers
    return found


def _neutral(move: Move, units: Units, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
    """Numbers that move nothing."""
    if move == "permute":
        return torch.arange(units.size, device=device).expand(units.shape)
    return torch.full(units.shape, float(move == "flip"), device=device, dtype=dtype)


def _through_copies(units: Units, images: Tensor | None, outer: Tensor | None) -> Tensor:
    """Images within each copy (None: all stay) as places among all units, moved along with the units outside."""
    if outer is None and units.copies == 1 and images is not None:
        return images
    batch = torch.broadcast_shapes(
        *(v.shape[:n] for v, n in ((images, -len(units.shape)), (outer, -1)) if v is not None)
    )
    device = (outer if images is None else images).device  # type: ignore[union-attr]
    copies = torch.arange(units.copies, device=device).expand(*batch, -1) if outer is None else outer
    inside = torch.arange(units.size, device=device) if images is None else images
    inside = inside.expand(*batch, *units.shape).reshape(*batch, units.copies, units.size)
    inside = inside.gather(-2, copies.unsqueeze(-1).expand_as(inside))
    return (copies.unsqueeze(-1) * units.size + inside).flatten(-2)
