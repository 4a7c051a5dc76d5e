"""The worth of a GPU to each flow, measured in one go and in under nine minutes: time, share of the device's peak,
memory, and stock Pyro and NumPyro (where JAX sees the device) beside them.

    python -m benchmarks.performance.gpu --json gpu.json  # on a machine with a GPU
    python -m benchmarks.performance.gpu --quick  # toy sizes on the CPU, two minutes: shows that everything works
    python -m benchmarks.performance.gpu --quick --pretend FOLDER  # on a pretend device, see launches.py
    python -m benchmarks.performance.gpu --only samplers mmd --seconds 200

Each part runs in a process of its own and for a time of its own (with --quick for as long as it takes). What it has
measured by then is kept, and so is what went wrong; the others go on. A part that begins when less than ten seconds are
left is skipped, and says so. All data are made up or come with scikit-learn: nothing is downloaded.

Peaks are measured, too: of a product of large float32 matrices (without TensorFloat-32) and of a copy within the
device. ``share of operations`` is a flow's arithmetic over the first, ``share of bytes`` its traffic over the second.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import MCMC, SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import print_table
from benchmarks.performance.sampler_gradients import Problem, PyroNet, numpyro_model, problem
from pyro_symmetric.networks import optunet, resnet18, resnet20

TOTAL, LEAST = 530.0, 10.0  # seconds of all parts, and without which none begins
MARGIN = 5.0  # seconds of a part's time that are left to say that a command took too long
STEPS = 8  # leapfrog steps of an iteration


@dataclass
class Bench:
    """One part's device, sizes, clock and rows.

    :param end: when it has to be done, by ``time.monotonic``.
    :param peaks: operations and bytes a second; empty before they are measured.
    """

    device: torch.device
    quick: bool
    end: float
    peaks: dict[str, float]
    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, **found: Any) -> None:
        """Keep a row at once, so that nothing measured is lost."""
        self.rows.append({"name": name, **found})
        self.path.write_text(json.dumps(self.rows))

    def note(self, **found: Any) -> None:
        """More about the last row, if it holds a measurement."""
        if "seconds" in self.rows[-1]:
            self.add(**self.rows.pop(), **found)

    def measure(self, name: str, call: Callable[[], object], flops: float = 0.0, traffic: float = 0.0) -> float:
        """Seconds of a call, and the most memory that it takes; a row that says so, or that its time was used up."""
        if time.monotonic() > self.end:
            self.add(name, skipped="the part's time is used up")
            return math.nan
        try:
            return self._measured(name, call, flops, traffic)
        except Exception as error:  # of one size; others may fit
            self.add(name, error=f"{type(error).__name__}: {str(error)[:300]}")
            return math.nan

    def _measured(self, name: str, call: Callable[[], object], flops: float, traffic: float) -> float:
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.clocked(call)
        once = self.clocked(call)
        times = 1 if self.quick else max(1, min(50, int(1.0 / max(once, 1e-6))))
        seconds = min([once, *[self.clocked(call) for _ in range(times)]])
        row: dict[str, Any] = {"seconds": seconds}
        for of, amount in (("operations", flops), ("bytes", traffic)):
            if amount and of in self.peaks:
                row[f"share of {of}"] = amount / seconds / self.peaks[of]
        self.add(name, **row, megabytes=torch.cuda.max_memory_allocated() / 1e6 if gpu else None)
        return seconds

    def clocked(self, call: Callable[[], object]) -> float:
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def at(self, small: Any, large: Any) -> Any:
        """A size."""
        return small if self.quick else large


def on_gpu(bench: Bench) -> bool:
    return bench.device.type == "cuda"


# parts --------------------------------------------------------------------------------------------------------------


def device(bench: Bench) -> None:
    """The device's name and its peaks."""
    name = torch.cuda.get_device_name() if on_gpu(bench) else "CPU"
    bench.add("device", device=name, torch=torch.__version__, pyro_symmetric=ps.__version__)
    side, numbers = bench.at(256, 8192), bench.at(2**20, 2**28)
    a, b = torch.randn(2, side, side, device=bench.device)
    matmul = bench.measure(f"product of {side} x {side}", lambda: a @ b)
    one = torch.randn(numbers, device=bench.device)
    other = torch.empty_like(one)
    copy = bench.measure(f"copy of {numbers} numbers", lambda: other.copy_(one))
    bench.add("peaks", operations=2 * side**3 / matmul, bytes=8 * numbers / copy)


