/* safetensors.c: the reader. Every length is checked before it is used, in the order of the file:
 * size -> header length -> header bytes (UTF-8, depth, number of values) -> JSON -> each tensor ->
 * all tensors together (unique names, no gap, no overlap).
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

/* { "name": { "shape": [ : nothing in the format lies deeper. */
#define MAX_DEPTH  3
#define MAX_EXACT  9007199254740992.0 /* 2^53: integers of a JSON number are exact up to here */
#define NAME_BYTES 72                 /* of a name in a message */

static const struct safetensors_dtype dtypes[] = {
    {"BF16", 2, FKDA_BF16},
    {"F32", 4, FKDA_F32},
    {"F64", 8, FKDA_F64},
    {"F16", 2, FKDA_F16},
    {"I32", 4, FKDA_I32},
    {"I64", 8, FKDA_I64},
    {"BOOL", 1, FKDA_DTYPE_INVALID},
    {"U8", 1, FKDA_DTYPE_INVALID},
    {"I8", 1, FKDA_DTYPE_INVALID},
    {"F8_E5M2", 1, FKDA_DTYPE_INVALID},
    {"F8_E4M3", 1, FKDA_DTYPE_INVALID},
    {"F8_E8M0", 1, FKDA_DTYPE_INVALID},
    {"I16", 2, FKDA_DTYPE_INVALID},
    {"U16", 2, FKDA_DTYPE_INVALID},
    {"U32", 4, FKDA_DTYPE_INVALID},
    {"U64", 8, FKDA_DTYPE_INVALID},
    {"C64", 8, FKDA_DTYPE_INVALID},
};

const struct safetensors_dtype *fkda_find_file_dtype(const char *name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (!strcmp(dtypes[i].name, name))
            return &dtypes[i];
    }
    return NULL;
}

/* Length of the UTF-8 sequence at p, 0 if it is not one (overlong, surrogate, cut, too large). */
static size_t utf8_length(const unsigned char *p, const unsigned char *end)
{
    if (p[0] < 0x80)
        return 1;
    size_t length = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
    if (p[0] < 0xC2 || p[0] > 0xF4 || (size_t)(end - p) < length)
        return 0;
    for (size_t i = 1; i < length; i++) {
        if ((p[i] & 0xC0) != 0x80)
            return 0;
    }
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) ||
        (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F))
        return 0;
    return length;
}

const char *fkda_printable_name(const char *name, char *text, size_t bytes)
{
    const unsigned char *p = (const unsigned char *)name, *end = p + strlen(name);
    size_t used = 0;
    while (p < end) {
        size_t length = utf8_length(p, end);
        bool control = length == 0 || *p < 0x20 || *p == 0x7F || (*p == 0xC2 && p[1] < 0xA0);
        size_t wanted = control ? 1 : length;
        if (used + wanted + 4 > bytes) { /* room for "..." and the end */
            if (used + 4 <= bytes) {
                memcpy(text + used, "...", 3);
                used += 3;
            }
            break;
        }
        if (control)
            text[used] = '?';
        else
            memcpy(text + used, p, length);
        used += wanted;
        p += length ? length : 1;
    }
    if (bytes)
        text[used] = '\0';
    return text;
}

/* What cJSON does not refuse by itself: bytes that are not UTF-8, control characters, names with a
 * zero in them, nesting that the format does not have, and headers that would take gigabytes. */
static enum fkda_file_status scan_header(const unsigned char *text, size_t length,
                                         struct reason reason)
{
    const unsigned char *end = text + length;
    size_t depth = 0, values = 0;
    bool in_string = false;
    if (text[0] != '{')
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "header starts with byte 0x%02x: wanted '{'",
                    text[0]);
    for (const unsigned char *p = text; p < end;) {
        size_t at = (size_t)(p - text), step = utf8_length(p, end);
        if (step == 0)
            return fail(reason, FKDA_FILE_ERROR_FORMAT, "header is not UTF-8 at byte %zu", at);
        if (*p < 0x20 && (in_string || !strchr("\t\n\r", *p) || *p == 0))
            return fail(reason, FKDA_FILE_ERROR_FORMAT,
                        "header has control byte 0x%02x at byte %zu", *p, at);
        if (in_string && *p == '\\') {
            if (end - p >= 6 && !memcmp(p, "\\u0000", 6))
                return fail(reason, FKDA_FILE_ERROR_FORMAT,
                            "header has a zero character at byte %zu", at);
            /* The next byte cannot end the string; cJSON checks what it is. */
            step = p + 1 < end && p[1] >= 0x20 && p[1] < 0x80 ? 2 : 1;
        } else if (*p == '"') {
            in_string = !in_string;
        } else if (!in_string && (*p == '{' || *p == '[')) {
            if (++depth > MAX_DEPTH)
                return fail(reason, FKDA_FILE_ERROR_FORMAT,
                            "header is nested deeper than %d at byte %zu", MAX_DEPTH, at);
        } else if (!in_string && (*p == '}' || *p == ']')) {
            if (depth-- == 0)
                return fail(reason, FKDA_FILE_ERROR_FORMAT, "header is not JSON at byte %zu", at);
        } else if (!in_string && (*p == ',' || *p == ':') && ++values > FKDA_FILE_MAX_VALUES) {
            return fail(reason, FKDA_FILE_ERROR_FORMAT, "header has more than %u values",
                        FKDA_FILE_MAX_VALUES);
        }
        p += step;
    }
    return FKDA_FILE_OK;
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp((*(const cJSON *const *)a)->string, (*(const cJSON *const *)b)->string);
}

