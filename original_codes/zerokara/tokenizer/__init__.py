"""Step 1's tokenizer; here are the names of its files in `output_dir`, beside its manifest."""

MODEL_NAME = "tokenizer.model"
VOCABULARY_NAME = "tokenizer.vocab"
JSON_NAME, CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
KEPT_NAMES = (JSON_NAME, CONFIG_NAME, "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
"""Files of a `base_tokenizer` that do not list its vocabulary once more."""
ENDS_NAMES = ("generation_config.json", "config.json")
"""Files of a model that name the ids at which it may stop."""
TOKENIZER_NAMES = (MODEL_NAME, VOCABULARY_NAME, *KEPT_NAMES, ENDS_NAMES[0], "report.json", "report.html")
LOG_NAME = "training.log"
LOG_HEADER = "# zerokara, step 1: the log of SentencePiece's trainer\n"
"""First line of the log, by which a log without a manifest, of a training that failed, is known as ours."""
WORK_NAME = "work.partial"
"""Folder that is there from the start of step 1 until its manifest is written (`durable.PARTIAL_SUFFIX`)."""


def made_name(base_tokenizer: str) -> str:
    return JSON_NAME if base_tokenizer else MODEL_NAME
