// bf16 and f16: conversions bit for bit, and what the layer makes of them on every target.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <vector>

#include "src/contract/half.hpp"
#include "src/contract/tensor.hpp"
#include "src/floating_mode.hpp"
#include "tests/support.hpp"

namespace tercet::test {
namespace {

constexpr uint32_t kSign = 0x80000000u, kInf = 0x7F800000u;

struct Format {
  Dtype dtype;
  int exponent_bits, fraction_bits;
};
constexpr Format kBfloat{Dtype::kBF16, 8, 7}, kHalf{Dtype::kF16, 5, 10};

bool IsNan(const Format& f, uint32_t bits) { return (bits & 0x7FFFu) > ((1u << f.exponent_bits) - 1) << f.fraction_bits; }

// The value of the bits, by the definition of the format.
double Value(const Format& f, uint32_t bits) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1;
  const auto exponent = static_cast<int>(bits >> f.fraction_bits & static_cast<uint32_t>(top));
  const double fraction = std::ldexp(static_cast<double>(bits & ((1u << f.fraction_bits) - 1)), -f.fraction_bits);
  const double size = exponent == top ? (fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN())
                                      : std::ldexp(exponent == 0 ? fraction : 1 + fraction, std::max(exponent, 1) - bias);
  return bits >> 15 != 0 ? -size : size;
}

float Widened(const Format& f, uint32_t bits) {
  const auto half = static_cast<uint16_t>(bits);
  return f.dtype == Dtype::kBF16 ? contract::Widen(BFloat16{half}) : contract::Widen(Float16{half});
}
uint32_t Narrowed(const Format& f, float x) {
  return f.dtype == Dtype::kBF16 ? contract::Narrow<BFloat16>(x).bits : contract::Narrow<Float16>(x).bits;
}

// Every float at which rounding can go wrong: each number of the format, the middle between it and the next one away from zero (after the largest:
// what rounds to inf from there on), and the neighbours of the middle; with both signs. The rounded bits beside each.
std::vector<std::pair<float, uint32_t>> Roundings(const Format& f) {
  std::vector<std::pair<float, uint32_t>> roundings;
  const uint32_t inf = ((1u << f.exponent_bits) - 1) << f.fraction_bits;
  for (uint32_t bits = 0; bits <= inf; ++bits) {
    for (const uint32_t sign : {0u, 0x8000u}) {
      const auto add = [&](double x, uint32_t rounded) {
        const auto exact = static_cast<float>(x);
        ASSERT_EQ(static_cast<double>(exact), x);
        roundings.emplace_back(sign != 0 ? -exact : exact, rounded | sign);
      };
      const double x = Value(f, bits);
      add(x, bits);
      if (bits == inf) continue;
      // Where the next number is inf, it stands for the number that would follow.
      const double step = bits + 1 == inf ? x - Value(f, bits - 1) : Value(f, bits + 1) - x;
      const auto middle = static_cast<float>(x + step / 2);
      add(static_cast<double>(middle), bits + (bits & 1));
      add(static_cast<double>(std::nextafter(middle, 0.0f)), bits);
      add(static_cast<double>(std::nextafter(middle, std::numeric_limits<float>::infinity())), bits + 1);
    }
  }
  return roundings;
}

class Halves : public testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Of, Halves, testing::Values(kBfloat, kHalf), [](const auto& instance) { return std::string(Name(instance.param.dtype)); });

TEST_P(Halves, WidenExactly) {
  const Format& f = GetParam();
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float wide = Widened(f, bits);
    const double value = Value(f, bits);
    if (IsNan(f, bits)) {
      EXPECT_TRUE(std::isnan(wide)) << bits;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(wide), std::bit_cast<uint32_t>(static_cast<float>(value))) << bits;
    }
    // The same where small numbers are zero.
    const FloatingMode mode;
    ASSERT_EQ(std::bit_cast<uint32_t>(Widened(f, bits)), std::bit_cast<uint32_t>(wide));
  }
}