/* A key that occurs twice means different things to different readers: refused. */
static enum fkda_file_status check_unique_keys(const cJSON *object, const char *what,
                                               struct reason reason)
{
    size_t count = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, object) count++;
    if (count < 2)
        return FKDA_FILE_OK;
    const cJSON **items = malloc(count * sizeof *items);
    if (!items)
        return fail(reason, FKDA_FILE_ERROR_MEMORY, "no memory for %zu names", count);
    count = 0;
    cJSON_ArrayForEach(item, object) items[count++] = item;
    qsort(items, count, sizeof *items, compare_keys);
    enum fkda_file_status status = FKDA_FILE_OK;
    for (size_t i = 1; i < count && !status; i++) {
        char name[NAME_BYTES];
        if (!strcmp(items[i - 1]->string, items[i]->string))
            status = fail(reason, FKDA_FILE_ERROR_FORMAT, "%s '%s' occurs twice", what,
                          fkda_printable_name(items[i]->string, name, sizeof name));
    }
    free(items);
    return status;
}

/* A JSON number that is a whole number in [0, 2^53]. */
static bool read_count(const cJSON *item, uint64_t *value)
{
    double number = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (!(number >= 0 && number <= MAX_EXACT) || number != (double)(uint64_t)number)
        return false;
    *value = (uint64_t)number;
    return true;
}

static enum fkda_file_status read_shape(const cJSON *json, const char *name,
                                        struct safetensors_tensor *tensor, struct reason reason)
{
    if (!cJSON_IsArray(json))
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "tensor '%s': shape is not a list", name);
    size_t elements = 1, largest = 1; /* largest: extents of 0 counted as 1, for the strides */
    bool overflow = false;
    const cJSON *item;
    cJSON_ArrayForEach(item, json)
    {
        uint64_t extent;
        if (tensor->ndim == FKDA_FILE_MAX_NDIM)
            return fail(reason, FKDA_FILE_ERROR_FORMAT, "tensor '%s': more than %d dimensions",
                        name, FKDA_FILE_MAX_NDIM);
        if (!read_count(item, &extent))
            return fail(reason, FKDA_FILE_ERROR_FORMAT,
                        "tensor '%s': shape[%d] is not a whole number from 0 to 2^53", name,
                        tensor->ndim);
        tensor->shape[tensor->ndim++] = (int64_t)extent;
        elements *= (size_t)extent;
        overflow |= __builtin_mul_overflow(largest, extent ? (size_t)extent : 1, &largest);
    }
    overflow |= __builtin_mul_overflow(largest, tensor->dtype->bytes, &largest);
    tensor->bytes = elements * tensor->dtype->bytes;
    if (overflow || largest > INT64_MAX)
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "tensor '%s': shape has too many elements",
                    name);
    return FKDA_FILE_OK;
}

