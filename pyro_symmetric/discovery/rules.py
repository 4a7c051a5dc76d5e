"""The rules of PyTorch's operators: elementwise, factories, reductions, normalisations,
products, views, indexing.

If indices are known (slices, index maps), units follow their entries. If they are data,
positions along the indexed axis are pinned; units along all other axes survive if all
of their entries go to the same positions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from pyro_symmetric.arguments import Shape
from pyro_symmetric.discovery.flow import CONSTANT_LIMIT, Flow
from pyro_symmetric.discovery.registry import (
    Array,
    Call,
    Part,
    Value,
    carrier,
    opaque,
    register_rule,
    salt_of,
)

# Elementwise functions that PyTorch doesn't tag as pointwise. Dropout is the identity,
# or its mean.
UNTAGGED = """to alias contiguous clone detach lift lift_fresh lift_fresh_copy _to_copy
    _conj _neg_view hardswish log_sigmoid special_expit floor_divide polar __and__
    __or__ complex max.other min.other masked_fill _prelu_kernel rsub rrelu threshold
    dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout"""


@register_rule(torch.Tag.pointwise, *UNTAGGED.split())
@carrier
def pointwise(flow: Flow, call: Call) -> list[Value]:
    """Tie the units of all operands."""
    if not call.operands:
        return [opaque(call.shape)] * len(call.shapes)
    pieces = any(part.history is not None for part in call.value.parts)
    if pieces and len(call.operands) == 1:
        past = call.value.past(salt_of(call.target, call.numbers))
        return [past] * len(call.shapes)
    operands = [flow.noted(value) for value in call.operands]
    result = flow.elementwise(operands)
    return [flow.without(result, _dead(call))] * len(call.shapes)


def _dead(call: Call) -> torch.Tensor | None:
    """Return where an operator's results are constant, whatever the units are:
    products with zeros, and filled entries.
    """
    if call.name == "mul":
        for value in call.operands:
            if value.constant is not None:
                return value.constant == 0
    if call.name == "masked_fill":
        return call["mask"].constant
    if call.name == "where" and len(call.operands) == 3:
        mask, first, second = call.operands
        if mask.constant is not None and second.constant is not None:
            return ~mask.constant
        if mask.constant is not None and first.constant is not None:
            return mask.constant
    return None


@register_rule("type_as", "copy")
def like_another(flow: Flow, call: Call) -> Value:
    """Return one operand's entries, with the shape or the type of another's."""
    return (
        call.value if call.name == "type_as" else flow.expand(call["src"], call.shape)
    )


# factories ----------------------------------------------------------------------------


@register_rule(
    "full",
    "full_like",
    "scalar_tensor",
    "zeros",
    "zeros_like",
    "ones",
    "ones_like",
    "new_full",
    "new_ones",
    "new_zeros",
)
def full(flow: Flow, call: Call) -> Value:
    by_default = call.get("s", int("ones" in call.name))
    fill_value = call.get("fill_value", by_default)
    value = Value(call.shape)
    if isinstance(fill_value, Value):
        value = flow.expand(fill_value, call.shape)
    constant = None
    number = isinstance(fill_value, int | float)
    if number and math.prod(call.shape) <= CONSTANT_LIMIT:
        constant = torch.full(call.shape, fill_value, device="cpu")
    return replace(value, constant=constant)


@register_rule("arange", "eye", "linspace", "logspace", "tril_indices", "triu_indices")
def made(flow: Flow, call: Call) -> Value:
    """Make what is no constant, as its size depends on data."""
    return opaque(call.shape)


# Factories that take at most a shape from an operand, and random numbers whose
# distribution depends on operands. PyTorch tags more operators as random (attention,
# recurrent layers): those have rules, or are decomposed.
OF_SHAPE = """empty_like new_empty new_empty_strided rand randn randint randperm
    rand_like randn_like randint_like uniform exponential cauchy log_normal geometric
    normal_functional""".split()  # noqa: SIM905
OF_PARAMETERS = """bernoulli normal multinomial poisson binomial _standard_gamma
    _sample_dirichlet""".split()  # noqa: SIM905


@register_rule(*OF_SHAPE, *OF_PARAMETERS)
def random_numbers(flow: Flow, call: Call) -> Value:
    """Pin what meets random numbers: the network is a function of its weights with
    these numbers fixed.

    Each entry meets its own number, so that entries can't be exchanged even if they are
    exchangeable in law.
    """
    if call.name in OF_PARAMETERS:
        for value in call.operands:
            flow.pin(value)
    return opaque(call.shape)


@register_rule("bernoulli.p")
def mask(flow: Flow, call: Call) -> Value:
    """Replace a mask of dropout by its mean."""
    return Value(call.shape)


# reductions and scans -----------------------------------------------------------------


def _axes(call: Call) -> list[int]:
    """Return the axes over which an operator reduces: an int, a list, or all if none is
    given.
    """
    dim = call.get("dim")
    value = call.value
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(value.dim))
    return [*map(value.axis, [dim] if isinstance(dim, int) else dim)]


def _pinned_along(flow: Flow, call: Call) -> Value:
    """Pin units along the axes of the reduction."""
    keep = set(range(call.value.dim)).difference(_axes(call))
    return flow.restrict(call.value, keep)


@register_rule(
    "sum", "mean", "nansum", "amax", "amin", "std", "var", "var_mean", "std_mean",
    "max", "min", "median", "kthvalue", "logsumexp", "prod", "any", "all",
    "count_nonzero", "linalg_vector_norm", "argmax", "argmin",
)  # fmt: skip
def symmetric(flow: Flow, call: Call) -> list[Value]:
    """Reduce symmetrically; pin units if the positions of extreme entries are read."""
    has_positions = len(call.shapes) > 1 and not call.name.endswith("_mean")
    positions_read = has_positions and bool(call.read - {0})
    value = call.value
    if positions_read or call.name.startswith("arg"):
        value = _pinned_along(flow, call)
    keepdim = bool(call.get("keepdim", False))
    return [flow.reduce(value, _axes(call), keepdim)] * len(call.shapes)


@register_rule("sort", "topk")
def ranked(flow: Flow, call: Call) -> list[Value]:
    """Order entries by rank, which replaces units along the axis by positions."""
    value = _pinned_along(flow, call) if call.read - {0} else call.value
    reduced = flow.reduce(value, _axes(call), True)
    return [flow.value(call.shape, reduced.parts, {*reduced.fixed, call.axis})] * 2


@register_rule(
    "cumsum",
    "cummax",
    "cummin",
    "cumprod",
    "logcumsumexp",
    "diff",
    "_fft_r2c",
    "_fft_c2c",
    "_fft_c2r",
)
def ordered(flow: Flow, call: Call) -> list[Value]:
    value = _pinned_along(flow, call)
    for operand in call.operands[1:]:  # what a difference puts before or behind
        flow.pin(operand)
    fixed = value.fixed.union(_axes(call))
    return [flow.value(call.shape, value.parts, fixed)] * len(call.shapes)


# softmax and the normalisations -------------------------------------------------------


@register_rule("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax")
def softmax(flow: Flow, call: Call) -> Value:
    return flow.normalise(call.value, [call["dim"]])


@register_rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def layer_norm(flow: Flow, call: Call) -> Value:
    value = call["input"]
    first = value.dim - len(call["normalized_shape"])
    normalised = flow.normalise(value, range(first, value.dim))
    return _affine(flow, call, normalised, first)


@register_rule("group_norm", "native_group_norm")
def group_norm(flow: Flow, call: Call) -> Value:
    """Let channels move within their group, and groups as wholes."""
    value = call["input"]
    batch, channels, *pixels = value.shape
    groups = call.get("num_groups") or call["group"]
    split = flow.reshape(value, [batch, groups, channels // groups, *pixels])
    normalised = flow.normalise(split, range(2, split.dim))
    return _affine(flow, call, flow.reshape(normalised, value.shape), 1)


@register_rule(
    "batch_norm", "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit",
    "native_batch_norm", "_batch_norm_with_update_functional", "cudnn_batch_norm",
)  # fmt: skip
def batch_norm(flow: Flow, call: Call) -> Value:
    """Normalise over all axes but that of the channels: units along any one axis may
    move.
    """
    value = call["input"]
    channels = value.part_on(1)
    if channels is not None and channels.axes != (1,):
        value = flow.restrict(value, [1])
    return _affine(flow, call, value, 1)


def _affine(flow: Flow, call: Call, value: Value, axis: int) -> Value:
    """Apply statistics, weights and biases along ``axis`` and those behind it
    (channels: one axis only).
    """
    for operand in map(call.get, ("running_mean", "running_var", "weight", "bias")):
        if operand is not None:
            behind = [1] * (value.dim - axis - operand.dim)
            wide = flow.reshape(operand, [*operand.shape, *behind])
            value = flow.elementwise([value, wide])
    return value


# products, summed over an axis --------------------------------------------------------


def matmul(flow: Flow, first: Value, second: Value) -> Value:
    """Compute ``torch.matmul`` with its broadcasting, also for vectors."""
    rows = "r" if first.dim > 1 else ""
    columns = "c" if second.dim > 1 else ""
    first_letters = f"...{rows}i" if rows else "i"
    second_letters = f"...i{columns}" if columns else "i"
    equation = f"{first_letters},{second_letters}->...{rows}{columns}"
    return flow.einsum(equation, first, second)


def linear(flow: Flow, value: Value, weight: Value, bias: Value | None) -> Value:
    """Compute ``value @ weight.T + bias``."""
    equation = "...i,oi->...o" if weight.dim == 2 else "...i,i->..."
    return flow.elementwise([flow.einsum(equation, value, weight), bias])


@register_rule("linear")
def linear_rule(flow: Flow, call: Call) -> Value:
    return linear(flow, call["input"], call["weight"], call["bias"])


@register_rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def matmul_rule(flow: Flow, call: Call) -> Value:
    return matmul(flow, *call.operands)


@register_rule("addmm", "baddbmm", "addmv")
def addmm(flow: Flow, call: Call) -> Value:
    start, first, second = call.operands
    return flow.elementwise([start, matmul(flow, first, second)])


@register_rule("bilinear")
def bilinear(flow: Flow, call: Call) -> Value:
    product = flow.einsum(
        "...i,...j,oij->...o", call["input1"], call["input2"], call["weight"]
    )
    return flow.elementwise([product, call["bias"]])


@register_rule("_cdist_forward", "cdist")
def distances(flow: Flow, call: Call) -> Value:
    """Compute norms of all differences between rows of two matrices."""
    return flow.einsum("...id,...jd->...ij", call["x1"], call["x2"])


@register_rule("einsum")
def einsum(flow: Flow, call: Call) -> Value:
    """Apply an equation; without an arrow, the result has the letters that come once,
    in alphabetical order.
    """
    inputs, arrow, out = call["equation"].replace(" ", "").partition("->")
    for text in inputs.replace("...", "").split(","):
        if len(set(text)) < len(text):
            return flow.give_up(call["tensors"], call.shape, "a letter is repeated")
    if not arrow:
        letters = sorted(set(inputs) - {",", "."})
        out = "..." if "." in inputs else ""
        out += "".join(letter for letter in letters if inputs.count(letter) == 1)
    return flow.einsum(f"{inputs}->{out}", *call["tensors"])


@register_rule("scaled_dot_product_attention")
def attention(flow: Flow, call: Call) -> Value:
    """Compute ``softmax(q k' + mask) v``: a head's units are rows of q and k together,
    and rows of v.
    """
    query = call["query"]
    key = call["key"]
    value = call["value"]
    if call.get("enable_gqa") and query.dim >= 3:
        key = _per_query_head(flow, key, query.shape[-3])
        value = _per_query_head(flow, value, query.shape[-3])
    products = flow.einsum("...qd,...kd->...qk", query, key)
    scores = flow.elementwise([products, call["attn_mask"]])
    return flow.einsum("...qk,...kd->...qd", flow.normalise(scores, [-1]), value)


def _per_query_head(flow: Flow, value: Value, heads: int) -> Value:
    """Repeat each head of keys (values) for the consecutive heads of queries that it
    serves.
    """
    *lead, key_heads, length, width = value.shape
    shape = [*lead, key_heads, heads // key_heads, length, width]
    wide = flow.expand(flow.unsqueeze(value, value.dim - 2), shape)
    return flow.reshape(wide, [*lead, heads, length, width])


# images: units along batch and channels only ------------------------------------------


@register_rule(
    *(f"conv{d}d" for d in "123"),
    *(f"conv_transpose{d}d" for d in "123"),
    "convolution",
)
def convolution(flow: Flow, call: Call) -> Value:
    """Convolve: each group of output channels reads one group of input channels, and
    moves with it.
    """
    weight = call["weight"]
    bias = call["bias"]
    dims = weight.dim - 2
    value = _channels(flow, _images(flow, call["input"], dims), dims)
    transposed = call.get("transposed", "transpose" in call.name)
    outputs = _per_group(flow, value, weight, call["groups"], transposed)
    result = _resized(flow, outputs, call.shape, dims)
    if bias is None:
        return result
    return flow.elementwise([result, flow.reshape(bias, [-1, *[1] * dims])])


def _images(flow: Flow, value: Value, dims: int) -> Value:
    """Pin units along the last ``dims`` axes, those of pixels."""
    return flow.restrict(value, range(value.dim - dims))


def _channels(flow: Flow, value: Value, dims: int) -> Value:
    """Drop the last ``dims`` axes, those of pixels, along which units are pinned."""
    axes = range(value.dim - dims)
    value = flow.told_apart(value, axes)
    fixed = value.fixed.intersection(axes)
    return Value(value.shape[: len(axes)], value.parts, fixed)


def _per_group(
    flow: Flow, value: Value, weight: Value, groups: int, transposed: bool
) -> Value:
    """Multiply by a kernel as rows, ``(groups, ...)``, times columns, of which each
    group may have its own.

    Groups lie along axis 0 of the kernel: that of its outputs or, if transposed, of its
    inputs.
    """
    row, column = "io" if transposed else "oi"
    columns = weight.columns
    rows, second = weight.shape[:2]
    parts = tuple(part for part in weight.parts if part is not columns)
    weight = _channels(flow, replace(weight, parts=parts), weight.dim - 2)
    if groups == 1:
        return flow.einsum(f"...i,{row}{column}->...o", value, weight)
    *batch, channels = value.shape
    value = flow.reshape(value, [*batch, groups, channels // groups])
    if columns is None:
        weight = flow.reshape(weight, [groups, rows // groups, second])
        result = flow.einsum(f"...gi,g{row}{column}->...go", value, weight)
    else:
        atoms = columns.atoms.reshape(groups, -1, second)[:, 0]
        of_rows = flow.reshape(weight.collapsed([1]), [groups, rows // groups, 1])
        of_columns = flow.value(atoms.shape, [Part((0, 1), atoms)])
        equation = f"...gi,g{row}{column},g{column}->...go"
        result = flow.einsum(equation, value, of_rows, of_columns)
    return flow.reshape(result, [*batch, -1])


CHANNELWISE = """max_pool{d}d max_pool{d}d_with_indices adaptive_max_pool{d}d
    fractional_max_pool{d}d avg_pool{d}d adaptive_avg_pool{d}d _adaptive_avg_pool{d}d
    reflection_pad{d}d replication_pad{d}d upsample_nearest{d}d
    _upsample_nearest_exact{d}d upsample_linear{d}d upsample_bilinear{d}d
    upsample_bicubic{d}d upsample_trilinear{d}d _upsample_bilinear{d}d_aa
    _upsample_bicubic{d}d_aa grid_sampler_{d}d"""


@register_rule(*(name.format(d=d) for name in CHANNELWISE.split() for d in "123"))
def channelwise(flow: Flow, call: Call) -> list[Value]:
    """Apply an operator on images channel by channel."""
    value, *parameters = call.operands
    for parameter in parameters:
        flow.pin(parameter)
    dims = int(next(c for c in call.name if c.isdigit()))
    result = _resized(flow, _images(flow, value, dims), call.shape, dims)
    return [result] * len(call.shapes)


def _resized(flow: Flow, value: Value, shape: Sequence[int], dims: int) -> Value:
    """Change the lengths of the last ``dims`` axes, along which no unit lies."""
    leading = len(shape) - dims
    pixels = range(leading, len(shape))
    fixed = value.fixed.intersection(range(leading))
    return flow.value(shape, value.parts, fixed.union(pixels))


# recurrent layers ---------------------------------------------------------------------

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@register_rule(*(f"{kind}.input" for kind in GATES))
def recurrent(flow: Flow, call: Call) -> list[Value]:
    """Run an LSTM, GRU or plain recurrent layer: one set of hidden units for each layer
    and direction.

    A unit owns a row of ``weight_ih``, ``weight_hh`` and both biases in each gate, and
    a column of ``weight_hh``.
    """
    states = call["hx"] if call.name == "lstm" else [call["hx"]]
    directions = 2 if call["bidirectional"] else 1
    per_cell = len(call["params"]) // (call["num_layers"] * directions)
    value = call["input"]
    biases = bool(call["has_biases"])
    all_hidden = []
    all_cells = []
    for layer in range(call["num_layers"]):
        outputs = []
        for number in range(layer * directions, (layer + 1) * directions):
            first = []
            for state in states:
                slice_of_state = flow.take(state, 0, np.array([number]))
                first.append(flow.restrict(slice_of_state, [2]))
            params = call["params"][number * per_cell : (number + 1) * per_cell]
            hidden, cell = _cell(flow, value, params, first, biases, GATES[call.name])
            outputs.append(hidden)
            all_hidden.append(hidden)
            all_cells.append(cell)
        value = flow.cat(outputs, 2)
    results = [value]
    for finals, state in zip((all_hidden, all_cells), states, strict=False):
        results.append(_stacked(flow, finals, state.shape))
    return results


def _cell(
    flow: Flow,
    value: Value,
    params: list[Value],
    states: list[Value],
    biases: bool,
    gates: int,
) -> tuple[Value, Value]:
    """Return hidden units and cells over all steps, ``(batch, time, units)``, of one
    layer in one direction.
    """
    weight_ih, weight_hh, *further = params
    bias_ih, bias_hh = further[:2] if biases else (None, None)
    cell = _per_unit(flow, linear(flow, value, weight_ih, bias_ih), gates)
    hidden = cell
    if len(further) == (3 if biases else 1):
        hidden = linear(flow, cell, further[-1], None)
    # the initial state has the same units
    for state, example in zip(states, (hidden, cell), strict=False):
        flow.elementwise([state.collapsed([0, 1]), flow.collapse(example, [0, 1])])
    from_hidden = linear(flow, hidden, weight_hh, bias_hh)
    flow.elementwise([cell, _per_unit(flow, from_hidden, gates)])
    return hidden, cell


def _per_unit(flow: Flow, value: Value, gates: int) -> Value:
    """Tie the rows of all gates, which are listed gate by gate: a unit owns one row in
    each.
    """
    *lead, rows = value.shape
    split = flow.reshape(value, [*lead, gates, rows // gates])
    axis = len(lead)
    by_gate = []
    for gate in range(gates):
        rows_of_gate = flow.take(split, axis, np.array([gate]))
        by_gate.append(flow.squeeze(rows_of_gate, [axis]))
    return flow.elementwise(by_gate)


def _stacked(flow: Flow, finals: list[Value], shape: Shape) -> Value:
    """Stack the final states of all layers and directions, each with its own units."""
    atoms = []
    for final in finals:
        part = final.part_on(2)
        if part is None or part.axes != (2,):
            why = "hidden units belong to the batch or to time"
            return flow.give_up(finals, shape, why)
        atoms.append(part.atoms)
    return flow.value(shape, [Part((0, 2), np.stack(atoms))], [1])


@register_rule("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def fused_cell(flow: Flow, call: Call) -> list[Value]:
    """Apply the fused step of a GPU to the gates of inputs and of hidden units, the
    state, and biases.
    """
    inner, outer, state, *biases = call.operands
    gates = GATES["lstm" if "lstm" in call.name else "gru"]
    by_unit = [_per_unit(flow, value, gates) for value in (inner, outer, *biases)]
    units = flow.elementwise([state, *by_unit])
    return [units] * (len(call.shapes) - 1)


# views --------------------------------------------------------------------------------


@register_rule(
    "view.default", "_unsafe_view", "reshape", "view_as", "flatten", "unflatten"
)
@carrier
def reshape(flow: Flow, call: Call) -> Value:
    return flow.reshape(call.value, call.shape)


@register_rule("squeeze")
@carrier
def squeeze(flow: Flow, call: Call) -> Value:
    dim = call.get("dim", range(call.value.dim))
    return flow.squeeze(call.value, [dim] if isinstance(dim, int) else dim)


@register_rule("unsqueeze")
@carrier
def unsqueeze(flow: Flow, call: Call) -> Value:
    return flow.unsqueeze(call.value, call["dim"])


@register_rule("permute", "transpose")
@carrier
def permute(flow: Flow, call: Call) -> Value:
    value = call.value
    axes = [*range(value.dim)]
    if call.name == "transpose":
        first = value.axis(call["dim0"])
        second = value.axis(call["dim1"])
        axes[first], axes[second] = second, first
    return flow.relaid(value, [*map(value.axis, call.get("dims", axes))])


@register_rule("expand", "expand_as")
@carrier
def expand(flow: Flow, call: Call) -> Value:
    return flow.expand(call.value, call.shape)


@register_rule("repeat")
def repeat(flow: Flow, call: Call) -> Value:
    """Repeat along axes: insert a new axis in front of each, and merge the two."""
    value = call.value
    counts = call["repeats"]
    while value.dim < len(counts):
        value = flow.unsqueeze(value, 0)
    for axis, count in enumerate(counts):
        if count != 1:
            shape = [*value.shape]
            shape.insert(axis, count)
            value = flow.expand(flow.unsqueeze(value, axis), shape)
            shape[axis : axis + 2] = [math.prod(shape[axis : axis + 2])]
            value = flow.reshape(value, shape)
    return value


@register_rule("view_as_real")
def view_as_real(flow: Flow, call: Call) -> Value:
    """Add a last axis, along which the real and the imaginary part are told apart."""
    value = flow.unsqueeze(call.value, call.value.dim)
    return flow.value(call.shape, value.parts, value.fixed | {value.dim - 1})


@register_rule("view_as_complex")
def view_as_complex(flow: Flow, call: Call) -> Value:
    """Drop the last axis: a unit along it is the real or the imaginary part of a larger
    one.
    """
    last = call.value.dim - 1
    return flow.squeeze(flow.collapse(call.value, [last]), [last])


# indexing by known positions ----------------------------------------------------------


SPLITS = "split split_with_sizes unsafe_split unsafe_split_with_sizes chunk".split()  # noqa: SIM905


@register_rule("slice", "select", "unbind", *SPLITS)
@carrier
def cut(flow: Flow, call: Call) -> list[Value]:
    """Take positions along an axis; single ones may lose the axis."""
    pieces = [flow.cut(call.value, call.axis, taken) for taken in _taken(call)]
    if call.name in ("select", "unbind"):
        pieces = [flow.squeeze(piece, [call.axis]) for piece in pieces]
    return pieces


def _taken(call: Call) -> list[Array]:
    """Return the positions along its axis that each result of an operator takes."""
    every = np.arange(call.value.shape[call.axis])
    if "index" in call.arguments:
        return [every[[int(call["index"])]]]
    if "step" in call.arguments:
        return [every[call["start"] : call["end"] : call["step"]]]
    if call.name == "unbind":
        return [*every[:, None]]
    sizes = call.get("split_sizes", call.get("split_size"))
    if not isinstance(sizes, list | tuple):
        sizes = [shape[call.axis] for shape in call.shapes]
    return np.split(every, np.cumsum([*map(int, sizes)])[:-1])


@register_rule("flip")
@carrier
def flip(flow: Flow, call: Call) -> Value:
    value = call.value
    for axis in map(value.axis, call["dims"]):
        value = flow.cut(value, axis, np.arange(value.shape[axis])[::-1])
    return value


@register_rule("cat")
@carrier
def cat(flow: Flow, call: Call) -> Value:
    values = [value for value in call["tensors"] if value.shape != (0,)]
    return flow.cat(values, values[0].axis(call["dim"]))


@register_rule("stack")
@carrier
def stack(flow: Flow, call: Call) -> Value:
    axis = call["dim"] % len(call.shape)
    return flow.cat([flow.unsqueeze(value, axis) for value in call["tensors"]], axis)


@register_rule("constant_pad_nd")
def pad(flow: Flow, call: Call) -> Value:
    """Pad with constants, as with units that are all equal; negative widths crop."""
    value = call.value
    widths = call["pad"]
    for step, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        axis = value.dim - 1 - step
        end = value.shape[axis] + min(0, after)
        value = flow.take(value, axis, np.arange(max(0, -before), end))
        pieces = [_padding(value, axis, before), value, _padding(value, axis, after)]
        value = flow.cat([piece for piece in pieces if piece.shape[axis]], axis)
    return value


def _padding(value: Value, axis: int, width: int) -> Value:
    shape = list(value.shape)
    shape[axis] = max(0, width)
    return Value(tuple(shape))


@register_rule("slice_scatter", "select_scatter")
def write_slice(flow: Flow, call: Call) -> Value:
    """Overwrite some positions along an axis; these are told apart from the rest."""
    value = call.value
    source = call["src"]
    axis = call.axis
    (written,) = _taken(call)
    if call.name == "select_scatter":
        source = flow.unsqueeze(source, axis)
    if np.array_equal(written, np.arange(value.shape[axis])):
        return source
    if value.part_on(axis) is None:
        operands = [value.collapsed([axis]), flow.collapse(source, [axis])]
        return _written(flow, call, operands, [axis])
    # Units keep their atoms; the source must have the same units, or be constant
    # (zeros). Taking the positions notes them as a tensor of their own, which tells
    # them apart from the rest.
    flow.elementwise([flow.take(value, axis, written), source])
    return flow.value(value.shape, value.parts, value.fixed | (source.fixed - {axis}))


# indexing by data ---------------------------------------------------------------------


@register_rule("embedding", "_embedding_bag", "_embedding_bag_forward_only")
def embedding(flow: Flow, call: Call) -> Value:
    """Look up rows (or their sums, means, largest entries) by index: the vocabulary is
    pinned.
    """
    weight, *indices = call.operands
    for value in indices:
        flow.pin(value)
    lead = len(call.shape) - 1
    weight = flow.chosen_by_data(weight, [1])
    rows = flow.relaid(weight, [*[None] * lead, 1], call.shape)
    return flow.value(call.shape, rows.parts, rows.fixed.union(range(lead)))


@register_rule("index", "index_select")
@carrier
def index(flow: Flow, call: Call) -> Value:
    """Index one or several axes; known index maps along one axis take units along."""
    indices = _indices(call)
    if len(indices) == 1:
        entry, (axis, *_) = indices[0]
        known = _positions_in(entry, call.value.shape[axis])
        if known is not None:
            return flow.cut(call.value, axis, known)
    value = flow.noted(call.value)
    replaced = _replaced_axes(indices)
    unindexed = [axis for axis in range(value.dim) if axis not in replaced]
    # the old axis along which each new axis selects, None if data choose positions
    selected: list[int | None] = [None] * (len(call.shape) - len(unindexed))
    outer = _outer_indices(indices, len(selected))
    for axis, (place, known) in outer.items():
        value = flow.take(value, axis, known)
        selected[place] = axis
    for entry, (axis, *_) in indices:
        if axis not in outer:
            flow.pin(entry)
    value = flow.restrict(value, {*unindexed, *outer})
    first = replaced[0] if _adjacent(replaced) else 0
    order = [*unindexed[:first], *selected, *unindexed[first:]]
    result = flow.relaid(value, order, call.shape)
    by_data = {place for place, axis in enumerate(order) if axis is None}
    return flow.value(call.shape, result.parts, result.fixed | by_data)


def _replaced_axes(indices: Sequence[tuple[Value, list[int]]]) -> list[int]:
    return [axis for _, replaced in indices for axis in replaced]


def _adjacent(axes: list[int]) -> bool:
    return axes == [*range(axes[0], axes[-1] + 1)]


def _positions_in(entry: Value, length: int) -> Array | None:
    """Return the positions that an index along one axis takes, if they are known."""
    if entry.constant is None or entry.dim != 1:
        return None
    if entry.mask:
        return np.flatnonzero(entry.constant.numpy())
    return _numbers(entry.constant) % length


def _numbers(index: torch.Tensor) -> Array:
    return index.reshape(-1).numpy().astype(np.int64)


def _outer_indices(
    indices: Sequence[tuple[Value, list[int]]], new: int
) -> dict[int, tuple[int, Array]]:
    """Return the axes that are indexed independently of all others: old axis -> its
    place among the new axes, and the positions that are taken.
    """
    outer = {}
    for entry, replaced in indices:
        long = [axis for axis, n in enumerate(entry.shape) if n > 1]
        if entry.constant is None or entry.mask or len(long) != 1:
            continue
        place = long[0] + new - entry.dim
        varying = []  # the indices that vary along the same axis
        for index_entry, _ in indices:
            if index_entry.mask or _length(index_entry, place - new) > 1:
                varying.append(index_entry)
        if len(varying) == 1:
            positions = _numbers(entry.constant)
            outer[replaced[0]] = place, positions
    return outer


def _length(value: Value, axis: int) -> int:
    """Return the length along a negative axis, one if there is none."""
    return value.shape[axis] if -axis <= value.dim else 1


def _indices(call: Call) -> list[tuple[Value, list[int]]]:
    """Return each index with the axes that it replaces: a mask replaces as many as it
    has.
    """
    if "dim" in call.arguments:
        return [(call["index"], [call.axis])]
    indices = []
    axis = 0
    for entry in call["indices"]:
        width = entry.dim if entry is not None and entry.mask else 1
        if entry is not None:
            indices.append((entry, [*range(axis, axis + width)]))
        axis += width
    return indices


@register_rule("gather")
def gather(flow: Flow, call: Call) -> Value:
    """Gather along one axis: units survive if all their entries come from the same
    positions.
    """
    positions = call["index"]
    known = None
    if positions.constant is not None and positions.dim:
        first = positions.constant.movedim(call.axis, 0)
        lines = first.reshape(len(first), -1)
        if lines.numel() and (lines == lines[:, :1]).all():
            known = _numbers(lines[:, 0])
    if known is None:
        value = flow.collapse(call.value, [call.axis])
    else:
        value = flow.take(call.value, call.axis, known)
    for axis in set(range(value.dim)) - {call.axis}:
        value = flow.take(value, axis, np.arange(positions.shape[axis]))
    return flow.elementwise([value, positions]) if known is None else value


@register_rule("take")
def take(flow: Flow, call: Call) -> Value:
    """Select entries of a flat tensor."""
    positions = call["index"]
    flat = flow.reshape(call.value, [-1])
    if positions.constant is None:
        return flow.give_up([flat, positions], call.shape, "positions are data")
    known = _numbers(positions.constant)
    return flow.reshape(flow.take(flat, 0, known % flat.shape[0]), call.shape)


@register_rule("scatter", "scatter_add", "scatter_reduce")
def scatter(flow: Flow, call: Call) -> Value:
    """Scatter along one axis: each entry goes to a position of its own."""
    value = call["self"]
    positions = call["index"]
    axis = call.axis
    source = call.get("src", call.get("value"))
    source = source if isinstance(source, Value) else Value(())
    flow.pin(positions)
    lines = _shape_without(positions, axis)
    complete = _shape_without(value, axis) == lines
    if source.dim:
        complete = complete and _shape_without(source, axis) == lines
    if not complete:
        why = "only some of the units are written"
        return flow.give_up([value, source], call.shape, why)
    operands = [flow.collapse(x, [axis]) for x in (value, source, positions)]
    return _written(flow, call, operands, [axis])


def _shape_without(value: Value, axis: int) -> Shape:
    return (*value.shape[:axis], *value.shape[axis + 1 :])


@register_rule(
    "index_put",
    "_index_put_impl",
    "_unsafe_index_put",
    "index_add",
    "index_reduce",
    "index_copy",
)
def index_put(flow: Flow, call: Call) -> Value:
    """Assign or add: ``self[indices] = values``, ``+=``. The indexed axes must be
    adjacent.
    """
    value = call["self"]
    source = call.get("values", call.get("source"))
    indices = _indices(call)
    for entry, _ in indices:
        flow.pin(entry)
    axes = _replaced_axes(indices)
    if not _adjacent(axes):
        why = "indices have gaps between them"
        return flow.give_up([value, source], call.shape, why)
    indexed_dims = max(1 if entry.mask else entry.dim for entry, _ in indices)
    before = range(axes[0])
    last = axes[0] + indexed_dims
    after = range(last, last + value.dim - axes[-1] - 1)
    missing = last + len(after) - source.dim
    source = flow.relaid(source, [*[None] * missing, *range(source.dim)])
    source = flow.restrict(source, [*before, *after])
    source = flow.relaid(source, [*before, *[None] * len(axes), *after])
    return _written(flow, call, [flow.collapse(value, axes), source], axes)


def _written(
    flow: Flow, call: Call, operands: Sequence[Value], axes: Collection[int]
) -> Value:
    """Tie the units of old and new entries; along the indexed axes all entries
    differ.
    """
    tied = flow.elementwise(operands)
    return flow.value(call.shape, tied.parts, tied.fixed.union(axes))
