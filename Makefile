# The two main commands are `make verify` and `make test`. Both install what is missing and work in a fresh clone.


.PHONY: verify test test-asan test-tsan test-aarch64 fuzz bench setup format check-doors clean

verify:
	tools/setup.sh build
	cmake --preset release -DTERCET_BUILD_TESTS=OFF
	cmake --build --preset release
	build/release/cli/tercet verify

test:
	tools/setup.sh build test
	cmake --preset release -DTERCET_BUILD_TESTS=ON
	cmake --build --preset release
	ctest --preset release

test-asan test-tsan: test-%:
	tools/setup.sh build test ci
	cmake --preset $*
	cmake --build --preset $*
	ctest --preset $*

# For aarch64, cross-compiled and run by QEMU.
test-aarch64:
	tools/setup.sh build aarch64
	cmake --preset aarch64
	cmake --build --preset aarch64
	qemu-aarch64 build/aarch64/cli/tercet verify
	ctest --preset aarch64

# Every reader of files for five minutes.
fuzz:
	tools/setup.sh build test ci
	cmake --preset fuzz
	cmake --build --preset fuzz --target fuzz_safetensors fuzz_npy fuzz_npz
	tools/fuzz.sh 300

bench:
	tools/setup.sh build
	cmake --preset release
	cmake --build --preset release --target tercet_cli
	build/release/cli/tercet bench

setup:
	tools/setup.sh build test ci

format:
	tools/format.sh

check-doors:
	tools/check_doors.sh

clean:
	rm -rf build
