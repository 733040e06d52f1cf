"""`convert_config.yaml`: step 4, conversion to Hugging Face, and step 6, the upload."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zerokara.base.errors import Fault
from zerokara.config.settings import Auto, PositiveInt, Prompts, Settings, Text, Words


class ConvertSettings(Settings):
    """Conversion to Hugging Face (step 4)."""

    input_model_dir: Text = "models/embedded"
    """A run folder, of which `checkpoint` says what is exported, or one global_stepN folder in it."""
    checkpoint: Literal["newest"] | Auto = "auto"
    """Checkpoint of a run folder: the `newest` complete one; or `auto`, of a fine-tuning the best, with which it was
    tested, else the newest, unless its validation is more than 1 % worse than that of the best and `average` is 1."""
    output_tokenizer_and_model_dir: Text = "models/embedded_hf"
    """Folder for the Hugging Face model and tokenizer."""
    average: PositiveInt = 1
    """Checkpoints whose mean is exported: that one and those saved before it, as keep_last of the run leaves them. It
    helps a run whose learning rate has not decayed yet; 1 is no mean."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the saved weights; the proof of equality is computed in fp32."""
    max_shard_size: Annotated[str, Field(pattern=r"^[1-9][0-9]*(MB|GB)$")] = "4GB"
    """Largest size of one safetensors file."""
    check_corpus: Words = ()
    """Raw text for the proofs; empty takes the corpus that the run was trained on."""
    check_lines: PositiveInt = 10_000
    """Lines of this text whose token ids are compared."""
    test_prompt_text: Prompts = "auto"
    """Prompts to continue with the converted model. `auto` takes those of the run (sample_prompts), or if it had none
    the beginnings of three documents of the text for the proofs."""


class UploadSettings(Settings):
    """Upload to the Hugging Face Hub (step 6)."""

    huggingface_name: str = ""
    """Repository on the Hub, as user/name."""
    private: bool = True
    """Only you can see the repository."""
    language: Words = ()
    """Language codes for the model card, e.g. [ja]; without one it names none."""
    license: Text = "apache-2.0"
    """Licence identifier for the model card."""

    def rules(self) -> Iterator[Fault]:
        part = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
        name = self.huggingface_name
        if name and not re.fullmatch(rf"(?!.*(--|\.\.)){part}/{part}(?<!\.git)", name):
            rule = "must be user/name in letters, digits, `-`, `_`, `.`, without `--`, `..`, or .git at the end"
            yield self.fault("huggingface_name", rule, "e.g. my-team/first")


class ConvertConfig(UploadSettings, ConvertSettings):
    """Conversion and upload."""
