/* Preloaded before the C library: lets the n-th file call below a directory fail. For tests of storage only.

   cc -shared -fPIC -o faultio.so faultio.c -ldl;  LD_PRELOAD=./faultio.so python ...

   Counted are write, pwrite, writev, fsync, fdatasync, ftruncate, rename, link, mkdir and open with O_CREAT, also those
   of SQLite and of Rust libraries. Kinds: 1 fails once, 2 fails from then on (a full disk), 3 writes half and then fails
   once (other calls as kind 1), 4 only fsync and fdatasync are counted, one fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[PATH_MAX];
static long nth, count;
static int failure, kind;

void faultio_arm(const char *directory, long call, int error, int how) {
    strncpy(below, directory, sizeof below - 1);
    nth = call, failure = error, kind = how, count = 0;
}

long faultio_count(void) { return count; }

static int inside(const char *path) {
    char whole[2 * PATH_MAX + 2], here[PATH_MAX];
    if (!below[0]) return 0;
    if (path[0] != '/') {
        if (!getcwd(here, sizeof here)) return 0;
        snprintf(whole, sizeof whole, "%s/%s", here, path);
        path = whole;
    }
    return strncmp(path, below, strlen(below)) == 0;
}

static int inside_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!below[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return inside(path);
}

static int fails(int is_sync) {
    if (kind == 4 && !is_sync) return 0;
    long now = __sync_add_and_fetch(&count, 1);
    if (nth <= 0 || (kind == 2 ? now < nth : now != nth)) return 0;
    errno = failure;
    return 1;
}

#define REAL(name, result, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write, ssize_t, int, const void *, size_t);
    if (inside_fd(fd) && fails(0)) {
        if (kind == 3 && size > 1) { nth = count + 1; return real(fd, data, size / 2); }
        return -1;
    }
    return real(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite, ssize_t, int, const void *, size_t, off_t);
    if (inside_fd(fd) && fails(0)) {
        if (kind == 3 && size > 1) { nth = count + 1; return real(fd, data, size / 2, at); }
        return -1;
    }
    return real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64, ssize_t, int, const void *, size_t, off64_t);
    if (inside_fd(fd) && fails(0)) {
        if (kind == 3 && size > 1) { nth = count + 1; return real(fd, data, size / 2, at); }
        return -1;
    }
    return real(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    REAL(writev, ssize_t, int, const struct iovec *, int);
    return inside_fd(fd) && fails(0) ? -1 : real(fd, parts, number);
}

int fsync(int fd) {
    REAL(fsync, int, int);
    return inside_fd(fd) && fails(1) ? -1 : real(fd);
}

int fdatasync(int fd) {
    REAL(fdatasync, int, int);
    return inside_fd(fd) && fails(1) ? -1 : real(fd);
}

int ftruncate(int fd, off_t size) {
    REAL(ftruncate, int, int, off_t);
    return inside_fd(fd) && fails(0) ? -1 : real(fd, size);
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64, int, int, off64_t);
    return inside_fd(fd) && fails(0) ? -1 : real(fd, size);
}

int rename(const char *from, const char *to) {
    REAL(rename, int, const char *, const char *);
    return inside(to) && fails(0) ? -1 : real(from, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir, int, const char *, mode_t);
    return inside(path) && fails(0) ? -1 : real(path, mode);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name, int, const char *, int, ...); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        if ((flags & O_CREAT) && inside(path) && fails(0)) return -1; \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
