#!/usr/bin/env bash
# All that is to be learned on a machine with a GPU, in parts of at most nine minutes; asks no network for anything.
#
#   benchmarks/gpu.sh PART --results DIR [--tiny] [--minutes 9] [--wheels DIR] [--set key=value …] [--only NAME …]
#
#   check      whether all that the parts import is there; every part begins with it
#   tests      tests/gpu under NCCL
#   dense      Llama of 125M, 350M and 1.3B: step 3 as a user has it, with a profile; then 125M to 1.3B eager
#   families   a mixture of experts and a T5, compiled and eager
#   zero       DeepSpeed's ZeRO: stages 2 and 3 at 125M and 350M, stage 1 with the optimizer's state in main memory
#   all        these four, one after another, each with its own minutes: no single call of nine minutes holds them
#   table      the table of what lies in DIR; further folders may follow it
#
# --results  one folder for everything: measurements.jsonl, log.txt, tests.txt, table.md. Nothing in it is overwritten: lines
#            are added, and what is measured again, or with --set, has a name of its own. It is small: some 100 kB.
# --minutes  of a part; what no longer fits is left out, and the table says so
# --tiny     models of a few thousand weights, on a CPU too: shows that everything runs, and measures nothing
# --only     of the part, these measurements (their names are in benchmarks/gpu.py)
# --wheels   a folder of wheels: they are installed into a temporary folder that is used for this call alone
#
# Any python serves that has the packages: .venv's, or else python3. An image that has torch, transformers, sentencepiece
# and pytest, and no network, lacks the rest: on x86-64 with Python 3.12 these wheels (8 MB), fetched elsewhere, in the
# versions of requirements.lock. DeepSpeed's is built from its source package, with none of its operators:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
#       --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest wheels megatron-core==0.16.1 hjson==3.1.0 \
#       annotated-types==0.8.0 pydantic==2.14.3 pydantic-core==2.50.4 typing-inspection==0.4.5 orjson==3.13.0 \
#       ruamel.yaml==0.19.1 backports.zstd==1.8.0 httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5
#   DS_BUILD_OPS=0 .venv/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir wheels deepspeed==0.19.8
#
# Half an hour on a borrowed machine is three calls, and what is left of it: dense (it has a profile of each size, and the
# 1.3B model writes 16 GB for its checkpoint), then tests and families with --minutes 4 each in one call, then zero.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

python=$here/../.venv/bin/python
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
export PYTHONPATH="$here/../original_codes${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1
if [ -n "$wheels" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$made/packages" "$wheels"/*.whl
  export PYTHONPATH="$PYTHONPATH:$made/packages"
fi
if [ "${arguments[0]:-}" != table ]; then "$python" "$here/gpu_needs.py"; fi
if [ "${arguments[0]:-}" != check ]; then "$python" "$here/gpu.py" ${arguments[@]+"${arguments[@]}"}; fi
