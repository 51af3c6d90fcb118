/* safetensors.h: .safetensors files by memory map, for files that may lie.
 *
 *     8 bytes: header length n, little endian | n bytes: JSON | tensor data
 *
 * The JSON is one object: {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]},
 * ..., "__metadata__": {"key": "text"}}; the tensors cover the data without gap or overlap.
 *
 * The reader checks every field before it hands out a pointer: after FKDA_FILE_OK each tensor's
 * bytes lie inside the file, are as many as its shape says and are aligned to its element. One
 * thing it cannot check: a file that another process cuts short while mapped raises SIGBUS.
 *
 * The writer makes a temporary file beside the target, at its full size, and hands out pointers
 * into its mapping; fkda_commit_safetensors syncs and renames it. Until then the target stays.
 *
 * Nothing here prints or exits; the reason of an error goes to the caller's buffer. Names in a
 * reason are made harmless for a terminal.
 */
#ifndef FLASHKDA_SAFETENSORS_H
#define FLASHKDA_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "flash_kda.h"

#define FKDA_FILE_MAX_NDIM     8
#define FKDA_FILE_REASON_BYTES 512
/* Limits on the header. The first is the format's own; the second bounds the parser's memory. */
#define FKDA_FILE_MAX_HEADER_BYTES 100000000u
#define FKDA_FILE_MAX_VALUES       (1u << 20)

enum fkda_file_status {
    FKDA_FILE_OK = 0,
    FKDA_FILE_ERROR_SYSTEM = 1, /* open, map, write, rename, ... */
    FKDA_FILE_ERROR_FORMAT = 2, /* the content is wrong */
    FKDA_FILE_ERROR_MEMORY = 3
};

struct safetensors_dtype {
    const char *name; /* as in the file: "BF16" */
    size_t bytes;     /* of an element */
    fkda_dtype dtype; /* FKDA_DTYPE_INVALID: not one of the library's */
};

struct safetensors_tensor {
    const char *name;
    const struct safetensors_dtype *dtype;
    int ndim;
    int64_t shape[FKDA_FILE_MAX_NDIM];
    void *data; /* of a reader: read-only memory */
    size_t bytes;
};

struct safetensors_file {
    struct safetensors_tensor *tensors; /* sorted by name */
    size_t num_tensors;
    const unsigned char *bytes; /* the whole file */
    size_t size;
    void *mapping;      /* NULL: parsed from the caller's memory */
    struct cJSON *json; /* owns the names and the metadata */
    const struct cJSON *metadata;
};

/* NULL for a name that the format does not know (or of less than a byte an element). */
const struct safetensors_dtype *fkda_find_file_dtype(const char *name);

/* Opens and checks a file. Close it after FKDA_FILE_OK; nothing to close after an error. */
enum fkda_file_status fkda_open_safetensors(const char *path, struct safetensors_file *file,
                                            char *reason, size_t reason_bytes);

/* The same for a file that is in memory already; `bytes` must outlive `file`, 8-byte aligned. */
enum fkda_file_status fkda_parse_safetensors(const void *bytes, size_t size,
                                             struct safetensors_file *file, char *reason,
                                             size_t reason_bytes);

void fkda_close_safetensors(struct safetensors_file *file);

/* NULL where there is none. */
const struct safetensors_tensor *fkda_find_tensor(const struct safetensors_file *file,
                                                  const char *name);
const char *fkda_find_metadata(const struct safetensors_file *file, const char *key);

/* A name from a file, cut to `bytes` and without control characters, for messages. */
const char *fkda_printable_name(const char *name, char *text, size_t bytes);

/* ---- Writing --------------------------------------------------------------------------------- */

struct safetensors_pair {
    const char *key, *value;
};

struct safetensors_writer {
    char *name;         /* of the target in its folder; NULL: nothing is open */
    char temporary[48]; /* of the temporary file there; "": none */
    unsigned char *mapping;
    size_t size;
    int file, folder; /* descriptors */
};

/* Makes the temporary file for these tensors (name, dtype, ndim, shape) and sets data and bytes of
 * each: zeros, to be filled by the caller. Disk space is reserved, so a full disk shows here. */
enum fkda_file_status
fkda_create_safetensors(const char *path, struct safetensors_tensor *tensors, size_t num_tensors,
                        const struct safetensors_pair *metadata, size_t num_metadata,
                        struct safetensors_writer *writer, char *reason, size_t reason_bytes);

/* Syncs, renames to the target and closes. On an error the temporary file is gone. */
enum fkda_file_status fkda_commit_safetensors(struct safetensors_writer *writer, char *reason,
                                              size_t reason_bytes);

/* Removes the temporary file. Safe on a zeroed or committed writer. */
void fkda_discard_safetensors(struct safetensors_writer *writer);

#endif /* FLASHKDA_SAFETENSORS_H */
