"""What the model of a checkpoint has and where its files have it; transformers is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.model_layout import ExpertsShape, ModelLayout
from cpumoe.integrations.transformers import hook

if TYPE_CHECKING:
    from cpumoe.integrations.transformers.recognition.explain import Explanation


def describe(checkpoint: Checkpoint) -> ModelLayout:
    """The layout of the model that a checkpoint holds: that of the class which ``load_model`` takes.

    Raises RuntimeError without transformers, which knows what models consist of, CheckpointError for a model that it
    does not know, and UnsupportedScheme for one whose experts are not served.
    """
    layout: ModelLayout = _description().describe_checkpoint(checkpoint)
    return layout


def expert_shapes(checkpoint: Checkpoint) -> frozenset[ExpertsShape]:
    """The shapes that the experts of a checkpoint's model have, from config.json alone, without names in files.

    Raises what :func:`describe` raises.
    """
    shapes: frozenset[ExpertsShape] = _description().shapes_of_experts(checkpoint)
    return shapes


def explain_step(checkpoint: Checkpoint) -> Explanation:
    """Return whether a checkpoint's model has a native decoder, and the decoder as its parts look like.

    Raises what :func:`describe` raises.
    """
    _description()
    from cpumoe.integrations.transformers.recognition import explain

    return explain.explain_step(checkpoint)


def _description() -> Any:
    if hook.is_missing():
        raise RuntimeError(
            "transformers is not installed, and it is what knows where a model keeps its experts: "
            "pip install 'cpumoe[transformers]'"
        )
    from cpumoe.integrations.transformers.layout import model_description

    return model_description
