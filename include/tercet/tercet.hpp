// Tercet: one layer, causal linear attention, in three forms that are the same function.
//
//   S_t = D_t S_{t-1} + w_t (r_t' S_{t-1}) + k_t u_t'        o_t = scale S_t' q_t
//
// A rule chooses the decay D and the update (w, r, u); docs/rules.md has all nine. The call is `Attend`. It never prints, throws or aborts: what it
// can't take it refuses with a `Status` that names the input, what it was and what it must be, and then nothing has been written.
#ifndef TERCET_TERCET_HPP_
#define TERCET_TERCET_HPP_

#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(_WIN32)
#define TERCET_API
#else
#define TERCET_API __attribute__((visibility("default")))
#endif

namespace tercet {

// ---- What a call says back ----------------------------------------------------------------------------------------------------------------

enum class StatusCode : int {
  kOk = 0,
  kInvalidOption,    // an option out of its range, or one the rule does not have (the normaliser on a delta rule)
  kMissingInput,     // the rule needs a tensor that was not given
  kUnexpectedInput,  // a tensor was given that the rule would ignore
  kShape,            // a tensor's rank or sizes are not those of the layout
  kDtype,            // a tensor's dtype is not one the call takes, or differs from that of q
  kNullData,         // a tensor that has elements, or a workspace or saved that has bytes, has no data
  kValue,            // a number that can't be one: a positive log_decay, offsets that don't increase, states saved of another call
  kOverlap,          // an output shares memory with an input or with itself, or the workspace or saved with either
  kTableLimit,       // the parallel form would need more than Options::table_limit bytes for its tables
  kOutOfMemory,      // an allocation failed
  kInternal,         // a fault of the library or of the caller's executor
};

struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  std::string message;  // one sentence, empty when ok

  bool ok() const { return code == StatusCode::kOk; }
};

// ---- Tensors ------------------------------------------------------------------------------------------------------------------------------

enum class Dtype : uint8_t { kF32, kF64, kBF16, kF16, kI32, kI64, kBool };  // kBool: one byte, zero is false

// Elements of bf16 (a float's upper half: 8 bits of exponent, 7 of fraction) and f16 (IEEE 754 binary16), as bits.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline constexpr int kMaxRank = 4;

// A read-only view of the caller's memory. Element [i, j, ...] lies at data + (i strides[0] + j strides[1] + ...) elements; strides may be any
// number, zero and negative ones too, and views may overlap. A default-constructed one (rank 0) means "not given".
struct ConstTensor {
  const void* data = nullptr;
  Dtype dtype = Dtype::kF32;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};  // in elements, not bytes

  bool given() const { return rank != 0; }
};

// The same, for memory the call writes. No two elements of an output may share memory.
struct Tensor {
  void* data = nullptr;
  Dtype dtype = Dtype::kF32;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};

  bool given() const { return rank != 0; }
  operator ConstTensor() const { return {data, dtype, rank, shape, strides}; }
};

// The dtype of a C++ element type.
template <class T>
constexpr Dtype DtypeOf() {
  using U = std::remove_const_t<T>;
  if constexpr (std::is_same_v<U, float>)
    return Dtype::kF32;
  else if constexpr (std::is_same_v<U, double>)
    return Dtype::kF64;
  else if constexpr (std::is_same_v<U, BFloat16>)
    return Dtype::kBF16;
  else if constexpr (std::is_same_v<U, Float16>)
    return Dtype::kF16;
  else if constexpr (std::is_same_v<U, int32_t>)
    return Dtype::kI32;
  else if constexpr (std::is_same_v<U, int64_t>)
    return Dtype::kI64;
  else {
    static_assert(std::is_same_v<U, bool> || std::is_same_v<U, uint8_t>,
                  "tercet takes float, double, BFloat16, Float16, int32_t, int64_t, bool and uint8_t");
    return Dtype::kBool;
  }
}

