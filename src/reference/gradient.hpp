// The gradient of the recurrent form, by reverse accumulation: the recurrence is run forwards, its states are kept, and then it is walked from the
// last token to the first. With dO, dS_T and dz_T given, what is written dx is the gradient to x of L = sum(dO out) + sum(dS_T state) + sum(dz_T z).
//
//   forwards   p_t = S_{t-1}' r_t     S_t = D_t S_{t-1} + w_t p_t' + k_t u_t'     m_t = S_t' q_t     o_t = scale m_t
//   backwards  dm = scale do          dscale += m do          dq = S_t dm         dS += q dm'
//              dk = dS u    du = dS' k    dw = dS p    dp = dS' w    dr = S_{t-1} dp    dlog = D rowsum(dS S_{t-1})
//              dS <- D dS + r dp'                                                                         and at the end dS_0 = dS
//   delta      r = D k, w = -beta k, u = beta v:    dk += D dr - beta dw    dlog += D k dr    dv = beta du    dbeta = v du - k dw
//   rank one   r = remove, w = write, u = v
//   rwkv6      m_t = (S_{t-1} + diag(b) k v')' q:   q dm' joins dS after the step; what it is to b, k and v goes through diag(b) k v'
//   normalised d_t = z_t' q_t and o_t = m_t / d_t:  dm = do / d    dd = -(o do) / d    dq += z dd    dz += q dd
//              z_t = D_t z_{t-1} + k_t:             dk += dz    dlog += D dz z_{t-1}    dz <- D dz. rwkv6 has z_{t-1} + diag(b) k in the place of
//              z_t. Where d is zero the row is zero and passes nothing on
//
// dlog is the gradient to log D, that is D times the one to D, and as such a polynomial: zero where D is.
#ifndef TERCET_SRC_REFERENCE_GRADIENT_HPP_
#define TERCET_SRC_REFERENCE_GRADIENT_HPP_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "src/reference/head.hpp"
#include "src/reference/plant.hpp"
#include "src/reference/recurrent.hpp"

