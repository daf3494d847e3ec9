/* Stands between a process and the C library, and sees every call that changes files below a root.
 *
 * Loaded with LD_PRELOAD it also sees what LMDB does, which calls the C library as we do. It can
 *
 *   - trace the calls, with the bytes that they wrote;
 *   - kill the process with SIGKILL before, after or in the middle of the n-th call;
 *   - let the n-th call fail, or write less than it was asked to, once or from then on.
 *
 * It is steered by the functions at the end, from inside the process (see interposer.py).
 *
 * A call goes to the kernel with syscall(2), so there is no real function to look up. Whether a
 * descriptor is below the root, and how it was opened, the kernel knows best: both are asked for at
 * each call, so neither a rename nor dup(2) nor fork(2) has to be followed. One lock is held from
 * the decision to the record, so the trace is in the order in which things happened.
 *
 * Not seen: stores through a writable mapping, stdio, and calls that the C library makes inside
 * itself. Whoever replays a trace compares the outcome with the real directory, and would notice.
 *
 * For Linux with offsets of 64 bits.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "offsets of 64 bits");

/* What a call does: one bit each, so that several can be asked for. Known to interposer.py. */
enum kind {
    CREATE = 1 << 0,
    WRITE = 1 << 1,
    TRUNCATE = 1 << 2,
    ALLOCATE = 1 << 3,
    SYNC = 1 << 4,
    SYNC_DATA = 1 << 5,
    SYNC_DIRECTORY = 1 << 6,
    RENAME = 1 << 7,
    UNLINK = 1 << 8,
    LINK = 1 << 9,
    MAKE_DIRECTORY = 1 << 10,
    REMOVE_DIRECTORY = 1 << 11,
    MARK = 1 << 12, /* not a call: the process says something */
};

enum moment { BEFORE, AFTER, MIDDLE };

/* One call in the trace. Its content, path and other path follow. Known to interposer.py. */
struct record {
    uint32_t kind;
    uint32_t is_durable; /* written through a descriptor with O_DSYNC or O_SYNC */
    int32_t error;       /* of a call that was made to fail */
    uint32_t content_bytes;
    uint32_t path_bytes;
    uint32_t other_path_bytes;
    uint64_t inode;
    uint64_t offset; /* of a write; the new size of a truncation or an allocation */
};

/* The number of the call at which something is to happen, 0 for never, counting those of `kinds`. */
struct plan {
    uint32_t kinds;
    long number;
    long seen;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_bytes;
static long calls;

static struct plan death;
static enum moment death_moment;
static bool is_dying; /* in this call */

static struct plan fault;
static int fault_code;
static bool fault_is_sticky, fault_is_short, fault_is_late;
static long fault_count;

static bool is_tracing;
static unsigned char *trace;
static size_t trace_bytes, trace_capacity;

/* Paths. */

/* The path below the root, "" for the root itself; NULL if it is elsewhere. */
static const char *below_root(const char *path)
{
    if (!root_bytes || strncmp(path, root, root_bytes))
        return NULL;
    if (path[root_bytes] == '\0')
        return path + root_bytes;
    return path[root_bytes] == '/' ? path + root_bytes + 1 : NULL;
}

/* Put the path behind a descriptor into `path`. A file without a name has " (deleted)" behind it. */
static bool path_of(int fd, char path[PATH_MAX])
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t count = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[count < 0 ? 0 : count] = '\0';
    return count > 0;
}

/* Put the path that `name` means, seen from `folder`, into `path`. Takes the names as they are:
 * no "..", no link on the way. */
static const char *resolve(int folder, const char *name, char path[PATH_MAX])
{
    if (!root_bytes || !name)
        return NULL;
    size_t count = 0;
    if (name[0] != '/') {
        if (folder == AT_FDCWD ? !getcwd(path, PATH_MAX) : !path_of(folder, path))
            return NULL;
        count = strlen(path);
        if (count + 1 < PATH_MAX)
            path[count++] = '/';
    }
    if (count + strlen(name) >= PATH_MAX)
        return NULL;
    strcpy(path + count, name);
    for (count = strlen(path); count > 1 && path[count - 1] == '/'; count--)
        path[count - 1] = '\0';
    return below_root(path);
}

static const char *resolve_descriptor(int fd, char path[PATH_MAX])
{
    return root_bytes && path_of(fd, path) ? below_root(path) : NULL;
}

