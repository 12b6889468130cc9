// Tercet from C11, and from whatever can call C. The same library as tercet.hpp and the same call: what a rule, an option or a tensor means is said
// there, once; here is what C needs beside it.
//
// A struct that begins with struct_size may grow at its end in later versions. Set it to sizeof of the struct and all that you do not use to zeros:
// zeros are the defaults. The library takes a shorter one, of an older header, as if zeros followed, and refuses a longer one, of a newer header,
// unless what it does not know is zeros. Structs without struct_size never change.
//
// No function prints, throws or aborts, and all may be called from any threads at once. A pointer that must not be NULL and is, is refused. What a
// function returns as const char* is never NULL where nothing else is said, lives as long as the program, and is the same for the same argument.
#ifndef TERCET_TERCET_H_
#define TERCET_TERCET_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define TERCET_API
#else
#define TERCET_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- What a call says back ----------------------------------------------------------------------------------------------------------------

typedef int32_t tercet_code;
enum {
  TERCET_OK = 0,
  TERCET_ERROR_INVALID_OPTION,    // an option out of its range, or one the rule does not have; or a struct_size that is none
  TERCET_ERROR_MISSING_INPUT,     // the rule needs a tensor that was not given
  TERCET_ERROR_UNEXPECTED_INPUT,  // a tensor was given that the rule would ignore
  TERCET_ERROR_SHAPE,             // a tensor's rank or sizes are not those of the layout
  TERCET_ERROR_DTYPE,             // a tensor's dtype is not one the call takes, or differs from that of q
  TERCET_ERROR_NULL_DATA,         // a tensor that has elements, or a workspace or saved that has bytes, has no data; or an argument is NULL
  TERCET_ERROR_VALUE,             // a number that can't be one: a positive log_decay, offsets that don't increase, states saved of another call
  TERCET_ERROR_OVERLAP,           // an output shares memory with an input or with itself, or the workspace or saved with either
  TERCET_ERROR_TABLE_LIMIT,       // the parallel form would need more than table_limit bytes for its tables
  TERCET_ERROR_OUT_OF_MEMORY,     // an allocation failed
  TERCET_ERROR_INTERNAL           // a fault of the library or of the caller's executor
};

// Where a call writes its one sentence, "" when ok: memory of the caller's, so that there is always some. A sentence that is longer, which only a
// long name of a target makes, ends in "...". Every call takes NULL in its place.
typedef struct tercet_message {
  char text[512];
} tercet_message;

// ---- Tensors ------------------------------------------------------------------------------------------------------------------------------

typedef int32_t tercet_dtype;
enum {
  TERCET_DTYPE_F32 = 0,
  TERCET_DTYPE_F64,
  TERCET_DTYPE_BF16,  // the upper half of a float's bits
  TERCET_DTYPE_F16,   // IEEE 754 binary16
  TERCET_DTYPE_I32,
  TERCET_DTYPE_I64,
  TERCET_DTYPE_BOOL  // one byte, zero is false
};

// A read-only view of the caller's memory. Element [i, j, ...] lies at data + (i strides[0] + j strides[1] + ...) elements; strides may be any
// number. All zeros (rank 0) means "not given".
typedef struct tercet_const_tensor {
  const void* data;
  int64_t shape[4];
  int64_t strides[4];  // in elements, not bytes
  tercet_dtype dtype;
  int32_t rank;
} tercet_const_tensor;

// The same, for memory the call writes. No two elements of an output may share memory.
typedef struct tercet_tensor {
  void* data;
  int64_t shape[4];
  int64_t strides[4];
  tercet_dtype dtype;
  int32_t rank;
} tercet_tensor;

// A view of dense memory in row-major order, the last axis fastest, of the `rank` sizes at `shape`. A rank or a shape that can't be (NULL, where
// there are sizes) makes a view that the call refuses.
TERCET_API tercet_const_tensor tercet_const_view(const void* data, tercet_dtype dtype, int32_t rank, const int64_t* shape);
TERCET_API tercet_tensor tercet_view(void* data, tercet_dtype dtype, int32_t rank, const int64_t* shape);

// ---- Rules, forms and options -------------------------------------------------------------------------------------------------------------

