r"""The network of two weights, whose posterior is known: what guides make of two copies
of a mode.

    python -m benchmarks.experiments.gelberg_2024.two_weight_network --json two.json

``f(x) = relu(w1 x) + relu(w2 x)``, no biases, N(0, 1) priors, Gaussian noise of known
scale. Data come from the weights (a, -a), ``DISTANCE = a sqrt(8)`` from their mirror
image (Gelberg et al. 2024, arXiv 2408.05496, section 5.1). A seed draws the data and
starts the guides. Every guide is a mean-field Gaussian, trained by stock SVI from two
starts (near the diagonal, and in a copy); its own objective, evaluated with many draws,
picks one.

What is reported needs no Monte Carlo: log-evidence, posterior and predictions by
quadrature over the plane of weights; the ELBO of a guide and that of the same guide
symmetrised by quadrature over the guide. Both ELBOs are exact values, no bounds of
them; the InfoNCE guides are *trained* on a bound.
"""

from __future__ import annotations

import math
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser

ESTIMATORS: dict[str, Any] = {
    "mean-field": ps.InfoNCE(0),
    "infonce-1": ps.InfoNCE(1),
    "exact": ps.ExactOrbit(),
}
DISTANCES = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NOISE = 1.0
NUM_DATA = 10
# of the square that holds the posterior: prior and data leave nothing beyond
HALF_WIDTH = 7.0


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(x)).sum(-1, keepdim=True)


class Problem:
    """Data, model and group of one distance and seed, with everything that quadrature
    can tell.
    """

    def __init__(self, distance: float, seed: int, num_data: int = NUM_DATA):
        generator = torch.Generator().manual_seed(1000 + seed)
        self.a = distance / math.sqrt(8)
        self.x = torch.linspace(-2, 2, num_data)[:, None]
        self.y = self.truth(self.x) + NOISE * torch.randn(num_data, generator=generator)
        self.test_x = torch.linspace(-2, 2, 41)[:, None]
        self.model = ps.BayesianModel(
            TwoWeights(), prior=1.0, likelihood=ps.GaussianLikelihood(NOISE)
        )
        self.group = ps.find_symmetry(TwoWeights().eval(), self.x).permutations
        axis = torch.linspace(-HALF_WIDTH, HALF_WIDTH, 351, dtype=torch.float64)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
        log_joint = self.log_joint(grid)
        cell = float(axis[1] - axis[0]) ** 2
        self.log_evidence = float(log_joint.logsumexp((0, 1))) + math.log(cell)
        self.posterior_scores = self.scores(
            grid[::3, ::3], (log_joint - self.log_evidence).exp()[::3, ::3]
        )

    def truth(self, x: Tensor) -> Tensor:
        return torch.relu(self.a * x[:, 0]) + torch.relu(-self.a * x[:, 0])

    def functions(self, w: Tensor, x: Tensor) -> Tensor:
        """Outputs ``batch + (N,)`` of weights ``batch + (2,)``."""
        return torch.relu(w[..., None, :] * x.to(w)).sum(-1)

    def log_joint(self, w: Tensor) -> Tensor:
        """In float64, written out: the quadrature is independent of the library."""
        residual = (self.y.to(w) - self.functions(w, self.x)) / NOISE
        constant = (len(self.x) + 2) * 0.5 * math.log(2 * math.pi) + len(
            self.x
        ) * math.log(NOISE)
        return -0.5 * residual.square().sum(-1) - 0.5 * w.square().sum(-1) - constant

    def scores(self, w: Tensor, mass: Tensor) -> dict[str, float]:
        """Test error of the mean prediction against the true function, and expected NLL
        of new targets, by ``mass``.

        The NLL integrates over the noise of new targets by Gauss-Hermite quadrature.
        """
        mass = (mass / mass.sum()).reshape(-1)
        w = w.reshape(-1, 2)
        held = mass > 1e-9 * mass.max()
        outputs, mass = self.functions(w[held], self.test_x), mass[held]
        truth = self.truth(self.test_x).double()
        rmse = float((mass @ outputs - truth).square().mean().sqrt())
        nodes, weights = (torch.tensor(v) for v in _hermite(12))
        nll = torch.zeros((), dtype=torch.float64)
        for node, weight in zip(nodes, weights, strict=True):
            target = truth + NOISE * node
            log_density = -0.5 * ((target - outputs) / NOISE).square() - math.log(
                NOISE * math.sqrt(2 * math.pi)
            )
            nll -= weight * (log_density + mass.log()[:, None]).logsumexp(0).mean()
        return {"rmse": rmse, "nll": float(nll)}

    def judge(self, moments: tuple[list[float], list[float]]) -> dict[str, float]:
        """ELBO of the guide, ELBO of the guide symmetrised, and test scores, by
        quadrature over the guide.
        """
        loc, scale = (torch.tensor(m, dtype=torch.float64) for m in moments)
        nodes = torch.linspace(-7, 7, 121, dtype=torch.float64)
        one = torch.exp(-0.5 * nodes**2)
        mass = torch.outer(one, one) / one.sum() ** 2
        w = loc + scale * torch.stack(torch.meshgrid(nodes, nodes, indexing="ij"), -1)
        base = torch.distributions.Normal(loc, scale)
        own, swapped = base.log_prob(w).sum(-1), base.log_prob(w.flip(-1)).sum(-1)
        log_joint = self.log_joint(w)
        gain = own - (torch.logaddexp(own, swapped) - math.log(2))
        elbo = float((mass * (log_joint - own)).sum())
        return {
            "elbo": elbo,
            "symmetrized_elbo": elbo + float((mass * gain).sum()),
            "apart": float((loc[0] - loc[1]).abs()),
            **self.scores(w, mass),
        }


