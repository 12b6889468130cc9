# A toolchain file: Debian's cross compiler for aarch64 and the libraries of its architecture arm64, on a machine of another architecture; what is
# built is run by QEMU. `make test-aarch64` uses it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)

# Debian keeps the libraries of all architectures in one tree, each in a folder of its own, so no other root is to be searched. CMake finds the folder
# by the compiler, pkg-config has to be told.
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig)
