// The C face from C11: every function, every sentence of its own, and that each option and size of a struct is heard. Numbers worked by hand: with
// one head, K = V = 1, scale 1 and the linear rule, o_t = q_t (S_0 + k_1 v_1 + ... + k_t v_t).
#include "tercet/tercet.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) {                                              \
      printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                    \
    }                                                                \
  } while (0)

static void CheckTextAt(int line, const char* got, const char* want) {
  if (got != NULL && strcmp(got, want) == 0) return;
  printf("%s:%d: \"%s\" and must be \"%s\"\n", __FILE__, line, got != NULL ? got : "NULL", want);
  ++failures;
}
#define CHECK_TEXT(got, want) CheckTextAt(__LINE__, got, want)

enum { kTokens = 6 };
static const float kQ[kTokens] = {1, 2, 3, 4, 5, 6}, kK[kTokens] = {1, 0, 2, 1, -1, 3}, kV[kTokens] = {2, 5, 1, -3, 4, 1};
static const float kOut[kTokens] = {2, 4, 12, 4, -15, 0};
static const double kOne = 1;

// A call of those tokens.
typedef struct Call {
  tercet_options options;
  tercet_inputs inputs;
  tercet_outputs outputs;
  float out[kTokens];
} Call;

static tercet_const_tensor Row(const float* data, int64_t tokens) {
  return tercet_const_view(data, TERCET_DTYPE_F32, 4, (int64_t[]){1, tokens, 1, 1});
}
static tercet_tensor OutRow(float* data, int64_t tokens) { return tercet_view(data, TERCET_DTYPE_F32, 4, (int64_t[]){1, tokens, 1, 1}); }

static void Prepare(Call* call) {
  memset(call, 0, sizeof(*call));
  call->options.struct_size = sizeof(call->options);
  call->options.scale = &kOne;
  call->inputs.struct_size = sizeof(call->inputs);
  call->inputs.q = Row(kQ, kTokens);
  call->inputs.k = Row(kK, kTokens);
  call->inputs.v = Row(kV, kTokens);
  call->outputs.struct_size = sizeof(call->outputs);
  call->outputs.out = OutRow(call->out, kTokens);
}

static tercet_code Attend(const Call* call, tercet_message* message) { return tercet_attend(&call->options, &call->inputs, &call->outputs, message); }

static int Same(const float* got, const float* want) {
  for (int t = 0; t < kTokens; ++t)
    if (!(got[t] == want[t])) return 0;
  return 1;
}
static int IsRight(const float* out) { return Same(out, kOut); }

static void CheckRightAt(int line, Call* call) {
  tercet_message message;
  memset(&message, 'x', sizeof(message));
  const tercet_code code = Attend(call, &message);
  if (code == TERCET_OK && message.text[0] == '\0' && IsRight(call->out)) return;
  printf("%s:%d: code %d, \"%s\", or wrong numbers\n", __FILE__, line, (int)code, message.text);
  ++failures;
}
#define CHECK_RIGHT(call) CheckRightAt(__LINE__, call)

// Refused so, and nothing written.
static void CheckRefusedAt(int line, const Call* call, tercet_code want, const char* sentence) {
  tercet_message message;
  memset(&message, 'x', sizeof(message));
  const tercet_code code = Attend(call, &message);
  if (code != want) {
    printf("%s:%d: code %d and must be %d\n", __FILE__, line, (int)code, (int)want);
    ++failures;
  }
  CheckTextAt(line, message.text, sentence);
  for (int t = 0; t < kTokens; ++t) {
    if (call->out[t] != 0) {
      printf("%s:%d: a refused call has written\n", __FILE__, line);
      ++failures;
      break;
    }
  }
}
#define CHECK_REFUSED(call, code, sentence) CheckRefusedAt(__LINE__, call, code, sentence)

// ---- Numbers ----------------------------------------------------------------------------------------------------------------------------------

static void TestForms(void) {
  for (tercet_form form = TERCET_FORM_AUTOMATIC; form <= TERCET_FORM_CHUNKWISE; ++form) {
    Call call;
    Prepare(&call);
    call.options.form = form;
    CHECK_RIGHT(&call);
  }
  // Nobody has to want the sentence.
  Call call;
  Prepare(&call);
  CHECK(Attend(&call, NULL) == TERCET_OK && IsRight(call.out));
  call.options.chunk = -1;
  CHECK(Attend(&call, NULL) == TERCET_ERROR_INVALID_OPTION);
}

static void TestStateInPlace(void) {
  float out[kTokens] = {0}, state = 0;
  for (int64_t begin = 0; begin < kTokens; begin += 2) {
    Call call;
    Prepare(&call);
    call.inputs.q = Row(kQ + begin, 2);
    call.inputs.k = Row(kK + begin, 2);
    call.inputs.v = Row(kV + begin, 2);
    call.inputs.initial_state = tercet_const_view(&state, TERCET_DTYPE_F32, 4, (int64_t[]){1, 1, 1, 1});
    call.outputs.final_state = tercet_view(&state, TERCET_DTYPE_F32, 4, (int64_t[]){1, 1, 1, 1});
    call.outputs.out = OutRow(out + begin, 2);
    CHECK(Attend(&call, NULL) == TERCET_OK);
  }
  CHECK(IsRight(out));
  CHECK(state == 0);  // 2 + 0 + 2 - 3 - 4 + 3
}

