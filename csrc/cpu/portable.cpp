// Lowers the C library that the wheel asks for.
//
// libstdc++'s shared_ptr reads this flag of glibc 2.32 to count without atomic instructions while a
// program has one thread. Our own flag, seen only inside the library, says that there may be several,
// which is always right; what is left needs glibc 2.29.

extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
