// Old versions of glibc's symbols, so that a wheel that is built with a recent glibc runs with old ones (manylinux).
//
// glibc 2.34 moved threads and dlsym from libraries of their own into libc, and gave the symbols a new version. The
// functions are the same, and every later glibc has the old versions too. The definitions below are hidden: all
// references inside the extension, also those of the libstdc++ linked into it, bind to them.
#include <dlfcn.h>
#include <pthread.h>

#if defined(__x86_64__)
#define CPUMOE_OLD_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define CPUMOE_OLD_VERSION "GLIBC_2.17"
#else
#error "CPUMOE_OLD_GLIBC is for x86-64 and AArch64"
#endif

#define CPUMOE_HIDDEN __attribute__((visibility("hidden")))
#define CPUMOE_BIND_OLD(name) __asm__(".symver old_" #name ", " #name "@" CPUMOE_OLD_VERSION)

extern "C" {

CPUMOE_BIND_OLD(dlsym);
void* old_dlsym(void* handle, const char* name) noexcept;
CPUMOE_HIDDEN void* dlsym(void* handle, const char* name) noexcept { return old_dlsym(handle, name); }

CPUMOE_BIND_OLD(pthread_create);
int old_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                       void* argument) noexcept;
CPUMOE_HIDDEN int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                                 void* argument) noexcept {
  return old_pthread_create(thread, attributes, start, argument);
}

CPUMOE_BIND_OLD(pthread_detach);
int old_pthread_detach(pthread_t thread) noexcept;
CPUMOE_HIDDEN int pthread_detach(pthread_t thread) noexcept { return old_pthread_detach(thread); }

CPUMOE_BIND_OLD(pthread_join);
int old_pthread_join(pthread_t thread, void** result);
CPUMOE_HIDDEN int pthread_join(pthread_t thread, void** result) { return old_pthread_join(thread, result); }

CPUMOE_BIND_OLD(pthread_once);
int old_pthread_once(pthread_once_t* once, void (*function)());
CPUMOE_HIDDEN int pthread_once(pthread_once_t* once, void (*function)()) { return old_pthread_once(once, function); }

CPUMOE_BIND_OLD(__pthread_key_create);
int old___pthread_key_create(pthread_key_t* key, void (*destroy)(void*)) noexcept;
CPUMOE_HIDDEN int __pthread_key_create(pthread_key_t* key, void (*destroy)(void*)) noexcept {
  return old___pthread_key_create(key, destroy);
}

// glibc 2.32 and later: whether the process has had one thread only. libstdc++ then counts references without atomic
// instructions; with zero it always uses them.
CPUMOE_HIDDEN char __libc_single_threaded = 0;
}
