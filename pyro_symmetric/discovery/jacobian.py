"""The Jacobian of a network's outputs in its weights, in float64, at random weights and for random inputs.

What is counted at one set of weights may be an accident of it (a unit that no input switches on, a layer that starts
with zeros). So weights are drawn around the network's own, and inputs like the given ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pyro_symmetric._process import without_fast_attention, without_warnings
from pyro_symmetric.discovery.export import try_out
from pyro_symmetric.discovery.symmetry import Symmetry, copied, in_precision, refreshed
from pyro_symmetric.weights import Weights

ROWS = 256  # rows of the Jacobian that are computed at once
PICKED = 16  # of the outputs for one draw of the inputs: other draws tell more than other outputs
SIZES = torch.tensor([1.0, 3.0, 10.0, 0.1], dtype=torch.float64, device="cpu")  # of random inputs, in turn
CENTRED = 0.9  # the part of their mean that centred rows lose; without any, offsets that all units share are unread
SPREAD = 0.3  # of weights around the network's own, relative to their standard deviation


class Jacobian:
    """Rows of the Jacobian in flat weights, which concatenate sites.

    :param sites: the sites that count as weights; all others keep the network's own values.
    """

    def __init__(
        self, symmetry: Symmetry, net: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], sites: Sequence[str]
    ):
        self.net = copied(net, torch.float64)
        self.logits = symmetry.logits
        own = symmetry.weights_of(self.net)
        if not_real := [site for site, value in own.items() if value.is_complex()]:
            raise ValueError(
                f"net has complex weights {not_real}; their directions aren't counted, only those of real ones"
            )
        self.shapes = {site: own[site].shape for site in sites}
        self.buffers = set(dict(self.net.named_buffers())) & set(sites)
        self.own = {site: own[site].detach().double().cpu() for site in own}
        self.device = next(iter(own.values())).device
        leaves, self._spec = pytree.tree_flatten((tuple(inputs), dict(kwargs)))
        self._leaves = [x.to(in_precision(x.dtype, torch.float64)) if _is_number(x) else x for x in leaves]
        self._ways: list[Callable[..., Tensor]] = [_all_at_once, _one_by_one, _row_by_row]

    @property
    def size(self) -> int:
        """The number of weights."""
        return sum(shape.numel() for shape in self.shapes.values())

    def flat(self, weights: Mapping[str, Tensor]) -> Tensor:
        """``batch + (size,)`` from values by site; a site that is missing is zero."""
        batch = next((v.shape[: v.dim() - len(self.shapes[s])] for s, v in weights.items() if s in self.shapes), ())
        pieces = [
            weights[site].reshape(*batch, -1) if site in weights else self.own[site].new_zeros(*batch, shape.numel())
            for site, shape in self.shapes.items()
        ]
        return torch.cat(pieces, -1)

    def draw(self, generator: torch.Generator, centred: bool = False) -> Weights:
        """Random weights around the network's own: values of all sites.

        :param centred: whether rows of matrices lose most of their mean. Units that read positive numbers, such as
            those of ReLU, then are on for some inputs and off for others.
        """
        drawn = {
            site: self._near(value, site in self.buffers, generator) if site in self.shapes else value
            for site, value in self.own.items()
        }
        if not centred:
            return drawn
        matrices = {site for site in self.shapes if drawn[site].dim() > 1 and site not in self.buffers}
        means = {site: drawn[site].mean([*range(1, drawn[site].dim())], keepdim=True) for site in matrices}
        return {site: value - CENTRED * means[site] if site in means else value for site, value in drawn.items()}

    @staticmethod
    def _near(value: Tensor, positive: bool, generator: torch.Generator) -> Tensor:
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype, device="cpu")
        if positive and bool((value >= 0).all()) and bool(value.any()):  # a variance
            return value * (SPREAD * noise).exp()
        spread = float(value.std(correction=0)) if value.numel() else 0.0
        least = SPREAD if value.dim() < 2 else max(value.shape) ** -0.5
        if spread < 0.1 * least:  # zeros, ones, and what is so small that no nonlinearity shows
            return value + least * noise
        return value + SPREAD * spread * noise

    def rows(self, weights: Mapping[str, Tensor], number: int, generator: torch.Generator) -> Tensor:
        """At least so many rows, each of length one: float64 ``(rows, size)``. Rows of zeros are left out."""
        flat = self.flat(weights).to(self.device)
        found: list[Tensor] = []
        empty = 0
        while sum(map(len, found)) < number and empty < 10:
            rows = self._block(flat, generator)
            norms = rows.norm(dim=1)
            kept = (norms > 0) & norms.isfinite()
            found.append(rows[kept] / norms[kept, None])
            empty = 0 if bool(kept.any()) else empty + 1
        if not any(map(len, found)):
            raise ValueError("no output of the network depends on these weights; there is no Jacobian to look at")
        return torch.cat(found)

    # small steps ----------------------------------------------------------------------------------------------------

    def _block(self, flat: Tensor, generator: torch.Generator) -> Tensor:
        leaves, outputs = self._leaves, self._number_of_outputs
        picked = min(outputs, PICKED)
        draws = ROWS // max(1, picked)
        drawn = [_like(leaf, draws, generator) for leaf in leaves]
        pick = torch.rand(draws, outputs, generator=generator, device="cpu").argsort(-1)[:, :picked].to(self.device)
        where = [0, *(None if new is None else 0 for new in drawn)]
        given = [pick, *(own if new is None else new for own, new in zip(leaves, drawn, strict=True))]

        def function(flat: Tensor, pick: Tensor, *leaves: Any) -> Tensor:
            return self._outputs(flat, leaves)[pick]

        while True:
            try:
                with without_fast_attention(), without_warnings(), sdpa_kernel(SDPBackend.MATH), _Differentiable():
                    rows = self._ways[0](function, flat, given, where, draws).detach()
                    if len(self._ways) > 1:  # the last way is what the others are compared with
                        _require_right(rows, function, flat, _chosen(given, where, 0))
                    return rows
            except (RuntimeError, NotImplementedError, ValueError, TypeError):
                if len(self._ways) == 1:  # the network doesn't run
                    raise
                self._ways.pop(0)

    @functools.cached_property
    def _number_of_outputs(self) -> int:
        """:raises ValueError: if the network doesn't take the inputs, or returns nothing."""
        try:
            with torch.no_grad(), without_fast_attention(), without_warnings():
                number = self._outputs(self.flat(self.own).to(self.device), self._leaves).numel()
        except Exception:
            args, kwargs = pytree.tree_unflatten(list(self._leaves), self._spec)
            try_out(self.net, args, kwargs)
            raise
        if not number:
            raise ValueError("for these inputs the network returns no numbers; there is no Jacobian to look at")
        return number

    def _outputs(self, flat: Tensor, leaves: Sequence[Any]) -> Tensor:
        args, kwargs = pytree.tree_unflatten(list(leaves), self._spec)
        pieces = flat.split([shape.numel() for shape in self.shapes.values()])
        weights = {s: piece.reshape(shape) for (s, shape), piece in zip(self.shapes.items(), pieces, strict=True)}
        outputs = [
            t
            for t in pytree.tree_leaves(functional_call(refreshed(self.net, train=False), weights, args, kwargs))
            if _is_number(t)
        ]
        if self.logits:
            outputs = [output.log_softmax(-1) if output.dim() else output for output in outputs]
        real = [torch.view_as_real(output) if output.is_complex() else output for output in outputs]
        return torch.cat([output.reshape(-1).double() for output in real])