def tests(bench: Bench) -> None:
    """The tests that ask for a GPU."""
    if not on_gpu(bench):
        bench.add("tests", skipped="the device is no GPU")
        return
    asking = re.compile(r"mark\.cuda|def test_\w+\([^)]*\bdevice\b")
    files = [str(file) for file in sorted(Path("tests").rglob("test_*.py")) if asking.search(file.read_text())]
    options = ["-q", "-m", "cuda and not slow", "-p", "no:cacheprovider", *bench.at(files[:4], files)]
    bench.add("tests", files=len(files), **command("pytest", *options, until=bench.end))


def study(bench: Bench) -> None:
    """The study of all default methods, on the device and on the CPU, and their tables."""
    small = ["--data", "wine", "--hidden", "4", "--methods", "mean-field,ensemble,hmc"] if bench.quick else []
    for place in dict.fromkeys([bench.device.type, "cpu"]):
        with tempfile.TemporaryDirectory() as folder:
            options = ["compare", "--quick", "--no-progress", "--device", place, "--out", f"{folder}/study", *small]
            found = command("pyro_symmetric", *options, until=bench.end)
            results = sorted(Path(folder).glob("study/*.json"))
            tables = {file.name: json.loads(file.read_text()) for file in results}
        bench.add(f"study on {place}", **found, results=tables)


def targets(bench: Bench) -> Iterator[tuple[str, ps.BayesianModel, Tensor, Tensor, float]]:
    """Models with data on the device, and the operations of one chain's gradient (0: not counted)."""
    for name, one in (("energy 8-50-1", problem("a", None)), ("digits 64-32-10", problem("b", None))):
        yield name, one.model().to(bench.device), one.x.to(bench.device), one.y.to(bench.device), one.flops
    torch.manual_seed(0)
    rows = bench.at(20, 1000)
    x, y = torch.randn(rows, 1, 28, 28, device=bench.device), torch.randint(10, (rows,), device=bench.device)
    model = ps.BayesianModel(optunet(), likelihood=ps.CategoricalLikelihood(), num_data=rows)
    yield "OptuNet", model.to(bench.device), x, y, 0.0


def samplers(bench: Bench) -> None:
    """An iteration of HMC, NUTS and AdaptiveHMC, of so many chains."""
    for name, model, x, y, flops in targets(bench):
        density = ps.mcmc.Density(model, (x, y), device=bench.device)
        settings: dict[str, Any] = {"step_size": 1e-3, "adapt_step_size": False, "adapt_mass": False}
        kernels = [
            ps.HMC(model, num_steps=STEPS, jitter=0.0, **settings),
            ps.NUTS(model, max_treedepth=3, **settings),
            ps.AdaptiveHMC(model, adapt_length=False, max_steps=STEPS, **settings),
        ]
        for chains in bench.at((4,), (16, 256, 1024, 8192)):
            generator = torch.Generator(bench.device).manual_seed(0)
            z = 0.1 * density.draw_prior(chains, generator)
            for kernel in kernels:
                iterate(bench, f"{type(kernel).__name__}, {name}, {chains} chains", kernel, density, z, flops)


