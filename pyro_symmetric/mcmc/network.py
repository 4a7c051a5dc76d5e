r"""Energy and gradient of a :class:`~pyro_symmetric.models.BayesianModel` of a feed-forward network, without autograd.

.. math:: U(z) = \beta \sum_i \ell_i(w) - \log p(w) + \text{const}, \qquad \beta = \frac{N}{B\,T}\,\tau

with :math:`\ell` the cross-entropy, :math:`\tau = 1`, or half the squared error, :math:`\tau` the noise's precision. An
:class:`~pyro_symmetric.mcmc.feedforward.Engine` gives the loss and its gradient; Gaussian priors on the network's
parameters are added in closed form, and whatever else is latent or not Gaussian by autograd.

Nothing here is taken on trust: :func:`network_energy` compares the result with the model's own density at draws from
the prior, value and gradient, and gives way where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyro
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from pyro_symmetric.mcmc.batched import BatchedEngine
from pyro_symmetric.mcmc.compiler import Unavailable
from pyro_symmetric.mcmc.feedforward import Data, Engine, NotFeedForward, Problem, read_layers
from pyro_symmetric.mcmc.layout import Layout, is_identity
from pyro_symmetric.mcmc.native import NativeEngine
from pyro_symmetric.mcmc.targets import ROWS, NetworkTarget, Rows
from pyro_symmetric.models import CategoricalLikelihood, GaussianLikelihood

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
Evaluation = tuple[Tensor, Tensor]


class NetworkEnergy:
    """Value and gradient by an engine, which is made of the problem.

    :raises NotFeedForward: saying what about the model doesn't fit.
    :raises Unavailable: if the engine doesn't serve.
    """

    def __init__(self, target: NetworkTarget, layout: Layout, engine: Callable[[Problem], Engine]):
        model, likelihood = target.model, target.model.likelihood
        layers = read_layers(model.net)
        data = _data(target, layers[-1].outputs)
        parameters = {name: parameter.shape for name, parameter in model.net.named_parameters()}
        if list(layout.site_shapes)[: len(parameters)] != list(parameters):
            raise NotFeedForward("its sites come in another order than the network's parameters")
        if data.x.shape[1] != layers[0].inputs:
            raise NotFeedForward(f"its first layer takes {layers[0].inputs} inputs, the data have {data.x.shape[1]}")
        offsets, dim = {}, 0
        for name, shape in parameters.items():
            offsets[name], dim = dim, dim + shape.numel()
        batch_size = target.row_counts[ROWS][1] if target.row_counts else None
        self._like = data.x.new_empty(0)
        self._engine = engine(Problem(layers, offsets, dim, data, batch_size))
        self._names, self._dim, self._batch_size = list(parameters), dim, batch_size
        count = 0 if data.categorical else data.y.numel()  # observations with a normal density
        self._count = count / likelihood.temperature
        self._learnt = isinstance(likelihood, GaussianLikelihood) and likelihood.scale is None
        scale = likelihood.scale if isinstance(likelihood, GaussianLikelihood) else None
        self._log_noise = math.log(scale) if scale is not None else 0.0
        self._share = (len(data.x) / batch_size if batch_size else 1.0) / likelihood.temperature
        self._sites, self._layout = target.sites, layout
        self._prior = _GaussianPriors.of({name: target.sites[name] for name in parameters}, layout)
        self._others = {name: fn for name, fn in target.sites.items() if name not in parameters}
        self._other_layout = Layout.of(self._others)

    @property
    def engine(self) -> str:
        """Its engine's name."""
        return self._engine.name

    @property
    def dtype(self) -> torch.dtype:
        """Of the network and its data."""
        return self._like.dtype

    def serves(self, z: Tensor, rows: Rows | None) -> bool:
        """Whether these are the dtype, device and size of mini-batches that it was made for."""
        index = None if rows is None else rows[ROWS]
        return (
            (z.dtype, z.device) == (self._like.dtype, self._like.device)
            and (None if index is None else index.shape[-1]) == self._batch_size
            and len(z) > 0
        )

    def value_and_grad(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """Energy ``(C,)`` and gradient ``(C, D)``; see :meth:`Potential.value_and_grad`."""
        index = None if rows is None else rows[ROWS]
        w = z.detach()[:, : self._dim]
        if self._prior is not None and not self._others:
            scale = math.exp(-2 * self._log_noise) * self._share
            loss, gradient = self._engine.loss_and_gradient(w, w.new_full((len(w),), scale), index)
            energy = loss.mul_(scale).add_(self._count * (self._log_noise + HALF_LOG_2PI))
            return self._prior.add(w, energy, gradient)
        straight = self._prior is not None
        # Without the checks of validation: a chain that left all numbers behind gets an energy that isn't one, either.
        with pyro.validation_enabled(False), torch.enable_grad():
            leaf = z.detach()[:, self._dim :] if straight else z.detach()
            leaf = leaf.requires_grad_()
            weights, log_det = (self._other_layout if straight else self._layout).constrain_with_log_det(leaf)
            rest = -log_det
            for name, value in weights.items():
                rest = rest - self._sites[name].log_prob(value).reshape(len(z), -1).sum(-1)
            log_noise = weights["noise_scale"].log() if self._learnt else z.new_tensor(self._log_noise)
            if self._prior is None:
                w = torch.cat([weights[name].reshape(len(z), -1) for name in self._names], 1)
            energy, gradient = self._likelihood(w, log_noise, index)
            energy = energy + rest
            outputs, pulls = [energy, w][: 1 if straight else 2], [torch.ones_like(energy), gradient]
            (slope,) = torch.autograd.grad(outputs, leaf, pulls[: len(outputs)])
        if self._prior is None:
            return energy.detach(), slope
        energy, gradient = self._prior.add(w, energy.detach(), gradient)
        return energy, torch.cat([gradient, slope], 1)

    def _likelihood(self, w: Tensor, log_noise: Tensor, index: Tensor | None) -> Evaluation:
        """The data's part of the energy, differentiable in ``log_noise``, and its gradient in the weights ``w``."""
        scale = (-2 * log_noise).exp() * self._share
        loss, gradient = self._engine.loss_and_gradient(w.detach(), scale.detach().expand(len(w)), index)
        return loss * scale + self._count * (log_noise + HALF_LOG_2PI), gradient


@dataclass(frozen=True, eq=False)
class _GaussianPriors:
    """Independent normal distributions of flat weights; ``loc`` is ``None`` where all are 0."""

    loc: Tensor | None
    precision: Tensor
    constant: float

    @classmethod
    def of(cls, priors: Mapping[str, Distribution], layout: Layout) -> _GaussianPriors | None:
        """``None`` if one isn't normal, or is mapped to unconstrained values."""
        bases = []
        for name, prior in priors.items():
            base = prior.base_dist if isinstance(prior, Independent) else prior
            if not isinstance(base, Normal) or not is_identity(layout.transforms[name]):
                return None
            bases.append(base)
        loc = torch.cat([base.loc.reshape(-1) for base in bases])
        scale = torch.cat([base.scale.reshape(-1) for base in bases])
        constant = float((scale.double().log() + HALF_LOG_2PI).sum())
        return cls(loc if bool((loc != 0).any()) else None, scale**-2, constant)

    def add(self, w: Tensor, energy: Tensor, gradient: Tensor) -> Evaluation:
        """Their part of an energy and its gradient, both in place."""
        centred = w if self.loc is None else w - self.loc
        energy.addmv_(centred.square(), self.precision, alpha=0.5).add_(self.constant)
        return energy, gradient.addcmul_(centred, self.precision)


@dataclass(frozen=True, eq=False)
class Probe:
    """A place where the energy is known: ``z`` of some chains, their mini-batches, energy and gradient."""

    z: Tensor
    rows: Rows | None
    energy: Tensor
    gradient: Tensor

    def agrees(self, energy: Tensor, gradient: Tensor) -> bool:
        """Whether another evaluation gives the same, up to rounding, where the energy is finite.

        Energies are continuous, but where the sign of a ReLU's input hangs on rounding, gradients are not.
        """
        coarse, fine = (1e-2, 3e-4) if self.z.dtype == torch.float32 else (1e-6, 1e-8)
        near = (energy - self.energy).abs() <= fine * (1 + self.energy.abs())
        close = (gradient - self.gradient).norm(dim=-1) <= coarse * (1 + self.gradient.norm(dim=-1))
        return bool((near & close | ~torch.isfinite(self.energy)).all())


def network_energy(
    target: NetworkTarget, layout: Layout, probe: Probe, compiled: bool
) -> tuple[NetworkEnergy | None, str]:
    """The fastest way to evaluate a network's model that agrees with the model itself, or ``None``.

    :param compiled: whether compiled code may be used.
    :return: it, and why no faster way was taken.
    """
    if not bool(torch.isfinite(probe.energy).all() & torch.isfinite(probe.gradient).all()):
        return None, "its density isn't finite at draws from the prior, where evaluations are compared"
    why = "" if compiled else "compile=False"
    engines: list[type[Engine]] = [NativeEngine, BatchedEngine] if compiled else [BatchedEngine]
    for engine in engines:
        try:
            found = NetworkEnergy(target, layout, engine)
        except Unavailable as reason:
            why = str(reason)
            continue
        except NotFeedForward as reason:
            return None, f"the network isn't a chain of linear layers and known activations: {reason}"
        if probe.z.dtype != found.dtype:
            return None, f"chains in {probe.z.dtype} of a network in {found.dtype}"
        if found.serves(probe.z, probe.rows) and probe.agrees(*found.value_and_grad(probe.z, probe.rows)):
            return found, why
        why = f"the {engine.name} evaluation differs from the model's own"
    return None, why


# small steps --------------------------------------------------------------------------------------------------------


def _data(target: NetworkTarget, outputs: int) -> Data:
    likelihood, x, y = target.model.likelihood, target.x, target.y
    like = next(iter(target.model.net.parameters()))
    if x.dim() < 2 or not x.numel() or (x.dtype, x.device) != (like.dtype, like.device):
        raise NotFeedForward(f"x has shape {tuple(x.shape)}, {x.dtype} on {x.device}")
    if type(likelihood) is CategoricalLikelihood:
        fits = y.shape == (len(x),) and not y.is_floating_point() and not y.is_complex() and y.device == x.device
        if not fits or outputs < 2 or int(y.min()) < 0 or int(y.max()) >= outputs:
            raise NotFeedForward(f"y isn't one label under {outputs} for each row")
        return Data(x.flatten(1), y.long(), True)
    if type(likelihood) is not GaussianLikelihood:
        raise NotFeedForward(f"its likelihood is a {type(likelihood).__name__}")
    targets = likelihood.targets(y)
    shape = (len(x),) if outputs == 1 else (len(x), outputs)
    if targets.shape != shape or (targets.dtype, targets.device) != (x.dtype, x.device):
        raise NotFeedForward(f"y has shape {tuple(y.shape)}, {y.dtype} on {y.device}")
    return Data(x.flatten(1), targets.reshape(len(x), outputs), False)
