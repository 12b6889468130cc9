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
  SpanNoise(const reference::Head<T>& h, int64_t span, double most)
      : h_(h), span_(span), most_(most), Z_(h.S0.begin(), h.S0.end()), X_(h.K * h.V), own_(h.K * h.V), last_(h.K * h.V), row_(h.V), out_(h.G) {}

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
        const double Y = s - Z[e] - X[e], sum = D * D * own[e] + 2 * (X[e] * X[e] + Y * Y + Z[e] * Z[e]);
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
      std::fill(own_.begin(), own_.end(), 0.0);
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
  const double most_;
  std::vector<double> Z_, X_, own_, last_;  // [K, V]; E of this span, and what is left of the last one's
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

}  // namespace tercet::proof

#endif  // TERCET_SRC_PROOF_SPAN_NOISE_HPP_
