/* test_safetensors.c: tools/flashkda/safetensors.c and safetensors_write.c. Every lie that a file
 * can tell has a row with the reason that the reader must give; files end at an unreadable page, so
 * that a read past the end is a crash in every build.
 */
#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "safetensors.h"

/* A file image that ends at an unreadable page. */
struct image {
    unsigned char *bytes;
    size_t size;
    void *mapping;
    size_t mapped;
};

static struct image make_image(const void *bytes, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t padded = (size + 7) / 8 * 8; /* keeps the start 8-byte aligned */
    size_t pages = padded / page + 1;
    struct image image = {.size = size, .mapped = (pages + 1) * page};
    image.mapping =
        mmap(NULL, image.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(image.mapping != MAP_FAILED);
    unsigned char *guard = (unsigned char *)image.mapping + pages * page;
    assert_int_equal(mprotect(guard, page, PROT_NONE), 0);
    image.bytes = guard - padded;
    if (size)
        memcpy(image.bytes, bytes, size);
    return image;
}

/* Length, header and `data_bytes` of data (0, 1, 2, ...). */
static struct image make_file(const char *header, size_t header_bytes, size_t data_bytes)
{
    size_t size = 8 + header_bytes + data_bytes;
    unsigned char *bytes = malloc(size);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)((uint64_t)header_bytes >> 8 * i);
    memcpy(bytes + 8, header, header_bytes);
    for (size_t i = 0; i < data_bytes; i++)
        bytes[8 + header_bytes + i] = (unsigned char)i;
    struct image image = make_image(bytes, size);
    free(bytes);
    return image;
}

static void free_image(struct image *image)
{
    munmap(image->mapping, image->mapped);
}

/* Headers are padded to a multiple of 8, as writers do; `cut` bytes of that are taken off again. */
static struct image make_padded_file(const char *header, size_t data_bytes)
{
    char padded[4096];
    size_t length = strlen(header), wanted = (length + 7) / 8 * 8;
    assert_true(wanted < sizeof padded);
    memset(padded, ' ', wanted);
    memcpy(padded, header, length);
    return make_file(padded, wanted, data_bytes);
}

static void expect_refused(struct image image, const char *wanted)
{
    struct safetensors_file file;
    char reason[FKDA_FILE_REASON_BYTES] = "";
    enum fkda_file_status status =
        fkda_parse_safetensors(image.bytes, image.size, &file, reason, sizeof reason);
    assert_string_equal(reason, wanted);
    assert_int_equal(status, FKDA_FILE_ERROR_FORMAT);
    assert_null(file.tensors);
    assert_null(file.json);
    /* A small or missing buffer for the reason is no reason to write past it. */
    char small[8] = "xxxxxxx";
    assert_int_equal(fkda_parse_safetensors(image.bytes, image.size, &file, small, 4),
                     FKDA_FILE_ERROR_FORMAT);
    assert_true(small[3] == '\0' && small[4] == 'x');
    assert_int_equal(fkda_parse_safetensors(image.bytes, image.size, &file, NULL, 0),
                     FKDA_FILE_ERROR_FORMAT);
    free_image(&image);
}

static void test_well_formed(void **state)
{
    (void)state;
    struct image image = make_padded_file(
        "{\"__metadata__\":{\"scale\":\"0.5\",\"\\u00e9\\n\":\"x\"},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[8,12]},"
        "\"a\":{\"data_offsets\":[0,8],\"shape\":[2],\"dtype\":\"F32\"},"
        "\"none\":{\"dtype\":\"F64\",\"shape\":[3,0],\"data_offsets\":[8,8]},"
        "\"\\u00e9\\\"\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[12,13]}}",
        13);
    struct safetensors_file file;
    char reason[FKDA_FILE_REASON_BYTES] = "";
    assert_int_equal(fkda_parse_safetensors(image.bytes, image.size, &file, reason, sizeof reason),
                     FKDA_FILE_OK);
    assert_int_equal(file.num_tensors, 4);
    const struct safetensors_tensor *a = fkda_find_tensor(&file, "a");
    assert_non_null(a);
    assert_int_equal(a->dtype->dtype, FKDA_F32);
    assert_int_equal(a->ndim, 1);
    assert_int_equal(a->shape[0], 2);
    assert_int_equal(a->bytes, 8);
    assert_memory_equal(a->data, ((const unsigned char[]){0, 1, 2, 3, 4, 5, 6, 7}), 8);
    const struct safetensors_tensor *b = fkda_find_tensor(&file, "b");
    assert_non_null(b);
    assert_int_equal(*(const unsigned char *)b->data, 8);
    assert_int_equal(b->shape[1], 2);
    const struct safetensors_tensor *none = fkda_find_tensor(&file, "none");
    assert_non_null(none);
    assert_int_equal(none->bytes, 0);
    const struct safetensors_tensor *scalar = fkda_find_tensor(&file, "\u00e9\"");
    assert_non_null(scalar);
    assert_int_equal(scalar->ndim, 0);
    assert_int_equal(scalar->bytes, 1);
    assert_null(fkda_find_tensor(&file, "A")); /* names are case-sensitive */
    assert_null(fkda_find_tensor(&file, "__metadata__"));
    assert_string_equal(fkda_find_metadata(&file, "scale"), "0.5");
    assert_null(fkda_find_metadata(&file, "Scale"));
    fkda_close_safetensors(&file);
    free_image(&image);
}

