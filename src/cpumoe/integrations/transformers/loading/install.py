"""Faster parts around the experts when a model decodes: norms, routers, and what takes the place of attention.

transformers writes each of them as several PyTorch operators. For one token nearly all the time goes into calling these
operators. The results are the same as those of the replaced code, apart from the order of sums; each form is compared
with the code it replaces before it is put in place.
"""

from __future__ import annotations

from torch import nn

from cpumoe.integrations.transformers.loading.packed_head import refuse_resizing
from cpumoe.integrations.transformers.native_decoder import run_natively
from cpumoe.integrations.transformers.replacements.lightning import speed_up_lightning_attention
from cpumoe.integrations.transformers.replacements.mla import absorb_latents
from cpumoe.integrations.transformers.replacements.norms import speed_up_norms
from cpumoe.integrations.transformers.replacements.recurrent import speed_up_linear_attention
from cpumoe.integrations.transformers.replacements.routers import speed_up_routers
from cpumoe.integrations.transformers.replacements.state_space import speed_up_state_spaces


def speed_up(model: nn.Module) -> None:
    """Replaces the forward of a model's parts by forms with few operators, where these compute the same."""
    speed_up_state_spaces(model)
    speed_up_lightning_attention(model)
    speed_up_linear_attention(model)
    absorb_latents(model)
    speed_up_norms(model)
    speed_up_routers(model)
    run_natively(model)
    refuse_resizing(model)
