/* kernel_sets_bf16.h: whether the sets with bf16 products can run here (detect_bf16.c). Compiled
 * without their instructions, so that it may be asked anywhere. */
#ifndef FKDA_KERNEL_SETS_BF16_H
#define FKDA_KERNEL_SETS_BF16_H

#include <stdbool.h>

bool fkda_avx512_bf16_usable(void);
bool fkda_amx_usable(void); /* asks the system for the tiles, the first time */

#endif /* FKDA_KERNEL_SETS_BF16_H */
