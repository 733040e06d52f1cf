"""Step 4: a checkpoint → a Hugging Face folder, which appears only if logits, greedy text and token ids agree."""

import time
from functools import partial
from pathlib import Path
from typing import Any

from zerokara.base import file_lock, manifest
from zerokara.base.durable import ASIDE_ENDING, unused_name
from zerokara.base.progress import bytes_text, log, plain, seconds_text, summary
from zerokara.config.convert_config import ConvertConfig
from zerokara.publishing import checkpoint_source, exported_folder
from zerokara.steps import command, preflight


def convert(config: ConvertConfig, options: command.Options) -> None:
    """Do step 4, or say that it is done, or what it would do."""
    started = time.monotonic()
    folder = Path(config.output_tokenizer_and_model_dir)
    source = checkpoint_source.find(config)
    exported_folder.check_place(config, source)
    is_encoder_decoder = source.shape.traits.is_encoder_decoder
    upload = command.next_command("6_upload.py", options, config, flags=["--dry-run"])
    talk = command.next_command("5_generate.py", options, config)
    notebook = "5_fill_masked_spans_with_model.ipynb" if is_encoder_decoder else "5_play_with_model.ipynb"
    following = f"next: {talk}\nor try {folder} in {notebook}, or list an upload: {upload}"
    work = exported_folder.work(source, config)
    card = [exported_folder.CARD_NAME]
    done = manifest.already_done(folder / manifest.NAME, work, redo=options.redo, editable=card)
    if done is not None:
        log(f"step 4 convert: done already, {folder} was made from {source.folder} (--redo: again)")
        _print_samples(done.facts["samples"], is_encoder_decoder)
        print(following)
        return
    preflight.check(config, preflight.of_export(config))
    exported_folder.check_space(config, source)
    files = checkpoint_source.corpus_files(config, source.config, source.state.data_sha256)
    log(f"step 4 convert: {source.folder} ({source.shape.size_text}) → {folder} ({config.dtype}), then the proofs")
    mean = f"of {len(source.averaged)} checkpoints, steps {', '.join(map(str, source.averaged))}"
    if source.averaged:
        print(f"  the weights are the mean {mean}")
    if others := exported_folder.to_keep(folder):
        kept = f"{', '.join(others[:5])}{' …' if others[5:] else ''}; it is kept as {unused_name(folder, ASIDE_ENDING)}"
        print(f"  {folder} holds files that step 4 did not write, or that were changed: {kept}")
    base = source.state.facts.get("init_from")
    if base:
        print(f"  license: {config.license or '(none)'}; check that the license of {base} allows it")
    if options.dry_run:
        print("dry run: nothing was written")
        return
    from zerokara.publishing import export  # torch and transformers: everything that can be checked without is checked

    documents = checkpoint_source.documents(files, source.config, config.check_lines, source.encoder)
    with file_lock.claimed(folder.with_name(f"{folder.name}.lock"), folder):
        made = export.export(source, config, documents)
    _print_samples(made.facts["samples"], is_encoder_decoder)
    model, proof = made.facts["model"], made.facts["proof"]
    logits, ids, chat = proof["logits"], proof["token_ids"], proof.get("chat")
    size = bytes_text(sum(record.bytes for record in made.outputs["weights"]))
    difference = f"max difference {logits['max_difference']:.2g} (allowed {logits['tolerance']:.2g})"
    in_bf16 = f"max difference {logits['bf16_max_difference']:.2g}, top-1 agreement {logits['bf16_argmax_equal']:.2%}"
    generated = f"{logits['greedy_tokens']} tokens after {logits['greedy_prompts']} prompts"
    texts = f"{ids['lines']:,} lines, {ids['whole_texts']:,} whole texts and {ids['hard_texts']} hard texts"
    rows = [
        ("checkpoint", f"{source.folder}, step {source.state.step:,}"),
        ("model", f"{model['class']}, {model['parameters']:,} parameters, {model['dtype']}, {size}"),
        ("logits", f"{difference} over {logits['positions']:,} tokens, arg max equal, {logits['argmax_ties']} ties"),
        ("bf16", in_bf16),
        ("greedy", f"{generated} equal, {logits['greedy_ties']} ties"),
        ("token ids", f"{texts} equal, {ids['ties']:,} ties"),
    ]
    if source.averaged:
        rows.insert(1, ("mean", mean))
    if chat is not None:
        rows.append(("chat template", f"{chat['compared']:,} conversations of the training data equal"))
    rows += [("time", seconds_text(time.monotonic() - started)), *(("note", note) for note in logits["notes"])]
    summary("step 4 convert: done", rows)
    print(following)


def _print_samples(samples: list[dict[str, Any]], is_encoder_decoder: bool) -> None:
    """Print what the model writes, sampled first: a young model's greedy text repeats itself."""
    for sample in samples:
        before = "" if is_encoder_decoder else sample["prompt"]  # spans do not continue the prompt
        print(plain(f"\nprompt   {sample['prompt']}"))
        print(plain(f"sampled  {before}{sample['sampled']}"))
        print(plain(f"greedy   {before}{sample['greedy']}"))


main = partial(command.run, "4_convert_to_HF.sh", convert, __doc__)
