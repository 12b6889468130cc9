// The tile verbs and the engine on them, real registers against emulated ones, bit for bit, in one static program that needs nothing: for machines
// with AMX, and for emulators of the instruction set. Prints OK or FAIL a check; exit 1 if any failed, 77 where there is no AMX. With --force it
// does not ask the machine first.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "src/contract/layer.hpp"
#include "src/floating_mode.hpp"
#include "src/forms/chunkwise_amx-inl.h"
#include "src/forms/products_amx-inl.h"
#include "src/proof/inputs.hpp"
#include "src/rules/all.hpp"
#include "tests/amx_emulation-inl.h"

#include <cpuid.h>

namespace tercet::test {
namespace {

using proof::Owned;

int failures = 0;

void Report(const std::string& what, bool ok) {
  std::printf("%s %s\n", ok ? "OK  " : "FAIL", what.c_str());
  std::fflush(stdout);
  failures += !ok;
}

bool MachineHasAmx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d >> 22 & 1) == 0 || (d >> 24 & 1) == 0) return false;
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

// The same bits, any two NaN counting as the same.
bool SameNumbers(const float* a, const float* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (std::memcmp(a + i, b + i, sizeof(float)) != 0 && !(a[i] != a[i] && b[i] != b[i])) return false;
  return true;
}

}  // namespace
}  // namespace tercet::test

TERCET_BEFORE_AMX
namespace tercet::test {
namespace {

// Words of every kind: ordinary, large and small, denormal, infinite and not a number.
amx::Tile RandomTile(std::mt19937& random, bool wild) {
  amx::Tile tile;
  for (auto& row : tile.row)
    for (uint32_t& pair : row) {
      pair = 0;
      for (int half = 0; half < 2; ++half) {
        const auto sign = static_cast<uint32_t>(random() % 2 << 15), fraction = static_cast<uint32_t>(random() % 128);
        auto exponent = static_cast<uint32_t>(120 + random() % 12);
        if (wild && random() % 64 == 0) exponent = random() % 4 == 0 ? 255 : random() % 2 == 0 ? 0 : static_cast<uint32_t>(random() % 256);
        pair |= (sign | exponent << 7 | fraction) << 16 * half;
      }
    }
  return tile;
}

template <class Tiles>
void Products(const std::vector<amx::Tile>& tiles, int64_t columns, int64_t depth, amx::Sums* to) {
  Tiles::Configure();
  amx::Clear<Tiles>();
  amx::MultiplyAdd<Tiles>(columns, depth, tiles.data(), tiles.data() + depth, columns);
  amx::Store<Tiles>(columns, to);
  amx::Clear<Tiles>();
  amx::MultiplyAddEach<Tiles>(columns, depth, tiles.data(), tiles.data() + columns * depth);
  amx::Store<Tiles>(columns, to + columns);
  Tiles::Release();
}

void CheckProducts() {
  std::mt19937 random(7);
  for (const bool wild : {false, true})
    for (const int64_t columns : {1, 2, 3, 4})
      for (const int64_t depth : {1, 2, 5}) {
        std::vector<amx::Tile> tiles;
        for (int64_t i = 0; i < 2 * columns * depth; ++i) tiles.push_back(RandomTile(random, wild));
        std::vector<amx::Sums> real(2 * columns), emulated(2 * columns);
        Products<amx::HardwareTiles>(tiles, columns, depth, real.data());
        Products<EmulatedTiles>(tiles, columns, depth, emulated.data());
        Report("products columns " + std::to_string(columns) + " depth " + std::to_string(depth) + (wild ? " with odd numbers" : ""),
               SameNumbers(real[0].row[0], emulated[0].row[0], 2 * columns * 256));
      }
}

// Matrices, turned and as they lie, whole and below the diagonal, with whole tiles and rows left over.
void CheckMatrices() {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (int n = 0; n < 24; ++n) {
    const int64_t sizes[] = {5, 16, 33, 64, 100};
    const auto any = [&] { return sizes[random() % 5]; };
    forms::Product product{any(), any(), any(), {nullptr, 128}, n % 2 == 0, {nullptr, 128}, n / 2 % 2 == 0, {nullptr, 128}, n / 4 % 2 == 0};
    product.part = n % 3 == 0 ? forms::Product::Part::kAll : n % 3 == 1 ? forms::Product::Part::kBelow : forms::Product::Part::kLower;
    std::vector<float> a(128 * 128), b(128 * 128), real(128 * 128);
    for (std::vector<float>* numbers : {&a, &b, &real})
      for (float& x : *numbers) x = normal(random);
    std::vector<float> emulated = real;
    std::vector<amx::Tile> room(static_cast<size_t>(forms::RoomFor(product.rows, product.depth) / forms::kTileBytes));
    product.a.at = a.data();
    product.b.at = b.data();
    product.room = reinterpret_cast<std::byte*>(room.data());
    for (const bool hardware : {true, false}) {
      const forms::Products& products = hardware ? amx::ProductsOn<amx::HardwareTiles>::All() : amx::ProductsOn<EmulatedTiles>::All();
      product.to.at = hardware ? real.data() : emulated.data();
      products.configure();
      products.multiply(product);
      products.release();
    }
    Report("matrices " + std::to_string(product.rows) + " x " + std::to_string(product.columns) + " over " + std::to_string(product.depth),
           SameNumbers(real.data(), emulated.data(), 128 * 128));
  }
}

void CheckNarrow() {
  std::mt19937 random(8);
  bool same = true;
  for (int i = 0; i < 100000; ++i) {
    alignas(64) uint32_t bits[32];
    for (uint32_t& x : bits) x = static_cast<uint32_t>(random()) & (i % 4 == 0 ? 0x807FFFFFu : i % 4 == 1 ? 0xFF80FFFFu : 0xFFFFFFFFu);
    const __m512 low = _mm512_castsi512_ps(_mm512_load_si512(bits)), high = _mm512_castsi512_ps(_mm512_load_si512(bits + 16));
    same &= _mm512_cmpneq_epi32_mask(amx::HardwareTiles::Narrow(low, high), EmulatedTiles::Narrow(low, high)) == 0;
  }
  Report("narrowing", same);
}

}  // namespace
}  // namespace tercet::test
TERCET_AFTER_AMX