def iterate(bench: Bench, name: str, kernel: ps.Kernel, density: Any, z: Tensor, flops: float) -> None:
    """Measure iterations of a kernel from ``z``, and say what a gradient of all chains took."""
    generator = torch.Generator(bench.device).manual_seed(0)
    state = kernel.init(density, z, 0, generator)
    steps = float(kernel.step(density, state).statistics["n_steps"].double().mean())
    seconds = bench.measure(name, lambda: kernel.step(density, state), flops * len(z) * steps)
    bench.note(chains=len(z), gradients=steps, chain_gradients_per_second=len(z) * steps / seconds)


def residual(bench: Bench) -> None:
    """SGHMC and an ensemble of a ResNet-20 with filter-response normalisation, on made-up images."""
    torch.manual_seed(0)
    rows, size, members = bench.at(8, 2048), bench.at(4, 64), bench.at(2, 8)
    shape = bench.at((3, 8, 8), (3, 32, 32))
    x, y = torch.randn(rows, *shape, device=bench.device), torch.randint(10, (rows,), device=bench.device)
    net = resnet20(shape, 10, width=bench.at(2, 16)).to(bench.device)
    model = ps.BayesianModel(net, likelihood=ps.CategoricalLikelihood(), num_data=rows)
    for chains in bench.at((2,), (1, 4, 16)):
        kernel = ps.SGHMC(model, 1e-4, batch_size=size, friction=1.0, num_steps=bench.at(1, 10))
        density = ps.mcmc.Density(model, (x, y), batch_size=size, subsampled=True)
        z = density.draw_prior(chains, torch.Generator(bench.device).manual_seed(0))
        iterate(bench, f"SGHMC, ResNet-20, batches of {size}, {chains} chains", kernel, density, z, 0.0)
    options: dict[str, Any] = {"epochs": 1, "batch_size": size, "seed": 0, "progress": False}
    bench.measure(
        f"ensemble, ResNet-20, {members} members, an epoch of {rows} images",
        lambda: ps.ensemble(model, (x, y), members, **options),
    )


def svi(bench: Bench) -> None:
    """A step of SVI with a symmetrised guide of a wide network, beside the stock guide's."""
    for width in bench.at((8,), (64, 512)):
        pyro.set_rng_seed(0)
        net = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10)).to(bench.device)
        x, y = torch.randn(500, 64, device=bench.device), torch.randint(10, (500,), device=bench.device)
        model = ps.BayesianModel(net, likelihood=ps.CategoricalLikelihood(), num_data=500)
        group = ps.find_symmetry(net, x[:4]).permutations
        guides = {
            "stock guide": pyro.infer.autoguide.AutoNormal(model),
            "symmetrised": ps.AutoSymmetrized(model, group, estimator=ps.SinkhornImportance(4)),
        }
        for name, guide in guides.items():
            pyro.clear_param_store()
            inference = SVI(model, guide, Adam({"lr": 1e-3}), Trace_ELBO())
            bench.measure(f"SVI step, width {width}, {name}", functools.partial(inference.step, x, y))


def alignment(bench: Bench) -> None:
    """Two networks of width 2048, and two ResNet-18, brought together."""
    width, shape = bench.at(8, 2048), bench.at((3, 8, 8), (3, 32, 32))
    wide = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    cases: list[tuple[str, Callable[[], nn.Module], Tensor]] = [
        (f"a network of width {width}", lambda: wide, torch.randn(4, 64)),
        ("ResNet-20" if bench.quick else "ResNet-18", lambda: residual_net(bench, shape), torch.randn(2, *shape)),
    ]
    for name, build, x in cases:
        torch.manual_seed(0)
        net = build().eval()
        symmetry = ps.find_symmetry(net, x)
        first, second = (
            {name: torch.randn_like(p, device=bench.device) / p[0].numel() ** 0.5 for name, p in net.named_parameters()}
            for _ in range(2)
        )
        groups = symmetry.permutations
        bench.measure(f"align, {name}", lambda a=first, b=second, g=groups: ps.align(a, b, g))


def residual_net(bench: Bench, shape: tuple[int, int, int]) -> nn.Module:
    return resnet20(shape, 10, width=2) if bench.quick else resnet18(shape, 10)


