"""Stacked members: fresh initial values of many networks of one architecture, and their loss, all at once."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from pyro_symmetric.models import BayesianModel, with_weights
from pyro_symmetric.traced import unchecked
from pyro_symmetric.weights import Weights

Loss = Callable[[Tensor, Tensor], Tensor]
# parameters, buffers, inputs, targets of one network -> its loss
MemberLoss = Callable[[Weights, Weights, Tensor, Tensor], Tensor]


def _flat(loss: Loss) -> Loss:
    """The loss of a single output, whose axis targets may lack."""

    def evaluate(outputs: Tensor, targets: Tensor) -> Tensor:
        single = outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1
        return loss(outputs.squeeze(-1) if single else outputs, targets.to(outputs.dtype))

    return evaluate


LOSSES: dict[str, Loss] = {
    "cross_entropy": nn.functional.cross_entropy,
    "binary_cross_entropy": _flat(nn.functional.binary_cross_entropy_with_logits),
    "mse": _flat(nn.functional.mse_loss),
}


def fresh_members(net: nn.Module, count: int) -> Weights:
    """Independent initial values of every parameter, ``(count,) + shape``, as the modules' own initialisation draws
    them.

    Parameters that no module resets (by ``reset_parameters``) keep the values that they have, in every member, which is
    warned of unless these are all alike (ones, zeros). What a network does to its weights after their modules made them
    isn't repeated. For both there is :func:`initialised_by`.
    """
    net = copy.deepcopy(net)
    members = {name: p.detach().expand(count, *p.shape).clone() for name, p in net.named_parameters()}
    left = dict(members)
    for prefix, module in net.named_modules():
        names = {f"{prefix}.{name}".lstrip("."): p for name, p in module.named_parameters(recurse=False)}
        own = {name: p for name, p in names.items() if name in members}  # a tied one is its first module's
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if not own or not callable(reset):
            continue
        left = {name: value for name, value in left.items() if name not in own}
        for member in range(count):
            reset()
            for name, parameter in own.items():
                members[name][member] = parameter.detach()
    alike = [name for name, values in left.items() if count > 1 and not bool((values[0] == values.flatten()[0]).all())]
    if alike:
        warnings.warn(
            f"no module resets the parameters {alike}, so that they begin alike in all members; pass "
            "initial=initialised_by(...) with a function that builds the network",
            UserWarning,
            stacklevel=2,
        )
    return members


def initialised_by(make: Callable[[], nn.Module]) -> Callable[[int], Weights]:
    """Initial values of members as a function makes networks, for ``ensemble(..., initial=)``: all that construction
    does to the weights is done to every member's.

    >>> members = initialised_by(lambda: torchvision.models.resnet18(num_classes=10))(5)

    :param make: a new network, of the same architecture each time; called once for each member.
    """

    def initial(count: int) -> Weights:
        made = [dict(make().named_parameters()) for _ in range(count)]
        return {name: torch.stack([own[name].detach() for own in made]) for name in made[0]}

    return initial


def fresh_starts(model: BayesianModel, count: int) -> Weights:
    """Independent initial values of every site, ``(count,) + shape``: of the network as :func:`fresh_members` draws
    them, of the likelihood's own sites from their prior."""
    others = {site: prior.sample((count,)) for site, prior in model.priors().items() if site not in _names(model.net)}
    return {**fresh_members(model.net, count), **others}


def network_loss(net: nn.Module, loss: Loss) -> MemberLoss:
    """The loss of one network as a function of its parameters, to be mapped over members."""

    def evaluate(parameters: Weights, buffers: Weights, x: Tensor, y: Tensor) -> Tensor:
        return loss(with_weights(net, {**parameters, **buffers}, (x,)), y)

    return evaluate


def map_loss(model: BayesianModel, num_data: int) -> MemberLoss:
    r"""The objective that a mode of the posterior minimises, by row of the data:
    :math:`-\frac1N \log p(w) - \frac1B \sum_{i \in \text{batch}} \frac1T \log p(y_i \mid x_i, w)`."""
    in_net, priors = _names(model.net), {site: unchecked(prior) for site, prior in model.priors().items()}

    def evaluate(weights: Weights, buffers: Weights, x: Tensor, y: Tensor) -> Tensor:
        network = {site: value for site, value in weights.items() if site in in_net}
        outputs = model.call({**network, **buffers}, x)
        latents = {site: value for site, value in weights.items() if site not in in_net}
        rows = unchecked(model.likelihood.distribution(outputs, latents)).log_prob(model.likelihood.targets(y))
        log_prior = torch.stack([prior.log_prob(weights[site]).sum() for site, prior in priors.items()]).sum()
        return -rows.sum() / (len(x) * model.likelihood.temperature) - log_prior / num_data

    return evaluate


def _names(net: nn.Module) -> set[str]:
    return {name for name, _ in net.named_parameters()}


@contextlib.contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """In eval mode for a while."""
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)
