# The two main commands are `make verify` and `make test`. Both install what is missing and work in a fresh clone.


PYTHON_TESTS = tests/python/requirements.txt

.PHONY: verify test test-peers wheel test-asan test-tsan test-aarch64 fuzz bench setup format check-doors clean

verify:
	tools/setup.sh build
	cmake --preset release -DTERCET_BUILD_TESTS=OFF -DTERCET_BUILD_PYTHON=OFF
	cmake --build --preset release
	build/release/cli/tercet verify

test:
	tools/setup.sh build test python
	tools/venv.sh $(PYTHON_TESTS)
	cmake --preset release -DTERCET_BUILD_TESTS=ON -DTERCET_BUILD_PYTHON=ON -DPython_EXECUTABLE="$(CURDIR)/build/venv/bin/python"
	cmake --build --preset release
	ctest --preset release

# `make test` with PyTorch, JAX, transformers and the rest that Python's tests need, about two gigabytes. They stay for later runs.
test-peers:
	tools/setup.sh python
	tools/venv.sh $(PYTHON_TESTS) tests/python/requirements-peers.txt
	build/venv/bin/python -m pip install -q --no-deps fla-core==0.6.0  # its naive references; what it asks for besides is for a GPU
	$(MAKE) test

# A wheel that needs nothing of the machine it comes to, in dist/, with the licence texts of what is in it of others.
wheel:
	tools/setup.sh build python
	tools/venv.sh $(PYTHON_TESTS) tools/wheel-requirements.txt
	rm -rf build/wheel
	build/venv/bin/python -m pip wheel -q --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/build/venv/bin:$$PATH" auditwheel repair --wheel-dir build/wheel/repaired build/wheel/*.whl
	build/venv/bin/python tools/wheel_licences.py build/wheel/*.whl build/wheel/repaired/*.whl dist

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
	tools/setup.sh build test python ci

format:
	tools/format.sh

check-doors:
	tools/check_doors.sh

clean:
	rm -rf build
