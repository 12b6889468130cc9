// The rounding that a recurrence does not show.
//
// A rule that removes what it finds corrects the state's rounding errors token by token. A form that sums up a span of tokens, and looks at the state
// only before and after it, can't: it carries them to the span's end as they are. What it sums up are three parts of S_t, and each may be far larger
// than S_t: Z, what is left of the state the span began with; X, of the writes k v'; and Y = S - Z - X, of what was removed. Each token rounds each
// of them twice, by its factor and in its sum, by half a unit in the last place at most. So with
//
//   E_t = D_t^2 E_{t-1} + 2 (X_t^2 + Y_t^2 + Z_t^2)
//
// the variance of the state's error is E times the square of that half unit, and that of an output's error is sum_c q_c^2 E_c likewise. An error
// handed to the next span is corrected only in the course of it, so E reaches back one span more.
//
// Where operands of products are rounded to less, a span reads other numbers than it keeps: of the state it began with, once, and of each write W,
// k v' or what a token removes. These are not corrected within the span either, so that with R_0 the square of the state before it,
//
//   R_t = D_t^2 R_{t-1} + W_t^2
//
// times the square of half a unit in the last place of an operand is added.
#ifndef TERCET_SRC_PROOF_SPAN_NOISE_HPP_
#define TERCET_SRC_PROOF_SPAN_NOISE_HPP_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "src/proof/monte_carlo.hpp"
#include "src/reference/head.hpp"

namespace tercet::proof {

template <class T>
class SpanNoise {
 public:
  // `operand` is half a unit in the last place of 1 of the operands over that of all else, 0 where they are rounded no more than that.
  SpanNoise(const reference::Head<T>& h, int64_t span, double most, double operand)
      : h_(h),
        span_(span),
        most_(most),
        operand_(operand * operand),
        Z_(h.S0.begin(), h.S0.end()),
        X_(h.K * h.V),
        own_(h.K * h.V),
        last_(h.K * h.V),
        before_(operand > 0 ? Z_ : std::vector<double>()),
        row_(h.V),
        out_(h.G) {
    for (size_t i = 0; i < before_.size(); ++i) own_[i] = operand_ * before_[i] * before_[i];
  }

  // To be shown the state after every token.
  void Add(int64_t t, const T* S) {
    const int64_t K = h_.K, V = h_.V;
    for (int64_t c = 0; c < K; ++c) {
      const auto D = static_cast<double>(h_.D[t * K + c]);
      // The delta rules write k u', whose u holds what is removed, in one sum: they have no X apart from Y.
      const auto k = static_cast<double>(h_.update == Update::kRankOne ? h_.k[t * K + c] : T(0));
      double *Z = Z_.data() + c * V, *X = X_.data() + c * V, *own = own_.data() + c * V, *last = last_.data() + c * V;
      const T* S_c = S + c * V;
      const T* v = h_.v.data() + t * V;
      for (int64_t e = 0; e < V; ++e) {
        Z[e] *= D;
        X[e] = D * X[e] + k * static_cast<double>(v[e]);
        const auto s = static_cast<double>(S_c[e]);
        const double Y = s - Z[e] - X[e];
        double sum = D * D * own[e] + 2 * (X[e] * X[e] + Y * Y + Z[e] * Z[e]);
        if (operand_ > 0) {
          double& before = before_[c * V + e];
          const double written = k * static_cast<double>(v[e]), rest = s - D * before - written;
          sum += operand_ * (written * written + rest * rest);
          before = s;
        }
        own[e] = std::abs(s) <= most_ ? sum : std::numeric_limits<double>::infinity();
        last[e] *= D * D;
      }
    }
    for (int64_t g = 0; g < h_.G; ++g) {
      std::fill(row_.begin(), row_.end(), 0.0);
      for (int64_t c = 0; c < K; ++c) {
        const auto q = static_cast<double>(h_.scale * h_.q[(g * h_.n + t) * K + c]);
        const double* own = own_.data() + c * V;
        const double* last = last_.data() + c * V;
        for (int64_t e = 0; e < V; ++e) row_[e] += q * q * (own[e] + last[e]);
      }
      for (const double variance : row_) out_[g].Add(variance);
    }
    if ((t + 1) % span_ == 0 && t + 1 < h_.n) {
      for (int64_t i = 0; i < K * V; ++i) Z_[i] = static_cast<double>(S[i]);
      std::fill(X_.begin(), X_.end(), 0.0);
      last_.swap(own_);
      for (int64_t i = 0; i < K * V; ++i) own_[i] = operand_ > 0 ? operand_ * Z_[i] * Z_[i] : 0;
    }
  }

