"""What CTranslate2 makes of exports: logits or log-probabilities and greedy tokens, after its own conversion.

    python with_ctranslate2.py EXPORTS QUESTIONS ANSWERS

EXPORTS holds a folder an export; QUESTIONS is a JSON file with token ids and prompts; ANSWERS gets a JSON file.
Imports nothing of zerokara.
"""

import json
import sys
import tempfile
from pathlib import Path

import ctranslate2
import numpy as np
import transformers
from ctranslate2.converters import TransformersConverter


def answer(export: Path, converted: Path, questions: dict) -> dict:
    """Logits of given tokens (of an encoder-decoder log-probabilities), and greedy continuations."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    pieces = [tokenizer.convert_ids_to_tokens(ids) for ids in questions["ids"]]
    prompts = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in questions["prompts"]]
    greedy = {"beam_size": 1}
    if json.loads((export / "config.json").read_text(encoding="utf-8")).get("is_encoder_decoder"):
        translator = ctranslate2.Translator(str(converted), device="cpu", inter_threads=1, intra_threads=1)
        scored = translator.score_batch(pieces, [row[::-1] for row in pieces])
        made = translator.translate_batch(prompts, max_decoding_length=12, **greedy)
        continued = [tokenizer.convert_tokens_to_ids(one.hypotheses[0]) for one in made]
        return {"scores": [one.log_probs for one in scored], "greedy": continued}
    generator = ctranslate2.Generator(str(converted), device="cpu", inter_threads=1, intra_threads=1)
    logits = np.array(generator.forward_batch(pieces).to_device(ctranslate2.Device.cpu))
    # One by one: of a batch it gives back the ends of the longer prompts too.
    made = [
        generator.generate_batch([prompt], max_length=12, include_prompt_in_result=False, **greedy)[0]
        for prompt in prompts
    ]
    return {"logits": logits.tolist(), "greedy": [one.sequences_ids[0] for one in made]}


def converted_and_asked(export: Path, questions: dict) -> dict:
    with tempfile.TemporaryDirectory() as place:
        converted = Path(place) / "converted"
        try:
            TransformersConverter(str(export)).convert(str(converted), quantization="float32")
        except ValueError as error:
            return {"refused": str(error)}
        return answer(export, converted, questions)


if __name__ == "__main__":
    exports, questions_path, answers_path = map(Path, sys.argv[1:])
    questions = json.loads(questions_path.read_text(encoding="utf-8"))
    folders = sorted(path for path in exports.iterdir() if path.is_dir())
    answers = {folder.name: converted_and_asked(folder, questions) for folder in folders}
    answers_path.write_text(json.dumps(answers | {"version": ctranslate2.__version__}), encoding="utf-8")
