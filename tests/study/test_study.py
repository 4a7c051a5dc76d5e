"""The study end to end on tiny budgets: what it writes, what it reuses, what it
refuses.
"""

import copy
import csv
import functools
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric import cli
from pyro_symmetric.compare.frames import canonical_frame
from pyro_symmetric.study import (
    METHODS,
    Fit,
    StudySettings,
    register,
    report,
    run_study,
)
from pyro_symmetric.study.measure import (
    GROUPS,
    OWN_HALF,
    _chains,
    between,
    concerns,
    draws_of,
    groups_of,
    judge_together,
    reference_of,
)
from pyro_symmetric.study.problem import build_problem, settle_statistics
from pyro_symmetric.study.report import MISSING, table_of

TINY = {
    "mean-field": {"steps": 30},
    "symmetrized": {"steps": 30},
    "symmetrized-blocks": {"steps": 30},
    "aligned": {"steps": 30, "path_points": 3, "path_draws": 4},
    "ensemble": {"modes": 12, "steps": 20},
    "sghmc": {"chains": 3, "warmup": 5, "draws": 8, "num_steps": 2, "batch_size": 32},
    "hmc": {"chains": 4, "warmup": 10, "draws": 10, "num_steps": 3},
}


@pytest.fixture(autouse=True)
def quick_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small budgets, and figures that are drawn but not rendered, which takes half of a
    study's time; those of ``finished`` are."""
    for name, budget in TINY.items():
        monkeypatch.setitem(METHODS, name, replace(METHODS[name], quick=budget))
    monkeypatch.setattr(report, "_as_image", lambda figure: "")
    monkeypatch.setattr(report, "_save", lambda figure, path: None)


def settings(**changes: Any) -> StudySettings:
    return StudySettings(
        **{
            "data": "wine",
            "hidden": (4,),
            "quick": True,
            "draws": 24,
            "device": "cpu",
            **changes,
        }
    )


