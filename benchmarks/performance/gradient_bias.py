r"""The part of the gradient of the gain that SinkhornImportance loses, against enumeration of the orbit.

    python -m benchmarks.performance.gradient_bias --draws 40000

With :math:`I = \mathbb E_q[\log q(w) - \log \bar q(w)]`, each figure is the share of :math:`\nabla I` that is missing
from the expected gradient of the estimate of ``I``,

.. math:: 1 - \frac{\langle \mathbb E\, \nabla \hat I, \nabla I \rangle}{|\nabla I|^2},

by means and log-deviations of the base (of all components of a mixture), with its standard error over batches of
draws. ``plain`` differentiates the estimate as it stands, which loses 1/(K+1) where proposals are exact; ``ours`` is
the gradient that the estimator has; ``noise`` is the size of the deviation of one draw's whole gradient, in
:math:`|\nabla I|`, beside that of enumeration; ``ms`` the processor time of value and
gradient at 10 draws. ``missed`` is the part of ``I`` itself that the estimate's value misses, in nats:
where it is large, proposals are poor, and what is lost then is no longer only the share of the identity.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_symmetric.distributions import ExactOrbit, Modes, SinkhornImportance, UnitBlocks, sinkhorn_importance
from pyro_symmetric.groups import Action, Group

Family = Callable[[Tensor, Tensor], Any]  # means and deviations, (components, D) -> base
ONE_LAYER = {"weight": ("unit", None), "out": (None, "unit")}
TWO_LAYERS = {"a": ("first", None), "b": ("second", "first"), "c": (None, "second")}
BATCH = 500  # draws of which gradients are averaged at once


def one_layer(width: int, inputs: int = 2) -> dict[str, torch.Size]:
    return {"weight": torch.Size([width, inputs]), "out": torch.Size([1, width])}


def two_layers(first: int, second: int) -> dict[str, torch.Size]:
    return {"a": torch.Size([first, 2]), "b": torch.Size([second, first]), "c": torch.Size([1, second])}


def mean_field(loc: Tensor, scale: Tensor) -> Any:
    return dist.Normal(loc[0], scale[0]).to_event(1)


def low_rank(loc: Tensor, scale: Tensor) -> Any:
    factor = torch.randn(loc.shape[-1], 2, dtype=loc.dtype, generator=torch.Generator().manual_seed(1))
    return dist.LowRankMultivariateNormal(loc[0], 0.5 * factor * scale[0].unsqueeze(-1), scale[0].square())


def full_rank(loc: Tensor, scale: Tensor) -> Any:
    dim = loc.shape[-1]
    noise = torch.randn(dim, dim, dtype=loc.dtype, generator=torch.Generator().manual_seed(1))
    tril = torch.eye(dim, dtype=loc.dtype) + 0.3 * noise.tril(-1)
    return dist.MultivariateNormal(loc[0], scale_tril=tril * scale[0].unsqueeze(-1))


def mixture(loc: Tensor, scale: Tensor) -> Any:
    logits = torch.linspace(0.4, -0.4, len(loc), dtype=loc.dtype)
    return Modes([mean_field(*moments) for moments in zip(loc[:, None], scale[:, None], strict=True)], logits)


def unit_blocks(loc: Tensor, scale: Tensor) -> Any:
    """Blocks of the units of one layer; the sites are ``weight (n, 2)`` and ``out (1, n)``."""
    n = loc.shape[-1] // 3
    units = torch.cat([torch.arange(2 * n).reshape(n, 2), torch.arange(2 * n, 3 * n)[:, None]], -1)
    noise = torch.randn(n, 3, 3, dtype=loc.dtype, generator=torch.Generator().manual_seed(1))
    tril = torch.eye(3, dtype=loc.dtype) + 0.7 * noise.tril(-1)
    return UnitBlocks(loc[0], [units], [tril * scale[0][units].unsqueeze(-1)])


def flow(loc: Tensor, scale: Tensor) -> Any:
    """A correlated normal, bent: a fixed flow after moments that are learnt."""
    return dist.TransformedDistribution(full_rank(loc, scale), [Bent()])


class Bent(dist.transforms.Transform):
    """``x + sin(x) / 2``, entry by entry."""

    domain = codomain = dist.constraints.independent(dist.constraints.real, 1)
    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        return x + x.sin() / 2

    def _inverse(self, y: Tensor) -> Tensor:
        x = y
        for _ in range(12):
            x = x - (x + x.sin() / 2 - y) / (1 + x.cos() / 2)
        return x

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return (1 + x.cos() / 2).log().sum(-1)


# Mixture components: their weights on a simplex, locations and positive scales.
COMPONENTS = {"locs": ("component",), "scales": ("component",), "weights": ("component",)}
SUPPORTS = {
    "locs": dist.constraints.real,
    "scales": dist.constraints.positive,
    "weights": dist.constraints.simplex,
}

# name -> group, base, number of its components
PROBLEMS: dict[str, tuple[Any, Family, int]] = {
    "one layer of 4": (Group.declare(ONE_LAYER, one_layer(4)), mean_field, 1),
    "two layers, 3 and 2": (Group.declare(TWO_LAYERS, two_layers(3, 2)), mean_field, 1),
    "signs of 4 units": (Group.declare(ONE_LAYER, one_layer(4), "flip"), mean_field, 1),
    "permutations and signs of 3": (Group.declare(ONE_LAYER, one_layer(3), ("permute", "flip")), mean_field, 1),
    "mixture of 2, one layer of 3": (Group.declare(ONE_LAYER, one_layer(3)), mixture, 2),
    "low rank, one layer of 4": (Group.declare(ONE_LAYER, one_layer(4)), low_rank, 1),
    "full rank, one layer of 4": (Group.declare(ONE_LAYER, one_layer(4)), full_rank, 1),
    "unit blocks, one layer of 4": (Group.declare(ONE_LAYER, one_layer(4)), unit_blocks, 1),
    "flow, one layer of 4": (Group.declare(ONE_LAYER, one_layer(4)), flow, 1),
    "constrained, 4 components": (Group.declare(COMPONENTS, dict.fromkeys(COMPONENTS, torch.Size([4]))), mean_field, 1),
    "full rank, two layers, 3 and 2": (Group.declare(TWO_LAYERS, two_layers(3, 2)), full_rank, 1),
    # Orbits of hundreds or thousands of elements
    "one layer of 7": (Group.declare(ONE_LAYER, one_layer(7)), mean_field, 1),
    "two layers, 5 and 4": (Group.declare(TWO_LAYERS, two_layers(5, 4)), mean_field, 1),
    "permutations and signs of 5": (Group.declare(ONE_LAYER, one_layer(5), ("permute", "flip")), mean_field, 1),
    "mixture of 2, one layer of 7": (Group.declare(ONE_LAYER, one_layer(7)), mixture, 2),
    "low rank, one layer of 7": (Group.declare(ONE_LAYER, one_layer(7)), low_rank, 1),
    "full rank, one layer of 7": (Group.declare(ONE_LAYER, one_layer(7)), full_rank, 1),
    "unit blocks, one layer of 7": (Group.declare(ONE_LAYER, one_layer(7)), unit_blocks, 1),
    "constrained, 6 components": (Group.declare(COMPONENTS, dict.fromkeys(COMPONENTS, torch.Size([6]))), mean_field, 1),
}


class Problem:
    """A base over a group's vectors, and the gradient of the gain with respect to its means and log-deviations."""

    def __init__(self, name: str, separation: float, seed: int = 0):
        self.group, self.family, count = PROBLEMS[name]
        self.action = Action(
            self.group, SUPPORTS if "weights" in self.group.site_shapes else list(self.group.site_shapes)
        )
        generator = torch.Generator().manual_seed(seed)
        shape = (count, self.action.dim)
        self.loc = separation * torch.randn(shape, dtype=torch.float64, generator=generator)
        self.log_scale = (0.3 + torch.rand(shape, dtype=torch.float64, generator=generator)).log()

    def gradients(self, estimators: dict[str, Any], draws: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Each estimator's gain and the gain's gradient, ``(batches,)`` and ``(batches, P)``, at the same draws."""
        rows: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in estimators}
        for _ in range(draws // BATCH):
            loc, log_scale = self.loc.clone().requires_grad_(), self.log_scale.clone().requires_grad_()
            base = self.family(loc, log_scale.exp())
            w = base.rsample((BATCH,))
            own = base.log_prob(w)
            for name, estimator in estimators.items():
                gain = (own - estimator.log_prob(base, self.action, w)).mean()
                parts = torch.autograd.grad(gain, (loc, log_scale), retain_graph=True)
                rows[name].append((gain.detach(), torch.cat([part.flatten() for part in parts])))
        return {name: tuple(map(torch.stack, zip(*found, strict=True))) for name, found in rows.items()}  # type: ignore


class Plain:
    """SinkhornImportance, differentiated as it stands."""

    def __init__(self, k: int):
        self.estimator = SinkhornImportance(k)

    def log_prob(self, *arguments: Any) -> Tensor:
        with mock.patch.object(sinkhorn_importance, "_log_sum_with_identity", lambda ratios: ratios.logsumexp(0)):
            return self.estimator.log_prob(*arguments)


def lost(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """The share of the exact gradient's mean that is missing, and its standard error, both by batches."""
    direction = exact.mean(0) / exact.mean(0).square().sum()
    shares = (exact - found) @ direction
    return float(shares.mean()), float(shares.std()) / math.sqrt(len(shares))


def noise(gradients: Tensor, size: float) -> float:
    """The deviation of one draw's gradient, all coordinates together, in sizes of the exact one."""
    return math.sqrt(float(gradients.var(0).sum()) * BATCH) / size


def milliseconds(problem: Problem, estimator: Any, draws: int = 10, repetitions: int = 10) -> float:
    """Processor time of the gain and its gradient."""
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        loc, log_scale = problem.loc.clone().requires_grad_(), problem.log_scale.clone().requires_grad_()
        base = problem.family(loc, log_scale.exp())
        w = base.rsample((draws,))
        (base.log_prob(w) - estimator.log_prob(base, problem.action, w)).mean().backward()
        times.append(time.process_time() - start)
    return 1e3 * sorted(times)[repetitions // 2]


def table(name: str, separation: float, proposals: list[int], draws: int) -> dict[str, Any]:
    torch.manual_seed(0)
    estimators: dict[str, Any] = {"exact": ExactOrbit()}
    for k in proposals:
        estimators |= {f"plain {k}": Plain(k), f"ours {k}": SinkhornImportance(k)}
    problem = Problem(name, separation)
    found = problem.gradients(estimators, draws)
    gain, exact = found.pop("exact")
    row: dict[str, Any] = {"gain": float(gain.mean()), "size": float(exact.mean(0).norm())}
    row |= {f"missed {k}": float((gain - found[f"ours {k}"][0]).mean()) for k in proposals}
    row |= {f"noise {which}": noise(gradient, row["size"]) for which, (_, gradient) in found.items()}
    row |= {"noise exact": noise(exact, row["size"])}
    row |= {f"ms {which}": milliseconds(problem, estimator) for which, estimator in estimators.items()}
    return row | {which: lost(gradient, exact) for which, (_, gradient) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40_000, help="draws of each base (default 40000)")
    parser.add_argument("--separation", type=float, default=0.7, help="standard deviation of the means (default 0.7)")
    parser.add_argument("--proposals", type=int, nargs="+", default=[1, 4, 16], metavar="K")
    parser.add_argument("--only", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    print(f"share of the gain's gradient that is lost; means {options.separation}, {options.draws} draws")
    for name in options.only:
        row = results[name] = table(name, options.separation, options.proposals, options.draws)
        print(
            f"{name}: I = {row['gain']:.2f} nats, |grad I| = {row['size']:.2f}; exact: noise {row['noise exact']:.1f}, "
            f"{row['ms exact']:.1f} ms"
        )
        for k in options.proposals:
            cells = [
                f"{which} {row[f'{which} {k}'][0]:+.3f} ± {row[f'{which} {k}'][1]:.3f}" for which in ("plain", "ours")
            ]
            print(
                f"  K = {k:2d} | {' | '.join(cells)} | missed {row[f'missed {k}']:.3f} nats "
                f"| noise plain {row[f'noise plain {k}']:.1f}, ours {row[f'noise ours {k}']:.1f} "
                f"| {row[f'ms ours {k}']:.1f} ms",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
