r"""Agreement of chains, and the worth of their draws, for many quantities at once.

Rank-normalised split :math:`\hat R` and effective sample sizes of the bulk and of the tails after Vehtari, Gelman,
Simpson, Carpenter & Bürkner 2021, arXiv 1903.08008, with Geyer's initial monotone sequence; the energy's Bayesian
fraction of missing information after Betancourt 2016, arXiv 1604.00695, equation 3. The numbers are ArviZ's, which
takes one weight at a time; here thousands are taken in parts that fit the cache, on as many threads as PyTorch uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import fft, special
from torch import Tensor

Array = NDArray[np.float64]

TAILS = (0.05, 0.95)
WATCHED_ENTRIES = 16  # of each site, which are enough to see whether chains move
_BLOCK_ENTRIES = 2**26  # copied at once out of what may be a mapped file: every page of a narrow site is read each time
_PART_ENTRIES = 2**17  # what a thread works on at a time: ten megabytes with its copies
_CHAINS_AT_ONCE = 256  # whose squares single precision adds up
_KEPT_BYTES = 2**25 - 2**16  # nearly the most that counts
_ROUNDING = 1e-11  # variances of normal scores, which are 1 together


@dataclass(frozen=True, eq=False)
class ChainStatistics:
    """Statistics of each of the quantities; NaN where they can't be told.

    :param r_hat: rank-normalised split R-hat, ``event_shape``, float64; 1 if chains agree.
    :param ess_bulk: effective sample size for the location, of all chains together, likewise.
    :param ess_tail: for the 5 % and 95 % quantiles, likewise.
    """

    r_hat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor

    def summary(self) -> dict[str, float]:
        """The worst of each (NaN if any is unknown) and its median over the known ones (``r_hat_median`` ...)."""
        result = {}
        for name, values in vars(self).items():
            known = values[~values.isnan()]
            worst = values.amax if name == "r_hat" else values.amin
            result[name] = float(worst()) if values.numel() else float("nan")
            result[f"{name}_median"] = float(np.median(known)) if len(known) else float("nan")
        return result


def chain_statistics(draws: Tensor) -> ChainStatistics:
    """R-hat and effective sample sizes of many quantities ``(chains, draws, *event_shape)``.

    >>> chain_statistics(torch.randn(4, 250, 10, 3)).r_hat.shape
    torch.Size([10, 3])

    NaN for fewer than 4 draws and for quantities that are constant or not finite. R-hat of one chain compares its
    halves, as Pyro's, and can't see another mode; it is infinite if no half of a chain moves, but halves differ. Draws
    that are mapped from a file are read in blocks of half a gigabyte at most.
    """
    event = draws.shape[2:]
    result = np.full((3, event.numel()), np.nan)
    if draws.numel() and draws.shape[1] >= 4:
        columns, series_size = draws.detach()[..., None].flatten(2), draws.shape[:2].numel()
        np.empty(_KEPT_BYTES, dtype=np.uint8)  # and freed: glibc keeps as much from now on, and page faults go
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as threads:
            for block in slices(columns.shape[2], _BLOCK_ENTRIES // series_size):
                one_by_one = [chain[:, block].T for chain in columns]  # several times faster than all at once
                series = torch.stack(one_by_one, 1).cpu()
                single = series.dtype in (torch.float32, torch.float16, torch.bfloat16)
                numbers = series.to(torch.float32 if single else torch.float64).numpy()
                parts = slices(len(numbers), _PART_ENTRIES // series_size)
                result[:, block] = np.hstack(list(threads.map(_part, [numbers[part] for part in parts])))
    return ChainStatistics(*(torch.from_numpy(row).reshape(event) for row in result))


@np.errstate(all="ignore")
def _part(series: NDArray[Any]) -> Array:
    """R-hat, bulk and tail effective sample size of each row of ``(quantities, chains, draws)``."""
    count, chains, length = series.shape
    halves = np.delete(series, length // 2, axis=2) if length % 2 else series  # without the middle
    shape = (count, 2 * chains, length // 2)
    rows, halves = series.reshape(count, -1), halves.reshape(count, -1)
    places = _ascending(halves)
    ordered = halves.ravel()[places].astype(np.float64)
    whole = np.sort(rows.astype(np.float64), axis=1) if length % 2 else ordered
    low, high = _quantiles(whole, TAILS)
    tail = np.concatenate([halves <= low[:, None], halves > high[:, None]]).reshape(-1, *shape[1:])
    tails = np.minimum(*np.split(effective_size(tail), 2))
    scores = _normal_scores(places, ordered).reshape(shape)
    n = places.shape[1]
    folded = np.abs(ordered - (ordered[:, (n - 1) // 2, None] + ordered[:, n // 2, None]) / 2)
    # Bits of numbers that aren't negative ascend as they do. A stable sort merges what falls with what rises.
    turned = folded.view(np.int64).argsort(1, kind="stable")
    turned += _starts(folded)
    far = _normal_scores(places.ravel()[turned], folded.ravel()[turned]).reshape(shape)
    found = [np.fmax(_r_hat(scores), _r_hat(far)), effective_size(scores.astype(series.dtype, copy=False)), tails]
    return np.where(np.isfinite(whole[:, [0, -1]]).all(1) & (ordered[:, 0] < ordered[:, -1]), found, np.nan)


def _starts(rows: NDArray[Any]) -> NDArray[Any]:
    """The place of each row's first number, if rows lie end to end, ``(rows, 1)``."""
    return np.arange(0, rows.size, rows.shape[1])[:, None]


