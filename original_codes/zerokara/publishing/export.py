"""One export: a checkpoint → a Hugging Face folder that is proved before it appears.

Written: ``model*.safetensors`` (and index), ``config.json``, ``generation_config.json``, the tokenizer files,
``metrics.jsonl`` (the training curve), ``README.md`` (the model card), and last ``manifest.json``. The folder takes
its name only when all proofs hold; if one does not, it is kept as ``<name>.failed`` for study.
"""

import os
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson

from zerokara.base import durable, manifest
from zerokara.base.errors import RunError
from zerokara.checkpoint.folders import METRICS_NAME
from zerokara.config.convert_config import ConvertConfig, ConvertSettings
from zerokara.config.settings import resolved
from zerokara.examples import facts as finetuning
from zerokara.examples.chat_template import ChatTemplate
from zerokara.examples.encoding import prompt_ids
from zerokara.examples.facts import FinetuneFacts
from zerokara.huggingface import families, proof, to_hf, tokenizer_json, tokenizer_proof
from zerokara.huggingface.tokenizer_proof import Proof
from zerokara.publishing import card, exported_folder
from zerokara.publishing.checkpoint_source import CheckpointSource
from zerokara.samples.objective import Prompt, beginnings, objective

_CORPUS_PROMPTS, _CORPUS_PROMPT_TOKENS = 2, 8
"""Besides the user's prompts, the first tokens of this many windows are continued greedily."""
_MASKED_TOKENS = 512
"""Longest input in which spans are masked to prove a fine-tuned encoder-decoder."""


def export(source: CheckpointSource, settings: ConvertConfig, documents: Sequence[str]) -> manifest.Manifest:
    """Convert, prove, and let the folder appear; `documents` are the text for the proofs.

    Raises:
        RunError: the weights do not fit the rules, or a proof did not hold.
        OSError: the disk is full; names the file.
    """
    started, seconds = time.monotonic(), dict[str, float]()

    def lap(name: str) -> None:
        """Record the seconds since the last lap."""
        seconds[name] = round(time.monotonic() - started - sum(seconds.values()), 3)

    folder = Path(settings.output_tokenizer_and_model_dir)
    keep = durable.ASIDE_ENDING if exported_folder.to_keep(folder) else ""
    with durable.atomic_folder(folder, keep) as partial:
        encoder, weights, shape = source.encoder, source.weights(), source.shape
        is_encoder_decoder = shape.traits.is_encoder_decoder
        path = source.run_dir / finetuning.CHAT_TEMPLATE_NAME
        chat_template = path.read_text(encoding="utf-8") if path.is_file() else None
        tokenizer_files = tokenizer_json.write(encoder, partial, shape.seq_len, is_encoder_decoder, chat_template)
        ends = [encoder.eos_id]
        if chat_template is not None:
            ends = ChatTemplate(chat_template, str(path), tokenizer_proof.load(partial), is_encoder_decoder).end_ids
        bos = encoder.bos_id if encoder.bos_id >= 0 else None
        special = families.SpecialIds(bos, encoder.eos_id, encoder.pad_id, tuple(ends))
        carried = source.state.facts.get("generation")
        outputs = to_hf.write_model(partial, weights, shape, special, settings.dtype, settings.max_shard_size, carried)
        outputs["tokenizer"] = tokenizer_files
        lap("writing")
        tokenizer = tokenizer_proof.load(partial)  # beside config.json, which may say what it is
        proofs = {"token_ids": tokenizer_proof.prove(encoder, tokenizer, documents, settings.check_lines)}
        lap("proof of token ids")
        if chat_template is not None:
            proofs["chat"] = tokenizer_proof.prove_chat(tokenizer, finetuning.conversations(source.run_dir))
            lap("proof of the chat template")
        proofs["logits"], samples = _prove_model(partial, source, settings, documents, tokenizer, ends)
        lap("proof of logits")
        if faults := [fault for each in proofs.values() for fault in each.faults]:
            raise _failed(faults, proof.as_json(proofs, samples, examples=True), partial, folder)
        facts = card.gather(source, encoder, settings.dtype, converses=bool(tokenizer.chat_template))
        facts |= proof.as_json(proofs, samples)
        if facts["finetuning"]:  # how the model is asked goes with its folder
            outputs["finetuning"] = [partial / finetuning.NAME]
            durable.write_json(partial / finetuning.NAME, facts["finetuning"])
        outputs["card"], outputs["curve"] = [partial / "README.md"], [partial / METRICS_NAME]
        name = settings.huggingface_name or folder.name
        text = card.render(facts, name=name, language=settings.language, license=settings.license)
        durable.write_file(partial / "README.md", text)
        curve = source.metrics()
        bad_samples = (sample for line in curve for sample in line.get("bad_samples", ()))
        for each in (each for sample in bad_samples for each in sample["documents"]):
            each["source"] = Path(each["source"]).name  # no folders of this machine
        durable.write_file(partial / METRICS_NAME, b"".join(orjson.dumps(line) + b"\n" for line in curve))
        return manifest.write(
            partial / manifest.NAME,
            exported_folder.work(source, settings),
            outputs,
            facts | {"seconds": seconds},
            time.monotonic() - started,
            published=True,
        )