def mmd(bench: Bench) -> None:
    """The maximum mean discrepancy of two samples of many weights."""
    draws, size = bench.at(8, 20), bench.at(1000, 11_000_000)
    a, b = ({"w": torch.randn(draws, size, device=bench.device)} for _ in range(2))
    pairs = (2 * draws) ** 2
    bench.measure(f"mmd, {draws} draws of {size} weights", lambda: ps.mmd(a, b), 2.0 * pairs * size, 8.0 * draws * size)


def peers(bench: Bench) -> None:
    """The same targets by stock Pyro, one chain, and by NumPyro, many chains at once."""
    for name, one in (("energy 8-50-1", problem("a", None)), ("digits 64-32-10", problem("b", None))):
        seconds = bench.clocked(lambda one=one: stock(bench, one))
        count = bench.at(2, 20) * STEPS
        bench.add(f"Pyro HMC, {name}, 1 chain", seconds_a_gradient=seconds / count)
        try:
            numpyro_rates(bench, name, one)
        except ImportError:
            bench.add(f"NumPyro, {name}", skipped="JAX and NumPyro aren't installed")


def stock(bench: Bench, one: Problem) -> None:
    """Iterations of Pyro's own HMC with trajectories of ``STEPS``."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    settings = {"adapt_step_size": False, "adapt_mass_matrix": False}
    with bench.device:  # where the model's priors are made, too
        model = PyroNet(one)
        kernel = pyro.infer.HMC(model, step_size=1e-3, num_steps=STEPS, **settings)
        run = MCMC(kernel, num_samples=bench.at(2, 20), warmup_steps=0, disable_progbar=True)
        run.run(one.x.to(bench.device), one.y.to(bench.device))


def numpyro_rates(bench: Bench, name: str, one: Problem) -> None:
    """:raises ImportError: without it."""
    import jax
    import numpyro
    from numpyro.infer import HMC
    from numpyro.infer.util import initialize_model

    if bench.device.type == "cuda" and jax.default_backend() != "gpu":
        bench.add(f"NumPyro, {name}", skipped="JAX sees no GPU")
        return
    numpyro.set_host_device_count(1)
    for chains in bench.at((4,), (16, 256, 1024, 8192)):
        keys = jax.random.split(jax.random.PRNGKey(0), chains)
        info = initialize_model(keys, numpyro_model(one), dynamic_args=False)
        kernel = HMC(
            potential_fn=info.potential_fn,
            step_size=1e-3,
            num_steps=STEPS,
            adapt_step_size=False,
            adapt_mass_matrix=False,
        )
        state = kernel.init(keys, 0, info.param_info.z, (), {})
        step = jax.jit(jax.vmap(lambda state, kernel=kernel: kernel.sample(state, (), {})))
        jax.block_until_ready(step(state))  # compiled

        def call(step: Any = step, state: Any = state) -> object:
            return jax.block_until_ready(step(state))

        seconds = bench.measure(f"NumPyro HMC, {name}, {chains} chains", call, one.flops * chains * STEPS)
        bench.note(chains=chains, gradients=STEPS, chain_gradients_per_second=chains * STEPS / seconds)


PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "device": (device, 25),
    "samplers": (samplers, 130),
    "svi": (svi, 40),
    "mmd": (mmd, 25),
    "alignment": (alignment, 60),
    "residual": (residual, 60),
    "peers": (peers, 60),
    "tests": (tests, 90),
    "study": (study, 110),
}
"""Each part, and the seconds that it may take; the most telling ones come first."""


# running ------------------------------------------------------------------------------------------------------------


def command(module: str, *options: str, until: float) -> dict[str, Any]:
    """Run a module; how it ended, and the last of what it said."""
    begin, ended = time.monotonic(), "its time was used up"
    launcher = [sys.executable, "-m", module]
    if folder := os.environ.get("PRETEND_FOLDER"):  # a pretend device is this process's own
        code = f"import sys, runpy; sys.path.insert(0, {folder!r}); import pretend_device; pretend_device.install()"
        code += f"; sys.argv = sys.argv[:1] + sys.argv[1:]; runpy.run_module({module!r}, run_name='__main__')"
        launcher = [sys.executable, "-c", code]
    try:
        found = subprocess.run(
            [*launcher, *options], capture_output=True, text=True, timeout=max(1.0, until - begin - MARGIN), check=False
        )
        said, ended = found.stdout + found.stderr, f"status {found.returncode}"
    except subprocess.TimeoutExpired as error:
        said = str(error.stdout or "")
    return {"seconds": time.monotonic() - begin, "ended": ended, "said": said[-1500:]}


def run_part(name: str, options: argparse.Namespace, seconds: float, peaks: dict[str, float]) -> dict[str, Any]:
    """A part in a process of its own, which is ended if it takes longer; its rows, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        call = [sys.executable, "-m", __spec__.name, "--part", name, "--rows", str(path), "--seconds", str(seconds)]
        call += ["--quick"] if options.quick else []
        call += ["--pretend", str(options.pretend)] if options.pretend else []
        call += ["--peaks", json.dumps(peaks)]
        begin, ended = time.monotonic(), ""
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=seconds + 5, check=False)
            ended = done.stderr[-1500:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            ended = "its time was used up, and it was ended"
        rows = json.loads(path.read_text()) if path.exists() else []
    return {"seconds": time.monotonic() - begin, "error": ended, "rows": rows}


def part(options: argparse.Namespace) -> None:
    """One part, in this process."""
    if options.pretend:
        os.environ["PRETEND_FOLDER"] = str(options.pretend)
        sys.path.insert(0, str(options.pretend))
        importlib.import_module("pretend_device").install()
    place = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    end = time.monotonic() + options.seconds
    bench = Bench(place, options.quick, end, json.loads(options.peaks), options.rows)
    try:
        PARTS[options.part][0](bench)
    except Exception:
        bench.add(options.part, error=traceback.format_exc()[-1500:])
        raise


def campaign(options: argparse.Namespace) -> dict[str, Any]:
    """All parts that are asked for, one after the other."""
    begin, peaks = time.monotonic(), dict[str, float]()
    found: dict[str, Any] = {"command": " ".join(sys.argv), "parts": {}}
    for name, (_, budget) in PARTS.items():
        if name != "device" and not any(word in name for word in options.only):
            continue
        left = options.seconds - (time.monotonic() - begin)
        if left < LEAST:
            found["parts"][name] = {"skipped": f"{left:.0f} of {options.seconds:.0f} seconds were left"}
        else:
            seconds = left - 5 if options.quick else min(budget, left - 5)
            found["parts"][name] = run_part(name, options, seconds, peaks)
            peaks |= {k: row[k] for row in found["parts"][name]["rows"] for k in ("operations", "bytes") if k in row}
        print_part(name, found["parts"][name])
        if options.json:
            found["seconds"] = time.monotonic() - begin
            options.json.write_text(json.dumps(found, indent=1))
    return found


def print_part(name: str, found: dict[str, Any]) -> None:
    rows = [
        [row["name"], ", ".join(f"{k} {shown(v)}" for k, v in row.items() if k not in ("name", "said", "results"))]
        for row in found.get("rows", [])
    ]
    print_table(name, ["what", "found"], rows)
    for word in ("skipped", "error"):
        if found.get(word):
            print(f"{word}: {found[word]}")
    sys.stdout.flush()


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="written anew after every part")
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that everything works")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="parts whose name has one of these")
    parser.add_argument("--seconds", type=float, default=TOTAL, help=f"for all of it (default {TOTAL:.0f})")
    parser.add_argument("--pretend", type=Path, metavar="FOLDER", help="of a module pretend_device")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peaks", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part(options)
    else:
        campaign(options)


if __name__ == "__main__":
    main()
