/* flash_kda.h: Kimi Delta Attention (KDA) for C programs.
 *
 * What it computes. Per sequence and value head, a state S [V, K] walks over the tokens:
 *
 *     q^ = q / sqrt(sum q^2 + 1e-6)       k^ likewise                   (FKDA_QK_L2NORM)
 *     g  = lower_bound * sigmoid(exp(A_log) * (g_raw + dt_bias))        (FKDA_GATE_BOUNDED)
 *        = -exp(A_log) * softplus(g_raw + dt_bias)                      (FKDA_GATE_SOFTPLUS)
 *        = g_raw                                                        (FKDA_GATE_ACTIVATED)
 *     b  = sigmoid(beta)                                                (FKDA_BETA_SIGMOID)
 *     b  = 2 b                                                          (FKDA_ALLOW_NEG_EIGVAL)
 *     S <- S diag(exp g);   u = b (v - S k^);   S <- S + u k^T;   out = scale * S q^
 *
 * (Kimi Linear, arXiv:2510.26692; the delta rule in chunks: arXiv:2406.06484, arXiv:2412.06464.)
 * While g <= 0 and 0 <= b |k|^2 <= 2 no step makes what is in S larger; FKDA_QK_L2NORM and
 * FKDA_BETA_SIGMOID keep to the latter, doubled or not. A beta that comes activated is taken as it
 * is: above 2 (above 1 where it is doubled), or with longer keys, the state may grow without bound,
 * and the results are what the arithmetic gives, infinities and NaN included; in fkda_forward on
 * CUDA, whose products are of fp16, sooner than in fp32.
 *
 * How to call it. Fill one fkda_args with fkda_args_init and fkda_tensor_contiguous, then call
 * fkda_forward (prefill), fkda_decode (a few tokens per sequence, state updated in place) or
 * fkda_reference (the same in float64: the definition). Every buffer belongs to the caller. A call
 * either returns FKDA_OK, or returns an error, writes the reason (argument, value seen, value
 * wanted) and leaves every output untouched. Nothing prints, exits or aborts; but GCC's OpenMP
 * runtime ends the process where the system refuses it a thread (num_threads 1 asks for none).
 *
 * On CUDA (fkda_forward and fkda_decode): K 128, in fkda_forward q, k, v, out bfloat16, every
 * pointer of the descriptor in the memory of device_index. Work is queued on the stream: no
 * synchronisation, no allocation, fit for capture in a graph. Nobody reads cu_seqlens,
 * state_indices, num_accepted_tokens and checkpoint_* before the kernels do: what the CPU would
 * refuse in them gives wrong numbers there, but no access outside the tensors; an index below 0 or
 * past the pool, or a number of accepted tokens that has no column, is padding, and a checkpoint
 * that is no multiple of 16, out of order or past the end of its sequence is not written. Without
 * FKDA_QK_L2NORM fkda_forward wants q and k normalised before the call: decayed rows are held in
 * fp16 (2^-14 to 65504). Nothing looks at their lengths to choose kernels, and those for sm90 have
 * less room for keys longer than 1 than those for sm80: they hold v - S k in fp16 before b makes it
 * small (while b |k|^2 <= 2 it fits up to |k| = 22, without FKDA_BETA_SIGMOID or with a doubled b
 * up to 360), and take products of such keys from bf16 factors, sm80 from tf32. fkda_decode
 * computes in fp32 and needs no workspace.
 * Which kernels take a call of fkda_forward depends on the device, the shapes and the alignment:
 * fkda_report names them. FLASH_KDA_CUDA_PATH = auto, sm80 (any call) or sm90 (one that they cannot
 * take is FKDA_ERROR_UNSUPPORTED) chooses; sm90-forward is sm90 without cutting sequences into
 * segments or sharing them out to pairs of multiprocessors, which is slower for few heads but gives
 * them the bits of many. Different kernels give different last bits, and a call for sm90 may be cut
 * at multiples of 128 tokens, not of FKDA_CHUNK_TOKENS.
 *
 * Threads. The library keeps no state between calls besides what it learned of the processor; any
 * number of threads may call it at once on different outputs.
 *
 * Letters, everywhere in this project:
 *     B batch   T tokens   H query/key heads   HV value heads (a multiple of H)
 *     K key channels   V value channels   C chunk tokens (16)   N sequences
 */
