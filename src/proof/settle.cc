#include "src/proof/settle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace tercet::proof {

namespace {

Status Refuse(StatusCode code, std::string message) { return {code, std::move(message)}; }

// The chunk asked for; else 64, the tables' own size; where that would make one chunk of the whole sequence, one that makes several and a shorter
// last one.
int64_t ChooseChunk(int64_t asked, const contract::Layer& layer) {
  const int64_t n = contract::LongestSequence(layer), own = 64;
  if (asked > 0) return asked;
  if (n > own) return own;
  if (n > 16) return n % 16 != 0 ? 16 : 20;
  return std::max<int64_t>(1, (2 * n + 1) / 3);
}

// A plant that can change nothing would be a test that can't fail.
Status CheckPlant(const VerifyOptions& options, const contract::Layer& layer) {
  if (options.plant != Plant::kNone && contract::LongestSequence(layer) == 0)
    return Refuse(StatusCode::kInvalidOption, "an error is planted and there is no token to get wrong: give at least one");
  if (options.plant == Plant::kDecay && layer.axes.decay == Decay::kNone)
    return Refuse(StatusCode::kInvalidOption,
                  "plant is decay and " + std::string(Name(layer.rule)) + " has no decay that could be off by one: plant scale or mask");
  if (options.plant == Plant::kScale && layer.normalize)
    return Refuse(StatusCode::kInvalidOption,
                  "plant is scale and under normalize the scale cancels, so that leaving it out changes nothing: plant decay or mask");
  if (options.plant == Plant::kScale && layer.scale == 1)
    return Refuse(StatusCode::kInvalidOption,
                  "plant is scale and the scale is 1, so that leaving it out changes nothing: give another scale, or plant decay or mask");
  if (options.plant == Plant::kMask && layer.axes.update == Update::kAddReadBefore && layer.normalize && contract::LongestSequence(layer) <= 1 &&
      !layer.in.initial_state.given() && !layer.in.initial_key_sum.given())
    return Refuse(StatusCode::kInvalidOption,
                  "plant is mask and a first token of rwkv6 under normalize gives its own v whatever its weight, so that nothing changes: give more "
                  "tokens or a state");
  return {};
}

Status CheckOptions(const VerifyOptions& options) {
  if (options.field_draws < 1)
    return Refuse(StatusCode::kInvalidOption, "field_draws is " + std::to_string(options.field_draws) + " and must be at least 1");
  if (options.noise_draws < 1)
    return Refuse(StatusCode::kInvalidOption, "noise_draws is " + std::to_string(options.noise_draws) + " and must be at least 1");
  if (!(options.tolerance >= 0) || !std::isfinite(options.tolerance))
    return Refuse(StatusCode::kInvalidOption, "tolerance is " + std::to_string(options.tolerance) + " and must be finite and at least 0");
  return {};
}

}  // namespace

Status Settle(const VerifyOptions& options, const Inputs& inputs, Settled* settled) {
  if (Status status = CheckOptions(options); !status.ok()) return status;
  Options& attend = settled->attend = options.attend;
  contract::Layer& layer = settled->layer;
  attend.form = Form::kChunkwise;
  if (Status status = contract::Validate(attend, inputs, nullptr, &layer); !status.ok()) return status;
  if (layer.f64() && std::numeric_limits<long double>::digits <= std::numeric_limits<double>::digits)
    return Refuse(StatusCode::kDtype, "q is f64 and must be f32 here: on this machine no floating type is more precise than f64 to judge it by");
  if (Status status = CheckPlant(options, layer); !status.ok()) return status;
  std::string& target = settled->target;
  if (Status status = ChooseTarget(attend.target, &target); !status.ok()) return status;
  // On Intel AMX the products of bf16 run on tiles.
  if (layer.dtype == Dtype::kBF16 && target.rfind("AMX", 0) == 0) settled->operands = Operands::kInBF16;
  attend.chunk = ChooseChunk(attend.chunk, layer);
  return {};
}

}  // namespace tercet::proof