static void TestWorkspace(void) {
  Call call;
  Prepare(&call);
  int64_t bytes = -1;
  tercet_message message;
  CHECK(tercet_workspace_bytes(&call.options, &call.inputs, &call.outputs, &bytes, &message) == TERCET_OK);
  CHECK_TEXT(message.text, "");
  CHECK(bytes > 0);
  call.options.workspace.data = malloc((size_t)bytes);
  call.options.workspace.bytes = bytes;
  CHECK_RIGHT(&call);
  memset(call.out, 0, sizeof(call.out));
  call.options.workspace.bytes = bytes - 1;
  char sentence[200];
  snprintf(sentence, sizeof(sentence), "workspace has %lld bytes and must have at least %lld, which WorkspaceBytes says of this call",
           (long long)(bytes - 1), (long long)bytes);
  CHECK_REFUSED(&call, TERCET_ERROR_INVALID_OPTION, sentence);
  free(call.options.workspace.data);
}

// L = the sum of out and of 10 times the final state. What comes after token t is the sum of q from t on, and 10.
static void TestGradient(void) {
  static const float kDq[kTokens] = {2, 2, 4, 1, -3, 0};
  static const float kDk[kTokens] = {2 * 31, 5 * 30, 1 * 28, -3 * 25, 4 * 21, 1 * 16};
  static const float kDv[kTokens] = {1 * 31, 0 * 30, 2 * 28, 1 * 25, -1 * 21, 3 * 16};
  const float d_out[kTokens] = {1, 1, 1, 1, 1, 1}, d_state = 10;
  for (tercet_form form = TERCET_FORM_RECURRENT; form <= TERCET_FORM_CHUNKWISE; ++form) {
    for (int with_saved = 0; with_saved < 2; ++with_saved) {
      Call call;
      Prepare(&call);
      call.options.form = form;
      float dq[kTokens], dk[kTokens], dv[kTokens], d_initial = -1;
      double d_scale = -1;
      tercet_output_gradients given = {.struct_size = sizeof(given)};
      given.out = Row(d_out, kTokens);
      given.final_state = tercet_const_view(&d_state, TERCET_DTYPE_F32, 4, (int64_t[]){1, 1, 1, 1});
      tercet_gradients wanted = {.struct_size = sizeof(wanted)};
      wanted.q = OutRow(dq, kTokens);
      wanted.k = OutRow(dk, kTokens);
      wanted.v = OutRow(dv, kTokens);
      wanted.initial_state = tercet_view(&d_initial, TERCET_DTYPE_F32, 4, (int64_t[]){1, 1, 1, 1});
      wanted.scale = &d_scale;
      tercet_message message;
      int64_t saved_bytes = 0, bytes = 0;
      if (with_saved) {
        CHECK(tercet_saved_bytes(&call.options, &call.inputs, &saved_bytes, &message) == TERCET_OK);
        CHECK_TEXT(message.text, "");
        CHECK(saved_bytes > 0);
        call.outputs.saved.data = given.saved.data = malloc((size_t)saved_bytes);
        call.outputs.saved.bytes = given.saved.bytes = saved_bytes;
        CHECK_RIGHT(&call);
      }
      CHECK(tercet_gradient_workspace_bytes(&call.options, &call.inputs, &given, &wanted, &bytes, &message) == TERCET_OK);
      CHECK_TEXT(message.text, "");
      CHECK(bytes > 0);
      call.options.workspace.data = malloc((size_t)bytes);
      call.options.workspace.bytes = bytes;
      CHECK(tercet_attend_gradient(&call.options, &call.inputs, &given, &wanted, &message) == TERCET_OK);
      CHECK_TEXT(message.text, "");
      CHECK(Same(dq, kDq));
      CHECK(Same(dk, kDk));
      CHECK(Same(dv, kDv));
      CHECK(d_initial == 31);
      CHECK(d_scale == 7);  // the sum of out
      // The workspace is heard of, and the saved states.
      call.options.workspace.bytes = bytes - 1;
      CHECK(tercet_attend_gradient(&call.options, &call.inputs, &given, &wanted, &message) == TERCET_ERROR_INVALID_OPTION);
      if (with_saved) {
        memset(given.saved.data, 0, (size_t)saved_bytes);
        call.options.workspace.bytes = bytes;
        CHECK(tercet_attend_gradient(&call.options, &call.inputs, &given, &wanted, &message) == TERCET_ERROR_VALUE);
      }
      free(call.options.workspace.data);
      free(given.saved.data);
    }
  }
}

// ---- Executors --------------------------------------------------------------------------------------------------------------------------------

enum { kLongTokens = 80, kKeyDim = 65, kValueDim = 257, kThreads = 4 };  // work enough for a second thread

typedef struct Pool {
  int64_t pieces;  // of all calls
  tercet_work* work;
  int64_t count;
} Pool;

typedef struct Share {
  Pool* pool;
  int64_t first;
} Share;

static void* RunShare(void* given) {
  const Share* share = given;
  for (int64_t piece = share->first; piece < share->pool->count; piece += kThreads) tercet_run_piece(share->pool->work, piece);
  return NULL;
}

