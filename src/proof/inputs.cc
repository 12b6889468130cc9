#include "src/proof/inputs.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string_view>

#include "src/contract/half.hpp"
#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/rules/all.hpp"

namespace tercet::proof {

namespace {

int64_t Product(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

template <class T>
void Store(double value, std::byte* at) {
  const T rounded = static_cast<T>(value);
  std::memcpy(at, &rounded, sizeof(T));
}

// Rounded once: what float can't hold is made odd in its last bit, which no later rounding takes for a tie.
template <class Half>
void StoreHalf(double value, std::byte* at) {
  auto narrow = static_cast<float>(value);
  if (std::abs(static_cast<double>(narrow)) > std::abs(value)) narrow = std::nextafter(narrow, 0.0f);
  if (static_cast<double>(narrow) != value && std::isfinite(narrow)) narrow = std::bit_cast<float>(std::bit_cast<uint32_t>(narrow) | 1u);
  const Half rounded = contract::Narrow<Half>(narrow);
  std::memcpy(at, &rounded, sizeof(Half));
}

template <class View, class Data>
View ViewOf(const Owned& owned, Data* data) {
  View view;
  view.data = data;
  view.dtype = owned.dtype;
  view.rank = static_cast<int>(owned.shape.size());
  int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    view.shape[axis] = owned.shape[axis];
    view.strides[axis] = stride;
    stride *= owned.shape[axis];
  }
  return view;
}

// Random numbers made of integers, sums, square roots and divisions alone, which every machine computes alike; logarithms and cosines differ.
class Numbers {
 public:
  // A stream of its own for every tensor, so that one tensor more or less leaves the others as they are.
  Numbers(uint64_t seed, std::string_view tensor) {
    std::vector<uint32_t> words = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (const char letter : tensor) words.push_back(static_cast<unsigned char>(letter));
    std::seed_seq sequence(words.begin(), words.end());
    words_.seed(sequence);
  }

  // In (0, 1), never 0 or 1.
  double Uniform() { return (static_cast<double>(words_() >> 12) + 0.5) * 0x1p-52; }

  // Normal, as the sum of eight uniform numbers is: mean 0, variance 1, at most 4.9.
  double Normal() {
    int64_t sum = 0;
    for (int word = 0; word < 2; ++word) {
      const uint64_t bits = words_();
      for (int shift = 0; shift < 64; shift += 16) sum += static_cast<int64_t>((bits >> shift) & 0xffff);
    }
    return (static_cast<double>(sum) - 4 * 65535.0) / (65536 * std::sqrt(8.0 / 12));
  }

  // Between 2^-10 and 1, as likely in each of the ten powers of two.
  double InPowers() {
    const auto power = static_cast<int>(words_() % 10);  // before the next number: compilers differ in the order of arguments
    return std::ldexp((1 + Uniform()) / 2, -power);
  }