def run(out: Path, **changes: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    return run_study(settings(**changes), out, progress=False, say=said.append), said


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One study of all methods, for the tests that only look at it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, budget in TINY.items():
            patch.setitem(METHODS, name, replace(METHODS[name], quick=budget))
        return run(tmp_path_factory.mktemp("study"), data="digits", max_train=200)[0]


LABELS = [
    "mean-field",
    "symmetrized",
    "symmetrized-blocks",
    "aligned",
    "aligned midpoint",
    "unaligned midpoint",
    "ensemble",
    "sghmc",
    "hmc",
]


def test_results_hold_every_method_and_valid_json(finished: Any) -> None:
    results = json.loads(
        (finished.out / "results.json").read_text(),
        parse_constant=lambda c: pytest.fail(f"{c} in JSON"),
    )
    assert list(results["methods"]) == LABELS
    assert results["settings"] == finished.problem.settings.to_dict()
    assert results["environment"]["torch"] == torch.__version__
    for label, row in results["methods"].items():
        assert 0 <= row["prediction"]["accuracy"] <= 1
        assert row["prediction"]["detection"]
        assert row["distance"]["to"] == (
            "its own other half" if label == "hmc" else "hmc"
        )
        assert list(row["distance"]) == ["to", "prediction", "raw", "removed"]
        assert ("evidence" in row) == (label not in ("ensemble", "sghmc", "hmc"))
        assert (row["chains"] is not None) == (label in ("sghmc", "hmc"))
    assert results["methods"]["symmetrized"]["evidence"]["bound"] == "exact"
    assert set(results["methods"]["aligned"]["barrier"]) == {"aligned", "unaligned"}


def test_distances_begin_with_those_of_the_predictions(finished: Any) -> None:
    """Against the formula, at all draws' mean probabilities; the reference's own halves
    are the ruler.
    """
    problem, rows = finished.problem, finished.results["methods"]

    def mean_probabilities(weights: Any) -> torch.Tensor:
        return (
            problem.model.outputs(weights, problem.dataset.test_x).softmax(-1).mean(0)
        )

    law = {
        label: mean_probabilities(draws.raw) for label, draws in finished.draws.items()
    }
    for label in LABELS[:-1]:
        found = rows[label]["distance"]["prediction"]
        expected = 0.5 * (law[label] - law["hmc"]).abs().sum(-1).mean()
        assert found["total_variation"]["mean"] == pytest.approx(
            float(expected), rel=1e-4
        )
        assert found["nll_gap"] == pytest.approx(
            rows[label]["prediction"]["nll"] - rows["hmc"]["prediction"]["nll"]
        )
    chains = {
        site: value.to(problem.x)
        for site, value in finished.fits["hmc"].posterior.samples.items()
    }
    first, second = (
        mean_probabilities({s: v[k].flatten(0, 1) for s, v in chains.items()})
        for k in ([0, 1], [2, 3])
    )
    expected = 0.5 * (first - second).abs().sum(-1).mean()
    assert rows["hmc"]["distance"]["prediction"]["total_variation"][
        "mean"
    ] == pytest.approx(float(expected), rel=1e-4)
    assert [column[0] for column in table_of("distances", rows)["columns"]][:2] == [
        "TV predictions",
        "NLL gap",
    ]


def test_the_report_stands_alone(finished: Any) -> None:
    html = finished.report.read_text()
    assert (
        len(re.findall(r'src="data:image/png;base64,', html))
        == len(re.findall("<img", html))
        == 6
    )
    assert not re.findall(r'(src|href)="(?!data:)', html)
    for label in LABELS:
        assert f"<td>{label}</td>" in html
    for line in (
        *finished.results["concerns"],
        "predicts the test rows best",
        "pyro-symmetric compare --max-train 200 ",
    ):
        assert line in html


def test_figures_and_tables_lie_beside_the_page(finished: Any) -> None:
    figures = sorted(path.name for path in (finished.out / "figures").iterdir())
    assert {Path(name).suffix for name in figures} == {".svg", ".pdf"}
    assert len(figures) == 2 * len(re.findall("<img", finished.report.read_text()))
    pca = (finished.out / "figures" / "all-draws-as-drawn.svg").read_text()
    assert re.search(r"component 1 \(\d+% of variance\)", pca)
    with open(finished.out / "tables" / "predictions.csv", newline="") as file:
        head, *rows = list(csv.reader(file))
    assert [row[0] for row in rows] == LABELS
    nll = head.index("NLL")
    for row in rows:
        scored = finished.results["methods"][row[0]]
        assert float(row[nll]) == scored["prediction"]["nll"]
        assert float(row[nll + 1]) == scored["errors"]["prediction/nll"]
    assert "± " in finished.report.read_text()


def test_scores_have_standard_errors_paired_with_the_reference(finished: Any) -> None:
    """Left-out groups of equal size give the deviation of groups' means, exactly."""
    problem = finished.problem
    labels = problem.dataset.test_y

    def of_rows(name: str) -> torch.Tensor:
        probabilities = finished.draws[name].predictive.double().mean(0)
        return -probabilities[range(len(labels)), labels].log()

    def error(values: torch.Tensor) -> float:
        groups = [values[groups_of(len(values)) == k] for k in range(GROUPS)]
        left_out = torch.stack(
            [torch.cat(groups[:k] + groups[k + 1 :]).mean() for k in range(GROUPS)]
        )
        variance = (left_out - left_out.mean()).square().sum() * (GROUPS - 1) / GROUPS
        return float(variance.sqrt())

    row = finished.results["methods"]["mean-field"]
    difference = of_rows("mean-field") - of_rows("hmc")
    assert row["errors"]["prediction/nll"] == pytest.approx(
        error(of_rows("mean-field")), rel=1e-4
    )
    assert row["paired"]["nll"] == pytest.approx(float(difference.mean()), rel=1e-4)
    assert row["errors"]["paired/nll"] == pytest.approx(error(difference), rel=1e-4)
    plain = of_rows("mean-field")
    usual = float(plain.std() / len(plain) ** 0.5)
    assert row["errors"]["prediction/nll"] == pytest.approx(usual, rel=0.5)


def test_the_level_holds_over_the_tests_of_all_methods() -> None:
    """Nine methods whose draws are invariant: the smallest of their p-values, 0.0076, is
    no evidence; alone it would be."""
    verdict = "not invariant at level 0.05 (p-value 0.0076, 9 draws): 1 of 2 sets"
    rows = [
        {
            "invariance": {
                "p_value": p,
                "level": 0.05,
                "num_draws": 9,
                "verdict": verdict,
            }
        }
        for p in (0.0076, *(0.1 * k for k in range(2, 10)))
    ]
    alone = copy.deepcopy(rows[:1])
    judge_together([*rows, {"invariance": None}])
    assert rows[0]["invariance"]["adjusted"] == pytest.approx(9 * 0.0076)
    assert not any(row["invariance"]["rejected"] for row in rows)
    said = rows[0]["invariance"]["verdict"]
    assert said.startswith("no evidence against invariance at level 0.05 over all 9")
    judge_together(alone)
    assert alone[0]["invariance"]["rejected"]
    assert alone[0]["invariance"]["verdict"].endswith(": 1 of 2 sets")


def test_numbers_that_contradict_what_was_trained_for_are_told() -> None:
    def bound(elbo: float) -> dict[str, Any]:
        return {"evidence": {"symmetrized_elbo": elbo, "symmetrized_error": 1.4}}

    rows = {"mean-field": bound(-706.6), "symmetrized": bound(-711.0), "hmc": {}}
    (sentence,) = concerns(rows, "hmc")
    assert "-711.0, is below" in sentence
    assert "give it more steps" in sentence
    assert concerns({**rows, "symmetrized": bound(-709.0)}, "hmc") == []
    assert concerns({"symmetrized": bound(-711.0)}, "hmc") == []


def test_chains_have_r_hats_modulo_symmetry_beside_raw_ones(finished: Any) -> None:
    for label in ("sghmc", "hmc"):
        row = finished.results["methods"][label]["chains"]
        posterior = finished.fits[label].posterior
        spaces = ps.diagnose(posterior, finished.problem.symmetry).statistics
        sites = spaces["modulo symmetry"].values()
        worst = max(float(numbers.r_hat.max()) for numbers in sites)
        assert row["r_hat_modulo"] == pytest.approx(worst)


def test_canonical_draws_compute_the_same_function(finished: Any) -> None:
    problem, draws = finished.problem, finished.draws["hmc"]
    outputs = [
        problem.model.outputs(weights, problem.dataset.test_x)
        for weights in (draws.raw, draws.canonical)
    ]
    torch.testing.assert_close(
        *(logits.softmax(-1) for logits in outputs), rtol=1e-3, atol=1e-4
    )
    assert not torch.allclose(draws.raw["1.weight"], draws.canonical["1.weight"])


def test_a_second_run_reuses_what_is_finished_and_gives_the_same_results(
    tmp_path: Path,
) -> None:
    first, _ = run(tmp_path, methods=("mean-field", "hmc"))
    second, said = run(tmp_path, methods=("mean-field", "hmc"))
    assert sum(line.startswith("Reusing") for line in said) == 2
    assert second.results["methods"] == first.results["methods"]


def test_methods_may_be_added_later_and_don_t_disturb_each_other(
    tmp_path: Path,
) -> None:
    alone, _ = run(tmp_path / "alone", methods=("hmc",))
    after, _ = run(tmp_path / "after", methods=("ensemble", "hmc"))
    more, said = run(tmp_path / "alone", methods=("ensemble", "hmc"))
    assert [line for line in said if line.startswith("Reusing")] == [
        line for line in said if "Reusing hmc" in line
    ]
    for other in (after, more):
        assert torch.equal(
            alone.draws["hmc"].raw["0.weight"], other.draws["hmc"].raw["0.weight"]
        )


def test_samples_that_hold_other_draws_than_were_written_are_made_anew(
    tmp_path: Path,
) -> None:
    """A flipped bit; another method's samples; those of another study, by settings that
    only decide the draws.
    """
    first, _ = run(tmp_path / "a", methods=("mean-field", "symmetrized"))
    run(tmp_path / "b", methods=("mean-field", "symmetrized"), seed=5)
    expected = first.draws["mean-field"].raw["0.weight"].clone()
    stored = tmp_path / "a/samples/mean-field"

    def flip() -> None:
        file = stored / "posterior/0.weight/c/0/0/0/0"
        flipped = bytearray(file.read_bytes())
        flipped[-5] ^= 4
        file.write_bytes(flipped)

    def replace(name: str) -> None:
        shutil.rmtree(stored)
        shutil.copytree(tmp_path / name, stored)

    others = [
        functools.partial(replace, name)
        for name in ("a/samples/symmetrized", "b/samples/mean-field")
    ]
    for damage, told in (
        (flip, "damaged"),
        (others[0], "of another"),
        (others[1], "of another"),
    ):
        damage()
        again, said = run(tmp_path / "a", methods=("mean-field", "symmetrized"))
        assert any(f"{stored} is" in line and told in line for line in said)
        assert sum(line.startswith("Fitting") for line in said) == 1
        assert torch.equal(again.draws["mean-field"].raw["0.weight"], expected)


THEIRS = {
    "report.html": "mine",
    "results.json": "[1]",
    "samples/hmc": "mine",
    "unfinished/thesis": "mine",
}


@pytest.mark.parametrize("name", [*THEIRS, "settings.json"])
def test_a_folder_that_holds_no_study_is_refused_and_left_as_it_is(
    name: str, tmp_path: Path
) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text(THEIRS.get(name, '{"settings": {"theme": "dark"}}'))
    with pytest.raises(
        FileExistsError,
        match=rf"is not the folder of a study but holds {Path(name).parts[0]}, .* "
        r"Nothing was changed",
    ):
        run_study(settings(methods=("mean-field",)), tmp_path, progress=False)
    assert [
        (file, file.read_text()) for file in tmp_path.rglob("*") if file.is_file()
    ] == [(theirs, THEIRS.get(name, '{"settings": {"theme": "dark"}}'))]


def test_a_study_leaves_the_callers_parameters_and_generators_alone(
    tmp_path: Path,
) -> None:
    kept = pyro.param(
        "kept", torch.ones(2), constraint=pyro.distributions.constraints.positive
    )
    kept.unconstrained().grad = torch.ones(2)
    state = torch.get_rng_state()
    first, _ = run(tmp_path / "a", methods=("mean-field", "ensemble"))
    assert list(pyro.get_param_store().keys()) == ["kept"]
    assert torch.equal(pyro.param("kept").unconstrained().grad, torch.ones(2))
    assert torch.equal(torch.get_rng_state(), state)
    pyro.set_rng_seed(99)
    again, _ = run(tmp_path / "b", methods=("mean-field", "ensemble"))
    for label in first.draws:  # the seed alone decides
        assert all(
            torch.equal(again.draws[label].raw[site], value)
            for site, value in first.draws[label].raw.items()
        )
    with pytest.raises(ValueError, match=r"prior_scale: .*another --out"):
        run(tmp_path / "a", methods=("mean-field",), prior_scale=("2",))


def test_a_prior_scale_may_be_a_number_or_a_text() -> None:
    for given, found in (
        (0.5, ("0.5",)),
        ("2,1.*=0.5", ("2", "1.*=0.5")),
        ((1.0,), ("1",)),
        (3, ("3",)),
    ):
        assert StudySettings(prior_scale=given).prior_scale == found  # type: ignore[arg-type]


def test_another_network_or_table_of_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.csv"
    rows = [f"{i},{i * i % 7},{'ab'[i % 2]}" for i in range(40)]
    table.write_text("\n".join(["u,v,label", *rows]))
    changes: dict[str, Any] = {
        "data": f"csv:{table}",
        "target": "label",
        "methods": ("mean-field",),
    }
    run(tmp_path / "out", **changes)
    table.write_text("\n".join(["u,v,label", *rows[:30]]))
    with pytest.raises(ValueError, match=r"another study \(data: "):
        run(tmp_path / "out", **changes)


def test_another_budget_makes_a_method_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, methods=("ensemble",))
    monkeypatch.setitem(
        METHODS,
        "ensemble",
        replace(METHODS["ensemble"], quick={"modes": 9, "steps": 5}),
    )
    study, said = run(tmp_path, methods=("ensemble", "ensemble:modes=7"))
    assert any("method or budget" in line for line in said)
    assert [draws.count for draws in study.draws.values()] == [9, 7]


