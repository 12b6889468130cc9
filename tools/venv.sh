#!/usr/bin/env bash
# The virtual environment build/venv, of the Python found first, with what the named requirements files list. Usage: tools/venv.sh FILE...
# Where nothing has changed since, it asks no network.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/venv
stamp=$(cat "$@" | sha256sum | cut -d ' ' -f 1)
if [[ -x $venv/bin/python && -e $venv/stamp-$stamp ]]; then
  exit 0
fi
[[ -x $venv/bin/python ]] || python3 -m venv $venv
echo "venv: installing $* into $venv"
options=()
for file in "$@"; do options+=(-r "$file"); done
$venv/bin/python -m pip install -q --disable-pip-version-check "${options[@]}"
touch $venv/stamp-"$stamp"
