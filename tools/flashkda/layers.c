/* layers.c: from the tensors and metadata of a file to one fkda_args per layer. */
#include "layers.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reason.h"

enum { NAME_BYTES = 72, PAGE_BYTES = 4096 };

/* Where each tensor goes. The first NUM_REQUIRED make a layer complete. */
enum { NUM_REQUIRED = 5 };
static const struct {
    const char *name;
    size_t offset;
} inputs[] = {
    {"q", offsetof(fkda_args, q)},
    {"k", offsetof(fkda_args, k)},
    {"v", offsetof(fkda_args, v)},
    {"g", offsetof(fkda_args, g)},
    {"beta", offsetof(fkda_args, beta)},
    {"A_log", offsetof(fkda_args, A_log)},
    {"dt_bias", offsetof(fkda_args, dt_bias)},
    {"initial_state", offsetof(fkda_args, initial_state)},
    {"cu_seqlens", offsetof(fkda_args, cu_seqlens)},
};
enum { NUM_INPUTS = sizeof inputs / sizeof *inputs };

static fkda_tensor *input_of(fkda_args *args, size_t i)
{
    return (fkda_tensor *)((char *)args + inputs[i].offset);
}

char *fkda_join_name(const char *prefix, const char *name)
{
    size_t length = strlen(prefix);
    char *text = malloc(length + strlen(name) + 1);
    if (text) {
        memcpy(text, prefix, length);
        strcpy(text + length, name);
    }
    return text;
}

/* A boolean of the metadata, named as FLA's keyword: absent, "true" or "false". */
static int read_flag(const struct safetensors_file *file, const char *key, bool *value,
                     struct reason reason)
{
    const char *text = fkda_find_metadata(file, key);
    char shown[NAME_BYTES];
    if (!text)
        return EXIT_OK;
    *value = !strcmp(text, "true");
    if (!*value && strcmp(text, "false"))
        return fail(reason, EXIT_INPUT, "metadata %s '%s': wanted true or false", key,
                    fkda_printable_name(text, shown, sizeof shown));
    return EXIT_OK;
}

static int read_flags(const struct safetensors_file *file, fkda_args *args, struct reason reason)
{
    bool norm = true, gate = true, sigmoid = true, doubled = false;
    int code = read_flag(file, "use_qk_l2norm_in_kernel", &norm, reason);
    if (!code)
        code = read_flag(file, "use_gate_in_kernel", &gate, reason);
    if (!code)
        code = read_flag(file, "use_beta_sigmoid_in_kernel", &sigmoid, reason);
    if (!code)
        code = read_flag(file, "allow_neg_eigval", &doubled, reason);
    args->flags = (norm ? FKDA_QK_L2NORM : 0u) | (sigmoid ? FKDA_BETA_SIGMOID : 0u) |
                  (doubled ? FKDA_ALLOW_NEG_EIGVAL : 0u);
    if (!gate)
        args->gate = FKDA_GATE_ACTIVATED;
    return code;
}

/* Options beat metadata; a gate without a bound must be asked for in words. */
static int read_settings(const struct safetensors_file *file, const struct options *options,
                         fkda_args *args, struct reason reason)
{
    char shown[NAME_BYTES];
    const char *scale = fkda_find_metadata(file, "scale");
    const char *bound = fkda_find_metadata(file, "lower_bound");
    fkda_gate gate = options->gate;
    args->scale = options->scale; /* 0: 1 / sqrt(K), set when K is known */
    args->lower_bound = options->lower_bound;
    args->isa = options->isa;
    args->precision = options->precision;
    args->num_threads = options->num_threads;
    if (!options->has_scale && scale && !fkda_parse_scale(scale, &args->scale))
        return fail(reason, EXIT_INPUT, "metadata scale '%s': wanted a finite float32 other than 0",
                    fkda_printable_name(scale, shown, sizeof shown));
    if (!options->has_lower_bound && bound &&
        !fkda_parse_lower_bound(bound, &gate, &args->lower_bound))
        return fail(reason, EXIT_INPUT,
                    "metadata lower_bound '%s': wanted a number in [-5, 0], or none",
                    fkda_printable_name(bound, shown, sizeof shown));
    args->gate = gate;
    int code = read_flags(file, args, reason);
    if (!code && args->gate != FKDA_GATE_ACTIVATED && !options->has_lower_bound && !bound)
        return fail(
            reason, EXIT_INPUT,
            "no lower_bound in the metadata: give --lower-bound X, or none for the softplus "
            "gate");
    return code;
}

