"""Whether a checkpoint's model has a native decoder, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpumoe import cpu
from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.integrations.transformers.layout.model_classes import config_of, empty_model
from cpumoe.integrations.transformers.recognition.recognize import recognize
from cpumoe.integrations.transformers.recognition.shown import as_lines, as_values
from cpumoe.integrations.transformers.recognition.values import Unrecognized


@dataclass(frozen=True)
class Explanation:
    """Whether a model has a native decoder, in a sentence, and the decoder as values and as lines of text.

    How pairs of RoPE are arranged and where norms of heads stand is found when the model is loaded: here they are as in
    most models.
    """

    sentence: str
    values: dict[str, Any] | None = None
    lines: tuple[str, ...] = ()


def explain_step(checkpoint: Checkpoint) -> Explanation:
    """Explain the native decoder of a model, or what stands against it.

    That a layer computes what its parts look like is compared only when the model is loaded.
    """
    found = recognize(empty_model(config_of(checkpoint.config), dtype=cpu.float_dtype()[0]))
    if isinstance(found, Unrecognized):
        return Explanation(f"layer by layer through transformers: {found}")
    sentence = (
        "each in one call of the core, if its layers compute what their parts look like; loading compares them, and "
        "finds how RoPE pairs values and whether norms of heads come after it"
    )
    return Explanation(sentence, as_values(found.decoder), tuple(as_lines(found.decoder)))