namespace tercet::test {
namespace {

template <class Form>
void RunHeads(const contract::Layer& layer, int64_t chunk) {
  const FloatingMode mode;
  for (int64_t sequence = 0; sequence < layer.sequences; ++sequence)
    for (int64_t head = 0; head < layer.state_heads; ++head) {
      forms::Job job;
      job.layer = &layer;
      job.span = chunk;
      job.sequence = sequence;
      job.head = head;
      job.columns = layer.value_dim;
      std::vector<std::byte> memory(Form::Bytes(job) + 64);
      job.workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
      Form::Run(job);
    }
}

template <class R>
void CheckEngine(int64_t tokens, int64_t key_dim, int64_t value_dim) {
  proof::RandomSpec spec;
  spec.rule = R::kRule;
  spec.dtype = Dtype::kBF16;
  spec.tokens = tokens;
  spec.key_dim = key_dim;
  spec.value_dim = value_dim;
  spec.heads = 1;
  const proof::OwnedInputs inputs = proof::RandomInputs(spec);
  Options options;
  options.rule = R::kRule;
  Owned out[2], state[2];
  bool valid = true;
  for (int i = 0; i < 2; ++i) {
    out[i] = Owned::Zeros(Dtype::kBF16, {1, tokens, 1, value_dim});
    state[i] = Owned::Zeros(Dtype::kF32, {1, 1, key_dim, value_dim});
    Outputs outputs;
    outputs.out = out[i].mutable_view();
    outputs.final_state = state[i].mutable_view();
    contract::Layer layer;
    valid &= contract::Validate(options, inputs.view(), &outputs, &layer).ok();
    if (!valid) break;
    if (i == 0)
      RunHeads<amx::ChunkwiseAmx<R, amx::HardwareTiles>>(layer, 64);
    else
      RunHeads<amx::ChunkwiseAmx<R, EmulatedTiles>>(layer, 64);
  }
  Report(std::string(R::kName) + " T" + std::to_string(tokens) + " K" + std::to_string(key_dim) + " V" + std::to_string(value_dim),
         valid && out[0].bytes == out[1].bytes && state[0].bytes == state[1].bytes);
}

}  // namespace
}  // namespace tercet::test

int main(int count, char** arguments) {
  using namespace tercet;
  const bool force = count > 1 && std::strcmp(arguments[1], "--force") == 0;
  if (!test::MachineHasAmx() && !force) {
    std::printf("no AMX here\n");
    return 77;
  }
  test::CheckNarrow();
  test::CheckProducts();
  test::CheckMatrices();
  rules::All::ForEach([]<class R>(R) {
    test::CheckEngine<R>(70, 33, 5);
    test::CheckEngine<R>(130, 128, 128);
  });
  std::printf("%s\n", test::failures == 0 ? "all OK" : "some FAILED");
  return test::failures == 0 ? 0 : 1;
}