#ifndef FLASH_KDA_H
#define FLASH_KDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(FKDA_SHARED) && defined(_WIN32)
#define FKDA_API __declspec(dllimport)
#elif defined(__GNUC__)
#define FKDA_API __attribute__((visibility("default")))
#else
#define FKDA_API
#endif

#define FKDA_VERSION_MAJOR  0
#define FKDA_VERSION_MINOR  1
#define FKDA_VERSION_PATCH  0
#define FKDA_VERSION_STRING "0.1.0"

/* Layout of struct fkda_args; fkda_args_init writes it, every call checks it. */
#define FKDA_ARGS_VERSION 1u

#define FKDA_MAX_NDIM     5
#define FKDA_CHUNK_TOKENS 16  /* a call may be cut at multiples of this without changing a bit */
#define FKDA_REASON_BYTES 256 /* a reason buffer of this size is never cut short */

/* ---- Status ---------------------------------------------------------------------------------- */

typedef enum fkda_status {
    FKDA_OK = 0,
    FKDA_ERROR_INVALID_ARGUMENT = 1, /* a value, shape, stride, dtype or pointer is wrong */
    FKDA_ERROR_UNSUPPORTED = 2,      /* meaningful, but not on this device, build or version */
    FKDA_ERROR_WORKSPACE = 3,        /* workspace given, but smaller than asked for */
    FKDA_ERROR_OUT_OF_MEMORY = 4,    /* the library needed memory and got none */
    FKDA_ERROR_DEVICE = 5,           /* the device or its driver refused */
    FKDA_ERROR_INTERNAL = 6          /* a bug of this library */
} fkda_status;

/* "FKDA_OK", "FKDA_ERROR_INVALID_ARGUMENT", ...; never NULL. */
FKDA_API const char *fkda_status_name(fkda_status status);

/* FKDA_VERSION_STRING of the library that is loaded (the macro is that of the header). */
FKDA_API const char *fkda_version(void);

/* ---- Tensors --------------------------------------------------------------------------------- */

typedef enum fkda_dtype {
    FKDA_DTYPE_INVALID = 0,
    FKDA_BF16 = 1,
    FKDA_F32 = 2,
    FKDA_F64 = 3, /* fkda_reference only: out and states */
    FKDA_I32 = 4,
    FKDA_I64 = 5,
    FKDA_F16 = 6 /* known by name so that an error can say so; accepted nowhere */
} fkda_dtype;

FKDA_API const char *fkda_dtype_name(fkda_dtype dtype); /* "bfloat16", "float32", ... */
FKDA_API size_t fkda_dtype_bytes(fkda_dtype dtype);     /* 0 for an invalid one */

/* A view of the caller's memory. data == NULL with ndim == 0 means "absent". An empty tensor (some
 * shape 0) may have data == NULL. Strides count elements, not bytes. */
typedef struct fkda_tensor {
    void *data;
    int32_t dtype; /* enum fkda_dtype */
    int32_t ndim;  /* 0: absent */
    int64_t shape[FKDA_MAX_NDIM];
    int64_t stride[FKDA_MAX_NDIM];
} fkda_tensor;

/* A row-major tensor of ndim dimensions. Never fails: what is wrong with it the call will say. */
FKDA_API fkda_tensor fkda_tensor_contiguous(void *data, fkda_dtype dtype, int ndim,
                                            const int64_t *shape);

/* ---- Arguments ------------------------------------------------------------------------------- */

typedef enum fkda_gate {
    FKDA_GATE_BOUNDED = 0,  /* needs lower_bound in [-5, 0]; 0 means no decay */
    FKDA_GATE_SOFTPLUS = 1, /* unbounded below */
    FKDA_GATE_ACTIVATED = 2 /* g is a natural-log decay already; A_log and dt_bias must be absent */
} fkda_gate;

enum {
    FKDA_QK_L2NORM = 1u << 0,       /* normalise q and k along K; in fp32, norms up to 1e18 */
    FKDA_BETA_SIGMOID = 1u << 1,    /* beta holds logits */
    FKDA_ALLOW_NEG_EIGVAL = 1u << 2 /* b is doubled */
};
#define FKDA_FLAGS_DEFAULT (FKDA_QK_L2NORM | FKDA_BETA_SIGMOID)

typedef enum fkda_device { FKDA_CPU = 0, FKDA_CUDA = 1 } fkda_device;

