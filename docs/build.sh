#!/usr/bin/env bash
# Makes the site of README.md and docs/ in site/. A dead link or anchor is an error. Installs what that takes, by hash,
# into .docs/venv, away from .venv; the build itself uses no network.
#
#   docs/build.sh          the site, in site/
#   docs/build.sh serve    shows it at http://localhost:8000 while you write
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=requirements/docs.lock env=.docs/venv
if ! sha256sum --status --check "$env/lock.sha256" 2>/dev/null; then
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    "$env/bin/pip" install --disable-pip-version-check --quiet --require-hashes --no-deps --only-binary :all: -r "$lock" \
        2> >(grep -v "is ignored: it is neither a file nor a directory" >&2 || true)
    sha256sum "$lock" >"$env/lock.sha256"
fi
export NO_MKDOCS_2_WARNING=1
exec "$env/bin/mkdocs" "${1:-build}" --strict --config-file docs/site/mkdocs.yml --site-dir "$PWD/site"
