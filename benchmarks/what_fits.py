"""Which strategies of training fit in the memory of H100s, as `moh-llm doctor` estimates it, as a table in Markdown.

    python benchmarks/what_fits.py                         # LLaMA 3 shapes of 1B to 70B on 1, 8 and 64 H100s
    python benchmarks/what_fits.py --sequence_length 8192
    python benchmarks/what_fits.py --activations           # what recomputing and offloading save, 8B under FSDP2 on 8

No weight is read and nothing is measured: the sizes are those of the published configs, and the model is what `convert`
makes of a base of long context (local fallbacks, a threshold router, half of the heads). Each process trains with one
sequence at a time, in bfloat16 with gradient checkpointing, by distillation from the base. Of the strategies that fit,
the first of one process, DDP, ZeRO-1, ZeRO-2, FSDP2 and ZeRO-3 is named: it sends the least between devices.
"""

import argparse
import tempfile
from dataclasses import dataclass

from moh_llm.devices import find_gpu
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.training.config import DataConfig, LoraConfig, TrainConfig
from moh_llm.training.memory import Sizes, estimate_memory

GIB = 1 << 30
GPU = "H100"
NUMBERS = (1, 8, 64)
ORDER = ("ddp", "zero1", "zero2", "fsdp2", "zero3")
LIBRARIES = 1  # GiB that PyTorch and CUDA take for themselves, which the estimate leaves out
MODELS = {
    "1B": (2048, 8192, 16, 32, 64, True),
    "3B": (3072, 8192, 28, 24, 128, True),
    "8B": (4096, 14336, 32, 32, 128, False),
    "70B": (8192, 28672, 80, 64, 128, False),
}


@dataclass(frozen=True)
class Kind:
    """What is trained: a row's name, and the recipe's keys."""

    name: str
    lora: LoraConfig | None = None
    quantization: str | None = None
    freeze_base: bool = False

    @property
    def strategies(self) -> tuple[str, ...]:
        """4-bit weights are not divided."""
        return ORDER[:1] if self.quantization else ORDER


KINDS = (
    Kind("all weights"),
    Kind("LoRA", LoraConfig()),
    Kind("QLoRA", LoraConfig(), "nf4"),
    Kind("fallbacks", freeze_base=True),
)


def make_config(model: str) -> MoHLlamaConfig:
    """The converted model of a name in `MODELS`."""
    hidden, mlp, layers, heads, size, tied = MODELS[model]
    return MoHLlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=size,
        tie_word_embeddings=tied,
        router_type="threshold",
        head_fallback="local",
        num_shared_heads=1,
        num_active_heads=heads // 2,
        local_start=1024,
    )


def find_fit(model: MoHLlamaConfig, kind: Kind, number: int, length: int, limit: float) -> str:
    """The first strategy that fits on ``number`` devices of ``limit`` GiB, and GiB of each; or what the least takes."""
    with tempfile.TemporaryDirectory() as folder:  # a model that was not tuned before
        recipe = TrainConfig(
            model=folder,
            output_dir=folder,
            max_steps=1000,
            mixed_precision="bf16",
            gradient_checkpointing=True,
            data=DataConfig("", length, number, 1),
            lora=kind.lora,
            freeze_base=kind.freeze_base,
            quantization=kind.quantization,
        )
        sizes = Sizes.of(recipe, model)
        needed = {
            name: estimate_memory(recipe, model, sizes, name, number).total / GIB + LIBRARIES
            for name in (kind.strategies if number > 1 else ("one",))
        }
    for name, gib in needed.items():
        if gib <= limit:
            return f"`{name}`, {gib:.0f}"
    name = min(needed, key=lambda name: needed[name])
    return f"no: `{name}` takes {needed[name]:.0f}"


def print_activations(lengths: tuple[int, ...] = (4096, 16384, 65536)) -> None:
    """What the choice of recomputed layers saves: GiB of each of 8 devices beside weights and moments, and in all."""
    model = make_config("8B")
    ways = {
        "all kept": {"gradient_checkpointing": False},
        "every second recomputed": {"gradient_checkpointing": True, "gradient_checkpointing_every": 2},
        "all recomputed": {"gradient_checkpointing": True},
        "all recomputed, inputs offloaded": {"gradient_checkpointing": True, "activation_offloading": True},
    }
    print("| layers |" + "".join(f" {length:,} tokens |" for length in lengths))
    print("|---|" + "---|" * len(lengths))
    for name, keys in ways.items():
        cells = []
        for length in lengths:
            data = DataConfig("", length, 8, 1)
            recipe = TrainConfig(
                model="none", output_dir="none", max_steps=1000, mixed_precision="bf16", data=data, **keys
            )
            memory = estimate_memory(recipe, model, Sizes.of(recipe, model), "fsdp2", 8)
            cells.append(f"{(memory.activations + memory.temporary) / GIB:.1f} of {memory.total / GIB:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence_length", type=int, default=4096)
    parser.add_argument("--activations", action="store_true", help="print that table in place of the other")
    args = parser.parse_args()
    if args.activations:
        print_activations()
        return
    length = args.sequence_length
    gpu = find_gpu(GPU)
    assert gpu is not None
    print(f"Sequences of {length:,} tokens; GiB for each device, of {gpu.memory / GIB:.0f}:\n")
    print("| base | trained |" + "".join(f" {number} x {GPU} |" for number in NUMBERS))
    print("|---|---|" + "---|" * len(NUMBERS))
    for name in MODELS:
        model = make_config(name)
        for kind in KINDS:
            cells = [find_fit(model, kind, number, length, gpu.memory / GIB) for number in NUMBERS]
            print(f"| {name if kind is KINDS[0] else ''} | {kind.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
