r"""R-hat, effective sample sizes and E-BFMI, for many quantities at once.

Rank-normalised split :math:`\hat R` and effective sample sizes of the bulk and of the
tails after Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021, arXiv 1903.08008, with
Geyer's initial monotone sequence; the energy's Bayesian fraction of missing information
after Betancourt 2016, arXiv 1604.00695, equation 3. The numbers equal ArviZ's, which
computes one quantity at a time; here thousands are computed in parts that fit the
cache, on PyTorch's threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import fft, special
from torch import Tensor

from pyro_symmetric._process import keep_freed_memory
from pyro_symmetric.weights import Tensors

Array = NDArray[np.float64]

TAILS = (0.05, 0.95)
WATCHED_ENTRIES = 16  # per site: enough to see whether a chain moves
# copied at once; draws may be mapped from a file, of which each copy reads every page
_BLOCK_ENTRIES = 2**26
_PART_ENTRIES = 2**17  # per thread: ten megabytes with temporaries
_CHAINS_AT_ONCE = 256  # power spectra summed in single precision
_ROUNDING = 1e-11  # of variances of normal scores, whose total variance is 1


@dataclass(frozen=True, eq=False)
class ChainStatistics:
    """Convergence statistics of each quantity; NaN where undefined.

    :param r_hat: rank-normalised split R-hat, ``event_shape``, float64; 1 if chains
        agree.
    :param ess_bulk: effective sample size for the location, of all chains together,
        likewise.
    :param ess_tail: for the 5 % and 95 % quantiles, likewise.
    """

    r_hat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor

    def summary(self) -> dict[str, float]:
        """Return the worst of each statistic (NaN if any is NaN) and its median without
        NaNs (``r_hat_median`` ...).
        """
        result = {}
        for name, values in vars(self).items():
            known = values[~values.isnan()]
            worst = values.amax if name == "r_hat" else values.amin
            result[name] = float(worst()) if values.numel() else float("nan")
            result[f"{name}_median"] = (
                float(np.median(known)) if len(known) else float("nan")
            )
        return result


def chain_statistics(draws: Tensor) -> ChainStatistics:
    """Return R-hat and effective sample sizes of quantities ``(chains, draws,
    *event_shape)``.

    >>> from pyro_symmetric.posterior.statistics import chain_statistics
    >>> chain_statistics(torch.randn(4, 250, 10, 3)).r_hat.shape
    torch.Size([10, 3])

    They are NaN for fewer than 4 draws and for quantities that are constant or not
    finite. R-hat of one chain compares its halves, as Pyro's does, and can't detect
    another mode. It is infinite if every half is constant but halves differ. Draws
    mapped from a file are read in blocks of half a gigabyte at most.
    """
    event = draws.shape[2:]
    result = np.full((3, event.numel()), np.nan)
    if draws.numel() and draws.shape[1] >= 4:
        columns = draws.detach()[..., None].flatten(2)
        series_size = draws.shape[:2].numel()
        keep_freed_memory()
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as threads:
            for block in slices(columns.shape[2], _BLOCK_ENTRIES // series_size):
                # several times faster than one transposition
                by_chain = [chain[:, block].T for chain in columns]
                series = torch.stack(by_chain, 1).cpu()
                single = series.dtype in (torch.float32, torch.float16, torch.bfloat16)
                numbers = series.to(torch.float32 if single else torch.float64).numpy()
                parts = slices(len(numbers), _PART_ENTRIES // series_size)
                result[:, block] = np.hstack(
                    list(threads.map(_part, [numbers[part] for part in parts]))
                )
    return ChainStatistics(*(torch.from_numpy(row).reshape(event) for row in result))


@np.errstate(all="ignore")
def _part(series: NDArray[Any]) -> Array:
    """Return R-hat, bulk and tail effective sample size of each row of ``(quantities,
    chains, draws)``.
    """
    count, chains, length = series.shape
    rows = series.reshape(count, -1).astype(np.float64)
    middle = [length // 2] * (length % 2)
    halves = np.delete(series, middle, axis=2).reshape(count, -1).astype(np.float64)
    shape = (count, 2 * chains, length // 2)
    low, high = np.quantile(rows, TAILS, axis=1, keepdims=True)
    below = effective_size((halves <= low).reshape(shape).astype(np.float64))
    above = effective_size((halves > high).reshape(shape).astype(np.float64))
    scores = _normal_scores(halves).reshape(shape)
    folded = np.abs(halves - np.median(halves, axis=1, keepdims=True))
    scale_scores = _normal_scores(folded).reshape(shape)
    r_hat = np.fmax(_r_hat(scores), _r_hat(scale_scores))
    bulk = effective_size(scores.astype(series.dtype, copy=False))
    defined = np.isfinite(rows).all(1) & (halves.min(1) < halves.max(1))
    return np.where(defined, [r_hat, bulk, np.minimum(below, above)], np.nan)


def _normal_scores(rows: Array) -> Array:
    """Return the standard normal quantile at each number's rank in its row; ties have
    their mean rank (Blom 1958).
    """
    count, n = rows.shape
    order = rows.argsort(1)
    ordered = np.sort(rows, axis=1)
    is_new = np.ones(rows.shape, dtype=bool)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=is_new[:, 1:])
    first = np.flatnonzero(is_new)  # of each run of ties
    sizes = np.diff(first, append=rows.size)
    half_ranks = np.arange(2 * n + 1)
    quantiles = special.ndtri((half_ranks / 2 - 3 / 8) / (n + 1 / 4))
    of_runs = quantiles[2 * (first % n) + sizes + 1]
    scores = np.empty_like(rows)
    np.put_along_axis(scores, order, of_runs.repeat(sizes).reshape(count, n), axis=1)
    return scores


def _r_hat(scores: Array) -> Array:
    """Return split R-hat of each row of ``(quantities, 2 * chains, half)``."""
    _, chains, length = scores.shape
    means = scores.mean(-1)
    squares = np.einsum("qcd,qcd->q", scores, scores) - length * np.square(means).sum(1)
    within = squares / (chains * (length - 1))
    between = means.var(1, ddof=1)
    result = np.sqrt(between / within + (length - 1) / length)
    # If every half is constant, the variance within is rounding error; any move changes
    # a rank, and so exceeds it.
    return np.where(
        within > _ROUNDING, result, np.where(between > _ROUNDING, np.inf, np.nan)
    )


def effective_size(split: NDArray[Any]) -> Array:
    """Return the effective sample size of each row of ``(quantities, 2 * chains,
    half)``, with at least two draws.
    """
    _, chains, length = split.shape
    means = split.sum(-1).astype(np.float64) / length
    products = _lagged_products(split - means[..., None].astype(split.dtype))
    covariance = products / (chains * length)
    pooled = covariance[:, 0] + means.var(1, ddof=1)
    within = covariance[:, :1] * length / (length - 1)
    rho = 1 - (within - covariance) / pooled[:, None]
    rho[:, 0] = 1
    shortest = 1 / np.log10(chains * length)
    tau = np.maximum(_autocorrelation_time(rho), shortest)
    constant = (split == split[:, :1, :1]).all((1, 2))
    return chains * length / np.where(constant, 1, tau)


def _lagged_products(series: NDArray[Any]) -> Array:
    """Return the sums over chains and draws of lagged products, for all lags."""
    length = series.shape[-1]
    padded = fft.next_fast_len(2 * length - 1, real=True)
    # one inverse transform serves all chains
    squares = np.zeros((len(series), 2 * (padded // 2 + 1)))
    for chains in slices(series.shape[1], _CHAINS_AT_ONCE):
        parts = fft.rfft(series[:, chains], n=padded).view(series.dtype)
        squares += np.einsum("qcf,qcf->qf", parts, parts)
    return fft.irfft(squares[:, ::2] + squares[:, 1::2], n=padded)[:, :length]


def _autocorrelation_time(rho: Array) -> Array:
    """Return autocorrelation times by Geyer's initial monotone sequence, which sums
    pairs of lags up to the first pair whose sum isn't positive.
    """
    count, length = rho.shape
    pairs = max(0, (length - 3) // 2)
    rows = np.arange(count)
    sums = rho[:, : 2 * pairs + 2].reshape(count, pairs + 1, 2).sum(-1)
    stops = ~(sums > 0)
    stops[:, pairs] = True
    end = stops.argmax(1)
    until = np.minimum.accumulate(sums, axis=1).cumsum(1)
    total = until[rows, end - 1] * (end > 0)
    # The even lag of the pair that ended the sequence still counts, once, if it is
    # positive, or if the lags ran out before a pair ended the sequence.
    even = rho[rows, 2 * end]
    counts = (even > 0) | (sums[rows, end] >= 0)
    return -1 + 2 * total + np.where(counts, even, 0)


# of chains ----------------------------------------------------------------------------


def non_finite(draws: Tensor) -> Tensor:
    """Count the draws of each chain that hold a NaN or an infinite value,
    ``(chains,)``.
    """
    if draws.numel() == 0:
        return torch.zeros(len(draws), dtype=torch.long, device="cpu")
    # NaN if any value is
    lowest, highest = torch.aminmax(draws.reshape(*draws.shape[:2], -1), dim=-1)
    return (~(lowest.isfinite() & highest.isfinite())).sum(1).cpu()


def standing_still(draws: Tensor) -> Tensor:
    """Return which quantities ``(chains, draws, *event_shape)`` are constant in each
    chain.
    """
    if draws.numel() == 0:
        return torch.ones(
            draws.shape[:1] + draws.shape[2:], dtype=torch.bool, device="cpu"
        )
    lowest, highest = torch.aminmax(draws, dim=1)
    return (lowest == highest).cpu()


def watched(draws: Tensor) -> Tensor:
    """Return the first entries of a site, ``(chains, draws, K)``, from which moves are
    detected.

    If none of them ever changes (zeros of a triangle, pruned weights), return the first
    that do.
    """
    entries = draws[..., None].flatten(2)
    heads = entries[..., :WATCHED_ENTRIES]
    if standing_still(heads).all():
        heads = entries[
            ...,
            (~standing_still(entries).all(0))
            .nonzero()
            .flatten()[:WATCHED_ENTRIES]
            .to(draws.device),
        ]
    return heads


def copied_chains(samples: Tensors) -> list[int]:
    """Return the chains that move and equal an earlier one draw for draw, as runs of
    one seed do.
    """
    heads = torch.cat(
        [watched(value).double().cpu() for value in samples.values()], 2
    ).numpy()
    seen = set()
    copies = []
    for chain, draws in enumerate(heads):
        if draws.tobytes() in seen and (draws != draws[:1]).any():
            copies.append(chain)
        seen.add(draws.tobytes())
    return copies


def missing_energy(energy: Tensor) -> Tensor:
    """Return the energy's Bayesian fraction of missing information (E-BFMI) of each
    chain, ``(chains,)``.

    Below 0.3, resampled momenta change the energy too little to explore the tails.

    :param energy: the Hamiltonian at every draw, ``(chains, draws)``.
    """
    energy = energy.double()
    return energy.diff(dim=1).square().mean(1) / energy.var(1)


# indices ------------------------------------------------------------------------------


def exceeded_by_few(values: Tensor) -> float:
    """Return the value that 1 % of values exceed; of fewer than a hundred, the largest;
    NaN if empty.
    """
    return (
        float(values.sort().values[-1 - len(values) // 100])
        if len(values)
        else float("nan")
    )


def evenly_spaced(count: int, most: int) -> Tensor:
    """Return at most ``most`` evenly spaced indices below ``count``: the last of each
    of as many equal parts.

    For concatenated chains these favour late draws, which depend least on the starting
    points.
    """
    parts = min(count, most)
    return (torch.arange(parts, device="cpu") + 1) * count // max(parts, 1) - 1


def slices(length: int, size: int) -> list[slice]:
    """Return slices that cut ``length`` into parts of ``size``; the last may be
    smaller.
    """
    size = max(1, size)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