static void RunOnThreads(void* context, int64_t count, tercet_work* work) {
  Pool* pool = context;
  pool->pieces += count;
  pool->work = work;
  pool->count = count;
  pthread_t threads[kThreads];
  Share shares[kThreads];
  int started[kThreads];
  for (int i = 0; i < kThreads; ++i) {
    shares[i].pool = pool;
    shares[i].first = i;
    started[i] = pthread_create(&threads[i], NULL, RunShare, &shares[i]) == 0;
    if (!started[i]) RunShare(&shares[i]);
  }
  for (int i = 0; i < kThreads; ++i)
    if (started[i]) pthread_join(threads[i], NULL);
}

static void RunBackwards(void* context, int64_t count, tercet_work* work) {
  *(int64_t*)context += count;
  for (int64_t piece = count - 1; piece >= 0; --piece) tercet_run_piece(work, piece);
}

static void RunNothing(void* context, int64_t count, tercet_work* work) {
  (void)context, (void)count, (void)work;
  tercet_run_piece(NULL, 0);
}

static void TestExecutors(void) {
  static float q[kLongTokens * kKeyDim], k[kLongTokens * kKeyDim], v[kLongTokens * kValueDim], out[4][kLongTokens * kValueDim];
  for (int i = 0; i < kLongTokens * kKeyDim; ++i) q[i] = (float)(i % 7) - 3, k[i] = (float)(i % 11) / 16;
  for (int i = 0; i < kLongTokens * kValueDim; ++i) v[i] = (float)(i % 13) / 8 - 1;
  Call call;
  Prepare(&call);
  call.inputs.q = tercet_const_view(q, TERCET_DTYPE_F32, 4, (int64_t[]){1, kLongTokens, 1, kKeyDim});
  call.inputs.k = tercet_const_view(k, TERCET_DTYPE_F32, 4, (int64_t[]){1, kLongTokens, 1, kKeyDim});
  call.inputs.v = tercet_const_view(v, TERCET_DTYPE_F32, 4, (int64_t[]){1, kLongTokens, 1, kValueDim});
  const int64_t shape[] = {1, kLongTokens, 1, kValueDim};
  call.outputs.out = tercet_view(out[0], TERCET_DTYPE_F32, 4, shape);
  CHECK(Attend(&call, NULL) == TERCET_OK);

  Pool pool = {0};
  tercet_executor executor = {.struct_size = sizeof(executor), .context = &pool, .parallel_for = RunOnThreads, .concurrency = kThreads};
  call.options.executor = &executor;
  call.outputs.out = tercet_view(out[1], TERCET_DTYPE_F32, 4, shape);
  CHECK(Attend(&call, NULL) == TERCET_OK);
  CHECK(pool.pieces >= 2);
  CHECK(memcmp(out[0], out[1], sizeof(out[0])) == 0);

  // `threads` is of the executor's.
  const int64_t before = pool.pieces;
  call.options.threads = 1;
  CHECK(Attend(&call, NULL) == TERCET_OK);
  CHECK(pool.pieces == before);
  call.options.threads = 0;

  int64_t pieces = 0;
  executor.context = &pieces;
  executor.parallel_for = RunBackwards;
  executor.concurrency = INT64_MAX;
  call.outputs.out = tercet_view(out[2], TERCET_DTYPE_F32, 4, shape);
  CHECK(Attend(&call, NULL) == TERCET_OK);
  CHECK(pieces >= 2);
  CHECK(memcmp(out[0], out[2], sizeof(out[0])) == 0);

  // Of an older version, without concurrency: one at a time.
  pieces = 0;
  executor.struct_size = offsetof(tercet_executor, concurrency);
  call.outputs.out = tercet_view(out[3], TERCET_DTYPE_F32, 4, shape);
  CHECK(Attend(&call, NULL) == TERCET_OK);
  CHECK(pieces == 0);
  CHECK(memcmp(out[0], out[3], sizeof(out[0])) == 0);
  executor.struct_size = sizeof(executor);
  executor.concurrency = INT64_MIN;
  CHECK(Attend(&call, NULL) == TERCET_OK);
  CHECK(pieces == 0);

  tercet_message message;
  executor.concurrency = 2;
  executor.parallel_for = RunNothing;
  CHECK(Attend(&call, &message) == TERCET_ERROR_INTERNAL);
  CHECK_TEXT(message.text, "the executor returned before it had run every piece of the call, so the outputs are not complete");
}

// ---- Options ----------------------------------------------------------------------------------------------------------------------------------

