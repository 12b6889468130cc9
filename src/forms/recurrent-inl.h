// The recurrent form: one pass over the state a token.
//
//   S_t = D_t S_{t-1} + w_t p_t' + k_t u_t'     p_t = S_{t-1}' r_t     o_t = S_t' q_t  (scale is in q)
//
// A panel of value columns stays in L1 while the tokens of a span pass over it. Where the update reads the state, the pass that writes token t also
// gathers p_{t+1}: state rows are loaded and stored once a token whatever the rule.
#include "src/forms/job.hpp"
#include "src/forms/span-inl.h"
#include "src/forms/tiles-inl.h"

#if defined(TERCET_SRC_FORMS_RECURRENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERCET_SRC_FORMS_RECURRENT_INL_H_
#undef TERCET_SRC_FORMS_RECURRENT_INL_H_
#else
#define TERCET_SRC_FORMS_RECURRENT_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tercet {
namespace HWY_NAMESPACE {

template <class R, class T>
class Recurrent {
 public:
  static int64_t Bytes(const Job& job) {
    Arena arena(nullptr);
    const Recurrent form(job, arena);
    return arena.used();
  }

  static void Run(const Job& job) {
    Arena arena(job.workspace);
    Recurrent(job, arena).Walk();
  }

 private:
  using S = Span<R, T>;

  Recurrent(const Job& job, Arena& arena) : span_(job, arena), walk_(job) {
    const int64_t tokens = span_.capacity;
    q_ = arena.Take<T>(span_.queries * tokens * span_.row);
    state_ = arena.Take<T>(span_.panels * span_.K * Panel<T>());
    out_ = arena.Take<T>(span_.queries * tokens * Panel<T>());
    bonus_ = arena.Take<T>(S::kReadBefore ? span_.queries * tokens : 0);
    key_sum_ = arena.Take<T>(span_.layer.normalize ? span_.row : 0);
    denominators_ = arena.Take<T>(span_.layer.normalize ? span_.queries * tokens : 0);
  }

  void Walk() {
    const bool normalize = span_.layer.normalize;
    span_.PackHead();
    span_.LoadState(state_);
    if (normalize) span_.LoadKeySum(key_sum_);
    while (span_.Next(walk_)) {
      for (int64_t g = 0; g < span_.queries; ++g) span_.PackQueries(walk_.batch(), g, Queries(g, 0));
      if constexpr (S::kReadBefore) SumBonus();
      if (normalize) SumKeys();
      for (int64_t p = 0; p < span_.panels; ++p) {
        switch (span_.Vectors(p)) {
          case 1:
            Pass<1>(p);
            break;
          case 2:
            Pass<2>(p);
            break;
          case 3:
            Pass < kPanelVectors<3 ? 1 : 3>(p);
            break;
          default:
            Pass<kPanelVectors>(p);
            break;
        }
        for (int64_t g = 0; g < span_.queries; ++g)
          span_.StoreOut(walk_.batch(), g, p, Outputs(g, 0), normalize ? denominators_ + g * span_.capacity : nullptr);
      }
    }
    span_.StoreState(state_);
    if (normalize) span_.StoreKeySum(key_sum_);
  }

  T* Queries(int64_t g, int64_t i) const { return q_ + (g * span_.capacity + i) * span_.row; }
  T* Outputs(int64_t g, int64_t i) const { return out_ + (g * span_.capacity + i) * Panel<T>(); }

  // What a token reads of its own write, over v: sum of q bonus k.
  void SumBonus() const {
    const Tag<T> d;
    for (int64_t g = 0; g < span_.queries; ++g) {
      for (int64_t i = 0; i < span_.n; ++i) {
        const T *q = Queries(g, i), *k = span_.k + i * span_.row, *bonus = span_.bonus;
        bonus_[g * span_.capacity + i] = SumLanes<T>(
            span_.K, [=](int64_t c) HWY_ATTR { return hn::Mul(hn::Mul(hn::Load(d, q + c), hn::Load(d, bonus + c)), hn::Load(d, k + c)); });
      }
    }
  }

