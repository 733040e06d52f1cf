"""What a run is recognised by, in the words of `config.yaml`: for messages, where names of our own say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLACES = frozenset({
    "output_model_dir", "input_jsonl", "input_tokenizer_file", "output_prefix", "deepspeed_template", "train_data",
    "valid_data", "test_data", "chat_template",
})  # fmt: skip
"""Settings that name files: their content is identified by hashes."""
_KEYS = {
    "data_parallel_size": "num_processes",
    "steps": "train_tokens, epochs or max_steps (number of steps)",
    "tokenizer": "input_tokenizer_file (its content)",
    "tokenizer_sha256": "input_tokenizer_file (SHA-256 of its content)",
    "vocab_size": "input_tokenizer_file (its number of pieces)",
    "data_sha256": "output_prefix (SHA-256 of the token files)",
    "reduce_bucket_size": "deepspeed_template (reduce_bucket_size)",
    "stage3_param_persistence_threshold": "deepspeed_template (stage3_param_persistence_threshold)",
    "hierarchy": "deepspeed_template (zero_hpz_partition_size)",
    "raw_len": "seq_len (tokens of the corpus in a sample)",
    "input_len": "seq_len (input tokens of a sample)",
    "target_len": "seq_len (tokens that a sample predicts)",
    "curriculum": "stages or source_weights (order of reading)",
    "gpu_bytes": "the GPU's memory in bytes",
}
_FOLLOW_FROM = {
    "vocab_size": "tokenizer_sha256",
    "raw_len": "seq_len",
    "input_len": "seq_len",
    "target_len": "seq_len",
}
"""Names of what is no setting, and of a setting that tells enough where it differs too."""
_MIXTURE = "stages, source_weights or the number of documents in input_jsonl: another order of reading"


def key_of(name: str) -> str:
    """What the user calls it."""
    return _KEYS.get(name, name)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A word for each value of `now` that `was` has otherwise."""
    differing = {name for name in now if was.get(name) != now[name]}
    return [
        _MIXTURE if name == "curriculum" else f"{key_of(name)} was {_brief(was.get(name))}, is now {_brief(now[name])}"
        for name in now
        if name in differing and _FOLLOW_FROM.get(name) not in differing
    ]


def _brief(value: object) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 else text