def _hermite(count: int) -> tuple[Any, Any]:
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / weights.sum()


def fit(
    problem: Problem, estimator: Any, start: list[list[float]], steps: int
) -> ps.AutoSymmetrized:
    pyro.clear_param_store()
    initial = init_to_value(values={"hidden.weight": torch.tensor(start)})
    guide = ps.AutoSymmetrized(
        problem.model,
        problem.group,
        estimator=estimator,
        init_loc_fn=initial,
        init_scale=0.3,
    )
    loss = Trace_ELBO(num_particles=32, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(
        problem.model,
        guide,
        pyro.optim.ClippedAdam({"lr": 0.04, "lrd": 0.01 ** (1 / steps)}),
        loss,
    )
    for _ in range(steps):
        svi.step(problem.x, problem.y)
    return guide


def run(problem: Problem, name: str, steps: int, seed: int) -> dict[str, Any]:
    """The better of two fits by their own objective, judged by quadrature."""
    pyro.set_rng_seed(seed)
    best: tuple[float, Any] = (-math.inf, None)
    for start in ([[0.2], [-0.2]], [[problem.a], [-problem.a]]):
        guide = fit(problem, ESTIMATORS[name], start, steps)
        worth = ps.evidence(
            guide,
            problem.x,
            problem.y,
            estimator=ESTIMATORS[name],
            num_samples=4096,
            chunk=4096,
        )
        if worth.symmetrized_elbo > best[0]:
            base = guide.base.get_posterior()
            best = (worth.symmetrized_elbo, (base.mean.tolist(), base.stddev.tolist()))
    return {"objective": best[0], "moments": best[1], **problem.judge(best[1])}


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=5)
    arguments.add_argument("--distances", type=float, nargs="+", default=DISTANCES)
    options = parse(arguments, argv)
    steps = 40 if options.quick else 400
    distances = [1.0, 4.0] if options.quick else options.distances
    settings = {
        "steps": steps,
        "noise": NOISE,
        "num_data": NUM_DATA,
        "particles": 32,
        "optimiser": "ClippedAdam 0.04",
    }
    results = Results(options.json, settings, options.progress)

    def fitted(distance: float, seed: int, method: str) -> Row:
        problem = Problem(distance, seed)
        reference = {
            f"posterior_{name}": value
            for name, value in problem.posterior_scores.items()
        }
        return {
            "log_evidence": problem.log_evidence,
            **run(problem, method, steps, seed),
            **reference,
        }

    results.fill(
        fitted, distance=distances, seed=range(options.seeds), method=ESTIMATORS
    )
    results.table(
        "By quadrature: nats that the guide's ELBO lacks, as it was trained and once "
        "it is symmetrised; |w1 - w2| of "
        "its mean; millinats of new targets' NLL over the posterior's; RMSE to the "
        "true function",
        ["distance", "method"],
        {
            "as trained": (_gap, 3),
            "symmetrised": (_symmetrized_gap, 3),
            "apart": ("apart", 3),
            "NLL": (lambda row: 1000 * (row["nll"] - row["posterior_nll"]), 3),
            "RMSE": ("rmse", 3),
            "posterior's": ("posterior_rmse", 3),
        },
    )
    gaps = [_symmetrized_gap(row) for row in results.rows]
    print(
        f"\nsmallest (log-evidence - symmetrised ELBO) of all {len(gaps)} fits: "
        f"{min(gaps):.6f} (never below 0)"
    )


def _gap(row: Row) -> float:
    return (
        row["log_evidence"]
        - row["elbo" if row["method"] == "mean-field" else "symmetrized_elbo"]
    )


def _symmetrized_gap(row: Row) -> float:
    return row["log_evidence"] - row["symmetrized_elbo"]


if __name__ == "__main__":
    main()