static void TestOptions(void) {
  Call call;
#define REFUSED(change, code, sentence)   \
  do {                                    \
    Prepare(&call);                       \
    change;                               \
    CHECK_REFUSED(&call, code, sentence); \
  } while (0)
  // What the library says of each.
  REFUSED(call.options.rule = 9, TERCET_ERROR_INVALID_OPTION, "rule is 9 and must be one of the 9 that Rules() lists");
  REFUSED(call.options.form = 4, TERCET_ERROR_INVALID_OPTION, "form is 4 and must be automatic, parallel, recurrent or chunkwise");
  REFUSED(call.options.feature_map = 200, TERCET_ERROR_INVALID_OPTION, "feature_map is 200 and must be identity, elu_plus_one, relu or l2_norm");
  REFUSED(call.options.chunk = -7, TERCET_ERROR_INVALID_OPTION, "chunk is -7 and must be at least 1, or 0 for the library's choice");
  const double infinite = 1e308 * 10, below = -0.5;
  REFUSED(call.options.scale = &infinite, TERCET_ERROR_INVALID_OPTION, "scale is inf and must be finite");
  REFUSED(call.options.eps = &below, TERCET_ERROR_INVALID_OPTION, "eps is -0.5 and must be finite and at least 0");
  REFUSED(call.options.threads = -2, TERCET_ERROR_INVALID_OPTION, "threads is -2 and must be at least 1, or 0 for all");
  REFUSED(call.options.table_limit = -3, TERCET_ERROR_INVALID_OPTION, "table_limit is -3 and must be at least 0 bytes");
  REFUSED(call.options.workspace.bytes = -4, TERCET_ERROR_INVALID_OPTION, "workspace has -4 bytes and must have at least 0");
  REFUSED(call.options.rule = TERCET_RULE_RETENTION, TERCET_ERROR_MISSING_INPUT, "log_decay was not given and retention needs it as [H]");
  REFUSED(memset(&call.inputs.q, 0, sizeof(call.inputs.q)), TERCET_ERROR_MISSING_INPUT, "q was not given and linear needs it as [B, T, H, K]");
  REFUSED(call.inputs.beta = call.inputs.q, TERCET_ERROR_UNEXPECTED_INPUT, "beta was given and linear takes none");
  REFUSED(call.inputs.q.shape[1] = 5, TERCET_ERROR_SHAPE, "k has shape [1, 6, 1, 1] and must be [B, T, H, K] = [1, 5, 1, 1]");
  REFUSED(call.inputs.q.dtype = TERCET_DTYPE_F64, TERCET_ERROR_DTYPE, "k is f32 and must be f64, the dtype of q");
  REFUSED(call.inputs.k.data = NULL, TERCET_ERROR_NULL_DATA, "k has no data and must point to its 6 elements");
  REFUSED(call.outputs.out.data = (float*)kQ, TERCET_ERROR_OVERLAP, "out shares memory with q and must be apart from it");
  REFUSED(call.options.form = TERCET_FORM_PARALLEL; call.options.table_limit = 1, TERCET_ERROR_TABLE_LIMIT,
                                                    "table_limit is 1 bytes and must be at least 144 for the parallel form's table of 6 x 6; the "
                                                    "chunkwise form computes the same with a small one");

  // What no enumeration of the library can hold.
  REFUSED(call.options.rule = -1, TERCET_ERROR_INVALID_OPTION, "rule is -1 and must be one of the constants TERCET_RULE_...");
  REFUSED(call.options.rule = 256, TERCET_ERROR_INVALID_OPTION, "rule is 256 and must be one of the constants TERCET_RULE_...");
  REFUSED(call.options.form = 257, TERCET_ERROR_INVALID_OPTION, "form is 257 and must be one of the constants TERCET_FORM_...");
  REFUSED(call.options.feature_map = INT32_MIN, TERCET_ERROR_INVALID_OPTION,
          "feature_map is -2147483648 and must be one of the constants TERCET_FEATURE_MAP_...");
  REFUSED(call.inputs.q.dtype = 256, TERCET_ERROR_DTYPE, "q is unknown and must be f32, f64, bf16 or f16");
  REFUSED(call.inputs.k.dtype = -1, TERCET_ERROR_DTYPE, "k is unknown and must be f32, the dtype of q");

  // NULL.
  tercet_executor executor = {.struct_size = sizeof(executor)};
  REFUSED(call.options.executor = &executor, TERCET_ERROR_NULL_DATA, "parallel_for of the executor is NULL and must point to a function");
#undef REFUSED

  // Each has its default, and is heard of.
  const float minus[1] = {-0.5f}, plus[1] = {0.5f};
  Prepare(&call);
  call.options.rule = TERCET_RULE_RETENTION;
  call.inputs.log_decay = tercet_const_view(minus, TERCET_DTYPE_F32, 1, (int64_t[]){1});
  CHECK(Attend(&call, NULL) == TERCET_OK);
  Prepare(&call);
  call.options.rule = TERCET_RULE_RETENTION;
  call.inputs.log_decay = tercet_const_view(plus, TERCET_DTYPE_F32, 1, (int64_t[]){1});
  CHECK_REFUSED(&call, TERCET_ERROR_VALUE,
                "log_decay[0] is 0.5 and must be at most 0: it is the natural logarithm of the factor by which the state decays");
  call.options.skip_check_values = 1;
  CHECK(Attend(&call, NULL) == TERCET_OK);

  // K = 4, and q of ones twice: the default scale of linear is a half, rwkv7's 1. Under l2_norm q is a half, with an eps of 12 a quarter.
  float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1}, out[1] = {0};
  const int64_t keys[] = {1, 1, 1, 4}, values[] = {1, 1, 1, 1};
  const double twelve = 12, two = 2;
  Prepare(&call);
  call.inputs.q = call.inputs.k = tercet_const_view(ones, TERCET_DTYPE_F32, 4, keys);
  call.inputs.v = tercet_const_view(ones, TERCET_DTYPE_F32, 4, values);
  call.outputs.out = tercet_view(out, TERCET_DTYPE_F32, 4, values);
  call.options.scale = NULL;
  CHECK(Attend(&call, NULL) == TERCET_OK && out[0] == 2);
  call.options.scale = &two;
  CHECK(Attend(&call, NULL) == TERCET_OK && out[0] == 8);
  call.options.scale = &kOne;
  call.options.feature_map = TERCET_FEATURE_MAP_L2_NORM;
  call.options.eps = &twelve;
  CHECK(Attend(&call, NULL) == TERCET_OK && out[0] == 0.25f);
  call.options.eps = NULL;
  CHECK(Attend(&call, NULL) == TERCET_OK && out[0] > 0.99999f && out[0] < 0.9999999f);  // 1 / (1 + 1e-6 / 4), less than 1
  call.options.feature_map = TERCET_FEATURE_MAP_ELU_PLUS_ONE;
  CHECK(Attend(&call, NULL) == TERCET_OK && out[0] == 16);
  call.options.normalize = 1;
  CHECK(Attend(&call, NULL) == TERCET_OK && out[0] == 1);
}