static enum fkda_file_status read_tensor(const cJSON *json, const unsigned char *data,
                                         size_t data_bytes, size_t data_start,
                                         struct safetensors_tensor *tensor, struct reason reason)
{
    char name[NAME_BYTES];
    fkda_printable_name(json->string, name, sizeof name);
    *tensor = (struct safetensors_tensor){.name = json->string};
    if (!cJSON_IsObject(json))
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "tensor '%s': not a JSON object", name);

    static const char *const fields[] = {"dtype", "shape", "data_offsets"};
    const cJSON *found[3] = {NULL, NULL, NULL}, *item;
    cJSON_ArrayForEach(item, json)
    {
        size_t f = 0;
        while (f < 3 && strcmp(item->string, fields[f]) != 0)
            f++;
        char field[NAME_BYTES];
        if (f == 3 || found[f])
            return fail(reason, FKDA_FILE_ERROR_FORMAT, "tensor '%s': field '%s' %s", name,
                        fkda_printable_name(item->string, field, sizeof field),
                        f == 3 ? "is not of this format" : "occurs twice");
        found[f] = item;
    }
    for (size_t f = 0; f < 3; f++) {
        if (!found[f])
            return fail(reason, FKDA_FILE_ERROR_FORMAT, "tensor '%s': no field '%s'", name,
                        fields[f]);
    }

    if (!cJSON_IsString(found[0]))
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "tensor '%s': dtype is not a text", name);
    tensor->dtype = fkda_find_file_dtype(found[0]->valuestring);
    char dtype[NAME_BYTES];
    if (!tensor->dtype)
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "tensor '%s': unknown dtype '%s'", name,
                    fkda_printable_name(found[0]->valuestring, dtype, sizeof dtype));
    enum fkda_file_status status = read_shape(found[1], name, tensor, reason);
    if (status)
        return status;

    uint64_t begin, end;
    const cJSON *offsets = found[2];
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !read_count(offsets->child, &begin) || !read_count(offsets->child->next, &end))
        return fail(reason, FKDA_FILE_ERROR_FORMAT,
                    "tensor '%s': data_offsets is not a list of two whole numbers from 0 to 2^53",
                    name);
    if (begin > end || end > data_bytes)
        return fail(reason, FKDA_FILE_ERROR_FORMAT,
                    "tensor '%s': data_offsets [%llu, %llu]: wanted begin <= end <= %zu", name,
                    (unsigned long long)begin, (unsigned long long)end, data_bytes);
    if (end - begin != tensor->bytes)
        return fail(reason, FKDA_FILE_ERROR_FORMAT,
                    "tensor '%s': data_offsets hold %llu bytes, but dtype and shape need %zu", name,
                    (unsigned long long)(end - begin), tensor->bytes);
    if ((data_start + begin) % tensor->dtype->bytes != 0)
        return fail(reason, FKDA_FILE_ERROR_FORMAT,
                    "tensor '%s': starts at byte %llu of the file, not a multiple of its element's "
                    "%zu bytes",
                    name, (unsigned long long)(data_start + begin), tensor->dtype->bytes);
    tensor->data = (void *)(uintptr_t)(data + begin); /* const for the caller: see the header */
    return FKDA_FILE_OK;
}

static int compare_data(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    if (p != q)
        return p < q ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty ones first */
}

static int compare_names(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

/* The tensors must cover the data: no byte twice, none unused. Leaves them sorted by name. */
static enum fkda_file_status check_cover(struct safetensors_file *file, const unsigned char *data,
                                         size_t data_bytes, struct reason reason)
{
    size_t covered = 0;
    if (file->num_tensors)
        qsort(file->tensors, file->num_tensors, sizeof *file->tensors, compare_data);
    for (size_t i = 0; i < file->num_tensors; i++) {
        const struct safetensors_tensor *tensor = &file->tensors[i];
        size_t begin = (size_t)((const unsigned char *)tensor->data - data);
        char name[NAME_BYTES];
        if (begin != covered)
            return fail(reason, FKDA_FILE_ERROR_FORMAT,
                        "tensor '%s' starts at data byte %zu: %s (the one before ends at %zu)",
                        fkda_printable_name(tensor->name, name, sizeof name), begin,
                        begin < covered ? "it overlaps another tensor"
                                        : "bytes before it are unused",
                        covered);
        covered = begin + tensor->bytes;
    }
    if (covered != data_bytes)
        return fail(reason, FKDA_FILE_ERROR_FORMAT,
                    "the file holds %zu bytes of data, its tensors %zu", data_bytes, covered);
    if (file->num_tensors)
        qsort(file->tensors, file->num_tensors, sizeof *file->tensors, compare_names);
    return FKDA_FILE_OK;
}

static enum fkda_file_status read_metadata(const cJSON *json, struct safetensors_file *file,
                                           struct reason reason)
{
    if (!cJSON_IsObject(json))
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "__metadata__ is not a JSON object");
    const cJSON *item;
    cJSON_ArrayForEach(item, json)
    {
        char name[NAME_BYTES];
        if (!cJSON_IsString(item))
            return fail(reason, FKDA_FILE_ERROR_FORMAT, "metadata '%s' is not a text",
                        fkda_printable_name(item->string, name, sizeof name));
    }
    file->metadata = json;
    return check_unique_keys(json, "metadata", reason);
}

/* From parsed JSON to tensors. */
static enum fkda_file_status read_header(struct safetensors_file *file, size_t header_bytes,
                                         struct reason reason)
{
    size_t data_start = 8 + header_bytes, data_bytes = file->size - data_start, count = 0;
    const unsigned char *data = file->bytes + data_start;
    if (!cJSON_IsObject(file->json))
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "header is not a JSON object");
    enum fkda_file_status status = check_unique_keys(file->json, "tensor", reason);
    if (status)
        return status;
    const cJSON *item;
    cJSON_ArrayForEach(item, file->json) count++;
    file->tensors = calloc(count + 1, sizeof *file->tensors);
    if (!file->tensors)
        return fail(reason, FKDA_FILE_ERROR_MEMORY, "no memory for %zu tensors", count);
    cJSON_ArrayForEach(item, file->json)
    {
        status = strcmp(item->string, "__metadata__") == 0
                     ? read_metadata(item, file, reason)
                     : read_tensor(item, data, data_bytes, data_start,
                                   &file->tensors[file->num_tensors++], reason);
        if (status)
            return status;
    }
    return check_cover(file, data, data_bytes, reason);
}

