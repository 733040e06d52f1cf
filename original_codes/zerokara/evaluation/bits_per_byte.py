"""Bits per byte: how well a causal language model predicts text, comparable whatever its tokenizer.

In: opened models and documents. Out: bits per byte of each model, with an interval over documents, and the paired
difference of every two models.

    bits per byte = sum over text tokens of -log2 p(token | what stands before it) / bytes of the text

- *Text only.* The end of a document is no byte of it: the nats of the end token are reported apart, per document.
- *Declared start.* A document stands alone, after one start token: the tokenizer's bos if the tokenizer puts one before
  text by itself, else the end-of-document token, after which documents begin in training. It is named in each row.
- *Strided windows.* A document longer than the context is read in windows that overlap, and each token is scored once,
  after at least `min_context` of the context. The first window begins with the start token.
- *Lossless tokenizers only.* A tokenizer that drops or replaces text (unknown tokens, normalisation) leaves less to
  predict: if a document does not decode to itself, the model is named, and not ranked.
- *Causal only.* An encoder-decoder trained on masked spans predicts the spans given the rest: another quantity.

What special tokens spell (``</s>`` in a text) is encoded as the text that it is, not as the token.

Shape suffixes: B windows, S tokens of the longest, K of them with logits, V entries of the vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zerokara.base.progress import Progress, plural
from zerokara.config.evaluate_config import EvaluateConfig
from zerokara.corpus.read import gathered
from zerokara.evaluation import cache
from zerokara.evaluation.inputs import MeasuredText
from zerokara.evaluation.models import SEES_LATER_TOKENS, LoadedModel
from zerokara.evaluation.results import PairedDifference, Row, Section
from zerokara.evaluation.scoring import SMALL_SAMPLE, Measure, share
from zerokara.publishing.exported_folder import begins_documents
from zerokara.samples.batches import Window, stride_of, windows

CACHE_FORMAT = 4
"""Raised when a change of this module changes what is measured."""
BLOCK_BYTES = 200_000
"""Text that is measured at once; a run that is killed loses no more."""
MAX_LOGITS = 2**27
"""Logits of a batch with `batch_tokens: auto`: half a gigabyte in fp32."""
BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}
"""Tokens of a batch with `batch_tokens: auto`: a CPU needs a quarter longer where its cache does not hold a batch. In
bf16 it holds twice as many, which are 3 % faster where these are four windows (40M, 1,024 tokens)."""
_NOT_SCORED = -100
"""Target of a position that another window scores, or that is padding."""


@dataclass(frozen=True)
class Windowing:
    """Start, end and windows of the documents for one model."""

    start_id: int
    start: str
    """The start token as text."""
    start_reason: str
    end_id: int | None
    """The end-of-document token; None for a tokenizer without one."""
    context_length: int
    """Maximum tokens of a window."""
    stride: int
    """Tokens by which windows advance, and the maximum that each but the first scores."""


class DocumentLoss(NamedTuple):
    """Nats of a document: of its text, and apart from it of its end."""

    tokens: int
    text_nats: float
    end_nats: float
    """0 for a tokenizer without an end token."""
    is_lossless: bool
    """True if the document decodes to itself."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.text_nats + self.end_nats)


Measured = tuple[Row, Measure | None]
"""A model's row, and its measure over documents; None for a model that is not ranked."""


def measure_texts(
    texts: Sequence[MeasuredText], models: Sequence[LoadedModel], config: EvaluateConfig, folder: Path | None = None
) -> Iterator[Section]:
    """Yield the section of each text; each model is loaded once for all. Measured blocks are kept in `folder`."""
    of_models = [[measure_model(model, text, config, folder) for text in texts] for model in models]
    for number, text in enumerate(texts):
        yield section(text, [measured[number] for measured in of_models], config)


def measure_model(
    model: LoadedModel, text: MeasuredText, config: EvaluateConfig, folder: Path | None = None
) -> Measured:
    """Measure one model on the documents of one text."""
    windowing = windowing_of(model, config)
    if isinstance(windowing, str):
        return Row(model.name, None, notes=(windowing,)), None
    is_less = config.context_length not in ("auto", windowing.context_length)
    notes = [
        f"start: {windowing.start} ({windowing.start_reason})",
        f"context {windowing.context_length:,}{' (the model takes no more)' if is_less else ''}",
    ]
    details: dict[str, Any] = {"windowing": asdict(windowing)}
    losses, reason = _losses(model, text, windowing, config, folder), ""
    if losses is None:
        losses, reason = [], SEES_LATER_TOKENS
    elif lost := [number for number, each in enumerate(losses, 1) if not each.is_lossless]:
        details["lost_documents"] = len(lost)
        reason = f"not ranked: the tokenizer loses text, {len(lost):,} of {len(losses):,} documents do not decode to "
        reason += f"themselves (the first is number {lost[0]:,}); it is ranked on a text without these"
    elif wrong := sum(not each.is_finite for each in losses):
        reason = f"not ranked: {plural(wrong, 'document')} without a finite loss"
    if reason:
        return Row(model.name, None, notes=(*notes, reason), details=details), None
    measure = share("bits_per_byte", [each.text_nats / math.log(2) for each in losses], text.bytes)
    tokens = sum(each.tokens for each in losses)
    end = None if windowing.end_id is None else sum(each.end_nats for each in losses) / len(losses)
    notes.append("no end token" if end is None else f"end of document: {end:.2f} nats")
    details |= {
        "tokens": tokens,
        "bytes_per_token": sum(text.bytes) / max(tokens, 1),
        "end_nats_per_document": end,
        "precision": str(model.dtype).removeprefix("torch."),
    }
    interval = measure.interval(config.seed)
    return Row(model.name, measure.value, interval, len(losses), tuple(notes), details), measure


