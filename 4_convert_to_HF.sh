#!/usr/bin/env bash
# Step 4: a checkpoint → a verified Hugging Face model. Settings: convert_config.yaml; options: --help.
set -euo pipefail
root="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
export PYTHONPATH="$root/original_codes${PYTHONPATH:+:$PYTHONPATH}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" # idle threads sleep and leave the cores to other programs
export PYTHONSAFEPATH=1 # a file of the current folder is never taken for a package
export ZEROKARA_COMMAND="bash $0"
exec "$python" -m zerokara.steps convert_to_hf "$@"