/* Sets every input of the layer. *missing: the first required tensor that is absent, or NULL. */
static int set_inputs(const struct safetensors_file *file, struct layer *layer,
                      const char **missing, struct reason reason)
{
    *missing = NULL;
    for (size_t i = 0; i < NUM_INPUTS; i++) {
        char *name = fkda_join_name(layer->prefix, inputs[i].name), shown[NAME_BYTES];
        if (!name)
            return fail(reason, EXIT_LIBRARY, "no memory for a name");
        const struct safetensors_tensor *tensor = fkda_find_tensor(file, name);
        free(name);
        if (!tensor && i < NUM_REQUIRED) {
            *missing = inputs[i].name;
            return EXIT_OK;
        }
        if (!tensor)
            continue;
        fkda_printable_name(tensor->name, shown, sizeof shown);
        if (tensor->ndim == 0 || tensor->ndim > FKDA_MAX_NDIM)
            return fail(reason, EXIT_INPUT, "tensor '%s': %d dimensions: wanted 1 to %d", shown,
                        tensor->ndim, FKDA_MAX_NDIM);
        if (tensor->dtype->dtype == FKDA_DTYPE_INVALID)
            return fail(reason, EXIT_INPUT, "tensor '%s': dtype %s cannot be used here", shown,
                        tensor->dtype->name);
        *input_of(&layer->args, i) =
            fkda_tensor_contiguous(tensor->data, tensor->dtype->dtype, tensor->ndim, tensor->shape);
    }
    return EXIT_OK;
}

/* cu_seqlens[N] for the token count; the library refuses what is cut to [0, max] here. */
static int64_t last_offset(const fkda_tensor *offsets, int64_t max)
{
    int64_t last = 0, n = offsets->shape[0] - 1;
    if (offsets->dtype == FKDA_I32)
        last = ((const int32_t *)offsets->data)[n];
    else if (offsets->dtype == FKDA_I64)
        last = ((const int64_t *)offsets->data)[n];
    return last < 0 ? 0 : last > max ? max : last;
}

/* Takes the letters from q and v, describes the outputs and lets the library check the shapes. */
static int set_shapes(struct layer *layer, struct reason reason)
{
    fkda_args *args = &layer->args;
    if (args->q.ndim != 4 || args->v.ndim != 4)
        return fail(reason, EXIT_INPUT,
                    "%s: %s has %d dimensions: wanted 4 [B, T, heads, channels]", layer->label,
                    args->q.ndim != 4 ? "q" : "v", args->q.ndim != 4 ? args->q.ndim : args->v.ndim);
    layer->B = args->q.shape[0];
    layer->T = args->q.shape[1];
    layer->H = args->q.shape[2];
    layer->K = args->q.shape[3];
    layer->HV = args->v.shape[2];
    layer->V = args->v.shape[3];
    layer->N = layer->B;
    if (args->cu_seqlens.ndim) {
        if (args->cu_seqlens.ndim != 1 || args->cu_seqlens.shape[0] < 1)
            return fail(reason, EXIT_INPUT, "%s: cu_seqlens: wanted shape [N + 1]", layer->label);
        layer->N = args->cu_seqlens.shape[0] - 1;
    }
    layer->num_tokens = layer->N ? layer->B * layer->T : 0;
    if (args->cu_seqlens.ndim && layer->N)
        layer->num_tokens = last_offset(&args->cu_seqlens, layer->B * layer->T);
    if (args->scale == 0)
        args->scale = 1 / sqrt((double)layer->K);
    const int64_t state[] = {layer->N, layer->HV, layer->V, layer->K};
    args->out = fkda_tensor_contiguous(NULL, FKDA_BF16, 4, args->v.shape);
    args->final_state = fkda_tensor_contiguous(NULL, FKDA_F32, 4, state);

    size_t bytes;
    char text[FKDA_REASON_BYTES];
    fkda_status status = fkda_workspace_bytes(args, &bytes, text, sizeof text);
    if (status)
        return fail(reason, status == FKDA_ERROR_INVALID_ARGUMENT ? EXIT_INPUT : EXIT_LIBRARY,
                    "%s: %s", layer->label, text);
    return EXIT_OK;
}

