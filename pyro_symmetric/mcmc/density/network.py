r"""Energy and gradient of a :class:`~pyro_symmetric.models.BayesianModel` of a feed-forward network, without autograd.

.. math:: U(z) = \beta \sum_i \ell_i(w) - \log p(w) + \text{const}, \qquad \beta = \frac{N}{B\,T}\,\tau

with :math:`\ell` the cross-entropy, or the loss of a noise that the network gives, with :math:`\tau = 1`, or half the
squared error, :math:`\tau` the noise's precision. A
:class:`~pyro_symmetric.mcmc.density.feedforward.Loss` gives the loss and its gradient; Gaussian priors on the network's
parameters are added in closed form, and whatever else is latent or not Gaussian by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric.layout import Layout, is_identity
from pyro_symmetric.likelihoods import CategoricalLikelihood, GaussianLikelihood, HeteroscedasticLikelihood
from pyro_symmetric.mcmc.density.batched import BatchedLoss
from pyro_symmetric.mcmc.density.engine import Evaluation, Unavailable, same_evaluation
from pyro_symmetric.mcmc.density.feedforward import Loss, NetworkProblem, read_layers
from pyro_symmetric.mcmc.density.native import NativeLoss
from pyro_symmetric.mcmc.density.targets import ROWS, NetworkTarget, Rows
from pyro_symmetric.models import normal_base

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class NetworkEngine:
    """Value and gradient of a network's energy, by a loss that is evaluated by hand."""

    def __init__(self, target: NetworkTarget, layout: Layout, problem: NetworkProblem, loss: Loss):
        likelihood = target.model.likelihood
        self.name, self.by_chain = loss.name, loss.name == "native"
        self._loss, self._sites = loss, target.sites
        self._dim, self._batch_size, self._like = problem.dim, problem.batch_size, problem.x.new_empty(0)
        self._scales = self._like  # of the gradient, for as many chains as there were last
        self._names = list(problem.offsets)
        self._share = (len(problem.x) / (problem.batch_size or len(problem.x))) / likelihood.temperature
        # observations with a normal density
        self._count = 0 if problem.loss == "cross-entropy" else problem.y.numel() / likelihood.temperature
        scale = likelihood.scale if isinstance(likelihood, GaussianLikelihood) else 1.0
        self._log_noise = None if scale is None else math.log(scale)  # None if it is learnt
        self._prior = _GaussianPriors.of({name: target.sites[name] for name in self._names}, layout)
        # What autograd goes through, and where it begins in z: the sites whose log-density isn't in closed form.
        self._begin = 0 if self._prior is None else self._dim
        others = {name: fn for name, fn in target.sites.items() if self._prior is None or name not in self._names}
        self._other_layout = Layout.of(others)

    def serves(self, z: Tensor, rows: Rows | None) -> bool:
        return (
            (z.dtype, z.device) == (self._like.dtype, self._like.device)
            and (None if rows is None else rows[ROWS].shape[-1]) == self._batch_size
            and len(z) > 0
        )

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        index = None if rows is None else rows[ROWS]
        z = z.detach()
        if self._begin == z.shape[1] and self._log_noise is not None:
            scale, scales = self._constant_scale(z)
            loss, gradient = self._loss.loss_and_gradient(z, scales, index)
            assert self._prior is not None  # autograd would begin at the first coordinate
            return self._prior.add(z, loss, gradient, scale, self._count * (self._log_noise + HALF_LOG_2PI))
        energy, gradient, slope = self._with_autograd(z, index)
        if self._prior is not None:
            energy, gradient = self._prior.add(z[:, : self._dim], energy, gradient)
        return energy, gradient if slope is None else torch.cat([gradient, slope], 1)

    def gradient(self, z: Tensor, rows: Rows | None) -> Tensor:
        """The gradient alone, for less where the energy can be left out."""
        if self._begin != z.shape[1] or self._log_noise is None:
            return self.energy_and_gradient(z, rows)[1]
        z = z.detach()
        gradient = self._loss.gradient(z, self._constant_scale(z)[1], None if rows is None else rows[ROWS])
        assert self._prior is not None  # as above
        return self._prior.add_gradient(z, gradient)

    def _constant_scale(self, z: Tensor) -> tuple[float, Tensor]:
        """The factor of the loss if the noise is known, and one for each chain."""
        scale = math.exp(-2 * (self._log_noise or 0.0)) * self._share
        if len(self._scales) != len(z):
            self._scales = z.new_full((len(z),), scale)
        return scale, self._scales

    def _with_autograd(self, z: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The energy less that of Gaussian priors, its gradient in the weights, and in what lies beyond them."""
        with torch.enable_grad():
            leaf = z[:, self._begin :].requires_grad_()
            weights, log_det = self._other_layout.constrain_with_log_det(leaf)
            rest = -log_det
            for name, value in weights.items():
                rest = rest - self._sites[name].log_prob(value).reshape(len(z), -1).sum(-1)
            learnt = self._log_noise is None
            log_noise = weights["noise_scale"].log() if learnt else z.new_full((len(z),), self._log_noise or 0.0)
            w = z[:, : self._dim]
            if self._prior is None:
                w = torch.cat([weights[name].reshape(len(z), -1) for name in self._names], 1)
            scale = (-2 * log_noise).exp() * self._share
            loss, gradient = self._loss.loss_and_gradient(w.detach(), scale.detach(), index)
            energy = loss * scale + self._count * (log_noise + HALF_LOG_2PI) + rest
            if self._prior is not None:
                (slope,) = torch.autograd.grad(energy, leaf, torch.ones_like(energy))
                return energy.detach(), gradient, slope
            (slope,) = torch.autograd.grad([energy, w], leaf, [torch.ones_like(energy), gradient])
            return energy.detach(), slope, None


@dataclass(frozen=True, eq=False)
class _GaussianPriors:
    """Independent normal distributions of flat weights; ``loc`` is ``None`` if all are 0."""

    loc: Tensor | None
    precision: Tensor
    constant: float

    @classmethod
    def of(cls, priors: Mapping[str, Distribution], layout: Layout) -> _GaussianPriors | None:
        """``None`` if one isn't normal, or is mapped to unconstrained values."""
        bases = []
        for name, prior in priors.items():
            base = normal_base(prior)
            if base is None or not is_identity(layout.transforms[name]):
                return None
            bases.append(base)
        loc = torch.cat([base.loc.reshape(-1) for base in bases])
        scale = torch.cat([base.scale.reshape(-1) for base in bases])
        constant = float((scale.double().log() + HALF_LOG_2PI).sum())
        return cls(loc if bool((loc != 0).any()) else None, scale**-2, constant)

    def add(self, w: Tensor, energy: Tensor, gradient: Tensor, scale: float = 1.0, constant: float = 0.0) -> Evaluation:
        """Their part, added to ``scale`` times an energy and a constant, and to its gradient, both in place."""
        centred = w if self.loc is None else w - self.loc
        energy.addmv_(centred.square(), self.precision, beta=scale, alpha=0.5).add_(self.constant + constant)
        return energy, gradient.addcmul_(centred, self.precision)

    def add_gradient(self, w: Tensor, gradient: Tensor) -> Tensor:
        return gradient.addcmul_(w if self.loc is None else w - self.loc, self.precision)


def network_engine(
    target: NetworkTarget, layout: Layout, native: bool, at: tuple[Tensor, Rows | None], expected: Evaluation
) -> tuple[NetworkEngine | None, Exception | None]:
    """The fastest engine of a network's model that agrees with the model itself, or ``None``.

    :param native: whether compiled code may be used.
    :param at: points and mini-batches at which ``expected`` is the model's own energy and gradient.
    :return: it, and why no faster one serves.
    """
    if not all(bool(torch.isfinite(part).all()) for part in expected):
        return None, Unavailable("its density isn't finite at draws from the prior, where evaluations are compared")
    try:
        problem = _problem(target, layout)
    except Unavailable as error:
        return None, Unavailable(f"the network isn't a chain of linear layers and known activations: {error}")
    if at[0].dtype != problem.x.dtype:
        return None, Unavailable(f"chains in {at[0].dtype} of a network in {problem.x.dtype}")
    why: Exception | None = None if native else Unavailable("engine='torch'")
    losses: list[type[Loss]] = [NativeLoss, BatchedLoss] if native else [BatchedLoss]
    for kind in losses:
        try:
            found = NetworkEngine(target, layout, problem, kind(problem))
        except Unavailable as reason:
            why = reason
            continue
        if found.serves(*at) and same_evaluation(found.energy_and_gradient(*at), expected):
            return found, why
        why = Unavailable(f"the evaluation by hand ({found.name}) differs from the model's own")
    return None, why


# small steps --------------------------------------------------------------------------------------------------------


def _problem(target: NetworkTarget, layout: Layout) -> NetworkProblem:
    """:raises Unavailable: saying what about the model doesn't fit."""
    layers = read_layers(target.model.net)
    parameters = {name: parameter.shape.numel() for name, parameter in target.model.net.named_parameters()}
    if list(layout.site_shapes)[: len(parameters)] != list(parameters):
        raise Unavailable("its sites come in another order than the network's parameters")
    x, y, loss = _data(target, layers[-1].outputs)
    if x.shape[1] != layers[0].inputs:
        raise Unavailable(f"its first layer takes {layers[0].inputs} inputs, the data have {x.shape[1]}")
    offsets, dim = {}, 0
    for name, count in parameters.items():
        offsets[name], dim = dim, dim + count
    batch_size = target.row_counts[ROWS][1] if target.row_counts else None
    return NetworkProblem(layers, offsets, dim, x, y, loss, batch_size)


def _data(target: NetworkTarget, outputs: int) -> tuple[Tensor, Tensor, str]:
    """Inputs ``(N, inputs)``; labels ``(N,)`` or real targets ``(N, targets)``; and which loss they ask for."""
    likelihood, x, y = target.model.likelihood, target.x, target.y
    like = next(iter(target.model.net.parameters()))
    if x.dim() < 2 or not x.numel() or (x.dtype, x.device) != (like.dtype, like.device):
        raise Unavailable(f"x has shape {tuple(x.shape)}, {x.dtype} on {x.device}")
    if type(likelihood) is CategoricalLikelihood:
        fits = y.shape == (len(x),) and not y.is_floating_point() and not y.is_complex() and y.device == x.device
        if not fits or outputs < 2 or int(y.min()) < 0 or int(y.max()) >= outputs:
            raise Unavailable(f"y isn't one label under {outputs} for each row")
        return x.flatten(1), y.long(), "cross-entropy"
    if type(likelihood) not in (GaussianLikelihood, HeteroscedasticLikelihood):
        raise Unavailable(f"its likelihood is a {type(likelihood).__name__}")
    targets = likelihood.targets(y)
    noise = isinstance(likelihood, HeteroscedasticLikelihood)
    size = outputs // 2 if noise else outputs
    shape = (len(x),) if size == 1 else (len(x), size)
    if targets.shape != shape or (targets.dtype, targets.device) != (x.dtype, x.device):
        raise Unavailable(f"y has shape {tuple(y.shape)}, {y.dtype} on {y.device}")
    return x.flatten(1), targets.reshape(len(x), size), "noise" if noise else "squares"
