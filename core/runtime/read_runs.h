// Reading parts of a matrix in a file: many short runs of bytes, at equal distances.
#pragma once

#include <cstdint>

namespace cpumoe {

// Run i of `runs` lies in the file at `start + i * file_stride`, and goes to `out + i * out_stride`.
struct FileRuns {
  int fd;
  std::int64_t start, file_stride;
  std::int64_t runs, run_bytes;
  std::uint8_t* out;
  std::int64_t out_stride;
};

// Reads these bytes and no others. Returns how many there were, which are fewer than wanted where the file ends before;
// -1 with `errno` where the system refuses.
//
// One call of the system each, of 0.5 microseconds where the page cache has them. To read what lies between as well,
// some megabytes at a time, and to copy the runs out of that would take 0.15 for runs of 200 bytes at twice that
// distance, but n times the bytes for one of n slices: each of n ranks of a machine would move the whole file through
// its memory.
std::int64_t read_runs(const FileRuns& part);

}  // namespace cpumoe
