/* constants.h: numbers of the definition on which every backend must agree. For C and CUDA. */
#ifndef FKDA_CONSTANTS_H
#define FKDA_CONSTANTS_H

/* Added to the sum of squares of a row of q or k before the root (FKDA_QK_L2NORM). */
#define FKDA_NORM_EPSILON 1e-6

#endif
