// Every rule, form and dtype at one size, as a share of what this core's multiply-adds can do at most, measured in the same run.
//
//   tercet_bench [--tokens=2048] [--heads=32] [--dim=128] [--threads=1] [--target=AVX2] [Google Benchmark's own flags]
//
// Counters: ns_per_token_head; gflops on the least work (per token and head: linear and retention 4KV operations; simple_gla, gla and rwkv6 5KV;
// delta 6KV; gated_delta and kda 7KV; rwkv7 9KV); peak_fraction of the multiply-add peak. decay/* shows that decays which sink below the normal range
// cost nothing: the same layer with mild, strong, no and one total decay.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <string>

#include "bench/peak.hpp"
#include "src/proof/inputs.hpp"
#include "tercet/tercet.hpp"

namespace tercet::bench {
namespace {

struct Setting {
  int64_t tokens = 2048, heads = 32, dim = 128;
  int threads = 1;
  std::string target;
  double peak_f32 = 0, peak_f64 = 0;
};
Setting setting;

// Operations a token and head over K V, of the recurrence.
double LeastWork(Rule rule) {
  switch (rule) {
    case Rule::kLinear:
    case Rule::kRetention:
      return 4;
    case Rule::kSimpleGla:
    case Rule::kGla:
    case Rule::kRwkv6:
      return 5;
    case Rule::kDelta:
      return 6;
    case Rule::kGatedDelta:
    case Rule::kKda:
      return 7;
    case Rule::kRwkv7:
      return 9;
  }
  return 0;
}

struct Layer {
  proof::OwnedInputs inputs;
  proof::Owned out, state;
  Options options;