def section(text: MeasuredText, measured: Sequence[Measured], config: EvaluateConfig) -> Section:
    """Compare the models that were measured on one text."""
    ranked = [(row.model, measure) for row, measure in measured if measure is not None]
    warnings = []
    if (count := len(text.documents)) < SMALL_SAMPLE:
        rule = f"{plural(count, 'document')}: the interval is too narrow with fewer than {SMALL_SAMPLE}"
        warnings.append(rule + (", and a single document has none" if count == 1 else ""))
    if text.bad_lines:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in text.bad_lines.items())
        warnings.append(f"not measured: {reasons}")
    return Section(
        name=f"bits per byte: {text.name}",
        metric="bits_per_byte",
        unit="bits/byte",
        higher_is_better=False,
        rows=tuple(row for row, _ in measured),
        differences=tuple(
            PairedDifference(a, b, one.value - other.value, one.difference(other, config.seed))
            for (a, one), (b, other) in combinations(ranked, 2)
        ),
        warnings=tuple(warnings),
        facts={
            "text": text.name,
            "documents": len(text.documents),
            "documents_found": text.num_found,
            "bytes": sum(text.bytes),
            "sha256": text.content,
            "min_context": config.min_context,
        },
        digits=4,
    )


def windowing_of(model: LoadedModel, config: EvaluateConfig) -> Windowing | str:
    """Return how the model reads documents, or why it cannot."""
    if model.is_encoder_decoder:
        return "not measured: an encoder-decoder predicts masked spans given the rest, which is another quantity"
    tokenizer = model.tokenizer
    first, text = (tokenizer("a", add_special_tokens=adds)["input_ids"][:1] for adds in (True, False))
    end = model.end_id
    if first not in (text, [end]) and begins_documents(model.folder):
        start, reason = first[0], "bos, which the tokenizer puts before text"
    elif end is not None:
        start, reason = end, "end of the document before"
    elif tokenizer.bos_token_id is not None:
        start, reason = tokenizer.bos_token_id, "bos; the tokenizer has no end token"
    else:
        return "not measured: the tokenizer has neither a bos nor an eos token, so nothing can stand before the text"
    longest = model.context_length
    context = longest if config.context_length == "auto" else min(config.context_length, longest)
    stride = stride_of(context, config.min_context)
    return Windowing(start, str(tokenizer.convert_ids_to_tokens(start)), reason, end, context, stride)


