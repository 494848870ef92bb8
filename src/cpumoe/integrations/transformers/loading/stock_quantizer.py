"""transformers' own quantizer, for checkpoints whose scheme cpumoe does not support, with checks around it.

transformers 5.22 reads two kinds of checkpoints wrongly and reports no error. These are refused here:

- experts under names that it does not expect (Mixtral and gpt-oss as llm-compressor 0.14 writes them): it initialises
  them at random;
- NVFP4 experts: it leaves out their global scales, and the weights come out thousands of times too large. Linears with
  such scales are read correctly.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.quantizers.base import HfQuantizer

from cpumoe.checkpoints.layer_names import EXPERT
from cpumoe.checkpoints.named_tensors import listed
from cpumoe.checkpoints.tensor_file import TensorFile
from cpumoe.errors import UnsupportedScheme

CURE = "quantise its float original: cpumoe quantize FLOAT_MODEL DST --scheme w4a8-g128"

_GLOBAL_SCALE = ".weight_global_scale"


class _Guard:
    """Comes before transformers' quantizer in the list of base classes, and checks how that one reads the files."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **options: Any
    ) -> None:
        super()._process_model_before_weight_loading(  # type: ignore[misc]  # a method of transformers' class
            model, checkpoint_files=checkpoint_files, **options
        )
        _refuse_lost_scales(model, checkpoint_files or [])
        _refuse_made_up_experts(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **options: Any) -> Any:
        del model._adjust_missing_and_unexpected_keys
        return super()._process_model_after_weight_loading(model, **options)  # type: ignore[misc]


def guarded(stock: type[HfQuantizer]) -> type[HfQuantizer]:
    """transformers' quantizer class, changed so that it refuses what it would read wrongly."""
    return type(stock.__name__, (_Guard, stock), {})


def _refuse_lost_scales(model: PreTrainedModel, files: Iterable[str]) -> None:
    """Raises before loading if transformers would merge experts into one tensor without a place for their scales."""
    separate = {name[name.rindex("experts.") :] for name, _ in model.named_modules() if "experts." in name}
    for file in files:
        if not str(file).endswith(".safetensors"):
            continue
        with TensorFile(Path(file)) as opened:
            names = [name for name in opened.tensors if name.endswith(_GLOBAL_SCALE) and EXPERT.search(name)]
        for name in names:
            if name[name.rindex("experts.") :].removesuffix(_GLOBAL_SCALE) not in separate:
                raise UnsupportedScheme(
                    f"NVFP4 experts are not served, and transformers {transformers_version} would read them without "
                    f"their global scales ({name}); {CURE}"
                )


def _refuse_made_up_experts(model: PreTrainedModel) -> None:
    """Raises if transformers did not find experts in the files, before it initialises them at random."""
    stock = model._adjust_missing_and_unexpected_keys

    def checked(info: Any) -> None:
        stock(info)
        missing = sorted(name for name in info.missing_keys if EXPERT.search(name))
        if missing:
            unused = sorted(name for name in info.unexpected_keys if EXPERT.search(name))
            instead = f"; it has no use for {listed(unused)}" if unused else ""
            raise UnsupportedScheme(
                f"the scheme of this checkpoint is not served, and transformers {transformers_version} does not find "
                f"its experts and would make them up: {listed(missing)}{instead}; {CURE}"
            )

    model._adjust_missing_and_unexpected_keys = checked
