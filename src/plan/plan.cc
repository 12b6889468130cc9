#include "src/plan/plan.hpp"

#include <algorithm>
#include <cstdio>
#include <string>

namespace tercet::plan {

namespace {

// Tokens whose packed rows the recurrent form holds at once: q and k of 64 tokens at K = 128 and a panel of the state lie in L2 and L1.
constexpr int64_t kRecurrentSpan = 64;
// Below so many multiply-adds a second thread costs more to wake (20 to 40 us with oneTBB) than it saves.
constexpr double kWorthAThread = 1e6;

// Bytes as digits, however many: the square of a number of tokens need not fit an integer.
std::string Digits(double bytes) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.0f", bytes);
  return text;
}

}  // namespace

forms::Job Plan::JobAt(const contract::Layer& layer, int64_t i) const {
  forms::Job job;
  job.layer = &layer;
  job.span = span;
  job.column = i % cuts * columns;
  job.columns = std::min(columns, layer.value_dim - job.column);
  job.head = i / cuts % layer.state_heads;
  job.sequence = i / cuts / layer.state_heads;
  return job;
}

Status Make(const Options& options, const contract::Layer& layer, const targets::Target& target, int concurrency, Plan* plan) {
  const int64_t longest = contract::LongestSequence(layer);
  if (longest == 0 && !layer.out.final_state.given() && !layer.out.final_key_sum.given()) return {};  // nothing to write, however many heads
  const bool f64 = layer.f64();
  // Measured, AVX-512, one core, T = 2048, all rules, f32 and f64: chunks of 64 take 0.92 to 1.7 times the recurrence's time at K = V = 128, and 1.1
  // to 2.4 times at 64. So chunks are taken where the caller names their size.
  const Form form = options.form != Form::kAutomatic ? options.form : options.chunk > 0 ? Form::kChunkwise : Form::kRecurrent;
  plan->engine = form == Form::kRecurrent ? target.recurrent : target.chunkwise;
  const int64_t span = form == Form::kRecurrent  ? kRecurrentSpan
                       : form == Form::kParallel ? longest
                       : options.chunk > 0       ? options.chunk
                                                 : kDefaultChunk;
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
  plan->jobs = heads * plan->cuts;
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
  if (plan->jobs > 0) plan->bytes = plan->engine->bytes[f64][static_cast<size_t>(layer.rule)](plan->JobAt(layer, 0));
  return {};
}

}  // namespace tercet::plan
