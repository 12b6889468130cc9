// The C face against the C++ face: every tensor of every rule goes where it belongs, with the same bits for it, and what runs out of memory says so.
#include "tercet/tercet.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/allocations.hpp"
#include "tests/gradients.hpp"
#include "tests/support.hpp"

namespace tercet::test {
namespace {

template <class To, class From>
To OfC(const From& t) {
  To c{};
  c.data = t.data;
  c.dtype = static_cast<tercet_dtype>(t.dtype);
  c.rank = t.rank;
  std::copy(t.shape.begin(), t.shape.end(), c.shape);
  std::copy(t.strides.begin(), t.strides.end(), c.strides);
  return c;
}
tercet_const_tensor C(const ConstTensor& t) { return OfC<tercet_const_tensor>(t); }
tercet_tensor C(const Tensor& t) { return OfC<tercet_tensor>(t); }
tercet_workspace C(const Workspace& memory) { return {memory.data, memory.bytes}; }

tercet_inputs C(const Inputs& in) {
  return {sizeof(tercet_inputs),
          C(in.q),
          C(in.k),
          C(in.v),
          C(in.log_decay),
          C(in.beta),
          C(in.remove),
          C(in.write),
          C(in.bonus),
          C(in.initial_state),
          C(in.initial_key_sum),
          C(in.offsets),
          C(in.valid)};
}
tercet_outputs C(const Outputs& out) { return {sizeof(tercet_outputs), C(out.out), C(out.final_state), C(out.final_key_sum), C(out.saved)}; }
tercet_output_gradients C(const OutputGradients& d) {
  return {sizeof(tercet_output_gradients), C(d.out), C(d.final_state), C(d.final_key_sum), C(d.saved)};
}
tercet_gradients C(const Gradients& d) {
  return {sizeof(tercet_gradients), C(d.q), C(d.k), C(d.v), C(d.log_decay), C(d.beta), C(d.remove), C(d.write), C(d.bonus), C(d.initial_state),
          C(d.initial_key_sum),     d.scale};
}

struct Case {
  Options options;
  OwnedInputs inputs;
};

// Packed sequences and masked tokens, sixteen bits and more.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const RuleInfo& info : Rules())
    for (const Dtype dtype : {Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kF16})
      for (const bool packed : {false, true}) {
        RandomSpec spec;
        spec.rule = info.rule;
        spec.dtype = dtype;
        spec.normalize = info.can_normalize;
        spec.batch = packed ? 1 : 2;
        spec.tokens = 9;
        spec.heads = 2;
        spec.key_dim = 4;
        spec.value_dim = 5;
        if (packed) spec.offsets = {0, 2, 2, 9};
        spec.valid_fraction = 0.7;
        Case one;
        one.options.rule = info.rule;
        one.options.form = packed ? Form::kChunkwise : Form::kRecurrent;
        one.options.chunk = packed ? 4 : 0;
        one.options.normalize = spec.normalize;
        one.inputs = RandomInputs(spec);
        cases.push_back(one);
      }
  return cases;
}

tercet_options C(const Options& options) {
  tercet_options c{};
  c.struct_size = sizeof(c);
  c.rule = static_cast<tercet_rule>(options.rule);
  c.form = static_cast<tercet_form>(options.form);
  c.chunk = options.chunk;
  c.normalize = options.normalize;
  return c;
}

TEST(CFace, GivesTheSameBits) {
  for (Case& one : Cases()) {
    const Inputs in = one.inputs.view();
    SCOPED_TRACE(std::string(Name(one.options.rule)) + " " + std::string(Name(in.q.dtype)));
    const tercet_options options = C(one.options);
    const tercet_inputs inputs = C(in);
    tercet_message message;

    Results want = Room(one.options, in), got = Room(one.options, in);
    Outputs want_out = want.view(), got_out = got.view();
    int64_t want_bytes = -1, got_bytes = -2;
    ASSERT_TRUE(SavedBytes(one.options, in, &want_bytes).ok());
    ASSERT_EQ(tercet_saved_bytes(&options, &inputs, &got_bytes, &message), TERCET_OK) << message.text;
    EXPECT_EQ(got_bytes, want_bytes);
    std::vector<std::byte> want_saved(want_bytes), got_saved(want_bytes);
    want_out.saved = {want_saved.data(), want_bytes};
    got_out.saved = {got_saved.data(), want_bytes};
    const tercet_outputs outputs = C(got_out);
    ASSERT_TRUE(WorkspaceBytes(one.options, in, want_out, &want_bytes).ok());
    ASSERT_EQ(tercet_workspace_bytes(&options, &inputs, &outputs, &got_bytes, &message), TERCET_OK) << message.text;
    EXPECT_EQ(got_bytes, want_bytes);
    ASSERT_TRUE(Attend(one.options, in, want_out).ok());
    ASSERT_EQ(tercet_attend(&options, &inputs, &outputs, &message), TERCET_OK) << message.text;
    ExpectSameBits(got, want);

    OwnedGiven given = DrawGiven(one.options, in, 1);
    given.saved = want_saved;
    OwnedGradients want_gradients = RoomForGradients(one.options, one.inputs), got_gradients = RoomForGradients(one.options, one.inputs);
    const tercet_output_gradients from = C(given.view());
    const tercet_gradients to = C(got_gradients.view());
    ASSERT_TRUE(GradientWorkspaceBytes(one.options, in, given.view(), want_gradients.view(), &want_bytes).ok());
    ASSERT_EQ(tercet_gradient_workspace_bytes(&options, &inputs, &from, &to, &got_bytes, &message), TERCET_OK) << message.text;
    EXPECT_EQ(got_bytes, want_bytes);
    ASSERT_TRUE(AttendGradient(one.options, in, given.view(), want_gradients.view()).ok());
    ASSERT_EQ(tercet_attend_gradient(&options, &inputs, &from, &to, &message), TERCET_OK) << message.text;
    for (size_t part = 0; part < got_gradients.All().size(); ++part)
      EXPECT_TRUE(SameBits(*got_gradients.All()[part].second, *want_gradients.All()[part].second)) << got_gradients.All()[part].first;
    EXPECT_EQ(got_gradients.scale, want_gradients.scale);
  }
}

TEST(CFace, SaysOfARuleWhatTheOtherSays) {
  for (const RuleInfo& info : Rules()) {
    const tercet_rule_info* c = tercet_info(static_cast<tercet_rule>(info.rule));
    ASSERT_NE(c, nullptr);
    EXPECT_EQ(c->rule, static_cast<tercet_rule>(info.rule));
    EXPECT_EQ(c->name, info.name);
    EXPECT_EQ(c->equation, info.equation);
    EXPECT_EQ(c->also_known_as, info.also_known_as);
    EXPECT_EQ(c->log_decay_layout, info.log_decay_layout);
    EXPECT_EQ(c->takes_beta, info.takes_beta);
    EXPECT_EQ(c->takes_remove_and_write, info.takes_remove_and_write);
    EXPECT_EQ(c->takes_bonus, info.takes_bonus);
    EXPECT_EQ(c->can_normalize, info.can_normalize);
    EXPECT_EQ(c->default_scale_is_one, info.default_scale_is_one);
  }
  EXPECT_EQ(tercet_info(static_cast<tercet_rule>(Rules().size())), nullptr);
  EXPECT_EQ(tercet_version(), Version());
  EXPECT_EQ(tercet_default_concurrency(), DefaultConcurrency());
  const std::vector<std::string> targets = Targets();
  for (size_t i = 0; i < targets.size(); ++i) EXPECT_EQ(tercet_target(static_cast<int32_t>(i)), targets[i]);
  EXPECT_EQ(tercet_target(static_cast<int32_t>(targets.size())), nullptr);
}

TEST(CFace, CountsCodesAsTheOther) {
  const std::pair<int, StatusCode> codes[] = {{TERCET_OK, StatusCode::kOk},
                                              {TERCET_ERROR_INVALID_OPTION, StatusCode::kInvalidOption},
                                              {TERCET_ERROR_MISSING_INPUT, StatusCode::kMissingInput},
                                              {TERCET_ERROR_UNEXPECTED_INPUT, StatusCode::kUnexpectedInput},
                                              {TERCET_ERROR_SHAPE, StatusCode::kShape},
                                              {TERCET_ERROR_DTYPE, StatusCode::kDtype},
                                              {TERCET_ERROR_NULL_DATA, StatusCode::kNullData},
                                              {TERCET_ERROR_VALUE, StatusCode::kValue},
                                              {TERCET_ERROR_OVERLAP, StatusCode::kOverlap},
                                              {TERCET_ERROR_TABLE_LIMIT, StatusCode::kTableLimit},
                                              {TERCET_ERROR_OUT_OF_MEMORY, StatusCode::kOutOfMemory},
                                              {TERCET_ERROR_INTERNAL, StatusCode::kInternal}};
  for (const auto& [c, cpp] : codes) EXPECT_EQ(c, static_cast<int>(cpp));
}

// A decode step asks C++'s heap for nothing here either.
TEST(CFace, AsksForNoMemory) {
  for (Case& one : Cases()) {
    const Inputs in = one.inputs.view();
    Results results = Room(one.options, in);
    const tercet_options options = C(one.options);
    const tercet_inputs inputs = C(in);
    const tercet_outputs outputs = C(results.view());
    ASSERT_EQ(tercet_attend(&options, &inputs, &outputs, nullptr), TERCET_OK);
    largest_block = 0;
    tercet_message message;
    const tercet_code code = tercet_attend(&options, &inputs, &outputs, &message);
    EXPECT_EQ(largest_block, 0u);
    EXPECT_EQ(code, TERCET_OK);
  }
}

// A function of C++ may be handed to C, and throw.
TEST(CFace, StopsAnExceptionOfTheExecutor) {
  RandomSpec spec;  // work enough for a second thread
  spec.tokens = 80;
  spec.key_dim = 65;
  spec.value_dim = 257;
  const OwnedInputs owned = RandomInputs(spec);
  Results results = Room({}, owned.view());
  tercet_executor executor{};
  executor.struct_size = sizeof(executor);
  executor.concurrency = 2;
  executor.parallel_for = [](void*, int64_t, tercet_work*) { throw std::runtime_error("no"); };
  tercet_options options = C(Options());
  options.executor = &executor;
  const tercet_inputs inputs = C(owned.view());
  const tercet_outputs outputs = C(results.view());
  tercet_message message;
  EXPECT_EQ(tercet_attend(&options, &inputs, &outputs, &message), TERCET_ERROR_INTERNAL);
  EXPECT_STREQ(message.text, "the executor threw an exception, so the outputs are not complete");
}

// Wherever memory ends, a sentence comes back in the caller's own.
TEST(CFace, SaysThatMemoryEnded) {
  const char* const kCall = "the call ran out of memory, and had none for the sentence that says where";
  tercet_message message;
  const char* name = nullptr;
  ASSERT_EQ(tercet_choose_target(nullptr, &name, &message), TERCET_OK) << message.text;  // the lists are made
  const auto once = [&](auto call) {
    until_failure = 0;
    const tercet_code code = call();
    until_failure = -1;
    EXPECT_EQ(code, TERCET_ERROR_OUT_OF_MEMORY);
    EXPECT_STREQ(message.text, kCall);
  };
  once([&] { return tercet_attend(nullptr, nullptr, nullptr, &message); });
  once([&] { return tercet_choose_target("none", &name, &message); });
  tercet_options options{};
  once([&] { return tercet_attend(&options, nullptr, nullptr, &message); });
}

}  // namespace
}  // namespace tercet::test
