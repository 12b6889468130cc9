#!/usr/bin/env bash
# Formats the C++ and C sources, or with --check says which are not formatted.
# The style is what clang-format 14 makes of .clang-format. Later versions break some lines otherwise, so others are not asked: where there is no 14,
# the check is skipped and says so.
set -euo pipefail
cd "$(dirname "$0")/.."

format=
for name in clang-format-14 clang-format; do
  if command -v "$name" >/dev/null && [[ "$("$name" --version)" =~ version\ 14\. ]]; then
    format=$name
    break
  fi
done
if [[ -z "$format" ]]; then
  echo "format: skipped, there is no clang-format 14 here" >&2
  [[ "${1:-}" == --check ]] && exit 0
  exit 1
fi

mapfile -d '' -t sources < <(find cli examples include python src tests \( -name '*.cc' -o -name '*.hpp' -o -name '*.c' -o -name '*.h' \) -print0)
if [[ "${1:-}" == --check ]]; then
  "$format" --dry-run -Werror "${sources[@]}"
else
  "$format" -i "${sources[@]}"
fi
