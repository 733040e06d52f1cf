"""What `gpu.py` measures: models by size, and the measurements of each part, by name."""

from __future__ import annotations

from typing import NamedTuple

RECIPE = ["optimizer=adamw", "lr=0.001", "min_lr=0.0001", "lr_schedule=cosine", "warmup_fraction=0.02",
          "weight_decay=0.1", "muon_momentum=0.95"]  # fmt: skip
"""In numbers, so that what was measured earlier can be compared whatever the rules say by now."""
_LLAMA = ["architecture=llama", "seq_len=2048"]
SIZES: dict[str, list[str]] = {
    "125m": [*_LLAMA, "num_layers=12", "hidden_size=768", "num_attn_heads=12", "ffn_hidden_size=2048",
             "micro_batch_size=32", "global_batch_size=128"],
    "350m": [*_LLAMA, "num_layers=24", "hidden_size=1024", "num_attn_heads=16", "ffn_hidden_size=2816",
             "micro_batch_size=16", "global_batch_size=64"],
    "1.3b": [*_LLAMA, "num_layers=24", "hidden_size=2048", "num_attn_heads=16", "ffn_hidden_size=5504",
             "micro_batch_size=8", "global_batch_size=32"],
    "moe": ["architecture=mixtral", "seq_len=2048", "num_layers=12", "hidden_size=768", "num_attn_heads=12",
            "ffn_hidden_size=2048", "num_experts=8", "experts_per_token=2", "micro_batch_size=16",
            "global_batch_size=64"],
    "t5": ["architecture=t5", "seq_len=512", "num_layers=12", "hidden_size=768", "num_attn_heads=12", "head_dim=64",
           "ffn_hidden_size=2048", "micro_batch_size=64", "global_batch_size=256"],
}  # fmt: skip
TINY = ["num_layers=2", "hidden_size=64", "num_attn_heads=4", "head_dim=auto", "ffn_hidden_size=128", "seq_len=64",
        "micro_batch_size=2", "global_batch_size=4", "precision=fp32", "eval_tokens=128"]  # fmt: skip


class Job(NamedTuple):
    """One measurement."""

    size: str
    settings: tuple[str, ...] = ()
    seconds: float = 75.0
    """It is not begun where less is left. A guess, on the safe side: none has been seen."""


EAGER = ("compile=off",)
PARTS: dict[str, dict[str, Job]] = {
    "dense": {
        "125m": Job("125m"),
        "350m": Job("350m"),
        "1.3b": Job("1.3b", seconds=110),
        "125m-eager": Job("125m", EAGER, 50),
        "350m-eager": Job("350m", EAGER, 50),
        "1.3b-eager": Job("1.3b", EAGER, 90),
    },
    "families": {
        "moe": Job("moe", seconds=90),
        "t5": Job("t5"),
        "moe-eager": Job("moe", EAGER, 60),
        "t5-eager": Job("t5", EAGER, 50),
    },
    "zero": {
        "125m-zero2": Job("125m", ("zero_stage=2",)),
        "125m-zero3": Job("125m", ("zero_stage=3",)),
        "350m-zero2": Job("350m", ("zero_stage=2",)),
        "350m-zero3": Job("350m", ("zero_stage=3",)),
        "125m-zero1-offload": Job("125m", ("zero_stage=1", "offload=optimizer")),
    },
}
"""What is wanted most comes first: at the end of a part's minutes the rest is left out."""
TINY_NAMES = ("125m", "moe", "t5", "125m-zero2")
"""What --tiny tries of the parts, unless --only names others."""
