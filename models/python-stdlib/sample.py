"""Completes a few prompts with plain transformers on the CPU.

    python sample.py build/model-export --temperature 0.6

For looking at the quality of an exported model: what is in bold is the model's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "def binary_search(items, target):\n",
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n',
    "import os\nimport sys\nimport unittest\n\n\nclass TestPath(unittest.TestCase):\n\n    def test_join(self):\n",
    'def read_config(path):\n    """Read a configuration file and return a dictionary."""\n    with open(path) as f:\n',
    "for i in range(",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", action="append", help="instead of the built-in prompts; may be repeated")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    how = {"do_sample": True, "temperature": args.temperature, "top_p": 0.95} if args.temperature else {}
    for prompt in args.prompt or PROMPTS:
        torch.manual_seed(args.seed)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=args.tokens, **(how or {"do_sample": False}))
        new = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{'=' * 80}\n{prompt}\033[1m{new}\033[0m")


if __name__ == "__main__":
    main()
