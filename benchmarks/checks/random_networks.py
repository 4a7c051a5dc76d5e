"""Random networks of at most 15 weights, whose symmetries are counted by other means.

* Signs: all patterns of signs of all weights are tried.
* Permutations: all products of exchanges of units in each layer are tried.
* Scales: exponents :math:`e` of a scaling solve
  :math:`\\sum_i e_i \\, \\partial f / \\partial \\log |w_i| = 0` at all weights and
  inputs; so their number is the dimension of the null space of these equations at many
  random points.

``python -m benchmarks.checks.random_networks 500`` compares the symmetries of 500
networks with these numbers, and tries random elements at fresh weights and inputs of
several sizes: none may have more, and one that has fewer must say "at least".
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry

Weights = dict[str, Tensor]
ROWS, LARGEST = 5, 15
SILENT = 1e-6  # derivatives up to which may be rounding
POINTS = 24  # at which outputs and derivatives are taken: more than there are weights
SIZES = (0.1, 1.0, 10.0, 100.0)  # of inputs, in turn
WEIGHT_SIZES = (1.0, 1.0, 8.0)  # likewise: large ones reach bounds behind a norm
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky": lambda z: F.leaky_relu(z, 0.2),
    "tanh": torch.tanh,
    "sin": torch.sin,
    "hard tanh": F.hardtanh,
    "abs": torch.abs,
    "square": torch.square,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "identity": lambda z: z,
    "gate": lambda z: z * torch.tanh(z),
    "bound": lambda z: torch.minimum(z, torch.full_like(z, 3.0)),
}
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "layer": lambda z: F.layer_norm(z, z.shape[-1:], eps=0.1),
    "root mean square": lambda z: F.rms_norm(z, z.shape[-1:], eps=0.1),
    "length": lambda z: z / z.norm(dim=-1, keepdim=True),
}
READOUTS = ("linear", "transposed", "sum", "products", "distances")


class Design(NamedTuple):
    """Choices that make up a network.

    :ivar repeated: whether its second layer is applied twice.
    :ivar dead: whether the network's own biases switch a ReLU off.
    """

    inputs: int
    units: int
    layers: int
    activation: str
    norm: str
    readout: str
    bias: bool
    residual: bool
    repeated: bool
    dead: bool


class Small(nn.Module):
    """One hidden layer or two, and what reads the last.

    :ivar layer_of: parameter -> the layer of the units along each axis; empty for
        inputs and outputs.
    """

    def __init__(self, design: Design, generator: torch.Generator):
        super().__init__()
        self.design = design
        self.layer_of: dict[str, tuple[str, ...]] = {}
        inputs, units = design.inputs, design.units
        shapes = {"first": ((units, inputs), ("1", ""))}
        if design.bias:
            shapes["bias"] = ((units,), ("1",))
        last = "1"
        if design.layers == 2:
            last = "1" if design.residual or design.repeated else "2"
            shapes["second"] = ((units, units), (last, "1"))
        if design.readout == "linear":
            shapes["out"] = ((1, units), ("", last))
        for name, (shape, layers) in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(value))
            self.layer_of[name] = layers
        if design.dead and design.bias:
            nn.init.constant_(self.bias, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        design = self.design
        activation = ACTIVATIONS[design.activation]
        z = x @ self.first.T
        h = activation(NORMS[design.norm](z + self.bias if design.bias else z))
        if design.layers == 2:
            for _ in range(1 + design.repeated):
                after = activation(h @ self.second.T)
                h = h + after if design.residual else after
        return self._read(h)

    def _read(self, h: Tensor) -> Tensor:
        readout = self.design.readout
        if readout == "linear":
            return h @ self.out.T
        if readout == "transposed":
            return h @ self.first
        if readout == "products":
            return h @ h.T
        if readout == "distances":
            return (h[:, None] - h).square().sum(-1)
        return h.sum(-1)


def network(seed: int) -> Small:
    """Build the network of a seed."""
    rng = random.Random(seed)
    while True:
        design = Design(
            inputs=rng.randint(1, 2),
            units=rng.randint(1, 3),
            layers=rng.randint(1, 2),
            activation=rng.choice([*ACTIVATIONS]),
            norm=rng.choice(["none", *NORMS]),
            readout=rng.choice(["linear", *READOUTS]),
            bias=rng.random() < 0.6,
            residual=rng.random() < 0.3,
            repeated=rng.random() < 0.3,
            dead=rng.random() < 0.2,
        )
        net = Small(design, torch.Generator().manual_seed(seed))
        if sum(p.numel() for p in net.parameters()) > LARGEST:
            continue
        # what has no effect has any sign and scale
        if all(bool(norm > 1e-6) for norm in Points(net).derivatives().norm(dim=0)):
            return net


# counts by other means ----------------------------------------------------------------


class Points:
    """A network's outputs at random weights and inputs."""

    def __init__(self, net: Small):
        self.net = net
        generator = torch.Generator().manual_seed(0)
        own = {name: p.detach() for name, p in net.named_parameters()}

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.weights = [
            {name: size * drawn(*value.shape) for name, value in own.items()}
            for _, size in zip(range(POINTS), itertools.cycle(WEIGHT_SIZES))
        ]
        self.inputs = [
            SIZES[k % len(SIZES)] * drawn(ROWS, net.design.inputs)
            for k in range(POINTS)
        ]

    def outputs(self, k: int, weights: Weights) -> Tensor:
        """Return the outputs for the inputs of a point."""
        return functional_call(self.net, weights, (self.inputs[k],)).flatten()

    def invariant(self, moved: Callable[[Weights], Weights]) -> bool:
        """Return whether a map of weights changes no outputs."""
        for k, weights in enumerate(self.weights):
            before = self.outputs(k, weights)
            change = (self.outputs(k, moved(weights)) - before).abs().max()
            if not change <= _rounding(before):
                return False
        return True

    def signs(self) -> int:
        """Count the patterns of signs that change no outputs."""
        sizes = [value.numel() for value in self.weights[0].values()]
        every = torch.tensor([*itertools.product((1.0, -1.0), repeat=sum(sizes))])
        patterns = every.double()

        def outputs(k: int, pattern: Tensor) -> Tensor:
            pairs = zip(self.weights[k].items(), pattern.split(sizes), strict=True)
            signed = {name: v * sign.view_as(v) for (name, v), sign in pairs}
            return self.outputs(k, signed)

        for k, weights in enumerate(self.weights):
            before = self.outputs(k, weights)
            after = vmap(lambda pattern, k=k: outputs(k, pattern))(patterns)
            change = (after - before).abs().amax(1)
            patterns = patterns[change <= _rounding(before)]
        return len(patterns)

    def permutations(self) -> int:
        """Count the exchanges of units in their layers that change no outputs."""
        layers = sorted(
            {n for names in self.net.layer_of.values() for n in names} - {""}
        )
        orders = itertools.permutations(range(self.net.design.units))
        count = 0
        for chosen in itertools.product([*orders], repeat=len(layers)):
            order_of = dict(zip(layers, chosen, strict=True))

            def moved(weights: Weights, order_of=order_of) -> Weights:
                result = dict(weights)
                for name, layers_of in self.net.layer_of.items():
                    for axis, layer in enumerate(layers_of):
                        if layer:
                            index = torch.tensor(order_of[layer])
                            result[name] = result[name].index_select(axis, index)
                return result

            count += self.invariant(moved)
        return count

    def derivatives(self) -> Tensor:
        """Return derivatives of all outputs by logarithms of all weights."""
        rows = []
        for k, weights in enumerate(self.weights):
            derivatives = jacrev(lambda own, k=k: self.outputs(k, own))(weights)
            columns = [
                derivatives[name].flatten(1) * value.flatten()
                for name, value in weights.items()
            ]
            block = torch.cat(columns, 1)
            rows.append(block / block.abs().max().clamp_min(SILENT))
        return torch.cat(rows)

    def scales(self) -> int:
        """Count the independent scalings that change no outputs."""
        values = torch.linalg.svdvals(self.derivatives())
        return int((values <= 1e-9 * values[0]).sum())


