// The parallel form: the whole sequence as one span, through tables of n x n.
//
// F(i, j) = product of D_l for j < l <= i, a channel each: F(i, i) = 1, F(i, 0) from before the first token. Fx(i, j) leaves out D_i.
// score(X, Y; F)_ij = sum_c x_ic y_jc F(i, j)_c. Q F0 means row i of Q times F(i, 0); K Fn means row j of K times F(n, j).
//
//   add        O = scale [ (Q F0) S0 + tril(score(Q,K;F)) V ]
//   rwkv6      O = scale [ (Q Fx0) S0 + (stril(score(Q,K;Fx)) + diag(sum_c q bonus k)) V ]
//   delta      A = stril(beta_i score(K,K;F))          U = (I + A)^-1 beta (V - (K F0) S0)
//              O = scale [ (Q F0) S0 + tril(score(Q,K;F)) U ]
//   rank one   N = stril(score(R,K;Fx))   M = stril(score(R,W;Fx))   P = (I - M)^-1 ((R Fx0) S0 + N V)
//              O = scale [ (Q F0) S0 + tril(score(Q,K;F)) V + tril(score(Q,W;F)) P ]
//   state      F(n,0) S0 + (K Fn)' U  [ + (W Fn)' P ]        (U = V for the add rules)
//
// tril keeps the diagonal, stril does not; what they mask is skipped, not multiplied by zero. Normalised: z0 beside S0 and a column of ones beside V,
// and a row of O is divided by its last number instead of scaled.
#ifndef TERCET_SRC_REFERENCE_PARALLEL_HPP_
#define TERCET_SRC_REFERENCE_PARALLEL_HPP_

#include <cstdint>
#include <vector>

#include "src/reference/head.hpp"

namespace tercet::reference {

template <class T>
Answer<T> Parallel(const Head<T>& h) {
  using Table = std::vector<T>;
  const int64_t n = h.n, K = h.K;
  const int64_t V = h.V + (h.normalize ? 1 : 0);
  const bool reads_before = h.update == Update::kAddReadBefore;

  // V and S0, the normaliser's column beside them.
  Table v(n * V, T(1)), S0(K * V);
  for (int64_t t = 0; t < n; ++t)
    for (int64_t e = 0; e < h.V; ++e) v[t * V + e] = h.v[t * h.V + e];
  for (int64_t c = 0; c < K; ++c) {
    for (int64_t e = 0; e < h.V; ++e) S0[c * V + e] = h.S0[c * h.V + e];
    if (h.normalize) S0[c * V + h.V] = h.z0[c];
  }

  // F(i, 0), and Fx(i, 0) = F(i - 1, 0); F(n, j).
  Table F0(n * K, T(1)), Fx0(n * K, T(1)), Fn(n * K, T(1));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < K; ++c) {
      if (i > 0) Fx0[i * K + c] = F0[(i - 1) * K + c];
      F0[i * K + c] = Fx0[i * K + c] * h.D[i * K + c];
    }
  for (int64_t j = n - 2; j >= 0; --j)
    for (int64_t c = 0; c < K; ++c) Fn[j * K + c] = Fn[(j + 1) * K + c] * h.D[(j + 1) * K + c];

