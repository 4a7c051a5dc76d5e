"""Draw the README's second figure: a mean-field guide between two copies of a mode, and
its symmetrised twin.

    python tools/guide_figure.py docs/_static/guides.svg

The posterior of a network with two weights (Gelberg et al. 2024, section 5.1), by
quadrature; ellipses are two standard deviations of guides that stock SVI has fitted
from one start.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib
import pyro
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

import pyro_symmetric as ps

GREY, RED, BLUE = "#808890", "#f0605a", "#4c8dff"  # legible on white and on black
DISTANCE, STEPS = 2.0, 1500


class TwoWeights(nn.Module):
    """relu(w1 x) + relu(w2 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(x)).sum(-1, keepdim=True)


def main(path: Path) -> None:
    pyro.set_rng_seed(0)
    a, x = DISTANCE / math.sqrt(8), torch.linspace(-2, 2, 6)[:, None]
    y = (a * x[:, 0]).relu() + (-a * x[:, 0]).relu() + torch.randn(len(x))
    net = TwoWeights().eval()
    group = ps.find_symmetry(net, x).permutations
    model = ps.BayesianModel(net, prior=1.0, likelihood=ps.GaussianLikelihood(1.0))
    start = init_to_value(values={"hidden.weight": torch.tensor([[0.3], [-0.3]])})
    options = {"init_loc_fn": start, "init_scale": 0.3}
    figure = Figure(figsize=(6.6, 3.1), layout="constrained")
    axis = torch.linspace(-1.8, 1.8, 101)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    density = (
        model.log_joint({"hidden.weight": grid.reshape(-1, 2, 1)}, x, y)
        .exp()
        .reshape(101, 101)
    )
    guides = {
        "mean-field": AutoDiagonalNormal(model, **options),
        "symmetrised": ps.AutoSymmetrized(model, group, **options),
    }
    for ax, (name, guide) in zip(figure.subplots(1, 2), guides.items(), strict=True):
        optimiser = pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.01 ** (1 / STEPS)})
        loss = Trace_ELBO(
            num_particles=32, vectorize_particles=True, max_plate_nesting=1
        )
        svi = SVI(model, guide, optimiser, loss)
        for _ in range(STEPS):
            svi.step(x, y)
        base = (
            guide.get_posterior()
            if name == "mean-field"
            else guide.base.get_posterior()
        )
        mean, scale = base.mean.tolist(), base.stddev.tolist()
        ax.contour(
            axis,
            axis,
            density / density.max(),
            levels=[0.1, 0.3, 0.5, 0.7, 0.9],
            colors=GREY,
            linewidths=0.8,
        )
        copies = (
            [(mean, scale)]
            if name == "mean-field"
            else [(mean, scale), (mean[::-1], scale[::-1])]
        )
        for (m, s), dash in zip(copies, ("solid", "dashed"), strict=False):
            colour = RED if name == "mean-field" else BLUE
            ax.add_patch(
                Ellipse(
                    m, 4 * s[0], 4 * s[1], fill=False, lw=2, ls=dash, edgecolor=colour
                )
            )
            ax.plot(*m, marker="o", color=colour)
        elbo = -sum(loss.loss(model, guide, x, y) for _ in range(200)) / 200
        ax.set(aspect="equal", xticks=[], yticks=[], xlabel="$w_1$", ylabel="$w_2$")
        ax.set_title(
            f"{name}: ELBO {elbo:.2f}".replace("-1", "\N{MINUS SIGN}1"), color=GREY
        )
        for part in (ax.xaxis.label, ax.yaxis.label, *ax.spines.values()):
            part.set_color(GREY)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "guides"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
