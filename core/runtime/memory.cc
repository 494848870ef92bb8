#include "runtime/memory.h"

#include <sys/mman.h>

#include <new>

namespace cpumoe {
namespace {

constexpr std::int64_t kHugePage = 2 << 20;

}  // namespace

void advise_huge_pages(void* data, std::int64_t bytes) {
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end =
      (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Buffer::~Buffer() {
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(capacity_));
}

void* Buffer::bytes(std::int64_t wanted) {
  if (wanted <= capacity_) return data_;
  const std::int64_t unit = wanted >= kHugePage ? kHugePage : 1 << 16;
  const std::int64_t capacity = (wanted + wanted / 4 + unit - 1) / unit * unit;
  void* fresh =
      mmap(nullptr, static_cast<std::size_t>(capacity), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) throw std::bad_alloc();
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(capacity_));
  data_ = fresh;
  capacity_ = capacity;
  advise_huge_pages(data_, capacity_);
  return data_;
}

}  // namespace cpumoe
