#!/usr/bin/env bash
# The doors of the house that stay shut. Usage: tools/check_doors.sh [ROOT]. Prints every line that opens one; exit 1 if there is any.
set -uo pipefail
cd "${1:-$(dirname "$0")/..}" || exit 2

opened=0
# door SENTENCE < LINES: there must be none.
door() {
  local lines
  lines=$(cat)
  [[ -z "$lines" ]] && return
  echo "$1:"
  sed 's/^/  /' <<<"$lines"
  opened=1
}
# search PATTERN PATH...: the matching lines of text files, as path:line:text.
search() { grep -rnIE -e "$1" -- "${@:2}" 2>/dev/null; }
# code PATTERN PATH...: likewise, of C++ and C with strings, comments and preprocessor lines taken out.
code() {
  find "${@:2}" \( -name '*.cc' -o -name '*.hpp' -o -name '*.c' -o -name '*.h' \) -exec env pattern="$1" awk '{
    line = $0
    gsub(/"([^"\\]|\\.)*"/, "\"\"", line)
    sub(/\/\/.*/, "", line)
    sub(/^[ \t]*#.*/, "", line)
    if (line ~ ENVIRON["pattern"]) print FILENAME ":" FNR ":" $0
  }' {} + 2>/dev/null
}
# This script and its test have to spell out what is forbidden.
others() { grep -vE '^(tools/check_doors\.sh|tests/doors_test\.sh):'; }
sources() { find include src cli python bench examples tests -type f \( -name '*.cc' -o -name '*.hpp' -o -name '*.c' -o -name '*.h' -o -name '*.py' \) 2>/dev/null; }

door "rules/ never includes Highway" < <(search '#[[:space:]]*include[[:space:]]*[<"]hwy/' src/rules)

# `delta` and `linear` alone are words of the axes and of English; code that means those rules must say Rule:: or rules::, or include them.
names=$(sed -nE 's/.*kName = "([a-z0-9_]+)".*/\1/p; s/^struct ([A-Za-z0-9]+) \{.*/\1/p' src/rules/*.hpp | grep -vxE 'delta|linear|Delta|Linear|List|Axes' | paste -sd '|')
door "forms/ never names a rule" < <(
  search '\<(Rule::|rules::[A-Z])|src/rules/' src/forms | grep -vE 'rules::Axes|src/rules/axes\.hpp'
  search "\\<($names)\\>" src/forms
)

# What is compiled for every target only lists engines. The format puts spaces around every binary operator, and not around the * and & of a type.
mapfile -t engines < <(grep -rlE 'foreach_target\.h' src/targets 2>/dev/null)
door "targets/ holds no arithmetic" < <(
  ((${#engines[@]} == 0)) || code ' [-+*/%|^] | << | >> |[-+*/%|&^]= ' "${engines[@]}"
  code '(^|[^A-Za-z_])(hn::|(Mul|Add|Sub|Div|MulAdd|NegMulAdd|Exp|Sqrt)\()' src/targets
)
# But for the loops that measure what the machine can do, which are no part of the library.
door "only targets/ uses foreach_target" < <(search 'foreach_target\.h' src cli python tests examples | grep -vE '^(src/targets/|cli/peak\.cc:)' | others)

door "reference/ never includes forms/" < <(search '#[[:space:]]*include[[:space:]]*"src/forms/' src/reference)
door "forms/ never includes reference/" < <(search '#[[:space:]]*include[[:space:]]*"src/reference/' src/forms)

door "no file name holds a dtype or an instruction set" < <(
  sources | grep -iE '[/_.-](bf16|f16|f32|f64|fp16|fp32|fp64|float|double|int8|sse|avx|neon|sve|rvv|x86|arm|aarch)[0-9]*[_.-][^/]*$'
)
door "nothing but the two headers is public" < <(find include -type f | grep -vxE 'include/tercet/tercet\.(hpp|h)')

door "the library never prints or aborts" < <(
  code '(^|[^A-Za-z0-9_])(v?f?printf|f?puts|putchar|perror|abort|_?exit|quick_exit|terminate|assert|__builtin_trap)[ ]?\(' src
  code '(^|[^A-Za-z0-9_])(cout|cerr|clog)([^A-Za-z0-9_]|$)|HWY_D?ASSERT|HWY_ABORT' src
  search '#[[:space:]]*include[[:space:]]*<(iostream|cassert|assert\.h)>' src
)

everything=(include src cli python bench examples tests docs cmake tools .ci README.md CMakeLists.txt CMakePresets.json Makefile)
door "no fast-math, and no instruction set for a whole file" < <(
  search '(-ffast-math|-Ofast|-funsafe-math|-fassociative-math|-ffinite-math|fp-contract=fast|FP_CONTRACT ON|-march=|-mcpu=|-mtune=|[" ]-m(avx|sse|fma))' \
    "${everything[@]}" | others
)
door "nothing is left for later" < <(search '\<(TODO|FIXME|XXX|HACK)\>' "${everything[@]}" | others)
door "no path leads out of the tree" < <(search '(/work/|/home/|/root/|\.\./shared|shared/golden)' "${everything[@]}" | others)

exit $opened
