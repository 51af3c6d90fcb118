/* fuzz_validate.c: libFuzzer target of validation alone: any descriptor, no crash, no read outside
 * of an index tensor, and a refusal names an argument. Nothing behind a float tensor may be
 * touched. */
#include "recipe.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct source s = {data, size};
    struct trial t;
    struct fkda_plan plan;
    char reason[FKDA_REASON_BYTES] = "";
    fuzz_make_trial(&t, &s, false);
    fkda_status status =
        fkda_validate(&t.args, t.call, &plan, (struct fkda_reason){reason, sizeof reason});
    if (status != FKDA_OK) {
        fuzz_require_reason(reason);
    } else {
        bool unread = t.call != FKDA_CALL_WORKSPACE && plan.device == FKDA_CUDA && plan.varlen;
        fuzz_require(unread ? plan.num_tokens == -1
                            : plan.num_tokens >= 0 && plan.num_tokens <= plan.B * plan.T,
                     "a number of tokens that cannot be");
        fuzz_require(plan.H >= 1 && plan.HV == plan.H * plan.heads_per_key && plan.N >= 0 &&
                         plan.max_sequence_tokens <= plan.T,
                     "a plan that contradicts itself");
    }
    fuzz_free_trial(&t);
    return 0;
}
