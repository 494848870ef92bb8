"""Which class of transformers a config.json is for, and models of it without weights."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto

from cpumoe.errors import CheckpointError

#: transformers' tables of classes that generate text, in the order in which they are asked.
_TABLES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
)


#: Code that asks for the name of the attention, other than transformers' own list of them does.
_ASKS_FOR_NAME = re.compile(
    r"\b_attn_implementation\s*(==|!=|in\b|not in\b)|(?<!ALL_ATTENTION_FUNCTIONS)\[[\w.]*\b_attn_implementation\]"
)


def config_of(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration object of a config.json, without what it says of quantisation.

    Raises CheckpointError for a model that transformers does not know and for fields that it refuses.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CheckpointError(f"model_type {kind!r:.80} is not known to transformers {transformers_version}")
    plain = {key: value for key, value in copy.deepcopy(dict(config)).items() if key != "quantization_config"}
    try:
        return CONFIG_MAPPING[kind].from_dict(PreTrainedConfig._decode_special_floats(plain))
    except Exception as problem:  # only transformers' own code runs here, and its validators raise all kinds of errors
        raise CheckpointError(f"transformers cannot make a model of config.json: {problem!r:.500}") from problem


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that generates text with a configuration: the language model's, or that of the whole if there is none.

    A model that is part of a larger one may be in no table of transformers; then config.json names the class.
    """
    candidates = [getattr(transformers, str(name), None) for name in getattr(config, "architectures", None) or []]
    named: list[Any] = [c for c in candidates if isinstance(c, type) and issubclass(c, PreTrainedModel)]
    found = [_in_table(table, config) for table in _TABLES]
    # A language model without a head comes last: it is what some text parts of larger models are saved as.
    for choice in (found[0], *(c for c in named if c.can_generate()), *found[1:], *named):
        if choice is not None:
            return cast("type[PreTrainedModel]", choice)
    raise CheckpointError(
        f"transformers {transformers_version} has no class for text with model_type {config.model_type!r}, and "
        f"config.json names none (architectures={getattr(config, 'architectures', None)!r:.80})"
    )


def auto_class_for(config: PreTrainedConfig) -> Any:
    """What loads a checkpoint: transformers' AutoModelForCausalLM, or a class itself where that has none."""
    found = _in_table(_TABLES[0], config)
    return model_class(config) if found is None else AutoModelForCausalLM


def has_plain_attention(config: PreTrainedConfig) -> bool:
    """Whether the attention of a model is softmax over the keys and nothing else, so that ours may compute it.

    Models with sinks or soft-capping say that they do not take PyTorch's; those with sparse attention, and some others,
    do something else for each name that an attention may have.
    """
    try:
        chosen = model_class(config)
    except CheckpointError:
        return False
    source = inspect.getsource(sys.modules[chosen.__module__])
    return bool(chosen._supports_sdpa) and not _ASKS_FOR_NAME.search(source)


def _in_table(table: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    mapping = getattr(modeling_auto, table, None)
    if mapping is None or type(config) not in mapping:
        return None
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def empty_model(
    config: PreTrainedConfig,
    of_class: type[PreTrainedModel] | None = None,
    *,
    dtype: torch.dtype | None = None,
    real_buffers: bool = False,
) -> PreTrainedModel:
    """Return a model without weights: its parameters and, unless ``real_buffers``, its buffers are on the meta device.

    ``dtype``: of the weights; None for PyTorch's default.
    """
    made_by = of_class or model_class(config)
    if made_by.config_class is type(config).sub_configs.get("text_config"):
        config = config.get_text_config()
    default = torch.get_default_dtype()
    torch.set_default_dtype(default if dtype is None else dtype)
    try:
        with no_init_weights(), _meta_parameters() if real_buffers else torch.device("meta"):
            return made_by(config).eval()
    except Exception as problem:  # only transformers' own code runs here
        raise CheckpointError(f"transformers cannot make a model of config.json: {problem!r:.500}") from problem
    finally:
        torch.set_default_dtype(default)


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Inside the block parameters of modules are put on the meta device. Memory for them is asked for, not touched."""
    stock = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        on_meta = None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        stock(self, name, on_meta)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = stock  # type: ignore[method-assign]
