#!/usr/bin/env bash
# Makes .venv if needed, installs what the tests need, checks style and runs the tests.
#   bash scripts/test.sh           the core suite, under 10 minutes on 2 cores
#   bash scripts/test.sh --all     also the tests that start, kill and resume real runs, under 35 minutes
#   bash scripts/test.sh ARGS...   the arguments go to pytest, as in: tests/test_model.py -x
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "test.sh: $1" >&2; exit 1; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no $python found; install Python 3.11 or newer, or set PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than Python 3.11; set PYTHON=/path/to/python"

wanted=$(cat requirements.txt tests/requirements.txt)
if [ "$(cat .venv/installed 2>/dev/null || true)" != "$wanted" ]; then
    echo "test.sh: installing into .venv (once; about 2 minutes)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv || fail "cannot make .venv; on Debian: apt-get install python3-venv"
    free=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "$free" -ge 3000 ] || fail "only $free MB free here; torch and the tests need 3000"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt \
        || fail "pip could not install tests/requirements.txt; is the network there?"
    echo "$wanted" > .venv/installed
fi

select=(-m "not integration")
if [ "${1:-}" = "--all" ]; then
    select=()
    shift
fi
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
exec .venv/bin/python -m pytest "${select[@]}" "$@"
