r"""Two Gaussians in the plane, each the mirror image of the other at y = x: which cost
finds the exchange?

    python -m benchmarks.experiments.rossi_2023.mirrored_gaussians

The group exchanges both coordinates. The reference is N(m, diag(s)^2), the source its
mirror image. First, for equal means, what each cost makes of the identity and of the
exchange, and true divergences (by torch.distributions). Then, with an error of the
estimated means, the shares of random pairs in which each cost finds the exchange and
the squared Wasserstein distance that is left, against how far apart the two means lie.
After Rossi et al. 2023 (arXiv 2310.10171), Fig. A1.

* ``wasserstein`` compares means and deviations: the exchange costs nothing.
* ``l2`` compares means alone. If they are alike it can't tell the two elements apart,
  and keeps the identity.
* ``gaussian``, the divergence up to the source's entropy, does find the exchange of
  mirror images, in both directions. It weighs every coordinate by the reference's
  precision, isn't symmetric and has no geodesic, which is why the library's default is
  another.
* ``gaussian, means only`` is the divergence without its terms in the source's
  deviations, sum (m0 - P m1)^2 / 2 s0^2: what remains of it if those are taken as
  constant. That is what keeps the identity if the means are alike.

The divergence term by term, for mean-field Gaussians and a permutation P of the
source's coordinates:

    KL(P#q1 || q0) = sum_i [log s0_i - log (P s1)_i] + sum_i [(P s1)_i^2 / s0_i^2 - 1] /
                     2 + sum_i (m0 - P m1)_i^2 / (2 s0_i^2)

The first sum is the same for every P. The second, the trace of S0^-1 P S1 P', isn't:
only if all deviations of one of the two are alike does it stay as it is. Dropping it is
the error in the paper's algebra. A table shows the terms, with the divergence by Monte
Carlo beside them; another, for more coordinates, how often the rule without the trace
takes another element than the divergence (both by enumeration), and how many nats of
divergence that costs.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, kl_divergence

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser, print_table
from pyro_symmetric.alignment import GaussianWeights

COSTS = ("wasserstein", "l2", "gaussian")
RULES = ("wasserstein", "l2", "gaussian, means only", "gaussian")
SPREADS = (0.0, 0.25, 0.5)
GROUP = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})


def pair(
    separation: float, noise: float, elongation: float
) -> tuple[GaussianWeights, GaussianWeights]:
    """A reference and its mirror image, each with an error of its own in the means."""
    loc, scale = (
        torch.tensor([-separation / 2, separation / 2]),
        torch.tensor([1.0, elongation]),
    )
    errors = noise * torch.randn(2, 2)
    return (
        GaussianWeights({"w": loc.flip(0) + errors[0]}, {"w": scale.flip(0)}),
        GaussianWeights({"w": loc + errors[1]}, {"w": scale}),
    )


def is_exchange(source: GaussianWeights, reference: GaussianWeights, cost: str) -> bool:
    """True if the exchange costs less than the identity."""
    if cost in COSTS:
        return ps.align(source, reference, GROUP, cost).element["k"].tolist() == [1, 0]
    (m1, _), (m0, s0) = ((q.loc["w"], q.scale["w"]) for q in (source, reference))
    left = ((m0 - torch.stack([m1, m1.flip(0)])) ** 2 / (2 * s0**2)).sum(-1)
    return bool(left[1] < left[0])


def distance_left(
    source: GaussianWeights, reference: GaussianWeights, exchange: bool
) -> float:
    moved = {part: getattr(source, part)["w"] for part in ("loc", "scale")}
    moved = {
        part: value.flip(0) if exchange else value for part, value in moved.items()
    }
    squares: list[Tensor] = [
        (moved[part] - getattr(reference, part)["w"]).square().sum() for part in moved
    ]
    return float(squares[0] + squares[1])


def costs_of(source: GaussianWeights, reference: GaussianWeights) -> list[list[str]]:
    """The costs of the identity and of the exchange, and which of the two ``align``
    takes.
    """

    def normal(q: GaussianWeights, exchange: bool = False) -> Distribution:
        loc, scale = (
            part["w"].flip(0) if exchange else part["w"] for part in (q.loc, q.scale)
        )
        return Independent(Normal(loc, scale), 1)

    lines = []
    for cost in COSTS:
        found = ps.align(source, reference, GROUP, cost)
        exchanged = found.element["k"].tolist() == [1, 0]
        moved = GaussianWeights(
            {"w": source.loc["w"].flip(0)}, {"w": source.scale["w"].flip(0)}
        )
        other = ps.align(moved, reference, GROUP, cost).initial_cost
        numbers = [f"{value:.4f}" for value in (found.initial_cost, other)]
        lines.append(
            [f"align, {cost}", *numbers, "exchange" if exchanged else "identity"]
        )
    for name, forward in (
        ("KL(source || reference)", True),
        ("KL(reference || source)", False),
    ):
        pairs = [
            (normal(source, exchange), normal(reference)) for exchange in (False, True)
        ]
        values = [
            float(kl_divergence(*(pair if forward else pair[::-1]))) for pair in pairs
        ]
        lines.append(
            [
                name,
                *(f"{v:.4f}" for v in values),
                "exchange" if values[1] < values[0] else "identity",
            ]
        )
    return lines


def terms(source: Tensor, reference: Tensor, elements: Tensor) -> dict[str, Tensor]:
    """The terms of KL(P#q1 || q0).

    :param source, reference: means and deviations, ``(..., 2, n)``.
    :param elements: orders of the source's coordinates, ``(K, n)``.
    :return: name -> term of each element, ``(..., K)``.
    """
    (m0, s0), (m1, s1) = (q[..., None, :].unbind(-3) for q in (reference, source))
    m1, s1 = (part[..., 0, :][..., elements] for part in (m1, s1))
    return {
        "log-determinants": (s0.log() - s1.log()).sum(-1),
        "trace": ((s1 / s0).square() - 1).sum(-1) / 2,
        "means": ((m0 - m1) / s0).square().sum(-1) / 2,
    }


def print_terms(elongation: float) -> None:
    """Both elements of the mirror images with equal means."""
    source, reference = (
        torch.tensor([[0.0, 0.0], [1.0, elongation]]),
        torch.tensor([[0.0, 0.0], [elongation, 1.0]]),
    )
    elements = torch.tensor([[0, 1], [1, 0]])
    found = terms(source, reference, elements)
    lines = [[name, *(f"{v:.4f}" for v in values)] for name, values in found.items()]
    lines.append(["divergence", *(f"{v:.4f}" for v in sum(found.values()))])  # type: ignore[arg-type]
    torch.manual_seed(0)
    estimates = []
    for element in elements:
        q1, q0 = Normal(*source[:, element]), Normal(*reference)
        w = q1.sample((1_000_000,))
        estimates.append(f"{(q1.log_prob(w) - q0.log_prob(w)).sum(-1).mean():.3f}")
    lines.append(["divergence, Monte Carlo", *estimates])
    print_table(
        "KL(source || reference) term by term, equal means",
        ["term", "identity", "exchange"],
        lines,
    )


def print_disagreements(options: Any) -> None:
    """Random pairs of independent Gaussians: the rule without the trace beside the
    divergence.
    """
    lines = []
    for n in (2, 3, 4, 6):
        elements = torch.tensor(list(itertools.permutations(range(n))))
        cells = []
        for spread_of_logs in SPREADS:
            torch.manual_seed(0)
            q = torch.randn(2, 10 * options.pairs, 2, n)
            q[:, :, 1] = (spread_of_logs * q[:, :, 1]).exp()
            found = terms(q[0], q[1], elements)
            divergence: Any = sum(found.values())
            taken = divergence.gather(-1, found["means"].argmin(-1, keepdim=True))[:, 0]
            lost = taken - divergence.min(-1).values
            cells += [f"{(lost > 1e-4).double().mean():.2f}", f"{lost.mean():.2f}"]
        lines.append([str(n), *cells])
    header = [
        "coordinates",
        *itertools.chain(*((f"other, spread {s:g}", "nats lost") for s in SPREADS)),
    ]
    title = (
        "without the trace: how often another element is taken, and the divergence "
        f"lost; {10 * options.pairs} pairs, "
        "standard normal means, deviations exp(spread z) with z standard normal"
    )
    print_table(title, header, lines)


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--pairs", type=int, default=100)
    arguments.add_argument("--noise", type=float, default=0.3, help="of the means")
    arguments.add_argument(
        "--elongation", type=float, default=4.0, help="ratio of the two deviations"
    )
    arguments.add_argument(
        "--separations", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.4, 0.8, 1.6]
    )
    options = parse(arguments, argv)
    if options.quick:
        options.pairs, options.separations = 10, [0.0, 0.8]
    print_table(
        f"mirror images with equal means, deviations 1 and {options.elongation:g}",
        ["cost", "of the identity", "of the exchange", "takes"],
        costs_of(*pair(0.0, 0.0, options.elongation)),
    )
    print_terms(options.elongation)
    print_disagreements(options)
    results = Results.of(options, "pairs", "noise", "elongation")

    def run(seed: int, separation: float, cost: str) -> Row:
        torch.manual_seed(seed)
        pairs = [
            pair(separation, options.noise, options.elongation)
            for _ in range(options.pairs)
        ]
        found = [is_exchange(*both, cost) for both in pairs]
        left = [
            distance_left(*both, exchange)
            for both, exchange in zip(pairs, found, strict=True)
        ]
        return {"found": sum(found) / len(found), "left": sum(left) / len(left)}

    results.fill(
        run, seed=range(options.seeds), separation=options.separations, cost=RULES
    )
    title = f"share of {options.pairs} pairs in which the exchange is found, and squared W2 left; means apart by separation"
    results.table(
        title, ["separation", "cost"], {"found": ("found", 3), "left": ("left", 3)}
    )


if __name__ == "__main__":
    main()