/* The trace. */

static unsigned char *append(unsigned char *end, const void *bytes, size_t count)
{
    if (count)
        memcpy(end, bytes, count);
    return end + count;
}

/* Append a record, whose content comes from as many buffers as it takes. */
static void note(struct record record, const struct iovec *content, const char *path,
                 const char *other_path)
{
    if (!is_tracing)
        return;
    record.path_bytes = strlen(path);
    record.other_path_bytes = strlen(other_path);
    size_t needed = trace_bytes + sizeof record + record.content_bytes + record.path_bytes +
                    record.other_path_bytes;
    if (needed > trace_capacity) {
        trace_capacity = 2 * needed + (1 << 16);
        trace = realloc(trace, trace_capacity);
        if (!trace)
            abort();
    }
    unsigned char *end = append(trace + trace_bytes, &record, sizeof record);
    for (size_t left = record.content_bytes; left; content++) {
        size_t count = content->iov_len < left ? content->iov_len : left;
        end = append(end, content->iov_base, count);
        left -= count;
    }
    end = append(end, path, record.path_bytes);
    end = append(end, other_path, record.other_path_bytes);
    trace_bytes = end - trace;
}

/* The powers. */

static void die(void)
{
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;)
        pause();
}

static bool is_due(struct plan *plan, enum kind kind)
{
    return plan->number && (plan->kinds & kind) && ++plan->seen == plan->number;
}

enum verdict { GO_ON, FAIL, FAIL_LATE, FALL_SHORT, DIE_IN_THE_MIDDLE };

/* Count a call, and say what becomes of it. The lock is held until `leave`. */
static enum verdict enter(enum kind kind)
{
    calls++;
    is_dying = is_due(&death, kind);
    if (is_dying && death_moment == BEFORE)
        die();
    if (is_dying && death_moment == MIDDLE && kind == WRITE)
        return DIE_IN_THE_MIDDLE;
    bool is_failing = is_due(&fault, kind) ||
                      (fault_is_sticky && (fault.kinds & kind) && fault_count > 0);
    if (!is_failing)
        return GO_ON;
    fault_count++;
    return fault_is_short ? FALL_SHORT : fault_is_late ? FAIL_LATE : FAIL;
}

/* Finish a call that began with `enter`, with errno `code`. */
static void leave(int code)
{
    if (is_dying)
        die();
    pthread_mutex_unlock(&lock);
    errno = code;
}

/* Calls on names. */

struct names {
    int folder, other_folder;
    const char *name, *other_name;
};

static uint64_t inode_of(int folder, const char *name)
{
    struct stat status;
    return fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW) ? 0 : status.st_ino;
}

/* Make a call that changes names: `number` of the kernel's calls with these arguments. */
static int change_names(enum kind kind, struct names names, long number, long a, long b, long c,
                        long d, long e)
{
    char path_space[PATH_MAX], other_space[PATH_MAX];
    pthread_mutex_lock(&lock);
    const char *path = resolve(names.folder, names.name, path_space);
    const char *other = "";
    if (path && names.other_name)
        other = resolve(names.other_folder, names.other_name, other_space);
    if (!path || !other) {
        pthread_mutex_unlock(&lock);
        return syscall(number, a, b, c, d, e);
    }
    enum verdict verdict = enter(kind);
    if (verdict == FAIL) {
        leave(fault_code);
        return -1;
    }
    int result = syscall(number, a, b, c, d, e);
    int code = errno;
    if (result == 0) {
        struct record record = {.kind = kind};
        if (kind == MAKE_DIRECTORY)
            record.inode = inode_of(names.folder, names.name);
        note(record, NULL, path, other);
    }
    if (verdict == FAIL_LATE) {
        result = -1;
        code = fault_code;
    }
    leave(code);
    return result;
}

int renameat2(int folder, const char *old, int new_folder, const char *new, unsigned flags)
{
    struct names names = {folder, new_folder, old, new};
    return change_names(RENAME, names, SYS_renameat2, folder, (long)old, new_folder, (long)new,
                        flags);
}

int renameat(int folder, const char *old, int new_folder, const char *new)
{
    return renameat2(folder, old, new_folder, new, 0);
}

int rename(const char *old, const char *new)
{
    return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0);
}