  Layer(Rule rule, Form form, Dtype dtype) {
    proof::RandomSpec spec;
    spec.rule = rule;
    spec.dtype = dtype;
    spec.tokens = setting.tokens;
    spec.heads = setting.heads;
    spec.key_dim = spec.value_dim = setting.dim;
    inputs = proof::RandomInputs(spec);
    out = proof::Owned::Zeros(dtype, {1, setting.tokens, setting.heads, setting.dim});
    state = proof::Owned::Zeros(dtype, {1, setting.heads, setting.dim, setting.dim});
    options.rule = rule;
    options.form = form;
    options.threads = setting.threads;
    options.target = setting.target;
  }
  Status Run() {
    Outputs outputs;
    outputs.out = out.mutable_view();
    outputs.final_state = state.mutable_view();
    return Attend(options, inputs.view(), outputs);
  }
};

// One thread is timed by the CPU time it got, for the machine may be shared; several by the wall.
double Seconds() {
  if (setting.threads > 1) return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

void Measure(benchmark::State& run, Layer& layer, Dtype dtype) {
  const double start = Seconds();
  for (auto _ : run) {
    const Status status = layer.Run();
    if (!status.ok()) return run.SkipWithError(status.message.c_str());
  }
  const double nanoseconds = (Seconds() - start) * 1e9;
  const double tokens = static_cast<double>(run.iterations()) * static_cast<double>(setting.tokens * setting.heads);
  const double gflops = LeastWork(layer.options.rule) * static_cast<double>(setting.dim * setting.dim) * tokens / nanoseconds;
  run.counters["ns_per_token_head"] = nanoseconds / tokens;
  run.counters["gflops"] = gflops;
  run.counters["peak_fraction"] = gflops / (setting.threads * (dtype == Dtype::kF64 ? setting.peak_f64 : setting.peak_f32));
}

void Forms(benchmark::State& run, Rule rule, Form form, Dtype dtype) {
  Layer layer(rule, form, dtype);
  Measure(run, layer, dtype);
}

enum class Strength { kMild, kStrong, kNone, kTotal };

void Decays(benchmark::State& run, Rule rule, Form form, Strength strength) {
  Layer layer(rule, form, Dtype::kF32);
  proof::Owned& log_decay = layer.inputs.log_decay;
  const int64_t channels = log_decay.shape.size() == 4 ? log_decay.shape[3] : 1, per_token = log_decay.size() / setting.tokens;
  for (int64_t i = 0; i < log_decay.size(); ++i) {
    double value = -0.1;
    if (strength == Strength::kStrong && i % channels == 0) value = -30;
    if (strength == Strength::kNone) value = 0;
    if (strength == Strength::kTotal && i / per_token == setting.tokens / 2) value = -std::numeric_limits<double>::infinity();
    log_decay.Set(i, value);
  }
  Measure(run, layer, Dtype::kF32);
}

void Register() {
  const auto add = [](const std::string& name, auto function) {
    benchmark::RegisterBenchmark(name.c_str(), function)->Unit(benchmark::kMillisecond);
  };
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF64})
    for (const RuleInfo& info : Rules())
      for (const Form form : {Form::kRecurrent, Form::kChunkwise, Form::kParallel, Form::kAutomatic})
        add(std::string(info.name) + "/" + std::string(Name(form)) + "/" + std::string(Name(dtype)),
            [rule = info.rule, form, dtype](benchmark::State& run) { Forms(run, rule, form, dtype); });
  const std::pair<Strength, const char*> strengths[] = {
      {Strength::kMild, "mild"}, {Strength::kStrong, "strong"}, {Strength::kNone, "none"}, {Strength::kTotal, "total"}};
  for (const RuleInfo& info : Rules())
    for (const Form form : {Form::kRecurrent, Form::kChunkwise})
      for (const auto& strength : strengths)
        if (info.log_decay_layout.size() > 3)  // not the constant one of retention
          add("decay/" + std::string(info.name) + "/" + std::string(Name(form)) + "/" + strength.second,
              [rule = info.rule, form, how = strength.first](benchmark::State& run) { Decays(run, rule, form, how); });
}

// Takes `--name=value` out of the arguments.
bool Take(int* count, char** arguments, const char* name, std::string* value) {
  const std::string prefix = std::string("--") + name + "=";
  for (int i = 1; i < *count; ++i) {
    if (std::strncmp(arguments[i], prefix.c_str(), prefix.size()) != 0) continue;
    *value = arguments[i] + prefix.size();
    std::copy(arguments + i + 1, arguments + *count, arguments + i);
    --*count;
    return true;
  }
  return false;
}

int Main(int count, char** arguments) {
  std::string text;
  const auto number = [&](const char* name, auto* to) {
    if (Take(&count, arguments, name, &text)) *to = static_cast<std::remove_pointer_t<decltype(to)>>(std::max(1L, std::atol(text.c_str())));
  };
  number("tokens", &setting.tokens);
  number("heads", &setting.heads);
  number("dim", &setting.dim);
  number("threads", &setting.threads);
  std::string wanted;
  Take(&count, arguments, "target", &wanted);
  if (const Status status = ChooseTarget(wanted, &setting.target); !status.ok()) {
    std::fprintf(stderr, "tercet_bench: %s\n", status.message.c_str());
    return 2;
  }
  setting.peak_f32 = PeakGflops(Dtype::kF32, setting.target);
  setting.peak_f64 = PeakGflops(Dtype::kF64, setting.target);
  benchmark::AddCustomContext("target", setting.target);
  benchmark::AddCustomContext("compiler", __VERSION__);
  benchmark::AddCustomContext("threads", std::to_string(setting.threads));
  benchmark::AddCustomContext("size",
                              "T=" + std::to_string(setting.tokens) + " H=" + std::to_string(setting.heads) + " K=V=" + std::to_string(setting.dim));
  benchmark::AddCustomContext("multiply-add peak of a core, f32", std::to_string(setting.peak_f32) + " GFLOP/s");
  benchmark::AddCustomContext("multiply-add peak of a core, f64", std::to_string(setting.peak_f64) + " GFLOP/s");
  Register();
  benchmark::Initialize(&count, arguments);
  if (benchmark::ReportUnrecognizedArguments(count, arguments)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace tercet::bench

int main(int count, char** arguments) { return tercet::bench::Main(count, arguments); }