  // The key sum z_t = D_t z_{t-1} + k_t, and z' q of every token (before the write, and with the bonus, where the read comes first).
  void SumKeys() const {
    for (int64_t i = 0; i < span_.n; ++i) {
      const auto read = [&](int64_t g) HWY_ATTR { return Dot(span_.K, Queries(g, i), key_sum_); };
      if constexpr (S::kReadBefore)
        for (int64_t g = 0; g < span_.queries; ++g) denominators_[g * span_.capacity + i] = read(g) + bonus_[g * span_.capacity + i];
      span_.Decayed(key_sum_, i, key_sum_);
      AddRow(span_.row, span_.k + i * span_.row, key_sum_);
      if constexpr (!S::kReadBefore)
        for (int64_t g = 0; g < span_.queries; ++g) denominators_[g * span_.capacity + i] = read(g);
    }
  }

  // All tokens of the span over panel p. Sums over channels run as two chains, even and odd channels, to halve their latency and their rounding.
  template <int kVectors>
  HWY_NOINLINE void Pass(int64_t p) const {
    const Tag<T> d;
    const int64_t lanes = Lanes<T>(), panel = Panel<T>(), K = span_.K, row = span_.row;
    T* HWY_RESTRICT state = state_ + p * K * panel;

    Vector<T> gathered[kVectors];  // p_t
    if constexpr (S::kReads) Read<kVectors>(state, span_.r, gathered);

    for (int64_t i = 0; i < span_.n; ++i) {
      const T* HWY_RESTRICT k = span_.k + i * row;
      const T* HWY_RESTRICT q = Queries(0, i);
      const T* HWY_RESTRICT decay = S::kPerChannel ? span_.D + i * row : nullptr;
      const T* HWY_RESTRICT w = R::kUpdate == Update::kRankOne ? span_.w + i * row : nullptr;
      const T* HWY_RESTRICT next = S::kReads && i + 1 < span_.n ? span_.r + (i + 1) * row : k;  // the last gathering is not used
      const auto factor = S::kPerToken ? hn::Set(d, span_.D[i]) : hn::Zero(d);

      if constexpr (S::kReadBefore)
        for (int64_t g = 1; g < span_.queries; ++g) ReadOut<kVectors>(state, g, i, p);

      Vector<T> u[kVectors];
      HWY_UNROLL(8)
      for (int m = 0; m < kVectors; ++m) {
        u[m] = hn::Load(d, span_.v + (p * span_.capacity + i) * panel + m * lanes);
        if constexpr (R::kUpdate == Update::kDelta) u[m] = hn::Mul(hn::Set(d, span_.beta[i]), hn::Sub(u[m], gathered[m]));
      }
      Vector<T> out[2][kVectors], gather[2][kVectors];
      HWY_UNROLL(2)
      for (int chain = 0; chain < 2; ++chain) {
        HWY_UNROLL(8)
        for (int m = 0; m < kVectors; ++m) out[chain][m] = gather[chain][m] = hn::Zero(d);
      }
      const auto channel = [&](int64_t c, Vector<T>* HWY_RESTRICT o, Vector<T>* HWY_RESTRICT g) HWY_ATTR {
        T* HWY_RESTRICT s = state + c * panel;
        const auto kc = hn::Set(d, k[c]), qc = hn::Set(d, q[c]);
        HWY_UNROLL(8)
        for (int m = 0; m < kVectors; ++m) {
          auto x = hn::Load(d, s + m * lanes);
          if constexpr (S::kReadBefore) o[m] = hn::MulAdd(qc, x, o[m]);
          if constexpr (S::kPerChannel) x = hn::Mul(hn::Set(d, decay[c]), x);
          if constexpr (S::kPerToken) x = hn::Mul(factor, x);
          if constexpr (R::kUpdate == Update::kRankOne) x = hn::MulAdd(hn::Set(d, w[c]), gathered[m], x);
          x = hn::MulAdd(kc, u[m], x);
          hn::Store(x, d, s + m * lanes);
          if constexpr (!S::kReadBefore) o[m] = hn::MulAdd(qc, x, o[m]);
          if constexpr (S::kReads) g[m] = hn::MulAdd(hn::Set(d, next[c]), x, g[m]);
        }
      };
      int64_t c = 0;
      for (; c + 1 < K; c += 2) {
        channel(c, out[0], gather[0]);
        channel(c + 1, out[1], gather[1]);
      }
      if (c < K) channel(c, out[0], gather[0]);

      HWY_UNROLL(8)
      for (int m = 0; m < kVectors; ++m) {
        auto o = hn::Add(out[0][m], out[1][m]);
        if constexpr (S::kReadBefore) o = hn::MulAdd(hn::Set(d, bonus_[i]), u[m], o);
        hn::Store(o, d, Outputs(0, i) + m * lanes);
        if constexpr (S::kReads) gathered[m] = hn::Add(gather[0][m], gather[1][m]);
      }
      if constexpr (!S::kReadBefore)
        for (int64_t g = 1; g < span_.queries; ++g) ReadOut<kVectors>(state, g, i, p);
    }
  }

