"""Bits per byte equal a computation by hand: every token scored once, text bytes only, whatever the tokenizer."""

import json
import math
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import evaluated_models
import pytest
import torch
import transformers
from evaluated_models import CONTEXT, save
from safetensors.torch import load_file, save_file

from zerokara.base.errors import UserError
from zerokara.config.evaluate_config import EvaluateConfig
from zerokara.evaluation import bits_per_byte
from zerokara.evaluation import models as evaluation_models
from zerokara.evaluation.bits_per_byte import Windowing, measure_texts, windowing_of
from zerokara.evaluation.inputs import MeasuredText
from zerokara.evaluation.models import BLOCKS, SEES_LATER_TOKENS, LoadedModel, open_models
from zerokara.evaluation.results import Row
from zerokara.huggingface import families
from zerokara.model.cpu_attention import blocked_attention

SHORT, LONG = "The naïve fox.", "the fox 日本語 \n  Größe " * 3
TEXT = MeasuredText("text", (SHORT, LONG, "țară 🦊 </s> <|endoftext|>", "a" * 70), 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {
        "gpt2": save(place / "gpt2", evaluated_models.byte_level(), "gpt2"),
        "llama": save(place / "llama", evaluated_models.dummy_prefix(), "llama"),
        "lossy": save(place / "lossy", evaluated_models.lossy(), "gpt2"),
        "t5": save(place / "t5", evaluated_models.byte_level(), "t5"),
    }


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, LoadedModel]:
    return {model.name: model for model in open_models(list(folders.values()), "cpu")}


