#!/usr/bin/env bash
# All that needs a GPU, on one GPU, in parts of at most nine minutes each; asks no network for anything.
#
#   benchmarks/gpu.sh tests|125m|350m|1.3b|resume|all [--tiny] [--wheels DIR] [--results DIR] [--set key=value …]
#
#   tests    tests/gpu, without the resume
#   125m …   a model of this size at a sequence of 2,048 in bf16: see benchmarks/gpu.py
#   resume   a run in bf16 that was cut short goes on as one that was not
#   all      all of these, one after another; a part that fails does not stop the next
#
# --wheels   a folder of wheels: all of them are installed into a temporary folder that is used for this call alone
# --tiny     small models, on a CPU too: shows that everything runs, and measures nothing worth keeping
# --results  where the numbers go: benchmarks/results/<date>_<device> unless given, a temporary folder with --tiny
# Any python is used that has the packages: .venv's, or else the python3 of the path. Prints its table last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

part=${1:?tests, 125m, 350m, 1.3b, resume or all}
shift
tiny=() settings=() wheels="" results=""
while [ $# -gt 0 ]; do
  case $1 in
    --tiny) tiny=(--tiny) ;;
    --wheels) wheels=$2; shift ;;
    --results) results=$2; shift ;;
    --set) settings+=(--set "$2"); shift ;;
    *) echo "gpu.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done

python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
export PYTHONPATH="$PWD/original_codes${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
if [ -n "$wheels" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --target "$made/packages" "$wheels"/*.whl
  export PYTHONPATH="$PYTHONPATH:$made/packages"
fi
if ! missing=$("$python" - <<'PYTHON'
import importlib.util as util
needed = ["torch", "deepspeed", "megatron.core", "numpy", "psutil", "pydantic", "orjson", "ruamel.yaml", "sentencepiece"]
def there(name):
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
missing = [name for name in needed if not there(name)]
print(" ".join(missing))
raise SystemExit(bool(missing))
PYTHON
); then
  echo "gpu.sh: $python lacks: $missing. Run ./setup.sh, or put their wheels into a folder and give --wheels" >&2
  exit 2
fi
if [ -z "$results" ]; then
  results=$made/results
  if [ ${#tiny[@]} -eq 0 ]; then
    device=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "none")')
    results=benchmarks/results/$(date -u +%F)_$device
  fi
fi

failed=()
run() {  # run PART COMMAND…: within nine minutes, remembering whether it failed
  echo "── $1: ${*:2}"
  timeout -k 10 540 "${@:2}" || failed+=("$1 (exit $?)")
}
measure() { run "$1" "$python" benchmarks/gpu.py "$1" --results "$results" ${tiny[@]+"${tiny[@]}"} ${settings[@]+"${settings[@]}"}; }
# pytest's 5 says that no test was left: on a CPU all of tests/gpu are left out.
tests() { run "$1" bash -c '"$0" -m pytest -q tests/gpu "$@" || [ $? -eq 5 ]' "$python" "${@:2}"; }

case $part in
  tests) tests tests -k "not resume" ;;
  resume) tests resume -k resume ;;
  125m | 350m | 1.3b) measure "$part" ;;
  all)
    tests tests -k "not resume"
    for size in 125m 350m 1.3b; do measure "$size"; done
    tests resume -k resume
    ;;
  *) echo "gpu.sh: there is no part $part" >&2; exit 2 ;;
esac

echo
"$python" benchmarks/gpu.py --table --results "$results" | if [ ${#tiny[@]} -eq 0 ] && [ -d "$results" ]; then tee "$results/table.md"; else cat; fi
if [ ${#failed[@]} -gt 0 ]; then printf 'failed: %s\n' "${failed[@]}"; exit 1; fi
