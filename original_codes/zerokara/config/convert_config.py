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
    """A run folder, from which `checkpoint` selects the checkpoint to export, or one global_stepN folder in it."""
    checkpoint: Literal["newest"] | Auto = "auto"
    """Checkpoint of a run folder: the `newest` complete one, or `auto`. For a fine-tuning `auto` is the best one, which
    was tested. For a pretraining it is the newest; but if that validates more than 1 % worse than the best, and
    `average` is 1, it is the best."""
    output_tokenizer_and_model_dir: Text = "models/embedded_hf"
    """Folder for the Hugging Face model and tokenizer."""
    average: PositiveInt = 1
    """Number of checkpoints to average: that one, and those saved before it that keep_last of the run has kept. The
    mean helps a run whose learning rate has not decayed yet; 1 exports a single checkpoint."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the saved weights; the proof of equality is computed in fp32."""
    max_shard_size: Annotated[str, Field(pattern=r"^[1-9][0-9]*(MB|GB)$")] = "4GB"
    """Largest size of one safetensors file."""
    check_corpus: Words = ()
    """Raw text for the proofs; empty takes the corpus that the run was trained on."""
    check_lines: PositiveInt = 10_000
    """Number of lines of that text whose token ids are compared."""
    test_prompt_text: Prompts = "auto"
    """Prompts to continue with the converted model. `auto` takes those of the run (sample_prompts), or if it had none
    the beginnings of three documents of the text for the proofs."""


class UploadSettings(Settings):
    """Upload to the Hugging Face Hub (step 6)."""

    huggingface_name: str = ""
    """Repository on the Hub, as user/name."""
    private: bool = True
    """Make the repository private: only you, or the members of its organisation, can see it."""
    language: Words = ()
    """Language codes for the model card, e.g. [ja]; if empty, the card names no language."""
    license: str = ""
    """Licence identifier for the model card, e.g. apache-2.0; if empty, the card names no licence."""

    def rules(self) -> Iterator[Fault]:
        part = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
        name = self.huggingface_name
        if name and not re.fullmatch(rf"(?!.*(--|\.\.)){part}/{part}(?<!\.git)", name):
            rule = "must be user/name in letters, digits, `-`, `_`, `.`, without `--`, `..`, or .git at the end"
            yield self.fault("huggingface_name", rule, "e.g. my-team/first")
        # The Hub refuses other forms, but only at the upload.
        if not re.fullmatch(r"[a-z0-9.+-]*", self.license):
            rule = "must be an identifier of https://huggingface.co/docs/hub/repositories-licenses, in lower case"
            yield self.fault("license", rule, f"e.g. {self.license.lower().replace(' ', '-')}, or other")
        for code in self.language:
            if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", code):
                rule = f"{code!r} must be a code of ISO 639 in lower case, `code`, or `multilingual`"
                yield self.fault("language", rule, "e.g. [ja], or [pt] for Portuguese of any country")


class ConvertConfig(UploadSettings, ConvertSettings):
    """Conversion and upload."""
