"""Moves of whole sites, from the gradient of one loss.

If the entries of a bias may all be shifted by one number, those of its gradient sum to
zero; if a site may be multiplied by a number, the inner product of its weights and
their gradient is zero.
"""

from __future__ import annotations

import torch

from pyro_symmetric.discovery.rotations import Slope
from pyro_symmetric.discovery.trials import Network
from pyro_symmetric.groups.moves import Move

# relative magnitude of a site's gradient that counts as none, by precision
SILENT = {torch.float64: 1e-9, torch.float32: 1e-5}
# relative tolerance for the scale of a whole site; the epsilon of a norm exceeds it
EXACT = 1e-12


def moves_of_whole_sites(network: Network, slope: Slope) -> dict[str, list[Move]]:
    """Find the sites that may be shifted or scaled as wholes, with their moves.

    Single precision can't tell a scale of a whole site from one that an epsilon breaks.
    """
    norms = {site: float(slopes.norm()) for site, slopes in slope.gradient.items()}
    silent = SILENT[network.dtype] * max(norms.values(), default=0.0)
    moves = dict[str, list[Move]]()
    for site, norm in norms.items():
        shape = network.shapes[site]
        if site in network.buffers or not shape or norm <= silent:
            continue
        whole_moves = list[Move]()
        slopes = slope.gradient[site]
        is_vector = len(shape) == 1 and shape[0] > 1
        total = abs(float(slopes.real.sum()))
        if is_vector and total <= network.tolerances.law * norm:
            whole_moves.append("shift")
        products = (slope.weights[site] * slopes.conj()).real
        least = EXACT * float(products.abs().sum())
        if network.dtype == torch.float64 and abs(float(products.sum())) <= least:
            whole_moves.append("scale")
        if whole_moves:
            moves[site] = whole_moves
    return moves
