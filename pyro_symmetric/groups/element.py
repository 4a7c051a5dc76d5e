r"""Elements of a group: batches of shifts, signs, scales and permutations in reduced form.

An element :math:`g = p\,m\,t` acts by its shifts ``t``, then its multipliers ``m`` (signs times scales), then its
permutations ``p``:

.. math:: (t \cdot w)_i = w_i + t_i, \qquad (m \cdot w)_i = m_i^{\,e}\, w_i, \qquad (p \cdot w)_i = w_{p(i)} .

Of units inside others, the inner permutations act first, :math:`(p \cdot w)_{i,j} = w_{s(i),\, c_{s(i)}(j)}` with the
outer image :math:`s` and the image :math:`c_k` inside unit ``k``. Write :math:`\hat p` for the permutation that counts
units through all copies, :math:`\hat p(i, j) = (s(i), c_{s(i)}(j))`. Then products reduce: permutations carry
multipliers into multipliers, :math:`p^{-1} m\, p = m'` with :math:`m'_u = m_{\hat p^{-1}(u)}`, and inner permutations
of a product are :math:`c^{pr}_k = c^r_k \circ c^p_{\hat r^{-1}(k)}`. Elements are unique: two act alike only if all
their numbers agree (for flips that can do what others do, see ``Group.independent``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.groups.arrangement import Arrangement
from pyro_symmetric.groups.numbers import neutral
from pyro_symmetric.groups.tensors import along_axis, gather_last, lay_out, lift, permute_axes
from pyro_symmetric.groups.units import MOVES, Move, Units
from pyro_symmetric.weights import Weights

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
    :param permutations: name of the units -> LongTensor ``batch_shape + units.shape``: unit ``i`` receives what unit
        ``permutations[..., i]`` had.
    :param signs: name -> 1 and -1.
    :param log_scales: name -> logarithms of multipliers.
    :param shifts: name -> constants that are added.
    :param batch_shape: of the batch, if it is larger than what these tell.
    """

    def __init__(
        self,
        group: Arrangement,
        permutations: Mapping[str, Tensor] | None = None,
        signs: Mapping[str, Tensor] | None = None,
        log_scales: Mapping[str, Tensor] | None = None,
        shifts: Mapping[str, Tensor] | None = None,
        batch_shape: Sequence[int] = (),
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.group: Any = group
        given = [dict(part or {}) for part in (permutations, signs, log_scales, shifts)]
        known = [value for part in given for value in part.values()]
        device = device or (known[0].device if known else torch.device("cpu"))
        real = dtype or next((v.dtype for v in known if v.is_floating_point()), torch.get_default_dtype())
        parts = []
        for move, part in zip(MOVES, given, strict=True):
            names = group.names(move)
            parts.append({n: part[n] if n in part else neutral(move, group[n], device, real) for n in names})
        shapes = {v.shape[: v.dim() - len(group[name].shape)] for part in parts for name, v in part.items()}
        shapes.add(torch.Size(batch_shape))
        # Of few elements, broadcasting takes longer than anything else.
        self.batch_shape = next(iter(shapes)) if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
        if len(shapes) > 1:
            parts = [{n: v.expand(*self.batch_shape, *group[n].shape) for n, v in part.items()} for part in parts]
        self.permutations, self.signs, self.log_scales, self.shifts = parts

    def __getitem__(self, name: str) -> Tensor:
        """The permutation of some units, ``batch_shape + units.shape``."""
        self.group[name]
        if name not in self.permutations:
            raise ValueError(f"the units {name!r} aren't permuted; those that are: {list(self.permutations)}")
        return self.permutations[name]

    def __repr__(self) -> str:
        copies = {name: self.group[name].copies for name in self.group.factors}
        sizes = ", ".join(
            f"{name}: {copies[name]} x {n}" if copies[name] > 1 else f"{name}: {n}"
            for name, n in self.group.factors.items()
        )
        return f"Element(batch_shape={tuple(self.batch_shape)}, {sizes or 'trivial'})"

    @property
    def parts(self) -> tuple[ByName, ByName, ByName, ByName]:
        """Permutations, signs, log-scales and shifts."""
        return self.permutations, self.signs, self.log_scales, self.shifts

    @property
    def device(self) -> torch.device | None:
        """The device of the numbers; None if there are none."""
        return next((value.device for part in self.parts for value in part.values()), None)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Element:
        """The same elements on another device; signs, scales and shifts in another precision."""
        device, dtype = arguments.device("device", device), arguments.dtype("dtype", dtype)
        if dtype is None and device == self.device:
            return self
        return self._each(
            lambda value: value.to(device=device, dtype=dtype if value.is_floating_point() else None), self.batch_shape
        )

    def select(self, index: int | slice | Tensor | tuple[Any, ...]) -> Element:
        """Index the batch: ``g.select(0)`` is the first element. An index on another device is moved."""
        device, given = self.device or torch.device("cpu"), index if isinstance(index, tuple) else (index,)
        here = tuple(part.to(device) if isinstance(part, Tensor) else part for part in given)
        if any(self.parts) and self.batch_shape:
            return self._each(lambda value: value[here])
        return self._each(lambda value: value, torch.empty(self.batch_shape, device=device)[here].shape)

    def expand(self, batch_shape: Sequence[int]) -> Element:
        """The same elements, repeated to a larger batch."""
        if self.batch_shape == batch_shape:
            return self
        return Element(self.group, *self.parts, batch_shape)

    def within(self, group: Arrangement) -> Element:
        """The element of another group that has the same numbers for the units of both, and leaves all others."""
        parts = [
            {name: own[name] if name in own else self._still(move, group[name]) for name in group.names(move)}
            for move, own in zip(MOVES, self.parts, strict=True)
        ]
        return Element._of_parts(group, parts, self.batch_shape)

    def equal(self, other: Element) -> bool:
        """True if both are the same elements, bit by bit."""
        arguments.instance("other", other, Element, "an Element")
        if self.group.factors != other.group.factors or self.batch_shape != other.batch_shape:
            return False
        return all(
            mine.keys() == theirs.keys()
            and all(torch.equal(value, theirs[name].to(value)) for name, value in mine.items())
            for mine, theirs in zip(self.parts, other.parts, strict=True)
        )

    def _still(self, move: Move, units: Units) -> Tensor:
        """Numbers that move nothing, in the precision of the others."""
        numbers = (value.dtype for part in self.parts for value in part.values() if value.is_floating_point())
        value = neutral(move, units, self.device, next(numbers, torch.get_default_dtype()))
        return value.expand(*self.batch_shape, *units.shape)

    def _each(self, change: Callable[[Tensor], Tensor], batch_shape: Sequence[int] = ()) -> Element:
        parts = [{name: change(value) for name, value in part.items()} for part in self.parts]
        for name, value in ((name, value) for part in parts for name, value in part.items()):
            batch_shape = value.shape[: value.dim() - len(self.group[name].shape)]
            break
        return Element._of_parts(self.group, parts, batch_shape)

    @classmethod
    def _of_parts(cls, group: Arrangement, parts: Sequence[ByName], batch_shape: Sequence[int]) -> Element:
        """An element whose numbers are complete and of one batch shape: of many small ones, looking takes longest."""
        element = cls.__new__(cls)
        element.group, element.batch_shape = group, torch.Size(batch_shape)
        element.permutations, element.signs, element.log_scales, element.shifts = parts
        return element

    # algebra --------------------------------------------------------------------------------------------------------

    def unit_index(self, name: str) -> Tensor:
        """The place that each unit, counted through all copies, comes from: LongTensor ``batch_shape + (count,)``."""
        index = self._total(name)
        count = self.group[name].count
        return torch.arange(count, device=self.device).expand(*self.batch_shape, count) if index is None else index

    def _total(self, name: str) -> Tensor | None:
        """The same; None if nothing moves these units."""
        units: Units = self.group[name]
        outer = None if units.parent is None else self._total(units.parent)
        own = self.permutations.get(name)
        if outer is None:
            return None if own is None else self._within_copies(name)
        if own is None:
            inner = torch.arange(units.size, device=outer.device)
        else:
            inner = _rows(own.reshape(*self.batch_shape, units.copies, units.size), outer)
        return (outer.unsqueeze(-1) * units.size + inner).flatten(-2)

    def _within_copies(self, name: str) -> Tensor:
        """Each unit's source if nothing outside moves, counted through all copies, ``batch + (count,)``."""
        units: Units = self.group[name]
        own = self.permutations[name]
        if units.copies == 1:
            return own
        return (own + torch.arange(0, units.count, units.size, device=own.device).unsqueeze(-1)).flatten(-2)

    def inverse(self) -> Element:
        """The element with ``g.inverse() @ g`` the identity."""
        permutations = {}
        for name, value in self.permutations.items():
            units: Units = self.group[name]
            own = value.reshape(*self.batch_shape, units.copies, units.size).argsort(-1)
            outer = None if units.parent is None else self._total(units.parent)
            permutations[name] = (own if outer is None else _rows(own, outer)).reshape(value.shape)
        return Element(
            self.group,
            permutations,
            {name: self._carried(name, value.reciprocal(), False) for name, value in self.signs.items()},
            {name: self._carried(name, -value, False) for name, value in self.log_scales.items()},
            {name: -value for name, value in self.shifts.items()},
            self.batch_shape,
        )

    def __matmul__(self, other: Element) -> Element:
        if not isinstance(other, Element):
            return NotImplemented
        mine, theirs = _over_one_group(self, other)
        shape = torch.broadcast_shapes(mine.batch_shape, theirs.batch_shape)
        mine, theirs = mine.expand(shape), theirs.expand(shape).to(mine.device)
        permutations = {}
        for name, value in mine.permutations.items():
            units: Units = mine.group[name]
            then = value.reshape(*shape, units.copies, units.size)
            first = theirs.permutations[name].reshape(then.shape)
            outer = None if units.parent is None else theirs._total(units.parent)
            then = then if outer is None else _rows(then, outer.argsort(-1))
            permutations[name] = first.gather(-1, then).reshape(value.shape)
        return Element(
            mine.group,
            permutations,
            {name: theirs._carried(name, own, True) * theirs.signs[name] for name, own in mine.signs.items()},
            {name: theirs._carried(name, own, True) + theirs.log_scales[name] for name, own in mine.log_scales.items()},
            {name: own + theirs.shifts[name] for name, own in mine.shifts.items()},
            shape,
        )

    def _carried(self, name: str, numbers: Tensor, back: bool) -> Tensor:
        r"""Numbers of units as this element's permutations carry them: :math:`m_{\hat p(u)}`, or with the inverse."""
        index = self._total(name)
        if index is None:
            return numbers
        flat = numbers.reshape(*self.batch_shape, -1)
        return gather_last(flat, (index.argsort(-1) if back else index).to(flat.device)).reshape(numbers.shape)

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
        """Act on one site alone; batch shapes broadcast. Large networks are moved so, without a second
        copy.

        :param site_dims: the number of trailing axes that are the site's, if its shape isn't that which the group knows
            (unconstrained coordinates may have fewer entries along axes that nothing moves).
        """
        by_dim = self.group.members(site)
        if not by_dim:
            return value
        if site_dims is None:
            viewed = self.on_site(site, self.group.view(site, value), len(self.group.view_shapes[site]))
            return self.group.view_back(site, viewed)
        factors = {dim: self._multiplier(site, dim, value.dtype) for dim in by_dim}
        epsilon = self.group.epsilon(site) if any(factor is not None for factor in factors.values()) else 0.0
        value = value + epsilon if epsilon else value
        for dim, factor in factors.items():
            constant = self.axis_shift(site, dim)
            value = value if constant is None else value + along_axis(constant.to(value), dim, site_dims)
            value = value if factor is None else value * along_axis(factor.to(value), dim, site_dims)
        value = value - epsilon if epsilon else value
        indices = {dim: self._index(site, dim) for dim in by_dim}
        placed = {dim: index.to(value.device) for dim, index in indices.items() if index is not None}
        return permute_axes(value, placed, site_dims) if placed else value

    def axis_index(self, site: str, dim: int) -> Tensor:
        """LongTensor ``batch_shape + (length,)``: position ``i`` of this axis receives what was at ``index[i]``.

        :param dim: the axis, counted in the group's view of the site, see ``group.view``.
        """
        index, length = self._index(site, dim), self.group.view_shapes[site][dim]
        return torch.arange(length, device=self.device).expand(*self.batch_shape, length) if index is None else index

    def _index(self, site: str, dim: int) -> Tensor | None:
        full: Tensor | None = None
        length = self.group.view_shapes[site][dim]
        for stage in self.group.stages(site, dim):
            parts = [(self._within_copies(name), axis.index) for name, axis in stage]
            step = parts[0][0] if stage[0][1].fills(length) else lift(parts, length)
            full = step if full is None else gather_last(full, step)
        return full

    def axis_multiplier(self, site: str, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """The factor of each position of this axis before it is permuted: ``batch_shape + (length,)``.

        :param dim: the axis, counted in the group's view of the site, see ``group.view``.
        :param dtype: computed in at least this precision.
        """
        factor = self._multiplier(site, dim, dtype)
        if factor is None:
            return torch.ones(*self.batch_shape, self.group.view_shapes[site][dim], dtype=dtype, device=self.device)
        return factor

    def _multiplier(self, site: str, dim: int, dtype: torch.dtype | None) -> Tensor | None:
        full: Tensor | None = None
        length = self.group.view_shapes[site][dim]
        for name, axis in self.group.members(site).get(dim, []):
            numbers: Tensor | None = None
            if axis.exponent % 2 and name in self.signs:
                numbers = self.signs[name]
            if axis.exponent and name in self.log_scales:
                logs = self.log_scales[name]
                logs = logs if dtype is None else logs.to(torch.promote_types(logs.dtype, dtype))
                scale = (axis.exponent * logs).exp()
                numbers = scale if numbers is None else numbers * scale
            if numbers is None:
                continue
            numbers = numbers.flatten(len(self.batch_shape))
            step = numbers if axis.fills(length) else lay_out(numbers, axis.index, 1.0, length)
            full = step if full is None else full * step
        return full

    def axis_shift(self, site: str, dim: int) -> Tensor | None:
        """The summand at each position of this axis, added first of all; None if nothing is."""
        full: Tensor | None = None
        for name, axis in self.group.members(site).get(dim, []):
            if name in self.shifts:
                numbers = self.shifts[name].flatten(len(self.batch_shape))
                step = lay_out(numbers, axis.index, 0.0, self.group.view_shapes[site][dim])
                full = step if full is None else full + step
        return full


def acted_shape(group: Arrangement, weights: Mapping[str, Tensor]) -> torch.Size:
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
    missing = [site for site in buffers if site not in weights]
    if missing:
        raise ValueError(
            f"{name} holds no running statistics {missing}, which the symmetry moves along with the parameters: moved "
            "without them, the network computes something else. If they stay in the network as it is (a posterior over "
            "parameters alone), take symmetry.holding(net), which leaves them as they are; if every set of weights has "
            "its own, add them"
        )


# small steps --------------------------------------------------------------------------------------------------------


def _over_one_group(one: Element, other: Element) -> tuple[Element, Element]:
    """Both as elements of one group: their own, or, of two restrictions of one group, the whole.

    :raises ValueError: if they belong to different groups.
    """
    if one.group is other.group or one.group == other.group:
        return one, other
    whole = one.group.whole
    if whole is not other.group.whole and whole != other.group.whole:
        raise ValueError("only elements of one group compose; these belong to two different groups")
    return one.within(whole), other.within(whole)


def _rows(copies: Tensor, order: Tensor) -> Tensor:
    """Reorder the copies of ``batch + (copies, n)``."""
    return copies.gather(-2, order.unsqueeze(-1).expand(*order.shape, copies.shape[-1]))
