/*
 * Preloaded into User-mode Linux, for processors with a large XSAVE area (Intel AMX: 11,008 bytes).
 *
 * Up to 6.12, User-mode Linux keeps 2,696 bytes of a process's extended state. On such a processor
 * the host refuses PTRACE_SETREGSET with a buffer that short, and the guest panics at its first process.
 * This writes the short buffer over the area's beginning and hands the host the whole area.
 * On other processors it changes nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

long ptrace(enum __ptrace_request request, ...)
{
	static long (*next)(int, ...);
	static char area[65536] __attribute__((aligned(64)));
	va_list args;

	va_start(args, request);
	int pid = va_arg(args, int);
	void *addr = va_arg(args, void *);
	void *data = va_arg(args, void *);
	va_end(args);

	if (!next)
		next = dlsym(RTLD_NEXT, "ptrace");
	if (request == PTRACE_SETREGSET && (long)addr == NT_X86_XSTATE) {
		struct iovec *part = data, whole = { area, sizeof area };
		long result = next(PTRACE_GETREGSET, pid, addr, &whole);

		if (result < 0)
			return result;
		if (whole.iov_len > part->iov_len) {
			memcpy(area, part->iov_base, part->iov_len);
			return next(PTRACE_SETREGSET, pid, addr, &whole);
		}
	}
	return next(request, pid, addr, data);
}
