// NUMA placement of packed weights: moves pages to the memory node whose threads multiply with them.
#pragma once

#include <cstdint>

#include "packed/layout.h"

namespace cpumoe {

// The pages of packed weights after placing: how many there are, and how many are on another node.
struct Placement {
  std::int64_t pages = 0, elsewhere = 0;  // whole pages or huge pages, and how many of them are not on their node
  int problem = 0;                        // errno of the first call that failed; `elsewhere` is then not known
};

// Puts the pages of packed weights on the nodes of their column blocks; contents stay. A page that holds blocks of
// several nodes goes to the one that has its middle. Meant for memory that has hardly been touched yet: pages are
// touched by a thread on their node, which costs nothing more and needs no permission; those that exist are moved.
Placement place_packed(const PackedMatrix& matrix, std::uint8_t* data);

}  // namespace cpumoe
