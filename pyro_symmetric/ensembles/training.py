r"""Ensembles by the thousand: many independent small networks, trained at once on one device.

A network with a few hundred parameters is too small to keep a processor busy: most of a training step goes into calling
operators. Here all members take their steps together, with a leading axis of members through
:func:`torch.func.vmap`. Members stay independent: each has its own initial values and its own order of mini-batches,
and what an element-wise optimiser does to one doesn't depend on the others.

Laurent, Aldea & Franchi 2024, arXiv 2310.08287, take such ensembles, thousands of "checkpoints", as their picture of
the posterior (figures 1, 13 and 14, table 1).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed
from pyro_symmetric.ensembles.members import Loss, Perturb
from pyro_symmetric.ensembles.parts import Parts
from pyro_symmetric.ensembles.trainer import MakeOptimizer, OutlierRule, Trainer, Watch
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import PathLike
from pyro_symmetric.store import FolderRecorder, MemoryRecorder
from pyro_symmetric.weights import Weights


def far_off(deviations: float = 10.0) -> OutlierRule:
    """A rule for outliers: a loss more than so many robust standard deviations above the median of the members.

    The robust deviation is 1.4826 times the median absolute deviation; it is that of a normal law.
    """
    if not deviations > 0:
        raise ValueError(f"deviations is {deviations}; it must be positive")

    def rule(losses: Tensor) -> Tensor:
        middle = losses.median()
        return losses > middle + deviations * 1.4826 * (losses - middle).abs().median().clamp(min=1e-12)

    return rule


def ensemble(
    net: nn.Module | BayesianModel,
    data: tuple[Tensor, Tensor],
    num_members: int = 1_000,
    *,
    loss: str | Loss = "cross_entropy",
    epochs: int | None = None,
    batch_size: int | None = 32,
    optimizer: MakeOptimizer | None = None,
    cosine: bool = True,
    initial: Callable[[int], Weights] | None = None,
    perturb: Perturb | None = None,
    outliers: OutlierRule | None = None,
    redraw: bool = True,
    members_at_once: int | None = None,
    watch: Watch | None = None,
    store: PathLike | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Posterior:
    """Train many independent networks at once and return them as one posterior, a member a draw.

    >>> x = torch.randn(100, 2)
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> posterior = ps.ensemble(net, (x, (x[:, 0] > 0).long()), num_members=500, epochs=5, progress=False)
    >>> posterior.get_samples()["0.weight"].shape
    torch.Size([500, 2, 2])

    Each part of the members has a random generator of its own. With ``store`` the members go to disk part by part;
    after Ctrl-C or ``kill -9`` the same call resumes, and gives the members of an unbroken run.
    ``Posterior.load(store)`` reads those that there are at any time.

    *Outliers.* A member whose mean loss over an epoch isn't finite, or that ``outliers`` names, stops at once; the
    others continue. The losses after the last step are judged likewise, and the weights must be finite. Members that
    stopped are left out; with ``redraw`` another takes the place of each. ``metadata["stopped"]`` says in which epoch
    and at which loss; a warning says how many diverged.

    *Running statistics* (batch normalisation) are kept as sites, since removing symmetries moves them.

    :param net: the network, trained in train mode; parameters that require no gradient keep its values in all members.
        Or a ``BayesianModel``, of which every member becomes a mode of the posterior, sites of the likelihood included
        (``loss`` is then minus its log-joint density, per row).
    :param data: inputs ``(N, ...)`` and targets ``(N, ...)``.
    :param num_members: how many networks.
    :param loss: ``"cross_entropy"``, ``"binary_cross_entropy"`` (of logits), ``"mse"``, or a function of one network's
        outputs ``(B, ...)`` and targets that returns their mean loss.
    :param epochs: passes over the data, by default as many as take 2,000 steps, and at least 20. Every member has its
        own order; rows that don't fill a batch are left out of that pass.
    :param batch_size: rows of a mini-batch; ``None`` takes all data at every step.
    :param optimizer: makes an element-wise PyTorch optimiser (SGD, Adam, AdamW, RMSprop ...) of stacked parameters:
        ``functools.partial(torch.optim.Adam, lr=1e-2, weight_decay=1e-4)``; it moves the weights as they are. Default:
        Adam at a learning rate of 0.01, in coordinates in which a table's columns and real targets have mean 0 and
        deviation 1 (:mod:`pyro_symmetric.ensembles.coordinates`), so that data needn't be standardised.
    :param cosine: whether the learning rate falls to zero along a cosine.
    :param initial: number of members -> their initial parameters ``(members, *shape)``, or
        :func:`~pyro_symmetric.ensembles.initialised_by` of a function that builds a network. Default: the modules' own
        initialisation, see :func:`~pyro_symmetric.ensembles.fresh_members`.
    :param perturb: of a ``BayesianModel``: one member's weights -> the weights at which its likelihood is evaluated in
        training (dropout, say).
    :param outliers: losses ``(members,)``, on the CPU -> which of them to stop; see :func:`far_off`.
    :param redraw: whether to train others in place of those that stopped.
    :param members_at_once: size of a part, trained together and written together. Default: by the size of a step's
        inputs, about 4 million numbers; with ``store`` a tenth of the members at most (and 25 at least), so that
        little is lost. Each part has a seed of its own: another size gives other members.
    :param watch: called after every step of a part with the step's number and all its members' weights, to record
        their path, say.
    :param store: a folder for the members, new or of this very ensemble.
    :param seed: of all random numbers. ``None``: one is drawn from PyTorch's global generator, which is otherwise left
        alone; ``metadata["seed"]`` says which. A stored ensemble that ``None`` resumes keeps its seed.
    :param device: where to train; by default where the network is. Members are moved to the CPU when their part is
        trained.
    :return: samples of shape ``(1, num_members, ...)``, on the CPU; the statistic ``loss`` is each member's on all
        data, in eval mode; ``metadata["losses"]`` holds the members' mean loss in each epoch.
    :raises ValueError: if arguments or data don't fit, every member of a part stops, or the store holds another run.
    :raises OSError: if the store can't be written (full disk, read-only, in use); what was committed stays.
    """
    trainer = Trainer(
        net,
        data,
        loss=loss,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        cosine=cosine,
        initial=initial,
        perturb=perturb,
        outliers=outliers,
        watch=watch,
        device=device,
    )
    arguments.whole("num_members", num_members, 1)
    arguments.whole("members_at_once", members_at_once, 1, none="a number that suits")
    arguments.whole("seed", seed, 0, none="one from PyTorch's generator")
    arguments.flag("redraw", redraw)
    comfortable = trainer.comfortable_size()
    if store is not None:
        comfortable = min(comfortable, max(25, num_members // 10))
    size = min(num_members, members_at_once or comfortable)
    counts = [min(size, num_members - start) for start in range(0, num_members, size)]
    more = {"num_members": num_members, "members_at_once": size, "redraw": redraw}
    with _recorder(store, num_members) as recorder:  # its lock comes first: who is refused has touched no generator
        parts = Parts(recorder, trainer.fingerprint(more, drawn_seed() if seed is None else seed), seed)
        bar = tqdm(
            total=num_members * trainer.epochs, desc="ensemble", unit="epoch", unit_scale=True, disable=not progress
        )
        with bar:
            for index, count in enumerate(counts):
                if index < len(parts.done):
                    bar.update(count * trainer.epochs)
                else:
                    parts.put(*trainer.part(count, (parts.seed + index) % 2**63, redraw, bar))
        posterior = parts.posterior()
    _warn_of_divergence(posterior, num_members)
    return posterior


def _recorder(store: PathLike | None, count: int) -> AbstractContextManager[MemoryRecorder | FolderRecorder]:
    if store is None:
        return nullcontext(MemoryRecorder(count))
    return FolderRecorder(arguments.path("store", store).absolute(), count)


def _warn_of_divergence(posterior: Posterior, num_members: int) -> None:
    diverged = sum(not math.isfinite(entry["loss"]) for entry in posterior.metadata["stopped"])
    if diverged:
        left = posterior.num_samples
        held = "others were trained in their place" if left == num_members else f"{left} of {num_members} are left"
        warnings.warn(
            f"{diverged} members diverged, to a loss or weights that aren't finite; {held}. A smaller learning rate "
            "may help",
            RuntimeWarning,
            stacklevel=3,
        )
