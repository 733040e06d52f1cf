"""Names of settings that a user may bring along: our own former ones, and those of other training programs.

A setting that is unknown is refused; with the name that it has here, or what became of it, the refusal helps. Source of
the others: the options of Megatron-LM, Hugging Face's `TrainingArguments`, SentencePiece's trainer, and T5X.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module

from zerokara.config.settings import Settings


@dataclass(frozen=True)
class ConfigFile:
    """One of the YAML files."""

    name: str
    """End of its name; a set in `model_configs/` has a prefix before it."""
    steps: str
    place: str
    """Module and class of its settings. A step needs its own file's only: a large class takes a tenth of a second."""

    @property
    def config_class(self) -> type[Settings]:
        """The class of its settings."""
        module, _, name = self.place.rpartition(".")
        found: type[Settings] = getattr(import_module(f"zerokara.config.{module}"), name)
        return found


TOKENIZER = ConfigFile("sentence_piece_config.yaml", "step 1", "tokenizer_config.TokenizerConfig")
FINETUNE = ConfigFile("finetune_config.yaml", "step 7", "finetune_config.FinetuneConfig")
CONVERT = ConfigFile("convert_config.yaml", "steps 4 and 6", "convert_config.ConvertConfig")
EVALUATE = ConfigFile("evaluate_config.yaml", "step 8", "evaluate_config.EvaluateConfig")
PRETRAIN = ConfigFile("config.yaml", "steps 2 and 3", "pretrain_config.PretrainConfig")
FILES = (TOKENIZER, FINETUNE, CONVERT, EVALUATE, PRETRAIN)
"""PRETRAIN is last, since its name ends the others."""

OTHER_NAMES = {
    # The data, and the steps.
    "input_jsonl": "input train_file dataset_name",
    "input": "input_jsonl train_file dataset_name",
    "check_corpus": "input input_jsonl",
    "texts": "input_jsonl input datasets",
    "models": "model pretrained model_name_or_path",
    "text_field": "text_column",
    "valid_fraction": "validation_split_percentage",
    "num_workers": "num_threads preprocessing_num_workers",
    "num_threads": "num_workers",
    "input_tokenizer_file": "tokenizer_name tokenizer_path tokenizer_model",
    "sample_bytes": "input_sentence_size",
    "model_type": "tokenizer_type",
    "output_dir": "model_prefix model_dir",
    "output_model_dir": "output_dir model_dir",
    "output_tokenizer_and_model_dir": "output_dir",
    "input_model_dir": "output_model_dir model_dir",
    "huggingface_name": "hugging_face_name hub_model_id",
    # The model.
    "num_layers": "num_hidden_layers",
    "hidden_size": "d_model",
    "num_attn_heads": "num_attention_heads",
    "num_kv_heads": "num_query_groups num_key_value_heads",
    "head_dim": "head_size kv_channels d_kv",
    "ffn_hidden_size": "intermediate_size d_ff",
    "seq_len": "seq_length encoder_seq_length max_seq_length max_length max_position_embeddings context_length",
    "rope_theta": "rotary_base",
    "relative_attention_num_buckets": "relative_attention_buckets",
    "relative_attention_max_distance": "relative_attention_distance",
    "mean_span_length": "mean_noise_span_length",
    "num_experts": "num_local_experts",
    "experts_per_token": "moe_router_topk num_experts_per_tok",
    "moe_ffn_hidden_size": "expert_ffn_hidden_size",
    "moe_layers": "sparse_layers",
    "norm_epsilon": "layernorm_epsilon rms_norm_eps",
    "init_std": "init_method_std initializer_range",
    # The training.
    "max_steps": "train_iters train_steps",
    "epochs": "num_train_epochs num_epochs",
    "global_batch_size": "batch_size train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "lr": "learning_rate",
    "lr_schedule": "lr_decay_style lr_scheduler_type",
    "warmup_steps": "lr_warmup_iters",
    "warmup_fraction": "lr_warmup_fraction warmup_ratio",
    "adam_epsilon": "adam_eps",
    "relative_attention_lr_multiplier": "relative_attention_lr_factor",
    "router_aux_loss_coef": "router_balance_loss moe_aux_loss_coeff",
    "router_z_loss_coef": "router_z_loss moe_z_loss_coeff",
    "expert_capacity_factor": "expert_capacity moe_expert_capacity_factor",
    "gradient_clipping": "clip_grad max_grad_norm",
    "init_from": "from_pretrained model_name_or_path",
    "intra_document_masking": "isolate_documents",
    "num_processes": "num_gpus",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "activation_checkpointing": "gradient_checkpointing",
    "compile": "torch_compile",
    "log_interval": "logging_steps",
    "eval_interval": "eval_steps",
    "save_interval": "save_steps",
    "keep_last": "save_total_limit",
    "wandb": "wandb_mode",
    "wandb_project": "wandb-project",
}
"""Our name → others for it, each in whichever of our files knows ours."""