TEST_P(Halves, NarrowToNearestEven) {
  const Format& f = GetParam();
  const auto roundings = Roundings(f);
  ASSERT_GT(roundings.size(), 8 * (31u << 10));
  for (const auto& [x, rounded] : roundings) {
    ASSERT_EQ(Narrowed(f, x), rounded) << x;
    const FloatingMode mode;
    ASSERT_EQ(Narrowed(f, x), rounded) << x;
  }
  for (uint32_t bits = kInf + 1; bits < kSign; bits += 4093) {
    for (const uint32_t sign : {0u, kSign}) {
      const uint32_t narrow = Narrowed(f, std::bit_cast<float>(bits | sign));
      EXPECT_TRUE(IsNan(f, narrow)) << bits;
      EXPECT_NE(narrow & (1u << (f.fraction_bits - 1)), 0u) << "a NaN that is not quiet: " << bits;
      EXPECT_EQ(narrow >> 15, sign >> 31);
    }
  }
}

// The element type, the dtype and the bytes agree.
TEST(Halves, AreElementTypes) {
  const BFloat16 b[2] = {{0x3F80}, {0xC040}};
  const Float16 h[2] = {{0x3C00}, {0xC200}};
  for (const ConstTensor& t : {View(b, {2}), View(h, {2})}) {
    EXPECT_EQ(contract::SizeOf(t.dtype), 2);
    EXPECT_EQ(contract::ReadDouble(t, 0), 1);
    EXPECT_EQ(contract::ReadDouble(t, 1), -3);
  }
  EXPECT_EQ(Name(View(b, {2}).dtype), "bf16");
  EXPECT_EQ(Name(View(h, {2}).dtype), "f16");
}

// A tensor's elements from double are rounded once: just above a tie goes up, where a float on the way would fall on the tie.
TEST_P(Halves, OfDoublesAreRoundedOnce) {
  const Format& f = GetParam();
  Owned one = Owned::Zeros(f.dtype, {1});
  const double half_step = std::ldexp(1.0, -f.fraction_bits - 1);
  for (const double sign : {1.0, -1.0}) {
    one.Set(0, sign * (1 + half_step));
    EXPECT_EQ(one.Get(0), sign);
    one.Set(0, sign * (1 + half_step + 0x1p-40));
    EXPECT_EQ(one.Get(0), sign * (1 + 2 * half_step));
    one.Set(0, sign * (1 + 3 * half_step - 0x1p-40));
    EXPECT_EQ(one.Get(0), sign * (1 + 2 * half_step));
    one.Set(0, sign * 1e300);
    EXPECT_EQ(one.Get(0), sign * std::numeric_limits<double>::infinity());
  }
}

// ---- Through the layer: one token and one channel, so that out = q S and S = k v' -----------------------------------------------------------

// Rows of `columns` numbers, from an address that is not even a multiple of two where `odd`, every `stride`th element.
struct Row {
  std::vector<std::byte> memory;
  Tensor view;

