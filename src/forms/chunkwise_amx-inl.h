// The chunkwise form for bf16 on the tiles of amx-inl.h. The formulas are those of chunkwise-inl.h; what follows is how they fall into tiles.
//
// A chunk is cut into blocks of 16 tokens, a row of tiles each. A block of queries x reads
//
//   O_b = scale [ (X F0)_b S0 + tril(score(X, K; F))_b U ]
//
// as two products with bf16 operands and f32 sums, the table made block by block between them. What is no product is f32: the table before it is
// rounded, the triangular solve inside a block (forward substitution in registers), state, key sum and denominators. Tokens t and t + 16 share a
// pair: then a right operand of tokens is two rows side by side, and a table's row two rows of sums.
//
// One decay a token: the factors of a row multiply sums (of scores, of reads) and values, in f32; q and k stay as they were given. One a channel: x
// and k are multiplied before they are rounded. Queries of a block, anchored at the start of every block up to their own, meet the keys of the block
// before that start, faded to its end; scores within a block are summed token by token in f32. All factors are products of decays, at most 1, and
// no anchor lies in a later token.
//
// Values that are not finite would reach, as zero times them, tokens that come earlier. They are taken out of the operand and added to what they
// belong to, one by one.
#ifndef TERCET_SRC_FORMS_CHUNKWISE_AMX_INL_H_
#define TERCET_SRC_FORMS_CHUNKWISE_AMX_INL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "src/contract/layer.hpp"
#include "src/contract/tensor.hpp"
#include "src/forms/amx-inl.h"
#include "src/forms/job.hpp"
#include "src/rules/axes.hpp"

TERCET_BEFORE_AMX
namespace tercet::amx {

using forms::Arena;
using forms::HeadOf;
using forms::Job;

// R is a point on the axes, Tiles the registers.
template <class R, class Tiles>
class ChunkwiseAmx {
 public:
  static int64_t Bytes(const Job& job) {
    Arena arena(nullptr);
    const ChunkwiseAmx form(job, arena);
    return arena.used();
  }

  static void Run(const Job& job) {
    Arena arena(job.workspace);
    ChunkwiseAmx form(job, arena);
    Tiles::Configure();
    form.Walk();
    Tiles::Release();
  }

 private:
  static constexpr bool kPerToken = R::kDecay == Decay::kPerHead || R::kDecay == Decay::kPerStep;  // one factor a token
  static constexpr bool kPerChannel = R::kDecay == Decay::kPerChannel;
  static constexpr bool kReadBefore = R::kUpdate == Update::kAddReadBefore;
  static constexpr bool kDelta = R::kUpdate == Update::kDelta;
  static constexpr bool kRankOne = R::kUpdate == Update::kRankOne;
  // Tokens of a block, and so rows of a tile.
  static constexpr int64_t kBlock = 16;

  // A right operand of tokens, [depth][value tiles]. `given` is what it was if `changed`: `tiles` then have zeros for what is not finite.
  struct Right {
    Tile *tiles = nullptr, *given = nullptr;
    bool changed = false;
  };

  ChunkwiseAmx(const Job& job, Arena& arena)
      : job_(job),
        layer_(*job.layer),
        walk_(job),
        K_(layer_.key_dim),
        depth_((K_ + 31) / 32),
        row_(32 * depth_),
        queries_(layer_.queries_per_state()),
        columns_((job.columns + 15) / 16),
        v_row_(16 * columns_),
        most_blocks_((job.span + 15) / 16),
        most_pairs_((job.span + 31) / 32) {
    const int64_t tokens = kBlock * most_blocks_, pair_tokens = 32 * most_pairs_;
    now_ = arena.Take<int64_t>(job.span);
    next_ = arena.Take<int64_t>(job.span);
    far_ = arena.Take<Far>(5 + 2 * queries_);
    scores_ = arena.Take<Sums>(kGroup);
    diagonal_ = arena.Take<Sums>(1);
    scratch_ = arena.Take<Sums>(1);
    reads_ = arena.Take<Sums>(2 * kReads * kGroup);
    table_ = arena.Take<Tile>(most_pairs_);
    w_table_ = arena.Take<Tile>(kRankOne ? most_pairs_ : 0);
    state_ = arena.Take<Sums>(2 * depth_ * columns_);
    state_tiles_ = arena.Take<Tile>(depth_ * columns_);
    v_rows_ = arena.Take<uint16_t>(pair_tokens * v_row_);
    TakeRight(arena, 1, &values_);
    TakeRight(arena, kPerToken, &end_values_);
    TakeRight(arena, kRankOne, &removed_);
    k_left_ = arena.Take<Tile>(kPerChannel ? 0 : most_blocks_ * depth_);
    x_left_ = arena.Take<Tile>((kPerChannel ? most_blocks_ : 1) * depth_);
    k_right_ = arena.Take<Tile>(most_blocks_ * depth_);
    w_right_ = arena.Take<Tile>(kRankOne ? most_blocks_ * depth_ : 0);
    k_turned_ = arena.Take<Tile>(2 * depth_ * most_pairs_);
    w_turned_ = arena.Take<Tile>(kRankOne ? 2 * depth_ * most_pairs_ : 0);
    q_rows_ = arena.Take<float>(kBlock * row_);
    k_rows_ = arena.Take<float>(kPerChannel ? tokens * row_ : 0);
    r_rows_ = arena.Take<float>(kRankOne ? tokens * row_ : 0);
    w_rows_ = arena.Take<float>(kRankOne ? tokens * row_ : 0);
    D_ = arena.Take<float>(kPerChannel ? tokens * row_ : kPerToken ? tokens : 0);
    whole_ = arena.Take<float>(kPerChannel ? most_blocks_ * row_ : 0);
    x_faded_ = arena.Take<float>(kPerChannel ? kBlock * row_ : 0);
    fade_ = arena.Take<float>(kPerChannel ? row_ : 0);
    from_start_ = arena.Take<float>(kPerToken ? tokens : 0);
    to_end_ = arena.Take<float>(kPerToken ? pair_tokens : 0);
    factors_ = arena.Take<float>(R::kDecay == Decay::kPerStep ? kBlock * tokens : 0);
    powers_ = arena.Take<float>(R::kDecay == Decay::kPerHead ? tokens + kBlock : 0);
    beta_ = arena.Take<float>(kDelta ? tokens : 0);
    bonus_ = arena.Take<float>(kReadBefore ? row_ : 0);
    key_sum_ = arena.Take<float>(layer_.normalize ? row_ : 0);
    denominators_ = arena.Take<float>(layer_.normalize ? kBlock : 0);
  }

  void TakeRight(Arena& arena, bool wanted, Right* right) const {
    right->tiles = arena.Take<Tile>(wanted ? most_pairs_ * columns_ : 0);
    right->given = arena.Take<Tile>(wanted ? most_pairs_ * columns_ : 0);
  }

