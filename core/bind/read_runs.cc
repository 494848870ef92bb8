// The Python seam of read_runs.h.
#include <errno.h>

#include "bind/array.h"
#include "bind/module.h"
#include "runtime/check.h"
#include "runtime/read_runs.h"

namespace nb = nanobind;

namespace cpumoe {
namespace {

std::int64_t read(int fd, std::int64_t start, std::int64_t file_stride, nb::handle out_) {
  const Array out(out_, "out");
  const std::int64_t out_stride = out.rows(2).stride(0);
  out.expect<std::uint8_t>("uint8").writable();
  CPUMOE_REQUIRE(start >= 0, "start=", start, "; 0 or more is accepted");
  CPUMOE_REQUIRE(file_stride >= out.dim(1), "file_stride=", file_stride, " for runs of ", out.dim(1),
                 " bytes; as many or more are accepted");
  const FileRuns part{.fd = fd,
                      .start = start,
                      .file_stride = file_stride,
                      .runs = out.dim(0),
                      .run_bytes = out.dim(1),
                      .out = out.data(),
                      .out_stride = out_stride};
  std::int64_t bytes = 0;
  int refused = 0;
  {
    const nb::gil_scoped_release release;
    bytes = read_runs(part);
    refused = errno;  // others may change it once this thread has waited for the lock again
  }
  if (bytes < 0) {
    errno = refused;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return bytes;
}

}  // namespace

void bind_read_runs(nb::module_& m) {
  using namespace nb::literals;
  m.def("read_runs", &read, "fd"_a, "start"_a, "file_stride"_a, "out"_a);
}

}  // namespace cpumoe
