/* layers.h: the layers of a file, each as one fkda_args.
 *
 * A layer is a set of tensors q, k, v, g, beta, and where present A_log, dt_bias, initial_state and
 * cu_seqlens, under a common prefix: "layer0.q", or plain "q".
 */
#ifndef FLASHKDA_LAYERS_H
#define FLASHKDA_LAYERS_H

#include "program.h"
#include "safetensors.h"

struct layer {
    char *prefix;   /* "layer0." or "" */
    char label[72]; /* for people: "layer0", or "unnamed" without a prefix */
    fkda_args args; /* complete but for the data of out (bf16) and final_state (fp32) */
    int64_t B, T, H, HV, K, V, N;
    int64_t num_tokens; /* that belong to a sequence */
};

struct layer_list {
    struct layer *layers;
    size_t count;
    size_t num_incomplete; /* sets that have a q, but not all the rest */
    char incomplete[160];  /* the first of them, and what it lacks */
};

/* Opens options->input and finds its layers, or the one of options->prefix; checks their shapes.
 * Returns an exit code, after a message where it is not EXIT_OK; then there is nothing to free. */
int fkda_load_layers(const struct options *options, struct safetensors_file *file,
                     struct layer_list *list);
/* The part of it that prints nothing. */
int fkda_find_layers(const struct safetensors_file *file, const struct options *options,
                     struct layer_list *list, char *reason, size_t reason_bytes);
void fkda_free_layers(struct layer_list *list);

/* "layer0." + "q", to be freed; NULL without memory. */
char *fkda_join_name(const char *prefix, const char *name);

/* Reads a byte of every page of the layer's inputs, so that no disk access is timed. */
void fkda_touch_layer(const struct layer *layer);

/* Bytes that a call must move: inputs, outputs and states once each. */
double fkda_layer_bytes(const struct layer *layer);
/* Useful floating-point operations: S k, the update and S q for each token and value head. */
double fkda_layer_flops(const struct layer *layer);
/* Tokens of a piece that takes about 0.2 s on one core: seldom enough to cost nothing. */
int64_t fkda_piece_tokens(const struct layer *layer);
/* {"prefix": ..., "B": ..., ...}: how a layer starts in every JSON output. */
struct cJSON *fkda_layer_json(const struct layer *layer);

#endif /* FLASHKDA_LAYERS_H */
