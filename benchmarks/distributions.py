"""A table of all of Pyro's distributions: which of them can be latent, and which observed, in a model that is sampled.

Run ``python -m benchmarks.distributions --markdown docs/reference/distributions.md``. Each distribution is made from
real numbers ``t ~ Normal(0, 1)``, once as the site of data and once as a latent site. For three chains the energy and
its gradient are compared with plain PyTorch in float64, chain by chain, without Pyro's handlers: the distribution's
own ``log_prob``, the log-determinant of the transform to its support, and for discrete latent sites the sum over
values."""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from benchmarks.distribution_cases import ABSTRACT, CASES, Case
from pyro_symmetric.mcmc import Density

CHAINS = 3
CLOSE = 1e-8  # largest error of energies and gradients, relative to 1 and their size
CLEAR = "summed out"
ROLES = ("observed", "latent")


@dataclass(frozen=True)
class Row:
    """The result of a distribution in one role.

    :param state: ``"works"``, ``"chain at a time"``, ``"refused"`` or ``"wrong"``; ``why`` says more.
    :param error: the largest error of energies and gradients, relative to 1 and their size.
    """

    state: str
    why: str = ""
    error: float = float("nan")


def model(case: Case, role: str, value: Tensor | None) -> None:
    """The distribution as a site of data or as a latent one."""
    t = pyro.sample("t", dist.Normal(torch.zeros(case.size), 1.0).to_event(1))
    if role == "observed":
        pyro.sample("x", case.make(t), obs=value)
        return
    x = pyro.sample("x", case.make(_fixed(case) if case.moving else t))
    pyro.sample("y", dist.Normal(_summary(x, case), 1.0), obs=torch.tensor(0.7))


def checked(case: Case, role: str, engine: str = "eager") -> Row:
    """Compare energies and gradients of a distribution in one role with plain PyTorch."""
    torch.manual_seed(0)
    value = None
    try:
        if role == "observed":
            value = case.make(_fixed(case)).sample() if case.value is None else case.value
            value = value.double() if value.is_floating_point() else value
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            density = Density(model, (case, role, value), dtype=torch.float64, engine=engine)
        z = torch.randn(CHAINS, density.dim, generator=torch.Generator().manual_seed(1)).to(density.device)
        energy, gradient = density.energy_and_gradient(z)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        return Row("refused", " ".join((str(error) or repr(error)).split()))
    if engine == "compiled" and density.engine != "compiled":
        return Row("not compiled", density.engine_reason)
    if not bool(torch.isfinite(energy).all()):
        return Row("wrong", "no finite density")
    expected = [_truth(case, role, value, z[c]) for c in range(CHAINS)]
    right = torch.stack([e for e, _ in expected]), torch.stack([g for _, g in expected])
    pairs = zip((energy, gradient), right, strict=True)
    error = max(float(((found - wanted) / (1 + wanted.abs())).abs().max()) for found, wanted in pairs)
    if not error < CLOSE:
        return Row("wrong", f"error {error:.1e}", error)
    alone = next((str(w.message) for w in told if "one after another" in str(w.message)), "")
    if alone:
        return Row("chain at a time", alone.partition("torch.func.vmap): ")[2].partition(". Usual")[0], error)
    return Row("works", CLEAR if role == "latent" and density.dim == case.size else "", error)


# plain PyTorch ------------------------------------------------------------------------------------------------------


def _truth(case: Case, role: str, value: Tensor | None, z: Tensor) -> tuple[Tensor, Tensor]:
    """Energy and gradient at one chain's unconstrained vector."""
    leaf = z.clone().requires_grad_()
    t = leaf[: case.size]
    log_joint = -0.5 * (t.square() + torch.log(torch.tensor(2 * torch.pi))).sum()
    made = case.make(_fixed(case) if case.moving and role == "latent" else t)
    if role == "observed":
        log_joint = log_joint + made.log_prob(value).sum()
    elif made.has_enumerate_support:
        values = [made.log_prob(x).sum() + _score(x, case) for x in made.enumerate_support()]
        log_joint = log_joint + torch.logsumexp(torch.stack(values), 0)
    else:
        transform = biject_to(_support(made))
        shape = transform.inverse_shape(torch.Size(made.batch_shape) + torch.Size(made.event_shape))
        free = leaf[case.size :].reshape(shape)
        x = transform(free)
        log_det = transform.log_abs_det_jacobian(free, x).sum()
        log_joint = log_joint + made.log_prob(x).sum() + log_det + _score(x, case)
    (gradient,) = torch.autograd.grad(-log_joint, leaf)
    return -log_joint.detach(), gradient


