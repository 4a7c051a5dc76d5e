r"""Which guide pays: bases and objectives on problems whose evidence is known, and on networks of UCI data.

    python -m benchmarks.performance.guides_that_pay --json runs/guides.json
    python -m benchmarks.performance.guides_that_pay --problems yacht-8 yacht-64 --root data --json runs/uci.json
    python -m benchmarks.performance.guides_that_pay --problems yacht-8 --annealed yacht-8 --particles 200 --root data

Every base starts from the moments of one mean-field fit, modes from those of a mean-field fit of as many modes, and is
trained by the plain ELBO, by the symmetrised ELBO as ``SinkhornImportance(4)`` has it, and by the exact one if the
group can be enumerated. All are then judged alike:

* ``symmetrised``: the ELBO of the guide averaged over the group, exact if possible, else by ``SinkhornImportance(64)``;
* ``gap``: the evidence less that, in nats. The evidence is that of sequential Monte Carlo runs from a wide normal, with
  its standard deviation over runs; of UCI networks it is found if ``--annealed`` asks for it. The mean of its
  exponential is right, so that its logarithm is too low on average: by half its variance where the runs agree well, and
  by more where they don't;
* ``efficiency``: the effective share of draws as importance samples of the posterior, ``(mean r)² / mean r²`` with
  ``r = p(w, D) / q̄(w)``; with a bound in place of q̄ it is left out;
* ``mean off``: the error of the posterior mean of what the model is for (predictions, reconstructions), in posterior
  standard deviations, root mean squared over points; of UCI networks the log predictive density of held-out rows in its
  place (``test``);
* ``CPU s``: processor seconds of the training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import Results, parse, parser, print_table, spread
from pyro_symmetric.guides.layout import layout_of

BASES: dict[str, Any] = {
    "mean-field": AutoDiagonalNormal,
    "unit blocks": ps.AutoUnitBlocks,
    "low rank": AutoLowRankMultivariateNormal,
    "full rank": AutoMultivariateNormal,
    "flow": AutoIAFNormal,
    "3 modes of full rank": AutoMultivariateNormal,
}
MODES = 3
PARTICLES, LEARNING_RATE, FALL = 12, 0.02, 0.05
JUDGED_BY, JUDGED_BY_A_BOUND, CHUNK = 4000, 400, 100
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """A model with data.

    :param function: weights of batch shape ``(S,)`` -> what the model is for, ``(S, points)``.
    :param small: whether the group can be enumerated.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    group: ps.Group
    function: Callable[[Weights], Tensor]
    small: bool = True


def matrix_factorisation() -> Problem:
    """6 x 5 numbers from two factors; permutations and signs."""
    g = torch.Generator().manual_seed(1)
    data = torch.randn(6, 2, generator=g) @ torch.randn(2, 5, generator=g) + 0.5 * torch.randn(6, 5, generator=g)

    def model(y: Tensor) -> None:
        rows = pyro.sample("rows", dist.Normal(torch.zeros(6, 2), 1.0).to_event(2))
        columns = pyro.sample("columns", dist.Normal(torch.zeros(5, 2), 1.0).to_event(2))
        pyro.sample("y", dist.Normal(rows @ columns.mT, 0.5).to_event(2), obs=y)

    shapes = {"rows": torch.Size([6, 2]), "columns": torch.Size([5, 2])}
    group = ps.Group.declare({site: (None, "factor") for site in shapes}, shapes, ("permute", "flip"))
    return Problem(model, (data,), group, lambda w: (w["rows"] @ w["columns"].mT).flatten(1))


