"""Step 4: a checkpoint → a Hugging Face folder, proved equal to the trained model (`4_convert_to_HF.sh`).

Only when the logits, the greedy continuations and the token ids agree does the folder appear.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerokara import manifest
from zerokara.config.convert_config import ConvertConfig
from zerokara.durable import ASIDE_ENDING, unused_name
from zerokara.huggingface import check_text, output_folder, source
from zerokara.huggingface.exported import MANIFEST_NAME
from zerokara.progress import bytes_text, opening, plain, seconds_text, summary
from zerokara.steps import command, next_command, outputs


def main(argv: Sequence[str]) -> int:
    """Command line of step 4; gives the exit code."""
    return command.run(convert, argv, ConvertConfig, "convert_config.yaml", __doc__ or "")


def convert(config: ConvertConfig, options: command.Options) -> None:
    """Do step 4, or say that it is done, or what it would do."""
    folder = Path(config.output_tokenizer_and_model_dir)
    outputs.check(outputs.of_export(config), unless=folder / MANIFEST_NAME)
    found = source.find(config, meanwhile=_import_libraries)
    output_folder.check_class(found)
    from zerokara.huggingface import to_hf

    output_folder.check_place(config, found)
    done = manifest.already_done(folder / MANIFEST_NAME, to_hf.work(found, config), redo=options.redo)
    if done is not None:
        opening(f"step 4 convert: done already, {folder} was made from {found.folder} (--redo: again)")
        _tell_samples(done.facts["samples"], found.shape.traits.is_encoder_decoder)
        print(_next(config, options, found.shape.traits.is_encoder_decoder))
        return
    outputs.check(outputs.of_export(config))
    output_folder.check_space(config, found)
    files = check_text.files_for(config, found.config)
    parameters = found.shape.size_text
    opening(f"step 4 convert: {found.folder} ({parameters}) → {folder} ({config.dtype}), then the proofs")
    if others := output_folder.to_keep(folder):
        names = f"{', '.join(others[:5])}{' …' if others[5:] else ''}"
        kept = unused_name(folder, ASIDE_ENDING)
        print(f"  {folder} holds what step 4 did not write, or not as it is now: {names}; it is kept as {kept}")
    if options.dry_run:
        print("dry run: nothing was written")
        return
    made = to_hf.export(found, config, check_text.documents(files, found.config, config.check_lines))
    _tell_samples(made.facts["samples"], found.shape.traits.is_encoder_decoder)
    summary("step 4 convert: done", _rows(made))
    print(_next(config, options, found.shape.traits.is_encoder_decoder))


def _import_libraries() -> None:
    """Torch, transformers and megatron-core: seconds, and not needed where the configuration is wrong."""
    import zerokara.huggingface.to_hf  # noqa: F401


def _rows(made: manifest.Manifest) -> list[tuple[str, str]]:
    model, logits, ids = made.facts["model"], made.facts["proof"]["logits"], made.facts["proof"]["token_ids"]
    size = sum(record.bytes for record in made.outputs["weights"])
    rows = [
        ("model", f"{model['class']}, {model['parameters']:,} parameters, {model['dtype']}, {bytes_text(size)}"),
        (
            "logits",
            f"largest difference {logits['max_difference']:.2g} (allowed {logits['tolerance']:g}) on "
            f"{logits['positions']:,} tokens, standard deviation {logits['logit_std']:.2f}",
        ),
        ("likeliest token", f"equal at every position, {logits['argmax_ties']} ties"),
        (
            "greedy",
            f"{logits['greedy_tokens']} tokens after {logits['greedy_prompts']} prompts equal, "
            f"{logits['greedy_ties']} ties",
        ),
        (
            "bf16",
            f"largest difference {logits['bf16_max_difference']:.2g}, same likeliest token at "
            f"{logits['bf16_argmax_equal']:.2%}",
        ),
        (
            "token ids",
            f"{ids['lines']:,} lines compared, {ids['equal']:,} equal, {ids['ties']:,} ties; {ids['whole_texts']:,} "
            f"whole texts and {ids['hard_texts']} hard ones beside",
        ),
        ("took", seconds_text(made.seconds)),
    ]
    return rows + [("note", note) for note in logits["notes"]]


def _tell_samples(samples: list[dict[str, Any]], is_encoder_decoder: bool) -> None:
    for sample in samples:
        print(plain(f"\nprompt   {sample['prompt']}"))
        for kind in ("greedy", "sampled"):
            # What fills gaps does not go on from the prompt.
            print(plain(f"{kind:<8} {'' if is_encoder_decoder else sample['prompt']}{sample[kind]}"))


def _next(config: ConvertConfig, options: command.Options, is_encoder_decoder: bool) -> str:
    upload = next_command.render(next_command.UPLOAD, options, "convert_config.yaml", config, flags=["--dry-run"])
    notebook = notebook_for(is_encoder_decoder)
    folder = config.output_tokenizer_and_model_dir
    return f"next: play with {folder} in {notebook}, or see what an upload would send: {upload}"


def notebook_for(is_encoder_decoder: bool) -> str:
    """The notebook for a model: an encoder-decoder fills masked spans, a decoder continues text."""
    return "5_fill_masked_spans_with_model.ipynb" if is_encoder_decoder else "5_play_with_model.ipynb"


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    gc.freeze()  # or Python looks once more through all that torch's modules hold before it leaves: a second and a half
    sys.exit(exit_code)
