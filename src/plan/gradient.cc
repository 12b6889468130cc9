#include "src/plan/gradient.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "src/contract/tensor.hpp"

namespace tercet::plan {

namespace {

// Tokens whose rows, factors and tables lie in L2 beside two states. Measured against 16, 64 and 128 (docs/performance.md).
constexpr int64_t kChunk = 32;
constexpr int64_t kLine = forms::Arena::kAlignment;

constexpr int64_t kMarkBytes = 64;
// Bytes of states of a head, one a chunk, that the second cache and a share of the third hold. More come from memory, and more slowly than they are
// computed again.
constexpr int64_t kKeptBytes = int64_t{4} << 20;

// States of all sequences.
int64_t Places(const contract::Layer& layer, int64_t tokens) {
  return layer.in.offsets.given() ? layer.tokens / tokens + layer.sequences : layer.sequences * ((layer.tokens + tokens - 1) / tokens);
}

// A number that calls have in common whose states are the same numbers in the same places (FNV-1a).
uint64_t MarkOf(const Options& options, const contract::Layer& layer) {
  uint64_t mark = 0xcbf29ce484222325;
  for (const int64_t x : {static_cast<int64_t>(layer.rule), static_cast<int64_t>(layer.feature_map), static_cast<int64_t>(layer.normalize),
                          static_cast<int64_t>(layer.dtype), layer.batch, layer.tokens, layer.sequences, layer.state_heads, layer.key_dim,
                          layer.value_dim, SavedTokens(options, layer)})
    for (int shift = 0; shift < 64; shift += 8) mark = (mark ^ (static_cast<uint64_t>(x) >> shift & 0xff)) * 0x100000001b3;
  return mark;
}

}  // namespace

int64_t GradientChunk(const Options& options, const contract::Layer& layer) {
  const int64_t chunk = options.form == Form::kRecurrent ? 1 : options.chunk > 0 ? options.chunk : kChunk;
  return std::clamp<int64_t>(chunk, 1, std::max<int64_t>(contract::LongestSequence(layer), 1));
}

int64_t SavedTokens(const Options& options, const contract::Layer& layer) {
  const int64_t chunk = GradientChunk(options, layer);
  return chunk < forms::kSegment ? forms::kSegment / chunk * chunk : chunk;
}

Status SavedBytes(const Options& options, const contract::Layer& layer, int64_t* bytes) {
  if (options.form == Form::kParallel)
    return {StatusCode::kInvalidOption, "saved was asked for in the parallel form, which has no states, and must be asked for in another"};
  const int64_t places = Places(layer, SavedTokens(options, layer)), size = contract::SizeOf(layer.state_dtype());
  int64_t all = layer.key_dim * (layer.value_dim + (layer.normalize ? 1 : 0));
  if (__builtin_mul_overflow(all, places, &all) || __builtin_mul_overflow(all, layer.state_heads * size, &all) || all > INT64_MAX - kMarkBytes)
    return {StatusCode::kOutOfMemory,
            "the call has " + std::to_string(places) + " states a head to save, more than any memory holds, and must have fewer: a larger chunk has"};
  *bytes = all + kMarkBytes;
  return {};
}

Status FindSaved(const Options& options, const contract::Layer& layer, const Workspace& memory, bool compare, forms::Saved* saved) {
  if (memory.data == nullptr) return {};
  int64_t bytes = 0;
  if (Status status = SavedBytes(options, layer, &bytes); !status.ok()) return status;
  if (memory.bytes < bytes)
    return {StatusCode::kInvalidOption, "saved has " + std::to_string(memory.bytes) + " bytes and must have at least " + std::to_string(bytes) +
                                            ", which SavedBytes says of this call"};
  uint64_t mark = 0;
  std::memcpy(&mark, memory.data, sizeof(mark));
  if (compare && mark != MarkOf(options, layer))
    return {
        StatusCode::kValue,
        "saved holds the states of a call of another rule, chunk, feature map, dtype or size, or none, and must be what Attend saved of this one"};
  saved->tokens = SavedTokens(options, layer);
  const int64_t places = Places(layer, saved->tokens), heads = layer.state_heads, K = layer.key_dim, V = layer.value_dim;
  std::byte* data = static_cast<std::byte*>(memory.data) + kMarkBytes;
  saved->state = View(static_cast<float*>(nullptr), {places, heads, K, V});
  saved->state.data = data;
  saved->state.dtype = layer.state_dtype();
  if (layer.normalize) {
    saved->key_sum = View(static_cast<float*>(nullptr), {places, heads, K});
    saved->key_sum.data = data + places * heads * K * V * contract::SizeOf(layer.state_dtype());
    saved->key_sum.dtype = layer.state_dtype();
  }
  return {};
}

void MarkSaved(const Options& options, const contract::Layer& layer, const Workspace& memory) {
  const uint64_t mark = MarkOf(options, layer);
  std::memset(memory.data, 0, kMarkBytes);
  std::memcpy(memory.data, &mark, sizeof(mark));
}

int64_t GradientPlan::Memory() const {
  int64_t all = 0;
  const bool much = __builtin_mul_overflow(bytes, workers, &all) || __builtin_add_overflow(all, (sums * 8 + kLine - 1) / kLine * kLine, &all);
  return much ? INT64_MAX / kLine * kLine : all;
}

forms::GradientJob GradientPlan::JobAt(const contract::GradientLayer& layer, int64_t i, std::byte* memory, int64_t worker) const {
  forms::GradientJob job;
  if (memory != nullptr) {
    job.workspace = memory + worker * bytes;
    job.sums = reinterpret_cast<double*>(memory + workers * bytes);
  }
  job.layer = &layer;
  job.gradient = &layer;
  job.saved = &saved;
  job.span = chunk;
  job.longest = longest;
  job.segment = segment;
  job.columns = layer.value_dim;
  const int64_t groups = layer.state_heads / heads;
  job.head = i % groups * heads;
  job.heads = heads;
  job.sequence = i / groups;
  return job;
}

Status Make(const Options& options, const contract::GradientLayer& layer, const targets::Target& target, int concurrency, GradientPlan* plan) {
  plan->longest = contract::LongestSequence(layer);
  plan->chunk = GradientChunk(options, layer);
  if (Status status = FindSaved(options, layer, layer.given.saved, true, &plan->saved); !status.ok()) return status;

  // Heads of every input are groups of state heads that follow each other; what no group of any input straddles can be cut.
  int64_t cuts = layer.state_heads;
  const Inputs& in = layer.in;
  for (const ConstTensor* t : {&in.q, &in.k, &in.v, &in.log_decay, &in.beta, &in.remove, &in.write})
    if (t->given() && t->rank > 2) cuts = std::gcd(cuts, t->shape[2]);
  plan->heads = layer.state_heads / cuts;
  plan->jobs = layer.sequences * cuts;
  plan->workers = options.threads > 0 ? std::min(concurrency, options.threads) : concurrency;
  plan->workers = std::clamp<int64_t>(plan->workers, 1, std::max<int64_t>(plan->jobs, 1));
  // Chunks from one state that is kept to the next; those between are computed once more. About the root of them all keeps the fewest.
  plan->segment = SavedTokens(options, layer) / plan->chunk;
  const int64_t chunks = (plan->longest + plan->chunk - 1) / plan->chunk;
  const double state =
      static_cast<double>(layer.key_dim) * static_cast<double>(layer.value_dim) * static_cast<double>(contract::SizeOf(layer.state_dtype()));
  if (plan->saved.tokens == 0 && static_cast<double>(chunks) * state > static_cast<double>(kKeptBytes))
    plan->segment = std::max(plan->segment, static_cast<int64_t>(std::sqrt(static_cast<double>(chunks))));
  plan->sums = layer.sequences * layer.state_heads * forms::SumsOf(layer);

  // Kept states and a chunk's rows and tables; counting exactly past 2^50 numbers, which no machine has, could overflow.
  const auto n = static_cast<double>(plan->chunk), K = static_cast<double>(layer.key_dim), V = static_cast<double>(layer.value_dim);
  const double states = static_cast<double>(plan->heads) * (static_cast<double>(plan->longest) / std::max(n, 1.0) + 64);
  const double numbers = states * (K + 64) * (V + 64) + (n + 64) * (n + 64) + (n + 64) * (K + V + 128);
  if (numbers > 0x1p50)
    return {StatusCode::kOutOfMemory, "the gradients take " + std::to_string(plan->chunk) + " tokens at a time with key_dim " +
                                          std::to_string(layer.key_dim) + " and value_dim " + std::to_string(layer.value_dim) +
                                          " over sequences of " + std::to_string(plan->longest) +
                                          " tokens, and these must be so small that a state a chunk and the tables of one are at most 2^50 numbers"};
  if (plan->jobs > 0) {
    const int64_t bytes = target.gradient->bytes[layer.f64()][static_cast<size_t>(layer.rule)](plan->JobAt(layer, 0));
    plan->bytes = (bytes + kLine - 1) / kLine * kLine + kLine;
  }
  return {};
}

}  // namespace tercet::plan