def three_units() -> Problem:
    """A network of 3 tanh units on 20 points of a line."""
    g = torch.Generator().manual_seed(2)
    x = torch.linspace(-2, 2, 20)
    y = torch.sin(1.5 * x) + 0.3 * torch.randn(20, generator=g)
    grid = torch.linspace(-3, 3, 31)
    shapes = {"a": torch.Size([3]), "b": torch.Size([3]), "c": torch.Size([3]), "d": torch.Size([])}

    def net(w: Weights, at: Tensor) -> Tensor:
        hidden = (w["a"].unsqueeze(-1) * at + w["b"].unsqueeze(-1)).tanh()
        return (w["c"].unsqueeze(-1) * hidden).sum(-2) + w["d"].unsqueeze(-1)

    def model(x: Tensor, y: Tensor) -> None:
        w = {s: pyro.sample(s, dist.Normal(torch.zeros(n), 1.5).to_event(len(n))) for s, n in shapes.items()}
        pyro.sample("y", dist.Normal(net(w, x), 0.3).to_event(1), obs=y)

    group = ps.Group.declare({s: ("unit",) for s in "abc"}, shapes, ("permute", "flip"))
    return Problem(model, (x, y), group, lambda w: net(w, grid))


def factor_analysis() -> Problem:
    """Two factors of five variables, 40 rows, the factor scores integrated out; loadings, log-variances."""
    g = torch.Generator().manual_seed(3)
    true = torch.tensor([[1.0, 0.0], [0.8, 0.3], [0.5, -0.6], [0.0, 0.9], [-0.3, 0.7]])
    rows = torch.randn(40, 2, generator=g) @ true.mT + 0.6 * torch.randn(40, 5, generator=g)

    def covariance(loadings: Tensor, log_psi: Tensor) -> Tensor:
        return loadings @ loadings.mT + torch.diag_embed(log_psi.exp())

    def model(rows: Tensor) -> None:
        loadings = pyro.sample("loadings", dist.Normal(torch.zeros(5, 2), 1.0).to_event(2))
        log_psi = pyro.sample("log_psi", dist.Normal(torch.full((5,), -1.0), 0.7).to_event(1))
        like = dist.MultivariateNormal(torch.zeros(5), covariance(loadings, log_psi)).expand([len(rows)])
        pyro.sample("y", like.to_event(1), obs=rows)

    shapes = {"loadings": torch.Size([5, 2]), "log_psi": torch.Size([5])}
    group = ps.Group.declare({"loadings": (None, "factor")}, shapes, ("permute", "flip"))
    lower = torch.tril_indices(5, 5)
    return Problem(model, (rows,), group, lambda w: covariance(w["loadings"], w["log_psi"])[:, lower[0], lower[1]])


def mixture() -> Problem:
    """Four normal components that overlap, 60 points; their places, log-widths and logits of their shares."""
    g = torch.Generator().manual_seed(4)
    which = torch.randint(4, (60,), generator=g)
    y = torch.tensor([-2.0, 0.0, 1.0, 3.0])[which] + 0.6 * torch.randn(60, generator=g)
    grid = torch.linspace(-4, 5, 31)

    def log_density(loc: Tensor, log_scale: Tensor, logit: Tensor, at: Tensor) -> Tensor:
        normal = dist.Normal(loc.unsqueeze(-1), log_scale.exp().unsqueeze(-1), validate_args=False)
        return (normal.log_prob(at) + logit.log_softmax(-1).unsqueeze(-1)).logsumexp(-2)

    def model(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(torch.zeros(4), 2.0).to_event(1))
        log_scale = pyro.sample("log_scale", dist.Normal(torch.full((4,), -0.5), 0.5).to_event(1))
        logit = pyro.sample("logit", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        pyro.factor("y", log_density(loc, log_scale, logit, y).sum(-1))

    shapes = {site: torch.Size([4]) for site in ("loc", "log_scale", "logit")}
    group = ps.Group.declare({site: ("component",) for site in shapes}, shapes)
    return Problem(model, (y,), group, lambda w: log_density(w["loc"], w["log_scale"], w["logit"], grid).exp())


def uci(name: str, width: int, root: Path) -> Problem:
    """A network of one hidden layer of tanh units on standardised UCI data, the noise's deviation taken as 0.1."""
    data = ps.datasets.load(f"uci/{name}", root=root)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(data.num_features, width), nn.Tanh(), nn.Linear(width, 1))
    model = ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(0.1))
    group = ps.find_symmetry(net, data.train_x[:4]).finite

    def log_density(w: Weights) -> Tensor:
        return model.log_likelihood(w, data.test_x, data.test_y)

    return Problem(model, (data.train_x, data.train_y), group, log_density, small=False)