def _ascending(rows: NDArray[Any]) -> NDArray[Any]:
    """The places of each row's numbers from the least to the greatest, as if rows lay end to end.

    Their bits, those of negative ones turned over, ascend with them as whole numbers, which NumPy sorts by counting if
    they have 16 bits: a fifth of the time of comparing.
    """
    bits = rows.view(f"i{rows.itemsize}")
    ascending = bits ^ (bits >> (8 * rows.itemsize - 1) | np.iinfo(bits.dtype).min)
    words = np.moveaxis(ascending.view("<u2").reshape(*rows.shape, -1), -1, 0)
    return np.lexsort(np.ascontiguousarray(words)) + _starts(rows)


def _normal_scores(places: NDArray[Any], ordered: Array) -> Array:
    """Quantiles of the standard normal at the rank of every number in its row, of equal ones the mean (Blom 1958).

    :param places: those of the numbers from the least to the greatest, ``ordered``.
    """
    count, n = ordered.shape
    quantiles, values = _normal_quantiles(n), ordered.ravel()
    equal = np.zeros(values.size + 1, dtype=bool)  # to the one before
    np.equal(values[1:], values[:-1], out=equal[1:-1])
    equal[::n] = False
    turns = np.flatnonzero(equal[1:] != equal[:-1])
    first, last = turns[::2], turns[1::2]  # of equal ones
    sizes = last - first + 1
    ascending = np.tile(quantiles[2::2], count)
    alike = np.repeat(last + 1 - sizes.cumsum(), sizes) + np.arange(sizes.sum())
    ascending[alike] = np.repeat(quantiles[first % n + last % n + 2], sizes)
    scores = np.empty_like(ascending)
    scores[places.ravel()] = ascending
    return scores


@lru_cache(maxsize=2)
def _normal_quantiles(n: int) -> Array:
    """Those at half of 0, 1, ... 2n, as ranks of n numbers."""
    return special.ndtri((np.arange(2 * n + 1) / 2 - 3 / 8) / (n + 1 / 4))


def _quantiles(ordered: Array, at: Sequence[float]) -> Array:
    """Quantiles of each row, between its numbers in proportion, rounded as :func:`numpy.quantile` rounds them."""
    below, share = np.divmod(np.array(at) * (ordered.shape[1] - 1), 1)
    low, high = ordered.T[below.astype(int)], ordered.T[below.astype(int) + 1]
    share = share[:, None]
    return np.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share))


def _r_hat(scores: Array) -> Array:
    _, chains, length = scores.shape
    means = scores.mean(-1)
    squares = np.einsum("qcd,qcd->q", scores, scores) - length * np.square(means).sum(1)
    within, between = squares / (chains * (length - 1)), means.var(1, ddof=1)
    result = np.sqrt(between / within + (length - 1) / length)
    # Of halves that stand still both variances are rounding errors. Where a draw moves its rank does, by many places.
    return np.where(within > _ROUNDING, result, np.where(between > _ROUNDING, np.inf, np.nan))