  // Mean variances, in units of the square of half a unit in the last place of 1.
  double OfOut(int64_t g) const { return out_[g].Get(); }
  double OfState() const {
    Mean mean;
    for (size_t i = 0; i < own_.size(); ++i) mean.Add(own_[i] + last_[i]);
    return mean.Get();
  }

 private:
  // Over what is finite: where the answer is not, its error is not measured either.
  struct Mean {
    double sum = 0;
    int64_t count = 0;
    void Add(double x) {
      if (!std::isfinite(x)) return;
      sum += x;
      ++count;
    }
    double Get() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
  };

  const reference::Head<T>& h_;
  const int64_t span_;
  const double most_, operand_;
  std::vector<double> Z_, X_, own_, last_;  // [K, V]; E, and R, of this span, and what is left of the last one's
  std::vector<double> before_;              // [K, V]; the state before the token
  std::vector<double> row_;                 // [V]
  std::vector<Mean> out_;                   // [G]
};

// The same for gradients, drawn: errors of that variance in every state that a gradient reads, and in the gradient of the state likewise, which is a
// recurrence that removes too, from the last token to the first. Of it Z is what is left of what the span's end handed in, X the sum of the reads q
// dm' and Y the rest. What is handed on is right, so that nothing is corrected.
template <class T>
class SpanDraw {
 public:
  static constexpr bool kCarries = true;

  // `unit` is half a unit in the last place of 1.
  SpanDraw(const reference::Head<T>& h, int64_t span, double unit, uint64_t seed)
      : h_(h), span_(span), unit_(unit), words_(seed), X_(h.K * h.V), own_(h.K * h.V), last_(h.K * h.V), read_(h.K * h.V) {}

  void Disturb(T* states) {
    const int64_t size = h_.K * h_.V;
    Begin(h_.S0.data());
    for (int64_t t = 0; t < h_.n; ++t) {
      T* S = states + t * size;
      Fade(t);
      for (int64_t i = 0; h_.update == Update::kRankOne && i < size; ++i)
        X_[i] += static_cast<double>(h_.k[t * h_.K + i / h_.V] * h_.v[t * h_.V + i % h_.V]);
      Err(S);
      if ((t + 1) % span_ == 0) NextSpan(S);
      for (int64_t i = 0; i < size; ++i) S[i] += own_[i] + last_[i];
    }
  }
  void DisturbKeySums(T* /*key_sums*/) {}
  void Begin(const T* dS) {
    Z_.assign(dS, dS + h_.K * h_.V);
    for (std::vector<double>* one : {&X_, &own_, &last_}) std::fill(one->begin(), one->end(), 0.0);
  }
  void Join(const T* dM) {
    for (size_t i = 0; i < X_.size(); ++i) X_[i] += static_cast<double>(dM[i]);
  }
  const T* Read(const T* dS) {
    for (size_t i = 0; i < read_.size(); ++i) read_[i] = dS[i] + own_[i] + last_[i];
    return read_.data();
  }
  void Step(int64_t t, const T* dS) {
    Fade(t);
    Err(dS);
    if (t % span_ == 0) NextSpan(dS);
  }

 private:
  void Fade(int64_t t) {
    for (int64_t i = 0; i < h_.K * h_.V; ++i) {
      const auto D = static_cast<double>(h_.D[t * h_.K + i / h_.V]);
      for (std::vector<double>* one : {&Z_, &X_, &own_, &last_}) (*one)[i] *= D;
    }
  }
  // Adds what a token rounds: uniform, and of the variance that E grows by.
  void Err(const T* S) {
    const int64_t size = h_.K * h_.V;
    const uint32_t* words = words_.Row(size);
    for (int64_t i = 0; i < size; ++i) {
      const double Y = static_cast<double>(S[i]) - Z_[i] - X_[i], sum = std::sqrt(2 * (X_[i] * X_[i] + Y * Y + Z_[i] * Z_[i]));
      if (std::isfinite(sum)) own_[i] += static_cast<double>(static_cast<int32_t>(words[i])) * 0x1p-31 * std::sqrt(3.0) * unit_ * sum;
    }
  }
  void NextSpan(const T* S) {
    Z_.assign(S, S + h_.K * h_.V);
    std::fill(X_.begin(), X_.end(), 0.0);
    last_.swap(own_);
    std::fill(own_.begin(), own_.end(), 0.0);
  }

