/* transition.cuh: the order of an image of M, which the RESPONSE items of a split forward write and
 * combine reads: what a lane of combine loads at once, two rows and two columns, and the lanes of a
 * warp side by side (g = lane / 4, t = lane % 4),
 *
 *     [16 columns][step of 8 rows][g][t]{ row 2t, columns 2g, 2g + 1; row 2t + 1, the same }
 */
#ifndef FKDA_TILE_TRANSITION_CUH
#define FKDA_TILE_TRANSITION_CUH

#include "cuda/tile_image.h"

enum { TRANSITION_STEP = 16 * 8 };

/* Place of an item in the image. */
static __device__ __forceinline__ int transition_offset(int row, int column)
{
    return column / 16 * (16 * TILE_K) + row / 8 * TRANSITION_STEP + column / 2 % 8 * 16 +
           row / 2 % 4 * 4 + row % 2 * 2 + column % 2;
}

#endif
