"""What the model of a checkpoint has and where its files have it; transformers is imported when it is asked for."""

from __future__ import annotations

from cpumoe.checkpoints.checkpoint import Checkpoint
from cpumoe.checkpoints.model_layout import ModelLayout


def describe(checkpoint: Checkpoint) -> ModelLayout:
    """The layout of the model that a checkpoint holds: that of the class which ``load_model`` takes.

    Raises RuntimeError without transformers, which knows what models consist of, CheckpointError for a model that it
    does not know, and UnsupportedScheme for one whose experts are not served.
    """
    try:
        from cpumoe.integrations.transformers.model_description import describe_checkpoint
    except ModuleNotFoundError as problem:
        if problem.name != "transformers":
            raise
        raise RuntimeError(
            "transformers is not installed, and it is what knows where a model keeps its experts: "
            "pip install 'cpumoe[transformers]'"
        ) from None
    return describe_checkpoint(checkpoint)
