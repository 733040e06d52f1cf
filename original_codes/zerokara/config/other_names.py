"""Names of settings that a user may bring along: our own former ones, and those of other training programs.

A setting that is unknown is refused; with the name that it has here, or what became of it, the refusal helps. Source of
the others: the options of Megatron-LM, Hugging Face's `TrainingArguments`, SentencePiece's trainer, and T5X.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass

from zerokara.config.convert_config import ConvertConfig
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig


@dataclass(frozen=True)
class ConfigFile:
    """One of the three YAML files."""

    name: str
    """End of its name; a set in `model_configs/` has a prefix before it."""
    steps: str
    config_class: type[Settings]


FILES = (
    ConfigFile("sentence_piece_config.yaml", "step 1", TokenizerConfig),
    ConfigFile("convert_config.yaml", "steps 4 and 6", ConvertConfig),
    ConfigFile("config.yaml", "steps 2 and 3", PretrainConfig),  # last, since its name ends the other two
)

SAME_AS: dict[str, tuple[str, ...]] = {
    # Our own former names.
    "sparse_layers": ("moe_layers",),
    "router_balance_loss": ("router_aux_loss_coef",),
    "router_z_loss": ("router_z_loss_coef",),
    "expert_capacity": ("expert_capacity_factor",),
    "expert_ffn_hidden_size": ("moe_ffn_hidden_size",),
    "isolate_documents": ("intra_document_masking",),
    "head_size": ("head_dim",),
    "relative_attention_buckets": ("relative_attention_num_buckets",),
    "relative_attention_distance": ("relative_attention_max_distance",),
    "relative_attention_lr_factor": ("relative_attention_lr_multiplier",),
    # Settings that have another name in each of our files.
    "input": ("input_jsonl", "check_corpus"),
    "input_jsonl": ("input", "check_corpus"),
    "output_dir": ("output_model_dir", "output_tokenizer_and_model_dir"),
    "output_model_dir": ("input_model_dir",),
    "num_workers": ("num_threads",),
    "num_threads": ("num_workers",),
    # The numbered pipeline and Megatron-LM.
    "model_prefix": ("output_dir",),
    "hugging_face_name": ("huggingface_name",),
    "num_attention_heads": ("num_attn_heads",),
    "num_query_groups": ("num_kv_heads",),
    "kv_channels": ("head_dim",),
    "seq_length": ("seq_len",),
    "encoder_seq_length": ("seq_len",),
    "max_position_embeddings": ("seq_len",),
    "rotary_base": ("rope_theta",),
    "init_method_std": ("init_std",),
    "layernorm_epsilon": ("norm_epsilon",),
    "tensor_model_parallel_size": ("tensor_parallel_size",),
    "train_iters": ("max_steps",),
    "lr_decay_style": ("lr_schedule",),
    "lr_warmup_iters": ("warmup_steps",),
    "lr_warmup_fraction": ("warmup_fraction",),
    "clip_grad": ("gradient_clipping",),
    "adam_eps": ("adam_epsilon",),
    "moe_router_topk": ("experts_per_token",),
    "moe_aux_loss_coeff": ("router_aux_loss_coef",),
    "moe_z_loss_coeff": ("router_z_loss_coef",),
    "moe_expert_capacity_factor": ("expert_capacity_factor",),
    "wandb-project": ("wandb_project",),
    "wandb_mode": ("wandb",),
    "num_gpus": ("num_processes",),
    # Hugging Face and the T5 scripts.
    "num_hidden_layers": ("num_layers",),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("ffn_hidden_size",),
    "d_model": ("hidden_size",),
    "d_ff": ("ffn_hidden_size",),
    "d_kv": ("head_dim",),
    "rms_norm_eps": ("norm_epsilon",),
    "initializer_range": ("init_std",),
    "num_local_experts": ("num_experts",),
    "num_experts_per_tok": ("experts_per_token",),
    "max_seq_length": ("seq_len",),
    "max_length": ("seq_len",),
    "context_length": ("seq_len",),
    "train_file": ("input_jsonl", "input"),
    "dataset_name": ("input_jsonl", "input"),
    "text_column": ("text_field",),
    "validation_split_percentage": ("valid_fraction",),
    "preprocessing_num_workers": ("num_workers",),
    "tokenizer_name": ("input_tokenizer_file",),
    "tokenizer_path": ("input_tokenizer_file",),
    "tokenizer_model": ("input_tokenizer_file",),
    "from_pretrained": ("init_from",),
    "model_name_or_path": ("init_from",),
    "learning_rate": ("lr",),
    "batch_size": ("global_batch_size",),
    "train_batch_size": ("global_batch_size",),
    "per_device_train_batch_size": ("micro_batch_size",),
    "num_train_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "train_steps": ("max_steps",),
    "max_grad_norm": ("gradient_clipping",),
    "lr_scheduler_type": ("lr_schedule",),
    "warmup_ratio": ("warmup_fraction",),
    "logging_steps": ("log_interval",),
    "eval_steps": ("eval_interval",),
    "save_steps": ("save_interval",),
    "save_total_limit": ("keep_last",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "torch_compile": ("compile",),
    "mean_noise_span_length": ("mean_span_length",),
    "hub_model_id": ("huggingface_name",),
    "model_dir": ("output_model_dir", "input_model_dir", "output_dir"),
    # SentencePiece.
    "input_sentence_size": ("sample_bytes",),
    "tokenizer_type": ("model_type",),
}
"""Another name → ours, in whichever file knows it."""

_RUN_LENGTH = "say how long the run is with train_tokens, epochs or max_steps"
_TOKEN_FILES = "remove it: steps 2 and 3 both take the token files from output_prefix"
_WARMUP = "say it as a share of the run, with warmup_fraction, or in steps, with warmup_steps"
_PRECISION = "set precision: bf16, fp32 or auto; fp16 is not offered, since bf16 needs no loss scaling"
_NO_DROPOUT = "remove it: there is no dropout"

GONE: dict[str, str] = {
    "expert_parallel_size": "remove it: with zero_stage 1 to 3 ZeRO shards the experts' state like all other",
    "model_size": "give the sizes themselves: num_layers, hidden_size and num_attn_heads (README.md has a table)",
    "train_samples": f"{_RUN_LENGTH}; no index is built, so its length costs no memory",
    "lr_warmup_tokens": _WARMUP,
    "lr_warmup_samples": _WARMUP,
    "warmup_tokens": _WARMUP,
    "lr_decay_tokens": "remove it: the learning rate decays over the whole run",
    "lr_decay_iters": "remove it: the learning rate decays over the whole run",
    "tokenized_data_path": _TOKEN_FILES,
    "data_path": _TOKEN_FILES,
    "input_tokenizer_file": "remove it: it belongs in config.yaml; step 1 writes tokenizer.model into its output_dir",
    "vocab_size": "remove it: the vocabulary is the tokenizer's (step 1, sentence_piece_config.yaml)",
    "gradient_accumulation_steps": "remove it: it follows from global_batch_size, micro_batch_size and num_processes",
    "pipeline_model_parallel_size": "remove it: there is no pipeline parallelism; see tensor_parallel_size, zero_stage",
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "dropout": _NO_DROPOUT,
    "hidden_dropout": _NO_DROPOUT,
    "attention_dropout": _NO_DROPOUT,
    "dropout_rate": _NO_DROPOUT,
    "resume_from_checkpoint": "remove it: the same command resumes from the newest checkpoint",
    "overwrite_output_dir": "remove it, and start the step with --redo",
    "push_to_hub": "remove it: step 6 uploads (huggingface_name in convert_config.yaml)",
}
"""A name that has no counterpart here → what to do instead."""


def remedy_for(key: str, config_class: type[Settings]) -> str:
    """What to do about `key`, which `config_class` does not know."""
    known: Collection[str] = config_class.model_fields
    ours = next((name for name in SAME_AS.get(key, ()) if name in known), None)
    if ours:
        return f"it is called {ours} here"
    if key in GONE:
        return GONE[key]
    elsewhere = file_that_knows(key)
    if elsewhere:
        return f"it belongs in {elsewhere.name} ({elsewhere.steps})"
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else "remove it"


def file_that_knows(key: str) -> ConfigFile | None:
    """The file that has a setting `key`, under this or our other name for it."""
    names = (key, *SAME_AS.get(key, ()))
    return next((file for file in FILES for name in names if name in file.config_class.model_fields), None)


def file_of(config_class: type[Settings]) -> ConfigFile:
    """The file that holds this configuration."""
    return next(file for file in FILES if file.config_class is config_class)


def better_fit(keys: Collection[str], config_class: type[Settings]) -> ConfigFile | None:
    """The other file that knows more of `keys` than `config_class` does: the wrong one was named."""
    best = max(FILES, key=lambda file: len(keys & file.config_class.model_fields.keys()))
    count = len(keys & config_class.model_fields.keys())
    return best if len(keys & best.config_class.model_fields.keys()) > count else None
