r"""R-hat, effective sample sizes and E-BFMI, for many quantities at once.

Rank-normalised split :math:`\hat R` and effective sample sizes of the bulk and of the
tails after Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021, arXiv 1903.08008, with
Geyer's initial monotone sequence; the energy's Bayesian fraction of missing information
after Betancourt 2016, arXiv 1604.00695, equation 3. The numbers equal ArviZ's, which
computes one quantity at a time; here thousands are computed in parts that fit the
cache, on PyTorch's threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
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
    # without the middle
    halves = np.delete(series, length // 2, axis=2) if length % 2 else series
    shape = (count, 2 * chains, length // 2)
    rows = series.reshape(count, -1)
    halves = halves.reshape(count, -1)
    order = _argsort(halves)
    ordered = halves.ravel()[order].astype(np.float64)
    whole = np.sort(rows.astype(np.float64), axis=1) if length % 2 else ordered
    low, high = _quantiles(whole, TAILS)
    tail = np.concatenate([halves <= low[:, None], halves > high[:, None]]).reshape(
        -1, *shape[1:]
    )
    tails = np.minimum(*np.split(effective_size(tail), 2))
    scores = _normal_scores(order, ordered).reshape(shape)
    n = order.shape[1]
    folded = np.abs(
        ordered - (ordered[:, (n - 1) // 2, None] + ordered[:, n // 2, None]) / 2
    )
    # Non-negative floats sort as their bits do. The folded values fall, then rise: a
    # stable sort merges two runs.
    fold = folded.view(np.int64).argsort(1, kind="stable")
    fold += _row_starts(folded)
    scale_scores = _normal_scores(order.ravel()[fold], folded.ravel()[fold]).reshape(
        shape
    )
    r_hat = np.fmax(_r_hat(scores), _r_hat(scale_scores))
    bulk = effective_size(scores.astype(series.dtype, copy=False))
    defined = np.isfinite(whole[:, [0, -1]]).all(1) & (ordered[:, 0] < ordered[:, -1])
    return np.where(defined, [r_hat, bulk, tails], np.nan)


def _row_starts(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the flat index of the first entry of each row, ``(rows, 1)``."""
    return np.arange(0, rows.size, rows.shape[1])[:, None]


