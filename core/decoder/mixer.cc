#include "decoder/mixer.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace cpumoe {

std::int64_t CachePart::size() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

int CacheLayout::count(CachePart::Per per) const {
  return static_cast<int>(
      std::count_if(parts.begin(), parts.end(), [&](const CachePart& part) { return part.per == per; }));
}

}  // namespace cpumoe
