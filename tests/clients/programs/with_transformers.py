"""What a version of transformers makes of exports: ids, logits, greedy tokens, and the model card's snippet.

    python with_transformers.py EXPORTS QUESTIONS ANSWERS

EXPORTS holds a folder an export; QUESTIONS is a JSON file with the lines and the token ids that are asked about;
ANSWERS gets a JSON file. Imports nothing of zerokara: it runs with the client's own packages.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import torch
import transformers


def answer(folder: Path, questions: dict) -> dict:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    auto_class = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    model = getattr(transformers, auto_class).from_pretrained(folder, dtype=torch.float32).eval()
    lines = tokenizer(questions["lines"], add_special_tokens=False, split_special_tokens=True)
    found = {
        "class": type(model).__name__,
        "saved_as": str(getattr(transformers, auto_class).from_pretrained(folder, dtype="auto").dtype),
        "keys": sorted(lines),
        "ids": lines["input_ids"],
        "decoded": [tokenizer.decode(ids, skip_special_tokens=True) for ids in lines["input_ids"]],
        "marks": [tokenizer(f"a {mark} b", add_special_tokens=False)["input_ids"] for mark in questions["sentinels"]],
    }
    ids = torch.tensor(questions["ids"])
    # What a decoder-start id comes to stands in the files, so the decoder is given labels, as a user would.
    asked = {"input_ids": ids, "labels": ids.flip(1)} if config.is_encoder_decoder else {"input_ids": ids}
    with torch.no_grad():
        found["logits"] = model(**asked).logits.tolist()
    greedy = {"max_new_tokens": 12, "do_sample": False}
    found["greedy"] = [
        model.generate(**tokenizer(prompt, return_tensors="pt"), **greedy)[0].tolist()
        for prompt in questions["prompts"]
    ]
    if not config.is_encoder_decoder:
        asked = [tokenizer(prompt, return_tensors="pt") for prompt in questions["prompts"]]
        with torch.no_grad():
            found["next_log_probs"] = [model(**one).logits[0, -1].log_softmax(-1).tolist() for one in asked]
    if tokenizer.chat_template:
        found["conversations"] = [
            [
                list(tokenizer.apply_chat_template(messages, return_dict=False)),
                list(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)),
            ]
            for messages in questions["conversations"]
        ]
    # A batch of prompts of several lengths: each must go on as it does alone.
    batch = model.generate(**tokenizer(questions["prompts"], return_tensors="pt", padding=True), **greedy)
    found["greedy_in_a_batch"] = [row[-12:].tolist() for row in batch]
    found["snippet"] = run_snippet(folder)
    return found


def run_snippet(folder: Path) -> str:
    """What the code in the model card prints, run where the name in it is that of the folder."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    code = card.split("```python\n")[1].split("```")[0]
    before, printed = os.getcwd(), io.StringIO()
    os.chdir(folder.parent)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(folder / "README.md"), "exec"), {})
    except Exception as error:  # whatever it is, it is the answer
        return f"{type(error).__name__}: {error}"
    finally:
        os.chdir(before)
    return printed.getvalue()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    exports, questions_path, answers_path = map(Path, sys.argv[1:])
    questions = json.loads(questions_path.read_text(encoding="utf-8"))
    answers = {"version": transformers.__version__}
    for folder in sorted(path for path in exports.iterdir() if path.is_dir()):
        try:
            answers[folder.name] = answer(folder, questions)
        except Exception as error:
            answers[folder.name] = {"failed": f"{type(error).__name__}: {error}"}
    answers_path.write_text(json.dumps(answers), encoding="utf-8")
