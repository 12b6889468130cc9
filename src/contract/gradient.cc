// What a call for gradients may be, beside what its inputs may be.
#include "src/contract/layer.hpp"

namespace tercet::contract {

Status ValidateGradient(const Options& options, const Inputs& inputs, const OutputGradients& given, const Gradients& wanted, GradientLayer* layer) {
  if (options.form == Form::kParallel)
    return {StatusCode::kInvalidOption, "form is parallel and must be automatic, recurrent or chunkwise: the parallel form has no gradients"};
  GradientLayer l;
  if (Status status = Validate(options, inputs, nullptr, &l); !status.ok()) return status;
  l.given = given;
  l.wanted = wanted;
  *layer = l;
  return {};
}

}  // namespace tercet::contract