  Row(Dtype dtype, int64_t columns, int64_t stride, bool odd) {
    const int64_t size = contract::SizeOf(dtype);
    memory.assign(static_cast<size_t>(columns * stride * size + 1), std::byte{0x5A});
    view.data = memory.data() + odd;
    view.dtype = dtype;
    view.rank = 4;
    view.shape = {1, 1, 1, columns};
    view.strides = {columns * stride, columns * stride, columns * stride, stride};
  }
  template <class T>
  void Set(int64_t i, T value) {
    std::memcpy(static_cast<std::byte*>(view.data) + i * view.strides[3] * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }
  template <class T>
  T Get(int64_t i) const {
    T value;
    std::memcpy(&value, static_cast<const std::byte*>(view.data) + i * view.strides[3] * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
};

TEST_P(Halves, ComeThroughEveryEngineExactly) {
  const Format& f = GetParam();
  const auto roundings = Roundings(f);
  const uint32_t one_bits = f.dtype == Dtype::kBF16 ? 0x3F80 : 0x3C00;
  for (const std::string& target : Targets()) {
    for (const Form form : {Form::kRecurrent, Form::kChunkwise}) {
      for (const int64_t stride : {1, 3}) {
        SCOPED_TRACE(target + " " + std::string(Name(form)) + " stride " + std::to_string(stride));
        Options options;
        options.form = form;
        options.target = target;
        options.scale = 1.0;
        options.executor = UsualExecutor();
        // Widened: every v, with k = 1, is the state.
        Row one(f.dtype, 1, 1, true), zero(f.dtype, 1, 1, true);
        one.Set(0, static_cast<uint16_t>(one_bits));
        zero.Set(0, uint16_t{0});
        Row v(f.dtype, 65536, stride, true), out(f.dtype, 65536, stride, true), state(Dtype::kF32, 65536, stride, true);
        for (int64_t i = 0; i < 65536; ++i) v.Set(i, static_cast<uint16_t>(i));
        Inputs in;
        in.q = in.k = one.view;
        in.v = v.view;
        Status status = Attend(options, in, {out.view, state.view, {}});
        ASSERT_TRUE(status.ok()) << status.message;
        for (uint32_t bits = 0; bits < 65536; ++bits) {
          const double value = Value(f, bits), got = static_cast<double>(state.Get<float>(bits));
          if (IsNan(f, bits)) {
            ASSERT_TRUE(std::isnan(got) && IsNan(f, out.Get<uint16_t>(bits))) << bits;
          } else if (std::abs(value) < static_cast<double>(std::numeric_limits<float>::min())) {
            ASSERT_EQ(got, 0);  // below the normal range of f32
          } else {
            ASSERT_EQ(got, value) << bits;
            ASSERT_EQ(out.Get<uint16_t>(bits), bits);
          }
        }
        // Narrowed: every state, with q = 1 and nothing written, is out.
        const auto columns = static_cast<int64_t>(roundings.size());
        Row S(Dtype::kF32, columns, stride, true), none(f.dtype, columns, stride, true), read(f.dtype, columns, stride, true);
        for (int64_t i = 0; i < columns; ++i) {
          S.Set(i, roundings[static_cast<size_t>(i)].first);
          none.Set(i, uint16_t{0});
        }
        in.k = zero.view;
        in.v = none.view;
        in.initial_state = S.view;
        const std::vector<std::byte> before = read.memory;
        status = Attend(options, in, {read.view, {}, {}});
        ASSERT_TRUE(status.ok()) << status.message;
        for (int64_t i = 0; i < columns; ++i) {
          const auto& [x, rounded] = roundings[static_cast<size_t>(i)];
          const uint32_t got = read.Get<uint16_t>(i);
          if (std::abs(x) < std::numeric_limits<float>::min())
            ASSERT_EQ(got & 0x7FFFu, 0u) << x;
          else
            ASSERT_EQ(got, rounded) << x;
        }
        for (size_t byte = 0; byte < before.size(); ++byte) {
          const int64_t element = (static_cast<int64_t>(byte) - 1) / 2;
          if (byte == 0 || element % stride != 0 || element / stride >= columns) {
            ASSERT_EQ(read.memory[byte], before[byte]) << byte;
          }
        }
      }
    }
  }
}

// Rows of every short length and one that is not at home anywhere: nothing beyond them is written, whatever the target's vectors hold.
TEST_P(Halves, RowsEndWhereTheyEnd) {
  const Format& f = GetParam();
  for (const std::string& target : Targets()) {
    for (int64_t columns = 1; columns <= 70; ++columns) {
      Options options;
      options.target = target;
      options.executor = UsualExecutor();
      Row one(f.dtype, 1, 1, false), v(f.dtype, columns, 1, true), out(f.dtype, columns + 40, 1, true);
      one.Set(0, static_cast<uint16_t>(f.dtype == Dtype::kBF16 ? 0x3F80 : 0x3C00));
      for (int64_t i = 0; i < columns; ++i) v.Set(i, static_cast<uint16_t>(0x4000 + i));
      const std::vector<std::byte> before = out.memory;
      Inputs in;
      in.q = in.k = one.view;
      in.v = v.view;
      out.view.data = static_cast<std::byte*>(out.view.data) + 40;
      out.view.shape[3] = columns;
      const Status status = Attend(options, in, {out.view, {}, {}});
      ASSERT_TRUE(status.ok()) << status.message;
      for (int64_t i = 0; i < columns; ++i) ASSERT_EQ(out.Get<uint16_t>(i), 0x4000 + i) << target << " " << columns;
      for (int64_t byte = 0; byte < static_cast<int64_t>(before.size()); ++byte) {
        if (byte < 41 || byte >= 41 + 2 * columns) {
          ASSERT_EQ(out.memory[static_cast<size_t>(byte)], before[static_cast<size_t>(byte)]) << byte;
        }
      }
    }
  }
}

// ---- Layers ---------------------------------------------------------------------------------------------------------------------------------

// q, k, v and out of 16 bits are f32 on the way: the recurrent form gives the bits that it gives for the same numbers in f32, out rounded.
TEST_P(Halves, ARecurrenceIsThatOfF32Rounded) {
  const Format& f = GetParam();
  for (const std::string& target : Targets()) {
    for (const RuleInfo& info : Rules()) {
      for (const Dtype gate_dtype : {f.dtype, Dtype::kF32}) {
        SCOPED_TRACE(target + " " + std::string(info.name));
        RandomSpec spec;
        spec.rule = info.rule;
        spec.dtype = f.dtype;
        spec.gate_dtype = gate_dtype;
        spec.tokens = 70;
        spec.key_dim = 20;
        spec.value_dim = 37;
        spec.valid_fraction = 0.8;
        spec.normalize = info.can_normalize;
        Options options;
        options.rule = info.rule;
        options.form = Form::kRecurrent;
        options.target = target;
        options.normalize = spec.normalize;
        options.feature_map = spec.feature_map = spec.normalize ? FeatureMap::kEluPlusOne : FeatureMap::kL2Norm;
        const OwnedInputs inputs = RandomInputs(spec), wide = As(inputs, Dtype::kF32, Dtype::kF32);
        const Results got = Compute(options, inputs.view());
        Results want = Compute(options, wide.view());
        want.out = As(want.out, f.dtype);
        ExpectSameBits(got, want);
      }
    }
  }
}

// Against the truth of numbers that have not been rounded: no more than twice what rounding the inputs and the outputs alone costs.
TEST_P(Halves, ErrAtMostTwiceWhatRoundingInputsAndOutputsCosts) {
  const Format& f = GetParam();
  for (const RuleInfo& info : Rules()) {
    for (const Dtype gate_dtype : {f.dtype, Dtype::kF32}) {
      RandomSpec spec;
      spec.rule = info.rule;
      spec.dtype = Dtype::kF64;
      spec.tokens = 300;
      spec.key_dim = 64;
      spec.value_dim = 48;
      Options options;
      options.rule = info.rule;
      const OwnedInputs exact = RandomInputs(spec), rounded = As(exact, f.dtype, gate_dtype);
      const std::vector<double> truth = Oracle<double>(options, exact.view()).out;
      std::vector<double> reference = Oracle<double>(options, rounded.view()).out;
      Owned one = Owned::Zeros(f.dtype, {1});
      for (double& x : reference) {
        one.Set(0, x);
        x = one.Get(0);
      }
      const double least = RootMeanSquare(reference, truth);
      ASSERT_GT(least, 0);
      for (const Form form : {Form::kRecurrent, Form::kChunkwise}) {
        options.form = form;
        const double error = RootMeanSquare(Numbers(Compute(options, rounded.view()).out), truth);
        EXPECT_LE(error, 2 * least) << info.name << " " << Name(form) << ": " << error / least;
      }
    }
  }
}

}  // namespace
}  // namespace tercet::test
