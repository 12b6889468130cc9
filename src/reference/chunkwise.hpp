// The chunkwise form: chunks of C tokens, the state handed from chunk to chunk. Inside a chunk a row i of every table of the parallel form is made,
// used and forgotten, so nothing here is n x n or C x C, and F(i, j) is walked from j = i down to the chunk's first token:
//
//   delta      u_i = beta_i (v_i - S0' (k_i F(i,0)) - sum_{j<i} score(k_i,k_j;F) u_j)
//   rank one   p_i = S0' (r_i Fx(i,0)) + sum_{j<i} score(r_i,k_j;Fx) v_j + sum_{j<i} score(r_i,w_j;Fx) p_j
//   out        o_i = scale [ S0' (q_i F(i,0)) + sum_{j<=i} score(q_i,k_j;F) u_j  [ + sum_{j<=i} score(q_i,w_j;F) p_j ] ]
//   rwkv6      o_i = scale [ S0' (q_i Fx(i,0)) + sum_{j<i} score(q_i,k_j;Fx) v_j + (sum_c q_i bonus k_i) v_i ]
//   state      S0 <- F(n,0) S0 + sum_j (k_j F(n,j)) u_j'  [ + sum_j (w_j F(n,j)) p_j' ]
//   normalised the same sums with z0 in the place of S0 and ones in the place of u are what o_i is divided by, and the next z0
//
// S0 and z0 are the chunk's own, 0 stands for before its first token and n for its last.
#ifndef TERCET_SRC_REFERENCE_CHUNKWISE_HPP_
#define TERCET_SRC_REFERENCE_CHUNKWISE_HPP_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/reference/head.hpp"
#include "src/reference/plant.hpp"