def effective_size(split: NDArray[Any]) -> Array:
    """Effective sample size of each row of split chains ``(quantities, 2 * chains, half)``, two draws or more."""
    _, chains, length = split.shape
    series = split.astype(np.float32) if split.dtype == np.bool_ else split
    means = series.sum(-1).astype(np.float64) / length
    between = means.var(1, ddof=1)
    for lags in (min(length, 16 + length // 4), length):  # the first are mostly enough
        if split.dtype == np.bool_:  # of which there are whole numbers of pairs, that single precision tells
            products = np.rint(_products(series, lags)) - _products_of_means(series, means, lags)
        else:
            products = _products(split - means[..., None].astype(split.dtype), lags)
        covariance = products / (chains * length)
        pooled = covariance[:, 0] + between
        rho = 1 - (covariance[:, :1] * length / (length - 1) - covariance) / pooled[:, None]
        rho[:, 0] = 1
        tau, last = _autocorrelation_time(rho, max(0, (length - 3) // 2))
        if not last.any():
            break
    constant = (split == split[:, :1, :1]).all((1, 2))
    return chains * length / np.where(constant, 1, np.maximum(tau, 1 / np.log10(chains * length)))


def _products(series: NDArray[Any], lags: int) -> Array:
    """The sums, over chains and draws, of products of numbers so many draws apart, at the first lags."""
    padded = fft.next_fast_len(series.shape[-1] + lags - 1, real=True)
    squares = np.zeros((len(series), 2 * (padded // 2 + 1)))  # of all chains, before they are transformed back
    for chains in slices(series.shape[1], _CHAINS_AT_ONCE):
        parts = fft.rfft(series[:, chains], n=padded).view(series.dtype)
        squares += np.einsum("qcf,qcf->qf", parts, parts)
    return fft.irfft(squares[:, ::2] + squares[:, 1::2], n=padded)[:, :lags]


def _products_of_means(inside: NDArray[np.float32], means: Array, lags: int) -> Array:
    """Tell by how much :func:`_products` of zeros and ones exceed those of their distances to each chain's mean."""
    length, ahead = inside.shape[-1], np.arange(lags)
    counts = np.rint(means * length).astype(np.float32)
    until = np.pad((counts[:, None] @ inside)[:, 0].astype(np.float64).cumsum(1), ((0, 0), (1, 0)))
    crossed = (until[:, length - ahead] + until[:, -1:] - until[:, ahead]) / length
    return crossed - (length - ahead) * np.square(means).sum(1)[:, None]


def _autocorrelation_time(rho: Array, most: int) -> tuple[Array, NDArray[np.bool_]]:
    """Sum over lags by Geyer's initial monotone sequence: pairs of lags up to the first that isn't positive.

    :param most: pairs that there may be.
    :return: the sums, and which of them may go on beyond the lags that there are.
    """
    pairs, rows = min(most, rho.shape[1] // 2 - 1), np.arange(len(rho))
    sums = rho[:, : 2 * pairs + 2].reshape(len(rho), pairs + 1, 2).sum(-1)
    ends = ~(sums > 0)
    ends[:, pairs] = True
    kept = ends.argmax(1)
    total = np.minimum.accumulate(sums, axis=1).cumsum(1)[rows, kept - 1] * (kept > 0)
    # The even lag of the pair that ended the sequence still counts, once, if it is positive.
    even = rho[rows, 2 * kept]
    tau = -1 + 2 * total + np.where((even > 0) | (sums[rows, kept] >= 0), even, 0)
    return tau, (kept == pairs) & (pairs < most)


# of chains ----------------------------------------------------------------------------------------------------------


def non_finite(draws: Tensor) -> Tensor:
    """Number of draws of each chain that hold a NaN or an infinite value, ``(chains,)``."""
    if draws.numel() == 0:
        return torch.zeros(len(draws), dtype=torch.long, device="cpu")
    lowest, highest = torch.aminmax(draws.reshape(*draws.shape[:2], -1), dim=-1)  # NaN if any value is
    return (~(lowest.isfinite() & highest.isfinite())).sum(1).cpu()


def standing_still(draws: Tensor) -> Tensor:
    """Mask of the quantities ``(chains, draws, *event_shape)`` that never change in a chain, without draws."""
    if draws.numel() == 0:
        return torch.ones(draws.shape[:1] + draws.shape[2:], dtype=torch.bool, device="cpu")
    lowest, highest = torch.aminmax(draws, dim=1)
    return (lowest == highest).cpu()


def watched(draws: Tensor) -> Tensor:
    """The first entries of a site, ``(chains, draws, K)``: enough to see whether chains move, as a move changes all.
    If none of them ever changes (zeros of a triangle, pruned weights), the first that do."""
    entries = draws[..., None].flatten(2)
    heads = entries[..., :WATCHED_ENTRIES]
    if bool(standing_still(heads).all()):
        heads = entries[..., (~standing_still(entries).all(0)).nonzero().flatten()[:WATCHED_ENTRIES].to(draws.device)]
    return heads


def copied_chains(samples: Mapping[str, Tensor]) -> list[int]:
    """The chains that equal an earlier one draw for draw, and move: runs that had the same seed, say."""
    heads = torch.cat([watched(value).double().cpu() for value in samples.values()], 2).numpy()
    seen, copies = set(), list[int]()
    for chain, draws in enumerate(heads):
        if draws.tobytes() in seen and (draws != draws[:1]).any():
            copies.append(chain)
        seen.add(draws.tobytes())
    return copies


def missing_energy(energy: Tensor) -> Tensor:
    """The energy's Bayesian fraction of missing information (E-BFMI) of each chain, ``(chains,)``, from the Hamiltonian
    at every draw, ``(chains, draws)``. Below 0.3 momenta change it too little to follow the posterior's tails."""
    energy = energy.double()
    return energy.diff(dim=1).square().mean(1) / energy.var(1)


# places -------------------------------------------------------------------------------------------------------------


def exceeded_by_few(values: Tensor) -> float:
    """The value that one in a hundred exceeds; of fewer the largest; NaN if there is none."""
    return float(values.sort().values[-1 - len(values) // 100]) if len(values) else float("nan")


def evenly_spaced(count: int, most: int) -> Tensor:
    """The places of at most so many of ``count``: the last of each of that many equal parts.

    Of chains laid end to end these are each chain's latest draws, which know least of where it started.
    """
    parts = min(count, most)
    return (torch.arange(parts, device="cpu") + 1) * count // max(parts, 1) - 1


def slices(length: int, size: int) -> list[slice]:
    """Cuts of a length into parts of a size, the last of what is left."""
    size = max(1, size)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
