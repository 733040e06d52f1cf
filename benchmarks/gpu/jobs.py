"""What `gpu.sh` measures: models by size, and the measurements of each part, by name."""

from __future__ import annotations

from typing import NamedTuple

WARM_UP_STEPS = 3
"""They take memory and choose kernels, and do not count."""
STEPS = 13
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
    vocabulary: str = "50k"
    """The token files, by name in `WORDS`."""


WORDS = {"50k": (49_000, 2_000), "128k": (127_000, 2_000)}
"""Words of a vocabulary, each a piece, and documents of the token files."""
TINY_WORDS = {"50k": (500, 60), "128k": (1000, 60)}


EAGER, OFFLOAD = ("compile=off",), "offload=optimizer"
"""One process meets DeepSpeed with offload alone."""
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
        **{
            f"{size}-zero{stage}": Job(size, (f"zero_stage={stage}", OFFLOAD))
            for size in ("125m", "350m")
            for stage in (1, 2, 3)
        },
    },
}
"""What is wanted most comes first: at the end of a part's minutes the rest is left out."""
TINY_NAMES = ("125m", "moe", "t5", "125m-zero2")
"""What --tiny tries of the parts, unless --only names others."""

MUON, DOCUMENTS = ("optimizer=muon",), ("intra_document_masking=true",)
FACTS = {"machine": 30.0, "attention": 35.0, "kernels": 30.0, "data": 15.0, "tests": 55.0}
"""What `gpu.sh first` begins with, and the seconds of each; then `FIRST`. `first.py` says what they are."""
FIRST: dict[str, Job] = {
    "125m-muon": Job("125m", MUON, 55),
    "350m-muon": Job("350m", MUON, 50),
    "1.3b-muon": Job("1.3b", MUON, 60),
    "1.3b-documents": Job("1.3b", (*MUON, *DOCUMENTS), 55),
    "125m-vocabulary-128k": Job("125m", MUON, 45, "128k"),
    "125m-zero2": Job("125m", ("zero_stage=2", OFFLOAD), 35),
    "1.3b-fp8": Job("1.3b", (*MUON, "precision=fp8"), 50),
}
"""What is wanted most comes first. One process each, that measures, is profiled, and does not save."""
FIRST_SECONDS = 9 * 60
"""The call, of which the plan takes less: wheels are installed before it."""
TINY_FIRST = ("1.3b-documents", "125m-vocabulary-128k", "125m-zero2")
"""What --tiny tries of them: the others are the same models then."""
TINY_TESTS = "guessing or flash or known or goes_out or (once_a_step and (t5_moe or adamw))"
"""Some of each file of tests/gpu, by pytest's -k."""
