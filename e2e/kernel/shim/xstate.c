/*
 * Preloaded into User-mode Linux, which keeps the extended state of a guest's processes (the registers of SSE and AVX) as a host process's
 * ptrace regset NT_X86_XSTATE, and reads and writes it at each system call and each fault of such a process. There are two problems with that.
 *
 * Up to 6.12, it keeps 2,696 bytes. On processors with a larger state (Intel AMX: 11,008 bytes), the host refuses PTRACE_SETREGSET with a
 * buffer that short, and the guest panics at its first process. This writes the short buffer over the area's beginning and hands the host
 * the whole area.
 *
 * And for PTRACE_SETREGSET the host maps memory for a copy, which takes as long as the rest of the system call where it runs in a virtual
 * machine without support from the processor. Mostly the state is the one that was read when the process stopped; then this writes nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

/* The state of a process that was read last, and of which process; of none while pid is 0. */
static struct {
	int pid;
	size_t size;
	char area[4096];
} known;

static void know(int pid, const struct iovec *part)
{
	if (part->iov_len > sizeof known.area)
		return;
	known.pid = pid;
	known.size = part->iov_len;
	memcpy(known.area, part->iov_base, part->iov_len);
}

static int is_known(int pid, const struct iovec *part)
{
	size_t size = part->iov_len < known.size ? part->iov_len : known.size; /* The host may have less than there is room for. */

	return known.pid == pid && !memcmp(known.area, part->iov_base, size);
}

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

	int is_state = (request == PTRACE_GETREGSET || request == PTRACE_SETREGSET) && (long)addr == NT_X86_XSTATE;
	struct iovec *part = data, whole = { area, sizeof area };

	if (!next)
		next = dlsym(RTLD_NEXT, "ptrace");
	if (is_state && request == PTRACE_SETREGSET) {
		if (is_known(pid, part))
			return 0;
		known.pid = 0;
		long result = next(PTRACE_GETREGSET, pid, addr, &whole);
		if (result < 0)
			return result;
		if (whole.iov_len > part->iov_len) {
			memcpy(area, part->iov_base, part->iov_len);
			return next(request, pid, addr, &whole);
		}
	}
	/* After any other request, the process may have run, or be another one. */
	if (request != PTRACE_GETREGS && request != PTRACE_SETREGS && request != PTRACE_GETSIGINFO)
		known.pid = 0;
	long result = next(request, pid, addr, data);
	if (is_state && request == PTRACE_GETREGSET && result >= 0)
		know(pid, part);
	return result;
}
