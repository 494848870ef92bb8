"""Runs models in vLLM, one after another in this process, and prints what they answered.

    python tests/vllm_plugin/run_models.py CASES.json OUT.json [--options JSON] [--only NAME ...]

``OUT.json`` has for each name the tokens for each prompt, or a sentence on what went wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def answers(folder: str, prompts: list[list[int]], new: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The tokens that follow greedily, and the logarithms of their probabilities."""
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 1 << 26,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    llm = LLM(folder, **settings | options)
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=3)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    outputs = [one.outputs[0] for one in found]
    return [
        {
            "tokens": list(output.token_ids),
            "logprobs": [{str(token): one.logprob for token, one in best.items()} for best in output.logprobs],
        }
        for output in outputs
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--only", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    cases = json.loads(arguments.cases.read_text())
    found: dict[str, Any] = {}
    for name in arguments.only or cases:
        case = cases[name]
        prompts = [answer["prompt"] for answer in case["answers"]]
        try:
            found[name] = answers(case["folder"], prompts, len(case["answers"][0]["tokens"]), arguments.options)
        except Exception as problem:
            traceback.print_exc()
            found[name] = f"{type(problem).__name__}: {problem}"
        print(f"ran {name}", flush=True)
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        gc.collect()
    arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
