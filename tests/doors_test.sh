#!/usr/bin/env bash
# The doors are shut in this tree, and each one, opened in a copy, is seen. Usage: doors_test.sh SOURCE_DIR
set -euo pipefail
source_dir=$1
check=$source_dir/tools/check_doors.sh
"$check" "$source_dir"

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
failed=0
# opens SENTENCE FILE LINE: a tree with that line in that file must be refused for that reason.
opens() {
  rm -rf "${copy:?}"/*
  mkdir -p "$copy/src/rules" "$copy/src/forms" "$copy/src/targets" "$copy/src/reference" "$copy/include/tercet" "$copy/$(dirname "$2")"
  cp "$source_dir"/src/rules/*.hpp "$copy/src/rules"
  printf '#include "hwy/foreach_target.h"\n' >"$copy/src/targets/chunkwise.cc"
  "$check" "$copy" || { echo "the tree was not clean before: $1"; failed=1; }
  printf '%s\n' "$3" >>"$copy/$2"
  local said
  if said=$("$check" "$copy") || ! grep -qF "$1:" <<<"$said"; then
    echo "not seen: $1: $2: $3"
    failed=1
  fi
}

opens "rules/ never includes Highway" src/rules/linear.hpp '#include <hwy/highway.h>'
opens "rules/ never includes Highway" src/rules/new.hpp '#include "hwy/highway.h"'
opens "forms/ never names a rule" src/forms/chunkwise-inl.h 'if (rule == Rule::kDelta) return;'
opens "forms/ never names a rule" src/forms/chunkwise-inl.h '#include "src/rules/all.hpp"'
opens "forms/ never names a rule" src/forms/chunkwise-inl.h 'void StepGatedDelta();  // gated_delta alone'
opens "forms/ never names a rule" src/forms/chunkwise-inl.h 'template void Run<rules::Delta>();'
opens "targets/ holds no arithmetic" src/targets/chunkwise.cc '  const int64_t chunks = (tokens - 1) / chunk;'
opens "targets/ holds no arithmetic" src/targets/chunkwise.cc '  sum += x;'
opens "targets/ holds no arithmetic" src/targets/other.cc '  return hn::Mul(a, b);'
opens "only targets/ uses foreach_target" src/forms/chunkwise-inl.h '#include "hwy/foreach_target.h"'
opens "only targets/ uses foreach_target" cli/run.cc '#include "hwy/foreach_target.h"'
opens "only targets/ uses foreach_target" tests/a_test.cc '#include <hwy/foreach_target.h>'
opens "reference/ never includes forms/" src/reference/forms.hpp '#include "src/forms/verbs-inl.h"'
opens "forms/ never includes reference/" src/forms/verbs-inl.h '#include "src/reference/forms.hpp"'
opens "no file name holds a dtype or an instruction set" src/forms/chunkwise_f32-inl.h '//'
opens "no file name holds a dtype or an instruction set" src/forms/avx512_verbs.hpp '//'
opens "nothing but the two headers is public" include/tercet/detail.hpp '//'
opens "the library never prints or aborts" src/attend.cc '  std::abort();'
opens "the library never prints or aborts" src/attend.cc '  printf("%d", x);'
opens "the library never prints or aborts" src/attend.cc '  std::cerr << x;'
opens "the library never prints or aborts" src/attend.cc '  HWY_ASSERT(x);'
opens "the library never prints or aborts" src/attend.cc '#include <cassert>'
opens "no fast-math, and no instruction set for a whole file" CMakeLists.txt 'add_compile_options(-ffast-math)'
opens "no fast-math, and no instruction set for a whole file" CMakeLists.txt 'set_source_files_properties(a.cc PROPERTIES COMPILE_OPTIONS "-mavx2")'
opens "no fast-math, and no instruction set for a whole file" CMakeLists.txt 'add_compile_options(-march=native)'
opens "nothing is left for later" src/attend.cc '// TODO: later'
opens "no path leads out of the tree" tests/CMakeLists.txt 'set(golden ..'/shared/golden')'
exit $failed