/* CPU kernels, slowest first. AUTO takes FLASH_KDA_CPU_ISA, else the fastest usable one. */
typedef enum fkda_isa {
    FKDA_ISA_AUTO = 0,
    FKDA_ISA_PORTABLE = 1,
    FKDA_ISA_AVX2 = 2,        /* AVX2 + FMA */
    FKDA_ISA_AVX512 = 3,      /* AVX-512 F, BW, DQ, VL */
    FKDA_ISA_AVX512_BF16 = 4, /* the same, and vdpbf16ps for FKDA_PRECISION_BF16 */
    FKDA_ISA_AMX_BF16 = 5,    /* the same, and tile products for FKDA_PRECISION_BF16 */
    FKDA_ISA_COUNT = 6
} fkda_isa;

FKDA_API const char *fkda_isa_name(fkda_isa isa); /* "auto", "portable", "avx2", "avx512", ... */

/* Arithmetic of CPU prefill. DEFAULT takes FLASH_KDA_PRECISION, else fp32. bf16 products need
 * AVX512_BF16 or AMX_BF16; asking for them elsewhere is FKDA_ERROR_UNSUPPORTED. The state is
 * carried in fp32 either way, and decode is fp32 whatever this says. */
typedef enum fkda_precision {
    FKDA_PRECISION_DEFAULT = 0,
    FKDA_PRECISION_FP32 = 1,
    FKDA_PRECISION_BF16 = 2
} fkda_precision;

/* What a successful call did; filled when args.report is not NULL. After FKDA_ERROR_WORKSPACE
 * workspace_bytes says what that very call needs, and nothing else is written. */
typedef struct fkda_report {
    char kernel[64];     /* for example "cpu/avx512/prefill_fp32" */
    int32_t num_threads; /* CPU threads used */
    int32_t reserved;
    int64_t num_tokens;     /* that belong to a sequence, summed over sequences; -1 on CUDA with
                               cu_seqlens, which only the device reads */
    size_t workspace_bytes; /* used, the caller's or the library's own */
    char note[128];         /* CUDA: why no faster kernel took the call; "" where the fastest did */
} fkda_report;

/* One call. The shape and dtype stand beside each tensor; "?" means it may be absent.
 * Inputs and out: last stride 1, other strides free and >= 0 (views of a fused projection are fine;
 * outputs must not overlap themselves, each other, an input or the workspace; an extent of bytes is
 * what counts). States: each [V, K] image contiguous. A_log: any stride >= 0; index tensors: >= 1.
 * The stride of a dimension of size 0 or 1 is never looked at.
 * Input floats are bfloat16 or float32, each tensor by itself. */
typedef struct fkda_args {
    uint32_t version; /* FKDA_ARGS_VERSION */
    uint32_t flags;   /* FKDA_QK_L2NORM | ... */
    int32_t gate;     /* enum fkda_gate */
    int32_t device;   /* enum fkda_device: where every tensor lives */
    double scale;     /* of the output; usually 1 / sqrt(K); finite and not 0 */
    double lower_bound;

    fkda_tensor q, k;    /* [B, T, H, K] */
    fkda_tensor v;       /* [B, T, HV, V] */
    fkda_tensor g;       /* [B, T, HV, K] */
    fkda_tensor beta;    /* [B, T, HV] */
    fkda_tensor A_log;   /* ? [HV] float32; absent: factor 1 */
    fkda_tensor dt_bias; /* ? [HV, K] or [HV * K] float32; absent: 0 */

    /* ? [N + 1] int32 or int64, B == 1, 0 = cu[0] <= ... <= cu[N] <= T. Rows past cu[N] stay
     * untouched. Absent: N = B sequences of T tokens. */
    fkda_tensor cu_seqlens;

    fkda_tensor out; /* [B, T, HV, V] bfloat16 or float32, written */

    /* ? [N, HV, V, K] bfloat16 or float32; absent: 0. final_state is written, and may be the very
     * same view as initial_state. With state_indices both are pools [S, HV, V, K].
     * fkda_decode: initial_state is absent, final_state is read and updated in place. */
    fkda_tensor initial_state, final_state;

    /* ? [N] int32 or int64: the pool slot of each sequence; -1 is padding: nothing read, no state
     * or checkpoint written, its output rows zero. Slots that are written must differ from one
     * another. fkda_decode also takes [N, T] with num_accepted_tokens. */
    fkda_tensor state_indices;

    /* ? fkda_decode only, [N] int32 or int64: the state is read from slot [n, accepted - 1], and
     * the state after token t is written to slot [n, t] (-1: not kept). A row that reads -1 is
     * padding. T is at least the longest sequence. 0 accepted: only in a row of nothing but -1. */
    fkda_tensor num_accepted_tokens;

    /* ? fkda_forward only: [M, HV, V, K] bfloat16 or float32, written: the state after a prefix of
     * a sequence, the same bits as the final state of that prefix run alone. */
    fkda_tensor checkpoint_state;
    /* ? [M] int32 or int64: prefix lengths in tokens, multiples of 16 from 0 to the sequence's
     * length, strictly ascending per sequence; -1: skip. */
    fkda_tensor checkpoint_offsets;
    /* ? [N + 1] int32 or int64: checkpoints indptr[n] up to indptr[n + 1] belong to sequence n;
     * absent: M / N each. */
    fkda_tensor checkpoint_indptr;

    void *workspace; /* ? NULL: the library allocates for the time of the call. CUDA: device memory,
                        never NULL where the kernels need it; calls that follow one another on
                        a stream may share it */
    size_t workspace_bytes;
    void *stream;         /* CUDA: a cudaStream_t on which the kernels are queued, NULL: the default
                             stream; nothing waits for them */
    int32_t device_index; /* CUDA: ordinal */
    int32_t num_threads;  /* CPU, up to 1024; 0: FLASH_KDA_NUM_THREADS, else all it may use */
    int32_t isa;          /* enum fkda_isa */
    int32_t precision;    /* enum fkda_precision */
    fkda_report *report;  /* ? written on success, and see fkda_report */
} fkda_args;

