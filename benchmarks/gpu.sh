#!/usr/bin/env bash
# All that is to be learned on a machine with a GPU, in parts of at most nine minutes; asks no network for anything.
#
#   benchmarks/gpu.sh PART --results DIR [--tiny] [--minutes 9] [--wheels DIR] [--set key=value …] [--only NAME …]
#
#   first      what is wanted first, in one call of nine minutes: a JSON object a line for each fact, as it is found. The
#              machine, its ceilings, attention's kernels, tests/gpu, and seven trainings (benchmarks/gpu/first.py)
#   check      whether all that the parts import is there; every other part begins with it
#   tests      tests/gpu under NCCL
#   dense      Llama of 125M, 350M and 1.3B: step 3 as a user has it, with a profile; then 125M to 1.3B eager
#   families   a mixture of experts and a T5, compiled and eager
#   zero       ZeRO stages 1 to 3, 125M and 350M, with the optimizer's state in main memory
#   all        these four, one after another, each with its own minutes: no single call of nine minutes holds them
#   table      the table of what lies in DIR; further folders may follow it
#
# --results  one folder for everything: measurements.jsonl, log.txt, tests.txt, table.md, comparison.md. Of the first three
#            nothing is overwritten: lines are added, and what is measured again, or with --set, has a name of its own. It is small: some 100 kB.
#            `first` prints all that matters, and needs none
# --minutes  of a part; what no longer fits is left out, and the table says so
# --tiny     models of a few thousand weights, on a CPU too: shows that everything runs, and measures nothing
# --only     of the part, these measurements (their names are in benchmarks/gpu/jobs.py)
# --wheels   a folder of wheels: they are installed into a temporary folder that is used for this call alone
#
# Any python serves that has the packages: .venv's, or else python3. An image that has torch (2.11 or later), transformers,
# sentencepiece and pytest, and no network, lacks the rest. `benchmarks/gpu.sh wheels DIR` gathers it elsewhere, in the
# versions of requirements/zerokara.lock: 8 MB of wheels for x86-64 and Python 3.12.
#
# Half an hour on a borrowed machine is three calls: first, then dense (a user's start and save; the 1.3B model writes
# 16 GB for its checkpoint), then families and zero with --minutes 4 each in one call.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
wheels="" arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=${2:?--wheels needs a folder}; shift ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
export PYTHONPATH="$root:$root/original_codes${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1
if [ -n "$wheels" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$made/packages" "$wheels"/*.whl
  export PYTHONPATH="$PYTHONPATH:$made/packages"
fi
case " ${arguments[*]:-} " in
  *" wheels "*) "$python" -m benchmarks.gpu.needs "${arguments[@]}"; exit ;;
  *" check "*) "$python" -m benchmarks.gpu.needs; exit ;;
  *" table "* | *" first "*) ;;  # needs nothing; says itself what is missing, and goes on
  *) "$python" -m benchmarks.gpu.needs ;;
esac
"$python" -m benchmarks.gpu "${arguments[@]}"
