// C++'s heap, watched and made to fail: replaces operator new and delete of the program, so one source of a test includes it.
#ifndef TERCET_TESTS_ALLOCATIONS_HPP_
#define TERCET_TESTS_ALLOCATIONS_HPP_

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

// The largest block that was asked for, and a count of allocations after which one fails (negative: none does).
static std::atomic<size_t> largest_block{0};
static std::atomic<int64_t> until_failure{-1};

static void* AllocateOrNull(size_t size) noexcept {
  size_t seen = largest_block;
  while (size > seen && !largest_block.compare_exchange_weak(seen, size)) {
  }
  if (until_failure >= 0 && until_failure-- == 0) return nullptr;
  return std::malloc(size == 0 ? 1 : size);
}
static void* Allocate(size_t size) {
  if (void* block = AllocateOrNull(size)) return block;
  throw std::bad_alloc();
}
void* operator new(size_t size) { return Allocate(size); }
void* operator new[](size_t size) { return Allocate(size); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return AllocateOrNull(size); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return AllocateOrNull(size); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
void operator delete[](void* block, size_t) noexcept { std::free(block); }

#endif  // TERCET_TESTS_ALLOCATIONS_HPP_
