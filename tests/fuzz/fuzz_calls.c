/* fuzz_calls.c: libFuzzer target of the public calls: what validation accepts must run without a
 * bad access, on tensors that end exactly where their shape and strides say. */
#include <stdlib.h>

#include "recipe.h"

#define MAX_RUN_WORK 6000 /* tokens times channels: some dozens of microseconds */

static void run(struct trial *t, struct source *s)
{
    char reason[FKDA_REASON_BYTES] = "";
    struct fkda_plan plan;
    fkda_report report;
    fkda_status status =
        fkda_validate(&t->args, t->call, &plan, (struct fkda_reason){reason, sizeof reason});
    if (status != FKDA_OK) {
        fuzz_require_reason(reason);
        return;
    }
    if (t->call != FKDA_CALL_WORKSPACE && !t->backed)
        return; /* nothing there to compute on */
    if (plan.num_tokens * plan.HV * (plan.K + plan.V) > MAX_RUN_WORK ||
        plan.N * plan.HV * plan.K * plan.V > 2 * MAX_RUN_WORK)
        return;
    size_t bytes = 0;
    void *workspace = NULL;
    t->args.report = fuzz_take(s) % 2 ? &report : NULL;
    switch (t->call) {
    case FKDA_CALL_FORWARD:
        status = fkda_workspace_bytes(&t->args, &bytes, reason, sizeof reason);
        if (status == FKDA_OK && fuzz_take(s) % 2) { /* exactly as much as asked for */
            t->args.workspace = workspace = malloc(bytes ? bytes : 1);
            t->args.workspace_bytes = bytes;
        }
        status = fkda_forward(&t->args, reason, sizeof reason);
        break;
    case FKDA_CALL_DECODE:
        status = fkda_decode(&t->args, reason, sizeof reason);
        break;
    case FKDA_CALL_REFERENCE:
        status = fkda_reference(&t->args, reason, sizeof reason);
        break;
    case FKDA_CALL_WORKSPACE:
        status = fkda_workspace_bytes(&t->args, &bytes, reason, sizeof reason);
        break;
    }
    free(workspace);
    fuzz_require(status == FKDA_OK || status == FKDA_ERROR_UNSUPPORTED, reason);
    if (status != FKDA_OK)
        fuzz_require_reason(reason);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct source s = {data, size};
    struct trial t;
    fuzz_make_trial(&t, &s, true);
    run(&t, &s);
    fuzz_free_trial(&t);
    return 0;
}
