#!/usr/bin/env bash
# The pages say what the code says: every block of C++, C and CMake in the README, docs/cpp.md and docs/c.md stands word for word in a file that is
# compiled; the README's sample of the command is one from docs/cli.md, whose own test runs it; docs/rules.md has every rule's name, equation and other
# names as its header has them. Usage: quotes_test.sh SOURCE_DIR
set -euo pipefail
cd "$1"

blocks=$(mktemp -d)
trap 'rm -rf "$blocks"' EXIT
for page in README.md docs/cpp.md docs/c.md; do
  awk -v stem="$blocks/$(basename "$page" .md)" '
    /^```(cpp|c|cmake)$/ { inside = 1; file = stem "." ++count; next }
    /^```/ { inside = 0; next }
    inside { print > file }' "$page"
  compgen -G "$blocks/$(basename "$page" .md).*" >/dev/null || { echo "$page quotes nothing"; exit 1; }
done

failed=0
for block in "$blocks"/*; do
  text=$(cat "$block")
  found=0
  for file in examples/*.cc examples/*.c include/tercet/tercet.hpp tests/install/CMakeLists.txt tests/install/c/CMakeLists.txt; do
    if [[ "$(cat "$file")" == *"$text"* ]]; then found=1; fi
  done
  if ((found == 0)); then
    echo "this block of $(basename "$block") stands in no file that is compiled:"
    cat "$block"
    failed=1
  fi
done

# Numbers that rounding may change are compared as #.
numberless() { sed -E 's/[0-9]+/#/g'; }
sample=$(awk '/^```console$/ { inside = 1; next } /^```/ { inside = 0 } inside && !/^ *\.\.\.$/ && NF' README.md)
[[ -n "$sample" ]] || { echo "the README has no sample of the command"; failed=1; }
while IFS= read -r line; do
  if ! grep -qxF -e "$(numberless <<<"$line")" <(numberless <docs/cli.md); then
    echo "the README's sample has a line that docs/cli.md has not: $line"
    failed=1
  fi
done <<<"$sample"

rules=0
for header in src/rules/*.hpp; do
  name=$(sed -nE 's/.*kName = "(.*)";/\1/p' "$header")
  [[ -n "$name" ]] || continue
  rules=$((rules + 1))
  for constant in kEquation kAlsoKnownAs; do
    said=$(sed -nE "s/.*$constant = \"(.*)\";/\1/p" "$header")
    if [[ -z "$said" ]] || ! grep -qF "$said" docs/rules.md; then
      echo "docs/rules.md lacks $name's $constant: $said"
      failed=1
    fi
  done
  for page in README.md docs/rules.md; do
    grep -qF "| \`$name\` |" "$page" || { echo "$page has no line for $name"; failed=1; }
  done
done
((rules > 0)) || failed=1
exit $failed