/* Adds the layer of a prefix (which it then owns) if it is complete. */
static int add_layer(const struct safetensors_file *file, const struct options *options,
                     const fkda_args *settings, char *prefix, struct layer_list *list,
                     struct reason reason)
{
    struct layer *layer = &list->layers[list->count];
    const char *missing;
    *layer = (struct layer){.prefix = prefix, .args = *settings};
    size_t length = strlen(prefix);
    fkda_printable_name(prefix, layer->label, sizeof layer->label);
    if (length == 0)
        strcpy(layer->label, "unnamed");
    else if (prefix[length - 1] == '.' && strlen(layer->label) == length)
        layer->label[length - 1] = '\0';
    int code = set_inputs(file, layer, &missing, reason);
    if (!code && missing) {
        if (list->num_incomplete++ == 0 || options->prefix)
            snprintf(list->incomplete, sizeof list->incomplete, "'%s' has no tensor %s",
                     layer->label, missing);
        free(prefix);
        return EXIT_OK;
    }
    list->count++;
    return code ? code : set_shapes(layer, reason);
}

/* The prefix of a tensor "PREFIX.q" or "q" (then ""); NULL: not such a name, or no memory. */
static char *prefix_of(const char *name, bool *is_layer)
{
    size_t length = strlen(name);
    *is_layer = !strcmp(name, "q") || (length > 2 && !strcmp(name + length - 2, ".q"));
    return *is_layer ? strndup(name, length - 1) : NULL;
}

static int add_named_layer(const struct safetensors_file *file, const struct options *options,
                           const fkda_args *settings, struct layer_list *list, struct reason reason)
{
    size_t length = strlen(options->prefix);
    bool dot = length > 0 && options->prefix[length - 1] != '.';
    char *prefix = fkda_join_name(options->prefix, dot ? "." : "");
    return prefix ? add_layer(file, options, settings, prefix, list, reason)
                  : fail(reason, EXIT_LIBRARY, "no memory for a name");
}

int fkda_find_layers(const struct safetensors_file *file, const struct options *options,
                     struct layer_list *list, char *reason_text, size_t reason_bytes)
{
    struct reason reason = {reason_text, reason_bytes};
    *list = (struct layer_list){.layers = calloc(file->num_tensors + 1, sizeof *list->layers)};
    if (!list->layers)
        return fail(reason, EXIT_LIBRARY, "no memory for %zu layers", file->num_tensors);
    fkda_args settings;
    fkda_args_init(&settings);
    int code = read_settings(file, options, &settings, reason);
    if (!code && options->prefix)
        code = add_named_layer(file, options, &settings, list, reason);
    for (size_t i = 0; i < file->num_tensors && !code && !options->prefix; i++) {
        bool is_layer;
        char *prefix = prefix_of(file->tensors[i].name, &is_layer);
        if (is_layer)
            code = prefix ? add_layer(file, options, &settings, prefix, list, reason)
                          : fail(reason, EXIT_LIBRARY, "no memory for a name");
    }
    if (!code && list->count == 0)
        code = fail(reason, EXIT_INPUT, "no layer: %s",
                    list->num_incomplete ? list->incomplete : "no tensor is named q or ends in .q");
    if (code)
        fkda_free_layers(list);
    return code;
}

