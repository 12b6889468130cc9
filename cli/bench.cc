// tercet bench: how long layers take, beside what this machine can do at most, measured in the same run.
#include <fmt/format.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/peak.hpp"
#include "cli/report.hpp"
#include "cli/terminal.hpp"
#include "src/contract/tensor.hpp"
#include "src/proof/inputs.hpp"
#include "src/rules/all.hpp"

namespace tercet::cli {
namespace {

constexpr const char* kFooter = R"(
Times layers of random tensors: every rule, form, chunk, dtype, size, decay and number of threads that the flags name; lists have commas.

  ns          nanoseconds a token and head: the median of --repeat rounds after a warm-up. Every round takes all layers of one size in turn, so that
              noise falls on all alike. One thread is timed by the CPU time it got, for the machine may be shared; several by the wall.
  GFLOP/s     on the least work that the rule's recurrence takes for each token and head, whatever the form really does: 4 K V operations for linear
              and retention, 5 for simple_gla, gla and rwkv6, 6 for delta, 7 for gated_delta and kda, 9 for rwkv7.
  of peak     that over what as many cores do in multiply-adds between registers, measured in the same run: in f32, for f64 in f64.
  of loop     at --tokens 1 alone, where the state lies in place (the initial state is the final state's memory, as in decoding): the bytes of the
              state read and written in a second, over those of a plain loop that multiplies as many bytes in place.
  work KiB    what a call works in beside its tensors, all threads together: in JSON workspace_bytes, what WorkspaceBytes says of it (with --gradient
              GradientWorkspaceBytes).
  peak MiB    the most memory the process had resident in the layer's first calls, the tensors of its size among it. In JSON added_bytes is what those
              calls added, as far as no layer before had left it behind.

With --gradient ns is Attend and then AttendGradient: given the gradient of the output, those of the scale and of all inputs of the rule are wanted.
No state is given, at --tokens 1 neither. Every round also takes Attend alone.

  forward     nanoseconds a token and head of Attend alone.
  ratio       ns over forward.
  GFLOP/s     on the least work of both: 14 K V operations for linear and retention, 17 for simple_gla, gla and rwkv6, 22 for delta, 25 for
              gated_delta and kda, 33 for rwkv7.

Examples
  tercet bench                                       every rule, T 2048, 32 heads, K = V = 128, one thread
  tercet bench --rule kda,rwkv7 --form recurrent,chunkwise,parallel --tokens 512
  tercet bench --rule gated_delta --form chunkwise --chunk 32,64,128 --dtype f32,f64
  tercet bench --tokens 1                            decode: one token a call
  tercet bench --rule gla --decay mild,strong,none,total --threads 1,2 --json
  tercet bench --rule linear,kda --gradient --form recurrent,chunkwise --chunk 0,16,64

Exit codes: 0 measured; 2 bad use.)";

// Tokens that are drawn; longer sequences repeat them.
constexpr int64_t kDrawn = 128;
constexpr std::string_view kDecays[] = {"random", "mild", "strong", "none", "total"};

struct Size {
  int64_t batch, tokens, heads, key_dim, value_dim;
};

std::vector<Dtype> FloatingDtypes() {
  std::vector<Dtype> list;
  for (int i = 0; i < 64; ++i) {
    const std::string_view name = Name(static_cast<Dtype>(i));
    if (name.size() > 1 && (name.substr(0, 2) == "bf" || (name[0] == 'f' && name[1] >= '0' && name[1] <= '9'))) list.push_back(static_cast<Dtype>(i));
  }
  return list;
}

// Operations a token and head over K V, of the recurrence: two for the write and two for the read, one for a decay that is not the same for all
// tokens, and two each for what the delta rules recall and what a rank-one update recalls and writes. With the gradient, the state once more and what
// goes back through each of these (docs/performance.md counts it).
int64_t LeastWork(Rule rule, bool gradient) {
  const rules::Axes axes = rules::AxesOf(rule);
  const int64_t decay = axes.decay == Decay::kPerStep || axes.decay == Decay::kPerChannel ? 1 : 0;
  const int64_t removal = axes.update == Update::kDelta ? 2 : axes.update == Update::kRankOne ? 4 : 0;
  return gradient ? 14 + 3 * decay + 4 * removal : 4 + decay + removal;
}

// The tensors of one size and dtype, each once for all the layers that can share it.
class Stock {
 public:
  Stock(const Size& size, Dtype dtype, const Options& options, uint64_t seed) : size_(size) {
    spec_.dtype = dtype;
    spec_.tokens = std::min(size.tokens, kDrawn);
    spec_.heads = size.heads;
    spec_.key_dim = size.key_dim;
    spec_.value_dim = size.value_dim;
    spec_.feature_map = options.feature_map;
    spec_.normalize = options.normalize;
    spec_.seed = seed;
    out_ = proof::Owned::Zeros(dtype, {size.batch, size.tokens, size.heads, size.value_dim});
  }

