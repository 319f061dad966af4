# shellcheck shell=bash
# What quickstart.sh and test.sh share; sourced from the root of the clone, after `set -euo pipefail`.
#   install FILE    makes .venv if needed and installs a requirements file into it, once per content of that file

fail() { echo "$(basename "$0"): $1" >&2; exit 1; }
say() { echo "$(basename "$0"): $1"; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() { # prints a Python that will do
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON does not exist; install Python 3.11 or newer, or set another path"
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is older than Python 3.11, or does not run; set another path"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python python3.14 python3.13 python3.12 python3.11; do
        if is_new_enough "$candidate"; then echo "$candidate"; return; fi
    done
    fail "found no Python 3.11 or newer; install one, or set PYTHON=/path/to/python"
}

make_venv() {
    local python
    # An interrupted start leaves a .venv without pip; a moved system Python leaves one that does not run.
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        is_new_enough .venv/bin/python || fail ".venv has a Python older than 3.11; remove the folder and start again"
        return
    fi
    require_space 2000 "installing torch and the rest"
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null \
        || fail "$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv"
    "$python" -m venv --clear .venv || fail "cannot make .venv in $PWD; may this folder be written to?"
}

require_space() { # MB, for what
    local free
    free=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "${free:-0}" -ge "$1" ] || fail "only ${free:-0} MB are free in $PWD; $2 needs $1"
}

install() { # requirements file
    local stamp coming
    stamp=.venv/installed.$(tr / - <<<"$1")
    if cmp -s "$1" "$stamp" && .venv/bin/python -c '' 2>/dev/null; then return; fi
    say "installing $1 into .venv (about 2 minutes the first time)"
    make_venv
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    # What pip would install tells whether the network is there and whether this is torch's CUDA build.
    coming=$(.venv/bin/python -m pip install --dry-run -r "$1" 2>&1) \
        || fail "pip cannot get $1, is the network there? It says: $(grep '^ERROR' <<<"$coming" | tail -n 1)"
    if grep -q '^Would install.* nvidia-' <<<"$coming"; then
        # 6 GB unpacked, and the downloads, which pip keeps.
        require_space 10000 "torch's CUDA build"
        command -v nvidia-smi >/dev/null \
            || say "this is torch's CUDA build, and no NVIDIA GPU is here: README.md says how to get the small CPU build"
    fi
    # On a terminal pip shows how far the downloads are.
    .venv/bin/python -m pip install $([ -t 1 ] || echo --quiet) -r "$1" || fail "pip could not install $1; the lines above say why"
    cp "$1" "$stamp"
}

if [ -n "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
    say "PYTHON=$PYTHON is not looked at: .venv has a Python of its own (to change it: rm -r .venv)"
fi
