#!/usr/bin/env bash
# Step 2: raw text → token files. Settings: config.yaml; options: --help.
set -euo pipefail
root="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root/original_codes${PYTHONPATH:+:$PYTHONPATH}"
export OPENBLAS_NUM_THREADS=1 # threads for matrix products, which this step does not need; starting them takes a tenth of a second
export PYTHONSAFEPATH=1 # a file of the current folder is never taken for a package
export ZEROKARA_COMMAND="bash $0"
exec "$python" -m zerokara.steps tokenize "$@"
