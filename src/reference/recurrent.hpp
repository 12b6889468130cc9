// The recurrent form: a state of fixed size, token by token.
//
//   S_t = D_t S_{t-1} + w_t (r_t' S_{t-1}) + k_t u_t'        o_t = scale S_t' q_t
//
//   add, rwkv6   u = v
//   delta        r = D k   w = -beta k   u = beta v
//   rank one     r = remove   w = write   u = v
//   rwkv6        o_t = scale (S_{t-1} + diag(bonus) k_t v_t')' q_t
//   normalised   z_t = D_t z_{t-1} + k_t   o_t = S_t' q_t / (z_t' q_t), with rwkv6's change to both; a zero row where the denominator is zero
//
// A policy says what is rounded on the way, and in what order sums over channels are taken. `Exact` rounds nothing; src/proof/monte_carlo.hpp rounds
// at random.
#ifndef TERCET_SRC_REFERENCE_RECURRENT_HPP_
#define TERCET_SRC_REFERENCE_RECURRENT_HPP_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "src/reference/head.hpp"

namespace tercet::reference {

template <class T>
struct Exact {
  using Stored = T;  // of inputs, state and answer
  using Wide = T;    // of the arithmetic
  // y = x, rounded to what can be stored.
  void Round(const T* x, int64_t n, T* y) { std::copy(x, x + n, y); }
  // x = x, sums over some of their terms, rounded likewise.
  void Partial(T* /*x*/, int64_t /*n*/) {}
  // y = x, as factors of products that are rounded.
  void Factors(const T* x, int64_t n, T* y) { std::copy(x, x + n, y); }
  // Likewise rows that a form has as operands of products of matrices: queries, keys, remove and write.
  void Operands(const T* x, int64_t n, T* y) { std::copy(x, x + n, y); }
  // The channels 0 ... K - 1.
  std::vector<int64_t> Order(int64_t K) {
    std::vector<int64_t> order(K);
    std::iota(order.begin(), order.end(), int64_t{0});
    return order;
  }
};

// `observe(t, S)` is shown the state after every token.
template <class Rounding, class Observe>
Answer<typename Rounding::Stored> Recurrent(const Head<typename Rounding::Stored>& h, Rounding& rounding, const Observe& observe) {
  using Stored = typename Rounding::Stored;
  using T = typename Rounding::Wide;
  const int64_t n = h.n, K = h.K, V = h.V;
  const bool reads_before = h.update == Update::kAddReadBefore;
  const bool removes = h.update == Update::kDelta || h.update == Update::kRankOne;

  Answer<Stored> a;
  a.out.resize(h.G * n * V);
  a.state = h.S0;
  a.z = h.z0;
  Stored* S = a.state.data();
  Stored* z = a.z.data();

  std::vector<T> row(std::max(K, V)), x(K), p(V), u(V), kx(K), wx(K), bx(K), Dx(K);
  std::vector<Stored> read(V), divisor(1);
  const std::vector<int64_t> order = rounding.Order(K);

  // out = scale M' q, with M = S, or the state before the write and the bonus in the write's place.
  const auto Read = [&](int64_t t) {
    const Stored* k = h.k.data() + t * K;
    const Stored* v = h.v.data() + t * V;
    for (int64_t g = 0; g < h.G; ++g) {
      const Stored* q = h.q.data() + (g * n + t) * K;
      rounding.Operands(q, K, x.data());
      if (reads_before) {
        rounding.Operands(k, K, kx.data());
        rounding.Factors(h.bonus.data(), K, bx.data());
      }
      std::fill(row.begin(), row.end(), T(0));
      T* o = row.data();
      for (const int64_t c : order) {
        const T q_c = x[c];
        const Stored* S_c = S + c * V;
        if (reads_before) {
          const T b_c = kx[c] * bx[c];
          for (int64_t i = 0; i < V; ++i) o[i] = o[i] + q_c * (T(S_c[i]) + b_c * T(v[i]));
        } else {
          for (int64_t i = 0; i < V; ++i) o[i] = o[i] + q_c * T(S_c[i]);
        }
        rounding.Partial(o, V);
      }
      rounding.Round(o, V, read.data());
      if (h.normalize) {
        T d = T(0);
        rounding.Operands(q, K, x.data());
        if (reads_before) rounding.Operands(k, K, kx.data());
        for (const int64_t c : order) {
          d = d + x[c] * (reads_before ? T(z[c]) + kx[c] * bx[c] : T(z[c]));
          rounding.Partial(&d, 1);
        }
        rounding.Round(&d, 1, divisor.data());
        for (int64_t i = 0; i < V; ++i) o[i] = divisor[0] == Stored(0) ? T(0) : T(read[i]) / T(divisor[0]);
      } else {
        for (int64_t i = 0; i < V; ++i) o[i] = T(h.scale) * T(read[i]);
      }
      rounding.Round(o, V, a.out.data() + (g * n + t) * V);
    }
  };

  for (int64_t t = 0; t < n; ++t) {
    const Stored* D = h.D.data() + t * K;
    const Stored* k = h.k.data() + t * K;
    const Stored* v = h.v.data() + t * V;
    if (reads_before) Read(t);

    // p = S' r and w, of the state as the token finds it
    const T beta = h.update == Update::kDelta ? T(h.beta[t]) : T(1);
    if (removes) {
      if (h.update == Update::kDelta) {
        rounding.Operands(k, K, x.data());
        rounding.Operands(k, K, wx.data());
        for (int64_t c = 0; c < K; ++c) {
          x[c] = T(D[c]) * x[c];
          wx[c] = T(0) - beta * wx[c];
        }
      } else {
        rounding.Operands(h.remove.data() + t * K, K, x.data());
        rounding.Operands(h.write.data() + t * K, K, wx.data());
      }
      std::fill(row.begin(), row.end(), T(0));
      T* sum = row.data();
      for (const int64_t c : order) {
        const T r_c = x[c];
        const Stored* S_c = S + c * V;
        for (int64_t i = 0; i < V; ++i) sum[i] = sum[i] + r_c * T(S_c[i]);
        rounding.Partial(sum, V);
      }
      rounding.Round(sum, V, read.data());
      for (int64_t i = 0; i < V; ++i) p[i] = T(read[i]);
    }

    // S <- D S + w p' + k u'
    for (int64_t i = 0; i < V; ++i) u[i] = beta * T(v[i]);
    rounding.Operands(k, K, kx.data());
    rounding.Factors(D, K, Dx.data());
    for (int64_t c = 0; c < K; ++c) {
      const T D_c = Dx[c], k_c = kx[c];
      T* s = row.data();
      Stored* S_c = S + c * V;
      if (removes) {
        const T w_c = wx[c];
        for (int64_t i = 0; i < V; ++i) s[i] = D_c * T(S_c[i]) + w_c * p[i] + k_c * u[i];
      } else {
        for (int64_t i = 0; i < V; ++i) s[i] = D_c * T(S_c[i]) + k_c * u[i];
      }
      rounding.Round(s, V, S_c);
    }
    // z <- D z + k
    if (h.normalize) {
      for (int64_t c = 0; c < K; ++c) row[c] = Dx[c] * T(z[c]) + kx[c];
      rounding.Round(row.data(), K, z);
    }
    if (!reads_before) Read(t);
    observe(t, static_cast<const Stored*>(S));
  }
  return a;
}

template <class T>
Answer<T> Recurrent(const Head<T>& h) {
  Exact<T> exact;
  return Recurrent(h, exact, [](int64_t, const T*) {});
}

}  // namespace tercet::reference

#endif  // TERCET_SRC_REFERENCE_RECURRENT_HPP_