  enum Kind { kF, kFx };
  // score(X, Y; F or Fx) for j <= i (Fx: j < i), the rest zero.
  const auto Score = [&](const T* x, const T* y, Kind kind) {
    Table score(n * n, T(0));
    std::vector<T> f(K);
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t c = 0; c < K; ++c) f[c] = T(1);
      for (int64_t i = kind == kF ? j : j + 1; i < n; ++i) {
        const int64_t last = kind == kF ? i : i - 1;  // f = product of D_l for j < l <= last
        if (last > j)
          for (int64_t c = 0; c < K; ++c) f[c] = f[c] * h.D[last * K + c];
        T sum = T(0);
        for (int64_t c = 0; c < K; ++c) sum = sum + x[i * K + c] * y[j * K + c] * f[c];
        score[i * n + j] = sum;
      }
    }
    return score;
  };
  // (X F) S0
  const auto FromStart = [&](const T* x, const Table& F) {
    Table rows(n * V, T(0));
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < K; ++c)
        for (int64_t e = 0; e < V; ++e) rows[i * V + e] = rows[i * V + e] + x[i * K + c] * F[i * K + c] * S0[c * V + e];
    return rows;
  };
  // rows += tril(score) y
  const auto AddTril = [&](const Table& score, const Table& y, Table* rows) {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j <= i; ++j)
        for (int64_t e = 0; e < V; ++e) (*rows)[i * V + e] = (*rows)[i * V + e] + score[i * n + j] * y[j * V + e];
  };
  // rows += stril(score) y
  const auto AddStril = [&](const Table& score, const Table& y, Table* rows) {
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < i; ++j)
        for (int64_t e = 0; e < V; ++e) (*rows)[i * V + e] = (*rows)[i * V + e] + score[i * n + j] * y[j * V + e];
  };

  Table u = v, p;
  if (h.update == Update::kDelta) {
    const Table scores = Score(h.k.data(), h.k.data(), kF);
    const Table known = FromStart(h.k.data(), F0);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t e = 0; e < V; ++e) {
        T rest = h.beta[i] * (v[i * V + e] - known[i * V + e]);
        for (int64_t j = 0; j < i; ++j) rest = rest - h.beta[i] * scores[i * n + j] * u[j * V + e];
        u[i * V + e] = rest;
      }
  }
  if (h.update == Update::kRankOne) {
    const Table N = Score(h.remove.data(), h.k.data(), kFx);
    const Table M = Score(h.remove.data(), h.write.data(), kFx);
    p = FromStart(h.remove.data(), Fx0);
    AddStril(N, v, &p);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < i; ++j)
        for (int64_t e = 0; e < V; ++e) p[i * V + e] = p[i * V + e] + M[i * n + j] * p[j * V + e];
  }

  Answer<T> a;
  a.out.resize(h.G * n * h.V);
  for (int64_t g = 0; g < h.G; ++g) {
    const T* q = h.q.data() + g * n * K;
    Table o;
    if (reads_before) {
      o = FromStart(q, Fx0);
      AddStril(Score(q, h.k.data(), kFx), v, &o);
      for (int64_t i = 0; i < n; ++i) {
        T own = T(0);
        for (int64_t c = 0; c < K; ++c) own = own + q[i * K + c] * h.bonus[c] * h.k[i * K + c];
        for (int64_t e = 0; e < V; ++e) o[i * V + e] = o[i * V + e] + own * v[i * V + e];
      }
    } else {
      o = FromStart(q, F0);
      AddTril(Score(q, h.k.data(), kF), u, &o);
      if (h.update == Update::kRankOne) AddTril(Score(q, h.write.data(), kF), p, &o);
    }
    for (int64_t i = 0; i < n; ++i)
      for (int64_t e = 0; e < h.V; ++e) {
        T& out = a.out[(g * n + i) * h.V + e];
        if (!h.normalize) {
          out = h.scale * o[i * V + e];
        } else {
          const T divisor = o[i * V + h.V];
          out = divisor == T(0) ? T(0) : o[i * V + e] / divisor;
        }
      }
  }

  Table S = S0;
  if (n > 0)
    for (int64_t c = 0; c < K; ++c)
      for (int64_t e = 0; e < V; ++e) {
        T sum = F0[(n - 1) * K + c] * S0[c * V + e];
        for (int64_t j = 0; j < n; ++j) sum = sum + h.k[j * K + c] * Fn[j * K + c] * u[j * V + e];
        if (h.update == Update::kRankOne)
          for (int64_t j = 0; j < n; ++j) sum = sum + h.write[j * K + c] * Fn[j * K + c] * p[j * V + e];
        S[c * V + e] = sum;
      }
  a.state.resize(K * h.V);
  for (int64_t c = 0; c < K; ++c) {
    for (int64_t e = 0; e < h.V; ++e) a.state[c * h.V + e] = S[c * V + e];
    if (h.normalize) a.z.push_back(S[c * V + h.V]);
  }
  return a;
}

}  // namespace tercet::reference

#endif  // TERCET_SRC_REFERENCE_PARALLEL_HPP_