  const reference::Head<T>& h_;
  const int64_t span_;
  const double unit_;
  RandomWords words_;
  std::vector<double> Z_, X_, own_, last_;  // [K, V]; errors of this span, and what is left of the last one's
  std::vector<T> read_;
};

// What gradients read, drawn likewise, where operands of products are rounded: every number of what a token writes into a state or a key sum errs
// within half a unit in the last place of 1 that an operand has, and so does, token by token, every number of a state and its gradient that is read.
// What is handed on is right.
template <class T>
class OperandDraw {
 public:
  static constexpr bool kCarries = true;

  // `h` is to live on, and may be rounded itself.
  OperandDraw(const reference::Head<T>& h, double unit, uint64_t seed)
      : h_(h),
        removes_(h.update == Update::kDelta || h.update == Update::kRankOne),
        unit_(unit),
        words_(seed),
        before_(h.K * h.V),
        read_(h.K * h.V) {}

  // Numbers in place.
  void Round(T* x, int64_t n) {
    const uint32_t* words = words_.Row(n);
    for (int64_t i = 0; i < n; ++i) x[i] += x[i] * Error(words[i]);
  }
  void Round(std::vector<T>* x) { Round(x->data(), static_cast<int64_t>(x->size())); }

  void Disturb(T* states) {
    const int64_t K = h_.K, V = h_.V;
    errors_.assign(K * V, T(0));
    before_ = h_.S0;
    for (int64_t t = 0; t < h_.n; ++t, states += K * V) {
      const uint32_t* words = words_.Row(2 * K * V);
      for (int64_t c = 0; c < K; ++c) {
        const T D = h_.D[t * K + c];
        for (int64_t i = c * V; i < (c + 1) * V; ++i) {
          // What a delta rule writes is one product with what it removes.
          const T written = h_.update == Update::kDelta ? T(0) : h_.k[t * K + c] * h_.v[t * V + i - c * V];
          const T removed = removes_ ? states[i] - D * before_[i] - written : T(0);
          errors_[i] = D * errors_[i] + written * Error(words[i]) + removed * Error(words[K * V + i]);
          before_[i] = states[i];
        }
      }
      Read(states, states);
    }
  }
  void DisturbKeySums(T* key_sums) {
    std::vector<T> written(h_.K, T(0));
    for (int64_t t = 0; t < h_.n; ++t, key_sums += h_.K) {
      const uint32_t* words = words_.Row(h_.K);
      for (int64_t c = 0; c < h_.K; ++c) {
        written[c] = h_.D[t * h_.K + c] * written[c] + h_.k[t * h_.K + c] * Error(words[c]);
        key_sums[c] += written[c];
      }
    }
  }
  void Begin(const T* /*dS*/) { std::fill(errors_.begin(), errors_.end(), T(0)); }
  void Join(const T* dM) {
    const uint32_t* words = words_.Row(h_.K * h_.V);
    for (int64_t i = 0; i < h_.K * h_.V; ++i) errors_[i] += dM[i] * Error(words[i]);
  }
  const T* Read(const T* dS) {
    std::copy(dS, dS + h_.K * h_.V, before_.begin());
    Read(dS, read_.data());
    return read_.data();
  }
  void Step(int64_t t, const T* dS) {
    const uint32_t* words = words_.Row(h_.K * h_.V);
    for (int64_t i = 0; i < h_.K * h_.V; ++i) {
      const T D = h_.D[t * h_.K + i / h_.V];
      errors_[i] = D * errors_[i] + (removes_ ? (dS[i] - D * before_[i]) * Error(words[i]) : T(0));
    }
  }

 private:
  T Error(uint32_t word) const { return static_cast<T>(static_cast<double>(static_cast<int32_t>(word)) * 0x1p-31 * unit_); }
  void Read(const T* from, T* to) {
    const uint32_t* words = words_.Row(h_.K * h_.V);
    for (int64_t i = 0; i < h_.K * h_.V; ++i) to[i] = from[i] + from[i] * Error(words[i]) + errors_[i];
  }

  const reference::Head<T>& h_;
  const bool removes_;
  const double unit_;
  RandomWords words_;
  std::vector<T> before_, errors_, read_;  // [K, V]; the state, or its gradient, before a step, errors of what was written, and what is read
};

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_SPAN_NOISE_HPP_