// A view of dense memory in row-major order, the last axis fastest: View(q, {batch, tokens, heads, key_dim}). At most kMaxRank axes are taken.
template <class T>
auto View(T* data, std::initializer_list<int64_t> shape) {
  std::conditional_t<std::is_const_v<T>, ConstTensor, Tensor> view;
  view.data = data;
  view.dtype = DtypeOf<T>();
  for (const int64_t size : shape)
    if (view.rank < kMaxRank) view.shape[static_cast<size_t>(view.rank++)] = size;
  int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    view.strides[static_cast<size_t>(axis)] = stride;
    // Sizes that nothing can have wrap around here, and the call refuses them.
    stride = static_cast<int64_t>(static_cast<uint64_t>(stride) * static_cast<uint64_t>(view.shape[static_cast<size_t>(axis)]));
  }
  return view;
}

// ---- Rules, forms and options -------------------------------------------------------------------------------------------------------------

enum class Rule : uint8_t { kLinear, kRetention, kSimpleGla, kGla, kRwkv6, kDelta, kGatedDelta, kKda, kRwkv7 };

enum class Form : uint8_t {
  kAutomatic,  // the chunkwise form with the chunk given, or else the one that is measured fastest (docs/performance.md)
  kParallel,   // one table of n x n affinities a sequence
  kRecurrent,  // a state of fixed size, token by token
  kChunkwise,  // parallel inside chunks, the state handed from chunk to chunk
};

// Applied to q and to k before anything else: x, elu(x) + 1, max(x, 0), or x / sqrt(sum x^2 + eps) over the key channels, where a row of zeros
// stays one without eps, too.
enum class FeatureMap : uint8_t { kIdentity, kEluPlusOne, kRelu, kL2Norm };

// What a rule is and needs, for programs that list or check rules. `name` is the one string the rule has everywhere.
struct RuleInfo {
  Rule rule;
  std::string_view name;
  std::string_view equation;
  std::string_view also_known_as;
  std::string_view log_decay_layout;  // "[B, T, H]" and the like; empty: the rule takes no log_decay
  bool takes_beta;
  bool takes_remove_and_write;
  bool takes_bonus;
  bool can_normalize;
  bool default_scale_is_one;  // else 1 / sqrt(key_dim)
};

// All rules, in the order of `Rule`.
TERCET_API const std::vector<RuleInfo>& Rules();
TERCET_API const RuleInfo& Info(Rule rule);

TERCET_API std::string_view Name(Rule rule);
TERCET_API std::string_view Name(Form form);
TERCET_API std::string_view Name(FeatureMap map);
TERCET_API std::string_view Name(Dtype dtype);
// The value of that name, or nothing.
TERCET_API std::optional<Rule> RuleFromName(std::string_view name);
TERCET_API std::optional<Form> FormFromName(std::string_view name);
TERCET_API std::optional<FeatureMap> FeatureMapFromName(std::string_view name);

// Runs pieces of work, possibly at the same time. Tercet uses oneTBB; give one of these to use threads of your own.
class Executor {
 public:
  virtual ~Executor() = default;
  // How many pieces can run at once, at least 1. The results of a call do not depend on it, not by a bit.
  virtual int Concurrency() const = 0;
  // Calls body(0) ... body(count - 1), each once, in any order, on any threads, and returns when all have returned. `body` does not throw.
  virtual void ParallelFor(int64_t count, const std::function<void(int64_t)>& body) = 0;
};

// Memory for a call to work in, at any address. What is in it before does not matter, and what is in it after means nothing.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

struct Options {
  Rule rule = Rule::kLinear;
  Form form = Form::kAutomatic;
  int64_t chunk = 0;            // tokens a chunk, chunkwise form only; 0: the library chooses
  std::optional<double> scale;  // multiplies q; default 1 / sqrt(key_dim), for rwkv7 1. It cancels under `normalize`
  FeatureMap feature_map = FeatureMap::kIdentity;
  double eps = 1e-6;                // of the l2_norm feature map, at least 0
  bool normalize = false;           // divide by the key sum: o_t = S_t' q_t / (z_t' q_t); a zero denominator gives a zero row
  bool check_values = true;         // look at every log_decay (NaN or above 0) and beta (not finite) before computing
  int64_t table_limit = 1LL << 30;  // bytes the tables of one parallel call may take
  int threads = 0;                  // at most so many at once; 0: all that the executor has
  Executor* executor = nullptr;     // not owned; nullptr: oneTBB
  std::string_view target = {};     // "AVX2", "AVX3", "NEON" ... as Targets() names them, in any case; empty: $TERCET_TARGET, else the best
  Workspace workspace = {};         // at least WorkspaceBytes, apart from every tensor; not given: memory of the calling thread's own
};

