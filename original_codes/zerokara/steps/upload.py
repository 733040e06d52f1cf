"""Step 6: the exported model → the Hugging Face Hub, private unless told otherwise (`6_upload.py`).

`--dry-run` lists what would be sent, without the network. `--redo` also deletes files in the repository that are not
part of this export, and replaces a model card that was edited there. The token comes from `hf auth login` or from
HF_TOKEN in the environment.
"""

import json
import shlex
import time
from functools import partial
from pathlib import Path

from zerokara.base.errors import UserError
from zerokara.base.progress import bytes_text, log, plural, seconds_text, summary
from zerokara.config.convert_config import ConvertConfig
from zerokara.publishing import exported_folder
from zerokara.steps import command


def upload(config: ConvertConfig, options: command.Options) -> None:
    """Do step 6, or say what it would do."""
    started = time.monotonic()
    name, folder = config.huggingface_name, Path(config.output_tokenizer_and_model_dir)
    if not name and not options.dry_run:
        raise UserError(config.fault("huggingface_name", "must name the repository", "set it to user/name"))
    # This is the border: the configuration has been checked, and the Hub's library is imported.
    from zerokara.publishing import card, hub

    made = exported_folder.proved(folder)
    text = card.renewed(was := exported_folder.read_card(folder), name, config.language, config.license)
    if text != was and not options.dry_run:
        exported_folder.write_card(folder, text)
    files = exported_folder.checked_files(folder, made)
    total = sum(record.bytes for record in files)
    what, visibility = f"{plural(len(files), 'file')}, {bytes_text(total)}", "private" if config.private else "public"
    log(f"step 6 upload: {what} → {name or 'a repository to be named'} ({visibility})")
    if made.settings.get("test_prompt_text") == "auto" and (samples := made.facts["samples"]):
        prompts = ", ".join(json.dumps(sample["prompt"], ensure_ascii=False) for sample in samples)
        log(f"  the card's samples continue {prompts}: if they quote your text, set test_prompt_text and repeat step 4")
    said = card.ModelCard(text).data.to_dict()
    if text != was:
        log("  the card gets the repository, language and license of the settings")
    if missing := [key for key in ("language", "license") if not said.get(key)]:
        log(f"  the card names no {' and no '.join(missing)}: set it in {options.config_path}, or edit the card")
    if options.dry_run:
        for record in files:
            print(f"  {record.bytes:>15,} bytes  {record.path}")
        print(f"dry run: nothing was sent; an upload would send {total:,} bytes in {len(files)} files")
        named = "" if name else f"write huggingface_name: user/name into {options.config_path}, then "
        print(f"next: {named}{command.next_command('6_upload.py', options, config)}")
        return
    done = hub.upload(folder, files, name, private=config.private, replace=options.redo)
    rows = [
        ("repository", f"{done.url} ({'private' if done.private else 'public'})"),
        ("commit", done.commit),
        ("sent", plural(done.num_files_sent, "file") if done.num_files_sent else "nothing: all were there already"),
        ("compared", f"{what}: paths, sizes and hashes on the Hub equal the local ones"),
        ("time", seconds_text(time.monotonic() - started)),
    ]
    if done.private and not config.private:
        rows.append(("note", f"the repository was private before and still is; make it public at {done.url}/settings"))
    prompt = next((sample["prompt"] for sample in made.facts["samples"]), "…")
    usage = "; ".join(card.usage(made.facts["model"], name, prompt))
    summary("step 6 upload: done", rows, f"python -c {shlex.quote(usage)}")


main = partial(command.run, "6_upload.py", upload, __doc__)