  // With `given` and `wanted` for the gradient, and then without a state to begin with.
  void Layer(Rule rule, std::string_view decay, Inputs* inputs, Outputs* outputs, OutputGradients* given, Gradients* wanted) {
    spec_.rule = rule;
    proof::OwnedInputs drawn = proof::RandomInputs(spec_);
    const RuleInfo& info = Info(rule);
    inputs->q = Keep("q", kToken, drawn.q).view();
    inputs->k = Keep(info.takes_beta ? "k of unit norm" : "k", kToken, drawn.k).view();
    inputs->v = Keep("v", kToken, drawn.v).view();
    inputs->beta = Keep("beta", kToken, drawn.beta).view();
    inputs->remove = Keep("remove", kToken, drawn.remove).view();
    inputs->write = Keep("write", kToken, drawn.write).view();
    inputs->bonus = Keep("bonus", kHead, drawn.bonus).view();
    const std::string layout(info.log_decay_layout);
    proof::Owned& log_decay = Keep(std::string(decay) + " log_decay " + layout, layout == "[H]" ? kHead : kToken, drawn.log_decay);
    if (decay != "random") SetDecay(decay, &log_decay);
    inputs->log_decay = log_decay.view();
    proof::Owned& state = Keep("state", kRow, drawn.initial_state);
    proof::Owned& key_sum = Keep("key sum", kRow, drawn.initial_key_sum);
    outputs->out = out_.mutable_view();
    outputs->final_state = state.mutable_view();
    outputs->final_key_sum = key_sum.mutable_view();
    if (given != nullptr) {
      given->out = Keep("given", kToken, RandomValues()).view();
      wanted->q = Keep("gradient of q", kToken, drawn.q).mutable_view();
      wanted->k = Keep("gradient of k", kToken, drawn.k).mutable_view();
      wanted->v = Keep("gradient of v", kToken, drawn.v).mutable_view();
      wanted->log_decay = Keep("gradient of log_decay " + layout, layout == "[H]" ? kHead : kToken, drawn.log_decay).mutable_view();
      wanted->beta = Keep("gradient of beta", kToken, drawn.beta).mutable_view();
      wanted->remove = Keep("gradient of remove", kToken, drawn.remove).mutable_view();
      wanted->write = Keep("gradient of write", kToken, drawn.write).mutable_view();
      wanted->bonus = Keep("gradient of bonus", kHead, drawn.bonus).mutable_view();
      wanted->scale = &gradient_of_scale_;
    } else if (size_.tokens == 1) {
      inputs->initial_state = state.view();
      inputs->initial_key_sum = key_sum.view();
    }
  }

 private:
  enum Axis { kHead, kRow, kToken };  // what a tensor has one of: every head, row of the batch, or token

  Size size_;
  proof::RandomSpec spec_;
  std::map<std::string, proof::Owned, std::less<>> tensors_;
  proof::Owned out_, none_;
  double gradient_of_scale_ = 0;

  // Like v, but not v.
  proof::Owned RandomValues() const {
    proof::RandomSpec spec = spec_;
    ++spec.seed;
    return proof::RandomInputs(spec).v;
  }

  // The tensor of that name, made of the drawn one if there is none: rows and tokens are repeated until they are as many as wanted.
  proof::Owned& Keep(const std::string& name, Axis axis, const proof::Owned& drawn) {
    if (drawn.shape.empty()) return none_;
    proof::Owned& kept = tensors_[name];
    if (!kept.shape.empty()) return kept;
    std::vector<int64_t> shape = drawn.shape;
    if (axis != kHead) shape[0] = size_.batch;
    if (axis == kToken) shape[1] = size_.tokens;
    kept = proof::Owned::Zeros(drawn.dtype, shape);
    for (size_t at = 0; at < kept.bytes.size(); at += drawn.bytes.size())
      std::memcpy(kept.bytes.data() + at, drawn.bytes.data(), std::min(drawn.bytes.size(), kept.bytes.size() - at));
    return kept;
  }