 private:
  std::mt19937_64 words_;
};

template <class Number>
Owned Fill(uint64_t seed, Dtype dtype, std::string_view name, std::vector<int64_t> shape, Number number) {
  Owned tensor = Owned::Zeros(dtype, std::move(shape));
  Numbers numbers(seed, name);
  for (int64_t i = 0; i < tensor.size(); ++i) tensor.Set(i, number(numbers));
  return tensor;
}

// Rows of unit norm along the last axis.
void Normalize(Owned* tensor) {
  const int64_t n = tensor->shape.back();
  for (int64_t begin = 0; begin < tensor->size(); begin += n) {
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += tensor->Get(begin + i) * tensor->Get(begin + i);
    const double norm = std::sqrt(squares);
    for (int64_t i = 0; i < n; ++i) tensor->Set(begin + i, tensor->Get(begin + i) / norm);
  }
}

}  // namespace

Owned Owned::Zeros(Dtype dtype, std::vector<int64_t> shape) {
  Owned tensor;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.bytes.resize(Product(tensor.shape) * contract::SizeOf(dtype));
  return tensor;
}

int64_t Owned::size() const { return shape.empty() ? 0 : Product(shape); }

double Owned::Get(int64_t i) const { return contract::ReadDouble(view(), i); }

void Owned::Set(int64_t i, double value) {
  std::byte* at = bytes.data() + i * contract::SizeOf(dtype);
  switch (dtype) {
    case Dtype::kF32:
      return Store<float>(value, at);
    case Dtype::kF64:
      return Store<double>(value, at);
    case Dtype::kBF16:
      return StoreHalf<BFloat16>(value, at);
    case Dtype::kF16:
      return StoreHalf<Float16>(value, at);
    case Dtype::kI32:
      return Store<int32_t>(value, at);
    case Dtype::kI64:
      return Store<int64_t>(value, at);
    case Dtype::kBool:
      return Store<uint8_t>(value != 0 ? 1 : 0, at);
  }
}

ConstTensor Owned::view() const { return ViewOf<ConstTensor>(*this, bytes.data()); }
Tensor Owned::mutable_view() { return ViewOf<Tensor>(*this, bytes.data()); }

Inputs OwnedInputs::view() const {
  Inputs inputs;
  inputs.q = q.view();
  inputs.k = k.view();
  inputs.v = v.view();
  inputs.log_decay = log_decay.view();
  inputs.beta = beta.view();
  inputs.remove = remove.view();
  inputs.write = write.view();
  inputs.bonus = bonus.view();
  inputs.initial_state = initial_state.view();
  inputs.initial_key_sum = initial_key_sum.view();
  inputs.offsets = offsets.view();
  inputs.valid = valid.view();
  return inputs;
}

OwnedInputs RandomInputs(const RandomSpec& spec) {
  const rules::Axes axes = rules::AxesOf(spec.rule);
  const int64_t B = spec.batch, T = spec.tokens, K = spec.key_dim, V = spec.value_dim;
  const int64_t q_heads = spec.q_heads.value_or(spec.heads), k_heads = spec.k_heads.value_or(spec.heads), v_heads = spec.v_heads.value_or(spec.heads);
  const int64_t gate_heads = spec.gate_heads.value_or(spec.heads), state_heads = std::max(k_heads, v_heads);
  const int64_t sequences = spec.offsets.empty() ? B : static_cast<int64_t>(spec.offsets.size()) - 1;
  const Dtype gate_dtype = spec.gate_dtype.value_or(spec.dtype), state_dtype = contract::StateDtype(spec.dtype);
  const auto fill = [&](Dtype dtype, std::string_view name, std::vector<int64_t> shape, auto number) {
    return Fill(spec.seed, dtype, name, std::move(shape), number);
  };
  const auto normal = [](Numbers& numbers) { return numbers.Normal(); };
  const auto uniform = [](Numbers& numbers) { return numbers.Uniform(); };
  const auto log_decay = [](Numbers& numbers) { return -numbers.InPowers(); };
  const double root = std::sqrt(static_cast<double>(K));

  OwnedInputs in;
  in.q = fill(spec.dtype, "q", {B, T, q_heads, K}, normal);
  in.k = fill(spec.dtype, "k", {B, T, k_heads, K}, [&](Numbers& numbers) { return numbers.Normal() / root; });
  in.v = fill(spec.dtype, "v", {B, T, v_heads, V}, normal);
  if (axes.decay == Decay::kPerHead) in.log_decay = fill(gate_dtype, "log_decay", {gate_heads}, log_decay);
  if (axes.decay == Decay::kPerStep) in.log_decay = fill(gate_dtype, "log_decay", {B, T, gate_heads}, log_decay);
  if (axes.decay == Decay::kPerChannel) in.log_decay = fill(gate_dtype, "log_decay", {B, T, gate_heads, K}, log_decay);
  if (axes.update == Update::kDelta) {
    Normalize(&in.k);
    in.beta = fill(gate_dtype, "beta", {B, T, gate_heads}, uniform);
    if (spec.feature_map == FeatureMap::kEluPlusOne) {
      // I - beta k k' must not stretch, so beta k'k stays below 1 for the largest k of any head: elu(x) + 1 is at most 1 + max(x, 0).
      for (int64_t token = 0; token < B * T; ++token) {
        double most = 1;
        for (int64_t head = 0; head < k_heads; ++head) {
          double squares = 0;
          for (int64_t c = 0; c < K; ++c) {
            const double bound = 1 + std::max(0.0, in.k.Get((token * k_heads + head) * K + c));
            squares += bound * bound;
          }
          most = std::max(most, squares);
        }
        for (int64_t i = token * gate_heads; i < (token + 1) * gate_heads; ++i) in.beta.Set(i, in.beta.Get(i) / most);
      }
    }
  }
  if (axes.update == Update::kRankOne) {
    // D - a kappa kappa' is symmetric with eigenvalues from -1 to 1, so the state's norm grows by no more than what is written.
    in.remove = fill(gate_dtype, "remove", {B, T, gate_heads, K}, normal);
    Normalize(&in.remove);
    in.write = in.remove;
    Numbers a(spec.seed, "write");
    for (int64_t begin = 0; begin < in.write.size(); begin += K) {
      const double rate = a.Uniform();
      for (int64_t i = begin; i < begin + K; ++i) {
        in.write.Set(i, rate * in.write.Get(i));
        in.remove.Set(i, -in.remove.Get(i));
      }
    }
  }
  if (axes.update == Update::kAddReadBefore) in.bonus = fill(gate_dtype, "bonus", {gate_heads, K}, normal);
  if (spec.initial_state) {
    in.initial_state = fill(state_dtype, "initial_state", {sequences, state_heads, K, V}, normal);
    if (spec.normalize)
      in.initial_key_sum =
          fill(state_dtype, "initial_key_sum", {sequences, state_heads, K}, [](Numbers& numbers) { return 0.5 + numbers.Uniform(); });
  }
  if (!spec.offsets.empty()) {
    in.offsets = Owned::Zeros(Dtype::kI64, {sequences + 1});
    for (int64_t n = 0; n <= sequences; ++n) in.offsets.Set(n, static_cast<double>(spec.offsets[n]));
  }
  if (spec.valid_fraction < 1) {
    in.valid = Owned::Zeros(Dtype::kBool, {B, T});
    Numbers numbers(spec.seed, "valid");
    for (int64_t i = 0; i < in.valid.size(); ++i) in.valid.Set(i, numbers.Uniform() < spec.valid_fraction ? 1 : 0);
  }
  return in;
}

OwnedOutputGradients RandomOutputGradients(const contract::Layer& layer, uint64_t seed) {
  const auto normal = [](Numbers& numbers) { return numbers.Normal(); };
  OwnedOutputGradients d;
  d.out = Fill(seed, layer.dtype, "gradient of out", {layer.batch, layer.tokens, layer.out_heads, layer.value_dim}, normal);
  d.final_state =
      Fill(seed, layer.state_dtype(), "gradient of final_state", {layer.sequences, layer.state_heads, layer.key_dim, layer.value_dim}, normal);
  if (layer.normalize)
    d.final_key_sum = Fill(seed, layer.state_dtype(), "gradient of final_key_sum", {layer.sequences, layer.state_heads, layer.key_dim}, normal);
  return d;
}

}  // namespace tercet::proof
