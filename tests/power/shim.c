/* Keeps what is on the disk: preloaded into every process of a run, it copies a file when it is synced, and the names
 * in a folder when the folder is. Whatever was written since is what a power failure may take (see disk.py).
 *
 *   POWER_ROOT    the folder that is watched        POWER_SHADOW   where copies go: f-<inode>, d-<inode>
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int (*real_fsync)(int), (*real_fdatasync)(int);

/* An inode's number is used again; with the moment of its birth it is not. */
static void name_of(int folder, const char *name, int flags, char *key, mode_t *mode) {
    struct statx found;
    memset(&found, 0, sizeof found);
    statx(folder, name, flags | AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS | STATX_BTIME, &found);
    *mode = found.stx_mode;
    sprintf(key, "%llu-%lld-%u", (unsigned long long)found.stx_ino, (long long)found.stx_btime.tv_sec,
            found.stx_btime.tv_nsec);
}

static void copy(int fd, FILE *to) {
    char piece[1 << 16];
    off_t at = 0;
    ssize_t got;
    while ((got = pread(fd, piece, sizeof piece, at)) > 0) {
        fwrite(piece, 1, got, to);
        at += got;
    }
}

static void list(int fd, FILE *to) {
    int again = openat(fd, ".", O_RDONLY | O_DIRECTORY);
    DIR *folder = fdopendir(again);
    struct dirent *entry;
    char key[128];
    mode_t mode;
    while (folder && (entry = readdir(folder))) {
        name_of(fd, entry->d_name, 0, key, &mode);
        if (S_ISREG(mode)) fprintf(to, "%s %s\n", key, entry->d_name);
    }
    if (folder) closedir(folder);
}

static void note(int fd) {
    const char *root = getenv("POWER_ROOT"), *shadow = getenv("POWER_SHADOW");
    char link[64], path[PATH_MAX], key[128], draft[PATH_MAX], whole[PATH_MAX];
    static __thread unsigned count;
    mode_t mode;
    if (!root || !shadow) return;
    sprintf(link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (strncmp(path, root, strlen(root))) return;
    name_of(fd, "", AT_EMPTY_PATH, key, &mode);
    snprintf(draft, sizeof draft, "%s/draft-%d-%ld-%u", shadow, getpid(), syscall(SYS_gettid), count++);
    snprintf(whole, sizeof whole, "%s/%c-%s", shadow, S_ISDIR(mode) ? 'd' : 'f', key);
    int readable = S_ISDIR(mode) ? dup(fd) : open(path, O_RDONLY); /* it may be open for writing only */
    FILE *to = readable < 0 ? NULL : fopen(draft, "w");
    if (to) {
        if (S_ISDIR(mode)) list(readable, to); else copy(readable, to);
        fclose(to);
        rename(draft, whole);
    }
    if (readable >= 0) close(readable);
}

int fsync(int fd) {
    if (!real_fsync) real_fsync = dlsym(RTLD_NEXT, "fsync");
    int done = real_fsync(fd);
    if (!done) note(fd);
    return done;
}

int fdatasync(int fd) {
    if (!real_fdatasync) real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    int done = real_fdatasync(fd);
    if (!done) note(fd);
    return done;
}