  void SetDecay(std::string_view decay, proof::Owned* log_decay) const {
    if (log_decay->shape.empty()) return;
    const bool per_token = log_decay->shape.size() >= 3;
    const int64_t channels = log_decay->shape.size() == 4 ? size_.key_dim : 1;
    const int64_t one = per_token ? log_decay->size() / (size_.batch * size_.tokens) : 1;
    for (int64_t i = 0; i < log_decay->size(); ++i) {
      double value = decay == "none" ? 0 : -0.1;
      if (decay == "strong" && i % channels == 0) value = -30;
      if (decay == "total" && (!per_token || i / one % size_.tokens == size_.tokens / 2)) value = -std::numeric_limits<double>::infinity();
      log_decay->Set(i, value);
    }
  }
};

double Seconds(bool of_this_thread) {
  if (!of_this_thread) return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double Median(std::vector<double> samples) {
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

// Something to time, over and over.
struct Timed {
  int64_t calls = 1;            // in a sample, so that it lasts
  std::vector<double> samples;  // seconds a call

  template <class Call>
  double Sample(bool of_this_thread, const Call& call) const {
    const double start = Seconds(of_this_thread);
    for (int64_t i = 0; i < calls; ++i) call();
    return (Seconds(of_this_thread) - start) / static_cast<double>(calls);
  }
  // Calls until it is known how many calls last that long.
  template <class Call>
  void WarmUp(bool of_this_thread, double seconds, const Call& call) {
    for (calls = 1;; calls *= 4) {
      const double each = Sample(of_this_thread, call);
      if (each * static_cast<double>(calls) < seconds / 4) continue;
      calls = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(seconds / each)));
      return;
    }
  }
};

// The bytes that /proc/self/status gives under that name, or 0.
int64_t ProcessBytes(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.rfind(name + ":", 0) == 0) return std::atoll(line.c_str() + name.size() + 1) * 1024;
  return 0;
}

// The most bytes that were resident since the process began, or since ForgetPeak where the kernel can forget.
int64_t PeakBytes() {
  if (const int64_t bytes = ProcessBytes("VmHWM"); bytes > 0) return bytes;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

void ForgetPeak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5";
}

struct Row {
  Size size;
  Dtype dtype;
  std::string decay;
  Options options;
  int cores = 1;
  Inputs inputs;
  Outputs outputs;
  bool gradient = false;  // then `time` is of Attend and AttendGradient, and `forward` of Attend alone
  OutputGradients given;
  Gradients wanted;
  Timed time, forward;
  const Timed* loop = nullptr;  // with one token: over as many bytes as a core has of the state
  double loop_seconds = 0;
  int64_t workspace_bytes = 0, peak_bytes = 0, added_bytes = 0;
  Status status;  // of the calls so far

  bool alone() const { return cores == 1; }
  void Forward() {
    if (status.ok()) status = Attend(options, inputs, outputs);
  }
  void Call() {
    Forward();
    if (gradient && status.ok()) status = AttendGradient(options, inputs, given, wanted);
  }
  double seconds() const { return Median(time.samples); }
  double forward_seconds() const { return Median(forward.samples); }
  double heads() const { return static_cast<double>(size.batch * size.tokens * size.heads); }  // all tokens' heads
  double gflops() const {
    return static_cast<double>(LeastWork(options.rule, gradient) * size.key_dim * size.value_dim) * heads() / seconds() * 1e-9;
  }
};

class Machine {
 public:
  explicit Machine(const std::string& target) : peak_(target), has_tiles_(HasTiles(&why_no_tiles_)), from_(kCached, 1.0f), to_(kCached, 1.0f) {
    for (int i = 0; i < 25; ++i) Sample();
  }

  // Once a round, so that a while in which the machine was slow is not all that is measured.
  void Sample() {
    f32_ = std::max(f32_, peak_.MultiplyAdds(false));
    f64_ = std::max(f64_, peak_.MultiplyAdds(true));
    if (has_tiles_) tiles_ = std::max(tiles_, TileProducts());
    cached_ = std::max(cached_, Copied(from_, &to_, 256));
  }
  // Last of all, for it takes half a gigabyte.
  void SampleMemory() {
    const std::vector<float> from(kUncached, 1.0f);
    std::vector<float> to(kUncached, 1.0f);
    for (int i = 0; i < 3; ++i) memory_ = std::max(memory_, Copied(from, &to, 1));
  }