int fkda_load_layers(const struct options *options, struct safetensors_file *file,
                     struct layer_list *list)
{
    fkda_info info;
    char reason[FKDA_FILE_REASON_BYTES];
    /* A wrong environment variable is not the file's fault. */
    if (fkda_get_info(&info, reason, sizeof reason))
        return fkda_print_error(EXIT_LIBRARY, options, "%s", reason);
    enum fkda_file_status status =
        fkda_open_safetensors(options->input, file, reason, sizeof reason);
    if (status)
        return fkda_print_error(status == FKDA_FILE_ERROR_MEMORY ? EXIT_LIBRARY : EXIT_INPUT,
                                options, "%s: %s", options->input, reason);
    int code = fkda_find_layers(file, options, list, reason, sizeof reason);
    if (code) {
        fkda_close_safetensors(file);
        return fkda_print_error(code, options, "%s: %s", options->input, reason);
    }
    if (list->num_incomplete)
        fkda_print_error(EXIT_OK, options, "%s: left out %zu incomplete layer%s: %s",
                         options->input, list->num_incomplete, list->num_incomplete == 1 ? "" : "s",
                         list->incomplete);
    return EXIT_OK;
}

void fkda_free_layers(struct layer_list *list)
{
    for (size_t i = 0; i < list->count; i++)
        free(list->layers[i].prefix);
    free(list->layers);
    list->layers = NULL;
    list->count = 0;
}

static size_t tensor_bytes(const fkda_tensor *tensor)
{
    size_t bytes = tensor->ndim ? fkda_dtype_bytes((fkda_dtype)tensor->dtype) : 0;
    for (int d = 0; d < tensor->ndim; d++)
        bytes *= (size_t)tensor->shape[d];
    return bytes;
}

void fkda_touch_layer(const struct layer *layer)
{
    fkda_args args = layer->args;
    for (size_t i = 0; i < NUM_INPUTS; i++) {
        const fkda_tensor *tensor = input_of(&args, i);
        const volatile unsigned char *data = tensor->data;
        size_t bytes = tensor_bytes(tensor);
        for (size_t at = 0; at < bytes; at += PAGE_BYTES)
            (void)data[at];
    }
}

double fkda_layer_bytes(const struct layer *layer)
{
    fkda_args args = layer->args;
    size_t bytes = tensor_bytes(&args.out) + tensor_bytes(&args.final_state);
    for (size_t i = 0; i < NUM_INPUTS; i++)
        bytes += tensor_bytes(input_of(&args, i));
    return (double)bytes;
}

double fkda_layer_flops(const struct layer *layer)
{
    return 6.0 * (double)layer->K * (double)layer->V * (double)layer->HV *
           (double)layer->num_tokens;
}

int64_t fkda_piece_tokens(const struct layer *layer)
{
    enum { HEAD_TOKENS = 1 << 17, LEAST = 512 }; /* 13 GFLOP at K = V = 128 */
    int64_t heads = layer->HV * (layer->args.cu_seqlens.ndim ? 1 : layer->B);
    int64_t tokens = heads > 0 ? HEAD_TOKENS / heads : LEAST;
    return tokens < LEAST ? LEAST : tokens / FKDA_CHUNK_TOKENS * FKDA_CHUNK_TOKENS;
}

struct cJSON *fkda_layer_json(const struct layer *layer)
{
    cJSON *json = cJSON_CreateObject();
    const fkda_args *args = &layer->args;
    cJSON_AddStringToObject(json, "prefix", layer->prefix);
    cJSON_AddNumberToObject(json, "B", (double)layer->B);
    cJSON_AddNumberToObject(json, "T", (double)layer->T);
    cJSON_AddNumberToObject(json, "H", (double)layer->H);
    cJSON_AddNumberToObject(json, "HV", (double)layer->HV);
    cJSON_AddNumberToObject(json, "K", (double)layer->K);
    cJSON_AddNumberToObject(json, "V", (double)layer->V);
    cJSON_AddNumberToObject(json, "N", (double)layer->N);
    cJSON_AddNumberToObject(json, "tokens", (double)layer->num_tokens);
    cJSON_AddNumberToObject(json, "scale", args->scale);
    if (args->gate == FKDA_GATE_BOUNDED)
        cJSON_AddNumberToObject(json, "lower_bound", args->lower_bound);
    else
        cJSON_AddNullToObject(json, "lower_bound");
    return json;
}
