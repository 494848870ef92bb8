#include "runtime/mapped_file.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "runtime/check.h"

namespace cpumoe {
namespace {

// One guarded map. Nodes are never freed, so that a signal handler may walk the list at any time; a node whose map is
// gone has no bytes and serves the next one.
struct Guard {
  std::atomic<std::uintptr_t> address{0};
  std::atomic<std::int64_t> bytes{0};
  std::string sentence;  // read only while bytes != 0, and not changed then
  Guard* next = nullptr;
};

std::atomic<Guard*> guards{nullptr};
std::mutex changing;
struct sigaction before;

void write_all(const char* text, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = write(STDERR_FILENO, text, bytes);
    if (written <= 0) return;
    text += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void hand_on(int signal, siginfo_t* info, void* context) {
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  } else {
    // Whoever read there reads again when this returns, and is ended as if we were not here.
    sigaction(signal, &before, nullptr);
    if (info->si_code <= 0) raise(signal);  // it was sent, and would not come again
  }
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  if (info->si_code == BUS_ADRERR) {  // not what a fault of the memory itself sends
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    for (const Guard* guard = guards.load(std::memory_order_acquire); guard != nullptr; guard = guard->next) {
      const std::int64_t bytes = guard->bytes.load(std::memory_order_acquire);
      const std::uintptr_t first = guard->address.load(std::memory_order_relaxed);
      if (address >= first && address - first < static_cast<std::uintptr_t>(bytes)) {
        write_all(guard->sentence.data(), guard->sentence.size());
        _exit(2);
      }
    }
  }
  hand_on(signal, info, context);
}

void install_handler() {
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, nullptr, &before);  // known before it can be needed
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace

void guard_mapping(std::uintptr_t address, std::int64_t bytes, const std::string& path) {
  CPUMOE_REQUIRE(bytes >= 0, "bytes=", bytes, "; 0 or more are accepted");
  const std::lock_guard<std::mutex> lock(changing);
  Guard* unused = nullptr;
  for (Guard* guard = guards.load(); guard != nullptr; guard = guard->next) {
    if (guard->address.load() == address) guard->bytes.store(0);
    if (guard->bytes.load() == 0) unused = guard;
  }
  if (bytes == 0) return;
  if (guards.load() == nullptr) install_handler();
  const bool is_new = unused == nullptr;
  if (is_new) unused = new Guard;
  unused->sentence = "cpumoe: " + path +
                     " was cut short while it was in use, and the weights in it are gone. Start again; "
                     "the file will be made anew if it is a packed cache.\n";
  unused->address.store(address, std::memory_order_relaxed);
  unused->bytes.store(bytes, std::memory_order_release);
  if (is_new) {
    unused->next = guards.load();
    guards.store(unused, std::memory_order_release);
  }
}

}  // namespace cpumoe
