"""The draws of a comparison: two sides, layer by layer; Markov chains thinned to
independent draws.

Sites whose names agree up to the last dot form a layer: ``0.weight`` and ``0.bias`` are
the layer ``0``. A site without a dot (``noise_scale``) is a layer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pyro_symmetric.arguments import Shape
from pyro_symmetric.posterior.posterior import Draws, Posterior, samples_of
from pyro_symmetric.posterior.statistics import (
    chain_statistics,
    copied_chains,
    evenly_spaced,
)
from pyro_symmetric.weights import (
    Tensors,
    drop_names,
    first_value,
    is_running_statistic,
    map_values,
    pick,
    require_finite,
    select_rows,
)

SIDES = ("weights_p", "weights_q")


def samples_given(draws: Draws, name: str) -> Tensors:
    """Return samples ``(samples, *site_shape)``; refuse a dictionary that seems to hold
    chains.

    If three sites or more have few samples and all the same, longer axis next, these
    are nearly always chains and draws. Fewer sites (a layer's weight and bias) may
    agree by accident.
    """
    samples = samples_of(draws, name)
    leading = {tuple(value.shape[:2]) for value in _weights_in(samples).values()}
    shape: Shape = ()
    if isinstance(draws, Mapping) and len(samples) > 2 and len(leading) == 1:
        (shape,) = leading
    if len(shape) == 2 and shape[0] < shape[1]:
        raise ValueError(
            f"{name} has {shape[0]} samples, and all its sites have an axis of size "
            f"{shape[1]} next; of chains, "
            "pass Posterior(weights, kind='chains'), otherwise "
            "Posterior.from_samples(weights, kind='independent')"
        )
    return samples


def _weights_in(samples: Tensors) -> Tensors:
    return drop_names(samples, set(filter(is_running_statistic, samples)))


class PairedSamples:
    """Two sets of samples with the same sites and shapes.

    Running statistics are left out: they aren't weights, and would dominate the
    distances.

    :param weights_p: a ``Posterior``, or site -> samples ``(samples, *site_shape)``.
    :param weights_q: the same sites; the number of samples may differ.
    :param minimum: the least number of samples on each side.
    """

    def __init__(self, weights_p: Draws, weights_q: Draws, *, minimum: int = 1):
        p = _weights_in(samples_given(weights_p, SIDES[0]))
        q = _weights_in(samples_given(weights_q, SIDES[1]))
        self.weights = [p, q]
        if unpaired := p.keys() ^ q.keys():
            raise ValueError(
                "weights_p and weights_q must have the same sites; only one has "
                f"{sorted(unpaired)}"
            )
        self.layers: dict[str, list[str]] = {}
        for site, value in p.items():
            if value.shape[1:] != q[site].shape[1:]:
                raise ValueError(
                    f"{site!r} has shape {tuple(value.shape)} in weights_p and "
                    f"{tuple(q[site].shape)} in weights_q; both must be (samples, "
                    "*site_shape). For chains (chains, draws, ...) pass a Posterior"
                )
            self.layers.setdefault(site.rpartition(".")[0] or site, []).append(site)
        self.shapes = map_values(lambda value: value.shape[1:], p)
        self.num_samples = (len(first_value(p)), len(first_value(q)))
        for name, side in zip(SIDES, self.weights, strict=True):
            counts = {len(value) for value in side.values()}
            if len(counts) > 1 or min(counts) < minimum:
                raise ValueError(
                    f"{name} holds {sorted(counts)} samples; all sites must have the "
                    f"same number, at least {minimum}"
                )

    def columns(self, layer: str, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples of both sides as matrices of at most ``chunk`` weights;
        half precision becomes float32.
        """
        for site in self.layers[layer]:
            p, q = (side[site].detach()[..., None].flatten(1) for side in self.weights)
            dtype = torch.promote_types(p.dtype, q.dtype)
            dtype = torch.promote_types(dtype, torch.float32)
            for p_slice, q_slice in zip(
                p.split(chunk, 1), q.split(chunk, 1), strict=True
            ):
                yield p_slice.to(dtype), q_slice.to(dtype)

    def require_finite(self, layer: str) -> None:
        """Raise ``ValueError`` if a weight of the layer is NaN or infinite."""
        for name, side in zip(SIDES, self.weights, strict=True):
            require_finite(pick(side, self.layers[layer]), name)

    def num_weights(self, layer: str) -> int:
        """Return the number of weights of one sample in a layer."""
        return sum(self.shapes[site].numel() for site in self.layers[layer])


def independent_draws(posterior: Posterior) -> int:
    """Count the evenly spaced draws that may be taken as independent.

    Independent draws all count. Of chains, half of the least effective sample size
    does: thinned to all of it, draws keep a correlation of about 0.1. At least one draw
    of each chain counts, as chains are independent of each other. The least is over
    bulk and tails, and over each weight and its distance from its mean: tests see more
    than means, and a weight whose sign alternates may keep its size for long. Weights
    that never change are left out.
    """
    total = posterior.num_chains * posterior.num_samples
    if posterior.kind == "independent":
        return total
    sizes = []
    for value in posterior.samples.values():
        mean = value.mean((0, 1), keepdim=True, dtype=torch.float64)
        for number in (value, (value - mean).abs()):
            statistics = chain_statistics(number)
            sizes += [statistics.ess_bulk.flatten(), statistics.ess_tail.flatten()]
    effective = torch.cat(sizes)
    least = min(effective[~effective.isnan()].tolist(), default=0.0)
    return min(max(posterior.num_chains, int(least) // 2), total)


def thinned(weights: Draws, name: str = "weights") -> Posterior:
    """Thin draws, evenly spaced over all chains, to as many as
    :func:`independent_draws` counts.

    One draw per chain is each chain's last. If all draws count, they are views.

    :param weights: a ``Posterior``; or site -> independent samples, which all count.
    :raises ValueError: if fewer than 2 draws count, a draw isn't finite, or chains are
        copies of each other.
    """
    if not isinstance(weights, Posterior):
        weights = Posterior.from_samples(
            samples_given(weights, name), kind="independent"
        )
    require_finite(weights.samples, name)
    if weights.kind == "chains" and (copies := copied_chains(weights.samples)):
        raise ValueError(
            f"the chains {copies} are copies of others, as if drawn with the same "
            "seed; leave them out"
        )
    total = weights.num_chains * weights.num_samples
    count = independent_draws(weights)
    if count < 2:
        raise ValueError(
            f"of {total} draws only {count} may be taken as independent; a test needs "
            "at least 2. Draw more, or run "
            "more chains"
        )
    keep = slice(None) if count == total else evenly_spaced(total, count)
    chosen = select_rows(weights.get_samples(), keep)
    return Posterior.from_samples(chosen, kind="independent")
