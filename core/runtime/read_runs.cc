#include "runtime/read_runs.h"

#include <errno.h>
#include <unistd.h>

#include <cstddef>

namespace cpumoe {

std::int64_t read_runs(const FileRuns& part) {
  std::int64_t total = 0;
  for (std::int64_t run = 0; run < part.runs; ++run) {
    std::uint8_t* out = part.out + run * part.out_stride;
    const std::int64_t start = part.start + run * part.file_stride;
    for (std::int64_t done = 0; done < part.run_bytes;) {
      const ssize_t count =
          pread(part.fd, out + done, static_cast<std::size_t>(part.run_bytes - done), static_cast<off_t>(start + done));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return -1;
      if (count == 0) return total;
      done += count;
      total += count;
    }
  }
  return total;
}

}  // namespace cpumoe
