#!/usr/bin/env bash
# The shared library exports what the header marks TERCET_API, and nothing else. Usage: exports_test.sh NM LIBRARY HEADER
set -euo pipefail
nm=$1 library=$2 header=$3

exported=$("$nm" -D --defined-only -C "$library" | sed -E 's/^[0-9a-f]+ [A-Za-z] //; s/\(.*//; s/\[abi:[a-z0-9]+\]//' | sort -u)
public=$(sed -nE 's/.*TERCET_API [^(]*[ &*]([A-Za-z0-9_]+)\(.*/tercet::\1/p' "$header" | sort -u)
[[ -n "$public" ]] || { echo "no public name found in $header"; exit 1; }
diff <(echo "$public") <(echo "$exported") || { echo "left: public in the header; right: exported by the library"; exit 1; }
