"""Draw the figure of the README: chains of a mixture, as drawn and in one frame.

    python tools/figure.py docs/_static/copies.svg

The SVG has no background and loads no font, and its colours stand out from light and
from dark pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.posterior.statistics import chain_statistics

COLOURS = ("#4c8dff", "#f0a020", "#f0605a")
GREY = "#808890"  # legible on white and on black
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 170, 44, 96, 36  # of a panel, and around it
TEXT = 24  # 11 pixels on a phone 330 pixels wide
SHOWN = 40  # draws of each chain
LOW, HIGH = -7.0, 8.0


def mixture(data: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    with pyro.plate("data", len(data)):
        pyro.sample(
            "x",
            dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 1.0)),
            obs=data,
        )


def panel(
    posterior: ps.Posterior, left: int, title: str, notes: list[str]
) -> list[str]:
    """One panel: the location that each component has in each draw, chain after
    chain.
    """
    locs = posterior.samples["locs"][:, :: max(1, posterior.num_samples // SHOWN)][
        :, :SHOWN
    ]
    chains, draws, components = locs.shape
    step = WIDTH / (chains * draws)
    parts = [text(left, TOP - 72, title, "bold")]
    parts += [text(left, TOP - 43 + 28 * row, line) for row, line in enumerate(notes)]
    for chain in range(chains + 1):
        x = left + chain * draws * step
        parts.append(
            f'<path d="M{x:.0f} {TOP}v{HEIGHT}" stroke="{GREY}" stroke-opacity=".35"/>'
        )
    for component in range(components):
        heights = TOP + HEIGHT * (HIGH - locs[..., component].flatten()) / (HIGH - LOW)
        dots = "".join(
            f"M{left + (i + 0.5) * step:.1f} {y:.1f}h0"
            for i, y in enumerate(heights.tolist())
        )
        parts.append(
            f'<path d="{dots}" stroke="{COLOURS[component]}" stroke-width="3" stroke-linecap="round"/>'
        )
    parts.append(text(left, TOP + HEIGHT + 30, f"draws of {chains} chains"))
    return parts


def text(x: float, y: float, words: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{TEXT}" font-weight="{weight}" fill="{GREY}">{words}</text>'


def main(path: Path) -> None:
    pyro.set_rng_seed(0)
    data = torch.cat([torch.randn(50) - 4, torch.randn(70), torch.randn(30) + 5])
    group = ps.Group.declare(
        {"weights": ("k",), "locs": ("k",)},
        {"weights": torch.ones(3), "locs": torch.zeros(3)},
    )
    posterior = ps.sample(
        mixture,
        data,
        num_samples=200,
        num_warmup=300,
        num_chains=8,
        seed=0,
        progress=False,
    )
    aligned = ps.align_many(posterior, group, progress=False).posterior
    parts = []
    for drawn, left, title in (
        (posterior, LEFT, "as drawn"),
        (aligned, LEFT + WIDTH + GAP, "modulo symmetry"),
    ):
        means = drawn.samples["locs"].mean((0, 1)).tolist()
        worst = float(chain_statistics(drawn.samples["locs"]).r_hat.max())
        listed = ", ".join(
            f"{mean:.1f}".replace("-", "\N{MINUS SIGN}") for mean in means
        )
        parts += panel(drawn, left, title, [f"R-hat {worst:.2f}", f"means {listed}"])
    for value in (-4, 0, 5):
        y = TOP + HEIGHT * (HIGH - value) / (HIGH - LOW)
        parts.append(
            text(LEFT - 40, y + 8, f"{value:>2}".replace("-", "\N{MINUS SIGN}"))
        )
    width, height = LEFT + 2 * WIDTH + GAP + 10, TOP + HEIGHT + 40
    style = 'font-family="system-ui, sans-serif" fill="none"'
    label = "Locations of a mixture's three components in the draws of eight chains, as drawn and modulo symmetry"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    head += f'viewBox="0 0 {width} {height}" role="img" aria-label="{label}" {style}>'
    path.write_text("\n".join([head, *parts, "</svg>", ""]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
