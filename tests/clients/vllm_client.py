"""Run by the interpreter of vLLM's environment: greedy tokens and log-probabilities of a model, as JSON.

    python vllm_client.py REQUEST.json REPLY.json

The request has `model`, a folder; `prompts`, lists of token ids, which are served at once; `max_tokens` of each; and
`step_tokens`, how many tokens a step takes, so that longer prompts are prefilled in chunks.
"""

import json
import sys
from pathlib import Path

import transformers
import vllm


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    engine = vllm.LLM(
        request["model"],
        trust_remote_code=True,
        model_impl=request.get("model_impl", "auto"),
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=request["step_tokens"],
        max_num_seqs=len(request["prompts"]),
        enable_chunked_prefill=True,
        enable_prefix_caching=request.get("prefix_caching", False),
        block_size=32,
    )
    greedy = vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"], logprobs=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = [answer.outputs[0] for answer in engine.generate(prompts, greedy, use_tqdm=False)]
    reply = {
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ],
    }
    Path(sys.argv[2]).write_text(json.dumps(reply))


if __name__ == "__main__":
    main()
