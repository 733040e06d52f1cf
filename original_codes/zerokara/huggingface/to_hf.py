"""A checkpoint → a Hugging Face folder that is proved before it appears.

Written: ``model*.safetensors`` (and index), ``config.json``, ``generation_config.json``, the tokenizer files,
``metrics.jsonl`` (the training curve), ``README.md`` (the model card), and last ``manifest.json``. The folder takes
its name only when both proofs held; if one does not, it is left as ``<name>.failed`` for study.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor

from zerokara import hashing, manifest
from zerokara.config.convert_config import ConvertConfig
from zerokara.durable import (
    ASIDE_ENDING,
    BackgroundSync,
    atomic_folder,
    unused_name,
    write_bytes,
    write_json,
    write_text,
)
from zerokara.errors import RunError
from zerokara.huggingface import (
    card_facts,
    continuations,
    dialects,
    families,
    model_card,
    output_folder,
    proof,
    rules,
    shards,
    tokenizer_json,
    windows,
)
from zerokara.huggingface.exported import MANIFEST_NAME, STEP
from zerokara.huggingface.source import METRICS_NAME, Source
from zerokara.huggingface.tokenizer_proof import TokenizerProof, prove
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt, objective
from zerokara.tokenizer.encoder import Encoder

FAILED_SUFFIX = ".failed"
_CORPUS_PROMPTS, _CORPUS_PROMPT_TOKENS = 2, 8
"""Beside the user's prompts, the first tokens of so many documents are continued greedily in the proof."""


def work(source: Source, settings: ConvertConfig) -> manifest.StepSpec:
    """What the conversion is about to do, for the chain of manifests."""
    names = (
        "dtype", "max_shard_size", "check_lines", "test_prompt_text", "huggingface_name", "language", "license",
    )  # fmt: skip
    return manifest.StepSpec(
        step=STEP,
        settings={name: getattr(settings, name) for name in names},
        inputs={"checkpoint": source.manifest_path, "tokenizer": source.tokenizer_path},
        key_of=lambda name: f"input_model_dir (its {name})" if name in ("checkpoint", "tokenizer") else name,
    )


def export(source: Source, settings: ConvertConfig, documents: Sequence[str]) -> manifest.Manifest:
    """Convert, prove, and let the folder appear; `documents` are the text for the proofs.

    Raises:
        RunError: the weights do not fit the rules, a proof did not hold, or the disk is full.
    """
    started = time.monotonic()
    folder = Path(settings.output_tokenizer_and_model_dir)
    encoder = Encoder(source.tokenizer_path)
    clock = _Clock()
    keep = ASIDE_ENDING if output_folder.to_keep(folder) else ""
    with output_folder.full_disk_told(folder), atomic_folder(folder, keep) as partial, BackgroundSync() as disk:
        bos = encoder.bos_id if encoder.bos_id >= 0 else None
        special = families.SpecialIds(bos=bos, eos=encoder.eos_id, pad=encoder.pad_id)
        weights = source.weights()
        outputs = write_model(partial, weights, source.shape, special, settings.dtype, settings.max_shard_size, disk)
        outputs["tokenizer"] = _write_tokenizer(partial, source, encoder)
        clock.lap("writing")
        # The disk and one core have the new files while the proofs go on.
        with hashing.BackgroundHashes(outputs["weights"]) as hashing_weights:
            known = card_facts.gather(source, encoder, settings.dtype)
            known |= _prove(partial, source, weights, settings, encoder, documents, clock)
            del known["proof"]["token_ids"]["examples"]  # lines of the corpus; the folder may be for everyone
            hashes = hashing_weights.result()
        name = settings.huggingface_name or folder.name
        card = model_card.render(known, name=name, language=settings.language, license=settings.license)
        write_text(partial / "README.md", card)
        curve = b"".join(orjson.dumps(_for_everyone(line)) + b"\n" for line in source.metrics())
        write_bytes(partial / METRICS_NAME, curve)
        outputs["card"], outputs["curve"] = [partial / "README.md"], [partial / METRICS_NAME]
        known["seconds"] = clock.laps
        seconds = time.monotonic() - started
        return manifest.write(
            partial / MANIFEST_NAME, work(source, settings), outputs, known, seconds, hashes=hashes, published=True
        )