def _prove_model(
    folder: Path,
    source: CheckpointSource,
    settings: ConvertConfig,
    documents: Sequence[str],
    tokenizer: Any,
    ends: Sequence[int],
) -> tuple[Proof, list[dict[str, str]]]:
    """Compare the exported model with the trained one, on `documents`; return the samples after the prompts as well.

    A fine-tuned model is asked as in its training; samples stop at the first of `ends`.

    Raises:
        RunError: there is no text to compare on.
    """
    shape, config, encoder = source.shape, source.config, source.encoder
    is_encoder_decoder, new_tokens = shape.traits.is_encoder_decoder, proof.num_new_tokens(shape)
    if config.packs_examples and is_encoder_decoder:  # whose examples needed no sentinels, as the proof's samples do
        config = config.model_copy(update={"seq_len": min(config.seq_len, _MASKED_TOKENS)})
    training = objective(config, encoder, config.seed, config.intra_document_masking)
    # Documents as in training: each begins after its start, or after the end of another.
    encoded = ([encoder.before_text, *encoder.encode(document).tolist()] for document in documents)
    texts = proof.windows(encoded, shape, training)
    tuned = finetuning.read(source.run_dir)
    prompts = inputs = prompts_for(settings, source, tuned, documents)
    if tuned:  # of the run, or of the user, they may stand in its template already
        inputs = [tuned.input_of(text) for text in prompts]
        prompts = [tuned.text(text) for text in inputs]
    asked = [training.prompt(encoder, prompt, new_tokens) for prompt in prompts]
    longest = shape.seq_len if is_encoder_decoder else max(1, shape.seq_len - new_tokens)
    if tuned:
        given = [prompt_ids(tokenizer, tuned.prompt(text), is_encoder_decoder, ends)[-longest:] for text in inputs]
        pairs = zip(given, asked, strict=True)
        asked = [Prompt(ids, own.decoder_ids) if is_encoder_decoder else Prompt([], ids) for ids, own in pairs]
    head = 1 if is_encoder_decoder else min(_CORPUS_PROMPT_TOKENS, longest)
    asked += proof.first_positions(texts[:_CORPUS_PROMPTS], head)
    found, greedy, sampled = proof.prove(folder, source.weights(), shape, settings.dtype, texts, asked)

    def text(tokens: list[int]) -> str:
        return encoder.decode_continuation(list(takewhile(lambda token: token not in (encoder.eos_id, *ends), tokens)))

    written = zip(prompts, greedy, sampled, strict=False)  # behind them stand those of the corpus
    return found, [{"prompt": prompt, "greedy": text(one), "sampled": text(other)} for prompt, one, other in written]


def prompts_for(
    settings: ConvertSettings, source: CheckpointSource, tuned: FinetuneFacts | None, documents: Sequence[str]
) -> Sequence[str]:
    """Return `test_prompt_text`; for `auto` the prompts of the run, or if it had none beginnings of `documents`, or of
    the inputs of a fine-tuning."""
    if settings.test_prompt_text != "auto":
        return settings.test_prompt_text
    if tuned:
        turns = [turn for each in finetuning.conversations(source.run_dir) for turn in each["messages"]]
        documents = [turn["content"] for turn in turns if turn["role"] == "user"] or documents
        documents = [given for text in documents if (given := tuned.input_of(text)) != text] or documents[::2]
    has_span = source.config.traits.is_encoder_decoder and not source.config.packs_examples
    thirds = documents[:: max(1, len(documents) // 3)][:3]
    own = () if tuned and tuned.task == "messages" else resolved(source.config.sample_prompts)  # with tokens of turns
    return own or beginnings(thirds, has_span)


def _failed(faults: list[str], facts: dict[str, Any], partial: Path, folder: Path) -> RunError:
    """Keep the export and its numbers under another name; return the error that says so."""
    kept = durable.unused_name(folder, ".failed")
    durable.write_json(partial / "proof.json", facts)
    os.rename(partial, kept)
    listed = "\n".join(f"  {fault}" for fault in faults)
    return RunError(
        f"the exported model does not equal the trained one, so {folder} was not written:\n{listed}\n"
        f"The export is kept in {kept}, with the numbers in proof.json."
    )
