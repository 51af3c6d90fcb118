/* safetensors_write.c: the writer. A temporary file beside the target, reserved at full size,
 * mapped, filled by the caller, synced and renamed: others see the old file or the whole new one.
 */
#include "safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "reason.h"

#define ALIGNMENT      64 /* of the first tensor in the file */
#define MAX_ATTEMPTS   100
#define POPULATE_BYTES ((size_t)1 << 30)

/* Bytes of each tensor, and of all. False: more than a file can hold. */
static bool set_sizes(struct safetensors_tensor *tensors, size_t num_tensors, size_t *total)
{
    *total = 0;
    for (size_t i = 0; i < num_tensors; i++) {
        size_t bytes = tensors[i].dtype->bytes;
        for (int d = 0; d < tensors[i].ndim; d++) {
            if (tensors[i].shape[d] < 0 ||
                __builtin_mul_overflow(bytes, (size_t)tensors[i].shape[d], &bytes))
                return false;
        }
        tensors[i].bytes = bytes;
        if (__builtin_add_overflow(*total, bytes, total) || *total > INT64_MAX / 2)
            return false;
    }
    return true;
}

static cJSON *tensor_json(const struct safetensors_tensor *tensor, size_t begin)
{
    cJSON *json = cJSON_CreateObject(), *list;
    cJSON_AddStringToObject(json, "dtype", tensor->dtype->name);
    list = cJSON_AddArrayToObject(json, "shape");
    for (int d = 0; d < tensor->ndim; d++)
        cJSON_AddItemToArray(list, cJSON_CreateNumber((double)tensor->shape[d]));
    list = cJSON_AddArrayToObject(json, "data_offsets");
    cJSON_AddItemToArray(list, cJSON_CreateNumber((double)begin));
    cJSON_AddItemToArray(list, cJSON_CreateNumber((double)(begin + tensor->bytes)));
    return json;
}

/* The header's text, NULL without memory (cJSON's calls pass a NULL on). */
static char *make_header(const struct safetensors_tensor *tensors, size_t num_tensors,
                         const struct safetensors_pair *metadata, size_t num_metadata)
{
    cJSON *root = cJSON_CreateObject();
    bool complete = root != NULL;
    if (num_metadata) {
        cJSON *pairs = cJSON_AddObjectToObject(root, "__metadata__");
        for (size_t i = 0; i < num_metadata; i++)
            complete &= cJSON_AddStringToObject(pairs, metadata[i].key, metadata[i].value) != NULL;
    }
    size_t begin = 0;
    for (size_t i = 0; i < num_tensors; i++) {
        cJSON *json = tensor_json(&tensors[i], begin);
        const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(json, "data_offsets");
        const cJSON *shape = cJSON_GetObjectItemCaseSensitive(json, "shape");
        complete &=
            cJSON_GetArraySize(offsets) == 2 && cJSON_GetArraySize(shape) == tensors[i].ndim;
        if (!cJSON_AddItemToObject(root, tensors[i].name, json)) {
            cJSON_Delete(json);
            complete = false;
        }
        begin += tensors[i].bytes;
    }
    char *text = complete ? cJSON_PrintUnformatted(root) : NULL;
    cJSON_Delete(root);
    return text;
}

/* Opens the target's folder and keeps its name; a symbolic link leads to the file it names. */
static enum fkda_file_status find_target(const char *path, struct safetensors_writer *writer,
                                         struct reason reason)
{
    struct stat info;
    char *folder = realpath(path, NULL); /* NULL: no such file yet */
    if (folder && stat(folder, &info) == 0 && !S_ISREG(info.st_mode)) {
        free(folder);
        return fail(reason, FKDA_FILE_ERROR_SYSTEM, "not a regular file");
    }
    folder = folder ? folder : strdup(path);
    const char *slash = folder ? strrchr(folder, '/') : NULL;
    writer->name = folder ? strdup(slash ? slash + 1 : folder) : NULL;
    if (!writer->name) {
        free(folder);
        return fail(reason, FKDA_FILE_ERROR_MEMORY, "no memory for its name");
    }
    enum fkda_file_status status = FKDA_FILE_OK;
    folder[slash ? slash + 1 - folder : 0] = '\0';
    writer->folder = open(*folder ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!*writer->name)
        status = fail(reason, FKDA_FILE_ERROR_SYSTEM, "not a file name");
    else if (writer->folder < 0)
        status =
            fail(reason, FKDA_FILE_ERROR_SYSTEM, "cannot open its folder: %s", strerror(errno));
    free(folder);
    return status;
}

