#!/usr/bin/env bash
# Makes .venv if needed, installs what the tests need, checks style and runs the tests.
#   bash scripts/test.sh           the core suite, under 10 minutes on 2 cores
#   bash scripts/test.sh --all     also the tests that start, kill and resume real runs, under 35 minutes; as root on
#                                  Debian or Ubuntu it installs the system packages that some of them need
#   bash scripts/test.sh ARGS...   the arguments go to pytest, as in: tests/test_model.py -x
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh

install requirements.txt
install tests/requirements.txt

install_debian_packages() { # Slurm, fault injection, network namespaces; without them those tests are skipped
    local missing
    missing=$(for each in slurmctld:slurm-wlm slurmd:slurm-wlm munged:munge strace:strace ip:iproute2; do
        command -v "${each%:*}" >/dev/null || echo "${each#*:}"
    done | sort -u)
    if [ -z "$missing" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return; fi
    say "installing" $missing
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install --yes --no-install-recommends $missing; } >/dev/null 2>&1 \
        || say "apt-get could not; the tests that need these will be skipped"
}

if [ "${1:-}" = "--all" ]; then shift; install_debian_packages; else set -- -m "not integration" "$@"; fi
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
exec .venv/bin/python -m pytest "$@"
