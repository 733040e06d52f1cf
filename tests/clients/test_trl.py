"""TRL and PEFT take over from an export: the same answers are learned, LoRA steps, merge, reload."""

import json
from pathlib import Path

import pytest
from clients.client_exports import Exports, client, joined


@pytest.mark.parametrize(("name", "packages"), [("llama", "training"), ("gpt2", "transformers4+training")])
def test_lora_steps_merge_and_reload(exports: Exports, tmp_path: Path, name: str, packages: str) -> None:
    said = client("with_trl.py", packages, exports[name], tmp_path)
    found = json.loads(next(line for line in said.splitlines() if line.startswith('{"versions"')))
    assert found["versions"]["transformers"].startswith("4." if "transformers4" in packages else "5.")
    assert len(found["losses"]) == 5
    assert found["losses"][-1] < found["losses"][0], "it learns"
    # Its loss counts the tokens that ours counts: the answers and their ends.
    ours = [learned_by_us(exports, name, messages) for messages in found["conversations"]]
    assert len(found["examples"]) == 4 and all(example in ours for example in found["examples"])
    assert found["saved_from_memory"] < 1e-5
    assert found["saved_from_export"] > 1e-3, "the merged model is another one"
    assert found["ids"] == exports.encoder(name).encode("the model reads a corpus and writes text").tolist()


def learned_by_us(exports: Exports, name: str, messages: list[dict[str, str]]) -> dict[str, list[int]]:
    """The ids of a conversation, and the labels: -100 where nothing is learned."""
    segments = exports.segments(name, messages)
    return {
        "ids": joined(segments),
        "learned": [i if number % 2 else -100 for number, segment in enumerate(segments) for i in segment],
    }