// B batch, T tokens, H heads, K key_dim, V value_dim.
//
// Dtypes: q, k, v and out share one, f32, f64, bf16 or f16. Beside f32 or f64 every other floating tensor has it too. Beside bf16 or f16 each of
// log_decay, beta, remove, write and bonus has that dtype or f32, and states and key sums are f32. What is computed is computed in f32, f64 for
// f64; a number of out is rounded once to its dtype, to nearest even.
//
// Heads: q has Hq, k has Hk, v has Hv. State heads Hs = max(Hk, Hv), output heads Ho = max(Hq, Hs). Each count divides the one it is grouped under,
// and groups are contiguous: state head s reads k head s / (Hs / Hk). The heads of log_decay, beta, remove, write and bonus may be any count that
// divides Hs.
//
// N is the number of sequences: B, or with `offsets` (then B = 1) the number of packed ones.
struct Inputs {
  ConstTensor q;                // [B, T, Hq, K]
  ConstTensor k;                // [B, T, Hk, K]
  ConstTensor v;                // [B, T, Hv, V]
  ConstTensor log_decay;        // natural logarithm of the decay, at most 0; 0 keeps all, -inf forgets all. retention [H]; simple_gla and
                                // gated_delta [B, T, H]; gla, rwkv6, kda and rwkv7 [B, T, H, K]
  ConstTensor beta;             // [B, T, H]; delta, gated_delta and kda
  ConstTensor remove;           // [B, T, H, K]; rwkv7 (r in the equation)
  ConstTensor write;            // [B, T, H, K]; rwkv7 (w in the equation)
  ConstTensor bonus;            // [H, K]; rwkv6
  ConstTensor initial_state;    // [N, Hs, K, V]; not given: zeros
  ConstTensor initial_key_sum;  // [N, Hs, K]; with `normalize`; not given: zeros
  ConstTensor offsets;          // [N + 1], i32 or i64: sequence n is the tokens offsets[n] to offsets[n + 1] - 1; from 0 to T, never decreasing
  ConstTensor valid;            // [B, T], bool: a token that is false leaves the state as it is, and its row of out is 0
};

struct Outputs {
  Tensor out;            // [B, T, Ho, V]
  Tensor final_state;    // [N, Hs, K, V]; optional. May be initial_state itself (the same data and strides)
  Tensor final_key_sum;  // [N, Hs, K]; optional, with `normalize`. May be initial_key_sum itself
  Workspace saved = {};  // optional: SavedBytes bytes at any address, where states are kept for AttendGradient. Not in the parallel form
};

// The gradients of a number L that is computed from the outputs, with respect to these. Shapes and dtypes are those of the outputs; one that is not
// given is zeros. Rows of `out` that belong to tokens that are not valid are never looked at.
struct OutputGradients {
  ConstTensor out;            // [B, T, Ho, V]
  ConstTensor final_state;    // [N, Hs, K, V]
  ConstTensor final_key_sum;  // [N, Hs, K]; with `normalize`
  Workspace saved = {};       // optional: what Attend kept in Outputs::saved, with the same options and inputs; only read. Else it is computed again
};