def test_a_reference_that_has_not_converged_is_named_at_the_top(finished: Any) -> None:
    assert "has not converged" in finished.results["concerns"][0]
    good = {"hmc": {"chains": {"r_hat_predictions": 1.01, "divergences": 0}}}
    assert concerns(good, "hmc") == []
    assert (
        len(
            concerns(
                {
                    "hmc": {
                        "chains": {"r_hat_predictions": float("nan"), "divergences": 3}
                    }
                },
                "hmc",
            )
        )
        == 2
    )


def test_the_reference_is_split_by_chains_and_gives_its_kernels_to_all() -> None:
    problem = build_problem(settings())
    weights = {
        site: torch.randn(4, 30, *shape)
        for site, shape in problem.model.site_shapes.items()
    }
    weights["0.bias"][:2] += 50
    posterior = ps.Posterior(weights, kind="chains")
    reference = reference_of("hmc", posterior, draws_of(posterior, problem), problem)
    first, second = reference.halves
    assert first.count == second.count == reference.draws.count == 24
    assert bool((first.raw["0.bias"] > 25).all())
    assert bool((second.raw["0.bias"] < 25).all())
    itself = between(first, second, problem.symmetry, reference.own)
    assert itself["raw"]["mmd"].value == pytest.approx(
        reference.own["raw"]["mmd"].value
    )