class _Differentiable(TorchFunctionMode):
    """Batch normalisation by running statistics as a formula, whose derivatives in these PyTorch's own lacks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.batch_norm:
            return _normalised(func, *args, **kwargs)
        return func(*args, **kwargs)


def _normalised(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    shape = (-1, *(1 for _ in input.shape[2:]))
    outputs = (input - running_mean.reshape(shape)) / (running_var + eps).sqrt().reshape(shape)
    outputs = outputs if weight is None else outputs * weight.reshape(shape)
    return outputs if bias is None else outputs + bias.reshape(shape)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _like(value: Any, draws: int, generator: torch.Generator) -> Tensor | None:
    """Random inputs like one, ``(draws,) + shape``: normal ones of several sizes, or integers from its
    smallest to its largest.

    None for what is no tensor, and for masks and switches: they are what they are.
    """
    if not isinstance(value, Tensor) or value.dtype == torch.bool or not value.numel():
        return None
    shape = (draws, *value.shape)
    if _is_number(value):
        dtype = torch.complex128 if value.is_complex() else torch.float64
        noise = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
        sizes = SIZES[torch.arange(draws, device="cpu") % len(SIZES)]
        return (noise * sizes.reshape(-1, *(1 for _ in value.shape))).to(value.device)
    occurring = value.unique().cpu()
    if set(occurring.tolist()) <= {0, 1}:
        return None
    low, high = int(occurring[0]), int(occurring[-1])
    return torch.randint(low, high + 1, shape, generator=generator, dtype=value.dtype, device="cpu").to(value.device)


def _all_at_once(function: Any, flat: Tensor, given: Sequence[Any], where: Sequence[int | None], draws: int) -> Tensor:
    jacobians = vmap(jacrev(function), in_dims=(None, *where))(flat, *given)
    return jacobians.reshape(-1, len(flat))


def _one_by_one(function: Any, flat: Tensor, given: Sequence[Any], where: Sequence[int | None], draws: int) -> Tensor:
    """For operators that can't be mapped over inputs."""
    return torch.cat([jacrev(function)(flat, *_chosen(given, where, draw)) for draw in range(draws)])


def _row_by_row(function: Any, flat: Tensor, given: Sequence[Any], where: Sequence[int | None], draws: int) -> Tensor:
    """For operators that can't be mapped over at all."""
    found = []
    for draw in range(draws):
        chosen = _chosen(given, where, draw)
        found.append(torch.autograd.functional.jacobian(lambda w, own=chosen: function(w, *own), flat))
    return torch.cat(found)


def _require_right(rows: Tensor, function: Any, flat: Tensor, given: Sequence[Any]) -> None:
    """Compare the rows of the first draw with a gradient that isn't mapped: some operators' mapped ones are wrong.

    (Those of ``prelu``, in PyTorch 2.13.)

    :raises RuntimeError: if they differ.
    """
    weights = flat.detach().clone().requires_grad_()
    outputs = function(weights, *given)
    mix = torch.linspace(1.0, 2.0, len(outputs), dtype=outputs.dtype, device=outputs.device)
    (expected,) = torch.autograd.grad(outputs @ mix, weights, allow_unused=True, materialize_grads=True)
    found = mix @ rows[: len(outputs)]
    if bool((found - expected).norm() > 1e-6 * expected.norm()):
        raise RuntimeError("the mapped derivatives of an operator are wrong")


def _chosen(given: Sequence[Any], where: Sequence[int | None], draw: int) -> list[Any]:
    return [value if place is None else value[draw] for value, place in zip(given, where, strict=True)]
