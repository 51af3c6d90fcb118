/* forward.c: one prefill of 20 tokens and 2 heads, in float32, checked against the definition. */
#include <flash_kda.h>
#include <math.h>
#include <stdio.h>

enum { T = 20, H = 2, D = 64 };
static float q[T * H * D], k[T * H * D], v[T * H * D], g[T * H * D], beta[T * H];
static float out[T * H * D], wanted[T * H * D], state[H * D * D];

int main(void)
{
    for (int i = 0; i < T * H * D; i++) {
        q[i] = sinf((float)i), k[i] = cosf(0.7f * (float)i);
        v[i] = sinf(0.3f * (float)i), g[i] = -3.0f + cosf((float)i);
    }
    fkda_args args;
    fkda_args_init(&args); /* bounded gate, norms and beta's sigmoid inside */
    const int64_t rows[] = {1, T, H, D}, image[] = {1, H, D, D};
    args.scale = 1.0 / sqrt(D);
    args.q = fkda_tensor_contiguous(q, FKDA_F32, 4, rows);
    args.k = fkda_tensor_contiguous(k, FKDA_F32, 4, rows);
    args.v = fkda_tensor_contiguous(v, FKDA_F32, 4, rows);
    args.g = fkda_tensor_contiguous(g, FKDA_F32, 4, rows);
    args.beta = fkda_tensor_contiguous(beta, FKDA_F32, 3, rows);
    args.out = fkda_tensor_contiguous(out, FKDA_F32, 4, rows);
    args.final_state = fkda_tensor_contiguous(state, FKDA_F32, 4, image);
    fkda_report report;
    args.report = &report;
    char reason[FKDA_REASON_BYTES];
    fkda_status status = fkda_forward(&args, reason, sizeof reason);
    args.out.data = wanted, args.report = NULL;
    status = status == FKDA_OK ? fkda_reference(&args, reason, sizeof reason) : status;
    if (status != FKDA_OK)
        return fprintf(stderr, "%s: %s\n", fkda_status_name(status), reason), 1;
    double square = 0;
    for (int i = 0; i < T * H * D; i++)
        square += pow((double)out[i] - (double)wanted[i], 2) / (T * H * D);
    printf("%s, %d tokens, RMS error %.1e\n", report.kernel, (int)report.num_tokens, sqrt(square));
    return square < 1e-12 ? 0 : 1;
}