// ---- Structs of other versions ----------------------------------------------------------------------------------------------------------------

static void TestOlderStructs(void) {
  Call call;
  Prepare(&call);
  call.options.workspace.bytes = -1;  // would be refused
  call.options.struct_size = offsetof(tercet_options, workspace);
  memset(&call.inputs.log_decay, 'x', sizeof(call.inputs) - offsetof(tercet_inputs, log_decay));
  call.inputs.struct_size = offsetof(tercet_inputs, log_decay);
  memset(&call.outputs.final_state, 'x', sizeof(call.outputs) - offsetof(tercet_outputs, final_state));
  call.outputs.struct_size = offsetof(tercet_outputs, final_state);
  CHECK_RIGHT(&call);

  float dq[kTokens];
  tercet_output_gradients given;
  tercet_gradients wanted;
  memset(&given, 'x', sizeof(given));
  memset(&wanted, 'x', sizeof(wanted));
  given.struct_size = offsetof(tercet_output_gradients, final_state);
  given.out = Row(kQ, kTokens);
  wanted.struct_size = offsetof(tercet_gradients, k);
  wanted.q = OutRow(dq, kTokens);
  tercet_message message;
  CHECK(tercet_attend_gradient(&call.options, &call.inputs, &given, &wanted, &message) == TERCET_OK);
  CHECK_TEXT(message.text, "");
  CHECK(dq[2] == 3 * 4);

  // The shortest of all: the defaults, and with them no inputs.
  Prepare(&call);
  call.options.struct_size = call.inputs.struct_size = call.outputs.struct_size = sizeof(size_t);
  CHECK_REFUSED(&call, TERCET_ERROR_MISSING_INPUT, "q was not given and linear needs it as [B, T, H, K]");
}

// Structs of a later version, which has more at the end.
typedef struct LaterOptions {
  tercet_options now;
  int64_t more[2];
} LaterOptions;
typedef struct LaterOutputs {
  tercet_outputs now;
  unsigned char more[8];
} LaterOutputs;

static void TestNewerStructs(void) {
  Call call;
  Prepare(&call);
  LaterOptions options;
  memset(&options, 0, sizeof(options));
  options.now = call.options;
  options.now.struct_size = sizeof(options);
  LaterOutputs outputs;
  memset(&outputs, 0, sizeof(outputs));
  outputs.now = call.outputs;
  outputs.now.struct_size = sizeof(outputs);
  tercet_message message;
  CHECK(tercet_attend(&options.now, &call.inputs, &outputs.now, &message) == TERCET_OK);
  CHECK_TEXT(message.text, "");
  CHECK(IsRight(call.out));

  char sentence[200];
  options.more[1] = 1;
  CHECK(tercet_attend(&options.now, &call.inputs, &outputs.now, &message) == TERCET_ERROR_INVALID_OPTION);
  snprintf(sentence, sizeof(sentence),
           "options has struct_size %zu and must have zeros past its first %zu bytes, which are all that this version of the library knows",
           sizeof(options), sizeof(tercet_options));
  CHECK_TEXT(message.text, sentence);
  options.more[1] = 0;
  outputs.more[7] = 128;
  CHECK(tercet_attend(&options.now, &call.inputs, &outputs.now, &message) == TERCET_ERROR_INVALID_OPTION);
  snprintf(sentence, sizeof(sentence),
           "outputs has struct_size %zu and must have zeros past its first %zu bytes, which are all that this version of the library knows",
           sizeof(outputs), sizeof(tercet_outputs));
  CHECK_TEXT(message.text, sentence);
}

