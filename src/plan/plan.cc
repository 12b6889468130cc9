#include "src/plan/plan.hpp"

#include <algorithm>
#include <cstdio>
#include <string>

#include "src/plan/gradient.hpp"
#include "src/rules/all.hpp"

namespace tercet::plan {

namespace {

// Tokens whose rows the passes hold at once: what they prepare of 32 tokens at K = 128 lies in L2, and a strip of the state in L1.
constexpr int64_t kPassSpan = 32;
// Heads that passes take side by side: their rows of a token share a page, and their states lie in L2.
constexpr int64_t kSideBySide = 8;
constexpr int64_t kStatesBytes = 1 << 19;
// Tokens from which products on tiles pay, a tile being 16 rows: by their count, not yet by measure.
constexpr int64_t kWorthTiles = 16;
// A pass of a rule that only adds, with a decay a channel, does little with each row of its strip of the state, two panels wide; where the strip does
// not lie in this much, and there are three strips and more, tables of this chunk are faster, by up to a fifth (docs/performance.md).
constexpr int64_t kStripBytes = 48 << 10, kChunkPastStrip = 32;
// Below so many multiply-adds a second thread costs more to wake (20 to 40 us with oneTBB) than it saves.
constexpr double kWorthAThread = 1e6;

// Bytes as digits, however many: the square of a number of tokens need not fit an integer.
std::string Digits(double bytes) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.0f", bytes);
  return text;
}

// kPassSpan, or where states are kept the most tokens up to twice as many that divide the tokens from one to the next.
int64_t PassSpan(int64_t saved_tokens) {
  if (saved_tokens % kPassSpan == 0) return kPassSpan;
  int64_t span = 2 * kPassSpan;
  while (saved_tokens % span != 0) --span;
  return span;
}

}  // namespace

int64_t Plan::Memory() const {
  int64_t all = 0;
  return __builtin_mul_overflow(bytes, workers, &all) ? INT64_MAX / forms::Arena::kAlignment * forms::Arena::kAlignment : all;
}

forms::Job Plan::JobAt(const contract::Layer& layer, int64_t i, std::byte* memory, int64_t worker) const {
  forms::Job job;
  if (memory != nullptr) job.workspace = memory + worker * bytes;
  job.saved = &saved;
  job.layer = &layer;
  job.span = span;
  job.block = block;
  job.column = i % cuts * columns;
  job.columns = std::min(columns, layer.value_dim - job.column);
  const int64_t groups = (layer.state_heads + heads - 1) / heads;
  job.head = i / cuts % groups * heads;
  job.heads = std::min(heads, layer.state_heads - job.head);
  job.sequence = i / cuts / groups;
  return job;
}

int64_t DefaultChunk(const contract::Layer& layer, const targets::Target& target) {
  const int64_t tiles = target.chunkwise->bf16_chunk;
  if (layer.dtype == Dtype::kBF16 && tiles > 0 && contract::LongestSequence(layer) >= kWorthTiles) return tiles;
  const rules::Axes axes = rules::AxesOf(layer.rule);
  const int64_t strip = 2 * target.recurrent->panel[layer.f64()], row = strip * (layer.f64() ? 8 : 4);
  const bool adds = axes.update == Update::kAdd || axes.update == Update::kAddReadBefore;
  if (adds && axes.decay == Decay::kPerChannel && layer.key_dim > kStripBytes / row && layer.value_dim >= 3 * strip) return kChunkPastStrip;
  return target.recurrent->tokens_a_pass[static_cast<size_t>(layer.rule)];
}

