"""What the heads of the scored models did on the text of the suite's benchmarks."""

import gc
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moh_llm.devices import choose_device
from moh_llm.errors import UserError
from moh_llm.evaluation.models import register_moh
from moh_llm.evaluation.prompts import ITEMS, prompts
from moh_llm.evaluation.suite import Suite
from moh_llm.evaluation.tasks import load_tasks

Record = dict[str, Any]


def analyse_models(
    models: dict[str, str],
    suite: Suite,
    data_dir: Path | None,
    device: str | None,
    dtype: str,
    say: Callable[[str], None],
) -> dict[str, Record]:
    """Analyse each of ``models`` (label to path or Hub id) that chooses among its heads, one in memory at a time.

    Args:
        models: others, dense ones and those with every head on, are passed over.
        suite: the benchmarks whose text is read.
        data_dir: as `runner.score` takes it.
        device: likewise; this process works alone.
        dtype: likewise.
        say: receives a line for each stage.

    Returns:
        By label, the record of `moh_llm.analysis.record.analyse`; or ``{"error": ...}``, in one line, for
        a model whose analysis failed, or for all of them where the text cannot be read.
    """
    # Whatever goes wrong here must not lose the scores, which took hours: every `except` takes all errors.
    found: dict[str, Record] = {}
    chosen = {}
    for label, model in models.items():
        try:
            if _chooses(model):
                chosen[label] = model
        except Exception as error:
            found[label] = _failed(label, error, say)
    if not chosen:
        return found
    say("analysis: reading the benchmarks' text (--no-analysis leaves all of it out)")
    try:
        texts = _texts(suite, data_dir, say)
        device = str(choose_device(device))
    except Exception as error:
        return found | {label: _failed(label, error, say) for label in chosen}
    for label, model in chosen.items():
        try:
            # The one before has left its memory by now.
            _free_memory()
            found[label] = _analyse(label, model, texts, device, dtype, say)
        except Exception as error:
            found[label] = _failed(label, error, say)
    return {label: found[label] for label in models if label in found}


def _chooses(model: str) -> bool:
    """Whether some head of a model is off."""
    from transformers import AutoConfig

    from moh_llm.modeling import MoHLlamaConfig

    register_moh()
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return isinstance(config, MoHLlamaConfig) and min(config.active_heads_per_layer) < config.num_attention_heads


def _texts(suite: Suite, data_dir: Path | None, say: Callable[[str], None]) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory(prefix="moh-eval-") as folder:
        texts = prompts(load_tasks(suite, Path(folder), data_dir, ITEMS), say=lambda line: say(f"analysis: {line}"))
    if not texts:
        raise UserError("no benchmark's text can be built; the lines above say why")
    return texts


def _analyse(
    label: str, model: str, texts: dict[str, list[str]], device: str, dtype: str, say: Callable[[str], None]
) -> Record:
    from transformers import AutoTokenizer

    from moh_llm.analysis.record import analyse
    from moh_llm.modeling import MoHLlamaForCausalLM

    say(f"analysis of {label}: loading {model}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        network = MoHLlamaForCausalLM.from_pretrained(model, dtype=dtype, use_safetensors=True).to(device)
    except (OSError, ValueError) as error:
        raise UserError(f"{model} cannot be loaded: {_one_line(error)}") from error
    return analyse(network, tokenizer, texts, say=lambda stage: say(f"analysis of {label}: {stage}"))


def _failed(label: str, error: BaseException, say: Callable[[str], None]) -> Record:
    if isinstance(error, UserError):
        text = str(error)
    else:
        # It may be a bug, whose place should reach the screen.
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {_one_line(error)}"
    say(f"analysis of {label} failed: {text}")
    return {"error": text}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _free_memory() -> None:
    """Give back what earlier models took."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
