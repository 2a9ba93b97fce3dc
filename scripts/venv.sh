#!/bin/sh
# usage: scripts/venv.sh EXTRA...
#
# Make the virtual environment $VENV (default .venv) hold this project, editable, with the named extras. $PYTHON
# (default: the environment's own Python if it exists, else python3) is the interpreter to build it from; naming another
# one rebuilds it. When nothing is to be done this returns in a few milliseconds: every installed extra leaves a copy of
# the pyproject.toml it was installed from, below a line with the folder's path (a moved folder needs a new install).
set -eu
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
stamps=$venv/installed
log=$venv/install.log
describe='import sys; print("%d.%d.%d" % sys.version_info[:3], sys.base_prefix)'

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
}

is_current() { # the stamp of one extra
    [ -f "$stamps/$1" ] && { pwd -P && cat pyproject.toml; } | cmp -s - "$stamps/$1"
}

installed=$("$venv/bin/python" -c "$describe" 2>/dev/null) || installed=
if [ -z "$installed" ] || [ -n "${PYTHON:-}" ]; then
    python=${PYTHON:-python3}
    wanted=$("$python" -c "$describe" 2>/dev/null) ||
        fail "there is no working $python: install Python 3.11 or newer, or name one: make ... PYTHON=/path/to/python3.12"
    if [ "$installed" != "$wanted" ]; then
        is_new_enough "$python" ||
            fail "$python is Python ${wanted%% *}, and 3.11 or newer is needed; name one: make ... PYTHON=/path/to/python3.12"
        "$python" -c 'import venv, ensurepip' 2>/dev/null ||
            fail "$python has no venv and ensurepip modules: install them (on Debian and Ubuntu: apt-get install python3-venv)"
        # --clear empties the folder, so it has to be an environment or nothing.
        [ -f "$venv/pyvenv.cfg" ] || [ -z "$(ls -A "$venv" 2>/dev/null)" ] ||
            fail "$venv exists and is no virtual environment: remove it, or name another: make ... VENV=DIRECTORY"
        printf 'Making %s with Python %s.\n' "$venv" "${wanted%% *}"
        "$python" -m venv --clear "$venv" || fail "$python -m venv --clear $venv failed, see above"
    fi
fi
is_new_enough "$venv/bin/python" ||
    fail "$venv holds Python ${installed%% *}, and 3.11 or newer is needed: remove it, or name another: make ... VENV=DIRECTORY"

missing=
for extra in "$@"; do
    is_current "$extra" || missing="$missing $extra"
done
[ -n "$missing" ] || exit 0

# Everything installed before is asked for again, so that pip finds one set of versions for all extras.
mkdir -p "$stamps"
extras=$(for extra in $(ls "$stamps") "$@"; do echo "$extra"; done | sort -u)
list=$(echo $extras | tr ' ' ',')
printf 'Installing gated-delta[%s] into %s (log: %s).\n' "$list" "$venv" "$log"
if ! {
    "$venv/bin/python" -c 'import pip' 2>/dev/null || "$venv/bin/python" -m ensurepip
    PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -e ".[$list]"
} >"$log" 2>&1 </dev/null; then
    tail -n 40 "$log" >&2
    fail "the installation into $venv failed; the end of $log is above"
fi
for extra in $extras; do
    { pwd -P && cat pyproject.toml; } >"$stamps/$extra"
done
