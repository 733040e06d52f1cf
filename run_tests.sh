#!/usr/bin/env bash
# Sets up, then lints, checks the types, and runs the tests.
#
#   ./run_tests.sh                      everything (tests/gpu too where there is a GPU)
#   ./run_tests.sh tests/unit -k order  hands its arguments on to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
./setup.sh
python=.venv/bin/python

part() { # part NAME COMMAND...: runs the command and says how long it took
    local name=$1 started=$SECONDS
    shift
    printf '── %s\n' "$name"
    "$@"
    printf '   %s: %d s\n' "$name" $((SECONDS - started))
}

part "lint" $python -m ruff check
part "format" $python -m ruff format --check
part "types" $python -m mypy original_codes/zerokara
printf '── %s\n' "tests"
exec $python -m pytest "$@"
