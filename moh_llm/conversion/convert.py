"""The conversion from first step to last."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM

import moh_llm
from moh_llm.conversion.base import BaseCheckpoint, open_base
from moh_llm.conversion.calibrate import LayerStatistics, collect_statistics, fit_router
from moh_llm.conversion.checkpoint import write_checkpoint
from moh_llm.conversion.plan import PlanOptions, build_config
from moh_llm.conversion.verify import verify
from moh_llm.data.mixture import EMBEDDED, Mixture
from moh_llm.data.stream import fixed_batches, validation_batches
from moh_llm.data.tokenize import TokenizedSource, tokenize_mixture
from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder, write_json
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

WINDOW = 512  # tokens of context in calibration and verification
BATCH = 4


@dataclass(frozen=True)
class ConversionOptions:
    """One conversion.

    Attributes:
        base: local folder or Hub id of a LLaMA checkpoint.
        output: folder to make.
        plan: which heads, which router.
        calibration: text to fit the router on and, its held-out part, to verify on.
        calibration_tokens, heldout_tokens: how much of it.
        dtype: dtype of the written weights; None keeps the base's bytes.
        revision: Hub revision of the base.
        overwrite: whether a non-empty output folder may be replaced.
    """

    base: str
    output: Path
    plan: PlanOptions = field(default_factory=PlanOptions)
    calibration: Mixture = EMBEDDED
    calibration_tokens: int = 16384
    heldout_tokens: int = 8192
    dtype: torch.dtype | None = None
    revision: str | None = None
    overwrite: bool = False


def convert(options: ConversionOptions) -> dict[str, Any]:
    """Convert a LLaMA checkpoint into a MoH one and prove it; returns the record in conversion.json.

    Raises:
        UserError: bad input, at the earliest step that can tell; the output folder is then as before.
    """
    started = time.perf_counter()
    texts = [file for source in options.calibration.sources for file in source.files]
    check_output_folder(options.output, options.overwrite, reads=[options.base, *texts])
    base = open_base(options.base, options.revision)
    config = build_config(base.config, options.plan)  # impossible counts fail before anything runs
    model = _load_base(base, options.dtype)
    sources = _tokenize(options, base)
    length = min(WINDOW, config.max_position_embeddings)
    held_out = validation_batches(sources, length, options.heldout_tokens, BATCH)

    statistics, calibration = None, None
    if options.plan.needs_calibration:
        batches = fixed_batches(
            [s.train for s in sources], [s.weight for s in sources], length, options.calibration_tokens, BATCH
        )
        statistics = collect_statistics(model, batches)
        calibration = _calibration_record(options, sources, statistics)
        config = build_config(base.config, options.plan, [layer.importance for layer in statistics])

    with new_folder(options.output, options.overwrite) as folder:
        config.dtype = model.dtype
        write_checkpoint(folder, base, config, _router_tensors(config, statistics, model.dtype), options.dtype)
        converted = MoHLlamaForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
        record = {
            "moh_llm": moh_llm.__version__,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "base": base.identity(),
            "plan": _plan_record(options.plan, config),
            "calibration": calibration,
            "verification": verify(converted, model, held_out),
            "seconds": round(time.perf_counter() - started, 1),
        }
        write_json(folder / "conversion.json", record)
    return record


def _load_base(base: BaseCheckpoint, dtype: torch.dtype | None) -> nn.Module:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LlamaForCausalLM.from_pretrained(base.folder, dtype=dtype or "auto").to(device).eval()


def _tokenize(options: ConversionOptions, base: BaseCheckpoint) -> list[TokenizedSource]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(base.folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{base.name} has no tokenizer that loads ({' '.join(str(error).split())[:120]})") from error
    return tokenize_mixture(options.calibration, tokenizer, options.calibration_tokens, options.heldout_tokens)


def _router_tensors(
    config: MoHLlamaConfig, statistics: Sequence[LayerStatistics] | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The linear router's tensors by name, fitted; nothing for the router without weights."""
    tensors: dict[str, torch.Tensor] = {}
    if config.router_type != "linear" or statistics is None:
        return tensors
    for layer, (shared, sums) in enumerate(zip(config.shared_heads_per_layer, statistics, strict=True)):
        routed = [head for head in range(config.num_attention_heads) if head not in shared]
        if routed:
            name = f"model.layers.{layer}.self_attn.router.routed"
            weight, bias = fit_router(sums, routed, dtype)
            tensors |= {f"{name}.weight": weight.cpu(), f"{name}.bias": bias.cpu()}
    return tensors


def _plan_record(options: PlanOptions, config: MoHLlamaConfig) -> dict[str, Any]:
    return {
        "preset": options.preset,
        "router_type": config.router_type,
        "router_score": config.router_score,
        "shared": options.shared,
        "num_attention_heads": config.num_attention_heads,
        "shared_heads": config.shared_heads_per_layer,
        "active_heads": config.active_heads_per_layer,
    }


def _calibration_record(
    options: ConversionOptions, sources: Sequence[TokenizedSource], statistics: Sequence[LayerStatistics]
) -> dict[str, Any]:
    if not statistics[0].tokens:
        raise UserError(
            f"the calibration text has no window of {WINDOW} tokens: "
            + ", ".join(f"{source.name} has {len(source.train)}" for source in sources)
        )
    return {
        "mixture": options.calibration.name,
        "sources": {source.name: round(source.weight, 6) for source in sources},
        "tokens": statistics[0].tokens,
    }