  // The other output heads of a group: a pass that only reads.
  template <int kVectors>
  HWY_INLINE void ReadOut(const T* state, int64_t g, int64_t i, int64_t p) const {
    const Tag<T> d;
    Vector<T> out[kVectors];
    Read<kVectors>(state, Queries(g, i), out);
    for (int m = 0; m < kVectors; ++m) {
      if constexpr (S::kReadBefore) {
        const auto v = hn::Load(d, span_.v + (p * span_.capacity + i) * Panel<T>() + m * Lanes<T>());
        out[m] = hn::MulAdd(hn::Set(d, bonus_[g * span_.capacity + i]), v, out[m]);
      }
      hn::Store(out[m], d, Outputs(g, i) + m * Lanes<T>());
    }
  }

  // to = S' x.
  template <int kVectors>
  HWY_INLINE void Read(const T* HWY_RESTRICT state, const T* HWY_RESTRICT x, Vector<T>* HWY_RESTRICT to) const {
    const Tag<T> d;
    const int64_t lanes = Lanes<T>(), panel = Panel<T>();
    Vector<T> sum[2][kVectors];
    HWY_UNROLL(2)
    for (int chain = 0; chain < 2; ++chain) {
      HWY_UNROLL(8)
      for (int m = 0; m < kVectors; ++m) sum[chain][m] = hn::Zero(d);
    }
    const auto channel = [&](int64_t c, Vector<T>* HWY_RESTRICT into) HWY_ATTR {
      HWY_UNROLL(8)
      for (int m = 0; m < kVectors; ++m) into[m] = hn::MulAdd(hn::Set(d, x[c]), hn::Load(d, state + c * panel + m * lanes), into[m]);
    };
    int64_t c = 0;
    for (; c + 1 < span_.K; c += 2) {
      channel(c, sum[0]);
      channel(c + 1, sum[1]);
    }
    if (c < span_.K) channel(c, sum[0]);
    HWY_UNROLL(8)
    for (int m = 0; m < kVectors; ++m) to[m] = hn::Add(sum[0][m], sum[1][m]);
  }

  S span_;
  forms::Tokens<T> walk_;
  T* q_;             // [queries][capacity][row]
  T* state_;         // [panels][K][Panel]
  T* out_;           // [queries][capacity][Panel]
  T* bonus_;         // kReadBefore [queries][capacity]
  T* key_sum_;       // [row]
  T* denominators_;  // [queries][capacity]
};

}  // namespace HWY_NAMESPACE
}  // namespace tercet
HWY_AFTER_NAMESPACE();

#endif  // TERCET_SRC_FORMS_RECURRENT_INL_H_
