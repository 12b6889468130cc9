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

static void* AllocateOrNull(size_t size, size_t alignment = 1) noexcept {
  size_t seen = largest_block;
  while (size > seen && !largest_block.compare_exchange_weak(seen, size)) {
  }
  if (until_failure >= 0 && until_failure-- == 0) return nullptr;
  if (size > SIZE_MAX / 2) return nullptr;
  return alignment == 1 ? std::malloc(size == 0 ? 1 : size) : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}
static void* Allocate(size_t size, size_t alignment = 1) {
  if (void* block = AllocateOrNull(size, alignment)) return block;
  throw std::bad_alloc();
}
void* operator new(size_t size) { return Allocate(size); }
void* operator new[](size_t size) { return Allocate(size); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return AllocateOrNull(size); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return AllocateOrNull(size); }
void* operator new(size_t size, std::align_val_t alignment) { return Allocate(size, static_cast<size_t>(alignment)); }
void* operator new(size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return AllocateOrNull(size, static_cast<size_t>(alignment));
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
void operator delete[](void* block, size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, size_t, std::align_val_t) noexcept { std::free(block); }

#endif  // TERCET_TESTS_ALLOCATIONS_HPP_
