"""Run by the interpreter of vLLM's environment: greedy tokens and log-probabilities of models, as JSON.

    python vllm_client.py REQUEST.json REPLY.json

The request has `prompts`, lists of token ids, which are served at once; `max_tokens` of each; and `jobs`, which have
`model`, a folder; `engine`, further arguments of `vllm.LLM`; and `rounds`, how often the prompts are served. A step
takes 32 tokens, so that longer prompts are prefilled in chunks, and a block of the cache 32.

The reply has an entry for each job: what came out in the last round, with `cached`, the number of tokens that the
engine did not compute, and `preempted`, how often it put a request off; or `error`, what it said.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # all in this process, one engine after the other

import transformers
import vllm
from vllm.distributed import cleanup_dist_env_and_memory

SETTINGS = {
    **{"enforce_eager": True, "dtype": "float32", "max_model_len": 256, "block_size": 32, "max_num_batched_tokens": 32},
    **{"enable_chunked_prefill": True, "enable_prefix_caching": False, "disable_log_stats": False},
    **{"distributed_executor_backend": "uni", "num_gpu_blocks_override": 64},
}


def serve(job: dict, prompts: list[list[int]], max_tokens: int) -> dict:
    """One engine's reply."""
    engine = vllm.LLM(job["model"], max_num_seqs=len(prompts), **(SETTINGS | job["engine"]))
    greedy = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
    for _ in range(job["rounds"]):
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            for output in outputs
        ],
        "cached": sum(answer.num_cached_tokens or 0 for answer in answers),
        "preempted": sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions"),
    }


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    replies = []
    for job in request["jobs"]:
        try:
            replies.append(serve(job, request["prompts"], request["max_tokens"]))
        except Exception as error:
            replies.append({"error": f"{type(error).__name__}: {error}"})
        cleanup_dist_env_and_memory()
    versions = {"vllm": vllm.__version__, "transformers": transformers.__version__}
    Path(sys.argv[2]).write_text(json.dumps(versions | {"replies": replies}))


if __name__ == "__main__":
    main()
