// The call of ../main.cc, from C.
#include <stdio.h>

#include "tercet/tercet.h"

int main(void) {
  const float q[6] = {1, 2, 3, 4, 5, 6}, k[6] = {1, 0, 2, 1, -1, 3}, v[6] = {2, 5, 1, -3, 4, 1};
  const float expected[6] = {2, 4, 12, 4, -15, 0};
  const int64_t shape[4] = {1, 6, 1, 1};
  const double scale = 1;
  for (tercet_form form = TERCET_FORM_AUTOMATIC; form <= TERCET_FORM_CHUNKWISE; ++form) {
    float out[6] = {0};
    tercet_options options = {.struct_size = sizeof(options), .form = form, .scale = &scale};
    tercet_inputs inputs = {.struct_size = sizeof(inputs)};
    inputs.q = tercet_const_view(q, TERCET_DTYPE_F32, 4, shape);
    inputs.k = tercet_const_view(k, TERCET_DTYPE_F32, 4, shape);
    inputs.v = tercet_const_view(v, TERCET_DTYPE_F32, 4, shape);
    tercet_outputs outputs = {.struct_size = sizeof(outputs)};
    outputs.out = tercet_view(out, TERCET_DTYPE_F32, 4, shape);
    tercet_message message;
    if (tercet_attend(&options, &inputs, &outputs, &message) != TERCET_OK) {
      printf("refused: %s\n", message.text);
      return 1;
    }
    for (int t = 0; t < 6; ++t) {
      if (out[t] != expected[t]) {
        printf("token %d is %g, not %g\n", t, (double)out[t], (double)expected[t]);
        return 1;
      }
    }
  }
  printf("tercet %s from C: right\n", tercet_version());
  return 0;
}