int linkat(int folder, const char *old, int new_folder, const char *new, int flags)
{
    struct names names = {folder, new_folder, old, new};
    return change_names(LINK, names, SYS_linkat, folder, (long)old, new_folder, (long)new, flags);
}

int link(const char *old, const char *new)
{
    return linkat(AT_FDCWD, old, AT_FDCWD, new, 0);
}

int unlinkat(int folder, const char *name, int flags)
{
    struct names names = {.folder = folder, .name = name};
    enum kind kind = flags & AT_REMOVEDIR ? REMOVE_DIRECTORY : UNLINK;
    return change_names(kind, names, SYS_unlinkat, folder, (long)name, flags, 0, 0);
}

int unlink(const char *name)
{
    return unlinkat(AT_FDCWD, name, 0);
}

int rmdir(const char *name)
{
    return unlinkat(AT_FDCWD, name, AT_REMOVEDIR);
}

int remove(const char *name)
{
    int result = unlink(name);
    return result && errno == EISDIR ? rmdir(name) : result;
}

int mkdirat(int folder, const char *name, mode_t mode)
{
    struct names names = {.folder = folder, .name = name};
    return change_names(MAKE_DIRECTORY, names, SYS_mkdirat, folder, (long)name, mode, 0, 0);
}

int mkdir(const char *name, mode_t mode)
{
    return mkdirat(AT_FDCWD, name, mode);
}

/* Opening: a change only if it makes a file or empties one. */

static int open_below(int folder, const char *name, int flags, mode_t mode)
{
    char path_space[PATH_MAX];
    struct stat status;
    pthread_mutex_lock(&lock);
    const char *path = resolve(folder, name, path_space);
    bool is_there = path && fstatat(folder, name, &status, 0) == 0;
    bool is_creation = path && (flags & O_CREAT) && !is_there;
    bool is_change = is_creation || (is_there && (flags & O_TRUNC) && status.st_size > 0);
    if (!is_change) {
        pthread_mutex_unlock(&lock);
        return syscall(SYS_openat, folder, name, flags, mode);
    }
    enum kind kind = is_creation ? CREATE : TRUNCATE;
    enum verdict verdict = enter(kind);
    if (verdict == FAIL) {
        leave(fault_code);
        return -1;
    }
    int fd = syscall(SYS_openat, folder, name, flags, mode);
    int code = errno;
    if (fd >= 0 && fstat(fd, &status) == 0) {
        struct record record = {.kind = kind, .inode = status.st_ino};
        note(record, NULL, path, "");
    }
    if (verdict == FAIL_LATE) {
        syscall(SYS_close, fd);
        fd = -1;
        code = fault_code;
    }
    leave(code);
    return fd;
}

/* The mode is there only if a file may be made. */
#define MODE_AFTER(flags)                                              \
    mode_t mode = 0;                                                   \
    if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE) {     \
        va_list arguments;                                             \
        va_start(arguments, flags);                                    \
        mode = va_arg(arguments, unsigned int);                        \
        va_end(arguments);                                             \
    }

int open(const char *name, int flags, ...)
{
    MODE_AFTER(flags)
    return open_below(AT_FDCWD, name, flags, mode);
}

int openat(int folder, const char *name, int flags, ...)
{
    MODE_AFTER(flags)
    return open_below(folder, name, flags, mode);
}

int creat(const char *name, mode_t mode)
{
    return open_below(AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC, mode);
}

/* Writing. */

#define AT_POSITION (-1) /* instead of an offset: where the descriptor stands */

static size_t total_of(const struct iovec *buffers, int count)
{
    size_t total = 0;
    for (int i = 0; i < count; i++)
        total += buffers[i].iov_len;
    return total;
}

static ssize_t write_to_kernel(int fd, const struct iovec *buffers, int count, off_t offset)
{
    if (offset == AT_POSITION)
        return syscall(SYS_writev, fd, buffers, count);
    /* The offset comes in two halves, of which the kernel here takes the first as all of it. */
    return syscall(SYS_pwritev, fd, buffers, count, offset, offset >> 32);
}

/* Write the first half: what a full disk takes, or what a death in the middle leaves. */
static ssize_t write_half(int fd, const struct iovec *buffers, int count, off_t offset)
{
    struct iovec some[IOV_MAX];
    size_t total = total_of(buffers, count);
    size_t left = total > 1 ? total / 2 : total;
    int used = 0;
    for (; left && used < count; used++) {
        some[used] = buffers[used];
        if (some[used].iov_len > left)
            some[used].iov_len = left;
        left -= some[used].iov_len;
    }
    return write_to_kernel(fd, some, used, offset);
}

