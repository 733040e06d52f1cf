"""The model card (README.md) of an export, written from its facts alone.

Format: Markdown with YAML front matter (https://huggingface.co/docs/hub/model-cards). A missing fact gives no line.
Names and texts of others are escaped (`zerokara.markdown`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from zerokara import markdown
from zerokara.config.architectures import ARCHITECTURES
from zerokara.progress import bytes_text, count_text, seconds_text
from zerokara.publishing import finetuning_card


def render(facts: dict[str, Any], *, name: str, language: Sequence[str], license: str) -> str:
    """Write the card; `name` is the repository (``user/name``) or the folder to load the model from."""
    title = name.rpartition("/")[2]
    sections = [
        _front_matter(facts, title, language, license),
        f"# {markdown.inline(title)}\n\n{_introduction(facts, language)}",
        "## Use\n\n" + _snippet(facts, name),
        "## Model\n\n" + _table(_model_rows(facts)),
        "## Data\n\n" + _data(facts) if facts.get("data") else "",
        finetuning_card.section(facts["finetuning"]) if facts.get("finetuning") else "",
        "## Training\n\n" + _table(_training_rows(facts)),
        _curve(facts),
        "## Tokenizer\n\n" + _table(_tokenizer_rows(facts)),
        "## Checked at export\n\n" + _bullets(_proof_lines(facts)),
        _samples(facts),
        f"## Licence\n\n{markdown.inline(license)}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(facts: dict[str, Any], title: str, language: Sequence[str], license: str) -> str:
    task, finetuning = facts["model"]["task"], facts.get("finetuning")
    # Only a task that has a pipeline: text2text-generation has none since transformers 5.
    is_task = task == "text-generation"
    tags = ["zerokara", "fine-tuned" if finetuning else "pretrained-from-scratch", *([] if is_task else [task])]
    tags += ["conversational"] if facts["model"].get("converses") else []
    results = finetuning_card.model_index(finetuning, title, task) if finetuning else []
    # JSON strings and lists are YAML too, and quote what must be quoted (`no` is a language code and a YAML false).
    lines = [
        "---",
        f"language: {_yaml(list(language))}",
        f"license: {_yaml(license)}",
        "library_name: transformers",
        *([f"pipeline_tag: {task}"] if is_task else []),
        f"tags: {_yaml(tags)}",
        *([f"model-index: {_yaml(results)}"] if results else []),
        "---",
    ]
    return "\n".join(lines)


def _yaml(value: object) -> str:
    """JSON, with unprintable characters as YAML escapes them, which has more than 16 bits."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)


def _introduction(facts: dict[str, Any], language: Sequence[str]) -> str:
    model, training, finetuning = facts["model"], facts["training"], facts.get("finetuning")
    start = f"A language model of {count_text(model['parameters'])} parameters ({markdown.inline(', '.join(language))})"
    if finetuning:
        return f"{start}, {finetuning_card.introduction(finetuning)}."
    return (
        f"{start}, pretrained from scratch on {count_text(training['tokens'])} tokens. It {_ABILITIES[model['task']]}; "
        "it was not trained to follow instructions or to converse."
    )


_ABILITIES = {
    "text-generation": "continues text",
    "text2text-generation": (
        "fills masked spans of a text (sentinel tokens <extra_id_0>, <extra_id_1>, …), and is meant to be fine-tuned"
    ),
}


def usage(model: dict[str, Any], name: str, prompt: str) -> list[str]:
    """Statements, one a line, that load `name` and print what it generates; `model` are the facts of that name.

    No pipeline: transformers 5 has none for encoder-decoders. They run under transformers 4 and 5 alike.
    """
    auto_class, is_encoder_decoder = model["auto_class"], model["task"] != "text-generation"
    return [
        f"from transformers import {auto_class}, AutoTokenizer",
        f"name = {json.dumps(name, ensure_ascii=False)}",
        "tokenizer = AutoTokenizer.from_pretrained(name)",
        f"model = {auto_class}.from_pretrained(name)",
        f"inputs = {_inputs(model, json.dumps(prompt, ensure_ascii=False))}",
        "output = model.generate(**inputs, max_new_tokens=50, do_sample=True, top_p=0.95)",
        # Sentinel tokens are special tokens, and tell which masked span the text after them fills.
        f"print(tokenizer.decode(output[0], skip_special_tokens={not is_encoder_decoder}))",
    ]


def _inputs(model: dict[str, Any], prompt: str) -> str:
    if not model.get("converses"):
        return f'tokenizer({prompt}, return_tensors="pt")'
    asked = 'add_generation_prompt=True, return_tensors="pt", return_dict=True'
    return f'tokenizer.apply_chat_template([{{"role": "user", "content": {prompt}}}], {asked})'


def usage_command(model: dict[str, Any], name: str, prompt: str) -> str:
    """The same as one shell command."""
    return f"python -c {shlex.quote('; '.join(usage(model, name, prompt)))}"


def _snippet(facts: dict[str, Any], name: str) -> str:
    samples = facts.get("samples") or [{"prompt": "…"}]
    imports, *others = usage(facts["model"], name, samples[0]["prompt"])
    return "\n".join(["```python", imports, "", *others, "```"])


