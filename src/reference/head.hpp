// What a reference form is given and what it answers: one state head of one sequence, dense and row-major, in letters of docs/rules.md. T is any
// scalar with + - * / == and T(0), T(1): a floating type, an element of a prime field, or a degree.
#ifndef TERCET_SRC_REFERENCE_HEAD_HPP_
#define TERCET_SRC_REFERENCE_HEAD_HPP_

#include <cstdint>
#include <vector>

#include "src/rules/axes.hpp"

namespace tercet::reference {

template <class T>
struct Head {
  Update update = Update::kAdd;
  bool normalize = false;  // kAdd and kAddReadBefore only; then the scale cancels and is not used
  int64_t n = 0;           // tokens; those that are not valid are already left out
  int64_t K = 1, V = 1;
  int64_t G = 1;  // output heads that read this state head
  T scale = T(1);
  std::vector<T> q;              // [G, n, K], the feature map already applied, like k
  std::vector<T> k;              // [n, K]
  std::vector<T> v;              // [n, V]
  std::vector<T> D;              // [n, K] decay factors, whatever axes the rule's decay has
  std::vector<T> beta;           // [n]; kDelta
  std::vector<T> remove, write;  // [n, K]; kRankOne
  std::vector<T> bonus;          // [K]; kAddReadBefore
  std::vector<T> S0;             // [K, V]
  std::vector<T> z0;             // [K]; with normalize
};

template <class T>
struct Answer {
  std::vector<T> out;    // [G, n, V]
  std::vector<T> state;  // [K, V]
  std::vector<T> z;      // [K]; with normalize, the key sum
};

}  // namespace tercet::reference

#endif  // TERCET_SRC_REFERENCE_HEAD_HPP_