/* Version, default flags, FKDA_GATE_BOUNDED with lower_bound -5, CPU, everything else absent.
 * scale is left 0, which every call refuses: the caller must set it. */
FKDA_API void fkda_args_init(fkda_args *args);

/* ---- Calls ----------------------------------------------------------------------------------- */

/* reason may be NULL; otherwise it receives a zero-terminated text of at most reason_bytes. */

/* Prefill: all tokens of every sequence. Writes out and, where given, final_state and
 * checkpoint_state (also for empty sequences: final = initial, or 0). */
FKDA_API fkda_status fkda_forward(const fkda_args *args, char *reason, size_t reason_bytes);

/* T in 1..16 tokens per sequence; q [N, T, H, K], or [1, total, H, K] with cu_seqlens. */
FKDA_API fkda_status fkda_decode(const fkda_args *args, char *reason, size_t reason_bytes);

/* The definition: fkda_forward token by token in float64, single-threaded, CPU tensors; out and
 * states may also be float64. Meant for tests: slow and obviously right. */
FKDA_API fkda_status fkda_reference(const fkda_args *args, char *reason, size_t reason_bytes);

/* Bytes of workspace that fkda_forward wants for these shapes (data pointers are not looked at).
 * A larger, unaligned or dirty workspace is fine. It depends on the number of threads, so both
 * calls must see the same options and environment. On CUDA it is enough for any kernels. What those
 * that take a call need, often nothing, the call itself says: fkda_forward with workspace NULL
 * either runs, or fails with FKDA_ERROR_WORKSPACE and the bytes in its report. */
FKDA_API fkda_status fkda_workspace_bytes(const fkda_args *args, size_t *bytes, char *reason,
                                          size_t reason_bytes);

/* ---- Information ----------------------------------------------------------------------------- */

typedef struct fkda_info {
    char version[16];
    uint32_t isa_built;  /* bit i: kernels of enum fkda_isa i are in this library */
    uint32_t isa_usable; /* bit i: and this processor and system can run them */
    int32_t isa_chosen;  /* what AUTO means now */
    int32_t num_threads; /* what 0 means now */
    int32_t num_devices; /* CUDA devices found; 0 without a driver */
    int32_t reserved;
    char cuda_archs[128];  /* architectures built, "" for a CPU-only library */
    char cuda_status[128]; /* why num_devices is 0, else the name of device 0 */
    char cuda_path[8];   /* the fastest kernels that a call may get on device 0, FLASH_KDA_CUDA_PATH
                              obeyed: "sm80" or "sm90"; "" without a device */
    char cuda_note[128]; /* why there are no faster ones; "" where there are none */
} fkda_info;

/* Fails only on a wrong FLASH_KDA_* environment variable. */
FKDA_API fkda_status fkda_get_info(fkda_info *info, char *reason, size_t reason_bytes);

#ifdef __cplusplus
}
#endif
#endif /* FLASH_KDA_H */
