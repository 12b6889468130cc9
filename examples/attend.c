// The call of attend.cc, from C11.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <tercet/tercet.h>

enum { kBatch = 1, kTokens = 1000, kHeads = 4, kKeyDim = 64, kValueDim = 32 };

static float* Filled(size_t count, float value) {
  float* numbers = malloc(count * sizeof(float));
  for (size_t i = 0; numbers != NULL && i < count; ++i) numbers[i] = value;
  return numbers;
}

int main(void) {
  const size_t rows = (size_t)kBatch * kTokens * kHeads;
  float* q = Filled(rows * kKeyDim, 0.1f);
  float* k = Filled(rows * kKeyDim, 0.05f);
  float* v = Filled(rows * kValueDim, 1.0f);
  float* log_decay = Filled(rows, -0.01f);
  float* beta = Filled(rows, 0.5f);
  float* out = Filled(rows * kValueDim, 0);
  float* state = Filled((size_t)kBatch * kHeads * kKeyDim * kValueDim, 0);

  const int64_t keys[] = {kBatch, kTokens, kHeads, kKeyDim}, values[] = {kBatch, kTokens, kHeads, kValueDim};
  const int64_t gates[] = {kBatch, kTokens, kHeads}, states[] = {kBatch, kHeads, kKeyDim, kValueDim};
  tercet_options options = {.struct_size = sizeof(options), .rule = TERCET_RULE_GATED_DELTA};
  tercet_inputs inputs = {.struct_size = sizeof(inputs)};
  inputs.q = tercet_const_view(q, TERCET_DTYPE_F32, 4, keys);
  inputs.k = tercet_const_view(k, TERCET_DTYPE_F32, 4, keys);
  inputs.v = tercet_const_view(v, TERCET_DTYPE_F32, 4, values);
  inputs.log_decay = tercet_const_view(log_decay, TERCET_DTYPE_F32, 3, gates);
  inputs.beta = tercet_const_view(beta, TERCET_DTYPE_F32, 3, gates);
  tercet_outputs outputs = {.struct_size = sizeof(outputs)};
  outputs.out = tercet_view(out, TERCET_DTYPE_F32, 4, values);
  outputs.final_state = tercet_view(state, TERCET_DTYPE_F32, 4, states);

  tercet_message message;
  const tercet_code code = tercet_attend(&options, &inputs, &outputs, &message);
  if (code == TERCET_OK)
    printf("the last token's first value: %g\n", (double)out[(kTokens - 1) * kHeads * kValueDim]);
  else
    fprintf(stderr, "%s\n", message.text);

  float* const all[] = {q, k, v, log_decay, beta, out, state};
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); ++i) free(all[i]);
  return code == TERCET_OK ? 0 : 1;
}