  void Walk() {
    ListRows();
    LoadState();
    if constexpr (kReadBefore) {
      const ConstTensor& t = layer_.in.bonus;
      LoadRow(t, contract::Offset(t, HeadOf(t, 0, job_.head, layer_.state_heads)), t.strides[1], K_, row_, bonus_);
    }
    if constexpr (R::kDecay == Decay::kPerHead) PackPowers();
    n_ = walk_.Next(job_.span, now_);
    while (n_ > 0) {
      coming_ = walk_.Next(job_.span, next_);
      blocks_ = (n_ + 15) / 16;
      pairs_ = (n_ + 31) / 32;
      PackFactors();
      PackKeys();
      PackValues();
      if constexpr (kDelta || kRankOne) {
        for (int64_t b = 0; b < blocks_; ++b) Solve(b);
        KeepFinite(kDelta ? &values_ : &removed_);
        if constexpr (kDelta && kPerToken) KeepFinite(&end_values_);
      }
      for (int64_t g = 0; g < queries_; ++g)
        for (int64_t b = 0; b < blocks_; ++b) Read(g, b);
      Advance();
      EndSteps();
      std::swap(now_, next_);
      n_ = coming_;
    }
    StoreState();
  }

  // ---- Packing ----------------------------------------------------------------------------------------------------------------------------

  static __mmask16 Lanes(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xFFFF : n <= 0 ? 0 : (1 << n) - 1); }
  static __mmask32 Lanes32(int64_t n) { return n >= 32 ? 0xFFFFFFFFu : n <= 0 ? 0 : (1u << n) - 1; }
  static const std::byte* At(const ConstTensor& t, int64_t offset) {
    return static_cast<const std::byte*>(t.data) + offset * contract::SizeOf(t.dtype);
  }
  int64_t Count(int64_t b) const { return std::min(kBlock, n_ - kBlock * b); }
  int64_t Offset(const ConstTensor& t, int64_t i, int64_t head, int64_t channel = 0) const {
    return contract::Offset(t, walk_.batch(), now_[i], head, channel);
  }
  int64_t GateHead(const ConstTensor& t) const { return HeadOf(t, 2, job_.head, layer_.state_heads); }
  int64_t QueryHead(int64_t g) const { return contract::GroupedHead(job_.head * queries_ + g, layer_.q_heads, layer_.out_heads); }

  static float LoadOne(const ConstTensor& t, int64_t offset) {
    if (t.dtype == Dtype::kBF16) {
      uint16_t word;
      std::memcpy(&word, At(t, offset), sizeof(word));
      return FromWord(word);
    }
    float x;
    std::memcpy(&x, At(t, offset), sizeof(x));
    return x;
  }
  static float FromWord(uint32_t word) {
    const uint32_t bits = word << 16;
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }

  // n numbers of bf16 or f32, `stride` apart, then zeros up to `padded`.
  static void LoadRow(const ConstTensor& t, int64_t offset, int64_t stride, int64_t n, int64_t padded, float* to) {
    const std::byte* from = At(t, offset);
    if (stride != 1) {
      for (int64_t i = 0; i < padded; ++i) to[i] = i < n ? LoadOne(t, offset + i * stride) : 0;
    } else if (t.dtype == Dtype::kBF16) {
      for (int64_t i = 0; i < padded; i += 16) _mm512_store_ps(to + i, Widen(_mm256_maskz_loadu_epi16(Lanes(n - i), from + 2 * i)));
    } else {
      for (int64_t i = 0; i < padded; i += 16) _mm512_store_ps(to + i, _mm512_maskz_loadu_ps(Lanes(n - i), from + 4 * i));
    }
  }

  // The rows of block b of [B, T, H, K]; those past the last token are zeros.
  void LoadRows(const ConstTensor& t, int64_t head, int64_t b, bool features, float* rows) const {
    for (int64_t i = 0; i < kBlock; ++i, rows += row_) {
      if (i < Count(b)) {
        LoadRow(t, Offset(t, kBlock * b + i, head), t.strides[3], K_, row_, rows);
        if (features) MapFeatures(rows);
      } else {
        for (int64_t c = 0; c < row_; c += 16) _mm512_store_ps(rows + c, _mm512_setzero_ps());
      }
    }
  }

