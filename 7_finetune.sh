#!/usr/bin/env bash
# Step 7: fine-tune a Hugging Face model. Settings: finetune_config.yaml; options: --help.
set -euo pipefail
root="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
export PYTHONPATH="$root/original_codes${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 # a file of the current folder is never taken for a package
export ZEROKARA_COMMAND="bash $0"
exec "$python" -m zerokara.steps finetune "$@"
