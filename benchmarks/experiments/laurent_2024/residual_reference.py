r"""Fig. 8 and Table 2 of Laurent, Aldea & Franchi 2024 (arXiv 2310.08287), small: a
residual network beside its HMC.

    python -m benchmarks.experiments.laurent_2024.residual_reference --out
    runs/residual_reference

The paper takes the HMC draws of a ResNet-20 with filter-response normalisation
(Izmailov et al. 2021) for its reference. Here a residual network of three blocks with
the same normalisation and activation (1,302 weights) sees 150 digits of 8 x 8 pixels,
few enough that chains can agree on what it computes. Above the table stands the worst
R-hat over the predictions of 32 test rows. The table has the squared MMD to the
reference (median over kernels) as weights are and with symmetries removed, the mean
total variation of predictions, and scores on test rows. The reference's own row
compares one half of its chains with the other. It is one study of ``pyro-symmetric
compare``: a broken run resumes, and ``report.html`` has the plots.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.experiments.laurent_2024.approximations import asked, entry, short
from benchmarks.harness import parse, parser, print_table
from pyro_symmetric.networks import FilterResponse, FilterResponseBlock
from pyro_symmetric.study import StudySettings, run_study

ROWS = 150  # training digits
REFERENCE = {"chains": 4, "warmup": 300, "draws": 2000, "num_steps": 100}
ONE_AND_SEVERAL = ("ensemble", "mean-field", "swag", "laplace-diagonal")
COLUMNS: dict[str, tuple[str, ...]] = {
    "MMD2": ("distance", "raw", "mmd", "median"),
    "MMD2 removed": ("distance", "removed", "mmd", "median"),
    "total variation": ("distance", "prediction", "total_variation", "mean"),
    "accuracy": ("prediction", "accuracy"),
    "NLL": ("prediction", "nll"),
    "ECE": ("prediction", "ece"),
}


def net(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A stem and a block of two channels, then one of four and one of eight, each at
    half the resolution.
    """
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 2, 3, 1, 1, bias=False),
        FilterResponse(2),
        FilterResponseBlock(2, 2, 1),
        FilterResponseBlock(2, 4, 2),
        FilterResponseBlock(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_outputs),
    )


def settings_of(options: Any) -> StudySettings:
    reference = asked("hmc", **({} if options.quick else REFERENCE))
    runs = (asked(name, modes=modes) for name in ONE_AND_SEVERAL for modes in (1, 16))
    return StudySettings(
        data="digits",
        max_train=ROWS,
        net=f"{__spec__.name}:net",
        methods=(reference, *runs, "symmetrized"),
        reference=reference,
        quick=options.quick,
        device="cpu",
    )


def main(argv: list[str] | None = None) -> None:
    options = parse(parser(__doc__, seeds=1), argv)
    folder = Path(options.out or "runs/residual_reference")
    settings = settings_of(options)
    found = run_study(settings, folder, progress=options.progress).results["methods"]
    chains = found[settings.reference]["chains"]
    title = (
        f"{ROWS} training digits; the reference: {chains['num_chains']} chains of "
        f"{chains['num_draws']} draws, "
        f"worst R-hat of predictions {chains['r_hat_predictions']:.3f} "
        f"({chains['ess_predictions']:.0f} effective "
        f"draws), of weights {chains['r_hat_weights']:.3f}"
    )
    rows = [
        [short(label), *(f"{entry(row, path):.4f}" for path in COLUMNS.values())]
        for label, row in found.items()
    ]
    print_table(title, ["method", *COLUMNS], rows)


if __name__ == "__main__":
    main()