def test_an_interrupt_keeps_the_methods_that_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(
            METHODS, "ensemble", replace(METHODS["ensemble"], fit=interrupted)
        )
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, methods=("mean-field", "ensemble"))
    _, said = run(tmp_path, methods=("mean-field", "ensemble"))
    assert [
        line.split()[1] for line in said if line.startswith(("Reusing", "Fitting"))
    ] == ["mean-field", "ensemble"]


@pytest.mark.filterwarnings("ignore:interrupted:RuntimeWarning")
def test_a_method_that_was_stopped_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, calls = "hmc", 20  # 10 + 10 iterations
    whole, _ = run(tmp_path / "whole", methods=(method,), reference=method)
    original, made, delay = ps.HMC.step, [], [0.05]

    def stopping(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        time.sleep(delay[0])
        if len(made) == calls - 1:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(ps.HMC, "step", stopping)
    stopped = tmp_path / "stopped"
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run(stopped, methods=(method,), reference=method)
    assert any((stopped / "unfinished").iterdir())
    delay[0] = 0.0
    time.sleep(0.5)
    again, _ = run(stopped, methods=(method,), reference=method)
    # what it took before the stop counts, the pause after it doesn't
    assert (
        0.05 * (calls - 2)
        < again.fits[method].found["seconds"]
        < time.perf_counter() - began - 0.5
    )
    assert len(made) == calls + 1  # nothing but the call that was stopped is made twice
    assert not any((stopped / "unfinished").iterdir())
    for site, value in whole.fits[method].posterior.samples.items():
        assert torch.equal(again.fits[method].posterior.samples[site], value)


@pytest.mark.filterwarnings("ignore:interrupted:RuntimeWarning")
def test_what_a_stopped_method_left_is_made_anew_only_if_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "hmc"
    original, made = ps.HMC.step, []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        if len(made) == 3:
            raise KeyboardInterrupt
        if len(made) == 4:
            raise ValueError("the method's own")
        return original(*args, **kwargs)

    monkeypatch.setattr(ps.HMC, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, methods=(method,), reference=method)
    with pytest.raises(ValueError, match="the method's own"):
        run(tmp_path, methods=(method,), reference=method)
    # a mistake in the method costs nothing that was computed
    (left,) = (tmp_path / "unfinished").iterdir()
    for file in left.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    again, said = run(tmp_path, methods=(method,), reference=method)
    assert any("started again" in line for line in said)
    assert again.fits[method].posterior.num_samples > 0


def test_a_method_that_the_problem_is_too_large_for_is_left_out_and_told(
    tmp_path: Path,
) -> None:
    # Wine: 13 inputs, 4 units, 3 outputs. A unit has 13 + 1 + 3 weights, so the blocks
    # 4 * 17^2 entries.
    small, large = (f"symmetrized-blocks:largest={entries}" for entries in (1155, 1156))
    study, said = run(
        tmp_path, methods=("mean-field", small, large), reference="mean-field"
    )
    assert list(study.fits) == list(study.results["methods"]) == ["mean-field", large]
    (told,) = (
        line
        for line in study.results["concerns"]
        if line.startswith(f"{small} is left out")
    )
    assert "1,156" in told
    assert told in said
    with pytest.raises(ValueError, match="too large for every method"):
        run(tmp_path, methods=(small,), reference=small)


def test_adding_a_method_is_one_small_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:

        @register("prior", {"draws": 24})
        def prior(problem: Any, budget: Any, progress: bool) -> Any:
            """Draws from the prior."""
            draws = {
                site: prior.sample((budget.draws,))
                for site, prior in problem.model.priors().items()
            }
            yield Fit(ps.Posterior.from_samples(draws, kind="independent"), {})

        study, _ = run(tmp_path, methods=("prior", "hmc"))
        assert study.results["methods"]["prior"]["distance"]["to"] == "hmc"
        with pytest.raises(ValueError, match="already"):
            register("prior", {})(prior)
    finally:
        METHODS.pop("prior", None)


# of a budget as tiny as this
@pytest.mark.filterwarnings("ignore:.*of the draws diverged:RuntimeWarning")
def test_regression_with_learnt_noise_runs_through_all_methods(tmp_path: Path) -> None:
    study, _ = run(tmp_path, data="diabetes", max_train=60, activation="tanh")
    rows = study.results["methods"]
    assert list(rows) == LABELS
    assert all(
        row["prediction"]["rmse"] > 0 and 0 <= row["prediction"]["coverage"]["0.9"] <= 1
        for row in rows.values()
    )
    assert bool((study.draws["hmc"].raw["noise_scale"] > 0).all())
    for row in rows.values():
        assert 0 < row["distance"]["prediction"]["total_variation"]["mean"] <= 1
    gap = (
        rows["hmc"]["prediction"]["log_predictive_density"]
        - rows["ensemble"]["prediction"]["log_predictive_density"]
    )
    assert rows["ensemble"]["distance"]["prediction"]["nll_gap"] == pytest.approx(gap)
    assert "RMSE" in study.report.read_text()
    problem = study.problem  # in the data's own units, as the literature gives it
    outputs = problem.model.outputs(study.draws["ensemble"].raw, problem.dataset.test_x)
    error = (
        outputs.reshape(len(outputs), -1).mean(0) - problem.dataset.test_y
    ) * problem.dataset.y_scale
    assert rows["ensemble"]["prediction"]["rmse"] == pytest.approx(
        float(error.square().mean().sqrt()), rel=1e-4
    )


def test_a_single_network_has_predictions_but_no_distance_and_can_be_no_reference(
    tmp_path: Path,
) -> None:
    one, two = "ensemble:modes=1", "ensemble:modes=2"
    study, _ = run(tmp_path, methods=(one, "ensemble", two), reference="ensemble")
    rows = study.results["methods"]
    assert (rows[one]["draws"], rows[two]["draws"]) == (1, 2)
    assert rows[one]["distance"] is rows[one]["invariance"] is None
    assert rows[two]["distance"]["to"] == "ensemble"
    samples = {name: study.fits[name].posterior.samples["0.weight"][0] for name in rows}
    # networks of their own
    assert not torch.equal(samples["ensemble"][0], samples[two][0])
    with pytest.raises(ValueError, match="--reference ensemble:modes=1 gives 1 draws"):
        run(tmp_path, methods=(one, two), reference="ensemble")


def test_without_the_reference_distances_are_left_out_and_that_is_said(
    tmp_path: Path,
) -> None:
    study, said = run(tmp_path, methods=("mean-field",))
    assert study.results["methods"]["mean-field"]["distance"] is None
    assert any(line.startswith("No distances") for line in said)


# pieces -------------------------------------------------------------------------------


def test_batch_normalisation_holds_the_statistics_of_the_training_rows() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    ).eval()
    # 256 rows at a time would leave one, of which there is no variance
    x = 50 + 30 * torch.randn(513, 3)
    settle_statistics(net, x)
    assert net[1].momentum == 0.1
    assert not net.training
    hidden = net[0](x).detach()
    torch.testing.assert_close(net[1].running_mean, hidden.mean(0), rtol=0.05, atol=1.0)
    # the mean of three parts'
    torch.testing.assert_close(net[1].running_var, hidden.var(0), rtol=0.1, atol=0.0)
    known = {name: value.clone() for name, value in net.named_buffers()}
    settle_statistics(net, x - 100)  # a network that was trained keeps its own
    assert all(torch.equal(value, known[name]) for name, value in net.named_buffers())


