"""Any Pyro model with its arguments, run with its sites given, for many draws of them at once by vmap.

Both samplers and predictions rest on it. A model that can't be mapped, such as one that branches on a sampled value, is
run for one draw after another. Parts of Pyro that :func:`torch.func.vmap` refuses have stand-ins, which choose or join
in place of writing into a tensor; they compute the same.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import hmm
from pyro.ops import gaussian, special, tensor_utils
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.utils import broadcast_all
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import running_pyro
from pyro_symmetric.enumeration import Enumeration
from pyro_symmetric.placement import promoted


class Traced:
    """A Pyro model with its arguments.

    :ivar enumeration: its discrete sites, if they are summed out.
    :ivar one_by_one: why draws are evaluated one after another; empty if they are all at once.
    """

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.enumeration: Enumeration | None = None
        self.one_by_one = ""

    def run(self, given: Mapping[str, Tensor], args: Any = None, kwargs: Any = None) -> poutine.Trace:
        """Run with these values of sites, and with all values of discrete sites that are summed out."""
        args, kwargs = (self.args, self.kwargs) if args is None else (args, kwargs)
        model = _Unchecked()(self.model)
        if self.enumeration is not None:
            return self.enumeration.run(model, given, args, kwargs)
        return poutine.trace(poutine.condition(model, data=dict(given))).get_trace(*args, **kwargs)

    def mapped(self, function: Callable[..., Any], *batches: Mapping[str, Tensor], randomness: str = "error") -> Any:
        """Results of a function of each draw, stacked."""
        with running_pyro(promoted(tree_leaves(batches))):
            if not self.one_by_one:
                with _stand_ins():
                    return torch.func.vmap(function, randomness=randomness)(*batches)
            count = len(tree_leaves(batches)[0])
            results = [function(*({n: value[s] for n, value in b.items()} for b in batches)) for s in range(count)]
            return tree_map(lambda *leaves: torch.stack(leaves), *results)

    def give_up_map(self, reason: object) -> None:
        """Evaluate draws one after another from now on, and say so."""
        said = (str(reason).strip() or repr(reason)).splitlines()[0]
        said = said.partition(" We don't support that yet")[0][:300].rstrip(".")  # PyTorch asks for a report of it
        self.one_by_one = f"the model can't be mapped over draws (torch.func.vmap): {said}"
        warnings.warn(
            f"draws are evaluated one after another, which takes longer: {self.one_by_one}. Usual causes: Python "
            "control flow or .item() on a sampled value, in-place changes, a distribution that PyTorch can't map",
            RuntimeWarning,
            stacklevel=5,
        )


class _Unchecked(Messenger):
    """Without the checks of distributions that were made with them, such as a ``PyroSample``'s.

    A chain that left all numbers behind mustn't stop the others, and no trace can hold a check.
    """

    def _pyro_sample(self, msg: Any) -> None:
        msg["fn"] = unchecked(msg["fn"])


def unchecked(fn: Any) -> Any:
    """A distribution that doesn't check values; a copy if it, or one that it is made of, did."""
    if not isinstance(fn, Distribution):
        return fn
    parts = {name: unchecked(part) for name, part in vars(fn).items() if isinstance(part, Distribution)}
    if not fn._validate_args and all(vars(fn)[name] is part for name, part in parts.items()):
        return fn
    own = copy.copy(fn)
    vars(own).update(parts, _validate_args=False)
    return own


# stand-ins ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Let the parts below stand in for the originals. Enter it with the lock ``LOCK`` held."""
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in _PARTS]
    for owner, name, part in _PARTS:
        setattr(owner, name, part)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


class _SafeLog(torch.autograd.Function):
    """The logarithm, whose slope at 0 is finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / x.clamp(min=torch.finfo(x.dtype).eps)


def _safe_cholesky(x: Tensor) -> Tensor:
    """With a jitter on the diagonal that no gradient goes through."""
    relative = tensor_utils.CHOLESKY_RELATIVE_JITTER
    if x.size(-1) == 1:
        return (x.clamp(min=torch.finfo(x.dtype).tiny) if relative else x).sqrt()
    jitter = relative * torch.finfo(x.dtype).eps * x.detach().abs().max(-1).values
    return torch.linalg.cholesky(x + jitter.diag_embed())


def _ordered_logistic(self: Any, predictor: Tensor, cutpoints: Tensor, validate_args: bool | None = None) -> None:
    below = torch.sigmoid(cutpoints - predictor.unsqueeze(-1))
    self.predictor, self.cutpoints = predictor.expand(below.shape[:-1]), cutpoints.expand(below.shape)
    steps = torch.cat([below[..., :1], below[..., 1:] - below[..., :-1], 1 - below[..., -1:]], -1)
    super(dist.OrderedLogistic, self).__init__(steps, validate_args=validate_args)


def _multinomial_log_prob(self: Any, value: Tensor) -> Tensor:
    if self._validate_args:
        self._validate_sample(value)
    logits, value = broadcast_all(self.logits, value)
    logits = torch.where((value == 0) & (logits == -torch.inf), 0.0, logits)
    ways = torch.lgamma(value.sum(-1) + 1) - torch.lgamma(value + 1).sum(-1)
    return ways + (logits * value).sum(-1)


_PARTS: list[tuple[Any, str, Any]] = [
    (special, "_SafeLog", _SafeLog),
    (gaussian, "safe_cholesky", _safe_cholesky),
    (hmm, "safe_cholesky", _safe_cholesky),
    (dist.OrderedLogistic, "__init__", _ordered_logistic),
    (torch.distributions.Multinomial, "log_prob", _multinomial_log_prob),
]