static ssize_t write_below(int fd, const struct iovec *buffers, int count, off_t offset)
{
    char path_space[PATH_MAX];
    struct stat status;
    pthread_mutex_lock(&lock);
    const char *path = resolve_descriptor(fd, path_space);
    if (!path || count > IOV_MAX || fstat(fd, &status)) {
        pthread_mutex_unlock(&lock);
        return write_to_kernel(fd, buffers, count, offset);
    }
    enum verdict verdict = enter(WRITE);
    int flags = fcntl(fd, F_GETFL);
    off_t start = offset != AT_POSITION ? offset : lseek(fd, 0, SEEK_CUR);
    if (flags & O_APPEND)
        start = status.st_size;
    ssize_t written = 0;
    if (verdict == FALL_SHORT || verdict == DIE_IN_THE_MIDDLE)
        written = write_half(fd, buffers, count, offset);
    else if (verdict != FAIL)
        written = write_to_kernel(fd, buffers, count, offset);
    int code = errno;
    bool is_failing = verdict == FAIL || verdict == FAIL_LATE;
    if (written > 0 || is_failing) {
        struct record record = {
            .kind = WRITE,
            .is_durable = (flags & O_DSYNC) != 0,
            .error = is_failing ? fault_code : 0,
            .content_bytes = written > 0 ? written : 0,
            .inode = status.st_ino,
            .offset = start,
        };
        note(record, buffers, path, "");
    }
    leave(is_failing ? fault_code : code);
    return is_failing ? -1 : written;
}

ssize_t writev(int fd, const struct iovec *buffers, int count)
{
    return write_below(fd, buffers, count, AT_POSITION);
}

ssize_t write(int fd, const void *bytes, size_t count)
{
    struct iovec buffer = {(void *)bytes, count};
    return write_below(fd, &buffer, 1, AT_POSITION);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t offset)
{
    struct iovec buffer = {(void *)bytes, count};
    return write_below(fd, &buffer, 1, offset);
}

ssize_t pwritev(int fd, const struct iovec *buffers, int count, off_t offset)
{
    return write_below(fd, buffers, count, offset);
}

ssize_t pwritev2(int fd, const struct iovec *buffers, int count, off_t offset, int flags)
{
    (void)flags; /* hints, of which nobody here makes use */
    return write_below(fd, buffers, count, offset);
}

/* Copies inside the kernel are refused: their callers then read and write. */

ssize_t copy_file_range(int from, off64_t *from_offset, int to, off64_t *to_offset, size_t count,
                        unsigned flags)
{
    char path[PATH_MAX];
    if (resolve_descriptor(to, path)) {
        errno = ENOSYS;
        return -1;
    }
    return syscall(SYS_copy_file_range, from, from_offset, to, to_offset, count, flags);
}

ssize_t sendfile(int to, int from, off_t *offset, size_t count)
{
    char path[PATH_MAX];
    if (resolve_descriptor(to, path)) {
        errno = ENOTSOCK;
        return -1;
    }
    return syscall(SYS_sendfile, to, from, offset, count);
}

/* Sizes and syncs. */

/* Make a call on a descriptor: `number` of the kernel's calls with these arguments. */
static int change_file(enum kind kind, int fd, off_t size, long number, long a, long b, long c)
{
    char path_space[PATH_MAX];
    struct stat status;
    pthread_mutex_lock(&lock);
    const char *path = resolve_descriptor(fd, path_space);
    if (!path || fstat(fd, &status)) {
        pthread_mutex_unlock(&lock);
        return syscall(number, fd, a, b, c);
    }
    bool is_sync = kind == SYNC || kind == SYNC_DATA;
    if (is_sync && S_ISDIR(status.st_mode))
        kind = SYNC_DIRECTORY;
    enum verdict verdict = enter(kind);
    bool is_failing = verdict == FAIL || verdict == FAIL_LATE;
    int result = verdict == FAIL ? -1 : syscall(number, fd, a, b, c);
    int code = errno;
    if (is_failing) {
        result = -1;
        code = fault_code;
    }
    /* A sync that failed changes what later ones are worth, so it is in the trace. */
    if (result == 0 || verdict == FAIL_LATE || (is_sync && verdict == FAIL)) {
        struct record record = {
            .kind = kind,
            .error = is_failing ? fault_code : 0,
            .inode = status.st_ino,
            .offset = size,
        };
        note(record, NULL, path, "");
    }
    leave(code);
    return result;
}