static void TestSizesThatAreNone(void) {
  const size_t sizes[] = {0, 1, sizeof(size_t) - 1, sizeof(tercet_options) - 1, sizeof(tercet_options) + 1, (size_t)1 << 20, SIZE_MAX};
  for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
    char sentence[200];
    Call call;
    Prepare(&call);
    call.options.struct_size = sizes[i];
    snprintf(sentence, sizeof(sentence), "options has struct_size %zu and must have that of a tercet_options, here %zu", sizes[i],
             sizeof(tercet_options));
    CHECK_REFUSED(&call, TERCET_ERROR_INVALID_OPTION, sentence);
  }
  // Of every struct.
  char sentence[200];
  tercet_message message;
  Call call;
  Prepare(&call);
  call.inputs.struct_size = 0;
  snprintf(sentence, sizeof(sentence), "inputs has struct_size 0 and must have that of a tercet_inputs, here %zu", sizeof(tercet_inputs));
  CHECK_REFUSED(&call, TERCET_ERROR_INVALID_OPTION, sentence);
  int64_t bytes = 12345;
  CHECK(tercet_saved_bytes(&call.options, &call.inputs, &bytes, &message) == TERCET_ERROR_INVALID_OPTION);
  CHECK_TEXT(message.text, sentence);
  Prepare(&call);
  call.outputs.struct_size = 0;
  snprintf(sentence, sizeof(sentence), "outputs has struct_size 0 and must have that of a tercet_outputs, here %zu", sizeof(tercet_outputs));
  CHECK_REFUSED(&call, TERCET_ERROR_INVALID_OPTION, sentence);
  CHECK(tercet_workspace_bytes(&call.options, &call.inputs, &call.outputs, &bytes, &message) == TERCET_ERROR_INVALID_OPTION);
  CHECK_TEXT(message.text, sentence);
  tercet_executor executor = {0};
  Prepare(&call);
  call.options.executor = &executor;
  snprintf(sentence, sizeof(sentence), "executor has struct_size 0 and must have that of a tercet_executor, here %zu", sizeof(tercet_executor));
  CHECK_REFUSED(&call, TERCET_ERROR_INVALID_OPTION, sentence);
  Prepare(&call);
  tercet_output_gradients given = {0};
  tercet_gradients wanted = {0};
  snprintf(sentence, sizeof(sentence), "given has struct_size 0 and must have that of a tercet_output_gradients, here %zu", sizeof(given));
  CHECK(tercet_attend_gradient(&call.options, &call.inputs, &given, &wanted, &message) == TERCET_ERROR_INVALID_OPTION);
  CHECK_TEXT(message.text, sentence);
  given.struct_size = sizeof(given);
  snprintf(sentence, sizeof(sentence), "wanted has struct_size 0 and must have that of a tercet_gradients, here %zu", sizeof(wanted));
  CHECK(tercet_gradient_workspace_bytes(&call.options, &call.inputs, &given, &wanted, &bytes, &message) == TERCET_ERROR_INVALID_OPTION);
  CHECK_TEXT(message.text, sentence);
  CHECK(bytes == 12345);
}

// ---- NULL -------------------------------------------------------------------------------------------------------------------------------------

static void TestNulls(void) {
  Call call;
  Prepare(&call);
  const tercet_options* o = &call.options;
  const tercet_inputs* i = &call.inputs;
  const tercet_outputs* out = &call.outputs;
  const tercet_output_gradients given = {.struct_size = sizeof(given)};
  const tercet_gradients wanted = {.struct_size = sizeof(wanted)};
  int64_t bytes = 12345;
  tercet_message message;
#define NULL_IN(call, sentence)              \
  do {                                       \
    CHECK((call) == TERCET_ERROR_NULL_DATA); \
    CHECK_TEXT(message.text, sentence);      \
  } while (0)
  const char* const no_options = "options is NULL and must point to a tercet_options";
  const char* const no_inputs = "inputs is NULL and must point to a tercet_inputs";
  const char* const no_outputs = "outputs is NULL and must point to a tercet_outputs";
  const char* const no_given = "given is NULL and must point to a tercet_output_gradients";
  const char* const no_wanted = "wanted is NULL and must point to a tercet_gradients";
  const char* const no_bytes = "bytes is NULL and must point to an int64_t";
  NULL_IN(tercet_attend(NULL, i, out, &message), no_options);
  NULL_IN(tercet_attend(o, NULL, out, &message), no_inputs);
  NULL_IN(tercet_attend(o, i, NULL, &message), no_outputs);
  NULL_IN(tercet_workspace_bytes(NULL, i, out, &bytes, &message), no_options);
  NULL_IN(tercet_workspace_bytes(o, NULL, out, &bytes, &message), no_inputs);
  NULL_IN(tercet_workspace_bytes(o, i, NULL, &bytes, &message), no_outputs);
  NULL_IN(tercet_workspace_bytes(o, i, out, NULL, &message), no_bytes);
  NULL_IN(tercet_saved_bytes(NULL, i, &bytes, &message), no_options);
  NULL_IN(tercet_saved_bytes(o, NULL, &bytes, &message), no_inputs);
  NULL_IN(tercet_saved_bytes(o, i, NULL, &message), no_bytes);
  NULL_IN(tercet_attend_gradient(NULL, i, &given, &wanted, &message), no_options);
  NULL_IN(tercet_attend_gradient(o, NULL, &given, &wanted, &message), no_inputs);
  NULL_IN(tercet_attend_gradient(o, i, NULL, &wanted, &message), no_given);
  NULL_IN(tercet_attend_gradient(o, i, &given, NULL, &message), no_wanted);
  NULL_IN(tercet_gradient_workspace_bytes(NULL, i, &given, &wanted, &bytes, &message), no_options);
  NULL_IN(tercet_gradient_workspace_bytes(o, NULL, &given, &wanted, &bytes, &message), no_inputs);
  NULL_IN(tercet_gradient_workspace_bytes(o, i, NULL, &wanted, &bytes, &message), no_given);
  NULL_IN(tercet_gradient_workspace_bytes(o, i, &given, NULL, &bytes, &message), no_wanted);
  NULL_IN(tercet_gradient_workspace_bytes(o, i, &given, &wanted, NULL, &message), no_bytes);
  NULL_IN(tercet_choose_target(NULL, NULL, &message), "name is NULL and must point to a const char*");
#undef NULL_IN
  CHECK(tercet_attend(NULL, NULL, NULL, NULL) == TERCET_ERROR_NULL_DATA);
  CHECK(bytes == 12345);
  CHECK(tercet_rule_from_name(NULL) == -1);
  CHECK(tercet_form_from_name(NULL) == -1);
  CHECK(tercet_feature_map_from_name(NULL) == -1);
}

