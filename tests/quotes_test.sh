#!/usr/bin/env bash
# Every block of C++ and CMake in the README and in docs/cpp.md stands word for word in a file that is compiled. Usage: quotes_test.sh SOURCE_DIR
set -euo pipefail
cd "$1"

blocks=$(mktemp -d)
trap 'rm -rf "$blocks"' EXIT
for page in README.md docs/cpp.md; do
  awk -v stem="$blocks/$(basename "$page" .md)" '
    /^```(cpp|cmake)$/ { inside = 1; file = stem "." ++count; next }
    /^```/ { inside = 0; next }
    inside { print > file }' "$page"
  compgen -G "$blocks/$(basename "$page" .md).*" >/dev/null || { echo "$page quotes nothing"; exit 1; }
done

failed=0
for block in "$blocks"/*; do
  text=$(cat "$block")
  found=0
  for file in examples/*.cc include/tercet/tercet.hpp tests/install/CMakeLists.txt; do
    if [[ "$(cat "$file")" == *"$text"* ]]; then found=1; fi
  done
  if ((found == 0)); then
    echo "this block of $(basename "$block") stands in no file that is compiled:"
    cat "$block"
    failed=1
  fi
done
exit $failed
