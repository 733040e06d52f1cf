"""Change one value in a configuration file of the user's, and nothing else: comments and layout stay."""

from __future__ import annotations

import re
from pathlib import Path

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.durable import write_text
from zerokara.errors import RunError, UserError


def write_train_tokens(config_path: Path, train_tokens: int) -> None:
    """Change the value of `train_tokens` in a YAML file, or append the key, and nothing else.

    Raises:
        RunError: the file does not load to the same configuration with that one value; it is left as it was.
    """
    before = config_path.read_bytes().decode("utf-8")
    pattern = re.compile(r"""^(train_tokens[ \t]*:[ \t]*)("[^"\n]*"|'[^'\n]*'|[^\s#]+)?""", re.MULTILINE)
    if pattern.search(before):
        after = pattern.sub(lambda match: f"{match[1].rstrip()} {train_tokens}", before, count=1)
    else:
        after = before + ("" if before.endswith("\n") or not before else "\n") + f"train_tokens: {train_tokens}\n"
    trial = config_path.with_name(config_path.name + ".trial.partial")
    expected = load(PretrainConfig, config_path, [f"train_tokens={train_tokens}"])
    try:
        trial.write_bytes(after.encode("utf-8"))
        as_expected = load(PretrainConfig, trial).model_dump() == expected.model_dump()
    except UserError:
        as_expected = False
    finally:
        trial.unlink(missing_ok=True)
    if not as_expected:
        raise RunError(
            f"{config_path}: cannot change train_tokens without touching something else; write by hand: "
            f"train_tokens: {train_tokens}"
        )
    write_text(config_path, after)