def encode(tokenizer: Any, documents: Sequence[str]) -> list[list[int]]:
    """Ids of documents, without any special token."""
    ids = tokenizer(list(documents), add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return [list(each) for each in ids]


def losses_of(
    model: LoadedModel,
    documents: Sequence[str],
    windowing: Windowing,
    batch_tokens: int,
    progress: Progress,
    num_bytes: int,
) -> list[DocumentLoss]:
    """Measure documents in batches of windows of like length; `progress` advances by `num_bytes`."""
    encoded = encode(model.tokenizer, documents)
    tail = [] if windowing.end_id is None else [windowing.end_id]
    tokens = [[windowing.start_id, *ids, *tail] for ids in encoded]
    size = windowing.context_length, windowing.stride
    all_windows = [window for number, ids in enumerate(tokens) for window in windows(len(ids), *size, number)]
    all_windows.sort(key=lambda window: (window.num_inputs, window.first_target - window.begin))
    nats = [np.zeros(len(ids)) for ids in tokens]
    num_inputs = sum(window.num_inputs for window in all_windows)
    for batch in _batches(all_windows, batch_tokens):
        for window, values in zip(batch, _window_nats(model, tokens, batch, batch_tokens), strict=True):
            nats[window.document][window.first_target : window.end] = values
        progress.advance(num_bytes * sum(window.num_inputs for window in batch) / num_inputs)
    losses = []
    for document, ids, values in zip(documents, encoded, nats, strict=True):
        of_text, of_end = np.split(values, [1 + len(ids)])
        decoded = model.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        is_lossless = decoded in (document, " " + document)  # some tokenizers put a space before every text
        losses.append(DocumentLoss(len(ids), float(of_text.sum()), float(of_end.sum()), is_lossless))
    return losses


def _window_nats(
    model: LoadedModel, tokens: Sequence[list[int]], batch: Sequence[Window], batch_tokens: int
) -> list[Any]:
    """Nats of the scored targets of each window; padding stands on the right, where causal attention never looks."""
    longest = max(window.num_inputs for window in batch)
    inputs_BS = np.zeros((len(batch), longest), dtype=np.int64)
    targets_BS = np.full((len(batch), longest), _NOT_SCORED, dtype=np.int64)
    for row, window in enumerate(batch):
        ids, first = tokens[window.document], window.first_target - window.begin - 1
        inputs_BS[row, : window.num_inputs] = ids[window.begin : window.end - 1]
        targets_BS[row, first : window.num_inputs] = ids[window.first_target : window.end]
    with torch.inference_mode():
        nats_BK = _nats(model, torch.from_numpy(inputs_BS), torch.from_numpy(targets_BS), batch_tokens)
    targets_BK = targets_BS[:, longest - nats_BK.shape[1] :]
    return [values[scored] for values, scored in zip(nats_BK, targets_BK != _NOT_SCORED, strict=True)]


def _nats(model: LoadedModel, inputs_BS: Tensor, targets_BS: Tensor, batch_tokens: int) -> Any:
    """Nats of the targets from the first column on that has one to score.

    A single window beyond `batch_tokens` is read in parts, to bound its logits, and has nats in all columns.
    """
    longest = inputs_BS.shape[1]
    size = batch_tokens if len(inputs_BS) == 1 else longest
    if size >= longest:
        targets_BS = targets_BS[:, int((targets_BS != _NOT_SCORED).any(0).int().argmax()) :]
    parts: list[Tensor] = []
    before: dict[str, Any] = {}
    for start in range(0, longest, size):
        inputs, targets = (each[:, start : start + size].to(model.device) for each in (inputs_BS, targets_BS))
        kept = targets.shape[1]
        output = model.model(input_ids=inputs, use_cache=size < longest, logits_to_keep=kept, **before)
        if size < longest:
            before = {"past_key_values": getattr(output, "past_key_values", None)}
            if before["past_key_values"] is None:  # a model without such a cache reads it whole
                return _nats(model, inputs_BS, targets_BS, longest)
        logits_KV = output.logits[:, -kept:].float().flatten(0, 1)
        nats = torch.nn.functional.cross_entropy(
            logits_KV, targets.flatten(), ignore_index=_NOT_SCORED, reduction="none"
        )
        parts.append(nats.view(targets.shape).double().cpu())
    return torch.cat(parts, 1).numpy()


def _batches(sorted_windows: Sequence[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Consecutive windows of at most `batch_tokens` with padding; a longer one is a batch by itself."""
    batch: list[Window] = []
    for window in sorted_windows:
        if batch and (len(batch) + 1) * window.num_inputs > batch_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _losses(
    model: LoadedModel, text: MeasuredText, windowing: Windowing, config: EvaluateConfig, cached_in: Path | None
) -> list[DocumentLoss] | None:
    """Measure all documents; blocks measured before are read from the cache. None for a model that is not causal."""
    how = [str(model.dtype), text.content, asdict(windowing), BLOCK_BYTES, CACHE_FORMAT]
    folder = cache.folder_of(cached_in, model.content, *how)
    batch_tokens = batch_tokens_of(model, windowing) if config.batch_tokens == "auto" else config.batch_tokens
    losses: list[DocumentLoss] = []
    blocks = list(gathered(range(len(text.documents)), text.bytes.__getitem__, BLOCK_BYTES))
    cached = [cache.read(folder, index) for index in range(len(blocks))]
    if None in cached and not model.is_causal:
        return None
    sizes = [sum(text.bytes[number] for number in block) for block in blocks]
    done = sum(size for size, rows in zip(sizes, cached, strict=True) if rows)
    with Progress(f"{model.name} on {text.name}", sum(sizes), "B", done=done) as progress:
        for index, rows in enumerate(cached):
            if rows is None:
                documents = [text.documents[number] for number in blocks[index]]
                rows = losses_of(model, documents, windowing, batch_tokens, progress, sizes[index])
                if all(each.is_finite for each in rows):
                    cache.write(folder, index, [[*each] for each in rows])
            losses += [DocumentLoss(*row) for row in rows]
    return losses


def batch_tokens_of(model: LoadedModel, windowing: Windowing) -> int:
    """Tokens in a batch if nobody says how many: at least a window, unless its logits are too many."""
    wanted = max(BATCH_TOKENS[model.device.type], windowing.context_length)
    if model.device.type == "cpu" and model.dtype == torch.bfloat16:
        wanted = max(wanted, min(2 * BATCH_TOKENS["cpu"], 4 * windowing.context_length))
    return min(wanted, max(1, MAX_LOGITS // model.vocab_size))