/* Creates ".flashkda-PID-i" for the first i that is free. */
static enum fkda_file_status open_temporary(struct safetensors_writer *writer, struct reason reason)
{
    for (int i = 0; i < MAX_ATTEMPTS && writer->file < 0; i++) {
        snprintf(writer->temporary, sizeof writer->temporary, ".flashkda-%ld-%d", (long)getpid(),
                 i);
        writer->file =
            openat(writer->folder, writer->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (writer->file < 0 && errno != EEXIST)
            break;
    }
    if (writer->file >= 0)
        return FKDA_FILE_OK;
    writer->temporary[0] = '\0';
    return fail(reason, FKDA_FILE_ERROR_SYSTEM, "cannot create a file in its folder: %s",
                strerror(errno));
}

/* Reserves the disk space, maps it and writes the header. */
static enum fkda_file_status fill_temporary(struct safetensors_writer *writer, const char *header,
                                            size_t header_bytes, struct reason reason)
{
    int error = posix_fallocate(writer->file, 0, (off_t)writer->size);
    if (error)
        return fail(reason, FKDA_FILE_ERROR_SYSTEM, "cannot reserve %zu bytes: %s", writer->size,
                    strerror(error));
    /* Pages of a usual output are made now, so that they do not cost the caller's computation. */
    int flags = MAP_SHARED | (writer->size <= POPULATE_BYTES ? MAP_POPULATE : 0);
    void *mapping = mmap(NULL, writer->size, PROT_READ | PROT_WRITE, flags, writer->file, 0);
    if (mapping == MAP_FAILED)
        return fail(reason, FKDA_FILE_ERROR_SYSTEM, "cannot map %zu bytes: %s", writer->size,
                    strerror(errno));
    writer->mapping = mapping;
    size_t length = strlen(header);
    for (int i = 0; i < 8; i++)
        writer->mapping[i] = (unsigned char)(header_bytes >> 8 * i);
    memset(writer->mapping + 8, ' ', header_bytes);
    memcpy(writer->mapping + 8, header, length);
    return FKDA_FILE_OK;
}

enum fkda_file_status
fkda_create_safetensors(const char *path, struct safetensors_tensor *tensors, size_t num_tensors,
                        const struct safetensors_pair *metadata, size_t num_metadata,
                        struct safetensors_writer *writer, char *reason_text, size_t reason_bytes)
{
    struct reason reason = {reason_text, reason_bytes};
    *writer = (struct safetensors_writer){.file = -1, .folder = -1};
    size_t data_bytes;
    if (!set_sizes(tensors, num_tensors, &data_bytes))
        return fail(reason, FKDA_FILE_ERROR_SYSTEM, "its tensors are too large for a file");
    char *header = make_header(tensors, num_tensors, metadata, num_metadata);
    if (!header)
        return fail(reason, FKDA_FILE_ERROR_MEMORY, "no memory for its header");
    size_t header_bytes = (strlen(header) + 8 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT - 8;
    writer->size = 8 + header_bytes + data_bytes;

    enum fkda_file_status status = find_target(path, writer, reason);
    if (!status)
        status = open_temporary(writer, reason);
    if (!status)
        status = fill_temporary(writer, header, header_bytes, reason);
    cJSON_free(header);
    if (status) {
        fkda_discard_safetensors(writer);
        return status;
    }
    unsigned char *data = writer->mapping + 8 + header_bytes;
    for (size_t i = 0; i < num_tensors; i++) {
        tensors[i].data = data;
        data += tensors[i].bytes;
    }
    return FKDA_FILE_OK;
}

enum fkda_file_status fkda_commit_safetensors(struct safetensors_writer *writer, char *reason_text,
                                              size_t reason_bytes)
{
    struct reason reason = {reason_text, reason_bytes};
    enum fkda_file_status status = FKDA_FILE_OK;
    if (msync(writer->mapping, writer->size, MS_SYNC) != 0 || fsync(writer->file) != 0)
        status = fail(reason, FKDA_FILE_ERROR_SYSTEM, "cannot write it: %s", strerror(errno));
    else if (renameat(writer->folder, writer->temporary, writer->folder, writer->name) != 0)
        status = fail(reason, FKDA_FILE_ERROR_SYSTEM, "cannot rename the finished file: %s",
                      strerror(errno));
    if (!status) {
        writer->temporary[0] = '\0';
        /* The new name survives a power cut only once the folder is synced; some file systems do
         * not offer that, and the content is safe either way. */
        (void)fsync(writer->folder);
    }
    fkda_discard_safetensors(writer);
    return status;
}

void fkda_discard_safetensors(struct safetensors_writer *writer)
{
    if (writer->mapping)
        munmap(writer->mapping, writer->size);
    if (writer->temporary[0])
        unlinkat(writer->folder, writer->temporary, 0);
    if (writer->name && writer->file >= 0)
        close(writer->file);
    if (writer->name && writer->folder >= 0)
        close(writer->folder);
    free(writer->name);
    *writer = (struct safetensors_writer){.file = -1, .folder = -1};
}