ADVICE = {
    "remove it: with zero_stage 1 to 3 ZeRO shards the experts' state like all other": "expert_parallel_size",
    "set train_tokens, epochs or max_steps; no index is built, so a long run costs no memory": "train_samples",
    "set warmup_fraction, a share of the run, or warmup_steps": "lr_warmup_tokens lr_warmup_samples warmup_tokens",
    "remove it: the learning rate decays over the whole run": "lr_decay_tokens lr_decay_iters",
    "remove it: steps 2 and 3 both take the token files from output_prefix": "tokenized_data_path data_path",
    "remove it: it belongs in config.yaml; step 1 writes tokenizer.model into its output_dir": "input_tokenizer_file",
    "remove it: the vocabulary is the tokenizer's (step 1, sentence_piece_config.yaml)": "vocab_size",
    "remove it: it follows from global_batch_size, micro_batch_size and num_processes": "gradient_accumulation_steps",
    "there is no pipeline parallelism: see zero_stage, and within a machine tensor_parallel_size": (
        "pipeline_model_parallel_size"
    ),
    "there is no context parallelism: see activation_checkpointing, tensor_parallel_size": "context_parallel_size",
    "set precision: bf16, fp32 or auto; fp16 is not offered, since bf16 needs no loss scaling": "bf16 fp16",
    "remove it: there is no dropout": "dropout hidden_dropout attention_dropout dropout_rate",
    "remove it: the same command resumes from the newest checkpoint": "resume_from_checkpoint",
    "remove it, and start the step with --redo": "overwrite_output_dir",
    "remove it: step 6 uploads (huggingface_name in convert_config.yaml)": "push_to_hub",
}
"""What to do → names that have no counterpart here."""


def remedy_for(key: str, config_class: type[Settings]) -> str:
    """What to do about `key`, which `config_class` does not know."""
    known: Collection[str] = config_class.model_fields
    ours = [name for name, others in OTHER_NAMES.items() if key in others.split()]
    if here := next((name for name in ours if name in known), None):
        return f"it is called {here} here"
    if advice := next((advice for advice, names in ADVICE.items() if key in names.split()), None):
        return advice
    holders = (file for file in FILES for name in (key, *ours) if name in file.config_class.model_fields)
    if elsewhere := next(holders, None):
        return f"it belongs in {elsewhere.name} ({elsewhere.steps})"
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else "remove it"


def file_of(config_class: type[Settings]) -> ConfigFile:
    """The file that holds this configuration."""
    return next(file for file in FILES if file.config_class is config_class)


def better_fit(keys: Collection[str], config_class: type[Settings]) -> ConfigFile | None:
    """The other file that knows more of `keys` than `config_class` does: the wrong one was named."""
    best = max(FILES, key=lambda file: len(keys & file.config_class.model_fields.keys()))
    count = len(keys & config_class.model_fields.keys())
    return best if len(keys & best.config_class.model_fields.keys()) > count else None
