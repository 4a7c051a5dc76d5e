"""Known families of continuous symmetries that the library doesn't act with, proposed from a group.

Units that permute may also mix: linear maps without a nonlinearity between them (queries and keys, values and outputs,
factors of low rank) leave their product alone under GL(n), what is normalised by its length alone under O(n). Offsets
pass into the next bias, and means in front of a normalisation or a softmax don't matter. Proposals are generous, for
each is tested against the Jacobian before it counts (:mod:`~pyro_symmetric.discovery.completeness`).

Sources: Ziyin et al. 2024, arXiv 2309.16932 (continuous symmetries of layers); Ashkboos et al. 2024, arXiv 2401.15024,
section 3 (O(n) of streams that are normalised by their root mean square).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pyro_symmetric.discovery.fields import Candidate, Field, Fields, Place
from pyro_symmetric.groups import Group

MIXED = "GL({n}) of consecutive linear maps"
MULTIPLIED = "GL({n}) of maps whose outputs are multiplied, as queries and keys are"
ROTATED = "O({n}) of a stream that is normalised by its length"
CENTRED = "O({n}) of a stream that is normalised by mean and length"
SCALED = "the scale of a stream that is normalised by its length"
PAIRS = "rotations of rotary pairs of queries and keys"
UNREAD = "what enters directions that no later linear map reads, or leaves those that none writes"
LOST = "offsets that a softmax or a normalisation takes out, as those of keys"
OFFSET = "offsets that other biases take up"
MEAN_OFFSET = "offsets that readers take up from a normalised mean"
MEAN = "means that a softmax or a normalisation takes out"
FIXED_SUM = "readers of units with a fixed sum: normalised ones, probabilities"
STATISTICS = "running statistics that affine weights can take over"
PARALLEL = "matrices that are added to one another"
STACKED = "scales of units that stacked vectors weigh one by one, as graph attention does"
LOW_RANK = "factors of low rank beside a full matrix"
SPECTRAL = "vectors of a spectral norm, of which one number counts"


def candidates(group: Group) -> Iterator[list[Candidate]]:
    """All proposals: variants of one family, of which the first that holds contains the others."""
    fields = Fields(group)
    for variants in _proposed(group, fields):
        yield [
            replace(one, main=fields.stored(one.main), helpers=tuple(map(fields.stored, one.helpers)))
            for one in variants
        ]


def _proposed(group: Group, fields: Fields) -> Iterator[list[Candidate]]:
    """The same in the weights that layers multiply by."""
    whole = fields.whole()
    for name in group.units:
        own = fields.places(name)
        if not own:
            continue
        yield from _offsets(group, fields, own)
        yield from _rotary(group, fields, name, own)
        if own[0].positions.shape[1] > 1:
            yield from _mixed(group, fields, name, own)
            yield from _sums(group, fields, [place for place in own if len(place.positions) > 1])
    for length in sorted({place.positions.shape[1] for place in whole}):
        yield from _offsets(group, fields, [place for place in whole if place.positions.shape[1] == length])
    yield from _sums(group, fields, [place for place in whole if place.positions.shape[1] > 1])
    yield from _stacked(group, fields, whole)
    yield from _statistics(group, fields, whole)
    yield from _parallel(group, fields)
    for number, turned in fields.norms():
        yield [Candidate(SPECTRAL, (number,), turned)]


# where units lie ----------------------------------------------------------------------------------------------------


def _biases(group: Group, place: Place) -> list[str]:
    """Vectors that may be added to what a matrix reads along this axis: of the same module, of the right length."""
    length, module = _rest(group, place), _module(place.site)
    return [
        site
        for site, shape in group.site_shapes.items()
        if tuple(shape) == (length,) and _module(site) == module and site != place.site
    ]


def _rest(group: Group, place: Place) -> int:
    """The number of entries that a unit has at a place."""
    shape = group.view_shapes[place.site]
    return shape.numel() // shape[place.dim]


def _vectors(group: Group, own: list[Place]) -> list[Place]:
    return [place for place in own if len(group.view_shapes[place.site]) == 1 and not place.buffer]


def _matrices(group: Group, own: list[Place]) -> list[Place]:
    return [place for place in own if len(group.view_shapes[place.site]) > 1]


# linear maps of units -----------------------------------------------------------------------------------------------


def _antisymmetric(raw: Tensor) -> Tensor:
    return raw - raw.mT


def _centred(raw: Tensor) -> Tensor:
    """Antisymmetric, and zero on the vector of ones."""
    raw = raw - raw.mean(-1, keepdim=True)
    return _antisymmetric(raw - raw.mean(-2, keepdim=True))


def _multiple(raw: Tensor) -> Tensor:
    """A multiple of the identity."""
    return torch.eye(raw.shape[-1], dtype=raw.dtype, device=raw.device) * raw[..., :1, :1]


def _mixed(group: Group, fields: Fields, name: str, own: list[Place]) -> Iterator[list[Candidate]]:
    """GL(n), or O(n) with whatever affine maps follow the normalisations."""
    matrices = _matrices(group, own)
    if "permute" not in group[name].moves or not matrices:
        return
    copies, n = own[0].positions.shape
    main, others = fields.mixed(matrices[0], False), [place for place in own if place is not matrices[0]]
    plain = [fields.mixed(place, False) for place in others]
    turned = [fields.mixed(place, True) for place in own]
    gauged = list(_gauged(group, fields, [place for place in own if place.exponent]))
    for child in group.children(name):
        if group[child].size == 1:  # the affine map of a normalisation, and its readers
            gauged += _gauged(group, fields, fields.places(child))
    alike = len(matrices) > 1 and all(place.dim == matrices[0].dim for place in matrices)
    shape = (copies, n, n)
    affine = _affine(fields, own, matrices)
    yield [
        Candidate((MULTIPLIED if alike else MIXED).format(n=n), shape, main, (*plain, *turned, *affine)),
        Candidate(ROTATED.format(n=n), shape, main, (*plain, *gauged), _antisymmetric, copies * n * (n - 1) // 2),
        Candidate(CENTRED.format(n=n - 1), shape, main, (*plain, *gauged), _centred, copies * (n - 1) * (n - 2) // 2),
    ]
    yield [
        Candidate(SCALED, shape, main, tuple(plain), _multiple, copies),
        *(
            Candidate(SCALED, shape, main, (*plain, *taken_up), _multiple, copies)
            for taken_up in _taken_up(group, fields, own, [*plain, *gauged])
        ),
    ]
    for place in own:
        beside = [other for other in matrices if place.exponent and other.exponent == place.exponent]
        readers = [other for other in matrices if other is not place and all(other is not one for one in beside)]
        if readers and sum(_rest(group, other) for other in readers) < n:
            yield [Candidate(UNREAD, (copies, n, _rest(group, place)), fields.unread(place, readers))]
    yield from _unwritten(group, fields, own)


def _unwritten(group: Group, fields: Fields, own: list[Place]) -> Iterator[list[Candidate]]:
    """Readers of normalised units along directions that a narrow map in front of the normalisation never writes."""
    vectors = _vectors(group, own)
    for writer, place in itertools.permutations(_matrices(group, own), 2):
        written = [writer, *(bias for bias in vectors if _module(bias.site) == _module(writer.site))]
        shape = (*place.positions.shape, _rest(group, place))
        if _rest(group, writer) + 1 >= shape[1]:
            continue
        for gauge in (vector for vector in vectors if all(vector is not one for one in written)):
            offsets = [
                (offset, bias)
                for offset, bias in itertools.product(vectors, _biases(group, place))
                if offset is not gauge and _module(offset.site) == _module(gauge.site)
            ]
            fields_ = [fields.unread(place, written, gauge, offset) for offset in (None, *offsets)]
            yield [Candidate(UNREAD, shape, field) for field in reversed(fields_)]


def _affine(fields: Fields, own: list[Place], matrices: list[Place]) -> Iterator[Field]:
    """The change behind a batch normalisation by running statistics: an affine map, for each unit its own."""
    for variance in (place for place in own if place.buffer and fields.group.epsilon(place.site)):
        vectors = [place for place in _vectors(fields.group, own) if _module(place.site) == _module(variance.site)]
        for gauge in vectors:
            yield from (fields.mixed(place, True, gauge, variance=variance) for place in matrices)
            yield from (fields.mixed(one, False, gauge, True, variance) for one in vectors if one is not gauge)


def _taken_up(group: Group, fields: Fields, own: list[Place], moved: list[Field]) -> Iterator[list[Field]]:
    r"""The epsilon of a normalised length, as part of an offset :math:`b`: with the part of it that no input writes,
    :math:`\lVert b_\perp \rVert^2 + \epsilon` grows as the squares of all else do, and readers undo the difference.
    """
    for writer, bias in itertools.product(_matrices(group, own), _vectors(group, own)):
        if _module(writer.site) == _module(bias.site) and _rest(group, writer) + 1 < bias.positions.shape[1]:
            for centred in (False, True):
                yield [fields.along_offset(field, bias, writer, centred) for field in moved]


def _gauged(group: Group, fields: Fields, own: list[Place]) -> Iterator[Field]:
    vectors = _vectors(group, own)
    for gauge, offset in itertools.permutations(vectors, 2):
        yield fields.mixed(offset, False, gauge, inverse=True)
    for place in _matrices(group, own):
        for gauge in vectors:
            yield fields.mixed(place, False, gauge)
            for offset, bias in itertools.product(vectors, _biases(group, place)):
                if offset is not gauge:
                    yield fields.mixed_offset(place, False, gauge, offset, bias)


def _rotary(group: Group, fields: Fields, name: str, own: list[Place]) -> Iterator[list[Candidate]]:
    """Rotations of entries of one unit among one another, the same at all places."""
    if "scale" not in group[name].moves:
        return
    pairs = [
        (one, other)
        for one, other in itertools.combinations(_matrices(group, own), 2)
        if one.exponent and other.exponent and (one.site, one.dim) == (other.site, other.dim)
    ]
    helpers = [fields.rotated(one, other) for one, other in pairs]
    shape = tuple(own[0].positions.shape)
    if pairs and len(pairs) <= 64:
        yield [Candidate(PAIRS, shape, main, (*helpers[:i], *helpers[i + 1 :])) for i, main in enumerate(helpers)]


# offsets, means, sums -----------------------------------------------------------------------------------------------


def _offsets(group: Group, fields: Fields, own: list[Place]) -> Iterator[list[Candidate]]:
    """An offset of units, lost, or taken up by other biases, those of all that reads these units included."""
    readers = [fields.read(place, bias) for place in _matrices(group, own) for bias in _biases(group, place)]
    tables = [
        place for place in own if place.dim == len(group.view_shapes[place.site]) - 1 <= 2 and not _biases(group, place)
    ]
    for place in tables:
        shape, main = tuple(place.positions.shape), fields.constant(place)
        others = [fields.constant(other) for other in tables if other is not place]
        yield [Candidate(LOST, shape, main), Candidate(OFFSET, shape, main, (*readers, *others))]
    for gauge, offset in itertools.permutations(_vectors(group, own), 2):
        if _module(gauge.site) == _module(offset.site) and gauge.site != offset.site:
            means = tuple(fields.mean_read(place, gauge) for place in _matrices(group, own))
            yield [Candidate(MEAN_OFFSET, tuple(offset.positions.shape), fields.weighed(offset, gauge), means)]


def _sums(group: Group, fields: Fields, own: list[Place]) -> Iterator[list[Candidate]]:
    """The same change of all units, which a normalisation takes out, or which reads their fixed sum."""
    for place in own:
        shape, biases = (len(place.positions), _rest(group, place)), _biases(group, place)
        alike = [other for other in own if other.positions.shape == place.positions.shape]
        vectors = _vectors(group, alike)
        main = fields.summed(place)
        others = [fields.summed(other) for other in vectors if other is not place and shape[1] == 1]
        variants = [Candidate(MEAN, shape, main), Candidate(MEAN, shape, main, tuple(others))]
        variants.append(Candidate(FIXED_SUM, shape, main, tuple(fields.summed_offset(bias) for bias in biases)))
        for gauge in vectors:
            offsets = [
                fields.summed_offset(bias, gauge, vector)
                for bias, vector in itertools.product(biases, vectors)
                if vector is not gauge and _module(vector.site) == _module(gauge.site)
            ]
            variants.append(Candidate(FIXED_SUM, shape, fields.summed(place, gauge), tuple(offsets)))
        yield variants


def _stacked(group: Group, fields: Fields, whole: list[Place]) -> Iterator[list[Candidate]]:
    """A stack of vectors ``(copies, size)``, whose entries weigh units that lie one behind the other elsewhere."""
    stacks = {
        site: torch.arange(shape.numel(), device="cpu").reshape([n for n in shape if n > 1])
        for site, shape in group.site_shapes.items()
        if sum(n > 1 for n in shape) == 2 and site not in group.buffers
    }
    for site, positions in stacks.items():
        own = Place(site, -1, positions, False)
        along = [other._replace(positions=positions) for other in whole if other.positions.numel() == positions.numel()]
        alike = [Place(s, -1, at, False) for s, at in stacks.items() if s != site and at.shape == positions.shape]
        if along:
            shape, others = tuple(positions.shape), tuple(fields.stretched(other) for other in (*along, *alike))
            yield [Candidate(STACKED, shape, fields.stretched(own), others)]
        for writer in (other for other in along if 1 < _rest(group, other) < positions.shape[1]):
            yield [Candidate(UNREAD, (*positions.shape, 1), fields.unread(own, [writer]))]


def _statistics(group: Group, fields: Fields, whole: list[Place]) -> Iterator[list[Candidate]]:
    """A running variance against the affine weight, a running mean against the affine bias."""
    for variance in whole:
        if not variance.buffer or not group.epsilon(variance.site):
            continue
        module = [own for own in whole if _module(own.site) == _module(variance.site) and own is not variance]
        module = [own for own in module if own.positions.shape == variance.positions.shape]
        shape = tuple(variance.positions.shape)
        for vector in _vectors(group, module):
            yield [Candidate(STATISTICS, shape, fields.stretched(vector), (fields.stretched(variance),))]
        for mean in (own for own in module if own.buffer):
            for gauge, vector in itertools.permutations(_vectors(group, module), 2):
                shift = fields.standardised(vector, gauge, variance)
                yield [Candidate(STATISTICS, shape, fields.constant(mean), (shift,))]


def _module(site: str) -> str:
    """The module that a site belongs to; that of a computed weight is the one that multiplies by it."""
    module, parametrized, _ = site.partition(".parametrizations.")
    return module if parametrized else site.rpartition(".")[0]


def _parallel(group: Group, fields: Fields) -> Iterator[list[Candidate]]:
    """Matrices that are added: part of one moves to the other, also if that one is a product of two factors."""
    shapes = {site: shape for site, shape in group.site_shapes.items() if len(shape) > 1}
    for site, shape in shapes.items():
        others = [other for other in shapes if other != site and shapes[other] == shape]
        if others:
            yield [Candidate(PARALLEL, tuple(shape), _itself(site), tuple(map(_itself, others)))]
    flat = {site: shape for site, shape in shapes.items() if len(shape) == 2}
    for outer, inner in itertools.permutations(flat, 2):
        (rows, rank), (same, columns) = flat[outer], flat[inner]
        full = [site for site, shape in flat.items() if tuple(shape) == (rows, columns)]
        if rank == same and rank < min(rows, columns) and full:
            for moved, kept, size in ((outer, inner, (rows, rank)), (inner, outer, (rank, columns))):
                helpers = tuple(_product(site, kept, moved is outer) for site in full)
                yield [Candidate(LOW_RANK, size, _itself(moved), helpers)]


def _itself(site: str) -> Field:
    return lambda weights, raw: {site: raw}


def _product(site: str, factor: str, behind: bool) -> Field:
    """A matrix moves by the numbers times a factor."""
    return lambda weights, raw: {site: raw @ weights[factor] if behind else weights[factor] @ raw}