static void test_no_tensors(void **state)
{
    (void)state;
    struct image image = make_file("{}", 2, 0);
    struct safetensors_file file;
    assert_int_equal(fkda_parse_safetensors(image.bytes, image.size, &file, NULL, 0), FKDA_FILE_OK);
    assert_int_equal(file.num_tensors, 0);
    assert_null(fkda_find_tensor(&file, "q"));
    assert_null(fkda_find_metadata(&file, "scale"));
    fkda_close_safetensors(&file);
    free_image(&image);
}

static void test_lying_length(void **state)
{
    (void)state;
    static const struct {
        unsigned char bytes[16];
        size_t size;
        const char *reason;
    } rows[] = {
        {{0}, 0, "0 bytes are too few: the header length alone takes 8"},
        {{2, 0, 0, 0, 0, 0, 0}, 7, "7 bytes are too few: the header length alone takes 8"},
        {{0}, 8, "header length 0: wanted at least 2"},
        {{1, 0, 0, 0, 0, 0, 0, 0, '{'}, 9, "header length 1: wanted at least 2"},
        {{3, 0, 0, 0, 0, 0, 0, 0, '{', '}'},
         10,
         "header length 3 reaches past the end of the file (10 bytes)"},
        {{2}, 8, "header length 2 reaches past the end of the file (8 bytes)"},
        {{1, 0xE1, 0xF5, 5, 0, 0, 0, 0, '{'},
         16,
         "header length 100000001: wanted at most 100000000"},
        {"# A document", 12,
         "not a safetensors file: wanted the header's length in 8 bytes, then '{'"},
        {{9}, 9, "not a safetensors file: wanted the header's length in 8 bytes, then '{'"},
        {{255, 255, 255, 255, 255, 255, 255, 255, '{', '}'},
         10,
         "header length 18446744073709551615: wanted at most 100000000"},
        {{2, 0, 0, 0, 0, 0, 0, 0x80, '{', '}'},
         10,
         "header length 9223372036854775810: wanted at most 100000000"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        expect_refused(make_image(rows[i].bytes, rows[i].size), rows[i].reason);
}

static void test_lying_json(void **state)
{
    (void)state;
    static const struct {
        const char *header, *reason;
    } rows[] = {
        {"[]", "header starts with byte 0x5b: wanted '{'"},
        {" {}", "header starts with byte 0x20: wanted '{'"},
        {"\xEF\xBB\xBF{}", "header starts with byte 0xef: wanted '{'"},
        {"{\"a\"}", "header is not JSON at byte 4"},
        {"{\"a\":1", "header is not JSON at byte 5"},
        {"{}}", "header is not JSON at byte 2"},
        {"{} {}", "header goes on after its JSON at byte 3"},
        {"{}\n", "header goes on after its JSON at byte 2"},
        {"{\"a\":[[[[[]]]]]}", "header is nested deeper than 3 at byte 7"},
        {"{\"\xff\":1}", "header is not UTF-8 at byte 2"},
        {"{\"\xc0\x80\":1}", "header is not UTF-8 at byte 2"},         /* overlong */
        {"{\"\xed\xa0\x80\":1}", "header is not UTF-8 at byte 2"},     /* surrogate */
        {"{\"\xf4\x90\x80\x80\":1}", "header is not UTF-8 at byte 2"}, /* past the last */
        {"{\"\xe2\x82", "header is not UTF-8 at byte 2"},              /* cut off */
        {"{\"a\nb\":1}", "header has control byte 0x0a at byte 3"},
        {"{\x01}", "header has control byte 0x01 at byte 1"},
        {"{\"a\\u0000b\":1}", "header has a zero character at byte 3"},
        {"{\"a\\ud800\":1}", "header is not JSON at byte 3"}, /* half of a pair */
        {"{\"a\":1}", "tensor 'a': not a JSON object"},
        {"{\"a\":null}", "tensor 'a': not a JSON object"},
        {"{\"__metadata__\":[]}", "__metadata__ is not a JSON object"},
        {"{\"__metadata__\":{\"scale\":1}}", "metadata 'scale' is not a text"},
        {"{\"__metadata__\":{\"a\":\"1\",\"b\":\"2\",\"a\":\"1\"}}", "metadata 'a' occurs twice"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", "tensor '__metadata__' occurs twice"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        expect_refused(make_file(rows[i].header, strlen(rows[i].header), 0), rows[i].reason);
    expect_refused(make_file("{\"a\0\":1}", 8, 0), "header has control byte 0x00 at byte 3");
}

/* One tensor 'a' with 8 bytes of data behind the header. */
static void test_lying_tensor(void **state)
{
    (void)state;
    static const struct {
        const char *fields, *reason;
    } rows[] = {
        {"\"shape\":[2],\"data_offsets\":[0,8]", "tensor 'a': no field 'dtype'"},
        {"\"dtype\":\"F32\",\"data_offsets\":[0,8]", "tensor 'a': no field 'shape'"},
        {"\"dtype\":\"F32\",\"shape\":[2]", "tensor 'a': no field 'data_offsets'"},
        {"\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"strides\":[1]",
         "tensor 'a': field 'strides' is not of this format"},
        {"\"dtype\":\"F32\",\"shape\":[2],\"shape\":[2],\"data_offsets\":[0,8]",
         "tensor 'a': field 'shape' occurs twice"},
        {"\"dtype\":4,\"shape\":[2],\"data_offsets\":[0,8]", "tensor 'a': dtype is not a text"},
        {"\"dtype\":\"f32\",\"shape\":[2],\"data_offsets\":[0,8]",
         "tensor 'a': unknown dtype 'f32'"},
        {"\"dtype\":\"\\u001b[2J\",\"shape\":[2],\"data_offsets\":[0,8]",
         "tensor 'a': unknown dtype '?[2J'"},
        {"\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]", "tensor 'a': shape is not a list"},
        {"\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]",
         "tensor 'a': shape[0] is not a whole number from 0 to 2^53"},
        {"\"dtype\":\"F32\",\"shape\":[2,0.5],\"data_offsets\":[0,8]",
         "tensor 'a': shape[1] is not a whole number from 0 to 2^53"},
        {"\"dtype\":\"F32\",\"shape\":[1e999],\"data_offsets\":[0,8]",
         "tensor 'a': shape[0] is not a whole number from 0 to 2^53"},
        {"\"dtype\":\"F32\",\"shape\":[\"2\"],\"data_offsets\":[0,8]",
         "tensor 'a': shape[0] is not a whole number from 0 to 2^53"},
        {"\"dtype\":\"F32\",\"shape\":[9007199254740994],\"data_offsets\":[0,8]",
         "tensor 'a': shape[0] is not a whole number from 0 to 2^53"},
        {"\"dtype\":\"F32\",\"shape\":[2,1,1,1,1,1,1,1,1],\"data_offsets\":[0,8]",
         "tensor 'a': more than 8 dimensions"},
        /* 2^32 x 2^32 = 2^64, which is 0 in 64 bits; 2^62 elements fit, their bytes do not. */
        {"\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]",
         "tensor 'a': shape has too many elements"},
        {"\"dtype\":\"F32\",\"shape\":[2147483648,2147483648],\"data_offsets\":[0,0]",
         "tensor 'a': shape has too many elements"},
        /* Empty, but its strides would overflow. */
        {"\"dtype\":\"F32\",\"shape\":[0,4294967296,4294967296],\"data_offsets\":[0,0]",
         "tensor 'a': shape has too many elements"},
        {"\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":8",
         "tensor 'a': data_offsets is not a list of two whole numbers from 0 to 2^53"},
        {"\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]",
         "tensor 'a': data_offsets is not a list of two whole numbers from 0 to 2^53"},
        {"\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]",
         "tensor 'a': data_offsets is not a list of two whole numbers from 0 to 2^53"},
        {"\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]",
         "tensor 'a': data_offsets is not a list of two whole numbers from 0 to 2^53"},
        {"\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]",
         "tensor 'a': data_offsets [8, 0]: wanted begin <= end <= 8"},
        {"\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]",
         "tensor 'a': data_offsets [0, 16]: wanted begin <= end <= 8"},
        {"\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[9007199254740988,9007199254740992]",
         "tensor 'a': data_offsets [9007199254740988, 9007199254740992]: wanted begin <= end <= 8"},
        {"\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]",
         "tensor 'a': data_offsets hold 8 bytes, but dtype and shape need 12"},
        {"\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]",
         "tensor 'a': data_offsets hold 8 bytes, but dtype and shape need 4"},
        {"\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[1,7]",
         "tensor 'a': starts at byte 65 of the file, not a multiple of its element's 2 bytes"},
        {"\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[2,8]",
         "tensor 'a' starts at data byte 2: bytes before it are unused (the one before ends at 0)"},
        {"\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,6]",
         "the file holds 8 bytes of data, its tensors 6"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char header[512];
        snprintf(header, sizeof header, "{\"a\":{%s}}", rows[i].fields);
        expect_refused(make_padded_file(header, 8), rows[i].reason);
    }
}

static void test_tensors_together(void **state)
{
    (void)state;
#define TENSOR(name, begin, end) \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[" #begin "," #end "]}"
    expect_refused(make_padded_file("{" TENSOR("a", 0, 4) "," TENSOR("b", 2, 6) "}", 6),
                   "tensor 'b' starts at data byte 2: it overlaps another tensor (the one before "
                   "ends at 4)");
    expect_refused(make_padded_file("{" TENSOR("a", 0, 4) "," TENSOR("b", 0, 4) "}", 4),
                   "tensor 'b' starts at data byte 0: it overlaps another tensor (the one before "
                   "ends at 4)");
    expect_refused(make_padded_file("{" TENSOR("a", 0, 4) "," TENSOR("b", 6, 10) "}", 10),
                   "tensor 'b' starts at data byte 6: bytes before it are unused (the one before "
                   "ends at 4)");
    expect_refused(make_padded_file("{" TENSOR("a", 0, 4) "," TENSOR("a", 4, 8) "}", 8),
                   "tensor 'a' occurs twice");
    /* One name, written in two ways. */
    expect_refused(make_padded_file("{" TENSOR("a", 0, 4) "," TENSOR("\\u0061", 4, 8) "}", 8),
                   "tensor 'a' occurs twice");
    expect_refused(make_padded_file("{}", 1), "the file holds 1 bytes of data, its tensors 0");
#undef TENSOR
}

/* A header of a few megabytes must not cost gigabytes. */
static void test_many_values(void **state)
{
    (void)state;
    size_t values = FKDA_FILE_MAX_VALUES + 2, bytes = 8 + 2 * values;
    char *header = malloc(bytes);
    assert_non_null(header);
    memcpy(header, "{\"a\":[0", 7);
    for (size_t i = 7; i + 1 < bytes; i += 2)
        memcpy(header + i, ",0", 2);
    header[bytes - 1] = ' ';
    expect_refused(make_file(header, bytes, 0), "header has more than 1048576 values");
    free(header);
}

/* Every prefix of a good file is refused: no cut is read past. */
static void test_truncated(void **state)
{
    (void)state;
    struct image image =
        make_padded_file("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8);
    struct safetensors_file file;
    assert_int_equal(fkda_parse_safetensors(image.bytes, image.size, &file, NULL, 0), FKDA_FILE_OK);
    fkda_close_safetensors(&file);
    for (size_t size = 0; size < image.size; size++) {
        struct image cut = make_image(image.bytes, size);
        assert_int_equal(fkda_parse_safetensors(cut.bytes, cut.size, &file, NULL, 0),
                         FKDA_FILE_ERROR_FORMAT);
        free_image(&cut);
    }
    free_image(&image);
}

static void test_printable_names(void **state)
{
    (void)state;
    char text[12];
    assert_string_equal(fkda_printable_name("layer0", text, sizeof text), "layer0");
    assert_string_equal(fkda_printable_name("a\033[2J\n\x7f", text, sizeof text), "a?[2J??");
    assert_string_equal(fkda_printable_name("\xc2\x9b\xc3\xa9\xff", text, sizeof text),
                        "?\xc3\xa9?");
    assert_string_equal(fkda_printable_name("0123456789abcdef", text, sizeof text), "01234567...");
    /* A character of several bytes is not cut in two. */
    assert_string_equal(fkda_printable_name("1234567\xe2\x82\xac+89", text, sizeof text),
                        "1234567...");
    assert_string_equal(fkda_printable_name("abc", text, 1), "");
}

/* ---- Files ----------------------------------------------------------------------------------- */

static char folder[] = "/tmp/fkda-safetensors-XXXXXX";

static const char *in_folder(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static int count_files(void)
{
    DIR *directory = opendir(folder);
    assert_non_null(directory);
    int count = -2; /* . and .. */
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    return rmdir(folder);
}

static void test_open_refuses(void **state)
{
    (void)state;
    struct safetensors_file file;
    char reason[FKDA_FILE_REASON_BYTES];
    assert_int_equal(fkda_open_safetensors(in_folder("none"), &file, reason, sizeof reason),
                     FKDA_FILE_ERROR_SYSTEM);
    assert_string_equal(reason, "cannot open it: No such file or directory");
    assert_int_equal(fkda_open_safetensors(folder, &file, reason, sizeof reason),
                     FKDA_FILE_ERROR_SYSTEM);
    assert_string_equal(reason, "not a regular file");
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0); /* must not wait for a writer */
    assert_int_equal(fkda_open_safetensors(in_folder("pipe"), &file, reason, sizeof reason),
                     FKDA_FILE_ERROR_SYSTEM);
    assert_string_equal(reason, "not a regular file");
    unlink(in_folder("pipe"));
    FILE *empty = fopen(in_folder("empty"), "w");
    assert_non_null(empty);
    fclose(empty);
    assert_int_equal(fkda_open_safetensors(in_folder("empty"), &file, reason, sizeof reason),
                     FKDA_FILE_ERROR_FORMAT);
    assert_string_equal(reason, "the file is empty");
    unlink(in_folder("empty"));
}

/* Two tensors: fp32 [2, 3] and bf16 [1, 5]. */
static void describe(struct safetensors_tensor tensors[2])
{
    tensors[0] = (struct safetensors_tensor){
        "layer0.final_state", fkda_find_file_dtype("F32"), 2, {2, 3}, NULL, 0};
    tensors[1] = (struct safetensors_tensor){
        "layer0.\"out\"\n", fkda_find_file_dtype("BF16"), 2, {1, 5}, NULL, 0};
}

static const struct safetensors_pair metadata[] = {{"scale", "0.5"}, {"who", "caf\u00e9"}};

static void write_file(const char *path, unsigned char fill)
{
    struct safetensors_tensor tensors[2];
    struct safetensors_writer writer;
    char reason[FKDA_FILE_REASON_BYTES] = "";
    describe(tensors);
    enum fkda_file_status status =
        fkda_create_safetensors(path, tensors, 2, metadata, 2, &writer, reason, sizeof reason);
    assert_string_equal(reason, "");
    assert_int_equal(status, FKDA_FILE_OK);
    assert_int_equal(tensors[0].bytes, 24);
    assert_int_equal((uintptr_t)tensors[0].data % 64, 0);
    memset(tensors[0].data, fill, tensors[0].bytes);
    memset(tensors[1].data, fill + 1, tensors[1].bytes);
    assert_int_equal(fkda_commit_safetensors(&writer, reason, sizeof reason), FKDA_FILE_OK);
    fkda_discard_safetensors(&writer); /* harmless */
}

static void expect_file(const char *path, unsigned char fill)
{
    struct safetensors_file file;
    char reason[FKDA_FILE_REASON_BYTES] = "";
    assert_int_equal(fkda_open_safetensors(path, &file, reason, sizeof reason), FKDA_FILE_OK);
    const struct safetensors_tensor *state = fkda_find_tensor(&file, "layer0.final_state");
    const struct safetensors_tensor *out = fkda_find_tensor(&file, "layer0.\"out\"\n");
    assert_true(state && out && file.num_tensors == 2);
    assert_int_equal(state->shape[1], 3);
    assert_int_equal(((const unsigned char *)state->data)[23], fill);
    assert_int_equal(((const unsigned char *)out->data)[9], fill + 1);
    assert_string_equal(fkda_find_metadata(&file, "who"), "caf\u00e9");
    fkda_close_safetensors(&file);
}

static void test_write_and_read(void **state)
{
    (void)state;
    write_file(in_folder("out"), 7);
    expect_file(in_folder("out"), 7);
    write_file(in_folder("out"), 40); /* replaces it */
    expect_file(in_folder("out"), 40);
    assert_int_equal(count_files(), 1);
    unlink(in_folder("out"));
}

static void test_discard_leaves_nothing(void **state)
{
    (void)state;
    struct safetensors_tensor tensors[2];
    struct safetensors_writer writer;
    write_file(in_folder("out"), 7);
    describe(tensors);
    assert_int_equal(
        fkda_create_safetensors(in_folder("out"), tensors, 2, metadata, 2, &writer, NULL, 0),
        FKDA_FILE_OK);
    assert_int_equal(count_files(), 2);
    expect_file(in_folder("out"), 7); /* untouched while the new one is being made */
    fkda_discard_safetensors(&writer);
    assert_int_equal(count_files(), 1);
    expect_file(in_folder("out"), 7);
    fkda_discard_safetensors(&writer);
    struct safetensors_writer zero = {.name = NULL};
    fkda_discard_safetensors(&zero);
    unlink(in_folder("out"));
}

static void test_write_through_link(void **state)
{
    (void)state;
    write_file(in_folder("target"), 1);
    assert_int_equal(symlink("target", in_folder("link")), 0);
    write_file(in_folder("link"), 2);
    expect_file(in_folder("target"), 2);
    struct stat info;
    assert_int_equal(lstat(in_folder("link"), &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    unlink(in_folder("link"));
    unlink(in_folder("target"));
}

static void expect_unwritable(const char *path, const char *wanted)
{
    struct safetensors_tensor tensors[2];
    struct safetensors_writer writer;
    char reason[FKDA_FILE_REASON_BYTES] = "";
    describe(tensors);
    assert_int_equal(
        fkda_create_safetensors(path, tensors, 2, metadata, 2, &writer, reason, sizeof reason),
        FKDA_FILE_ERROR_SYSTEM);
    assert_string_equal(reason, wanted);
    assert_int_equal(count_files(), 0);
}

static void test_unwritable(void **state)
{
    (void)state;
    expect_unwritable(in_folder("none/out"), "cannot open its folder: No such file or directory");
    expect_unwritable(in_folder("out/"), "not a file name");
    expect_unwritable(folder, "not a regular file");
    expect_unwritable("/dev/null", "not a regular file");
    expect_unwritable("", "not a file name");
    expect_unwritable("/proc/out", "cannot create a file in its folder: No such file or directory");

    struct safetensors_tensor huge = {
        "a", fkda_find_file_dtype("F32"), 2, {INT64_C(1) << 40, INT64_C(1) << 40}, NULL, 0};
    struct safetensors_writer writer;
    char reason[FKDA_FILE_REASON_BYTES];
    assert_int_equal(fkda_create_safetensors(in_folder("out"), &huge, 1, NULL, 0, &writer, reason,
                                             sizeof reason),
                     FKDA_FILE_ERROR_SYSTEM);
    assert_string_equal(reason, "its tensors are too large for a file");

    /* A full disk, as far as a test may make one: the limit on a file's size. */
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    small.rlim_cur = 100;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    struct safetensors_tensor tensors[2];
    describe(tensors);
    enum fkda_file_status status = fkda_create_safetensors(in_folder("out"), tensors, 2, metadata,
                                                           2, &writer, reason, sizeof reason);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(status, FKDA_FILE_ERROR_SYSTEM);
    assert_non_null(strstr(reason, "cannot reserve"));
    assert_non_null(strstr(reason, strerror(EFBIG)));
    assert_int_equal(count_files(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_well_formed),        cmocka_unit_test(test_no_tensors),
        cmocka_unit_test(test_lying_length),       cmocka_unit_test(test_lying_json),
        cmocka_unit_test(test_lying_tensor),       cmocka_unit_test(test_tensors_together),
        cmocka_unit_test(test_many_values),        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_printable_names),    cmocka_unit_test(test_open_refuses),
        cmocka_unit_test(test_write_and_read),     cmocka_unit_test(test_discard_leaves_nothing),
        cmocka_unit_test(test_write_through_link), cmocka_unit_test(test_unwritable),
    };
    return cmocka_run_group_tests_name("safetensors", tests, make_folder, remove_folder);
}
