// Refusing bad input: the message names the argument, the value seen and what is accepted.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace cpumoe {

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// std::invalid_argument becomes ValueError in Python.
template <class... Parts>
void require(bool ok, const Parts&... message) {
  if (!ok) throw std::invalid_argument(concat(message...));
}

}  // namespace cpumoe
