#!/bin/sh
# Makes the virtual environment $VENV (default .venv) with mtpkit and what developing it needs.
# Usage: tools/setup.sh            ($PYTHON chooses the interpreter; otherwise one is looked for)
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
stamp=$venv/.mtpkit-setup
log=$venv/setup.log

# A candidate must run (a shim on PATH may not), be recent enough, and be able to make environments.
works() {
    "$1" -c 'import ensurepip, venv, sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

# 3.12 first, wherever it is: it is the version that the tests run on.
find_python() {
    pyenv=${PYENV_ROOT:-${HOME:-/root}/.pyenv}/versions
    uv=${HOME:-/root}/.local/share/uv/python
    for python in python3.12 "$pyenv"/3.12*/bin/python "$uv"/cpython-3.12*/bin/python3 \
        python3 python python3.13 "$pyenv"/3.13*/bin/python "$uv"/cpython-3.13*/bin/python3; do
        if works "$python"; then
            command -v "$python"
            return
        fi
    done
    return 1
}

if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
    works "$python" || {
        echo "setup: PYTHON=$python is not a working Python 3.12 or 3.13 with its venv module" >&2
        exit 2
    }
else
    python=$(find_python) || {
        echo "setup: found no working Python 3.12 or 3.13 with its venv module; install one" \
            "(Debian, Ubuntu: apt install python3.12 python3.12-venv; else: pyenv install 3.12) or set PYTHON=/path/to/python" >&2
        exit 2
    }
fi

# The stamp goes first, so that an interrupted installation is done again.
rm -f "$stamp"
if ! works "$venv/bin/python"; then
    if [ -e "$venv/pyvenv.cfg" ]; then rm -rf "$venv"; fi
    "$python" -m venv "$venv"
fi
echo "setup: installing mtpkit into $venv ($("$venv/bin/python" -V)); the first time takes a few minutes" >&2
# A path, not a hook: beside a clone named mtpkit, `import mtpkit` would else find the clone's folder.
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --editable '.[dev]' \
    --config-settings editable_mode=compat >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "setup: installation failed, see $log" >&2
    exit 1
fi
touch "$stamp"
echo "setup: done, the commands are in $venv/bin" >&2
