#!/usr/bin/env bash
# Installs a build into a prefix, moves that, and lets the projects in this folder, in C++ and in C, find and use it: through CMake and through
# pkg-config.
# Usage: install_test.sh CMAKE BUILD_DIR CXX CC VERSION [FLAG...]. The flags are what the library itself must be linked with (a sanitizer).
set -euo pipefail
cmake=$1 build=$2 cxx=$3 cc=$4 version=$5
flags=("${@:6}")
here=$(cd "$(dirname "$0")" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$cmake" --install "$build" --prefix "$work/first" >/dev/null
prefix=$work/elsewhere
mv "$work/first" "$prefix"

# outside SOURCE BUILD [SETTING...]: the project there, found through CMake, built and run.
outside() {
  "$cmake" -S "$1" -B "$2" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF "${@:3}" >/dev/null
  "$cmake" --build "$2" >/dev/null
  "$2/outside"
}
outside "$here" "$work/build" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_CXX_FLAGS="${flags[*]}"
# A C compiler links no sanitizer's runtime for C++.
in_c=$((${#flags[@]} == 0))
if ((in_c)); then outside "$here/c" "$work/build_c" -DCMAKE_C_COMPILER="$cc"; fi

pkgconfig=$(dirname "$(find "$prefix" -name tercet.pc)")
export PKG_CONFIG_PATH=$pkgconfig
[[ $(pkg-config --modversion tercet) == "$version" ]]
read -ra compile < <(pkg-config --cflags tercet)
read -ra link < <(pkg-config --libs tercet)
"$cxx" -std=c++20 "${flags[@]}" "${compile[@]}" "$here/main.cc" -o "$work/by-pkg-config" "${link[@]}"
programs=("$work/by-pkg-config")
if ((in_c)); then
  programs+=("$work/by-pkg-config-c")
  "$cc" -std=c11 "${compile[@]}" "$here/c/main.c" -o "$work/by-pkg-config-c" "${link[@]}"
fi
for program in "${programs[@]}"; do LD_LIBRARY_PATH=$(pkg-config --variable=libdir tercet) "$program"; done

[[ -n $(find "$prefix" -name LICENSE) ]] || { echo "the licence was not installed"; exit 1; }
headers=$(cd "$prefix/include" && find . -type f | sort | xargs)
[[ $headers == "./tercet/tercet.h ./tercet/tercet.hpp" ]] || { echo "installed headers: $headers"; exit 1; }
if [[ -e $build/cli/tercet ]]; then
  [[ $("$prefix/bin/tercet" --version) == *"$version"* ]] || { echo "the installed command does not say version $version"; exit 1; }
fi
if grep -rlIF -e "$build" -e "$work/first" "$prefix"; then
  echo "these installed files name the folder they were built or first installed in"
  exit 1
fi