def _argsort(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the flat indices that sort each row.

    With the bits of negative floats inverted, floats sort as unsigned integers. NumPy
    sorts 16-bit words by radix, in a fifth of the time of comparisons.
    """
    bits = rows.view(f"i{rows.itemsize}")
    ascending = bits ^ (bits >> (8 * rows.itemsize - 1) | np.iinfo(bits.dtype).min)
    words = np.moveaxis(ascending.view("<u2").reshape(*rows.shape, -1), -1, 0)
    return np.lexsort(np.ascontiguousarray(words)) + _row_starts(rows)


def _normal_scores(order: NDArray[Any], ordered: Array) -> Array:
    """Return the standard normal quantile at each number's rank in its row; ties have
    their mean rank (Blom 1958).

    :param order: flat indices that sort each row.
    :param ordered: the sorted rows.
    """
    count, n = ordered.shape
    quantiles = _normal_quantiles(n)
    values = ordered.ravel()
    tied = np.zeros(values.size + 1, dtype=bool)  # with its predecessor
    np.equal(values[1:], values[:-1], out=tied[1:-1])
    tied[::n] = False
    ends = np.flatnonzero(tied[1:] != tied[:-1])
    first, last = ends[::2], ends[1::2]  # of each run of ties
    sizes = last - first + 1
    ascending = np.tile(quantiles[2::2], count)
    ties = np.repeat(last + 1 - sizes.cumsum(), sizes) + np.arange(sizes.sum())
    ascending[ties] = np.repeat(quantiles[first % n + last % n + 2], sizes)
    scores = np.empty_like(ascending)
    scores[order.ravel()] = ascending
    return scores


@lru_cache(maxsize=2)
def _normal_quantiles(n: int) -> Array:
    """Return the quantiles of the half-integer ranks 0, 1/2, ..., n."""
    return special.ndtri((np.arange(2 * n + 1) / 2 - 3 / 8) / (n + 1 / 4))


def _quantiles(ordered: Array, probabilities: Sequence[float]) -> Array:
    """Return quantiles of each sorted row, interpolated and rounded as
    :func:`numpy.quantile` does.
    """
    below, share = np.divmod(np.array(probabilities) * (ordered.shape[1] - 1), 1)
    low = ordered.T[below.astype(int)]
    high = ordered.T[below.astype(int) + 1]
    share = share[:, None]
    return np.where(
        share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share)
    )


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
    series = split.astype(np.float32) if split.dtype == np.bool_ else split
    means = series.sum(-1).astype(np.float64) / length
    between = means.var(1, ddof=1)
    # a quarter of the lags mostly suffices
    for lags in (min(length, 16 + length // 4), length):
        if split.dtype == np.bool_:  # counts of pairs, which are whole numbers
            products = np.rint(_products(series, lags)) - _products_of_means(
                series, means, lags
            )
        else:
            products = _products(split - means[..., None].astype(split.dtype), lags)
        covariance = products / (chains * length)
        pooled = covariance[:, 0] + between
        rho = (
            1
            - (covariance[:, :1] * length / (length - 1) - covariance) / pooled[:, None]
        )
        rho[:, 0] = 1
        tau, last = _autocorrelation_time(rho, max(0, (length - 3) // 2))
        if not last.any():
            break
    constant = (split == split[:, :1, :1]).all((1, 2))
    return (
        chains
        * length
        / np.where(constant, 1, np.maximum(tau, 1 / np.log10(chains * length)))
    )


def _products(series: NDArray[Any], lags: int) -> Array:
    """Return the sums over chains and draws of lagged products, for lags 0 to ``lags -
    1``.
    """
    padded = fft.next_fast_len(series.shape[-1] + lags - 1, real=True)
    # one inverse transform serves all chains
    squares = np.zeros((len(series), 2 * (padded // 2 + 1)))
    for chains in slices(series.shape[1], _CHAINS_AT_ONCE):
        parts = fft.rfft(series[:, chains], n=padded).view(series.dtype)
        squares += np.einsum("qcf,qcf->qf", parts, parts)
    return fft.irfft(squares[:, ::2] + squares[:, 1::2], n=padded)[:, :lags]


def _products_of_means(inside: NDArray[np.float32], means: Array, lags: int) -> Array:
    """Return the excess of :func:`_products` of zeros and ones over those of deviations
    from each chain's mean.
    """
    length = inside.shape[-1]
    ahead = np.arange(lags)
    counts = np.rint(means * length).astype(np.float32)
    until = np.pad(
        (counts[:, None] @ inside)[:, 0].astype(np.float64).cumsum(1), ((0, 0), (1, 0))
    )
    crossed = (until[:, length - ahead] + until[:, -1:] - until[:, ahead]) / length
    return crossed - (length - ahead) * np.square(means).sum(1)[:, None]


def _autocorrelation_time(rho: Array, most: int) -> tuple[Array, NDArray[np.bool_]]:
    """Return autocorrelation times by Geyer's initial monotone sequence, and which of
    them need further lags.

    The sequence sums pairs of lags up to the first pair whose sum isn't positive.

    :param most: the largest number of pairs.
    """
    pairs = min(most, rho.shape[1] // 2 - 1)
    rows = np.arange(len(rho))
    sums = rho[:, : 2 * pairs + 2].reshape(len(rho), pairs + 1, 2).sum(-1)
    stops = ~(sums > 0)
    stops[:, pairs] = True
    kept = stops.argmax(1)
    total = np.minimum.accumulate(sums, axis=1).cumsum(1)[rows, kept - 1] * (kept > 0)
    # The even lag of the pair that ended the sequence still counts, once, if it is
    # positive.
    even = rho[rows, 2 * kept]
    tau = -1 + 2 * total + np.where((even > 0) | (sums[rows, kept] >= 0), even, 0)
    return tau, (kept == pairs) & (pairs < most)


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
