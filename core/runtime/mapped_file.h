// Memory maps of files that others may cut short: reading behind the new end of such a file raises SIGBUS.
#pragma once

#include <cstdint>
#include <string>

namespace cpumoe {

// From now on, SIGBUS within [address, address + bytes) ends the process with a sentence that names `path`, and with
// exit code 2. All other SIGBUS go where they went before. With bytes == 0 the map that begins at `address` is
// forgotten, which must happen before it is unmapped.
void guard_mapping(std::uintptr_t address, std::int64_t bytes, const std::string& path);

}  // namespace cpumoe
