"""Graph networks of PyTorch Geometric: two layers of each kind on a graph of eight
nodes, then a linear one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo import Built, Case, Cases
from pyro_symmetric.networks import import_torchvision

NODES, FEATURES, WIDTH, EDGES = 8, 5, 12, 4


def graph() -> Tensor:
    """A ring with chords, in both directions: ``(2, edges)``."""
    ring = torch.arange(NODES)
    pairs = torch.stack(
        [ring.repeat(2), torch.cat([(ring + 1) % NODES, (ring + 3) % NODES])]
    )
    return torch.cat([pairs, pairs.flip(0)], 1)


class Layers(nn.Module):
    """Two layers on a graph, which take the features of nodes and the edges; some take
    features of edges, too.
    """

    def __init__(self, make: Callable[[int, int], nn.Module], of_edges: bool = False):
        super().__init__()
        self.first, self.second, self.last = (
            make(FEATURES, WIDTH),
            make(WIDTH, WIDTH),
            nn.LazyLinear(3),
        )
        self.of_edges = of_edges

    def forward(self, x: Tensor, edges: Tensor, *features: Tensor) -> Tensor:
        x = self.first(x, edges, *features).relu()
        return self.last(self.second(x, edges, *features).relu())


def geometric() -> Cases:
    import_torchvision()
    from torch_geometric import nn as library

    def mlp(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 10), nn.ReLU(), nn.Linear(10, outputs))

    degrees = torch.tensor([0, 0, 0, 0, 8])
    kinds: dict[str, Callable[[int, int], nn.Module]] = {
        "ARMAConv": lambda i, o: library.ARMAConv(i, o, num_stacks=2),
        "ChebConv": lambda i, o: library.ChebConv(i, o, 2),
        "ClusterGCNConv": library.ClusterGCNConv,
        "EdgeConv": lambda i, o: library.EdgeConv(mlp(2 * i, o)),
        "FeaStConv": lambda i, o: library.FeaStConv(i, o, heads=2),
        "FiLMConv": library.FiLMConv,
        "GATConv": lambda i, o: library.GATConv(i, o // 2, heads=2),
        "GATv2Conv": lambda i, o: library.GATv2Conv(i, o // 2, heads=2),
        "GCNConv": library.GCNConv,
        "GENConv": library.GENConv,
        "GINConv": lambda i, o: library.GINConv(mlp(i, o)),
        "GatedGraphConv": lambda i, o: library.GatedGraphConv(o, 2),
        "GraphConv": library.GraphConv,
        "LEConv": library.LEConv,
        "MFConv": library.MFConv,
        "MixHopConv": lambda i, o: library.MixHopConv(i, o // 3),
        "PNAConv": lambda i, o: library.PNAConv(
            i, o, ["mean", "max", "std"], ["identity", "amplification"], degrees
        ),
        "ResGatedGraphConv": library.ResGatedGraphConv,
        "SAGEConv": library.SAGEConv,
        "SGConv": lambda i, o: library.SGConv(i, o, K=2),
        "SuperGATConv": lambda i, o: library.SuperGATConv(i, o // 2, heads=2),
        "TAGConv": library.TAGConv,
        "TransformerConv": lambda i, o: library.TransformerConv(i, o // 2, heads=2),
    }
    with_features: dict[str, Callable[[int, int], nn.Module]] = {
        "GINEConv": lambda i, o: library.GINEConv(mlp(i, o), edge_dim=EDGES),
        "GMMConv": lambda i, o: library.GMMConv(i, o, dim=EDGES, kernel_size=2),
        "NNConv": lambda i, o: library.NNConv(i, o, mlp(EDGES, i * o)),
    }
    for name, make in {**kinds, **with_features}.items():
        yield Case(name, lambda make=make, own=name in with_features: built(make, own))


def built(make: Callable[[int, int], Any], of_edges: bool) -> Built:
    edges = graph()
    inputs = (
        torch.randn(NODES, FEATURES),
        edges,
        *([torch.rand(edges.shape[1], EDGES)] if of_edges else []),
    )
    net = Layers(make, of_edges)
    with torch.no_grad():
        net(*inputs)
    return net, inputs
