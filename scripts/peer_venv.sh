#!/bin/sh
# usage: scripts/peer_venv.sh NAME
#
# Make .venv-NAME hold a peer for the benchmarks: what benchmarks/NAME.txt lists, on Python 3.12 ($PYTHON312, a python3.12 that
# runs, or pyenv's). A peer that cannot be installed is named, and the benchmark leaves it out.
set -eu
cd "$(dirname "$0")/.."

venv=.venv-$1
cmp -s "benchmarks/$1.txt" "$venv/installed.txt" && exit 0

python=
for candidate in "${PYTHON312:-}" python3.12 "$(pyenv prefix 3.12 2>/dev/null || true)/bin/python"; do
    if [ -n "$candidate" ] && "$candidate" --version >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    printf '%s is left out: it needs Python 3.12 (PYTHON312=/path/to/python3.12).\n' "$1" >&2
    exit 0
fi
printf 'Installing %s into %s.\n' "$1" "$venv"
"$python" -m venv --clear "$venv"
if "$venv/bin/python" -m pip install -q -r "benchmarks/$1.txt" >"$venv/install.log" 2>&1; then
    cp "benchmarks/$1.txt" "$venv/installed.txt"
else
    tail -n 5 "$venv/install.log" >&2
    printf '%s is left out: it could not be installed (%s/install.log).\n' "$1" "$venv" >&2
    rm -rf "$venv/bin"
fi