namespace tercet::reference {

template <class T>
Answer<T> Chunkwise(const Head<T>& h, int64_t C, Plant plant = Plant::kNone) {
  const int64_t K = h.K, V = h.V;
  C = std::min(C, std::max<int64_t>(h.n, 1));
  const bool delta = h.update == Update::kDelta, rank_one = h.update == Update::kRankOne, reads_before = h.update == Update::kAddReadBefore;
  Answer<T> a;
  a.out.resize(h.G * h.n * V);
  a.state = h.S0;
  a.z = h.z0;
  std::vector<T>& S0 = a.state;
  std::vector<T>& z0 = a.z;

  std::vector<T> u = h.v;                        // [n, V]
  std::vector<T> p(rank_one ? h.n * V : 0);      // [n, V]
  std::vector<T> F0(K), Fx0(K), f(K), score(C);  // score: of one row, by j - begin
  std::vector<T> o(V);

  // What F(., j) begins with: nothing of token j's own decay falls on its own write.
  const auto Begin = [&](int64_t j, int64_t c) { return plant == Plant::kDecay ? h.D[j * K + c] : T(1); };
  // score_j = score(x, y_j; F(i, j)) for j = i ... begin, or with Fx, which leaves D_i out.
  const auto Score = [&](const T* x, const std::vector<T>& y, int64_t begin, int64_t i, bool without_own) {
    for (int64_t c = 0; c < K; ++c) f[c] = T(1);
    for (int64_t j = i; j >= begin; --j) {
      T sum = T(0);
      for (int64_t c = 0; c < K; ++c) sum = sum + x[c] * (f[c] * Begin(j, c)) * y[j * K + c];
      score[j - begin] = sum;
      if (j == i && without_own) continue;
      for (int64_t c = 0; c < K; ++c) f[c] = f[c] * h.D[j * K + c];
    }
  };
  // row += S0' (x F)
  const auto AddState = [&](const T* x, const std::vector<T>& F, T* row) {
    for (int64_t c = 0; c < K; ++c)
      for (int64_t e = 0; e < V; ++e) row[e] = row[e] + x[c] * F[c] * S0[c * V + e];
  };
  // row += sum of score_j y_j for begin <= j < end
  const auto AddTokens = [&](const std::vector<T>& y, int64_t begin, int64_t end, T* row) {
    for (int64_t j = begin; j < end; ++j)
      for (int64_t e = 0; e < V; ++e) row[e] = row[e] + score[j - begin] * y[j * V + e];
  };

  for (int64_t begin = 0; begin < h.n; begin += C) {
    const int64_t end = std::min(begin + C, h.n);
    for (int64_t c = 0; c < K; ++c) F0[c] = T(1);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t c = 0; c < K; ++c) {
        Fx0[c] = F0[c];
        F0[c] = F0[c] * h.D[i * K + c];
      }
      T* u_i = u.data() + i * V;
      if (delta) {
        std::fill(o.begin(), o.end(), T(0));
        Score(h.k.data() + i * K, h.k, begin, i, false);
        AddState(h.k.data() + i * K, F0, o.data());
        AddTokens(u, begin, i, o.data());
        for (int64_t e = 0; e < V; ++e) u_i[e] = h.beta[i] * (u_i[e] - o[e]);
      }
      if (rank_one) {
        T* p_i = p.data() + i * V;
        std::fill(p_i, p_i + V, T(0));
        AddState(h.remove.data() + i * K, Fx0, p_i);
        Score(h.remove.data() + i * K, h.k, begin, i, true);
        AddTokens(u, begin, i, p_i);
        Score(h.remove.data() + i * K, h.write, begin, i, true);
        AddTokens(p, begin, i, p_i);
      }

      // A token sees itself, in rwkv6 through the bonus alone.
      const bool sees_itself = reads_before == (plant == Plant::kMask);
      const int64_t seen = sees_itself ? i + 1 : i;
      for (int64_t g = 0; g < h.G; ++g) {
        const T* q_i = h.q.data() + (g * h.n + i) * K;
        const std::vector<T>& F = reads_before ? Fx0 : F0;
        std::fill(o.begin(), o.end(), T(0));
        AddState(q_i, F, o.data());
        Score(q_i, h.k, begin, i, reads_before);
        AddTokens(u, begin, seen, o.data());
        T divisor = T(0), bonus = T(0);
        if (h.normalize) {
          for (int64_t c = 0; c < K; ++c) divisor = divisor + q_i[c] * F[c] * z0[c];
          for (int64_t j = begin; j < seen; ++j) divisor = divisor + score[j - begin];
        }
        if (reads_before) {
          for (int64_t c = 0; c < K; ++c) bonus = bonus + q_i[c] * h.bonus[c] * h.k[i * K + c];
          for (int64_t e = 0; e < V; ++e) o[e] = o[e] + bonus * u_i[e];
          divisor = divisor + bonus;
        }
        if (rank_one) {
          Score(q_i, h.write, begin, i, false);
          AddTokens(p, begin, seen, o.data());
        }
        T* out = a.out.data() + (g * h.n + i) * V;
        const T scale = plant == Plant::kScale ? T(1) : h.scale;
        for (int64_t e = 0; e < V; ++e) out[e] = !h.normalize ? scale * o[e] : divisor == T(0) ? T(0) : o[e] / divisor;
      }
    }

    for (int64_t c = 0; c < K; ++c) {
      for (int64_t e = 0; e < V; ++e) S0[c * V + e] = F0[c] * S0[c * V + e];
      if (h.normalize) z0[c] = F0[c] * z0[c];
      f[c] = T(1);
    }
    for (int64_t j = end - 1; j >= begin; --j)
      for (int64_t c = 0; c < K; ++c) {
        const T left = f[c] * Begin(j, c);  // F(n, j)
        for (int64_t e = 0; e < V; ++e) S0[c * V + e] = S0[c * V + e] + h.k[j * K + c] * left * u[j * V + e];
        if (rank_one)
          for (int64_t e = 0; e < V; ++e) S0[c * V + e] = S0[c * V + e] + h.write[j * K + c] * left * p[j * V + e];
        if (h.normalize) z0[c] = z0[c] + h.k[j * K + c] * left;
        f[c] = f[c] * h.D[j * K + c];
      }
  }
  return a;
}

}  // namespace tercet::reference

#endif  // TERCET_SRC_REFERENCE_CHUNKWISE_HPP_
