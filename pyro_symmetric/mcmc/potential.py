r"""The potential energy of any Pyro model with continuous sites, for many chains at once.

.. math:: U(z) = -\log p(w(z), \text{data}) - \log\left|\det \frac{\partial w}{\partial z}\right|

over the unconstrained vectors of a :class:`~pyro_symmetric.mcmc.layout.Layout`. Pyro's own potential can't be mapped
over chains (its enumeration handler reads ``tensor.data``), so this one traces the conditioned model itself under
:func:`torch.func.vmap`. A :class:`~pyro_symmetric.models.BayesianModel` skips the trace and is asked for its batched
``log_joint``.

Chains are independent, so one backward pass through the sum of their energies gives every chain's gradient.
Feed-forward networks do without autograd (:mod:`~pyro_symmetric.mcmc.network`), and any model can be compiled
(:mod:`~pyro_symmetric.mcmc.compiled`). :attr:`Potential.route` says which way was taken, ``chain_chunk`` in what
portions. Both are settled when the potential is made, by rules and not by timing, so that every run rounds alike.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.calls import described, described_call, model_arguments
from pyro_symmetric.generators import kept, turn
from pyro_symmetric.largest import LargestTensor
from pyro_symmetric.mcmc.compiled import Compiled, CompileFailed
from pyro_symmetric.mcmc.layout import Layout
from pyro_symmetric.mcmc.network import NetworkEnergy, Probe, network_energy
from pyro_symmetric.mcmc.starts import initial_points
from pyro_symmetric.mcmc.targets import NetworkTarget, Rows, Target, TracedTarget
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.placement import placed, promoted
from pyro_symmetric.weights import Weights

CHAIN_DTYPES = (torch.float32, torch.float64)
CACHE_BYTES = 2**22  # that the largest intermediate result of a chunk of chains should fit into, on a CPU
COMPILED_CHAINS = 64  # at most, by default: a program pads to its number of chains


def log_joint(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[Weights], Tensor]:
    """The log-joint density of any Pyro model as a function of batches of weights.

    >>> density = log_joint(model, data)
    >>> density({"locs": torch.randn(5, 3), "scales": torch.rand(5, 3)}).shape
    torch.Size([5])

    :param model: a Pyro model with continuous latent sites, or a ``BayesianModel``; ``args`` and ``kwargs`` are what it
        is called with.
    :return: constrained weights of batch shape ``(S,)`` -> ``(S,)``.
    """
    with kept():  # a model is run once, from the prior, to see its sites
        target = Potential(model, args, kwargs).target

    def density(weights: Weights) -> Tensor:
        arguments.weights("weights", weights)
        with turn(), pyro.validation_enabled(False):  # whose checks branch on values, which vmap forbids
            return target.log_joint(weights, None)

    return density


class Potential:
    """Potential energy and its gradient, chains first.

    >>> model = BayesianModel(nn.Linear(3, 2))
    >>> potential = Potential(model, (torch.randn(10, 3), torch.randint(2, (10,))))
    >>> z = potential.initial(16)
    >>> energy, gradient = potential.value_and_grad(z)
    >>> energy.shape, gradient.shape
    (torch.Size([16]), torch.Size([16, 8]))

    :param model: a Pyro model. Latent sites must be continuous; a module with batch normalisation must be in eval mode.
    :param args: the model's positional arguments, data included.
    :param kwargs: the model's keyword arguments.
    :param device: where to compute; by default where the model's sites are. A module is copied there, never moved.
    :param dtype: of the chains; by default that of the model's sites. Floating-point arguments are converted.
    :param chain_chunk: how many chains to evaluate at once. ``None``: on a CPU as many as keep the largest intermediate
        result in the cache, on other devices all. Route ``"native"`` goes chain by chain and doesn't need it.
    :param compile: ``None``: a ``BayesianModel`` of a feed-forward network runs code that the machine's C++ compiler
        builds once, in a few seconds, and that is kept; everything else runs as it is. ``True``: any other model goes
        through ``torch.compile``, which takes tens of seconds in every process, so it pays in long runs only. Where
        that fails, a warning says so and the potential runs uncompiled. ``False``: nothing is compiled.
    :param batch_size: rows of each mini-batch, for stochastic-gradient samplers; see :meth:`value_and_grad`. Every
        tensor argument as long as the first one is data. ``None``: all data, or what the model's plates with
        ``subsample_size`` draw.
    :param subsampled: whether mini-batches are allowed; otherwise a model that subsamples is refused.
    :raises ValueError: naming the site, plate or module that can't be sampled, with advice.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        chain_chunk: int | None = None,
        compile: bool | None = None,
        batch_size: int | None = None,
        subsampled: bool = False,
    ):
        require_model(model)
        args, kwargs = model_arguments(args, kwargs)
        arguments.whole("chain_chunk", chain_chunk, 1, none="all chains at once")
        arguments.dtype("dtype", dtype, CHAIN_DTYPES)
        arguments.device("device", device)
        _refuse_training_batch_norm(model)
        model, args, kwargs = placed(model, args, kwargs, device, dtype)
        self.chain_chunk: int | None = chain_chunk  # as resolved below; None for all chains at once
        self.target: Target = _target(model, args, kwargs, batch_size, device, dtype)
        if not subsampled and self.target.row_counts:
            raise ValueError(
                f"the model subsamples its data ({_sizes(self.target.row_counts)}); this sampler needs all of them at "
                "every step. Pass the whole data (and no subsample_size), or use a stochastic-gradient sampler (SGHMC)"
            )
        self.layout = Layout.of(self.target.sites)
        self.target.check_layout(self.layout)
        like = self.target.prior_weights(1)
        floats = [value for value in like.values() if value.is_floating_point()]
        self.device = torch.device(device) if device is not None else floats[0].device
        self.dtype = dtype or promoted(floats) or torch.get_default_dtype()
        if self.dtype not in CHAIN_DTYPES:
            raise ValueError(f"the model's sites are of {self.dtype}, too coarse for chains; pass dtype=torch.float32")
        self._network: NetworkEnergy | None = None
        self._compiled: Compiled | None = None
        self.route_reason = ""  # why no faster route was taken, in words
        self._choose_route(*self._probe(), compile)

    @property
    def dim(self) -> int:
        """Number of unconstrained coordinates ``D``."""
        return self.layout.dim

    @property
    def row_counts(self) -> dict[str, tuple[int, int]]:
        """What mini-batches draw from: name -> (rows there are, rows in a batch); empty if all data are used."""
        return self.target.row_counts

    @property
    def num_rows(self) -> int:
        """How many observations the likelihood counts, about; 0 without any."""
        return self.target.num_rows

    def __repr__(self) -> str:
        route = f"{self.route!r} ({self.route_reason})" if self.route_reason else repr(self.route)
        return (
            f"Potential({self.target}, dim={self.dim}, device={self.device}, dtype={self.dtype}, route={route}, "
            f"chain_chunk={self.chain_chunk})"
        )

    @property
    def route(self) -> str:
        """How energies are computed: ``"native"`` (compiled code for feed-forward networks), ``"batched"`` (PyTorch's
        batched products), ``"compiled"`` (``torch.compile``) or ``"vmap"``. They round differently. Where a faster one
        was given up, ``route_reason`` says why."""
        if self._network is not None:
            return self._network.engine
        return "compiled" if self._compiled is not None else "vmap"

    # energy ---------------------------------------------------------------------------------------------------------

    def __call__(self, z: Tensor, rows: Rows | None = None) -> Tensor:
        """Energy ``(C,)`` of chains at ``z`` of shape ``(C, D)``; see :meth:`value_and_grad`."""
        with pyro.validation_enabled(False):
            pieces = [self._energies(part, batch) for part, batch in self._chunks(z, rows)]
        return torch.cat(pieces)

    def value_and_grad(self, z: Tensor, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
        """Energy ``(C,)`` and gradient ``(C, D)``.

        :param z: unconstrained vectors of the chains, ``(C, D)``.
        :param rows: mini-batches, for each name in :attr:`row_counts` a LongTensor ``(C, B)``: each chain its own rows.
            The energy is then the unbiased estimate that counts each row ``N / B`` times.
        """
        if self._network is not None and self.route == "native" and self._network.serves(z, rows):
            return self._network.value_and_grad(z, rows)  # which goes chain by chain anyhow
        energies, gradients = [], []
        for part, batch in self._chunks(z, rows):
            energy, gradient = self._by_route(part, batch)
            energies.append(energy)
            gradients.append(gradient)
        if len(energies) == 1:
            return energies[0], gradients[0]
        return torch.cat(energies), torch.cat(gradients)

    def _by_route(self, z: Tensor, rows: Rows | None) -> tuple[Tensor, Tensor]:
        if self._network is not None and self._network.serves(z, rows):
            return self._network.value_and_grad(z, rows)
        if self._compiled is not None and len(z) <= self._compiled.chunk:
            try:
                return self._compiled(z, rows)
            except torch.linalg.LinAlgError:
                pass  # below, chain by chain
            except CompileFailed as error:
                self._compiled, self.route_reason = None, "torch.compile failed"
                warnings.warn(
                    f"compile=True, but torch.compile failed; the potential runs uncompiled ({error})",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return self._value_and_grad(z, rows)

    def _value_and_grad(self, z: Tensor, rows: Rows | None) -> tuple[Tensor, Tensor]:
        try:
            return self._evaluate(z, rows)
        except torch.linalg.LinAlgError:
            # One chain with a singular matrix mustn't stop the others: halve until it is alone, outside of the support.
            if len(z) == 1:
                return torch.full_like(z[:, 0], torch.inf), torch.zeros_like(z)
            parts = [self._value_and_grad(z[s], _cut(rows, s)) for s in _halves(len(z))]
            return torch.cat([energy for energy, _ in parts]), torch.cat([gradient for _, gradient in parts])

    def _energies(self, z: Tensor, rows: Rows | None) -> Tensor:
        try:
            return self._energy(z, rows)
        except torch.linalg.LinAlgError:  # as above
            if len(z) == 1:
                return torch.full_like(z[:, 0], torch.inf)
            return torch.cat([self._energies(z[s], _cut(rows, s)) for s in _halves(len(z))])

    def _evaluate(self, z: Tensor, rows: Rows | None) -> tuple[Tensor, Tensor]:
        with pyro.validation_enabled(False), torch.enable_grad():
            leaf = z.detach().requires_grad_()
            energy = self._energy(leaf, rows)
            return energy.detach(), torch.autograd.grad(energy.sum(), leaf)[0]

    def _energy(self, z: Tensor, rows: Rows | None) -> Tensor:
        weights, log_det = self.layout.constrain_with_log_det(z)
        return -(self.target.log_joint(weights, rows) + log_det)

    def _chunks(self, z: Tensor, rows: Rows | None) -> list[tuple[Tensor, Rows | None]]:
        if self.chain_chunk is None or len(z) <= self.chain_chunk:
            return [(z, rows)]
        starts = range(0, len(z), self.chain_chunk)
        cut = [slice(start, start + self.chain_chunk) for start in starts]
        return [(z[s], _cut(rows, s)) for s in cut]

    def _choose_route(self, probe: Probe, largest: int, compile: bool | None) -> None:
        """:param largest: size of the largest intermediate result, in bytes for each chain."""
        if isinstance(self.target, NetworkTarget):
            self._network, self.route_reason = network_energy(self.target, self.layout, probe, compile is not False)
        compiled = compile is True and self.route != "native"
        if self.chain_chunk is None and (self.device.type == "cpu" or compiled):
            fits = 2 ** int(math.log2(max(1, CACHE_BYTES // max(1, largest))))
            self.chain_chunk = min(fits, COMPILED_CHAINS) if compiled else fits
        if compiled:
            self._network, self._compiled = None, Compiled(self._evaluate, self.chain_chunk or COMPILED_CHAINS)

    def _probe(self) -> tuple[Probe, int]:
        """Evaluate once, so that a model that can't be mapped over chains is reported here and in words."""
        z = self.layout.unconstrain(self._cast(self.target.prior_weights(2)))
        rows = {
            name: torch.arange(size, device=self.device).expand(2, size) for name, (_, size) in self.row_counts.items()
        }
        largest = LargestTensor()
        try:
            with largest:
                energy, gradient = self._value_and_grad(z, rows or None)
        except NotImplementedError as error:
            raise ValueError(f"a site's transform lacks a log-determinant, so it can't be sampled: {error}") from error
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise ValueError(
                "the model can't be evaluated for many chains at once (torch.func.vmap). Usual causes: dropout or "
                "batch normalisation in train mode (call .eval()), random numbers drawn outside of pyro.sample, "
                f"Python control flow or .item() on a sampled value, in-place changes. PyTorch says: {error}"
            ) from error
        return Probe(z, rows or None, energy, gradient), largest.bytes // len(z)

    # places ---------------------------------------------------------------------------------------------------------

    def constrain(self, z: Tensor) -> Weights:
        """Unconstrained vectors ``batch_shape + (D,)`` -> weights."""
        return self.layout.constrain(z)

    def unconstrain(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Weights -> unconstrained vectors ``batch_shape + (D,)``."""
        return self.layout.unconstrain(self._cast(weights))

    def initial(
        self,
        num_chains: int,
        init: str | Mapping[str, Tensor] | None = None,
        radius: float = 2.0,
        max_tries: int = 100,
    ) -> Tensor:
        """Starting points ``(C, D)`` with finite energy and gradient; chains where they aren't are drawn anew.

        :param init: ``"prior"``; ``"uniform"`` in ``(-radius, radius)`` on the unconstrained scale, as Pyro's MCMC;
            or weights (draws of a guide, of another posterior) of batch shape ``(num_chains,)`` or ``()``. By default
            ``"prior"`` for a ``BayesianModel``, whose energy far out is huge, and ``"uniform"`` for any other model.
        """
        return initial_points(self, num_chains, init, radius, max_tries)

    def _cast(self, weights: Mapping[str, Tensor]) -> Weights:
        return {site: value.detach().to(self.device, self.dtype) for site, value in weights.items()}


# small steps --------------------------------------------------------------------------------------------------------


def _halves(count: int) -> list[slice]:
    return [slice(0, count // 2), slice(count // 2, None)]


def _cut(rows: Rows | None, chains: slice) -> Rows | None:
    return None if rows is None else {name: index[chains] for name, index in rows.items()}


def _target(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_size: int | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Target:
    if isinstance(model, BayesianModel):
        data = {**dict(zip(("x", "y"), args, strict=False)), **kwargs}
        if set(data) != {"x", "y"} or data["y"] is None or len(args) > 2:
            raise ValueError(
                "a BayesianModel is sampled given x and y, as in sample(kernel, args=(x, y)); found "
                f"{described_call(args, kwargs)}"
            )
        return NetworkTarget(model, data["x"], data["y"], batch_size)
    return TracedTarget(model, args, kwargs, batch_size, device, dtype)


def require_model(model: Any) -> None:
    """:raises TypeError: if it can't be one."""
    if isinstance(model, type):
        raise TypeError(f"model is the class {model.__name__}; pass an instance of it")
    if isinstance(model, AutoGuide):
        raise TypeError(f"model is a guide ({type(model).__name__}); pass the model itself, and initial=guide")
    if not callable(model):
        raise TypeError(f"model is {described(model)}; it must be a Pyro model, that is, callable")


def _refuse_training_batch_norm(model: Any) -> None:
    if not isinstance(model, nn.Module):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"the module {name or type(module).__name__!r} is batch normalisation in train mode: the likelihood of "
                "one row would depend on the other rows. Call .eval() on the model, so that it uses its running "
                "statistics"
            )


def _sizes(row_counts: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name!r}: {size} of {total} rows" for name, (total, size) in row_counts.items())
