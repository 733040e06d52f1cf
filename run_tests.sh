#!/usr/bin/env bash
# Sets up, then lints, checks the types, and runs the tests.
#
#   ./run_tests.sh                      all tests but those marked slow (tests/gpu where there is a GPU)
#   ./run_tests.sh --all                what CI runs: also the slow ones, six times the kills, other programs that load our
#                                       exports (tests/clients), and the documents as a site
#   ./run_tests.sh tests/unit -k order  passes its arguments to pytest
#   ./run_tests.sh --kernels            only the numerical tests, with the kernels of other processors (tests/numerics/kernels.py)
#   ./run_tests.sh --help               prints this
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")"
export PYTHONSAFEPATH=1
./setup.sh
python=.venv/bin/python
if [ "${1:-}" = --kernels ]; then
    exec $python tests/numerics/kernels.py "${@:2}"
fi

part() { # part NAME COMMAND...: runs the command, says how long it took, and ends with its exit code
    local name=$1 started=$SECONDS code=0
    shift
    printf '── %s\n' "$name"
    "$@" || code=$? # by itself `set -e` is off where `part` stands before an `||`
    printf '   %s: %d s\n' "$name" $((SECONDS - started))
    return $code
}

# What is optional, so that its tests are real ones: two of the analysers, the lighter one for each language, and what
# the cleaning of text needs.
optional() { # optional LOCK [NAMES]: installs the packages of a lock file whose names are these (a regular expression)
    local wanted
    wanted=$(awk -v names="^(${2:-.*})==" '/^[a-z0-9]/ { on = $0 ~ names } on && !/^ *#/' "$1")
    $python -c 'import sys
from importlib.metadata import version, PackageNotFoundError
try:
    sys.exit(any(version(name) != pin for name, pin in (line.split("==") for line in sys.argv[1:])))
except PackageNotFoundError:
    sys.exit(1)' $(grep -E '^[^ ]+==[^ ;]+ \\' <<<"$wanted" | grep -oE '^[^ ]+==[^ ]+') ||
        $python -m pip install --disable-pip-version-check --quiet --require-hashes --no-deps -r <(echo "$wanted") \
            2> >(grep --line-buffered -v 'is ignored: it is neither a file nor a directory' >&2)
}
checks() {
    part "lint" $python -m ruff check
    part "format" $python -m ruff format --check
    part "types" $python -m mypy original_codes/zerokara
    printf '── %s\n' "tests"
}
part "analysers" optional requirements/analysers.lock 'sudachipy|sudachidict-small|python-mecab-ko|python-mecab-ko-dic'
part "cleaning" optional requirements/clean.lock
# Where the environment forbids Python to keep what it compiles, each of the hundreds of starts would do it again.
$python -m compileall -q original_codes
further= options=(-m "not slow" --faults 4)
if [ "${1:-}" = --all ]; then
    further=yes options=(--faults 24)
elif [ $# -gt 0 ]; then
    checks
    exec $python -m pytest "$@"
fi

further() {
    local failed=0
    part "clients" bash tests/clients/run.sh transformers4 ctranslate2 llama_cpp trl harness s3 || failed=$?
    part "documents" docs/build.sh || failed=$?
    return $failed
}

# Two halves that take about as long, side by side, each on cores of its own: most tests keep one core busy. The checks
# of the source come before the first; what CI tries besides comes after the second.
first=(tests/unit tests/pipeline tests/gpu) second=(tests/numerics tests/faults)
if [ -n "$further" ]; then
    moved=(tests/numerics/test_compiled.py) first+=("${moved[@]}") second+=("${moved[@]/#/--ignore=}")
    moved=(tests/pipeline/test_{lines_of_families,gpu_benchmark,notebook}.py) second+=("${moved[@]}") first+=("${moved[@]/#/--ignore=}")
else
    moved=(tests/pipeline/test_{upload_step,inputs_hub,train_step}.py) second+=("${moved[@]}") first+=("${moved[@]/#/--ignore=}")
fi
cores=$($python -c 'import os
cores = sorted(os.sched_getaffinity(0))
print(*(",".join(map(str, part)) for part in (cores[::2], cores[1::2])))')
read -r some others <<<"$cores"
if [ -z "$others" ] || ! command -v taskset >/dev/null; then
    checks
    $python -m pytest "${options[@]}"
    [ -z "$further" ] || further
    exit
fi
aside=$(mktemp)
{
    failed=0
    taskset -p -c "$others" $BASHPID >/dev/null
    $python -m pytest -p no:cacheprovider "${options[@]}" "${second[@]}" || failed=$?
    [ -z "$further" ] || further || failed=$?
    exit $failed
} >"$aside" 2>&1 &
half=$!
trap 'pkill -P $half 2>/dev/null || true; rm -f "$aside"' EXIT
checks
failed=0
taskset -c "$some" $python -m pytest "${options[@]}" "${first[@]}" || failed=$?
wait $half || failed=$?
cat "$aside"
exit $failed
