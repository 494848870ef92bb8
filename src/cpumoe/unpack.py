"""Packed weights back to integers and scales: for saving, and for checking a layer against the plain arithmetic.

The layout is that of ``core/packed.h``. The result is what was packed, to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpumoe import ops

_COLUMNS = 32  # of a block
_DEPTH = 128  # inputs of a record
_HEADER_BYTES = 64

#: Sub-group size -> where in a record the scale of each sub-group is, in the order of their inputs.
_SCALE_SLOTS = {32: [0, 2, 1, 3], 64: [0, 1], 128: [0]}


def unpack(blob: Tensor, first: int = 0, count: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Experts ``first`` to ``first + count - 1`` of packed weights (all by default).

    Returns:
        int8 values [count, out, in], scales [count, out, groups] (groups is 1 per channel) in the dtype that was
        packed, and the biases [count, out] fp32 or None. Rows of a gated matrix are gate rows, then up rows.
    """
    h = ops.describe_packed(blob)
    bits, rows, columns, group = h["weight_bits"], h["out_features"], h["in_features"], h["group_size"]
    experts = h["experts"]
    count = experts - first if count is None else count
    if not (first >= 0 and 0 <= count <= experts - first):
        raise ValueError(f"experts {first} to {first + count - 1}; 0 to {experts - 1} are packed")
    blocks, records = -(-rows // _COLUMNS), -(-columns // _DEPTH)
    by_block = blob[_HEADER_BYTES:].view(experts, blocks, -1)[first : first + count]
    weight_bytes = _COLUMNS * _DEPTH * bits // 8
    head_vectors = 1 + (group == 0) + bool(h["has_bias"])  # column sums, channel scales, biases
    head, body = by_block.split([head_vectors * _COLUMNS * 4, by_block.shape[-1] - head_vectors * _COLUMNS * 4], -1)
    body = body.reshape(count, blocks, records, -1)
    scale_bytes, weights = body.split([body.shape[-1] - weight_bytes, weight_bytes], -1)

    lines = weights.reshape(count, blocks, records, -1, _COLUMNS, 4).view(torch.int8)
    if bits == 4:  # low nibbles are the first 64 inputs of a record; shifts of int8 keep the sign
        lines = torch.cat(((lines << 4) >> 4, lines >> 4), 3)
    values = lines.permute(0, 1, 4, 2, 3, 5).reshape(count, blocks * _COLUMNS, records * _DEPTH)

    vectors = head.reshape(count, blocks, head_vectors, -1).view(torch.float32)  # [count, blocks, vectors, 32]
    dtype = torch.bfloat16 if h["scale_bytes"] == 2 else torch.float32
    if group == 0:  # held as fp32 whatever was packed
        scales = vectors[:, :, 1].reshape(count, -1, 1).to(dtype)
    else:
        stored = scale_bytes.contiguous().view(dtype).view(count, blocks, records, -1, _COLUMNS)
        subgroup = _DEPTH // stored.shape[3]
        ordered = stored[:, :, :, _SCALE_SLOTS[subgroup]]  # [count, blocks, records, sub-groups, 32]
        per_row = ordered.permute(0, 1, 4, 2, 3).reshape(count, blocks * _COLUMNS, -1)
        scales = per_row[..., : columns // subgroup : group // subgroup]
    if bits == 4:
        scales = scales * 16  # stored as a sixteenth
    bias = vectors[:, :, -1].reshape(count, -1) if h["has_bias"] else None

    def in_order(t: Tensor) -> Tensor:
        """Columns of blocks -> rows of the matrix."""
        if h["gated"]:  # a block is 16 gate columns and their 16 up columns
            t = t.view(count, blocks, 2, _COLUMNS // 2, *t.shape[2:]).transpose(1, 2)
            t = t.reshape(count, -1, *t.shape[4:])
        return t[:, :rows].contiguous()

    return in_order(values[..., :columns]), in_order(scales), None if bias is None else in_order(bias)