namespace tercet::reference {

// To what a head is given, in its shapes; empty where the head has none.
template <class T>
struct Gradient {
  std::vector<T> q;              // [G, n, K], to q with the feature map applied, like k
  std::vector<T> k;              // [n, K]
  std::vector<T> v;              // [n, V]
  std::vector<T> log_decay;      // [n, K], to log D
  std::vector<T> beta;           // [n]
  std::vector<T> remove, write;  // [n, K]
  std::vector<T> bonus;          // [K]
  std::vector<T> S0;             // [K, V]
  std::vector<T> z0;             // [K]
  T scale = T(0);
};

// What errs in the states that are read, while those handed on stay as they are; this one, nothing. src/proof/span_noise.hpp has another.
template <class T>
struct NothingCarried {
  static constexpr bool kCarries = false;
  void Disturb(T* /*states S_1 ... S_n*/) {}
  void DisturbKeySums(T* /*z_1 ... z_n*/) {}
  void Begin(const T* /*dS*/) {}
  void Join(const T* /*what the reads of a token add to dS*/) {}
  const T* Read(const T* dS) { return dS; }
  void Step(int64_t /*t*/, const T* /*dS, now of the token before*/) {}
};

// `d` holds dO, dS_T and dz_T, in the shapes of the head's answer. A plant puts in its error: dS has faded by a token's own decay when that token's
// write looks at it, the scale is left out of dm, or what a token reads of its own write passes nothing on (rwkv6: it does).
template <class T, class Carried = NothingCarried<T>>
Gradient<T> GradientOf(const Head<T>& h, const Answer<T>& d, Plant plant = Plant::kNone, Carried carried = {}) {
  const int64_t n = h.n, K = h.K, V = h.V;
  const bool reads_before = h.update == Update::kAddReadBefore;
  const bool joins_after = reads_before != (plant == Plant::kMask), fades_before = plant == Plant::kDecay;
  const T scale = plant == Plant::kScale ? T(1) : h.scale;
  const bool delta = h.update == Update::kDelta, rank_one = h.update == Update::kRankOne;

  // S_0 ... S_n and z_0 ... z_n.
  std::vector<T> states = h.S0, key_sums = h.z0;
  states.reserve((n + 1) * K * V);
  Exact<T> exact;
  Recurrent(h, exact, [&](int64_t, const T* S) { states.insert(states.end(), S, S + K * V); });
  carried.Disturb(states.data() + K * V);
  std::vector<T> factors(K), keys(K);
  for (int64_t t = 0; h.normalize && t < n; ++t) {
    exact.Factors(h.D.data() + t * K, K, factors.data());
    exact.Factors(h.k.data() + t * K, K, keys.data());
    for (int64_t c = 0; c < K; ++c) key_sums.push_back(factors[c] * key_sums[t * K + c] + keys[c]);
  }
  if (h.normalize) carried.DisturbKeySums(key_sums.data() + K);
  // By a recurrence of their own: dq is what is left of S dm and z dd, nothing where K = 1, and a scalar that rounds anew in every run
  // (src/proof/rounded.hpp) would leave out what outputs and states do not have in common in other forms.
  const std::vector<T> outs = h.normalize ? Recurrent(h).out : std::vector<T>();

  Gradient<T> a;
  a.q.assign(h.q.size(), T(0));
  a.k.assign(h.k.size(), T(0));
  a.v.assign(h.v.size(), T(0));
  a.log_decay.assign(h.D.size(), T(0));
  a.beta.assign(h.beta.size(), T(0));
  a.remove.assign(h.remove.size(), T(0));
  a.write.assign(h.write.size(), T(0));
  a.bonus.assign(h.bonus.size(), T(0));
  a.S0 = d.state;
  a.z0 = d.z;
  std::vector<T>& dS = a.S0;
  std::vector<T>& dz = a.z0;
  carried.Begin(dS.data());

  std::vector<T> dm(V), p(V), dp(V), handed(V), u(V), du(V), r(K), w(K), dr(K), dw(K);
  std::vector<T> dM(K * V), dy(K);  // what the reads of a token add to dS and dz, in rwkv6 after its step

  for (int64_t t = n - 1; t >= 0; --t) {
    const T *k = h.k.data() + t * K, *v = h.v.data() + t * V, *D = h.D.data() + t * K;
    const T *before = states.data() + t * K * V, *after = before + K * V;  // S_{t-1} and S_t
    const T *z_before = key_sums.data() + (h.normalize ? t * K : 0), *z_after = z_before + (h.normalize ? K : 0);
    T *dk = a.k.data() + t * K, *dv = a.v.data() + t * V, *dlog = a.log_decay.data() + t * K;

    // The reads: m = M' q and, normalised, d = y' q.
    const auto M = [&](int64_t c, int64_t e) { return reads_before ? before[c * V + e] + h.bonus[c] * k[c] * v[e] : after[c * V + e]; };
    const auto y = [&](int64_t c) { return reads_before ? z_before[c] + h.bonus[c] * k[c] : z_after[c]; };
    std::fill(dM.begin(), dM.end(), T(0));
    std::fill(dy.begin(), dy.end(), T(0));
    for (int64_t g = 0; g < h.G; ++g) {
      const T* q = h.q.data() + (g * n + t) * K;
      T* dq = a.q.data() + (g * n + t) * K;
      const T* dO = d.out.data() + (g * n + t) * V;
      T divisor = T(0), dd = T(0);
      if (h.normalize) {
        for (int64_t c = 0; c < K; ++c) divisor = divisor + y(c) * q[c];
        if (divisor == T(0)) continue;
        T o_dO = T(0);
        for (int64_t e = 0; e < V; ++e) o_dO = o_dO + outs[(g * n + t) * V + e] * dO[e];
        dd = T(0) - o_dO / divisor;
      } else {
        for (int64_t e = 0; e < V; ++e) {
          T m = T(0);
          for (int64_t c = 0; c < K; ++c) m = m + M(c, e) * q[c];
          a.scale = a.scale + m * dO[e];
        }
      }
      for (int64_t e = 0; e < V; ++e) dm[e] = h.normalize ? dO[e] / divisor : scale * dO[e];
      for (int64_t c = 0; c < K; ++c) {
        for (int64_t e = 0; e < V; ++e) {
          dq[c] = dq[c] + M(c, e) * dm[e];
          dM[c * V + e] = dM[c * V + e] + q[c] * dm[e];
        }
        if (h.normalize) {
          dq[c] = dq[c] + y(c) * dd;
          dy[c] = dy[c] + q[c] * dd;
        }
      }
    }
    if (reads_before) {
      for (int64_t c = 0; c < K; ++c) {
        T own = dy[c];  // to b_c k_c
        for (int64_t e = 0; e < V; ++e) {
          own = own + dM[c * V + e] * v[e];
          dv[e] = dv[e] + dM[c * V + e] * h.bonus[c] * k[c];
        }
        a.bonus[c] = a.bonus[c] + own * k[c];
        dk[c] = dk[c] + own * h.bonus[c];
      }
    }
    const auto join = [&] {
      for (int64_t i = 0; i < K * V; ++i) dS[i] = dS[i] + dM[i];
      for (int64_t c = 0; h.normalize && c < K; ++c) dz[c] = dz[c] + dy[c];
      carried.Join(dM.data());
    };
    if (!joins_after) join();
    const auto fade = [&] {
      for (int64_t i = 0; i < K * V; ++i) dS[i] = D[i / V] * dS[i];
    };
    if (fades_before) fade();
    const T* read = carried.Read(dS.data());

    // The step: S_t = D S_{t-1} + w p' + k u' with p = S_{t-1}' r.
    const T beta = delta ? h.beta[t] : T(1);
    for (int64_t c = 0; c < K; ++c) {
      r[c] = delta ? D[c] * k[c] : rank_one ? h.remove[t * K + c] : T(0);
      w[c] = delta ? T(0) - beta * k[c] : rank_one ? h.write[t * K + c] : T(0);
    }
    for (int64_t e = 0; e < V; ++e) {
      u[e] = beta * v[e];
      p[e] = du[e] = dp[e] = handed[e] = T(0);
      for (int64_t c = 0; c < K; ++c) {
        p[e] = p[e] + before[c * V + e] * r[c];
        du[e] = du[e] + read[c * V + e] * k[c];
        dp[e] = dp[e] + read[c * V + e] * w[c];
        if constexpr (Carried::kCarries) handed[e] = handed[e] + dS[c * V + e] * w[c];
      }
    }
    for (int64_t c = 0; c < K; ++c) {
      T dD = T(0);
      dw[c] = dr[c] = T(0);
      for (int64_t e = 0; e < V; ++e) {
        dk[c] = dk[c] + read[c * V + e] * u[e];
        dw[c] = dw[c] + read[c * V + e] * p[e];
        dr[c] = dr[c] + before[c * V + e] * dp[e];
        dD = dD + read[c * V + e] * before[c * V + e];
        dS[c * V + e] = (fades_before ? dS[c * V + e] : D[c] * dS[c * V + e]) + r[c] * (Carried::kCarries ? handed[e] : dp[e]);
      }
      if (h.normalize) {
        dk[c] = dk[c] + dz[c];
        dD = dD + dz[c] * z_before[c];
        dz[c] = D[c] * dz[c];
      }
      dlog[c] = D[c] * dD;
    }
    if (joins_after) join();
    carried.Step(t, dS.data());

    // What u, r and w are made of.
    for (int64_t e = 0; e < V; ++e) dv[e] = dv[e] + beta * du[e];
    if (delta) {
      for (int64_t e = 0; e < V; ++e) a.beta[t] = a.beta[t] + v[e] * du[e];
      for (int64_t c = 0; c < K; ++c) {
        a.beta[t] = a.beta[t] - k[c] * dw[c];
        dk[c] = dk[c] + D[c] * dr[c] - beta * dw[c];
        dlog[c] = dlog[c] + D[c] * k[c] * dr[c];
      }
    }
    if (rank_one) {
      std::copy(dr.begin(), dr.end(), a.remove.data() + t * K);
      std::copy(dw.begin(), dw.end(), a.write.data() + t * K);
    }
  }
  if constexpr (Carried::kCarries) dS.assign(carried.Read(dS.data()), carried.Read(dS.data()) + K * V);
  return a;
}

}  // namespace tercet::reference

#endif  // TERCET_SRC_REFERENCE_GRADIENT_HPP_
