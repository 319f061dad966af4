#!/usr/bin/env bash
# Makes .venv if needed, installs what the tests need, checks style and runs the tests.
#   bash scripts/test.sh           the core suite, under 10 minutes on 2 cores
#   bash scripts/test.sh --all     also the tests that start, kill and resume real runs, under 35 minutes
#   bash scripts/test.sh ARGS...   the arguments go to pytest, as in: tests/test_model.py -x
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

install requirements.txt
install tests/requirements.txt

if [ "${1:-}" = "--all" ]; then shift; else set -- -m "not integration" "$@"; fi
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
exec .venv/bin/python -m pytest "$@"
