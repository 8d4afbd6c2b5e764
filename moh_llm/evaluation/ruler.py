"""The synthetic tasks of RULER (Hsieh et al., 2024) as lm-eval makes them, but without its downloads.

lm-eval makes 500 prompts of a task and length; here `--limit` counts them. It splits sentences by a model that NLTK
downloads; here they end at a mark before a space. It hides needles in essays that it downloads; here in the text of
`--data-dir`, or in Python's documentation. Prompt and answer fit into the length; lm-eval's may be some tokens longer.
"""

import contextlib
import dataclasses
import importlib
import io
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from moh_llm.data.embedded import embedded_documents
from moh_llm.errors import UserError
from moh_llm.evaluation.suite import HAYSTACK, Suite
from moh_llm.evaluation.tasks import read_splits
from moh_llm.reading import read_text

_MODULES = "lm_eval.tasks.ruler."
# Per module the function that makes prompts, and the tokens of an answer that it leaves no room for.
_GENERATORS = {
    "niah_utils": ("generate_samples", 0),
    "vt_utils": ("sys_vartrack_w_noise_random", 0),
    "cwe_utils": ("sys_word_pair_random", 0),
    "fwe_utils": ("sys_kwext", 50),
}


def prepare(suite: Suite, models: list[str], say: Callable[[str], None]) -> Suite:
    """The suite with a tokenizer for prompts that are made, the first model's, and without those too long for a model.

    Raises UserError if a package is not installed, or no prompt is short enough.
    """
    if not any(benchmark.lengths for benchmark in suite.benchmarks):
        return suite
    from transformers import AutoConfig

    configs = [AutoConfig.from_pretrained(model, trust_remote_code=False) for model in models]
    context = min(config.max_position_embeddings for config in configs)
    kept = suite.within(context)
    import_generators()
    if len(kept.benchmarks) < len(suite.benchmarks):
        say(f"prompts of more than {context:,} tokens, the context of a model, are left out")
    return dataclasses.replace(kept, tokenizer=suite.tokenizer or models[0])


def import_generators() -> None:
    """Import lm-eval's modules of RULER without a download. Raises UserError if a package is not installed."""
    try:
        with patch("nltk.data.find"):  # at import it would download a model of sentences
            for module in _GENERATORS:
                importlib.import_module(_MODULES + module)
    except ImportError as error:
        raise UserError('RULER needs wonderwords and nltk: pip install "lm-eval[ruler]"') from error


def make_prompts(
    stock: str, tokenizer: str, lengths: list[int], items: int, split: str, data_files: Any = None, **_: Any
) -> dict[str, Any]:
    """The dataset of lm-eval's task in the file ``stock``: ``items`` prompts of each length, the same in every call."""
    import numpy as np
    from lm_eval.tasks.ruler import prepare_niah
    from transformers import AutoTokenizer

    name, function = re.findall(r"custom_dataset: !function (\w+)\.(\w+)", read_text(Path(stock)))[0]
    module, (generator, answer) = importlib.import_module(_MODULES + name), _GENERATORS[name]
    generate, tokens = getattr(module, generator), AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)

    def measure(text: str) -> SimpleNamespace:
        # lm-eval does not count the beginning of the answer, which repeats the question in the last line.
        ids = tokens(text + text[text.rfind("\n") :], verbose=False).input_ids
        return SimpleNamespace(input_ids=ids + answer * [0])

    def generate_some(*arguments: Any, **options: Any) -> Any:
        return generate(*arguments, **options | {"num_samples": min(items, options.get("num_samples", items))})

    changes: dict[str, Any] = {"get_tokenizer": lambda *_: measure, generator: generate_some}
    if name == "niah_utils":
        texts = read_splits(data_files)[split]["text"] if data_files else dict(embedded_documents(HAYSTACK)).values()
        words, others = " ".join(texts).split(), module.get_haystack
        changes["get_haystack"] = lambda type_haystack: words if type_haystack == "essay" else others(type_haystack)
    if name == "cwe_utils":
        module.RNG.seed(0)
    random.seed(0)
    np.random.seed(0)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        patch.multiple(module, **changes),
        patch.object(prepare_niah, "cached_sent_tokenize", lambda text: re.split(r"(?<=[.!?])\s+", text)),
    ):
        return {split: getattr(module, function)(max_seq_lengths=lengths)["test"]}


def recall(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the right answers that a text holds, as lm-eval's RULER counts it."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {"recall": string_match_all(postprocess_pred(results), [doc["outputs"]])}