def _score(x: Tensor, case: Case) -> Tensor:
    gap = 0.7 - _summary(x, case)
    return -0.5 * (gap.square() + torch.log(torch.tensor(2 * torch.pi)))


def _summary(x: Tensor, case: Case) -> Tensor:
    """A number of a value, over its event; what lies left of it are values side by side."""
    made = case.make(_fixed(case))
    shape = torch.Size(made.batch_shape) + torch.Size(made.event_shape)
    own = len(shape)
    weights = torch.linspace(0.1, 0.5, shape.numel()).reshape(shape)
    scored = x.to(weights.dtype).clamp(-5, 5) * weights
    return scored.sum(tuple(range(-own, 0))) if own else scored


def _fixed(case: Case) -> Tensor:
    return torch.linspace(-0.4, 0.6, case.size)


def _support(made: Any) -> Any:
    support = made.support
    if "VonMises" in repr(made) or isinstance(made, dist.SineSkewed):  # angles, which Pyro has on the line
        return constraints.independent(constraints.interval(-math.pi, math.pi), len(made.event_shape))
    if isinstance(support, constraints.MixtureSameFamilyConstraint):
        return support.base_constraint
    if getattr(support, "upper_bound", None) == torch.inf:
        return constraints.greater_than_eq(support.lower_bound)
    return support


# the table ----------------------------------------------------------------------------------------------------------


def exported() -> list[str]:
    """Names of all distributions that ``pyro.distributions`` exports."""
    kinds = {name: getattr(dist, name) for name in dist.__all__}
    base = torch.distributions.Distribution
    return [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, base)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--only", nargs="*", help="names of distributions")
    parser.add_argument("--compiled", nargs="*", default=(), help="of these, compile the models as well (some seconds)")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    lines, counts = [], {"works": 0, "chain at a time": 0, "refused": 0}
    for name, case in CASES.items():
        if options.only and name not in options.only:
            continue
        began = time.perf_counter()
        rows = [checked(case, role) for role in ROLES]
        for row in rows:
            counts[row.state] = counts.get(row.state, 0) + 1
        again = [checked(case, role, "compiled").state for role in ROLES] if name in options.compiled else []
        lines.append(f"| {name} | {_cell(rows[0])} | {_cell(rows[1])} | {', '.join(again)} |")
        print(lines[-1], f"({time.perf_counter() - began:.1f} s)", flush=True)
    missing = [name for name in exported() if name not in CASES and name not in ABSTRACT]
    print(counts, "without a row:", missing)
    if options.markdown:
        options.markdown.write_text(_page(lines, counts))


def _cell(row: Row) -> str:
    said = row.why.replace("|", "\\|")
    said = said if len(said) < 160 else said[:157] + "..."
    number = "" if row.error != row.error else f" ({row.error:.0e})" if row.error else " (exact)"
    return f"{row.state}{number}" + (f": {said}" if said else "")


def _page(lines: list[str], counts: dict[str, int]) -> str:
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    others = "\n".join(f"* `{name}`: {why}." for name, why in ABSTRACT.items())
    return f"""# Pyro's distributions in models that are sampled

Made by `python -m benchmarks.distributions --markdown docs/reference/distributions.md` on {datetime.date.today()}, with
pyro {pyro.__version__} and torch {torch.__version__} on {platform.system()}.

Every distribution that `pyro.distributions` exports, once as the site of data and once as a latent site, with
parameters that are latent themselves. For three chains, energy and gradient are compared with plain PyTorch in float64,
chain by chain: the distribution's own `log_prob`, the log-determinant of the transform to its support, and the sum over
all values of a discrete latent site (`{CLEAR}`). In brackets stands the largest relative error.

"Works": all chains at once. "Chain at a time": PyTorch can't map the distribution over chains, so they are evaluated
one after another, with a warning and `metadata["engine_reason"]`. "Refused": with a sentence that says what to do.

{told}.

| distribution | observed | latent | compiled, a sample |
| --- | --- | --- | --- |
{chr(10).join(lines)}

Not distributions of their own:

{others}
"""


if __name__ == "__main__":
    main()
