#!/usr/bin/env bash
# The shared library exports what the headers mark TERCET_API, and nothing else. Usage: exports_test.sh NM LIBRARY CPP_HEADER C_HEADER
set -euo pipefail
nm=$1 library=$2 cpp=$3 c=$4

exported=$("$nm" -D --defined-only -C "$library" | sed -E 's/^[0-9a-f]+ [A-Za-z] //; s/\(.*//; s/\[abi:[a-z0-9]+\]//' | sort -u)
# names HEADER PREFIX: the marked functions of a header, as the library has them.
names() {
  local found
  found=$(sed -nE "s/.*TERCET_API [^(]*[ &*]([A-Za-z0-9_]+)\(.*/$2\1/p" "$1")
  [[ -n "$found" ]] || { echo "no public name found in $1" >&2; exit 1; }
  echo "$found"
}
public=$({ names "$cpp" tercet:: && names "$c" ""; } | sort -u)
diff <(echo "$public") <(echo "$exported") || { echo "left: public in the headers; right: exported by the library"; exit 1; }