def test_a_users_network_is_built_by_its_callable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def small(input_shape, num_outputs):\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], 3), nn.ReLU(), "
        "nn.Linear(3, num_outputs))\n"
        "def wrong(input_shape, num_outputs):\n"
        "    return nn.Linear(input_shape[0], num_outputs + 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = build_problem(settings(net="my_nets:small"))
    assert problem.symmetry.permutations.factors == {"0": 3}
    with pytest.raises(ValueError, match="needs"):
        build_problem(settings(net="my_nets:wrong"))


def test_canonical_draws_of_a_network_with_batch_normalisation_predict_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statistics stay as they are: only what leaves them alone is removed."""
    (tmp_path / "my_norms.py").write_text(
        "from torch import nn\n"
        "def normalised(input_shape, num_outputs):\n"
        "    first = [nn.Linear(input_shape[0], 6), nn.BatchNorm1d(6), nn.ReLU()]\n"
        "    return nn.Sequential(*first, nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, "
        "num_outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = build_problem(settings(net="my_norms:normalised"))
    assert problem.symmetry.permutations.factors == {"3": 5}
    net = problem.model.net
    draws = {name: torch.randn(4, *p.shape) for name, p in net.named_parameters()}
    moved = canonical_frame(draws, problem.symmetry)
    assert not torch.equal(moved["3.weight"], draws["3.weight"])
    for k in range(4):
        before, after = (
            torch.func.functional_call(
                net, {s: v[k] for s, v in weights.items()}, (problem.x[:9],)
            ).softmax(-1)
            for weights in (draws, moved)
        )
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


# the command line ---------------------------------------------------------------------


def test_the_command_runs_the_study_and_names_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"compare --data wine --hidden 4 --quick --draws 24 --methods mean-field,hmc --no-progress --out {tmp_path}"
    assert cli.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith(f"Report: {tmp_path / 'report.html'}")
    assert "Distance to the reference" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data nonsense", "nonsense"),
        ("--methods hmc,magic", "no method 'magic'"),
        ("--noise 0.1", "--noise 0.1 is for regressions"),
        ("--prior-scale 1,nothing.*=2", "prior has scales for ['nothing.*']"),
        ("--net nowhere:build", "can't be imported"),
        ("--net refused:Branching", "can't be traced"),
    ],
)
def test_bad_input_ends_in_one_sentence_and_a_non_zero_exit(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "refused.py").write_text(
        "import torch\n"
        "class Branching(torch.nn.Module):\n"
        "    def __init__(self, input_shape, num_outputs):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(input_shape[0], num_outputs)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x) if float(x.sum()) > 0 else -self.layer(x)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = cli.main(
        f"compare --data wine --quick --no-progress --out {tmp_path / 'out'} {arguments}".split()
    )
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert captured.err.startswith("pyro-symmetric: ")


def test_a_full_disk_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Any, path: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(ps.Posterior, "save", full)
    code = cli.main(
        f"compare --data wine --hidden 4 --quick --methods ensemble --no-progress --out {tmp_path}".split()
    )
    assert code == 2
    assert "No space left on device" in capsys.readouterr().err


def test_the_best_of_a_column_is_marked_and_the_reference_does_not_compete() -> None:
    rows = {
        name: {"distance": {"to": to, "removed": {"mmd": {"median": value}}}}
        for name, to, value in (
            ("a", "hmc", 0.2),
            ("b", "hmc", 0.1),
            ("hmc", OWN_HALF, 0.0),
        )
    }
    table = table_of("distances", rows)
    titles = [column[0] for column in table["columns"]]
    cells = {
        name: dict(zip(titles, row, strict=True)) for name, row in table["rows"].items()
    }
    found = {name: row["MMD² removed"] for name, row in cells.items()}
    assert found == {
        "a": ("0.2000", False),
        "b": ("0.1000", True),
        "hmc": ("0.0000", False),
    }
    assert cells["a"]["W₁ raw"] == (MISSING, False)


def test_chains_of_few_draws_are_measured_as_drawn_and_modulo_symmetry() -> None:
    settings = StudySettings(data="diabetes", hidden=(3,), max_train=40, device="cpu")
    problem = build_problem(settings)
    draws = {
        site: torch.rand(2, 4, *shape)
        for site, shape in problem.model.site_shapes.items()
    }
    numbers = _chains(ps.Posterior(draws, kind="chains"), problem)
    assert numbers["r_hat_weights"] > 0.5
    assert numbers["r_hat_modulo"] > 0.5


def test_chains_of_many_draws_are_matched_to_the_frame_of_those_compared() -> None:
    """Copies of a mode that are clearly apart: R-hat is that before they were mixed."""
    settings = StudySettings(
        data="diabetes",
        hidden=(4,),
        activation="tanh",
        max_train=40,
        draws=8,
        device="cpu",
    )
    problem = build_problem(settings)
    draws = {
        site: 3 * torch.randn(shape) + 0.1 * torch.randn(2, 80, *shape)
        for site, shape in problem.model.site_shapes.items()
        if site != "noise_scale"
    }
    mixed = problem.symmetry.finite.sample((2, 80))(draws)
    noise = {"noise_scale": torch.rand(2, 80)}
    found = [
        _chains(ps.Posterior({**weights, **noise}, kind="chains"), problem)
        for weights in (draws, mixed)
    ]
    expected = found[0]["r_hat_weights"]
    assert found[1]["r_hat_modulo"] == pytest.approx(expected, abs=1e-6)
    assert found[1]["r_hat_weights"] != pytest.approx(expected, abs=1e-3)
