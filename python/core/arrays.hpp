// Arrays of Python's libraries as the library's views, without copies: NumPy, PyTorch and JAX on the CPU, and whatever else speaks DLPack or has a
// buffer. Only what a view can't say is refused here: what is not an array, not on the CPU, of a foreign dtype, or read-only where it is written.
#ifndef TERCET_PYTHON_CORE_ARRAYS_HPP_
#define TERCET_PYTHON_CORE_ARRAYS_HPP_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <vector>

#include "tercet/tercet.hpp"

namespace tercet::python {

namespace nb = nanobind;

// Whose arrays a call gives back: those of the library that made its q.
enum class Library : uint8_t { kNumPy, kTorch, kJax };

// Keeps what views look at alive until the call is over.
struct Held {
  std::vector<nb::ndarray<nb::ro>> read;
  std::vector<nb::ndarray<>> written;
};

Library LibraryOf(nb::handle array);

// Whether torch computes these tensors, or Nones, at once and as they are: they are of its own types, the first is on the CPU, and no gradients are
// recorded, nothing is traced and nothing differentiated forward. False, too, where that can't be told in short.
bool OnlyComputes(const nb::tuple& tensors);
// As many threads as torch takes.
int TorchThreads();
// Whether a tensor is marked for torch.compile as memory that stays where it is, as the buffers of caches are.
bool IsStatic(nb::handle tensor);

// None is a view that is not given. `name` is what errors call the array.
ConstTensor Read(const char* name, nb::handle array, Held* held);
Tensor Write(const char* name, nb::handle array, Held* held);

struct NewArray {
  nb::object array;
  Tensor view;
};
// A new array with nothing in it, dense, in row-major order. JAX's arrays can't be written to: for JAX it is NumPy's, and `Finish` makes it JAX's.
NewArray Empty(Library library, Dtype dtype, int rank, const std::array<int64_t, kMaxRank>& shape, Held* held);
NewArray EmptyBytes(Library library, int64_t bytes, Held* held);
nb::object Finish(Library library, nb::object array);

}  // namespace tercet::python

#endif  // TERCET_PYTHON_CORE_ARRAYS_HPP_
