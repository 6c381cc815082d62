#!/bin/sh
# Makes the virtual environment $VENV (default .venv) with mtpkit and what developing it needs.
# Usage: tools/setup.sh            ($PYTHON chooses the interpreter; otherwise one is looked for)
#        tools/setup.sh newest     makes $VENV/newest with the newest releases that pyproject.toml admits
#        tools/setup.sh lowest     makes $VENV/lowest with the oldest
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
bounds=${1:-}
case $bounds in
    "") ;;
    newest) resolution=highest ;;
    lowest) resolution=lowest-direct ;;
    *) echo "setup: $bounds is neither newest nor lowest" >&2 && exit 2 ;;
esac
# The installer of the two other environments, which no configuration of pip holds back.
uv=$venv/bin/uv
venv=$venv${bounds:+/$bounds}
stamp=$venv/.mtpkit-setup
log=$venv/setup.log

# A candidate must run (a shim on PATH may not), be recent enough, and be able to make environments.
works() {
    "$1" -c 'import ensurepip, venv, sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

# 3.12 first, wherever it is: it is the version that the tests run on. With the newest releases: 3.13.
find_python() {
    first=3.12
    second=3.13
    if [ "$bounds" = newest ]; then
        first=3.13
        second=3.12
    fi
    pyenv=${PYENV_ROOT:-${HOME:-/root}/.pyenv}/versions
    managed=${HOME:-/root}/.local/share/uv/python
    for python in "python$first" "$pyenv/$first"*/bin/python "$managed/cpython-$first"*/bin/python3 \
        "python$second" "$pyenv/$second"*/bin/python "$managed/cpython-$second"*/bin/python3 python3 python; do
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
# Compat: a path, not a hook; beside a clone named mtpkit, `import mtpkit` would else find the clone's folder.
install() {
    if [ -z "$bounds" ]; then
        set -- "$venv/bin/python" -m pip install --disable-pip-version-check --editable '.[dev]'
    else
        set -- "$uv" pip install --python "$venv/bin/python" --compile-bytecode --editable '.[test]' \
            --upgrade --resolution "$resolution"
    fi
    "$@" --config-settings editable_mode=compat
}

echo "setup: installing mtpkit into $venv ($("$venv/bin/python" -V)); the first time takes a few minutes" >&2
if ! install >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "setup: installation failed, see $log" >&2
    exit 1
fi
touch "$stamp"
echo "setup: done, the commands are in $venv/bin" >&2