# the truth ----------------------------------------------------------------------------------------------------------


class Truth:
    """The evidence and draws of the posterior by sequential Monte Carlo over a geometric path.

    The path goes from ``N(0, REFERENCE²)`` to the posterior in unconstrained coordinates; the next temperature is that
    at which the effective share of particles falls to ``KEPT``; after resampling, particles move by Hamiltonian Monte
    Carlo in the scale of their cloud. The mean of the weights' product is unbiased for the evidence (Del Moral, Doucet
    & Jasra 2006).
    """

    REFERENCE, KEPT, LEAPFROGS, SWEEPS = 1.5, 0.9, 8, 3

    def __init__(self, log_target: Callable[[Tensor], Tensor], dim: int, particles: int, runs: int):
        self.log_target = log_target
        found, clouds = zip(*(self._run(dim, particles) for _ in range(runs)), strict=True)
        values = torch.tensor(found, dtype=torch.float64)
        self.log_evidence = float(values.logsumexp(0)) - math.log(runs)
        self.deviation = float(values.std()) if runs > 1 else math.nan
        self.draws = torch.cat(clouds)

    def _run(self, dim: int, particles: int) -> tuple[float, Tensor]:
        cloud = self.REFERENCE * torch.randn(particles, dim)
        beta, total, step = 0.0, 0.0, 0.3
        while beta < 1:
            excess = (self.log_target(cloud) - self._log_reference(cloud)).double()
            following = self._next(beta, excess)
            log_weights = (following - beta) * excess
            total += float(log_weights.logsumexp(0)) - math.log(particles)
            beta = following
            cloud = cloud[_systematic(log_weights.softmax(0))]
            for _ in range(self.SWEEPS if beta < 1 else 10 * self.SWEEPS):
                cloud, accepted = self._move(cloud, beta, step)
                step *= math.exp(0.3 * (accepted - 0.75))
        return total, cloud

    def _log_reference(self, cloud: Tensor) -> Tensor:
        return dist.Normal(0.0, self.REFERENCE, validate_args=False).log_prob(cloud).sum(-1)

    def _next(self, beta: float, excess: Tensor) -> float:
        low, high = beta, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            weights = ((middle - beta) * excess).softmax(0)
            low, high = (middle, high) if 1 / float(weights.square().sum()) > self.KEPT * len(excess) else (low, middle)
        return 1.0 if high == 1.0 else low

    def _move(self, cloud: Tensor, beta: float, step: float) -> tuple[Tensor, float]:
        scale = cloud.std(0)
        size = step * scale * (0.5 + torch.rand(len(cloud), 1))

        def energy_and_force(at: Tensor) -> tuple[Tensor, Tensor]:
            at = at.detach().requires_grad_()
            value = beta * self.log_target(at) + (1 - beta) * self._log_reference(at)
            return value.detach(), torch.autograd.grad(value.sum(), at)[0]

        momentum = torch.randn_like(cloud)  # of mass scale^-2, in units of the cloud
        before, force = energy_and_force(cloud)
        at, moving = cloud, momentum
        for _ in range(self.LEAPFROGS):
            moving = moving + 0.5 * size * force
            at = at + size * moving
            after, force = energy_and_force(at)
            moving = moving + 0.5 * size * force
        log_ratio = after - before + 0.5 * (momentum.square() - moving.square()).sum(-1)
        taken = (torch.rand(len(cloud)).log() < log_ratio.nan_to_num(-torch.inf)).unsqueeze(-1)
        return torch.where(taken, at, cloud), float(taken.float().mean())