  void Loop(std::vector<float>* data) const { peak_.ReadMultiplyWrite(data->data(), static_cast<int64_t>(data->size())); }
  double gflops(Dtype dtype) const { return dtype == Dtype::kF64 ? f64_ : f32_; }

  std::string Text(const std::string& target) const {
    return fmt::format("cpu       {}\ntarget    {}\ntercet    {}\ncompiler  {}\n", Escape(CpuName()), target, Version(), CompilerName()) +
           fmt::format("fma       f32 {:.1f}, f64 {:.1f} GFLOP/s a core\n", f32_, f64_) +
           (has_tiles_ ? fmt::format("amx       bf16 {:.0f} GFLOP/s a core\n", tiles_) : fmt::format("amx       none: {}\n", why_no_tiles_)) +
           fmt::format("copy      {:.1f} GB/s in cache, {:.1f} from DRAM, read and written\n", cached_, memory_);
  }
  Json ToJson(const std::string& target) const {
    return {{"cpu", CpuName()},
            {"target", target},
            {"compiler", CompilerName()},
            {"version", Version()},
            {"peaks",
             {{"fma_f32_gflops", f32_},
              {"fma_f64_gflops", f64_},
              {"amx_bf16_gflops", has_tiles_ ? Json(tiles_) : Json()},
              {"copy_cache_gbytes_per_second", cached_},
              {"copy_dram_gbytes_per_second", memory_}}}};
  }

 private:
  // Floats: a quarter of a mebibyte, which a core's own cache holds twice, and a quarter of a gibibyte, which none does.
  static constexpr size_t kCached = size_t{1} << 16, kUncached = size_t{1} << 26;
  Peak peak_;
  std::string why_no_tiles_;
  bool has_tiles_;
  std::vector<float> from_, to_;
  double f32_ = 0, f64_ = 0, tiles_ = 0, cached_ = 0, memory_ = 0;

  double Copied(const std::vector<float>& from, std::vector<float>* to, int times) const {
    const double start = Seconds(false);
    for (int i = 0; i < times; ++i) peak_.Copy(from.data(), to->data(), static_cast<int64_t>(from.size()));
    return 2e-9 * static_cast<double>(times) * static_cast<double>(from.size() * sizeof(float)) / (Seconds(false) - start);
  }
};

struct Command {
  Flags flags;
  bool json = false, gradient = false;

  Status Run(Result* result);

 private:
  Options options_;
  std::vector<Rule> rules_;
  std::vector<Form> forms_ = {Form::kAutomatic};
  std::vector<Dtype> dtypes_ = {Dtype::kF32};
  std::vector<int64_t> chunks_ = {0};
  std::vector<std::string> decays_ = {"random"};
  std::vector<int> threads_ = {1};
  std::vector<Size> sizes_;
  int64_t repeat_ = 7;
  double seconds_ = 0.02;
  uint64_t seed_ = 1;
  std::vector<std::pair<std::string, std::string>> left_out_;  // what, and why