typedef int32_t tercet_rule;
enum {
  TERCET_RULE_LINEAR = 0,
  TERCET_RULE_RETENTION,
  TERCET_RULE_SIMPLE_GLA,
  TERCET_RULE_GLA,
  TERCET_RULE_RWKV6,
  TERCET_RULE_DELTA,
  TERCET_RULE_GATED_DELTA,
  TERCET_RULE_KDA,
  TERCET_RULE_RWKV7
};

typedef int32_t tercet_form;
enum { TERCET_FORM_AUTOMATIC = 0, TERCET_FORM_PARALLEL, TERCET_FORM_RECURRENT, TERCET_FORM_CHUNKWISE };

typedef int32_t tercet_feature_map;
enum { TERCET_FEATURE_MAP_IDENTITY = 0, TERCET_FEATURE_MAP_ELU_PLUS_ONE, TERCET_FEATURE_MAP_RELU, TERCET_FEATURE_MAP_L2_NORM };

// What a rule is and needs, for programs that list or check rules. It may grow at its end: look at it where it lies.
typedef struct tercet_rule_info {
  tercet_rule rule;
  int32_t takes_beta;
  int32_t takes_remove_and_write;
  int32_t takes_bonus;
  int32_t can_normalize;
  int32_t default_scale_is_one;  // else 1 / sqrt(key_dim)
  const char* name;
  const char* equation;
  const char* also_known_as;
  const char* log_decay_layout;  // "[B, T, H]" and the like; "": the rule takes no log_decay
} tercet_rule_info;

// That rule, or NULL for a number that is none: rules are numbered from 0 without a gap.
TERCET_API const tercet_rule_info* tercet_info(tercet_rule rule);

// "unknown" for a number that is none.
TERCET_API const char* tercet_rule_name(tercet_rule rule);
TERCET_API const char* tercet_form_name(tercet_form form);
TERCET_API const char* tercet_feature_map_name(tercet_feature_map map);
TERCET_API const char* tercet_dtype_name(tercet_dtype dtype);
// The value of that name, or -1, which every call refuses.
TERCET_API tercet_rule tercet_rule_from_name(const char* name);
TERCET_API tercet_form tercet_form_from_name(const char* name);
TERCET_API tercet_feature_map tercet_feature_map_from_name(const char* name);

// The pieces of a call, in the hands of an executor.
typedef struct tercet_work tercet_work;
// Runs one.
TERCET_API void tercet_run_piece(tercet_work* work, int64_t piece);

// Threads of your own instead of oneTBB's.
typedef struct tercet_executor {
  size_t struct_size;
  void* context;  // handed to parallel_for
  // Calls tercet_run_piece(work, 0) ... tercet_run_piece(work, count - 1), each once, in any order, on any threads, and returns when all have
  // returned.
  void (*parallel_for)(void* context, int64_t count, tercet_work* work);
  int64_t concurrency;  // how many pieces can run at once; less than 1 counts as 1. The results of a call do not depend on it, not by a bit
} tercet_executor;

// Memory for a call to work in, at any address. What is in it before does not matter, and what is in it after means nothing.
typedef struct tercet_workspace {
  void* data;
  int64_t bytes;
} tercet_workspace;

typedef struct tercet_options {
  size_t struct_size;
  tercet_rule rule;
  tercet_form form;
  int64_t chunk;                    // tokens a chunk, chunkwise form only; 0: the library chooses
  const double* scale;              // multiplies q; NULL: 1 / sqrt(key_dim), for rwkv7 1
  const double* eps;                // of the l2_norm feature map; NULL: 1e-6
  tercet_feature_map feature_map;   // applied to q and to k before anything else
  int32_t normalize;                // not 0: divide by the key sum
  int32_t skip_check_values;        // not 0: do not look at every log_decay and beta before computing
  int32_t threads;                  // at most so many at once; 0: all that the executor has
  int64_t table_limit;              // bytes the tables of one parallel call may take; 0: 2^30
  const tercet_executor* executor;  // NULL: oneTBB
  const char* target;               // a name that tercet_target has; NULL or "": $TERCET_TARGET, else the best
  tercet_workspace workspace;       // at least tercet_workspace_bytes, apart from every tensor; zeros: memory of the calling thread's own
} tercet_options;