def _model_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    model = facts["model"]
    rows = [
        ("architecture", f"`{model['class']}` ({model['description']})"),
        ("parameters", f"{model['parameters']:,}"),
        *_expert_rows(model),
        ("layers", str(model["num_layers"])),
        ("hidden size", f"{model['hidden_size']} (feed-forward {model['ffn_hidden_size']})"),
        ("attention heads", f"{model['num_attn_heads']} ({model['num_kv_heads']} key and value heads)"),
        ("context length", f"{model['seq_len']} tokens"),
        ("vocabulary", f"{model['vocab_size']:,}"),
        ("output matrix", "tied to the embedding" if model["tie_word_embeddings"] else "separate from the embedding"),
        ("saved as", model["dtype"]),
    ]
    if ARCHITECTURES[model["architecture"]].positions == "rotary":
        rows.append(("rope theta", f"{model['rope_theta']:g}"))
    return rows


def _expert_rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    if not model.get("moe_layers"):
        return []
    layers = ", ".join(map(str, model["moe_layers"]))
    of_each = f"{model['num_experts']} in layers {layers}, feed-forward {model['moe_ffn_hidden_size']}"
    return [
        ("active parameters", f"{model['active_parameters']:,}"),
        ("experts", f"{of_each}; {model['experts_per_token']} per token"),
    ]


def _data(facts: dict[str, Any]) -> str:
    header = ["source", "split", "documents", "tokens", "text"]
    rows = [
        [markdown.inline(source["name"]), split, *_split_cells(source[split])]
        for source in facts["data"]["sources"]
        for split in ("train", "valid")
        if source[split]["documents"]
    ]
    for split in ("train", "valid"):
        if facts["data"].get(split) and facts["data"][split]["documents"]:
            rows.append(["**all**", split, *_split_cells(facts["data"][split])])
    return markdown.table(header, rows)


def _split_cells(split: dict[str, Any]) -> list[str]:
    return [f"{split['documents']:,}", f"{split['tokens']:,}", bytes_text(split["text_bytes"])]


def _training_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    training = facts["training"]
    rows = [
        *([("initialised from", markdown.inline(training["init_from"]))] if training.get("init_from") else []),
        ("steps", f"{training['step']:,}"),
        ("tokens", f"{training['tokens']:,}"),
        ("epochs", f"{training['epochs']:.2f}" if training["epochs"] is not None else "unknown"),
        ("time", seconds_text(training["seconds"])),
        ("precision", training["precision"]),
    ]
    return rows + [(f"`{key}`", markdown.inline(str(value))) for key, value in training["settings"].items()]


def _curve(facts: dict[str, Any]) -> str:
    names = {
        "loss": "training loss (nats per token)",
        "valid_loss": "validation loss (nats per token)",
        "valid_bits_per_byte": "validation, bits per byte of text",
    }
    rows = []
    for key, label in names.items():
        points = facts["training"]["curve"][key]
        if points:
            rows.append([label, *(f"{point['value']:.4f} (step {point['step']:,})" for point in points)])
    return markdown.table(["", "first", "last"], rows) + "\n\nThe whole curve: `metrics.jsonl`." if rows else ""


def _tokenizer_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    tokenizer = facts["tokenizer"]
    return [("vocabulary", f"{tokenizer['vocab_size']:,}"), ("sha256 of tokenizer.model", f"`{tokenizer['sha256']}`")]


def _proof_lines(facts: dict[str, Any]) -> list[str]:
    logits, ids, chat = facts["proof"]["logits"], facts["proof"]["token_ids"], facts["proof"].get("chat")
    lines = [
        f"Logits, in fp32, of this model loaded by transformers and of the trained model, over {logits['positions']:,} "
        f"tokens of text: max difference {logits['max_difference']:.2g} (allowed {logits['tolerance']:g}; standard "
        f"deviation of the logits {logits['logit_std']:.2f}).",
        f"Arg max: equal at every position, {logits['argmax_ties']} ties. Greedy continuations: "
        f"{logits['greedy_tokens']} tokens after {logits['greedy_prompts']} prompts equal, "
        f"{logits['greedy_ties']} ties.",
        f"Computed in bf16: max difference {logits['bf16_max_difference']:.2g}, top-1 agreement "
        f"{logits['bf16_argmax_equal']:.2%}.",
        f"Token ids of the Hugging Face tokenizer and of training: {ids['lines']:,} lines of the corpus compared, "
        f"{ids['equal']:,} equal, {ids['ties']:,} ties.",
    ]
    if chat:
        own = f" and {chat['own']:,} of the training data" if chat["own"] else ""
        text = f"{chat['made']:,} made conversations{own}, with texts that spell control tokens"
        lines.append(f"Token ids of the chat template and of training: {text}: equal, {chat['ties']:,} ties.")
    return lines


def _samples(facts: dict[str, Any]) -> str:
    parts, is_encoder_decoder = [], facts["model"]["task"] != "text-generation"
    for sample in facts.get("samples", []):
        for kind in ("sampled", "greedy"):
            text = f"{sample['prompt']}\n→ {sample[kind]}" if is_encoder_decoder else sample["prompt"] + sample[kind]
            parts.append(f"{kind}:\n\n{markdown.fenced(text)}")
    return "## Samples, unselected\n\n" + "\n\n".join(parts) if parts else ""


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return markdown.table(["", ""], [list(row) for row in rows])