  Status Read();
  std::vector<Row> Rows(const Size& size);
  Status Measure(std::vector<Row>* rows, Machine* machine, Progress* progress, double begun, double part);
};

Status Command::Read() {
  ReadOptionFlags(&flags, &options_);
  if (!flags.Given("rule") || flags.Text("rule") == "all")
    for (const RuleInfo& info : Rules()) rules_.push_back(info.rule);
  else
    flags.GetList("rule", &rules_);
  flags.GetList("form", &forms_);
  flags.GetList("chunk", &chunks_, int64_t{0});
  flags.GetList("threads", &threads_);
  if (flags.Given("dtype")) dtypes_.clear();
  std::string dtypes;
  for (const Dtype dtype : FloatingDtypes()) dtypes += (dtypes.empty() ? "" : ", ") + std::string(Name(dtype));
  flags.ForEach("dtype", [&](const std::string& text) {
    for (const Dtype dtype : FloatingDtypes())
      if (Name(dtype) == text) return dtypes_.push_back(dtype);
    flags.Refuse("dtype", "one of " + dtypes);
  });
  if (flags.Given("decay")) decays_.clear();
  flags.ForEach("decay", [&](const std::string& text) {
    decays_.push_back(text);
    if (std::find(std::begin(kDecays), std::end(kDecays), text) == std::end(kDecays)) flags.Refuse("decay", "random, mild, strong, none or total");
  });
  std::vector<int64_t> batches = {1}, tokens = {2048}, heads = {32}, key_dims = {128}, value_dims;
  flags.GetList("batch", &batches, int64_t{1});
  flags.GetList("tokens", &tokens, int64_t{1});
  flags.GetList("heads", &heads, int64_t{1});
  flags.GetList("key_dim", &key_dims, int64_t{1});
  flags.GetList("value_dim", &value_dims, int64_t{1});
  flags.Get("repeat", &repeat_, 5);
  flags.Get("seconds", &seconds_);
  if (!(seconds_ > 0 && seconds_ <= 60)) flags.Refuse("seconds", "above 0 and at most 60");
  flags.Get("seed", &seed_);
  if (!flags.status().ok()) return flags.status();

  for (const int64_t batch : batches)
    for (const int64_t T : tokens)
      for (const int64_t H : heads)
        for (const int64_t K : key_dims)
          for (const int64_t V : value_dims.empty() ? std::vector<int64_t>{K} : value_dims) {
            const double rows = gradient ? 11 * Product({K}) + 4 * Product({V}) : 6 * Product({K}) + 2 * Product({V});
            const double elements = Product({batch, T, H}) * rows + Product({batch, H, K, V});
            double bytes = 0;
            for (const Dtype dtype : dtypes_) bytes += elements * static_cast<double>(contract::SizeOf(dtype));
            if (Status status = CheckMemory("random tensors of these sizes and their outputs", bytes); !status.ok()) return status;
            sizes_.push_back({batch, T, H, K, V});
          }
  return {};
}

std::vector<Row> Command::Rows(const Size& size) {
  std::vector<Row> rows;
  for (const Rule rule : rules_)
    for (const Form form : forms_)
      for (const int64_t chunk : form == Form::kAutomatic || form == Form::kChunkwise || forms_.size() == 1 ? chunks_ : std::vector<int64_t>{0})
        for (const Dtype dtype : dtypes_)
          for (const std::string& decay : rules::AxesOf(rule).decay == Decay::kNone ? std::vector<std::string>{"none"} : decays_)
            for (const int threads : threads_) {
              Row row;
              row.size = size;
              row.dtype = dtype;
              row.decay = decay;
              row.gradient = gradient;
              row.options = options_;
              row.options.rule = rule;
              row.options.form = form;
              row.options.chunk = chunk;
              row.options.threads = threads;
              row.cores = threads == 0 ? DefaultConcurrency() : std::clamp(threads, 1, DefaultConcurrency());
              rows.push_back(row);
            }
  return rows;
}

Status Command::Measure(std::vector<Row>* rows, Machine* machine, Progress* progress, double begun, double part) {
  std::map<Dtype, Stock> stocks;
  struct Loop {
    Timed time;
    std::vector<float> data;
  };
  std::map<size_t, Loop> loops;  // by bytes
  const double steps = static_cast<double>(rows->size()) * static_cast<double>(repeat_ + 1);
  double done = 0;
  const auto say = [&](const Row& row) {
    progress->Update(begun + part * done++ / steps, fmt::format("{}, {} tokens", Name(row.options.rule), row.size.tokens));
  };

  for (auto row = rows->begin(); row != rows->end();) {
    say(*row);
    const auto stock = stocks.try_emplace(row->dtype, row->size, row->dtype, options_, seed_).first;
    stock->second.Layer(row->options.rule, row->decay, &row->inputs, &row->outputs, gradient ? &row->given : nullptr, &row->wanted);
    row->status = gradient ? GradientWorkspaceBytes(row->options, row->inputs, row->given, row->wanted, &row->workspace_bytes)
                           : WorkspaceBytes(row->options, row->inputs, row->outputs, &row->workspace_bytes);
    ForgetPeak();
    const int64_t before = ProcessBytes("VmRSS");
    row->Call();
    if (row->status.ok()) row->time.WarmUp(row->alone(), seconds_, [&] { row->Call(); });
    if (row->status.ok() && gradient) row->forward.WarmUp(row->alone(), seconds_, [&] { row->Forward(); });
    if (!row->status.ok()) {
      const bool no_key_sum = options_.normalize && !Info(row->options.rule).can_normalize;
      if (!no_key_sum && row->status.code != StatusCode::kTableLimit) return row->status;
      const std::string what = fmt::format("{}, {} form, {} tokens", Name(row->options.rule), Name(row->options.form), row->size.tokens);
      left_out_.emplace_back(what, row->status.message);
      row = rows->erase(row);
      continue;
    }
    row->peak_bytes = PeakBytes();
    row->added_bytes = std::max<int64_t>(0, row->peak_bytes - before);
    if (row->size.tokens == 1 && !gradient) {
      const Tensor& state = row->outputs.final_state;
      const auto bytes = static_cast<size_t>(contract::Count(state) * contract::SizeOf(state.dtype) / row->cores);
      Loop& loop = loops[bytes];
      if (loop.data.empty()) {
        loop.data.assign(std::max<size_t>(1, bytes / sizeof(float)), 1.0f);
        loop.time.WarmUp(true, seconds_, [&] { machine->Loop(&loop.data); });
      }
      row->loop = &loop.time;
    }
    ++row;
  }
  for (int64_t round = 0; round < repeat_; ++round) {
    machine->Sample();
    for (auto& [bytes, loop] : loops) loop.time.samples.push_back(loop.time.Sample(true, [&loop = loop, machine] { machine->Loop(&loop.data); }));
    for (Row& row : *rows) {
      say(row);
      if (gradient) row.forward.samples.push_back(row.forward.Sample(row.alone(), [&] { row.Forward(); }));
      row.time.samples.push_back(row.time.Sample(row.alone(), [&] { row.Call(); }));
      if (!row.status.ok()) return row.status;
    }
  }
  for (Row& row : *rows)
    if (row.loop != nullptr) row.loop_seconds = Median(row.loop->samples);
  return {};
}

Json ToJson(const Row& row, const Machine& machine, const std::string& target) {
  Json json = {{"rule", Name(row.options.rule)},
               {"form", Name(row.options.form)},
               {"chunk", row.options.chunk},
               {"dtype", Name(row.dtype)},
               {"decay", row.decay},
               {"batch", row.size.batch},
               {"tokens", row.size.tokens},
               {"heads", row.size.heads},
               {"key_dim", row.size.key_dim},
               {"value_dim", row.size.value_dim},
               {"threads", row.cores},
               {"target", target},
               {"ns_per_token_head", row.seconds() * 1e9 / row.heads()},
               {"gflops", row.gflops()},
               {"peak_fraction", row.gflops() / (row.cores * machine.gflops(row.dtype))},
               {"rmw_fraction", row.loop != nullptr ? Json(row.loop_seconds / row.seconds()) : Json()},
               {"tokens_per_second", static_cast<double>(row.size.batch * row.size.tokens) / row.seconds()},
               {"workspace_bytes", row.workspace_bytes},
               {"peak_rss_bytes", row.peak_bytes},
               {"added_bytes", row.added_bytes}};
  if (row.gradient) {
    json["gradient"] = true;
    json["forward_ns_per_token_head"] = row.forward_seconds() * 1e9 / row.heads();
    json["ratio"] = row.seconds() / row.forward_seconds();
  }
  return json;
}

// A line of the table: the same fields of that JSON, whose names stand above.
std::string Line(const Json& row) {
  const auto text = [&](const char* name) { return row[name].get<std::string>(); };
  const auto whole = [&](const char* name) { return row[name].get<int64_t>(); };
  const auto real = [&](const char* name) { return row[name].get<double>(); };
  const Json& loop = row["rmw_fraction"];
  std::string time = fmt::format("{:>10.1f}", real("ns_per_token_head"));
  if (row.contains("gradient")) time = fmt::format("{:>10.1f}  {}  {:>6.2f}", real("forward_ns_per_token_head"), time, real("ratio"));
  return fmt::format(
      "{:<12} {:<10} {:>5}  {:<5}  {:<6}  {:>3} {:>7} {:>4} {:>4} {:>4}  {:>7}  {}  {:>7.1f}  {:>7.3f}  {:>7}  {:>9.3g}  {:>8.1f}  {:>8.1f}\n",
      text("rule"), text("form"), whole("chunk"), text("dtype"), text("decay"), whole("batch"), whole("tokens"), whole("heads"), whole("key_dim"),
      whole("value_dim"), whole("threads"), time, real("gflops"), real("peak_fraction"),
      loop.is_null() ? "-" : fmt::format("{:.3f}", loop.get<double>()), real("tokens_per_second"), real("workspace_bytes") * 0x1p-10,
      real("peak_rss_bytes") * 0x1p-20);
}

Status Command::Run(Result* result) {
  if (Status status = Read(); !status.ok()) return status;
  std::string target;
  if (Status status = ChooseTarget(options_.target, &target); !status.ok()) return status;
  Machine machine(target);
  std::vector<Row> measured;
  {
    Progress progress;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      std::vector<Row> rows = Rows(sizes_[i]);
      const double part = 1 / static_cast<double>(sizes_.size());
      if (Status status = Measure(&rows, &machine, &progress, static_cast<double>(i) * part, part); !status.ok()) return status;
      measured.insert(measured.end(), rows.begin(), rows.end());
    }
  }
  if (measured.empty()) return {StatusCode::kInvalidOption, "no layer is left to time: " + left_out_[0].second};
  machine.SampleMemory();
  Json rows = Json::array();
  for (const Row& row : measured) rows.push_back(ToJson(row, machine, target));
  if (json) {
    Json left_out = Json::array();
    for (const auto& [what, why] : left_out_) left_out.push_back({{"layer", what}, {"why", why}});
    result->text = Dump({{"machine", machine.ToJson(target)}, {"rows", rows}, {"left_out", left_out}});
    return {};
  }
  result->text =
      machine.Text(target) + "\n" +
      fmt::format("{:<12} {:<10} {:>5}  {:<5}  {:<6}  {:>3} {:>7} {:>4} {:>4} {:>4}  {:>7}  {:>10}  {:>7}  {:>7}  {:>7}  {:>9}  {:>8}  {:>8}\n",
                  "rule", "form", "chunk", "dtype", "decay", "B", "T", "H", "K", "V", "threads",
                  gradient ? fmt::format("{:>10}  {:>10}  {:>6}", "forward", "ns", "ratio") : "ns", "GFLOP/s", "of peak", "of loop", "tokens/s",
                  "work KiB", "peak MiB");
  for (const Json& row : rows) result->text += Line(row);
  for (const auto& [what, why] : left_out_) result->text += fmt::format("left out: {}: {}\n", what, why);
  return {};
}

}  // namespace