// ---- Views, names and the machine -------------------------------------------------------------------------------------------------------------

static void TestViews(void) {
  double numbers[24];
  const int64_t shape[] = {2, 3, 4};
  const tercet_tensor view = tercet_view(numbers, TERCET_DTYPE_F64, 3, shape);
  CHECK(view.data == numbers && view.dtype == TERCET_DTYPE_F64 && view.rank == 3);
  CHECK(view.shape[0] == 2 && view.shape[1] == 3 && view.shape[2] == 4 && view.shape[3] == 0);
  CHECK(view.strides[0] == 12 && view.strides[1] == 4 && view.strides[2] == 1 && view.strides[3] == 0);
  const tercet_const_tensor constant = tercet_const_view(numbers, TERCET_DTYPE_F64, 3, shape);
  CHECK(sizeof(view) == sizeof(constant) && memcmp(&view, &constant, sizeof(view)) == 0);
  const tercet_tensor none = tercet_view(NULL, 0, 0, NULL);
  CHECK(none.data == NULL && none.rank == 0);

  // What can't be is refused by the call.
  Call call;
  Prepare(&call);
  call.inputs.k = tercet_const_view(kK, TERCET_DTYPE_F32, 5, (int64_t[]){1, 1, 6, 1, 1});
  CHECK_REFUSED(&call, TERCET_ERROR_SHAPE, "k has rank 5 and must have one from 0 (not given) to 4");
  call.inputs.k = tercet_const_view(kK, TERCET_DTYPE_F32, -1, (int64_t[]){6});
  CHECK_REFUSED(&call, TERCET_ERROR_SHAPE, "k has rank -1 and must have one from 0 (not given) to 4");
  call.inputs.k = tercet_const_view(kK, TERCET_DTYPE_F32, 4, NULL);
  CHECK_REFUSED(&call, TERCET_ERROR_SHAPE, "k has shape [-1, -1, -1, -1] and must have no negative size");
  call.inputs.k = tercet_const_view(kK, TERCET_DTYPE_F32, 4, (int64_t[]){INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX});
  CHECK(Attend(&call, NULL) == TERCET_ERROR_SHAPE);
}

static void TestNames(void) {
  static const char* const kRules[] = {"linear", "retention", "simple_gla", "gla", "rwkv6", "delta", "gated_delta", "kda", "rwkv7"};
  static const tercet_rule kRuleConstants[] = {TERCET_RULE_LINEAR,      TERCET_RULE_RETENTION, TERCET_RULE_SIMPLE_GLA,
                                               TERCET_RULE_GLA,         TERCET_RULE_RWKV6,     TERCET_RULE_DELTA,
                                               TERCET_RULE_GATED_DELTA, TERCET_RULE_KDA,       TERCET_RULE_RWKV7};
  for (int i = 0; i < 9; ++i) {
    CHECK(kRuleConstants[i] == i);
    CHECK_TEXT(tercet_rule_name(i), kRules[i]);
    CHECK(tercet_rule_from_name(kRules[i]) == i);
    const tercet_rule_info* info = tercet_info(i);
    CHECK(info != NULL && info->rule == i);
    if (info == NULL) continue;
    CHECK_TEXT(info->name, kRules[i]);
    CHECK(strstr(info->equation, "S_t") != NULL);
    CHECK(info == tercet_info(i));
    CHECK(info->takes_beta == (i == TERCET_RULE_DELTA || i == TERCET_RULE_GATED_DELTA || i == TERCET_RULE_KDA));
    CHECK(info->takes_remove_and_write == (i == TERCET_RULE_RWKV7));
    CHECK(info->takes_bonus == (i == TERCET_RULE_RWKV6));
    CHECK(info->can_normalize == (i <= TERCET_RULE_RWKV6));
    CHECK(info->default_scale_is_one == (i == TERCET_RULE_RWKV7));
  }
  CHECK(tercet_info(-1) == NULL && tercet_info(9) == NULL && tercet_info(INT32_MAX) == NULL);
  if (tercet_info(TERCET_RULE_GLA) != NULL) {
    CHECK_TEXT(tercet_info(TERCET_RULE_LINEAR)->log_decay_layout, "");
    CHECK_TEXT(tercet_info(TERCET_RULE_RETENTION)->log_decay_layout, "[H]");
    CHECK_TEXT(tercet_info(TERCET_RULE_SIMPLE_GLA)->log_decay_layout, "[B, T, H]");
    CHECK_TEXT(tercet_info(TERCET_RULE_GLA)->log_decay_layout, "[B, T, H, K]");
    CHECK(strstr(tercet_info(TERCET_RULE_GLA)->also_known_as, "HGRN2") != NULL);
  }

  static const char* const kForms[] = {"automatic", "parallel", "recurrent", "chunkwise"};
  static const tercet_form kFormConstants[] = {TERCET_FORM_AUTOMATIC, TERCET_FORM_PARALLEL, TERCET_FORM_RECURRENT, TERCET_FORM_CHUNKWISE};
  static const char* const kMaps[] = {"identity", "elu_plus_one", "relu", "l2_norm"};
  static const tercet_feature_map kMapConstants[] = {TERCET_FEATURE_MAP_IDENTITY, TERCET_FEATURE_MAP_ELU_PLUS_ONE, TERCET_FEATURE_MAP_RELU,
                                                     TERCET_FEATURE_MAP_L2_NORM};
  for (int i = 0; i < 4; ++i) {
    CHECK_TEXT(tercet_form_name(kFormConstants[i]), kForms[i]);
    CHECK(tercet_form_from_name(kForms[i]) == kFormConstants[i]);
    CHECK_TEXT(tercet_feature_map_name(kMapConstants[i]), kMaps[i]);
    CHECK(tercet_feature_map_from_name(kMaps[i]) == kMapConstants[i]);
  }
  static const char* const kDtypes[] = {"f32", "f64", "bf16", "f16", "i32", "i64", "bool"};
  static const tercet_dtype kDtypeConstants[] = {TERCET_DTYPE_F32, TERCET_DTYPE_F64, TERCET_DTYPE_BF16, TERCET_DTYPE_F16,
                                                 TERCET_DTYPE_I32, TERCET_DTYPE_I64, TERCET_DTYPE_BOOL};
  for (int i = 0; i < 7; ++i) CHECK_TEXT(tercet_dtype_name(kDtypeConstants[i]), kDtypes[i]);

  static const int32_t kNone[] = {-1, 9, 255, 256, 65536, INT32_MIN, INT32_MAX};
  for (size_t i = 0; i < sizeof(kNone) / sizeof(kNone[0]); ++i) {
    CHECK_TEXT(tercet_rule_name(kNone[i]), "unknown");
    CHECK_TEXT(tercet_form_name(kNone[i]), "unknown");
    CHECK_TEXT(tercet_feature_map_name(kNone[i]), "unknown");
    CHECK_TEXT(tercet_dtype_name(kNone[i]), "unknown");
  }
  CHECK(tercet_rule_from_name("Linear") == -1 && tercet_rule_from_name("") == -1);
  CHECK(tercet_form_from_name("unknown") == -1);
  CHECK(tercet_feature_map_from_name("relu ") == -1);
}