// The gradients of L with respect to the inputs as they are given: to q and k before the feature map, and to log_decay, not to the factor that it is
// the logarithm of. Heads that share a head of an input add up in its gradient, and so do tokens and sequences that share retention's log_decay or
// rwkv6's bonus. What belongs to a token that is not valid is 0. Under `normalize` a row whose denominator is zero passes nothing on, and scale's
// gradient is 0. At 0 the derivative of relu is 0, and so are all of l2_norm at a row of zeros without eps.
//
// Each is optional, and has the shape and the dtype of its input. So beside a q of bf16 or f16, those of q, k and v have that dtype, each of
// log_decay, beta, remove, write and bonus has that dtype or f32, whichever its input has, and those of the initial state and key sum are f32; beside
// a q of f32 or f64 all have that dtype. A rule has no gradient of an input that it does not take; those of the initial state and key sum are there
// even where these were not given and are zeros.
struct Gradients {
  Tensor q;                 // [B, T, Hq, K]
  Tensor k;                 // [B, T, Hk, K]
  Tensor v;                 // [B, T, Hv, V]
  Tensor log_decay;         // [H], [B, T, H] or [B, T, H, K], as the rule takes it
  Tensor beta;              // [B, T, H]
  Tensor remove;            // [B, T, H, K]
  Tensor write;             // [B, T, H, K]
  Tensor bonus;             // [H, K]
  Tensor initial_state;     // [N, Hs, K, V]
  Tensor initial_key_sum;   // [N, Hs, K]; with `normalize`
  double* scale = nullptr;  // one number, whatever the dtype, and whether the scale was given or is the default
};

// Computes the layer. NaN and inf in q, k, v, remove, write, bonus and the initial state are data: they reach what the formula carries them to, and
// nothing else. Numbers below the normal range of f32 (f64 for f64) are taken as zero inside the call; the caller's floating-point mode is put back.
// The same call gives the same bits for any number of threads. Memory beyond inputs and outputs: recurrent and chunkwise a chunk and a state
// a thread, or up to eight states that together take at most 512 KiB; parallel a table of T x T for every head in flight. It is Options::workspace,
// or else the calling thread's own, kept for its next call if it is at most 8 MiB. Nothing else is asked of the system, but for what the executor
// asks and for lists that the first call of a process makes.
[[nodiscard]] TERCET_API Status Attend(const Options& options, const Inputs& inputs, const Outputs& outputs);

// How many bytes of workspace that call needs, for data at any address: 0 where there is nothing to compute. It refuses what Attend refuses, but for
// Options::workspace, which it does not look at. The answer holds for the same options, views and offsets, and for as long as the executor has as
// many threads.
[[nodiscard]] TERCET_API Status WorkspaceBytes(const Options& options, const Inputs& inputs, const Outputs& outputs, int64_t* bytes);

// How many bytes Attend needs to keep states for the gradients of this call: one state a chunk and head (chunks shorter than 16 tokens: one every so
// many whole chunks as 16 tokens have). The chunk is the one given, else 32 tokens; 1 in the recurrent form.
[[nodiscard]] TERCET_API Status SavedBytes(const Options& options, const Inputs& inputs, int64_t* bytes);

// Computes gradients, in the recurrent or the chunkwise form (chunks of 32 where no chunk is given): backward over the chunks, from the
// states that Attend saved, or else from states that are computed again, forward, from the inputs. NaN and inf are data, as in Attend; with finite
// inputs and given gradients there are none but where numbers overflow. The same call gives the same bits for any number of threads. Memory beyond
// inputs and gradients: for every head in flight one state a chunk as SavedBytes counts them, where none were saved, and a chunk a thread.
[[nodiscard]] TERCET_API Status AttendGradient(const Options& options, const Inputs& inputs, const OutputGradients& given, const Gradients& wanted);

// The workspace of that call, as WorkspaceBytes says it of Attend's.
[[nodiscard]] TERCET_API Status GradientWorkspaceBytes(const Options& options, const Inputs& inputs, const OutputGradients& given,
                                                       const Gradients& wanted, int64_t* bytes);

// ---- The machine --------------------------------------------------------------------------------------------------------------------------

// The instruction sets this build has code for and this machine can run, best first. Options::target and $TERCET_TARGET take these names.
TERCET_API std::vector<std::string> Targets();
// The target a call with this option would use, or why it can't.
TERCET_API Status ChooseTarget(std::string_view option, std::string* name);
// Threads that the default executor has.
TERCET_API int DefaultConcurrency();
TERCET_API std::string_view Version();

}  // namespace tercet

#endif  // TERCET_TERCET_HPP_