Action AddBench(CLI::App* command) {
  auto self = std::make_shared<Command>();
  Flags* flags = &self->flags;
  command->footer(kFooter);
  std::string dtypes;
  for (const Dtype dtype : FloatingDtypes()) dtypes += (dtypes.empty() ? "" : ", ") + std::string(Name(dtype));
  const auto list = [&](const char* name, const char* value, const std::string& help) {
    flags->Add(command, name, value, help)->group("What to time: each takes a list with commas");
  };
  list("rule", "RULE", RuleNames() + ", or all (the default)");
  list("form", "FORM", "automatic (the default), parallel, recurrent or chunkwise");
  list("chunk", "N", "tokens a chunk in the chunkwise form; 0, the default: the library chooses");
  list("dtype", "DTYPE", dtypes + "; by default f32");
  list("tokens", "N", "by default 2048; 1: decode, the state in place");
  list("batch", "N", "by default 1");
  list("heads", "N", "by default 32");
  list("key_dim", "N", "by default 128");
  list("value_dim", "N", "by default as --key-dim");
  list("decay", "DECAY", "random (the default), mild, strong, none or total: decays that sink below the normal range must cost nothing");
  list("threads", "N", "by default 1; 0: all cores");
  flags->Add(command, "repeat", "N", "rounds, at least 5; by default 7");
  flags->Add(command, "seconds", "X", "that a layer is called again and again for in a round, at least once; by default 0.02");
  flags->Add(command, "seed", "N", "of the random tensors; by default 1");
  AddOptionFlags(command, flags);
  command->add_flag("--gradient", self->gradient, "time Attend and then AttendGradient, beside Attend alone");
  command->add_flag("--json", self->json, "machine and rows as one JSON object");
  return [self](Result* result) { return self->Run(result); };
}

}  // namespace tercet::cli
