#!/usr/bin/env bash
# Training on several machines, tried on one: hosts are Linux namespaces (hosts.py). Takes some minutes; needs iproute2
# and util-linux, and a machine that gives its users namespaces, and says so where one of these is missing.
#
#   bash tests/cluster/run.sh                  everything
#   bash tests/cluster/run.sh -k lost          passes its arguments to pytest
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."
export PYTHONSAFEPATH=1
python=.venv/bin/python
[[ -x $python ]] || ./setup.sh
PYTHONPATH=tests/support:original_codes $python "$here/hosts.py"
user=()
[[ $(id -u) == 0 ]] || user=(--user --map-root-user) # Slurm's daemons want the real root, and are left out otherwise
exec unshare "${user[@]}" --net --mount --pid --fork --mount-proc \
    sh -c 'ip link set lo up && exec "$@"' sh "$python" -m pytest -p no:cacheprovider tests/cluster "$@"
