/* Fails the n-th call of a kind for files in a folder; loaded with LD_PRELOAD, see io_faults.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { FAIL, FAIL_FROM_HERE, KILL, TEAR };

static char folder[PATH_MAX], kind[16];
static long chosen_call;
static int error_number;
static enum action action;
static volatile long *num_calls; /* shared by all processes of a program; NULL: no faults */

/* The server calls it after each fork; a program that is executed calls it when it starts. */
__attribute__((constructor)) void arm_io_fault(void) {
  const char *counter = getenv("IO_FAULT_COUNTER");
  if (counter == NULL)
    return;
  snprintf(folder, sizeof folder, "%s", getenv("IO_FAULT_FOLDER"));
  snprintf(kind, sizeof kind, "%s", getenv("IO_FAULT_KIND"));
  chosen_call = atol(getenv("IO_FAULT_CALL"));
  error_number = atoi(getenv("IO_FAULT_ERROR"));
  action = atoi(getenv("IO_FAULT_ACTION"));
  int file = syscall(SYS_openat, AT_FDCWD, counter, O_RDWR);
  void *page = (void *)syscall(SYS_mmap, 0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  syscall(SYS_close, file);
  num_calls = page == MAP_FAILED ? NULL : page;
}

static void die(void) {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;)
    pause();
}

/* Count a call if it is of the kind and in the folder; return whether it shall fail, or die. */
static int fails(const char *of_kind, const char *path) {
  if (num_calls == NULL || path == NULL || strcmp(kind, of_kind))
    return 0;
  char absolute[2 * PATH_MAX];
  if (path[0] != '/') {
    char here[PATH_MAX];
    if (syscall(SYS_getcwd, here, sizeof here) < 0)
      return 0;
    snprintf(absolute, sizeof absolute, "%s/%s", here, path);
    path = absolute;
  }
  size_t length = strlen(folder);
  if (strncmp(path, folder, length) || (path[length] != '/' && path[length] != 0))
    return 0;
  long call = __sync_add_and_fetch(num_calls, 1);
  if (call != chosen_call && !(action == FAIL_FROM_HERE && chosen_call && call > chosen_call))
    return 0;
  if (action == KILL)
    die();
  errno = error_number;
  return 1;
}

static int fails_fd(const char *of_kind, int file) {
  if (num_calls == NULL || strcmp(kind, of_kind))
    return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
  if (length <= 0)
    return 0;
  path[length] = 0;
  return fails(of_kind, path);
}

