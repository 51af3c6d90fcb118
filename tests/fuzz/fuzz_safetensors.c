/* fuzz_safetensors.c: libFuzzer target of tools/flashkda/safetensors.c. An input is a whole file.
 * Whatever the reader accepts must keep its promises: every byte of every tensor lies inside the
 * file and is readable, names are unique and found again, and the layers made of it are either
 * refused with a reason or described without touching anything outside.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"

/* Kept in a volatile, so that the reads are not removed. */
static volatile unsigned sink;

static void require(int condition)
{
    if (!condition)
        abort();
}

static void use_tensor(const struct safetensors_file *file, const struct safetensors_tensor *tensor)
{
    const unsigned char *data = tensor->data, *end = file->bytes + file->size;
    char text[24];
    require(tensor->dtype && tensor->ndim >= 0 && tensor->ndim <= FKDA_FILE_MAX_NDIM);
    require(data >= file->bytes + 8 && data <= end && tensor->bytes <= (size_t)(end - data));
    require((uintptr_t)data % tensor->dtype->bytes == 0);
    size_t bytes = tensor->dtype->bytes;
    for (int d = 0; d < tensor->ndim; d++) {
        require(tensor->shape[d] >= 0);
        bytes *= (size_t)tensor->shape[d];
    }
    require(bytes == tensor->bytes);
    for (size_t i = 0; i < tensor->bytes; i++)
        sink += data[i];
    require(fkda_find_tensor(file, tensor->name) == tensor);
    require(strlen(fkda_printable_name(tensor->name, text, sizeof text)) < sizeof text);
}

static void use_layers(const struct safetensors_file *file)
{
    struct layer_list list;
    struct options options = {.command = "fuzz"};
    char reason[FKDA_FILE_REASON_BYTES] = "";
    int code = fkda_find_layers(file, &options, &list, reason, sizeof reason);
    require(code == EXIT_OK ? list.count > 0 : reason[0] != '\0');
    if (code)
        return;
    for (size_t i = 0; i < list.count; i++)
        fkda_touch_layer(&list.layers[i]);
    fkda_free_layers(&list);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct safetensors_file file;
    char reason[FKDA_FILE_REASON_BYTES] = "";
    /* The fuzzer's buffer has no alignment to rely on; malloc's has, and ends with the file. */
    unsigned char *copy = malloc(size + !size);
    require(copy != NULL);
    if (size)
        memcpy(copy, bytes, size);
    enum fkda_file_status status = fkda_parse_safetensors(copy, size, &file, reason, sizeof reason);
    if (status) {
        require(reason[0] != '\0' && !file.tensors && !file.json);
    } else {
        for (size_t i = 0; i < file.num_tensors; i++)
            use_tensor(&file, &file.tensors[i]);
        use_layers(&file);
        fkda_close_safetensors(&file);
    }
    free(copy);
    return 0;
}
