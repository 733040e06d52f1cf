"""What llama.cpp makes of a GGUF: token ids, probabilities and greedy text, asked of its own server on this machine.

    python with_llama_cpp.py MODEL.gguf QUESTIONS ANSWERS

QUESTIONS is a JSON file with lines and prompts; ANSWERS gets a JSON file. Imports nothing of zerokara.
"""

import json
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path

import xllamacpp

NUM_TOKENS = 12
NUM_PROBABILITIES = 50
NUM_DRAWS = 100


def main(model: Path, questions: dict) -> dict:
    settings = xllamacpp.CommonParams()
    settings.model.path = str(model)
    settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 64, 1, 1
    server = xllamacpp.Server(settings)

    def ask(path: str, **question: object) -> dict:
        request = urllib.request.Request(
            f"{server.listening_address}/{path}", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    plain = {"add_special": False, "parse_special": False}
    ids = [ask("tokenize", content=line, **plain)["tokens"] for line in questions["lines"]]
    prompts = [ask("tokenize", content=prompt, **plain)["tokens"] for prompt in questions["prompts"]]
    greedy = {"samplers": ["top_k"], "top_k": 1, "return_tokens": True, "cache_prompt": False}
    written = [ask("completion", prompt=prompt, n_predict=NUM_TOKENS, **greedy) for prompt in prompts]

    def log_probs(prompt: list[int]) -> dict[int, float]:
        """Those of the next token. Where the token that it draws is a part of a character, llama.cpp reports none:
        then it draws another, which changes nothing about the probabilities."""
        asked = {"prompt": prompt, "n_predict": 1, "n_probs": NUM_PROBABILITIES, "cache_prompt": False}
        for seed in range(NUM_DRAWS):
            if reported := ask("completion", seed=seed, **asked).get("completion_probabilities"):
                return {entry["id"]: entry["logprob"] for entry in reported[0]["top_logprobs"]}
        raise ValueError(f"{NUM_DRAWS} draws were all parts of characters")

    return {
        "version": version("xllamacpp"),
        "ids": ids,
        "greedy": [one["tokens"] for one in written],
        "log_probs": [log_probs(prompt) for prompt in prompts],
    }


if __name__ == "__main__":
    model, questions_path, answers_path = map(Path, sys.argv[1:])
    answers = main(model, json.loads(questions_path.read_text(encoding="utf-8")))
    answers_path.write_text(json.dumps(answers), encoding="utf-8")
