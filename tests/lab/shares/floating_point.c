/* User-mode Linux keeps 2,696 bytes of a process's floating-point registers. On a CPU with AMX the
 * host's kernel takes nothing but all of them: this adds what is left out, which is never in use. */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define KEPT 0x2e7 /* x87, SSE, AVX, AVX-512 and PKRU: what fits */
#define PRESENT 512 /* where the state says which of its parts are in use */

long ptrace(enum __ptrace_request request, ...)
{
    static char whole[1 << 16];
    va_list rest;
    va_start(rest, request);
    long pid = va_arg(rest, int);
    void *address = va_arg(rest, void *), *data = va_arg(rest, void *);
    va_end(rest);
    if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
        struct iovec *given = data, all = {whole, sizeof whole};
        if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, address, &all) >= 0
            && given->iov_len < all.iov_len) {
            uint64_t present;
            memcpy(whole, given->iov_base, given->iov_len);
            memcpy(&present, whole + PRESENT, sizeof present);
            present &= KEPT;
            memcpy(whole + PRESENT, &present, sizeof present);
            return syscall(SYS_ptrace, request, pid, address, &all);
        }
    }
    if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
        long word, failed = syscall(SYS_ptrace, request, pid, address, &word);
        if (failed < 0)
            return failed;
        errno = 0;
        return word;
    }
    return syscall(SYS_ptrace, request, pid, address, data);
}
