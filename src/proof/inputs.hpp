// Tensors that own their memory, and random ones that a layer can stand: what the command, the tests and the benchmarks feed to Attend.
#ifndef TERCET_SRC_PROOF_INPUTS_HPP_
#define TERCET_SRC_PROOF_INPUTS_HPP_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <optional>
#include <vector>

#include "tercet/tercet.hpp"

namespace tercet::contract {
struct Layer;
}

namespace tercet::proof {

// Memory that begins with a cache line, as the arrays of NumPy's and PyTorch's allocators do: else every row of a benchmark would straddle one more.
template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
};

// A dense row-major tensor that owns its bytes. Rank 0: not given.
struct Owned {
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte, LineAllocator<std::byte>> bytes;

  static Owned Zeros(Dtype dtype, std::vector<int64_t> shape);
  int64_t size() const;
  double Get(int64_t i) const;        // element i in row-major order, as a double
  void Set(int64_t i, double value);  // rounded to the dtype
  ConstTensor view() const;
  Tensor mutable_view();
};

struct OwnedInputs {
  Owned q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum, offsets, valid;
  Inputs view() const;
};

struct RandomSpec {
  Rule rule = Rule::kLinear;
  Dtype dtype = Dtype::kF32;        // of q, k and v
  std::optional<Dtype> gate_dtype;  // of log_decay, beta, remove, write and bonus; default: dtype
  int64_t batch = 1, tokens = 96, key_dim = 32, value_dim = 32;
  int64_t heads = 2;
  std::optional<int64_t> q_heads, k_heads, v_heads, gate_heads;  // default: heads
  FeatureMap feature_map = FeatureMap::kIdentity;                // that the layer will have: the delta rules need a beta to suit it
  bool normalize = false;                                        // then an initial key sum that is positive is made with the initial state
  bool initial_state = true;
  std::vector<int64_t> offsets;  // packed sequences; empty: none
  double valid_fraction = 1;     // below 1: a `valid` mask with so many true
  uint64_t seed = 1;
};

// Random inputs under which no rule's state grows without bound: q, v normal; k normal over sqrt(K), of unit norm for the delta rules; log_decay
// between -2^-10 and -1, as likely in each power of two; beta in (0, 1), for elu_plus_one over a bound of the features' squares; remove = -kappa,
// write = kappa a with kappa of unit norm and a in (0, 1).
// Numbers are drawn in double and rounded to the dtype. The same spec gives the same numbers on every machine.
OwnedInputs RandomInputs(const RandomSpec& spec);

struct OwnedOutputGradients {
  Owned out, final_state, final_key_sum;
  OutputGradients view() const { return {out.view(), final_state.view(), final_key_sum.view()}; }
};

// Normal numbers in the shapes and dtypes of what the layer gives, drawn likewise.
OwnedOutputGradients RandomOutputGradients(const contract::Layer& layer, uint64_t seed);

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_INPUTS_HPP_
