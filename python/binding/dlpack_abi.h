/* dlpack_abi.h: the part of the DLPack 1.x binary interface that the binding reads.
 *
 * Declared here so that building needs no other project's headers. Layout and meaning follow the
 * DLPack specification 1.3 (https://dmlc.github.io/dlpack/latest/), whose rules for a consumer are:
 * - only a matching major version may be read; a minor version adds values, never fields;
 * - a capsule named "dltensor" holds a fkda_dl_managed, "dltensor_versioned" a
 *   fkda_dl_managed_versioned; a consumer that does not rename the capsule leaves the memory to it,
 *   so holding a reference to the capsule is holding the tensor;
 * - a tensor type may carry a table of C functions, a capsule named "dlpack_exchange_api" in the
 *   attribute __dlpack_c_exchange_api__; it lives as long as the process and is used with the GIL.
 */
#ifndef FKDA_DLPACK_ABI_H
#define FKDA_DLPACK_ABI_H

#include <stdint.h>

#define FKDA_DL_MAJOR 1u

enum fkda_dl_device_type {
    FKDA_DL_CPU = 1,
    FKDA_DL_CUDA = 2,
    FKDA_DL_CUDA_HOST = 3, /* pinned memory of the host */
    FKDA_DL_ROCM_HOST = 11,
    FKDA_DL_CUDA_MANAGED = 13
};

enum fkda_dl_code { FKDA_DL_INT = 0, FKDA_DL_UINT = 1, FKDA_DL_FLOAT = 2, FKDA_DL_BFLOAT = 4 };

#define FKDA_DL_FLAG_READ_ONLY 1u

struct fkda_dl_version {
    uint32_t major, minor;
};

struct fkda_dl_device {
    int32_t type; /* enum fkda_dl_device_type, or one that is not listed above */
    int32_t index;
};

struct fkda_dl_dtype {
    uint8_t code, bits;
    uint16_t lanes;
};

struct fkda_dl_tensor {
    void *data;
    struct fkda_dl_device device;
    int32_t ndim;
    struct fkda_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL before DLPack 1.2: row-major */
    uint64_t byte_offset;
};

struct fkda_dl_managed {
    struct fkda_dl_tensor tensor;
    void *owner;
    void (*release)(struct fkda_dl_managed *self);
};

struct fkda_dl_managed_versioned {
    struct fkda_dl_version version;
    void *owner;
    void (*release)(struct fkda_dl_managed_versioned *self);
    uint64_t flags;
    struct fkda_dl_tensor tensor;
};

struct fkda_dl_table {
    struct fkda_dl_version version;
    const struct fkda_dl_table *older; /* a table of an earlier major version, or NULL */
    int (*allocate)(struct fkda_dl_tensor *prototype, struct fkda_dl_managed_versioned **result,
                    void *context, void (*set_error)(void *context, const char *, const char *));
    int (*own)(void *object, struct fkda_dl_managed_versioned **result);
    int (*wrap)(struct fkda_dl_managed_versioned *tensor, void **object);
    int (*borrow)(void *object, struct fkda_dl_tensor *result); /* may be NULL */
    int (*current_stream)(int32_t device_type, int32_t device_index, void **stream);
};

#endif /* FKDA_DLPACK_ABI_H */