// B batch, T tokens, H heads, K key_dim, V value_dim, N sequences; which dtypes go together and how heads are grouped is in tercet.hpp.
typedef struct tercet_inputs {
  size_t struct_size;
  tercet_const_tensor q;                // [B, T, Hq, K]
  tercet_const_tensor k;                // [B, T, Hk, K]
  tercet_const_tensor v;                // [B, T, Hv, V]
  tercet_const_tensor log_decay;        // retention [H]; simple_gla and gated_delta [B, T, H]; gla, rwkv6, kda and rwkv7 [B, T, H, K]
  tercet_const_tensor beta;             // [B, T, H]; delta, gated_delta and kda
  tercet_const_tensor remove;           // [B, T, H, K]; rwkv7
  tercet_const_tensor write;            // [B, T, H, K]; rwkv7
  tercet_const_tensor bonus;            // [H, K]; rwkv6
  tercet_const_tensor initial_state;    // [N, Hs, K, V]; not given: zeros
  tercet_const_tensor initial_key_sum;  // [N, Hs, K]; with `normalize`; not given: zeros
  tercet_const_tensor offsets;          // [N + 1], i32 or i64: where packed sequences begin and end
  tercet_const_tensor valid;            // [B, T], bool
} tercet_inputs;

typedef struct tercet_outputs {
  size_t struct_size;
  tercet_tensor out;            // [B, T, Ho, V]
  tercet_tensor final_state;    // [N, Hs, K, V]; optional. May be initial_state itself (the same data and strides)
  tercet_tensor final_key_sum;  // [N, Hs, K]; optional, with `normalize`. May be initial_key_sum itself
  tercet_workspace saved;       // optional: tercet_saved_bytes bytes, where states are kept for tercet_attend_gradient. Not in the parallel form
} tercet_outputs;

// The gradients of a number that is computed from the outputs, with respect to these; one that is not given is zeros.
typedef struct tercet_output_gradients {
  size_t struct_size;
  tercet_const_tensor out;            // [B, T, Ho, V]
  tercet_const_tensor final_state;    // [N, Hs, K, V]
  tercet_const_tensor final_key_sum;  // [N, Hs, K]; with `normalize`
  tercet_workspace saved;             // optional: what tercet_attend kept, with the same options and inputs; only read
} tercet_output_gradients;

// The gradients of that number with respect to the inputs as they are given. Each is optional, and has the shape and the dtype of its input.
typedef struct tercet_gradients {
  size_t struct_size;
  tercet_tensor q;
  tercet_tensor k;
  tercet_tensor v;
  tercet_tensor log_decay;
  tercet_tensor beta;
  tercet_tensor remove;
  tercet_tensor write;
  tercet_tensor bonus;
  tercet_tensor initial_state;
  tercet_tensor initial_key_sum;  // with `normalize`
  double* scale;                  // one number, whatever the dtype, and whether the scale was given or is the default
} tercet_gradients;

// Computes the layer. A call that is refused has written nothing but its message.
TERCET_API tercet_code tercet_attend(const tercet_options* options, const tercet_inputs* inputs, const tercet_outputs* outputs,
                                     tercet_message* message);

// How many bytes of workspace that call needs.
TERCET_API tercet_code tercet_workspace_bytes(const tercet_options* options, const tercet_inputs* inputs, const tercet_outputs* outputs,
                                              int64_t* bytes, tercet_message* message);

// How many bytes tercet_attend needs to keep states for the gradients of this call.
TERCET_API tercet_code tercet_saved_bytes(const tercet_options* options, const tercet_inputs* inputs, int64_t* bytes, tercet_message* message);

// Computes gradients, in the recurrent or the chunkwise form.
TERCET_API tercet_code tercet_attend_gradient(const tercet_options* options, const tercet_inputs* inputs, const tercet_output_gradients* given,
                                              const tercet_gradients* wanted, tercet_message* message);

// How many bytes of workspace that call needs.
TERCET_API tercet_code tercet_gradient_workspace_bytes(const tercet_options* options, const tercet_inputs* inputs,
                                                       const tercet_output_gradients* given, const tercet_gradients* wanted, int64_t* bytes,
                                                       tercet_message* message);

// ---- The machine --------------------------------------------------------------------------------------------------------------------------

// The instruction sets this build has code for and this machine can run, best first, from index 0; NULL past the last.
TERCET_API const char* tercet_target(int32_t index);
// The target a call with this option would use, or why it can't.
TERCET_API tercet_code tercet_choose_target(const char* option, const char** name, tercet_message* message);
// Threads that the default executor has.
TERCET_API int32_t tercet_default_concurrency(void);
TERCET_API const char* tercet_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TERCET_TERCET_H_