Status Make(const Options& options, const contract::Layer& layer, const targets::Target& target, int concurrency, Plan* plan) {
  const int64_t longest = contract::LongestSequence(layer);
  if (longest == 0 && !layer.out.final_state.given() && !layer.out.final_key_sum.given()) return {};  // nothing to write, however many heads
  const bool f64 = layer.f64();
  const Form form = options.form != Form::kAutomatic ? options.form : Form::kChunkwise;
  const int64_t chunk = options.chunk > 0 ? options.chunk : DefaultChunk(layer, target);
  const int64_t tokens_a_pass = target.recurrent->tokens_a_pass[static_cast<size_t>(layer.rule)];
  if (Status status = FindSaved(options, layer, layer.out.saved, false, &plan->saved); !status.ok()) return status;
  // Tiles keep no states.
  const bool tiles = plan->saved.tokens > 0 && layer.dtype == Dtype::kBF16 && target.chunkwise->bf16_chunk > 0;
  const bool passes = form == Form::kRecurrent || (form == Form::kChunkwise && (chunk == tokens_a_pass || tiles));
  plan->engine = passes ? target.recurrent : target.chunkwise;
  plan->block = form == Form::kRecurrent ? 1 : tokens_a_pass;
  const int64_t span = passes ? PassSpan(plan->saved.tokens) : form == Form::kParallel ? longest : chunk;
  plan->span = std::clamp<int64_t>(span, 1, std::max<int64_t>(longest, 1));

  const int64_t heads = layer.sequences * layer.state_heads;
  const double work =
      static_cast<double>(heads) * static_cast<double>(longest) * static_cast<double>(layer.key_dim) * static_cast<double>(layer.value_dim);
  plan->workers = work < kWorthAThread ? 1 : std::max(1, concurrency);
  if (options.threads > 0) plan->workers = std::min<int64_t>(plan->workers, options.threads);

  if (form == Form::kParallel) {
    const double side = static_cast<double>(plan->span), table = side * side * (f64 ? 8 : 4);
    const auto limit = static_cast<double>(options.table_limit);
    if (table > limit)
      return {StatusCode::kTableLimit, "table_limit is " + std::to_string(options.table_limit) + " bytes and must be at least " + Digits(table) +
                                           " for the parallel form's table of " + std::to_string(plan->span) + " x " + std::to_string(plan->span) +
                                           "; the chunkwise form computes the same with a small one"};
    plan->workers = std::min(plan->workers, std::max<int64_t>(1, static_cast<int64_t>(limit / std::max(table, 1.0))));
  }

  // Whole heads where there are enough of them; else their value columns are shared out, by panels.
  const int64_t panel = plan->engine->panel[f64], panels = (layer.value_dim + panel - 1) / panel;
  // A key sum written over its initial one is read by every job of a head: then there is one.
  const bool over = layer.out.final_key_sum.given() && layer.out.final_key_sum.data == layer.in.initial_key_sum.data;
  const int64_t wanted = heads == 0 || over ? 1 : std::min(panels, (plan->workers + heads - 1) / heads);
  const int64_t panels_a_job = (panels + wanted - 1) / wanted;
  plan->columns = std::min(layer.value_dim, panels_a_job * panel);
  plan->cuts = (panels + panels_a_job - 1) / panels_a_job;
  if (passes) {
    // Heads side by side: a page of rows and a state or so each, as many as leave every worker two jobs.
    const int64_t state = layer.key_dim * layer.value_dim * (f64 ? 8 : 4);
    plan->heads = std::clamp<int64_t>(std::min(kSideBySide, kStatesBytes / std::max<int64_t>(state, 1)), 1, layer.state_heads);
    if (plan->workers > 1) plan->heads = std::clamp<int64_t>(heads / (2 * plan->workers), 1, plan->heads);
  }
  plan->jobs = layer.sequences * ((layer.state_heads + plan->heads - 1) / plan->heads) * plan->cuts;
  plan->workers = std::max<int64_t>(1, std::min(plan->workers, plan->jobs));
  // What a workspace holds grows with these products; past 2^50 numbers no machine has it, and counting it exactly could overflow.
  const double numbers =
      static_cast<double>(plan->span) * static_cast<double>(plan->span) +
      static_cast<double>(layer.key_dim + plan->span) * static_cast<double>(plan->columns + layer.queries_per_state() * (layer.key_dim + panel));
  if (numbers > 0x1p50)
    return {StatusCode::kOutOfMemory,
            "the call takes " + std::to_string(plan->span) + " tokens at a time with key_dim " + std::to_string(layer.key_dim) + " and value_dim " +
                std::to_string(layer.value_dim) +
                ", and these must be so small that the tables of them are at most 2^50 numbers; a smaller chunk takes fewer tokens at a time"};
  if (plan->jobs > 0) {
    constexpr int64_t kLine = forms::Arena::kAlignment;
    const int64_t bytes = plan->engine->bytes[f64][static_cast<size_t>(layer.rule)](plan->JobAt(layer, 0));
    plan->bytes = (bytes + kLine - 1) / kLine * kLine + kLine;
  }
  return {};
}

}  // namespace tercet::plan
