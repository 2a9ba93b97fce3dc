#!/bin/sh
# usage: scripts/peer_venv.sh NAME [VERSION]
#
# Make .venv-NAME hold peers for the benchmarks: what benchmarks/NAME.txt lists, on this version of Python (3.12), one that
# runs: $PYTHON312 (or $PYTHON311, ...), python3.12, or pyenv's. Peers that cannot be installed are named, and are left out.
set -eu
cd "$(dirname "$0")/.."

venv=.venv-$1
version=${2:-3.12}
cmp -s "benchmarks/$1.txt" "$venv/installed.txt" && exit 0

variable=PYTHON$(printf '%s' "$version" | tr -d .)
given=$(printenv "$variable" || true)
python=
for candidate in "$given" "python$version" "$(pyenv prefix "$version" 2>/dev/null || true)/bin/python"; do
    if [ -n "$candidate" ] && "$candidate" --version >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    printf '%s is left out: it needs Python %s (%s=/path/to/python%s).\n' "$1" "$version" "$variable" "$version" >&2
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
