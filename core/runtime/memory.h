// Scratch memory that grows and is kept for the next call.
#pragma once

#include <cstdint>

namespace cpumoe {

// Asks for huge pages behind [data, data + bytes); a hint that may be ignored.
void advise_huge_pages(void* data, std::int64_t bytes);

// A 4 KB aligned buffer. `get` keeps nothing of the old contents when it has to grow.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  template <class T>
  T* get(std::int64_t count) {
    return static_cast<T*>(bytes(count * static_cast<std::int64_t>(sizeof(T))));
  }

 private:
  void* bytes(std::int64_t wanted);

  void* data_ = nullptr;
  std::int64_t capacity_ = 0;
};

}  // namespace cpumoe
