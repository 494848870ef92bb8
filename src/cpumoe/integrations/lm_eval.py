"""The command line of lm-evaluation-harness with one more kind of model, ``cpumoe``.

    python -m cpumoe.integrations.lm_eval run --model cpumoe --model_args pretrained=MODEL,scheme=w4a8-g128 --tasks ...

The harness does not look for plug-ins, so this module registers the model and then runs the harness.
"""

from __future__ import annotations

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from cpumoe.integrations.transformers.loading.model_loading import load_model

#: Options of the harness's own transformers model that still have a meaning when the model is already loaded.
_TAKEN_OVER = {
    "add_bos_token",
    "batch_size",
    "chat_template_args",
    "enable_thinking",
    "logits_cache",
    "max_batch_size",
    "max_length",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "tokenizer",
    "truncation",
}

_DEFAULT_DEVICE = "cuda:0"  # what the harness passes if the user named no device


@register_model("cpumoe")
class PackedModel(HFLM):  # type: ignore[misc]  # untyped base
    """A checkpoint as :func:`cpumoe.load_model` loads it, for the harness.

    Args:
        pretrained: folder of the checkpoint.
        scheme, linears, cache, kv_cache: as in ``load_model``.
        device: ``cpu`` or None.
        options: options of the harness's ``hf`` model that do not concern loading.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        scheme: str | None = None,
        linears: str | None = None,
        cache: str | None = None,
        kv_cache: str | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        if unknown := sorted(options.keys() - _TAKEN_OVER):
            known = ", ".join(sorted(_TAKEN_OVER | {"pretrained", "scheme", "linears", "cache", "kv_cache"}))
            raise ValueError(f"--model_args has {', '.join(unknown)}; accepted are {known}")
        if device not in (None, "cpu", _DEFAULT_DEVICE):
            raise ValueError(f"--device {device}; packed weights run on 'cpu'")
        options.setdefault("tokenizer", pretrained)
        model = load_model(pretrained, scheme=scheme, linears=linears, cache=cache, kv_cache=kv_cache)
        super().__init__(pretrained=model, backend="causal", device="cpu", **options)


if __name__ == "__main__":
    cli_evaluate()