static int fails_at(const char *of_kind, int parent, const char *path) {
  if (num_calls == NULL || path == NULL || path[0] == '/' || parent == AT_FDCWD)
    return fails(of_kind, path);
  char link[64], whole[2 * PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", parent);
  long length = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX - 1);
  if (length <= 0)
    return 0;
  snprintf(whole + length, PATH_MAX, "/%s", path);
  return fails(of_kind, whole);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* CALL(name, declared parameters, passed parameters, the condition that it fails). */
#define CALL(type, name, parameters, arguments, condition, failure)                                \
  type name parameters {                                                                           \
    static __typeof__(&name) next;                                                                 \
    if (next == NULL)                                                                              \
      next = NEXT(name);                                                                           \
    if (condition)                                                                                 \
      return failure;                                                                              \
    return next arguments;                                                                         \
  }

#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & (O_CREAT | O_TRUNC)))
#define OPEN(name)                                                                                 \
  int name(const char *path, int flags, ...) {                                                     \
    va_list rest;                                                                                  \
    va_start(rest, flags);                                                                         \
    mode_t mode = va_arg(rest, mode_t);                                                            \
    va_end(rest);                                                                                  \
    if (WRITES(flags) && fails("open", path))                                                      \
      return -1;                                                                                   \
    return NEXT(name)(path, flags, mode);                                                          \
  }
#define OPENAT(name)                                                                               \
  int name(int parent, const char *path, int flags, ...) {                                         \
    va_list rest;                                                                                  \
    va_start(rest, flags);                                                                         \
    mode_t mode = va_arg(rest, mode_t);                                                            \
    va_end(rest);                                                                                  \
    if (WRITES(flags) && fails_at("open", parent, path))                                           \
      return -1;                                                                                   \
    return NEXT(name)(parent, path, flags, mode);                                                  \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
CALL(FILE *, fopen, (const char *path, const char *mode), (path, mode),
     strpbrk(mode, "wa+") && fails("open", path), NULL)
CALL(FILE *, fopen64, (const char *path, const char *mode), (path, mode),
     strpbrk(mode, "wa+") && fails("open", path), NULL)

static ssize_t refuse_write(int file, const void *content, size_t size) {
  if (action == TEAR) {
    syscall(SYS_write, file, content, size / 2);
    die();
  }
  return -1;
}
CALL(ssize_t, write, (int file, const void *content, size_t size), (file, content, size),
     fails_fd("write", file), refuse_write(file, content, size))
CALL(ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count),
     fails_fd("write", file), refuse_write(file, parts[0].iov_base, parts[0].iov_len))
CALL(ssize_t, pwrite, (int file, const void *content, size_t size, off_t place),
     (file, content, size, place), fails_fd("write", file), refuse_write(file, content, 0))
CALL(ssize_t, pwrite64, (int file, const void *content, size_t size, off64_t place),
     (file, content, size, place), fails_fd("write", file), refuse_write(file, content, 0))
CALL(ssize_t, sendfile, (int to, int from, off_t *place, size_t size), (to, from, place, size),
     fails_fd("write", to), -1)
CALL(ssize_t, sendfile64, (int to, int from, off64_t *place, size_t size), (to, from, place, size),
     fails_fd("write", to), -1)
CALL(ssize_t, copy_file_range,
     (int from, off64_t *first, int to, off64_t *second, size_t size, unsigned flags),
     (from, first, to, second, size, flags), fails_fd("write", to), -1)

CALL(ssize_t, read, (int file, void *content, size_t size), (file, content, size),
     fails_fd("read", file), -1)
CALL(int, fsync, (int file), (file), fails_fd("fsync", file), -1)
CALL(int, fdatasync, (int file), (file), fails_fd("fsync", file), -1)
CALL(int, rename, (const char *from, const char *to), (from, to), fails("rename", to), -1)
CALL(int, renameat, (int parent, const char *from, int new_parent, const char *to),
     (parent, from, new_parent, to), fails_at("rename", new_parent, to), -1)
CALL(int, link, (const char *from, const char *to), (from, to), fails("link", to), -1)
CALL(int, symlink, (const char *target, const char *path), (target, path), fails("link", path), -1)
CALL(int, mkdir, (const char *path, mode_t mode), (path, mode), fails("mkdir", path), -1)
CALL(int, mkdirat, (int parent, const char *path, mode_t mode), (parent, path, mode),
     fails_at("mkdir", parent, path), -1)
CALL(int, unlink, (const char *path), (path), fails("unlink", path), -1)
CALL(int, unlinkat, (int parent, const char *path, int flags), (parent, path, flags),
     fails_at("unlink", parent, path), -1)
CALL(int, rmdir, (const char *path), (path), fails("unlink", path), -1)
CALL(int, ftruncate, (int file, off_t size), (file, size), fails_fd("truncate", file), -1)
CALL(int, ftruncate64, (int file, off64_t size), (file, size), fails_fd("truncate", file), -1)
CALL(void *, mmap, (void *at, size_t size, int access, int flags, int file, off_t place),
     (at, size, access, flags, file, place), file >= 0 && fails_fd("mmap", file), MAP_FAILED)
CALL(void *, mmap64, (void *at, size_t size, int access, int flags, int file, off64_t place),
     (at, size, access, flags, file, place), file >= 0 && fails_fd("mmap", file), MAP_FAILED)