def _systematic(weights: Tensor) -> Tensor:
    n = len(weights)
    places = (torch.arange(n, dtype=weights.dtype) + torch.rand(1, dtype=weights.dtype)) / n
    return torch.searchsorted(weights.cumsum(0), places).clamp(max=n - 1)


# fitting and judging ------------------------------------------------------------------------------------------------


class Contest:
    """All bases and objectives on one problem."""

    def __init__(self, problem: Problem, seed: int, steps: int, rate: float = LEARNING_RATE):
        self.problem, self.steps, self.rate = problem, steps, rate
        torch.manual_seed(seed)
        self.density = ps.log_joint(problem.model, *problem.args)
        first = ps.AutoSymmetrized(problem.model, problem.group).setup(*problem.args)
        self.layout, self.action = layout_of(first), layout_of(first).action(problem.group)
        self._train(first.base, None, steps)
        self.start = first.base._loc_scale()

    def log_target(self, latent: Tensor) -> Tensor:
        return self.density(self.layout.constrain(latent)) + self.layout.log_det(latent)

    def run(self, base: str, objective: str, truth: Truth | None) -> dict[str, Any]:
        guide = self._guide(base)
        estimator = {"plain": None, "sinkhorn": ps.SinkhornImportance(4), "exact": ps.ExactOrbit()}[objective]
        began = time.process_time()
        self._train(guide, estimator, self.steps, self.rate)
        seconds = time.process_time() - began
        return {"CPU s": seconds, **self._judged(guide.get_posterior(), truth)}

    def _guide(self, base: str) -> Any:
        model, args, group = self.problem.model, self.problem.args, self.problem.group
        if base.startswith(f"{MODES} modes"):
            return self._modes(BASES[base])
        guide = ps.AutoSymmetrized(model, group, base=BASES[base], num_starts=1).setup(*args).base
        with torch.no_grad():
            guide.loc.copy_(self.start[0])
            guide.scale = self.start[1] * (0.5**0.5 if base == "low rank" else 1.0)
        return guide

    def _modes(self, base: Any) -> Any:
        simple, rich = (
            ps.AutoModes(self.problem.model, MODES, base=one, train_weights=False).setup(*self.problem.args)
            for one in (AutoDiagonalNormal, base)
        )
        self._train(simple, None, self.steps)
        with torch.no_grad():
            for start, mode in zip(simple.modes, rich.modes, strict=True):
                loc, scale = start._loc_scale()
                mode.loc.copy_(loc)
                mode.scale = scale
        return rich

    def _train(self, guide: Any, estimator: Any, steps: int, rate: float = LEARNING_RATE) -> None:
        optimizer = torch.optim.Adam(guide.parameters(), lr=rate)
        falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, FALL ** (1 / steps))
        for _ in range(steps):
            q = guide.get_posterior()
            latent = q.rsample((PARTICLES,))
            log_q = q.log_prob(latent) if estimator is None else estimator.log_prob(q, self.action, latent)
            optimizer.zero_grad()
            (log_q - self.log_target(latent)).mean().backward()
            optimizer.step()
            falling.step()

    @torch.no_grad()
    def _judged(self, q: Any, truth: Truth | None) -> dict[str, Any]:
        exact = self.problem.small
        estimator = ps.ExactOrbit() if exact else ps.SinkhornImportance(64)
        latent = q.sample((JUDGED_BY if exact else JUDGED_BY_A_BOUND,))
        log_p, log_q = self.log_target(latent).double(), q.log_prob(latent).double()
        parts = latent.split(CHUNK)
        log_ratio = log_p - torch.cat([estimator.log_prob(q, self.action, part) for part in parts]).double()
        function = self.problem.function(self.layout.constrain(latent))
        row = {
            "plain": float((log_p - log_q).mean()),
            "symmetrised": float(log_ratio.mean()),
            "±": float(log_ratio.std()) / math.sqrt(len(log_ratio)),
        }
        if truth is not None:
            row["gap"] = truth.log_evidence - row["symmetrised"]
        if truth is None or not exact:
            return row | {"test": float((function.double().logsumexp(0) - math.log(len(latent))).mean())}
        posterior = self.problem.function(self.layout.constrain(truth.draws))
        off = (function.mean(0) - posterior.mean(0)) / posterior.std(0)
        return row | {
            "efficiency": float((2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp()) / len(log_ratio),
            "mean off": float(off.square().mean().sqrt()),
        }


SMALL = {
    "matrix factorisation": matrix_factorisation,
    "3 tanh units": three_units,
    "factor analysis": factor_analysis,
    "mixture of 4": mixture,
}


def table(name: str, results: Results) -> None:
    rows = results.find(problem=name)
    found = [row for row in rows if "evidence" in row]
    title = f"{name}, log|G| = {rows[0]['log_order']:.1f}"
    if found:
        title += f", log evidence {found[0]['evidence']:.2f} ± {found[0]['deviation']:.2f} (deviation over runs)"
    columns = ["plain", "symmetrised", "±", "gap", "efficiency", "mean off", "test", "CPU s"]
    columns = [column for column in columns if any(column in row for row in rows)]
    lines = []
    for key in dict.fromkeys((row["base"], row["objective"]) for row in rows if "base" in row):
        own = [row for row in rows if (row.get("base"), row.get("objective")) == key]
        lines.append([*key, *(spread([row[c] for row in own if c in row], 1 if c == "CPU s" else 3) for c in columns)])
    print_table(title, ["base", "objective", *columns], lines)


def main() -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--problems", nargs="+", default=list(SMALL), metavar="NAME", help="or <uci name>-<width>")
    arguments.add_argument("--bases", nargs="+", choices=list(BASES), default=list(BASES)[:-1], metavar="BASE")
    arguments.add_argument("--objectives", nargs="+", choices=["plain", "sinkhorn", "exact"], metavar="OBJECTIVE")
    arguments.add_argument("--steps", type=int, default=1000, help="of each training (default 1000)")
    arguments.add_argument(
        "--learning-rate",
        type=float,
        default=LEARNING_RATE,
        help="of the bases, at first; flows of networks need 0.002",
    )
    arguments.add_argument("--particles", type=int, default=1500, help="of sequential Monte Carlo")
    arguments.add_argument("--runs", type=int, default=3, help="of sequential Monte Carlo")
    arguments.add_argument(
        "--annealed", nargs="*", default=[], metavar="NAME", help="UCI networks whose evidence to find"
    )
    arguments.add_argument("--root", type=Path, default=Path("data"), help="folder that holds uci/<name>")
    options = parse(arguments)
    steps = 50 if options.quick else options.steps
    results = Results.of(options, "steps", "learning_rate", "particles", "runs", "annealed")
    for name in options.problems:
        uci_name, _, width = name.rpartition("-")
        problem = SMALL[name]() if name in SMALL else uci(uci_name, int(width), options.root)
        truth = None
        if problem.small or name in options.annealed:
            contest = Contest(problem, 0, 1)
            particles = 200 if options.quick else options.particles
            truth = Truth(contest.log_target, contest.layout.dim, particles, options.runs)
        objectives = options.objectives or (["plain", "sinkhorn", "exact"] if problem.small else ["plain", "sinkhorn"])
        for seed in range(options.seeds):
            contest = Contest(problem, seed, steps, options.learning_rate)
            for base in options.bases:
                for objective in objectives:
                    key = {"problem": name, "seed": seed, "base": base, "objective": objective}
                    if not results.find(**key):
                        row = {**key, "log_order": problem.group.log_order(), **contest.run(base, objective, truth)}
                        results.add(
                            row | ({"evidence": truth.log_evidence, "deviation": truth.deviation} if truth else {})
                        )
        table(name, results)


if __name__ == "__main__":
    main()
