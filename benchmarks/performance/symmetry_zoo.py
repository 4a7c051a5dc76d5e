"""Is find_symmetry sound, and how fast, on networks that people use? Torchvision, timm, transformers, those of papers.

    python -m benchmarks.performance.symmetry_zoo  # all torchvision classification variants, one at a time
    python -m benchmarks.performance.symmetry_zoo resnet50 vit_b_16  # some of them
    python -m benchmarks.performance.symmetry_zoo --extra timm transformers
    python -m benchmarks.performance.symmetry_zoo --extra named  # OptuNet, ResNet-20, a UNet, recurrent ones, ...
    python -m benchmarks.performance.symmetry_zoo --json zoo.json

Networks have random weights. For each: seconds for discovery and for verification; the largest change of an output,
relative to the largest output, under a random element of the whole group, in float64 (eval and train mode) and in
float32 (eval and train mode), beside the network's own rounding errors in float32 (batch statistics of few numbers
magnify them); the number of sets of units that permute and the log of the group's order.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.networks import NETWORKS
from pyro_symmetric._torchvision import import_torchvision
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import copied
from pyro_symmetric.discovery.verify import Outputs as OutputsOfWeights
from pyro_symmetric.discovery.verify import difference, outputs_of, verify

Case = tuple[str, Callable[[], nn.Module], tuple[Any, ...]]

# Smaller images than the networks were made for, where they allow it: the same operators, less memory.
PIXELS = {"inception_v3": 299, "maxvit_t": 224, "swin_": 224, "swin_v2": 256, "vit_": 224, "alexnet": 96, "vgg": 64}
TOO_LARGE = ("regnet_y_128gf", "vit_h_14")  # weights alone are 2.5 GiB; copies in float64 don't fit beside others


def torchvision_cases(names: list[str]) -> Iterator[Case]:
    models = import_torchvision().models
    every = [name for name in models.list_models(module=models) if name not in TOO_LARGE]
    for name in names or every:
        side = max((n for prefix, n in PIXELS.items() if name.startswith(prefix)), default=64)
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        yield (
            name,
            lambda name=name, options=options: models.get_model(name, weights=None, **options),
            # Batch statistics of few numbers magnify rounding: small images come in larger batches.
            (torch.randn(8 if side < 100 else 2, 3, side, side),),
        )


def timm_cases() -> Iterator[Case]:
    import_torchvision()
    import timm

    for name, side, options in (
        ("resnet10t", 64, {}),
        ("convnextv2_atto", 64, {}),
        ("vit_tiny_patch16_224", 64, {"img_size": 64}),
        ("deit3_small_patch16_224", 64, {"img_size": 64, "depth": 2}),
        ("mobilenetv3_small_050", 64, {}),
        ("mixer_s32_224", 64, {"img_size": 64}),
        ("resmlp_12_224", 64, {"img_size": 64}),
        ("regnetx_002", 64, {}),
        ("ghostnet_050", 64, {}),
        ("eca_resnet33ts", 64, {}),
        ("seresnext26t_32x4d", 64, {}),
        ("poolformer_s12", 64, {}),
        ("efficientformer_l1", 224, {}),
        ("gmlp_s16_224", 64, {"img_size": 64}),
        ("cait_xxs24_224", 224, {"depth": 3}),
        ("edgenext_xx_small", 64, {}),
        ("nfnet_l0", 64, {}),
        ("hrnet_w18_small", 64, {}),
        ("dla34", 64, {}),
        ("eva02_tiny_patch14_224", 224, {"depth": 2}),
    ):
        yield (
            f"timm {name}",
            lambda name=name, options=options: timm.create_model(name, num_classes=7, **options),
            (torch.randn(2, 3, side, side),),
        )


class Outputs(nn.Module):
    """A network of transformers, with one tensor as its output."""

    def __init__(self, net: nn.Module, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.net, self.function = net, forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.net, x)


def transformers_cases() -> Iterator[Case]:
    import_torchvision()
    import transformers as hf

    tokens = (torch.randint(0, 50, (2, 6)),)
    sizes = {
        "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 32, "max_position_embeddings": 32,
    }  # fmt: skip

    def hidden(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net(x).last_hidden_state

    def logits(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net(x, use_cache=False).logits

    gpt2 = {"vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
    t5 = {"vocab_size": 50, "d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    for kind in ("sdpa", "eager"):
        how = {"attn_implementation": kind}
        yield f"BERT ({kind})", lambda how=how: Outputs(hf.BertModel(hf.BertConfig(**sizes, **how)), hidden), tokens
        yield (
            f"GPT-2 ({kind})",
            lambda how=how: Outputs(hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, **how)), logits),
            tokens,
        )
        yield (
            f"Llama ({kind})",
            lambda how=how: Outputs(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=2, **how)), logits),
            tokens,
        )
    yield (
        "T5",
        lambda: Outputs(
            hf.T5ForConditionalGeneration(hf.T5Config(**t5)),
            lambda net, x: net(input_ids=x, decoder_input_ids=x, use_cache=False).logits,
        ),
        tokens,
    )
    yield "ALBERT", lambda: Outputs(hf.AlbertModel(hf.AlbertConfig(**sizes, embedding_size=12)), hidden), tokens


def named_cases() -> Iterator[Case]:
    for name, (make, shape) in NETWORKS.items():
        yield name, make, (torch.randn(shape),)


def measure(name: str, make: Callable[[], nn.Module], inputs: tuple[Any, ...]) -> dict[str, Any]:
    """All numbers of one network."""
    torch.manual_seed(0)
    net = make()
    start = time.perf_counter()
    symmetry = find_symmetry(net, *inputs, verify=False)
    found = time.perf_counter()
    double = verify(symmetry, net, *inputs)
    verified = time.perf_counter()
    single = verify(symmetry, net, *inputs, dtype=torch.float32)
    own_error, own_train = rounding(OutputsOfWeights(symmetry, net, inputs, torch.float64))
    return {
        "name": name,
        "seconds_to_find": found - start,
        "seconds_to_verify": verified - found,
        "error": double.error,
        "train_error": double.train_error,
        "error_float32": single.error,
        "train_error_float32": single.train_error,
        "units": len(symmetry.permutations.factors),
        "log_order": symmetry.permutations.log_order(),
        "scales": sum(int(own.sum()) for own in symmetry.group.independent("scale").values()),
        "signs": sum(symmetry.group[name].count for name in symmetry.group.names("flip")),
        "rounding_float32": own_error,
        "train_rounding_float32": own_train,
        "sound": bool(double)
        and single.error < max(1e-5, 3 * own_error)
        and single.train_error < max(1e-5, 3 * own_train),
    }


def rounding(test: OutputsOfWeights) -> tuple[float, float]:
    """How far the network's float32 outputs are from its float64 ones with the same weights, in eval and train mode."""
    single = copied(test.net).float()
    errors = []
    for train in (False, True):
        inputs = [x.float() if x.is_floating_point() else x for x in test.inputs[train]]
        outputs = None if test.before[train] is None else outputs_of(single, inputs, train, torch.float32)
        errors.append(difference(test.before[train], None if outputs is None else [x.double() for x in outputs]))
    return errors[0], errors[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="torchvision networks; all that fit by default")
    parser.add_argument("--extra", nargs="*", choices=["timm", "transformers", "named"], help="these instead")
    parser.add_argument("--json", help="write all numbers to this file")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sources = {"timm": timm_cases, "transformers": transformers_cases, "named": named_cases}
    cases = [sources[name]() for name in options.extra] if options.extra else [torchvision_cases(options.names)]
    results, unsound = [], 0
    for name, make, inputs in (case for source in cases for case in source):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = measure(name, make, inputs)
            result["warnings"] = sorted({str(w.message) for w in caught if "left out" in str(w.message)})
        except Exception as error:
            result = {"name": name, "sound": False, "failed": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        results.append(result)
        unsound += not result["sound"]
        print(line(result), flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(results, file, indent=1)
    print(f"{len(results) - unsound} of {len(results)} sound")
    return min(unsound, 1)


def line(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"{result['name']:28s} FAILED {result['failed']}"
    sound = "sound" if result["sound"] else "NOT SOUND"
    errors = [result[key] for key in ("error", "train_error", "error_float32", "train_error_float32")]
    return (
        f"{result['name']:28s} {sound:9s} find {result['seconds_to_find']:5.1f} s "
        f"verify {result['seconds_to_verify']:5.1f} s  error {errors[0]:.0e} train {errors[1]:.0e} "
        f"float32 {errors[2]:.0e} train {errors[3]:.0e} "
        f"(own rounding {result['rounding_float32']:.0e} {result['train_rounding_float32']:.0e})  "
        f"units {result['units']:4d} log-order {result['log_order']:8.0f}  {'; '.join(result['warnings'])[:100]}"
    ).rstrip()


if __name__ == "__main__":
    sys.exit(main())