def _rounding(outputs: Tensor) -> float:
    """Return the largest change that counts as rounding."""
    return 1e-8 * float(outputs.abs().max()) + 1e-12


class Comparison(NamedTuple):
    """Numbers of what was found, and of all that there is.

    :ivar sound: whether random elements leave outputs alone.
    """

    found: tuple[int, int, int]
    exact: tuple[int, int, int]
    at_least: bool
    sound: bool

    @property
    def wrong(self) -> bool:
        """The verdict that something that was found is no symmetry."""
        pairs = zip(self.found, self.exact, strict=True)
        return not self.sound or any(found > exact for found, exact in pairs)

    @property
    def missed_in_silence(self) -> bool:
        """The verdict that there is more, of which the symmetry says nothing."""
        return not self.wrong and self.found != self.exact and not self.at_least


def compared(net: Small) -> Comparison:
    """Compare the symmetry of a network with other counts."""
    points = Points(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a rule
        symmetry = find_symmetry(net, points.inputs[1])
    found = (
        round(math.exp(symmetry.signs.log_order())),
        int(symmetry.permutations.order()),
        _rank_of_scales(symmetry, points.weights[0]),
    )
    exact = points.signs(), points.permutations(), points.scales()
    sound = points.invariant(lambda weights: symmetry.sample()(weights))
    return Comparison(found, exact, symmetry.at_least, sound)


def _rank_of_scales(symmetry: Symmetry, weights: Weights) -> int:
    """Return the number of independent scales."""
    rows = []
    for name in symmetry.group.names("scale"):
        units = symmetry.group[name]
        for step in torch.eye(units.count, dtype=torch.float64):
            scales = {name: step.reshape(units.shape)}
            moved = symmetry.group.element(log_scales=scales)(weights)
            ratios = [
                (moved[s] / value).log().flatten() for s, value in weights.items()
            ]
            rows.append(torch.cat(ratios))
    return int(torch.linalg.matrix_rank(torch.stack(rows), rtol=1e-6)) if rows else 0


def main() -> None:
    """Compare many random networks, and print those that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("--start", type=int, default=0)
    arguments = parser.parse_args()
    results = []
    for seed in range(arguments.start, arguments.start + arguments.count):
        net = network(seed)
        result = compared(net)
        results.append(result)
        if result.wrong or result.missed_in_silence:
            print(f"seed {seed}: {result}\n  {net.design}", flush=True)
    wrong = sum(result.wrong for result in results)
    silent = sum(result.missed_in_silence for result in results)
    said = sum(r.found != r.exact and r.at_least for r in results) - sum(
        r.wrong and r.at_least and r.found != r.exact for r in results
    )
    print(
        f"{len(results)} networks: {wrong} wrong, {said} with more than was found, "
        f"which say at least, and {silent} in silence"
    )


if __name__ == "__main__":
    main()