static void TestMachine(void) {
  CHECK_TEXT(tercet_version(), TERCET_TEST_VERSION);
  CHECK(tercet_default_concurrency() >= 1);

  int32_t targets = 0;
  const char* name = NULL;
  tercet_message message;
  for (; tercet_target(targets) != NULL; ++targets) {
    CHECK(tercet_target(targets) == tercet_target(targets));
    name = NULL;
    CHECK(tercet_choose_target(tercet_target(targets), &name, &message) == TERCET_OK);
    CHECK(name == tercet_target(targets));
    Call call;
    Prepare(&call);
    call.options.target = tercet_target(targets);
    CHECK_RIGHT(&call);
  }
  CHECK(targets >= 1);
  CHECK(tercet_target(-1) == NULL && tercet_target(INT32_MAX) == NULL);

  Call call;
  unsetenv("TERCET_TARGET");
  for (int i = 0; i < 2; ++i) {
    name = NULL;
    CHECK(tercet_choose_target(i == 0 ? NULL : "", &name, NULL) == TERCET_OK);
    CHECK(name == tercet_target(0));
  }
  Prepare(&call);
  call.options.target = "";
  CHECK_RIGHT(&call);

  name = "untouched";
  CHECK(tercet_choose_target("none", &name, &message) == TERCET_ERROR_INVALID_OPTION);
  CHECK(strncmp(message.text, "target is \"none\" and must be one of those ", 42) == 0);
  CHECK_TEXT(name, "untouched");
  Prepare(&call);
  call.options.target = "none";
  CHECK_REFUSED(&call, TERCET_ERROR_INVALID_OPTION, message.text);
  setenv("TERCET_TARGET", "of the environment", 1);
  CHECK(tercet_choose_target(NULL, &name, &message) == TERCET_ERROR_INVALID_OPTION);
  CHECK(strncmp(message.text, "TERCET_TARGET is \"of the environment\" and ", 42) == 0);
  unsetenv("TERCET_TARGET");
}

// A sentence that has no room is cut, and not within a character.
static void TestLongSentences(void) {
  for (size_t shift = 0; shift < 2; ++shift) {
    char target[1001] = "";
    if (shift == 1) target[0] = 'x';
    for (size_t i = shift; i + 2 < sizeof(target); i += 2) target[i] = '\xc3', target[i + 1] = '\xa9';
    target[1000] = '\0';
    const char* name = NULL;
    struct {
      tercet_message message;
      char after[16];
    } guarded;
    memset(&guarded, 'x', sizeof(guarded));
    CHECK(tercet_choose_target(target, &name, &guarded.message) == TERCET_ERROR_INVALID_OPTION);
    const char* text = guarded.message.text;
    const size_t length = strlen(text);
    CHECK(length == 510 + shift);  // 11 bytes before the name, in which every second byte begins a character
    CHECK(strncmp(text, "target is \"", 11) == 0 && strncmp(text + 11, target, length - 14) == 0);
    CHECK(strcmp(text + length - 5, "\xc3\xa9...") == 0);
    for (size_t i = 0; i < sizeof(guarded.after); ++i) CHECK(guarded.after[i] == 'x');
  }
}

int main(void) {
  TestForms();
  TestStateInPlace();
  TestWorkspace();
  TestGradient();
  TestExecutors();
  TestOptions();
  TestOlderStructs();
  TestNewerStructs();
  TestSizesThatAreNone();
  TestNulls();
  TestViews();
  TestNames();
  TestMachine();
  TestLongSentences();
  if (failures > 0) printf("%d failures\n", failures);
  return failures > 0;
}
