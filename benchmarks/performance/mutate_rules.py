"""Break each operator rule in turn: do the tests notice every time?

    python -m benchmarks.performance.mutate_rules  # all mutations; exit status 1 if one survives
    python -m benchmarks.performance.mutate_rules add lstm  # those whose name contains one of these words

A mutation is one changed piece of source text in a copy of the package. Each runs the discovery tests until the first
failure; a mutation that no test notices *survives*, and is printed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/discovery/test_discovery.py",
    "tests/discovery/test_discovery_operators.py",
    "tests/discovery/test_grouped.py",
)


class Mutation(NamedTuple):
    """In ``file`` (below ``discovery/``), ``old`` becomes ``new``; ``tests`` are the likeliest to notice, tried first."""

    name: str
    file: str
    old: str
    new: str
    tests: str = ""


# ruff: noqa: E501
MUTATIONS = [
    # sums, products, activations
    Mutation("add lets scales differ", "rules/elementwise.py", '("add sub rsub", "sum", LINEAR)', '("add sub rsub", "product", LINEAR)', "residual"),
    Mutation("mul is a sum", "rules/elementwise.py", '("mul", "product", LINEAR)', '("mul", "sum", NOTHING)', "gates"),
    Mutation("division multiplies", "rules/elementwise.py", "(1.0, -1.0))", "(1.0, 1.0))", "normalis or parametrised or divi"),
    Mutation("relu passes signs", "rules/elementwise.py", "partial(_unary, passes=_passes)", "partial(_unary, passes=Passes(_passes.scale, _passes.sign or _passes.scale))", "mlp"),
    Mutation("tanh passes scales", "rules/elementwise.py", "partial(_unary, passes=_passes)", "partial(_unary, passes=Passes(_passes.scale or _passes.sign, _passes.sign))", "mlp"),
    Mutation("powers don't multiply scales", "rules/elementwise.py", "[float(exponent)])", "[1.0])", "powers"),
    Mutation("clamp passes scales", "rules/elementwise.py", "scale=all(b == 0 for b in bounds)", "scale=True", "clamp"),
    Mutation("clamp passes signs", "rules/elementwise.py", "sign=odd)", "sign=True)", "clamp"),
    Mutation("prelu forgets its weight", "rules/elementwise.py", 'return labeller.elementwise([call["self"], call["weight"]], "product", HOMOGENEOUS)', 'return call["self"]', "prelu"),
    Mutation("where forgets its mask", "rules/elementwise.py", 'labeller.elementwise([replace(mask, zero=False), chosen], "product")', "chosen", "mask"),
    Mutation("maximum is any function", "rules/elementwise.py", 'max.other min.other", "sum", HOMOGENEOUS)', 'max.other min.other", "product", HOMOGENEOUS)', "maximum"),
    # contraction
    Mutation("linear doesn't tie inputs", "rules/contraction.py", "(weight, [last + 1, last][-weight.dim :])", "(weight, [last + 1, last + 2][-weight.dim :])", "mlp"),
    Mutation("linear forgets its bias", "rules/contraction.py", "return result if bias is None else labeller.elementwise([result, bias])", "return result", "mlp"),
    Mutation("matmul doesn't tie batch axes", "rules/contraction.py", "right = [*range(batch - max(other.dim - 2, 0), batch), k,", "right = [*range(100, 100 + max(other.dim - 2, 0)), k,", "attention"),
    Mutation("einsum mixes up its letters", "rules/contraction.py", "return [*map(ord, before), *range(-hidden, 0), *map(ord, after)]", "return [*map(ord, before), *range(-hidden, 0), *map(ord, after)][::-1]", "einsum"),
    Mutation("addmm forgets what is added", "rules/contraction.py", "return labeller.elementwise([start, product])", "return product", "addmm"),
    # shapes
    Mutation("permute does nothing", "rules/shape.py", 'return labeller.relaid(call.value, [call.value.axis(dim) for dim in call["dims"]])', "return call.value", "attention"),
    Mutation("slices start at zero", "rules/shape.py", '[call["start"] : call["end"] : call["step"]]', '[: call["end"] : call["step"]]', "slices"),
    Mutation("select takes the first", "rules/shape.py", '[[call["index"]]]', "[[0]]", "last_hidden or select"),
    Mutation("split gives the first piece", "rules/shape.py", "        start = stop\n", "", "split"),
    Mutation("flip does nothing", "rules/shape.py", "np.arange(value.shape[axis])[::-1]", "np.arange(value.shape[axis])", "flip"),
    Mutation("cat doesn't tell copies apart", "rules/shape.py", "joined = labeller.copies(joined, shape.axes, axis)", "pass", "occurs_twice"),
    Mutation("cat doesn't pin constants", "rules/shape.py", "labeller.facts.pin(atoms, labeller.where)", "pass", "constant or cat"),
    Mutation("repeat puts copies behind", "rules/shape.py", "labeller.expand(labeller.unsqueeze(value, axis), shape)", "labeller.unsqueeze(value, axis)", "repeat"),
    Mutation("reshape forgets places", "labeller.py", "            self.facts.refine(joint.atoms, place, self.where)\n", "            pass\n", "flatten"),
    Mutation("restrict forgets places", "labeller.py", "self.facts.refine(part.atoms, positions(off, part.axes, sizes), self.where)", "pass", "pixel_shuffle"),
    # images
    Mutation("convolution ties inputs with outputs", "rules/spatial.py", "[inputs, outputs] if transposed else [outputs, inputs]", "[outputs, inputs] if transposed else [inputs, outputs]", "flatten or padded"),
    Mutation("groups are not groups", "rules/spatial.py", "letters = [group, inputs, outputs] if transposed else [group, outputs, inputs]", "letters = [9, inputs, outputs] if transposed else [9, outputs, inputs]", "kernel"),
    Mutation("convolution forgets its bias", "rules/spatial.py", "    if bias is not None:\n", "    if False:\n", "padded"),
    Mutation("max pooling passes signs", "rules/spatial.py", "partial(_channelwise, passes=_passes)", "partial(_channelwise, passes=LINEAR)", "pooling"),
    Mutation("places of maxima have multipliers", "rules/spatial.py", "[pooled, labeller.unscaled(pooled)]", "[pooled, pooled]", "places"),
    Mutation("padding counts from the front", "rules/spatial.py", "axis = value.dim - 1 - step", "axis = step", "padded"),
    # normalisation
    Mutation("softmax lets scales through", "rules/normalisation.py", 'return labeller.normalise(call.value, [call["dim"]])', "return call.value", "attention or softmax"),
    Mutation("layer norm passes multipliers", "rules/normalisation.py", "labeller.normalise(value, list(range(first, value.dim)), passes)", "value", "normalisations"),
    Mutation("normalisation forgets its bias", "rules/normalisation.py", '(("product", "weight"), ("sum", "bias"))', '(("product", "weight"),)', "normalisation"),
    Mutation("group norm forgets its groups", "rules/normalisation.py", "split = labeller.normalise(split, list(range(2, split.dim)))", "labeller.still(split)", "group_norm"),
    Mutation("running means stay", "rules/normalisation.py", "value = labeller.elementwise([value, labeller.reshape(mean, shape)])", "pass", "running"),
    Mutation("running variances don't move", "rules/normalisation.py", "    facts.unify(part.atoms, spread.atoms)\n", "", "running"),
    Mutation("running variances scale once", "rules/normalisation.py", "[(2.0, part.atoms), (-1.0, spread.atoms)]", "[(1.0, part.atoms), (-1.0, spread.atoms)]", "running"),
    Mutation("epsilon is forgotten", "rules/normalisation.py", "    facts.epsilon(spread.atoms,", "    (lambda *_: None)(spread.atoms,", "running"),
    # attention, recurrence, lookups, reductions
    Mutation("attention forgets its softmax", "rules/attention.py", "labeller.normalise(scores, [-1])", "scores", "attention"),
    Mutation("attention forgets its mask", "rules/attention.py", "    if mask is not None:\n", "    if False:\n", "mask"),
    Mutation("queries share the wrong head", "rules/attention.py", "labeller.unsqueeze(value, axis), [*lead, own, heads // own, length, width]", "labeller.unsqueeze(value, axis - 1), [*lead, heads // own, own, length, width]", "grouped_queries"),
    Mutation("hidden units aren't fed back", "rules/recurrent.py", "    labeller.elementwise([cell, again])\n", "", "recurrent"),
    Mutation("gates aren't tied", "rules/recurrent.py", "return labeller.elementwise([first, *others])", "return first", "recurrent"),
    Mutation("first states are forgotten", "rules/recurrent.py", "        _starts_like(labeller, state, like)\n", "        pass\n", "state_that_comes"),
    Mutation("gates pass multipliers", "rules/recurrent.py", "    labeller.still(value)\n", "", "recurrent"),
    Mutation("relu recurrence passes signs", "rules/recurrent.py", '"rnn_relu": (1, HOMOGENEOUS)', '"rnn_relu": (1, ODD)', "plain_recurrent"),
    Mutation("embeddings forget their features", "rules/indexing.py", "result = labeller.relaid(weight, [*[None] * indices.dim, 1], call.shape)", "result = Value(call.shape, (), frozenset({indices.dim}))", "used_twice"),
    Mutation("writes forget what is written", "rules/indexing.py", "    labeller.elementwise([old, source])\n", "", "written"),
    Mutation("gather lets units move", "rules/indexing.py", "labeller.restrict(call.value, set(range(call.value.dim)) - {axis})", "call.value", "gather"),
    Mutation("index maps are ignored", "rules/indexing.py", "entry.constant.numpy().astype(np.int64) % value.shape[axis]", "np.arange(len(entry.constant))", "index"),
    Mutation("sums keep labels", "rules/reduction.py", 'LINEAR: "sum mean nansum",', "", "encoder or mean"),
    Mutation("places of sorted units permute", "rules/reduction.py", "_in_order(labeller, call) if any(call.read[1:]) else call.value", "call.value", "places"),
    Mutation("running sums permute", "rules/reduction.py", "    value = _in_order(labeller, call)\n    labeller.still(value, passes)\n", "    value = call.value\n    labeller.still(value, passes)\n", "cumsum"),
    # the engine
    Mutation("outputs aren't pinned", "trace.py", "                labeller.pin(values[node])\n", "                pass\n", "mlp"),
    Mutation("unknown operators free", "labeller.py", "            self.lose(value.parts, why)\n            self.pin(value)\n", "            self.lose(value.parts, why)\n", "unknown"),
    Mutation("constants aren't told apart", "combination.py", "facts.refine(part.atoms, positions(apart, part.axes, sizes), labeller.where)", "pass", "buffers"),
    Mutation("equal labels aren't tied", "combination.py", "facts.unify(p.atoms, q.atoms)", "pass", "mlp"),
    Mutation("larger units aren't tied", "combination.py", "facts.relate(part.atoms, spread(shared, part.axes, sizes))", "pass", ""),
    Mutation("sums of scales aren't balanced", "combination.py", "        facts.balance([(c, spread(p, top.axes, sizes)) for c, p in equal])\n", "        pass\n", "residual"),
    Mutation("contractions aren't balanced", "combination.py", "        facts.balance(form)\n        return []\n", "        return []\n", "mlp"),
    Mutation("copies aren't told apart", "structure.py", "        self._tell_copies_apart()\n", "", "shifted"),
    Mutation("ambiguous members move", "structure.py", "        self._set_apart_ambiguous_members()\n", "", ""),
    Mutation("unused parameters move", "find.py", 'facts.pin(part.atoms, "no forward pass uses it")', "pass", "no_pass"),
    Mutation("training branches are ignored", "find.py", "if any(name not in used for name, _ in traced.named_parameters()):", "if False:", "training"),
]  # fmt: skip


def survives(mutation: Mutation) -> bool:
    """True if all tests pass with the mutation in place."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "pyro_symmetric", copy / "pyro_symmetric", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "pyro_symmetric" / "discovery" / mutation.file
        text = path.read_text()
        if mutation.old and mutation.old not in text:
            raise ValueError(f"mutation {mutation.name!r}: {mutation.file} doesn't contain {mutation.old!r}")
        path.write_text(text.replace(mutation.old, mutation.new, 1))
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *TESTS]
        slow = ["-m", "not slow", "--deselect", f"{TESTS[0]}::test_torchvision_networks"]
        for chosen in ([["-k", mutation.tests]] if mutation.tests else []) + [[]]:
            run = subprocess.run([*command, *slow, *chosen], cwd=copy, env=environment, capture_output=True, text=True)
            if run.returncode == 1:
                return False
            if run.returncode not in (0, 5):  # 5: no test has such a name
                raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
        return True


def main() -> int:
    words = sys.argv[1:]
    if not survives(Mutation("none", "labels.py", "", "")):
        print("the tests fail without any mutation, so their failures would say nothing")
        return 1
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    left = []
    for mutation in chosen:
        alive = survives(mutation)
        left += [mutation.name] * alive
        print(f"{'SURVIVES' if alive else 'noticed ':8s}  {mutation.name}", flush=True)
    print(f"{len(chosen) - len(left)} of {len(chosen)} mutations noticed")
    return min(len(left), 1)


if __name__ == "__main__":
    sys.exit(main())