  void MapFeatures(float* x) const {
    const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1);
    if (layer_.feature_map == FeatureMap::kIdentity) return;
    __m512 squares = zero;
    if (layer_.feature_map == FeatureMap::kL2Norm)
      for (int64_t c = 0; c < row_; c += 16) squares = _mm512_fmadd_ps(_mm512_load_ps(x + c), _mm512_load_ps(x + c), squares);
    const __m512 norm = _mm512_set1_ps(std::sqrt(_mm512_reduce_add_ps(squares) + static_cast<float>(layer_.eps)));
    for (int64_t c = 0; c < row_; c += 16) {
      __m512 y = _mm512_load_ps(x + c);
      if (layer_.feature_map == FeatureMap::kL2Norm) {
        y = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(norm, zero, _CMP_NEQ_UQ), y, norm);
      } else if (layer_.feature_map == FeatureMap::kRelu) {
        y = _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(y, zero, _CMP_LT_OQ), zero);
      } else {
        const __mmask16 above = _mm512_cmp_ps_mask(y, zero, _CMP_GT_OQ);
        y = _mm512_mask_add_ps(ExpOfNonPositive(_mm512_mask_mov_ps(y, above, zero)), above, y, one);
      }
      _mm512_store_ps(x + c, _mm512_maskz_mov_ps(Lanes(K_ - c), y));
    }
  }

  // Block b of q or k as a left operand [depth]. Rows of bf16 that need no mapping are copied as they are.
  void PackLeft(const ConstTensor& t, int64_t head, int64_t b, Tile* to) const {
    const bool as_given = t.strides[3] == 1 && layer_.feature_map == FeatureMap::kIdentity;
    if (!as_given) LoadRows(t, head, b, true, q_rows_);
    for (int64_t i = 0; i < kBlock; ++i) {
      const bool copied = as_given && i < Count(b);
      const std::byte* from = copied ? At(t, Offset(t, kBlock * b + i, head)) : nullptr;
      for (int64_t d = 0; d < depth_; ++d) {
        __m512i x = _mm512_setzero_si512();
        if (copied) x = _mm512_maskz_loadu_epi16(Lanes32(K_ - 32 * d), from + 64 * d);
        if (!as_given) x = Tiles::Narrow(_mm512_load_ps(q_rows_ + i * row_ + 32 * d), _mm512_load_ps(q_rows_ + i * row_ + 32 * d + 16));
        _mm512_store_si512(to[d].row[i], x);
      }
    }
  }

  void PackKeys() {
    const ConstTensor& t = layer_.in.k;
    const int64_t head = GateHead(t);
    if constexpr (kPerChannel) {
      for (int64_t b = 0; b < blocks_; ++b) {
        LoadRows(t, head, b, true, k_rows_ + kBlock * b * row_);
        FadeToBlockEnd(b, k_rows_, k_right_);
        if constexpr (kRankOne) {
          LoadRows(layer_.in.remove, GateHead(layer_.in.remove), b, false, r_rows_ + kBlock * b * row_);
          LoadRows(layer_.in.write, GateHead(layer_.in.write), b, false, w_rows_ + kBlock * b * row_);
          FadeToBlockEnd(b, w_rows_, w_right_);
        }
      }
    } else {
      for (int64_t b = 0; b < blocks_; ++b) {
        Tile* left = k_left_ + b * depth_;
        PackLeft(t, head, b, left);
        for (int64_t d = 0; d < depth_; ++d) Turn(left[d], k_right_ + d * most_blocks_ + b);
      }
      TurnKeys();
    }
  }

  // Keys as the left operand [channel blocks][pairs] of the state, from their right one [depth][blocks]: its rows hold two channels of 16 tokens.
  void TurnKeys() const {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    for (int64_t m = 0; m < pairs_; ++m) {
      const bool both = 2 * m + 1 < blocks_;
      for (int64_t d = 0; d < depth_; ++d) {
        const Tile* from = k_right_ + d * most_blocks_ + 2 * m;
        for (int64_t p = 0; p < 16; ++p) {
          const __m512i a = _mm512_load_si512(from->row[p]), b = both ? _mm512_load_si512(from[1].row[p]) : _mm512_setzero_si512();
          Tile* to = k_turned_ + (2 * d + p / 8) * most_pairs_ + m;
          _mm512_store_si512(to->row[2 * (p % 8)], _mm512_or_si512(_mm512_andnot_si512(high, a), _mm512_slli_epi32(b, 16)));
          _mm512_store_si512(to->row[2 * (p % 8) + 1], _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_and_si512(b, high)));
        }
      }
    }
  }

  void PackValues() {
    const ConstTensor& t = layer_.in.v;
    const int64_t head = GateHead(t);
    for (int64_t i = 0; i < 32 * pairs_; ++i) {
      uint16_t* to = v_rows_ + i * v_row_;
      const std::byte* from = i < n_ ? At(t, Offset(t, i, head, job_.column)) : nullptr;
      if (from != nullptr && t.strides[3] != 1) {
        for (int64_t x = 0; x < v_row_; ++x) {
          to[x] = 0;
          if (x < job_.columns) std::memcpy(to + x, from + 2 * x * t.strides[3], 2);
        }
      } else {
        for (int64_t x = 0; x < v_row_; x += 16)
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + x),
                             from == nullptr ? _mm256_setzero_si256() : _mm256_maskz_loadu_epi16(Lanes(job_.columns - x), from + 2 * x));
      }
    }
    if constexpr (kDelta) return;
    for (int64_t m = 0; m < pairs_; ++m) {
      for (int64_t p = 0; p < 16; ++p) {
        const uint16_t *low = v_rows_ + (32 * m + p) * v_row_, *high = low + 16 * v_row_;
        for (int64_t x = 0; x < columns_; ++x, low += 16, high += 16) {
          const __m512i pair =
              _mm512_or_si512(_mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(low))),
                              _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(high))), 16));
          _mm512_store_si512(values_.tiles[m * columns_ + x].row[p], pair);
          if constexpr (kPerToken) {
            const float* end = to_end_ + 32 * m + p;
            _mm512_store_si512(
                end_values_.tiles[m * columns_ + x].row[p],
                NarrowPairs<Tiles>(_mm512_mul_ps(WidenLow(pair), _mm512_set1_ps(end[0])), _mm512_mul_ps(WidenHigh(pair), _mm512_set1_ps(end[16]))));
          }
        }
      }
    }
    KeepFinite(&values_);
    if constexpr (kPerToken) KeepFinite(&end_values_);
  }

  // Takes out what is not finite. Twice a word, without its sign, is at least 0xFF00 where the exponent has all its bits.
  void KeepFinite(Right* right) const {
    const __m512i limit = _mm512_set1_epi16(static_cast<int16_t>(0xFF00));
    __m512i largest = _mm512_setzero_si512();
    for (int64_t x = 0; x < pairs_ * columns_; ++x) {
      for (int p = 0; p < 16; ++p) {
        const __m512i pair = _mm512_load_si512(right->tiles[x].row[p]);
        largest = _mm512_max_epu16(largest, _mm512_add_epi16(pair, pair));
      }
    }
    right->changed = _mm512_cmpge_epu16_mask(largest, limit) != 0;
    if (!right->changed) return;
    for (int64_t x = 0; x < pairs_ * columns_; ++x) {
      for (int p = 0; p < 16; ++p) {
        const __m512i pair = _mm512_load_si512(right->tiles[x].row[p]);
        _mm512_store_si512(right->given[x].row[p], pair);
        _mm512_store_si512(right->tiles[x].row[p], _mm512_maskz_mov_epi16(_mm512_cmplt_epu16_mask(_mm512_add_epi16(pair, pair), limit), pair));
      }
    }
  }

  // What KeepFinite took out of column group `group`, given to rows of sums: += left times it. Tokens are rows from `first_token` on: each is seen by
  // its own row (or with `strictly` the next) and those after it. Rows that are no tokens see them all.
  void AddNotFinite(const Right& right, const Tile* left, int64_t pairs, int64_t first_token, bool strictly, int64_t rows, int64_t group,
                    Sums* sums) const {
    if (!right.changed) return;
    for (int64_t t = 0; t < std::min(n_, 32 * pairs); ++t) {
      const int shift = t % 32 < 16 ? 0 : 16;
      for (int64_t x = 0; x < 16 * GroupColumns(group); ++x) {
        const Tile& tile = right.given[t / 32 * columns_ + group * kGroup + x / 16];
        const float value = FromWord(tile.row[t % 16][x % 16] >> shift & 0xFFFF);
        if (std::isfinite(value)) continue;
        for (int64_t i = first_token < 0 ? 0 : std::max<int64_t>(0, t + strictly - first_token); i < rows; ++i)
          sums[x / 16].row[i][x % 16] += FromWord(left[t / 32].row[i][t % 16] >> shift & 0xFFFF) * value;
      }
    }
  }

  int64_t Groups() const { return (columns_ + kGroup - 1) / kGroup; }
  int64_t GroupColumns(int64_t group) const { return std::min(kGroup, columns_ - kGroup * group); }

  // ---- Factors ------------------------------------------------------------------------------------------------------------------------------

  // Logarithms become factors. Past the last token nothing decays.
  void PackFactors() {
    const ConstTensor& t = layer_.in.log_decay;
    if constexpr (kPerChannel) {
      const int64_t head = GateHead(t);
      for (int64_t i = 0; i < kBlock * blocks_; ++i) {
        float* row = D_ + i * row_;
        if (i < n_) LoadRow(t, Offset(t, i, head), t.strides[3], K_, row_, row);
        for (int64_t c = 0; c < row_; c += 16) _mm512_store_ps(row + c, i < n_ ? ExpOfNonPositive(_mm512_load_ps(row + c)) : _mm512_set1_ps(1));
      }
    }
    if constexpr (R::kDecay == Decay::kPerStep) {
      const int64_t head = GateHead(t);
      for (int64_t i = 0; i < kBlock * blocks_; ++i) D_[i] = i < n_ ? LoadOne(t, Offset(t, i, head)) : 0;
      for (int64_t i = 0; i < n_; i += 16) _mm512_store_ps(D_ + i, ExpOfNonPositive(_mm512_load_ps(D_ + i)));
      float factor = 1;
      for (int64_t i = 0; i < n_; ++i) from_start_[i] = factor *= D_[i];
      factor = 1;
      for (int64_t i = n_ - 1; i >= 0; --i) {
        to_end_[i] = factor;
        factor *= D_[i];
      }
    }
    if constexpr (R::kDecay == Decay::kPerHead) {
      for (int64_t i = 0; i < n_; ++i) {
        from_start_[i] = Power(i + 1);
        to_end_[i] = Power(n_ - 1 - i);
      }
    }
    if constexpr (kPerToken)
      for (int64_t i = n_; i < 32 * pairs_; ++i) to_end_[i] = 1;
    if constexpr (kDelta)
      for (int64_t i = 0; i < n_; ++i) beta_[i] = LoadOne(layer_.in.beta, Offset(layer_.in.beta, i, GateHead(layer_.in.beta)));
  }

  // The powers of a constant decay, from f64 and rounded once, in the order in which a table's row takes them: powers_[m] = D^(tokens - m).
  void PackPowers() const {
    const ConstTensor& t = layer_.in.log_decay;
    const double log_decay = static_cast<double>(LoadOne(t, contract::Offset(t, HeadOf(t, 0, job_.head, layer_.state_heads))));
    const int64_t tokens = kBlock * most_blocks_;
    for (int64_t m = 0; m < tokens + kBlock; ++m)
      powers_[m] = m >= tokens ? 1 : static_cast<float>(std::exp(log_decay * static_cast<double>(tokens - m)));
  }
  float Power(int64_t exponent) const { return powers_[kBlock * most_blocks_ - exponent]; }

  // The factors of block b's rows of a table, from those of the block before: row i is row i - 1 times D_i.
  void FactorRows(int64_t b) const {
    if constexpr (R::kDecay != Decay::kPerStep) return;
    const int64_t tokens = kBlock * most_blocks_;
    const float* before = factors_ + (kBlock - 1) * tokens;
    for (int64_t i = 0; i < kBlock; ++i) {
      float* row = factors_ + i * tokens;
      const __m512 decay = _mm512_set1_ps(D_[kBlock * b + i]);
      for (int64_t j = 0; j < b; ++j) _mm512_store_ps(row + 16 * j, _mm512_mul_ps(_mm512_load_ps(before + 16 * j), decay));
      _mm512_store_ps(row + 16 * b, _mm512_mask_mul_ps(_mm512_set1_ps(1), Lanes(i), _mm512_load_ps(before + 16 * b), decay));
      before = row;
    }
  }
  // Those of row i of block b for the keys of block j.
  __m512 Factors(int64_t b, int64_t i, int64_t j) const {
    if constexpr (R::kDecay == Decay::kPerStep) return _mm512_load_ps(factors_ + i * kBlock * most_blocks_ + 16 * j);
    return _mm512_loadu_ps(powers_ + kBlock * most_blocks_ - (kBlock * b + i) + 16 * j);
  }

  // A decay a channel. Rows y of block b, times the factors from after each to the block's end, as a right operand [depth]. Leaves the block's
  // product of factors in whole_.
  void FadeToBlockEnd(int64_t b, const float* y, Tile* right) const {
    Tile rows;
    for (int64_t d = 0; d < depth_; ++d) {
      __m512 low = _mm512_set1_ps(1), high = low;
      for (int64_t i = kBlock - 1; i >= 0; --i) {
        const int64_t at = (kBlock * b + i) * row_ + 32 * d;
        _mm512_store_si512(rows.row[i], Tiles::Narrow(_mm512_mul_ps(_mm512_load_ps(y + at), low), _mm512_mul_ps(_mm512_load_ps(y + at + 16), high)));
        low = _mm512_mul_ps(low, _mm512_load_ps(D_ + at));
        high = _mm512_mul_ps(high, _mm512_load_ps(D_ + at + 16));
      }
      Turn(rows, right + b * depth_ + d);
      _mm512_store_ps(whole_ + b * row_ + 32 * d, low);
      _mm512_store_ps(whole_ + b * row_ + 32 * d + 16, high);
    }
  }

  // Rows y of all tokens, times the factors from after each to the chunk's end, as the left operand [channel blocks][pairs] of the state. Leaves the
  // chunk's product of factors in fade_.
  void FadeToEnd(const float* y, Tile* turned) const {
    Tile rows;
    for (int64_t c = 0; c < 2 * depth_; ++c) {
      __m512 fade = _mm512_set1_ps(1);
      for (int64_t m = pairs_ - 1; m >= 0; --m) {
        const bool both = 2 * m + 1 < blocks_;
        const float *low = y + 32 * m * row_ + 16 * c, *low_decay = D_ + 32 * m * row_ + 16 * c;
        const float *high = both ? low + 16 * row_ : low, *high_decay = both ? low_decay + 16 * row_ : low_decay;
        __m512 high_fade = both ? fade : _mm512_setzero_ps();
        if (both) fade = _mm512_mul_ps(fade, _mm512_load_ps(whole_ + (2 * m + 1) * row_ + 16 * c));
        for (int64_t i = kBlock - 1; i >= 0; --i) {
          const __m512 x = _mm512_load_ps(high + i * row_);
          _mm512_store_si512(rows.row[i], NarrowPairs<Tiles>(_mm512_mul_ps(_mm512_load_ps(low + i * row_), fade),
                                                             both ? _mm512_mul_ps(x, high_fade) : _mm512_setzero_ps()));
          fade = _mm512_mul_ps(fade, _mm512_load_ps(low_decay + i * row_));
          high_fade = _mm512_mul_ps(high_fade, _mm512_load_ps(high_decay + i * row_));
        }
        Turn(rows, turned + c * most_pairs_ + m);
      }
      _mm512_store_ps(fade_ + 16 * c, fade);
    }
  }

  // Rows x of block b as left operands [anchors][depth]: times the factors from the start of block a up to the row, a = 0 .. b, its own among them
  // unless the row is read before its decay.
  void FadeFromAnchors(int64_t b, const float* x, bool before) const {
    const float* decay = D_ + kBlock * b * row_;
    for (int64_t d = 0; d < depth_; ++d) {
      __m512 low = _mm512_set1_ps(1), high = low;
      for (int64_t i = 0; i < kBlock; ++i) {
        const int64_t at = i * row_ + 32 * d;
        const __m512 next_low = _mm512_mul_ps(low, _mm512_load_ps(decay + at)), next_high = _mm512_mul_ps(high, _mm512_load_ps(decay + at + 16));
        const __m512 y = _mm512_mul_ps(_mm512_load_ps(x + at), before ? low : next_low);
        const __m512 z = _mm512_mul_ps(_mm512_load_ps(x + at + 16), before ? high : next_high);
        _mm512_store_ps(x_faded_ + at, y);
        _mm512_store_ps(x_faded_ + at + 16, z);
        _mm512_store_si512(x_left_[b * depth_ + d].row[i], Tiles::Narrow(y, z));
        low = next_low;
        high = next_high;
      }
      low = high = _mm512_set1_ps(1);
      for (int64_t a = b - 1; a >= 0; --a) {
        low = _mm512_mul_ps(low, _mm512_load_ps(whole_ + a * row_ + 32 * d));
        high = _mm512_mul_ps(high, _mm512_load_ps(whole_ + a * row_ + 32 * d + 16));
        for (int64_t i = 0; i < kBlock; ++i) {
          const float* at = x_faded_ + i * row_ + 32 * d;
          _mm512_store_si512(x_left_[a * depth_ + d].row[i],
                             Tiles::Narrow(_mm512_mul_ps(_mm512_load_ps(at), low), _mm512_mul_ps(_mm512_load_ps(at + 16), high)));
        }
      }
    }
  }

  // ---- Scores -------------------------------------------------------------------------------------------------------------------------------

  enum class Diagonal { kIncluded, kStrict, kApart };

  // Row b of a table from the scores of a left operand with keys y, in groups of key blocks. The last group's products are under way when this
  // returns; FinishScores makes the row of them. `x` are the rows themselves (of a decay a channel).
  void StartScores(int64_t b, const Tile* left, const Tile* right, Tile* table, Diagonal diagonal) const {
    int64_t j = 0;
    for (; j + kGroup <= b; j += kGroup) {
      ScoreGroup(b, j, left, right);
      MakeRow(b, j, table, diagonal);
    }
    ScoreGroup(b, j, left, right);
  }
  void FinishScores(int64_t b, Tile* table, Diagonal diagonal) const { MakeRow(b, b / kGroup * kGroup, table, diagonal); }

  void ScoreGroup(int64_t b, int64_t j, const Tile* left, const Tile* right) const {
    const int64_t blocks = std::min(kGroup, b + (kPerChannel ? 0 : 1) - j);
    if (blocks == 0) return;
    Clear<Tiles>();
    if constexpr (kPerChannel)
      MultiplyAddEach<Tiles>(blocks, depth_, left + (j + 1) * depth_, right + j * depth_);
    else
      MultiplyAdd<Tiles>(blocks, depth_, left, right + j, most_blocks_);
    Store<Tiles>(blocks, scores_);
  }

  // Key blocks first .. of row b, from sums to pairs of bf16. A block on the diagonal is cut to its triangle there, or set apart in diagonal_.
  void MakeRow(int64_t b, int64_t first, Tile* table, Diagonal diagonal) const {
    for (int64_t j = first; j <= b && j < first + kGroup; j += 2) {
      for (int64_t i = 0; i < kBlock; ++i) {
        const __m512 low = Score(b, i, j, first, diagonal), high = j < b ? Score(b, i, j + 1, first, diagonal) : _mm512_setzero_ps();
        if (layer_.normalize) row_sums_[i] = _mm512_add_ps(_mm512_add_ps(first == 0 && j == 0 ? _mm512_setzero_ps() : row_sums_[i], low), high);
        _mm512_store_si512(table[j / 2].row[i], NarrowPairs<Tiles>(low, high));
      }
    }
  }
  __m512 Score(int64_t b, int64_t i, int64_t j, int64_t first, Diagonal diagonal) const {
    float* at = kPerChannel && j == b ? diagonal_->row[i] : scores_[j - first].row[i];
    __m512 x = _mm512_load_ps(at);
    if constexpr (kPerToken) x = _mm512_mul_ps(x, Factors(b, i, j));
    if (j < b) return x;
    if (diagonal == Diagonal::kApart) {
      _mm512_store_ps(diagonal_->row[i], x);
      return _mm512_setzero_ps();
    }
    return _mm512_maskz_mov_ps(Lanes(diagonal == Diagonal::kStrict ? i : i + 1), x);
  }

  // A decay a channel: scores among the tokens of block b in diagonal_, the lower triangle and the diagonal; the rest is anything.
  void ScoreDiagonal(int64_t b, const float* x, const float* y, bool before) {
    const float *decay = D_ + kBlock * b * row_, *from = y + kBlock * b * row_;
    Sums turned;
    for (int64_t j = 0; j < kBlock; ++j) {
      Step();
      int64_t c = 0;
      for (; c + 128 <= row_; c += 128) ScoreColumn<8>(j, x + c, from + c, decay + c, before, c > 0);
      const int64_t left = row_ - c;
      if (left == 96) ScoreColumn<6>(j, x + c, from + c, decay + c, before, c > 0);
      if (left == 64) ScoreColumn<4>(j, x + c, from + c, decay + c, before, c > 0);
      if (left == 32) ScoreColumn<2>(j, x + c, from + c, decay + c, before, c > 0);
      _mm512_store_ps(turned.row[j], SumRows(*scratch_));
    }
    Turn(turned, diagonal_);
  }

  // scratch_ row i (+)= key j of a block times query i and the decays between, over kVectors vectors of channels, which are summed later.
  template <int kVectors>
  void ScoreColumn(int64_t j, const float* x, const float* y, const float* decay, bool before, bool add) const {
    __m512 key[kVectors];
    TERCET_UNROLL
    for (int v = 0; v < kVectors; ++v) key[v] = _mm512_load_ps(y + j * row_ + 16 * v);
    for (int64_t i = j; i < kBlock; ++i) {
      const float *query = x + i * row_, *factor = decay + i * row_;
      if (!before && i > j) {
        TERCET_UNROLL
        for (int v = 0; v < kVectors; ++v) key[v] = _mm512_mul_ps(key[v], _mm512_load_ps(factor + 16 * v));
      }
      __m512 even = add ? _mm512_load_ps(scratch_->row[i]) : _mm512_setzero_ps(), odd = _mm512_setzero_ps();
      TERCET_UNROLL
      for (int v = 0; v < kVectors; v += 2) {
        even = _mm512_fmadd_ps(key[v], _mm512_load_ps(query + 16 * v), even);
        odd = _mm512_fmadd_ps(key[v + 1], _mm512_load_ps(query + 16 * (v + 1)), odd);
      }
      _mm512_store_ps(scratch_->row[i], _mm512_add_ps(even, odd));
      if (before && i > j) {
        TERCET_UNROLL
        for (int v = 0; v < kVectors; ++v) key[v] = _mm512_mul_ps(key[v], _mm512_load_ps(factor + 16 * v));
      }
    }
  }

  // What a token reads of its own write, through the bonus.
  void OwnTerms(int64_t b) const {
    for (int64_t i = 0; i < kBlock; ++i) {
      const float *q = q_rows_ + i * row_, *k = k_rows_ + (kBlock * b + i) * row_;
      __m512 sum = _mm512_setzero_ps();
      for (int64_t c = 0; c < row_; c += 16)
        sum = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_load_ps(q + c), _mm512_load_ps(bonus_ + c)), _mm512_load_ps(k + c), sum);
      diagonal_->row[i][i] = _mm512_reduce_add_ps(sum);
    }
  }

  // ---- The steps of a chunk -------------------------------------------------------------------------------------------------------------------

  // The sums of products for group `group` of value columns: those with the state, and apart from them (at + kGroup) where a row's factor multiplies
  // only the former.
  static constexpr int64_t kReads = kPerToken ? 2 : 1;
  Sums* Reads(int64_t group) const { return reads_ + group % 2 * kReads * kGroup; }

  void ReadState(const Tile* left, int64_t group) const {
    Clear<Tiles>();
    MultiplyAdd<Tiles>(GroupColumns(group), depth_, left, state_tiles_ + kGroup * group, columns_);
    if constexpr (kPerToken) {
      Store<Tiles>(GroupColumns(group), Reads(group));
      Clear<Tiles>();
    }
  }
  void ReadTokens(const Tile* table, int64_t pairs, const Right& right, int64_t group) const {
    MultiplyAdd<Tiles>(GroupColumns(group), pairs, table, right.tiles + kGroup * group, columns_);
  }
  void StoreReads(int64_t group) const { Store<Tiles>(GroupColumns(group), Reads(group) + (kReads - 1) * kGroup); }

  // Block b of U = (1 + A)^-1 beta (V - (K F0) S0), or of P = (1 - M)^-1 ((R Fx0) S0 + N V).
  void Solve(int64_t b) {
    const Tile* left = k_left_ + b * depth_;
    if constexpr (kPerChannel) {
      const float* rows = (kDelta ? k_rows_ : r_rows_) + kBlock * b * row_;
      FadeFromAnchors(b, rows, kRankOne);
      left = x_left_;
      if constexpr (kRankOne) {
        StartScores(b, left, k_right_, table_, Diagonal::kStrict);
        ScoreDiagonal(b, rows, k_rows_, true);
        FinishScores(b, table_, Diagonal::kStrict);
      }
      StartScores(b, left, kDelta ? k_right_ : w_right_, kDelta ? table_ : w_table_, Diagonal::kApart);
      ScoreDiagonal(b, rows, kDelta ? k_rows_ : w_rows_, kRankOne);
    } else {
      FactorRows(b);
      StartScores(b, left, k_right_, table_, Diagonal::kApart);
    }
    for (int64_t group = 0; group <= Groups(); ++group) {
      if (group < Groups()) {
        ReadState(left, group);
        if (group == 0) FinishScores(b, kDelta ? table_ : w_table_, Diagonal::kApart);
        if constexpr (kRankOne) ReadTokens(table_, b / 2 + 1, values_, group);
        ReadTokens(kDelta ? table_ : w_table_, (b + 1) / 2, kDelta ? values_ : removed_, group);
        StoreReads(group);
      }
      if (group > 0) FinishSolve(b, group - 1);
    }
  }

  void FinishSolve(int64_t b, int64_t group) {
    Sums *of_state = Reads(group), *sums = of_state + (kReads - 1) * kGroup;
    if constexpr (kRankOne) AddNotFinite(values_, table_, b / 2 + 1, kBlock * b, true, kBlock, group, sums);
    for (int64_t c = 0; c < GroupColumns(group); ++c) {
      Step();
      const int64_t column = kGroup * group + c;
      const uint16_t* v = v_rows_ + kBlock * b * v_row_ + 16 * column;
      __m512 x[kBlock];
      TERCET_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        x[i] = _mm512_load_ps(sums[c].row[i]);
        if constexpr (kPerToken) x[i] = _mm512_fmadd_ps(_mm512_load_ps(of_state[c].row[i]), _mm512_set1_ps(from_start_[kBlock * b + i]), x[i]);
        if constexpr (kDelta) x[i] = _mm512_sub_ps(Widen(_mm256_load_si256(reinterpret_cast<const __m256i*>(v + i * v_row_))), x[i]);
      }
      TERCET_UNROLL
      for (int j = 0; j < kBlock; ++j) {
        if constexpr (kDelta) x[j] = _mm512_mul_ps(x[j], _mm512_set1_ps(beta_[kBlock * b + j]));
        TERCET_UNROLL
        for (int i = j + 1; i < kBlock; ++i) {
          const __m512 a = _mm512_set1_ps(diagonal_->row[i][j]);
          x[i] = kDelta ? _mm512_fnmadd_ps(a, x[j], x[i]) : _mm512_fmadd_ps(a, x[j], x[i]);
        }
      }
      const int64_t count = Count(b);
      const int64_t at = b / 2 * columns_ + column;
      TERCET_UNROLL
      for (int i = 0; i < kBlock; ++i) {
        if (i >= count) x[i] = _mm512_setzero_ps();
        StoreHalf(b, x[i], (kDelta ? values_ : removed_).tiles[at].row[i]);
        if constexpr (kPerToken) StoreHalf(b, _mm512_mul_ps(x[i], _mm512_set1_ps(to_end_[kBlock * b + i])), end_values_.tiles[at].row[i]);
      }
    }
  }
  // One of the two tokens of a pair: the first with zeros beside it, the second beside what is there.
  static void StoreHalf(int64_t b, __m512 x, uint32_t* to) {
    const __m512 zero = _mm512_setzero_ps();
    if (b % 2 == 0)
      _mm512_store_si512(to, NarrowPairs<Tiles>(x, zero));
    else
      _mm512_store_si512(to, _mm512_or_si512(_mm512_load_si512(to), NarrowPairs<Tiles>(zero, x)));
  }

  // The outputs of block b for query head g.
  void Read(int64_t g, int64_t b) {
    const ConstTensor& t = layer_.in.q;
    if constexpr (kPerChannel) {
      LoadRows(t, QueryHead(g), b, true, q_rows_);
      FadeFromAnchors(b, q_rows_, kReadBefore);
    } else {
      PackLeft(t, QueryHead(g), b, x_left_);
      FactorRows(b);
    }
    if constexpr (kRankOne) {
      StartScores(b, x_left_, w_right_, w_table_, Diagonal::kIncluded);
      ScoreDiagonal(b, q_rows_, w_rows_, false);
      FinishScores(b, w_table_, Diagonal::kIncluded);
    }
    StartScores(b, x_left_, k_right_, table_, Diagonal::kIncluded);
    if constexpr (kPerChannel) ScoreDiagonal(b, q_rows_, k_rows_, kReadBefore);
    if constexpr (kReadBefore) OwnTerms(b);
    for (int64_t group = 0; group <= Groups(); ++group) {
      if (group < Groups()) {
        ReadState(x_left_, group);
        if (group == 0) {
          FinishScores(b, table_, Diagonal::kIncluded);
          if (layer_.normalize) Denominators(b);
        }
        ReadTokens(table_, b / 2 + 1, values_, group);
        if constexpr (kRankOne) ReadTokens(w_table_, b / 2 + 1, removed_, group);
        StoreReads(group);
      }
      if (group > 0) StoreOut(g, b, group - 1);
    }
  }

  void Denominators(int64_t b) const {
    for (int64_t i = 0; i < Count(b); ++i) {
      __m512 even = _mm512_setzero_ps(), odd = even;
      for (int64_t d = 0; d < depth_; ++d) {
        const __m512i pair = _mm512_load_si512(x_left_[d].row[i]);
        even = _mm512_fmadd_ps(WidenLow(pair), _mm512_load_ps(key_sum_ + 32 * d), even);
        odd = _mm512_fmadd_ps(WidenHigh(pair), _mm512_load_ps(key_sum_ + 32 * d + 16), odd);
      }
      float seen = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
      if constexpr (kPerToken) seen *= from_start_[kBlock * b + i];
      denominators_[i] = seen + _mm512_reduce_add_ps(row_sums_[i]);
    }
  }

  void StoreOut(int64_t g, int64_t b, int64_t group) {
    const Tensor& t = layer_.out.out;
    Sums *of_state = Reads(group), *sums = of_state + (kReads - 1) * kGroup;
    AddNotFinite(values_, table_, b / 2 + 1, kBlock * b, false, kBlock, group, sums);
    if constexpr (kRankOne) AddNotFinite(removed_, w_table_, b / 2 + 1, kBlock * b, false, kBlock, group, sums);
    const __m512 scale = _mm512_set1_ps(static_cast<float>(layer_.scale));
    const int64_t first = 16 * kGroup * group, width = std::min(16 * kGroup, job_.columns - first), step = t.strides[3];
    for (int64_t i = 0; i < Count(b); ++i) {
      Step();
      std::byte* to = static_cast<std::byte*>(t.data) + 2 * Offset(t, kBlock * b + i, job_.head * queries_ + g, job_.column + first);
      const auto number = [&](int64_t c) TERCET_AMX_ATTR {
        if (c >= GroupColumns(group)) return _mm512_setzero_ps();
        __m512 x = _mm512_load_ps(sums[c].row[i]);
        if constexpr (kPerToken) x = _mm512_fmadd_ps(_mm512_load_ps(of_state[c].row[i]), _mm512_set1_ps(from_start_[kBlock * b + i]), x);
        if (!layer_.normalize) return _mm512_mul_ps(x, scale);
        return denominators_[i] == 0 ? _mm512_setzero_ps() : _mm512_div_ps(x, _mm512_set1_ps(denominators_[i]));
      };
      for (int64_t x = 0; x < width; x += 32) {
        const __m512i words = Tiles::Narrow(number(x / 16), number(x / 16 + 1));
        if (step == 1) {
          _mm512_mask_storeu_epi16(to + 2 * x, Lanes32(width - x), words);
        } else {
          alignas(64) uint16_t word[32];
          _mm512_store_si512(word, words);
          for (int64_t y = x; y < std::min(x + 32, width); ++y) std::memcpy(to + 2 * y * step, word + (y - x), 2);
        }
      }
    }
  }

  // S <- F(n, 0) S0 + (K Fn)' U [+ (W Fn)' P], and z likewise.
  void Advance() {
    if constexpr (kPerChannel) {
      if constexpr (kRankOne) FadeToEnd(w_rows_, w_turned_);
      FadeToEnd(k_rows_, k_turned_);
    }
    const Right& values = kPerToken ? end_values_ : values_;
    const int64_t count = 2 * depth_ * Groups();
    for (int64_t at = 0; at <= count; ++at) {
      if (at < count) {
        const int64_t c = at / Groups(), group = at % Groups(), columns = GroupColumns(group);
        if constexpr (R::kDecay == Decay::kNone)
          Load<Tiles>(columns, Written(at));
        else
          Clear<Tiles>();
        MultiplyAdd<Tiles>(columns, pairs_, k_turned_ + c * most_pairs_, values.tiles + kGroup * group, columns_);
        if constexpr (kRankOne) MultiplyAdd<Tiles>(columns, pairs_, w_turned_ + c * most_pairs_, removed_.tiles + kGroup * group, columns_);
        Store<Tiles>(columns, Written(at));
      }
      if (at > 0) AddToState((at - 1) / Groups(), (at - 1) % Groups(), Written(at - 1));
    }
    if (layer_.normalize) AdvanceKeySum();
  }

  // Where the sums of channel block and group `at` go: what is written, or without a decay the state itself with it.
  Sums* Written(int64_t at) const {
    if constexpr (R::kDecay == Decay::kNone) return state_ + at / Groups() * columns_ + kGroup * (at % Groups());
    return reads_ + at % 2 * kGroup;
  }

  // A state tile and its bf16 pairs of channels. Channels past the last stay zero: their keys are.
  void AddToState(int64_t c, int64_t group, Sums* sums) {
    const int64_t rows = std::min(kBlock, K_ - kBlock * c);
    AddNotFinite(kPerToken ? end_values_ : values_, k_turned_ + c * most_pairs_, pairs_, -1, false, rows, group, sums);
    if constexpr (kRankOne) AddNotFinite(removed_, w_turned_ + c * most_pairs_, pairs_, -1, false, rows, group, sums);
    for (int64_t x = 0; x < GroupColumns(group); ++x) {
      Step();
      Sums* state = state_ + c * columns_ + kGroup * group + x;
      Tile* pairs = state_tiles_ + c / 2 * columns_ + kGroup * group + x;
      for (int64_t p = 0; p < 8; ++p) {
        const __m512 low = NextState(c, 2 * p, state->row[2 * p], sums[x].row[2 * p]);
        const __m512 high = NextState(c, 2 * p + 1, state->row[2 * p + 1], sums[x].row[2 * p + 1]);
        _mm512_store_si512(pairs->row[c % 2 * 8 + p], NarrowPairs<Tiles>(low, high));
      }
    }
  }
  __m512 NextState(int64_t c, int64_t i, float* state, const float* sum) const {
    __m512 x = _mm512_load_ps(sum);
    if constexpr (R::kDecay != Decay::kNone) {
      x = _mm512_fmadd_ps(_mm512_load_ps(state), _mm512_set1_ps(kPerChannel ? fade_[kBlock * c + i] : from_start_[n_ - 1]), x);
      _mm512_store_ps(state, x);
    }
    return x;
  }

  // ---- State and key sum ------------------------------------------------------------------------------------------------------------------

  // The key sum lies as a widened pair does: of every 32 channels first the even ones, then the odd.
  int64_t KeySumAt(int64_t c) const { return c / 32 * 32 + c % 2 * 16 + c % 32 / 2; }

  void AdvanceKeySum() const {
    if constexpr (kPerToken)
      for (int64_t c = 0; c < row_; c += 16)
        _mm512_store_ps(key_sum_ + c, _mm512_mul_ps(_mm512_load_ps(key_sum_ + c), _mm512_set1_ps(from_start_[n_ - 1])));
    if constexpr (kPerChannel)
      for (int64_t c = 0; c < row_; ++c) key_sum_[KeySumAt(c)] *= fade_[c];
    // The turned keys hold what is added, channel by channel.
    for (int64_t c = 0; c < K_; ++c) {
      __m512 even = _mm512_setzero_ps(), odd = even;
      for (int64_t m = 0; m < pairs_; ++m) {
        const __m512i pair = _mm512_load_si512(k_turned_[c / 16 * most_pairs_ + m].row[c % 16]);
        __m512 low = WidenLow(pair), high = WidenHigh(pair);
        if constexpr (kPerToken) {
          low = _mm512_mul_ps(low, _mm512_load_ps(to_end_ + 32 * m));
          high = _mm512_mul_ps(high, _mm512_load_ps(to_end_ + 32 * m + 16));
        }
        even = _mm512_add_ps(even, low);
        odd = _mm512_add_ps(odd, high);
      }
      key_sum_[KeySumAt(c)] += _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }
  }

  void LoadState() const {
    const ConstTensor& t = layer_.in.initial_state;
    std::memset(state_, 0, static_cast<size_t>(2 * depth_ * columns_) * sizeof(Sums));
    for (int64_t c = 0; t.given() && c < K_; ++c)
      for (int64_t x = 0; x < job_.columns; x += 16)
        LoadRow(t, contract::Offset(t, job_.sequence, job_.head, c, job_.column + x), t.strides[3], std::min<int64_t>(16, job_.columns - x), 16,
                state_[c / 16 * columns_ + x / 16].row[c % 16]);
    for (int64_t d = 0; d < depth_; ++d)
      for (int64_t x = 0; x < columns_; ++x)
        for (int64_t p = 0; p < 16; ++p) {
          const Sums& from = state_[(2 * d + p / 8) * columns_ + x];
          _mm512_store_si512(state_tiles_[d * columns_ + x].row[p],
                             NarrowPairs<Tiles>(_mm512_load_ps(from.row[p % 8 * 2]), _mm512_load_ps(from.row[p % 8 * 2 + 1])));
        }
    if (!layer_.normalize) return;
    const ConstTensor& z = layer_.in.initial_key_sum;
    for (int64_t c = 0; c < row_; ++c) {
      const bool known = z.given() && c < K_;
      key_sum_[KeySumAt(c)] = known ? LoadOne(z, contract::Offset(z, job_.sequence, job_.head, c)) : 0;
    }
  }

  void StoreState() const {
    const Tensor& t = layer_.out.final_state;
    for (int64_t c = 0; t.given() && c < K_; ++c)
      for (int64_t x = 0; x < job_.columns; x += 16) {
        const float* row = state_[c / 16 * columns_ + x / 16].row[c % 16];
        const int64_t offset = contract::Offset(t, job_.sequence, job_.head, c, job_.column + x), width = std::min<int64_t>(16, job_.columns - x);
        std::byte* to = static_cast<std::byte*>(t.data) + 4 * offset;
        for (int64_t y = 0; y < width; ++y) std::memcpy(to + 4 * y * t.strides[3], row + y, 4);
      }
    // Every job of a head has the same key sum; the one with the first columns writes it.
    const Tensor& z = layer_.out.final_key_sum;
    for (int64_t c = 0; z.given() && job_.column == 0 && c < K_; ++c)
      std::memcpy(static_cast<std::byte*>(z.data) + 4 * contract::Offset(z, job_.sequence, job_.head, c), key_sum_ + KeySumAt(c), 4);
  }

  // ---- The next chunk's rows ------------------------------------------------------------------------------------------------------------------

  // A token's rows lie far apart, one a page, and their way from memory can be most of a chunk's time. They are asked for while the chunk before is
  // computed, a few lines at every step: asked for all at once they would wait for each other, and the arithmetic for them.
  struct Far {
    std::byte* data;
    int64_t step, bytes;  // from token to token, and of a row
    bool written;
  };

  void ListRows() {
    const Inputs& in = layer_.in;
    for (const ConstTensor* t : {&in.k, &in.v, &in.log_decay, &in.remove, &in.write})
      if (t->rank == 4) ListRow(*t, GateHead(*t), t == &in.v, false);
    for (int64_t g = 0; g < queries_; ++g) {
      ListRow(in.q, QueryHead(g), false, false);
      ListRow(layer_.out.out, job_.head * queries_ + g, true, true);
    }
  }
  void ListRow(const ConstTensor& t, int64_t head, bool values, bool written) {
    const int64_t size = contract::SizeOf(t.dtype), first = values ? job_.column : 0, count = values ? job_.columns : K_;
    // Where channels don't lie side by side, the first of them is all that is asked for.
    far_[far_rows_++] = {const_cast<std::byte*>(At(t, contract::Offset(t, walk_.batch(), 0, head, first))), t.strides[1] * size,
                         (t.strides[3] == 1 ? count : 1) * size, written};
  }

  // So many rows that the steps of a chunk, of which there are as many as in the last, ask for all.
  void Step() {
    ++steps_;
    for (credit_ += coming_ * far_rows_; credit_ >= last_steps_; credit_ -= last_steps_) AskRow();
  }
  void AskRow() {
    if (asked_token_ >= coming_) return;
    const Far& far = far_[asked_row_];
    std::byte* at = far.data + next_[asked_token_] * far.step;
    for (std::byte* end = at + far.bytes; at < end; at += 64) {
      if (far.written)
        __builtin_prefetch(at, 1);
      else
        _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
    }
    if (++asked_row_ < far_rows_) return;
    asked_row_ = 0;
    ++asked_token_;
  }
  void EndSteps() {
    last_steps_ = std::max<int64_t>(1, steps_);
    steps_ = credit_ = asked_token_ = asked_row_ = 0;
  }

  const Job& job_;
  const contract::Layer& layer_;
  forms::Tokens walk_;
  const int64_t K_, depth_, row_;  // key channels; tiles of 32 of them; the channels of these
  const int64_t queries_;          // output heads that read this state
  const int64_t columns_, v_row_;  // tiles of value columns, and the columns of these
  const int64_t most_blocks_, most_pairs_;
  int64_t n_ = 0, blocks_ = 0, pairs_ = 0;  // tokens held now, blocks of 16 and of 32 of them
  int64_t coming_ = 0;                      // tokens of the next chunk

  // What is asked for ahead: rows of a token, the next of them, and how steps are shared out.
  Far* far_;
  int64_t far_rows_ = 0, asked_token_ = 0, asked_row_ = 0, steps_ = 0, last_steps_ = 64, credit_ = 0;

  int64_t *now_, *next_;  // [n]: tokens
  Sums* scores_;          // [kGroup]: of key blocks
  Sums* diagonal_;        // scores within a block
  Sums* scratch_;         // their sums over every 16th channel
  Sums* reads_;           // [2][kReads][kGroup]
  Tile* table_;           // [pairs]: a row of scores
  Tile* w_table_;         // likewise, with write
  Sums* state_;           // [channel blocks][columns]
  Tile* state_tiles_;     // [depth][columns]: right operand
  uint16_t* v_rows_;      // [n][v_row]
  Right values_;          // U, or V
  Right end_values_;      // kPerToken: times the factors to the chunk's end
  Right removed_;         // kRankOne: P
  Tile* k_left_;          // [blocks][depth]; not kPerChannel
  Tile* x_left_;          // [depth]; kPerChannel [anchors][depth]
  Tile* k_right_;         // [depth][most_blocks]; kPerChannel [blocks][depth], faded to the block's end
  Tile* w_right_;         // likewise
  Tile* k_turned_;        // [channel blocks][most_pairs]: left operand
  Tile* w_turned_;        // likewise
  float* q_rows_;         // [kBlock][row]
  float* k_rows_;         // kPerChannel [n][row]
  float* r_rows_;         // likewise
  float* w_rows_;         // likewise
  float* D_;              // kPerChannel [n][row], kPerStep [n]
  float* whole_;          // kPerChannel [blocks][row]: products of a block's factors
  float* x_faded_;        // kPerChannel [kBlock][row]
  float* fade_;           // kPerChannel [row]: F(n, 0)
  float* from_start_;     // kPerToken [n]: F(i, 0)
  float* to_end_;         // kPerToken [n]: F(n, i)
  float* factors_;        // kPerStep [kBlock][n]: rows of F
  float* powers_;         // kPerHead
  float* beta_;           // [n]
  float* bonus_;          // [row]
  float* key_sum_;        // [row]
  float* denominators_;   // [kBlock]
  mutable __m512 row_sums_[kBlock];
};

}  // namespace tercet::amx
TERCET_AFTER_AMX

#endif  // TERCET_SRC_FORMS_CHUNKWISE_AMX_INL_H_