enum fkda_file_status fkda_parse_safetensors(const void *bytes, size_t size,
                                             struct safetensors_file *file, char *reason_text,
                                             size_t reason_bytes)
{
    struct reason reason = {reason_text, reason_bytes};
    *file = (struct safetensors_file){.bytes = bytes, .size = size};
    if (size < 8)
        return fail(reason, FKDA_FILE_ERROR_FORMAT,
                    "%zu bytes are too few: the header length alone takes 8", size);
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--)
        length = length << 8 | file->bytes[i];
    if (length > size - 8 && size > 8 && file->bytes[8] != '{') /* some other file */
        return fail(reason, FKDA_FILE_ERROR_FORMAT,
                    "not a safetensors file: wanted the header's length in 8 bytes, then '{'");
    if (length > FKDA_FILE_MAX_HEADER_BYTES)
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "header length %llu: wanted at most %u",
                    (unsigned long long)length, FKDA_FILE_MAX_HEADER_BYTES);
    if (length > size - 8)
        return fail(reason, FKDA_FILE_ERROR_FORMAT,
                    "header length %llu reaches past the end of the file (%zu bytes)",
                    (unsigned long long)length, size);
    if (length < 2)
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "header length %llu: wanted at least 2",
                    (unsigned long long)length);

    const char *text = (const char *)file->bytes + 8, *parsed = text;
    enum fkda_file_status status = scan_header(file->bytes + 8, (size_t)length, reason);
    if (status)
        return status;
    file->json = cJSON_ParseWithLengthOpts(text, (size_t)length, &parsed, 0);
    if (!file->json)
        return fail(reason, FKDA_FILE_ERROR_FORMAT, "header is not JSON at byte %td",
                    parsed - text);
    while (parsed < text + length && *parsed == ' ')
        parsed++;
    if (parsed < text + length)
        status = fail(reason, FKDA_FILE_ERROR_FORMAT, "header goes on after its JSON at byte %td",
                      parsed - text);
    if (!status)
        status = read_header(file, (size_t)length, reason);
    if (status)
        fkda_close_safetensors(file);
    return status;
}

enum fkda_file_status fkda_open_safetensors(const char *path, struct safetensors_file *file,
                                            char *reason_text, size_t reason_bytes)
{
    struct reason reason = {reason_text, reason_bytes};
    *file = (struct safetensors_file){.bytes = NULL};
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not block */
    if (descriptor < 0)
        return fail(reason, FKDA_FILE_ERROR_SYSTEM, "cannot open it: %s", strerror(errno));
    struct stat info;
    enum fkda_file_status status = FKDA_FILE_OK;
    void *mapping = MAP_FAILED;
    if (fstat(descriptor, &info) != 0)
        status = fail(reason, FKDA_FILE_ERROR_SYSTEM, "cannot examine it: %s", strerror(errno));
    else if (!S_ISREG(info.st_mode))
        status = fail(reason, FKDA_FILE_ERROR_SYSTEM, "not a regular file");
    else if (info.st_size == 0)
        status = fail(reason, FKDA_FILE_ERROR_FORMAT, "the file is empty");
    else if ((mapping = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0)) ==
             MAP_FAILED)
        status = fail(reason, FKDA_FILE_ERROR_SYSTEM, "cannot map it: %s", strerror(errno));
    close(descriptor);
    if (status)
        return status;
    status = fkda_parse_safetensors(mapping, (size_t)info.st_size, file, reason_text, reason_bytes);
    if (status)
        munmap(mapping, (size_t)info.st_size);
    else
        file->mapping = mapping;
    return status;
}

void fkda_close_safetensors(struct safetensors_file *file)
{
    cJSON_Delete(file->json);
    free(file->tensors);
    if (file->mapping)
        munmap(file->mapping, file->size);
    *file = (struct safetensors_file){.bytes = NULL};
}

const struct safetensors_tensor *fkda_find_tensor(const struct safetensors_file *file,
                                                  const char *name)
{
    struct safetensors_tensor key = {.name = name};
    return file->num_tensors ? bsearch(&key, file->tensors, file->num_tensors,
                                       sizeof *file->tensors, compare_names)
                             : NULL;
}

const char *fkda_find_metadata(const struct safetensors_file *file, const char *key)
{
    const cJSON *item =
        file->metadata ? cJSON_GetObjectItemCaseSensitive(file->metadata, key) : NULL;
    return item ? item->valuestring : NULL;
}
