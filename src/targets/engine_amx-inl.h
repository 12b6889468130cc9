// The chunkwise engine and the gradients of a target whose bf16 products run on tiles: everything else is AVX3's.
#ifndef TERCET_SRC_TARGETS_ENGINE_AMX_INL_H_
#define TERCET_SRC_TARGETS_ENGINE_AMX_INL_H_

#include <cstddef>

#include "src/forms/chunkwise_amx-inl.h"
#include "src/forms/job.hpp"
#include "src/forms/products_amx-inl.h"
#include "src/rules/all.hpp"
#include "src/targets/targets.hpp"

namespace tercet::targets {

// kElse is the target of the rest.
template <class R, class Tiles, int64_t kElse>
struct OnTiles {
  static constexpr auto kRule = static_cast<size_t>(R::kRule);
  static bool Takes(const forms::Job& job) { return job.layer->dtype == Dtype::kBF16; }
  static void Run(const forms::Job& job) { Takes(job) ? amx::ChunkwiseAmx<R, Tiles>::Run(job) : ChunkwiseEngine<kElse>().run[0][kRule](job); }
  static int64_t Bytes(const forms::Job& job) {
    return Takes(job) ? amx::ChunkwiseAmx<R, Tiles>::Bytes(job) : ChunkwiseEngine<kElse>().bytes[0][kRule](job);
  }
};

template <class Tiles, int64_t kElse>
forms::Engine MakeEngineOnTiles() {
  forms::Engine engine = ChunkwiseEngine<kElse>();
  rules::All::ForEach([&]<class R>(R) {
    engine.run[0][static_cast<size_t>(R::kRule)] = &OnTiles<R, Tiles, kElse>::Run;
    engine.bytes[0][static_cast<size_t>(R::kRule)] = &OnTiles<R, Tiles, kElse>::Bytes;
  });
  engine.bf16_chunk = 64;
  return engine;
}

// Gradients are those of kElse, with products on tiles.
template <class R, class Tiles, int64_t kElse>
struct GradientOnTiles {
  static constexpr auto kRule = static_cast<size_t>(R::kRule);
  static forms::GradientJob With(const forms::GradientJob& job) {
    forms::GradientJob with = job;
    if (job.layer->dtype == Dtype::kBF16) with.products = &amx::ProductsOn<Tiles>::All();
    return with;
  }
  static void Run(const forms::GradientJob& job) { GradientEngineOf<kElse>().run[0][kRule](With(job)); }
  static int64_t Bytes(const forms::GradientJob& job) { return GradientEngineOf<kElse>().bytes[0][kRule](With(job)); }
};

template <class Tiles, int64_t kElse>
forms::GradientEngine MakeGradientEngineOnTiles() {
  forms::GradientEngine engine = GradientEngineOf<kElse>();
  rules::All::ForEach([&]<class R>(R) {
    engine.run[0][static_cast<size_t>(R::kRule)] = &GradientOnTiles<R, Tiles, kElse>::Run;
    engine.bytes[0][static_cast<size_t>(R::kRule)] = &GradientOnTiles<R, Tiles, kElse>::Bytes;
  });
  return engine;
}

}  // namespace tercet::targets

#endif  // TERCET_SRC_TARGETS_ENGINE_AMX_INL_H_