def by_hand(model: LoadedModel, document: str, start: int, context: int, stride: int) -> tuple[float, float]:
    """Nats of the text and of its end: one forward pass a token, over the inputs that its window holds."""
    ids = model.tokenizer(document, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    tokens = [start, *ids, model.tokenizer.eos_token_id]
    nats = []
    for target in range(1, len(tokens)):
        # The window that scores this target ends with the last target of its stride.
        after_first = max(0, -(-(target - context) // stride))
        end = min(len(tokens), context + 1 + after_first * stride)
        inputs = tokens[max(0, end - 1 - context) : target]
        with torch.inference_mode():
            logits = model.model(torch.tensor([inputs])).logits[0, -1].double()
        nats.append(float(torch.logsumexp(logits, 0) - logits[tokens[target]]))
    return sum(nats[:-1]), nats[-1]


def row_of(model: LoadedModel, text: MeasuredText = TEXT, cache: Path | None = None, **settings: Any) -> Row:
    return next(measure_texts([text], [model], EvaluateConfig(**settings), cache)).rows[0]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("min_context", [0.0, 0.75])
def test_it_equals_a_computation_by_hand(models: dict[str, LoadedModel], name: str, min_context: float) -> None:
    model = models[name]
    start = {"gpt2": model.tokenizer.eos_token_id, "llama": model.tokenizer.bos_token_id}[name]
    stride = round(CONTEXT * (1 - min_context))
    nats = [by_hand(model, document, start, CONTEXT, stride) for document in TEXT.documents]
    row = row_of(model, min_context=min_context, batch_tokens=70)
    assert row.value == pytest.approx(sum(text for text, _ in nats) / math.log(2) / sum(TEXT.bytes), abs=1e-5)
    assert row.details["end_nats_per_document"] == pytest.approx(sum(end for _, end in nats) / 4, abs=1e-4)
    assert row.interval is not None and row.n == 4
    # With the end counted as text, or after another start, it would be another number.
    with_end = sum(text + end for text, end in nats) / math.log(2) / sum(TEXT.bytes)
    assert abs(with_end - (row.value or 0)) > 1e-2
    assert abs(by_hand(model, SHORT, 5, CONTEXT, stride)[0] - nats[0][0]) > 0.1


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_window_beyond_the_batch_is_read_in_parts(models: dict[str, LoadedModel], name: str) -> None:
    model, lengths = models[name], list[int]()
    whole = row_of(model).value
    head = model.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, inputs, output: lengths.append(output.shape[0] * output.shape[1]))
    parts = row_of(model, batch_tokens=5).value
    hook.remove()
    assert parts == pytest.approx(whole, abs=1e-5)
    assert max(lengths) == 5


def test_logits_are_computed_where_a_token_is_scored(models: dict[str, LoadedModel]) -> None:
    """In windows that overlap, each a batch by itself."""
    model, lengths = models["gpt2"], list[int]()
    assert model.is_causal, "which computes logits, too"
    head = model.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, inputs, output: lengths.append(output.shape[0] * output.shape[1]))
    row = row_of(model, MeasuredText("text", (LONG * 2,), 1), min_context=0.75, batch_tokens=CONTEXT)
    hook.remove()
    assert len(lengths) > 2 and sum(lengths) == row.details["tokens"] + 1, "and the end"


@pytest.mark.parametrize(("sliding_window", "in_blocks"), [(None, 2), (8, 0)])
def test_attention_is_computed_in_blocks_where_nothing_else_is_hidden(
    sliding_window: int | None, in_blocks: int, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models["llama"].model.config._attn_implementation == BLOCKS
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MistralConfig(vocab_size=50, num_hidden_layers=2, sliding_window=sliding_window, **sizes)
    model, ids = transformers.MistralForCausalLM(config).eval(), torch.arange(80).view(2, 40) % 50
    computed = list[int]()
    counted = lambda query, *others: computed.append(query.size(2)) or blocked_attention(query, *others)  # noqa: E731
    monkeypatch.setattr(evaluation_models, "blocked_attention", counted)
    with torch.inference_mode():
        by_torch = model(ids).logits
        assert not computed
        model.set_attn_implementation(BLOCKS)
        torch.testing.assert_close(model(ids).logits, by_torch, rtol=1e-5, atol=1e-6)
        assert computed == [40] * in_blocks
        first = model(ids[:, :30], use_cache=True)
        rest = model(ids[:, 30:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, by_torch[:, 30:], rtol=1e-5, atol=1e-6)
    assert computed == [40, 40, 30, 30][: 2 * in_blocks]


def test_a_batch_holds_a_window_unless_its_logits_are_too_many() -> None:
    def size(context: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> int:
        model: Any = SimpleNamespace(device=torch.device("cpu"), vocab_size=vocabulary, dtype=dtype)
        return bits_per_byte.batch_tokens_of(model, Windowing(0, "", "", 0, context, context))

    assert size(256, 8_000) == 2048 and size(4096, 8_000) == 4096
    assert size(4096, 128_000) == bits_per_byte.MAX_LOGITS // 128_000 < 4096
    assert [size(context, 8_000, torch.bfloat16) for context in (512, 1024, 8192)] == [2048, 4096, 8192]


def test_start_and_context_are_declared(models: dict[str, LoadedModel]) -> None:
    notes = [row_of(models["gpt2"], context_length=length).notes[:2] for length in (8, 2 * CONTEXT, "auto")]
    assert {start for start, _ in notes} == {"start: <|endoftext|> (end of the document before)"}
    contexts = [context for _, context in notes]
    assert contexts == ["context 8", f"context {CONTEXT} (the model takes no more)", f"context {CONTEXT}"]
    windowing = windowing_of(models["llama"], EvaluateConfig())
    bos = "bos, which the tokenizer puts before text"
    assert windowing == Windowing(1, "<s>", bos, 2, CONTEXT, CONTEXT // 2)


def test_documents_end_with_the_token_that_config_json_names(folders: dict[str, Path], tmp_path: Path) -> None:
    for ids in (5, [5, 2]):  # a chat tokenizer's own end is that of a turn
        folder = shutil.copytree(folders["llama"], tmp_path / str(ids))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ids}), encoding="utf-8")
        windowing = windowing_of(open_models([folder], "cpu")[0], EvaluateConfig())
        assert (windowing.end_id, windowing.start_id) == (5, 1)
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert windowing_of(open_models([folder], "cpu")[0], EvaluateConfig()).end_id == 2


def test_a_lossy_tokenizer_and_an_encoder_decoder_are_named_and_not_ranked(models: dict[str, LoadedModel]) -> None:
    (section,) = measure_texts([TEXT], list(models.values()), EvaluateConfig())
    values = {row.model: row.value for row in section.rows}
    assert values["gpt2"] and values["llama"] and values["lossy"] is values["t5"] is None
    assert [row.value is None for row in section.ranked()] == [False, False, True, True]
    lossy, t5 = section.rows[2:]
    assert lossy.details["lost_documents"] == 2 and "loses text" in lossy.notes[-1]
    assert "masked spans" in t5.notes[-1]
    assert [(each.a, each.b) for each in section.differences] == [("gpt2", "llama")]
    assert section.differences[0].difference == pytest.approx((values["gpt2"] or 0) - (values["llama"] or 0))


def test_what_spells_a_control_token_is_text(models: dict[str, LoadedModel]) -> None:
    for model in (models["gpt2"], models["llama"]):
        (ids,) = bits_per_byte.encode(model.tokenizer, ["</s><|endoftext|><s>"])
        assert not set(ids) & set(model.tokenizer.all_special_ids)


def test_a_killed_run_goes_on(models: dict[str, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits_per_byte, "BLOCK_BYTES", 80)
    model, whole, measured = models["gpt2"], row_of(models["gpt2"]), list[int]()
    compute = bits_per_byte.losses_of

    def counts(*arguments: Any) -> Any:
        if measured == [1]:
            raise KeyboardInterrupt
        measured.append(len(arguments[1]))
        return compute(*arguments)

    monkeypatch.setattr(bits_per_byte, "losses_of", counts)
    with pytest.raises(KeyboardInterrupt):
        row_of(model, cache=tmp_path)
    measured.append(0)
    assert row_of(model, cache=tmp_path) == whole and sum(measured) == len(TEXT.documents)
    measured.clear()
    assert row_of(model, cache=tmp_path) == whole and not measured
    measured.append(0)
    row_of(model, cache=tmp_path, min_context=0.0)  # another reading is another measurement
    assert sum(measured) == len(TEXT.documents)


def test_a_model_that_sees_what_comes_after_is_not_measured(tmp_path: Path) -> None:
    tokenizer = evaluated_models.dummy_prefix()
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    for is_decoder in (False, True):
        config = transformers.RobertaConfig(vocab_size=len(tokenizer), pad_token_id=2, is_decoder=is_decoder, **widths)
        transformers.RobertaForCausalLM(config).save_pretrained(tmp_path / str(is_decoder))
        tokenizer.save_pretrained(tmp_path / str(is_decoder))
    both, causal = open_models([tmp_path / "False", tmp_path / "True"], "cpu")
    row = row_of(both, cache=tmp_path / "cache")
    assert row.value is None and SEES_LATER_TOKENS in row.notes and not (tmp_path / "cache").exists()
    assert row_of(causal).value


def test_a_loss_that_is_no_number_is_not_ranked_and_not_kept(folders: dict[str, Path], tmp_path: Path) -> None:
    (model,) = open_models([folders["gpt2"]], "cpu")
    (token,) = model.tokenizer("🦊", add_special_tokens=False)["input_ids"][-1:]
    head = model.model.lm_head.weight.detach().clone()
    model.model.get_input_embeddings().weight.data[token] = math.nan
    model.model.lm_head.weight = torch.nn.Parameter(head)
    row = row_of(model, cache=tmp_path)
    assert row.value is None and "1 document without a finite loss" in row.notes[-1]
    assert not list(tmp_path.glob("*/*.json"))


def test_folders_that_are_no_whole_models_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["gpt2"], tmp_path / "without")
    for path in (tmp_path / "without").glob("token*"):
        path.unlink()
    with pytest.raises(UserError, match="makes no token of 'hello'"):
        open_models([tmp_path / "without"], "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["gpt2"])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(shutil.copytree(folders["gpt2"], tmp_path / "padded"))
    with pytest.raises(UserError, match=f"no row for <pad> .id {len(tokenizer) - 1}.*resize_token_embeddings"):
        open_models([tmp_path / "padded"], "cpu")
    weights = load_file(folders["gpt2"] / "model.safetensors")
    for name, extra, refused in (
        ("constants", {"transformer.h.0.attn.masked_bias": torch.ones(1)}, False),
        ("more", {"transformer.h.9.ln_1.weight": torch.ones(32)}, True),
    ):
        whole = shutil.copytree(folders["gpt2"], tmp_path / name)
        save_file(weights | extra, whole / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=r"h\.9\.ln_1") if refused else nullcontext():
            _ = open_models([whole], "cpu")[0].model
    os.truncate(whole / "model.safetensors", 1000)
    with pytest.raises(UserError, match="cannot be loaded by transformers"):
        _ = open_models([whole], "cpu")[0].model


def test_no_model_is_measured_with_the_attention_of_cudnn(folders: dict[str, Path]) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        assert open_models([next(iter(folders.values()))])[0].model is not None
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(("free", "device", "precision"), [(2**40, "cuda", "bf16"), (2**30, "cpu", "fp32")])
def test_a_gpu_without_room_is_left_to_the_run_that_holds_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    free: int, device: str, precision: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
    (model,) = open_models([folders["gpt2"]], precision="auto")
    assert (model.device.type, model.dtype) == (device, families.TORCH_DTYPES[precision])
    assert ("GPU has 1.1 GB free" in capsys.readouterr().out) == (device == "cpu")
    (demanded,) = open_models([folders["gpt2"]], "cuda")
    assert demanded.device.type == "cuda"


def test_one_model_is_in_memory_at_a_time(folders: dict[str, Path]) -> None:
    texts = [MeasuredText(name, TEXT.documents[:number], 4) for number, name in enumerate(("a", "b"), 2)]
    opened = open_models([folders["gpt2"], folders["llama"]], "cpu")
    sections = list(measure_texts(texts, opened, EvaluateConfig()))
    assert [section.name for section in sections] == ["bits per byte: a", "bits per byte: b"]
    assert [model._model is None for model in opened] == [True, False]