int fsync(int fd)
{
    return change_file(SYNC, fd, 0, SYS_fsync, 0, 0, 0);
}

int fdatasync(int fd)
{
    return change_file(SYNC_DATA, fd, 0, SYS_fdatasync, 0, 0, 0);
}

int ftruncate(int fd, off_t size)
{
    return change_file(TRUNCATE, fd, size, SYS_ftruncate, size, 0, 0);
}

int truncate(const char *name, off_t size)
{
    int fd = open_below(AT_FDCWD, name, O_WRONLY | O_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    int result = ftruncate(fd, size);
    int code = errno;
    syscall(SYS_close, fd);
    errno = code;
    return result;
}

int fallocate(int fd, int mode, off_t offset, off_t count)
{
    return change_file(ALLOCATE, fd, offset + count, SYS_fallocate, mode, offset, count);
}

int posix_fallocate(int fd, off_t offset, off_t count)
{
    return fallocate(fd, 0, offset, count) ? errno : 0;
}

/* With offsets of 64 bits these are the same functions. */

#define ALSO(other, name) extern __typeof__(name) other __attribute__((alias(#name)))

ALSO(open64, open);
ALSO(openat64, openat);
ALSO(creat64, creat);
ALSO(pwrite64, pwrite);
ALSO(pwritev64, pwritev);
ALSO(pwritev64v2, pwritev2);
ALSO(sendfile64, sendfile);
ALSO(ftruncate64, ftruncate);
ALSO(truncate64, truncate);
ALSO(fallocate64, fallocate);
ALSO(posix_fallocate64, posix_fallocate);

/* A fork in one thread must not leave the child with a lock that another one held. */

static void take_lock(void)
{
    pthread_mutex_lock(&lock);
}

static void let_lock_go(void)
{
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void begin(void)
{
    pthread_atfork(take_lock, let_lock_go, let_lock_go);
}

/* Steering. */

/* Forget what was asked for and counted. */
void interposer_reset(void)
{
    pthread_mutex_lock(&lock);
    memset(&death, 0, sizeof death);
    memset(&fault, 0, sizeof fault);
    calls = fault_count = 0;
    fault_is_sticky = fault_is_short = fault_is_late = false;
    pthread_mutex_unlock(&lock);
}

/* See calls below this directory, whose path is absolute and without links; "" sees none. */
void interposer_watch(const char *path)
{
    interposer_reset();
    pthread_mutex_lock(&lock);
    root_bytes = strlen(path) < sizeof root ? strlen(path) : 0;
    memcpy(root, path, root_bytes);
    root[root_bytes] = '\0';
    pthread_mutex_unlock(&lock);
}

void interposer_kill(long number, uint32_t kinds, int moment)
{
    pthread_mutex_lock(&lock);
    death = (struct plan){.kinds = kinds, .number = number};
    death_moment = moment;
    pthread_mutex_unlock(&lock);
}

void interposer_fail(long number, uint32_t kinds, int code, bool is_sticky, bool is_short,
                     bool is_late)
{
    pthread_mutex_lock(&lock);
    fault = (struct plan){.kinds = kinds, .number = number};
    fault_code = code;
    fault_is_sticky = is_sticky;
    fault_is_short = is_short;
    fault_is_late = is_late;
    fault_count = 0;
    pthread_mutex_unlock(&lock);
}

long interposer_calls(void)
{
    return calls;
}

long interposer_fault_count(void)
{
    return fault_count;
}

void interposer_trace(bool is_on)
{
    pthread_mutex_lock(&lock);
    is_tracing = is_on;
    trace_bytes = 0;
    pthread_mutex_unlock(&lock);
}

/* The trace so far, which the caller copies before anything else happens. */
const void *interposer_trace_start(size_t *count)
{
    *count = trace_bytes;
    return trace;
}

void interposer_mark(const char *text)
{
    struct record record = {.kind = MARK};
    pthread_mutex_lock(&lock);
    note(record, NULL, text, "");
    pthread_mutex_unlock(&lock);
}
