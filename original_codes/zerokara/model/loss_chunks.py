"""Chunks of tokens in which the loss is computed (`model.loss`), and the memory that it takes; without torch.

Letters: N tokens, C tokens of a chunk, D hidden size, V rows of the vocabulary that a process holds.
"""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Memory for one chunk of fp32 logits, enough for full matrix products: on a CPU those of 128 rows, 16 MiB of a
vocabulary of 32,000, ran at two thirds of the speed of those of 512."""

LEAST_ROWS = {"cpu": 1, "cuda": 4096}
"""C at least, however large the vocabulary. On a GPU each chunk reads and writes the fp32 gradient of the weight, which
takes as long as a product of some 800 rows (H100: 3.35 TB/s, 700 TFLOP/s): of 4,096 rows a fifth of it."""

BLOCK_BYTES = 2 * 2**20
"""Memory for the rows of a chunk that a CPU takes the softmax of at a time, in fp32: they stay in its cache through all
passes over them. For 2,048 rows of 8,064 on a core of an EPYC the softmax took 42 ms, and 31 so (bf16)."""

TILE_ROWS = 64
"""Large chunks are whole multiples of this: a GPU computes products in tiles, and a partial tile costs a whole one."""


def chunk_rows(device_type: str, num_tokens: int, num_rows: int) -> int:
    """Return C, about equal in all chunks: no small one is left over."""
    most_rows = max(LEAST_ROWS[device_type], CHUNK_BYTES[device_type] // (4 * num_rows))
    num_chunks = max(1, -(-num_tokens // most_rows))
    rows = max(1, -(-num_tokens // num_chunks))
    return -(-rows // TILE_ROWS) * TILE_ROWS if rows > 4 * TILE_ROWS else rows


def block_rows(device_type: str, chunk: int, num_rows: int) -> int:
    """Return the rows of a chunk that the uncompiled softmax works on at a time."""
    return min(chunk, max(1, BLOCK_BYTES // (4 * num_rows))) if device_type == "cpu" else chunk


def loss_bytes(
    device_type: str, num_tokens: int, num_rows: int, hidden_size: int, number_bytes: int, is_fused: bool
) -> int:
    """Return the most bytes that the loss and its gradients take at a time, beside what the layers keep.

    A number of the computation has `number_bytes`; `is_fused` says that the softmax is compiled.
    """
    rows = chunk_rows(device_type, num_tokens, num_rows)
    converted = number_bytes if number_bytes < 4 else 0  # beside fp32
    weight = num_rows * hidden_size
    hidden = number_bytes * num_tokens * hidden_size  # their gradient
    # A chunk's gradient of the weight, before it is added (`loss.adds_in_fp32`).
    product = converted * weight if device_type == "cpu" else 0
    if device_type == "cpu":
        hidden *= 2  # and a copy in the order of the labels (`layout`)
    # Logits and their gradient; or both in one place, and where that is not in fp32, meanwhile a block that is.
    block = 4 * block_rows(device_type, rows, num_rows) * num_rows if converted else 0
    of_rows = number_bytes * rows * num_rows
    chunk = 2 * of_rows + product if is_fused else of_rows + max(block, product)
    # At the end no chunk is left, and the gradient of the weight is converted.
    return hidden + 4 * weight + max(chunk, converted * weight)
