// Where threads come from: oneTBB, unless the caller brings an Executor of its own.
#ifndef TERCET_SRC_EXECUTOR_HPP_
#define TERCET_SRC_EXECUTOR_HPP_

#include "tercet/tercet.hpp"

namespace tercet {

// The one over oneTBB, shared by all calls.
Executor& DefaultExecutor();

}  // namespace tercet

#endif  // TERCET_SRC_EXECUTOR_HPP_
