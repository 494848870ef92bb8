"""The Qwen3-MoE architecture in plain PyTorch, for training only, and its names in a transformers checkpoint.

Every expert computes every token and the router's weights, zero for all but the chosen ones, scale the results. At
this size that is a dense feed-forward network of ``experts * expert_size`` with a mask: large matrix products without a
loop, a sort or a host synchronisation. It costs ``experts / top_k`` times the arithmetic of the chosen experts alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUP = 128  # input channels that share a scale when weights are quantised


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    vocabulary: int = 4096
    hidden: int = 384
    layers: int = 7  # 14.1 MB with 4-bit weights in groups of 32; 8 would leave no room below 16 MB
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 16
    top_k: int = 4
    expert_size: int = 128
    context: int = 1024
    rope_theta: float = 10_000.0
    eps: float = 1e-6

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden * self.expert_size

    @property
    def attention_parameters(self) -> int:
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    def parameters(self, *, active: bool = False) -> int:
        """All parameters, or those that one token uses; the embedding is tied and counts once."""
        norms = 2 * self.hidden + 2 * self.head_dim
        experts = (self.top_k if active else self.experts) * self.expert_parameters
        layer = self.attention_parameters + experts + self.experts * self.hidden + norms
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden

    def training_flops(self) -> int:
        """Floating-point operations per token of one training step: all experts are computed here."""
        attention = 12 * self.layers * self.heads * self.head_dim * self.context // 2  # causal: half of the scores
        return 6 * self.parameters() + attention

    def shipped_bytes(self, group: int = GROUP) -> int:
        """Size with 4-bit weights, one bf16 scale per group, and everything that is not a linear layer in bf16."""
        linear = self.layers * (self.attention_parameters + self.experts * self.expert_parameters)
        return linear // 2 + linear // group * 2 + 2 * (self.parameters() - linear)

    def transformers_config(self, *, begin: int, end: int, pad: int) -> dict[str, Any]:
        """config.json of a Qwen3MoeForCausalLM."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.top_k * self.expert_size,  # of dense layers: there are none
            "moe_intermediate_size": self.expert_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.01,
            "output_router_logits": False,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,  # read by vLLM and by transformers before 5
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": begin,
            "eos_token_id": end,
            "pad_token_id": pad,
        }


class Routing(NamedTuple):
    """What the router of one layer did: its two losses, and the share of the choices that each expert got."""

    balance: Tensor
    z: Tensor
    load: Tensor  # [experts]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Linear(nn.Module):
    """A matrix without bias whose forward pass can see its weights rounded to 4 bits; the gradient ignores that."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)
        self.rounded = False

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.rounded:
            groups = weight.detach().reshape(-1, GROUP)
            scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-8) / 7
            rounded = (groups / scale).round().clamp(-8, 7) * scale
            weight = weight + (rounded.view_as(weight) - weight).detach()
        return F.linear(x, weight)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden, width, 0.02)
        self.k_proj = Linear(shape.hidden, kv_width, 0.02)
        self.v_proj = Linear(shape.hidden, kv_width, 0.02)
        self.o_proj = Linear(width, shape.hidden, 0.02 / math.sqrt(2 * shape.layers))
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:  # [batch, length, heads * head_dim]
            return y.view(batch, length, -1, self.shape.head_dim)

        q = _rotate(self.q_norm(heads(self.q_proj(x))), cos, sin).transpose(1, 2)
        k = _rotate(self.k_norm(heads(self.k_proj(x))), cos, sin).transpose(1, 2)
        v = heads(self.v_proj(x)).transpose(1, 2)
        repeats = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True)
        output: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return output


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: channel i turns with channel i + head_dim / 2."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Experts(nn.Module):
    """Router and experts. Expert e owns rows ``e * expert_size`` onwards of gate and up, and these columns of down."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.experts * shape.expert_size
        self.router = nn.Parameter(torch.randn(shape.experts, shape.hidden) * 0.02)
        self.gate_proj = Linear(shape.hidden, width, 0.02)
        self.up_proj = Linear(shape.hidden, width, 0.02)
        self.down_proj = Linear(width, shape.hidden, 0.02 / math.sqrt(2 * shape.layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        experts, top_k = self.shape.experts, self.shape.top_k
        with torch.autocast(x.device.type, enabled=False):  # a bf16 router flips close choices at random
            logits = F.linear(x.float(), self.router.float())  # [batch, length, experts]
            probabilities = logits.softmax(-1)
            chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(top_k, -1).indices, 1.0)
            weights = probabilities * chosen
            weights = weights / weights.sum(-1, keepdim=True)
            load = chosen.detach().mean((0, 1)) / top_k
            # 1 when balanced; pushes probability away from experts that get more than their share
            balance = experts * (load * probabilities.mean((0, 1))).sum()
            z = logits.logsumexp(-1).square().mean()
        y = F.silu(self.gate_proj(x)) * self.up_proj(x)  # [batch, length, experts * expert_size]
        y = (y.unflatten(-1, (experts, -1)) * weights.to(y.dtype).unsqueeze(-1)).flatten(-2)
        return self.down_proj(y), Routing(balance, z, load)


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = Experts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Routing]:
        attention = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(attention, self.dropout, self.training)
        experts, routing = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(experts, self.dropout, self.training), routing


class Model(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.embed_tokens = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.arange(shape.context).float()[:, None, None] * frequencies  # [context, 1, head_dim / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Routing]]:
        """The last hidden states, [batch, length, hidden], and what the routers did."""
        length = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = F.dropout(F.embedding(ids, self.embed_tokens), self.dropout, self.training)
        routings = []
        for layer in self.layers:
            x, routing = layer(x, cos, sin)
            routings.append(routing)
        return self.norm(x), routings

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens)

    def set_rounded(self, rounded: bool) -> None:
        for module in self.modules():
            if isinstance(module, Linear):
                module.rounded = rounded


def to_transformers(shape: Shape, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames the state of :class:`Model` to a Qwen3MoeForCausalLM checkpoint, with one tensor per expert matrix."""
    result = {"model.embed_tokens.weight": state["embed_tokens"], "model.norm.weight": state["norm.weight"]}
    for layer in range(shape.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            result[f"{theirs}.{name}.weight"] = state[f"{ours}.{name}.weight"]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            result[f"{theirs}.self_attn.{name}.weight"] = state[f"{ours}.self_attn.{name}.weight"]
        result[f"{theirs}.mlp.gate.weight"] = state[f"{ours}.mlp.router"]
        for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            parts = state[f"{ours}.mlp.{name}.weight"].split(shape.expert_size, dim)
            for expert, part in enumerate(parts):
                result[f"{theirs}.mlp.experts.{expert}.{name}.weight"] = part
    return {name: tensor.contiguous() for name, tensor in result.items()}


def from_transformers(shape: Shape, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`to_transformers`."""
    result = {"embed_tokens": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    for layer in range(shape.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            result[f"{ours}.{name}.weight"] = state[f"{theirs}.{name}.weight"]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            result[f"{ours}.self_attn.{name}.weight"] = state[f"{theirs}.self_attn.{name}.weight"]
        result[f"{ours}.mlp.router"] = state[f"{theirs}.mlp.gate.weight"]
        for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            parts = [state[f"{theirs}.mlp.experts.{expert}.{name}.weight"] for expert in range(shape.experts)]
            result[f"{ours}.mlp.{name}.weight"] = torch.cat(parts, dim)
    return result