def _for_everyone(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the training curve that names no folder: documents of a skipped step stand in it with their file."""
    for sample in line.get("bad_samples", ()):
        for documents in sample["documents"]:
            documents["source"] = Path(documents["source"]).name
    return line


class _Clock:
    """The seconds that each part of the work took."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        """A part has ended."""
        now = time.monotonic()
        self.laps[name] = round(now - self._since, 3)
        self._since = now


def write_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    special: families.SpecialIds,
    dtype: str,
    max_shard_size: str,
    disk: BackgroundSync | None = None,
) -> dict[str, list[Path]]:
    """Write weights and configurations into `folder`; gives the files by kind. `disk` is given what is written so far.

    Raises:
        RunError: the weights do not fit the rules; lists every tensor at fault.
    """
    from transformers import GenerationConfig

    config = families.hf_config(shape, special, dtype)
    checked, hf_shapes = families.checked_rules(weights, shape, config)
    in_order = {name: hf_shapes[name] for rule in checked for name in rule.hf}
    tensors = rules.to_hf(checked, weights, shape)
    files = shards.write(folder, tensors, in_order, families.TORCH_DTYPES[dtype], max_shard_size, disk)
    config.save_pretrained(folder)
    written = orjson.loads((folder / "config.json").read_bytes())
    older_names = families.FAMILIES[shape.architecture].older_names
    write_json(folder / "config.json", dialects.with_older_names(written, older_names))
    generation = GenerationConfig(
        bos_token_id=special.bos,
        eos_token_id=special.eos,
        pad_token_id=special.pad,
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
    )
    generation.save_pretrained(folder)
    return {"weights": list(files), "config": [folder / "config.json", folder / "generation_config.json"]}


def _write_tokenizer(folder: Path, source: Source, encoder: Encoder) -> list[Path]:
    before = set(folder.iterdir())
    shape = source.shape
    tokenizer_json.write(encoder, folder, shape.seq_len, is_encoder_decoder=shape.traits.is_encoder_decoder)
    return sorted(set(folder.iterdir()) - before)


def _prove(
    partial: Path,
    source: Source,
    weights: Mapping[str, Tensor],
    settings: ConvertConfig,
    encoder: Encoder,
    documents: Sequence[str],
    clock: _Clock,
) -> dict[str, Any]:
    """Make both proofs; gives their facts and the continuations.

    Raises:
        RunError: a proof did not hold; the folder is kept as ``.failed``.
    """
    token_ids = prove(encoder, partial, documents, settings.check_lines)
    clock.lap("proof of token ids")
    shape = source.shape
    # Documents as training saw them: each begins after the end of another.
    encoded = [[encoder.eos_id, *encoder.encode(document).tolist()] for document in documents]
    made = objective(source.config, encoder)
    is_encoder_decoder = shape.traits.is_encoder_decoder
    texts = windows.of_samples(encoded, shape, made) if is_encoder_decoder else windows.within_budget(encoded, shape)
    new_tokens = continuations.num_new_tokens(shape)
    prompts = [made.prompt(encoder, prompt, new_tokens) for prompt in settings.test_prompt_text]
    num_sampled = len(prompts)
    read = texts.read or [[] for _ in texts.tokens]
    head = 1 if is_encoder_decoder else min(_CORPUS_PROMPT_TOKENS, max(1, shape.seq_len - new_tokens))
    prompts += [Prompt(read[i], tokens[:head]) for i, tokens in enumerate(texts.tokens[:_CORPUS_PROMPTS])]
    logits, said = proof.prove(partial, weights, shape, settings.dtype, texts, prompts, num_sampled)
    continued = said.in_words(encoder, settings.test_prompt_text)
    clock.lap("proof of logits")
    holds = logits.holds and token_ids.ok
    found = {
        "proof": {"holds": holds, "logits": logits.as_json(), "token_ids": _token_id_facts(token_ids)},
        "samples": [each.as_json() for each in continued],
    }
    faults = [*logits.faults, *([] if token_ids.ok else [f"token ids: {token_ids}"])]
    if faults:
        folder = Path(settings.output_tokenizer_and_model_dir)
        kept = _keep_failed(partial, folder, found)
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise RunError(
            f"the exported model is not the trained one, nothing was put at {folder}:\n{listed}\n"
            f"What was written is kept in {kept}, with the numbers in proof.json."
        )
    return found


def _token_id_facts(found: TokenizerProof) -> dict[str, Any]:
    return {
        "holds": found.ok,
        "lines": found.lines,
        "whole_texts": found.whole_texts,
        "hard_texts": found.hard_texts,
        "equal": found.equal,
        "ties": found.ties,
        "failures": found.num_failures,
        "examples": [str(difference) for difference in (*found.failures, *found.tie_examples)],
    }


def _keep_failed(partial: Path, folder: Path, found: dict[str, Any]) -> Path:
    kept = unused_name(folder, FAILED_SUFFIX)
    write_json(partial / "proof.json", found)
    os.rename(partial, kept)
    return kept
