"""Faster parts around the experts when a model decodes: norms, routers, and what takes the place of attention.

transformers writes each of them as several PyTorch operators. For one token nearly all the time goes into calling these
operators. The results are the same as those of the replaced code, apart from the order of sums; each form is compared
with the code it replaces before it is put in place.
"""

from __future__ import annotations

from torch import nn

from cpumoe.integrations.transformers.adapter import install_native_decoder
from cpumoe.integrations.transformers.loading.packed_head import refuse_resizing
from cpumoe.integrations.transformers.recognition.probe import probing
from cpumoe.integrations.transformers.replacements.lightning import speed_up_lightning_attention
from cpumoe.integrations.transformers.replacements.mla import absorb_latents
from cpumoe.integrations.transformers.replacements.norms import speed_up_norms
from cpumoe.integrations.transformers.replacements.recurrent import speed_up_linear_attention
from cpumoe.integrations.transformers.replacements.routers import speed_up_routers
from cpumoe.integrations.transformers.replacements.state_space import speed_up_state_spaces

#: What is installed in a model, in any order: each compares what it replaces with the code of the class.
INSTALLED = (
    speed_up_state_spaces,
    speed_up_lightning_attention,
    speed_up_linear_attention,
    absorb_latents,
    speed_up_norms,
    speed_up_routers,
    install_native_decoder,
)


def speed_up(model: nn.Module) -> None:
    """Install the native decoder of a model, and fused operators for models and calls that run layer by layer."""
    with probing():
        for install in INSTALLED:
            install(model)
    refuse_resizing(model)
